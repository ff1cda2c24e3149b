"""Per-record gradients that are matrix products: their norms and sums, without the matrices.

The gradient of a linear layer's weight is, for one record, an outer product of what comes back to
the layer and what went in. The norm of an outer product is the product of the norms, and a weighted
sum of them over records is one matrix product (Goodfellow 2015, arXiv 1510.01799; Li et al. 2021,
arXiv 2110.05679). They are found in the traced graph, so that any model may contain them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
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


@dataclass(frozen=True)
class Product:
    """Where an output of a graph is a batched matrix product.

    :param transposed: whether the output is its transpose.
    """

    transposed: bool


@dataclass
class OuterProducts:
    """A block of the records' contributions: left @ right, flattened, of each record.

    :param left: (B, p, k).
    :param right: (B, k, q).
    :param transposed: of each record; before it is flattened.
    """

    left: Tensor
    right: Tensor
    transposed: bool = False

    def squared_norms(self) -> Tensor:
        """(B, 1) in float64; never below the true ones."""
        if self.left.shape[2] == 1:
            squares = _squares(self.left.flatten(1)) * _squares(self.right.flatten(1))
        else:
            left, right = self.left.double(), self.right.double()
            ours, theirs = left.mT @ left, right @ right.mT  # (B, k, k)
            squares = (ours * theirs).sum(dim=(1, 2)).clamp(min=0.0)
            # That sum has terms of both signs: what rounding may take away is put back. An entry
            # of a Gram matrix is rounded in proportion to the norms of the two vectors.
            own, other = (each.diagonal(dim1=1, dim2=2) for each in (ours, theirs))
            size = (own * other).sqrt().sum(dim=1).square()
            terms = left.shape[1] + right.shape[2] + left.shape[2] ** 2 + 8
            squares = squares + terms * torch.finfo(torch.float64).eps * size
        return squares.unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(p q,) in float64; where a weight (B, 1) is zero, the record does not matter."""
        left, right = finite(self.left).double(), finite(self.right).double()
        if left.shape[1] < right.shape[2]:
            left = left * weights.unsqueeze(2)
        else:
            right = right * weights.unsqueeze(2)
        # (p, B k) (B k, q)
        total = left.permute(1, 0, 2).flatten(1) @ right.flatten(0, 1)
        return (total.T if self.transposed else total).flatten()

    def dense(self) -> Tensor:
        """(B, p q) in float64."""
        left, right = self.left.double(), self.right.double()
        # A batched product of vectors takes twenty times as long as their multiplication.
        products = left * right if left.shape[2] == 1 else left @ right
        return (products.mT if self.transposed else products).flatten(1)


@dataclass
class Matrices:
    """A block that is held as it is.

    :param values: (B, ...).
    """

    values: Tensor

    def squared_norms(self) -> Tensor:
        """As :meth:`OuterProducts.squared_norms`."""
        return _squares(self._flat()).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As :meth:`OuterProducts.weighted_sum`."""
        return torch.where(weights > 0, self._flat().double() * weights, 0.0).sum(dim=0)

    def dense(self) -> Tensor:
        """As :meth:`OuterProducts.dense`."""
        return self._flat().double()

    def _flat(self) -> Tensor:
        return self.values.reshape(len(self.values), -1)


@dataclass
class Joined:
    """Blocks that are clipped jointly.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`.
    """

    parts: Sequence[OuterProducts | Matrices]

    @staticmethod
    def of(outputs: Sequence[Tensor], products: Sequence[Product | None]) -> "Joined":
        """From the outputs of a graph that :func:`factorised` made, but for the last one."""
        rest = iter(outputs)
        parts = [
            Matrices(next(rest))
            if product is None
            else OuterProducts(next(rest), next(rest), product.transposed)
            for product in products
        ]
        return Joined(parts)

    def norms(self) -> Tensor:
        squares = [part.squared_norms() for part in self.parts]
        return sum(squares[1:], squares[0]).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        sums = [part.weighted_sum(weights) for part in self.parts]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)


def _squares(rows: Tensor) -> Tensor:
    """Squared norms of rows (B, n), (B,) in float64."""
    return rows.double().square().sum(dim=1)


def finite(values: Tensor) -> Tensor:
    """Zero in place of NaN and infinity: a record of weight zero must not matter."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def factorised(graph: GraphModule, *, fused: bool) -> tuple[GraphModule, list[Product | None]]:
    """Hand out the factors of all outputs but the last that are products worth it.

    :param fused: the graph will be compiled, so that small products are never stored.
    :returns: a graph with two outputs in place of each of these, and which they are.
    """
    new = Graph()
    copies: dict[Node, Node] = {}
    outputs = new.graph_copy(graph.graph, copies)
    found: list[Product | None] = []
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
            found.append(Product(transposed))
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
