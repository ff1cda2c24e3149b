"""Initial values of parameters: computed on placeholders, so that they say nothing of the data."""

import copy
import weakref
from collections.abc import Callable

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_dp.errors import ModelError
from pyro_dp.guard import PLACEHOLDERS, guarded
from pyro_dp.randomness import forked_rng
from pyro_dp.records import Records


def initialise(model: Callable, guide: Callable, records: Records) -> None:
    """Run the guide once, on placeholders.

    :raises ModelError: on the data a parameter would have started at another value.
    """
    # All N rows, so that a guide with latents per record shows it.
    public = records.arguments(records.placeholder(), length=records.plate.size)
    initial = _initial_values(model, guide, public)
    on_data = _initial_values(model, guide, records.unprotected_arguments())
    for name in initial.keys() & on_data.keys():
        if not agree(initial[name], on_data[name]):
            raise ModelError(
                f"The initial value of parameter {name!r} depends on the data, and would be "
                "public: start it at a constant or at random."
            )
    args, kwargs = public
    with guarded("Initialising the guide on placeholder data", hint=PLACEHOLDERS):
        guide(*args, **kwargs)


def _initial_values(
    model: Callable, guide: Callable, arguments: tuple[tuple, dict]
) -> dict[str, Tensor]:
    try:
        model, guide = _copied(model, guide)
    except Exception:  # what cannot be copied is not run on the data
        return {}
    args, kwargs = arguments
    with (
        forked_rng(),
        pyro.get_param_store().scope(),
        guarded("Running guide and model once", hint=PLACEHOLDERS),
        poutine.trace(param_only=True) as captured,
    ):
        guide(*args, **kwargs)
        model(*args, **kwargs)
    return {name: site["value"].detach().clone() for name, site in captured.trace.nodes.items()}


def _copied(model: Callable, guide: Callable) -> tuple[Callable, Callable]:
    """Copies whose lazily created parameters leave the originals as they are."""
    modules = list(guide.modules()) if isinstance(guide, torch.nn.Module) else []
    # Copying an autoguide makes it forget its model and its master, the original included.
    links = [(m._model, m.master) if isinstance(m, AutoGuide) else None for m in modules]
    try:
        new_model, new_guide = copy.deepcopy((model, guide))
    finally:
        for module, link in zip(modules, links, strict=True):
            if link is not None:
                module._model, module.master = link
    copies = list(new_guide.modules()) if modules else []
    copy_of = dict(zip(map(id, modules), copies, strict=True))
    for module, link in zip(copies, links, strict=True):
        if link is not None:
            (its_model,), master = link
            module._model = (new_model if its_model is model else its_model,)
            module.master = None if master is None else weakref.ref(copy_of[id(master())])
    return new_model, new_guide


def agree(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 1e-8 if one.dtype == torch.float64 else 1e-4
    size = one.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * size, equal_nan=True)
