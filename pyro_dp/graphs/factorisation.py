"""Find the matrix products among a graph's outputs, and hand out their factors instead."""

import torch
from torch.fx import Graph, GraphModule, Node

_OPS = torch.ops.aten
_SAME = {
    _OPS.clone.default,
    _OPS.squeeze.dim,
    _OPS.squeeze.default,
    _OPS.unsqueeze.default,
    _OPS.view.default,
    _OPS._unsafe_view.default,
}
_TRANSPOSED = {_OPS.transpose.int, _OPS.permute.default}


def factorised(graph: GraphModule, *, fused: bool) -> tuple[GraphModule, list[bool | None]]:
    """Hand out the factors of all outputs but the last that are products worth it.

    :param fused: the graph will be compiled, so that small products are never stored.
    :returns: a graph with two outputs in place of each of these; and for each output whether it is
        the transpose of their product, or None where it is handed out itself.
    """
    new = Graph()
    copies: dict[Node, Node] = {}
    outputs = new.graph_copy(graph.graph, copies)
    found: list[bool | None] = []
    results = []
    (original,) = graph.graph.find_nodes(op="output")
    for node, copy in zip(original.args[0][:-1], outputs[:-1], strict=True):
        product = _product(node, fused)
        if product is None:
            results.append(copy)
            found.append(None)
        else:
            factors, transposed = product
            results.extend(copies[factor] for factor in factors)
            found.append(transposed)
    results.append(outputs[-1])
    new.output(results)
    new.eliminate_dead_code()
    return GraphModule(graph, new), found


def _product(node: Node, fused: bool) -> tuple[tuple[Node, Node], bool] | None:
    """The factors of a node that is a batched product, seen through views, and if transposed."""
    transposed = False
    while node.target in _SAME | _TRANSPOSED:
        before = node.args[0]
        if node.target in _TRANSPOSED:
            if not _swaps_last(node, len(_shape(before))):
                return None
            transposed = not transposed
        elif _shape(before) != _shape(node):
            # Flattened it is the same, if it was not reshaped between two transpositions.
            if transposed or _shape(before)[:1] != _shape(node)[:1]:
                return None
        node = before
    if node.target is not _OPS.bmm.default:
        return None
    left, right = node.args
    (_, rows, inner), columns = _shape(left), _shape(right)[2]
    # Worth it where Gram matrices of the factors are less work than the product's own entries.
    if inner**2 * (rows + columns) >= rows * inner * columns and (fused or inner > 1):
        return None
    return (left, right), transposed


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _swaps_last(node: Node, dims: int) -> bool:
    if node.target is _OPS.permute.default:
        return list(node.args[1]) == [0, 2, 1]
    return dims == 3 and {d % 3 for d in node.args[1:]} == {1, 2}
