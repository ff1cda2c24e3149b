"""Both bounds against exact worst cases and against simulated mechanisms of exact epsilon.

There are many simulated audits. The number of wrong bounds may exceed its allowed mean by six
standard deviations, a false-alarm rate of about 1e-9 (the seeds are fixed).
"""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from scipy.special import ndtr, ndtri
from scipy.stats import binom, binomtest

from pyro_dp.auditing.bounds import (
    canaries_bound,
    canaries_contradict,
    canaries_error,
    least_advantage,
    rate_interval,
    runs_bound,
)


def accuracy(epsilon):
    return 1 / (1 + math.exp(-epsilon))


def allowed(error, audits):
    return error + 6 * math.sqrt(error / audits)


@pytest.mark.parametrize("hits, trials", [(0, 7), (3, 7), (7, 7), (120, 40_000), (1, 1)])
def test_rate_interval(hits, trials):
    low, high = rate_interval(hits, trials, 0.0005)
    exact = binomtest(hits, trials).proportion_ci(0.999, method="exact")
    assert low == pytest.approx(exact.low, abs=1e-12)
    assert high == pytest.approx(exact.high, abs=1e-12)


class TestRuns:
    AUDITS = 20_000

    def wrong(self, correct, wrong, trials, epsilon, delta, confidence=0.9):
        """How often the bound exceeds epsilon if each run's guess has these probabilities."""
        counts = np.random.default_rng(0).multinomial(
            trials, [correct, wrong, 1 - correct - wrong], size=self.AUDITS
        )
        bounds = runs_bound(trials, counts[:, :2].sum(1), counts[:, 0], delta, confidence)
        return np.mean(bounds > epsilon), np.median(bounds)

    @pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
    @pytest.mark.parametrize("guessed", [0.05, 1.0])
    @pytest.mark.parametrize("delta", [0.0, 0.01])
    def test_is_wrong_as_often_as_stated_in_the_worst_case(self, epsilon, guessed, delta):
        correct = guessed * accuracy(epsilon) + delta * (1 - accuracy(epsilon))
        wrong, _ = self.wrong(correct, guessed - correct, 2000, epsilon, delta)
        assert wrong <= allowed(0.1, self.AUDITS)

    @pytest.mark.long
    def test_is_not_much_too_careful(self):
        wrong, median = self.wrong(accuracy(1.0), 1 - accuracy(1.0), 2000, 1.0, 0.0)
        assert wrong > 0.05
        assert 0.85 < median < 1.0
        _, median = self.wrong(accuracy(1.0), 1 - accuracy(1.0), 10**7, 1.0, 0.0)
        assert 0.997 < median < 1.0

    def test_what_delta_allows_is_no_evidence(self):
        """With probability delta the mechanism tells everything, and otherwise nothing."""
        assert runs_bound(100_000, 1000, 1000, 0.01, 0.999) == 0.0
        assert runs_bound(100_000, 1000, 1000, 0.0, 0.999) > 4.0

    def test_perfect_guesses(self):
        expected = math.log(1 / (1 - (0.95 * 0.001) ** (1 / 5000)) - 1)
        assert runs_bound(5000, 5000, 5000, 0.0, 0.999) == pytest.approx(expected)

    @pytest.mark.parametrize("guesses, correct", [(0, 0), (5, 0), (100, 40)])
    def test_no_evidence_is_zero(self, guesses, correct):
        assert runs_bound(100, guesses, correct, 1e-5, 0.999) == 0.0


def worst_case(m, guesses, correct, epsilon, delta):
    """The largest P(W >= correct) of all mechanisms on m bits, by linear programming.

    It has the variables M(s)(t) for inputs s and guesses t, and excesses over e^epsilon M(s')(t).
    For each pair of neighbours s and s' the excesses sum to at most delta.
    """
    inputs = list(itertools.product([-1, 1], repeat=m))
    outputs = [t for t in itertools.product([-1, 0, 1], repeat=m) if np.abs(t).sum() == guesses]
    right = np.array(inputs) @ np.array(outputs).T  # correct minus wrong
    size = right.size
    pairs = [
        (i, j)
        for i, j in itertools.product(range(len(inputs)), repeat=2)
        if np.sum(np.array(inputs[i]) != inputs[j]) == 1
    ]
    n, k = len(outputs), len(pairs)
    entries, limits = [], np.concatenate([np.zeros(k * n), np.full(k, delta)])
    for p, (i, j) in enumerate(pairs):
        for t in range(n):
            row = p * n + t
            entries += [(row, i * n + t, 1.0), (row, j * n + t, -math.exp(epsilon))]
            entries += [(row, size + row, -1.0), (k * n + p, size + row, 1.0)]
    rows, columns, values = zip(*entries, strict=True)
    inequalities = coo_matrix((values, (rows, columns)), shape=(len(limits), size + k * n))
    total = coo_matrix(
        (np.ones(size), (np.repeat(range(len(inputs)), n), range(size))),
        shape=(len(inputs), size + k * n),
    )
    gain = np.concatenate([(right >= 2 * correct - guesses).ravel(), np.zeros(k * n)])
    result = linprog(
        -gain / len(inputs),
        A_ub=inequalities.tocsr(),
        b_ub=limits,
        A_eq=total.tocsr(),
        b_eq=np.ones(len(inputs)),
        method="highs",
    )
    return -result.fun


class TestCanaries:
    @pytest.mark.parametrize("m, guesses", [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
    @pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
    @pytest.mark.parametrize("delta", [0.0, 0.02, 0.1])
    def test_no_mechanism_does_better(self, m, guesses, epsilon, delta):
        for correct in range(1, guesses + 1):
            error = canaries_error(m, guesses, correct, epsilon, delta)
            worst = worst_case(m, guesses, correct, epsilon, delta)
            assert worst <= error + 1e-9
            if delta == 0.0 or guesses == 1:
                assert worst == pytest.approx(error, abs=1e-8)

    def test_delta_term(self):
        """It is that of a loop over the definition, and smaller than the paper's here."""
        m, guesses, correct, epsilon, delta = 400, 50, 45, 1.5, 1e-4
        q = accuracy(epsilon)
        top = [binom.pmf(np.arange(j + 1), j, q).max() for j in range(guesses)]
        tail = binom.sf(correct - 1, guesses, q)
        error = canaries_error(m, guesses, correct, epsilon, delta)
        assert error == pytest.approx(tail + m * delta * np.mean(top) / (1 + math.exp(epsilon)))
        paper = max(
            (binom.sf(correct - i - 1, guesses, q) - tail) / i for i in range(1, guesses + 1)
        )
        assert error - tail < 2 * m * delta * paper

    @pytest.mark.slow
    @pytest.mark.parametrize("epsilon", [0.5, 2.0])
    def test_randomised_response(self, epsilon):
        """The bound is wrong at most as often as allowed. With many canaries it is tight."""
        rng = np.random.default_rng(0)
        correct = rng.binomial(100, accuracy(epsilon), size=20_000)
        bounds = {c: canaries_bound(100, 100, int(c), 0.0, 0.9) for c in np.unique(correct)}
        wrong = np.mean([bounds[c] > epsilon for c in correct])
        assert 0.05 < wrong <= allowed(0.1, 20_000)
        many = canaries_bound(20_000, 20_000, round(20_000 * accuracy(epsilon)), 0.0, 0.999)
        assert 0.9 * epsilon < many < epsilon

    @pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-5])
    def test_is_the_largest_epsilon_that_is_rejected(self, delta):
        bound = canaries_bound(1000, 200, 180, delta, 0.999)
        assert canaries_error(1000, 200, 180, bound, delta) <= 0.001
        for more in np.linspace(1e-4, 3.0, 50):
            assert canaries_error(1000, 200, 180, bound + more, delta) > 0.001
        assert bound > 1.0

    def test_no_evidence_is_zero(self):
        assert canaries_bound(100, 40, 20, 0.0, 0.999) == 0.0
        assert canaries_bound(100, 40, 40, 0.01, 0.999) == 0.0
        assert canaries_bound(1, 1, 1, 0.0, 0.999) == 0.0


def gaussian_curve(mu):
    return lambda alpha: ndtr(ndtri(1 - alpha) - mu)


class TestCurve:
    AUDITS = 20_000

    def test_advantage_is_wrong_as_often_as_stated(self):
        """Clopper and Pearson's limit is exact: it is wrong nearly as often as it may be."""
        right = np.random.default_rng(0).binomial(2000, ndtr(0.5), size=self.AUDITS)
        limits = np.array([least_advantage(2000, count, 0.1) for count in np.unique(right)])
        wrong = np.isin(right, np.unique(right)[limits > 2 * ndtr(0.5) - 1]).mean()
        assert 0.07 < wrong <= allowed(0.1, self.AUDITS)

    @pytest.mark.long
    @pytest.mark.parametrize("m, mu", [(1, 1.0), (12, 0.5), (12, 2.0), (300, 1.0)])
    def test_canaries_that_do_not_meet(self, m, mu):
        """Guesses about sums in directions of their own are independent: their tail is exact."""
        for correct in range(1, m + 1):
            exact = binom.sf(correct - 1, m, ndtr(mu / 2))
            assert not canaries_contradict(gaussian_curve(mu), m, m, correct, 0.999 * exact)

    @pytest.mark.parametrize("epsilon", [0.5, 2.0])
    def test_randomised_response(self, epsilon):
        def curve(alpha):
            growth = math.exp(epsilon)
            return np.maximum(0.0, np.maximum(1 - growth * alpha, (1 - alpha) / growth))

        for correct in range(1, 41):
            exact = binom.sf(correct - 1, 40, accuracy(epsilon))
            assert not canaries_contradict(curve, 40, 40, correct, 0.999 * exact)
            if exact < 0.1:  # it is nearly the worst case
                assert canaries_contradict(curve, 40, 40, correct, 1.5 * exact)

    def test_canaries_find_a_false_curve(self):
        """The 250 clearest of 1,000 canaries at mu = 2 refute half of that mu."""
        rng = np.random.default_rng(0)
        coins = rng.integers(2, size=1000) == 1
        order = np.argsort(2.0 * coins + rng.standard_normal(1000))
        right = int((~coins[order[:125]]).sum() + coins[order[-125:]].sum())
        assert canaries_contradict(gaussian_curve(1.0), 1000, 250, right, 0.005)
        assert not canaries_contradict(gaussian_curve(2.0), 1000, 250, right, 0.1)
