"""The package's own inferences audited, and faults planted in them that an audit must find.

At 99.9% confidence an audit of a correct program contradicts the claim in one of a thousand seeds
at most. Audits of correct programs here have confidence 1 - 1e-8. Each fault has its probability to
be missed written beside it. benchmarks/audit.py has longer audits.
"""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from ledgers import ledger
from problems import logistic
from pyro.infer import Trace_ELBO

from pyro_dp import (
    Execution,
    FullBatch,
    Noise,
    PaperDPSVI,
    PrivacyAccountant,
    SubsampledGaussian,
    audit,
    audit_one_run,
)
from pyro_dp.mechanism import clipping, releases
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.vips import VIPS, LogisticRegression

# Made-up data.
pytestmark = pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")

SURE = 1 - 1e-8
SIZE, DIM = 20, 3
LONG = 20.0  # features of the canary: its gradient is ten times the bound


def claimed(epsilon):
    """The accountant of one full-batch release with this epsilon, and the noise multiplier."""
    sigma = PrivacyAccountant(epsilon).noise_multiplier(num_steps=1, sampling="full")
    return ledger((SubsampledGaussian(sigma, 1.0, "full"), 1), epsilon=epsilon), sigma


def records():
    """The first coordinate of the features is the canary's alone; the first record is empty."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(SIZE, DIM, generator=generator) - 0.5
    x[:, 0] = 0.0
    x[0] = 0.0
    return (x, torch.ones(SIZE)), (torch.eye(DIM)[0] * LONG, 1.0)


class OneStep:
    """One step of plain gradient ascent from zero: the new location is the release.

    Each of the two data sets has one DPSVI for all of the steps. A first step takes as long as a
    thousand later ones.
    """

    def __init__(self, noise_multiplier, *, prepare=lambda x: x):
        self._noise_multiplier, self._prepare = noise_multiplier, prepare
        self._known = {}
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, x, y):
        if id(x) not in self._known:
            name = f"loc{len(self._known)}"
            self._known[id(x)] = (self._prepare(x), *self._svi(name, x.shape[1]))
        prepared, svi, loc = self._known[id(x)]
        with torch.no_grad():
            loc.zero_()
        svi.step(prepared, y)
        return loc.numpy(force=True).copy()

    def _svi(self, name, dim):
        loc = pyro.param(name, torch.zeros(dim))

        def guide(x, y):
            pyro.sample("w", dist.Delta(pyro.param(name), event_dim=1))

        noise = Noise(self._noise_multiplier, source=self._generator)
        how = dict(noise=noise, sampling=FullBatch(), execution=Execution(jit="trace"))
        optim, accountant = pyro.optim.SGD({"lr": 1.0}), PrivacyAccountant()
        return PaperDPSVI(logistic, guide, optim, Trace_ELBO(), accountant=accountant, **how), loc


def first(location):
    return location[0]


def run(make_run, claim, data=None, **settings):
    settings = {"num_trials": 1500, "score": first, "seed": 0, "progress": False} | settings
    return audit(make_run, *(data or records()), claim=claim, **settings)


def with_noise(scale):
    """The release with its noise scaled, and accounted as if it were not."""
    original = releases.release

    class Scaled:
        def __init__(self, noise):
            self._noise = noise

        def standard_normal(self, size):
            return scale * self._noise.standard_normal(size)

    def release(clipped, *, accountant, event, noise):
        return original(clipped, accountant=accountant, event=event, noise=Scaled(noise))

    return release


class TestOneStep:
    @pytest.mark.slow
    def test_is_private(self):
        """The audit has power: with 3,000 runs it shows an eighth of epsilon."""
        claim, sigma = claimed(4.0)
        result = run(OneStep(sigma), claim, num_trials=3000, confidence=SURE)
        assert 0.5 < result.bound < 4.0
        assert not result.contradicts_claim

    @pytest.mark.slow
    def test_without_noise(self, monkeypatch):
        """The fault is found with certainty: 240 right guesses show log(240 / 7) = 3.5."""
        claim, sigma = claimed(2.0)
        monkeypatch.setattr(releases, "release", with_noise(0.0))
        assert run(OneStep(sigma), claim, num_trials=300).contradicts_claim

    @pytest.mark.slow
    def test_without_clipping(self, monkeypatch):
        """The fault is found with certainty: the worlds are 9 standard deviations apart."""
        original = clipping.clipped_sums

        def unclipped(values, bounds, weights=None):
            return original(values, [math.inf] * len(bounds), weights)

        claim, sigma = claimed(4.0)
        monkeypatch.setattr(clipping.ClippedSum, "clipped_sums", staticmethod(unclipped))
        assert run(OneStep(sigma), claim, num_trials=600).contradicts_claim

    @pytest.mark.slow
    def test_data_centred_by_their_own_mean(self):
        """Found with certainty: the canary moves each of the 19 others, altogether by 8 C."""
        claim, sigma = claimed(4.0)
        make_run = OneStep(sigma, prepare=lambda x: x - x.mean(dim=0))
        score = dict(num_trials=600, score=lambda w: -w[0])
        assert run(make_run, claim, **score).contradicts_claim

    @pytest.mark.slow
    def test_fixed_order_counted_as_poisson(self):
        """Single-record steps, each record once; records are at the bounds -C, the canary at +C.

        The attacker knows the order, so only the canary's step matters, a Gaussian with mu = 2. So
        is one on all records, which stands for it here. At 2,000 runs the bound is 2.6 on average
        with a standard deviation of 0.2.
        """
        claim = ledger((SubsampledGaussian(1.0, 1 / 100), 100), neighboring="replace_one")
        data = (-LONG * torch.eye(DIM)[[0] * SIZE], torch.ones(SIZE))
        result = run(OneStep(1.0), None, (data, records()[1]), num_trials=2000)
        assert result.bound > 1.5 > claim.get_epsilon()

    @pytest.mark.long
    def test_many_canaries_in_one_run(self, monkeypatch):
        """200, each in a direction of its own. Without noise 75 right guesses show 2.3."""
        data = torch.zeros(200, 200), torch.ones(200)
        canaries = LONG * torch.eye(200), torch.ones(200)
        claim, sigma = claimed(4.0)
        attack = dict(data=data, canaries=canaries, score=lambda w: w, seed=0)
        result = audit_one_run(OneStep(sigma), claim=claim, confidence=SURE, **attack)
        assert result.bound < 4.0
        monkeypatch.setattr(releases, "release", with_noise(0.0))
        claim, sigma = claimed(2.0)
        result = audit_one_run(OneStep(sigma), claim=claim, negative=50, **attack)
        assert result.contradicts_claim


class TestRelease:
    """The release that all of them share, without a model: a record at its bound, or none."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "scale, trials", [(1.0, 10_000), pytest.param(0.5, 50_000, marks=pytest.mark.slow)]
    )
    def test_half_the_noise(self, scale, trials):
        """The claimed epsilon is 1. With half the noise it is 2.2.

        The bound has mean 1.13 there: missed in one of fifteen seeds.
        """
        release = with_noise(scale)
        claim, sigma = claimed(1.0)
        event, accountant = SubsampledGaussian(sigma, 1.0, "full"), PrivacyAccountant()
        stream, sums = np.random.default_rng(0), {}

        def make_run(rows):
            if id(rows) not in sums:
                sums[id(rows)] = ClippedSum([Block(1, 1.0)])
                sums[id(rows)].add(rows)
            return release(sums[id(rows)], accountant=accountant, event=event, noise=stream)[0]

        data = (torch.zeros(1, 1),), ([3.0],)
        result = run(make_run, claim, data, num_trials=trials, score=float)
        assert result.contradicts_claim == (scale == 0.5)


def ten_of_each(make_run):
    """Without noise only public draws differ between runs on the same data: ten take turns."""
    turns = {}

    def turn(x, y):
        with_canary = x[0].any().item()
        if with_canary not in turns:
            turns[with_canary] = itertools.cycle([make_run(x, y) for _ in range(10)])
        return next(turns[with_canary])

    return turn


class TestWholeRuns:
    """Inferences from their start to their end, as users run them."""

    @pytest.mark.slow
    def test_vips_without_noise(self, monkeypatch):
        """All 60 guesses are right, which shows an epsilon of 2.1."""
        monkeypatch.setattr(releases, "release", with_noise(0.0))
        generator = torch.Generator().manual_seed(0)
        accountants = []

        def make_run(x, y):
            accountants.append(PrivacyAccountant(1.0))
            settings = dict(num_steps=3, noise=Noise(source=generator))
            vips = VIPS(LogisticRegression(DIM), accountant=accountants[-1], **settings)
            vips.run(x, y, progress=False)
            return vips.posterior()["weights"].mean

        make_run(*records()[0])
        result = run(ten_of_each(make_run), accountants[0], num_trials=100, score=None)
        assert result.contradicts_claim
