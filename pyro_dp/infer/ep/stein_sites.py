"""Stein's sites of a batch by closed forms: what :class:`SteinMoments` gives, and faster.

Many likelihoods depend on the latents z through few numbers per record, and these through few
*predictors* P z + c, with P affine in the record's row. A regression of ordered levels has one
predictor and its cutpoints. If a covariate is missing, the outcome is a mixture over what may stand
there. Each component has a predictor, and the weights have a few.

The model's own code is traced once, and cut where it stops to be affine. Then the draws'
predictors are one product of the rows with a public matrix. What follows is elementwise:
derivatives in the predictors, by closed forms and :mod:`~pyro_dp.graphs.jets`.

A mixture needs no derivatives of a logarithm of a sum. Take f_jk, the joint log density of draw j
and component k, and W_jk, its softmax over both. By Louis' identity, which holds for both averages
at once, the site's gradient is g = E_W[grad f], and its curvature is
g g' - E_W[hess f + grad f grad f'].

A record whose components are all alike is no mixture: one of them is computed. A record whose
predictors are not as on public rows gets the site that :class:`SteinMoments` gives it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MixtureSameFamily
from torch.fx import GraphModule, Node

import pyro
from pyro_dp.graphs.jets import ALONG, Jet, JetGraph, composed, log_softmax, total
from pyro_dp.graphs.linearity import affine_nodes
from pyro_dp.graphs.simplify import only_reads
from pyro_dp.graphs.tracing import NotTraceable, trace
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.linear_design import Axes, Coefficients, padded
from pyro_dp.infer.ep.observation_family import Family, NotLinear, innermost, scale_and_mask
from pyro_dp.infer.ep.site_factors import Factors, LowRank
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.utils.linalg import times

_SIZE = 512  # records at a time: the draws' numbers stay in the processor's cache
_MOST_NUMBERS = 12  # of an element
_MOST_PREDICTORS = 8  # beside those of components
_MIXTURES = MixtureSameFamily, pyro.distributions.MixtureSameFamily
_NARROWING = {"alias", "constant_pad_nd", "expand", "squeeze", "unsqueeze", "view", "_unsafe_view"}
_NARROWING |= {"add", "sub", "rsub", "neg", "mul", "div"}
_TOLERANCE = {torch.float64: 1e-9}
_COARSE_TOLERANCE = 1e-5
LARGEST_REDUCTION = 0.5  # of the cavity's variance by one record, beyond which draws say nothing
UNSEEN, ALIKE, MIXED, OTHER = range(4)  # kinds of records


class FewPredictors:
    """A likelihood as a function of few predictors.

    :param count: number of draws.
    :raises NotLinear: it is none, as far as public rows tell.
    :raises NotTraceable: likewise.
    :ivar kinds: of the records, by index.
    """

    def __init__(self, likelihood: Likelihood, z: Tensor, count: int):
        if not likelihood.term.vectorizes or likelihood.term.enumerates:
            raise NotLinear("it is not a sum of densities")
        records = likelihood.term.records
        self._likelihood, self.count = likelihood, count
        self.length = count * _SIZE
        self._read_sites(z)
        graph = self._trace(z)
        moving, affine = affine_nodes(graph, 0)
        (output,) = graph.graph.find_nodes(op="output")
        wanted: Any = output.args[0]
        self._leaves = list(dict.fromkeys(x for n in wanted for x in _leaves(n, moving, affine)))
        self._affine = JetGraph(graph, self._leaves, [])
        self._curved = JetGraph(graph, wanted, self._leaves)
        self._columns: list[list[int]] = []
        for leaf in self._leaves:
            start = self._columns[-1][-1] + 1 if self._columns else 0
            self._columns.append(list(range(start, start + _numbers(leaf))))
        self.own = self._own_columns(wanted, moving, affine)
        number = sum(map(len, self._columns))
        self._shared = [i for i in range(number) if i not in self.own]
        if len(self._shared) > _MOST_PREDICTORS:
            raise NotLinear("it depends on the latents through many numbers")
        found = on_varied(
            lambda integers: Coefficients.find(likelihood, self._homogeneous, z, integers)
        )
        if found is None:
            raise NotLinear("predictors are not affine in a record's row")
        self.coefficients = found
        self.kinds = torch.zeros(records.count, dtype=torch.uint8, device=records.device)

    @staticmethod
    def find(likelihood: Likelihood, z: Tensor, count: int) -> "FewPredictors | None":
        """None: it is no such function."""
        try:
            return FewPredictors(likelihood, z, count)
        except (NotLinear, NotTraceable):
            return None

    def _read_sites(self, z: Tensor) -> None:
        records = self._likelihood.term.records
        index = torch.zeros((), dtype=torch.long, device=records.device)
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            sites = self._likelihood.observations(z, index, records.placeholder())
            split = [_components(site) for site in sites]
            self._families = [Family(each, _MOST_NUMBERS) for each, _ in split]
        self._sizes = [0 if logits is None else logits.shape[-1] for _, logits in split]
        shapes = [innermost(each["fn"]).batch_shape.numel() for each, _ in split]
        if shapes != [max(size, 1) for size in self._sizes] or sum(map(bool, self._sizes)) > 1:
            raise NotLinear("a site has several elements")
        self._size = max(self._sizes)

    def _trace(self, z: Tensor) -> GraphModule:
        records, names = self._likelihood.term.records, [f.name for f in self._families]

        def read(z: Tensor, index: Tensor, row: list[Tensor]) -> list[Tensor]:
            sites = {s["name"]: s for s in self._likelihood.observations(z, index, row)}
            found = []
            for name, family in zip(names, self._families, strict=True):
                site, logits = _components(sites[name])
                numbers, rest = family.read_each(site)
                found += [*numbers, *rest, *([] if logits is None else [logits])]
            return found

        def function(z: Tensor, indices: Tensor, *rows: Tensor) -> list[Tensor]:
            found = self._likelihood.for_each("parts", read, z, indices, list(rows))
            return [x.reshape(len(z), -1) for x in found]

        z = z.detach().to(self._likelihood.dtype).expand(self.length, -1).contiguous()
        rows = [x.expand(self.length, *x.shape).contiguous() for x in records.placeholder()]
        inputs = [z, torch.zeros(self.length, dtype=torch.long, device=records.device), *rows]
        function(*(x[:1] for x in inputs))  # the first call tells what a broken record gives
        graph = trace(function, inputs)
        if not only_reads(graph):
            raise NotTraceable("it writes to its arguments")
        return graph

    def _own_columns(
        self, wanted: Sequence[Node], moving: set[Node], affine: set[Node]
    ) -> list[int]:
        """Those of a predictor of each component."""
        start, found = 0, set()
        for family, size in zip(self._families, self._sizes, strict=True):
            if size:
                for node in wanted[start : start + family.rank]:
                    found |= {
                        leaf
                        for leaf in _leaves(node, moving, affine)
                        if leaf.meta["val"].shape[-1] == size == _numbers(leaf) > 1
                    }
            start += family.rank + len(family.constants) + 2 + bool(size)
        if len(found) > 1:
            raise NotLinear("components have several predictors each")
        return [i for leaf in found for i in self._columns[self._leaves.index(leaf)]]

    def columns(self, kind: int) -> list[int]:
        """The predictors of such records, those of components first."""
        own = self.own[:1] if kind == ALIKE else self.own
        return [*own, *self._shared]

    def at(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Predictors of at most so many records as there are in a pass, (B, R), in float64."""
        z = z.to(self._likelihood.dtype).expand(self.length, -1)
        found = self._affine([z, *padded([indices, *rows], self.length)], [])
        return torch.cat([x.reshape(self.length, -1) for x in found], 1)[: len(indices)].double()

    def _homogeneous(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> list[tuple]:
        """P and c, (B, 1, R, d + 1), as Jacobians are handed on."""
        points = torch.eye(len(z) + 1, len(z), dtype=z.dtype, device=z.device)
        found = torch.stack([self.at(point, indices, rows) for point in points], dim=-1)
        found[..., :-1] -= found[..., -1:]
        return [(None, None, found.unsqueeze(1), None)]

    def joint(
        self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor], kind: int
    ) -> Jet:
        """Log densities of draws and components, (J, B, K).

        :param predictors: (B, R', J), as :meth:`columns` has them.
        """
        batch, count = len(indices), predictors.shape[2]
        flat = padded(predictors, _SIZE).permute(1, 2, 0).flatten(1)  # (R', J B)
        given = [
            padded(x, _SIZE).repeat(count, *(1,) * (x.dim() - 1)) if needed else None
            for x, needed in zip([indices, *rows], self._curved.needed[1:], strict=True)
        ]
        terms = []
        for family, jets, rest, logits in self._parts(flat, given, kind):
            density = family.derivatives([x.value for x in jets], rest)
            terms.append(composed(density.value, density.gradient, density.hessian, jets))
            if logits is not None and kind != ALIKE:
                terms.append(log_softmax(logits, -1))

        def laid_out(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.expand(self.length, x.shape[-1] if x.dim() else 1)
            return x.unflatten(0, (count, _SIZE))[:, :batch]

        return total(terms).each(laid_out)

    def components(
        self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of records, (B,): whether weights are 0 or 1 where components are weighed, and whether
        all components are the same.

        :param predictors: (B, R), as :meth:`columns` has them.
        """
        given = padded([indices, *rows], self.length)
        flat = padded(predictors, self.length).mT
        regular = alike = torch.ones_like(indices, dtype=torch.bool)
        for _, jets, rest, logits in self._parts(flat, given, MIXED):
            if logits is not None:
                numbers = [x[: len(indices)].double() for x in (*(j.value for j in jets), *rest)]
                same = [(x - x[:, :1]).abs() <= 1e-6 * x[:, :1].abs() for x in numbers]
                alike = torch.stack([each.all(dim=1) for each in same]).all(dim=0)
                regular = ((numbers[-1] == 0) | (numbers[-1] == 1)).all(dim=1)
        return regular, alike

    def _parts(self, flat: Tensor, given: Sequence[Tensor | None], kind: int) -> Iterator[tuple]:
        """Of each site: family, numbers, what else its density needs, and logits of components.

        :param flat: predictors, (R', length).
        """
        dtype, places = self._likelihood.dtype, self.columns(kind)
        flat, leaves = flat.to(dtype), []
        for leaf, columns in zip(self._leaves, self._columns, strict=True):
            shape, first = list(leaf.meta["val"].shape), dict.fromkeys(columns, 1.0)
            chosen = flat[[places.index(i) for i in columns if i in places]]
            if columns == self.own:
                shape[-1], first = len(chosen), {ALONG: 1.0}
            elif len(columns) > 1:
                ones = torch.eye(len(columns), dtype=dtype, device=flat.device)
                first = {i: x.reshape(shape[1:]) for i, x in zip(columns, ones, strict=True)}
            leaves.append(Jet(chosen.mT.reshape(shape), first))
        found = iter(self._curved([None, *given], leaves))
        for family, size in zip(self._families, self._sizes, strict=True):
            jets = [_jet(next(found)) for _ in range(family.rank)]
            rest = [next(found) for _ in range(len(family.constants) + 2)]
            rest = [x.to(dtype) if x.is_floating_point() else x for x in rest]
            if size and kind == ALIKE:
                jets, rest = [x.each(_first) for x in jets], [_first(x) for x in rest]
            yield family, jets, rest, _jet(next(found)) if size else None


class SteinSites:
    """
    :param moments: :class:`SteinMoments` with few predictors.
    :param mean: the cavity's mean, (d,).
    :param root: L of the cavity's covariance.
    :param frame: W of the frame in which the sites are released, (d, d); None: the latents' own.
    """

    def __init__(self, moments: Any, mean: Tensor, root: Tensor, frame: Tensor | None):
        self._moments, self._few = moments, moments.design
        self._mean, self._root, self._frame = mean, root, frame
        self._axes = axes = Axes.of(root @ root.mT, frame)
        dim = len(mean)
        basis = mean.new_zeros(dim + 1, dim + 1)
        basis[:dim, :dim], basis[:dim, dim], basis[dim, dim] = axes.basis, mean, 1.0
        self._products = {
            kind: self._few.coefficients.along(basis, self._few.columns(kind))
            for kind in (ALIKE, MIXED)
        }
        self._steps = torch.linalg.solve(axes.basis, root @ moments._draws.mT)  # (d, J)
        probe = torch.cos(torch.arange(1.0, dim + 1).to(mean))  # an irregular direction
        self._probe = probe / probe.norm()
        self._tolerance = _TOLERANCE.get(moments.dtype, _COARSE_TOLERANCE)
        self.size = self._few.length

    def each(self, indices: Tensor, rows: list[Tensor]) -> Iterator[Factors]:
        """The sites of B records in the frame's coordinates, of one kind after the other.

        :param rows: rows of the records. This method only reads them.
        """
        kinds = self._few.kinds[indices]
        if not kinds.all():
            kinds = self._few.kinds[indices] = self._kinds(indices, rows)
        for kind in (ALIKE, MIXED, OTHER):
            (places,) = (kinds == kind).nonzero(as_tuple=True)
            for chosen in places.split(_SIZE if kind != OTHER else self._moments.microbatch_size):
                if len(chosen):
                    part = [x[chosen] for x in rows] if len(chosen) < len(indices) else rows
                    yield self._factors(kind, indices[chosen], part)

    def _factors(self, kind: int, indices: Tensor, rows: list[Tensor]) -> Factors:
        if kind == OTHER:
            sites = self._moments.factors(self._mean, self._root, indices, rows)
            return sites if self._frame is None else sites.whitened(self._frame)
        found = self._products[kind](rows)
        along, here = found[..., :-1], found[..., -1:]
        predictors = here + times(along.flatten(0, 1), self._steps).unflatten(0, along.shape[:2])
        gradient, curvature = _averages(
            self._few.joint(predictors, indices, rows, kind), self._few.columns(kind), self._few.own
        )
        if along.shape[1] >= along.shape[2]:
            gradient = (gradient.unsqueeze(1) @ along).squeeze(1)
            curvature = along.mT @ curvature @ along
            along = torch.eye(along.shape[2]).to(along).expand(len(along), -1, -1)
        half = along * self._axes.variances.sqrt()
        return LowRank(along, *_site(gradient, curvature, half), turn=self._axes.turn)

    def _kinds(self, indices: Tensor, rows: list[Tensor]) -> Tensor:
        """Of records."""
        found = self._products[MIXED](rows)
        along, here = found[..., :-1], found[..., -1]
        there, straight, alike = here + along @ self._probe, True, True
        size = here.abs() + there.abs() + along.norm(dim=2)
        own = len(self._few.own)
        same = (found[:, :own] - found[:, :1]).abs() <= 1e-12 * found[:, :1].abs()
        alike = same.flatten(1).all(dim=1)
        for found, z in ((here, self._mean), (there, self._mean + self._axes.basis @ self._probe)):
            expected = self._few.at(z, indices, rows)[:, self._few.columns(MIXED)]
            straight &= ((found - expected).abs() <= self._tolerance * size).all(dim=1)
            regular, equal = self._few.components(found, indices, rows)
            straight, alike = straight & regular, alike & equal
        kinds = torch.where(alike, ALIKE, MIXED) if own else torch.full_like(indices, MIXED)
        return torch.where(straight, kinds, OTHER).to(torch.uint8)


def _components(site: dict) -> tuple[dict, Tensor | None]:
    """A mixture's site as one of all components, and their logits; None: it is no mixture."""
    base = innermost(site["fn"])
    if type(base) not in _MIXTURES:
        return site, None
    scale, mask = scale_and_mask(site)
    aside = {"value": site["value"].unsqueeze(-1), "fn": base.component_distribution}
    aside |= {"scale": scale.unsqueeze(-1), "mask": mask.unsqueeze(-1)}
    return site | aside, base.mixture_distribution.logits


def _leaves(node: Node, moving: set[Node], affine: set[Node]) -> list[Node]:
    """The last nodes before this one that are affine."""
    if node in affine:
        return [_narrowest(node, affine)]
    inputs = [x for x in node.all_input_nodes if x in moving]
    return list(dict.fromkeys(leaf for x in inputs for leaf in _leaves(x, moving, affine)))


def _narrowest(node: Node, affine: set[Node]) -> Node:
    """The node with the fewest numbers from which this one follows by itself."""
    found = node
    while getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in _NARROWING:
        inputs = [x for x in node.all_input_nodes if x in affine]
        if len(inputs) != 1 or inputs[0].op == "placeholder":
            break
        (node,) = inputs
        if _numbers(node) == 1 or _numbers(node) < _numbers(found):
            found = node
    return found


def _numbers(node: Node) -> int:
    """Of a record."""
    return int(node.meta["val"][0].numel())


def _jet(x: Jet | Tensor) -> Jet:
    return x if isinstance(x, Jet) else Jet(x)


def _first(x: Any) -> Any:
    return x[..., :1] if isinstance(x, Tensor) else x


def _averages(joint: Jet, columns: Sequence[int], own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """g and B in R predictors, (B, R) and (B, R, R), in float64.

    :param joint: log densities of draws and components, (J, B, K).
    :param columns: directions of the predictors, those of components first.
    """
    value = joint.value.transpose(0, 1)
    weights = value.flatten(1).softmax(dim=1).unflatten(1, value.shape[1:]).transpose(0, 1)
    number = sum(i in own for i in columns)
    spans = {ALONG: slice(0, number)} if number else {}
    spans |= {i: slice(p, p + 1) for p, i in enumerate(columns) if p >= number}
    gradient = weights.new_zeros(value.shape[0], len(columns), dtype=torch.float64)
    moments = gradient.new_zeros(value.shape[0], len(columns), len(columns))
    weighted = {i: weights * joint.first[i] for i in spans if i in joint.first}

    def summed(x: Tensor, along: bool) -> Tensor:
        return (x.sum(dim=0) if along else x.sum(dim=(0, 2)).unsqueeze(1)).double()

    for i, slope in weighted.items():
        gradient[:, spans[i]] = summed(slope, i == ALONG)
        for k in weighted:
            if i <= k:
                bend = joint.second.get((i, k))
                each = slope * joint.first[k] + (0.0 if bend is None else weights * bend)
                found = summed(each, i == ALONG)
                if k == ALONG:
                    moments[:, :number, :number] = torch.diag_embed(found)
                else:
                    moments[:, spans[i], spans[k].start] = found
                    moments[:, spans[k].start, spans[i]] = found
    return gradient, gradient.unsqueeze(2) * gradient.unsqueeze(1) - moments


def _site(gradient: Tensor, curvature: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Precision (B, R, R) and residual (B, R) of the site of g and B, in R numbers.

    With G the numbers' covariance in the cavity, that is (I - B G)^-1 times B and g. Eigenvalues of
    B G above a limit count as the limit.

    :param half: G = half half', (B, R, d).
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
        values, vectors = torch.linalg.eigh(torch.where(broken[:, None, None], 0.0, inner))
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
