"""Parameters of single records, behind a privacy wall.

A guide without amortisation has a row of parameters for each record's latent. Such *local
parameters* are private, like the data that they are learnt from, and stay with the curator. The
wall has two sides:

* *In*: a record's term is shown its own row of every local parameter, repeated N times, as it is
  shown its own row of the data. ``loc[i - 1]`` and ``loc.mean(0)`` give the record's own row again.
  Whatever is not one record's term (global draws, the loss outside the plate, initial values,
  checks) is shown rows that are fixed constants.
* *Out*: a row is moved without noise, by the gradient of its own record's term and its own moments
  (:mod:`pyro_dp.row_adam`), in the steps in which its record was sampled. Neither rows nor their
  gradients are part of a release. Globals learn from the clipped, noised sum only.

**Why the guarantee holds.** Let s be the private state of record n: its rows and their moments.
Fix the earlier releases, and also the selections and local draws R of all other records, which are
independent of record n. Then the sum A of all others is a constant, the same with and without
record n. Record n adds b g(x_n, s) with |g| <= C for *any* s, and b is a fresh coin (Poisson) or 1
(full). The release without it is N(A, sigma^2 C^2), with it a mixture, over s given the earlier
releases, of (1 - q) N(A, .) + q N(A + g, .). Each component is dominated by the subsampled
Gaussian's pair, and hockey-stick divergences are jointly convex: so is the mixture, and, under
replace-one, the mixture over the states of both candidates. Dominating pairs compose adaptively
(Zhu, Dong & Wang 2022, arXiv 2106.08567, Theorem 10), which gives the ledger's cost for fixed R,
and, by convexity again, for random R.

**Why not with** ``sampling="fixed"``. There R says whether record n was selected: a batch of fixed
size without it holds one record more of the others. Amplification compares batches in which
another record takes its place. With private states that record's past selections are tied to those
of record n; earlier releases tell more or less of them depending on x_n, so that at the same
releases *several* records' contributions are distributed differently in the two data sets, and the
bound of one record's C no longer covers the difference. It is refused.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint, real
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyro_dp.errors import ModelError
from pyro_dp.guard import WHOLE_TENSORS, guarded
from pyro_dp.initial_values import agree
from pyro_dp.plates import OneRecord, is_random
from pyro_dp.randomness import forked_rng
from pyro_dp.record_mode import substituted
from pyro_dp.records import Records

NOTE = (
    "Parameters {names} hold a private row per record, learnt without noise: they, and what guide "
    "or Predictive draw for the training records, are not covered by this ledger. Publish "
    "state_dict(), which leaves them out, not the parameter store."
)
FIXED = (
    "sampling='fixed' does not go with parameters per record ({names}): whether others were "
    "sampled before would tell through their rows whether a record was, and the amplification by "
    "fixed-size sampling is not proven. Use sampling='poisson' or 'full'."
)

_SCALE = 0.1  # of the constants in place of rows, in unconstrained coordinates


@dataclass
class LocalParameters:
    """The unconstrained parameters that have a row per record.

    :param size: N.
    :param leaves: unconstrained parameters, by name.
    :param dims: of each, the dimension of length N.
    :param constraints: of each that is constrained.
    """

    size: int = 0
    leaves: dict[str, Tensor] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    constraints: dict[str, Constraint] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.leaves)

    @property
    def listed(self) -> str:
        """The names, for messages."""
        return ", ".join(map(repr, self.leaves))

    def current(self) -> "LocalParameters":
        """Those that are still in Pyro's parameter store."""
        store = pyro.get_param_store()
        kept = {n: leaf for n, leaf in self.leaves.items() if store.param_name(leaf) == n}
        return replace(self, leaves=kept)

    def rows(self, indices: Tensor) -> dict[str, Tensor]:
        """Private rows of these records, (B, ...) each."""
        return {
            name: leaf.detach().movedim(self.dims[name], 0).index_select(0, indices)
            for name, leaf in self.leaves.items()
        }

    def constants(self, factor: float = 1.0) -> dict[str, Tensor]:
        """Public rows in place of private ones, without batch dimension.

        They are numbers without meaning, since at zero gradients may vanish.

        :param factor: of these numbers.
        """
        return {
            name: factor * _constant(leaf.movedim(self.dims[name], 0)[0])
            for name, leaf in self.leaves.items()
        }

    @contextlib.contextmanager
    def shown(self, rows: dict[str, Tensor]) -> Iterator[None]:
        """Within: whatever reads a local parameter reads this row, N times.

        :param rows: of one record, or :meth:`constants`; without batch dimension.
        """
        if not self:
            yield
            return
        with _OwnRows(self, rows) as own, _OwnParams(own):
            yield


def find_local_parameters(model: Callable, guide: Callable, records: Records) -> LocalParameters:
    """Parameters of which a record uses one row, that of its index.

    They are found on placeholders and constants, so that what is found is public. A parameter with
    N rows that all records use alike is a global one.

    :raises ModelError: records use rows of their own, but not only those at their index.
    """
    plate, found = records.plate, LocalParameters(records.plate.size)
    if plate.size == 1:
        return found
    _, parameters = _run_at(model, guide, records, 0, {})
    candidates = {
        name: leaf
        for name, leaf in _leaves(parameters).items()
        if plate.size in leaf.shape and leaf.requires_grad
    }
    if not candidates:
        return found
    examples = records.examples()
    gradients = [_gradients_at(model, guide, records, i, candidates) for i in examples]
    declared = pyro.get_param_store().get_state()["constraints"]
    for name, leaf in candidates.items():
        own = [gradient[name] for gradient in gradients]
        if all(agree(own[0], other) for other in own[1:]):
            continue
        dim = _own_dimension(own, examples, plate.size)
        if dim is None:
            raise ModelError(
                f"Parameter {name!r} has rows for the records of plate {plate.name!r}, but a "
                "record, or a site outside the plate, reads others than the record's own: index "
                "it with the plate's indices (loc[idx]), inside the plate only."
            )
        found.leaves[name], found.dims[name] = leaf, dim
        if declared.get(name, real) is not real:
            found.constraints[name] = declared[name]
    return found


def _run_at(
    model: Callable, guide: Callable, records: Records, index: int, values: dict[int, Tensor]
) -> tuple[list[poutine.Trace], poutine.Trace]:
    """Guide, and model replayed against it, at one index of the plate, with other parameters.

    :param values: in place of parameters, by ``id``.
    :returns: their traces, and one of the parameters alone, which sees them whole.
    """
    args, kwargs = records.arguments(records.placeholder())
    position = torch.tensor([index], device=records.device)
    with (
        forked_rng(),
        guarded("Running guide and model on one record", hint=WHOLE_TENSORS),
        _Substitution(values),
        poutine.trace(param_only=True) as parameters,
        OneRecord(records.plate, position),
    ):
        torch.manual_seed(0)
        of_guide = poutine.trace(guide).get_trace(*args, **kwargs)
        of_model = poutine.trace(poutine.replay(model, trace=of_guide)).get_trace(*args, **kwargs)
        for trace in (of_guide, of_model):
            trace.compute_log_prob(lambda name, site: is_random(site))
    return [of_guide, of_model], parameters.trace


def _leaves(parameters: poutine.Trace) -> dict[str, Tensor]:
    leaves = {name: site["value"].unconstrained() for name, site in parameters.nodes.items()}
    first = {id(leaf): name for name, leaf in reversed(leaves.items())}
    return {name: leaf for name, leaf in leaves.items() if first[id(leaf)] == name}


def _gradients_at(
    model: Callable, guide: Callable, records: Records, index: int, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Of all log densities, with respect to constants in place of these parameters."""
    values = {name: _constant(leaf).requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        substitutes = {id(leaf): values[name] for name, leaf in leaves.items()}
        traces, _ = _run_at(model, guide, records, index, substitutes)
        terms = [
            site["log_prob"].sum()
            for trace in traces
            for site in trace.nodes.values()
            if is_random(site)
        ]
        total = sum((term for term in terms if term.requires_grad), torch.tensor(0.0))
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in values.items()}
    with guarded("Differentiating a record's term"):
        gradients = torch.autograd.grad(
            total, list(values.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(values, gradients, strict=True))


def _own_dimension(gradients: list[Tensor], indices: list[int], size: int) -> int | None:
    """The dimension along which each gradient is zero but at its record's index."""
    for dim, length in enumerate(gradients[0].shape):
        if length == size and not any(
            torch.cat([g.narrow(dim, 0, i), g.narrow(dim, i + 1, size - i - 1)], dim).any()
            for g, i in zip(gradients, indices, strict=True)
        ):
            return dim
    return None


def _constant(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = _SCALE * torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return numbers.to(like.device)


class _Substitution(TorchFunctionMode):
    """Torch functions get other tensors in place of some, by ``id``."""

    def __init__(self, substitutes: dict[int, Tensor]):
        super().__init__()
        self.substitutes = substitutes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.substitutes:
            args = substituted(args, self.substitutes)
            kwargs = {k: substituted(value, self.substitutes) for k, value in kwargs.items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Repeated:
    """A row N times.

    :param whole: all of them, a view.
    :param single: one of them: ``dim`` has length 1.
    """

    whole: Tensor
    single: Tensor
    dim: int

    @staticmethod
    def of(single: Tensor, dim: int, size: int) -> "_Repeated":
        shape = [*single.shape[:dim], size, *single.shape[dim + 1 :]]
        return _Repeated(single.expand(shape), single, dim)


class _OwnRows(_Substitution):
    """One record's rows, in place of the local parameters.

    All rows being equal, what is read from the N of them is read from one: the derivative of an
    indexed tensor would be as large as N rows, for every record.
    """

    def __init__(self, local: LocalParameters, rows: dict[str, Tensor]):
        self.local = local
        self.unconstrained = {
            name: _Repeated.of(row.unsqueeze(local.dims[name]), local.dims[name], local.size)
            for name, row in rows.items()
        }
        self.repeated = {id(each.whole): each for each in self.unconstrained.values()}
        super().__init__(
            {id(local.leaves[name]): own.whole for name, own in self.unconstrained.items()}
        )

    def constrained(self, name: str) -> Tensor:
        """The row in the parameter's own space, N times."""
        own = self.unconstrained[name]
        if name in self.local.constraints:
            single = transform_to(self.local.constraints[name])(own.single)
            own = _Repeated.of(single, own.dim, self.local.size)
        else:  # a new tensor: it gets attributes
            own = _Repeated.of(own.single, own.dim, self.local.size)
        self.repeated[id(own.whole)] = own
        return own.whole

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _READERS:
            read = _READERS[func](self, *args, **kwargs)
            if read is not None:
                return read
        return super().__torch_function__(func, types, args, kwargs)

    def find(self, tensor: Any) -> _Repeated | None:
        return self.repeated.get(id(self.substitutes.get(id(tensor), tensor)))


def _getitem(own: _OwnRows, tensor: Tensor, key: Any) -> Tensor | None:
    repeated = own.find(tensor)
    keys = list(key) if isinstance(key, tuple) else [key]
    if repeated is None or any(k is None or k is Ellipsis or _is_mask(k) for k in keys):
        return None
    if len(keys) <= repeated.dim:
        return None
    place = keys[repeated.dim]
    if isinstance(place, Tensor):
        keys[repeated.dim] = torch.zeros_like(place)
    elif isinstance(place, int):
        keys[repeated.dim] = 0
    else:
        return None
    return repeated.single[tuple(keys)]


def _is_mask(key: Any) -> bool:
    return isinstance(key, bool) or (isinstance(key, Tensor) and key.dtype == torch.bool)


def _index_select(own: _OwnRows, tensor: Tensor, dim: int, index: Tensor) -> Tensor | None:
    repeated = own.find(tensor)
    if repeated is None or dim % tensor.dim() != repeated.dim:
        return None
    return _Repeated.of(repeated.single, repeated.dim, index.numel()).whole


def _embedding(
    own: _OwnRows,
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *others: Any,
    **named: Any,
) -> Tensor | None:
    repeated = own.find(weight)
    if repeated is None or repeated.dim != 0 or padding_idx is not None or max_norm is not None:
        return None
    return functional.embedding(torch.zeros_like(index), repeated.single)


_READERS = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    functional.embedding: _embedding,
}


class _OwnParams(Messenger):
    """Answers ``pyro.param`` with the record's own row, so that only one row is constrained."""

    def __init__(self, own: _OwnRows):
        super().__init__()
        self.own = own

    def _pyro_param(self, msg: dict) -> None:
        leaf = self.own.local.leaves.get(msg["name"])
        if leaf is None or msg["value"] is not None:
            return
        value = self.own.constrained(msg["name"])
        value.unconstrained = lambda: leaf
        # Where plates would note, on the parameter itself, which rows they took.
        value._pyro_unconstrained_param = torch.empty(0)
        msg["value"] = value
