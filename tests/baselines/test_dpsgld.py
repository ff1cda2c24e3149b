"""DPSGLD: the right chain, topped-up noise, sensitivity, ledger, state, bad input."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract
from problems import (
    PROBLEMS,
    gamma_poisson,
    hierarchical,
    logistic,
    mixture,
    mixture_parameters,
    outlier_of,
    regression_data,
)
from pyro.infer import Predictive
from pyro.infer.autoguide import init_to_value
from releases import Releases, batches
from scipy import stats

from pyro_dp import (
    ConfigurationError,
    ModelError,
    PrivacyAccountant,
)
from pyro_dp.baselines import DPSGLD

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


class TestContract(InferenceContract):
    variants = ("AutoNormal", "slice_data", "constrained", "mixture", "nested mixture")
    kinds = ("AutoNormal", "mixture")
    bound = "max_grad_norm"
    bad_settings = (
        ({"step_size": 0.0}, "step_size"),
        ({"step_size": math.nan}, "step_size"),
        ({"step_size": "small"}, "step_size"),
        ({"step_size": math.inf}, "step_size"),
        ({"num_steps": None}, "num_steps"),
        ({"warmup_steps": 10}, "warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"init_loc_fn": 0.0}, "init_loc_fn"),
        ({"jit": "fast"}, "jit"),
    )
    noisy_options = {"jit": "trace"}

    def make(self, variant, **options):
        problem = PROBLEMS[variant]()
        settings = {"step_size": 0.01, "warmup_steps": 0, "max_grad_norm": 0.5}
        if variant == "AutoNormal":
            settings["init_loc_fn"] = _at_zero
        return DPSGLD(problem.model, **(settings | problem.options | options))

    def data(self, variant):
        return PROBLEMS[variant]().data

    def result(self, sgld):
        return sgld.get_samples()

    def neighbours(self, variant, data):
        ordinary, *_ = super().neighbours(variant, data)
        yield ordinary
        yield outlier_of(variant, data)

    def damage(self, state):
        yield {"bound": 3.0}, "max_grad_norm"
        yield {"bound": None}, "bound"
        yield {"position": torch.zeros(4)}, "latents"
        yield {"position": 1.0}, "position"
        yield {"samples": []}, "samples"
        yield {"samples": {"m": 0}}, "samples"


def test_there_is_no_state_before_the_first_step():
    with pytest.raises(ConfigurationError, match="first step"):
        chain(logistic).state_dict()


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
    spy, taken = Releases(monkeypatch), batches(monkeypatch)
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
        own = x[taken[t]] - u[t - 1].exp()
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
    assert len({len(batch) for batch in taken}) > 2


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
    spy = Releases(monkeypatch)
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


def test_graphs_give_the_same_chain():
    x, y = regression_data()
    chains = []
    for jit in ("none", "trace"):
        pyro.set_rng_seed(0)
        sgld = chain(logistic, noise_multiplier=1.0, sample_rate=0.4, generator=3, jit=jit)
        sgld.run(x, y, progress=False)
        chains.append(sgld.get_samples()["w"])
    torch.testing.assert_close(*chains, rtol=1e-10, atol=1e-12)


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


def test_state_of_another_model():
    sgld, data = chain(logistic), regression_data()
    sgld.step(*data)
    other = chain(logistic)
    other.load_state_dict(sgld.state_dict() | {"position": torch.zeros(4)})
    with pytest.raises(ModelError, match="latents"):
        other.step(*data)
    assert other.accountant.num_releases == 1


def test_a_chain_that_diverges_says_so():
    sgld = chain(means, step_size=1e40, max_grad_norm=math.inf)
    with pytest.raises(ConfigurationError, match="step_size is too large"):
        sgld.run(torch.randn(10, 2), progress=False)
    assert sgld.state_dict()["position"].isfinite().all()


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
