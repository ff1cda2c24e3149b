"""Rare records with large gradients: found where noise hides them, and nowhere else."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import PrivacyAccountant
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.svi.gradient_regression import regressed, total_information
from pyro_dp.infer.svi.hidden_records import hidden
from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.infer.svi.released_gradients import ReleasedGradients
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI
from pyro_dp.mechanism.norm_histogram import Bins, Norms

_N = 8000


def bernoulli(mean, length=1.5, size=_N):
    """Norms of gradients, |y - p| |x|, without the outcome and with it, and their information."""
    lengths = length * (1 + 0.1 * torch.randn(size, dtype=torch.float64)).abs()
    with_it = torch.arange(size) < round(mean * size)
    norms = torch.where(with_it, 1 - mean, mean) * lengths
    return norms, with_it, (mean * (1 - mean) * lengths.square()).sum().item()


def seen(norms):
    values = norms.sort().values.numpy()
    return Norms(values, np.full(len(values), _N / len(values)))


@pytest.mark.parametrize("mean", [0.001, 0.01, 0.05])
def test_a_rare_outcome(mean):
    norms, with_it, information = bernoulli(mean)
    found = hidden(seen(norms[~with_it]), information, 20.0)
    assert found.count == pytest.approx(with_it.sum().item(), rel=0.2)
    assert found.norm == pytest.approx(1.5, rel=0.1)
    everyone = found.among(seen(norms[~with_it]))
    assert everyone.counts.sum() == pytest.approx(_N)
    assert (np.diff(everyone.norms) >= 0).all() and everyone.norms[-1] == found.norm


@pytest.mark.parametrize("mean", [0.01, 0.2, 0.5])
def test_nobody_where_all_are_seen(mean):
    norms, _, information = bernoulli(mean)
    for factor in (0.5, 1.0, 1.05):
        assert hidden(seen(norms), factor * information, 20.0) is None
    assert hidden(seen(norms), 0.0, 20.0) is None


def test_nobody_where_it_is_the_model_that_is_wrong():
    """Residuals half as large as the model says: many records would have to hide, and little noise
    hides few."""
    norms, with_it, information = bernoulli(0.5)
    assert hidden(seen(norms), 4 * information, 20.0) is None
    norms, with_it, information = bernoulli(0.05)
    assert hidden(seen(norms[~with_it]), information, 1.0) is None


def test_nobody_where_the_loss_is_a_mean():
    """Scaled down by N, curvatures exceed squares of gradients, as by half a record of norm 1."""
    norms, _, information = bernoulli(0.2)
    scaled = hidden(seen(norms / _N), information / _N, 20.0)
    assert scaled is None


def released(size, noise, cut=None, seed=0):
    """Gradients of a quadratic log likelihood with curvature 400 and top 1, at draws around it."""
    generator = torch.Generator().manual_seed(seed)
    history = ReleasedGradients(1.0, _N)
    for step in range(size):
        z = 1.0 + 0.2 * torch.randn(2, generator=generator, dtype=torch.float64)
        away = torch.randn(2, generator=generator, dtype=torch.float64)
        bias = 0.0 if cut is None else cut[step].item()
        history.add(z, 400.0 * (1.0 - z) + noise * away + bias, noise)
    history.cut = cut
    return history


def test_information_is_the_trace():
    found = total_information(released(2000, 20.0))
    assert found == pytest.approx(800.0, rel=0.05) and found < 800.0
    assert total_information(released(2000, 1e6)) == 0.0
    assert total_information(released(10, 20.0)) == 0.0


def test_gradients_of_which_much_was_cut_off_hardly_count():
    """Of half of the releases; the noise of the mean is 20 / sqrt(500), of the regression's top
    .0022. With all of them alike it is off by .12, 55 standard deviations."""
    cut = 100.0 * (torch.arange(1000) % 2 == 0).double()
    history = released(1000, 20.0, cut)

    def prior(mean, covariance):
        return Gaussian.from_moments(torch.zeros_like(mean), torch.eye(2, dtype=mean.dtype))

    found = regressed(history, prior)
    assert (found.mean - 400.0 / 401.0).abs().max() < 5.5 * 0.0022
    history.cut = None
    assert (regressed(history, prior).mean - 400.0 / 401.0).abs().min() > 0.1


def test_what_earlier_bounds_took():
    """Of the hidden, and of others."""
    norms, with_it, information = bernoulli(0.01)
    counts = Bins(norms[~with_it].unsqueeze(1)).dense().sum(dim=0)
    found = HistogramBound.start(_N, 4, 0.01)
    for _ in range(3):  # what they tell is asked for where C is chosen anew
        found = found.updated(counts, 20.0, 1.0, lambda: information)
    assert found.bound > 1.0
    bounds = torch.tensor([1e-3, 0.1, 1.0, 2.0], dtype=torch.float64)
    cut = found.cut(bounds)
    exact = 80 * (1.5 - bounds).clamp(min=0.0) / math.sqrt(4)
    torch.testing.assert_close(cut[1:], exact[1:], rtol=0.1, atol=0.5)
    assert cut[0] > exact[0] + 5.0 and cut[3] == 0.0  # of others, too
    again = HistogramBound.resumed(found.state())
    assert torch.equal(again.cut(bounds), found.cut(bounds))
    old = {name: value for name, value in found.state().items() if name != "information"}
    assert HistogramBound.resumed(old).information == 0.0  # as earlier versions saved it


def test_a_rare_outcome_is_learnt():
    """1% of 8,000 records, nothing set: cut off, they were a fourteenth of what they are, and the
    baseline 8 of its own standard deviations off, unmarked."""
    pyro.clear_param_store()
    generator = torch.Generator().manual_seed(3)
    x = torch.cat([torch.ones(_N, 1), torch.rand(_N, 2, generator=generator) * 2 - 1], dim=1)
    weights = torch.tensor([-5.0, 1.0, -1.0])
    y = torch.bernoulli(torch.sigmoid(x @ weights), generator=generator)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        with pyro.plate("people", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(epsilon=1.0)
    svi = StochasticGradientVI(
        model, AutoMultivariateNormal(model), accountant=accountant, generator=0
    )
    svi.run(x, y, progress=False)
    found = svi.posterior()
    assert svi.clipped_fraction.fraction < 0.05
    away = (found.mean - weights) / found.stddev
    assert away[0].abs() < 4.0 and found.mean[0] > -6.0
