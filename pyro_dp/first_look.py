"""From the arguments of a step to records: no user code is shown any of them."""

from collections.abc import Callable, Sequence
from typing import Any

from pyro_dp.arguments import as_tensors
from pyro_dp.captured_data import refuse_captured_data, refuse_rows
from pyro_dp.captured_state import CapturedState
from pyro_dp.plates import find_plate
from pyro_dp.records import Records


def first_look(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    *,
    plate: str | None,
    slice_data: bool,
    others: Sequence[Any] = (),
) -> Records:
    """Find the private plate on placeholders, and what the arguments are.

    :param others: whatever else of the user's decides what is released, such as an optimizer's
        settings.
    :param plate: its name, or ``None`` if exactly one plate holds observed sites.
    :raises ModelError: there is no such plate; an argument is no data that can be read record by
        record; model or guide hold data beside their arguments.
    """
    state = CapturedState(model, guide, *others)
    tensors = as_tensors(model, args, kwargs)
    with state.pristine():
        found = find_plate(model, *tensors, plate)
    refuse_rows(state.references, found.size)
    records = Records(model, found, *tensors, slice_data, given=(args, kwargs))
    refuse_captured_data(state.references, records)
    return records
