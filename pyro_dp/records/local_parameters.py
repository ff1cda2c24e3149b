"""Local parameters: parameters with a private row per record.

A guide without amortisation has a row of parameters for each record's latent. Like the data from
which they are learnt, these rows are private and stay with the curator. Two rules protect them:

* *In*: a record's term sees its own row of every local parameter, repeated N times, like its own
  row of the data. ``loc[i - 1]`` and ``loc.mean(0)`` give the record's own row again. All other
  code (global draws, the loss outside the plate, initial values, checks) sees fixed constants.
* *Out*: a row moves without noise when its record is sampled, by the gradient and moments of that
  record's term (:class:`LocalOptimizer`). Neither rows nor their gradients are part of a release.
  Global parameters learn only from the clipped, noised sum.

So the dominating pair of a subsampled Gaussian covers each release, for all values of the rows. For
batches of fixed size this is not proven, so they are refused. The proof is in docs/proofs/rows.md.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to
from torch.distributions.constraints import Constraint, real
from torch.nn import functional

from pyro_dp.graphs.tracing import untraced
from pyro_dp.records.plate import OneRecord, Traces, random_sites, traced
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded, whole_tensors
from pyro_dp.records.torch_modes import Substitution
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng


@dataclass(frozen=True)
class _Repeated:
    """A repeated row.

    :param whole: a view with all repetitions along ``dim``.
    :param single: the same with length 1 along ``dim``.
    """

    whole: Tensor
    single: Tensor
    dim: int

    @staticmethod
    def of(single: Tensor, dim: int, length: int) -> "_Repeated":
        shape = [*single.shape[:dim], length, *single.shape[dim + 1 :]]
        return _Repeated(single.expand(shape), single, dim)


class _OwnRows(Substitution):
    """Gives torch functions one record's rows instead of the parameters.

    The parameters may be in Pyro's store, in a module, or captured by a guide. All rows are equal,
    so a read at an index reads a single row. Otherwise the derivative of an indexed tensor would
    take N rows for each record.

    :param rows: without the dimension of length N.
    """

    def __init__(self, local: "LocalParameters", rows: dict[str, Tensor]):
        self._local, self._rows = local, rows
        self._repeated: dict[int, _Repeated] = {}
        super().__init__({id(leaf): self.keep(name) for name, leaf in local.leaves.items()})

    def keep(self, name: str, constraint: Constraint = real) -> Tensor:
        """The record's constrained row, repeated; :meth:`find` will recognise it."""
        dim = self._local.dims[name]
        single = transform_to(constraint)(self._rows[name].unsqueeze(dim))
        repeated = _Repeated.of(single, dim, 1 if self._local.is_whole else self._local.size)
        self._repeated[id(repeated.whole)] = repeated
        return repeated.whole

    def find(self, tensor: Any) -> _Repeated | None:
        """The repeated row that a tensor is, or is replaced by."""
        return self._repeated.get(id(self.substitutes.get(id(tensor), tensor)))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READERS:
            read = _READERS[func](self, *args, **(kwargs or {}))
            if read is not None:
                return read
        return super().__torch_function__(func, types, args, kwargs)


@dataclass(eq=False, repr=False)
class _OwnParams(Messenger):
    """Answers ``pyro.param`` with the record's own row, so that only one row is constrained."""

    local: "LocalParameters"
    own: _OwnRows

    def _pyro_param(self, msg: dict) -> None:
        name = msg["name"]
        if name not in self.local.leaves or msg["value"] is not None:
            return
        value: Any = self.own.keep(name, self.local.constraints.get(name, real))
        value.unconstrained = lambda: self.local.leaves[name]
        # Plates note here which rows they took. On the leaf, that would reveal sampled records.
        value._pyro_unconstrained_param = torch.empty(0)
        msg["value"] = value


# These functions read a single row instead of N. They return None for unsupported indices.


def _getitem(own: _OwnRows, tensor: Tensor, key: Any) -> Tensor | None:
    repeated = own.find(tensor)
    keys = list(key) if isinstance(key, tuple) else [key]
    if repeated is None or len(keys) <= repeated.dim:
        return None
    if any(k is None or k is Ellipsis or _is_mask(k) for k in keys):
        return None
    index = keys[repeated.dim]
    if isinstance(index, Tensor):
        keys[repeated.dim] = torch.zeros_like(index)
    elif isinstance(index, int):
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


_READERS: dict[Any, Callable[..., Tensor | None]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    functional.embedding: _embedding,
}


NOTE = (
    "Parameters {names} hold a private row per record, learnt without noise. This ledger does not "
    "cover them, nor draws of guide or Predictive for the training records. Publish "
    "state_dict(), which leaves them out, not the parameter store."
)
FIXED = (
    "FixedSizeSampling does not support parameters per record ({names}). The rows of other records "
    "would reveal whether a record was sampled, and amplification by fixed-size sampling is not "
    "proven. Use PoissonSampling or FullBatch."
)

_SCALE = 0.1  # standard deviation of the constants that replace rows, in unconstrained space


@dataclass
class LocalParameters:
    """The unconstrained parameters that have a row per record.

    :param leaves: unconstrained parameters, by name.
    :param dims: each parameter's dimension of length N.
    :param constraints: each parameter's constraint; by default none.
    :param is_whole: whether code sees a record's row once, and not N times.
    """

    size: int = 0
    leaves: dict[str, Tensor] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    constraints: dict[str, Constraint] = field(default_factory=dict)
    is_whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.leaves)

    @property
    def listed(self) -> str:
        """The names, for messages."""
        return ", ".join(map(repr, self.leaves))

    def add(self, name: str, leaf: Tensor, dim: int) -> None:
        """Add a parameter, and mark it: it holds private rows from now on."""
        self.leaves[name], self.dims[name] = leaf, dim
        leaf._pyro_dp_rows = dim  # type: ignore[attr-defined]
        self.constraints[name] = pyro.get_param_store().get_state()["constraints"].get(name, real)

    def rows(self, indices: Tensor) -> dict[str, Tensor]:
        """Private rows of these records, (B, ...) for each parameter."""
        return {
            name: leaf.detach().movedim(self.dims[name], 0).index_select(0, indices)
            for name, leaf in self.leaves.items()
        }

    def constants(self, factor: float = 1.0) -> dict[str, Tensor]:
        """Rows that replace the private ones in public code, without batch dimension.

        They are arbitrary numbers, because gradients may vanish at zero.
        """
        return {
            name: factor * _constant(leaf.movedim(self.dims[name], 0)[0])
            for name, leaf in self.leaves.items()
        }

    @contextlib.contextmanager
    def shown(self, rows: dict[str, Tensor]) -> Iterator[None]:
        """Inside, code that reads a local parameter reads this row, N times or once.

        :param rows: one record's rows, or :meth:`constants`, without batch dimension.
        """
        if not self:
            yield
            return
        with _OwnRows(self, rows) as own, _OwnParams(self, own):
            yield


def marked_parameters(size: int) -> LocalParameters:
    """Parameters in Pyro's store that an inference has learnt as private rows.

    They stay private, even if a model now uses them in another role.

    :raises ModelError: the rows belong to another number of records.
    """
    store, found = pyro.get_param_store(), LocalParameters(size)
    for name in store.keys():
        leaf = store[name].unconstrained()
        dim = getattr(leaf, "_pyro_dp_rows", None)
        if dim is None:
            continue
        if leaf.shape[dim] != size:
            raise ModelError(
                f"Parameter {name!r} in Pyro's store holds a private row for each of "
                f"{leaf.shape[dim]} records, but there are {size} now. Save what you need, and "
                "call pyro.clear_param_store()."
            )
        found.add(name, leaf, dim)
    return found


def find_local_parameters(
    model: Callable, guide: Callable, records: Records, marked: LocalParameters
) -> LocalParameters:
    """The marked parameters, and those whose row at its index each record uses.

    The search uses placeholders and constants, so the result is public. A parameter with N rows
    that all records use alike is global.

    :raises ModelError: records differ in the rows that they use, but also use others than their
        own.
    """
    plate = records.plate
    found = LocalParameters(plate.size, is_whole=records.slice_data)
    for name, leaf in marked.leaves.items():
        found.add(name, leaf, marked.dims[name])
    if plate.size == 1:
        return found
    with marked.shown(marked.constants()):
        parameters = _parameters(model, guide, records)
    candidates = {
        name: leaf
        for name, leaf in leaves_of(parameters).items()
        if plate.size in leaf.shape and leaf.requires_grad and name not in marked.leaves
    }
    if not candidates:
        return found
    examples = records.examples()
    with marked.shown(marked.constants()):
        gradients = [_gradients_at(model, guide, records, i, candidates) for i in examples]
    for name, leaf in candidates.items():
        own = [gradient[name] for gradient in gradients]
        if all(agree(own[0], other) for other in own[1:]):
            continue
        dim = _own_dimension(own, examples, plate.size)
        if dim is None and records.slice_data:
            continue  # every record has other draws in this run, so shared parameters differ, too
        if dim is None:
            raise ModelError(
                f"Parameter {name!r} has rows for the records of plate {plate.name!r}, but a "
                f"record, or a site outside the plate, reads other rows than its own. Index it "
                f"with the plate's indices (loc[idx]), inside the plate only."
            )
        found.add(name, leaf, dim)
        vars(leaf).pop("_pyro_subsample", None)  # plates note here which rows they took
    return found


def _parameters(model: Callable, guide: Callable, records: Records) -> poutine.Trace:
    """A trace of the parameters: on all records, or on fewer if no parameter has N rows."""
    size, shown = records.plate.size, records.shown
    if records.slice_data and shown < size:
        with contextlib.suppress(ModelError):
            _, found = _run_at(model, guide, records, 0, {}, shown)
            if not any(size in leaf.shape for leaf in leaves_of(found).values()):
                return found
    return _run_at(model, guide, records, 0, {})[1]


def _run_at(
    model: Callable,
    guide: Callable,
    records: Records,
    index: int,
    values: dict[int, Tensor],
    length: int | None = None,
) -> tuple[Traces, poutine.Trace]:
    """Run guide and model at one index of the plate, with other values of parameters.

    Draws are the same each time, because the public generator is restored.

    :param values: replacements of parameters, by ``id``.
    :param length: number of rows in the arguments; by default N.
    :returns: the traces of guide and model, and one of the parameters, with all of their rows.
    """
    # If the model reads its data whole, the run is on all records.
    length = length or records.plate.size
    first, last = (0, length) if records.slice_data else (index, index + 1)
    args, kwargs = records.arguments(records.placeholder(), length=length)
    hint = whole_tensors(records.slice_data)
    with (
        forked_rng(),
        guarded("Running guide and model on one record", public=True, hint=hint),
        Substitution(values),
        poutine.trace(param_only=True) as parameters,
        OneRecord(records.plate, torch.arange(first, last, device=records.device)),
    ):
        traces = traced(model, guide, args, kwargs)
    return traces, parameters.trace


def leaves_of(parameters: poutine.Trace) -> dict[str, Tensor]:
    """Unconstrained parameters in a trace, each under its first name only."""
    leaves = {name: site["value"].unconstrained() for name, site in parameters.nodes.items()}
    first = {id(leaf): name for name, leaf in reversed(leaves.items())}
    return {name: leaf for name, leaf in leaves.items() if first[id(leaf)] == name}


def _gradients_at(
    model: Callable, guide: Callable, records: Records, index: int, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of all log densities with respect to constants that replace these parameters."""
    inputs = [_constant(leaf).requires_grad_() for leaf in leaves.values()]
    with torch.enable_grad():
        substitutes = {id(leaf): x for leaf, x in zip(leaves.values(), inputs, strict=True)}
        traces, _ = _run_at(model, guide, records, index, substitutes)
        terms = [
            records.plate.of_record(site, index).sum()
            for trace in traces.values()
            for site in random_sites(trace).values()
        ]
        total = sum((term for term in terms if term.requires_grad), torch.tensor(0.0))
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    with guarded("Differentiating a record's term"):
        gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _own_dimension(gradients: list[Tensor], indices: list[int], size: int) -> int | None:
    """The dimension along which each gradient is zero except at its record's index."""
    for dim, length in enumerate(gradients[0].shape):
        if length == size and not any(
            torch.cat([g.narrow(dim, 0, i), g.narrow(dim, i + 1, size - i - 1)], dim).any()
            for g, i in zip(gradients, indices, strict=True)
        ):
            return dim
    return None


def _constant(like: Tensor) -> Tensor:
    with untraced():
        generator = torch.Generator().manual_seed(0)
        numbers = _SCALE * torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return numbers.to(like.device)
