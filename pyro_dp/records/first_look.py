"""From the arguments of a step to records: no user code is shown any of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.references import References
from pyro_dp.records.arguments import argument_names, as_tensors
from pyro_dp.records.captured_data import refuse_captured_data, refuse_rows
from pyro_dp.records.plate import find_plate
from pyro_dp.records.reading import find_reading
from pyro_dp.records.records import Records


def first_look(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    *,
    plate: str | None,
    slice_data: bool | str,
    others: Sequence[Any] = (),
) -> Records:
    """Find on placeholders the private plate, and how the arguments are read.

    :param others: whatever else of the user's decides what is released, such as an optimizer's
        settings.
    :param plate: its name, or ``None`` if exactly one plate holds observed sites.
    :raises ModelError: there is no such plate; an argument is no data that can be read record by
        record; model or guide hold data beside their arguments.
    """
    tensors = as_tensors(model, args, kwargs)
    named = zip(argument_names(model, *tensors), pytree.tree_leaves(tensors), strict=True)
    # Arguments that are no tensors may hold data, or keep them.
    objects = [(f"argument {name!r}", leaf) for name, leaf in named if not isinstance(leaf, Tensor)]
    state = CapturedState(model, guide, *others, *objects)
    state.forget()
    with state.pristine():
        found = find_plate(model, *tensors, plate)
    refuse_rows(state.references, found.size)
    with state.pristine():
        reading = find_reading(model, found, tensors, slice_data)
    records = Records(model, found, *tensors, reading, given=(args, kwargs))
    references = References(model, guide, *others, *records.constants)
    refuse_captured_data(references, records)
    return records
