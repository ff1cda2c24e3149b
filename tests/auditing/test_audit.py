"""Audits of mechanisms whose privacy has a closed form: reports and refusals.

Mechanisms here are plain numpy: tests/test_audited_inference.py audits the package's own. Seeds are
fixed. A bound at confidence 0.999 is wrong in one of a thousand seeds, those with confidence
1 - 1e-8 in one of 10^8.
"""

import math

import numpy as np
import pytest
import torch
from ledgers import ledger
from scipy.special import ndtr, ndtri
from scipy.stats import binomtest

from pyro_dp import ApproximateDP, PrivacyAccountant, SubsampledGaussian, audit, audit_one_run
from pyro_dp.accounting.trade_off import TradeOff
from pyro_dp.auditing.bounds import least_advantage, middle_threshold, runs_bound
from pyro_dp.auditing.result import with_noise
from pyro_dp.utils.errors import ConfigurationError

# Made-up data.
pytestmark = pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")

SURE = 1 - 1e-8
DATA = (np.zeros((5, 2)), torch.zeros(5))
CANARY = ([1.0, 0.0], 1.0)


def gaussian(sigma, seed=0):
    """A noisy sum of rows, with its accountant."""
    rng = np.random.default_rng([seed, 1])  # apart from the coins
    accountant = ledger((SubsampledGaussian(sigma, 1.0, "full"), 1))
    return lambda x, y: x.sum(0) + sigma * rng.standard_normal(x.shape[1]), accountant


def run(mechanism, **settings):
    settings = {"num_trials": 1000, "seed": 0, "progress": False} | settings
    return audit(mechanism, DATA, CANARY, **settings)


class TestRepeatedRuns:
    @pytest.mark.slow
    @pytest.mark.parametrize("score", [None, lambda value: value[0]])
    @pytest.mark.parametrize("sigma", [0.5, 1.0])
    def test_is_below_epsilon_and_shows_a_part_of_it(self, score, sigma):
        mechanism, claim = gaussian(sigma)
        result = run(mechanism, num_trials=20_000, score=score, claim=claim, confidence=SURE)
        assert 0.3 * claim.get_epsilon() < result.bound <= claim.get_epsilon()
        assert not result.contradicts_claim

    def test_thresholds_are_chosen_on_other_runs(self, monkeypatch):
        """A threshold looks too good on the runs by which it was chosen."""
        seen = []

        def spied(scores, included):
            seen.append(scores)
            return middle_threshold(scores, included)

        monkeypatch.setitem(audit.__globals__, "middle_threshold", spied)
        run(lambda x, y: x.sum(0), num_trials=100, score=lambda value: value[0])
        assert [len(scores) for scores in seen] == [20]

    def test_no_noise(self):
        result = run(lambda x, y: x.sum(0))
        assert result.guesses == result.correct == result.coins == 600
        assert result.bound == pytest.approx(math.log(1 / (1 - 0.00095 ** (1 / 600)) - 1), abs=0.01)

    @pytest.mark.long
    def test_randomised_response(self):
        rng = np.random.default_rng(0)

        def mechanism(x, y):
            truth = bool(x.any())
            return float(truth if rng.random() < 0.75 else not truth)

        result = run(mechanism, num_trials=20_000, delta=0.0, confidence=SURE)
        assert 0.8 * math.log(3) < result.bound <= math.log(3)

    @pytest.mark.long
    @pytest.mark.parametrize("told", [0.0, 1.0])
    def test_one_direction_is_enough(self, told):
        """Numbers that only one of the worlds gives, with probability 0.05, far out on one side."""
        rng = np.random.default_rng(0)
        side = 5.0 if told else -5.0

        def mechanism(x, y):
            tells = bool(x.any()) == bool(told) and rng.random() < 0.05
            return rng.random() + (side if tells else 0.0)

        result = run(mechanism, num_trials=20_000, score=float)
        assert result.bound > 2.0
        assert 300 < result.guesses < 600

    def test_nothing_to_see(self):
        assert run(lambda x, y: 0.0).bound == 0.0

    @pytest.mark.slow
    @pytest.mark.parametrize("dim", [1, 30])
    def test_is_wrong_as_often_as_stated(self, dim):
        """If nothing can be seen, any bound is wrong. Thresholds and direction were fitted.

        200 audits at confidence 0.9: more than 45 wrong ones have probability 1e-7.
        """
        rng = np.random.default_rng(0)
        wrong = sum(
            run(lambda x, y: rng.standard_normal(dim), num_trials=150, confidence=0.9, seed=i).bound
            > 0.0
            for i in range(200)
        )
        assert wrong <= 45

    def test_delta_pays_for_rare_disclosures(self):
        rng = np.random.default_rng(0)
        result = run(
            lambda x, y: float(x.any()) * (rng.random() < 0.01), delta=0.01, confidence=SURE
        )
        assert result.bound == 0.0

    def test_what_a_run_gets(self):
        seen = []

        def mechanism(x, y):
            seen.append((x.copy(), y.clone()))
            return float(len(seen))

        with pytest.raises(ConfigurationError):
            run(lambda x, y: None)
        run(mechanism, num_trials=100)
        assert len(seen) == 100
        included = [x.any() for x, _ in seen]
        assert 30 < sum(included) < 70
        for x, y in seen:
            assert isinstance(x, np.ndarray) and isinstance(y, torch.Tensor)
            assert not x[1:].any() and not y[1:].any()
            np.testing.assert_array_equal(x[0], CANARY[0] if y[0] else [0.0, 0.0])
        assert not DATA[0].any() and not DATA[1].any()

    def test_seed(self):
        coins = []
        for seed in (1, 1, 2, None, None):
            coins.append([])
            run(lambda x, y, into=coins[-1]: into.append(bool(x.any())) or 0.0, seed=seed)
        assert coins[0] == coins[1]
        assert len({tuple(each) for each in coins}) == 4

    def test_progress(self, capsys):
        run(lambda x, y: 0.0, num_trials=100, progress=True)
        assert "audit: 100%" in capsys.readouterr().err


class TestRates:
    @pytest.mark.long
    def test_limits_hold_the_true_curve(self):
        mechanism, claim = gaussian(1.0)
        settings = dict(num_trials=20_000, score=lambda v: v[0], confidence=SURE)
        result = run(mechanism, claim=claim, **settings)
        rates = result.rates
        assert len(rates.thresholds) == 25
        for interval, truth in (
            (rates.false_positive_limits, ndtr(-rates.thresholds)),
            (rates.false_negative_limits, ndtr(rates.thresholds - 1.0)),
        ):
            assert np.all(interval[0] <= truth) and np.all(truth <= interval[1])
            assert np.all(interval[1] - interval[0] < 0.08)
        absent = int((np.random.default_rng(0).integers(2, size=16_000) == 0).sum())
        hits = round(rates.false_positive[3] * absent)
        exact = binomtest(hits, absent).proportion_ci(1 - 1e-8 / 50, method="exact")
        np.testing.assert_allclose(rates.false_positive_limits[:, 3], exact, rtol=1e-6)
        alpha, least = result.claimed_curve
        np.testing.assert_allclose(least, ndtr(ndtri(1 - alpha) - 1.0), atol=2e-3)
        assert result.claimed_epsilon == claim.get_epsilon()

    @pytest.mark.long
    def test_delta_of_the_claim(self):
        mechanism, claim = gaussian(1.0)
        assert run(mechanism, claim=claim, delta=1e-3).claimed_epsilon == claim.get_epsilon(1e-3)
        assert run(mechanism, claim=claim, delta=0.0).claimed_epsilon == math.inf

    def test_words(self):
        mechanism, claim = gaussian(0.5)
        result = run(mechanism, claim=claim)
        assert f"{result.curve.correct} of {result.curve.guesses} guesses" in result.how
        assert f"{result.curve.noise_share:.3g} times the claimed" in result.how
        assert f"{result.bound:.4g}" in str(result) and "claimed" in str(result)
        result = run(mechanism)
        assert f"{result.correct} of {result.guesses} guesses" in result.how
        assert f"epsilon below {result.bound:.4g}" in result.how
        assert "no epsilon" in run(lambda x, y: 0.0).how and "claimed" not in str(result)

    @pytest.mark.parametrize("one_run", [True, False])
    def test_plot(self, one_run):
        pytest.importorskip("matplotlib").use("Agg")
        mechanism, claim = gaussian(0.5)
        if one_run:
            result = audit_one_run(mechanism, DATA, (np.eye(2), [1, 1]), lambda v: v, claim=claim)
        else:
            result = run(mechanism, claim=claim)
        axes = result.plot()
        assert {"least errors claimed", "attack"} <= set(axes.get_legend_handles_labels()[1])
        assert result.plot(axes) is axes


class TestCurve:
    """The claimed trade-off curve: mechanisms whose noise is a little too small."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("share", "found"), [(1.0, range(1)), (0.9, range(3, 21)), (0.8, range(16, 21))]
    )
    def test_noise_that_is_too_small(self, share, found):
        """Twenty audits at epsilon = 4. The chances to find it are .0005, .5 and 1 - 1e-7."""
        sigma = PrivacyAccountant(4.0).noise_multiplier(num_steps=1, sampling="full")
        claim, results = gaussian(sigma)[1], []
        settings = dict(num_trials=10_000, score=lambda v: v[0], claim=claim)
        for seed in range(20):
            results.append(run(gaussian(share * sigma, seed)[0], seed=seed, **settings))
        assert sum(each.contradicts_claim for each in results) in found
        if share == 1.0:
            assert np.median([each.bound for each in results]) > 3.16
            shares = [each.curve.noise_share for each in results]
            assert 1.0 < min(shares) and max(shares) < 1.3

    def test_share_is_the_mechanism_with_that_noise(self):
        assert with_noise(gaussian(1.0)[1], 0.5).get_epsilon() == gaussian(0.5)[1].get_epsilon()

    def test_both_tests_share_the_error(self):
        mechanism, claim = gaussian(1.0)
        result = run(mechanism, claim=claim, confidence=0.9)
        curve = result.curve
        point = runs_bound(600, result.guesses, result.correct, 1e-5, 0.95)
        assert result.point_bound == pytest.approx(point)
        advantage = TradeOff.of(with_noise(claim, curve.noise_share)).advantage
        assert advantage == pytest.approx(least_advantage(600, curve.correct, 0.05), rel=1e-2)

    @pytest.mark.long
    def test_samples(self):
        """With a rate of .5 the total variation halves, and the share of the noise is found."""
        rng, claim = np.random.default_rng(0), ledger((SubsampledGaussian(0.5, 0.5), 1))

        def mechanism(x, y):
            return (rng.random() < 0.5) * x[0, 0] + 0.5 * rng.standard_normal()

        result = run(mechanism, num_trials=20_000, claim=claim, score=float)
        assert result.curve.correct == pytest.approx(0.671 * 16_000, abs=6 * 60)
        assert 1.0 < result.curve.noise_share < 1.3

    def test_a_ledger_without_noise_to_scale(self):
        claim = ledger((ApproximateDP(0.1, 0.0, "a count"), 1))
        result = run(lambda x, y: x.sum(), claim=claim)
        assert result.curve.noise_share == 0.0 and result.contradicts_claim
        assert run(lambda x, y: 0.0, claim=claim).curve.noise_share == math.inf

    @pytest.mark.slow
    def test_one_run(self):
        """A thousand canaries at a confidence of .95: a half of epsilon."""
        sigma = PrivacyAccountant(4.0).noise_multiplier(num_steps=1, sampling="full")
        settings = dict(confidence=0.95, claim=gaussian(sigma)[1])
        results = [TestOneRun().run(sigma, seed, **settings) for seed in range(10)]
        for result in results:
            assert result.curve.noise_share > 1.0 and result.point_bound < result.bound
        assert np.median([result.bound for result in results]) > 1.7


class TestOneRun:
    """m canaries in directions of their own."""

    M = 1000
    DATA = (torch.zeros(1500, 1000),)
    CANARIES = (torch.eye(1000),)

    def run(self, sigma, seed=0, **settings):
        rng = np.random.default_rng([seed, 1])
        return audit_one_run(
            lambda x: x.sum(0).numpy() + sigma * rng.standard_normal(self.M),
            self.DATA,
            self.CANARIES,
            lambda released: released,
            **{"seed": seed} | settings,
        )

    @pytest.mark.parametrize("sigma", [0.5, 1.0])
    def test_is_below_epsilon_and_shows_a_part_of_it(self, sigma):
        claim = gaussian(sigma)[1]
        result = self.run(sigma, claim=claim, delta=1e-5)
        assert 0.15 * claim.get_epsilon() < result.bound < claim.get_epsilon()
        assert (result.coins, result.guesses) == (1000, 200)
        assert "One run" in result.how

    def test_finds_missing_noise(self):
        claim = gaussian(1.0)[1]
        result = self.run(0.0, claim=claim, positive=500, negative=400)
        assert result.contradicts_claim

    def test_guesses(self):
        """Guesses follow the scores. Included canaries have the larger ones here."""
        for positive in (300, 0):
            result = self.run(0.0, positive=positive, negative=300 - positive)
            assert result.guesses == result.correct == 300
        mean = self.run(0.0, positive=1000, negative=0).correct / 1000
        assert 0.4 < mean < 0.6

    def test_a_score_without_information(self):
        bounds = [self.run(1e6, seed=seed).bound for seed in range(20)]
        assert max(bounds) < 0.3 and np.median(bounds) == 0.0

    @pytest.mark.parametrize(
        "settings", [{"positive": 600, "negative": 500}, {"positive": 0, "negative": 0}]
    )
    def test_number_of_guesses(self, settings):
        with pytest.raises(ConfigurationError, match="positive"):
            self.run(1.0, **settings)

    def test_one_score_for_each(self):
        with pytest.raises(ConfigurationError, match="1000 canaries"):
            audit_one_run(lambda x: 0.0, self.DATA, self.CANARIES, lambda value: value)
        with pytest.raises(ConfigurationError, match="score must be callable"):
            audit_one_run(lambda x: 0.0, self.DATA, self.CANARIES, None)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"make_run": 1}, "make_run"),
        ({"score": 1}, "score"),
        ({"num_trials": 99}, "num_trials"),
        ({"num_trials": 1e3}, "num_trials"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -0.1}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"claim": 1.0}, "claim"),
        ({"seed": -1}, "seed"),
        ({"data": DATA[0]}, "data"),
        ({"data": ()}, "data"),
        ({"data": (DATA[0], 3.0)}, r"data\[1\]"),
        ({"data": (DATA[0], torch.tensor(1.0))}, r"data\[1\]"),
        ({"canary": CANARY[:1]}, "canary"),
        ({"canary": torch.zeros(2)}, "canary"),
        ({"canary": ([1.0], 1.0)}, r"canary\[0\]"),
        ({"canary": ([1.0, 0.0], "yes")}, r"canary\[1\]"),
        ({"make_run": lambda x, y: "a string"}, "score=None"),
        ({"make_run": lambda x, y: np.nan}, "finite"),
        ({"make_run": lambda x, y: np.zeros(1 + int(y[0]))}, "equally many"),
        ({"score": lambda value: [1.0, 2.0]}, "one number"),
        ({"score": lambda value: np.inf}, "finite"),
    ],
)
def test_refuses(settings, named):
    arguments = {"make_run": lambda x, y: 0.0, "data": DATA, "canary": CANARY, "num_trials": 100}
    with pytest.raises(ConfigurationError, match=named):
        audit(**arguments | settings, progress=False)


def test_refuses_a_canary_that_is_the_record():
    """Such a canary finds no fault, however small the noise is."""
    zeros = [np.zeros((4, 2))]
    with pytest.raises(ConfigurationError, match="canary equals the record"):
        audit(np.sum, zeros, [[0.0, 0.0]], num_trials=100, score=float, progress=False)
    with pytest.raises(ConfigurationError, match="canary equals the record"):
        audit_one_run(np.copy, zeros, [np.eye(3, 2)], lambda x: x[:3, 0])


@pytest.mark.parametrize(
    "canaries", [(np.ones((6, 2)), np.ones(6)), (np.ones((2, 2)), np.ones(3)), (np.ones(2), 1.0)]
)
def test_refuses_canaries(canaries):
    with pytest.raises(ConfigurationError, match="canaries"):
        audit_one_run(lambda x, y: 0.0, DATA, canaries, lambda value: value)
