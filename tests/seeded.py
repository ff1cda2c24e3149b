"""Seeded runs that many tests begin with, and records as inferences see them."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import torch
from sums import exact_sums

from pyro_dp import ClippingWarning, ConvergenceWarning, Noise, PrivacyAccountant
from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.records.plate import find_plate
from pyro_dp.records.records import Reading, Records


def seeded(
    kind: type,
    model: Callable,
    guide: Callable,
    *data: Any,
    epsilon: float | None = None,
    noise: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """The inference after a run, whose warnings about its result are ignored.

    :param guide: makes the guide of the model.
    :param epsilon: the budget; None: there is none.
    :param noise: the multiplier; None: it follows from the budget.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    settings = {"accountant": PrivacyAccountant(epsilon), "noise": Noise(noise, source=seed)}
    inference = kind(model, guide(model), **settings | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", ClippingWarning)
        inference.run(*data, progress=False)
    return inference


def records_of(model: Callable, *data: Any, plate: str | None = None) -> Records:
    """The model's records, read by index."""
    return Records(model, find_plate(model, data, {}, plate), data, {}, Reading.BY_INDEX)


def look_sums(sep: Any, frame: Frame | None, indices: Iterable[int]) -> list[torch.Tensor]:
    """Exact sums of some records in a look with this frame, or in the opening (None).

    :param sep: a DPSEP that has seen its data.
    """
    prepared, known = sep._kept.prepared, replace(sep._fit.approximation, frame=frame)
    clipped, at = ClippedSum(known.blocks), known.at(prepared.records.plate.size)
    chosen, stream = torch.tensor(list(indices)), np.random.default_rng(0)
    known.next_sum(prepared.sites).add(clipped, at, chosen, stream)
    return exact_sums(clipped)
