"""From model, guide and records to one record's term: all that is checked and built, in order.

Privacy does not rest on these checks: whatever a release is computed from sees one record only, or
a placeholder (:class:`Records`). They tell the curator where the model meant something else. They
run before any budget is spent, and restore the random state.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.records.additivity import check_additive
from pyro_dp.records.global_draw import Particle, draw_particle
from pyro_dp.records.initial_values import initialise
from pyro_dp.records.local_parameters import find_local_parameters, marked_parameters
from pyro_dp.records.losses import single_particle, user_code
from pyro_dp.records.messengers import Inside, Outside, no_sites
from pyro_dp.records.plate import random_sites
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Records
from pyro_dp.records.site_checks import (
    Runs,
    check_inside,
    check_latents,
    check_outside,
    plate_nesting,
)
from pyro_dp.records.structure_checks import (
    check_coupling,
    check_isolation,
    check_values,
    on_fastest_path,
)
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng

_AT_A_TIME = 2**14  # records whose observations are looked at: each may take more than its row


def build_record_term(
    loss: ELBO,
    model: Callable,
    guide: Callable,
    records: Records,
    *,
    privatize: str = "latents",
    microbatch_size: int | None = None,
) -> tuple[RecordTerm, dict[str, Tensor]]:
    """Initialise the parameters, run every check, and build the term whose gradients are released.

    :returns: the term, and all unconstrained parameters of model and guide by name, except those
        with a row per record, which the term holds.
    :raises ModelError: names the site, parameter or argument that does not fit, and the remedy.
    """
    examples = torch.tensor(records.examples(), device=records.device)
    records.require_finite(records.rows(examples))  # that checks run on; of all, at the end
    with forked_rng():
        marked = marked_parameters(records.plate.size)
        with marked.shown(marked.constants()):
            initialise(model, guide, records)
        local = find_local_parameters(model, guide, records, marked)
        # With the objects that the first run made.
        state = CapturedState(model, guide, *user_code(loss), *records.constants)
        outside = Runs(model, guide, records, Outside, local, state)
        check_outside(outside)
        particle = draw_particle(loss, model, guide, records, local=local)
        check_latents(loss, outside, particle, privatize)
        values = particle.values(particle.detached())
        inside = replace(outside, view=lambda plate: Inside(plate, values))
        check_inside(loss, inside)
        check_coupling(inside)
        if user_code(loss):
            check_additive(loss, inside, particle)
        term = _loop_over_all(loss, model, guide, particle, outside, inside)
        check_isolation(term, particle)
        term = on_fastest_path(term, particle)
        check_values(term, particle, microbatch_size or min(records.block, _AT_A_TIME))
        return _with_released(term, particle), particle.parameters


def _loop_over_all(
    loss: ELBO, model: Callable, guide: Callable, particle: Particle, outside: Runs, inside: Runs
) -> RecordTerm:
    """The term as the loop, with all latents and parameters that it can reach at all."""
    records, sites = inside.records, inside.public
    in_guide, in_model = map(random_sites, (sites["guide"], sites["model"]))
    latent = {name for name, site in in_model.items() if not site["is_observed"]}
    runs = [sites["model"], sites["guide"]] if in_guide else [sites["model"]]
    reached = {name for trace in runs for name in trace.nodes}
    drawn = frozenset(particle.latents)
    return RecordTerm(
        single_particle(loss, plate_nesting(loss, inside)),
        model,
        guide if in_guide else no_sites,
        records,
        CapturedState(model, *([guide] if in_guide else []), *user_code(loss), *records.constants),
        inside.local,
        latents=drawn if in_guide else drawn.intersection(outside.public["model"].nodes),
        parameters={n: leaf for n, leaf in particle.parameters.items() if n in reached},
        released=particle.parameters,
        enumerates=bool(latent - in_guide.keys()),
    )


def _with_released(term: RecordTerm, particle: Particle) -> RecordTerm:
    """:raises ModelError: there is nothing to release."""
    reached = particle.restricted(term.latents).reaches() | term.parameters.keys()
    released = {name: leaf for name, leaf in particle.parameters.items() if name in reached}
    if not (term.latents or released or term.local):
        raise ModelError(
            "The records' terms use neither a latent nor a parameter: there must be a "
            "pyro.sample or pyro.param that the observations depend on."
        )
    return replace(term, released=released)
