"""The structure of a graph: affine nodes, and outputs that are products or gradients of tables."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from pyro_dp.graphs.simplify import arguments, shape

_OPS = torch.ops.aten
# Operations that are linear in their first argument, or in a list of tensors.
LINEAR = {
    *("_to_copy", "_unsafe_view", "alias", "cat", "clone", "contiguous", "cumsum", "detach"),
    *("diagonal", "expand", "flip", "index", "index_select", "mean", "neg", "permute", "repeat"),
    *("constant_pad_nd", "select", "slice", "split", "split_with_sizes", "squeeze", "stack"),
    *("sum", "t", "transpose", "unbind", "unsqueeze", "view"),
}
_SUMS = {"add", "rsub", "sub"}
_PRODUCTS = {"bmm", "dot", "mm", "mul", "mv"}  # affine if only one factor depends on the input


def affine_nodes(graph: GraphModule) -> tuple[set[Node], set[Node]]:
    """The nodes that depend on the first input, and those among them that are affine in it."""
    first, *others = graph.graph.nodes
    dependent, affine = {first}, {first}
    for node in others:
        inputs = [each for each in node.all_input_nodes if each in dependent]
        if node.op != "output" and inputs:
            dependent.add(node)
            if affine.issuperset(inputs) and _is_affine(node, dependent):
                affine.add(node)
    return dependent, affine


def _is_affine(node: Node, dependent: set[Node]) -> bool:
    """Whether a node is affine in its dependent arguments."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return False
    args = node.args
    first = args[0] in dependent or isinstance(args[0], list | tuple)
    others = [each for each in args[1:] if isinstance(each, Node) and each in dependent]
    if name in LINEAR or name == "div":
        return first and not others
    if name in _SUMS:
        return True
    if name in _PRODUCTS:
        return not (first and others)
    return name == "addmm" and not (args[1] in dependent and args[2] in dependent)


_VIEWS = {
    *(_OPS.clone.default, _OPS.squeeze.dim, _OPS.squeeze.default, _OPS.unsqueeze.default),
    *(_OPS.view.default, _OPS._unsafe_view.default),
}
_TRANSPOSED = {_OPS.transpose.int, _OPS.permute.default}


@dataclass(frozen=True)
class Product:
    """An output that is the product of left factors (B, p, k) and right factors (B, k, q).

    :param transposed: whether the output is the transpose of the product.
    """

    transposed: bool


@dataclass(frozen=True)
class Lookup:
    """An output that is the gradient of a table from which each record reads a few rows.

    Its factors are the gradients with respect to the values read, (B, T, q), and the indices of
    their rows, (B, T). The indices of record b are larger by b times ``size``.

    :param size: number of rows of the table.
    :param padding: the row without a gradient; ``None``: all rows have one.
    """

    size: int
    padding: int | None = None


Form = Product | Lookup | None


def factorised(
    graph: GraphModule, *, fused: bool, others: int = 1
) -> tuple[GraphModule, list[Form]]:
    """A graph that returns factors instead of products, for outputs where that saves work.

    :param others: number of last outputs that stay unchanged.
    :param fused: whether the graph will be compiled, so that small products are never stored.
    :returns: the graph, with two factors for each such output, and the form of each output, without
        the last ones. ``None`` stands for an unchanged output.
    """
    new = Graph()
    copies: dict[Node, Node] = {}
    outputs: Any = new.graph_copy(graph.graph, copies)
    found: list[Form] = []
    results = []
    (original,) = graph.graph.find_nodes(op="output")
    for node, copy in zip(arguments(original)[0][:-others], outputs[:-others], strict=True):
        form, factors = _lookup(new, copies, node)
        terms = _terms(node) if form is None else None
        if terms and _worth_it(terms, fused):
            form, factors = _product(new, copies, terms)
        results += factors or [copy]
        found.append(form)
    results += outputs[-others:]
    new.output(results)
    new.eliminate_dead_code()
    return _LazyGraphModule(graph, new), found


@dataclass(frozen=True)
class _Term:
    """A product for each record, (B, p, k) times (B, k, q).

    :param left: (B, p, k), or (B p, k).
    :param right: (B, k, q), or (k, q) for all records.
    :param sizes: B, p, k, q.
    :param transposed: whether the term is the transpose of the product.
    """

    left: Node
    right: Node
    sizes: tuple[int, int, int, int]
    transposed: bool

    def factors(self, graph: Graph, copies: dict[Node, Node]) -> list[Node]:
        count, rows, inner, columns = self.sizes
        left, right = copies[self.left], copies[self.right]
        if len(shape(self.left)) == 2:
            left = graph.call_function(_OPS.reshape.default, (left, (count, rows, inner)))
        if len(shape(self.right)) == 2:
            right = graph.call_function(_OPS.expand.default, (right, (count, inner, columns)))
        return [left, right]


def _terms(node: Node, transposed: bool = False) -> list[_Term] | None:
    """The batched products whose sum is this node, also behind views. ``None``: it is no such sum.

    The gradient of a weight that is used several times has one product for each use.

    :param transposed: whether to find the terms of the node's transpose.
    """
    while node.target in _VIEWS | _TRANSPOSED:
        before = arguments(node)[0]
        if node.target in _TRANSPOSED:
            if not _swaps_last(node, len(shape(before))):
                return None
            transposed = not transposed
        elif before.target is _OPS.mm.default and len(shape(node)) == 3:
            left, right = arguments(before)
            (count, rows, columns), inner = shape(node), shape(left)[1]
            if shape(before) != (count * rows, columns):
                return None
            return [_Term(left, right, (count, rows, inner, columns), transposed)]
        elif shape(before) != shape(node):
            # Another shape is fine if the view only flattens, and not between two transpositions.
            if transposed or shape(before)[:1] != shape(node)[:1]:
                return None
        node = before
    if node.target is _OPS.add.Tensor and not node.kwargs and len(shape(node)) == 3:
        parts = [each for each in arguments(node) if isinstance(each, Node)]
        if len(parts) != 2 or any(shape(each) != shape(node) for each in parts):
            return None
        one, other = (_terms(each, transposed) for each in parts)
        return one + other if one and other else None
    if node.target is not _OPS.bmm.default:
        return None
    left, right = arguments(node)
    (count, rows, inner), columns = shape(left), shape(right)[2]
    return [_Term(left, right, (count, rows, inner, columns), transposed)]


def _worth_it(terms: list[_Term], fused: bool) -> bool:
    """Whether Gram matrices of the factors take less work than the entries of the product."""
    _, rows, _, columns = terms[0].sizes
    inner = sum(each.sizes[2] for each in terms)
    return inner**2 * (rows + columns) < rows * inner * columns or (inner == 1 and not fused)


def _product(
    graph: Graph, copies: dict[Node, Node], terms: list[_Term]
) -> tuple[Product, list[Node]]:
    """The form of a sum of products, and its factors."""
    if len(terms) == 1:
        return Product(terms[0].transposed), terms[0].factors(graph, copies)
    call, pairs = graph.call_function, []
    for term in terms:
        left, right = term.factors(graph, copies)
        if term.transposed:
            left, right = (call(_OPS.transpose.int, (each, 1, 2)) for each in (right, left))
        pairs.append((left, right))
    lefts, rights = map(list, zip(*pairs, strict=True))
    return Product(False), [call(_OPS.cat.default, (lefts, 2)), call(_OPS.cat.default, (rights, 1))]


def _lookup(graph: Graph, copies: dict[Node, Node], node: Node) -> tuple[Form, list[Node]]:
    """The form of a batch of gradients of an embedding's table, also behind views, and its factors.

    No other node may use the views, because it could write into them. The only exception writes
    zeros for padding.
    """
    count, zeros, row = shape(node)[0], None, None
    selected = [user for user in node.users if user.target is _OPS.select.int]
    if len(selected) == 1 and len(node.users) == 2 and len(selected[0].users) == 1:
        (zeros,), (_, axis, row) = selected[0].users, arguments(selected[0])
        fills = zeros.target in (_OPS.fill_.Scalar, _OPS.zero_.default)
        if not fills or any(arguments(zeros)[1:]) or zeros.users or axis != 1:
            return None, []
        node = arguments(node)[0]
    while node.target in _VIEWS and len(node.users) == 1:
        node = arguments(node)[0]
    if node.target is not _OPS.embedding_dense_backward.default or len(node.users) > 1:
        return None, []
    gradients, indices, size, padding, by_frequency = arguments(node)
    total, columns = indices.meta["val"].numel(), shape(node)[1]
    if padding >= 0 or by_frequency or size % count or total % count:
        return None, []
    each, size = total // count, size // count
    if each * (each + columns) >= size * columns:  # the rows take no less work than the table
        return None, []
    if zeros is not None:  # this node would keep the table alive
        graph.erase_node(copies[zeros])
    shapes = {gradients: (count, each, columns), indices: (count, each)}
    reshape = _OPS.reshape.default
    factors = [graph.call_function(reshape, (copies[x], sizes)) for x, sizes in shapes.items()]
    return Lookup(size, row), factors


def _swaps_last(node: Node, dims: int) -> bool:
    if node.target is _OPS.permute.default:
        return list(arguments(node)[1]) == [0, 2, 1]
    return dims == 3 and {d % 3 for d in arguments(node)[1:]} == {1, 2}
