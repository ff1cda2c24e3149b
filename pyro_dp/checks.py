"""Structural checks: do model and guide decompose over the private plate's records?

Privacy does not rest on these checks: a model only ever sees one record, or a placeholder (:class:`Records`). They tell
the user where the model meant something else. They run before any budget is spent, with random state and parameter
store restored, and their outcome is for the curator alone.
"""

import copy
import warnings
import weakref
from collections.abc import Callable

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dp.errors import ModelError, PrivacyError
from pyro_dp.gradients import LocalDraws, RecordGradients, RecordTerm
from pyro_dp.guard import guarded
from pyro_dp.outside import Particle, draw_particle
from pyro_dp.plates import Inside, OneRecord, Outside, PrivatePlate, is_random
from pyro_dp.randomness import Randomness, forked_rng
from pyro_dp.records import Records

Sites = dict[str, dict]


def build_record_term(
    loss: ELBO, model: Callable, guide: Callable, records: Records, *, privatize: str
) -> tuple[RecordTerm, dict[str, Tensor]]:
    """Initialise the parameters, run every check, and build the term whose gradients are released.

    :returns: the term, and all unconstrained parameters of model and guide by name.
    :raises ModelError: names the site, parameter or argument that does not fit, and says what to do.
    """
    records.require_finite()
    with forked_rng():
        _initialise(model, guide, records)
        _check_outside(model, guide, records)
        particle = draw_particle(loss, model, guide, records)
        _check_latents(loss, model, guide, records, particle, privatize)
        term = _record_term(loss, model, guide, records, particle)
        _check_isolation(term, records, particle)
        _choose_path(term, records, particle.restricted(term.latents))
    return term, particle.parameters


def _initialise(model: Callable, guide: Callable, records: Records) -> None:
    """Give every parameter its initial value on placeholders; on the data it must be the same."""
    # All N rows, so that a guide with latents per record shows it.
    public = records.arguments(records.placeholder(), length=records.plate.size)
    initial = _initial_values(model, guide, *public)
    on_data = _initial_values(model, guide, *records.unprotected_arguments())
    for name in initial.keys() & on_data.keys():
        if not _equal(initial[name], on_data[name]):
            raise ModelError(
                f"The initial value of parameter {name!r} depends on the data, and would be public: start it at a "
                "constant or at random."
            )
    args, kwargs = public
    with guarded("Initialising the guide on placeholder data"):
        guide(*args, **kwargs)


def _initial_values(
    model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> dict[str, Tensor]:
    try:
        model, guide = _copied(model, guide)
    except Exception:  # what cannot be copied is not run on the data
        return {}
    with (
        forked_rng(),
        pyro.get_param_store().scope(),
        guarded("Running guide and model once"),
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
    of = dict(zip(map(id, modules), copies, strict=True))
    for module, link in zip(copies, links, strict=True):
        if link is not None:
            (its_model,), master = link
            module._model = (new_model if its_model is model else its_model,)
            module.master = None if master is None else weakref.ref(of[id(master())])
    return new_model, new_guide


def _sites(
    model: Callable,
    guide: Callable,
    records: Records,
    arguments: tuple[tuple, dict],
    view: Callable[[PrivatePlate], Messenger],
) -> dict[str, Sites]:
    """The random sites of guide and model that ``view`` (outside or inside the plate) shows for one record."""
    args, kwargs = arguments
    first = torch.zeros(1, dtype=torch.long, device=records.device)
    with forked_rng(), guarded("Running guide and model on one record"), OneRecord(records.plate, first):
        guide_trace = poutine.trace(view(records.plate)(guide)).get_trace(*args, **kwargs)
        replayed = poutine.replay(view(records.plate)(model), trace=guide_trace)
        traces = {"guide": guide_trace, "model": poutine.trace(replayed).get_trace(*args, **kwargs)}
        for trace in traces.values():
            trace.compute_log_prob(lambda name, site: is_random(site))
    return {
        part: {name: site for name, site in trace.nodes.items() if is_random(site)} for part, trace in traces.items()
    }


def _check_outside(model: Callable, guide: Callable, records: Records) -> None:
    """What lies outside the plate must be the same on placeholders and on data."""
    arguments = [records.arguments(_row(records, i)) for i in _examples(records)]
    if not records.slice_data:
        arguments.append(records.unprotected_arguments())
    public = _sites(model, guide, records, records.arguments(records.placeholder()), Outside)
    for on_data in (_sites(model, guide, records, each, Outside) for each in arguments):
        for part in ("guide", "model"):
            for name in public[part].keys() | on_data[part].keys():
                one, other = public[part].get(name), on_data[part].get(name)
                if not (one and other and all(_equal(one[key], other[key]) for key in ("value", "log_prob"))):
                    raise ModelError(
                        f"Site {name!r} of the {part} lies outside the private plate {records.plate.name!r} but "
                        "depends on the data: only sites inside the plate may read them."
                    )


def _check_latents(
    loss: ELBO, model: Callable, guide: Callable, records: Records, particle: Particle, privatize: str
) -> None:
    """Latents outside the plate need a gradient with respect to a draw from the guide."""
    sites = _sites(model, guide, records, records.arguments(records.placeholder()), Outside)
    for name, site in (sites["model"] | sites["guide"]).items():
        if _is_enumerated(loss, site):
            raise ModelError(f"Global site {name!r} is enumerated: a sum over it does not decompose over records.")
        if name not in sites["guide"]:
            raise ModelError(f"Global latent site {name!r} of the model is not in the guide: add it there.")
    for name in particle.fixed:
        if privatize == "latents":
            raise ModelError(
                f"Global site {name!r} is not reparameterised, so that a record has no gradient with respect to it: "
                "use privatize='parameters'."
            )
        if isinstance(loss, TraceMeanField_ELBO):
            raise ModelError(f"Global site {name!r} is not reparameterised: use Trace_ELBO.")


def _is_enumerated(loss: ELBO, site: dict) -> bool:
    return (
        isinstance(loss, TraceEnum_ELBO)
        and bool(site["infer"].get("enumerate"))
        and getattr(site["fn"], "has_enumerate_support", False)
    )


def _record_term(
    loss: ELBO, model: Callable, guide: Callable, records: Records, particle: Particle
) -> RecordTerm:
    """Look at the sites inside the plate and build the term."""
    placeholder = records.arguments(records.placeholder())
    values = particle.values(particle.detached())
    sites = _sites(model, guide, records, placeholder, lambda plate: Inside(plate, values))
    for name, site in (*sites["guide"].items(), *sites["model"].items()):
        dim, shape = records.plate.frame(site).dim, site["log_prob"].shape
        if dim is not None and len(shape) >= -dim and shape[dim] != 1:
            raise ModelError(
                f"Site {name!r} has a batch of its own along the private plate {records.plate.name!r}. Index what it "
                "reads (with pyro.plate(...) as idx: ... x[idx]), or use slice_data=True for a model written for whole "
                "tensors. A guide cannot hold a latent per record."
            )
    for name, site in sites["model"].items():
        if not site["is_observed"] and name not in sites["guide"] and not _is_enumerated(loss, site):
            raise ModelError(
                f"Latent site {name!r} of the model is not in the guide: add it there, or sum it out with "
                "TraceEnum_ELBO and infer={'enumerate': 'parallel'}."
            )
    frames = [f for part in sites.values() for site in part.values() for f in site["cond_indep_stack"]]
    nesting = loss.max_plate_nesting
    if nesting == float("inf"):
        nesting = max((-f.dim for f in frames if f.dim is not None), default=0)
    term = RecordTerm(loss, model, guide, runs_guide=bool(sites["guide"]), max_plate_nesting=nesting)
    term.parameters = particle.parameters
    draws = LocalDraws(stream=_checking_stream())
    term.single(records, particle, torch.tensor(0, device=records.device), placeholder, draws)
    term.draws = draws.requested
    return term


def _check_isolation(term: RecordTerm, records: Records, particle: Particle) -> None:
    """The term must depend on its own row, and on nothing else that its index points to."""
    tables = term.draw_tables(1, _checking_stream(), records.device)

    def at(index: int, arguments: tuple[tuple, dict]) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        draws = LocalDraws([table[0] for table in tables], _checking_stream())
        return term.single(records, particle, torch.tensor(index, device=records.device), arguments, draws)

    first = records.arguments(_row(records, 0))
    gradients, loss = at(0, first)
    used = set(gradients)
    for i in _examples(records):
        moved, moved_loss = at(i, first)
        for name in term.parameters.keys() & gradients.keys() & moved.keys():
            if not _equal(gradients[name], moved[name]):
                raise ModelError(
                    f"Parameter {name!r} has values of its own for each record of plate {records.plate.name!r}: use a "
                    "guide that computes them from the record (amortisation)."
                )
        if not _equal(loss, moved_loss):
            raise ModelError(
                f"The term of a record changes with its index in plate {records.plate.name!r} although its row does "
                "not: the model reads data that are no argument of step(), or not indexed along the first dimension. "
                "Pass them as a tensor with one row per record."
            )
        own, own_loss = at(i, records.arguments(_row(records, i)))
        used |= set(own)
        if not records.slice_data and not _equal(own_loss, at(i, records.unprotected_arguments())[1]):
            raise ModelError(
                "The term of a record moves when other records change: the model reads other rows (a mean over the "
                "data, a shifted index, batch statistics). A record may read only its own x[idx]."
            )
    term.latents = used & particle.latents.keys()
    term.parameters = {name: leaf for name, leaf in term.parameters.items() if name in used}


def _choose_path(term: RecordTerm, records: Records, particle: Particle) -> None:
    """Vectorise if that gives the loop's numbers; else say why not, once."""
    indices = torch.tensor(_examples(records))
    rows = records.rows(indices)
    tables = term.draw_tables(len(indices), _checking_stream(), records.device)
    before = torch.get_rng_state()
    looped = term.looped(records, particle, indices, rows, tables, _checking_stream())
    draws_beyond_tables = not torch.equal(before, torch.get_rng_state())
    try:
        vectorized = term.vectorized(records, particle, indices, rows, tables)
    except PrivacyError as error:
        reason = str(error)
    except Exception as error:
        reason = f"torch.func raised {type(error).__name__}"
    else:
        if draws_beyond_tables or _same_gradients(looped, vectorized):
            return
        reason = "the vectorised gradient differs from the loop's"
    term.vectorizes = False
    warnings.warn(f"Gradients are taken one record at a time, which is slow: {reason}", stacklevel=2)


def _same_gradients(one: RecordGradients, other: RecordGradients) -> bool:
    return all(
        _equal(one_part[name], other_part[name])
        for one_part, other_part in ((one.latents, other.latents), (one.parameters, other.parameters))
        for name in one_part
    )


def _checking_stream():
    return Randomness(0).stream("local", 0)


def _examples(records: Records) -> list[int]:
    last = records.plate.size - 1
    return sorted({0, last // 2, last})


def _row(records: Records, index: int) -> list[Tensor]:
    return [rows[0] for rows in records.rows(torch.tensor([index]))]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return bool(one is other or (not isinstance(one, Tensor) and one == other))
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float16, torch.bfloat16) else 1e-8
    size = one.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * size, equal_nan=True)
