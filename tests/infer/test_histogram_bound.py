"""The bound of gradients: histograms are averaged, read now and then, and kept in states."""

import math
import re

import numpy as np
import pytest
import torch

from pyro_dp import Clip, ConfigurationError
from pyro_dp.infer.svi.clip_policy import Measured
from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.mechanism.norm_histogram import SIZE, Bins

_N = 4000


def counts(scale=1.0, size=_N):
    norms = scale * torch.randn(size, 4).norm(dim=1, keepdim=True)
    return Bins(norms).dense().sum(dim=0)


def noisy(sd, scale=1.0):
    return counts(scale) + sd * torch.randn(SIZE)


def after(steps, sd=5.0, rate=1.0, scale=1.0):
    found = HistogramBound(_N, 4, 0.01)
    for _ in range(steps):
        found = found.updated(noisy(sd, scale), sd, rate)
    return found


def test_the_mean_is_as_exact_as_it_says():
    """By noise and by sampling."""
    exact, rate, sd = counts(), 0.5, 4.0
    distances, said = [], []
    for _ in range(40):
        found = HistogramBound(_N, 4, 0.01)
        for _ in range(10):
            sampled = torch.distributions.Binomial(exact, torch.tensor(rate)).sample() / rate
            found = found.updated(sampled + sd * torch.randn(SIZE), sd, rate)
        distances.append((found.counts - exact).square().mean().item())
        said.append(found.variance)
    assert np.mean(distances) == pytest.approx(np.mean(said), rel=0.1)


def test_one_of_less_noise_counts_more():
    found = HistogramBound(_N, 4, 0.01)
    one, other = counts(), counts(2.0)
    found = found.updated(one, 1.0, 1.0).updated(other, 10.0, 1.0)
    torch.testing.assert_close(found.counts, (one + other * 2 / 100) / 1.02)


def test_read_ever_more_rarely():
    found, read = HistogramBound(_N, 4, 0.01), []
    for step in range(1, 100):
        new = found.updated(noisy(5.0), 5.0, 1.0)
        if new.next_reading != found.next_reading:
            read.append(step)
        found = new
    assert read == [1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]


def test_the_bound_is_of_the_size_of_norms():
    """In whatever units; with more noise it is smaller."""
    assert 1.5 < after(20).bound < 10.0
    assert after(20, scale=1000.0).bound == pytest.approx(1000 * after(20).bound, rel=0.2)
    loud = HistogramBound(_N, 4, 50.0).updated(noisy(5.0), 5.0, 1.0)
    assert loud.bound < 0.7 * after(20).bound


def test_of_many_latents_it_is_the_median():
    found = HistogramBound(_N, 4, 0.01, of_many=True).updated(noisy(1.0), 1.0, 1.0)
    assert found.bound == pytest.approx(torch.randn(10**5, 4).norm(dim=1).median().item(), rel=0.1)
    assert found.clipped(found.bound).fraction == pytest.approx(0.5, abs=0.1)
    assert HistogramBound.resumed(found.state()).of_many
    assert HistogramBound.resumed(
        found.state() | {"information": 3.0}
    ).of_many  # version 0.2.0 had it


@pytest.mark.long
def test_what_is_clipped():
    """With a standard error that is not too small."""
    errors = []
    for _ in range(30):
        found = after(10, sd=20.0)
        above = found.counts.new_tensor(0.0) + (torch.randn(10**5, 4).norm(dim=1) > found.bound)
        clipped = found.clipped(found.bound)
        errors.append((clipped.fraction - above.double().mean().item()) / clipped.standard_error)
    assert np.square(errors).mean() < 4.0
    assert 0 < clipped.standard_error < 0.05


def test_a_state_goes_on():
    found = after(7)
    again, new = HistogramBound.resumed(found.state()), noisy(5.0)
    assert vars(again.updated(new, 5.0, 1.0)).keys() == found.state().keys()
    one, other = (each.updated(new, 5.0, 1.0) for each in (again, found))
    assert torch.equal(one.counts, other.counts) and one.bound == other.bound
    for damage in (
        {"noise": math.nan},
        {"steps": 1.5},
        {"counts": torch.zeros(2)},
        {"of_many": 1},
        {"more": 1},
    ):
        with pytest.raises(ConfigurationError, match="histogram"):
            HistogramBound.resumed(found.state() | damage)
    with pytest.raises(ConfigurationError, match="histogram"):
        HistogramBound.resumed(5)


def test_a_tight_bound_and_one_that_is_far_above():
    found = after(30)
    own = Measured(Clip(), 0.5, histogram=found)
    assert "clips about" in str(own.status) and own.status.cause == "clipping"
    assert "far above" in str(Measured(Clip(), 100.0, histogram=found).status)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.01, " clips about 100%.*clip=None"),
        (1.0, None),
        (0.8, None),
        (3.0, None),
        (10, " 10 times"),
    ],
)
def test_a_bound_of_ones_own_is_compared(factor, words):
    """With the one that costs least."""
    found = after(30)
    status = Measured(Clip(), factor * found.bound, histogram=found).status
    assert status.is_ok == (words is None)
    assert status.is_ok or re.search(f"^check: clip=[0-9.]+.*{words}", str(status))
