"""Structural checks: do model and guide decompose over the private plate's records?

Privacy does not rest on these checks: whatever a release is computed from sees one record only, or
a placeholder (:class:`Records`). They tell the curator where the model meant something else. They
run before any budget is spent, and restore the random state.
"""

import warnings
from collections.abc import Callable

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState, require_same_changes
from pyro_dp.mechanism.streams import LocalStream, Randomness
from pyro_dp.records.coupling import check_coupling
from pyro_dp.records.global_draw import Particle, draw_particle
from pyro_dp.records.initial_values import agree, initialise
from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.local_parameters import find_local_parameters, marked_parameters
from pyro_dp.records.messengers import Inside, Outside
from pyro_dp.records.record_term import Batch, RecordGradients, RecordTerm
from pyro_dp.records.records import Arguments, Records
from pyro_dp.records.site_checks import (
    Runs,
    check_inside,
    check_latents,
    check_outside,
    plate_nesting,
    random_sites,
)
from pyro_dp.utils.errors import ModelError, PrivacyError
from pyro_dp.utils.rng import forked_rng

_REMEMBERS = (
    "The term of a record changes after another record was looked at: the model keeps something of "
    "the data that it is shown. Compute it from the record each time, in a local variable."
)


def build_record_term(
    loss: ELBO,
    model: Callable,
    guide: Callable,
    records: Records,
    *,
    privatize: str,
    microbatch_size: int | None = None,
) -> tuple[RecordTerm, dict[str, Tensor]]:
    """Initialise the parameters, run every check, and build the term whose gradients are released.

    :returns: the term, and all unconstrained parameters of model and guide by name, but for those
        with a row per record, which the term holds.
    :raises ModelError: names the site, parameter or argument that does not fit, and what to do.
    """
    records.require_finite()
    with forked_rng():
        marked = marked_parameters(records.plate.size)
        with marked.shown(marked.constants()):
            initialise(model, guide, records)
        local = find_local_parameters(model, guide, records, marked)
        state = CapturedState(model, guide, *records.constants)  # with what the first run made
        outside = Runs(model, guide, records, Outside, local, state)
        check_outside(outside, records)
        particle = draw_particle(loss, model, guide, records, local=local)
        check_latents(loss, outside.public, particle, privatize)
        values = particle.values(particle.detached())
        runs = Runs(model, guide, records, lambda plate: Inside(plate, values), local, state)
        inside = runs.public
        check_inside(loss, inside, records)
        check_coupling(runs, records)
        in_guide, in_model = random_sites(inside["guide"]), random_sites(inside["model"])
        latent = {name for name, site in in_model.items() if not site["is_observed"]}
        term = RecordTerm(
            loss,
            model,
            guide,
            runs_guide=bool(in_guide),
            enumerates=bool(latent - in_guide.keys()),
            max_plate_nesting=plate_nesting(loss, inside),
            constants=records.constants,
        )
        term.local = local
        _let_touch(term, particle, outside.public, inside)
        _check_isolation(term, records, particle)
        _choose_path(term, records, particle)
        _check_support(term, records, particle, microbatch_size or 1024)
        reached = particle.restricted(term.latents).reaches() | term.parameters.keys()
        term.released = {n: x for n, x in particle.parameters.items() if n in reached}
        if not term.latents and not term.released:
            raise ModelError(
                "The records' terms use neither a latent nor a parameter: there must be a "
                "pyro.sample or pyro.param that the observations depend on."
            )
    return term, particle.parameters


def _let_touch(
    term: RecordTerm,
    particle: Particle,
    outside: dict[str, poutine.Trace],
    inside: dict[str, poutine.Trace],
) -> None:
    """Latents and parameters that a record's term can reach at all."""
    runs = [inside["model"], inside["guide"]] if term.runs_guide else [inside["model"]]
    reached = {name for trace in runs for name in trace.nodes}
    term.parameters = {n: leaf for n, leaf in particle.parameters.items() if n in reached}
    drawn = set(particle.latents)
    term.latents = drawn if term.runs_guide else drawn & outside["model"].nodes.keys()


def _check_isolation(term: RecordTerm, records: Records, particle: Particle) -> None:
    """The term must depend on its own row, and on nothing else that its index points to."""

    def at(index: int, arguments: Arguments) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        position = torch.tensor(index, device=records.device)
        # The same draws wherever the index points.
        draws = LocalDraws(stream=_stream(), index=torch.tensor(0))
        return term.single(records, particle, position, arguments, draws)

    first = records.arguments(records.row(0))
    gradients, loss = at(0, first)
    for i in records.examples(12):
        moved, moved_loss = at(i, first)
        for name in term.parameters.keys() & gradients.keys() & moved.keys():
            if not agree(gradients[name], moved[name]):
                raise ModelError(
                    f"Parameter {name!r} has values that depend on the record's index in plate "
                    f"{records.plate.name!r}, but not one row per record, at its index: make it "
                    "so (loc[idx]), or compute the values from the record (amortisation)."
                )
        if not agree(loss, moved_loss):
            raise ModelError(
                f"The term of a record changes with its index in plate {records.plate.name!r} "
                "although its row does not: the model reads data that are no argument of step(), "
                "or not indexed along their first dimension. Pass them as a tensor with one row "
                "per record."
            )
    with term.state.pristine() as once:
        at(0, first)
    with term.state.pristine() as changes:
        for i in records.examples()[1:]:
            at(i, records.arguments(records.row(i)))
        _, again = at(0, first)
    if not agree(loss, again):
        require_same_changes(once, changes)
        raise ModelError(_REMEMBERS)


def _choose_path(term: RecordTerm, records: Records, particle: Particle) -> None:
    """Vectorise if that gives the loop's numbers; else say why not, once.

    The choice, and what a record's gradient consists of, are made on placeholders: they are public.
    """
    indices = torch.tensor(records.examples(), device=records.device)
    public = [row.expand(len(indices), *row.shape) for row in records.placeholder()]
    placeholder = records.arguments(records.placeholder())
    draws = LocalDraws(stream=_stream(), index=indices[0])
    used, _ = term.single(records, particle, indices[0], placeholder, draws)
    term.draws = draws.requested
    local = {
        name: row.expand(len(indices), *row.shape) for name, row in term.local.constants().items()
    }
    batch = Batch(indices, public, _stream(), local_rows=local)
    reason = _why_not_vectorized(term, records, particle, batch)
    if reason is not None:
        # Control flow may make other records use more: nothing that can be reached is dropped.
        term.vectorizes = False
        warnings.warn(
            f"Gradients are taken one record at a time, which is slow: {reason}.", stacklevel=2
        )
        return
    examples = Batch(indices, records.rows(indices), _stream(), local_rows=local)
    reason = _why_not_vectorized(term, records, particle, examples)
    if reason is not None:
        raise ModelError(f"The model was vectorised on placeholders, but on the data {reason}.")
    term.parameters = {name: leaf for name, leaf in term.parameters.items() if name in used}
    term.latents &= used.keys()


def _why_not_vectorized(
    term: RecordTerm, records: Records, particle: Particle, batch: Batch
) -> str | None:
    before = torch.get_rng_state()
    looped = term.looped(records, particle, batch)
    other_draws = not torch.equal(before, torch.get_rng_state())
    try:
        vectorized = term.vectorized(records, particle, batch)
    except PrivacyError as error:
        return str(error).split(". ")[0].rstrip(".")
    except Exception as error:
        return f"torch.func raised {type(error).__name__}"
    if other_draws or _same_gradients(looped, vectorized):
        return None
    return "the vectorised gradient differs from the loop's"


def _check_support(term: RecordTerm, records: Records, particle: Particle, batch_size: int) -> None:
    """Observations lie in the support of their distributions, as Pyro's validation would ask."""
    indices = torch.arange(records.plate.size, device=records.device)
    if not term.vectorizes:  # one at a time is slow: a part of them
        indices, batch_size = indices[records.examples(100)], 1
    for chosen in indices.split(batch_size):
        batch = Batch(chosen, records.rows(chosen), _stream())
        for name, supported in term.supported(records, particle, batch).items():
            if not supported.all():
                raise ModelError(
                    f"Site {name!r} observes values outside the support of its distribution: "
                    "recode or scale them (a Bernoulli takes 0 and 1). (This message depends on "
                    "the data: it is for the curator only.)"
                )


def _same_gradients(one: RecordGradients, other: RecordGradients) -> bool:
    """Equal up to rounding, relative to the largest gradient of all."""
    pairs = [
        (getattr(one, part), getattr(other, part)) for part in ("latents", "parameters", "local")
    ]
    flat = [
        (these[name].flatten().double(), those[name].flatten().double())
        for these, those in pairs
        for name in these
    ]
    if not flat:
        return True
    ours, theirs = (torch.cat(column) for column in zip(*flat, strict=True))
    exact = all(x.dtype == torch.float64 for x in (*one.latents.values(), *one.parameters.values()))
    return agree(ours, theirs, tolerance=1e-8 if exact else 1e-4)


def _stream() -> LocalStream:
    """The same numbers for every check; nothing is released from them."""
    return LocalStream(Randomness(0).stream("local", 0))
