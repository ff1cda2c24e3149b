"""The private plate, whose elements are the records: find it, and run a model inside or outside."""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Distribution, Independent, MaskedDistribution, Unit
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger, _Subsample
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.tracing import untraced
from pyro_dp.records.arguments import argument_names
from pyro_dp.records.sandbox import PLACEHOLDERS, guarded
from pyro_dp.records.stand_ins import FewIndices, identity, is_table, placeholder, rows_shown
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng, seed_torch

_LONGER = (
    "The private plate {plate.name!r} has size {plate.size}, but the longest argument has "
    "{longest} rows. If an argument is longer than the data, the model must run on placeholders "
    "for all tensors. " + PLACEHOLDERS
)
_NOT_OBSERVED = "The model has no observed site: pass the data with obs= inside a pyro.plate."
_LOOPS = (
    "The model observes nothing if argument {name!r} is zero, and integers are replaced by zeros "
    "here. A loop over its values, as in range({name}.max()), runs no step. Write a public bound, "
    "as in range(max_length) or range(x.shape[1]), and mask the steps after each record's last: "
    "poutine.mask(mask=t < {name})."
)
Sites = dict[str, dict]
Traces = dict[str, poutine.Trace]  # the guide's and the model's


@dataclass(frozen=True)
class PrivatePlate:
    """The ``pyro.plate`` whose elements are the protected individuals.

    :param size: N, a public constant.
    :param subsample_size: the batch size that the plate declares (N if none).
    :param enumerates: whether the model marks latents to sum out.
    :param continuous: the size of each continuous latent inside the plate, for one element.
    """

    name: str
    size: int
    subsample_size: int
    enumerates: bool = False
    continuous: Mapping[str, int] = field(default_factory=dict, hash=False)

    def holds(self, site: Mapping) -> bool:
        """Whether a site lies within the plate."""
        return self.frame(site) is not None

    def frame(self, site: Mapping) -> Any:
        """The plate's frame at a site; ``None`` outside the plate."""
        return next((f for f in site["cond_indep_stack"] if f.name == self.name), None)

    def of_record(self, site: Mapping, position: int) -> Tensor:
        """A site's log density. Inside the plate, that of the element at this position."""
        frame, log_prob = self.frame(site), site["log_prob"]
        if frame is None or frame.dim is None or log_prob.dim() < -frame.dim:
            return log_prob
        length = log_prob.shape[frame.dim]
        return log_prob if length == 1 else log_prob.narrow(frame.dim, position, 1)


def is_random(site: Mapping) -> bool:
    """Whether a site is a sample with a density.

    It is false for a plate's indices and for functions of other sites, such as
    ``pyro.deterministic`` and the original site of a reparameterisation.
    """
    if site["type"] != "sample" or isinstance(site["fn"], _Subsample):
        return False
    return not (site["is_observed"] and isinstance(bare(site["fn"]), Delta))


def random_sites(trace: poutine.Trace) -> Sites:
    return {name: site for name, site in trace.nodes.items() if is_random(site)}


def traced(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Traces:
    """Traces of the guide, and of the model replayed against it, with log densities."""
    of_guide = poutine.trace(guide).get_trace(*args, **kwargs)
    of_model = poutine.trace(poutine.replay(model, trace=of_guide)).get_trace(*args, **kwargs)
    for trace in (of_guide, of_model):
        trace.compute_log_prob(lambda name, site: is_random(site))
    return {"guide": of_guide, "model": of_model}


def find_plate(model: Callable, args: tuple, kwargs: dict, name: str | None) -> PrivatePlate:
    """Run the model on placeholders, and find the plate that holds the observations.

    Placeholders of the same shape replace all tensors. If the model fails on them, square matrices
    become identities. If that also fails, only the longest tensors are replaced.

    Large data are cut to a few rows. If the model fails on those, tensors keep their length, and
    the plate has a few indices.

    Random state and parameter store are restored.

    :param name: the plate's name. ``None`` if only one plate holds observed sites, or if it
        contains all others and the arguments have its rows.
    :raises ModelError: no plate qualifies, or several do; an observed site, or a factor that reads
        arguments, lies outside the plate; the model fails on placeholders.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    longest = max((len(x) for x in leaves if is_table(x)), default=0)
    numbers = sum(x.shape[1:].numel() for x in leaves if is_table(x) and len(x) == longest)
    few = FewIndices(longest, rows_shown(longest, numbers))
    if few.count < longest:
        fewer = pytree.tree_unflatten([_shortened(x, few) for x in leaves], spec)
        with contextlib.suppress(ModelError), few.shown():
            plate = _find_plate(model, fewer[0], fewer[1], name, longest)
            if plate.size == plate.subsample_size == few.count or plate.size == longest:
                declared = few.declared.get(plate.name, longest)
                return replace(plate, size=longest, subsample_size=declared)
    with few.shown():
        plate = _find_plate(model, args, kwargs, name, longest)
    return replace(plate, subsample_size=few.declared.get(plate.name, plate.subsample_size))


def _shortened(leaf: Any, few: FewIndices) -> Any:
    if is_table(leaf) and len(leaf) == few.size:
        return leaf[: few.count]
    return few.count if type(leaf) is int and leaf == few.size else leaf


def _find_plate(
    model: Callable, args: tuple, kwargs: dict, name: str | None, rows: int
) -> PrivatePlate:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    lengths = [len(x) for x in leaves if is_table(x)]
    longest = max(lengths, default=0)
    attempts: list[Callable[[Any], Any]] = [placeholder]
    if any(is_table(x) and x.shape[-1:] == x.shape[-2:-1] for x in leaves):
        attempts.append(identity)
    if any(length < longest for length in lengths):
        attempts.append(lambda x: x.clone() if is_table(x) and len(x) < longest else placeholder(x))
    errors = []
    for stand_in in attempts:
        shown = pytree.tree_unflatten(map(stand_in, leaves), spec)
        try:
            trace = run_once(model, *shown)
            plate = _plate_of(trace, name, lengths, rows)
        except ModelError as error:
            errors.append(error)
            continue
        if stand_in not in (placeholder, identity) and plate.size != longest:
            raise ModelError(_LONGER.format(plate=plate, longest=longest))
        others = pytree.tree_unflatten(map(_other, map(stand_in, leaves)), spec)
        _require_outside_is_public(model, trace, plate, others)
        return plate
    if str(errors[0]) == _NOT_OBSERVED:
        _refuse_loops(model, args, kwargs)
    raise errors[0]  # the last attempt sees shorter tensors, and its error could quote their data


def _refuse_loops(model: Callable, args: tuple, kwargs: dict) -> None:
    """:raises ModelError: the model observes a site only if an integer argument is not zero."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shown = [placeholder(leaf) for leaf in leaves]
    for i, name in enumerate(argument_names(model, args, kwargs)):
        leaf = shown[i]
        if not is_table(leaf) or leaf.is_floating_point():
            continue
        ones = [*shown[:i], _other(leaf), *shown[i + 1 :]]
        observed: Sites = {}
        with contextlib.suppress(ModelError):
            observed = _observed(run_once(model, *pytree.tree_unflatten(ones, spec)))
        if observed:
            raise ModelError(_LOOPS.format(name=name))


def _other(leaf: Any) -> Any:
    """The argument with numbers that a placeholder does not have."""
    if not is_table(leaf):
        return leaf
    row = leaf[:1] if leaf.stride(0) == 0 else leaf  # a placeholder repeats one row
    return (row / 2 if leaf.is_floating_point() else torch.ones_like(row)).expand(leaf.shape)


def run_once(
    model: Callable, args: tuple, kwargs: dict, *, densities: bool = False
) -> poutine.Trace:
    """Trace the model on placeholders, and restore random state and parameter store.

    :raises ModelError: the model raised an exception.
    """
    store = pyro.get_param_store()
    with (
        forked_rng(),
        store.scope(store.get_state()),
        torch.no_grad(),
        guarded("Running the model on placeholder data", public=True),
    ):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        if densities:
            trace.compute_log_prob(lambda name, site: is_random(site))
    return trace


def _plate_of(
    trace: poutine.Trace, name: str | None, lengths: Collection[int], rows: int
) -> PrivatePlate:
    observed = _observed(trace)
    if not observed:
        raise ModelError(_NOT_OBSERVED)
    candidates = {f.name: f for site in observed.values() for f in site["cond_indep_stack"]}
    listed = ", ".join(map(repr, sorted(candidates)))
    if not candidates:
        raise ModelError(
            "plate: no pyro.plate holds the observed sites. Put them inside one, with one element "
            "per individual, and index the data by it: with pyro.plate('data', len(x)) as idx."
        )
    if name is None:
        name = _outermost(observed, candidates, lengths, rows)
    if name is None:
        raise ModelError(
            f"plate: several plates hold observed sites ({listed}). Name the one whose elements "
            "are the protected individuals: pass PoissonSampling(plate='people') as sampling, or "
            "such a FullBatch to DPSEP. Plates nested inside it are part of the record."
        )
    if name not in candidates:
        raise ModelError(f"plate={name!r} holds no observed site; the plates that do: {listed}.")
    frame = candidates[name]
    size, subsample = frame.full_size, frame.size
    if size is None or size < 0:  # a plate without a size has any number of rows
        size = subsample = max(lengths, default=0)
    latents = {n: s for n, s in random_sites(trace).items() if not s["is_observed"]}
    marked = any(site["infer"].get("enumerate") for site in latents.values())
    plate = PrivatePlate(frame.name, int(size), int(subsample), marked)
    inside = {n: s["fn"] for n, s in latents.items() if plate.holds(s) and _is_continuous(s["fn"])}
    return replace(plate, continuous={n: math.prod(fn.event_shape) for n, fn in inside.items()})


def _is_continuous(fn: Any) -> bool:
    with contextlib.suppress(NotImplementedError):
        return not fn.support.is_discrete
    return False


def _observed(trace: poutine.Trace) -> Sites:
    return {name: site for name, site in random_sites(trace).items() if site["is_observed"]}


def _outermost(
    observed: Sites, candidates: Mapping, lengths: Collection[int], rows: int
) -> str | None:
    """The name of the only plate, or of the outermost one; ``None`` if that is unclear.

    The outermost plate must contain all observed sites, and arguments must have its rows. It is
    unclear if arguments have rows for another plate. It is also unclear if an inner plate is longer
    than every argument. Then rows may be times, and the inner plate may be the people.
    """
    if len(candidates) == 1:
        return next(iter(candidates))
    if max(frame.full_size or 0 for frame in candidates.values()) > rows:
        return None
    stacks = (site["cond_indep_stack"] for site in observed.values())
    first = {stack[0].name for stack in stacks if stack}
    fitting = {name for name, frame in candidates.items() if frame.full_size in lengths}
    return next(iter(first)) if len(first) == 1 and first == fitting else None


def _require_outside_is_public(
    model: Callable, trace: poutine.Trace, plate: PrivatePlate, others: tuple[tuple, dict]
) -> None:
    """:raises ModelError: outside the plate a site is observed, or a factor reads arguments."""
    outside = {n: site for n, site in _observed(trace).items() if not plate.holds(site)}
    for key, site in outside.items():
        if not isinstance(site["fn"], Unit):
            raise ModelError(
                f"Site {key!r} is observed outside the private plate {plate.name!r}: move it "
                "inside, or use its observed value as a public constant."
            )
    if not outside:
        return
    try:
        again = run_once(poutine.replay(model, trace=latents_alone(trace)), *others)
    except ModelError:
        again = poutine.Trace()
    for key, site in outside.items():
        if key not in again or not agree(site["fn"].log_factor, again.nodes[key]["fn"].log_factor):
            raise ModelError(
                f"pyro.factor {key!r} stands outside the private plate {plate.name!r} and reads "
                "arguments: put terms of the records inside, one for each record. A term of the "
                "latents may stay; public numbers that it needs are better captured than passed."
            )


def latents_alone(trace: poutine.Trace) -> poutine.Trace:
    """A trace of the latents alone, for a replay."""
    latents = poutine.Trace()
    for name, site in random_sites(trace).items():
        if not site["is_observed"]:
            latents.add_node(name, **site)
    return latents


def bare(fn: Any) -> Any:
    """The base distribution, without transforms, masks and independent dimensions."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def innermost(fn: Distribution) -> Any:
    """A distribution without its masks and independent dimensions."""
    while isinstance(fn, (Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


@dataclass(eq=False, repr=False)
class OneRecord(Messenger):
    """Run a model on one index of the private plate, without the plate's scale N / 1.

    This replaces the plate's ``randperm`` indices, also if it declares ``subsample_size``. Scales
    and masks of the user stay.

    :param index: tensor of shape (1,). The checks pass several indices, (k,).
    :param parameters: allowed names; ``None``: all. The existence of a parameter that only some
        records use would reveal something.
    :param indexes: whether whole observed tensors are read at the index.
    """

    plate: PrivatePlate
    index: Tensor
    parameters: Collection[str] | None = None
    indexes: bool = True

    def __enter__(self):
        original, private = SubsampleMessenger._subsample, self.plate.name

        def subsample(name, size=None, subsample_size=None, subsample=None, *rest):
            # Pyro would compare a declared size with the single index, and raise.
            if name == private:
                subsample_size = subsample = None
            return original(name, size, subsample_size, subsample, *rest)

        self._patch = mock.patch.object(SubsampleMessenger, "_subsample", staticmethod(subsample))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._patch.stop()
        return super().__exit__(*exc_info)

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "param" and self.parameters is not None:
            if msg["name"] not in self.parameters:
                raise ModelError(
                    f"Parameter {msg['name']!r} appears for some records only: create every "
                    "parameter before anything depends on the data."
                )
        if msg["type"] != "sample":
            return
        if msg["name"] == self.plate.name and isinstance(msg["fn"], _Subsample):
            msg["value"] = self.index
            msg["done"] = True
        elif frame := self.plate.frame(msg):
            msg["scale"] = msg["scale"] * frame.size / frame.full_size
            if self.indexes and msg["is_observed"] and frame.dim is not None:
                msg["value"] = self._at_index(msg["value"], msg["fn"], frame)

    def _at_index(self, value: Any, fn: Any, frame: CondIndepStackFrame) -> Any:
        """An observed value at the index, if it still has all N rows, as with ``pyro.condition``.

        Pyro does not need this, because it sees all N records.
        """
        batch, dim = getattr(fn, "batch_shape", ()), frame.dim - getattr(fn, "event_dim", 0)
        is_whole = isinstance(value, Tensor) and value.dim() >= -dim
        is_whole = is_whole and value.shape[dim] == frame.full_size != frame.size
        if is_whole and (len(batch) < -frame.dim or batch[frame.dim] in (1, frame.size)):
            return value.index_select(dim, self.index)
        return value


@dataclass(eq=False, repr=False)
class Outside(Messenger):
    """Hide every site within the private plate from outer handlers.

    The model still needs values of the hidden latents. Their draws do not move the public
    generator.
    """

    plate: PrivatePlate
    seed: int = 0

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and self.plate.holds(msg):
            if msg["value"] is None:
                with forked_rng(), torch.no_grad(), untraced():
                    seed_torch(self.seed)
                    msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
                msg["done"] = True
            msg["stop"] = True


@dataclass(eq=False, repr=False)
class Inside(Messenger):
    """Hide every site outside the private plate, with the global latents fixed.

    :param values: values of the latents outside the plate, and indices of other plates.
    """

    plate: PrivatePlate
    values: Mapping[str, Tensor]

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and not self.plate.holds(msg):
            if msg["value"] is None and msg["name"] in self.values:
                msg["value"] = self.values[msg["name"]]
                msg["done"] = True
            # The private plate's own index site goes on to OneRecord.
            msg["stop"] = msg["name"] != self.plate.name


@dataclass(eq=False, repr=False)
class Redrawn(Messenger):
    """Draw the latents, but use these values.

    So other random parts, such as a dropout, get the same numbers as before.
    """

    values: Mapping[str, Tensor]

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] in self.values and not msg["done"]:
            with torch.no_grad():
                msg["fn"](*msg["args"], **msg["kwargs"])
            msg["value"], msg["done"] = self.values[msg["name"]], True


def no_sites(*args: Any, **kwargs: Any) -> None:
    """A guide without sites, instead of one that has none, cannot run, or does not exist yet."""
