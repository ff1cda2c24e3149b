"""Likelihoods that depend on the latents through few predictors of a record.

The model's code is traced once, and split where it stops being affine in the latents.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyro
import torch
from torch import Tensor
from torch.distributions import MixtureSameFamily
from torch.fx import GraphModule, Node

from pyro_dp.graphs.factorisation import affine_nodes
from pyro_dp.graphs.jets import ALONG, Jet, JetGraph, Number, composed, total
from pyro_dp.graphs.simplify import shape
from pyro_dp.graphs.tracing import NotTraceable
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.linear_design import Coefficients, padded, reading_graph
from pyro_dp.infer.ep.observation_family import Family, NotLinear, scale_and_mask
from pyro_dp.records.plate import innermost
from pyro_dp.records.stand_ins import on_varied

T = TypeVar("T")
LENGTH = 4096  # batch size of the traced graph
_MOST_NUMBERS = 12  # in one element
_MOST_PREDICTORS = 8  # without those of components
MIXTURES = MixtureSameFamily, pyro.distributions.MixtureSameFamily
_NARROWING = {"alias", "constant_pad_nd", "expand", "squeeze", "unsqueeze", "view", "_unsafe_view"}
_NARROWING |= {"add", "sub", "rsub", "neg", "mul", "div"}
# Kinds of records: not classified, without differences between components, mixtures, and others.
UNSEEN, ALIKE, MIXED, OTHER = range(4)


class FewPredictors:
    """A likelihood as a function of few predictors.

    :raises NotLinear: on public rows it is no such function.
    :raises NotTraceable: it is more than a fixed sequence of tensor operations.
    :ivar families: the families of the observed distributions, or of their components.
    :ivar component_columns: columns of the predictor that each component has.
    :ivar kinds: kind of each record, (N,).
    :ivar varying: columns of predictors that depend on the record's row.
    """

    def __init__(self, likelihood: Likelihood, z: Tensor):
        if not likelihood.term.vectorizes or likelihood.sums:
            raise NotLinear("it is not a sum of densities")
        records = likelihood.term.records
        self._likelihood = likelihood
        self._read_sites(z)
        graph = self._trace(z)
        moving, affine = affine_nodes(graph)
        (output,) = graph.graph.find_nodes(op="output")
        wanted: Any = output.args[0]
        self._leaves = list(dict.fromkeys(x for n in wanted for x in _leaves(n, moving, affine)))
        self._affine = JetGraph(graph, self._leaves, [])
        self._curved = {MIXED: JetGraph(graph, wanted, self._leaves)}
        without = [x for numbers, rest, _ in self._by_site(wanted) for x in (*numbers, *rest)]
        self._curved[ALIKE] = JetGraph(graph, without, self._leaves)
        ends = itertools.accumulate(map(_numbers, self._leaves), initial=0)
        self._columns = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        self.component_columns = self._component_columns(wanted, moving, affine)
        if len(self._shared) > _MOST_PREDICTORS:
            raise NotLinear("it depends on the latents through many numbers")
        found = on_varied(
            lambda integers: Coefficients.find(likelihood, self._homogeneous, z, integers)
        )
        if found is None:
            raise NotLinear("predictors are not affine in a record's row")
        self.coefficients = found
        slopes = [x for x in found.of_rows if x is not None]
        of_rows = torch.cat([found.constant[None][:0], *slopes])
        self.varying = of_rows.any(dim=2).any(dim=0).nonzero().flatten().tolist()
        # Components' predictors span few directions, such as those of a matrix's columns.
        constant, own = found.constant[self.component_columns], of_rows[:, self.component_columns]
        directions = _independent(torch.cat([constant, own.flatten(0, 1)]))
        back = torch.linalg.pinv(directions)
        rest = [x if x is None else x[:, self.component_columns] @ back for x in found.of_rows]
        self.directions = directions, Coefficients(constant @ back, rest)
        self.kinds = torch.zeros(records.count, dtype=torch.uint8, device=records.device)

    @staticmethod
    def find(likelihood: Likelihood, z: Tensor) -> "FewPredictors | None":
        """None if it is no such function."""
        try:
            return FewPredictors(likelihood, z)
        except (NotLinear, NotTraceable):
            return None

    def _read_sites(self, z: Tensor) -> None:
        likelihood = self._likelihood
        with torch.enable_grad():
            sites = likelihood.observations(z.detach().requires_grad_(), *likelihood.placeholder)
            split = [_components(site) for site in sites.values()]
            self.families = [Family(each, _MOST_NUMBERS) for each, _ in split]
        self._sizes = [0 if logits is None else logits.shape[-1] for _, logits in split]
        shapes = [math.prod(innermost(each["fn"]).batch_shape) for each, _ in split]
        if shapes != [max(size, 1) for size in self._sizes] or sum(map(bool, self._sizes)) > 1:
            raise NotLinear("a site has several elements")

    def _trace(self, z: Tensor) -> GraphModule:
        names = [f.name for f in self.families]

        def read(z: Tensor, index: Tensor, row: list[Tensor]) -> list[Tensor]:
            sites, found = self._likelihood.observations(z, index, row), []
            for name, family in zip(names, self.families, strict=True):
                site, logits = _components(sites[name])
                numbers, rest = family.read_each(site)
                found += [*numbers, *rest, *([] if logits is None else [logits])]
            return found

        def function(z: Tensor, indices: Tensor, *rows: Tensor) -> list[Tensor]:
            found = self._likelihood.for_each("parts", read, z, indices, list(rows))
            return [x.reshape(len(z), -1) for x in found]  # (B, K)

        z = z.detach().to(self._likelihood.dtype).expand(LENGTH, -1).contiguous()
        return reading_graph(self._likelihood, function, z, LENGTH)

    def _by_site(self, found: Iterable[T], logits: bool = True) -> Iterator[tuple[list[T], ...]]:
        """Each site's numbers, the other arguments of its density, and a mixture's logits."""
        each = iter(found)
        for family, size in zip(self.families, self._sizes, strict=True):
            counts = family.rank, len(family.constants) + 2, int(logits and size > 0)
            yield tuple(list(itertools.islice(each, count)) for count in counts)

    def _component_columns(
        self, wanted: Sequence[Node], moving: set[Node], affine: set[Node]
    ) -> list[int]:
        """The columns of the predictor that each component has."""
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
        return [i for columns in self._columns for i in columns if i not in self.component_columns]

    def columns(self, kind: int) -> list[int]:
        """The predictors of records of this kind, those of components first."""
        own = self.component_columns[:1] if kind == ALIKE else self.component_columns
        return [*own, *self._shared]

    def at(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Predictors of at most ``LENGTH`` records, (B, R), in float64."""
        z = z.to(self._likelihood.dtype).expand(LENGTH, -1)
        found = self._affine([z, *padded([indices, *rows], LENGTH)], [], len(indices))
        return torch.cat([x.reshape(-1, len(indices)) for x in found]).mT.double()

    def _homogeneous(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> list[tuple]:
        """P and c, (B, 1, R, d + 1), in the form that :meth:`Coefficients.find` expects."""
        points = torch.eye(len(z) + 1, len(z), dtype=z.dtype, device=z.device)
        found = torch.stack([self.at(point, indices, rows) for point in points], dim=-1)
        found[..., :-1] -= found[..., -1:]
        return [(None, None, found.unsqueeze(1), None)]

    def joint(self, predictors: Tensor, indices: Tensor, rows: Sequence[Tensor], kind: int) -> Jet:
        """Log densities (K, J, B) of components, draws and records.

        :param predictors: (R', J, B), in the order of :meth:`columns`.
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
        """Whether a record's mixture is weighted 0 or 1, and whether its components are equal."""
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
        """Each site's family, numbers, other arguments of its density, and logits."""
        dtype, order = self._likelihood.dtype, self.columns(kind)
        predictors, leaves = predictors.to(dtype), []
        for leaf, columns in zip(self._leaves, self._columns, strict=True):
            lead = list(shape(leaf)[1:])
            first: dict[int, Number] = dict.fromkeys(columns, 1.0)
            chosen = predictors[[order.index(i) for i in columns if i in order]]
            if not any(i in self.varying for i in columns):
                chosen = chosen[..., :1]
            if columns == self.component_columns:
                lead[-1], first = len(chosen), {ALONG: 1.0}
            elif len(columns) > 1:
                ones = torch.eye(len(columns), dtype=dtype, device=predictors.device)
                first = {i: x.reshape(*lead, 1, 1) for i, x in zip(columns, ones, strict=True)}
            leaves.append(Jet(chosen.reshape(*lead, *chosen.shape[1:]), first))
        inputs = [indices, *padded([indices, *rows], LENGTH)]
        outputs = self._curved[kind](inputs, leaves, len(indices))
        sites = zip(self.families, self._sizes, self._by_site(outputs, kind == MIXED), strict=True)
        for family, size, (numbers, rest, logits) in sites:
            jets = [x if isinstance(x, Jet) else Jet(x) for x in (*numbers, *logits)]
            rest = [x.to(dtype) if x.is_floating_point() else x for x in rest]
            if size and kind == ALIKE:
                jets, rest = [jet.each(lambda x: x[:1]) for jet in jets], [x[:1] for x in rest]
            yield family, jets[: family.rank], rest, jets[family.rank :]


def _components(site: dict) -> tuple[dict, Tensor | None]:
    """A mixture's site, as a site of its components, and their logits; None: it is no mixture."""
    base = innermost(site["fn"])
    if type(base) not in MIXTURES:
        return site, None
    scale, mask = scale_and_mask(site)
    tensors = {"value": site["value"], "scale": scale, "mask": mask}
    components = {name: x.unsqueeze(-1) for name, x in tensors.items()}
    components["fn"] = base.component_distribution
    return site | components, base.mixture_distribution.logits


def _leaves(node: Node, moving: set[Node], affine: set[Node]) -> list[Node]:
    """The last affine nodes before this one."""
    if node in affine:
        return [_narrowest(node, affine)]
    inputs = [x for x in node.all_input_nodes if x in moving]
    return list(dict.fromkeys(leaf for x in inputs for leaf in _leaves(x, moving, affine)))


def _narrowest(node: Node, affine: set[Node]) -> Node:
    """The node with the fewest numbers that determines this one."""
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
    """How many numbers of the node a record has."""
    return int(node.meta["val"][0].numel())


def _independent(rows: Tensor) -> Tensor:
    """A maximal linearly independent subset of these rows, (r, d)."""
    found = rows[:0]
    for row in rows.unique(dim=0).flip(0):
        rest = row - row @ torch.linalg.pinv(found) @ found
        if rest.norm() > 1e-9 * row.norm():
            found = torch.cat([found, row[None]])
    return found
