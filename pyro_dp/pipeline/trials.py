"""The trials of a private selection: their random number, their cost, and the accountant of one.

Papernot & Steinke 2022, "Hyperparameter tuning with Rényi differential privacy" (ICLR, arXiv
2110.03620). A mechanism Q runs K times, and the best outcome is published. With K fixed, the winner
would reveal a data set on which one outcome is a little better. With K random, a better one may
have been missed for lack of trials. So the cost grows with log E[K] only.

Let f be the probability generating function of K. The winner is y with probability f(Q(<= y))
- f(Q(< y)) = Q(y) E f'(X), X uniform in between. By joint convexity, the moment of order lambda is
at most that of one trial times the largest f'(q)^lambda f'(q')^(1 - lambda). The maximum is over
all q and q' that the privacy of one trial allows. The theorems bound that.
"""

import abc
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.pld import RATES, renyi_delta
from pyro_dp.utils.errors import PrivacyBudgetExceeded, PrivacyError
from pyro_dp.utils.validation import require_count, require_number

_MOST = 500.0  # trials, on average: e^-mean is the first probability of a Poisson draw
_LEAST = 1e-6  # away from divisions by zero
_NEGLIGIBLE = 1e-18  # probability of so many trials: below the resolution of a draw


class Trials(abc.ABC):
    """Distribution of the number of trials K."""

    mean: float

    @abc.abstractmethod
    def probabilities(self) -> tuple[int, float]:
        """The smallest K, and its probability."""

    @abc.abstractmethod
    def ratio(self, k: int) -> float:
        """P(K = k + 1) / P(K = k)."""

    @abc.abstractmethod
    def moments(self, base: np.ndarray) -> np.ndarray:
        """Bounds of log E exp(rate * loss) at :data:`RATES`, for the best of K trials.

        :param base: the bounds for one trial, for both directions of the neighbouring relation.
        """

    def draw(self, uniform: float) -> int:
        """K by inversion of its distribution function.

        :param uniform: a private draw from [0, 1).
        """
        k, probability = self.probabilities()
        below = probability
        while uniform >= below and (k <= self.mean or probability > _NEGLIGIBLE):
            probability *= self.ratio(k)
            below += probability
            k += 1
        return k


@dataclass(frozen=True)
class TruncatedNegativeBinomial(Trials):
    """K >= 1 with P(K = k) in proportion to (1 - gamma)^k prod_{l < k} (l + eta) / (l + 1).

    A smaller ``eta`` has a longer tail and a cheaper selection: few trials are likely, although the
    mean is large.

    :param mean: E[K], in [1.000001, 500].
    :param eta: shape, 0 or in [0.000001, 100]: 0 is the logarithmic distribution, 1 the geometric
        one.
    :raises ConfigurationError: a setting is out of range.

    >>> least, chances = TruncatedNegativeBinomial(mean=10).probabilities()
    >>> least
    1
    """

    mean: float
    eta: float = 0.0

    def __post_init__(self) -> None:
        inside = dict(closed=True, or_equal=True)
        mean = require_number("mean", self.mean, above=1.0 + _LEAST, below=_MOST, **inside)
        eta = require_number("eta", self.eta, above=0.0, below=100.0, **inside)
        if eta:
            require_number("eta", eta, above=_LEAST, below=100.0, **inside)
        vars(self).update(mean=mean, eta=eta)

    @functools.cached_property
    def gamma(self) -> float:
        """The parameter in (0, 1) that has this mean (Papernot & Steinke 2022, Definition 1)."""
        root = scipy.optimize.brentq(lambda x: math.log(self._mean(x) / self.mean), 1e-300, 700.0)
        return math.exp(-root)

    def probabilities(self) -> tuple[int, float]:
        gamma = self.gamma
        if self.eta == 0.0:
            return 1, (1.0 - gamma) / -math.log(gamma)
        return 1, self.eta * (1.0 - gamma) / math.expm1(-self.eta * math.log(gamma))

    def ratio(self, k: int) -> float:
        return (1.0 - self.gamma) * (k + self.eta) / (k + 1)

    def moments(self, base: np.ndarray) -> np.ndarray:
        """Theorem 2, with the best auxiliary order; it holds at every order."""
        order = 1.0 + RATES
        auxiliary = (1.0 - 1.0 / order) * base / RATES - math.log(self.gamma) / order
        return base + RATES * (1.0 + self.eta) * np.min(auxiliary) + math.log(self.mean)

    def _mean(self, x: float) -> float:
        """E[K] at gamma = e^-x."""
        ratio = math.expm1(x)  # (1 - gamma) / gamma
        return ratio / x if self.eta == 0.0 else self.eta * ratio / -math.expm1(-self.eta * x)


@dataclass(frozen=True)
class PoissonTrials(Trials):
    """K from a Poisson distribution; with probability e^-mean there is no trial, and no result.

    :param mean: E[K], in [1, 500].
    :raises ConfigurationError: it is out of range.

    >>> trial = {SubsampledGaussian(20.0, sample_rate=0.05): 200}
    >>> print(f"{selection_epsilon(trial, trials=PoissonTrials(mean=10)):.2f}")
    0.31
    """

    mean: float

    def __post_init__(self) -> None:
        mean = require_number("mean", self.mean, above=1.0, below=_MOST, closed=True, or_equal=True)
        vars(self).update(mean=mean)

    def probabilities(self) -> tuple[int, float]:
        return 0, math.exp(-self.mean)

    def ratio(self, k: int) -> float:
        return self.mean / (k + 1)

    def moments(self, base: np.ndarray) -> np.ndarray:
        """Theorem 6, with e^eps = lambda / (lambda - 1), and no trial as an outcome of its own."""
        excess = [renyi_delta(RATES, base, math.log1p(1.0 / rate)) for rate in RATES]
        best = math.log(self.mean) + base + RATES * self.mean * np.array(excess)
        return np.logaddexp(-self.mean, best)


_ROUNDING = 1e-9
NOTE = "This is the ledger of one trial of a private_selection: it lacks the selection's cost."


class Declared:
    """The declared releases that a trial has not made yet.

    :ivar refused: whether the trial tried to release anything else.
    :ivar over: whether the trial has ended. It may release nothing more.
    """

    def __init__(self, releases: Mapping[SubsampledGaussian, int]):
        self._left: dict[Event, int] = dict(releases.items())
        # Gaussian sums over all records compose by their precision, however it is shared out.
        self._precision = math.fsum(n * _precision(e) for e, n in releases.items())
        self.refused = self.over = False

    def use(self, event: Any, count: int, record: Callable[[Any, int], None]) -> None:
        """Record a release, and subtract it from the declared ones.

        :raises PrivacyBudgetExceeded: it was not declared, or the trial is over.
        """
        left = self._left.get(event, 0) if type(event) is SubsampledGaussian else 0
        precision = count * _precision(event)
        admitted = count <= left
        if precision:
            admitted = precision <= self._precision * (1 + _ROUNDING)
        if self.over or not admitted:
            self.refused = True
            raise PrivacyBudgetExceeded(
                "a trial of private_selection may make only the declared releases, and only "
                "while it runs."
            )
        record(event, count)
        self._left[event] = left - count
        self._precision = max(self._precision - precision, 0.0)


class TrialAccountant(PrivacyAccountant):
    """The accountant of one trial, which admits only the declared releases.

    :param start: a random number of 128 bits. So no two trials derive a stream from the same
        position, and no position reveals a trial's number.
    """

    silent = True

    def __init__(
        self, declared: Mapping[SubsampledGaussian, int], ours: PrivacyAccountant, start: int
    ):
        super().__init__(delta=ours.delta, neighboring=ours.neighboring, engine=ours.engine)
        self.declared = Declared(declared)
        self._books.start = start + (1 << 128)  # beyond the positions of other accountants
        self.continued = False
        self.note(NOTE)

    def record(self, event: Any, count: int = 1, *, neighboring: str | None = None) -> None:
        count = require_count("count", count, least=0)
        with self._books.lock:
            self.declared.use(event, count, super().record)

    def note_earlier_values(self, text: str) -> None:
        """:raises PrivacyError: always, because a trial must not continue an earlier one."""
        self.continued = True
        raise PrivacyError(text)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """:raises PrivacyError: always."""
        raise PrivacyError("A trial of private_selection starts afresh: it cannot load a state.")


def _precision(event: Event) -> float:
    """Noise precision of a sum over all records, in units of its bound; 0 for other events."""
    if type(event) is not SubsampledGaussian or event.sample_rate < 1.0:
        return 0.0
    sigma = event.noise_multiplier
    return sigma**-2 if sigma else math.inf
