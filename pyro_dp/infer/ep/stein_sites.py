"""Stein's sites of a batch by closed forms: what :class:`SteinMoments` gives, and faster.

Many likelihoods depend on the latents z through few *predictors* P z + c per record, with P affine
in the record's row. A regression of ordered levels has one predictor and its cutpoints. If a
covariate is missing, the outcome is a mixture over its possible values. Each component has a
predictor, and the weights have a few.

The model's own code is traced once, and cut where it stops to be affine. Then the draws'
predictors are one product of the rows with a public matrix. All further operations are elementwise.
Their derivatives are closed forms and :mod:`~pyro_dp.graphs.jets`.

A mixture needs no derivatives of a logarithm of a sum. Take f_jk, the joint log density of draw j
and component k, and W_jk, its softmax over both. Louis' identity holds for both averages at once.
So the site's gradient is g = E_W[grad f], and its curvature is g g' - E_W[hess f + grad f grad f'].

A record whose components are all alike is no mixture: one of them is computed. A record whose
predictors are not as on public rows gets the site that :class:`SteinMoments` gives it.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from torch import Tensor
from torch.distributions import MixtureSameFamily
from torch.fx import GraphModule, Node

from pyro_dp.graphs.factorisation import affine_nodes
from pyro_dp.graphs.jets import ALONG, Jet, JetGraph, Number, averages, composed, total
from pyro_dp.graphs.simplify import only_reads, shape
from pyro_dp.graphs.tracing import NotTraceable, trace
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.linear_design import Axes, Coefficients, halves, padded, where_possible
from pyro_dp.infer.ep.observation_family import Family, NotLinear, scale_and_mask
from pyro_dp.infer.ep.site_factors import Factors, LowRank
from pyro_dp.records.plate import innermost
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.utils.linalg import spectra, times

T = TypeVar("T")
_LENGTH = 4096  # records of the traced graph
_PASS = 2 * _LENGTH  # so that there are many of each kind
_NUMBERS = 2**18  # in a tensor of a mixture, which stays in the processor's cache
_MOST_NUMBERS = 12  # in one element
_MOST_PREDICTORS = 8  # beside those of components
MIXTURES = MixtureSameFamily, pyro.distributions.MixtureSameFamily
_NARROWING = {"alias", "constant_pad_nd", "expand", "squeeze", "unsqueeze", "view", "_unsafe_view"}
_NARROWING |= {"add", "sub", "rsub", "neg", "mul", "div"}
_TOLERANCE = {torch.float64: 1e-9}
_COARSE_TOLERANCE = 1e-5
_ALIKE = 1e-12  # predictors of components that differ by rounding alone
LARGEST_REDUCTION = 0.5  # one record's effect on the cavity's variance: draws say nothing beyond it
UNSEEN, ALIKE, MIXED, OTHER = range(4)  # kinds of records


class FewPredictors:
    """A likelihood as a function of few predictors.

    :param count: number of draws.
    :raises NotLinear: it is none, as far as public rows tell.
    :raises NotTraceable: likewise.
    :ivar families: the families of the observed distributions, or of their components.
    :ivar kinds: one for each record.
    """

    def __init__(self, likelihood: Likelihood, z: Tensor, count: int):
        if not likelihood.term.vectorizes or likelihood.sums:
            raise NotLinear("it is not a sum of densities")
        records = likelihood.term.records
        self._likelihood = likelihood
        self._read_sites(z)
        graph = self._trace(z)
        moving, affine = affine_nodes(graph, 0)
        (output,) = graph.graph.find_nodes(op="output")
        wanted: Any = output.args[0]
        self._leaves = list(dict.fromkeys(x for n in wanted for x in _leaves(n, moving, affine)))
        self._affine = JetGraph(graph, self._leaves, [])
        self._curved = {MIXED: JetGraph(graph, wanted, self._leaves)}
        without = [x for numbers, rest, _ in self._by_site(wanted) for x in (*numbers, *rest)]
        self._curved[ALIKE] = JetGraph(graph, without, self._leaves)
        self._columns: list[list[int]] = []
        for leaf in self._leaves:
            start = self._columns[-1][-1] + 1 if self._columns else 0
            self._columns.append(list(range(start, start + _numbers(leaf))))
        self.own = self._own_columns(wanted, moving, affine)
        if len(self._shared) > _MOST_PREDICTORS:
            raise NotLinear("it depends on the latents through many numbers")
        found = on_varied(
            lambda integers: Coefficients.find(likelihood, self._homogeneous, z, integers)
        )
        if found is None:
            raise NotLinear("predictors are not affine in a record's row")
        self.coefficients = found
        of_rows = torch.cat(
            [found.constant[None][:0], *(x for x in found.of_rows if x is not None)]
        )
        self._varying = of_rows.any(dim=2).any(dim=0).nonzero().flatten().tolist()
        # Components' predictors lie in few directions, such as those of the columns of a matrix.
        constant, own = found.constant[self.own], of_rows[:, self.own]
        directions = _independent(torch.cat([constant, own.flatten(0, 1)]))
        back = torch.linalg.pinv(directions)
        rest = [x if x is None else x[:, self.own] @ back for x in found.of_rows]
        self.directions = directions, Coefficients(constant @ back, rest)
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
            self.families = [Family(each, _MOST_NUMBERS) for each, _ in split]
        self._sizes = [0 if logits is None else logits.shape[-1] for _, logits in split]
        shapes = [math.prod(innermost(each["fn"]).batch_shape) for each, _ in split]
        if shapes != [max(size, 1) for size in self._sizes] or sum(map(bool, self._sizes)) > 1:
            raise NotLinear("a site has several elements")

    def _trace(self, z: Tensor) -> GraphModule:
        records, names = self._likelihood.term.records, [f.name for f in self.families]

        def read(z: Tensor, index: Tensor, row: list[Tensor]) -> list[Tensor]:
            sites = {s["name"]: s for s in self._likelihood.observations(z, index, row)}
            found = []
            for name, family in zip(names, self.families, strict=True):
                site, logits = _components(sites[name])
                numbers, rest = family.read_each(site)
                found += [*numbers, *rest, *([] if logits is None else [logits])]
            return found

        def function(z: Tensor, indices: Tensor, *rows: Tensor) -> list[Tensor]:
            found = self._likelihood.for_each("parts", read, z, indices, list(rows))
            return [x.reshape(len(z), -1) for x in found]  # (B, K)

        z = z.detach().to(self._likelihood.dtype).expand(_LENGTH, -1).contiguous()
        rows = [x.expand(_LENGTH, *x.shape).contiguous() for x in records.placeholder()]
        inputs = [z, torch.zeros(_LENGTH, dtype=torch.long, device=records.device), *rows]
        function(*(x[:1] for x in inputs))  # the first call tells what a broken record gives
        graph = trace(function, inputs)
        if not only_reads(graph):
            raise NotTraceable("it writes to its arguments")
        return graph

    def _by_site(self, found: Iterable[T], logits: bool = True) -> Iterator[tuple[list[T], ...]]:
        """Each site's numbers, other arguments of its density, and logits if it is a mixture."""
        each = iter(found)
        for family, size in zip(self.families, self._sizes, strict=True):
            counts = family.rank, len(family.constants) + 2, int(logits and size > 0)
            yield tuple(list(itertools.islice(each, count)) for count in counts)

    def _own_columns(
        self, wanted: Sequence[Node], moving: set[Node], affine: set[Node]
    ) -> list[int]:
        """The columns of a predictor of each component."""
        found = {
            leaf
            for numbers, _, logits in self._by_site(wanted)
            for node in numbers
            for leaf in _leaves(node, moving, affine)
            if logits and leaf.meta["val"].shape[-1] == max(self._sizes) == _numbers(leaf) > 1
        }
        if len(found) > 1:
            raise NotLinear("components have several predictors each")
        return [i for leaf in found for i in self._columns[self._leaves.index(leaf)]]

    @property
    def _shared(self) -> list[int]:
        return [i for columns in self._columns for i in columns if i not in self.own]

    def columns(self, kind: int) -> list[int]:
        """The predictors of such records, those of components first."""
        own = self.own[:1] if kind == ALIKE else self.own
        return [*own, *self._shared]

    def at(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Predictors of at most so many records as in a pass, (B, R), in float64."""
        z = z.to(self._likelihood.dtype).expand(_LENGTH, -1)
        found = self._affine([z, *padded([indices, *rows], _LENGTH)], [], len(indices))
        return torch.cat([x.reshape(-1, len(indices)) for x in found]).mT.double()

    def _homogeneous(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> list[tuple]:
        """P and c, (B, 1, R, d + 1), as Jacobians are handed on."""
        points = torch.eye(len(z) + 1, len(z), dtype=z.dtype, device=z.device)
        found = torch.stack([self.at(point, indices, rows) for point in points], dim=-1)
        found[..., :-1] -= found[..., -1:]
        return [(None, None, found.unsqueeze(1), None)]

    def joint(self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor], kind: int) -> Jet:
        """Log densities of components, draws and records, (K, J, B).

        :param predictors: (R', J, B), as :meth:`columns` has them.
        """
        terms = []
        for family, jets, rest, logits in self._parts(predictors, indices, rows, kind):
            density = family.derivatives([x.value for x in jets], rest)
            terms.append(composed(density.value, density.gradient, density.hessian, jets))
            terms += logits
        return total(terms)

    def components(
        self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Whether a record's mixture has weight 0 or 1, and whether its components are the same.

        :param predictors: (R, B).
        """
        regular = alike = torch.ones_like(indices, dtype=torch.bool)
        for _, jets, rest, logits in self._parts(predictors.unsqueeze(1), indices, rows, MIXED):
            if logits:
                numbers = [x.double() for x in (*(jet.value for jet in jets), *rest)]
                same = [(x - x[:1]).abs() <= 1e-6 * x[:1].abs() for x in numbers]
                alike = torch.stack([x.all(dim=0)[0].expand(len(indices)) for x in same]).all(dim=0)
                regular = ((numbers[-1] == 0) | (numbers[-1] == 1)).all(dim=0)[0]
        return regular.expand(len(indices)), alike

    def _parts(
        self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor], kind: int
    ) -> Iterator[tuple]:
        """Each site's family, numbers, other arguments of its density, and logits.

        :param predictors: (R', J, B).
        """
        dtype, places = self._likelihood.dtype, self.columns(kind)
        predictors, leaves = predictors.to(dtype), []
        for leaf, columns in zip(self._leaves, self._columns, strict=True):
            lead = list(shape(leaf)[1:])
            first: dict[int, Number] = dict.fromkeys(columns, 1.0)
            chosen = predictors[[places.index(i) for i in columns if i in places]]
            if not any(i in self._varying for i in columns):
                chosen = chosen[..., :1]
            if columns == self.own:
                lead[-1], first = len(chosen), {ALONG: 1.0}
            elif len(columns) > 1:
                ones = torch.eye(len(columns), dtype=dtype, device=predictors.device)
                first = {i: x.reshape(*lead, 1, 1) for i, x in zip(columns, ones, strict=True)}
            leaves.append(Jet(chosen.reshape(*lead, *chosen.shape[1:]), first))
        inputs = padded([indices, *rows], _LENGTH)
        found = self._by_site(
            self._curved[kind]([indices, *inputs], leaves, len(indices)), logits=kind == MIXED
        )
        for family, size, (numbers, rest, logits) in zip(
            self.families, self._sizes, found, strict=True
        ):
            jets = [x if isinstance(x, Jet) else Jet(x) for x in (*numbers, *logits)]
            rest = [x.to(dtype) if x.is_floating_point() else x for x in rest]
            if size and kind == ALIKE:
                jets, rest = [jet.each(lambda x: x[:1]) for jet in jets], [x[:1] for x in rest]
            yield family, jets[: family.rank], rest, jets[family.rank :]


class SteinSites:
    """
    :param moments: :class:`SteinMoments` with few predictors.
    :param mean: the cavity's mean, (d,).
    :param root: L of the cavity's covariance.
    :param frame: W of the frame in which the sites are released, (d, d); None: the latents' own.
    """

    size = _PASS

    def __init__(self, moments: Any, mean: Tensor, root: Tensor, frame: Tensor | None):
        self._moments, self._few = moments, moments.design
        self._mean, self._root, self._frame = mean, root, frame
        self._axes = axes = Axes.of(root @ root.mT, frame)
        dim = len(mean)
        basis = mean.new_zeros(dim + 1, dim + 1)
        basis[:dim, :dim], basis[:dim, dim], basis[dim, dim] = axes.basis, mean, 1.0
        directions, coordinates = self._few.directions
        along, shared = self._few.coefficients.along, self._few.columns(MIXED)[len(self._few.own) :]
        self._products = {
            "alike": along(basis, self._few.columns(ALIKE)),
            "shared": along(basis, shared),
            "own": coordinates.along(torch.eye(len(directions)).to(basis)),
        }
        self._directions = directions @ basis  # (r, d + 1)
        steps = torch.linalg.solve(axes.basis, root @ moments._draws.mT)  # (d, J)
        self._draws = torch.cat([steps, torch.ones_like(steps[:1])])  # (d + 1, J)
        probe = torch.cos(torch.arange(1.0, dim + 1).to(mean))  # an irregular direction
        self._probe = probe / probe.norm()
        self._tolerance = _TOLERANCE.get(moments.dtype, _COARSE_TOLERANCE)
        numbers = len(moments._draws) * max(1, len(self._few.own))
        self._sizes = {
            ALIKE: _LENGTH,
            MIXED: min(_LENGTH, max(64, _NUMBERS // numbers)),
            OTHER: moments.microbatch_size,
        }

    def each(self, indices: Tensor, rows: list[Tensor]) -> Iterator[Factors]:
        """The sites of B records in the frame's coordinates, of one kind after the other.

        :param rows: rows of the records. This method only reads them.
        """
        kinds = self._few.kinds[indices]
        (unseen,) = (kinds == UNSEEN).nonzero(as_tuple=True)
        for part in unseen.split(_LENGTH):  # those alone: no kind tells who else takes part
            if len(part):
                kinds[part] = self.found_kinds(indices[part], [x[part] for x in rows])
        self._few.kinds[indices] = kinds
        for kind in (ALIKE, MIXED, OTHER):
            (places,) = (kinds == kind).nonzero(as_tuple=True)
            for chosen in places.split(self._sizes[kind]):
                if len(chosen):
                    part = [x[chosen] for x in rows] if len(chosen) < len(indices) else rows
                    sites, others = (partial(self.factors, each) for each in (kind, OTHER))
                    yield from where_possible(sites, others, indices[chosen], part)

    def factors(self, kind: int, indices: Tensor, rows: list[Tensor]) -> Factors:
        """The sites of records of this kind."""
        if kind == OTHER:
            sites = self._moments.factors(self._mean, self._root, indices, rows)
            return sites if self._frame is None else sites.whitened(self._frame)
        if kind == ALIKE or not self._few.own:
            found, spread = self._products["alike"](rows), None
            predictors, along = self._drawn(found), found[..., :-1]
        else:
            predictors, along, spread = self._mixed(rows)
        joint = self._few.joint(predictors, indices, rows, kind)
        columns, own = self._few.columns(kind), self._few.own
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
        """Predictors of mixtures at the draws, and few others whose sums they are.

        :returns: (R', J, B); the few in T, (B, R, d); how much each component has of the first n,
            (n, K, B).
        """
        shared = self._products["shared"](rows)
        spread = self._products["own"](rows).permute(2, 1, 0).contiguous()
        own = times((self._directions @ self._draws).mT, spread.flatten(1))
        own = own.unflatten(1, spread.shape[1:]).permute(1, 0, 2).to(self._moments.dtype)
        predictors = torch.cat([own, self._drawn(shared)])
        # All that is alike in the components of all these records is one predictor. A record has
        # exact zeros for a direction in which only others' components differ.
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
        """The kinds of at most as many records as the graph takes, (B,)."""
        try:
            own, shared = self._products["own"](rows), self._products["shared"](rows)
            found = torch.cat([own @ self._directions, shared], dim=1)
            along, here = found[..., :-1], found[..., -1]
            there = here + along @ self._probe
            size = here.abs() + there.abs() + along.norm(dim=2)
            number = len(self._few.own)
            same = (own - own[:, :1]).abs() <= _ALIKE * own[:, :1].abs()
            straight, alike = torch.ones_like(indices, dtype=torch.bool), same.flatten(1).all(dim=1)
            elsewhere = self._mean + self._axes.basis @ self._probe
            for predictors, z in ((here, self._mean), (there, elsewhere)):
                expected = self._few.at(z, indices, rows)[:, self._few.columns(MIXED)]
                close = (predictors - expected).abs() <= self._tolerance * size
                regular, equal = self._few.components(predictors.mT, indices, rows)
                straight, alike = straight & close.all(dim=1) & regular, alike & equal
        except Exception:  # on some record
            if len(indices) > 1:
                parts = halves([indices, *rows])
                return torch.cat([self.found_kinds(part[0], part[1:]) for part in parts])
            return torch.full_like(indices, OTHER, dtype=torch.uint8)
        kinds = torch.where(alike, ALIKE, MIXED) if number else torch.full_like(indices, MIXED)
        return torch.where(straight, kinds, OTHER).to(torch.uint8)


def _components(site: dict) -> tuple[dict, Tensor | None]:
    """A mixture's site as one of all components, and their logits; None: it is no mixture."""
    base = innermost(site["fn"])
    if type(base) not in MIXTURES:
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
    """How many a record has."""
    return int(node.meta["val"][0].numel())


def _averages(
    joint: Jet, columns: Sequence[int], own: Sequence[int], spread: Tensor | None
) -> tuple[Tensor, Tensor]:
    """g and B in R predictors, (B, R) and (B, R, R), in float64.

    :param joint: log densities of components, draws and records, (K, J, B).
    :param columns: directions of the predictors, those of components first.
    :param spread: as of :meth:`SteinSites._mixed`; None: one component has a predictor, or none.
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


def _independent(rows: Tensor) -> Tensor:
    """Some of these rows, (r, d). All others are sums of multiples of them."""
    found = rows[:0]
    for row in rows.unique(dim=0).flip(0):
        rest = row - row @ torch.linalg.pinv(found) @ found
        if rest.norm() > 1e-9 * row.norm():
            found = torch.cat([found, row[None]])
    return found


def _site(gradient: Tensor, curvature: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Precision (B, R, R) and residual (B, R) of the site of g and B, in R numbers.

    The site is (I - B G)^-1 times B and g, with G the numbers' covariance in the cavity.
    Eigenvalues of B G are cut off at a limit.

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
