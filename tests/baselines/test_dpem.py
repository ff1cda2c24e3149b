"""DPEM: equality with EM, recovery, sensitivity, noise, impossible estimates, state, bad input."""

import io
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from sums import exact_sums

import pyro_dp.mechanism.iterative
import pyro_dp.mechanism.sampling
from pyro_dp import (
    ConfigurationError,
    ModelError,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.baselines import DPEM
from pyro_dp.mechanism.release import release

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


class Spy:
    """Keeps what enters each release and what comes out."""

    def __init__(self, monkeypatch):
        self.blocks, self.sums, self.released = [], [], []

        def spy(clipped, **named):
            self.blocks.append(clipped.blocks)
            self.sums.append([total.clone() for total in exact_sums(clipped)])
            self.released.append([block.clone() for block in release(clipped, **named)])
            return self.released[-1]

        monkeypatch.setattr(pyro_dp.mechanism.iterative, "release", spy)


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


def sums_of(monkeypatch, x, batch, **options):
    """The exact sums of one step on a batch, at estimates that do not depend on it.

    Also the blocks.
    """
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        dpem = em(sample_rate=0.5, generator=0, **options)
        dpem.locs, dpem.weights = CENTRES.clone(), WEIGHTS.clone()
        dpem.covariances = 0.25 * torch.eye(2).repeat(3, 1, 1)
        patch.setattr(
            pyro_dp.mechanism.sampling.RecordSampler,
            "draw",
            lambda self, stream: torch.tensor(batch),
        )
        dpem.step(x)
    return spy.sums[0], spy.blocks[0]


@pytest.mark.parametrize("row", [[1e6, 1e6], [1e200, -1e200], [0.0, 0.0], [-4.0, 4.0]])
def test_sensitivity(monkeypatch, row):
    """Neighbouring data sets: each block within its bound, and together within one.

    A long row in the middle of a component attains it.
    """
    x = points()
    other = x.clone()
    other[4] = torch.tensor(row)
    with_it, blocks = sums_of(monkeypatch, x, [1, 4, 8, 20])
    without, _ = sums_of(monkeypatch, x, [1, 8, 20])
    unseen, _ = sums_of(monkeypatch, other, [1, 8, 20])
    replaced, _ = sums_of(monkeypatch, other, [1, 4, 8, 20])
    assert all(map(torch.equal, without, unseen))
    assert sum(block.share for block in blocks) == pytest.approx(1.0)

    def distance(one, two):
        """Joint: in units of each block's bound over the square root of its share."""
        norms = [(a - b).norm().item() for a, b in zip(one, two, strict=True)]
        assert all(n <= 2 * b.bound * (1 + 1e-9) for n, b in zip(norms, blocks, strict=True))
        return math.hypot(*(n / b.bound * b.share**0.5 for n, b in zip(norms, blocks, strict=True)))

    assert 0 < distance(with_it, without) <= 1 + 1e-9
    assert 0 < distance(replaced, without) <= 1 + 1e-9
    assert distance(replaced, with_it) <= 2 * (1 + 1e-9)
    if row == [1e6, 1e6]:
        assert distance(replaced, without) > 1 - 1e-6


def test_rows_that_break_add_nothing(monkeypatch):
    """NaN that appears behind the back of the checks."""
    array = points().numpy()
    x = torch.from_numpy(array)
    spy, dpem = Spy(monkeypatch), em()
    dpem.step(x)
    array[3] = math.nan
    before = dpem.state_dict()
    dpem.step(x)
    clean = em()
    clean.load_state_dict(before)
    clean.step(torch.cat([x[:3], x[4:]]))
    for one, other in zip(spy.sums[1], spy.sums[2], strict=True):
        torch.testing.assert_close(one, other)


def test_noise_is_added_at_the_right_scale(monkeypatch):
    """Of each block in units of its bound; two thirds and three halves are rejected."""
    spy, x = Spy(monkeypatch), points()
    dpem = em(torch.randn(3, 2), num_steps=400, noise_multiplier=1.5, sample_rate=0.3, generator=0)
    dpem.run(x, progress=False)
    for k, block in enumerate(spy.blocks[0]):
        pairs = zip(spy.released, spy.sums, strict=True)
        noise = torch.cat([r[k] - s[k] for r, s in pairs]).numpy()
        noise = noise / (1.5 * block.bound / math.sqrt(block.share))
        assert stats.kstest(noise, "norm").pvalue > _ALARM
        assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
        assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM
    assert dpem.accountant.ledger == ((SubsampledGaussian(1.5, 0.3), 400),)


def test_divides_by_the_public_rate(monkeypatch):
    """Moments are sum / rate, whatever the batch."""
    seen, x = [], points()
    dpem = em(sample_rate=0.3, num_steps=40, generator=0)
    spy = Spy(monkeypatch)
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
    spy = Spy(monkeypatch)
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


@pytest.mark.parametrize("size", [1, 7, 60])
def test_microbatches_change_nothing(size):
    x = points()
    whole = em(sample_rate=0.6, noise_multiplier=1.0, generator=0)
    parts = em(sample_rate=0.6, noise_multiplier=1.0, generator=0, microbatch_size=size)
    torch.testing.assert_close(
        whole.run(x, progress=False), parts.run(x, progress=False), rtol=1e-9, atol=1e-12
    )


def test_budget():
    accountant = PrivacyAccountant(epsilon=1.0, neighboring="replace_one")
    dpem = em(accountant=accountant, noise_multiplier=None, sample_rate=0.1, sampling="fixed")
    x = points()
    dpem.run(x, progress=False)
    assert 0.995 < accountant.get_epsilon() <= 1.0
    (entry,) = accountant.ledger
    assert entry == (SubsampledGaussian(dpem.noise_multiplier, 0.1, "fixed"), 10)
    before = dpem.locs.clone()
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        dpem.step(x)
    other = em(accountant=accountant, noise_multiplier=0.5)
    with pytest.raises(PrivacyBudgetExceeded):
        other.step(x)
    assert torch.equal(dpem.locs, before) and torch.equal(other.locs, CENTRES / 2)
    assert accountant.num_releases == 10


def test_state_round_trip():
    x = points()

    def make():
        return em(accountant=PrivacyAccountant(epsilon=1.0), noise_multiplier=None)

    first, second = make(), make()
    for _ in range(4):
        first.step(x)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for name in ("weights", "locs", "covariances"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert second.noise_multiplier == first.noise_multiplier
    second.run(x, progress=False)
    assert second.accountant.num_releases == 10
    assert second.accountant.get_epsilon() <= 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "state_dict"),
        ({"noise_multiplier": 3.0}, "noise_multiplier"),
        ({"radius": 3.0}, "radius"),
        ({"steps": -1}, "steps"),
        ({"locs": torch.zeros(4, 2)}, "start"),
    ],
)
def test_damaged_state(change, words):
    dpem = em()
    with pytest.raises(ConfigurationError, match=words):
        dpem.load_state_dict(dpem.state_dict() | change)


def test_pickling_would_carry_the_data():
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(em())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": [[0.0]]}, "start"),
        ({"start": torch.zeros(3)}, "start"),
        ({"start": torch.zeros(0, 2)}, "start"),
        ({"start": torch.full((2, 2), math.nan)}, "start"),
        ({"radius": 0.0}, "radius"),
        ({"radius": math.nan}, "radius"),
        ({"radius": "1"}, "radius"),
        ({"start_variance": 0.0}, "start_variance"),
        ({"least_variance": 0.0}, "least_variance"),
        ({"least_variance": 17.0}, "least_variance"),
        ({"least_variance": np.ones(2), "radius": math.inf}, "start_variance"),
        ({"num_steps": None}, "num_steps"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": None}, "sample_rate"),
        ({"sampling": "fixed"}, "fixed"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"secure": 1}, "secure"),
        ({"accountant": None}, "accountant"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ConfigurationError, match=words):
        em(**options)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([[0.0, 0.0]], "tensor"),
        (torch.zeros(5, 2, dtype=torch.long), "floating"),
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


@pytest.mark.parametrize("key", ["weights", "locs", "covariances", "radius"])
@pytest.mark.parametrize("value", ["1", 1.5, torch.full((3, 2), math.nan), torch.zeros(7)])
def test_parts_of_a_state_that_do_not_fit(key, value):
    dpem = em()
    dpem.step(points())
    with pytest.raises(ConfigurationError):
        dpem.load_state_dict(dpem.state_dict() | {key: value})


def test_covariances_are_symmetric_at_any_scale():
    """Else torch does not take them for positive definite, and there is no distribution."""
    dpem = em(
        torch.tensor([[1e20, 1e20], [0.0, 0.0]]), radius=1e20, noise_multiplier=0.5, generator=0
    )
    for _ in range(5):
        dpem.step(points())
        assert torch.equal(dpem.covariances, dpem.covariances.mT)
        assert dpem.distribution.sample().isfinite().all()
