"""Data that reach a model beside its arguments: refused by name.

What is an argument of ``step()`` is shown record by record. What a function captures is not: it
would reach the release unclipped, and every parameter that starts at it is public.
"""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.graphs.references import References, sentence
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.memory import address

_SAME_MEMORY = (
    "{label} is (part of) the data that are given to step(): what is captured cannot be protected. "
    "Read the data from the arguments only, or capture a copy of public numbers."
)
_ROWS = (
    "{label} has {size} rows, as many as there are records: what is captured cannot be protected. "
    "Pass it as an argument of step(), and read it from there. (A public constant that has this "
    "length by chance: keep it as c[None], and read c[0].)"
)
_CONDITIONED = (
    "pyro.condition holds {site}, which has {size} rows, as many as there are records: what is "
    "captured cannot be protected. Condition within a function that takes it as an argument, "
    "def conditioned(x, y): return pyro.condition(model, data={{{site}: y}})(x), give it to the "
    "inference and to an autoguide in place of the model, and y to step()."
)
_NUMBERS = (
    "{label} has numbers of the data ({what}), which would be public: use constants that were "
    "known before the data, or release them with DPStandardScaler. (This message depends on the "
    "data: it is for the curator only.)"
)
_OF_CONDITION = r"element ('.+') of attribute 'data' of ConditionMessenger"
_CHANCE = 1e-4  # with which an innocent number may look like one of the data's


def refuse_rows(references: References, size: int) -> None:
    """:raises ModelError: something that user code holds has a row per record; names it.

    :param size: number of records N.
    """
    for label, thing in references.held:
        if size > 1 and _rows(thing) == size:
            if found := re.match(_OF_CONDITION, label):
                raise ModelError(_CONDITIONED.format(site=found.group(1), size=size))
            raise ModelError(_ROWS.format(label=sentence(label), size=size))


def refuse_captured_data(references: References, records: Records) -> None:
    """:raises ModelError: something that model or guide refer to holds data; names it."""
    data = [table.detach() for table in records.tables]
    memory = {address(table) for table in data}
    given = [x for x in records.given if _rows(x) == records.plate.size]
    memory |= {address(x) for x in given if isinstance(x, Tensor)}
    memory |= {_base(x) for x in given if isinstance(x, np.ndarray)}
    for label, tensor in references.tensors:
        if tensor.numel() and address(tensor) in memory:
            raise ModelError(_SAME_MEMORY.format(label=sentence(label)))
    arrays = [(label, x) for label, x in references.held if isinstance(x, np.ndarray)]
    for label, array in arrays:
        if array.size and _base(array) in memory:
            raise ModelError(_SAME_MEMORY.format(label=sentence(label)))
    numbers = DataNumbers(data)
    floats = [(label, np.ascontiguousarray(x)) for label, x in arrays if x.dtype.kind == "f"]
    for label, tensor in [*references.tensors, *((n, torch.from_numpy(x)) for n, x in floats)]:
        numbers.refuse(label, tensor)
    for place in references.places:
        numbers.refuse(place.label, torch.tensor(place.floats(), dtype=torch.float64))


def refuse_numbers(values: dict[str, Tensor], records: Records) -> None:
    """:raises ModelError: a parameter starts at numbers of the data; names it."""
    numbers = DataNumbers(records.tables)
    for name, value in values.items():
        numbers.refuse(f"the initial value of parameter {name!r}", value)


class DataNumbers:
    """Numbers of the data that somebody might start from: rows, means, standard deviations.

    :param data: tensors with a row per record.
    """

    def __init__(self, data: list[Tensor]):
        self._tables = [table for table in data if table.is_floating_point() and len(table) > 1]
        self._statistics = [
            (what, values, _rounding(table))
            for table in self._tables
            for what, values in (
                ("means", table.double().mean(0)),
                ("standard deviations", table.double().std(0)),
                ("standard deviations", table.double().std(0, correction=0)),
                ("variances", table.double().var(0)),
                ("medians", table.double().median(0).values),
                ("smallest values", table.double().amin(0)),
                ("largest values", table.double().amax(0)),
                ("the mean", table.double().mean()),
                ("the standard deviation", table.double().std()),
            )
        ]

    def refuse(self, label: str, value: Tensor) -> None:
        """:raises ModelError: the value has a row of the data in it, or a mean of theirs."""
        if not value.is_floating_point() or value.numel() == 0 or value.is_meta or value.is_sparse:
            return
        value = value.detach().cpu()
        for what, numbers, rounding in self._statistics:
            rounding = max(rounding, _rounding(value))
            if _holds_all(value.flatten().double(), numbers.flatten().cpu(), rounding):
                raise ModelError(_NUMBERS.format(label=sentence(label), what=what))
        for table in self._tables:
            if holds_rows(value, table):
                raise ModelError(_NUMBERS.format(label=sentence(label), what="rows"))


def _is_telling(values: Tensor) -> Tensor:
    """Not round: 0, 1, 0.5 or 0.25 are nobody's."""
    values = values.double()
    return values.isfinite() & ((values * 1000 - (values * 1000).round()).abs() > 1e-3)


def _rounding(value: Tensor) -> float:
    return 1e-9 if value.dtype == torch.float64 else 1e-5


def _holds_all(values: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Whether each of the wanted numbers is among the values, and not by chance."""
    wanted = wanted[_is_telling(wanted)]
    if not 0 < len(wanted) <= len(values) or (len(values) * 2 * rounding) ** len(wanted) > _CHANCE:
        return False
    values = values.sort().values
    places = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    nearest = torch.stack([values[places], values[(places - 1).clamp(min=0)]])
    return bool(((nearest - wanted).abs().amin(0) <= rounding * wanted.abs()).all())


def holds_rows(value: Tensor, table: Tensor) -> bool:
    """Whether rows of the table stand in the value, and not by chance."""
    width = table[0].numel()
    if table.dim() > 2 or (table.dim() == 2 and value.shape[-1:] != (width,)):
        return False
    rows = value.reshape(-1, width).to(table)
    rows = rows[_is_telling(rows).all(dim=1)][:64]
    found = sum(bool((table.reshape(-1, width) == row).all(dim=1).any()) for row in rows)
    by_chance = len(rows) * len(table) * (2.0**-50 if table.dtype == torch.float64 else 2.0**-20)
    return found > 0 and by_chance ** (found * width) < _CHANCE


def _base(array: np.ndarray) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.__array_interface__["data"][0]


def _rows(thing: Any) -> int:
    """How many rows a thing has, if it is an array, or a sequence of numbers or sequences."""
    if isinstance(thing, Tensor):
        return 0 if thing.requires_grad or thing.dim() == 0 else len(thing)
    shape = getattr(thing, "shape", None)
    if isinstance(shape, tuple):
        return shape[0] if shape else 0
    if isinstance(thing, (list, tuple)) and len(thing):
        return len(thing) if isinstance(thing[0], (int, float, list, tuple, Tensor)) else 0
    return 0
