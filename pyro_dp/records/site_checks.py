"""Structural checks of the sites of model and guide: where they lie, and what they may read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.infer import ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.records.global_draw import Particle
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.records.losses import enumerates
from pyro_dp.records.plate import (
    OneRecord,
    Outside,
    PrivatePlate,
    Redrawn,
    Traces,
    random_sites,
    traced,
)
from pyro_dp.records.records import Arguments, Records
from pyro_dp.records.sandbox import guarded, looking_at_records, whole_tensors
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng

_COMPARED = ("value", "log_prob")
_MASKED = (
    " (With an obs_mask, Pyro drops infer: write config_enumerate(model) instead. In a guide, put "
    "the site under poutine.mask(mask=~obs_mask).)"
)


@dataclass(eq=False, repr=False)
class Runs:
    """Runs of the guide, and of the model replayed against it, for one record.

    :param view: makes a handler that hides sites of a plate: :class:`Outside` or :class:`Inside`.
    :param local: parameters with a private row per record, which the model sees as constants.
    :param state: objects that model and guide refer to.
    :param factor: multiplies these constants.
    """

    model: Callable
    guide: Callable
    records: Records
    view: Callable[[PrivatePlate], Messenger]
    local: LocalParameters
    state: CapturedState
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._parameters: set[str] | None = None
        placeholders = self.records.arguments(self.records.placeholder())
        self.public = self._run(placeholders, public=True)
        self._parameters = {
            name
            for trace in self.public.values()
            for name, site in trace.nodes.items()
            if site["type"] == "param"
        }

    def on(self, arguments: Arguments, **options: Any) -> Traces:
        """Traces for these rows; state that model and guide keep of them is put back.

        :param options: ``public`` (whether rows are public), ``indices`` (of several records at
            once, (k,), by default the first), ``replayed`` (traces whose latents are used).
        """
        with self.state.preserved():
            return self._run(arguments, **options)

    def _run(self, arguments, *, public=False, indices=None, replayed=None) -> Traces:
        args, kwargs = arguments
        plate = self.records.plate
        if indices is None:
            indices = torch.zeros(1, dtype=torch.long, device=self.records.device)
        hint = whole_tensors(self.records.slice_data)
        with (
            forked_rng(),
            guarded("Running guide and model on one record", public=public, hint=hint),
            OneRecord(plate, indices, self._parameters),
            self.local.shown(self.local.constants(self.factor)),
        ):
            guide, model = self.view(plate)(self.guide), self.view(plate)(self.model)
            if replayed is not None:
                guide = Redrawn(_drawn(replayed, "guide"))(guide)
                model = Redrawn(_drawn(replayed, "model"))(model)
            return traced(model, guide, args, kwargs)


def _drawn(traces: Traces, part: str) -> dict[str, Tensor]:
    """Values of the latents that this part, guide or model, draws itself."""
    others = traces["guide"].nodes if part == "model" else {}
    sites = random_sites(traces[part]).items()
    return {n: s["value"] for n, s in sites if not (s["is_observed"] or n in others)}


def check_outside(outside: Runs) -> None:
    """Require that sites outside the plate do not depend on the data or on latents inside it."""
    records = outside.records
    where = f"lies outside the private plate {records.plate.name!r} but depends on"
    problem = f"{where} the data: only sites inside the plate may read them."
    length = 1 if records.slice_data else records.shown
    public = outside.public
    try:
        on_others = outside.on(records.varied(length, seed=1), public=True)
        if not records.slice_data and length < records.plate.size:  # the length is public
            alike = records.arguments(records.placeholder(), length=length)
            public = outside.on(alike, public=True)
    except ModelError:  # rows that vary may lie outside the model's domain
        on_others = public
    _require_same_sites(public, on_others, problem)
    with looking_at_records():
        for i in records.examples():
            on_data = outside.on(records.arguments(records.row(i)))
            _require_same_sites(outside.public, on_data, problem)
    other_draws = replace(outside, view=lambda plate: Outside(plate, seed=1)).public
    _require_same_sites(outside.public, other_draws, f"{where} latents inside of it.")
    if outside.local:
        other_rows = replace(outside, factor=-2.0).public
        problem = f"{where} parameters that have a private row per record."
        _require_same_sites(outside.public, other_rows, problem)
    if records.slice_data:
        whole = records.arguments(records.placeholder(), length=records.shown)
        indices = torch.arange(records.shown, device=records.device)
        problem = (
            f"{where} the length of the data, which is 1 for a model that sees one record: pass N "
            "as an argument."
        )
        on_whole = outside.on(whole, public=True, indices=indices)
        _require_same_sites(outside.public, on_whole, problem)


def _require_same_sites(public: Traces, other: Traces, problem: str) -> None:
    for part, trace in public.items():
        expected, sites = random_sites(trace), random_sites(other[part])
        for name in expected.keys() | sites.keys():
            one, two = expected.get(name), sites.get(name)
            if not (one and two and all(agree(one[key], two[key]) for key in _COMPARED)):
                raise ModelError(f"Site {name!r} of the {part} {problem}")


def check_latents(loss: ELBO, outside: Runs, particle: Particle, privatize: str) -> None:
    """Require that the guide draws all latents outside the plate, with the needed gradients."""
    in_guide, in_model = map(random_sites, (outside.public["guide"], outside.public["model"]))
    for name, site in (in_model | in_guide).items():
        if site["is_observed"]:  # a factor of the latents
            continue
        if _is_enumerated(loss, site):
            raise ModelError(
                f"Global site {name!r} is enumerated: a sum over it does not decompose over "
                "records. Move it inside the private plate, or sample it in the guide."
            )
        if name not in in_guide:
            raise ModelError(
                f"Global latent site {name!r} of the model is not in the guide: add it there. "
                "(An autoguide is made from this model: AutoNormal(model).)"
            )
    for name in particle.fixed:
        if privatize == "latents":
            raise ModelError(
                f"Global site {name!r} is not reparameterised. So records have no gradient with "
                "respect to it. Use clip=Clip(of='parameters')."
            )
        if isinstance(loss, TraceMeanField_ELBO):
            raise ModelError(f"Global site {name!r} is not reparameterised: use Trace_ELBO.")


def _is_enumerated(loss: ELBO, site: dict) -> bool:
    return (
        enumerates(loss)
        and bool(site["infer"].get("enumerate"))
        and getattr(site["fn"], "has_enumerate_support", False)
    )


def check_inside(loss: ELBO, inside: Runs) -> None:
    """Require that sites inside belong to one record, and latents are drawn or summed out."""
    plate, slice_data = inside.records.plate, inside.records.slice_data
    in_guide, in_model = map(random_sites, (inside.public["guide"], inside.public["model"]))
    for name, site in (*in_guide.items(), *in_model.items()):
        dim, shape = plate.frame(site).dim, site["log_prob"].shape
        if dim is not None and len(shape) >= -dim and shape[dim] != 1:
            raise ModelError(
                f"Site {name!r} has a batch of its own along the private plate {plate.name!r}. "
                f"{whole_tensors(slice_data)}"
            )
    for name, site in in_model.items():
        if not site["is_observed"] and name not in in_guide and not _is_enumerated(loss, site):
            hint = _MASKED if name.endswith("_unobserved") else ""
            raise ModelError(
                f"Latent site {name!r} of the model is not in the guide: add it there, or sum it "
                f"out with TraceEnum_ELBO and infer={{'enumerate': 'parallel'}}.{hint}"
            )


def plate_nesting(loss: ELBO, inside: Runs) -> float:
    """The loss's ``max_plate_nesting``, or the number of nested plates if it is not set.

    :raises ModelError: it is too small for latents that are enumerated in parallel.
    """
    sites = [site for trace in inside.public.values() for site in random_sites(trace).values()]
    frames = [frame for site in sites for frame in site["cond_indep_stack"]]
    depth = max((-frame.dim for frame in frames if frame.dim is not None), default=0)
    if loss.max_plate_nesting == float("inf"):
        return depth
    parallel = (site for site in sites if site["infer"].get("enumerate") == "parallel")
    if loss.max_plate_nesting < depth and any(_is_enumerated(loss, site) for site in parallel):
        raise ModelError(
            f"loss: max_plate_nesting={loss.max_plate_nesting} is too small, as plates are nested "
            f"{depth} deep. Write TraceEnum_ELBO(max_plate_nesting={depth})."
        )
    return loss.max_plate_nesting
