"""From the arguments of a step to records: no user code is shown any of them.

A model reads its arguments at the indices of the plate, or whole. Placeholders show which.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.references import References
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
from pyro_dp.records.captured_data import refuse_captured_data, refuse_rows
from pyro_dp.records.column import Column, like
from pyro_dp.records.messengers import OneRecord
from pyro_dp.records.plate import PrivatePlate, find_plate, is_random, latents_alone, random_sites
from pyro_dp.records.records import Reading, Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng

_WAYS: dict[bool | str, tuple[Reading, ...]] = {
    False: (Reading.BY_INDEX,),
    True: (Reading.WHOLE, Reading.COUNTED),
    "auto": (Reading.BY_INDEX, Reading.WHOLE, Reading.COUNTED),
}


def require_slice_data(value: Any) -> None:
    """:raises ConfigurationError: it is none of those that are known."""
    if not isinstance(value, (bool, str)) or value not in _WAYS:
        raise ConfigurationError(f"slice_data must be True, False or 'auto'; it is {value!r}.")


def find_reading(
    model: Callable, plate: PrivatePlate, arguments: Arguments, slice_data: bool | str
) -> Reading:
    """The first of the ways allowed in which the model has one term for a record.

    Where there is none, the first, which serves a model that observes whole what it else reads by
    index; of others, later checks say what does not fit.

    :param arguments: of the model, tensors.
    :param slice_data: False: by index; True: whole; "auto": either.
    """
    ways = _WAYS[slice_data]
    if len(ways) == 1:
        return ways[0]
    return next((w for w in ways if _suits(model, Records(model, plate, *arguments, w))), ways[0])


def _suits(model: Callable, records: Records) -> bool:
    """Whether there is one term for one record; the same, if numbers of records are shown as 1.

    A number that does more than to give shapes, such as one that a factor is divided by, would make
    it another one where two records are shown.
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
    """A run that leaves nothing behind, with all log densities.

    :param count: so many records are shown. One of them is not the first.
    :raises ModelError: the model raised.
    """
    last = min(max(count - 1, 1), records.plate.size - 1)
    indices = torch.arange(last + 1 - count, last + 1, device=records.device)
    length = count if records.slice_data else records.shown
    args, kwargs = records.arguments(records.placeholder(), length=length)
    store = pyro.get_param_store()
    with (
        forked_rng(),
        store.scope(store.get_state()),
        torch.no_grad(),
        OneRecord(records.plate, indices, indexes=False),
        guarded("Running the model on one record", public=True),
    ):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        trace.compute_log_prob(lambda name, site: is_random(site))
    return trace


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
    """Find on placeholders the private plate, and how the arguments are read.

    :param others: whatever else of the user's decides what is released, such as an optimizer's
        settings.
    :param plate: its name, or ``None`` if exactly one plate holds observed sites.
    :param exchange: in a cluster, tells the other processes something public.
    :raises ModelError: there is no such plate; an argument is no data that can be read record by
        record; model or guide hold data beside their arguments.
    """
    tensors = as_tensors(model, args, kwargs)
    names = argument_names(model, *tensors)
    shards = [None] if exchange is None else find_shards(names, tensors, exchange)
    named = zip(names, pytree.tree_leaves(tensors), strict=True)
    # Arguments that are no tensors may hold data, or keep them.
    objects = [(f"argument {n!r}", x) for n, x in named if not isinstance(x, (Tensor, Column))]
    state = CapturedState(model, guide, *others, *objects)
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
    """The private plate, what model and guide are shown there, and which records are here."""
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
