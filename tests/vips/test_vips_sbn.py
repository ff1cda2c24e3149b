"""Sigmoid belief network: E-step, sensitivity, M-step, evidence by enumeration, bad images."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from vips_problems import PIXELS, UNITS, fitted, images_of

from pyro_dp import ModelError, Noise, PrivacyAccountant
from pyro_dp.vips import SigmoidBeliefNetwork
from pyro_dp.vips.models.polya_gamma import polya_gamma_mean
from pyro_dp.vips.models.sigmoid_belief_network import (
    ShrinkagePrior,
    noisy_regression,
)

# Made-up data.
pytestmark = pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")

NOT_STEP = (0.0, 0.0)


def model_of(**options):
    return SigmoidBeliefNetwork(**(dict(pixels=PIXELS, units=UNITS) | options))


def some_posterior(model, seed=0):
    """One that is not symmetric."""
    torch.manual_seed(seed)
    statistics = model.initial_statistics(50)
    for name, value in statistics.items():
        statistics[name] = 4 * value + torch.randn(value.shape)
    return model.posterior(statistics, dict.fromkeys(statistics, 0.0), 50)


def configurations(units):
    """All values of the hidden units, (2^K, K) of -1/2 and 1/2."""
    return torch.tensor(list(itertools.product((-0.5, 0.5), repeat=units)), dtype=torch.float64)


# E-step


@pytest.mark.long
def test_the_e_step_is_the_augmented_likelihood_s():
    """Its field and coupling, against the bound of each pixel's likelihood by enumeration."""
    model = model_of(sweeps=300)
    posterior = some_posterior(model)
    image = images_of(1)
    y = image[0] - 0.5
    x = configurations(UNITS)
    augmented = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    outer = posterior.covariance + posterior.mean.unsqueeze(2) * posterior.mean.unsqueeze(1)
    squares = torch.einsum("sk,jkl,sl->sj", augmented, outer, augmented)
    energy = (augmented @ posterior.mean.T * y - posterior.curvature * squares / 2).sum(1)
    energy = energy + x @ posterior.hidden_mean
    means = torch.zeros(UNITS)
    for _ in range(300):
        for k in range(UNITS):
            on = 0.5 + means
            q = torch.where(x > 0, on, 1 - on)
            others = q[:, torch.arange(UNITS) != k].prod(1)
            gain = (others * energy * torch.sign(x[:, k])).sum()
            means[k] = torch.sigmoid(gain) - 0.5
    found = parts(model, image, posterior)["hidden"][0]
    torch.testing.assert_close(found, means)


# Statistics and their bounds


def parts(model, images, posterior):
    """Each image's part, (N, ...)."""
    found = model.expected_statistics(posterior, None, images) | model.static_statistics(images)
    rows = dict(found)
    units = torch.eye(len(images)).unsqueeze(2)
    sums = [found["products"].weighted_sum(unit) for unit in units]
    rows["products"] = torch.stack(sums).reshape(len(images), model.pixels, model.units)
    return rows


def test_statistics_are_moments_of_centred_values():
    model = model_of()
    images = images_of(6)
    found = parts(model, images, some_posterior(model))
    x, y = found["hidden"], images - 0.5
    assert torch.equal(found["images"], y)
    torch.testing.assert_close(found["products"], y.unsqueeze(2) * x.unsqueeze(1))
    torch.testing.assert_close(
        found["pairs"], torch.stack([x[:, 0] * x[:, 1], x[:, 0] * x[:, 2], x[:, 1] * x[:, 2]], 1)
    )


def certain(model):
    """A posterior under which the hidden units of every image are practically certain."""
    posterior = some_posterior(model)
    posterior.hidden_mean[:] = 1e4
    return posterior


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("units", [1, 2, 5])
def test_bounds_are_reached_and_never_exceeded(units):
    model = model_of(units=units)
    images = torch.cat([torch.ones(1, PIXELS), torch.zeros(1, PIXELS), images_of(50)])
    for posterior, reached in ((certain(model), True), (some_posterior(model), False)):
        found = parts(model, images, posterior)
        for name, statistic in model.statistics.items():
            norms = found[name].flatten(1).norm(dim=1)
            assert (norms <= statistic.bound * (1 + 1e-12)).all()
            if reached or name == "images":
                torch.testing.assert_close(norms, torch.full_like(norms, statistic.bound))


# M-step


def test_polya_gamma_means():
    c = torch.tensor([0.0, 1e-5, 1e-3, 0.999e-3, 0.5, 3.0, 50.0])
    expected = [0.25, *(math.tanh(v / 2) / (2 * v) for v in c[1:].tolist())]
    torch.testing.assert_close(
        polya_gamma_mean(c.square()), torch.tensor(expected), rtol=1e-9, atol=0
    )


def test_regression_on_noisy_sums():
    """Against the joint Gaussian of weights, sums and noisy sums, conditioned by Schur."""
    torch.manual_seed(0)
    root = torch.randn(2, 3, 5)
    information, noise = root @ root.mT, torch.tensor([0.5, 2.0, 1.0])
    precision, sums = torch.rand(2, 3) + 0.1, torch.randn(2, 3)
    mean, covariance = noisy_regression(information, sums, noise, precision)
    plain, spread = noisy_regression(information, sums, 0 * noise, precision)
    for j in range(2):
        prior = torch.diag(1 / precision[j])
        cross = prior @ information[j]
        total = information[j] @ cross + information[j] + torch.diag(noise)
        torch.testing.assert_close(mean[j], cross @ torch.linalg.solve(total, sums[j]))
        torch.testing.assert_close(
            covariance[j], prior - cross @ torch.linalg.solve(total, cross.T)
        )
        expected = torch.linalg.inv(information[j] + torch.diag(precision[j]))
        torch.testing.assert_close(spread[j], expected)
        torch.testing.assert_close(plain[j], expected @ sums[j])


@pytest.mark.long
def test_shrinkage_is_variational_bayes():
    """At its end each block is the exponential of the expected log joint: by the Pyro model."""
    squares = torch.tensor([[0.01, 4.0], [0.3, 1.0], [25.0, 0.0001]])
    prior = ShrinkagePrior(0.4, 0.7)
    q = None
    for _ in range(500):
        q = prior.posterior(squares, q)
    again = prior.posterior(squares, q)
    for name, one in q.items():
        torch.testing.assert_close(one.mean, again[name].mean)
    blocks = {name: block.base_dist if block.event_dim else block for name, block in q.items()}
    means = {name: block.mean for name, block in blocks.items()}
    logs = {
        name: block.concentration.digamma() - block.rate.log() for name, block in blocks.items()
    }
    for name in means:

        def log_joint(value, name=name):
            """Linear in a block's values and logs, at the others' expectations; up to constants."""
            m, log = means | {name: value}, logs | {name: value.log()}
            terms = [
                -0.5 * log["spread"] - m["spread"],
                0.5 * log["spread"] - 0.5 * log["scales"] - m["spread"] * m["scales"],
                0.4 * log["scales"] - 0.6 * log["rates"] - m["scales"] * m["rates"],
                0.7 * log["rates"] - 0.3 * log["precisions"] - m["rates"] * m["precisions"],
                0.5 * log["precisions"] - 0.5 * m["precisions"] * squares,
            ]
            return sum(term.sum() for term in terms)

        low, high = means[name] * 0.7, means[name] * 1.6
        difference = log_joint(high) - log_joint(low)
        expected = (blocks[name].log_prob(high) - blocks[name].log_prob(low)).sum()
        torch.testing.assert_close(difference, expected)


@pytest.mark.long
def test_the_m_step_solves_its_equations():
    """Weights, Pólya-Gamma means and precisions of the weights need each other."""
    model = model_of(bias_scale=2.0)
    images = images_of(400)
    statistics = {
        name: part.sum(0) for name, part in parts(model, images, some_posterior(model)).items()
    }
    posterior = model.posterior(statistics, dict.fromkeys(statistics, 0.0), 400)
    x = parts(model, images, some_posterior(model))["hidden"]
    augmented = torch.cat([x, torch.ones(400, 1)], dim=1)
    second = augmented.T @ augmented + torch.diag(torch.cat([(0.25 - x**2).sum(0), torch.zeros(1)]))
    for j in range(PIXELS):
        precision = torch.cat([posterior.shrinkage["precisions"].mean[j], torch.tensor([0.25])])
        information = posterior.curvature[j] * second + torch.diag(precision)
        mean = torch.linalg.solve(information, augmented.T @ (images[:, j] - 0.5))
        torch.testing.assert_close(posterior.mean[j], mean, rtol=1e-3, atol=1e-3)
        outer = posterior.covariance[j] + torch.outer(mean, mean)
        squared = (outer * second).sum() / 400
        expected = torch.tanh(squared.sqrt() / 2) / (2 * squared.sqrt())
        torch.testing.assert_close(posterior.curvature[j], expected, rtol=1e-3, atol=0.0)
    b, c = posterior.hidden_mean, (posterior.hidden_mean**2 + posterior.hidden_variance).sqrt()
    curvature = torch.tanh(c / 2) / (2 * c)
    torch.testing.assert_close(posterior.hidden_variance, 1 / (0.25 + 400 * curvature))
    torch.testing.assert_close(b, posterior.hidden_variance * x.sum(0))


def test_second_moments_are_what_second_moments_can_be():
    """Three units cannot all be opposite to each other."""
    statistics = {"hidden": torch.zeros(UNITS), "pairs": torch.full((UNITS,), -100.0)}
    moments = model_of()._second_moments(statistics, 400)
    values = torch.linalg.eigvalsh(moments)
    torch.testing.assert_close(values, torch.tensor([0.0, 200.0, 200.0, 400.0]), rtol=0, atol=1e-9)
    possible = {
        "hidden": torch.tensor([50.0, -20.0, 0.0]),
        "pairs": torch.tensor([30.0, -10.0, 5.0]),
    }
    a, b, c = possible["pairs"]
    torch.testing.assert_close(
        model_of()._second_moments(possible, 400),
        torch.tensor(
            [
                [100.0, a, b, 50.0],
                [a, 100.0, c, -20.0],
                [b, c, 100.0, 0.0],
                [50.0, -20.0, 0.0, 400.0],
            ]
        ),
    )


@pytest.mark.long
@pytest.mark.every_commit
def test_noise_in_the_sums_is_taken_for_noise():
    """The larger it is, the smaller the weights; and without it nothing is shrunk."""
    model = model_of()
    images = images_of(400)
    statistics = {
        name: part.sum(0) for name, part in parts(model, images, some_posterior(model)).items()
    }
    sizes = []
    for sd in (0.0, 1.0, 10.0, 100.0, 1e4):
        posterior = model.posterior(statistics, dict.fromkeys(statistics, sd), 400)
        sizes.append(posterior.mean.norm().item())
    assert all(more > less for more, less in itertools.pairwise(sizes))
    assert sizes[1] > 0.9 * sizes[0] and sizes[-1] < 0.01 * sizes[0]


# The whole


@pytest.mark.slow
def test_a_private_network_learns():
    images = images_of(6000, seed=2)
    train, test = images[:5000], images[5000:]
    pyro.set_rng_seed(0)
    model, accountant = model_of(), PrivacyAccountant(2.0)
    vips = fitted(model, (train,), 10, accountant=accountant, noise=Noise(source=0))
    assert accountant.get_epsilon() <= 2.0
    majority = ((train.mean(0) > 0.5) == (test > 0.5)).double().mean().item()
    posterior = vips.posterior(noise_aware=False)  # its means are the same
    assert model.pixel_accuracy(posterior, test) > majority + 0.03


def test_pixel_accuracy_of_what_is_known():
    """Two groups of pixels, each on or off as one: the others tell every pixel."""
    weights = torch.zeros(20, 2)
    weights[:10, 0], weights[10:, 1] = 8.0, -8.0
    values = {"weights": weights, "biases": torch.zeros(20), "hidden_biases": torch.zeros(2)}
    posterior = {name: dist.Delta(value) for name, value in values.items()}
    hidden = configurations(2).repeat(20, 1)
    images = (hidden @ weights.T > 0).double()
    model = model_of(pixels=20, units=2)
    assert model.pixel_accuracy(posterior, images) == 1.0
    flipped = images.clone()
    flipped[:, 3] = 1 - flipped[:, 3]
    assert model.pixel_accuracy(posterior, flipped) == pytest.approx(0.95)
    with pytest.raises(ModelError, match="zeros and ones"):
        model.pixel_accuracy(posterior, images / 2)


def test_pixel_accuracy_does_not_see_what_it_predicts():
    """Pixels that are independent are predicted by their majority."""
    torch.manual_seed(0)
    images = torch.bernoulli(torch.full((2000, PIXELS), 0.5))
    posterior = some_posterior(model_of())
    accuracy = model_of().pixel_accuracy(model_of().marginals(posterior), images)
    assert abs(accuracy - 0.5) < 6 * 0.5 / math.sqrt(images.numel())


# The Pyro model


def test_the_pyro_model():
    images = images_of(10)
    model = model_of(a=0.4, b=0.7, bias_scale=2.0)
    trace = poutine.trace(model.model).get_trace(images)
    values = {name: site["value"] for name, site in trace.nodes.items() if site["type"] == "sample"}
    half = torch.tensor(0.5)
    logits = (values["hidden"] - 0.5) @ values["weights"].T + values["biases"]
    expected = [
        dist.Gamma(half, 1.0).log_prob(values["spread"]),
        dist.Gamma(half, values["spread"]).log_prob(values["scales"]),
        dist.Gamma(0.4, values["scales"]).log_prob(values["rates"]),
        dist.Gamma(0.7, values["rates"]).log_prob(values["precisions"]),
        dist.Normal(0.0, values["precisions"] ** -0.5).log_prob(values["weights"]),
        dist.Normal(0.0, 2.0).log_prob(values["biases"]),
        dist.Normal(0.0, 2.0).log_prob(values["hidden_biases"]),
        dist.Bernoulli(logits=values["hidden_biases"]).log_prob(values["hidden"]),
        dist.Bernoulli(logits=logits).log_prob(images),
    ]
    torch.testing.assert_close(trace.log_prob_sum(), sum(each.sum() for each in expected))


@pytest.mark.slow
def test_the_guide_has_the_joint_covariance_of_weights_and_biases():
    images = images_of(200)
    vips = fitted(model_of(), (images,), 5)
    samples = Predictive(vips.guide, num_samples=2000)(images[:1])
    found = torch.cat([samples["weights"], samples["biases"].unsqueeze(-1)], dim=-1)
    covariance = vips._found.posterior.covariance
    scale = covariance.diagonal(dim1=1, dim2=2).sqrt()
    for j in range(PIXELS):
        errors = found[:, j].T.cov() - covariance[j]
        assert (errors.abs() < 8 / math.sqrt(2000) * torch.outer(scale[j], scale[j])).all()


@pytest.mark.long
@pytest.mark.one_in(12)
@pytest.mark.parametrize("units", [1, 3, 5])
@pytest.mark.parametrize("sigma", [0.0, 1.0, 100.0, 1e6])
def test_nothing_explodes(sigma, units):
    """Under noise; and without it, with more hidden units than the images can tell."""
    images = images_of(20)
    images[:5], images[5:8] = 1.0, 0.0
    for rate in (1.0, 0.3):
        options = dict(noise=Noise(sigma, source=0), sampling=rate)
        vips = fitted(model_of(units=units), (images,), 4, **options)
        # Intervals with the noise take seconds.
        found = vips.posterior(noise_aware=rate < 1)
        for q in found.values():
            assert torch.isfinite(q.mean).all() and torch.isfinite(q.variance).all()
            assert (q.variance > 0).all()
        assert found["weights"].mean.abs().max() < 100.0
        if rate < 1:  # it takes them from there
            vips.guide(images)
