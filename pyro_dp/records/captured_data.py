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
from pyro_dp.records.column import ArrayColumn, TensorColumn
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import address

_SAME_MEMORY = (
    "{label} is (part of) the data that are given to step(): what is captured cannot be protected. "
    "Read the data from the arguments only, or capture a copy of public numbers."
)
_ROWS = (
    "{label} has {size} rows, as many as there are records: what is captured cannot be protected. "
    "Pass it as an argument of step(), and read it from there. (A public constant that has this "
    "length by chance: keep it as c[None], or torch.tensor([c]) of a list, and read c[0].)"
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
    memory = {address(x.tensor) for x in records.columns if isinstance(x, TensorColumn)}
    memory |= {_base(x.array) for x in records.columns if isinstance(x, ArrayColumn)}
    given = [x for x in records.given if _rows(x) == records.count]
    memory |= {address(x) for x in given if isinstance(x, Tensor)}
    memory |= {_base(x) for x in given if isinstance(x, np.ndarray)}
    for label, tensor in references.tensors:
        if tensor.numel() and address(tensor) in memory:
            raise ModelError(_SAME_MEMORY.format(label=sentence(label)))
    arrays = [(label, x) for label, x in references.held if isinstance(x, np.ndarray)]
    for label, array in arrays:
        if array.size and _base(array) in memory:
            raise ModelError(_SAME_MEMORY.format(label=sentence(label)))
    floats = [(label, np.ascontiguousarray(x)) for label, x in arrays if x.dtype.kind == "f"]
    for label, tensor in [*references.tensors, *((n, torch.from_numpy(x)) for n, x in floats)]:
        _refuse(label, tensor, records)
    for place in references.places:
        _refuse(place.label, torch.tensor(place.floats(), dtype=torch.float64), records)


def refuse_numbers(values: dict[str, Tensor], records: Records) -> None:
    """:raises ModelError: a parameter starts at numbers of the data; names it."""
    for name, value in values.items():
        _refuse(f"the initial value of parameter {name!r}", value, records)


def _refuse(label: str, value: Tensor, records: Records) -> None:
    """:raises ModelError: the value has a row of the data in it, or a mean of theirs."""
    if what := records.numbers.found_in(value):
        raise ModelError(_NUMBERS.format(label=sentence(label), what=what))


def _base(array: Any) -> int:
    """Of the memory that an array and its views share; -1 of what is no array."""
    if not isinstance(array, np.ndarray):
        return -1
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
