"""Structural checks: do model and guide decompose over the private plate's records?

Privacy does not rest on these checks: whatever a release is computed from sees one record only, or
a placeholder (:class:`Records`). They tell the curator where the model meant something else. They
run before any budget is spent, and restore the random state.
"""

import contextlib
import warnings
from collections.abc import Callable

import torch
from pyro import poutine
from pyro.infer import ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dp.errors import ModelError, PrivacyError
from pyro_dp.gradients import Batch, RecordGradients, RecordTerm
from pyro_dp.guard import guarded, unchanged_buffers
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
_COMPARED = ("value", "log_prob")
Arguments = tuple[tuple, dict]
Sites = dict[str, dict]


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
        with unchanged_buffers():
            _check_isolation(term, records, particle)
            _choose_path(term, records, particle)
            _check_support(term, records, particle, microbatch_size or 1024)
        reached = particle.restricted(term.latents).reaches() | term.parameters.keys()
        term.released = {n: x for n, x in particle.parameters.items() if n in reached}
        if not term.latents and not term.released:
            raise ModelError("The records' terms use neither a latent nor a parameter.")
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
        self._parameters: set[str] | None = None
        self.public = self.on(records.arguments(records.placeholder()))
        self._parameters = {
            name
            for trace in self.public.values()
            for name, site in trace.nodes.items()
            if site["type"] == "param"
        }

    def with_view(self, view: Callable[[PrivatePlate], Messenger]) -> "_Runs":
        return _Runs(self._model, self._guide, self._records, view)

    def on(self, arguments: Arguments, *, one_record: bool = True) -> dict[str, poutine.Trace]:
        """Traces of guide and model.

        :param one_record: else the whole plate.
        """
        args, kwargs = arguments
        plate = self._records.plate
        first = torch.zeros(1, dtype=torch.long, device=self._records.device)
        restriction = OneRecord(plate, first, self._parameters)
        with (
            forked_rng(),
            guarded("Running guide and model on one record", hint=_WHOLE_TENSORS),
            restriction if one_record else contextlib.nullcontext(),
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
    """What lies outside the plate must be the same whatever is inside of it."""
    where = f"lies outside the private plate {records.plate.name!r} but depends on"
    arguments = [records.arguments(_row(records, i)) for i in _examples(records)]
    if not records.slice_data:
        arguments.append(records.unprotected_arguments())
    with unchanged_buffers():
        for on_data in map(outside.on, arguments):
            _require_same_sites(
                outside.public,
                on_data,
                f"{where} the data: only sites inside the plate may read them.",
            )
    other_draws = outside.with_view(lambda plate: Outside(plate, seed=1)).public
    _require_same_sites(outside.public, other_draws, f"{where} latents inside of it.")
    if records.slice_data:
        whole = records.arguments(records.placeholder(), length=records.plate.size)
        _require_same_sites(
            outside.public,
            outside.on(whole, one_record=False),
            f"{where} the length of the data, which is 1 for a model that is shown one record: "
            "pass N as an argument.",
        )


def _require_same_sites(
    public: dict[str, poutine.Trace], other: dict[str, poutine.Trace], problem: str
) -> None:
    for part, trace in public.items():
        expected, sites = _random_sites(trace), _random_sites(other[part])
        for name in expected.keys() | sites.keys():
            one, two = expected.get(name), sites.get(name)
            if not (one and two and all(agree(one[key], two[key]) for key in _COMPARED)):
                raise ModelError(f"Site {name!r} of the {part} {problem}")


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


def _check_support(term: RecordTerm, records: Records, particle: Particle, batch_size: int) -> None:
    """Observations lie in the support of their distributions, as Pyro's validation would ask."""
    indices = torch.arange(records.plate.size, device=records.device)
    if not term.vectorizes:  # one at a time is slow: a part of them
        indices, batch_size = indices[_examples(records, 100)], 1
    for chosen in indices.split(batch_size):
        batch = Batch(chosen, records.rows(chosen), _stream())
        for name, supported in term.supported(records, particle, batch).items():
            if not supported.all():
                raise ModelError(
                    f"Site {name!r} observes values outside the support of its distribution. "
                    "(This message depends on the data: it is for the curator only.)"
                )


def _same_gradients(one: RecordGradients, other: RecordGradients) -> bool:
    """Equal up to rounding, relative to the largest gradient of all."""
    pairs = [(one.latents, other.latents), (one.parameters, other.parameters)]
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


def _examples(records: Records, count: int = 3) -> list[int]:
    return sorted({i * (records.plate.size - 1) // (count - 1) for i in range(count)})


def _row(records: Records, index: int) -> list[Tensor]:
    return [rows[0] for rows in records.rows(torch.tensor([index]))]
