"""DPEM: equality with EM, recovery, sensitivity, noise, impossible estimates, state, bad input."""

import math

import numpy as np
import pytest
import torch
from contract import InferenceContract
from releases import Releases
from scipy import stats

from pyro_dp import (
    ConfigurationError,
    ModelError,
    PrivacyAccountant,
)
from pyro_dp.baselines import DPEM

_ALARM = 1e-8
CENTRES = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [0.0, -2.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def points(n=60, scale=0.5):
    z = torch.multinomial(WEIGHTS, n, replacement=True)
    return CENTRES[z] + scale * torch.randn(n, 2)


def em(start=CENTRES / 2, **options):
    settings = dict(
        radius=4.0,
        accountant=PrivacyAccountant(),
        num_steps=10,
        noise_multiplier=0,
        sampling="full",
    )
    if "sample_rate" in options:
        del settings["sampling"]
    return DPEM(start, **(settings | options))


class TestContract(InferenceContract):
    bound = "radius"
    outliers = ([1e6, 1e6], [1e200, -1e200], [0.0, 0.0], [-4.0, 4.0])
    bad_settings = (
        ({"start": [[0.0]]}, "start"),
        ({"start": torch.zeros(3)}, "start"),
        ({"start": torch.zeros(0, 2)}, "start"),
        ({"start": torch.full((2, 2), math.nan)}, "start"),
        ({"start_variance": 0.0}, "start_variance"),
        ({"least_variance": 0.0}, "least_variance"),
        ({"least_variance": 17.0}, "least_variance"),
        ({"least_variance": np.ones(2)}, "least_variance"),
        ({"num_steps": None}, "num_steps"),
        ({"sample_rate": None}, "sample_rate"),
    )

    def make(self, variant="model", start=CENTRES / 2, **options):
        scales = {"radius": 4.0, "start_variance": 4.0, "least_variance": 1e-3}
        return DPEM(start, **(scales | options))

    def data(self, variant="model"):
        return (points(),)

    def result(self, dpem):
        return {"weights": dpem.weights, "locs": dpem.locs, "covariances": dpem.covariances}

    def damage(self, state):
        yield {"radius": 3.0}, "radius differs"
        yield {"locs": torch.zeros(4, 2)}, "start"
        for name in ("weights", "locs", "covariances", "radius"):
            for value in ("1", 1.5, torch.full((3, 2), math.nan), torch.zeros(7)):
                yield {name: value}, None

    def test_a_long_row_moves_all_that_it_may(self):
        """The bounds of the blocks are tight, for a row in the direction of a component; one whose
        square overflows is no broken record, and has a component, too."""
        (x,) = self.data()

        def norms(length):
            far = torch.cat([x[:4], length * CENTRES[:1], x[5:]])
            blocks, sums = self.sums("model", (far,), [4], start=CENTRES, start_variance=0.25)
            return [(a.norm() / b.bound).item() for a, b in zip(sums, blocks, strict=True)]

        assert norms(1e6) == pytest.approx([1.0] * 3, abs=1e-6)
        assert norms(1e200)[0] > 0


def textbook(x, weights, locs, covariances):
    """One iteration of EM, component by component."""
    joint = np.stack(
        [
            w * stats.multivariate_normal(m, c).pdf(x)
            for w, m, c in zip(weights, locs, covariances, strict=True)
        ],
        axis=1,
    )
    r = joint / joint.sum(axis=1, keepdims=True)
    locs = np.stack([np.average(x, axis=0, weights=r[:, k]) for k in range(len(weights))])
    covariances = np.stack([np.cov(x.T, aweights=r[:, k], bias=True) for k in range(len(weights))])
    return r.mean(axis=0), locs, covariances


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_equals_em(dim):
    """sigma=0, all rows: the textbook's, from the same start."""
    x = torch.randn(300, dim) + 2 * torch.randint(-1, 2, (300, 1))
    start = torch.linspace(-2, 2, 3).unsqueeze(1) * torch.ones(dim)
    ours = em(start, radius=50.0, start_variance=1.5, least_variance=1e-9)
    expected = np.full(3, 1 / 3), start.numpy(), 1.5 * np.eye(dim)[None].repeat(3, 0)
    for _ in range(8):
        ours.step(x)
        expected = textbook(x.numpy(), *expected)
    found = (ours.weights, ours.locs, ours.covariances)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.reshape(one.shape), atol=1e-8)


def test_unclipped_rows():
    """radius=inf is EM, too; and it needs public scales, and no noise."""
    x = points()
    scales = {"start_variance": 1.0, "least_variance": 1e-6}
    far, wide = em(radius=math.inf, **scales), em(radius=100.0, **scales)
    far.run(x, progress=False)
    wide.run(x, progress=False)
    torch.testing.assert_close(far.locs, wide.locs)
    with pytest.raises(ConfigurationError, match="no scale"):
        em(radius=math.inf)
    with pytest.raises(ConfigurationError, match="infinite bound"):
        em(radius=math.inf, noise_multiplier=1.0, **scales)


@pytest.mark.parametrize("sample_rate", [1.0, 0.2])
def test_recovers_separated_components(sample_rate):
    """epsilon=1, N=20,000."""
    x = points(20_000)
    dpem = em(
        accountant=PrivacyAccountant(epsilon=1.0),
        noise_multiplier=None,
        sample_rate=sample_rate,
        generator=0,
    )
    dpem.run(x, progress=False)
    assert (dpem.locs - CENTRES).norm(dim=1).max() < 0.15
    assert (dpem.weights - WEIGHTS).abs().max() < 0.03
    assert (dpem.covariances - 0.25 * torch.eye(2)).abs().max() < 0.3
    assert dpem.accountant.get_epsilon() <= 1.0
    # Within 0.15 nats of the truth.
    truth = -math.log(2 * math.pi * 0.25) - 1 + (WEIGHTS * WEIGHTS.log()).sum().item()
    assert dpem.distribution.log_prob(x).mean().item() == pytest.approx(truth, abs=0.15)


def test_divides_by_the_public_rate(monkeypatch):
    """Moments are sum / rate, whatever the batch."""
    seen, x = [], points()
    dpem = em(sample_rate=0.3, num_steps=40, generator=0)
    spy = Releases(monkeypatch)
    maximise = DPEM._maximise
    monkeypatch.setattr(
        DPEM, "_maximise", lambda self, *moments: (seen.append(moments), maximise(self, *moments))
    )
    dpem.run(x, progress=False)
    assert len({total[0].sum().round().item() for total in spy.sums}) > 3
    for moments, sums in zip(seen, spy.sums, strict=True):
        for one, other in zip(moments[:-1], sums, strict=True):
            torch.testing.assert_close(one, other / 0.3)


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_empty_batch(monkeypatch, sigma):
    """It pays, is noisy, and leaves a possible estimate."""
    spy = Releases(monkeypatch)
    dpem = em(noise_multiplier=sigma, sample_rate=1e-9)
    dpem.step(points())
    assert all(torch.equal(total, torch.zeros_like(total)) for total in spy.sums[0])
    assert (spy.released[0][0].abs().min() > 0) == (sigma > 0)
    assert dpem.accountant.num_releases == 1
    require_possible(dpem)


def require_possible(dpem):
    assert dpem.weights.min() > 0 and dpem.weights.sum().item() == pytest.approx(1.0)
    assert dpem.locs.norm(dim=1).max() <= dpem.radius * (1 + 1e-9)
    values = torch.linalg.eigvalsh(dpem.covariances)
    assert values.min() > dpem.least_variance * (1 - 1e-6)
    assert values.max() < dpem.radius**2 * (1 + 1e-6)
    x = torch.randn(50, dpem.locs.shape[1])
    assert dpem.distribution.log_prob(x).isfinite().all()


@pytest.mark.parametrize("dim", [1, 2, 6])
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 10.0])
def test_never_an_impossible_estimate(epsilon, dim):
    dpem = em(
        torch.randn(4, dim),
        accountant=PrivacyAccountant(epsilon=epsilon),
        noise_multiplier=None,
        num_steps=30,
        generator=0,
    )
    x = torch.randn(50, dim)
    for _ in range(30):
        dpem.step(x)
        require_possible(dpem)


def test_degenerate_data():
    """One point, many times; and a component that gets no row at all."""
    dpem = em(torch.tensor([[1.0, 1.0], [-3.9, 0.0], [1.0, 1.0]]), start_variance=0.01)
    dpem.run(torch.ones(30, 2), progress=False)
    require_possible(dpem)
    assert torch.equal(dpem.locs[1], torch.tensor([-3.9, 0.0]))


def test_start_is_not_shared():
    start = CENTRES.clone()
    dpem = em(start)
    dpem.run(points(), progress=False)
    assert torch.equal(start, CENTRES)
    assert dpem.locs.dtype == torch.float64


def test_single_precision():
    x = points()
    single, double = em(CENTRES.float()), em(CENTRES)
    single.run(x.float(), progress=False)
    double.run(x, progress=False)
    torch.testing.assert_close(single.locs, double.locs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([[0.0, 0.0]], "tensor"),
        (torch.zeros(5, 2, dtype=torch.cfloat), "real numbers"),
        (torch.zeros(5, 3), "rows of 2"),
        (torch.zeros(2), "rows of 2"),
        (torch.zeros(0, 2), "rows of 2"),
        (torch.full((5, 2), math.inf), "NaN or infinite"),
    ],
)
def test_bad_data(x, words):
    dpem = em(noise_multiplier=1.0)
    with pytest.raises(ModelError, match=words):
        dpem.step(x)
    assert dpem.accountant.num_releases == 0


def test_data_that_change_are_checked_again():
    x, dpem = points(), em()
    dpem.step(x)
    x[3] = math.nan
    with pytest.raises(ModelError, match="NaN"):
        dpem.step(x)


def test_covariances_are_symmetric_at_any_scale():
    """Else torch does not take them for positive definite, and there is no distribution."""
    dpem = em(
        torch.tensor([[1e20, 1e20], [0.0, 0.0]]), radius=1e20, noise_multiplier=0.5, generator=0
    )
    for _ in range(5):
        dpem.step(points())
        assert torch.equal(dpem.covariances, dpem.covariances.mT)
        assert dpem.distribution.sample().isfinite().all()
