"""Gradient steps without an optim: the contract, kept state, chosen settings, the guide."""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract, through_a_file
from problems import (
    PROBLEMS,
    Fixture,
    handwritten_guide,
    linear,
    logistic,
    new_paper_dpsvi,
    outlier_of,
    regression_data,
    values,
    with_needs,
)
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoMultivariateNormal,
    AutoNormal,
)

from pyro_dp import (
    Clip,
    ConfigurationError,
    ConvergenceWarning,
    Execution,
    FullBatch,
    Noise,
    PrivacyAccountant,
    RowAdam,
    SubsampledGaussian,
)
from pyro_dp.infer.svi.optimizers import StepPlan
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI


class TestContract(InferenceContract):
    variants = kinds = ("AutoMultivariateNormal", "mixture", "VAE", "particles", "PyroModule")
    opening = 1  # release of norms alone
    beyond, done = ConfigurationError, "num_steps=6 steps of the plan are done"
    bad_settings = (
        ({"optim": torch.optim.Adam}, "optim"),
        ({"loss": Trace_ELBO}, "loss"),
        ({"loss": Trace_ELBO(num_particles=0)}, "num_particles"),
        ({"clip": Clip(loss=1.0, loss_share=0.96)}, "loss_share"),
    )
    bound = "Clip.bound"
    noisy_options = {"execution": Execution(jit="trace")}

    def make(self, variant, **options):
        problem = PROBLEMS[variant]()
        loss = problem.loss if variant == "particles" else None
        options = with_needs(problem.needs, {"loss": loss} | options)
        return StochasticGradientVI(problem.model, problem.guide, **options)

    def data(self, variant):
        return PROBLEMS[variant]().data

    def result(self, svi):
        return values()

    def neighbours(self, variant, data):
        ordinary, *_ = super().neighbours(variant, data)
        yield ordinary
        yield outlier_of(variant, data)

    def damage(self, state):
        yield {"histogram": {}}, "histogram"
        yield {"histogram": state["histogram"] | {"counts": torch.zeros(3)}}, "histogram"
        yield {"histogram": state["histogram"] | {"steps": 0}}, "histogram"
        yield {"histogram": state["histogram"] | {"bound": math.nan}}, "histogram"
        for part in ({"counts": [1]}, {"counts": [0, 0, 0, -1]}, {"sums": {"x": torch.zeros(2)}}):
            yield {"averages": state["averages"] | part}, "averages"
        for part in ({"variance": "a"}, {"gradients": {"x": torch.zeros(2)}}):
            yield {"averages": state["averages"] | part}, "averages"
        yield {"averages": 5}, "averages"
        yield {"history": None}, "history"  # in states of version 0.2.0
        yield {"num_steps": 7}, "num_steps"


def new(model=logistic, guide=None, **options):
    settings = dict(accountant=PrivacyAccountant(), noise=Noise(1.0, source=0)) | options
    return StochasticGradientVI(model, guide or AutoMultivariateNormal(model), **settings)


def budget():
    return PrivacyAccountant(epsilon=1.0)


# Results.


@pytest.mark.slow
@pytest.mark.parametrize("of", ["latents", "parameters"])
@pytest.mark.parametrize("particles", [1, 3])
def test_intervals_include_the_noise(of, particles):
    """The variance of privacy is that of the noise in the gradients, which the release knows."""
    svi = new(
        linear,
        AutoNormal(linear),
        loss=Trace_ELBO(num_particles=particles),
        num_steps=80,
        clip=Clip(2.0, of=of),
        noise=Noise(20.0, source=0),
        sampling=FullBatch(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(*regression_data(200), progress=False)
    found = svi.posterior()
    plain = svi.posterior(noise_aware=False)
    num_noises = particles if of == "latents" else 1
    assert svi._kept.prepared.step.eager.num_noises == num_noises
    gradients = num_noises * (20.0 * 2.0) ** 2 / svi._moves.policy.share
    expected = plain.covariance_matrix + gradients / 40 * plain.covariance_matrix.square()
    torch.testing.assert_close(found.covariance_matrix, expected)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("name", ["AutoNormal", "VAE"])
def test_intervals_that_do_not_include_the_noise(name):
    """After few steps, or if there is no Gaussian. The warning and the status say so."""
    problem = PROBLEMS[name]()
    svi = new(problem.model, problem.guide, num_steps=13)
    with pytest.warns(ConvergenceWarning, match="not include the privacy noise.*The guide holds"):
        svi.run(*problem.data, progress=False)
    if name == "AutoNormal":
        posterior = svi.posterior()
        torch.testing.assert_close(posterior.mean, pyro.param("AutoNormal.locs.w"))
        torch.testing.assert_close(posterior.stddev, pyro.param("AutoNormal.scales.w"))
        assert (posterior.status.level, posterior.status.cause) == ("check", "steps")
    else:
        with pytest.raises(ConfigurationError, match="The model learns parameter"):
            svi.posterior()


@pytest.mark.long
@pytest.mark.every_commit
def test_without_noise_there_is_nothing_to_check_or_clip():
    svi = new(num_steps=5, noise=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        svi.run(*regression_data(), progress=False)
    assert svi.posterior().status.is_ok
    assert svi._moves.policy.bound == math.inf and svi.clipped_fraction is None


@pytest.mark.slow
def test_graphs_change_nothing():
    """Parameters, bound and posterior are those of Pyro's code."""
    found = []
    for jit in ("none", "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        svi = new(num_steps=40, execution=Execution(jit=jit), sampling=0.5)
        svi.run(*regression_data(), progress=False)
        found.append((values(), svi.posterior().covariance_matrix, svi._moves.policy.bound))
    one, other = found
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        torch.testing.assert_close(one[0][name], other[0][name], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-8)
    assert one[2] == other[2]


# Chosen settings.


def test_nothing_need_be_said():
    """Steps, rate and noise follow from N and the budget; all of it is spent, and no more."""
    accountant = budget()
    svi = StochasticGradientVI(logistic, AutoNormal(logistic), accountant=accountant)
    with pytest.raises(ConfigurationError, match="by the first step"):
        svi.noise_multiplier  # noqa: B018
    svi.step(*regression_data())
    assert svi.num_steps == 1000 and type(svi.loss) is Trace_ELBO
    ((event, count),) = accountant.ledger
    assert (event.sample_rate, count) == (1.0, 1)
    sigma = budget().noise_multiplier(num_steps=1000, sample_rate=1.0)
    assert svi.noise_multiplier == pytest.approx(sigma, rel=1e-3)


@pytest.mark.parametrize(("size", "rate"), [(500, 1.0), (4000, 0.25), (50_000, 0.05)])
def test_the_rate_follows_from_the_number_of_records(size, rate):
    svi = new(guide=AutoNormal(logistic), num_steps=2)
    svi.step(*regression_data(size))
    assert svi.accountant.ledger[0].event.sample_rate == rate


def test_a_plate_that_subsamples_keeps_its_rate():
    problem = PROBLEMS["subsample_size"]()
    svi = new(problem.model, problem.guide, num_steps=2)
    svi.step(*problem.data)
    assert svi.accountant.ledger[0].event == SubsampledGaussian(1.0, 5 / 30)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "loss"), [("AutoNormal", Trace_ELBO), ("mixture", TraceEnum_ELBO), ("VAE", Trace_ELBO)]
)
def test_the_loss_sums_out_what_is_marked(name, loss):
    problem = PROBLEMS[name]()
    svi = new(problem.model, problem.guide, num_steps=2)
    assert svi.loss is None
    svi.step(*problem.data)
    assert type(svi.loss) is loss


@pytest.mark.slow
def test_rows_of_records_have_a_step_size():
    def model(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            own = pyro.sample("own", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(own, 1.0), obs=x[idx])

    svi = new(model, AutoNormal(model), num_steps=4)
    data = torch.randn(20)
    sizes = []
    for _ in range(4):
        svi.step(data)
        sizes += [svi._moves.rows._adams["AutoNormal.locs.own"].lr]
    assert sizes[1:] == pytest.approx([0.1, 0.1, 0.1**1.5])  # after the norms
    svi = new(model, AutoNormal(model), num_steps=4, optim=RowAdam(lr=0.3))
    svi.run(data, progress=False)
    assert svi._moves.rows._adams["AutoNormal.locs.own"].lr == 0.3


@pytest.mark.long
def test_step_sizes_fall():
    """To a hundredth, with noise to a tenth; with much noise the first is shorter, too."""
    noisy, quiet, latents, network = (
        StepPlan(1000, dim, 20_000, noise, sees_parameters=sees)
        for dim, noise, sees in (
            (10, 4.0, True),
            (10, 0.1, True),
            (300, 5.0, False),
            (300, 5.0, True),
        )
    )
    assert (latents.step_size(0), network.step_size(0)) == (0.1, 0.03)
    assert network.step_size(1000) == pytest.approx(0.003)
    assert replace(network, noise=0.0).step_size(0) == 0.01  # nothing shortens Adam's steps
    silent, between = replace(quiet, noise=0.0), replace(quiet, noise=0.5)
    ends = [(plan.step_size(0), plan.step_size(1000)) for plan in (silent, quiet, between, noisy)]
    firsts, lasts = zip(*ends, strict=True)
    assert firsts == pytest.approx((0.1,) * 4)
    assert (lasts[0], lasts[-1]) == pytest.approx((0.001, 0.01)) and lasts == tuple(sorted(lasts))
    assert lasts[0] < lasts[1] < lasts[-1]
    firsts = [replace(quiet, noise=noise).step_size(0) for noise in (10.0, 100.0, 1e4)]
    assert 0.1 > firsts[0] > firsts[1] > firsts[2] == pytest.approx(0.02)
    hidden = replace(quiet, noise=1e4)  # a walk at random, were its steps long
    assert hidden.step_size(1000) == pytest.approx(0.002)
    sizes = [quiet.step_size(step) for step in range(1001)]
    assert sizes == sorted(sizes, reverse=True)
    svi, data = new(num_steps=8, noise=0, sampling=FullBatch()), regression_data()
    for step in range(1, 8):
        svi.step(*data)
        plan = StepPlan.of(8, 3, svi._kept.prepared.sampler, 0.0, False)
        rates = {g["lr"] for each in svi.optim.optim_objs.values() for g in each.param_groups}
        assert rates == {plan.step_size(step)}


# The bound.


@pytest.mark.long
@pytest.mark.every_commit
def test_the_bound_follows_the_norms(monkeypatch):
    """The first release is of norms alone; C is near the norms, and what it clips is reported."""
    x, y = regression_data(4000)
    own = dict(clip=None, noise=Noise(1.0, source=0), num_steps=50, sampling=FullBatch())
    fixture = Fixture(monkeypatch, kind=StochasticGradientVI, **own)
    svi = fixture.svi
    svi.step(x, y)
    assert all(leaf.grad is None for leaf in svi._kept.prepared.parameters.values())
    (counts,) = fixture.sums[0]
    assert counts.sum().item() == pytest.approx(4000)
    for _ in range(49):
        svi.step(x, y)
    norms = x.norm(dim=1) * (y - torch.sigmoid(x @ svi.guide.median()["w"])).abs()
    above = (norms > svi._moves.policy.bound).double().mean()
    assert norms.quantile(0.5) < svi._moves.policy.bound < 2 * x.norm(dim=1).max()
    assert svi.clipped_fraction.fraction == pytest.approx(above.item(), abs=0.05)
    assert fixture.bounds[0] == 1.0 and fixture.bounds[-1] == pytest.approx(
        svi._moves.policy.bound, rel=0.3
    )
    assert svi.accountant.ledger == ((SubsampledGaussian(1.0, 1.0, "full"), 50),)


# Going on.


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_a_state_has_the_averages(old):
    """A state of version 0.2.0, which had more parts, loads, too."""
    data, options = regression_data(), dict(noise=0, sampling=FullBatch())

    def steps(svi, which):
        for number in which:
            pyro.set_rng_seed(number)
            svi.step(*data)
        return svi

    steps(new(num_steps=40, **options), range(40))
    held = values()
    pyro.clear_param_store()
    state = through_a_file(steps(new(num_steps=40, **options), range(25)).state_dict())
    if old:
        history = {"gradients": None, "averages": state.pop("averages")}
        state |= {"history": history, "lengths": {"adam": {}, "ways": {}}}
    pyro.clear_param_store()
    second = new(num_steps=40, **options)
    second.load_state_dict(state)
    steps(second, range(25, 40))
    for name, value in values().items():
        torch.testing.assert_close(value, held[name])


def test_a_chosen_number_of_steps_is_in_the_state():
    svi = new(accountant=budget(), noise=Noise(source=0))
    svi.step(*regression_data())
    state = through_a_file(svi.state_dict())
    second = new(accountant=budget(), noise=Noise(source=0))
    second.load_state_dict(state)
    assert second.num_steps == 1000
    other = new(num_steps=7)
    with pytest.raises(ConfigurationError, match="num_steps differs"):
        other.load_state_dict(state | {"noise_multiplier": 1.0})


# Users' errors.


def test_no_posterior_before_the_first_step():
    with pytest.raises(ConfigurationError, match="before the first step"):
        new().posterior()


def test_its_optimizer_is_its_own():
    with pytest.raises(ConfigurationError, match="chooses its own"):
        new().optim = pyro.optim.Adam({})


def test_who_passes_an_optimizer_says_how_many_steps():
    with pytest.raises(ConfigurationError, match="num_steps"):
        new_paper_dpsvi(logistic, handwritten_guide, noise=None, accountant=budget())
    svi = new_paper_dpsvi(logistic, handwritten_guide)
    with pytest.raises(ConfigurationError, match="num_steps"):
        svi.run(*regression_data(), progress=False)


# With an optim that is passed.


@pytest.mark.long
def test_a_passed_optimizer_is_used_as_ever():
    """The numbers are those of earlier versions: C = 1, the bit, no mean of iterates."""
    options = dict(noise=Noise(1.0, source=3), num_steps=20, sampling=0.5)
    optim = pyro.optim.Adam({"lr": 0.05})
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic), optim=optim, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        svi.run(*regression_data(), progress=False)
    loc = torch.tensor([-0.6444638656223852, 0.6032120082854993, 0.823555265194682])
    scale = torch.tensor([0.2252326420370528, 0.2252496287925971, 0.21878714733517995])
    torch.testing.assert_close(pyro.param("AutoNormal.locs.w"), loc, rtol=1e-9, atol=0)
    torch.testing.assert_close(pyro.param("AutoNormal.scales.w"), scale, rtol=1e-9, atol=0)
    assert svi.clip.bound == svi._moves.policy.bound == 1.0


def test_a_passed_optimizer_has_a_histogram():
    options = dict(clip=Clip(loss=1.0), num_steps=4, optim=pyro.optim.Adam({"lr": 0.05}))
    svi = new(guide=AutoNormal(logistic), **options)
    losses = svi.run(*regression_data(), progress=False)
    assert len(losses) == 3 and svi._moves.policy.bound != 1.0
