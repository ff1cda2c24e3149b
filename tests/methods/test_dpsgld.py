"""DPSGLD: the right chain, its releases, topped-up noise, models that it refuses."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from dpsgld import DPSGLD
from problems import PROBLEMS, gamma_poisson, hierarchical, mixture_parameters, regression_data
from releases import Releases, batches
from scipy import stats

from pyro_dp import ConfigurationError, Execution, ModelError, Noise, PrivacyAccountant

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
    settings = dict(accountant=PrivacyAccountant(), num_steps=10, step_size=0.01, warmup_steps=0)
    settings |= dict(noise=0, clip=0.5, execution=Execution(jit="none"))
    return DPSGLD(model, **settings | options)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("jit", ["none", "trace"])
def test_step_is_a_langevin_step(monkeypatch, jit):
    """Written by hand for u = log rate: Gamma prior, Jacobian, clipping, noise, rate, top-up."""
    (x,) = PROBLEMS["constrained"]().data
    spy, taken = Releases(monkeypatch), batches(monkeypatch)
    h, sigma, bound, rate = 0.003, 2.0, 1.5, 0.4
    sgld = chain(
        gamma_poisson,
        step_size=h,
        noise=Noise(sigma, source=0),
        clip=bound,
        sampling=rate,
        execution=Execution(jit=jit),
    )
    for t in range(8):
        pyro.set_rng_seed(t)
        sgld.step(x)
    u = sgld.get_samples()["rate"].log()
    missing = h - (h / 2 * sigma * bound / rate) ** 2
    assert missing > 0 and sgld.accountant.num_releases == 8
    for t in range(1, 8):
        own = x[taken[t]] - u[t - 1].exp()
        torch.testing.assert_close(spy.sums[t][0].squeeze(), own.clamp(-bound, bound).sum().neg())
        noise = (spy.sums[t][0] - spy.released[t][0]).squeeze()
        likelihood = (own.clamp(-bound, bound).sum() + noise) / rate
        prior = (2.0 - 1.0) - u[t - 1].exp() + 1.0  # d/du of log Gamma(2, 1) at e^u, and of u
        pyro.set_rng_seed(t)
        drawn = math.sqrt(missing) * torch.randn(1).squeeze()
        expected = u[t - 1] + h / 2 * (prior + likelihood) + drawn
        assert abs(u[t] - expected) < 1e-10
    assert len({len(batch) for batch in taken}) > 2


@pytest.mark.slow
@pytest.mark.every_case
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
        noise=Noise(sigma, source=0),
        clip=bound,
        sampling=rate,
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


@pytest.mark.long
def test_chains_do_not_meet_in_the_parameter_store():
    """Two at a time, and a parameter of the user's own name."""
    data = torch.randn(20, 3)
    pyro.param("AutoLaplaceApproximation.loc", torch.full((3,), 7.0))
    chains = [chain(means, init_loc_fn=lambda site: torch.zeros(site["fn"].shape())) for _ in "ab"]
    for seed in (1, 2):
        for sgld in chains:
            pyro.set_rng_seed(seed)
            sgld.step(data)
    one, other = (sgld.get_samples()["m"] for sgld in chains)
    assert torch.equal(one, other) and not torch.equal(one[0], one[1])
    assert dict(pyro.get_param_store()).keys() == {"AutoLaplaceApproximation.loc"}
    assert (pyro.param("AutoLaplaceApproximation.loc") == 7.0).all()


@pytest.mark.long
def test_a_chain_that_diverges_says_so():
    """A finite position may have an infinite exponential."""
    for size in (1e6, 1e40):
        sgld = chain(gamma_poisson, step_size=size, noise=Noise(1.0, source=0))
        with pytest.raises(ConfigurationError, match="step_size is too large"):
            sgld.run(torch.ones(10), progress=False)
        assert all(value.isfinite().all() for value in sgld.get_samples().values())


def discrete(x):
    k = pyro.sample("k", dist.Categorical(torch.ones(3)))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("x", dist.Normal(k.double(), 1.0), obs=x[idx])


@pytest.mark.every_case
@pytest.mark.parametrize(
    "model, data, words",
    [
        (discrete, lambda: (torch.randn(10),), "'k' is discrete"),
        (hierarchical, regression_data, "'effect' is discrete, or has a value for each record"),
        (mixture_parameters, lambda: (torch.randn(10, 2),), "learns no parameter 'weights'"),
    ],
)
def test_models_that_it_refuses(model, data, words):
    sgld = chain(model, noise=1.0)
    with pytest.raises(ModelError, match=words):
        sgld.step(*data())
    assert sgld.accountant.num_releases == 0
