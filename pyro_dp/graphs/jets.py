"""Numbers of a traced graph with their first two derivatives in few directions.

A direction is a scalar of each record. The derivatives are carried forward, operation by operation.
They keep the shapes in which they differ. So a scale that is alike at all nodes of a quadrature
costs as much as one number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pyro_dp.graphs.linearity import LINEAR
from pyro_dp.graphs.simplify import are_written
from pyro_dp.graphs.tracing import NotTraceable

Number = Tensor | float
Pair = tuple[int, int]
ALONG = -1  # the direction of a whole axis: of its elements, each in its place
_VIEWS = {"alias", "clone", "contiguous", "detach", "expand", "squeeze", "unsqueeze", "view"}
_VIEWS |= {"_to_copy", "_unsafe_view"}


@dataclass(frozen=True, eq=False)
class Jet:
    """A tensor and its derivatives, which broadcast with it.

    :param second: by pairs of directions, the smaller one first.
    """

    value: Tensor
    first: dict[int, Number] = field(default_factory=dict)
    second: dict[Pair, Number] = field(default_factory=dict)

    def each(self, function: Callable[[Number], Number]) -> "Jet":
        """A linear function of all of it."""
        value = function(self.value)
        assert isinstance(value, Tensor)
        first = {i: function(x) for i, x in self.first.items()}
        return Jet(value, first, {pair: function(x) for pair, x in self.second.items()})


def composed(
    value: Tensor, gradient: Sequence[Number], hessian: Sequence[Number], jets: Sequence[Jet]
) -> Jet:
    """A function of these jets, by its derivatives.

    :param hessian: the lower triangle, by rows.
    """
    first: dict[int, Number] = {}
    second: dict[Pair, Number] = {}
    for slope, jet in zip(gradient, jets, strict=True):
        for i, x in jet.first.items():
            _add(first, i, _times(slope, x))
        for pair, x in jet.second.items():
            _add(second, pair, _times(slope, x))
    bends = iter(hessian)
    for a, one in enumerate(jets):
        for b, other in enumerate(jets[: a + 1]):
            bend = next(bends)
            for i, x in one.first.items():
                for k, y in other.first.items():
                    if a != b or i <= k:
                        twice = 2.0 if a != b and i == k else 1.0
                        _add(second, (min(i, k), max(i, k)), _times(bend, _times(twice * x, y)))
    return Jet(value, first, second)


def total(jets: Sequence[Jet]) -> Jet:
    """Their sum."""
    ones, zeros = [1.0] * len(jets), [0.0] * (len(jets) * (len(jets) + 1) // 2)
    return composed(sum((x.value for x in jets[1:]), jets[0].value), ones, zeros, jets)


def log_softmax(jet: Jet, dim: int) -> Jet:
    """:raises NotTraceable: a direction lies along the axis."""
    if ALONG in jet.first:
        raise NotTraceable("a whole axis is summed over")
    value = jet.value.log_softmax(dim)
    weights = value.exp()

    def mean(x: Number) -> Number:
        return (weights * x).sum(dim, keepdim=True) if isinstance(x, Tensor) else x

    means = {i: mean(x) for i, x in jet.first.items()}
    first = {i: x - means[i] for i, x in jet.first.items() if isinstance(x, Tensor)}
    second: dict[Pair, Number] = {}
    for i, x in jet.second.items():
        _add(second, i, x - mean(x))
    for i, x in first.items():
        for k, y in first.items():
            if i <= k:
                _add(second, (i, k), -mean(x * y))
    return Jet(value, first, second)


def _times(x: Number, y: Number) -> Number:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, float) and one in (0.0, 1.0):
            return other if one else 0.0
    return x * y


def _add(sums: dict, key: Any, x: Number) -> None:
    if not (isinstance(x, float) and x == 0.0):
        sums[key] = sums[key] + x if key in sums else x


def _exp(x: Tensor) -> tuple[Tensor, Number, Number]:
    y = x.exp()
    return y, y, y


def _log(x: Tensor) -> tuple[Tensor, Number, Number]:
    y = x.reciprocal()
    return x.log(), y, -y.square()


def _reciprocal(x: Tensor) -> tuple[Tensor, Number, Number]:
    y = x.reciprocal()
    return y, -y.square(), 2 * y**3


def _sigmoid(x: Tensor) -> tuple[Tensor, Number, Number]:
    y = x.sigmoid()
    slope = y * (1 - y)
    return y, slope, slope * (1 - 2 * y)


def _power(x: Tensor, n: float) -> tuple[Tensor, Number, Number]:
    if n == 2:
        return x.square(), 2 * x, 2.0
    return x**n, n * x ** (n - 1), n * (n - 1) * x ** (n - 2)


_CURVES: Mapping[str, Callable[..., tuple[Tensor, Number, Number]]] = {
    "exp": _exp,
    "log": _log,
    "pow": _power,
    "reciprocal": _reciprocal,
    "sigmoid": _sigmoid,
}


class JetGraph:
    """Some nodes of a graph as functions of others.

    :param wanted: the nodes.
    :param leaves: those that are given.
    :raises NotTraceable: an operation has no rule here.
    """

    def __init__(self, graph: GraphModule, wanted: Sequence[Node], leaves: Sequence[Node]):
        self._graph, self._wanted, self._leaves = graph, wanted, leaves
        self._inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        needed, waiting = set(leaves), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        if are_written(graph, needed):
            raise NotTraceable("it writes to its numbers")
        self._nodes = [n for n in graph.graph.nodes if n in needed - set(leaves)]
        self.needed = [node in needed for node in self._inputs]

    def __call__(self, inputs: Sequence[Tensor | None], leaves: Sequence[Jet]) -> list[Any]:
        """Jets of what depends on the leaves; tensors of all else.

        :param inputs: of the graph; None: it is not needed.
        """
        known: dict[Node, Any] = dict(zip(self._leaves, leaves, strict=True))
        given = dict(zip(self._inputs, inputs, strict=True))
        for node in self._nodes:
            if node.op == "placeholder":
                known[node] = given[node]
            elif node.op == "get_attr":
                known[node] = getattr(self._graph, str(node.target))
            elif any(isinstance(known[each], Jet) for each in node.all_input_nodes):
                known[node] = self._applied(node, known)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [known[node] for node in self._wanted]

    def _applied(self, node: Node, known: dict[Node, Any]) -> Jet:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        args: Any = torch.fx.map_arg(node.args, known.__getitem__)
        first = args[0]
        if name in LINEAR and isinstance(first, Jet):
            return _linear(node, name, first, args[1:])
        if name == "cat" and isinstance(first, list | tuple):
            return _joined(first, *args[1:])
        if name in ("add", "sub", "rsub") and len(args) == 2 and not node.kwargs:
            signs = {"add": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}[name]
            terms = [
                x.each(lambda y, sign=sign: _times(sign, y)) if isinstance(x, Jet) else sign * x
                for x, sign in zip(args, signs, strict=True)
            ]
            jets = [x for x in terms if isinstance(x, Jet)]
            if len(jets) == 2:
                return total(jets)
            (constant,) = (x for x in terms if not isinstance(x, Jet))
            return Jet(jets[0].value + constant, jets[0].first, jets[0].second)
        if name in ("mul", "div") and len(args) == 2 and not node.kwargs:
            one, other = args
            if name == "div":
                other = _curve("reciprocal", other) if isinstance(other, Jet) else 1 / other
            if isinstance(one, Jet) and isinstance(other, Jet):
                slopes = [other.value, one.value]
                return composed(one.value * other.value, slopes, [0.0, 1.0, 0.0], [one, other])
            jet, factor = (one, other) if isinstance(one, Jet) else (other, one)
            return jet.each(lambda x: x * factor)
        if name in _CURVES and isinstance(first, Jet):
            return _curve(name, first, *args[1:])
        if name == "_log_softmax":
            return log_softmax(first, args[1])
        if name == "logsumexp":
            whole = log_softmax(first, args[1][0])  # x - logsumexp(x)
            lost = total([first, whole.each(lambda x: -1.0 * x)])
            ((dim,), *keep) = args[1:]
            return lost.each(lambda x: _first_of(x, lost.value, dim, bool(keep and keep[0])))
        raise NotTraceable(f"{name or node.target} has no rule")


def _first_of(x: Number, value: Tensor, dim: int, keep: bool) -> Number:
    if not isinstance(x, Tensor):
        return x
    found = x.expand(value.shape).narrow(dim, 0, 1)
    return found if keep else found.squeeze(dim)


def _curve(name: str, jet: Jet, *args: Any) -> Jet:
    value, slope, bend = _CURVES[name](jet.value, *args)
    return composed(value, [slope], [bend], [jet])


def _linear(node: Node, name: str, jet: Jet, args: Sequence[Any]) -> Jet:
    """An operation that is linear in its first argument."""
    target: Any = node.target
    if name == "constant_pad_nd" and any(args[1:]):
        raise NotTraceable("it is padded with a number")
    if name in ("view", "_unsafe_view"):
        target = Tensor.reshape
    shape = list(node.meta["val"].shape)
    before = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if ALONG in jet.first:
        # The axis is the last one, and may be shorter than in the graph.
        if name not in _VIEWS or [n for n in before if n > 1] != [n for n in shape if n > 1]:
            raise NotTraceable(f"{name} moves a whole axis")
        shape[-1] = jet.value.shape[-1]
        return jet.each(lambda x: x.expand(jet.value.shape).reshape(shape) if _is(x) else x)

    def apply(x: Number) -> Number:
        if not isinstance(x, Tensor):
            if name in _VIEWS or name in ("index", "select", "slice"):
                return x
            x = jet.value.new_full((), x)
        return target(x.expand(jet.value.shape), *args, **node.kwargs)

    return jet.each(apply)


def _is(x: Number) -> bool:
    return isinstance(x, Tensor)


def _joined(parts: Sequence[Any], dim: int = 0) -> Jet:
    jets = [x if isinstance(x, Jet) else Jet(x) for x in parts]
    if any(ALONG in jet.first for jet in jets):
        raise NotTraceable("a whole axis is joined with another")

    def cat(derivatives: Sequence[Mapping], key: Any) -> Tensor:
        return torch.cat(
            [
                torch.as_tensor(each.get(key, 0.0)).to(jet.value).expand(jet.value.shape)
                for each, jet in zip(derivatives, jets, strict=True)
            ],
            dim,
        )

    first, second = [jet.first for jet in jets], [jet.second for jet in jets]
    return Jet(
        torch.cat([jet.value for jet in jets], dim),
        {key: cat(first, key) for key in set().union(*first)},
        {key: cat(second, key) for key in set().union(*second)},
    )
