"""The private plate: whose elements are the records, and how it is found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Unit
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.sandbox import PLACEHOLDERS, guarded
from pyro_dp.records.stand_ins import identity, is_table, placeholder
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.rng import forked_rng

_LONGER = (
    "The private plate {plate.name!r} has size {plate.size}, but the longest argument has "
    "{longest} rows: arguments that are longer than the data must be such that the model runs "
    "where all tensors are placeholders. " + PLACEHOLDERS
)
Sites = dict[str, dict]
Traces = dict[str, poutine.Trace]  # of guide and model


@dataclass(frozen=True)
class PrivatePlate:
    """The ``pyro.plate`` whose elements are the protected individuals.

    :param name: its name.
    :param size: N, a public constant.
    :param subsample_size: the batch size that the plate declares (N if none).
    :param enumerates: whether the model marks latents that are to be summed out.
    """

    name: str
    size: int
    subsample_size: int
    enumerates: bool = False

    def holds(self, site: Mapping) -> bool:
        """Whether a site lies within the plate."""
        return self.frame(site) is not None

    def frame(self, site: Mapping) -> Any:
        return next((f for f in site["cond_indep_stack"] if f.name == self.name), None)

    def of_record(self, site: Mapping, position: int) -> Tensor:
        """A site's log densities; of those inside the plate, one element's, if there are more."""
        frame, log_prob = self.frame(site), site["log_prob"]
        if frame is None or frame.dim is None or log_prob.dim() < -frame.dim:
            return log_prob
        length = log_prob.shape[frame.dim]
        return log_prob if length == 1 else log_prob.narrow(frame.dim, position, 1)


def is_random(site: Mapping) -> bool:
    """A sample site with a density.

    Neither a plate's indices nor a function of other sites, be it ``pyro.deterministic`` or what a
    reparameterisation leaves behind.
    """
    if site["type"] != "sample" or isinstance(site["fn"], _Subsample):
        return False
    fn = site["fn"]
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return not (site["is_observed"] and isinstance(fn, Delta))


def random_sites(trace: poutine.Trace) -> Sites:
    return {name: site for name, site in trace.nodes.items() if is_random(site)}


def traced(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Traces:
    """Runs of the guide, and of the model replayed against it, with all log densities."""
    of_guide = poutine.trace(guide).get_trace(*args, **kwargs)
    of_model = poutine.trace(poutine.replay(model, trace=of_guide)).get_trace(*args, **kwargs)
    for trace in (of_guide, of_model):
        trace.compute_log_prob(lambda name, site: is_random(site))
    return {"guide": of_guide, "model": of_model}


def find_plate(model: Callable, args: tuple, kwargs: dict, name: str | None) -> PrivatePlate:
    """Run the model once, on placeholders, and find the plate that holds the observations.

    Every tensor is replaced by a placeholder of its shape; where the model does not run on these,
    square matrices by identities; where it does not run on these, either, only tensors that are as
    long as the longest are replaced.

    Random state and parameter store are restored.

    :param name: the plate's name, or ``None`` if exactly one plate holds observed sites.
    :raises ModelError: no such plate or several; an observed site outside the plate; the model does
        not run on placeholders.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    lengths = [len(x) for x in leaves if is_table(x)]
    longest = max(lengths, default=0)
    attempts: list[Callable[[Any], Any]] = [placeholder]
    if any(is_table(x) and x.shape[-1:] == x.shape[-2:-1] for x in leaves):
        attempts.append(identity)
    if any(length < longest for length in lengths):
        attempts.append(partial(_unless_longest, longest))
    errors = []
    for stand_in in attempts:
        try:
            given, named = pytree.tree_unflatten(map(stand_in, leaves), spec)
            plate = _find_plate(model, given, named, name)
        except ModelError as error:
            # A later text could quote what is shorter than the longest, and data all the same.
            errors.append(error)
            continue
        if stand_in not in (placeholder, identity) and plate.size != longest:
            raise ModelError(_LONGER.format(plate=plate, longest=longest))
        return plate
    raise errors[0]


def _unless_longest(longest: int, leaf: Any) -> Any:
    return leaf.clone() if is_table(leaf) and len(leaf) < longest else placeholder(leaf)


def _find_plate(model: Callable, args: tuple, kwargs: dict, name: str | None) -> PrivatePlate:
    store = pyro.get_param_store()
    with (
        forked_rng(),
        store.scope(store.get_state()),
        torch.no_grad(),
        guarded("Running the model on placeholder data", public=True),
    ):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    observed = {
        key: site["cond_indep_stack"]
        for key, site in trace.nodes.items()
        if site["type"] == "sample" and site["is_observed"] and is_random(site)
    }
    if not observed:
        raise ModelError(
            "The model has no observed site: pass the data with obs= inside a pyro.plate."
        )
    candidates = {frame.name: frame for stack in observed.values() for frame in stack}
    listed = ", ".join(map(repr, sorted(candidates)))
    if not candidates:
        raise ModelError(
            "plate: no pyro.plate holds the observed sites; put them inside one, with one element "
            "per individual: with pyro.plate('data', len(x)) as idx: pyro.sample(..., obs=y[idx])."
        )
    if name is None and len(candidates) > 1:
        raise ModelError(
            f"plate: several plates hold observed sites ({listed}); name the one whose elements "
            "are the protected individuals with plate='...'. Plates nested inside it are part of "
            "the record."
        )
    if name is not None and name not in candidates:
        raise ModelError(f"plate={name!r} holds no observed site; the plates that do: {listed}.")
    frame = candidates[name or next(iter(candidates))]
    if frame.full_size is None or frame.full_size < 0:
        raise ModelError(
            f"plate: the private plate {frame.name!r} has no size: give the plate a size, the "
            f"number of records, as in pyro.plate({frame.name!r}, len(x))."
        )
    marked = any(
        site["infer"].get("enumerate")
        for site in trace.nodes.values()
        if site["type"] == "sample" and not site["is_observed"]
    )
    plate = PrivatePlate(frame.name, int(frame.full_size), int(frame.size), marked)
    for key, stack in observed.items():
        if plate.name in {frame.name for frame in stack}:
            continue
        if isinstance(trace.nodes[key]["fn"], Unit):
            raise ModelError(
                f"pyro.factor {key!r} stands outside the private plate {plate.name!r}: put terms "
                "of the records inside, one for each record; a term of the latents alone goes "
                "there, too, divided by the plate's size."
            )
        raise ModelError(
            f"Site {key!r} is observed outside the private plate {plate.name!r}: move it inside, "
            "or use what it observes as a public constant."
        )
    return plate
