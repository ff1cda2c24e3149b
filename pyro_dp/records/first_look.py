"""Turn the arguments of a step into records, without running user code on any of them.

A model reads its arguments at the plate's indices, or whole; a run on placeholders shows which.
Data beside the arguments are refused by name. They would reach the release unclipped, and a
parameter that starts at them would be public.
"""

import array
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.places import LISTS
from pyro_dp.graphs.references import References, is_table, sentence
from pyro_dp.records.arguments import (
    NO_SHARD,
    Arguments,
    Exchange,
    Shard,
    argument_names,
    as_of_all,
    as_tensors,
    find_shards,
)
from pyro_dp.records.column import ArrayColumn, Column, TensorColumn, like
from pyro_dp.records.plate import (
    OneRecord,
    PrivatePlate,
    find_plate,
    latents_alone,
    random_sites,
    run_once,
)
from pyro_dp.records.records import Reading, Records
from pyro_dp.records.sandbox import looking_at_records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import address

_SAME_MEMORY = (
    "{label} is (part of) the data of step(). Captured data cannot be protected. "
    "Read the data from the arguments only, or capture a copy of public numbers."
)
_ROWS = (
    "{label} has {size} {kind}, as many as there are records. Captured data cannot be protected. "
    "Pass it as an argument of step(), and read it from there. (A public constant that has this "
    "length by chance: keep it as c[None], or torch.tensor([c]) of a list, and read c[0].)"
)
_CONDITIONED = (
    "pyro.condition holds {site}, which has {size} rows, as many as there are records. Captured "
    "data cannot be protected. Write def conditioned(x, y), which returns pyro.condition(model, "
    "data={{{site}: y}})(x). Pass it to inference and autoguide as the model, and y to step()."
)
_NUMBERS = (
    "{label} has numbers of the data ({what}), which would be public. Use constants chosen before "
    "seeing the data, or release them with DPStandardScaler. (This message depends on the "
    "data: it is for the curator only.)"
)
_OF_CONDITION = r"element ('.+') of attribute 'data' of ConditionMessenger"
_ENDS = ("\n", ",", "],", "},")  # ends of a record in a text
_READINGS: dict[bool | str, tuple[Reading, ...]] = {
    False: (Reading.BY_INDEX,),
    True: (Reading.WHOLE, Reading.COUNTED),
    "auto": (Reading.BY_INDEX, Reading.WHOLE, Reading.COUNTED),
}


def refuse_rows(references: References, size: int) -> None:
    """:raises ModelError: user code holds an object with a row per record; names it."""
    for label, thing in references.held:
        kind = _elements(thing, size)
        if kind == "rows" and (found := re.match(_OF_CONDITION, label)):
            raise ModelError(_CONDITIONED.format(site=found.group(1), size=size))
        if kind:
            raise ModelError(_ROWS.format(label=sentence(label), size=size, kind=kind))


def refuse_captured_data(references: References, records: Records) -> None:
    """:raises ModelError: model or guide refer to an object that holds data; names it."""
    data = [x for x in records.original.leaves if _shape(x)[:1] == (records.count,)]
    data += [x.tensor for x in records.columns if isinstance(x, TensorColumn)]
    data += [x.array for x in records.columns if isinstance(x, ArrayColumn)]
    memory = {_memory(x) for x in data} - {None}
    for label, thing in [*references.tensors, *references.held]:
        if _memory(thing) in memory:
            raise ModelError(_SAME_MEMORY.format(label=sentence(label)))
    arrays = [(label, each) for label, x in references.held for each in _arrays_of(x)]
    floats = [(label, np.ascontiguousarray(x)) for label, x in arrays if x.dtype.kind in "fc"]
    for label, tensor in [*references.tensors, *((n, torch.from_numpy(x)) for n, x in floats)]:
        _refuse(label, tensor, records)
    numbers = [(place.label, place.floats()) for place in references.places]
    for label, found in [*numbers, *references.floats.items()]:
        _refuse(label, torch.tensor(found, dtype=torch.float64), records)


@looking_at_records()
def refuse_numbers(values: dict[str, Tensor], records: Records) -> None:
    """:raises ModelError: a parameter starts at numbers of the data; names it."""
    for name, value in values.items():
        _refuse(f"the initial value of parameter {name!r}", value, records)


def _refuse(label: str, value: Tensor, records: Records) -> None:
    """:raises ModelError: the value contains rows or statistics of the data."""
    if what := records.numbers.found_in(value):
        raise ModelError(_NUMBERS.format(label=sentence(label), what=what))


def _arrays_of(thing: Any) -> list[np.ndarray]:
    """The arrays in an object: the fields of a structured array, or the numbers of a table."""
    if isinstance(thing, (array.array, memoryview)):
        thing = np.asarray(thing)
    if isinstance(thing, np.ndarray):
        return [thing[name] for name in thing.dtype.names] if thing.dtype.names else [thing]
    return [_numeric(thing)] if is_table(thing) else []


def _numeric(table: Any) -> np.ndarray:
    """All numbers of a frame or a series, flat, without columns of other types."""
    columns = [table.iloc[:, j] for j in range(table.shape[1])] if table.ndim == 2 else [table]
    found = [x.to_numpy(dtype=float, na_value=np.nan) for x in columns if x.dtype.kind in "fiu"]
    return np.concatenate(found or [np.empty(0)])


def _memory(thing: Any) -> int | None:
    """The address of the memory that a tensor or array shares with its views; ``None``: none."""
    if isinstance(thing, Tensor):
        return address(thing) if thing.numel() else None
    if not (isinstance(thing, np.ndarray) and thing.size):
        return None
    while isinstance(thing.base, np.ndarray):
        thing = thing.base
    return thing.__array_interface__["data"][0]


def _elements(thing: Any, size: int) -> str:
    """Whether an object has a "rows" or "columns" per record; else an empty text."""
    if isinstance(thing, (str, bytes)):
        return "rows" if size > 1 and _lists(thing, size) else ""
    shape = () if isinstance(thing, Tensor) and thing.requires_grad else _shape(thing)
    if size > 1 and shape[:1] == (size,):
        return "rows"
    # A single row of this length may be a public constant.
    transposed = size > 1 and len(shape) == 2 and shape[0] > 1 and shape[1] == size
    return "columns" if transposed else ""


def _lists(text: str | bytes, size: int) -> bool:
    """Whether a text has a line or a JSON element for each record, perhaps after a header.

    Bytes may also have numbers of four or eight bytes for each record.
    """
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    if isinstance(text, bytes) and len(text) % (4 * size) == 0:
        return True
    counts = {whole.strip().count(end) + 1 for end in _ENDS}
    return bool(counts & {size, size + 1})


def _shape(thing: Any) -> tuple[int, ...]:
    """The shape of an array or tensor, or the length of another collection; else empty."""
    try:
        if isinstance(thing, Tensor) and thing.is_nested:
            return (thing.size(0),)
        shape = getattr(thing, "shape", None)
        if isinstance(shape, tuple):
            return shape
        return () if _is_code(thing) else (len(thing),)
    except Exception:  # whatever a user's class may raise
        return ()


def _is_code(thing: Any) -> bool:
    """Whether a container holds functions, modules, optimizers and the like instead of records."""
    if not isinstance(thing, (dict, set, tuple, frozenset, *LISTS)):
        return False
    first = next(iter(thing.values() if isinstance(thing, dict) else thing), None)
    of_library = str(type(first).__module__).split(".")[0] in ("torch", "pyro")
    return callable(first) or (of_library and not isinstance(first, Tensor))


def find_reading(
    model: Callable, plate: PrivatePlate, arguments: Arguments, slice_data: bool | str
) -> Reading:
    """The first allowed reading in which the model has one term per record.

    If none suits, it is the first one, for a model that observes a whole argument and reads others
    by index. Later checks refuse other models.

    :param slice_data: False (by index), True (whole) or "auto" (either).
    """
    allowed = _READINGS[slice_data]
    if len(allowed) == 1:
        return allowed[0]
    suits = (x for x in allowed if _suits(model, Records(model, plate, *arguments, x)))
    return next(suits, allowed[0])


def _suits(model: Callable, records: Records) -> bool:
    """Whether one record has one term, which stays the same if the model sees two records.

    A count that does more than set shapes, such as the divisor of a factor, would change the term.
    """
    plate = records.plate
    try:
        one = _run(model, records, 1)
        sites = random_sites(one)
        if any(plate.of_record(s, 0).shape != s["log_prob"].shape for s in sites.values()):
            return False
        if records.reading is not Reading.COUNTED:
            return True
        two = random_sites(_run(poutine.replay(model, trace=latents_alone(one)), records, 2))
    except ModelError:
        return False
    return sites.keys() == two.keys() and all(
        agree(sites[name]["log_prob"], plate.of_record(two[name], 0)) for name in sites
    )


def _run(model: Callable, records: Records, count: int) -> poutine.Trace:
    """A trace on ``count`` records, with log densities. The last one is not the plate's first."""
    last = min(max(count - 1, 1), records.plate.size - 1)
    indices = torch.arange(last + 1 - count, last + 1, device=records.device)
    length = count if records.slice_data else records.shown
    args, kwargs = records.arguments(records.placeholder(), length=length)
    with OneRecord(records.plate, indices, indexes=False):
        return run_once(model, args, kwargs, densities=True)


def first_look(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    *,
    plate: str | None,
    slice_data: bool | str,
    others: Sequence[Any] = (),
    exchange: Exchange | None = None,
) -> Records:
    """Find the private plate, and how the model reads its arguments, on placeholders.

    :param others: other objects of the user that influence releases, such as an optimizer's
        settings.
    :param plate: the plate's name; ``None``: see :func:`~pyro_dp.records.plate.find_plate`.
    :param exchange: in a cluster, exchanges public messages between processes.
    :raises ModelError: no plate qualifies; an argument cannot be read record by record; model or
        guide hold data beside their arguments.
    """
    tensors = as_tensors(model, args, kwargs)
    names = argument_names(model, *tensors)
    shards = [None] if exchange is None else find_shards(names, tensors, exchange)
    named = zip(names, pytree.tree_leaves(tensors), strict=True)
    # Arguments that are no tensors may hold data, or keep data that they see.
    objects = [(f"argument {n!r}", x) for n, x in named if not isinstance(x, (Tensor, Column))]
    state = CapturedState(model, guide, *others, *objects)
    state.references.require_all()
    state.references.require_plain()
    state.forget()
    with state.pristine():
        found, shown, shard = _find_plate(model, tensors, shards, plate)
    refuse_rows(state.references, found.size)
    if shard is not None:
        refuse_rows(state.references, shard.count)
    with state.pristine():
        reading = find_reading(model, found, shown, slice_data)
    records = Records(model, found, *tensors, reading, given=(args, kwargs), shard=shard)
    references = References(model, guide, *others, *records.constants)
    refuse_captured_data(references, records)
    return records


def _find_plate(
    model: Callable, tensors: Arguments, shards: Sequence[Shard | None], name: str | None
) -> tuple[PrivatePlate, Arguments, Shard | None]:
    """The private plate, the arguments that model and guide see, and this process's records."""
    errors = []
    for shard in shards:
        shown = tensors if shard is None else as_of_all(tensors, shard)
        args, kwargs = pytree.tree_map(like, shown)
        try:
            plate = find_plate(model, args, kwargs, name)
        except ModelError as error:
            errors.append(error)
            continue
        if len(shards) == 1 or (shard is not None and plate.size == shard.size):
            return plate, shown, shard
    raise errors[0] if errors else ModelError(NO_SHARD)
