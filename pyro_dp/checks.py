"""Structural checks: do model and guide decompose over the private plate's records?

Privacy does not rest on these checks: a model only ever sees one record, or a placeholder
(:class:`Records`), and what is released does not depend on their outcome. They tell the curator
where the model meant something else. They run before any budget is spent, and restore random state
and parameter store.
"""

import warnings
from collections.abc import Callable

import torch
from pyro import poutine
from pyro.infer import ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dp.errors import ModelError, PrivacyError
from pyro_dp.gradients import Batch, RecordGradients, RecordTerm
from pyro_dp.guard import guarded
from pyro_dp.initial_values import agree, initialise
from pyro_dp.outside import Particle, draw_particle
from pyro_dp.plates import Inside, OneRecord, Outside, PrivatePlate, is_random
from pyro_dp.randomness import LocalStream, Randomness, forked_rng
from pyro_dp.record_mode import LocalDraws
from pyro_dp.records import Records

_WHOLE_TENSORS = (
    "In the private plate, index what is read (with pyro.plate(...) as idx: ... x[idx]), or use "
    "slice_data=True for a model that is written for whole tensors."
)
Arguments = tuple[tuple, dict]
Sites = dict[str, dict]


def build_record_term(
    loss: ELBO, model: Callable, guide: Callable, records: Records, *, privatize: str
) -> tuple[RecordTerm, dict[str, Tensor]]:
    """Initialise the parameters, run every check, and build the term whose gradients are released.

    :returns: the term, and all unconstrained parameters of model and guide by name.
    :raises ModelError: names the site, parameter or argument that does not fit, and what to do.
    """
    records.require_finite()
    with forked_rng():
        initialise(model, guide, records)
        outside = _Runs(model, guide, records, Outside)
        _check_outside(outside, records)
        particle = draw_particle(loss, model, guide, records)
        _check_latents(loss, outside.public, particle, privatize)
        values = particle.values(particle.detached())
        inside = _Runs(model, guide, records, lambda plate: Inside(plate, values)).public
        _check_inside(loss, inside, records.plate)
        term = RecordTerm(
            loss,
            model,
            guide,
            runs_guide=bool(_random_sites(inside["guide"])),
            max_plate_nesting=_plate_nesting(loss, inside),
        )
        _let_touch(term, particle, outside.public, inside)
        _check_isolation(term, records, particle)
        _choose_path(term, records, particle)
        _check_support(term, records, particle)
    return term, particle.parameters


class _Runs:
    """Guide and model, replayed against it, for one record, as ``view`` shows them.

    :param view: :class:`Outside` or :class:`Inside`, for a plate.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        records: Records,
        view: Callable[[PrivatePlate], Messenger],
    ):
        self._model, self._guide, self._records, self._view = model, guide, records, view
        self.public = self.on(records.arguments(records.placeholder()))

    def on(self, arguments: Arguments) -> dict[str, poutine.Trace]:
        args, kwargs = arguments
        plate = self._records.plate
        first = torch.zeros(1, dtype=torch.long, device=self._records.device)
        with (
            forked_rng(),
            guarded("Running guide and model on one record", hint=_WHOLE_TENSORS),
            OneRecord(plate, first),
        ):
            guide = poutine.trace(self._view(plate)(self._guide)).get_trace(*args, **kwargs)
            replayed = poutine.replay(self._view(plate)(self._model), trace=guide)
            model = poutine.trace(replayed).get_trace(*args, **kwargs)
            for trace in (guide, model):
                trace.compute_log_prob(lambda name, site: is_random(site))
        return {"guide": guide, "model": model}


def _random_sites(trace: poutine.Trace) -> Sites:
    return {name: site for name, site in trace.nodes.items() if is_random(site)}


def _check_outside(outside: _Runs, records: Records) -> None:
    """What lies outside the plate must be the same on placeholders and on data."""
    arguments = [records.arguments(_row(records, i)) for i in _examples(records)]
    if not records.slice_data:
        arguments.append(records.unprotected_arguments())
    for on_data in map(outside.on, arguments):
        for part, trace in outside.public.items():
            expected, sites = _random_sites(trace), _random_sites(on_data[part])
            for name in expected.keys() | sites.keys():
                one, other = expected.get(name), sites.get(name)
                if not (one and other and _same_site(one, other)):
                    raise ModelError(
                        f"Site {name!r} of the {part} lies outside the private plate "
                        f"{records.plate.name!r} but depends on the data: only sites inside the "
                        "plate may read them."
                    )


def _same_site(one: dict, other: dict) -> bool:
    return all(agree(one[key], other[key]) for key in ("value", "log_prob"))


def _check_latents(
    loss: ELBO, outside: dict[str, poutine.Trace], particle: Particle, privatize: str
) -> None:
    """Latents outside the plate come from the guide, and records have a gradient for them."""
    in_guide, in_model = _random_sites(outside["guide"]), _random_sites(outside["model"])
    for name, site in (in_model | in_guide).items():
        if _is_enumerated(loss, site):
            raise ModelError(
                f"Global site {name!r} is enumerated: a sum over it does not decompose over "
                "records. Move it inside the private plate, or sample it in the guide."
            )
        if name not in in_guide:
            raise ModelError(f"Global latent site {name!r} of the model is not in the guide.")
    for name in particle.fixed:
        if privatize == "latents":
            raise ModelError(
                f"Global site {name!r} is not reparameterised, so that records have no gradient "
                "with respect to it: use privatize='parameters'."
            )
        if isinstance(loss, TraceMeanField_ELBO):
            raise ModelError(f"Global site {name!r} is not reparameterised: use Trace_ELBO.")


def _is_enumerated(loss: ELBO, site: dict) -> bool:
    return (
        isinstance(loss, TraceEnum_ELBO)
        and bool(site["infer"].get("enumerate"))
        and getattr(site["fn"], "has_enumerate_support", False)
    )


def _check_inside(loss: ELBO, inside: dict[str, poutine.Trace], plate: PrivatePlate) -> None:
    """Each site inside the plate belongs to one record; each latent is drawn or summed out."""
    in_guide, in_model = _random_sites(inside["guide"]), _random_sites(inside["model"])
    for name, site in (*in_guide.items(), *in_model.items()):
        dim, shape = plate.frame(site).dim, site["log_prob"].shape
        if dim is not None and len(shape) >= -dim and shape[dim] != 1:
            raise ModelError(
                f"Site {name!r} has a batch of its own along the private plate {plate.name!r}. "
                f"{_WHOLE_TENSORS} A guide cannot hold a latent per record."
            )
    for name, site in in_model.items():
        if not site["is_observed"] and name not in in_guide and not _is_enumerated(loss, site):
            raise ModelError(
                f"Latent site {name!r} of the model is not in the guide: add it there, or sum it "
                "out with TraceEnum_ELBO and infer={'enumerate': 'parallel'}."
            )


def _plate_nesting(loss: ELBO, inside: dict[str, poutine.Trace]) -> float:
    if loss.max_plate_nesting != float("inf"):
        return loss.max_plate_nesting
    sites = [site for trace in inside.values() for site in _random_sites(trace).values()]
    frames = [frame for site in sites for frame in site["cond_indep_stack"]]
    return max((-frame.dim for frame in frames if frame.dim is not None), default=0)


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

    first = records.arguments(_row(records, 0))
    gradients, loss = at(0, first)
    for i in _examples(records, 12):
        moved, moved_loss = at(i, first)
        for name in term.parameters.keys() & gradients.keys() & moved.keys():
            if not agree(gradients[name], moved[name]):
                raise ModelError(
                    f"Parameter {name!r} has values of its own for each record of plate "
                    f"{records.plate.name!r}: use a guide that computes them from the record "
                    "(amortisation)."
                )
        if not agree(loss, moved_loss):
            raise ModelError(
                f"The term of a record changes with its index in plate {records.plate.name!r} "
                "although its row does not: the model reads data that are no argument of step(), "
                "or not indexed along their first dimension. Pass them as a tensor with one row "
                "per record."
            )
    for i in () if records.slice_data else _examples(records):
        _, own_loss = at(i, records.arguments(_row(records, i)))
        _, whole_loss = at(i, records.unprotected_arguments())
        if not agree(own_loss, whole_loss):
            raise ModelError(
                "The term of a record moves when other records change: the model reads other rows "
                "(a mean over the data, a shifted index, batch statistics). A record may read only "
                "its own x[idx]."
            )


def _choose_path(term: RecordTerm, records: Records, particle: Particle) -> None:
    """Vectorise if that gives the loop's numbers; else say why not, once.

    The choice, and what a record's gradient consists of, are made on placeholders: they are public.
    """
    indices = torch.tensor(_examples(records), device=records.device)
    public = [row.expand(len(indices), *row.shape) for row in records.placeholder()]
    placeholder = records.arguments(records.placeholder())
    draws = LocalDraws(stream=_stream(), index=indices[0])
    used, _ = term.single(records, particle, indices[0], placeholder, draws)
    term.draws = draws.requested
    reason = _why_not_vectorized(term, records, particle, Batch(indices, public, _stream()))
    if reason is not None:
        # Control flow may make other records use more: nothing that can be reached is dropped.
        term.vectorizes = False
        warnings.warn(
            f"Gradients are taken one record at a time, which is slow: {reason}.", stacklevel=2
        )
        return
    examples = Batch(indices, records.rows(indices), _stream())
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
        return str(error).rstrip(".")
    except Exception as error:
        return f"torch.func raised {type(error).__name__}"
    if other_draws or _same_gradients(looped, vectorized):
        return None
    return "the vectorised gradient differs from the loop's"


def _check_support(term: RecordTerm, records: Records, particle: Particle) -> None:
    """Every record's observations lie in the support of their distributions, as Pyro validates."""
    if not term.vectorizes:
        return
    for indices in torch.arange(records.plate.size, device=records.device).split(4096):
        batch = Batch(indices, records.rows(indices), _stream())
        for name, supported in term.supported(records, particle, batch).items():
            if not supported.all():
                raise ModelError(
                    f"Site {name!r} observes values outside the support of its distribution. "
                    "(This message depends on the data: it is for the curator only.)"
                )


def _same_gradients(one: RecordGradients, other: RecordGradients) -> bool:
    pairs = [(one.latents, other.latents), (one.parameters, other.parameters)]
    return all(agree(these[name], those[name]) for these, those in pairs for name in these)


def _stream() -> LocalStream:
    """The same numbers for every check; nothing is released from them."""
    return LocalStream(Randomness(0).stream("local", 0))


def _examples(records: Records, count: int = 3) -> list[int]:
    return sorted({i * (records.plate.size - 1) // (count - 1) for i in range(count)})


def _row(records: Records, index: int) -> list[Tensor]:
    return [rows[0] for rows in records.rows(torch.tensor([index]))]
