"""The budget: whether a further release fits, and the smallest noise with which releases fit.

To avoid composing the ledger for each release, the budget keeps a plan: counts of events that
certainly fit. Epsilon grows with every count, so any ledger within the plan fits, too. When a
release exceeds the plan, a new plan is computed, with as many more of the recent events as may fit.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import scipy

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import Event, NonPrivateLook
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded
from pyro_dp.utils.validation import require_choice, require_number

Counts = Mapping[Event, int]
_LEAST, _MOST = math.log(1e-4), math.log(1e9)  # logarithms of noise multipliers
_AIM = 2e-4  # log ratio by which the root finder aims below the budget
_LEFT_OVER = 0.005  # if less than this share of the budget is left, calibration is refused
_UNFINISHED = (
    "A run that stopped early keeps its whole plan, which counts (print the accountant). Go on "
    "with that run, or load its state. "
)
_USED_UP = (
    "The budget of these data is used up. A larger one is a new promise to the people in them."
)


@dataclass(frozen=True)
class Settings:
    """The settings of a :class:`PrivacyAccountant`; see there.

    :raises ConfigurationError: a setting is out of range.
    """

    epsilon: float | None
    delta: float
    neighboring: str
    engine: str

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            vars(self).update(epsilon=require_number("epsilon", self.epsilon, above=0.0))
        require_choice("neighboring", self.neighboring, composition.NEIGHBORING)
        require_choice("engine", self.engine, tuple(composition.ENGINES))
        vars(self).update(delta=require_number("delta", self.delta, above=0.0, below=1.0))


class Budget:
    """Decides whether releases fit the budget, or this thread's share of it."""

    def __init__(self, settings: Settings):
        self._limit = math.inf if settings.epsilon is None else settings.epsilon
        self._how = settings.delta, settings.neighboring, settings.engine
        self._thread = threading.local()
        self.forget({})

    def forget(self, counts: Counts) -> None:
        """Start again from this ledger, without a plan."""
        self._plan: tuple[dict[Event, int], float] = {}, math.inf  # counts and their epsilon
        self._mark = dict(counts)  # the ledger at the last plan; later events are "recent"

    def cost(self, counts: Counts) -> float:
        return composition.epsilon(counts, *self._how)

    def bound(self, counts: Counts) -> float:
        """An upper bound of epsilon without computation: the plan's, or inf for larger counts."""
        plan, cost = self._plan
        contained = bool(counts) and all(plan.get(e, 0) >= n for e, n in counts.items())
        return cost if contained else math.inf

    def adopt(self, plan: dict[Event, int], cost: float) -> bool:
        """Make this the plan if its cost is allowed now. Returns whether it is."""
        if cost > self.most:
            return False
        self._plan = plan, cost
        return True

    @property
    def most(self) -> float:
        """The largest epsilon that is allowed now, in this thread."""
        found: float = getattr(self._thread, "most", self._limit)
        return found

    @contextlib.contextmanager
    def up_to(self, share: float, spent: Callable[[], float]) -> Iterator[None]:
        """See :meth:`PrivacyAccountant.up_to`.

        :param spent: returns epsilon so far.
        """
        if self._limit == math.inf:
            raise ConfigurationError(
                "up_to() is a share of a budget: give the accountant an epsilon."
            )
        what = f"share, a part of the budget and no epsilon (of {self._limit:.6g} here),"
        share = require_number(what, share, above=0.0, below=1.0, closed=True)
        before, most = self.most, share * self._limit
        if spent() > most * (1.0 - _LEFT_OVER):
            raise PrivacyBudgetExceeded(
                f"up_to({share:.6g}): epsilon={spent():.6g} is spent already, and the "
                f"share is {most:.6g} in all. The shares of several analyses ascend: 0.5 for the "
                "first, 0.8 for the first two."
            )
        self._thread.most = min(before, most)
        try:
            yield
        finally:
            self._thread.most = before

    def require_room(self, ledger: Counts, more: Counts) -> None:
        """Check that these events fit the budget beside the ledger, and extend the plan.

        :raises PrivacyBudgetExceeded: they do not fit.
        """
        most, needed = self.most, dict(Counter(ledger) + Counter(more))
        if self._limit == math.inf or self.bound(needed) <= most:
            return
        looks = [each for each in ledger if type(each) is NonPrivateLook]
        if looks:
            raise PrivacyBudgetExceeded(
                f"the ledger has a {looks[0].brief}: no budget holds after it, and nothing was "
                "released. Start anew with other data, or without a budget."
            )
        # The mark may count reservations that a run has replaced since.
        before = {e: min(n, ledger.get(e, 0)) for e, n in self._mark.items()}
        recent = {e: n - before.get(e, 0) for e, n in needed.items() if n > before.get(e, 0)}
        share = sum(needed.values()) / sum(recent.values())

        def ahead(factor: float, base: Counts = needed) -> dict[Event, int]:
            more = {e: int(factor * share * n) for e, n in recent.items()}
            return {e: n + more.get(e, 0) for e, n in base.items()}

        planned, _ = self._plan
        everything = {e: max(planned.get(e, 0), needed.get(e, 0)) for e in planned | needed}
        mark = dict(ledger)
        for plan in (ahead(1.0, everything), everything, ahead(1.0)):
            if self.adopt(plan, composition.epsilon_bound(plan, *self._how)):
                self._mark = mark
                return
        cost = self.cost(needed)
        if cost > most:
            part = "" if most == self._limit else f"the {most:.6g} that up_to() allows of "
            what = " and ".join(f"{n} more of {e.brief}" for e, n in more.items())
            raise PrivacyBudgetExceeded(
                f"recording {what} would bring epsilon to {cost:.6g}, "
                f"above {part}the budget of {self._limit:.6g} at delta={self._how[0]:.6g}; nothing "
                "was released. Stop here, or plan fewer steps or more noise from the start."
            )
        self._mark = mark
        # Epsilon grows roughly with the root of the counts. Guess, then correct by interpolation.
        budget, paid = most**2, cost**2
        factor = min(1.0, max(0.0, budget / paid - 1.0)) if paid else 1.0
        # The deltas of events add up, and epsilon is inf if they exceed the accountant's delta.
        lost, further = (
            math.fsum(n * event.delta for event, n in counts.items())
            for counts in (needed, ahead(1.0))
        )
        further -= lost
        factor = min(factor, 0.5 * (self._how[0] - lost) / further) if further > 0.0 else factor
        for _ in range(2):
            if factor * sum(needed.values()) < 1.0:
                break
            plan = ahead(factor)
            reached = self.cost(plan)
            if self.adopt(plan, reached):
                return
            factor *= 0.995 * (budget - paid) / (reached**2 - paid)
        self.adopt(needed, cost)

    def least_noise(
        self, ledger: Counter[Event], releases: Callable[[float], Counts], unfinished: bool
    ) -> tuple[float, dict[Event, int]]:
        """Sigma, and the ledger with the releases. See :meth:`PrivacyAccountant.least_noise`.

        :param unfinished: whether runs have reserved releases, for the error's text.
        """
        for event in releases(1.0):
            composition.interpret(event, self._how[1])
        if self._limit == math.inf:
            raise ConfigurationError(
                "epsilon=None is no budget to calibrate from: give the accountant an epsilon, or "
                "choose noise_multiplier yourself."
            )
        most = self.most
        what = f"the {most:.6g} that up_to() allows of " if most < self._limit else ""
        what += f"the budget of epsilon={self._limit:.6g}"
        if most - min(self.bound(ledger), self.cost(ledger)) < _LEFT_OVER * most:
            raise PrivacyBudgetExceeded(
                f"less than {_LEFT_OVER:.1%} remains of {what}, so releases that fit would be "
                f"all noise. {_UNFINISHED if unfinished else ''}{_USED_UP}"
            )

        def plan(sigma: float) -> dict[Event, int]:
            return dict(ledger + Counter(releases(sigma)))

        sigma = least_noise(lambda sigma: self.cost(plan(sigma)), most)
        if sigma is None:
            raise PrivacyBudgetExceeded(
                f"nothing remains of {what}: no noise is large enough for more releases. {_USED_UP}"
            )
        return sigma, plan(sigma)


def least_noise(cost: Callable[[float], float], budget: float) -> float | None:
    """The smallest noise multiplier that fits a budget.

    :param cost: epsilon as a decreasing function of the noise multiplier.
    :returns: the cost of this multiplier is at most the budget, and within 0.1% of it. It is 1e-4
        if that fits, and ``None`` if not even 1e9 fits.
    """

    def excess(log_noise: float) -> float:
        ratio = max(cost(math.exp(log_noise)), 1e-300) / budget
        return min(700.0, math.log(ratio) + _AIM)

    low, high, factor = 0.0, 0.0, math.log(2.0)
    while excess(high) > 0.0:
        low, high, factor = high, high + factor, 1.5 * factor
        if high > _MOST:
            return None
    while low == high or excess(low) <= 0.0:
        if low == _LEAST:
            return math.exp(_LEAST)
        low, high, factor = max(_LEAST, low - factor), low, 1.5 * factor
    root = scipy.optimize.brentq(excess, low, high, xtol=1e-5, rtol=1e-7)
    while cost(math.exp(root)) > budget:
        root += 2e-5
    return math.exp(root)
