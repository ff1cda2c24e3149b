"""Predictors that are linear in the latents, with coefficients that are affine in a record's row.

Generalised linear models have a(z) = J z + c, with J = J_0 + sum_k row_k J_k and public J_k. For
public T, the product J T of a batch is *one product of the data with public* J_k T, without J
itself. The norm of a record's site, its predictors' variance and its part of the sum follow.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pyro_dp.graphs.factorisation import affine_nodes
from pyro_dp.graphs.simplify import only_reads
from pyro_dp.graphs.tracing import NotTraceable, called_by_torch, trace
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.observation_family import Family
from pyro_dp.records.stand_ins import on_varied, varied
from pyro_dp.utils.linalg import agree, cholesky, times

T = TypeVar("T")
_MOST_COEFFICIENTS = 2**22
_NUM_VARIED = 3
_INTEGERS = torch.int16, torch.int32, torch.int64
Numbers = list[tuple[Tensor, list[Tensor]]]  # a (B, E, r) of each family, and other arguments


@dataclass(frozen=True, eq=False)
class Axes:
    """Coordinates with the norms of W z, in which the cavity's covariance is diagonal.

    A row j of J becomes the vector u = T' j in these coordinates. The norm of u is that of W j.
    The sum of D u^2 is the variance of j z in the cavity. Both need only one product.

    :param basis: T = W Q, (d, d).
    :param variances: D, (d,): the cavity's covariance is T D T'.
    :param turn: Q, orthogonal: a vector W v is Q (T' v).
    """

    basis: Tensor
    variances: Tensor
    turn: Tensor

    @property
    def probe(self) -> Tensor:
        """An irregular direction, along which nonlinear predictors are detected."""
        direction = torch.cos(torch.arange(1.0, len(self.variances) + 1).to(self.variances))
        return direction / direction.norm()

    @staticmethod
    def of(covariance: Tensor, root: Tensor | None) -> "Axes":
        """
        :param covariance: the cavity's, (d, d).
        :param root: W, symmetric, (d, d); None: the identity.
        """
        half = cholesky(covariance)
        if root is not None:
            half = torch.linalg.solve(root, half)
        variances, turn = torch.linalg.eigh(half @ half.mT)
        basis = turn if root is None else root @ turn
        return Axes(basis, variances.clamp(min=0.0), turn)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """J of R rows for each record, J_0 + sum_k row_k J_k, with a table of J_k for integers.

    :param constant: J_0, (R, d).
    :param of_rows: each data tensor's J_k, (K, R, d), or None if all are zero. For an integer, the
        addends for its values 0, 1, ..., K - 1.
    """

    constant: Tensor
    of_rows: list[Tensor | None]

    @staticmethod
    def find(
        likelihood: Likelihood, predictors: Callable, z: Tensor, integers: bool
    ) -> "Coefficients | None":
        """J_0 and J_k by differences of public rows. None: predictors are not affine in the row.

        :param predictors: function of (z, indices, rows), with Jacobians (B, E, r, d).
        """
        records = likelihood.term.records
        base = records.placeholder()
        sizes = [row.numel() if row.is_floating_point() else 0 for row in base]
        if any(row.is_complex() for row in base) or sum(sizes) * len(z) > _MOST_COEFFICIENTS:
            return None

        def jacobians(rows: list[Tensor]) -> Tensor:
            indices = torch.arange(len(rows[0]), device=records.device) % records.plate.size
            found = predictors(z, indices, rows)
            return torch.cat([each[2].flatten(1, 2) for each in found], dim=1).double()  # (B, R, d)

        probes = [row.expand(1 + sum(sizes), *row.shape).clone() for row in base]
        start = 1
        for probe, size in zip(probes, sizes, strict=True):
            for k in range(size):
                probe[start + k].view(-1)[k] += 1
            start += size
        found = jacobians(probes)
        if found[0].numel() * sum(sizes) > _MOST_COEFFICIENTS or not found.isfinite().all():
            return None
        slopes = found[1:] - found[0]
        constant = found[0] - slopes.sum(dim=0)
        coefficients = list(slopes.split(sizes))
        widths = sorted({u.numel() for u in likelihood.particle.latents.values()}, reverse=True)
        for place, row in enumerate(base):
            if row.dtype in _INTEGERS and row.numel() == 1:
                coefficients[place] = _levels(jacobians, base, place, widths)
        rows = [varied(table, _NUM_VARIED, 1, integers=integers) for table in records.likes]
        expected = constant.expand(_NUM_VARIED, -1, -1)
        for row, k in zip(rows, coefficients, strict=True):
            flat = row.reshape(_NUM_VARIED, -1)
            if len(k) and not row.is_floating_point():
                expected = expected + _looked_up(k, flat[:, 0])
            elif len(k):
                expected = expected + torch.tensordot(flat.double(), k, dims=1)
        tolerance = 1e-8 if likelihood.dtype == torch.float64 else 1e-4
        if not agree(jacobians(rows), expected, tolerance=tolerance):
            return None
        return Coefficients(constant, [k if k.any() else None for k in coefficients])

    def along(
        self, basis: Tensor, chosen: Sequence[int] | None = None
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        """A function that maps B records to J T, (B, R, d).

        :param chosen: indices among the R rows of J; None: all of them.
        """
        some: Any = slice(None) if chosen is None else list(chosen)
        constant = self.constant[some] @ basis
        matrices = [None if k is None else (k[:, some] @ basis).flatten(1) for k in self.of_rows]
        used = [
            None if chosen is None or x is None else x.any(dim=1).nonzero().squeeze(1)
            for x in matrices
        ]

        def product(rows: Sequence[Tensor]) -> Tensor:
            total = None
            for row, matrix, some in zip(rows, matrices, used, strict=True):
                if matrix is not None:
                    row = row.reshape(len(row), -1)
                    if not row.is_floating_point():
                        part = _looked_up(matrix, row[:, 0])
                    elif some is None:
                        part = times(row.double(), matrix)
                    else:
                        part = times(row[:, some].double(), matrix[some])
                    total = part if total is None else total.add_(part)
            if total is None:
                total = constant.flatten().expand(len(rows[0]), -1).clone()
            elif constant.any():
                total += constant.flatten()
            return total.unflatten(1, constant.shape)

        return product


class LinearDesign:
    """Predictors with affine coefficients, and the graph that computes them.

    :param coefficients: J of each record.
    :param numbers: function of (z, indices, rows) of ``size`` records.
    :param affine: whether the code is affine in z for every row.
    :param num_records: the number of local records.
    """

    def __init__(
        self,
        coefficients: Coefficients,
        numbers: Callable[..., Numbers],
        affine: bool,
        size: int,
        num_records: int,
    ):
        self.along = coefficients.along
        self._numbers, self.affine, self.size = numbers, affine, size
        # Records whose predictors were confirmed to be linear. Each record is checked separately,
        # because no record's site may depend on another record.
        device = coefficients.constant.device
        self.straight = torch.zeros(num_records, dtype=torch.bool, device=device)

    @staticmethod
    def find(
        likelihood: Likelihood, families: list[Family], predictors: Callable, z: Tensor, size: int
    ) -> "LinearDesign | None":
        """None if predictors have no such coefficients on public rows."""
        if not likelihood.term.vectorizes:
            return None
        try:
            found = on_varied(lambda i: Coefficients.find(likelihood, predictors, z, i))
            if found is None:
                return None
            graph = _graph(likelihood, families, z, size)
        except NotTraceable:
            return None
        return LinearDesign(found, *graph, size, likelihood.term.records.count)

    def numbers(self, z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> Numbers:
        """Numbers of at most ``size`` records."""
        count = len(indices)
        found = self._numbers(z, *padded([indices, rows], self.size))
        return pytree.tree_map(
            lambda x: x[:count].double() if x.is_floating_point() else x[:count], found
        )


def rounding(dtype: torch.dtype) -> float:
    """The relative error of predictors, in the dtype that a model computes in."""
    return 1e-9 if dtype == torch.float64 else 1e-5


def padded(rows: Any, size: int) -> Any:
    """Tensors of ``size`` rows. The first row of each tensor fills up missing ones."""

    def filled(x: Tensor) -> Tensor:
        missing = x[:1].expand(size - len(x), *x.shape[1:])
        return torch.cat([x, missing]) if len(missing) else x

    return pytree.tree_map(filled, rows)


def where_possible(
    sites: Callable[..., T], others: Callable[..., T], indices: Tensor, rows: list[Tensor]
) -> Iterator[T]:
    """Sites of B records by ``sites``, and by ``others`` for records on which it fails."""
    try:
        found = sites(indices, rows)
    except Exception:
        if len(indices) > 1:
            middle = len(indices) // 2
            for half in (slice(middle), slice(middle, None)):
                yield from where_possible(sites, others, indices[half], [x[half] for x in rows])
            return
        found = others(indices, rows)
    yield found


def _looked_up(table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table, (K, ...). An index out of range gives NaN."""
    inside = (indices >= 0) & (indices < len(table))
    found = table[indices.clamp(0, len(table) - 1).long()]
    broken = ~inside.view(-1, *[1] * (table.dim() - 1))
    return found if inside.all() else found.masked_fill(broken, torch.nan)


def _levels(
    jacobians: Callable[[list[Tensor]], Tensor], base: list[Tensor], place: int, counts: list[int]
) -> Tensor:
    """Addends to the Jacobian for the values of an integer, (K, R, d).

    :param place: the integer's position in a row.
    :param counts: candidates for K. If none is possible, there are no addends.
    """
    for count in counts:
        rows, one = [row.expand(count, *row.shape) for row in base], base[place]
        rows[place] = torch.arange(count).to(one).reshape(count, *one.shape)
        with contextlib.suppress(Exception):  # there may be fewer levels
            found = jacobians(rows)
            if found.isfinite().all():
                return found - found[0]
    return torch.zeros(0)


def reading_graph(
    likelihood: Likelihood, function: Callable[..., list[Tensor]], z: Tensor, size: int
) -> GraphModule:
    """A graph of a function of (z, indices, *rows) of ``size`` records.

    :raises NotTraceable: it is no fixed sequence of operations, or writes to its arguments.
    """
    records = likelihood.term.records
    rows = [row.expand(size, *row.shape).contiguous() for row in records.placeholder()]
    inputs = [torch.zeros(size, dtype=torch.long, device=records.device), *rows]
    one = z[:1] if z.dim() == 2 else z
    function(one, *(x[:1] for x in inputs))  # the first call fixes the result's shapes
    graph = trace(function, [z, *inputs])
    if not only_reads(graph):
        raise NotTraceable("it writes to its arguments")
    return graph


def _graph(
    likelihood: Likelihood, families: list[Family], z: Tensor, size: int
) -> tuple[Callable[..., Numbers], bool]:
    """A graph of all families' numbers that only reads rows, and whether it is affine in z."""
    spec: Any = None

    def read(z: Tensor, index: Tensor, row: list[Tensor]) -> Numbers:
        sites = likelihood.observations(z, index, row)
        return [family.read(sites[family.name]) for family in families]

    def function(z: Tensor, indices: Tensor, *rows: Tensor) -> list[Tensor]:
        nonlocal spec
        leaves, spec = pytree.tree_flatten(
            likelihood.for_each("numbers", read, z, indices, list(rows))
        )
        return leaves

    graph = reading_graph(likelihood, function, z.to(likelihood.dtype), size)
    call = called_by_torch(graph)

    def numbers(z: Tensor, indices: Tensor, rows: Sequence[Tensor]) -> Numbers:
        found = list(call(z.to(likelihood.dtype), indices, *rows))
        return cast(Numbers, pytree.tree_unflatten(found, spec))

    moving, affine = affine_nodes(graph)
    return numbers, moving == affine
