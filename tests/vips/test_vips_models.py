"""The models of VIPS without noise: exact posteriors, and the Pyro models that they stand for."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from vips_problems import (
    ALL,
    MEANS,
    PROBLEMS,
    SDS,
    fitted,
    linear_data,
    logistic_data,
    mixture_data,
)

from pyro_dp import DPSEP, ConfigurationError, Noise, PaperDPSVI, PrivacyAccountant
from pyro_dp.utils.linalg import stacked
from pyro_dp.vips import (
    GaussianMixture,
    LatentDirichletAllocation,
    LinearRegression,
    LogisticRegression,
    SigmoidBeliefNetwork,
)
from pyro_dp.vips.models.regressions import NoisySecondMoment, WeightedSquares

DRAWN = {"mixture": "assignment", "documents": "words", "images": "images"}  # others draw y
NOT_STEP = (0.0, 0.0)  # every step forgets what was before: plain variational Bayes


def log_density(function, values, *data):
    """The log density of a Pyro function with these values."""
    return poutine.trace(poutine.condition(function, values)).get_trace(*data).log_prob_sum()


def polya_gamma_vb(x, y, a0, b0, sweeps):
    """Pólya-Gamma variational Bayes with a Gamma prior on the precision, one block at a time."""
    dim = x.shape[1]
    alpha = a0 / b0
    mean, covariance = torch.zeros(dim), torch.eye(dim) / alpha
    for _ in range(sweeps):
        c = ((x @ covariance * x).sum(1) + (x @ mean) ** 2).sqrt()
        omega = torch.tanh(c / 2) / (2 * c)
        covariance = torch.linalg.inv(alpha * torch.eye(dim) + x.T @ torch.diag(omega) @ x)
        mean = covariance @ (x.T @ (y - 0.5))
        alpha = (a0 + dim / 2) / (b0 + (mean @ mean + covariance.trace()) / 2)
    return mean, covariance, alpha


@pytest.mark.long
@pytest.mark.parametrize(("a0", "b0"), [(1.0, 1.0), (0.1, 2.0), (1e6, 1e6)])
def test_logistic_regression_is_polya_gamma_variational_bayes(a0, b0):
    x, y = logistic_data(size=300, dim=4, scale=4.0)
    model = LogisticRegression(4, concentration=a0, rate=b0)
    posterior = fitted(model, (x, y), 150, step_size=NOT_STEP).posterior()
    mean, covariance, alpha = polya_gamma_vb(x, y, a0, b0, sweeps=1000)
    torch.testing.assert_close(posterior["weights"].mean, mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(
        posterior["weights"].covariance_matrix, covariance, rtol=0.0, atol=1e-6
    )
    torch.testing.assert_close(posterior["precision"].mean, alpha, rtol=1e-6, atol=0.0)


def test_the_logistic_pyro_model():
    """Its density is that of the docstring, and rows beyond norm 1 are clipped in it."""
    x, y = logistic_data(size=20)
    model = LogisticRegression(3, concentration=2.0, rate=3.0)
    weights, precision = torch.tensor([1.0, -2.0, 0.5]), torch.tensor(0.7)
    prior = dist.Gamma(2.0, 3.0).log_prob(precision)
    prior = prior + dist.Normal(0.0, precision**-0.5).log_prob(weights).sum()
    likelihood = dist.Bernoulli(logits=x @ weights).log_prob(y).sum()
    values = {"weights": weights, "precision": precision}
    found = log_density(model.model, values, x, y)
    torch.testing.assert_close(found, prior + likelihood)
    long = x.clone()
    long[4] *= 1e6
    clipped = x.clone()
    clipped[4] /= x[4].norm()
    torch.testing.assert_close(
        log_density(model.model, values, long, y), log_density(model.model, values, clipped, y)
    )


def test_linear_regression_is_the_conjugate_posterior():
    x, y = linear_data(size=200)
    model = LinearRegression(
        3, x_bound=2.0, y_bound=5.0, weight_precision=0.3, concentration=2.0, rate=0.7
    )
    posterior = fitted(model, (x, y), 1).posterior()
    precision = 0.3 * torch.eye(3) + x.T @ x
    mean = torch.linalg.solve(precision, x.T @ y)
    a, b = 2.0 + 200 / 2, 0.7 + (y @ y - mean @ precision @ mean) / 2
    torch.testing.assert_close(posterior["weights"].mean, mean)
    covariance = torch.linalg.inv(precision) * b / (a - 1)
    torch.testing.assert_close(posterior["weights"].variance, covariance.diagonal())
    torch.testing.assert_close(posterior["precision"].mean, a / b)
    torch.testing.assert_close(posterior["precision"].variance, a / b**2)


def test_linear_regression_fits_its_pyro_model():
    """Joint density over posterior density is the evidence, wherever it is taken.

    Rows and labels beyond the bounds are clipped in both.
    """
    x, y = linear_data(size=50)
    x[3], y[5] = 1e3, -1e3
    model = LinearRegression(3, x_bound=2.0, y_bound=5.0, weight_precision=0.3, rate=0.7)
    vips = fitted(model, (x, y), 1)
    evidence = []
    for _ in range(5):
        trace = poutine.trace(vips.guide).get_trace(x, y)
        values = {name: trace.nodes[name]["value"] for name in ("precision", "weights")}
        evidence.append(log_density(model.model, values, x, y) - trace.log_prob_sum())
    torch.testing.assert_close(torch.stack(evidence), evidence[0].expand(5))


def test_linear_regression_makes_the_best_of_what_cannot_be_a_second_moment():
    """The closest one that can be; directions and residuals below the noise are not believed."""
    model = LinearRegression(1, x_bound=2.0, y_bound=5.0, weight_precision=0.4, rate=0.7)
    impossible = stacked(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))  # its eigenvalues are 3 and -1
    exact = model.posterior({"second_moment": impossible}, {"second_moment": 0.0}, 10)
    mean = 1.5 / (0.1 + 1.5)
    torch.testing.assert_close(exact.mean, torch.tensor([mean * 5.0 / 2.0]))
    residual = 1.5 - 2 * mean * 1.5 + mean * 1.6 * mean
    torch.testing.assert_close(exact.rate, torch.tensor(0.7 + 25.0 * residual / 2))
    noisy = model.posterior({"second_moment": impossible}, {"second_moment": 3.0}, 10)
    mean = 1.5 / (0.1 + 3.0 * math.sqrt(2.0))
    torch.testing.assert_close(noisy.mean, torch.tensor([mean * 5.0 / 2.0]))
    torch.testing.assert_close(noisy.scale, exact.scale)
    torch.testing.assert_close(noisy.rate, torch.tensor(0.7 + 25.0 * 3.0 * (1 + mean**2) / 2))


def mixture_sweep(x, q, prior):
    """One sweep of variational Bayes for the mixture, coordinate by coordinate."""
    weights, mean, count, shape, rate = q
    alpha0, kappa0, a0, b0 = prior
    log_r = torch.empty(len(x), len(weights))
    for k in range(len(weights)):
        log_r[:, k] = torch.digamma(weights[k]) - torch.digamma(weights.sum())
        for d in range(x.shape[1]):
            expected_log = torch.digamma(shape[k]) - torch.log(rate[k, d])
            squares = shape[k] / rate[k, d] * (x[:, d] - mean[k, d]) ** 2 + 1 / count[k]
            log_r[:, k] += (expected_log - squares) / 2
    r = (log_r - torch.logsumexp(log_r, dim=1, keepdim=True)).exp()
    n = r.sum(0)
    averages = (r.T @ x) / n[:, None]
    scatter = torch.stack([r[:, k] @ (x - averages[k]) ** 2 for k in range(len(n))])
    between = (kappa0 * n / (kappa0 + n))[:, None] * averages**2
    return (
        alpha0 + n,
        averages * (n / (kappa0 + n))[:, None],
        kappa0 + n,
        a0 + n / 2,
        b0 + (scatter + between) / 2,
    )


def mixture_fit():
    data = mixture_data(size=2000)
    torch.manual_seed(0)
    model = GaussianMixture(
        3, 2, radius=6.0, concentration=2.0, mean_precision=0.05, shape=1.5, rate=0.4
    )
    return model, data, fitted(model, data, 80, step_size=NOT_STEP)


@pytest.mark.long
def test_the_mixture_is_variational_bayes():
    """Its end is where a sweep of variational Bayes changes nothing."""
    _, (x,), vips = mixture_fit()
    found = vips._found.posterior
    q = (found.weights, found.mean, found.count[:, 0], found.shape[:, 0], found.rate)
    again = mixture_sweep(x, q, prior=(2.0, 0.05, 1.5, 0.4))
    for one, other in zip(q, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True])
def test_the_mixture_recovers_its_components(private):
    data = mixture_data(size=20_000)
    torch.manual_seed(0)
    options = dict(accountant=PrivacyAccountant(2.0), noise=Noise(source=0)) if private else {}
    posterior = fitted(GaussianMixture(3, 2, radius=6.0), data, 40, **options).posterior()
    order = posterior["means"].mean[:, 0].argsort()
    tolerance = 0.3 if private else 0.02
    means, precisions = posterior["means"].mean[order], posterior["precisions"].mean[order]
    torch.testing.assert_close(means, MEANS, rtol=0.0, atol=tolerance)
    weights = torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(posterior["weights"].mean[order], weights, rtol=0.0, atol=0.03)
    if not private:
        torch.testing.assert_close(precisions.rsqrt(), SDS, rtol=0.0, atol=0.03)


def test_the_mixture_starts_where_it_is_told():
    start = MEANS.flip(0) + 0.5
    model = GaussianMixture(3, 2, radius=6.0, start=start)
    found = model.posterior(model.initial_statistics(1000), dict.fromkeys(model.statistics, 0.0), 1)
    torch.testing.assert_close(found.mean, start, rtol=1e-3, atol=1e-3)


def test_the_mixture_s_pyro_model():
    (x,) = mixture_data(size=20)
    model = GaussianMixture(
        2, 2, radius=6.0, concentration=2.0, mean_precision=0.05, shape=1.5, rate=0.4
    )
    values = {
        "weights": torch.tensor([0.3, 0.7]),
        "means": torch.tensor([[0.0, 1.0], [2.0, -1.0]]),
        "precisions": torch.tensor([[0.5, 1.0], [2.0, 0.3]]),
        "assignment": torch.arange(20) % 2,
    }
    sd = (0.05 * values["precisions"]).rsqrt()
    z = values["assignment"]
    expected = (
        dist.Dirichlet(torch.tensor([2.0, 2.0])).log_prob(values["weights"])
        + dist.Gamma(1.5, 0.4).log_prob(values["precisions"]).sum()
        + dist.Normal(0.0, sd).log_prob(values["means"]).sum()
        + values["weights"][z].log().sum()
        + dist.Normal(values["means"][z], values["precisions"][z].rsqrt()).log_prob(x).sum()
    )
    torch.testing.assert_close(log_density(model.model, values, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_posterior_and_guide_are_of_the_model_s_sites(name):
    """Same names and shapes as in the Pyro model; the guide's marginals are the posterior's."""
    make, data = ALL[name]
    model, data = make(), data()
    vips = fitted(model, data, 1)
    sites = poutine.trace(model.model).get_trace(*data)
    latent = {
        key: site["value"].shape
        for key, site in sites.nodes.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and key not in ("data", "assignment", "topic_weights", "hidden")
    }
    posterior = vips.posterior()
    assert {key: q.shape() for key, q in posterior.items()} == latent
    samples = Predictive(vips.guide, num_samples=3000)(*data)
    for key, q in posterior.items():
        values = samples[key].reshape(3000, -1)
        sd = q.variance.reshape(-1).sqrt()
        error = (values.mean(0) - q.mean.reshape(-1)) / sd * math.sqrt(3000)
        assert error.abs().max() < 6
        if name not in ("mixture", "images"):  # which have coordinates with heavy tails
            assert ((values.std(0) / sd - 1).abs() < 0.2).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_predictive(name, dtype):
    """New labels for new rows, in the precision of the data."""
    make, data = ALL[name]
    model, data = make(), [x.to(dtype) for x in data()]
    vips = fitted(model, data, 1)
    new = data[0][:7]
    function = poutine.uncondition(model.model) if name in ("documents", "images") else model.model
    samples = Predictive(function, guide=vips.guide, num_samples=20)(new)
    drawn = samples[DRAWN.get(name, "y")]
    assert drawn.shape == (20, *(new.shape if name in ("documents", "images") else (7,)))
    if name == "documents":
        assert (drawn.sum(-1) == 20).all()  # the fixed length
    other = 1 - new if name == "images" else new + 1 if name == "documents" else 0.9 * new
    mine = vips.predictive(20)(other)
    assert mine[DRAWN.get(name, "y")].shape == drawn.shape
    assert set(vips.posterior()) <= mine.keys()


@pytest.mark.parametrize("name", PROBLEMS)
def test_other_precisions_of_the_data_change_little(name):
    make, data = PROBLEMS[name]
    torch.manual_seed(0)
    exact = fitted(make(), data(), 1).posterior()
    torch.manual_seed(0)
    rounded = fitted(make(), [x.float() for x in data()], 1).posterior()
    for key, q in exact.items():
        assert rounded[key].mean.dtype == torch.float64
        torch.testing.assert_close(rounded[key].mean, q.mean, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "documents", "images"])
def test_whole_numbers_may_be_of_any_type(name):
    """Also of types without a ``round`` of their own."""
    make, data = ALL[name]
    *x, whole = data()
    found = []
    for dtype in (torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool):
        torch.manual_seed(0)
        vips = fitted(make(), (*x, (whole > 0).to(dtype)), 2)
        found.append(vips.state_dict()["statistics"]["values"])
    for statistic, value in found[0].items():
        assert all(torch.equal(each[statistic], value) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_dpsvi_and_dpsep_run_on_the_same_model(name):
    make, data = PROBLEMS[name]
    model, data = make(), data()
    function = poutine.block(model.model, hide=["assignment"])
    loss = TraceEnum_ELBO(max_plate_nesting=1) if name == "mixture" else Trace_ELBO()
    guides = AutoNormal(function), AutoMultivariateNormal(function)
    own = [dict(accountant=PrivacyAccountant(), noise=1.0) for _ in guides]
    optim = pyro.optim.Adam({"lr": 0.01})
    PaperDPSVI(model.model, guides[0], optim, loss, sampling=0.5, **own[0]).step(*data)
    DPSEP(model.model, guides[1], **own[1]).step(*data)
    sites = fitted(model, data, 1).posterior().keys()
    assert all(guide.median().keys() == sites for guide in guides)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [1.0, 100.0, 1e6])
@pytest.mark.parametrize("name", [*PROBLEMS, "documents"])
def test_nothing_explodes_under_noise(name, sigma):
    """However small epsilon is, means stay within what the prior and the bounds allow."""
    make, data = ALL[name]
    model, data = make(), data()
    for seed in range(5):
        for rate, steps in ((1.0, 1), (0.5, 5)):
            options = dict(noise=Noise(sigma, source=seed), sampling=rate)
            vips = fitted(model, data, steps, **options)
            for site, q in vips.posterior().items():
                assert torch.isfinite(q.mean).all()
                assert site == "means" or (q.variance > 0).all()
            assert vips._found.posterior.mean.norm() < 20.0  # and finite
            vips.guide(*data)


def test_second_moments_are_never_made_row_by_row():
    """Norms and weighted sums of outer products."""
    rows, own = torch.randn(9, 4), torch.rand(9)
    matrices = own[:, None, None] * rows[:, :, None] * rows[:, None, :]
    squares = WeightedSquares(rows, own)
    norms = torch.linalg.matrix_norm(matrices)
    torch.testing.assert_close(squares.norms(), norms.unsqueeze(1))
    weights = torch.rand(9, 1)
    weights[3], rows[3] = 0.0, math.nan
    total = stacked((weights[:, :, None].nan_to_num() * matrices).sum(0))
    torch.testing.assert_close(squares.weighted_sum(weights), total)
    assert (WeightedSquares(torch.ones(2, 3), -torch.ones(2)).norms() == 3.0).all()
    huge = WeightedSquares(torch.full((2, 3), 1e200), torch.tensor([1e200, 1.0]))
    assert (huge.weighted_sum(torch.zeros(2, 1)) == 0.0).all()


def test_eigenvalues_below_the_noise_are_not_taken_for_information():
    matrix = torch.diag(torch.tensor([-3.0, 1.0, 50.0]))
    moment = NoisySecondMoment.of(stacked(matrix), 3, noise=2.0)
    torch.testing.assert_close(moment.known, torch.tensor([0.0, 1.0, 50.0]))
    radius = 2.0 * math.sqrt(6.0)
    torch.testing.assert_close(moment.stepping, torch.tensor([radius, radius, 50.0]))
    exact = NoisySecondMoment.of(stacked(matrix), 3, noise=0.0)
    assert torch.equal(exact.known, exact.stepping)


def test_half_of_the_variance_decides_what_is_hidden():
    turn = math.pi / 8
    directions = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    moment = NoisySecondMoment(torch.tensor([0.0, 1.0]), directions, radius=0.5)
    assert moment.hides(torch.tensor(1e6)).tolist() == [True, False]
    assert moment.hides(torch.tensor(0.01)).tolist() == [True, True]
    assert not replace(moment, radius=0.0).hides(torch.tensor(0.01)).any()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LogisticRegression(0), "dim"),
        (lambda: LogisticRegression(3, concentration=0.0), "concentration"),
        (lambda: LogisticRegression(3, rate=math.inf), "rate"),
        (lambda: LinearRegression(3, x_bound=0.0, y_bound=1.0), "x_bound"),
        (lambda: LinearRegression(3, x_bound=1.0, y_bound=math.nan), "y_bound"),
        (lambda: LinearRegression(3, x_bound=1.0, y_bound=1.0, weight_precision=-1), "weight"),
        (lambda: GaussianMixture(0, 2, radius=1.0), "components"),
        (lambda: GaussianMixture(2, 2.5, radius=1.0), "dim"),
        (lambda: GaussianMixture(2, 2, radius=-1.0), "radius"),
        (lambda: GaussianMixture(2, 2, radius=1.0, rate=0.0), "rate"),
        (lambda: GaussianMixture(2, 2, radius=1.0, start=torch.zeros(2)), "start"),
        (lambda: GaussianMixture(1, 1, radius=1.0, start=torch.tensor([[math.nan]])), "start"),
        (lambda: LatentDirichletAllocation(0, 5), "topics"),
        (lambda: LatentDirichletAllocation(3, -1), "words"),
        (lambda: LatentDirichletAllocation(3, 5, length=math.inf), "length"),
        (lambda: LatentDirichletAllocation(3, 5, length=10.0, clip=1.1), "clip"),
        (lambda: LatentDirichletAllocation(3, 5, clip=0.5), "length"),
        (lambda: LatentDirichletAllocation(3, 5, alpha=0.0), "alpha"),
        (lambda: LatentDirichletAllocation(3, 5, eta=math.nan), "eta"),
        (lambda: LatentDirichletAllocation(3, 5, iterations=0), "iterations"),
        (lambda: SigmoidBeliefNetwork(0, 3), "pixels"),
        (lambda: SigmoidBeliefNetwork(9, 1.5), "units"),
        (lambda: SigmoidBeliefNetwork(9, 3, a=0.0), "a must"),
        (lambda: SigmoidBeliefNetwork(9, 3, b=math.inf), "b must"),
        (lambda: SigmoidBeliefNetwork(9, 3, bias_scale=-1.0), "bias_scale"),
        (lambda: SigmoidBeliefNetwork(9, 3, sweeps=0), "sweeps"),
    ],
)
def test_bad_model_settings(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()
