"""Plausible user code that leaks, or would: models, guides and init functions as people write them.

Each function builds an inference on a data set, and its first docstring line describes the leak. A
refusal must contain one of the words in ``names``, which help the user to find it. The verdicts
come from leak_verdicts.py. In test_leaks.py none leaks, and docs/leaks.md lists them. They were
written before anything was changed because of them.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_median, init_to_value
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_dp import DPSEP, DPSVI, VIPS, Execution, FullBatch, Noise, PrivacyAccountant
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.vips import ConjugateModel, Statistic

STEPS = 3


@dataclass
class Case:
    """A user's run and later publications.

    :param inference: made, but without a step.
    :param data: the arguments of ``step``.
    :param publishes: modules whose ``state_dict()`` is published beside the parameter store.
    """

    inference: IterativeMechanism
    data: tuple
    publishes: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Leak:
    """
    :param build: makes the case from the data; model, guide and all that they keep are new.
    :param data: makes the data set.
    :param names: a refusal says at least one of these words.
    :param curator: whether a record is so odd that the checks before the first release may stumble
        over it. Such errors are for the curator, and may depend on the data set.
    """

    name: str
    build: Callable[..., Case]
    data: Callable[[], tuple[Tensor, ...]]
    names: tuple[str, ...] = ()
    curator: bool = False

    @property
    def description(self) -> str:
        return self.build.__doc__.strip().splitlines()[0]


LEAKS: dict[str, Leak] = {}


def patients() -> tuple[Tensor, ...]:
    """Age, weight and height of 40 people, and their blood pressure. No number is near 0 or 1."""
    generator = torch.Generator().manual_seed(11)
    z = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    x = torch.tensor([52.3, 74.6, 172.9]) + torch.tensor([13.1, 9.7, 7.3]) * z
    y = 128.4 + z @ torch.tensor([6.0, 4.0, -3.0]) + 5.2 * torch.randn(40, generator=generator)
    return x, y


def points() -> tuple[Tensor, ...]:
    """Weight and height, in two groups."""
    return (patients()[0][:, 1:].contiguous() + 15.0 * (torch.arange(40) % 2).unsqueeze(1),)


def leak(*names: str, data: Callable = patients, curator: bool = False):
    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        LEAKS[build.__name__] = Leak(build.__name__, build, data, names, curator)
        return build

    return register


def dpsvi(model, guide, *data, optim=None, loss=None, publishes=(), **options) -> Case:
    inference = DPSVI(
        model,
        guide or AutoNormal(model),
        optim or Adam({"lr": 0.01}),
        loss or Trace_ELBO(),
        **_settings() | {"execution": Execution(jit="none")} | options,
    )
    return Case(inference, data, tuple(publishes))


def dpsep(model, guide, *data, **options) -> Case:
    settings = {name: _settings()[name] for name in ("accountant", "noise")} | options
    return Case(DPSEP(model, guide or AutoNormal(model), **settings), data)


def vips(model, *data) -> Case:
    return Case(VIPS(model, **_settings()), data)


def _settings() -> dict:
    return dict(
        accountant=PrivacyAccountant(neighboring="replace_one"),
        num_steps=STEPS,
        noise=Noise(1.0, source=0),
        sampling=FullBatch(),
    )


def weights(dim: int = 3) -> Tensor:
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([dim]).to_event(1))


def observe(mean: Tensor, y: Tensor) -> None:
    """Within the plate."""
    pyro.sample("y", dist.Normal(100.0 + 10.0 * mean, 10.0), obs=y)


def regress(features: Tensor, y: Tensor) -> None:
    """On features of all records."""
    w = weights()
    with pyro.plate("data", len(y)) as idx:
        observe(features[idx] @ w, y[idx])


# Data-dependent initialisation and memoisation: something is computed once, from what comes first.


class ActNorm(nn.Module):
    """Glow's activation normalisation (Kingma & Dhariwal 2018), initialised by its first batch."""

    def __init__(self, dim: int = 3):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(dim))
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            self.b.data = -x.mean(0)
            self.initialised = True
        return (x + self.b) / 10.0


@leak("norm", "ActNorm", "initialised")
def act_norm_by_closure(x, y):
    """ActNorm that a model captures; its first forward sets b to minus the mean (Python flag)."""
    norm = ActNorm()

    def model(x, y):
        pyro.module("norm", norm)
        h = norm(x)
        regress(h, y)

    return dpsvi(model, None, x, y, publishes=[norm])


@leak("FirstBatchScale", "ready")
def scale_with_a_buffer_as_flag(x, y):
    """A scale that the first batch sets, with the flag in a buffer."""

    class FirstBatchScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(3))
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x):
            if not self.ready:
                self.log_scale.data.copy_(-x.std(0).log())
                self.ready.fill_(True)
            return x * self.log_scale.exp()

    scale = FirstBatchScale()

    def model(x, y):
        pyro.module("scale", scale)
        w = weights()
        with pyro.plate("data", len(x)):
            observe(scale(x) @ w, y)

    return dpsvi(
        model, None, x, y, publishes=[scale], execution=Execution(jit="none", slice_data=True)
    )


@leak("encoder", "Encoder", "shift", data=points)
def weight_norm_in_the_guide(x):
    """An encoder with data-dependent initialisation (Salimans & Kingma 2016), in the guide only."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.shift = self.factor = None

        def forward(self, x):
            h = self.linear(x)
            if self.shift is None:
                self.shift = nn.Parameter(-h.mean(0).detach())
                self.factor = nn.Parameter(1 / (h.std(0).detach() + 0.2))
            return (h + self.shift) * self.factor

    encoder = Encoder()

    def model(x):
        centre = pyro.param("centre", torch.zeros(2))
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(centre + z, 10.0).to_event(1), obs=x[idx])

    def guide(x):
        h = encoder(x)
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(h[idx], 0.5).to_event(1))

    return dpsvi(model, guide, x, publishes=[encoder])


@leak("centres", data=points)
def dictionary_in_model_and_guide(x):
    """A dictionary of centres, shared by model and guide. The first to run fills it; traced."""
    centres = {}
    encoder = nn.Linear(2, 2)

    def centred(x):
        if "x" not in centres:
            centres["x"] = x.mean(0)
        return x - centres["x"]

    def model(x):
        spread = pyro.param("spread", torch.tensor(2.0), constraint=dist.constraints.positive)
        h = centred(x)
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(10.0 * z, spread).to_event(1), obs=h[idx])

    def guide(x):
        pyro.module("encoder", encoder)
        h = centred(x)
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(encoder(h[idx] / 10.0), 0.5).to_event(1))

    return dpsvi(model, guide, x, publishes=[encoder], execution=Execution(jit="trace"))


def memoised() -> Callable:
    cache = {}

    def model(x, y):
        if "sd" not in cache:
            cache["sd"] = x.std(0) + 1e-3
        regress(x / cache["sd"], y)

    return model


@leak("cache")
def cache_in_a_dictionary(x, y):
    """Memoised standard deviations in a dictionary: cache["sd"] = x.std(0)."""
    return dpsvi(memoised(), None, x, y)


@leak("cache")
def cache_under_dpsep(x, y):
    """The same dictionary, under DPSEP."""
    return dpsep(memoised(), None, x, y)


@leak("cache")
def cache_in_a_default_argument(x, y):
    """A mutable default argument as cache."""

    def model(x, y, cache={}):  # noqa: B006
        if not cache:
            cache["centre"], cache["sd"] = x.mean(0), x.std(0) + 1e-3
        regress((x - cache["centre"]) / cache["sd"], y)

    return dpsvi(model, None, x, y)


@leak("largest")
def attribute_of_a_function(x, y):
    """A function's attribute as cache: model.largest = x.abs().max(0)."""

    def model(x, y):
        if not hasattr(model, "largest"):
            model.largest = x.abs().amax(0)
        w = weights()
        with pyro.plate("data", len(x)):
            observe((x / model.largest) @ w, y)

    return dpsvi(model, None, x, y, execution=Execution(jit="none", slice_data=True))


_STATISTICS: dict[str, Tensor] = {}


@leak("_STATISTICS")
def cache_in_a_global(x, y):
    """A dictionary of the script as cache."""
    _STATISTICS.clear()  # a new session

    def model(x, y):
        if "offset" not in _STATISTICS:
            _STATISTICS["offset"] = y.mean()
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            mean = _STATISTICS["offset"] + x[idx] @ w / 100.0
            pyro.sample("y", dist.Normal(mean, 10.0), obs=y[idx])

    return dpsvi(model, None, x, y)


@leak("centre")
def nonlocal_variable(x, y):
    """A None check on a variable of the enclosing function."""
    centre = None

    def model(x, y):
        nonlocal centre
        if centre is None:
            centre = x.mean(0)
        regress((x - centre) / 10.0, y)

    return dpsvi(model, None, x, y)


@leak("Study")
def attribute_of_a_class(x, y):
    """A None check on a class attribute, which no copy of the object copies."""

    class Study:
        mean = None

        def model(self, x, y):
            if Study.mean is None:
                Study.mean = x.mean(0)
            regress((x - Study.mean) / 10.0, y)

    return dpsvi(Study().model, None, x, y)


@leak("sd", "latest")
def lru_cache_of_columns(x, y):
    """functools.lru_cache on a function of the column's number."""
    latest = {}

    @functools.cache
    def sd(column):
        return latest["x"][:, column].std() + 1e-3

    def model(x, y):
        latest["x"] = x
        scale = torch.stack([sd(j) for j in range(x.shape[1])])
        regress(x / scale, y)

    return dpsvi(model, None, x, y)


@leak("Regression", "sd")
def callable_class_with_a_none_check(x, y):
    """A callable class, not to be copied, that keeps the standard deviations of its first call."""

    class Regression:
        def __init__(self):
            self.sd = None
            self.history = (step for step in range(100))  # a generator: deepcopy refuses

        def __call__(self, x, y):
            if self.sd is None:
                self.sd = x.std(0) + 1e-3
            regress(x / self.sd, y)

    return dpsvi(Regression(), None, x, y)


@leak("Whitened", "whitened")
def module_that_cannot_be_copied(x, y):
    """A module with a tensor that is no leaf, which deepcopy refuses, and a first-batch shift."""

    class Whitened(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(3))
            self.log_sd = nn.Parameter(torch.full((3,), 2.3))
            self.sd = self.log_sd.exp()
            self.started = False

        def forward(self, x, y):
            if not self.started:
                self.b.data, self.started = x.mean(0), True
            regress((x - self.b) / self.sd.detach(), y)

    model = Whitened()

    def registered(x, y):
        pyro.module("whitened", model)
        return model(x, y)

    return dpsvi(registered, None, x, y, publishes=[model])


@leak("Shared", "centre")
def module_whose_copy_is_itself(x, y):
    """A module that shares its weights with its copies: __deepcopy__ returns self."""

    class Shared(nn.Module):
        centre = None

        def __deepcopy__(self, memo):
            return self

        def forward(self, x, y):
            if self.centre is None:
                self.centre = x.mean(0)
            w = weights()
            with pyro.plate("data", len(x)):
                observe((x - self.centre) @ w / 10.0, y)

    return dpsvi(Shared(), None, x, y, execution=Execution(jit="none", slice_data=True))


@leak("whiten", "LazyWhitening", "centre")
def lazy_module(x, y):
    """A lazy module whose parameter takes its shape, and its values, from the first batch."""

    class LazyWhitening(nn.modules.lazy.LazyModuleMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.UninitializedParameter()

        def initialize_parameters(self, x):
            if self.has_uninitialized_params():
                with torch.no_grad():
                    self.centre.materialize(x.shape[1:])
                    self.centre.copy_(x.mean(0))

        def forward(self, x):
            return (x - self.centre) / 10.0

    whiten = LazyWhitening()

    def model(x, y):
        h = whiten(x)
        pyro.module("whiten", whiten)
        regress(h, y)

    return dpsvi(model, None, x, y, publishes=[whiten])


# The data themselves are within reach of the model, beside its arguments.


@leak("reference")
def data_in_a_default(x, y):
    """The training data as default of a further argument."""

    def model(x, y, reference=x):
        regress((x - reference.mean(0)) / reference.std(0), y)

    return dpsvi(model, None, x, y)


@leak("reference")
def data_in_a_partial(x, y):
    """functools.partial(model, reference=x)."""

    def model(x, y, *, reference):
        regress((x - reference.mean(0)) / reference.std(0), y)

    return dpsvi(functools.partial(model, reference=x), None, x, y)


@dataclass
class Table:
    x: Tensor
    y: Tensor = field(repr=False)


@leak("table", "Model")
def data_in_an_attribute(x, y):
    """A callable class that was made with the table of the data."""

    class Model:
        def __init__(self, table):
            self.table = table

        def __call__(self, x, y):
            offset = self.table.y.mean()
            w = weights()
            with pyro.plate("data", len(x)) as idx:
                mean = offset + (x[idx] - self.table.x.amin(0)) @ w / 10.0
                pyro.sample("y", dist.Normal(mean, 10.0), obs=y[idx])

    return dpsvi(Model(Table(x, y)), None, x, y)


@leak("array")
def numpy_array_by_closure(x, y):
    """The NumPy array from which the tensors were made; traced."""
    array = x.numpy()

    def model(x, y):
        centre = torch.from_numpy(array.mean(0))
        regress((x - centre) / 10.0, y)

    return dpsvi(model, None, x, y, execution=Execution(jit="trace"))


@leak("rows")
def list_by_closure(x, y):
    """The data as a list of lists, from which the model computes the heaviest weight."""
    rows = x.tolist()

    def model(x, y):
        heaviest = max(row[1] for row in rows)
        regress(x / heaviest, y)

    return dpsvi(model, None, x, y)


_TRAIN: Tensor | None = None


@leak("_TRAIN")
def data_as_a_global(x, y):
    """The data as a variable of the script: its column means are the prior's."""
    global _TRAIN
    _TRAIN = x

    def model(x, y):
        mu = pyro.sample("mu", dist.Normal(_TRAIN.mean(0), 1.0).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(mu, 10.0).to_event(1), obs=x[idx])
            pyro.sample("y", dist.Normal(mu[0], 10.0), obs=y[idx])

    return dpsep(model, None, x, y)


@leak("'y'", "condition")
def pyro_condition(x, y):
    """``pyro.condition(model, data={"y": y})``: the handler holds the labels, no argument does."""

    def model(x, label=None):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(100.0 + x[idx] @ w, 10.0))

    return dpsvi(pyro.condition(model, data={"y": y}), None, x)


@leak("optim", "rate_of")
def optimiser_that_reads_the_data(x, y):
    """A learning rate of one over the data's spread, in a function that captures the data."""

    def rate_of(parameter):
        return {"lr": 0.1 / float(x.std())}

    def model(x, y):
        regress(x / 100.0, y)

    return dpsvi(model, None, x, y, optim=Adam(rate_of))


# Initial values.


def mixture(x):
    """The mixture of Pyro's tutorial."""
    share = pyro.sample("share", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(100.0, 50.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(share), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[z], 10.0).to_event(1), obs=x[idx])


@leak("init_loc_fn", "init", "locs", data=points)
def init_loc_fn_that_picks_rows(x):
    """The initialisation of Pyro's GMM tutorial: locations start at rows of the data."""

    def init(site):
        if site["name"] == "locs":
            return x[torch.multinomial(torch.ones(len(x)) / len(x), 2)]
        return init_to_median(site)

    guide = AutoDelta(pyro.poutine.block(mixture, hide=["z"]), init_loc_fn=init)
    return dpsvi(mixture, guide, x, loss=TraceEnum_ELBO())


@leak("init_to_value", "init_loc_fn", "locs", data=points)
def init_to_value_with_rows(x):
    """init_to_value(values={"locs": x[[0, 22]]}), under DPSEP."""
    hidden = pyro.poutine.block(mixture_of_known_shares, hide=["z"])
    guide = AutoNormal(hidden, init_loc_fn=init_to_value(values={"locs": x[[0, 22]]}))
    # It has more noise than the others, because its result is near the data's own numbers.
    return dpsep(mixture_of_known_shares, guide, x, noise=Noise(4.0, source=0))


def mixture_of_known_shares(x):
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(100.0, 50.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[z], 10.0).to_event(1), obs=x[idx])


def location(x):
    mu = pyro.sample("mu", dist.Normal(100.0, 50.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(mu, 10.0).to_event(1), obs=x[idx])


@leak("init_to_value", "init_loc_fn", "mu", data=points)
def init_to_value_with_means(x):
    """``init_to_value(values={"mu": x.mean(0)})``: numbers, made before anything else ran."""
    guide = AutoNormal(location, init_loc_fn=init_to_value(values={"mu": x.mean(0)}))
    return dpsvi(location, guide, x)


@leak("loc", data=points)
def parameter_from_the_argument(x):
    """pyro.param("loc", lambda: x.mean(0)) in the guide, from the guide's own argument."""

    def guide(x):
        loc = pyro.param("loc", lambda: x.mean(0))
        pyro.sample("mu", dist.Normal(loc, 1.0).to_event(1))

    return dpsvi(location, guide, x)


@leak("loc", "train", data=points)
def parameter_from_captured_data(x):
    """pyro.param("loc", lambda: train.mean(0)) in the guide, from data that it captures."""
    train = x

    def guide(x):
        loc = pyro.param("loc", lambda: train.mean(0))
        pyro.sample("mu", dist.Normal(loc, 1.0).to_event(1))

    return dpsvi(location, guide, x)


# Running statistics.


@leak("running", "RunningMean")
def running_mean_in_a_buffer(x, y):
    """A module that keeps a running mean in a buffer."""

    class RunningMean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.running = 0.9 * self.running + 0.1 * x.mean(0)
            return x - self.running

    centre = RunningMean()

    def model(x, y):
        h = centre(x)
        regress(h / 10.0, y)

    return dpsvi(model, None, x, y, publishes=[centre])


@leak("Scaled", "scaled", "largest", "'y'")
def running_maximum_in_a_float(x, y):
    """The largest label so far, as a Python float by which labels are divided; the default jit."""

    class Scaled:
        largest = 1.0

        def __call__(self, y):
            self.largest = max(self.largest, float(y.max()))
            return y / self.largest

    scaled = Scaled()

    def model(x, y):
        w = weights()
        h = scaled(y)
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx] @ w / 100.0, 2.0), obs=h[idx])

    return dpsvi(model, None, x, y, execution=Execution(jit="trace"))


@leak("seen", "'y'", "in model")
def running_mean_in_a_list(x, y):
    """A list of all labels so far: each record is compared with the mean of those before it."""
    seen = []

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            before = sum(seen) / len(seen) if seen else 100.0
            seen.append(y[idx].mean().item())
            pyro.sample("y", dist.Normal(before + x[idx] @ w / 10.0, 10.0), obs=y[idx])

    return dpsvi(model, None, x, y)


@leak("centre")
def assignment_to_the_parameter_store(x, y):
    """pyro.get_param_store()["centre"] = x.mean(0), if it is not there yet."""

    def model(x, y):
        store = pyro.get_param_store()
        if "centre" not in store:
            store["centre"] = x.mean(0)
        centre = pyro.param("centre")
        regress((x - centre) / 10.0, y)

    return dpsvi(model, None, x, y)


@leak("centre")
def parameter_moved_in_the_model(x, y):
    """A running mean in a parameter's own data: centre.data = 0.9 centre + 0.1 mean."""

    def model(x, y):
        centre = pyro.param("centre", torch.zeros(3))
        centre.data = 0.9 * centre.data + 0.1 * x.mean(0)
        regress((x - centre) / 10.0, y)

    return dpsvi(model, None, x, y)


# Statistics in forward: other rows enter a record's term.


@leak("'x'", "'data'", "in model")
def centred_by_the_mean(x, y):
    """x - x.mean(0), indexed afterwards."""

    def model(x, y):
        w = weights()
        h = x - x.mean(0)
        with pyro.plate("data", len(x)) as idx:
            observe(h[idx] @ w / 10.0, y[idx])

    return dpsvi(model, None, x, y)


@leak("'x'", "'data'", "in model")
def scaled_by_the_deviation(x, y):
    """x / x.std(0), with slice_data=True."""

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            observe((x / (x.std(0) + 1e-6)) @ w, y)

    return dpsvi(model, None, x, y, execution=Execution(jit="none", slice_data=True))


@leak("'x'", "'data'", "in model")
def ranks_totals_and_lags(x, y):
    """Ranks, cumulative sums and the row before, x[idx - 1], as features; DPSEP."""

    def model(x, y):
        w = weights()
        rank, total = x.argsort(0).argsort(0).to(x), x.cumsum(0)
        with pyro.plate("data", len(x)) as idx:
            features = x[idx] - x[idx - 1] + rank[idx] + total[idx] / len(x)
            observe(features @ w / 100.0, y[idx])

    return dpsep(model, None, x, y)


@leak("'x'", "'data'", "in guide", data=points)
def batch_norm_by_hand_in_the_guide(x):
    """An encoder that normalises its batch by hand."""
    encoder = nn.Linear(2, 2)

    def model(x):
        centre = pyro.param("centre", torch.full((2,), 100.0))
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(centre + z, 10.0).to_event(1), obs=x[idx])

    def guide(x):
        pyro.module("encoder", encoder)
        h = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(encoder(h[idx]), 0.5).to_event(1))

    return dpsvi(model, guide, x, publishes=[encoder])


@leak("'mu'", "'x'", data=points)
def prior_from_the_data(x):
    """Empirical Bayes: the prior of mu is Normal(x.mean(0), x.std(0)), outside the plate."""

    def model(x):
        mu = pyro.sample("mu", dist.Normal(x.mean(0), x.std(0) + 1e-3).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(mu, 10.0).to_event(1), obs=x[idx])

    return dpsvi(model, None, x)


# Texts.


@leak("'y'", "in model", curator=True)
def warning_that_quotes(x, y):
    """A plausibility check in the model that quotes the largest label in a warning."""

    def model(x, y):
        if float(y.max()) > 120.0:
            warnings.warn(f"Some labels are as large as {float(y.max())}.", stacklevel=1)
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            observe(x[idx] @ w / 100.0, y[idx])

    return dpsvi(model, None, x, y)


@leak("'y'", "in model", curator=True)
def error_that_quotes(x, y):
    """A plausibility check that quotes the odd record's label in an error."""

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            if (y[idx] > 500.0).any():
                raise ValueError(f"The label {y[idx].max().item()} is beyond what can be measured.")
            observe(x[idx] @ w / 100.0, y[idx])

    return dpsvi(model, None, x, y)


@leak("'x'", "in model", curator=True)
def warning_of_one_record(x, y):
    """np.sqrt of a number that is negative for one record: NumPy warns in every step."""

    def model(x, y):
        w = weights(1)
        with pyro.plate("data", len(x)) as idx:
            left = torch.as_tensor(np.sqrt(300.0 - x[idx, 1].numpy()))
            observe(left * w / 10.0, y[idx])

    return dpsvi(model, None, x, y)


# VIPS with a model of one's own.


class Means(ConjugateModel):
    """Means of columns with fixed standard deviation 10, for rows of a norm of at most 300."""

    @property
    def statistics(self):
        return {"total": Statistic((2,), bound=1.0)}

    def check(self, *data):
        pass

    def expected_statistics(self, posterior, draws, x):
        return {"total": x / 300.0}

    def posterior(self, statistics, noise, size):
        precision = 1 / 50.0**2 + size / 10.0**2
        return statistics["total"] * 300.0 / 10.0**2 / precision, precision**-0.5

    def marginals(self, posterior):
        return {"mu": dist.Normal(*posterior).to_event(1)}

    def guide(self, posterior):
        pyro.sample("mu", dist.Normal(*posterior).to_event(1))

    def model(self, x):
        mu = pyro.sample("mu", dist.Normal(0.0, 50.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(mu, 10.0).to_event(1), obs=x[idx])


@leak("Centred", "expected_statistics", "E-step", data=points)
def e_step_that_centres_its_batch(x):
    """An E-step that subtracts the batch's mean."""

    class Centred(Means):
        def expected_statistics(self, posterior, draws, x):
            return {"total": (x - x.mean(0)) / 300.0}

    return vips(Centred(), x)


@leak("Scaled", "sd", data=points)
def check_that_keeps_the_deviation(x):
    """check() keeps the data's standard deviation, and the E-step divides by it."""

    class Scaled(Means):
        def check(self, *data):
            self.sd = data[0].std(0)

        def expected_statistics(self, posterior, draws, x):
            return {"total": x / self.sd / 30.0}

    return vips(Scaled(), x)


@leak("Anchored", "anchor", "expected_statistics", data=points)
def e_step_that_keeps_its_first_batch(x):
    """An E-step that measures everything from the first row it ever saw."""

    class Anchored(Means):
        anchor = None

        def expected_statistics(self, posterior, draws, x):
            if self.anchor is None:
                self.anchor = x.amax(0)
            return {"total": (x - self.anchor) / 300.0}

    return vips(Anchored(), x)


@leak("Running", "running", "expected_statistics", data=points)
def posterior_around_a_running_mean(x):
    """An E-step that keeps a running mean, around which the M-step puts the posterior."""

    class Running(Means):
        running = 0.0

        def expected_statistics(self, posterior, draws, x):
            self.running = 0.5 * self.running + 0.5 * x.mean(0)
            return super().expected_statistics(posterior, draws, x)

        def posterior(self, statistics, noise, size):
            mean, sd = super().posterior(statistics, noise, size)
            return 0.5 * mean + 0.5 * self.running, sd

    return vips(Running(), x)


# Code that must not be called a leak.

HONEST: dict[str, Leak] = {}


def honest(data: Callable = patients):
    def register(build):
        HONEST[build.__name__] = Leak(build.__name__, build, data)
        return build

    return register


@honest()
def regression(x, y):
    """Indexed, with a module that the model captures."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def model(x, y):
        pyro.module("network", network)
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            observe(level + network(x[idx] / 100.0).squeeze(-1), y[idx])

    return dpsvi(model, None, x, y, publishes=[network])


@honest()
def regression_on_whole_tensors(x, y):
    """slice_data=True, traced, with public constants by closure."""
    usual = {"centre": torch.tensor([50.0, 75.0, 170.0]), "sd": torch.tensor([15.0, 10.0, 10.0])}

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            observe(((x - usual["centre"]) / usual["sd"]) @ w, y)

    return dpsvi(model, None, x, y, execution=Execution(jit="trace", slice_data=True))


@honest(points)
def autoencoder(x):
    """Amortised latents per record."""
    encoder = nn.Linear(2, 2)

    def model(x):
        centre = pyro.param("centre", torch.full((2,), 100.0))
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(centre + z, 10.0).to_event(1), obs=x[idx])

    def guide(x):
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(encoder(x[idx] / 100.0), 0.5).to_event(1))

    return dpsvi(model, guide, x, publishes=[encoder])


@honest()
def one_record_at_a_time(x, y):
    """Control flow on values."""
    low, high, limit = 10.0, 20.0, 300.0

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            spread = low if float(x[idx].sum()) < limit else high
            pyro.sample("y", dist.Normal(100.0 + x[idx] @ w / 10.0, spread), obs=y[idx])

    return dpsvi(model, None, x, y)


@honest(points)
def clusters(x):
    """DPSEP with enumerated assignments, and public initial values."""
    start = torch.tensor([[80.0, 160.0], [95.0, 195.0]]) + math.pi
    hidden = pyro.poutine.block(mixture_of_known_shares, hide=["z"])
    guide = AutoNormal(hidden, init_loc_fn=init_to_value(values={"locs": start}))
    # It has more noise than the others, because its result is near the data's own numbers.
    return dpsep(mixture_of_known_shares, guide, x, noise=Noise(4.0, source=0))


@honest(points)
def column_means(x):
    """VIPS with a model of one's own."""
    return vips(Means(), x)
