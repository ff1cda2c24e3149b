"""From the arguments of a step to records: no user code is shown any of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.references import References
from pyro_dp.records.arguments import Arguments, argument_names, as_tensors
from pyro_dp.records.captured_data import refuse_captured_data, refuse_rows
from pyro_dp.records.column import Column, like
from pyro_dp.records.plate import PrivatePlate, find_plate
from pyro_dp.records.reading import find_reading
from pyro_dp.records.records import Records
from pyro_dp.records.shards import NO_SHARD, Exchange, Shard, as_of_all, find_shards
from pyro_dp.utils.errors import ModelError


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
