"""Values of a traced graph with their first two derivatives in few directions.

The graph's tensors have records along their first axis. Here that axis comes last, after a new axis
of draws; the others keep their order. A direction is an input number of each draw and record.
Derivatives are carried forward, operation by operation. They stay short along axes on which they
are constant. So the scale of a draw, which all records share, costs next to nothing.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pyro_dp.graphs.simplify import are_written, shape
from pyro_dp.graphs.tracing import NotTraceable

Number = Tensor | float
Pair = tuple[int, int]
ALONG = -1  # one direction for each element of an axis: the last one before draws
VIEWS = {"_unsafe_view", "alias", "clone", "detach", "expand", "squeeze", "unsqueeze", "view"}


@dataclass(frozen=True, eq=False)
class Jet:
    """A tensor and its derivatives, which broadcast with it.

    :param second: by pairs of directions, the smaller one first.
    """

    value: Tensor
    first: dict[int, Number] = field(default_factory=dict)
    second: dict[Pair, Number] = field(default_factory=dict)

    def each(self, function: Callable[[Tensor], Tensor]) -> "Jet":
        """Apply a linear function to all tensors. Derivatives that are plain numbers stay."""

        def of(x: Number) -> Number:
            return function(x) if isinstance(x, Tensor) else x

        first = {i: of(x) for i, x in self.first.items()}
        return Jet(function(self.value), first, {pair: of(x) for pair, x in self.second.items()})


def composed(
    value: Tensor, gradient: Sequence[Number], hessian: Sequence[Number], jets: Sequence[Jet]
) -> Jet:
    """The jet of a function of jets, from the function's derivatives.

    :param hessian: the lower triangle, by rows.
    """
    first: dict[int, Number] = {}
    second: dict[Pair, Number] = {}
    for slope, jet in zip(gradient, jets, strict=True):
        for i, x in jet.first.items():
            _add(first, i, _times(slope, x))
        for pair, x in jet.second.items():
            _add(second, pair, _times(slope, x))
    curvatures = iter(hessian)
    for a, one in enumerate(jets):
        for b, other in enumerate(jets[: a + 1]):
            curvature = next(curvatures)
            if isinstance(curvature, float) and curvature == 0.0:
                continue
            for i, x in one.first.items():
                for k, y in other.first.items():
                    if a != b or i <= k:
                        factor = 2.0 if a != b and i == k else 1.0
                        term = _times(curvature, _times(factor, _times(x, y)))
                        _add(second, (min(i, k), max(i, k)), term)
    return Jet(value, first, second)


def total(jets: Sequence[Jet], signs: Sequence[float] | None = None) -> Jet:
    """The sum of jets, each with its sign; by default all are positive."""
    signs = signs or [1.0] * len(jets)
    values: Any = [_times(sign, jet.value) for sign, jet in zip(signs, jets, strict=True)]
    hessian = [0.0] * (len(jets) * (len(jets) + 1) // 2)
    return composed(sum(values[1:], values[0]), signs, hessian, jets)


def log_sum_exp(jet: Jet, axis: int) -> Jet:
    """``logsumexp`` over an axis, which stays with length 1.

    :raises NotTraceable: the axis has a direction for each of its elements.
    """
    if ALONG in jet.first:
        raise NotTraceable("a whole axis is summed over")
    value = jet.value.logsumexp(axis, keepdim=True)
    first, second = averages(jet, (jet.value - value).exp_(), axis)
    return Jet(value, dict(first), dict(second))


def averages(jet: Jet, weights: Tensor, *axes: int) -> tuple[dict[int, Tensor], dict[Pair, Tensor]]:
    """The average gradient, and the average of the Hessian plus the centred gradient's square.

    In the direction of a whole axis, each element has its own sum, and the gradient is not centred.

    :param weights: weights of the average, which sum to one over all axes.
    """
    weighted = {i: weights * x for i, x in jet.first.items()}
    first = {i: _summed(x, i, axes) for i, x in weighted.items()}
    centred = {i: x if i == ALONG else x - first[i] for i, x in jet.first.items()}
    second: dict[Pair, Tensor] = {}
    for i, k in itertools.combinations_with_replacement(sorted(centred), 2):
        each = (weighted[i] if i == ALONG else weights * centred[i]) * centred[k]
        hessian = jet.second.get((i, k))
        if hessian is not None:
            each = torch.addcmul(each, weights, torch.as_tensor(hessian).to(each))
        second[i, k] = _summed(each, i, axes)
    return first, second


def _summed(x: Tensor, direction: int, axes: Sequence[int]) -> Tensor:
    return x.sum([a for a in axes if a or direction != ALONG], keepdim=True)


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
    """Jets of some nodes of a graph as functions of others.

    :param wanted: nodes to compute.
    :param leaves: nodes whose jets the caller passes.
    :raises NotTraceable: memory of these nodes is overwritten.
    """

    def __init__(self, graph: GraphModule, wanted: Sequence[Node], leaves: Sequence[Node]):
        self._graph, self._wanted, self._leaves = graph, wanted, leaves
        self._inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._length = shape(self._inputs[0])[0]
        needed, waiting = set(leaves), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        if are_written(graph, needed):
            raise NotTraceable("it writes to its numbers")
        self._nodes = [n for n in graph.graph.nodes if n in needed - set(leaves)]

    def __call__(self, inputs: Sequence[Tensor], leaves: Sequence[Jet], count: int) -> list[Any]:
        """Jets of nodes that depend on the leaves; for others, tensors in the same axes.

        :param inputs: inputs of the graph, for as many records as when it was traced.
        :param count: number of records to use, from the first.
        :raises NotTraceable: an operation has no rule here.
        """
        values: dict[Node, Any] = dict(zip(self._leaves, leaves, strict=True))
        by_node = dict(zip(self._inputs, inputs, strict=True))

        def in_axes(node: Node) -> Any:
            """A node's value, with tensors in the axes of jets."""
            x = values[node]
            if isinstance(x, Tensor):
                if x.dim() and x.shape[0] == self._length:
                    return x[:count].movedim(0, -1).unsqueeze(-2)
                return x[..., None, None]
            return x

        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = by_node[node]
            elif node.op == "get_attr":
                values[node] = getattr(self._graph, str(node.target))
            elif any(isinstance(values[each], Jet) for each in node.all_input_nodes):
                values[node] = self._applied(node, torch.fx.map_arg(node.args, in_axes))
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
        return [in_axes(node) for node in self._wanted]

    def _applied(self, node: Node, args: Any) -> Jet:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        first, *others = args
        here = shape(node)
        if node.kwargs or not here or here[0] != self._length:
            raise NotTraceable(f"{name} has no rule")
        if name in ("add", "sub", "rsub") and len(args) == 2:
            signs = {"add": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}[name]
            jets = [x if isinstance(x, Jet) else Jet(torch.as_tensor(x)) for x in args]
            return total(jets, signs)
        if name == "neg":
            return total([first], [-1.0])
        if name in ("mul", "div") and len(args) == 2:
            (other,) = others
            if name == "div":
                other = _curve("reciprocal", other) if isinstance(other, Jet) else 1 / other
            if not isinstance(first, Jet):
                first, other = other, first
            if not isinstance(other, Jet):
                return composed(first.value * other, [other], [0.0], [first])
            slopes = [other.value, first.value]
            return composed(first.value * other.value, slopes, [0.0, 1.0, 0.0], [first, other])
        if name == "cat":
            return _joined(first, _axis(others, here))
        if isinstance(first, Jet) and not any(isinstance(x, Jet) for x in others):
            before = shape(node.args[0])[1:]  # type: ignore[arg-type]
            if name in _CURVES:
                return _curve(name, first, *others)
            if name in VIEWS:
                return _viewed(first, before, here[1:])
            if name == "_log_softmax":
                return total([first, log_sum_exp(first, _axis(others, here))], [1.0, -1.0])
            if name == "logsumexp" and others[1:] == [True]:
                return log_sum_exp(first, _axis(others[0], here))
            if ALONG not in first.first:
                return _moved(name, _spread(first, before), others, len(before) + 1)
        raise NotTraceable(f"{name or node.target} has no rule")


def _axis(args: Sequence[Any], like: Sequence[int]) -> int:
    """The axis of jets for a node's axis, which is the first argument."""
    axis = (args[0] if args else 0) % len(like)
    if axis == 0:
        raise NotTraceable("records are joined")
    return axis - 1


def _curve(name: str, jet: Jet, *args: Any) -> Jet:
    value, slope, curvature = _CURVES[name](jet.value, *args)
    return composed(value, [slope], [curvature], [jet])


def _spread(jet: Jet, before: Sequence[int]) -> Jet:
    """The jet with all tensors expanded, except along draws and records."""
    return jet.each(lambda x: x.expand(*before, *x.shape[-2:]))


def _viewed(jet: Jet, before: Sequence[int], after: Sequence[int]) -> Jet:
    if ALONG in jet.first:
        if [n for n in before if n > 1] != [n for n in after if n > 1] or before[-1] != after[-1]:
            raise NotTraceable("a whole axis is moved")
        length = jet.value.shape[-3]  # it may be shorter than in the graph
        before, after = [*before[:-1], length], [*after[:-1], length]
    if len(before) == len(after) and all(n in (1, m) for n, m in zip(before, after, strict=True)):
        return jet
    return _spread(jet, before).each(lambda x: x.reshape(*after, *x.shape[-2:]))


def _moved(name: str, jet: Jet, args: Sequence[Any], dim: int) -> Jet:
    """The result of a linear operation.

    :param dim: number of the node's axes.
    """
    if name == "constant_pad_nd" and not any(args[1:]) and len(args[0]) < 2 * dim:
        return _whole(jet).each(lambda x: torch.nn.functional.pad(x, [0, 0, 0, 0, *args[0]]))
    if name == "cumsum":
        axis = _axis(args, range(dim))
        return _whole(jet).each(lambda x: x.cumsum(axis))
    if name == "select":
        axis = _axis(args, range(dim))
        return jet.each(lambda x: x.select(axis, args[1]))
    if name == "slice":
        axis = _axis(args, range(dim))
        return jet.each(lambda x: x[(slice(None),) * axis + (slice(*args[1:]),)])
    if name == "index" and args[0][0] is None:
        chosen = [x for x in args[0] if x is not None]
        if len(chosen) == 1 and chosen[0].dim() == 3 and chosen[0].shape[1:] == (1, 1):
            keys = tuple(slice(None) if x is None else x[:, 0, 0] for x in args[0][1:])
            return jet.each(lambda x: x[keys])
    raise NotTraceable(f"{name} has no rule")


def _whole(jet: Jet) -> Jet:
    """The jet with tensors instead of plain numbers."""

    def whole(x: Number) -> Tensor:
        return x if isinstance(x, Tensor) else jet.value.new_full(jet.value.shape[:-2] + (1, 1), x)

    first: dict[int, Number] = {i: whole(x) for i, x in jet.first.items()}
    return Jet(jet.value, first, {pair: whole(x) for pair, x in jet.second.items()})


def _joined(parts: Sequence[Any], axis: int) -> Jet:
    jets = [_whole(x if isinstance(x, Jet) else Jet(x)) for x in parts]
    if any(ALONG in jet.first for jet in jets):
        raise NotTraceable("a whole axis is joined with another")
    tail = torch.broadcast_shapes(*(jet.value.shape[-2:] for jet in jets))
    shapes = [(*jet.value.shape[:-2], *tail) for jet in jets]

    def cat(derivatives: Sequence[Mapping]) -> dict:
        keys = dict.fromkeys(key for each in derivatives for key in each)
        zero = jets[0].value.new_zeros(())

        def of(key: Any) -> Tensor:
            pairs = zip(derivatives, shapes, strict=True)
            return torch.cat([each.get(key, zero).expand(x) for each, x in pairs], axis)

        return {key: of(key) for key in keys}

    (value,) = cat([{0: jet.value} for jet in jets]).values()
    return Jet(value, cat([jet.first for jet in jets]), cat([jet.second for jet in jets]))
