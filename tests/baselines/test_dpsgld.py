"""DPSGLD: the right chain, topped-up noise, sensitivity, ledger, state, bad input."""

import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    PROBLEMS,
    gamma_poisson,
    hierarchical,
    logistic,
    mixture,
    mixture_parameters,
    regression_data,
    with_outlier,
)
from pyro.infer import Predictive
from pyro.infer.autoguide import init_to_value
from scipy import stats
from sums import exact_sums

import pyro_dp.mechanism.iterative
import pyro_dp.mechanism.sampling
from pyro_dp import (
    ConfigurationError,
    ModelError,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.baselines import DPSGLD
from pyro_dp.mechanism.release import release

_ALARM = 1e-8


def means(x):
    """Conjugate: D independent locations."""
    m = pyro.sample("m", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(m, 1.0).to_event(1), obs=x[idx])


def shrunk_means(x):
    """Records see the locations, and not what these are centred at."""
    centre = pyro.sample("centre", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    m = pyro.sample("m", dist.Normal(centre, 1.0).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(m, 1.0).to_event(1), obs=x[idx])


def chain(model, **options):
    settings = dict(
        accountant=PrivacyAccountant(),
        num_steps=10,
        step_size=0.01,
        warmup_steps=0,
        noise_multiplier=0,
        max_grad_norm=0.5,
        sampling="full",
    )
    if options.keys() & {"sample_rate", "sampling"}:
        del settings["sampling"]
    return DPSGLD(model, **(settings | options))


class Spy:
    """Keeps the sums that are released, and what comes out."""

    def __init__(self, monkeypatch):
        self.sums, self.released, self.batches = [], [], []

        def spy(clipped, **named):
            self.sums.append([total.clone() for total in exact_sums(clipped)])
            self.released.append([block.clone() for block in release(clipped, **named)])
            return self.released[-1]

        draw = pyro_dp.mechanism.sampling.RecordSampler.draw

        def drawn(sampler, stream):
            self.batches.append(draw(sampler, stream))
            return self.batches[-1]

        monkeypatch.setattr(pyro_dp.mechanism.iterative, "release", spy)
        monkeypatch.setattr(pyro_dp.mechanism.sampling.RecordSampler, "draw", drawn)


def test_posterior_of_a_conjugate_model():
    """Mean and variance of 100 independent chains that an AR(1) process describes exactly."""
    x = torch.randn(50, 100) + torch.randn(100)
    precision, h = 51.0, 0.08 / 51
    sgld = chain(
        means, num_steps=2500, warmup_steps=500, step_size=h, max_grad_norm=math.inf, jit="trace"
    )
    assert set(sgld.run(x, progress=False)) == {1.0}
    deviations = (sgld.get_samples()["m"] - x.sum(0) / precision) * math.sqrt(precision)
    kept = 1 - h * precision / 2
    effective = 2000 * (1 - kept) / (1 + kept)
    chi2 = deviations.mean(0).square().sum().item() * effective
    assert _ALARM < stats.chi2.sf(chi2, 100) < 1 - _ALARM
    # The variance of Langevin dynamics at a finite step is larger by 1 / (1 - h precision / 4).
    effective = 2000 * 100 * (1 - kept**2) / (1 + kept**2)
    variance = deviations.square().mean().item() * (1 - h * precision / 4)
    assert abs(variance - 1) < 6 * math.sqrt(2 / effective) < 0.1


def test_posterior_at_a_temperature():
    """More noise than Langevin dynamics needs: variances grow by what step() returns."""
    x = 0.01 * torch.randn(50, 100)  # within the bound: nothing is clipped
    precision, h = 51.0, 0.08 / 51
    sigma = 2 * math.sqrt(3 * h) / h / 5.0
    sgld = chain(
        means,
        num_steps=2500,
        warmup_steps=500,
        step_size=h,
        noise_multiplier=sigma,
        max_grad_norm=5.0,
        generator=0,
        jit="trace",
    )
    assert sgld.run(x, progress=False)[0] == pytest.approx(3.0)
    deviations = (sgld.get_samples()["m"] - x.sum(0) / precision) * math.sqrt(precision)
    variance = deviations.square().mean().item() * (1 - h * precision / 4)
    assert abs(variance / 3 - 1) < 0.1


def test_step_is_a_langevin_step(monkeypatch):
    """Written by hand for u = log rate: Gamma prior, Jacobian, clipping, noise, rate, top-up."""
    (x,) = PROBLEMS["constrained"]().data
    spy = Spy(monkeypatch)
    h, sigma, bound, rate = 0.003, 2.0, 1.5, 0.4
    sgld = chain(
        gamma_poisson,
        step_size=lambda t: h / (1 + t),
        noise_multiplier=sigma,
        max_grad_norm=bound,
        sample_rate=rate,
        generator=0,
    )
    for t in range(8):
        pyro.set_rng_seed(t)
        sgld.step(x)
    u = sgld.get_samples()["rate"].log()
    for t in range(1, 8):
        size = h / (1 + t)
        own = x[spy.batches[t]] - u[t - 1].exp()
        torch.testing.assert_close(spy.sums[t][0].squeeze(), own.clamp(-bound, bound).sum().neg())
        noise = (spy.sums[t][0] - spy.released[t][0]).squeeze()
        likelihood = (own.clamp(-bound, bound).sum() + noise) / rate
        prior = (2.0 - 1.0) - u[t - 1].exp() + 1.0  # d/du of log Gamma(2, 1) at e^u, and of u
        missing = size - (size / 2 * sigma * bound / rate) ** 2
        assert missing > 0
        pyro.set_rng_seed(t)
        drawn = math.sqrt(missing) * torch.randn(1).squeeze()
        expected = u[t - 1] + size / 2 * (prior + likelihood) + drawn
        assert abs(u[t] - expected) < 1e-10
    assert len({len(batch) for batch in spy.batches}) > 2


def test_enumerated_records(monkeypatch):
    """A mixture's drift is the gradient of its marginal likelihood, by hand."""
    (x,) = PROBLEMS["mixture"]().data
    start = {"weights": torch.tensor([0.2, 0.3, 0.5]), "locs": torch.randn(3, 2)}
    sgld = chain(
        mixture, max_grad_norm=math.inf, step_size=1e-3, init_loc_fn=init_to_value(values=start)
    )
    sgld.step(x)
    before = sgld.state_dict()["position"]
    pyro.set_rng_seed(5)
    sgld.step(x)
    pyro.set_rng_seed(5)
    drift = sgld.state_dict()["position"] - before - math.sqrt(1e-3) * torch.randn(8)
    u = before.clone().requires_grad_()
    simplex = torch.distributions.biject_to(torch.distributions.constraints.simplex)
    weights, locs = simplex(u[:2]), u[2:].reshape(3, 2)
    density = dist.Normal(locs, 0.5).to_event(1).log_prob(x.unsqueeze(1)) + weights.log()
    joint = density.logsumexp(1).sum() + dist.Normal(0.0, 3.0).log_prob(locs).sum()
    joint = joint + dist.Dirichlet(torch.ones(3)).log_prob(weights)
    joint = joint + simplex.log_abs_det_jacobian(u[:2], weights)
    joint.backward()
    torch.testing.assert_close(drift, 1e-3 / 2 * u.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_noise_is_topped_up(monkeypatch, ratio):
    """In all, N(0, max(h, v)) where records see the latent and N(0, h) elsewhere."""
    spy = Spy(monkeypatch)
    x, h, bound, rate = torch.randn(20, 200), 1e-3, 0.7, 0.25
    sigma = math.sqrt(ratio * h) / (h / 2 * bound / rate)
    sgld = chain(
        shrunk_means,
        num_steps=40,
        step_size=h,
        noise_multiplier=sigma,
        max_grad_norm=bound,
        sample_rate=rate,
        generator=0,
    )
    assert sgld.run(x, progress=False) == pytest.approx([max(1.0, ratio)] * 40)
    centre, m = sgld.get_samples()["centre"], sgld.get_samples()["m"]
    sums = torch.stack([-total[0] for total in spy.sums[1:]]) / rate
    drifts = {"centre": m[:-1] - 2 * centre[:-1], "m": centre[:-1] - m[:-1] + sums}
    for name, variance in (("centre", h), ("m", max(h, ratio * h))):
        values = sgld.get_samples()[name]
        noise = values[1:] - values[:-1] - h / 2 * drifts[name]
        noise = noise.flatten().numpy() / math.sqrt(variance)
        assert stats.kstest(noise, "norm").pvalue > _ALARM
        assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
        assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM


def test_too_much_noise_is_not_increased(monkeypatch):
    """Beyond v = h the step is the release's alone: public draws change nothing."""
    x = torch.randn(20, 3)
    ends = []
    for seed in (1, 2):
        sgld = chain(means, noise_multiplier=1e3, generator=0, init_loc_fn=_at_zero)
        pyro.set_rng_seed(seed)
        sgld.run(x, progress=False)
        ends.append(sgld.get_samples()["m"])
    assert torch.equal(*ends)


def _at_zero(site):
    return torch.zeros(site["fn"].shape())


def first_sum(monkeypatch, name, data, batch, **options):
    """The exact sum of one first step on a given batch of records."""
    pyro.set_rng_seed(0)
    spy, problem = Spy(monkeypatch), PROBLEMS[name]()
    sgld = chain(problem.model, generator=0, sample_rate=0.5, **(problem.options | options))
    monkeypatch.setattr(
        pyro_dp.mechanism.sampling.RecordSampler, "draw", lambda self, stream: torch.tensor(batch)
    )
    sgld.step(*data)
    monkeypatch.undo()
    return spy.sums[0][0]


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize(
    "name", ["AutoNormal", "slice_data", "constrained", "mixture", "nested mixture"]
)
def test_sensitivity(monkeypatch, name, microbatch):
    """Neighbouring data sets, one record an outlier of 1e6: C for one more, 2C for another."""
    data, outlier = with_outlier(name)
    options = {"microbatch_size": microbatch}
    with_it = first_sum(monkeypatch, name, data, [1, 4, 8, 20], **options)
    without = first_sum(monkeypatch, name, data, [1, 8, 20], **options)
    replaced = first_sum(monkeypatch, name, outlier, [1, 4, 8, 20], **options)
    unseen = first_sum(monkeypatch, name, outlier, [1, 8, 20], **options)
    assert torch.equal(without, unseen)
    assert 0 < torch.linalg.vector_norm(with_it - without) <= 0.5 * (1 + 1e-12)
    assert torch.linalg.vector_norm(replaced - without) <= 0.5 * (1 + 1e-12)
    assert torch.linalg.vector_norm(replaced - with_it) <= 1.0 * (1 + 1e-12)


def test_graphs_give_the_same_chain():
    x, y = regression_data()
    chains = []
    for jit in ("none", "trace"):
        pyro.set_rng_seed(0)
        sgld = chain(logistic, noise_multiplier=1.0, sample_rate=0.4, generator=3, jit=jit)
        sgld.run(x, y, progress=False)
        chains.append(sgld.get_samples()["w"])
    torch.testing.assert_close(*chains, rtol=1e-10, atol=1e-12)


def test_calibrates_to_the_budget():
    accountant = PrivacyAccountant(epsilon=1.0)
    sgld = chain(logistic, accountant=accountant, noise_multiplier=None, sample_rate=0.1)
    data = regression_data()
    sgld.run(*data, progress=False)
    assert accountant.ledger == ((SubsampledGaussian(sgld.noise_multiplier, 0.1), 10),)
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        sgld.step(*data)


def test_budget_is_checked_before_the_release(monkeypatch):
    """A step too many changes neither ledger nor chain."""
    accountant, spy, data = PrivacyAccountant(epsilon=1.0), Spy(monkeypatch), regression_data()
    sgld = chain(logistic, accountant=accountant, noise_multiplier=5.0, num_steps=100)
    with pytest.raises(PrivacyBudgetExceeded):
        sgld.run(*data, progress=False)
    assert accountant.get_epsilon() <= 1.0
    assert len(sgld.get_samples()["w"]) == accountant.num_releases == len(spy.released)


def test_an_empty_batch_pays_and_is_noisy(monkeypatch):
    spy = Spy(monkeypatch)
    sgld = chain(logistic, noise_multiplier=1.0, sample_rate=1e-9)
    sgld.step(*regression_data())
    assert torch.equal(spy.sums[0][0], torch.zeros(3))
    assert spy.released[0][0].abs().min() > 0
    assert sgld.accountant.ledger == ((SubsampledGaussian(1.0, 1e-9), 1),)


def test_samples_are_a_posterior_for_pyro():
    """Also of constrained latents in a plate; warm-up left out, half of the steps by default."""
    data = PROBLEMS["mixture"]().data
    sgld = chain(mixture, warmup_steps=None)
    with pytest.raises(ConfigurationError, match="warm-up"):
        sgld.get_samples()
    sgld.run(*data, progress=False)
    samples = sgld.get_samples()
    assert {name: x.shape for name, x in samples.items()} == {"weights": (5, 3), "locs": (5, 3, 2)}
    torch.testing.assert_close(samples["weights"].sum(1), torch.ones(5))
    visible = pyro.poutine.uncondition(mixture)
    assert Predictive(visible, posterior_samples=samples)(*data)["x"].shape == (5, 30, 2)


def test_chains_do_not_meet_in_the_parameter_store():
    """Two at a time, and a parameter of the user's own name."""
    data = regression_data()
    pyro.param("AutoLaplaceApproximation.loc", torch.full((3,), 7.0))
    alone, *together = (chain(logistic, init_loc_fn=_at_zero) for _ in range(3))
    draws = []
    for sgld in (alone, *together):
        pyro.set_rng_seed(1)
        sgld.step(*data)
        draws.append(sgld)
    for one, other in zip(together, reversed(together), strict=True):
        assert torch.equal(one.get_samples()["w"], other.get_samples()["w"])
    pyro.set_rng_seed(2)
    alone.step(*data)
    together[0].step(*data)
    pyro.set_rng_seed(2)
    together[1].step(*data)
    assert torch.equal(alone.get_samples()["w"], together[1].get_samples()["w"])
    assert dict(pyro.get_param_store()).keys() == {"AutoLaplaceApproximation.loc"}
    assert (pyro.param("AutoLaplaceApproximation.loc") == 7.0).all()


def test_state_round_trip():
    data = regression_data()

    def make():
        accountant = PrivacyAccountant(epsilon=1.0)
        return chain(logistic, accountant=accountant, noise_multiplier=None)

    first = make()
    with pytest.raises(ConfigurationError, match="first step"):
        first.state_dict()
    for _ in range(6):
        first.step(*data)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = make()
    second.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(second.get_samples(), first.get_samples())
    assert second.accountant.ledger == first.accountant.ledger
    assert second.noise_multiplier == first.noise_multiplier
    second._prepare(data, {})
    assert torch.equal(second._prepared.leaf, first._prepared.leaf)
    second.run(*data, progress=False)
    assert len(second.get_samples()["w"]) == 10
    assert second.accountant.get_epsilon() <= 1.0
    torch.testing.assert_close(second.get_samples()["w"][:6], first.get_samples()["w"])


def test_loading_back_into_a_running_chain():
    data = regression_data()
    sgld = chain(logistic)
    sgld.step(*data)
    state = sgld.state_dict()
    other = chain(logistic)
    other.step(*data)
    other.load_state_dict(state)
    pyro.set_rng_seed(4)
    sgld.step(*data)
    pyro.set_rng_seed(4)
    other.step(*data)
    assert torch.equal(sgld.get_samples()["w"], other.get_samples()["w"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "state_dict"),
        ({"noise_multiplier": 3.0}, "noise_multiplier"),
        ({"bound": 3.0}, "max_grad_norm"),
        ({"steps": -1}, "steps"),
        ({"position": torch.zeros(4)}, "latents"),
    ],
)
def test_damaged_state(change, words):
    sgld = chain(logistic)
    sgld.step(*regression_data())
    with pytest.raises(ConfigurationError, match=words):
        sgld.load_state_dict(sgld.state_dict() | change)


def test_state_of_another_model():
    sgld, data = chain(logistic), regression_data()
    sgld.step(*data)
    other = chain(logistic)
    other.load_state_dict(sgld.state_dict() | {"position": torch.zeros(4)})
    with pytest.raises(ModelError, match="latents"):
        other.step(*data)
    assert other.accountant.num_releases == 1


def test_pickling_would_carry_the_data():
    sgld = chain(logistic)
    sgld.step(*regression_data())
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(sgld)


def test_a_chain_that_diverges_says_so():
    sgld = chain(means, step_size=1e40, max_grad_norm=math.inf)
    with pytest.raises(ConfigurationError, match="step_size is too large"):
        sgld.run(torch.randn(10, 2), progress=False)
    assert sgld.state_dict()["position"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_size": 0.0}, "step_size"),
        ({"step_size": math.nan}, "step_size"),
        ({"step_size": "small"}, "step_size"),
        ({"step_size": math.inf}, "step_size"),
        ({"num_steps": None}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"warmup_steps": 10}, "warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf, "noise_multiplier": 1.0}, "infinite bound"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"init_loc_fn": 0.0}, "init_loc_fn"),
        ({"sampling": "shuffle"}, "sampling"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"secure": 1}, "secure"),
        ({"jit": "fast"}, "jit"),
        ({"accountant": None}, "accountant"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ConfigurationError, match=words):
        chain(logistic, **options)


def test_bad_schedule_spends_nothing():
    sgld = chain(logistic, step_size=lambda t: -1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match=r"step_size\(step\)"):
        sgld.step(*regression_data())
    assert sgld.accountant.num_releases == 0


def discrete(x):
    k = pyro.sample("k", dist.Categorical(torch.ones(3)), infer={"enumerate": "parallel"})
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(k.double(), 1.0), obs=x[idx])


def dependent(x):
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    high = pyro.sample("high", dist.Uniform(low, low + 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(high, 1.0), obs=x[idx])


def nothing_global(x):
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=x[idx])


def mixing(x):
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(m, 1.0), obs=(x - x.mean())[idx])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (discrete, "'k' is discrete"),
        (dependent, "support of site 'high'"),
        (nothing_global, "no latent"),
        (mixing, "other rows"),
    ],
)
def test_bad_models(model, words):
    sgld = chain(model, noise_multiplier=1.0)
    with pytest.raises(ModelError, match=words):
        sgld.step(torch.randn(10))
    assert sgld.accountant.num_releases == 0


def test_models_that_only_dpsvi_takes():
    with pytest.raises(ModelError, match="'effect' lies within"):
        chain(hierarchical).step(*regression_data())
    with pytest.raises(ModelError, match="learns parameter 'weights'"):
        chain(mixture_parameters).step(torch.randn(10, 2))


def test_bad_data():
    x, y = regression_data()
    x[3, 1] = math.nan
    sgld = chain(logistic, noise_multiplier=1.0)
    with pytest.raises(ModelError, match="'x' holds NaN"):
        sgld.step(x, y)
    assert sgld.accountant.num_releases == 0


def test_a_latent_beyond_the_numbers_is_no_sample():
    """The position is finite where it is unconstrained, and its exponential is not."""
    sgld = chain(gamma_poisson, step_size=1e6, noise_multiplier=1.0, generator=0)
    with pytest.raises(ConfigurationError, match="step_size is too large"):
        sgld.run(torch.ones(10), progress=False)
    if sgld._samples:
        assert all(value.isfinite().all() for value in sgld.get_samples().values())


def test_large_steps_in_single_precision():
    torch.set_default_dtype(torch.float32)
    sgld = chain(means, step_size=1e40, noise_multiplier=1.0, generator=0)
    with pytest.raises(ConfigurationError, match="step_size is too large"):
        sgld.run(torch.ones(10, 2), progress=False)


@pytest.mark.parametrize(
    ("key", "value"), [("position", 1.0), ("samples", []), ("samples", {"m": 0}), ("bound", None)]
)
def test_damaged_parts_of_a_state(key, value):
    sgld = chain(means)
    sgld.step(torch.ones(10, 2))
    with pytest.raises(ConfigurationError, match=key):
        sgld.load_state_dict(sgld.state_dict() | {key: value})
