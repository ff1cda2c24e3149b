"""Find outputs of a graph that are products or sums of few rows, and hand out their factors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pyro_dp.graphs.simplify import arguments, shape

_OPS = torch.ops.aten
_SAME = {
    *(_OPS.clone.default, _OPS.squeeze.dim, _OPS.squeeze.default, _OPS.unsqueeze.default),
    *(_OPS.view.default, _OPS._unsafe_view.default),
}
_TRANSPOSED = {_OPS.transpose.int, _OPS.permute.default}


@dataclass(frozen=True)
class Product:
    """An output that is the product of left factors (B, p, k) and right factors (B, k, q).

    :param transposed: whether it is the transpose of the product.
    """

    transposed: bool


@dataclass(frozen=True)
class Lookup:
    """An output that is the gradient of a table, of which each record reads a few rows.

    Its factors are the gradients of what was read, (B, T, q), and the rows' numbers, (B, T). Those
    of record b are larger by b times ``size``.

    :param size: number of the table's rows.
    """

    size: int


Form = Product | Lookup | None


def factorised(
    graph: GraphModule, *, fused: bool, others: int = 1
) -> tuple[GraphModule, list[Form]]:
    """Hand out the factors of all outputs but the last that are worth it.

    :param others: so many last outputs stay what they are.
    :param fused: the graph will be compiled, so that small products are never stored.
    :returns: a graph with two outputs in place of each of these; and the form of each output. None:
        it is handed out itself.
    """
    new = Graph()
    copies: dict[Node, Node] = {}
    outputs: Any = new.graph_copy(graph.graph, copies)
    found: list[Form] = []
    results = []
    (original,) = graph.graph.find_nodes(op="output")
    for node, copy in zip(arguments(original)[0][:-others], outputs[:-others], strict=True):
        factors, form = _lookup(node) or _product(node, fused) or ((), None)
        results += [_shaped(new, copies[factor], sizes) for factor, sizes in factors] or [copy]
        found.append(form)
    results += outputs[-others:]
    new.output(results)
    new.eliminate_dead_code()
    return GraphModule(graph, new), found


Factors = tuple[tuple[Node, tuple[int, ...]], ...]  # with the shapes that they are given


def _shaped(graph: Graph, node: Node, sizes: tuple[int, ...]) -> Node:
    if shape(node) == sizes:
        return node
    return graph.call_function(_OPS.reshape.default, (node, sizes))


def _product(node: Node, fused: bool) -> tuple[Factors, Product] | None:
    """The factors of a node that is a batched product, seen through views."""
    transposed = False
    while node.target in _SAME | _TRANSPOSED:
        before = arguments(node)[0]
        if node.target in _TRANSPOSED:
            if not _swaps_last(node, len(shape(before))):
                return None
            transposed = not transposed
        elif shape(before) != shape(node):
            # Flattened it is the same, if it was not reshaped between two transpositions.
            if transposed or shape(before)[:1] != shape(node)[:1]:
                return None
        node = before
    if node.target is not _OPS.bmm.default:
        return None
    left, right = arguments(node)
    (_, rows, inner), columns = shape(left), shape(right)[2]
    # Worth it where Gram matrices of the factors are less work than the product's own entries.
    if inner**2 * (rows + columns) >= rows * inner * columns and (fused or inner > 1):
        return None
    return ((left, shape(left)), (right, shape(right))), Product(transposed)


def _lookup(node: Node) -> tuple[Factors, Lookup] | None:
    """The factors of a node that is a batch of an embedding's gradients, seen through views."""
    count = shape(node)[0]
    while node.target in _SAME:
        (before, *_), users = arguments(node), node.users
        if len(users) > 1:  # one of them may write zeros for padding
            return None
        node = before
    if node.target is not _OPS.embedding_dense_backward.default or len(node.users) > 1:
        return None
    gradients, indices, size, padding, by_frequency = arguments(node)
    each = indices.meta["val"].numel() // count
    if padding >= 0 or by_frequency or size % count or each * count != indices.meta["val"].numel():
        return None
    size, columns = size // count, shape(node)[1]
    if each * (each + columns) >= size * columns:
        return None
    return ((gradients, (count, each, columns)), (indices, (count, each))), Lookup(size)


def _swaps_last(node: Node, dims: int) -> bool:
    if node.target is _OPS.permute.default:
        return list(arguments(node)[1]) == [0, 2, 1]
    return dims == 3 and {d % 3 for d in arguments(node)[1:]} == {1, 2}
