"""Evidence: files, its likelihood, other priors, products."""

import functools
import json
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import linear, logistic
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from seeded import seeded
from torch.distributions import MultivariateNormal, biject_to, constraints

from pyro_dp import DPSEP, ConfigurationError, ModelError, PrivacyAccountant
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.evidence_parts import Cost, Part
from pyro_dp.infer.posterior.looks import Look
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.records.global_draw import Latent

DIM = 3


def prior():
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([DIM]).to_event(1))


def regression(size=1500, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, DIM, generator=rng)
    noise = torch.randn(size, generator=rng)
    return x, x @ torch.linspace(-1.0, 1.0, DIM) + 0.5 * noise


def run(model=linear, data=None, epsilon=3.0, guide=AutoMultivariateNormal, noise=None):
    own = {"epsilon": epsilon if noise is None else None, "noise": noise}
    return seeded(DPSEP, model, guide, *(data or regression()), **own)


def exact(x, y):
    precision = x.T @ x / 0.25 + torch.eye(DIM)
    return torch.linalg.solve(precision, x.T @ y / 0.25), torch.linalg.inv(precision)


@functools.cache
def of_one_run():
    return run().evidence


@pytest.fixture
def evidence():
    return of_one_run()


def test_there_is_none_before_the_first_look():
    sep = DPSEP(logistic, AutoNormal(logistic), accountant=PrivacyAccountant(1.0))
    with pytest.raises(ConfigurationError):
        _ = sep.evidence


# Files.


def numbers(evidence):
    z = torch.linspace(-0.3, 0.4, DIM)
    posterior = evidence.posterior(prior)
    found = [posterior.mean, posterior.covariance_matrix, evidence.log_likelihood({"w": z})]
    return [each.tolist() for each in found] + [evidence.mu]


@pytest.mark.long
def test_a_file_has_all_to_the_digit(evidence, tmp_path):
    path = tmp_path / "evidence.json"
    evidence.save(path)
    again = Evidence.load(path)
    assert numbers(again) == numbers(evidence) and repr(again) == repr(evidence)
    assert again.parts[0].cost == evidence.parts[0].cost and again.disjoint == evidence.disjoint


def test_the_status_of_the_run_stays_with_the_evidence(evidence, tmp_path):
    """A posterior from a run that must not be published is not ok."""
    doubted = Status("do not publish", "the data said little", "privacy noise")
    parts = tuple(replace(part, status=doubted) for part in evidence.parts)
    worse = replace(evidence, parts=parts + evidence.parts)
    worse.save(tmp_path / "evidence.json")
    again = Evidence.load(tmp_path / "evidence.json")
    assert again.status == again.posterior(prior).status == doubted
    assert "do not publish" in repr(again) and evidence.status.is_ok


@pytest.mark.long
def test_a_model_of_the_data_is_no_prior(evidence):
    def model(x, *others, y=None):
        raise AssertionError("not called")

    with pytest.raises(ModelError, match="the model takes x, but the prior has no arguments"):
        evidence.posterior(model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: "[]",
        lambda text: '{"format": "another"}',
        lambda text: text.replace('"version": 1', '"version": 99'),
        lambda text: text.replace('"records": 1500', '"records": -1'),
        lambda text: text.replace('"score"', '"scope"'),
        lambda text: text.replace('"name": "w"', '"nome": "w"'),
        lambda text: _changed(text, "geometry", [[1.0]]),
        lambda text: _changed(text, "point", [float("nan")] * DIM),
        lambda text: _changed(text, "curvature", "no numbers"),
        lambda text: json.dumps(json.loads(text) | {"parts": [{}]}),
    ],
)
def test_a_damaged_file_is_refused(evidence, tmp_path, damage):
    path = tmp_path / "evidence.json"
    evidence.save(path)
    before = path.read_text()
    path.write_text(damage(before))
    assert path.read_text() != before
    with pytest.raises(ConfigurationError):
        Evidence.load(path)


def _changed(text, name, value):
    saved = json.loads(text)
    saved["parts"][0]["looks"][0][name] = value
    return json.dumps(saved)


# The likelihood.


def test_the_likelihood_is_that_of_a_noisy_estimate(evidence):
    """N(estimate; z, K^-1 (K + V(z)) K^-1), up to one constant."""
    (part,) = evidence.parts
    found = part.pooled
    inverse, differences = torch.linalg.inv(found.curvature), []
    for scale in (0.0, 0.1, 1.0, 10.0, 1000.0):
        z = found.estimate + scale * torch.tensor([1.0, -2.0, 0.5])
        covariance = inverse @ (found.curvature + found.noise(z)) @ inverse
        normal = MultivariateNormal(z, (covariance + covariance.T) / 2)
        differences.append(evidence.log_likelihood({"w": z}) - normal.log_prob(found.estimate))
    differences = torch.stack(differences)
    torch.testing.assert_close(differences, differences[:1].expand(5), rtol=1e-8, atol=1e-8)


def test_the_likelihood_has_a_gradient_everywhere(evidence):
    for scale in (0.0, 1.0, 1e6):
        z = (scale * torch.ones(DIM)).requires_grad_()
        (slope,) = torch.autograd.grad(evidence.log_likelihood({"w": z}), z)
        assert slope.isfinite().all()
    assert torch.autograd.gradcheck(
        lambda z: evidence.log_likelihood({"w": z}), torch.zeros(DIM, requires_grad=True)
    )


def test_values_that_do_not_fit(evidence):
    with pytest.raises(ModelError, match="no 'w'"):
        evidence.log_likelihood({"v": torch.zeros(DIM)})
    with pytest.raises(ModelError, match="'w' has shape"):
        evidence.log_likelihood({"w": torch.zeros(DIM + 1)})


# Priors.


@pytest.mark.slow
def test_with_the_run_s_own_prior_it_is_the_run_s_posterior():
    for sep in (run(), run(noise=0.0)):
        found, own = sep.evidence.posterior(prior), sep.posterior()
        assert ((found.mean - own.mean).abs() < 0.1 * own.stddev).all()
        torch.testing.assert_close(found.stddev, own.stddev, rtol=0.1, atol=0.0)


@pytest.mark.slow
def test_without_noise_it_is_conjugate():
    """With the prior of the run, and with another one."""
    x, y = regression()
    evidence = run(noise=0.0).evidence
    mean, covariance = exact(x, y)
    found = evidence.posterior(prior)
    torch.testing.assert_close(found.mean, mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=1e-5, atol=1e-9)

    def certain():
        pyro.sample("w", dist.Normal(2.0, 0.01).expand([DIM]).to_event(1))

    precision = x.T @ x / 0.25 + 1e4 * torch.eye(DIM)
    found = evidence.posterior(certain)
    expected = torch.linalg.solve(precision, x.T @ y / 0.25 + 2e4)
    torch.testing.assert_close(found.mean, expected, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(
        found.covariance_matrix, torch.linalg.inv(precision), rtol=1e-5, atol=1e-9
    )


def wide():
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([8]).to_event(1))


def far_from_the_prior():
    """Evidence at 3, a hundred standard deviations from where each search starts."""
    estimate = torch.full((8,), 3.0, dtype=torch.float64)
    matrix = 1e4 * torch.eye(8, dtype=torch.float64)
    look = Look(estimate, torch.zeros_like(estimate), matrix, matrix, 1.0, curvature_sd=0.1)
    real = biject_to(constraints.independent(constraints.real, 1))
    part = Part(1000, (look,), 0.0, 0.0, Cost(1.0, "add_or_remove_one"))
    return Evidence((Latent("w", torch.Size([8]), real, 0, 8),), (part,))


@pytest.mark.slow
def test_far_evidence_is_found():
    """Noise of the curvature flattens the likelihood far away."""
    evidence = far_from_the_prior()
    expected = evidence.posterior(wide).mean
    assert (expected > 2.9).all()
    found = evidence.posterior(wide, "chains").mean
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.slow
def test_nuts_and_a_guide_find_far_evidence():
    """Means lie within six standard errors of those draws."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    evidence = far_from_the_prior()
    expected = evidence.posterior(wide)
    drawn = evidence.posterior(wide, "nuts", num_samples=20, warmup_steps=20)["w"]
    assert drawn.shape == (20, 8)
    assert ((drawn.mean(0) - expected.mean).abs() < 1.4 * expected.stddev).all()
    guide = AutoNormal(wide)
    assert evidence.posterior(wide, guide, num_steps=301, lr=0.04) is guide
    assert ((guide.median()["w"] - expected.mean).abs() < 1.4 * expected.stddev).all()


def test_what_is_no_prior_or_method(evidence):
    def other():
        pyro.sample("w", dist.Gamma(1.0, 1.0).expand([DIM]).to_event(1))

    def observed():
        pyro.sample("y", dist.Normal(prior().sum(), 1.0), obs=torch.tensor(0.0))

    for model in (other, observed, lambda: pyro.sample("v", dist.Normal(0.0, 1.0)), lambda: None):
        with pytest.raises(ModelError):
            evidence.posterior(model)
    with pytest.raises(ConfigurationError, match="method must be"):
        evidence.posterior(prior, "laplace")


# Products.


@pytest.mark.every_commit
@pytest.mark.slow
def test_products_cost_what_the_people_in_them_pay(evidence):
    other = run(data=regression(seed=1), epsilon=1.0).evidence
    apart, overlapping = (evidence.times(other, disjoint=each) for each in (True, False))
    assert other.mu < evidence.mu == apart.mu
    assert overlapping.mu == pytest.approx((evidence.mu**2 + other.mu**2) ** 0.5)
    assert apart.size == 3000
    # Once some people may be in both, no product forgets it.
    third = run(data=regression(seed=2), epsilon=1.0).evidence
    assert overlapping.times(third, disjoint=True).mu > overlapping.mu


@pytest.mark.every_commit
@pytest.mark.slow
def test_mu_is_that_of_the_relation():
    """Sums over all records move twice as far where a record is replaced."""
    found = {}
    for relation in ("add_or_remove_one", "replace_one"):
        accountant = PrivacyAccountant(1.0, neighboring=relation)
        sep = seeded(DPSEP, linear, AutoNormal, *regression(), accountant=accountant)
        found[relation] = sep.evidence
    one, two = found.values()
    assert one.mu == pytest.approx(two.mu, rel=1e-3)  # at the same epsilon
    with pytest.raises(ConfigurationError, match="relation"):
        one.times(two, disjoint=True)


@pytest.mark.every_commit
@pytest.mark.long
def test_products_that_are_refused(evidence, tmp_path):
    with pytest.raises(ConfigurationError, match="a run that is in this evidence"):
        evidence.times(evidence, disjoint=True)
    evidence.save(tmp_path / "one")
    with pytest.raises(ConfigurationError, match="a run that is in this evidence"):
        evidence.times(Evidence.load(tmp_path / "one"), disjoint=False)
    x, y = regression(seed=1)
    with pytest.raises(ConfigurationError, match="other sites"):
        evidence.times(run(data=(x[:, :2], y)).evidence, disjoint=True)
    with pytest.raises(ConfigurationError, match="disjoint"):
        evidence.times(evidence, disjoint="yes")
