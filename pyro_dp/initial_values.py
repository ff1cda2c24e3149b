"""Initial values of parameters: computed on placeholders, so that they say nothing of the data."""

import copy
import weakref
from collections.abc import Callable

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_dp.arguments import Arguments
from pyro_dp.captured_data import refuse_numbers
from pyro_dp.captured_state import CapturedState, Changes, require_same_changes
from pyro_dp.errors import ModelError
from pyro_dp.guard import guarded
from pyro_dp.randomness import forked_rng
from pyro_dp.records import Records


def initialise(model: Callable, guide: Callable, records: Records, state: CapturedState) -> None:
    """Run the guide once, on placeholders.

    :param state: what model and guide refer to.
    :raises ModelError: on other rows a parameter would have started at another value, or something
        would have been kept of them; or a value is one of the data's.
    """
    # All N rows, so that a guide with latents per record shows it.
    public = records.arguments(records.placeholder(), length=records.plate.size)
    new = [each for each in _autoguides(guide) if each.prototype_trace is None]
    initial, kept = _first_run(model, guide, public, state)
    on_others = _first_run_on_others(model, guide, records, state)
    if on_others is not None:
        values, kept_of_others = on_others
        for name in initial.keys() & values.keys():
            if not agree(initial[name], values[name]):
                raise ModelError(
                    f"The initial value of parameter {name!r} depends on the data, and would be "
                    "public: start it at a constant or at random."
                )
        require_same_changes(kept, kept_of_others)
    args, kwargs = public
    with guarded("Initialising the guide on placeholder data", public=True):
        guide(*args, **kwargs)
    for leaf in [leaf for each in new for leaf in each.parameters()]:
        # init_to_value hands over the user's own tensor, which the next guide may start from.
        leaf.data = leaf.data.clone()
    refuse_numbers(initial, records)


def initialised(guide: Callable) -> bool:
    """Whether an autoguide has been run before; its values survive a cleared parameter store."""
    return any(each.prototype_trace is not None for each in _autoguides(guide))


def _autoguides(guide: Callable) -> list[AutoGuide]:
    modules = guide.modules() if isinstance(guide, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, AutoGuide)]


def _first_run(
    model: Callable, guide: Callable, arguments: Arguments, state: CapturedState
) -> tuple[dict[str, Tensor], Changes]:
    """Parameters as they start on public rows, and what else changes; all is put back.

    Without the parameters, if there is something that cannot be copied.
    """
    copies = copied(model, guide)
    store = pyro.get_param_store()
    args, kwargs = arguments
    with (
        forked_rng(),
        store.scope(store.get_state()),
        guarded("Running guide and model once", public=True),
        state.pristine() as kept,
        poutine.trace(param_only=True) as captured,
    ):
        if copies is not None:
            model, guide = copies
            guide(*args, **kwargs)
        model(*args, **kwargs)
    if copies is None:
        return {}, kept
    nodes = captured.trace.nodes.items()
    return {name: site["value"].detach().clone() for name, site in nodes}, kept


def _first_run_on_others(
    model: Callable, guide: Callable, records: Records, state: CapturedState
) -> tuple[dict[str, Tensor], Changes] | None:
    """The same on rows that vary, if the model runs on such."""
    for integers in (True, False):
        rows = records.varied(records.plate.size, seed=1, integers=integers)
        try:
            return _first_run(model, guide, rows, state)
        except ModelError:
            continue
    return None


def copied(model: Callable, guide: Callable) -> tuple[Callable, Callable] | None:
    """Copies that may run before the originals: what they create is not theirs.

    ``None`` if there is something in them that cannot be copied.
    """
    original = AutoGuide.__getstate__
    AutoGuide.__getstate__ = _whole_state
    try:
        new_model, new_guide = copy.deepcopy((model, guide))
    except Exception:  # whatever a user's __deepcopy__ or __reduce__ may raise
        return None
    finally:
        AutoGuide.__getstate__ = original
    if isinstance(guide, torch.nn.Module):
        pairs = list(zip(guide.modules(), new_guide.modules(), strict=True))
        copy_of = {id(old): new for old, new in pairs}
        for old, new in pairs:
            if isinstance(old, AutoGuide) and old.master is not None:
                new.master = weakref.ref(copy_of[id(old.master())])
    return new_model, new_guide


def _whole_state(guide: AutoGuide) -> dict:
    # Pyro's own makes a copied autoguide forget its model, and the original as well.
    return guide.__dict__.copy()


def agree(one: Tensor, other: Tensor, *, tolerance: float | None = None) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    if tolerance is None:
        tolerance = 1e-8 if one.dtype == torch.float64 else 1e-4
    size = one.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * size, equal_nan=True)
