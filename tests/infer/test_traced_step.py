"""Steps from graphs: against the same steps by Pyro's own code."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from compilers import needs_compiler
from problems import (
    PROBLEMS,
    Fixture,
    Problem,
    eager,
    handwritten_guide,
    logistic,
    regression_data,
    start,
    values,
    with_outlier,
)
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from record_draws import by_index
from sums import exact_sums
from torch import nn

import pyro_dp.infer.padded_sum
import pyro_dp.infer.svi.traced_step
from pyro_dp import (
    AdaptiveClip,
    Clip,
    Execution,
    FixedSizeSampling,
    FullBatch,
    ModelError,
    Noise,
    PrivacyAccountant,
)
from pyro_dp.infer.svi.traced_step import RecordsTracedStep, TracedStep
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.sampling import RecordSampler


@pytest.fixture(autouse=True)
def _small_passes(monkeypatch):
    """Most batches take several passes, and the last pass is padded."""
    monkeypatch.setattr(RecordSampler, "usual_size", 7)


def new(make, jit, microbatch_size=None, **options):
    """A fresh problem, and its DPSVI on small Poisson batches."""
    problem = start(make)
    optim = options.pop("optim", lambda: pyro.optim.Adam({"lr": 0.02}))()
    settings = dict(noise=Noise(0.0, source=0), clip=0.5, sampling=0.3)
    settings |= dict(execution=Execution(microbatch_size, jit=jit), optim=optim)
    settings |= dict(accountant=PrivacyAccountant(neighboring="replace_one")) | options
    return problem, problem.paper_dpsvi(**settings)


def run(make, jit, steps=4, **options):
    """The DPSVI after some steps, its parameters, and its private losses."""
    problem, svi = new(make, jit, **options)
    losses = [svi.step(*problem.data) for _ in range(steps)]
    return svi, values(), losses


def assert_same(make, jit="trace", tolerance=1e-10, **options):
    """The same parameters and losses as without graphs; returns the DPSVI."""
    with pytest.MonkeyPatch.context() as patch:
        by_index(patch)  # passes are padded, so the order of draws differs
        _, expected, expected_losses = run(make, "none", **options)
        svi, found, losses = run(make, jit, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=tolerance)
    assert losses == pytest.approx(expected_losses, rel=0.0, abs=100 * tolerance, nan_ok=True)
    return svi


NOISELESS = dict(clip=Clip(AdaptiveClip(0.5), loss=2.0))
NOISY = dict(noise=Noise(1.0, source=0))


@pytest.mark.one_in(7)
@pytest.mark.long
@pytest.mark.parametrize(("place", "name"), list(enumerate(PROBLEMS)))
def test_equals_pyro_code(place, name):
    """On the same draws, for every problem; with and without noise, bits and losses."""
    of, noiseless = ("latents", "parameters")[place % 2], place % 4 < 2
    clip = replace(NOISELESS["clip"] if noiseless else Clip(0.5), of=of)
    svi = assert_same(PROBLEMS[name], clip=clip, **({} if noiseless else NOISY))
    assert isinstance(svi._kept.prepared.step, TracedStep)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(sampling=FullBatch(), **NOISY),
        dict(sampling=FixedSizeSampling(0.3), clip=AdaptiveClip(0.5)),
        dict(clip=math.inf),
        dict(microbatch_size=2, clip=Clip(0.5, loss=1.0), **NOISY),
    ],
)
def test_other_settings(options):
    assert_same(PROBLEMS["VAE"], **options)


@pytest.mark.slow
def test_single_precision():
    """Only rounding differs, and the checks of the first steps tolerate it."""
    torch.set_default_dtype(torch.float32)
    for name in ("VAE", "AutoMultivariateNormal"):
        svi = assert_same(PROBLEMS[name], tolerance=1e-3, steps=5, **NOISY)
        assert isinstance(svi._kept.prepared.step, TracedStep)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["VAE", "hierarchical"])
def test_compiled_equals_pyro_code(name):
    svi = assert_same(PROBLEMS[name], "compile", **NOISELESS, **NOISY)
    assert isinstance(svi._kept.prepared.step, TracedStep)


@pytest.mark.long
def test_without_a_compiler(monkeypatch):
    """One warning, and the graphs as they are."""

    def broken(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr("torch._inductor.standalone_compile", broken)
    with pytest.warns(UserWarning, match="compiler.*jit='trace'") as caught:
        svi = assert_same(PROBLEMS["AutoNormal"], "compile", **NOISY)
    assert len(caught) == 1 and isinstance(svi._kept.prepared.step, TracedStep)


# Randomness


@pytest.mark.slow
def test_draws_are_fresh_in_every_step(monkeypatch):
    """All three are: public draws, local draws and noise."""
    problem = PROBLEMS["hierarchical"]()
    fixture = Fixture(
        monkeypatch,
        problem.model,
        problem.guide,
        execution=Execution(jit="trace"),
        sampling=FullBatch(),
        noise=Noise(1.0, source=0),
    )
    fixture.svi.optim = pyro.optim.SGD({"lr": 0.0})
    for _ in range(6):
        pyro.set_rng_seed(0)  # the same public draws: all differences are local
        fixture.svi.step(*problem.data)
    sums = [total[0] for total in fixture.sums]
    noise = [r[0] - total for r, total in zip(fixture.released, sums, strict=True)]
    public = [
        torch.cat([x.flatten() for x in fixture.svi._kept.prepared.step.draw()[0]])
        for _ in range(6)
    ]
    for drawn in (sums, noise, public):
        assert len({tuple(each.round(decimals=9).tolist()) for each in drawn}) == 6


@pytest.mark.slow
def test_particles_draw_on_their_own():
    """Particles differ in their public and in their local draws."""
    problem, svi = new(PROBLEMS["hierarchical"], "trace", noise=0.0)
    svi.loss.num_particles = 2
    svi._look_at(problem.data, {})
    (one, other), used = svi._kept.prepared.step.draw(), []
    assert not any(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    make = pyro_dp.infer.padded_sum.PaddedSum.batch

    def spy(self, public, chosen):
        made = make(self, public, chosen)
        used.extend(made.sampled)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyro_dp.infer.padded_sum.PaddedSum, "batch", spy)
        svi._kept.prepared.step._unchecked = 0
        contributions(svi, [1, 2])
    one, other = used
    assert not torch.equal(one, other)


# What runs, and how often


def counted(function, calls):
    def wrapper(*args):
        calls.append(1)
        return function(*args)

    return wrapper


@pytest.mark.long
def test_later_steps_run_no_pyro_code():
    model_calls, guide_calls = [], []

    def make():
        model, guide = counted(logistic, model_calls), counted(handwritten_guide, guide_calls)
        return Problem(model, guide, regression_data())

    problem, svi = new(make, "trace", **NOISY)
    for _ in range(3):
        svi.step(*problem.data)
    before = len(model_calls), len(guide_calls)
    for _ in range(6):
        svi.step(*problem.data)
    assert (len(model_calls), len(guide_calls)) == before


@pytest.mark.long
def test_nothing_is_traced_twice(monkeypatch):
    """There are four graphs, for batches of any sizes."""
    traced = []

    def spy(function, inputs, **options):
        traced.append(function)
        return trace(function, inputs, **options)

    trace = pyro_dp.graphs.tracing.trace
    for module in (pyro_dp.infer.svi.traced_step, pyro_dp.infer.padded_sum):
        monkeypatch.setattr(module, "trace", spy)
    problem, svi = new(PROBLEMS["AutoNormal"], "trace", sampling=0.1, **NOISELESS)
    for _ in range(50):
        svi.step(*problem.data)
    assert len(traced) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "microbatch_size",
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(100, marks=pytest.mark.slow)],
)
def test_memory(monkeypatch, microbatch_size):
    """No tensor of the records' graph holds more records than a microbatch."""
    sizes = []
    trace = pyro_dp.graphs.tracing.trace

    def spy(function, inputs, **options):
        graph = trace(function, inputs, **options)
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.shape[1:] == (13,):
                sizes.append(len(value))
        return graph

    for module in (pyro_dp.infer.svi.traced_step, pyro_dp.infer.padded_sum):
        monkeypatch.setattr(module, "trace", spy)

    def make():  # nothing else has 13 of anything
        return Problem(logistic, AutoNormal(logistic), regression_data(dim=13))

    _, svi = new(make, "trace", microbatch_size=microbatch_size)
    svi._look_at(make().data, {})
    assert max(sizes) == svi._kept.prepared.step._passes.size == min(microbatch_size, 7)


# What one record adds


def contributions(svi, batch, step=None, seed=0):
    """The contributions of these records to each block, on the same draws each time."""
    pyro.set_rng_seed(5)
    step = step or svi._kept.prepared.step
    draws = step.draw()
    clipped = ClippedSum(svi._moves.policy.blocks(step.size(draws)))
    indices = torch.tensor(batch, dtype=torch.long)
    before = torch.get_rng_state()
    step.add(clipped, draws, indices, lambda: np.random.default_rng(seed))
    assert torch.equal(before, torch.get_rng_state())  # private draws leave the public generator
    return exact_sums(clipped)


def prepared(make, **options):
    """A traced DPSVI whose first steps are behind it."""
    problem, svi = new(make, "trace", **options)
    svi._look_at(problem.data, {})
    svi._kept.prepared.step._unchecked = 0
    return problem, svi


@pytest.mark.long
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        4,
        pytest.param(7, marks=pytest.mark.slow),
        30,
        pytest.param(50, marks=pytest.mark.slow),
    ],
)
def test_padding_adds_nothing(monkeypatch, size):
    """Padding adds to no block, whether batches are smaller than a pass, larger, or empty."""
    monkeypatch.setattr(RecordSampler, "usual_size", size)
    by_index(monkeypatch)
    _, svi = prepared(PROBLEMS["VAE"], **NOISELESS)
    for batch in ([], [4], [3, 7], list(range(7)), [1, 4, 8, 9, 20, 21, 22, 29], list(range(30))):
        found = contributions(svi, batch)
        expected = contributions(svi, batch, eager(svi))
        assert len(found) == 3
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)
        assert abs(found[2].item()) <= 0.5 * len(batch)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "privatize"),
    [
        ("AutoNormal", "latents"),
        ("mixture", "latents"),
        pytest.param("VAE", "latents", marks=pytest.mark.slow),
        ("VAE", "parameters"),
        pytest.param("PyroModule", "latents", marks=pytest.mark.slow),
        ("hierarchical", "parameters"),
    ],
)
def test_sensitivity(monkeypatch, name, privatize):
    """C for one record more, 2C for one replaced by an outlier; none for a broken record."""
    by_index(monkeypatch)
    data, outlier = with_outlier(name)
    problem, svi = prepared(PROBLEMS[name], clip=Clip(0.5, of=privatize, loss=2.0))

    def blocks(rows, batch):
        for own, value in zip(problem.data, rows, strict=True):
            own.copy_(value)
        return contributions(svi, batch)

    with_it = blocks(data, [1, 4, 8, 20])
    without = blocks(data, [1, 8, 20])
    replaced = blocks(outlier, [1, 4, 8, 20])
    for x in outlier:
        x[4] = math.nan
    broken = blocks(outlier, [1, 4, 8, 20])
    for bound, one, none, other, nan in zip(
        (0.5, 2.0, 0.5), with_it, without, replaced, broken, strict=True
    ):
        assert 0 < torch.linalg.vector_norm(one - none) <= bound * (1 + 1e-12)
        assert torch.linalg.vector_norm(other - none) <= bound * (1 + 1e-12)
        assert torch.linalg.vector_norm(other - one) <= 2 * bound * (1 + 1e-12)
        torch.testing.assert_close(nan, none)


@pytest.mark.every_commit
@pytest.mark.long
def test_a_record_on_which_the_model_fails_counts_as_zero(monkeypatch):
    """Its batch is taken by Pyro's code; all others are not."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            matrix = torch.eye(2) * (3.0 - x[idx].abs() * w.abs())[..., None, None]
            scale = torch.linalg.cholesky(matrix)
            pyro.sample("x", dist.Normal(w * scale[..., 0, 0], 1.0), obs=x[idx])

    def make():
        return Problem(model, AutoNormal(model), (0.1 * torch.rand(20),))

    problem, svi = prepared(make, clip=1e6)
    microbatches = []
    add = eager(svi).add_microbatch
    monkeypatch.setattr(
        eager(svi),
        "add_microbatch",
        lambda *args: (microbatches.append(args[2].tolist()), add(*args))[1],
    )
    expected = contributions(svi, [i for i in range(14) if i != 3])
    assert not microbatches and expected[0].abs() > 0
    problem.data[0][3] = 1e6
    torch.testing.assert_close(contributions(svi, range(14)), expected)
    assert microbatches == [[0, 1, 2, 3, 4, 5, 6]]


# What cannot be traced


def guide_with_a_branch(x, y):
    scale = pyro.param("scale", torch.tensor(0.9), constraint=dist.constraints.positive)
    if scale > 1:
        scale = scale * 1.1
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(3)), scale).to_event(1))


def guide_with_an_item(x, y):
    scale = pyro.param("scale", torch.tensor(0.9), constraint=dist.constraints.positive)
    scale = scale * math.exp(-scale.item())
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(3)), scale).to_event(1))


def model_with_a_branch(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sign = 1.0 if w.sum() > 0 else -2.0
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=sign * x[idx] @ w), obs=y[idx])


def model_with_random_indices(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("columns", 3, subsample_size=2):
        pass
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


ONE_PART = "not apply to the guide and to the model outside the plate"
WHOLE = "every step runs Pyro code"


@pytest.mark.long
@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize(
    ("model", "guide", "named", "words"),
    [
        (logistic, guide_with_a_branch, "guide_with_a_branch", ONE_PART),
        (logistic, guide_with_an_item, "guide_with_an_item", ONE_PART),
        (model_with_a_branch, handwritten_guide, "model_with_a_branch", WHOLE),
    ],
)
def test_falls_back(model, guide, named, words, particles):
    """With one warning that says which and where, and the right numbers."""

    def make():
        loss = Trace_ELBO(num_particles=particles)
        return Problem(model, guide, regression_data(), loss)

    words = rf"{words}.*: .*\(test_traced_step.py:\d+, in {named}: "
    with pytest.warns(UserWarning, match=words) as caught:
        svi = assert_same(make, **NOISELESS)
    step = svi._kept.prepared.step
    assert len(caught) == 1
    assert type(step) is RecordsTracedStep if model is logistic else step is eager(svi)


def test_a_draw_that_does_not_fit_the_graph():
    """Its step is Pyro's: here a latent whose support moved, after the graph was made."""
    with pytest.warns(UserWarning, match="The records have a graph"):
        _, svi = prepared(lambda: Problem(logistic, guide_with_a_branch, regression_data()))
    step = svi._kept.prepared.step
    draws = step.draw()
    assert type(step) is RecordsTracedStep and step._fits(draws)
    (particle,) = draws
    moved = {"w": torch.distributions.AffineTransform(0.0, torch.tensor(2.0))}
    other = [replace(particle, transforms=moved)]
    assert not step._fits(other)
    assert not step._fits([replace(particle, latents={"w": torch.zeros(4)})])
    found, expected = (ClippedSum(svi._moves.policy.blocks(3)) for _ in range(2))
    indices, stream = torch.arange(9), partial(np.random.default_rng, 0)
    step.add(found, other, indices, stream)
    eager(svi).add(expected, other, indices, stream)
    assert torch.equal(*(exact_sums(each)[0] for each in (found, expected)))
    fitting = ClippedSum(svi._moves.policy.blocks(3))
    step.add(fitting, draws, indices, stream)
    assert not torch.allclose(exact_sums(found)[0], exact_sums(fitting)[0])


@pytest.mark.long
def test_a_support_that_moves_has_no_graph():
    """A graph would keep the support of the first draw."""

    def model(x, y):
        low = pyro.sample("low", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Uniform(low, low + 2.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=w * x[idx, 0]), obs=y[idx])

    def guide(x, y):
        low = pyro.sample("low", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
        if low > 1e9:
            low = 2 * low
        pyro.sample("w", dist.Uniform(low, low + 2.0))

    with pytest.warns(UserWarning, match="every step runs Pyro code") as caught:
        svi = assert_same(lambda: Problem(model, guide, regression_data()), **NOISELESS)
    assert len(caught) == 1 and svi._kept.prepared.step is eager(svi)


@pytest.mark.every_commit
@pytest.mark.long
def test_indices_of_another_plate_are_public_draws():
    def make():
        return Problem(model_with_random_indices, handwritten_guide, regression_data())

    assert isinstance(assert_same(make, **NOISY)._kept.prepared.step, TracedStep)


def test_records_in_a_loop_are_not_traced():
    """One warning says so."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", len(x)):
            pyro.sample(f"x_{i}", dist.Normal(w if x[i] > 0 else 2 * w, 1.0), obs=x[i])

    problem, svi = new(lambda: Problem(model, AutoNormal(model), (torch.randn(12),)), "trace")
    with pytest.warns(UserWarning, match="one record at a time") as caught:
        svi.step(*problem.data)
    assert len(caught) == 1 and svi._kept.prepared.step is eager(svi)


# State


def scaled(scale):
    """A model that reads its scales from an array which no check inspects."""

    def model(x, y):
        spread, slope = float(scale[0]), float(scale[-1])
        w = pyro.sample("w", dist.Normal(0.0, spread).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=slope * x[idx] @ w), obs=y[idx])

    return model


@pytest.mark.long
@pytest.mark.parametrize("place", [0, -1])
def test_a_state_is_noticed_in_the_first_steps(place):
    """It is noticed before anything is spent, in a record's term and outside the plate."""
    scale = np.array([1.0, 1.0])
    accountant = PrivacyAccountant()
    problem, svi = new(
        lambda: Problem(scaled(scale), handwritten_guide, regression_data()),
        "trace",
        accountant=accountant,
        sampling=FullBatch(),
    )
    svi.step(*problem.data)
    before = values()
    scale[place] = 2.0
    with pytest.raises(ModelError, match="jit='none'"):
        svi.step(*problem.data)
    assert accountant.num_releases == 1
    for name, value in before.items():
        assert torch.equal(value, pyro.param(name))


@pytest.mark.long
def test_values_of_parameters_are_inputs():
    """Set from outside between two steps, they are what the next step starts from."""
    ends = []
    for jit in ("none", "trace"):
        problem, svi = new(PROBLEMS["hand-written"], jit, **NOISY)
        for k in range(8):
            svi.step(*problem.data)
            with torch.no_grad():
                pyro.get_param_store()["loc"].unconstrained().add_(0.1 * k)
        ends.append(values())
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("jit", ["none", "trace"])
@pytest.mark.parametrize(
    "optim",
    [
        lambda: pyro.optim.SGD({"lr": 0.1}, {"clip_norm": 0.3}),
        lambda: pyro.optim.ClippedAdam({"lr": 0.1, "clip_norm": 0.3}),
    ],
)
def test_optimizers_that_change_gradients_in_place(jit, optim):
    """Gradients that are constants, or the same for two parameters, stay so: as in SVI."""
    constant = torch.tensor([1.0, 2.0, 3.0])

    def guide(x, y):
        loc, shift = pyro.param("loc", torch.zeros(3)), pyro.param("shift", torch.zeros(3))
        slope, level = pyro.param("slope", torch.zeros(3)), pyro.param("level", torch.zeros(3))
        pyro.sample("w", dist.Normal(loc + shift, 0.3).to_event(1))
        term = (constant * slope).sum() + level.sum()
        pyro.sample("extra", dist.Delta(torch.zeros(()), log_density=term))

    def model(x, y):
        pyro.sample("extra", dist.Delta(torch.zeros(())))
        logistic(x, y)

    def make():
        return Problem(model, guide, regression_data())

    _, found, _ = run(make, jit, 6, optim=optim, sampling=FullBatch(), clip=math.inf)
    problem = start(make)
    svi = pyro.infer.SVI(problem.model, problem.guide, optim(), problem.loss)
    for _ in range(6):
        svi.step(*problem.data)
    torch.testing.assert_close(found, values())


class Switched(nn.Module):
    """A model that refers to values beside its arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.slope = 1.0
        self.offset = torch.zeros(3)

    def model(self, x, y):
        pyro.module("layer", self.layer)
        slope = self.slope * (2 if self.training else 1)
        with pyro.plate("data", len(x)) as idx:
            logits = slope * self.layer(x[idx] + self.offset).squeeze(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])


def switched():
    return Problem(Switched().model, lambda x, y: None, regression_data())


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "slope", 3.0),
        lambda net: net.eval(),
        lambda net: net.offset.fill_(0.5),
    ],
)
def test_values_that_a_model_refers_to_may_change(change):
    """After the first steps, too."""
    ends = []
    for jit in ("none", "trace"):
        problem, svi = new(switched, jit, clip=3.0)
        for step in range(6):
            if step == 4:
                change(problem.model.__self__)
            svi.step(*problem.data)
        ends.append(values())
        assert isinstance(svi._kept.prepared.step, TracedStep) == (jit == "trace")
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-10)


@pytest.mark.slow
def test_values_that_keep_changing():
    """Tracing in each step would take longer than it saves: one warning, and the right numbers."""
    ends = []

    def anneal(jit):
        problem, svi = new(switched, jit, clip=3.0)
        for step in range(8):
            problem.model.__self__.slope = 1 + 0.1 * step
            svi.step(*problem.data)
        ends.append(values())

    anneal("none")
    with pytest.warns(UserWarning, match="keep changing") as caught:
        anneal("trace")
    assert len(caught) == 1
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("jit", ["none", "trace"])
def test_compiled_modules_run_as_they_were_written(jit):
    """The same numbers as without ``torch.compile``, on the fastest path."""
    ends = []
    for compiled in (False, True):

        def make(compiled=compiled):
            net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
            shown = torch.compile(net, backend="eager") if compiled else net
            shift = torch.compile(torch.sin, backend="eager") if compiled else torch.sin

            def model(x, y):
                pyro.module("net", shown)
                with pyro.plate("data", len(x)):
                    logits = shift(shown(x).squeeze(-1))
                    pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

            return Problem(model, lambda x, y: None, regression_data())

        svi, found, _ = run(make, jit, **NOISY)
        assert svi._kept.prepared.term.vectorizes
        assert isinstance(svi._kept.prepared.step, TracedStep) == (jit == "trace")
        ends.append(list(found.values()))
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-12)
