"""Gradient steps without an optim: the contract, what is kept and chosen, what the guide holds."""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract, same, through_a_file
from problems import (
    PROBLEMS,
    Fixture,
    handwritten_guide,
    logistic,
    new_paper_dpsvi,
    outlier_of,
    regression_data,
    values,
)
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from releases import Releases, take
from torch.distributions import constraints

from pyro_dp import (
    ConfigurationError,
    ConvergenceWarning,
    PrivacyAccountant,
    RowAdam,
    SubsampledGaussian,
)
from pyro_dp.infer.svi.step_plan import StepPlan
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI
from pyro_dp.infer.svi.traced_step import TracedStep


class TestContract(InferenceContract):
    variants = kinds = ("AutoMultivariateNormal", "mixture", "VAE", "particles", "PyroModule")
    opening = 1  # of norms alone
    younger = (*InferenceContract.younger, "lengths")
    beyond, done = ConfigurationError, "num_steps=6 steps of the plan are done"
    bad_settings = (
        ({"optim": torch.optim.Adam}, "optim"),
        ({"loss": Trace_ELBO}, "loss"),
        ({"loss": Trace_ELBO(num_particles=0)}, "num_particles"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "infinite bound"),
        ({"loss_clip": 1.0, "loss_share": 0.96}, "loss_share"),
    )
    noisy_options = {"jit": "trace"}

    def make(self, variant, **options):
        problem = PROBLEMS[variant]()
        loss = problem.loss if variant == "particles" else None
        return StochasticGradientVI(
            problem.model, problem.guide, **({"loss": loss} | problem.options | options)
        )

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
        yield {"history": None}, "history"
        yield {"history": state["history"] | {"gradients": 5}}, "history"
        averages = state["history"]["averages"]
        for part in ({"counts": [1]}, {"counts": [0, 0, 0, -1]}, {"sums": {"x": torch.zeros(2)}}):
            yield {"history": state["history"] | {"averages": averages | part}}, "averages"
        yield {"num_steps": 7}, "num_steps"


def new(model=logistic, guide=None, **options):
    settings = dict(accountant=PrivacyAccountant(), noise_multiplier=1.0, generator=0) | options
    return StochasticGradientVI(model, guide or AutoMultivariateNormal(model), **settings)


def budget():
    return PrivacyAccountant(epsilon=1.0)


def kept(svi):
    """Draws, gradients and noise that the run has released, from its state."""
    return svi.state_dict()["history"]["gradients"]


# What is kept.


@pytest.mark.parametrize("jit", ["none", "trace"])
@pytest.mark.parametrize("name", ["AutoMultivariateNormal", "mixture, full rank", "particles"])
def test_what_was_released_is_kept(monkeypatch, name, jit):
    """At the draws of the particles, as an estimate of all records' log likelihood: no more."""
    problem, draws = PROBLEMS[name](), []
    seen = Releases(monkeypatch)
    settings = dict(noise_multiplier=2.0, max_grad_norm=0.5, sample_rate=0.4, generator=0, jit=jit)
    optim = pyro.optim.Adam({"lr": 0.02})
    svi = StochasticGradientVI(
        problem.model,
        problem.guide,
        optim,
        problem.loss,
        accountant=PrivacyAccountant(),
        **settings,
    )
    steps, count = 5, problem.loss.num_particles
    for _ in range(steps):
        svi._prepare(problem.data, {})
        svi._prepared.step._unchecked = 0
        eager, state = svi._prepared.step.eager, torch.get_rng_state()
        draws += [torch.cat([u.flatten() for u in p.latents.values()]) for p in eager.draw()]
        torch.set_rng_state(state)
        svi.step(*problem.data)
    found, width = kept(svi), len(draws[0])
    torch.testing.assert_close(found["draws"], torch.stack(draws).detach())
    released = torch.cat([blocks[0].reshape(count, width) for blocks in seen.released])
    torch.testing.assert_close(found["gradients"], -count * released / 0.4)
    noise = count * 2.0 * 0.5 / math.sqrt(0.95) / 0.4
    torch.testing.assert_close(found["noise"], torch.full((steps * count,), noise))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("AutoNormal", {"privatize": "parameters"}, "not of latents alone"),
        ("PyroModule", {}, "not of latents alone"),  # a parameter inside the plate
        ("VAE", {}, "not of latents alone"),
        ("AutoNormal", {"num_steps": 12}, "3 latents take more than 12 steps"),
        ("AutoDelta", {}, "not one Gaussian"),
        ("AutoIAFNormal", {}, "not one Gaussian"),
    ],
)
def test_where_nothing_can_be_regressed(name, options, why):
    """A warning at the end of the run says why, and so does the status of a posterior."""
    problem = PROBLEMS[name]()
    svi = new(problem.model, problem.guide, **({"num_steps": 13} | problem.options | options))
    with pytest.warns(ConvergenceWarning, match=f"{why}.*The guide holds"):
        svi.run(*problem.data, progress=False)
    if name == "AutoNormal":
        posterior = svi.posterior()
        torch.testing.assert_close(posterior.mean, pyro.param("AutoNormal.locs.w"))
        assert posterior.status.level == "check" and why in posterior.status.reason
    else:
        with pytest.raises(ConfigurationError, match="not one Gaussian"):
            svi.posterior()


def test_a_prior_with_a_kink():
    def model(x, y):
        w = pyro.sample("w", dist.Laplace(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    svi = new(model, AutoNormal(model), num_steps=13)
    with pytest.warns(ConvergenceWarning, match="prior is flat or linear"):
        svi.run(*regression_data(), progress=False)


# What is found.


def line(x, y):
    """Linear regression: its posterior is a Gaussian."""
    w = pyro.sample("w", dist.Normal(0.5, 2.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 0.7), obs=y[idx])


def nested(x, y):
    """The same, with a mean that records do not see."""
    mean = pyro.sample("mean", dist.Normal(0.5, 2.0))
    w = pyro.sample("w", dist.Normal(mean, 0.8).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 0.7), obs=y[idx])


def exact(x, y, hidden):
    """Posterior mean and covariance; with ``hidden`` of (mean, w)."""
    precision, eta = torch.eye(3) / 4, torch.full((3,), 0.5 / 4)
    if hidden:
        away = torch.tensor([[-1.0, 1, 0, 0], [-1, 0, 1, 0], [-1, 0, 0, 1]]) / 0.8
        precision = away.T @ away
        precision[0, 0] += 1 / 4
        eta = torch.tensor([0.5 / 4, 0, 0, 0])
    seen = torch.nn.functional.pad(x, (1, 0)) if hidden else x
    covariance = torch.linalg.inv(precision + seen.T @ seen / 0.49)
    return covariance @ (eta + seen.T @ y / 0.49), covariance


@pytest.mark.parametrize("model", [line, nested])
@pytest.mark.parametrize(
    "kind", [AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoNormal]
)
def test_exact_without_noise(model, kind):
    """On all records, without a bound; also of latents that no record sees. The guide holds it."""
    x, _ = regression_data()
    y = x @ torch.linspace(-1, 1, 3) + 0.7 * torch.randn(30)
    guide = kind(model)
    svi = new(model, guide, noise_multiplier=0, num_steps=60, sampling="full", generator=None)
    svi.run(x, y, progress=False)
    posterior = svi.posterior()
    mean, covariance = exact(x, y, hidden=model is nested)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)
    held = guide.median()
    torch.testing.assert_close(held["w"], mean[-3:], rtol=1e-6, atol=1e-6)
    assert posterior.status.is_ok and posterior.noise_share.max() < 1e-6


@pytest.mark.in_turns
@pytest.mark.parametrize("jit", ["none", "trace"])
def test_the_noise_is_in_the_width(jit):
    """And the plain posterior is without it; the guide holds the wider one."""
    guide = AutoMultivariateNormal(logistic)
    svi = new(guide=guide, num_steps=200, sampling="full", noise_multiplier=3.0, jit=jit)
    svi.run(*regression_data(2000), progress=False)
    aware, plain = svi.posterior(), svi.posterior(noise_aware=False)
    assert torch.equal(aware.mean, plain.mean)
    assert (aware.stddev > plain.stddev).all() and (aware.noise_share > 0).all()
    torch.testing.assert_close(guide.get_posterior().stddev, aware.stddev)
    torch.testing.assert_close(guide.get_posterior().mean, aware.mean)


def test_a_guide_of_low_rank_finds_the_same():
    """With little noise. The guide holds the means and variances found."""
    data, found = regression_data(1000), []
    for kind in (AutoMultivariateNormal, AutoLowRankMultivariateNormal):
        pyro.clear_param_store()
        guide = kind(logistic)
        accountant = PrivacyAccountant(epsilon=20.0)
        svi = StochasticGradientVI(
            logistic, guide, accountant=accountant, num_steps=200, generator=0
        )
        svi.run(*data, progress=False)
        found.append(svi.posterior())
    expected, posterior = found
    assert ((posterior.mean - expected.mean).abs() < expected.stddev).all()
    torch.testing.assert_close(posterior.stddev, expected.stddev, rtol=0.3, atol=0.0)
    torch.testing.assert_close(guide.get_posterior().mean, posterior.mean)
    torch.testing.assert_close(guide.get_posterior().variance, posterior.variance)


def test_before_the_end_the_guide_holds_the_iterate():
    guide = AutoMultivariateNormal(logistic)
    svi, data = new(guide=guide, num_steps=60), regression_data()
    for _ in range(59):
        svi.step(*data)
    assert not torch.allclose(guide.get_posterior().mean, svi.posterior().mean)
    svi.step(*data)
    torch.testing.assert_close(guide.get_posterior().mean, svi.posterior().mean)


def test_integers_by_graphs(monkeypatch):
    """With ``secure=True``, too: a warning would say that there is no graph."""
    take(monkeypatch, [1, 4, 8, 20])
    sums = []
    for jit in ("none", "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        with pytest.MonkeyPatch.context() as patch:
            seen = Releases(patch)
            svi = new(num_steps=8, jit=jit, secure=True, generator=None, sample_rate=0.5)
            data = regression_data()
            for _ in range(2):
                svi.step(*data)
            sums.append(seen.sums[0][0])
            assert isinstance(svi._prepared.step, TracedStep) == (jit == "trace")
            assert seen.sums[1][1].sum() == pytest.approx(4)
    assert torch.equal(*sums)


def test_graphs_change_nothing():
    """Parameters, releases, history and posterior are those of Pyro's code."""
    found = []
    for jit in ("none", "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        svi = new(num_steps=40, jit=jit, sample_rate=0.5)
        svi.run(*regression_data(), progress=False)
        found.append((values(), kept(svi), svi.posterior().covariance_matrix, svi._bound))
    one, other = found
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        torch.testing.assert_close(one[0][name], other[0][name], rtol=1e-8, atol=1e-8)
    for name in ("draws", "gradients", "noise"):
        torch.testing.assert_close(one[1][name], other[1][name], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(one[2], other[2], rtol=1e-6, atol=1e-8)
    assert one[3] == other[3]


# What is chosen.


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


@pytest.mark.parametrize(
    ("name", "loss"), [("AutoNormal", Trace_ELBO), ("mixture", TraceEnum_ELBO), ("VAE", Trace_ELBO)]
)
def test_the_loss_sums_out_what_is_marked(name, loss):
    problem = PROBLEMS[name]()
    svi = new(problem.model, problem.guide, num_steps=2, **problem.options)
    assert svi.loss is None
    svi.step(*problem.data)
    assert type(svi.loss) is loss


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
        sizes += [svi._rows._adams["AutoNormal.locs.own"].lr]
    assert sizes[1:] == pytest.approx([0.1, 0.1, 0.1**1.5])  # after the norms
    svi = new(model, AutoNormal(model), num_steps=4, local_optim=RowAdam(lr=0.3))
    svi.run(data, progress=False)
    assert svi._rows._adams["AutoNormal.locs.own"].lr == 0.3


def test_a_guide_that_is_no_gaussian_arrives():
    """Gradients are a thousand times as large at the start, and Adam must forget that."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        sd = pyro.sample("sd", dist.Uniform(0.0, 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, sd), obs=y)

    def guide(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        log_sd = pyro.param("log_sd", torch.tensor(0.0))
        pyro.sample("mean", dist.Normal(loc, scale))
        pyro.sample("sd", dist.LogNormal(log_sd, 0.05))

    torch.manual_seed(0)
    data = 9 + 0.5 * torch.randn(2000)
    svi = new(model, guide, num_steps=1000, noise_multiplier=0)
    with pytest.warns(ConvergenceWarning, match="not one Gaussian"):
        svi.run(data, progress=False)
    assert pyro.param("loc").item() == pytest.approx(9, abs=0.1)
    assert pyro.param("log_sd").exp().item() == pytest.approx(0.5, abs=0.1)


def test_records_alone_may_be_of_single_precision():
    """Their graph rounds as much as the model does."""

    def model(count, hits):
        with pyro.plate("data", len(hits)):
            rate = pyro.sample("rate", dist.Uniform(0.0, 1.0))
            pyro.sample("hits", dist.Binomial(count, rate), obs=hits)

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    count = torch.randint(3000, 6000, (2000,)).float()
    svi = new(model, AutoNormal(model), num_steps=8, jit="trace")
    svi.run(count, dist.Binomial(count, 0.3).sample(), progress=False)
    assert isinstance(svi._prepared.step, TracedStep)


def test_step_sizes_fall():
    """To a hundredth, with noise to a tenth; with much noise the first is shorter, too."""
    noisy, quiet, latents, network = (
        StepPlan(1000, dim, 20_000, noise, regresses=True, sees_parameters=sees)
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
    svi, data = new(num_steps=8, noise_multiplier=0, sampling="full"), regression_data()
    for step in range(1, 8):
        svi.step(*data)
        plan = svi._plan(3, svi._prepared.sampler)
        rates = {g["lr"] for each in svi.optim.optim_objs.values() for g in each.param_groups}
        assert rates == {plan.step_size(step)}


# The bound.


def test_the_bound_follows_the_norms(monkeypatch):
    """The first release is of norms alone; C is near the norms, and what it clips is reported."""
    x, y = regression_data(4000)
    fixture = Fixture(
        monkeypatch,
        kind=StochasticGradientVI,
        max_grad_norm=None,
        noise_multiplier=1.0,
        num_steps=50,
        sampling="full",
        generator=0,
    )
    svi = fixture.svi
    svi.step(x, y)
    assert all(leaf.grad is None for leaf in svi._prepared.parameters.values())
    (counts,) = fixture.sums[0]
    assert counts.sum().item() == pytest.approx(4000)
    for _ in range(49):
        svi.step(x, y)
    norms = x.norm(dim=1) * (y - torch.sigmoid(x @ svi.guide.median()["w"])).abs()
    above = (norms > svi._bound).double().mean()
    # The histogram counts the norms at all draws, and the largest are larger than at the median.
    draws = svi._history._kept().draws.to(x)
    largest = max((x.norm(dim=1) * (y - torch.sigmoid(x @ w)).abs()).max() for w in draws)
    assert norms.quantile(0.5) < svi._bound < 2 * largest
    assert svi.clipped_fraction.fraction == pytest.approx(above.item(), abs=0.05)
    assert fixture.bounds[0] == 1.0 and fixture.bounds[-1] == pytest.approx(svi._bound, rel=0.3)
    assert svi.accountant.ledger == ((SubsampledGaussian(1.0, 1.0, "full"), 50),)


def test_the_bound_is_in_the_units_of_the_data():
    """A thousandfold gradient has a thousandfold bound; one below 1e-6 is none."""
    bounds = []
    for unit in (1.0, 1e3, 1e-9):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        x, y = regression_data(4000)
        svi = new(guide=AutoNormal(logistic, init_scale=1e-6), num_steps=2, sampling="full")
        svi.step(x * unit, y)
        bounds.append(svi._bound)
        svi.step(x * unit, y)
    assert bounds[1] == pytest.approx(1e3 * bounds[0], rel=0.5)
    assert 1e-6 <= bounds[2] < 1.2e-6


def test_no_bound_without_noise():
    svi = new(noise_multiplier=0, num_steps=3, generator=None)
    svi.step(*regression_data())
    assert svi._bound == math.inf and svi.clipped_fraction is None


# Going on.


def test_a_state_has_the_history():
    """Also of a posterior that was asked for in between."""
    data, options = regression_data(), dict(noise_multiplier=0, sampling="full", generator=None)

    def steps(svi, which):
        for number in which:
            pyro.set_rng_seed(number)
            svi.step(*data)
        return svi

    whole = steps(new(num_steps=40, **options), range(40))
    expected, held = whole.posterior(), values()
    pyro.clear_param_store()
    first = steps(new(num_steps=40, **options), range(25))
    first.posterior()
    state = through_a_file(first.state_dict())
    pyro.clear_param_store()
    second = new(num_steps=40, **options)
    second.load_state_dict(state)
    assert same(kept(second), state["history"]["gradients"])
    steps(second, range(25, 40))
    torch.testing.assert_close(second.posterior().mean, expected.mean)
    torch.testing.assert_close(second.posterior().covariance_matrix, expected.covariance_matrix)
    for name, value in values().items():
        torch.testing.assert_close(value, held[name])


def test_a_chosen_number_of_steps_is_in_the_state():
    svi = new(accountant=budget(), noise_multiplier=None)
    svi.step(*regression_data())
    state = through_a_file(svi.state_dict())
    second = new(accountant=budget(), noise_multiplier=None)
    second.load_state_dict(state)
    assert second.num_steps == 1000
    other = new(num_steps=7)
    with pytest.raises(ConfigurationError, match="num_steps differs"):
        other.load_state_dict(state | {"noise_multiplier": 1.0})


def test_the_history_of_other_latents_spends_nothing():
    svi, data = new(num_steps=13), regression_data()
    for _ in range(2):
        svi.step(*data)
    state = svi.state_dict() | {"parameters": {}}
    pyro.clear_param_store()
    other = new(num_steps=13)
    other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="other latents"):
        other.step(*regression_data(dim=4))
    assert other.accountant.num_releases == 2


def test_nothing_beyond_the_last_step():
    svi, data = new(num_steps=13), regression_data()
    svi.run(*data, progress=False)
    spent = svi.accountant.num_releases
    for more in (svi.step, svi.run):
        with pytest.raises(ConfigurationError, match="num_steps=13 steps of the plan are done"):
            more(*data)
    assert svi.accountant.num_releases == spent


# Users' errors.


def test_no_posterior_before_the_first_step():
    with pytest.raises(ConfigurationError, match="before the first step"):
        new().posterior()


def test_its_optimizer_is_its_own():
    with pytest.raises(ConfigurationError, match="chooses its own"):
        new().optim = pyro.optim.Adam({})


def test_who_passes_an_optimizer_says_how_many_steps():
    with pytest.raises(ConfigurationError, match="num_steps"):
        new_paper_dpsvi(logistic, handwritten_guide, noise_multiplier=None, accountant=budget())
    svi = new_paper_dpsvi(logistic, handwritten_guide)
    with pytest.raises(ConfigurationError, match="num_steps"):
        svi.run(*regression_data(), progress=False)


@pytest.mark.parametrize(("noise", "hidden"), [(20.0, False), (400.0, True)])
def test_noise_that_hides_most_is_told(noise, hidden):
    """By one warning, whose text is the status and a remedy."""
    svi = new(guide=AutoNormal(logistic), noise_multiplier=noise, num_steps=60, sample_rate=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        svi.run(*regression_data(4000), progress=False)
    told = [str(each.message) for each in caught if "init_to_mean" in str(each.message)]
    assert len(told) == hidden
    if hidden:
        status = svi.posterior().status
        assert (status.level, status.cause) == ("do not publish", "privacy noise")
        assert "in 3 of 3 coordinates" in status.reason and told[0].startswith(f"{status}. ")
        assert len(caught) == 1


# With an optim that is passed.


def test_a_passed_optimizer_is_used_as_ever():
    """The very numbers of before there was a choice: C = 1, the bit, no average of iterates."""
    options = dict(generator=3, num_steps=20, sample_rate=0.5)
    optim = pyro.optim.Adam({"lr": 0.05})
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic), optim=optim, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        svi.run(*regression_data(), progress=False)
    loc = torch.tensor([-0.6444638656223852, 0.6032120082854993, 0.823555265194682])
    scale = torch.tensor([0.2252326420370528, 0.2252496287925971, 0.21878714733517995])
    torch.testing.assert_close(pyro.param("AutoNormal.locs.w"), loc, rtol=1e-9, atol=0)
    torch.testing.assert_close(pyro.param("AutoNormal.scales.w"), scale, rtol=1e-9, atol=0)
    assert svi.max_grad_norm == svi._bound == 1.0


def test_asking_for_the_posterior_changes_nothing():
    """Neither parameters nor public generators nor what is released later."""
    found = []
    for asks in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(2)
        svi, data = new_paper_dpsvi(logistic, AutoNormal(logistic), generator=0), regression_data()
        for step in range(30):
            svi.step(*data)
            if asks and step > 20:
                svi.posterior()
        found.append((values(), torch.get_rng_state(), kept(svi)))
    assert same(*found)


def test_a_passed_optimizer_has_a_histogram():
    options = dict(loss_clip=1.0, num_steps=4, optim=pyro.optim.Adam({"lr": 0.05}))
    svi = new(guide=AutoNormal(logistic), **options)
    losses = svi.run(*regression_data(), progress=False)
    assert len(losses) == 3 and svi._bound != 1.0
