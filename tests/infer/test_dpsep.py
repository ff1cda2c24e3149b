"""PaperDPSEP: equality with exact EP and plain SEP, sensitivity, noise, uncertainty."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract, through_a_file
from problems import (
    dropout,
    factored,
    glm,
    handwritten_guide,
    hierarchical,
    in_turns,
    linear,
    logistic,
    logistic_whole,
    mixture,
    mixture_guide,
    points,
    regression_data,
    repeated_mixture,
    with_needs,
)
from pyro.infer import Predictive
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_value,
)
from releases import Releases, take
from scipy import integrate, stats

from pyro_dp import (
    ConfigurationError,
    ConvergenceWarning,
    Factors,
    FixedSizeSampling,
    ModelError,
    Noise,
    PaperDPSEP,
    PoissonSampling,
    PrivacyAccountant,
)
from pyro_dp.infer.ep.approximation import Approximation

_GUIDES = [
    AutoNormal,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoLowRankMultivariateNormal,
    lambda model: handwritten_guide,
]


def new_sep(model=logistic, guide=None, **options):
    """A PaperDPSEP without noise or a bound."""
    pyro.clear_param_store()
    settings = dict(accountant=PrivacyAccountant(), num_steps=5, noise=0, clip=math.inf)
    guide = AutoMultivariateNormal(model) if guide is None else guide
    return PaperDPSEP(model, guide, **settings | options)


def conjugate(x, y):
    precision = torch.eye(x.shape[1]) + x.T @ x / 0.25
    covariance = torch.linalg.inv(precision)
    return covariance @ x.T @ y / 0.25, covariance


def laplace(x, y):
    w = x.new_zeros(x.shape[1])
    for _ in range(20):
        p = torch.sigmoid(x @ w)
        precision = (x * (p * (1 - p)).unsqueeze(1)).T @ x + torch.eye(len(w)).to(x)
        w = w + torch.linalg.solve(precision, x.T @ (y - p) - w)
    return w, torch.linalg.inv(precision)


def correlated_data(size, dim=3, correlation=0.9):
    x = math.sqrt(1 - correlation) * torch.randn(size, dim)
    x = x + math.sqrt(correlation) * torch.randn(size, 1)
    return x, torch.bernoulli(torch.sigmoid(x @ torch.linspace(-1, 1, dim)))


@pytest.mark.long
@pytest.mark.parametrize("guide", _GUIDES)
def test_exact_for_linear_regression(guide):
    """Conjugate mean and covariance; a guide without correlations gets the marginals."""
    x = torch.randn(50, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(50)
    sep = new_sep(linear, guide(linear), damping=1.0)
    sep.run(x, y, progress=False)
    mean, covariance = conjugate(x, y)
    posterior = sep.posterior()
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)
    draws = Predictive(linear, guide=sep.guide, num_samples=200)(x, y)["w"].reshape(200, 3)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0.0, atol=6 * 0.1 / math.sqrt(200))
    # 5.4 standard errors
    torch.testing.assert_close(draws.std(0), covariance.diagonal().sqrt(), rtol=0.27, atol=0.0)


def runs(sep, data, count):
    """Repeat the run from its start, each time with new noise, and yield the inference."""
    sep._look_at(data, {})
    start = sep.state_dict()
    for _ in range(count):
        sep.load_state_dict(start | {"accountant": sep.accountant.state_dict()})
        sep.run(*data, progress=False)
        yield sep


def tilted_moment(k, mean, sd, label):
    def integrand(a):
        return a**k * stats.norm.pdf(a, mean, sd) / (1 + math.exp(-a if label else a))

    return integrate.quad(integrand, mean - 10 * sd, mean + 10 * sd, epsabs=1e-14)[0]


def slow_sep(x, y, mean, steps, damping):
    """SEP for logistic regression, one record at a time, by numerical integration."""
    size, dim = x.shape
    prior = torch.eye(dim)
    posterior, eta = 100 * torch.eye(dim), 100 * mean
    factor, factor_eta = (posterior - prior) / size, eta / size
    for _ in range(steps):
        covariance = torch.linalg.inv(posterior - factor)
        centre = covariance @ (eta - factor_eta)
        new, new_eta = torch.zeros(dim, dim), torch.zeros(dim)
        for row, label in zip(x, y, strict=True):
            m, v = (row @ centre).item(), (row @ covariance @ row).item()

            z, first, second = (tilted_moment(k, m, math.sqrt(v), label.item()) for k in range(3))
            tilted_mean = first / z
            tilted_variance = second / z - tilted_mean**2
            site = 1 / tilted_variance - 1 / v
            site_eta = tilted_mean / tilted_variance - m / v
            new = new + site * torch.outer(row, row)
            new_eta = new_eta + site_eta * row
        factor = (1 - damping) * factor + damping * new / size
        factor_eta = (1 - damping) * factor_eta + damping * new_eta / size
        posterior, eta = prior + size * factor, size * factor_eta
    return torch.linalg.solve(posterior, eta), torch.linalg.inv(posterior)


@pytest.mark.slow
@pytest.mark.parametrize("centred", [True, False])
def test_without_noise_and_clipping_it_is_plain_sep(centred):
    x, y = regression_data(size=12)
    start = torch.tensor([0.3, -0.2, 0.1])
    guide = AutoNormal(logistic, init_loc_fn=init_to_value(values={"w": start}), init_scale=0.1)
    sep = new_sep(logistic, guide, num_steps=3, damping=0.6, factors=Factors(centred=centred))
    sep.run(x, y, progress=False)
    mean, covariance = slow_sep(x, y, start, steps=3, damping=0.6)
    torch.testing.assert_close(sep.posterior().mean, mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(sep.posterior().covariance_matrix, covariance, rtol=0.0, atol=1e-6)


# Models of every kind of moments and shape, with their guides and data.


_KINDS = {
    "logistic": (logistic, AutoMultivariateNormal, regression_data, {}),
    "linear": (linear, AutoNormal, regression_data, {}),
    "whole": (logistic_whole, AutoNormal, regression_data, {"slice_data": True}),
    "factor": (factored, AutoNormal, regression_data, {}),
    "mixture": (mixture, mixture_guide, points, {}),
    "nested": (repeated_mixture, mixture_guide, points, {"plate": "data"}),
}


@pytest.mark.filterwarnings("ignore:.*one record at a time")
class TestContract(InferenceContract):
    # Every pair of two of the three.
    variants = tuple(
        f"{kind}, {('centred', 'as they are')[(row + column) % 2]}, {precision}"
        for row, kind in enumerate(_KINDS)
        for column, precision in enumerate(("full", "diagonal", "shared"))
    )
    slow = tuple(each for row, each in enumerate(variants) if row // 3 % 3 != row % 3)
    kinds = ("logistic, centred, full", "factor, as they are, full")
    bound = "Clip.bound"
    bad_settings = (
        ({"damping": 0.0}, "damping"),
        ({"damping": 1.5}, "damping"),
        ({"factors": Factors(moments="exact")}, "moments"),
        ({"num_steps": None}, "num_steps"),
        ({"clip": None}, "Clip.bound"),
    )
    test_ctrl_c_anywhere = None  # its step is that of test_automatic_dpsep.py

    def make(self, variant, **options):
        kind, centred, precision = variant.split(", ")
        model, guide, _, needs = _KINDS[kind]
        factors = Factors(precision, centred=centred == "centred")
        options = with_needs(needs, {"clip": 0.5, "factors": factors} | options)
        return PaperDPSEP(model, guide(model), **options)

    def data(self, variant):
        return _KINDS[variant.split(", ")[0]][2]()

    def result(self, sep):
        posterior = sep.posterior()
        held = {name: value.detach().clone() for name, value in sep.guide.median().items()}
        return held | {"mean": posterior.mean, "covariance": posterior.covariance_matrix}

    def neighbours(self, variant, data):
        ordinary, _, outlier, *_ = super().neighbours(variant, data)
        return (ordinary, outlier) if variant in self.kinds else (outlier,)

    def damage(self, state):
        for name in state["settings"]:
            yield {"settings": state["settings"] | {name: 7}}, name


def one_sum(monkeypatch, data, batch, **options):
    """The exact sum of a block in one first step on this batch of records."""
    pyro.set_rng_seed(0)
    options = {"clip": 0.5, "noise": Noise(0, source=0), "sampling": 0.5} | options
    seen, sep = Releases(monkeypatch), new_sep(**options)
    take(monkeypatch, batch)
    sep.step(*data)
    return seen.sums[0][0]


def test_the_release_bounds_matrices_in_the_frobenius_norm(monkeypatch):
    """With weight 1, the norm is that of the vector and of the whole matrix."""
    x, y = regression_data()
    total = one_sum(monkeypatch, (x, y), [7], clip=math.inf, factors=Factors(weight=1.0))
    eta, diagonal, above = total[:3], total[3:6], total[6:]
    p = 0.5  # the guide starts close to zero
    site = p * (1 - p) * torch.outer(x[7], x[7])
    torch.testing.assert_close(diagonal, site.diagonal(), rtol=0.4, atol=0.05)
    norm = torch.linalg.vector_norm(torch.cat([diagonal, above]))
    off = torch.stack([site[0, 1], site[0, 2], site[1, 2]])
    assert torch.sign(above).equal(torch.sign(off))
    scale = (diagonal.sum() / x[7].square().sum()).item()
    assert norm.item() == pytest.approx(scale * x[7].square().sum().item(), rel=1e-9)
    assert torch.dot(eta / eta.norm(), x[7] / x[7].norm()).abs().item() == pytest.approx(1.0)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [PoissonSampling(0.11), FixedSizeSampling(0.11)])
def test_divides_by_the_public_rate(monkeypatch, sampling):
    seen, accountant = Releases(monkeypatch), PrivacyAccountant(neighboring="replace_one")
    sep, estimates = new_sep(accountant=accountant, num_steps=30, sampling=sampling), []
    estimate = Approximation._estimate
    monkeypatch.setattr(
        Approximation,
        "_estimate",
        lambda self, r, c: (estimates.append(r), estimate(self, r, c))[1],
    )
    sep.run(*regression_data(), progress=False)
    rate = 0.11 if sampling.kind == "poisson" else 0.1
    for one, (other, *_) in zip(estimates, seen.released, strict=True):
        torch.testing.assert_close(one, other / rate)


@pytest.mark.every_commit
@pytest.mark.long
@pytest.mark.parametrize("moments", ["linear", "stein"])
def test_public_generators_do_not_see_the_batch(monkeypatch, moments):
    states = []
    for batch in ([], [1], [1, 4, 8, 20]):
        one_sum(monkeypatch, regression_data(), batch, factors=Factors(moments=moments))
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def residuals(x, y):
    """The observation itself depends on a latent, not only its distribution."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx, 0] * w[0], 0.5), obs=y[idx] - x[idx, 1:] @ w[1:])


@pytest.mark.long
def test_a_likelihood_that_is_not_in_the_parameters_alone():
    """Linear moments do not apply: they would miss a part of the likelihood."""
    x = torch.randn(200, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(200)
    sep = new_sep(residuals)
    sep.run(x, y, progress=False)
    assert sep._kept.prepared.problem.moments.name == "stein"
    mean, covariance = conjugate(x, y)
    torch.testing.assert_close(sep.posterior().mean, mean, rtol=0.0, atol=2e-3)


@pytest.mark.long
def test_clipping_applies_to_the_joint_site(monkeypatch):
    """Eta and precision are scaled by the same factor."""
    data = regression_data()
    loose = one_sum(monkeypatch, data, [3], factors=Factors(weight=2.0), clip=1e9)
    tight = one_sum(monkeypatch, data, [3], factors=Factors(weight=2.0), clip=0.01)
    torch.testing.assert_close(tight, 0.01 * loose / loose.norm())


# The posterior under noise.


def noisy(size=4000, **options):
    settings = dict(num_steps=20, noise=Noise(20.0, source=1), clip=3.0)
    sep = new_sep(**(settings | options))
    sep.run(*regression_data(size=size), progress=False)
    return sep


@pytest.mark.long
def test_noise_aware_covariance_is_the_closed_form():
    """Sigma + v Sigma^2, v by the recursion over the dampings; minibatches add u Sigma."""
    sd = 20.0 * 3.0 / math.sqrt(0.99)
    for rate in (1.0, 0.5):
        sep = noisy(damping=lambda t: 1 / (1 + 0.3 * t), sampling=rate)
        v = u = 0.0
        for t in range(20):
            damping = 1 / (1 + 0.3 * t)
            v = (1 - damping) ** 2 * v + damping**2 * (sd / rate) ** 2
            u = (1 - damping) ** 2 * u + damping**2 * (1 - rate) / rate
        plain = sep.posterior(noise_aware=False).covariance_matrix
        expected = (1 + u) * plain + v * plain @ plain
        torch.testing.assert_close(sep.posterior().covariance_matrix, expected)


@pytest.mark.long
@pytest.mark.every_commit
def test_noise_aware_covariance_uncentred():
    sep = noisy(factors=Factors(centred=False), damping=1.0, noise=Noise(1.0, source=1))
    plain, mu = sep.posterior(noise_aware=False).covariance_matrix, sep.posterior().mean
    v, kappa = (1.0 * 3.0) ** 2 / 0.99, 2 / 3.0
    inner = torch.eye(3) + (mu @ mu * torch.eye(3) + torch.outer(mu, mu)) / (2 * kappa**2)
    expected = plain + v * plain @ inner @ plain
    torch.testing.assert_close(sep.posterior().covariance_matrix, expected)


@pytest.mark.long
def test_the_guide_holds_the_posterior():
    sep = noisy()
    held, asked = sep.guide.get_posterior(), sep.posterior()
    torch.testing.assert_close(held.mean, asked.mean)
    torch.testing.assert_close(held.covariance_matrix, asked.covariance_matrix)
    wider = sep.posterior(True).stddev / sep.posterior(False).stddev
    assert (wider > 1.05).all()


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_noise_aware_intervals_cover(correlation):
    """The noise's part of the covariance against the errors of the mean over fresh noise.

    There are 3 x 40 intervals of one sd. A share of 0.683 +- 4 * 0.043 holds the mean without
    noise. With half or twice the sd it would be 0.38 or 0.95.
    """
    x, y = correlated_data(1500, correlation=correlation)
    target = new_sep(num_steps=4)
    target.run(x, y, progress=False)
    inside = []
    sep = new_sep(
        guide=AutoDiagonalNormal(logistic), num_steps=4, noise=Noise(8.0, source=0), clip=3.0
    )
    for _ in runs(sep, (x, y), 40):
        added = sep.posterior(True).variance - sep.posterior(False).variance
        error = sep.posterior().mean - target.posterior().mean
        inside.append(error.abs() <= added.sqrt())
    share = torch.stack(inside).double().mean().item()
    assert 0.51 < share < 0.85


def with_hyperprior(x, y):
    """Two latents that no record sees, and a scale that is not Gaussian."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    pyro.sample("idle", dist.Normal(2.0, 3.0))
    w = pyro.sample("w", dist.Normal(0.0, tau).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


@pytest.mark.long
def test_latents_that_no_record_sees_get_no_noise(monkeypatch):
    """Their coordinates are not released. Only the prior moves them."""
    seen, noise = Releases(monkeypatch), Noise(5.0, source=0)
    sep = new_sep(with_hyperprior, noise=noise, clip=2.0)
    sep.run(*regression_data(size=500), progress=False)
    assert seen.sums[0][0].shape == (3 + 6,)
    posterior = sep.posterior(noise_aware=False)
    torch.testing.assert_close(posterior.mean[1], torch.tensor(2.0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.stddev[1], torch.tensor(3.0), rtol=1e-6, atol=1e-6)


# Accounting, settings, errors.


@pytest.mark.long
@pytest.mark.parametrize("failing", ["updated", "advanced", "moments"])
def test_a_step_that_fails_half_way_leaves_the_last_posterior(monkeypatch, failing):
    sep = new_sep(noise=Noise(1.0, source=0), clip=1.0)
    data = regression_data()
    sep.step(*data)
    before, held = sep.posterior(), sep.guide.median()["w"].clone()
    original = getattr(Approximation, failing)

    def fail(*args, **kwargs):
        original(*args, **kwargs)
        raise torch.linalg.LinAlgError

    with monkeypatch.context() as patch:
        patch.setattr(Approximation, failing, fail)
        with pytest.raises(ConfigurationError, match="was not changed"):
            sep.step(*data)
    assert sep.accountant.num_releases == 2
    assert torch.equal(sep.posterior().mean, before.mean)
    assert torch.equal(sep.posterior().covariance_matrix, before.covariance_matrix)
    assert torch.equal(sep.guide.median()["w"], held)
    assert len(sep.run(*data, progress=False)) == 3


def test_a_bad_damping_function_is_refused():
    sep = new_sep(damping=lambda step: 2.0)
    with pytest.raises(ConfigurationError, match="damping"):
        sep.step(*regression_data())
    assert not sep.accountant.ledger


def kinked_prior(x, y):
    w = pyro.sample("w", dist.Laplace(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


kinked = glm(lambda mean: dist.Laplace(mean, 1.0))


def uncentred_features(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        features = x - x.mean(0)
        pyro.sample("y", dist.Bernoulli(logits=features[idx] @ w), obs=y[idx])


@pytest.mark.parametrize(
    ("model", "guide", "options", "message"),
    [
        (hierarchical, AutoNormal, {}, "draws latents of records"),
        (uncentred_features, AutoNormal, {}, "other rows|other records"),
        (logistic, AutoDelta, {}, "AutoDelta"),
        (kinked, AutoNormal, {}, "kinks"),
        (kinked_prior, AutoNormal, {}, "Laplace"),
        (dropout, lambda model: handwritten_guide, {}, "draws at random"),
        (
            factored,
            AutoNormal,
            {"factors": Factors(moments="linear")},
            "moments='linear' does not apply",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_before_anything_is_spent(
    model, guide, options, message
):
    sep = new_sep(model, guide(model), noise=1.0, clip=1.0, **options)
    with pytest.raises(ModelError, match=message):
        sep.step(*regression_data())
    assert not sep.accountant.ledger


@pytest.mark.long
@pytest.mark.every_commit
def test_the_noise_of_a_saved_run_is_remembered():
    data = regression_data()
    sep = new_sep(noise=3.0, clip=1.0)
    for _ in range(3):
        sep.step(*data)
    state = through_a_file(sep.state_dict())
    second = new_sep(noise=3.0, clip=1.0)
    second.load_state_dict(state)
    second._look_at(data, {})
    for aware in (True, False):
        torch.testing.assert_close(
            second.posterior(aware).covariance_matrix, sep.posterior(aware).covariance_matrix
        )


@pytest.mark.slow
def test_states_of_other_latents():
    x, y = regression_data()
    sep = new_sep()
    with pytest.raises(ConfigurationError, match="first step"):
        sep.state_dict()
    sep.step(x, y)
    state, other = sep.state_dict(), new_sep()
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ModelError, match="latents"):
            other.step(x[:, :2], y)
    assert other.accountant.num_releases == 1
    other = new_sep()
    other.step(x[:, :2], y)
    with pytest.raises(ModelError, match="latents"):
        other.load_state_dict(state)


@pytest.mark.long
def test_single_precision():
    """A model in float32: sums and posterior are kept in float64."""
    torch.set_default_dtype(torch.float32)
    x, y = regression_data(size=500)
    sep = new_sep(num_steps=10, noise=Noise(1.0, source=0), clip=3.0)
    sep.run(x, y, progress=False)
    assert sep.posterior().mean.dtype == torch.float64
    assert sep.guide.median()["w"].dtype == torch.float32
    mean, _ = laplace(x.double(), y.double())
    torch.testing.assert_close(sep.posterior().mean, mean, rtol=0.0, atol=0.2)


@pytest.mark.filterwarnings("ignore:Encountered")
@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_a_guide_that_starts_at_an_extreme_scale_spends_nothing(scale):
    sep = new_sep(guide=AutoNormal(logistic, init_scale=scale), noise=1.0, clip=1.0)
    with pytest.raises(ModelError, match="scales"):
        sep.step(*regression_data())
    assert sep.accountant.num_releases == 0


def test_a_posterior_beyond_the_numbers_stays_where_it_was():
    """Noise of 1e40 in a step of the precision leaves variances that rounding makes negative."""
    sep = new_sep(noise=Noise(1e40, source=0), clip=1.0)
    with pytest.raises(ConfigurationError, match="was not changed"):
        for _ in range(20):
            sep.step(*regression_data())
            assert (sep.posterior().variance > 0).all()
    assert sep.posterior().mean.isfinite().all()


def test_observations_with_more_dimensions_than_their_distribution():
    """Labels of shape (N, 1) have no linear moments: a typed error says so."""
    x, y = regression_data()
    sep = new_sep(factors=Factors(moments="linear"))
    with pytest.raises(ModelError):
        sep.step(x, y.unsqueeze(-1))


def counties(county, floor, y):
    """Radon: a hierarchy of 20 counties, with unknown scales."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 10.0))
    spread, scale = (pyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("spread", "scale"))
    with pyro.plate("counties", 20):
        level = pyro.sample("level", dist.Normal(mu, spread))
    with pyro.plate("data", len(y)) as idx:
        mean = level[county[idx]] + slope * floor[idx]
        pyro.sample("y", dist.Normal(mean, scale), obs=y[idx])


def radon(size=200):
    county, floor = torch.arange(size) % 20, torch.bernoulli(torch.full((size,), 0.2))
    level = 1.5 + 0.3 * torch.randn(20)
    return county, floor, level[county] - 0.7 * floor + 0.8 * torch.randn(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure, guide",
    in_turns(
        [(0.0, "estimates were left aside"), (20.0, "of 22 directions|left aside")],
        [AutoNormal, AutoMultivariateNormal],
    ),
)
def test_a_hierarchy_that_fails_is_warned_of(failure, guide):
    sigma, words = failure
    options = dict(noise=Noise(sigma, source=0), clip=3.0)
    sep = new_sep(counties, guide(counties), num_steps=30, **options)
    with pytest.warns(ConvergenceWarning, match=words):
        sep.run(*radon(), progress=False)


@pytest.mark.long
@pytest.mark.parametrize("sigma, model", in_turns([0.0, 1.0, 10.0], [logistic, linear]))
def test_a_regression_that_settles_is_not_warned_of(sigma, model):
    bound = 20.0 if model is linear else 3.0
    options = dict(noise=Noise(sigma, source=0), clip=bound)
    sep = new_sep(model, num_steps=20, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in runs(sep, regression_data(2000), 3):
            pass
