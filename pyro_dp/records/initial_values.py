"""Initial values of parameters, computed on placeholders, so that they reveal nothing."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState, Changes, require_same_changes
from pyro_dp.records.arguments import Arguments
from pyro_dp.records.first_look import refuse_numbers
from pyro_dp.records.plate import OneRecord, no_sites, random_sites, traced
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import FewIndices, on_varied
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng, seed_torch

_STARTS = (
    "The initial value of parameter {name!r} depends on the data, and would be public: start it at "
    "a constant or at random."
)
_SHAPE = (
    "The shape of parameter {name!r} depends on the data, and would be public. Write a number of "
    "groups or levels as a constant, not as group.max() + 1."
)
_AUTOGUIDE_STARTS = (
    " An autoguide starts at the model's priors, or as its init_loc_fn says. Neither may read the "
    "data, as a prior with its mean at y.mean() does."
)
_SUPPORT = (
    "The prior of site {name!r} has other bounds on other data, and the autoguide would keep them. "
    "Write bounds that are public, as in dist.Uniform(0.0, 100.0), not x.max()."
)
_REMEMBERS = (
    "Site {name!r} of the {part} changes after a run on other data: something of them is "
    "kept{by}. Compute it from the record each time, in a local variable."
)


def initialise(model: Callable, guide: Callable, records: Records) -> None:
    """Run the guide once, on placeholders.

    :raises ModelError: parameters start at other values, or terms change, after a first run on
        other rows; or a parameter starts at numbers of the data.
    """
    new = [each for each in _autoguides(guide) if each.prototype_trace is None]
    size, first = _on_public_rows(model, guide, records)
    run = partial(_first_run, model, guide, records, size)
    other = on_varied(lambda integers: run(records.varied(size, seed=1, integers=integers)))
    if other is not None:
        _require_same(first, other, [f"{each._pyro_name}." for each in new])
    # A model that reads by index reads only as many rows as there are indices.
    args, kwargs = _public(records, size if records.slice_data else records.plate.size)
    few = FewIndices(records.plate.size, size)
    with few.shown(), guarded("Initialising the guide on placeholder data", public=True):
        guide(*args, **kwargs)
    for leaf in [leaf for each in new for leaf in each.parameters()]:
        # init_to_value passes the user's tensor itself, from which the next guide may start.
        leaf.data = leaf.data.clone()
    refuse_numbers(first.values, records)


def _public(records: Records, length: int) -> Arguments:
    return records.arguments(records.placeholder(), length=length)


def _on_public_rows(model: Callable, guide: Callable, records: Records) -> tuple[int, "FirstRun"]:
    """How many rows the first run needs, and that run: N rows, or fewer with the same values.

    It needs N rows if a parameter has a row per record, or starts at a function of N.
    """
    size, shown = records.plate.size, records.shown

    def run(length: int) -> FirstRun:
        return _first_run(model, guide, records, length, _public(records, length))

    if shown < size and copied(model, guide) is not None:
        with contextlib.suppress(ModelError):
            first, other = run(shown), run(shown - 1).values
            if first.values.keys() == other.keys() and all(
                value.shape == other[name].shape
                and size not in value.shape
                and (agree(value, other[name]) or not records.slice_data)
                for name, value in first.values.items()
            ):
                return shown, first
    return size, run(size)


def initialised(guide: Callable) -> bool:
    """Whether an autoguide has run before: its values survive a cleared parameter store."""
    return any(each.prototype_trace is not None for each in _autoguides(guide))


def _autoguides(guide: Callable) -> list[AutoGuide]:
    modules = guide.modules() if isinstance(guide, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, AutoGuide)]


@dataclass(frozen=True)
class FirstRun:
    """The effects of a first run on public rows.

    :param values: initial values of the parameters; none, if model or guide cannot be copied.
    :param terms: log densities of a placeholder's sites, after the run.
    :param changes: state that user code kept. It is put back.
    """

    values: dict[str, Tensor]
    terms: dict[tuple[str, str], Tensor]
    changes: Changes


def _first_run(
    model: Callable, guide: Callable, records: Records, count: int, arguments: Arguments
) -> FirstRun:
    """Run guide and model on these public arguments, of ``count`` rows."""
    copies = copied(model, guide)
    model, guide = copies or (model, guide)
    # Pyro's guides keep state of their first run. Only a copy can be thrown away.
    runs_guide = copies is not None or not isinstance(guide, torch.nn.Module)
    store = pyro.get_param_store()
    args, kwargs = arguments
    with (
        forked_rng(),
        store.scope(store.get_state()),
        guarded("Running guide and model once", public=True),
        CapturedState(model, guide, *records.constants).pristine() as changes,
        FewIndices(records.plate.size, count).shown(),
    ):
        with poutine.trace(param_only=True) as captured:
            if runs_guide:
                guide(*args, **kwargs)
            model(*args, **kwargs)
        terms = _terms_afterwards(model, guide if runs_guide else no_sites, records)
    nodes = captured.trace.nodes.items() if copies else ()
    values = {name: site["value"].detach().clone() for name, site in nodes}
    return FirstRun(values, terms, changes)


def _terms_afterwards(
    model: Callable, guide: Callable, records: Records
) -> dict[tuple[str, str], Tensor]:
    args, kwargs = records.arguments(records.placeholder())
    first = torch.zeros(1, dtype=torch.long, device=records.device)
    seed_torch(0)
    with OneRecord(records.plate, first), contextlib.suppress(Exception):  # later checks say why
        return {
            (part, name): site["log_prob"].detach()
            for part, trace in traced(model, guide, args, kwargs).items()
            for name, site in random_sites(trace).items()
        }
    return {}


def _require_same(first: FirstRun, other: FirstRun, autoguides: Sequence[str]) -> None:
    for name in first.values.keys() & other.values.keys():
        if first.values[name].shape != other.values[name].shape:
            raise ModelError(_SHAPE.format(name=name))
        if not agree(first.values[name], other.values[name]):
            why = _AUTOGUIDE_STARTS if name.startswith(tuple(autoguides)) else ""
            raise ModelError(_STARTS.format(name=name) + why)
    for part, name in sorted(first.terms.keys() & other.terms.keys()):  # the guide's first
        if not agree(first.terms[part, name], other.terms[part, name]):
            if part == "guide" and any("prototype_trace" in label for label, _ in other.changes):
                raise ModelError(_SUPPORT.format(name=name))
            require_same_changes(first.changes, other.changes)
            kept = ", ".join(label for label, _ in other.changes)
            by = f" ({kept})" if kept else ""
            raise ModelError(_REMEMBERS.format(name=name, part=part, by=by))


def copied(model: Callable, guide: Callable) -> tuple[Callable, Callable] | None:
    """Copies of model and guide, whose runs do not change the originals.

    ``None`` if one of their objects cannot be copied.
    """
    try:
        # Pyro's __getstate__ makes the copy and the original of an autoguide forget their model.
        with mock.patch.object(AutoGuide, "__getstate__", lambda guide: guide.__dict__.copy()):
            new_model, new_guide = copy.deepcopy((model, guide))
    except Exception:  # whatever a user's __deepcopy__ or __reduce__ may raise
        return None
    if isinstance(guide, torch.nn.Module) and isinstance(new_guide, torch.nn.Module):
        pairs: list[tuple[Any, Any]] = list(zip(guide.modules(), new_guide.modules(), strict=True))
        copy_of = {id(old): new for old, new in pairs}
        for old, new in pairs:
            if isinstance(old, AutoGuide) and old.master is not None:
                new.master = weakref.ref(copy_of[id(old.master())])
    return new_model, new_guide
