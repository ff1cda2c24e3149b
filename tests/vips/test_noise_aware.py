"""VIPS's posterior with the noise's uncertainty: against simulation, and where it is marked."""

import math
from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from vips_problems import PROBLEMS, fitted, linear_data, logistic_data

from pyro_dp import VIPS, FullBatch, Noise, PrivacyAccountant
from pyro_dp.utils.linalg import clipped_rows
from pyro_dp.vips import LinearRegression, LogisticRegression, site_posterior
from pyro_dp.vips.e_step import MixedStatistics
from pyro_dp.vips.models.polya_gamma import logit_information, polya_gamma_mean
from pyro_dp.vips.noise_response import NoiseResponse


def noisy(model, data, **options):
    settings = dict(accountant=PrivacyAccountant(), num_steps=10, noise=Noise(1.0, source=0))
    vips = VIPS(model, **settings | options)
    vips.run(*data, progress=False)
    return vips


# Families


def spd(size):
    root = torch.randn(size, size)
    return root @ root.T + torch.eye(size)


def marginals():
    torch.manual_seed(0)
    df = torch.tensor(7.0)
    return {
        "normal": dist.Normal(torch.randn(2, 3), torch.rand(2, 3) + 0.1).to_event(2),
        "normals": dist.MultivariateNormal(torch.randn(2, 3), spd(3)).to_event(1),
        "student": dist.StudentT(df, torch.randn(4), torch.rand(4) + 0.1).to_event(1),
        "students": dist.MultivariateStudentT(df, torch.randn(3), torch.linalg.cholesky(spd(3))),
        "gamma": dist.Gamma(3 + torch.rand(4), 1 + torch.rand(4)).to_event(1),
        "dirichlet": dist.Dirichlet(1 + 5 * torch.rand(2, 4)).to_event(1),
        "scalar": dist.Gamma(torch.tensor(3.0), torch.tensor(2.0)),
    }


FAMILIES = tuple(marginals())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wider_one_has_the_same_centre_and_more_variance(name):
    marginal = marginals()[name]
    root = 0.1 * torch.rand(*marginal.mean.shape, 5)
    wider = site_posterior.widened(marginal, root)
    assert type(wider) is type(marginal)
    assert wider.batch_shape == marginal.batch_shape and wider.event_shape == marginal.event_shape
    torch.testing.assert_close(wider.mean, marginal.mean)
    noise = root.square().sum(dim=-1)
    if "student" in name:  # its scale is widened
        noise = noise * 7 / 5
    added = wider.variance - marginal.variance
    if name == "dirichlet":
        noise, added = noise.sum(dim=-1), added.sum(dim=-1)
    torch.testing.assert_close(added, noise)
    if name in ("normals", "students"):
        factor = 7 / 5 if name == "students" else 1.0
        covariance = site_posterior.covariance(wider) - site_posterior.covariance(marginal)
        blocks = factor * (root @ root.mT).reshape(-1, 3, 3)
        torch.testing.assert_close(covariance, torch.block_diag(*blocks))


@pytest.mark.parametrize("name", FAMILIES)
def test_covariances_and_quantiles_are_those_of_draws(name):
    marginal = marginals()[name]
    draws = marginal.sample((100_000,))
    covariance = torch.cov(draws.reshape(len(draws), -1).T).reshape_as(
        site_posterior.covariance(marginal)
    )
    size = site_posterior.covariance(marginal).diagonal().max().item()
    torch.testing.assert_close(
        covariance, site_posterior.covariance(marginal), rtol=0.1, atol=0.05 * size
    )
    at = torch.tensor([0.1, 0.5, 0.9])
    for p, ends in zip(at, site_posterior.quantiles(marginal, at), strict=True):
        share = (draws < ends).double().mean(dim=0)
        torch.testing.assert_close(share, p.expand_as(share), rtol=0.0, atol=0.01)


def test_a_dirichlet_can_only_get_so_flat():
    marginal = dist.Dirichlet(torch.tensor([5.0, 10.0]))
    wider = site_posterior.widened(marginal, 100 * torch.ones(2, 1))
    torch.testing.assert_close(wider.concentration.sum(), torch.tensor(1.0))
    small = dist.Dirichlet(torch.tensor([0.1, 0.2]))
    wider = site_posterior.widened(small, 100 * torch.ones(2, 1))
    torch.testing.assert_close(wider.concentration, small.concentration)


def test_another_family_stays_as_it_is():
    marginal = dist.Beta(torch.tensor(2.0), torch.tensor(3.0))
    assert site_posterior.centre(marginal) is None
    assert site_posterior.widened(marginal, torch.ones(1)) is marginal
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ends = site_posterior.quantiles(marginal, torch.tensor([0.25, 0.75]))
    assert torch.equal(torch.get_rng_state(), state)
    share = (marginal.sample((50_000,)).unsqueeze(1) < ends).double().mean(dim=0)
    torch.testing.assert_close(share, torch.tensor([0.25, 0.75]), rtol=0.0, atol=0.02)


# The information of a logistic regression


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0, 20.0])
def test_the_information_is_that_of_gaussian_rows(scale):
    torch.manual_seed(1)
    size = 100_000
    x = 0.2 * torch.randn(size, 3) @ torch.diag(torch.tensor([1.0, 0.5, 0.8]))
    mean, covariance = scale * torch.randn(3), 0.01 * torch.eye(3)
    squared = (x @ mean).square() + ((x @ covariance) * x).sum(dim=1)
    g = polya_gamma_mean(squared)
    slope = (polya_gamma_mean(squared + 1e-5) - g) / 1e-5
    curvature = (x * g.unsqueeze(1)).T @ x
    exact = (x * (g + 2 * (x @ mean).square() * slope).unsqueeze(1)).T @ x
    found = logit_information(curvature, mean, covariance, size)
    ratios = torch.linalg.eigvals(torch.linalg.solve(exact, found)).real
    torch.testing.assert_close(ratios, torch.ones(3), rtol=0.0, atol=0.05)


def test_the_information_is_never_more_than_the_curvature():
    torch.manual_seed(2)
    for scale in (0.1, 10.0, 1e4):
        curvature = spd(4) * scale  # larger than that of 50 records in the unit ball
        found = logit_information(curvature, scale * torch.randn(4), torch.eye(4), 50)
        assert torch.linalg.eigvalsh(found).min() > 0
        assert torch.linalg.eigvalsh(curvature - found).min() > -1e-9 * scale


# Noise through the steps


def linear_world(size=3):
    """s_hat = A theta + c, theta = B (s + b): all that the response claims to know, exactly."""
    torch.manual_seed(3)
    turn, slope = 0.3 * torch.randn(size, size), torch.eye(size) + 0.2 * torch.randn(size, size)
    return turn, slope


@pytest.mark.parametrize("kappa", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("static_noise", [1e-9, 2.0])
def test_noise_goes_through_the_steps(kappa, static_noise):
    turn, slope = linear_world()
    size, runs, steps, sd = 3, 20_000, 25, 1.0
    weights = [step**-kappa for step in range(1, steps + 1)]
    still = static_noise * torch.randn(runs, size)
    s, mixed, theta = torch.zeros(runs, size), 0.0, torch.zeros(runs, size)
    for weight in weights:
        s_hat = theta @ turn.T + sd * torch.randn(runs, size)
        s = (1 - weight) * s + weight * s_hat
        mixed = math.hypot((1 - weight) * mixed, weight * sd)
        theta = (s + still) @ slope.T

    def m_step(values):
        mean = slope @ (values["moving"] + values["still"])
        return {"w": dist.Normal(mean, torch.ones(size)).to_event(1)}

    values = {"moving": torch.randn(size), "still": torch.randn(size)}
    statistics = MixedStatistics(values, {"moving": mixed, "still": static_noise})
    response = NoiseResponse(m_step, statistics, ["still"], weights, None)
    moved = response.moved({("moving", "w"): turn}, {"w": torch.eye(size)})
    root = moved.noise["w"]
    expected = torch.cov(theta.T)
    torch.testing.assert_close(root @ root.T, expected, rtol=0.1, atol=0.05 * expected.max().item())
    assert not moved.remaining["w"].any()
    torch.testing.assert_close(moved.nonlinearity["w"], torch.zeros(size, 1), rtol=0.0, atol=1e-9)
    linear = torch.linalg.inv(torch.eye(size) - slope @ turn)
    added = moved.spread["w"] @ moved.spread["w"].T
    symmetric = (linear + linear.T) / 2 - torch.eye(size)
    values, vectors = torch.linalg.eigh(symmetric)
    torch.testing.assert_close(
        added, (vectors * values.clamp(min=0.0)) @ vectors.T, atol=1e-6, rtol=1e-4
    )
    alone = response.moved(None, {}).noise["w"]
    assert not torch.allclose(alone @ alone.T, expected, rtol=0.2)


def test_what_is_left_of_the_way():
    turn, slope = linear_world()
    weights = [step**-0.7 for step in range(1, 11)]
    s, theta, first = torch.zeros(3), 5 * torch.randn(3), None
    for weight in weights:
        s = (1 - weight) * s + weight * (turn @ theta + 1.0)
        theta = slope @ s
        first = s if first is None else first
    goal = torch.linalg.solve(torch.eye(3) - slope @ turn, slope @ torch.ones(3))

    def m_step(values):
        return {"w": dist.Normal(slope @ values["s"], torch.ones(3)).to_event(1)}

    def way(first, weights=weights):
        statistics = MixedStatistics({"s": s}, {"s": 1e-6})
        response = NoiseResponse(m_step, statistics, [], weights, first)
        return response.moved({("s", "w"): turn}, {"w": torch.eye(3)}).remaining["w"].squeeze(1)

    torch.testing.assert_close(way({"s": first}), theta - goal, rtol=1e-4, atol=1e-6)
    assert not way(None).any()
    torch.testing.assert_close(way({"s": first}, weights[:1]), theta)


def test_many_statistics_are_moved_along_random_ways():
    size = 400

    def m_step(values):
        return {"w": dist.Normal(values["s"][:2], torch.ones(2)).to_event(1)}

    statistics = MixedStatistics({"s": torch.zeros(size)}, {"s": 3.0})

    def root(feedback):
        response = NoiseResponse(m_step, statistics, [], [1.0], None)
        return response.moved(feedback, {}).noise["w"]

    for feedback, count, error in (({}, 200, 0.15), (None, 30, 0.4)):
        found = root(feedback)
        assert found.shape == (2, count) and torch.equal(found, root(feedback))
        sds = found.square().sum(dim=1).sqrt()
        torch.testing.assert_close(sds, torch.full((2,), 3.0), rtol=error, atol=0.0)


def simulated(kind, size, seed, dim=4):
    """Data within a model's bounds, and its weights in the model's units."""
    torch.manual_seed(seed)
    x = clipped_rows(
        torch.cat([0.4 * torch.randn(size, dim - 1), torch.full((size, 1), 0.4)], 1), 1.0
    )
    if kind == "logistic":
        w = 2.5 * torch.randn(dim)
        return (x, torch.bernoulli(torch.sigmoid(x @ w))), w
    w = torch.randn(dim)
    return (x, x @ w + 0.3 * torch.randn(size)), w


MODELS = {
    "logistic": lambda: LogisticRegression(4),
    "linear": lambda: LinearRegression(4, x_bound=1.0, y_bound=4.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
@pytest.mark.parametrize("kind", MODELS)
def test_intervals_cover_the_truth(kind, epsilon):
    inside, plain = [], []
    for seed in range(100):
        data, w = simulated(kind, 5000, seed)
        steps, accountant = 30 if kind == "logistic" else 1, PrivacyAccountant(epsilon=epsilon)
        options = dict(accountant=accountant, num_steps=steps, noise=Noise(source=seed))
        vips = noisy(MODELS[kind](), data, **options)
        lower, upper = vips.posterior().intervals()["weights"]
        if vips.posterior().status.is_ok:
            inside.append((lower < w) & (w < upper))
        lower, upper = vips.posterior(noise_aware=False).intervals()["weights"]
        plain.append((lower < w) & (w < upper))
    covered = torch.cat(inside)
    assert len(covered) > 100 and covered.double().mean() > 0.9
    assert torch.cat(plain).double().mean() < 0.75


# The posterior


def test_without_noise_it_is_that_of_variational_bayes():
    vips = fitted(LogisticRegression(3), logistic_data(), 5)
    for aware in (True, False):
        posterior = vips.posterior(noise_aware=aware)
        own = vips.model.marginals(vips._found.posterior)
        assert posterior.keys() == own.keys()
        for site, marginal in own.items():
            assert torch.equal(posterior[site].mean, marginal.mean)
            assert torch.equal(posterior[site].variance, marginal.variance)
        assert not posterior.noise_share.any() and posterior.status.is_ok


@pytest.mark.long
def test_it_explains_itself():
    vips = noisy(LogisticRegression(3), logistic_data())
    found, posterior = vips.explain(), vips.posterior()
    assert found.names == posterior.names and found.clipped is None
    assert found.status == posterior.status
    assert set(found.shares) == {"data", "privacy noise"}
    torch.testing.assert_close(found.shares["privacy noise"], posterior.noise_share)
    assert found.shares["privacy noise"].max() > 0.01
    half = PrivacyAccountant()
    for event, count in vips.accountant.ledger:
        half.record(replace(event, noise_multiplier=event.noise_multiplier / 2), count)
    assert found.epsilon_at_half_noise == pytest.approx(half.get_epsilon())
    slow = noisy(LogisticRegression(3), logistic_data(), step_size=(20.0, 1.0))
    assert slow.explain().limit == "steps" and "take more" in slow.explain().status.reason


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_model_has_one(name):
    make, data = PROBLEMS[name]
    steps = 1 if name == "linear" else 5
    vips = noisy(make(), data(), num_steps=steps)
    posterior, plain = vips.posterior(), vips.posterior(noise_aware=False)
    dim = len(posterior.names)
    assert posterior.mean.shape == posterior.stddev.shape == posterior.noise_share.shape == (dim,)
    assert posterior.sample().shape == (dim,) and posterior.sample((3,)).shape == (3, dim)
    assert posterior.log_prob(posterior.sample((3,))).shape == (3,)
    assert posterior.draws(6).keys() == posterior.keys() == plain.keys()
    assert posterior.covariance_matrix.shape == (dim, dim)
    torch.testing.assert_close(posterior.covariance_matrix.diagonal().sqrt(), posterior.stddev)
    assert (
        posterior.stddev >= plain.stddev * (1 - 1e-9)
    ).all() and posterior.noise_share.max() > 0.0
    torch.testing.assert_close(posterior.mean, plain.mean)
    for site, (lower, upper) in posterior.intervals().items():
        assert lower.shape == upper.shape == posterior[site].mean.shape
        assert (lower < upper).all()
    assert len(repr(posterior).splitlines()) > dim or dim > 30
    assert not posterior.plain.noise_share.any()
    assert torch.equal(posterior.mean, vips.posterior().mean)  # and is the same when asked again


def test_the_log_density_is_the_sum_of_the_sites():
    vips = noisy(LogisticRegression(3), logistic_data())
    posterior, flat = vips.posterior(), vips.posterior().sample((2,))
    expected = posterior["precision"].log_prob(flat[:, 0]) + posterior["weights"].log_prob(
        flat[:, 1:]
    )
    torch.testing.assert_close(posterior.log_prob(flat), expected)


def test_the_guide_holds_what_posterior_returns():
    vips = noisy(LogisticRegression(3), logistic_data())
    sites = poutine.trace(vips.guide).get_trace().nodes
    for name, marginal in vips.posterior().items():
        assert torch.equal(sites[name]["fn"].mean, marginal.mean)
        assert torch.equal(sites[name]["fn"].variance, marginal.variance)
    vips = noisy(LogisticRegression(3), logistic_data(), noise=0)
    assert "weights" in poutine.trace(vips.guide).get_trace().nodes


@pytest.mark.long
def test_a_step_makes_a_new_one():
    data = logistic_data()
    settings = dict(num_steps=3, noise=Noise(1.0, source=0))
    vips, other = (
        VIPS(LogisticRegression(3), accountant=PrivacyAccountant(), **settings) for _ in range(2)
    )
    found = []
    for _ in range(2):
        vips.step(*data)
        found.append(vips.posterior())
    assert not torch.equal(found[0].mean, found[1].mean)
    state = vips.state_dict()
    other.load_state_dict(state)
    torch.testing.assert_close(other.posterior().stddev, found[1].stddev)
    del state["start"]  # as older versions saved it
    other.load_state_dict(state)
    torch.testing.assert_close(other.posterior().mean, found[1].mean)


# Status


def reason(vips):
    return vips.posterior().status.reason


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("name", ["logistic", "linear"])
def test_the_status_counts_what_the_noise_hides(name):
    make, data = PROBLEMS[name]
    steps = {"num_steps": 1} if name == "linear" else {}
    loud = noisy(make(), data(), noise=Noise(100.0, source=0), **steps).posterior()
    assert (loud.status.level, loud.status.cause) == ("do not publish", "privacy noise")
    assert loud.status.reason.endswith("outweigh the data in 4 of 4 intervals")
    assert loud.plain.status == loud.status
    assert repr(loud).splitlines()[-2:] == loud.status.lines
    quiet = noisy(make(), data(), noise=Noise(1e-6, source=0), **steps)
    assert "outweigh" not in reason(quiet)


def test_the_report_has_the_status():
    make, data = PROBLEMS["logistic"]
    vips = noisy(make(), data())
    assert f"| {vips.posterior().status} |" in vips.accountant.report()


@pytest.mark.long
def test_steps_that_have_not_arrived_are_to_check():
    data, _ = simulated("logistic", 4000, seed=5)
    few = noisy(MODELS["logistic"](), data, num_steps=2, noise=Noise(0.1, source=0))
    assert "have not converged" in reason(few)
    one = noisy(MODELS["logistic"](), data, num_steps=1, noise=Noise(0.1, source=0))
    assert "have not converged" in reason(one)
    many = noisy(
        MODELS["logistic"](), data, num_steps=80, noise=Noise(0.1, source=0), step_size=(0.0, 0.3)
    )
    assert "have not converged" not in reason(many)


def test_a_model_that_does_not_know_its_feedback_is_to_check():
    make, data = PROBLEMS["mixture"]
    posterior = noisy(make(), data()).posterior()
    count = len(posterior.names)
    assert posterior.status.level == "check"
    assert f"{count} of {count} intervals leave out how the E-step" in posterior.status.reason


def test_noise_beyond_first_order_is_to_check():
    model = LinearRegression(3, x_bound=2.0, y_bound=5.0)
    loud = noisy(model, linear_data(200), num_steps=1, noise=Noise(2.0, source=0))
    assert "first-order" in reason(loud)


class Frequency(LinearRegression):
    """With a site of a family that cannot be widened."""

    def marginals(self, posterior):
        return super().marginals(posterior) | {"share": dist.Beta(posterior.rate, posterior.rate)}


def test_a_family_that_is_not_known_is_to_check():
    data = [x[:4] for x in linear_data()]
    settings = dict(num_steps=1, sampling=FullBatch(), noise=Noise(1e-3, source=0))
    vips = noisy(Frequency(3, x_bound=2.0, y_bound=5.0), data, **settings)
    assert "1 of 5 intervals leave out the noise" in reason(vips)
    assert "share" in vips.posterior().intervals()
