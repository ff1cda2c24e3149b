"""The sites of :class:`SteinMoments` for a batch by closed forms, which are faster.

Many likelihoods depend on the latents z through few *predictors* P z + c per record, with P affine
in the record's row. A regression of ordered levels has one predictor and its cutpoints. If a
covariate is missing, the outcome is a mixture over its possible values. Each component has a
predictor, and the weights have a few.

The model's code is traced once, and split where it stops being affine. Then one product of the rows
with a public matrix makes the draws' predictors. All further operations are elementwise. Closed
forms and :mod:`~pyro_dp.graphs.jets` differentiate them.

A mixture needs no derivatives of a logarithm of a sum. Let f_jk be the joint log density of draw j
and component k, and W_jk its softmax over both. Louis' identity holds for both averages at once. So
the site's gradient is g = E_W[grad f], and its curvature is g g' - E_W[hess f + grad f grad f'].

If all components of a record are equal, only one is computed. If its predictors differ from those
that public rows predict, :class:`SteinMoments` computes the site.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dp.graphs.jets import ALONG, Jet, averages
from pyro_dp.infer.ep.few_predictors import ALIKE, LENGTH, MIXED, OTHER, UNSEEN
from pyro_dp.infer.ep.linear_design import Axes, rounding, where_possible
from pyro_dp.infer.ep.site_factors import LowRank
from pyro_dp.utils.linalg import spectra, times

_PASS = 2 * LENGTH  # records, with many of each kind
_NUMBERS = 2**18  # in a tensor of a mixture, which stays in the processor's cache
_ALIKE = 1e-12  # relative difference of components' predictors by rounding alone
LARGEST_REDUCTION = 0.5  # one record's effect on the cavity's variance; draws fail beyond it


class SteinSites:
    """
    :param moments: :class:`SteinMoments` with few predictors.
    :param mean: the cavity's mean, (d,).
    :param root: L, with L L' the cavity's covariance.
    :param frame: W of the frame of the release, (d, d); None: the latents' own coordinates.
    """

    size = _PASS

    def __init__(self, moments: Any, mean: Tensor, root: Tensor, frame: Tensor | None):
        self._moments, self._few = moments, moments.design
        few, count = moments.design, len(moments.design.component_columns)
        self._mean, self._root, self._frame = mean, root, frame
        self._axes = axes = Axes.of(root @ root.mT, frame)
        dim = len(mean)
        basis = mean.new_zeros(dim + 1, dim + 1)
        basis[:dim, :dim], basis[:dim, dim], basis[dim, dim] = axes.basis, mean, 1.0
        directions, coordinates = few.directions
        self._products = {
            "alike": few.coefficients.along(basis, few.columns(ALIKE)),
            "shared": few.coefficients.along(basis, few.columns(MIXED)[count:]),
            "components": coordinates.along(torch.eye(len(directions)).to(basis)),
        }
        self._directions = directions @ basis  # (r, d + 1)
        steps = torch.linalg.solve(axes.basis, root @ moments._draws.mT)  # (d, J)
        self._draws = torch.cat([steps, torch.ones_like(steps[:1])])  # (d + 1, J)
        self._probe = axes.probe
        self._tolerance = rounding(moments.dtype)
        mixed = min(LENGTH, max(64, _NUMBERS // (len(moments._draws) * max(1, count))))
        self._sizes = {ALIKE: LENGTH, MIXED: mixed, OTHER: moments.microbatch_size}

    def each(self, indices: Tensor, rows: list[Tensor]) -> Iterator[LowRank]:
        """The sites of B records in the frame's coordinates, sorted by kind.

        :param rows: rows of the records. This method only reads them.
        """
        kinds = self._few.kinds[indices]
        (unseen,) = (kinds == UNSEEN).nonzero(as_tuple=True)
        for part in unseen.split(LENGTH):  # only these: a kind must not depend on other records
            if len(part):
                kinds[part] = self.found_kinds(indices[part], [x[part] for x in rows])
        self._few.kinds[indices] = kinds
        for kind in (ALIKE, MIXED, OTHER):
            (members,) = (kinds == kind).nonzero(as_tuple=True)
            for chosen in members.split(self._sizes[kind]):
                if len(chosen):
                    part = [x[chosen] for x in rows] if len(chosen) < len(indices) else rows
                    sites, others = (partial(self.factors, each) for each in (kind, OTHER))
                    yield from where_possible(sites, others, indices[chosen], part)

    def factors(self, kind: int, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """The sites of records of this kind."""
        if kind == OTHER:
            sites = self._moments.factors(self._mean, self._root, indices, rows)
            return sites if self._frame is None else sites.whitened(self._frame)
        if kind == ALIKE or not self._few.component_columns:
            found, spread = self._products["alike"](rows), None
            predictors, along = self._drawn(found), found[..., :-1]
        else:
            predictors, along, spread = self._mixed(rows)
        joint = self._few.joint(predictors, indices, rows, kind)
        columns, own = self._few.columns(kind), self._few.component_columns
        gradient, curvature = _averages(joint, columns, own, spread)
        if along.shape[1] >= along.shape[2]:
            gradient = (gradient.unsqueeze(1) @ along).squeeze(1)
            curvature = along.mT @ curvature @ along
            along = torch.eye(along.shape[2]).to(along).expand(len(along), -1, -1)
        half = along * self._axes.variances.sqrt()
        return LowRank(along, *_site(gradient, curvature, half), turn=self._axes.turn)

    def _drawn(self, found: Tensor) -> Tensor:
        """Predictors at the draws, (R', J, B), from (B, R', d + 1)."""
        drawn = times(self._draws.mT, found.flatten(0, 1).mT).unflatten(1, found.shape[:2])
        return drawn.permute(2, 0, 1).to(self._moments.dtype)

    def _mixed(self, rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Predictors of mixtures at the draws, and a few rows that span them.

        :returns: predictors (R', J, B); spanning rows in coordinates T, (B, R, d); coefficients of
            the first n of these in each component, (n, K, B).
        """
        shared = self._products["shared"](rows)
        spread = self._products["components"](rows).permute(2, 1, 0).contiguous()
        own = times((self._directions @ self._draws).mT, spread.flatten(1))
        own = own.unflatten(1, spread.shape[1:]).permute(1, 0, 2).to(self._moments.dtype)
        predictors = torch.cat([own, self._drawn(shared)])
        # The common part of all components is one predictor. If components differ in a direction
        # only for other records, a record has exact zeros there.
        first = spread[:, :1]
        vary = ((spread - first).abs() > _ALIKE * first.abs()).flatten(1).any(dim=1)
        few = [self._directions[vary].expand(len(shared), -1, -1), shared]
        spread = spread[vary]
        if not vary.all():
            common = (first[:, 0] * ~vary[:, None]).mT @ self._directions
            few.insert(0, common.unsqueeze(1))
            spread = torch.cat([spread.new_ones(1, *spread.shape[1:]), spread])
        return predictors, torch.cat(few, dim=1)[..., :-1], spread

    def found_kinds(self, indices: Tensor, rows: list[Tensor]) -> Tensor:
        """The kinds of at most ``LENGTH`` records, (B,)."""

        def others(indices: Tensor, rows: list[Tensor]) -> Tensor:
            return torch.full_like(indices, OTHER, dtype=torch.uint8)

        return torch.cat(list(where_possible(self._kinds, others, indices, rows)))

    def _kinds(self, indices: Tensor, rows: list[Tensor]) -> Tensor:
        own, shared = self._products["components"](rows), self._products["shared"](rows)
        found = torch.cat([own @ self._directions, shared], dim=1)
        along, here = found[..., :-1], found[..., -1]
        there = here + along @ self._probe
        size = here.abs() + there.abs() + along.norm(dim=2)
        same = (own - own[:, :1]).abs() <= _ALIKE * own[:, :1].abs()
        straight, alike = torch.ones_like(indices, dtype=torch.bool), same.flatten(1).all(dim=1)
        elsewhere = self._mean + self._axes.basis @ self._probe
        for predictors, z in ((here, self._mean), (there, elsewhere)):
            expected = self._few.at(z, indices, rows)[:, self._few.columns(MIXED)]
            close = (predictors - expected).abs() <= self._tolerance * size
            regular, equal = self._few.components(predictors.mT, indices, rows)
            straight, alike = straight & close.all(dim=1) & regular, alike & equal
        kinds = torch.where(alike, ALIKE, MIXED) if self._few.component_columns else MIXED
        return torch.where(straight, kinds, OTHER).to(torch.uint8)


def _averages(
    joint: Jet, columns: Sequence[int], own: Sequence[int], spread: Tensor | None
) -> tuple[Tensor, Tensor]:
    """g and B in R predictors, (B, R) and (B, R, R), in float64.

    :param joint: log densities of components, draws and records, (K, J, B).
    :param columns: directions of the predictors, those of components first.
    :param spread: the coefficients of :meth:`SteinSites._mixed`; None: at most one component has a
        predictor.
    """
    value = joint.value
    weights = value.flatten(0, 1).softmax(dim=0).unflatten(0, value.shape[:2])
    shared = [i for i in columns if i not in own]
    number = int(len(shared) < len(columns)) if spread is None else len(spread)
    places = {i: number + p for p, i in enumerate(shared)}
    gradient = weights.new_zeros(number + len(shared), value.shape[2], dtype=torch.float64)
    moments = gradient.new_zeros(len(gradient), len(gradient), value.shape[2])
    first, second = averages(joint, weights, 0, 1)

    def summed(x: Tensor) -> Tensor:
        """The sum over components, for each of the n predictors."""
        x = x[:, 0].double()
        return x if spread is None else (spread * x).sum(dim=1)

    for i, x in first.items():
        if i == ALONG:
            gradient[:number] = summed(x)
        else:
            gradient[places[i]] = x[0, 0].double()
    for (i, k), x in second.items():
        if k == ALONG:
            for n in range(number):
                moments[n, :number] = summed(x if spread is None else x * spread[n].unsqueeze(1))
        else:
            part = summed(x) if i == ALONG else x[0, 0].double()
            at = slice(0, number) if i == ALONG else places[i]
            moments[at, places[k]] = moments[places[k], at] = part
    moments[:number, :number] -= gradient[:number, None] * gradient[:number]
    return gradient.mT.contiguous(), -moments.permute(2, 0, 1).contiguous()


def _site(gradient: Tensor, curvature: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Precision (B, R, R) and residual (B, R) of the site of g and B, in R numbers.

    The site is (I - B G)^-1 times B and g, with G the numbers' covariance in the cavity.
    Eigenvalues of B G are limited to ``LARGEST_REDUCTION``.

    :param half: a root of G, (B, R, d).
    """
    product = curvature @ half @ half.mT
    identity = torch.eye(product.shape[1], dtype=product.dtype, device=product.device)
    both = torch.cat([curvature, gradient.unsqueeze(2)], dim=2)
    found, _ = torch.linalg.solve_ex(identity - product, both)
    # The sum of the squared eigenvalues.
    others = ~((product * product.mT).sum(dim=(1, 2)) <= LARGEST_REDUCTION**2)
    if others.any():
        mine, half = both[others], half[others]
        inner = half.mT @ mine[..., :-1] @ half
        broken = ~inner.isfinite().all(dim=2).all(dim=1)
        values, vectors = spectra(torch.where(broken[:, None, None], 0.0, inner))
        usual, much = (1 - values).reciprocal(), values > LARGEST_REDUCTION
        gains = torch.where(much, (values.reciprocal() - 1) / values, usual)
        pulls = torch.where(much, (LARGEST_REDUCTION / (1 - LARGEST_REDUCTION)) / values, usual)
        back = half @ vectors
        inside = back.mT @ mine
        inside[..., :-1] *= gains.unsqueeze(2)
        inside[..., -1] *= pulls
        found[others] = mine + mine[..., :-1] @ back @ inside
    precision = found[..., :-1]
    return (precision + precision.mT) / 2, found[..., -1]
