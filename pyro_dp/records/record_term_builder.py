"""Build one record's term from model, guide and records, after all checks, in order.

Privacy does not rest on these checks, because code that a release depends on sees only one record
or a placeholder (:class:`Records`). They tell the curator if the model means something else. They
run before any budget is spent, and restore the random state.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.records.global_draw import Particle, draw_particle
from pyro_dp.records.initial_values import initialise
from pyro_dp.records.local_parameters import (
    LocalParameters,
    find_local_parameters,
    marked_parameters,
)
from pyro_dp.records.losses import record_loss, single_particle, user_code
from pyro_dp.records.plate import Inside, OneRecord, Outside, PrivatePlate, no_sites, random_sites
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.records import Arguments, Records
from pyro_dp.records.sandbox import guarded, looking_at_records
from pyro_dp.records.site_checks import (
    Runs,
    check_inside,
    check_latents,
    check_outside,
    plate_nesting,
)
from pyro_dp.records.stand_ins import on_varied, varied
from pyro_dp.records.structure_checks import (
    check_coupling,
    check_isolation,
    check_values,
    on_fastest_path,
)
from pyro_dp.records.torch_modes import Substitution
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng

_MOST_CHECKED = 2**14  # records whose observations are checked at once


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
    with looking_at_records():
        records.require_finite(records.rows(examples))  # the checks run on these; all come last
    with forked_rng():
        marked = initialise_parameters(model, guide, records)
        local = find_local_parameters(model, guide, records, marked)
        # Found now, it includes the objects that the first run made.
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
        check_values(term, particle, microbatch_size or min(records.block, _MOST_CHECKED))
        return _with_released(term, particle), particle.parameters


def initialise_parameters(model: Callable, guide: Callable, records: Records) -> LocalParameters:
    """Initialise the parameters.

    :returns: parameters that hold private rows of an earlier run.
    """
    marked = marked_parameters(records.plate.size)
    with marked.shown(marked.constants()):
        initialise(model, guide, records)
    return marked


def _loop_over_all(
    loss: ELBO, model: Callable, guide: Callable, particle: Particle, outside: Runs, inside: Runs
) -> RecordTerm:
    """The term as a loop over records, with all latents and parameters that it may use."""
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
    """The term with the parameters that are released.

    :raises ModelError: there is nothing to release.
    """
    reached = particle.restricted(term.latents).reaches() | term.parameters.keys()
    released = {name: leaf for name, leaf in particle.parameters.items() if name in reached}
    if not (term.latents or released or term.local):
        raise ModelError(
            "The records' terms use neither a latent nor a parameter: there must be a "
            "pyro.sample or pyro.param that the observations depend on."
        )
    return replace(term, released=released)


_STEP = 0.1  # parameters move by this step, because penalties may be 0 at the start
_NO_SUM = (
    "loss: for two records, its value or derivative is not the sum of its parts outside plate "
    "{plate!r} and for each record alone. Only a sum over sites can be clipped record by "
    "record. A mean over records, or a product or ratio with the whole loss, cannot. Write a "
    "penalty beside the sites as pyro.factor inside the plate, divided by the plate's size."
)
_RUNS = (
    "loss: it runs the guide {runs} times. Run it once, for one draw of the latents; for several "
    "draws, set num_particles of a subclass of ELBO. (TraceEnum_ELBO without max_plate_nesting "
    "runs it once more: write TraceEnum_ELBO(max_plate_nesting=...), and enumerate in parallel.)"
)
_NO_NUMBER = "loss: it must return one number, as a tensor."
_Hide = Callable[[PrivatePlate], Messenger]


def check_additive(loss: ELBO, inside: Runs, particle: Particle) -> None:
    """Require that the loss of two records is the sum of the loss outside the plate and each term.

    The check compares values and derivatives at parameters that moved a little. All latents that
    are not enumerated have the same draws.

    :param inside: runs that show the plate's sites.
    :raises ModelError: the loss is no such sum.
    """
    records = inside.records
    if records.plate.size == 1:
        return
    value = partial(_value, loss, inside, particle)
    length = 2 if records.slice_data else records.shown
    indices = records.apart(2, length)

    def parts(tables: list[Tensor]) -> list[Tensor]:
        """The loss and its derivatives: of both records, outside, of the first, of the second."""
        drawn: dict[str, Tensor] = {}
        together = records.with_tables(tables)
        rows = [[table[i] for table in tables] for i in indices.tolist()]
        both = value(together, indices, _Drawn(records.plate, drawn), None)
        outside = value(together, indices, _Drawn(records.plate, drawn), Outside)
        term = partial(value, hide=partial(Inside, values={}))
        alone = [
            term(records.arguments(row), indices[k : k + 1], _Drawn(records.plate, drawn, k))
            for k, row in enumerate(rows)
        ]
        return [both, outside, *alone]

    found = on_varied(
        lambda integers: parts([varied(x, length, 1, integers=integers) for x in records.likes])
    )
    if found is None:  # rows that vary may lie outside the model's domain
        found = parts([row.expand(length, *row.shape) for row in records.placeholder()])
    both, *each = found
    if not agree(torch.stack([both, *each]), torch.stack([torch.stack(each).sum(0), *each])):
        raise ModelError(_NO_SUM.format(plate=records.plate.name))


def _value(
    loss: ELBO,
    inside: Runs,
    particle: Particle,
    arguments: Arguments,
    indices: Tensor,
    drawn: "_Drawn",
    hide: _Hide | None,
) -> Tensor:
    """The loss of these records and its derivatives, without the sites that ``hide`` hides."""
    plate, leaves = inside.records.plate, list(particle.parameters.values())
    moved = [_moved(leaf) for leaf in leaves]

    def shown(function: Callable) -> Callable:
        return hide(plate)(drawn(function)) if hide else drawn(function)

    guide, runs = shown(inside.guide), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        return guide(*args, **kwargs)

    single = single_particle(loss, plate_nesting(loss, inside))
    with (
        forked_rng(),
        inside.state.preserved(),
        guarded("Running the loss on public rows", public=True),
        OneRecord(plate, indices),
        Substitution({id(leaf): x for leaf, x in zip(leaves, moved, strict=True)}),
        inside.local.shown(inside.local.constants()),
    ):
        value = record_loss(single, shown(inside.model), counted, *arguments)
        if runs != 1:
            raise ModelError(_RUNS.format(runs=runs))
        if value.numel() != 1:
            raise ModelError(_NO_NUMBER)
        value = value.reshape(1)
        if not (moved and value.requires_grad):
            return torch.cat([value.detach(), *(torch.zeros_like(x).flatten() for x in moved)])
        gradients = torch.autograd.grad(value, moved, allow_unused=True, materialize_grads=True)
    return torch.cat([value.detach(), *(g.flatten() for g in gradients)])


def _moved(leaf: Tensor) -> Tensor:
    step = torch.linspace(_STEP, 2 * _STEP, leaf.numel(), dtype=leaf.dtype, device=leaf.device)
    return (leaf.detach() + step.reshape(leaf.shape)).requires_grad_()


@dataclass(eq=False, repr=False)
class _Drawn(Messenger):
    """Gives latents the values of the first run, without derivatives.

    The loss handles enumerated sites.

    :param values: values for both records, which the first run adds.
    :param position: the record's position, if the model sees only one.
    """

    plate: PrivatePlate
    values: dict[str, Tensor]
    position: int | None = None

    def _pyro_sample(self, msg: dict) -> None:
        name, frame = msg["name"], self.plate.frame(msg)
        if msg["is_observed"] or msg["infer"].get("enumerate") or name == self.plate.name:
            return
        if name not in self.values:
            self.values[name] = msg["fn"](*msg["args"], **msg["kwargs"]).detach()
        value = self.values[name]
        if self.position is not None and frame is not None and frame.dim is not None:
            dim = frame.dim - getattr(msg["fn"], "event_dim", 0)
            if value.dim() >= -dim and value.shape[dim] > 1:
                value = value.narrow(dim, self.position, 1)
        msg["value"], msg["done"] = value, True
