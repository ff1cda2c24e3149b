"""Cases to fuzz the package with, as hypothesis strategies of plain values.

A case says what is called and with what; :func:`fuzz_contract.check` runs it and judges. Used by
test_fuzz.py and benchmarks/fuzz.py.
"""

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import fuzz_models as made
import numpy as np
import pandas as pd
import torch
from fuzz_contract import Case, NotBuilt, Watch, odd_values, parameters, require_finite
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    AdaptiveClip,
    Clip,
    Cluster,
    ConfigurationError,
    Execution,
    Factors,
    FixedSizeSampling,
    FullBatch,
    Noise,
    PaperDPSEP,
    PaperDPSVI,
    PoissonSampling,
    PrivacyAccountant,
    ReleasedStep,
    RowAdam,
    SubsampledGaussian,
    columns,
)
from pyro_dp.accounting.origins import Origin
from pyro_dp.infer.ep.stochastic_ep import StochasticEP
from pyro_dp.tabular import Category, Count, Date, Number, Schema, Synthesizer
from pyro_dp.vips import (
    GaussianMixture,
    LatentDirichletAllocation,
    LinearRegression,
    LogisticRegression,
    SigmoidBeliefNetwork,
)

_EYE = torch.eye(2, dtype=torch.float64)
odd = st.sampled_from(odd_values())


def _filled(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def _half(step: int) -> float:
    return 0.5


def mostly(sound: list, others: list) -> SearchStrategy:
    """One of the sound ones, seven times out of eight."""
    return st.sampled_from(sound * math.ceil(7 * len(others) / len(sound)) + others)


def _read(source: Any, names: Any) -> None:
    """All rows of some columns."""
    found = columns(source, *(names if isinstance(names, tuple) else (names,)))
    for each in found if isinstance(found, tuple) else (found,):
        assert sum(len(rows) for rows in each.blocks()) == len(each)


def _encoded(values: Any, **settings: Any) -> None:
    """A frame of one column, there and back."""
    frame = own(lambda: pd.DataFrame({"a": values, "id": 1}))
    schema = Schema({"a": Number(0, 2, missing=True)}, unit="id", **settings)
    back = schema.decode(schema.encode(frame))
    assert len(back) == min(len(frame), schema.max_rows) and schema.possible(frame).any() in (0, 1)
    assert Schema.from_json(schema.to_json()) == schema


def _synthesized(values: Any, n: Any, **settings: Any) -> None:
    """Rows that are made up of those of a frame of two columns."""
    frame = own(lambda: pd.DataFrame({"a": values, "b": 1, "id": [1, 1, 2]}))
    columns_of = {"a": Number(0, 2, bins=3, missing=True), "b": Count(0, 2)}
    schema = Schema(columns_of, unit="id", max_rows=2)
    twin = Synthesizer(schema, accountant=PrivacyAccountant(), **settings)
    made_up = twin.fit(frame).sample(n)
    assert made_up["id"].nunique() == (2 if n is None else n)


def look(step: ReleasedStep) -> None:
    assert repr(step) and step.epsilon >= 0


def own(make: Callable) -> Any:
    """Make the user's own objects before the package sees them; this may fail."""
    try:
        return make()
    except Exception as error:
        raise NotBuilt from error


def settings_of(sound: dict[str, list], required: tuple[str, ...] = ()) -> SearchStrategy:
    """Keyword arguments: some of the sound ones, and now and then an odd or unknown one."""
    optional = sorted(sound.keys() - set(required))
    few = st.lists(st.sampled_from(optional), max_size=3, unique=True) if optional else st.just([])
    wrong = st.dictionaries(
        st.sampled_from([*sorted(sound), *sorted(sound), "nonsense"]), odd, min_size=1, max_size=2
    )
    wrong = st.sampled_from([st.just({})] * 5 + [wrong]).flatmap(lambda chosen: chosen)

    def drawn(names: list[str]) -> SearchStrategy:
        chosen = {name: st.sampled_from(sound[name]) for name in (*required, *names)}
        return st.builds(lambda sound, odd: sound | odd, st.fixed_dictionaries(chosen), wrong)

    return few.flatmap(drawn)


_ACCOUNTANT = {
    "epsilon": [None, None, None, 1e6, 8.0, 0.01, 1e-300],
    "delta": [1e-5, 1e-3, 0.5, 1e-30, 1e-300],
    "neighboring": ["add_or_remove_one", "replace_one"],
    "engine": ["pld", "rdp"],
}
ACCOUNTANT = settings_of(_ACCOUNTANT)


def every(kind: Callable, **fields: list) -> list:
    """An object for every combination of these values."""
    chosen = itertools.product(*fields.values())
    return [kind(**dict(zip(fields, values, strict=True))) for values in chosen]


_BOUNDS = [1.0, 0.1, 10.0, 1e-6, 1e-9, 1e10, 1e40, math.inf]
_SIGMAS = [*[1.0, 0.5] * 4, 50.0, 1e-3, 1e6, 1e40, 1e300, None]
_RATES = [1.0, 0.5, 0.1, 0.999999, 1e-6, 1e-300, 1.0 - 1e-12]
_SIZES = [None, 1, 2, 10**9]
_SHARED = {
    "num_steps": [1, 2, 3, 10**6],
    "noise": [0, 0, *every(Noise, multiplier=_SIGMAS, source=[None, 0, 10**40, "system"])],
    "sampling": [*_RATES, *_RATES, *every(FixedSizeSampling, rate=_RATES), *[FullBatch()] * 5],
    "execution": every(Execution, microbatch_size=_SIZES),
}
_PYRO = {
    "execution": every(
        Execution, microbatch_size=_SIZES, slice_data=["auto", False, True], jit=["none"]
    )
}
_CLIPS = {
    "of": ["latents", "parameters"],
    "loss": [None, None, 1.0, 1e-9, 1e40],
    "loss_share": [0.05, 0.99, 1e-40],
}
_SVI = {
    **_SHARED,
    **_PYRO,
    "sampling": [*_SHARED["sampling"], PoissonSampling(plate="data")],
    "clip": every(Clip, bound=[*_BOUNDS, None, None], **_CLIPS),
}
_PAPER_BOUNDS = [*_BOUNDS, AdaptiveClip(), AdaptiveClip(1e-6, 0.99, 50.0)]
_PAPER = _SVI | {"clip": every(Clip, bound=_PAPER_BOUNDS, report=[True, False], **_CLIPS)}
_SEP = {
    "noise": _SHARED["noise"],
    **_PYRO,
    "sampling": [FullBatch(), FullBatch(plate="data")],
    "moments": ["auto", "linear", "stein"],
}
_PAPER_SEP = {
    **{name: _SVI[name] for name in ("num_steps", "noise", "sampling", "execution")},
    "clip": every(Clip, bound=_BOUNDS, report=[True, False]),
    "damping": [None, 0.5, 1.0, 1e-300, _half],
    "factors": every(
        Factors,
        precision=[None, "full", "diagonal", "shared"],
        weight=[None, 1.0, 1e-40, 1e40],
        centred=[True, False],
        moments=_SEP["moments"],
    ),
}
tensors = st.fixed_dictionaries(
    {
        "dtype": mostly(["float64"] * 9 + ["float32"], list(made.DTYPES)),
        "fill": mostly(["plain", "sentinel"], made.FILLS),
        "layout": mostly(["plain"], made.LAYOUTS),
        "seed": st.integers(0, 3),
    }
)
sizes = mostly([2, 3, 5, 8], [0, 1])
WAYS = [
    *("step", "twice", "run", "odd callbacks", "changed", "other size", "reloaded"),
    *("odd argument", "no argument", "columns"),
]
ways = mostly(["step", "twice", "run"], [*WAYS, "no plate argument", "evaluate", "damaged"])


@dataclass(frozen=True, kw_only=True)
class OnData(Case):
    """An inference, and steps on data.

    :param accountant: its settings.
    :param data: for each argument of the step, the arguments of :func:`fuzz_models.tensor`.
    :param size: number of records.
    :param way: how it is used.
    :param odd: an argument, if the case needs one.
    :param damage: see :func:`damaged`.
    """

    accountant: dict
    data: tuple[dict, ...]
    size: int
    way: str
    odd: Any = None
    damage: tuple = ([0], ...)

    def build(self, accountant: PrivacyAccountant) -> Any:
        raise NotImplementedError

    def results(self, inference: Any) -> Any:
        """Name and value of all that must be finite."""
        raise NotImplementedError

    def shapes(self, size: int) -> list[tuple[int, ...]]:
        return [(size, made.DIM), (size,)]

    def arguments(self, size: int | None = None, seed: int = 0) -> list[torch.Tensor]:
        shapes = self.shapes(self.size if size is None else size)
        return own(
            lambda: [
                made.tensor(shape, each["dtype"], each["fill"], each["layout"], each["seed"] + seed)
                for shape, each in zip(shapes, self.data, strict=False)
            ]
        )

    def releases(self, inference: Any) -> int:
        """Releases of the next step."""
        return 1

    def run(self, watch: Watch) -> None:
        if self.data[0]["dtype"] == "float32":
            torch.set_default_dtype(torch.float32)
        data = self.arguments()
        accountant = watch.watch(PrivacyAccountant(**self.accountant))
        inference = self.build(accountant)
        needed = {"evaluate": "evaluate_loss", "damaged": "state_dict", "reloaded": "state_dict"}
        if not hasattr(inference, needed.get(self.way, "step")):
            raise NotBuilt
        if self.way == "damaged":
            self._step(watch, inference, data)
            state = damaged(inference.state_dict(), self.damage)
            accountant = watch.watch(PrivacyAccountant(**self.accountant))
            inference = self.build(accountant)
            inference.load_state_dict(state)
            watch.watch(accountant)
        elif self.way == "reloaded":
            self._step(watch, inference, data)
            inference.load_state_dict(inference.state_dict())
        elif self.way in ("run", "odd callbacks"):
            if isinstance(inference.num_steps, int) and inference.num_steps > 3:
                raise NotBuilt
            callbacks = [look] if self.way == "run" else self.odd
            assert repr(inference.run(*data, progress=False, callbacks=callbacks))
            require_finite(self.results(inference))
            return
        elif self.way == "odd argument":
            data[-1] = self.odd
        elif self.way == "no argument":
            data.pop()
        elif self.way == "columns":
            data = [columns(each) for each in data]
        elif self.way == "evaluate":
            inference.evaluate_loss(*data)
        self._step(watch, inference, data)
        if self.way == "twice":
            self._step(watch, inference, data)
        elif self.way == "changed":
            self._step(watch, inference, self.arguments(seed=1))
        elif self.way == "other size":
            self._step(watch, inference, self.arguments(self.size + 1))
        repr(inference)

    def _step(self, watch: Watch, inference: Any, data: list) -> None:
        watch.step(lambda: inference.step(*data), self.releases(inference))
        require_finite(self.results(inference))


def damaged(state: Any, how: tuple) -> Any:
    """The state with one part replaced, or without it.

    :param how: which part, as a number for each level; the new value, or ``Ellipsis`` for none.
    """
    (place, *rest), value = how
    if isinstance(state, dict) and state:
        keys = list(state)
        key = keys[place % len(keys)]
        if not rest or not isinstance(state[key], (dict, list)):
            if value is ...:
                return {k: v for k, v in state.items() if k != key}
            return state | {key: value}
        return state | {key: damaged(state[key], (rest, value))}
    if isinstance(state, list) and state:
        return [damaged(state[0], ((place, *rest), value)), *state[1:]]
    return value


_places = st.lists(st.integers(0, 20), min_size=1, max_size=4)
_saved = st.sampled_from(odd_values())
damages = st.tuples(_places, st.one_of(st.just(...), _saved))


@dataclass(frozen=True, kw_only=True)
class OnModel(OnData):
    model: str = "normal"
    guide: str = "AutoNormal"

    def made_model(self) -> Callable:
        return made.MODELS[self.model]

    def made_guide(self) -> Any:
        return own(lambda: made.GUIDES[self.guide](self.made_model()))

    def executed(self) -> dict:
        reading = True if self.model == "whole" else "auto"
        return {"execution": Execution(jit="none", slice_data=reading)} | self.settings


def explained(inference: Any) -> Iterator[tuple[str, Any]]:
    found = inference.explain()
    assert repr(found)
    yield from found.shares.items()
    yield "half the width", torch.tensor(found.records_for_half_width)


def predicted(inference: Any) -> Iterator[tuple[str, Any]]:
    yield from inference.predictive(2).posterior_samples.items()


@dataclass(frozen=True, kw_only=True)
class Svi(OnModel):
    kind: ClassVar[type[DPSVI]] = DPSVI
    optim: str = "Adam"
    loss: str = "Trace_ELBO"

    def build(self, accountant: PrivacyAccountant) -> DPSVI:
        enumerates = self.model == "mixture" and self.loss == "Trace_ELBO"
        loss = "TraceEnum_ELBO" if enumerates else self.loss
        optim, loss = own(made.OPTIMIZERS[self.optim]), own(made.LOSSES[loss])
        settings = {"accountant": accountant} | self.executed()
        return self.kind(self.made_model(), self.made_guide(), optim, loss, **settings)

    def results(self, inference: DPSVI) -> Any:
        inference.finish()
        yield from parameters()
        yield from predicted(inference)
        with contextlib.suppress(ConfigurationError):  # the guide is no Gaussian
            posterior = inference.posterior()
            yield "mean", posterior.mean
            yield "covariance", posterior.covariance_matrix
            yield from explained(inference)


@dataclass(frozen=True, kw_only=True)
class PaperSvi(Svi):
    kind: ClassVar[type[DPSVI]] = PaperDPSVI


@dataclass(frozen=True, kw_only=True)
class Sep(OnModel):
    kind: ClassVar[type[StochasticEP]] = DPSEP

    def build(self, accountant: PrivacyAccountant) -> StochasticEP:
        settings = {"accountant": accountant} | self.executed()
        return self.kind(self.made_model(), self.made_guide(), **settings)

    def results(self, inference: StochasticEP) -> Any:
        posterior = inference.posterior()
        yield "mean", posterior.mean
        yield "covariance", posterior.covariance_matrix
        yield from predicted(inference)
        yield "noise share", posterior.noise_share
        yield from explained(inference)
        yield from parameters()


@dataclass(frozen=True, kw_only=True)
class PaperSep(Sep):
    kind: ClassVar[type[StochasticEP]] = PaperDPSEP


# Constructor, sound settings, shapes of the data of N records.
CONJUGATE: dict[str, tuple[Callable, dict[str, list], Callable]] = {
    "logistic": (
        LogisticRegression,
        {"dim": [2], "concentration": [1.0, 1e-40, 1e40], "rate": [1.0, 1e-40, 1e40]},
        lambda n: [(n, 2), (n,)],
    ),
    "linear": (
        LinearRegression,
        {
            "dim": [2],
            "x_bound": [1.0, 1e-6, 1e40],
            "y_bound": [1.0, 1e-40, 1e20],
            "weight_precision": [1.0, 1e-40, 1e40],
            "concentration": [1.0, 1e-40, 1e40],
            "rate": [1.0, 1e-40, 1e40],
        },
        lambda n: [(n, 2), (n,)],
    ),
    "mixture": (
        GaussianMixture,
        {
            "components": [2, 1, 3],
            "dim": [2],
            "radius": [1.0, 1e-6, 1e20, 1e40],
            "concentration": [1.0, 1e-40, 1e40],
            "mean_precision": [0.01, 1e-40, 1e40],
            "shape": [1.0, 1e-40, 1e40],
            "rate": [None, 1.0, 1e-40, 1e40],
            "start": [*[None] * 5, _filled(2, 2), _filled(2, 2, value=math.nan), _filled(3, 1)],
        },
        lambda n: [(n, 2)],
    ),
    "topics": (
        LatentDirichletAllocation,
        {
            "topics": [2],
            "words": [3],
            "length": [None, 4.0, 1e-40, 1e40],
            "clip": [1.0, 0.5, 1e-40],
            "alpha": [None, 1.0, 1e-40, 1e40],
            "eta": [None, 1.0, 1e-40, 1e40],
            "iterations": [2],
        },
        lambda n: [(n, 3)],
    ),
    "sigmoid": (
        SigmoidBeliefNetwork,
        {
            "pixels": [3],
            "units": [2],
            "a": [0.5, 1e-40, 1e40],
            "b": [0.5, 1e-40, 1e40],
            "bias_scale": [5.0, 1e-40, 1e40],
            "sweeps": [2],
        },
        lambda n: [(n, 3)],
    ),
}
_VIPS = {**_SHARED, "step_size": [None, (1, 0.7), (0, 1), (0, 0), (1e40, 1.0), (0.0, 1e-40)]}


@dataclass(frozen=True, kw_only=True)
class Vips(OnData):
    family: str = "logistic"
    of_model: dict | None = None

    def build(self, accountant: PrivacyAccountant) -> VIPS:
        model = CONJUGATE[self.family][0](**self.of_model)
        settings = {"accountant": accountant} | self.settings
        return VIPS(model, **settings)

    def shapes(self, size: int) -> list[tuple[int, ...]]:
        return CONJUGATE[self.family][2](size)

    def releases(self, inference: VIPS) -> int:
        """Static statistics have a release of their own, in the first step."""
        state = inference.state_dict()
        first = state["steps"] == 0 and state["static"] is None
        return 2 if first and inference._static_sum and inference._step_sum else 1

    def results(self, inference: VIPS) -> Any:
        posterior = inference.posterior()
        for name, marginal in posterior.items():
            yield name, marginal.sample()
        yield "noise share", posterior.noise_share
        yield from explained(inference)
        for name, value in inference.state_dict()["statistics"]["values"].items():
            yield name, value
        inference.guide()


EVENTS = settings_of(
    {
        "noise_multiplier": [1.0, 1.0, 0.5, 0.0, 1e-3, 1e-300, 1e300, 50.0],
        "sample_rate": [1.0, 1.0, 0.01, 0.5, 1e-300, 0.999999, 1.0 - 1e-12],
        "sampling": ["poisson", "poisson", "full", "fixed"],
    },
    required=("noise_multiplier",),
)
_DESCRIPTIONS = {
    "title": ["T", "<b>", "x" * 1001, "two\nlines"],
    "unit": ["a person"],
    "units": [1, 10**6, 0],
}
_counts = st.sampled_from([1, 1, 2, 100, 10**6, 10**12, 0])
OPERATIONS = st.one_of(
    st.tuples(st.just("record"), EVENTS, st.one_of(_counts, _counts, odd)),
    st.tuples(st.just("record anything"), odd),
    st.tuples(st.just("get_epsilon"), st.sampled_from([None, 1e-5, 1e-300, 0.999]) | odd),
    st.tuples(st.just("get_delta"), st.sampled_from([0.0, 1.0, 1e-300, 1e300]) | odd),
    st.tuples(st.just("note"), odd),
    st.tuples(st.just("describe"), settings_of(_DESCRIPTIONS)),
    st.tuples(st.just("run"), EVENTS, st.sampled_from([1.0, 1e-300, math.inf, None])),
    st.tuples(st.just("show")),
    st.tuples(st.just("reload"), damages),
    st.tuples(st.just("reload")),
    st.tuples(st.just("file"), st.sampled_from(["", "{", "[]", "{}", "null", "1e999"])),
)
_CALIBRATED = st.tuples(
    st.just("noise_multiplier"),
    settings_of(
        {
            "num_steps": [1, 10, 10**6, 10**15, 10**300],
            "sample_rate": [1.0, 1.0, 0.01, 1e-300, 0.999999],
            "sampling": ["poisson", "full", "fixed"],
        },
        required=("num_steps",),
    ),
)


# Calls, and whether what they return is as it must be.
_CALLS: dict[str, Callable] = {
    "record anything": lambda ours, event: ours.record(event) is None,
    "get_epsilon": lambda ours, delta: ours.get_epsilon(delta) >= 0,
    "get_delta": lambda ours, epsilon: 0 <= ours.get_delta(epsilon) <= 1,
    "note": lambda ours, text: ours.note(text) is None,
    "describe": lambda ours, said: ours.describe(**said) is None,
    "show": lambda ours: repr(ours) and ours._repr_html_(),
    "noise_multiplier": lambda ours, own: 0 < ours.noise_multiplier(**own) < math.inf,
}


@dataclass(frozen=True, kw_only=True)
class Accountant(Case):
    """Calls of an accountant, one after the other."""

    operations: tuple = ()

    def run(self, watch: Watch) -> None:
        accountant = PrivacyAccountant(**self.settings)
        for name, *values in self.operations:
            before, spent = accountant.num_releases, accountant.get_epsilon()
            if name in ("record", "run", "reload", "file"):
                getattr(self, f"_{name}")(accountant, *values)
            else:
                assert _CALLS[name](accountant, *values)
            assert accountant.num_releases >= before, "the ledger counts less than before"
            # Grids are refined to 1e-3.
            assert accountant.get_epsilon() >= spent * (1 - 2e-3), "epsilon is less than before"
            assert accountant.epsilon is None or spent <= accountant.epsilon, "over the budget"

    def _record(self, accountant: PrivacyAccountant, event: dict, count: Any) -> None:
        before = accountant.num_releases
        accountant.record(SubsampledGaussian(**event), count)
        assert accountant.num_releases == before + count, "an event was lost"

    def _run(self, accountant: PrivacyAccountant, event: dict, bound: float | None) -> None:
        origin = Origin.now("a run", seeded=False, secure=True)
        with accountant.next_position(origin, bound):
            accountant.record(SubsampledGaussian(**event))
        accountant.note_result(origin, (0.5, 0.1))
        assert accountant.runs()[-1][0] is origin, "a run was lost"

    def _reload(self, accountant: PrivacyAccountant, how: tuple | None = None) -> None:
        state = accountant.state_dict()
        accountant.load_state_dict(state if how is None else damaged(state, how))

    def _file(self, accountant: PrivacyAccountant, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ledger.json")
            accountant.save(path)
            json.loads(path.read_text())
            accountant.load(path)
            if text:
                path.write_text(text)
                accountant.load(path)


_PLAIN: dict[str, tuple[Callable, dict[str, list], tuple[str, ...]]] = {
    "SubsampledGaussian": (
        SubsampledGaussian,
        {"noise_multiplier": [1.0], "sample_rate": [0.5], "sampling": ["poisson"]},
        ("noise_multiplier",),
    ),
    "Cluster": (Cluster, {"timeout": [60.0, 1e-300, 1e300]}, ()),  # in one process: refused
    **{
        kind.__name__: (kind, {each.name: [each.default] for each in fields(kind)}, ())
        for kind in (AdaptiveClip, Clip, Execution, Factors, Noise, PoissonSampling, RowAdam)
    },
    "columns": (
        _read,
        {
            "source": [{"x": torch.ones(3), "y": [1, 2, 3]}, {"x": np.ones((3, 2), "f2")}, _EYE],
            "names": [("x",), ("x", "y"), (["x", "y"],), (), ([],)],
        },
        ("source", "names"),
    ),
    **{name: (make, sound, tuple(sound)) for name, (make, sound, _) in CONJUGATE.items()},
    "number": (
        Number,
        {
            "lower": [0, -1e40, -1e-300],
            "upper": [1, 1e40, 1e-300],
            "bins": [3, [0, 1]],
            "missing": [True],
            "dtype": ["float32", "Int64"],
        },
        ("lower", "upper"),
    ),
    "count": (
        Count,
        {"lower": [0, -5], "upper": [1, 9], "bins": [None, 2, [0, 1, 9]], "missing": [True]},
        ("lower", "upper"),
    ),
    "category": (
        Category,
        {
            "levels": [("a", "b"), [3, 1], (True,)],
            "other": [True, False],
            "missing": [True],
            "ordered": [True],
            "dtype": ["", "category", "str"],
        },
        ("levels",),
    ),
    "date": (
        Date,
        {"lower": ["2020-01-01"], "upper": ["2020-12-31"], "bins": [2], "missing": [True]},
        ("lower", "upper"),
    ),
    "synthesizer": (
        _synthesized,
        {
            "values": [[1, 2, 2], [0.5, 3.0, 1e300], _EYE[0].numpy()],
            "n": [1, 5, None],
            "noise": _SHARED["noise"],
            "components": [1, 3, 10**30],
            "keep": [(), [("b", "*")]],
        },
        ("values", "n", "noise"),
    ),
    "schema": (
        _encoded,
        {
            "values": [[1, 2, 2], [0.5, 3.0, 1e300], np.array([1, 2, 3], "u8"), _EYE[0].numpy()],
            "max_rows": [1, 2, 10**6],
            "constant": [(), ["a"], ("a",)],
            "derived": [None, {"b": "a * 2"}],
            "impossible": [(), [{"a": (0, 1)}]],
        },
        ("values",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plain(Case):
    """A settings object or a function of plain arguments."""

    name: str = ""

    def run(self, watch: Watch) -> None:
        result = _PLAIN[self.name][0](**self.settings)
        if isinstance(result, float) and math.isnan(result):
            raise AssertionError("NaN")


def _on_data(kind: type, sound: dict, required: tuple[str, ...] = (), **more) -> SearchStrategy:
    return st.builds(
        kind,
        settings=settings_of(sound, required),
        accountant=ACCOUNTANT,
        data=st.tuples(tensors, tensors),
        size=sizes,
        way=ways,
        odd=odd,
        damage=damages,
        **more,
    )


_models = mostly(made.SOUND_MODELS, list(made.MODELS))
_guides = mostly(made.SOUND_GUIDES, list(made.GUIDES))
_traced = {
    "execution": [Execution(jit="trace")],
    "noise": [1.0],
    "clip": every(Clip, bound=[1.0, None], of=["latents", "parameters"]),
}


def _svi(sound: dict, required: tuple[str, ...], kind: type[Svi] = Svi) -> SearchStrategy:
    return _on_data(
        kind,
        sound,
        required,
        model=_models,
        guide=_guides,
        optim=mostly(made.SOUND_OPTIMIZERS, list(made.OPTIMIZERS)),
        loss=mostly(made.SOUND_LOSSES, list(made.LOSSES)),
    )


_models_of_vips = st.sampled_from(list(CONJUGATE)).flatmap(
    lambda family: st.tuples(
        st.just(family), settings_of(CONJUGATE[family][1], tuple(CONJUGATE[family][1]))
    )
)

SVI = _svi(_SVI, ("num_steps", "noise"))
PAPER = _svi(_PAPER, ("num_steps", "noise"), PaperSvi)
TRACED = _svi(_traced, tuple(_traced))
SEP = st.one_of(
    _on_data(Sep, _SEP, ("noise",), model=_models, guide=_guides),
    _on_data(PaperSep, _PAPER_SEP, ("num_steps", "noise", "clip"), model=_models, guide=_guides),
)
VIPS_CASES = _models_of_vips.flatmap(
    lambda model: _on_data(
        Vips, _VIPS, ("num_steps", "noise"), family=st.just(model[0]), of_model=st.just(model[1])
    )
)
ACCOUNTANTS = st.builds(
    Accountant, settings=ACCOUNTANT, operations=st.lists(OPERATIONS, min_size=1, max_size=4)
)
CALIBRATIONS = st.builds(
    Accountant,
    settings=st.builds(
        lambda budget, settings: {"epsilon": budget} | settings,
        st.sampled_from([1.0, 8.0, 0.01, 1e-300, 1e6]),
        settings_of({name: values for name, values in _ACCOUNTANT.items() if name != "epsilon"}),
    ),
    operations=st.tuples(_CALIBRATED),
)
PLAIN = st.sampled_from(list(_PLAIN)).flatmap(
    lambda name: st.builds(
        Plain, settings=settings_of(_PLAIN[name][1], _PLAIN[name][2]), name=st.just(name)
    )
)

# Shares in a thousand cases.
FAMILIES: dict[str, tuple[SearchStrategy, int]] = {
    "DPSVI": (SVI, 150),
    "PaperDPSVI": (PAPER, 70),
    "DPSVI, traced": (TRACED, 10),
    "DPSEP": (SEP, 100),
    "VIPS": (VIPS_CASES, 220),
    "PrivacyAccountant": (ACCOUNTANTS, 130),
    "calibration": (CALIBRATIONS, 5),
    "settings": (PLAIN, 115),
}
CASES = st.sampled_from(
    [name for name, (_, share) in FAMILIES.items() for _ in range(share)]
).flatmap(lambda name: FAMILIES[name][0])
