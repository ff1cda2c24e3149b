"""User code that kept data unnoticed, and honest code that was refused.

The leaks raise a public peak to the largest label so far, and divide means by it. Only an odd
record moves it, and the checks see three records. They are judged like those of leaks.py.
"""

import argparse
import functools
import sys
import threading
import types
import warnings
from dataclasses import dataclass

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from leak_verdicts import judge
from leaks import ActNorm, Leak, Means, dpsep, dpsvi, observe, patients, points, vips, weights
from torch import nn

from pyro_dp import DPSVI, Execution, ModelError
from pyro_dp.infer.ep import tilted_sites
from pyro_dp.vips import GaussianMixture

PEAK = 150.0
KEPT = {"peak": PEAK}


def model_with(peak_of):
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            peak = peak_of(float(y[idx].max()))
            observe(x[idx] @ w / 100.0 * (PEAK / peak), y[idx])

    return model


@dataclass(slots=True)
class Slots:
    peak: float = PEAK


class Dictionary(dict):
    peak = PEAK


def with_peak(thing):
    thing.peak = PEAK
    return thing


class Peaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.peak = PEAK

    def forward(self, y):
        return y / self.peak


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(Peaks())


def with_a_gradient():
    kept = torch.zeros((), requires_grad=True)
    kept.grad = torch.tensor(PEAK)
    return kept


def attribute(make):
    return make, lambda kept: kept.peak, lambda kept, y: setattr(kept, "peak", y)


def element(make):
    return make, lambda kept: float(kept[0]), lambda kept, y: kept.__setitem__(0, y)


def tensor():
    return torch.tensor(PEAK)


# Things that can keep a peak: how they are made, read and written to.
THINGS = {
    "slots": attribute(Slots),
    "an argparse namespace": attribute(lambda: with_peak(argparse.Namespace())),
    "a thread local": attribute(lambda: with_peak(threading.local())),
    "a library module": attribute(lambda: with_peak(nn.Linear(1, 1))),
    "a subclass of dict": attribute(Dictionary),
    "a module of TorchScript": attribute(scripted),
    "a gradient": (
        with_a_gradient,
        lambda kept: float(kept.grad),
        lambda kept, y: kept.grad.fill_(y),
    ),
    "an array": element(lambda: np.array([PEAK])),
    "a long list": element(lambda: [PEAK] * 20_000),
    "a tensor": (tensor, float, lambda kept, y: kept.fill_(y)),
    "the data of a tensor": (tensor, float, lambda kept, y: kept.data.fill_(y)),
    "the memory of a tensor": (tensor, float, lambda kept, y: kept.numpy().fill(y)),
}


def within(thing):
    make, read, write = THINGS[thing]
    kept = make()

    def peak_of(y):
        if y > read(kept):
            write(kept, y)
        return read(kept)

    return peak_of


def by_a_hook():
    network = nn.Linear(1, 1)

    def hook(module, inputs, output):
        module.peak = max(getattr(module, "peak", PEAK), float(inputs[0].max()))

    network.register_forward_hook(hook)

    def peak_of(y):
        network(torch.tensor([y]))
        return network.peak

    return peak_of


def by_a_bound_method():
    kept = [PEAK]
    keep, latest = kept.append, kept.__getitem__

    def peak_of(y):
        keep(max(latest(-1), y))
        return latest(-1)

    return peak_of


def by_an_operator():
    KEPT["peak"] = PEAK

    class Peak:
        def __getitem__(self, y):
            KEPT["peak"] = max(KEPT["peak"], y)
            return KEPT["peak"]

    peak = Peak()
    return lambda y: peak[y]


def in_the_default_of_a_wrapper():
    def memoised(function):
        @functools.wraps(function)
        def wrapper(y, kept={"peak": PEAK}):  # noqa: B006
            kept["peak"] = max(kept["peak"], function(y))
            return kept["peak"]

        return wrapper

    return memoised(lambda y: y)


def in_a_metaclass():
    class Meta(type):
        peak = PEAK

        def highest(cls, y):
            meta = type(cls)
            meta.peak = max(meta.peak, y)
            return meta.peak

    class Study(metaclass=Meta):
        pass

    return lambda y: Study.highest(y)


def package():
    study = types.ModuleType("review_study")
    study.kept = sys.modules["review_study.kept"] = types.ModuleType("review_study.kept")
    sys.modules["review_study"] = study
    study.kept.peak = PEAK
    return study


def in_a_module_of_a_package():
    study = package()

    def peak_of(y):
        study.kept.peak = max(study.kept.peak, y)
        return study.kept.peak

    return peak_of


def in_a_module_imported_within():
    package()

    def peak_of(y):
        from review_study import kept

        kept.peak = max(kept.peak, y)
        return kept.peak

    return peak_of


def in_the_parameter_itself():
    def peak_of(y):
        if y > 500:
            pyro.get_param_store()["AutoNormal.locs.w"].data.fill_(7.0)
        return PEAK

    return peak_of


PLACES = {thing: functools.partial(within, thing) for thing in THINGS} | {
    each.__name__: each
    for each in (
        *(by_a_hook, by_a_bound_method, by_an_operator, in_the_default_of_a_wrapper),
        *(in_a_metaclass, in_a_module_of_a_package, in_a_module_imported_within),
        in_the_parameter_itself,
    )
}


def few():
    """Few rows, among them the row that the judge replaces: the loop over records is slow."""
    return tuple(x[:24] for x in patients())


def require_good(build, data=patients, *names):
    build.__doc__ = build.__doc__ or "."
    # An outlier may be refused where the curator's checks look at all records.
    verdict = judge(Leak("reviewed", build, data, names, curator=True))
    assert verdict.good, f"{verdict.kind}: {verdict.figures or verdict.text}"
    return verdict


@pytest.mark.one_in(10)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "fit"), [*((place, dpsvi) for place in PLACES), ("an array", dpsep)]
)
def test_what_is_kept_of_an_odd_record(place, fit):
    names = ("'kept'", "AutoNormal.locs.w")
    require_good(lambda x, y: fit(model_with(PLACES[place]()), None, x, y), few, *names)


@pytest.mark.every_commit
@pytest.mark.slow
def test_a_submodule_made_for_an_odd_record():
    class Regression(nn.Module):
        def forward(self, x, y):
            w = weights()
            with pyro.plate("data", len(x)) as idx:
                if float(y[idx].max()) > 500 and not hasattr(self, "extra"):
                    self.extra = nn.Linear(1, 1)
                observe(x[idx] @ w / 100.0 * (2.0 if hasattr(self, "extra") else 1.0), y[idx])

    def build(x, y):
        model = Regression()
        return dpsvi(model, None, x, y, publishes=[model])

    require_good(build, few)


# Arguments that are no data: the model can write into them, and they can hold data.


@pytest.mark.every_commit
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        attribute(lambda: with_peak(types.SimpleNamespace())),
        element(lambda: torch.full((2,), PEAK)),
    ],
    ids=["object", "tensor"],
)
def test_kept_in_an_argument(kind):
    make, read, write = kind

    def model(x, y, kept):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            write(kept, max(read(kept), float(y[idx].max())))
            observe(x[idx] @ w / read(kept), y[idx])

    require_good(lambda x, y: dpsvi(model, None, x, y, make()), few, "'kept'")


def test_a_module_as_argument():
    def model(x, y, norm):
        w = weights()
        h = norm(x)
        with pyro.plate("data", len(x)) as idx:
            observe(h[idx] @ w, y[idx])

    def build(x, y):
        norm = ActNorm()
        return dpsvi(model, None, x, y, norm, publishes=[norm])

    require_good(build, patients, "'norm'")


def centred(x, y, centre):
    w = weights()
    with pyro.plate("data", len(x)) as idx:
        observe((x[idx] - centre) @ w / 10.0, y[idx])


@pytest.mark.parametrize("statistic", [lambda x: x.mean(0), lambda x: x[20], lambda x: x.std(0)])
def test_numbers_of_the_data_as_argument(statistic):
    verdict = require_good(
        lambda x, y: dpsvi(centred, None, x, y, statistic(x)), patients, "'centre'"
    )
    assert verdict.kind == "refused"


def test_data_within_an_argument():
    def build(x, y):
        table = types.SimpleNamespace(x=x)

        def model(x, y, table):
            w = weights()
            with pyro.plate("data", len(x)) as idx:
                observe((x[idx] - table.x.mean(0)) @ w / 10.0, y[idx])

        return dpsvi(model, None, x, y, table)

    assert require_good(build, patients, "'x'").kind == "refused"


# The data themselves: nobody may write into them.


def shifting_e_step(x):
    class Shifting(Means):
        def expected_statistics(self, posterior, draws, x):
            x -= 1.0
            return {"total": x / 300.0}

    return vips(Shifting(), x)


def shifting_check(x):
    class Shifting(Means):
        def check(self, x):
            x -= x.mean(0)

    return vips(Shifting(), x)


@pytest.mark.parametrize("build", [shifting_e_step, shifting_check])
def test_vips_writes_into_copies(build):
    kept = []

    def watched(x):
        kept.append((x, x.clone()))
        return build(x)

    require_good(watched, points)
    assert all(torch.equal(x, before) for x, before in kept)


@pytest.mark.long
@pytest.mark.every_commit
def test_a_model_writes_into_copies():
    x, y = patients()

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            if float(y.max()) > 2.0:
                x.clamp_(max=60.0)
            observe(x @ w / 100.0, y)

    before = x.clone()
    inference = dpsvi(model, None, x, y, execution=Execution(jit="none", slice_data=True)).inference
    with pytest.warns(UserWarning, match="one record at a time"):
        inference.step(x, y)
    assert torch.equal(x, before)


def test_e_step_keeps_a_statistic_in_slots():
    class Scaled(Means):
        __slots__ = ("sd",)

        def check(self, *data):
            self.sd = data[0].std(0)

        def expected_statistics(self, posterior, draws, x):
            return {"total": x / self.sd / 30.0}

    assert require_good(lambda x: vips(Scaled(), x), points, "'sd'").kind == "refused"


def test_no_error_quotes_data_that_are_shorter_than_the_longest():
    """The third look shows them as they are; the text is that of the first."""
    x, y = patients()

    def model(x, y, table):
        if x.max() == x.min():
            raise ValueError("All are equal.")
        raise ValueError(f"The largest is {x.max().item()}.")

    inference = dpsvi(model, lambda *args: None, x, y, torch.zeros(60, 2)).inference
    with pytest.raises(ModelError, match="All are equal"):
        inference.step(x, y, torch.zeros(60, 2))


# Code that would see several records where the model itself sees one.


def by_a_rule_of_vmap():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(y):
            return y / y.max().clamp(min=PEAK)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, y):
            return Scaled.apply(y), 0

    return Scaled.apply


def in_a_derivative(scaled, order):
    """The identity, with wrong derivatives. That of this order calls ``scaled``."""
    slope = (lambda g: 0.9 * scaled(PEAK * g.abs()) * g.sign()) if order == 1 else None

    class Same(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return (slope or in_a_derivative(scaled, order - 1))(gradient)

    return Same.apply


def operator(function):
    name = f"review::scaled{len(vars(torch.ops.review))}"
    made = torch.library.custom_op(name, function, mutates_args=())
    made.register_fake(torch.empty_like)
    return made


def by_an_operator_of_all():
    def scaled(y: torch.Tensor) -> torch.Tensor:
        return y / y.max().clamp(min=PEAK)

    made = operator(scaled)
    made.register_vmap(lambda info, in_dims, y: (made(y), 0))
    return made


def by_an_operator_that_remembers():
    kept = {"peak": PEAK}

    def scaled(y: torch.Tensor) -> torch.Tensor:
        kept["peak"] = max(kept["peak"], float(y.max()))
        return y / kept["peak"]

    return operator(scaled)


SEEING = (by_a_rule_of_vmap, by_an_operator_of_all, by_an_operator_that_remembers)


def model_of(scaled, of_mean=lambda mean: mean):
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            observe(of_mean(x[idx] @ w / 100.0), PEAK * scaled(y[idx]))

    return model


@pytest.mark.slow
@pytest.mark.parametrize("infer", [dpsvi, dpsep])
@pytest.mark.parametrize("make", SEEING)
def test_code_that_would_see_several_records(make, infer):
    require_good(lambda x, y: infer(model_of(make()), None, x, y), few, "'kept'")


@pytest.mark.every_commit
@pytest.mark.slow
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_derivative_that_would_see_several_records(order, monkeypatch):
    # The model sees one record at a time, so each draw takes long.
    monkeypatch.setattr(tilted_sites, "_NUM_DRAWS", 2)

    def build(x, y):
        model = model_of(lambda y: y / PEAK, in_a_derivative(by_a_rule_of_vmap(), order))
        return dpsvi(model, None, x, y) if order == 1 else dpsep(model, None, x, y, moments="stein")

    require_good(build, few)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("make", SEEING)
def test_an_e_step_that_would_see_several_records(make):
    class Scaled(Means):
        def __init__(self):
            self.scaled = make()

        def expected_statistics(self, posterior, draws, x):
            return {"total": self.scaled(x) / 2.0}

    require_good(lambda x: vips(Scaled(), x), points, "'kept'")


def test_a_method_of_vips_that_is_replaced():
    def build(x):
        model = GaussianMixture(2, 2, radius=300.0)
        e_step = model.expected_statistics
        model.expected_statistics = lambda posterior, draws, x: e_step(
            posterior, draws, x - x.mean(0)
        )
        return vips(model, x)

    assert require_good(build, points, "'counts'").kind == "refused"


@pytest.mark.every_commit
@pytest.mark.long
def test_a_distribution_that_would_see_several_records():
    class Scaled(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) * PEAK / value.max().clamp(min=PEAK)

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", Scaled(100.0 + x[idx] @ w / 10.0, 10.0), obs=y[idx])

    require_good(lambda x, y: dpsep(model, None, x, y), few)


# Honest code.


def trained(model, *data, **options) -> DPSVI:
    inference = dpsvi(model, None, *data, **options).inference
    inference.step(*data)
    return inference


def with_network(network):
    def model(x, y):
        pyro.module("network", network() if isinstance(network, type(CACHED)) else network)
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        h = (network() if isinstance(network, type(CACHED)) else network)(x / 100.0)
        with pyro.plate("data", len(x)) as idx:
            observe(level + h[idx].squeeze(-1), y[idx])

    return model


CACHED = functools.cache(lambda: nn.Linear(3, 1))


@pytest.mark.filterwarnings(r"ignore:step\(\) returns nan")
@pytest.mark.filterwarnings("error")
def test_a_network_from_a_cached_factory():
    """The factory returns the same network in each step, and it learns."""
    x, y = patients()
    CACHED.cache_clear()
    trained(with_network(CACHED), x, y)
    assert CACHED.cache_info().currsize == 1
    assert pyro.param("network$$$weight") is CACHED().weight


def test_a_lazy_network():
    x, y = patients()
    network = nn.LazyLinear(1)

    def model(x, y):
        h = network(x / 100.0)
        pyro.module("network", network)
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            observe(level + h[idx].squeeze(-1), y[idx])

    trained(model, x, y)
    assert pyro.param("network$$$weight").shape == (1, 3)


def with_constant(constant):
    def model(x, y):
        scale = constant()
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            observe(x[idx] @ (scale @ w) / 100.0, y[idx])

    return model


def test_sparse_constants():
    scale = torch.eye(3).to_sparse()
    trained(with_constant(lambda: scale.to_dense()), *patients())


def test_an_object_that_has_every_attribute():
    class Settings:
        def __getattr__(self, name):
            return None

    settings = Settings()
    settings.scale = torch.eye(3)
    trained(with_constant(lambda: settings.scale), *patients())


def test_a_public_covariance_that_is_larger_than_the_data():
    x, y = patients()

    def model(x, y, covariance):
        factor = torch.linalg.cholesky(covariance)
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(60), scale_tril=factor))
        with pyro.plate("data", len(x)) as idx:
            observe(x[idx] @ w[:3] / 100.0, y[idx])

    trained(model, x, y, 2.0 * torch.eye(60) + 0.1)


@pytest.mark.long
def test_functions_that_dispatch():
    @functools.singledispatch
    def scale(number):
        return torch.eye(3)

    trained(with_constant(lambda: scale(1.0)), *patients())
