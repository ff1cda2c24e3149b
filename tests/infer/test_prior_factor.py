"""The prior as a Gaussian factor."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_value
from seeded import records_of
from torch.distributions import MultivariateNormal

from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.prior_factor import combined, model_prior
from pyro_dp.utils.linalg import Gaussian, dense

DRAWS = 64  # as in the module


def prior_of(latents, guide=AutoMultivariateNormal, y=None):
    """The prior of a model with these latents, a callable that samples them and returns a mean."""
    y = torch.randn(6) if y is None else y

    def model(y):
        mean = latents()
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])

    pyro.clear_param_store()
    records = records_of(model, y)
    return EPProblem.build(model, guide(model), records, "auto", None).prior


def posterior(size, scale=0.5):
    root = 0.3 * torch.randn(size, size).tril(-1) + torch.eye(size)
    return torch.randn(size), scale**2 * root @ root.T


def close(factor, expected, tolerance=1e-8):
    for name in ("eta", "precision"):
        torch.testing.assert_close(
            getattr(factor, name), getattr(expected, name), rtol=tolerance, atol=tolerance
        )


def independent():
    a = pyro.sample("a", dist.Normal(1.0, 2.0))
    return a + pyro.sample("b", dist.Normal(-1.0, 0.1))


def event():
    scale = torch.tensor([0.5, 1.0, 3.0])
    return pyro.sample("w", dist.Normal(torch.arange(3.0), scale).to_event(1)).sum()


def in_a_plate():
    with pyro.plate("parts", 3):
        return pyro.sample("w", dist.Normal(torch.arange(3.0), 0.5)).sum()


def multivariate():
    covariance = torch.tensor([[2.0, 0.8], [0.8, 1.0]])
    return pyro.sample("w", dist.MultivariateNormal(torch.tensor([1.0, -2.0]), covariance)).sum()


def hierarchical_mean():
    mu = pyro.sample("mu", dist.Normal(0.5, 2.0))
    return pyro.sample("w", dist.Normal(mu, 1.0))


def log_normal():
    """Gaussian where the guide is."""
    return pyro.sample("s", dist.LogNormal(0.3, 0.5))


def moments(mean, covariance):
    return torch.tensor(mean), torch.tensor(covariance)


GAUSSIAN = {
    independent: lambda: (torch.tensor([1.0, -1.0]), torch.tensor([4.0, 0.01]).diag()),
    event: lambda: (torch.arange(3.0), torch.tensor([0.25, 1.0, 9.0]).diag()),
    in_a_plate: lambda: (torch.arange(3.0), 0.25 * torch.eye(3)),
    multivariate: lambda: moments([1.0, -2.0], [[2.0, 0.8], [0.8, 1.0]]),
    hierarchical_mean: lambda: moments([0.5, 0.5], [[4.0, 4.0], [4.0, 5.0]]),
    log_normal: lambda: moments([0.3], [[0.25]]),
}


@pytest.mark.parametrize("latents", GAUSSIAN, ids=lambda latents: latents.__name__)
def test_a_gaussian_prior_is_exact(latents):
    """The factor is exact wherever the posterior is."""
    prior, expected = prior_of(latents), Gaussian.from_moments(*GAUSSIAN[latents]())
    for scale in (1e-3, 1.0, 30.0):
        close(prior.factor(*posterior(len(expected.eta), scale)), expected)


@pytest.mark.parametrize("latents", [independent, event, log_normal])
def test_an_independent_prior_is_exact_as_a_diagonal(latents):
    mean, covariance = GAUSSIAN[latents]()
    expected = Gaussian.from_moments(mean, covariance.diagonal())
    found = prior_of(latents, AutoNormal).factor(*posterior_diagonal(len(mean)))
    close(found, expected)


def posterior_diagonal(size):
    mean, covariance = posterior(size)
    return mean, covariance.diagonal()


def gamma():
    return pyro.sample("s", dist.Gamma(2.0, 3.0))


def half_cauchy():
    return pyro.sample("s", dist.HalfCauchy(1.0))


def weights():
    return pyro.sample("p", dist.Dirichlet(torch.tensor([2.0, 1.0, 4.0])))[0]


def horseshoe():
    """Not log-concave, jointly."""
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    return pyro.sample("w", dist.Normal(0.0, scale))


def transformed_density(name, z):
    """Log density in unconstrained space, written down anew. z: (K, d)."""
    if name == "gamma":
        return 2 * z[:, 0] - 3 * z[:, 0].exp()
    if name == "half_cauchy":
        return z[:, 0] - torch.log1p((2 * z[:, 0]).exp())
    if name == "weights":
        transform = torch.distributions.StickBreakingTransform()
        p = transform(z)
        density = dist.Dirichlet(torch.tensor([2.0, 1.0, 4.0])).log_prob(p)
        return density + transform.log_abs_det_jacobian(z, p)
    scale = z[:, 0].exp()
    return transformed_density("half_cauchy", z) + dist.Normal(0.0, scale).log_prob(z[:, 1])


def derivatives(name, z):
    """Gradients (K, d) and Hessians (K, d, d)."""

    def density(one):
        return transformed_density(name, one[None])[0]

    gradients = torch.vmap(torch.func.jacrev(density))(z)
    return gradients, torch.vmap(torch.func.jacrev(torch.func.jacrev(density)))(z)


OTHERS = {gamma: 1, half_cauchy: 1, weights: 2, horseshoe: 2}


@pytest.mark.parametrize("latents", OTHERS, ids=lambda latents: latents.__name__)
def test_in_a_tight_posterior_it_has_gradient_and_hessian(latents):
    size = OTHERS[latents]
    prior, (mean, covariance) = prior_of(latents), posterior(size, 1e-5)
    mean[0] = 0.3  # all are log-concave there
    mean[1:] *= 0.1
    found = prior.factor(mean, covariance)
    gradient, hessian = (each[0] for each in derivatives(latents.__name__, mean[None]))
    expected = Gaussian(gradient - hessian @ mean, -hessian)
    assert torch.linalg.eigvalsh(expected.precision).min() > 1e-3
    close(found, expected, 1e-3)


@pytest.mark.long
@pytest.mark.parametrize("latents", OTHERS, ids=lambda latents: latents.__name__)
def test_in_a_wide_posterior_it_has_their_averages(latents):
    """Within the error of its few draws."""
    size = OTHERS[latents]
    mean, covariance = posterior(size, 0.3)
    mean[0], mean[1:] = 0.3, 0.1 * mean[1:]
    found = prior_of(latents).factor(mean, covariance)
    z = MultivariateNormal(mean, covariance).sample((4000,))
    gradients, hessians = derivatives(latents.__name__, z)
    assert torch.linalg.eigvalsh(-hessians.mean(0)).min() > 1e-3  # no floor
    error = 5 * hessians.std(0) / DRAWS**0.5
    assert ((found.precision + hessians.mean(0)).abs() <= error + 1e-6).all()
    slope = found.eta - found.precision @ mean  # E_q[grad], at the mean
    error = 5 * gradients.std(0) / DRAWS**0.5
    assert ((slope - gradients.mean(0)).abs() <= error + 1e-6).all()


@pytest.mark.long
@pytest.mark.parametrize("latents", OTHERS, ids=lambda latents: latents.__name__)
def test_a_diagonal_factor_has_the_diagonal(latents):
    prior, (mean, variances) = prior_of(latents, AutoNormal), posterior_diagonal(OTHERS[latents])
    found, full = prior.factor(mean, variances), prior.factor(mean, variances.diag())
    assert found.precision.shape == mean.shape
    slopes = [f.eta - dense(f.precision) @ mean for f in (found, full)]
    torch.testing.assert_close(*slopes)
    hessian = -sum(derivatives(latents.__name__, mean + prior._draws * variances.sqrt())[1])
    expected = (hessian.diagonal() / DRAWS).clamp(min=1e-4)
    torch.testing.assert_close(found.precision, expected)


@pytest.mark.long
def test_the_factor_is_proper_where_the_prior_is_not_log_concave():
    prior = prior_of(horseshoe)
    mean, covariance = torch.tensor([-2.0, 3.0]), 0.1 * torch.eye(2)
    _, hessians = derivatives("horseshoe", mean[None])
    assert torch.linalg.eigvalsh(-hessians[0]).min() < 0
    assert torch.linalg.eigvalsh(prior.factor(mean, covariance).precision).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("latents", [*GAUSSIAN, *OTHERS], ids=lambda latents: latents.__name__)
def test_it_does_not_depend_on_the_data(latents):
    """The factor is bitwise the same for other data."""
    factors, q = [], None
    for y in (torch.randn(6), 1e6 * torch.ones(6)):
        pyro.set_rng_seed(0)
        prior = prior_of(latents, y=y)
        q = q or posterior(len(prior._centre))
        factors.append(prior.factor(*q))
    one, other = factors
    assert torch.equal(one.eta, other.eta) and torch.equal(one.precision, other.precision)


def test_a_prior_that_reads_the_data_is_shown_placeholders():
    """The checks refuse such a model; should they not, its prior still holds no data."""

    def model(y):
        w = pyro.sample("w", dist.Normal(y.sum(), 1.0))
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Normal(w, 1.0), obs=y[idx])

    factors = []
    for y in (torch.randn(6), 1e6 * torch.ones(6)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        records = records_of(model, y)
        guide = AutoNormal(model, init_loc_fn=init_to_value(values={"w": torch.zeros(())}))
        guide(*records.arguments(records.placeholder())[0])
        gaussian = GaussianGuide(model, guide, records)
        prior = model_prior(
            model, gaussian.latents, gaussian.read()[0], records, {"w": torch.float64}
        )
        factors.append(prior.factor(torch.zeros(1), torch.ones(1, 1)))
    assert torch.equal(factors[0].eta, factors[1].eta)


def vague():
    return pyro.sample("w", dist.Normal(5000.0, 1000.0))


def test_a_vague_gaussian_prior_is_exact():
    """The floor applies only to priors that are not log-concave."""
    expected = Gaussian.from_moments(*moments([5000.0], [[1e6]]))
    close(prior_of(vague).factor(*posterior(1)), expected)


@pytest.mark.parametrize("latents", [multivariate, hierarchical_mean])
def test_a_correlated_prior_as_a_diagonal_moves_with_the_posterior(latents):
    """Its slope at the posterior's mean is the prior's there: not that at the first posterior."""
    prior, (mean, variances) = prior_of(latents, AutoNormal), posterior_diagonal(2)
    found, exact = prior.factor(mean, variances), Gaussian.from_moments(*GAUSSIAN[latents]())
    torch.testing.assert_close(found.precision, exact.precision.diagonal())
    slope = exact.eta - exact.precision @ mean
    torch.testing.assert_close(found.eta - found.precision * mean, slope)


def hierarchy_of_effects():
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    return pyro.sample("effects", dist.Normal(0.0, scale).expand([4]).to_event(1)).sum()


@pytest.mark.parametrize("latents", [hierarchical_mean, hierarchy_of_effects])
def test_prior_times_evidence_is_a_fixed_point(latents):
    """Another round changes nothing, from another start as well."""
    prior = prior_of(latents)
    dim = len(prior._centre)
    precision = torch.diag(torch.tensor([0.0, *(4.0 for _ in range(dim - 1))]).double())
    likelihood = Gaussian(precision @ torch.linspace(0.5, 1.5, dim).double(), precision)
    found = []
    for start in (torch.zeros(dim).double(), torch.full((dim,), 0.5).double()):
        before = prior.factor(start, 0.1 * torch.eye(dim).double())
        factor, q = combined(prior, lambda _: likelihood, start, before)
        again = prior.factor(q.mean, q.covariance) * likelihood
        torch.testing.assert_close(again.mean, q.mean, rtol=0.0, atol=1e-3)
        torch.testing.assert_close(again.covariance, q.covariance, rtol=0.01, atol=1e-3)
        torch.testing.assert_close((factor * likelihood).mean, q.mean)
        found.append(q.mean)
    torch.testing.assert_close(*found, rtol=0.0, atol=0.01)


def many_effects():
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    return pyro.sample("effects", dist.Normal(0.0, scale).expand([20]).to_event(1)).sum()


@pytest.mark.long
def test_a_scale_that_starts_uncertain_is_not_lost():
    """Its draws are so far apart that the effects' precision is 10^5 times what it will be."""
    prior, start = prior_of(many_effects), torch.zeros(21).double()
    precision = torch.diag(torch.tensor([0.0] + [25.0] * 20).double())
    peak = torch.cat([torch.zeros(1), torch.linspace(-1.0, 1.0, 20)]).double()
    likelihood = Gaussian(precision @ peak, precision)
    known = prior.factor(start, 0.1 * torch.eye(21).double())
    uncertain = Gaussian(known.eta, known.precision.diagonal().clone().diag())
    uncertain.precision[0, 0] = 0.05
    one, other = (
        combined(prior, lambda _: likelihood, start, before)[1] for before in (known, uncertain)
    )
    torch.testing.assert_close(one.mean, other.mean, rtol=0.0, atol=0.02)
    assert other.mean.abs().max() < 2.0
