"""Draw a model's outcomes for new records, and for made-up ones."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.arguments import (
    Arguments,
    as_tensors,
    in_memory,
    named_arguments,
    signature_of,
)
from pyro_dp.records.column import Column, TensorColumn, equal
from pyro_dp.records.data_numbers import holds_rows
from pyro_dp.records.local_parameters import LocalParameters, marked_parameters
from pyro_dp.records.plate import OneRecord, PrivatePlate, find_plate, is_random, no_sites
from pyro_dp.records.records import Records, on_placeholders
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import is_table, varied
from pyro_dp.records.tables import as_tensor
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree
from pyro_dp.utils.torch_state import forked_rng

_NONE = (
    "There are no records to predict for: pass an argument with a row for each, such as {name!r}."
)
_LENGTHS = "All arguments must have a row for each new record, but {listed}."
_MISSING = (
    "Argument {name!r} is missing, and predictions depend on it. Pass it, with a row for each new "
    "record. Only observed outcomes may be left out."
)
_NO_ROWS = (
    "Argument {name!r} must have a row for each new record, in {dims} dimensions as in the fit. "
    "For a single record, pass {name}[None]."
)
_NO_PARTS = (
    "Argument {name!r} must have the parts that it had in the fit, each with a row for each new "
    "record. An outcome among them may have any values."
)
_NO_PARAMETERS = (
    "Parameter {name!r} has a row for each record of the fit, and none for new ones. Make it a "
    "latent of the record (pyro.sample within the plate)."
)
_NO_SITES = "return_sites: the model has no site {names}; it has {known}."
_SUBSAMPLED = (
    "Plate {name!r} takes a part of its elements (subsample_size), so a prediction would have the "
    "latents of only some of them. Leave subsample_size out."
)
_FACTOR = "pyro.factor {name!r} has no outcomes to draw: to {verb}, write pyro.sample with obs=."


@dataclass(frozen=True, eq=False)
class NewRecords:
    """Predictions of a fitted model for new records.

    :param fitted: the records of the fit. Predictions use only the shapes of their rows. A warning
        depends on whether new rows are among them.
    """

    model: Callable
    guide: Callable
    fitted: Records

    def global_draws(self, count: int) -> dict[str, Tensor]:
        """Draws of the guide's global sites, (count, ...), from torch's global generator."""
        plate, local = self.fitted.plate, self.parameters
        draws: dict[str, list[Tensor]] = {}
        with (
            torch.no_grad(),
            on_placeholders(self.fitted, "the guide") as (args, kwargs),
            local.shown(local.constants()),
        ):
            for _ in range(count):
                trace = poutine.trace(self.guide).get_trace(*args, **kwargs)
                _require_whole_plates(trace, plate.name)
                for name, site in trace.iter_stochastic_nodes():
                    if not (plate.holds(site) or site["infer"].get("is_auxiliary")):
                        draws.setdefault(name, []).append(site["value"])
        return {name: torch.stack(values) for name, values in draws.items()}

    @property
    def parameters(self) -> LocalParameters:
        """Parameters with a row for each record of the fit."""
        return marked_parameters(self.fitted.plate.size)

    def given(self, args: tuple, kwargs: dict) -> "Given":
        """The arguments of a call, with defaults for missing ones.

        Constants are those of the fit. An integer that was N becomes the number of new records. A
        missing outcome gets the default of the model's signature. If there is none, placeholder
        rows replace it, which only an observed site may read.

        :raises ModelError: the arguments do not match those of the fit, or a missing one is no
            outcome.
        """
        known = dict(self._named(*self.fitted.arguments(self.fitted.placeholder(), length=1)))
        flags = self._named(*self.fitted.places)
        tables = {name: x for name, x in flags if any(pytree.tree_leaves(x))}
        found = self._converted(args, kwargs, tables)
        rows = {
            name: list(_rows(name, found[name], known[name], tables[name]))
            for name in tables
            if found.get(name) is not None
        }
        lengths = {name: len(leaf) for name, leaves in rows.items() for leaf in leaves}
        if not lengths:
            raise ModelError(_NONE.format(name=next(iter(tables))))
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise ModelError(_LENGTHS.format(listed=listed))
        size, parameters = next(iter(lengths.values())), signature_of(self.model).values()
        defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        missing = [name for name in tables if name not in rows]
        found |= {name: defaults[name] for name in missing if name in defaults}
        filled = {n: (known[n], tables[n]) for n in missing if n not in defaults}
        constants = {name: x for name, x in known.items() if name not in tables}
        n = self.fitted.plate.size
        resized = pytree.tree_map(lambda x: size if type(x) is int and x == n else x, constants)
        found = resized | found
        order = list(known)[: len(self.fitted.places[0])]
        return Given(self, order, found, filled, rows, size, complete=not missing)

    def _named(self, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
        return named_arguments(self.model, args, kwargs)

    def _converted(self, args: tuple, kwargs: dict, tables: Mapping) -> dict[str, Any]:
        """The arguments by name, as tensors. A list may have a single record."""

        def rows(name: str, value: Any) -> Any:
            listed = isinstance(value, (list, tuple, range)) and tables.get(name) is True
            return as_tensor(name, value, size=len(value)) if listed else value

        args = tuple(rows(name, value) for name, value in self._named(args, {}))
        kwargs = {name: rows(name, value) for name, value in kwargs.items()}
        return dict(self._named(*in_memory(as_tensors(self.model, args, kwargs))))


@dataclass(frozen=True, eq=False)
class Given:
    """The arguments of a call for new records, and the model's draws.

    :param order: names of the arguments that are passed by position.
    :param found: all arguments except the filled ones, by name.
    :param filled: for each missing outcome, a placeholder row, and which leaves are data.
    :param rows: the caller's tensors with a row per record, by argument.
    :param complete: whether no argument with rows is missing.
    """

    new: NewRecords
    order: list[str]
    found: dict[str, Any]
    filled: dict[str, tuple[Any, Any]]
    rows: dict[str, list[Tensor]]
    size: int
    complete: bool

    @property
    def columns(self) -> dict[str, Tensor]:
        """The caller's tensors with a row per record, by name; numbered within an argument."""
        return {
            name if len(leaves) == 1 else f"{name}_{i}": leaf
            for name, leaves in self.rows.items()
            for i, leaf in enumerate(leaves)
        }

    @property
    def recognised(self) -> str | None:
        """The name of an argument that seems to hold records of the fit; ``None`` if none does."""
        columns = self.new.fitted.columns
        for name, leaves in self.rows.items():
            if any(_is_of_the_fit(leaf, column) for leaf in leaves for column in columns):
                return name
        return None

    def draws(
        self, latents: Mapping[str, Tensor], count: int, sites: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """The model's samples by site, (count, ...), for draws of the global latents.

        Latents of the records come from an amortised guide if no argument is missing, and otherwise
        from the model.

        :param latents: draws of each global latent, (count, ...).
        :param sites: sites to return; if empty, all.
        :raises ModelError: the model fails, or has no such site.
        """
        amortised = self.complete and not isinstance(self.new.guide, AutoGuide)
        amortised = amortised and not self.new.parameters
        guide = self.new.guide if amortised else no_sites
        plate, drawn = self.new.fitted.plate, list[dict[str, Tensor]]()
        model = _Outcomes()(self.new.model)
        with self._running():
            self._require_outcomes(sites)
            for i in range(count):
                values = {name: each[i] for name, each in latents.items()}
                trace = self._traced(poutine.condition(guide, values))
                local = {n: s["value"] for n, s in trace.iter_stochastic_nodes() if plate.holds(s)}
                guide = guide if local else no_sites
                trace = self._traced(poutine.condition(model, values | local))
                drawn.append(_values(trace, sites))
        return {name: torch.stack([each[name] for each in drawn]) for name in drawn[0]}

    @contextmanager
    def _running(self) -> Iterator[None]:
        fitted = self.new.fitted
        with (
            torch.no_grad(),
            guarded("Predicting", public=self.recognised is None),
            OneRecord(fitted.plate, torch.arange(self.size, device=fitted.device)),
            _NoRows(self.new.parameters.leaves),
        ):
            yield

    def _traced(self, function: Callable, varies: str | None = None) -> poutine.Trace:
        """A trace of a run on the new records.

        :param varies: the missing argument whose rows differ; others repeat a placeholder.
        """
        values = dict(self.found)
        for name, (row, places) in self.filled.items():
            make = partial(_repeated, size=self.size, varies=name == varies)
            values[name] = pytree.tree_map(make, row, places)
        args = [values.pop(name) for name in self.order]
        trace = poutine.trace(function).get_trace(*args, **values)
        _require_whole_plates(trace, self.new.fitted.plate.name)
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and isinstance(site["fn"], Unit):
                raise ModelError(_FACTOR.format(name=name, verb="predict"))
        return trace

    def _require_outcomes(self, sites: Collection[str]) -> None:
        """:raises ModelError: predictions of these sites depend on a missing argument."""
        for missing in self.filled:
            traces = []
            for varies in (None, missing):
                with forked_rng():
                    pyro.set_rng_seed(0)
                    traces.append(self._traced(_Outcomes()(self.new.model), varies))
                traces[-1].compute_log_prob()
            one, other = (_samples(trace) for trace in traces)
            alike = one.keys() == other.keys() and all(
                agree(site[part], other[name][part])
                for name, site in one.items()
                for part in ("value", "log_prob")
            )
            values = [list(_values(trace, sites).values()) for trace in traces]  # also "_RETURN"
            if not (alike and all(map(agree, *values))):
                raise ModelError(_MISSING.format(name=missing))


class _Outcomes(UnconditionMessenger):
    """Draws observed sites. Deterministic sites stay, because a plate would expand their draws."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["infer"].get("_deterministic"):
            super()._pyro_sample(msg)


@dataclass(eq=False, repr=False)
class _NoRows(Messenger):
    """Refuses parameters that have no rows for new records."""

    names: Collection[str]

    def _pyro_param(self, msg: dict) -> None:
        if msg["name"] in self.names:
            raise ModelError(_NO_PARAMETERS.format(name=msg["name"]))


def _require_whole_plates(trace: poutine.Trace, private: str) -> None:
    """Remove the plates' index sites from a trace.

    :raises ModelError: a plate other than the private one takes a part of its elements.
    """
    for name, site in list(trace.nodes.items()):
        if site["type"] != "sample" or not isinstance(site["fn"], _Subsample):
            continue
        if name != private and site["fn"].subsample_size not in (None, site["fn"].size):
            raise ModelError(_SUBSAMPLED.format(name=name))
        trace.remove_node(name)


def _samples(trace: poutine.Trace) -> dict[str, dict]:
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def _values(trace: poutine.Trace, names: Collection[str]) -> dict[str, Tensor]:
    """Draws of these sites, or of all sites if no names are passed."""
    found = {name: site["value"] for name, site in _samples(trace).items()}
    returned = trace.nodes["_RETURN"]["value"]
    if "_RETURN" in names and isinstance(returned, Tensor):  # as of Pyro's Predictive
        found["_RETURN"] = returned
    if absent := set(names) - found.keys():
        listed, known = (", ".join(map(repr, each)) for each in (sorted(absent), found))
        raise ModelError(_NO_SITES.format(names=listed, known=known))
    return {name: value for name, value in found.items() if name in (names or found)}


def _rows(name: str, value: Any, known: Any, places: Any) -> Iterator[Tensor]:
    """The tensors of an argument with a row per record, checked against a row of the fit."""
    likes, spec = pytree.tree_flatten(known)
    try:
        leaves = spec.flatten_up_to(value)
    except ValueError:
        raise ModelError(_NO_PARTS.format(name=name)) from None
    for leaf, like, has_rows in zip(leaves, likes, pytree.tree_leaves(places), strict=True):
        if has_rows:
            if not is_table(leaf) or leaf.dim() != like.dim():
                raise ModelError(_NO_ROWS.format(name=name, dims=like.dim()))
            yield leaf


def _repeated(row: Any, is_data: bool, size: int, varies: bool) -> Any:
    if not is_data:
        return row
    return varied(row, size, seed=1) if varies else row.expand(size, *row.shape[1:])


def _is_of_the_fit(leaf: Tensor, column: Column) -> bool:
    """Whether a tensor contains rows of the column, and not by chance."""
    if not leaf.numel() or leaf.is_floating_point() != column.dtype.is_floating_point:
        return False
    if isinstance(column, TensorColumn) and leaf.data_ptr() == column.tensor.data_ptr():
        return True
    if holds_rows(leaf, column, shared=True):
        return True
    whole = leaf.shape == column.shape and bool((leaf != leaf[:1]).any())
    return whole and equal(TensorColumn(leaf.to(column.dtype)), column)


_NOT_FINITE = (
    "The prior predictive of site {name!r} is not finite. Use a narrower prior or smaller features."
)
_NOT_FOUND = (
    "Site {name!r} observes something else than an argument, or a column of one, as it stands. "
    "Made-up outcomes cannot replace it. Pass its observed value as an argument of its own."
)


@dataclass(frozen=True, eq=False)
class PriorPredictive:
    """Draws of made-up data from the model's prior.

    :param args: made-up arguments, as ``kwargs``; outcomes only need the right shape and dtype.
    """

    model: Callable
    plate: PrivatePlate
    args: tuple
    kwargs: dict

    @staticmethod
    def of(model: Callable, args: tuple, kwargs: dict, plate: str | None) -> "PriorPredictive":
        """
        :param plate: name of the private plate; ``None``: it is found.
        :raises ModelError: there is no such plate.
        """
        args, kwargs = in_memory(as_tensors(model, args, kwargs))
        return PriorPredictive(model, find_plate(model, args, kwargs, plate), args, kwargs)

    def draw(self, seed: int) -> Arguments:
        """The arguments, with outcomes from one draw of the prior predictive.

        :raises ModelError: the model fails on these arguments; outcomes are not finite, have no
            distribution, or are no arguments.
        """
        with forked_rng():
            pyro.set_rng_seed(seed)
            trace = self._traced(_Outcomes()(self.model), (self.args, self.kwargs))
            arguments = self.args, self.kwargs
            for name, site in trace.nodes.items():
                if not (is_random(site) and site["infer"].get("was_observed")):
                    continue
                if isinstance(site["fn"], Unit):
                    raise ModelError(_FACTOR.format(name=name, verb="forecast"))
                if not site["value"].isfinite().all():
                    raise ModelError(_NOT_FINITE.format(name=name))
                arguments = self._with_outcome(arguments, name, trace)
            return arguments

    def _with_outcome(self, arguments: Arguments, name: str, trace: poutine.Trace) -> Arguments:
        """The arguments with which a site observes its draw.

        Each tensor is replaced by the draw in turn, until the site observes it.
        """
        site = trace.nodes[name]
        drawn, before = site["value"], site["infer"]["obs"]
        if _same(before, drawn):
            return arguments
        model = poutine.replay(self.model, trace=trace)
        for candidate in _replaced(arguments, drawn):
            try:
                observed = self._traced(model, candidate).nodes[name]["value"]
            except ModelError:  # it cannot hold outcomes
                continue
            if _same(observed, drawn):
                return candidate
        raise ModelError(_NOT_FOUND.format(name=name))

    def _traced(self, model: Callable, arguments: Arguments) -> poutine.Trace:
        """A trace of the model on all records at once."""
        args, kwargs = arguments
        tables = (leaf for leaf in pytree.tree_leaves(arguments) if is_table(leaf))
        indices = torch.arange(self.plate.size, device=next(tables).device)
        with (
            torch.no_grad(),
            pyro.get_param_store().scope(),
            OneRecord(self.plate, indices),
            guarded("Running the model on the made-up arguments", public=True),
        ):
            return poutine.trace(model).get_trace(*args, **kwargs)


def _replaced(arguments: Arguments, outcomes: Tensor) -> Iterator[Arguments]:
    """The arguments, with each tensor or column of the outcomes' shape replaced in turn."""
    leaves, spec = pytree.tree_flatten(arguments)
    for i, leaf in enumerate(leaves):
        if not is_table(leaf):
            continue
        for column in _columns(leaf, outcomes):
            new = leaf.clone()
            new[column] = outcomes.to(leaf.dtype)
            yield pytree.tree_unflatten([*leaves[:i], new, *leaves[i + 1 :]], spec)


def _columns(table: Tensor, outcomes: Tensor) -> list[Any]:
    """Indices of the table at which outcomes have the right shape."""
    if table.shape == outcomes.shape:
        return [...]
    if table.shape[:-1] == outcomes.shape:
        return [(..., column) for column in range(table.shape[-1])]
    return []


def _same(observed: Any, drawn: Tensor) -> bool:
    """Whether a site observed the draw, perhaps in the dtype of an argument."""
    if not isinstance(observed, Tensor) or observed.shape != drawn.shape:
        return False
    return bool(torch.isclose(observed.double(), drawn.double(), rtol=1e-5, atol=1e-30).all())
