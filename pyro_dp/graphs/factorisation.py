"""Find the matrix products among a graph's outputs, and hand out their factors instead."""

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


def factorised(
    graph: GraphModule, *, fused: bool, others: int = 1
) -> tuple[GraphModule, list[bool | None]]:
    """Hand out the factors of all outputs but the last that are products worth it.

    :param others: so many last outputs stay what they are.
    :param fused: the graph will be compiled, so that small products are never stored.
    :returns: a graph with two outputs in place of each of these; and for each output whether it is
        the transpose of their product, or None where it is handed out itself.
    """
    new = Graph()
    copies: dict[Node, Node] = {}
    outputs: Any = new.graph_copy(graph.graph, copies)
    found: list[bool | None] = []
    results = []
    (original,) = graph.graph.find_nodes(op="output")
    for node, copy in zip(arguments(original)[0][:-others], outputs[:-others], strict=True):
        factors, transposed = _product(node, fused) or ((), None)
        results += [copies[factor] for factor in factors] or [copy]
        found.append(transposed)
    results += outputs[-others:]
    new.output(results)
    new.eliminate_dead_code()
    return GraphModule(graph, new), found


def _product(node: Node, fused: bool) -> tuple[tuple[Node, Node], bool] | None:
    """The factors of a node that is a batched product, seen through views, and if transposed."""
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
    return (left, right), transposed


def _swaps_last(node: Node, dims: int) -> bool:
    if node.target is _OPS.permute.default:
        return list(arguments(node)[1]) == [0, 2, 1]
    return dims == 3 and {d % 3 for d in arguments(node)[1:]} == {1, 2}
