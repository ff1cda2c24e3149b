"""Fit releases into a budget: further releases, by a plan, and the least noise.

The plan holds counts that fit for sure; most releases then need no engine.

Epsilon grows with every count, so a ledger within the plan fits. Only when the plan has run out an
engine is asked, for as much more of the recent mix of events as may fit.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping

import scipy

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import Event, NonPrivateLook
from pyro_dp.utils.errors import PrivacyBudgetExceeded

Counts = Mapping[Event, int]
_LEAST, _MOST = math.log(1e-4), math.log(1e9)  # noise multipliers
_AIM = 2e-4  # below the budget, relative: room for the root finder


class Budget:
    """Says whether an event still fits. The settings are those of the accountant."""

    def __init__(self, budget: float | None, delta: float, neighboring: str, engine: str):
        self._budget, self._delta = math.inf if budget is None else budget, delta
        self._how = (delta, neighboring, engine)
        self.forget({})

    def forget(self, counts: Counts) -> None:
        """Start again from this ledger."""
        self._counts: dict[Event, int] = {}
        self._cost = math.inf
        self._mark = dict(counts)

    def cost(self, counts: Counts) -> float:
        """Epsilon of a ledger."""
        return composition.epsilon(counts, *self._how)

    def bound(self, counts: Counts) -> float:
        """The plan's cost if it contains the ledger, else inf: a bound at no cost."""
        contained = bool(counts) and all(self._counts.get(e, 0) >= n for e, n in counts.items())
        return self._cost if contained else math.inf

    def adopt(self, counts: dict[Event, int], cost: float, most: float) -> bool:
        """Make this the plan, if it costs at most so much."""
        if cost > most:
            return False
        self._counts, self._cost = counts, cost
        return True

    def require_room(self, ledger: Counts, more: Counts, most: float) -> None:
        """Budget for the ledger, these events, and as much more of the recent mix as fits.

        :param most: epsilon that may be reached now, at most the budget.
        :raises PrivacyBudgetExceeded: the ledger and so much more do not fit.
        """
        needed = dict(Counter(ledger) + Counter(more))
        if self._budget == math.inf or self.bound(needed) <= most:
            return
        looks = [each for each in ledger if type(each) is NonPrivateLook]
        if looks:
            raise PrivacyBudgetExceeded(
                f"the ledger has a {looks[0].brief}: no budget holds after it, and nothing was "
                "released. Start anew on other data, or without a budget."
            )
        # The mark may count what a run had reserved and has replaced since.
        before = {e: min(n, ledger.get(e, 0)) for e, n in self._mark.items()}
        recent = {e: n - before.get(e, 0) for e, n in needed.items() if n > before.get(e, 0)}
        share = sum(needed.values()) / sum(recent.values())

        def ahead(factor: float, base: Counts = needed) -> dict[Event, int]:
            more = {e: int(factor * share * n) for e, n in recent.items()}
            return {e: n + more.get(e, 0) for e, n in base.items()}

        union = self._counts | needed
        everything = {e: max(self._counts.get(e, 0), needed.get(e, 0)) for e in union}
        mark = dict(ledger)
        for plan in (ahead(1.0, everything), everything, ahead(1.0)):
            if self.adopt(plan, composition.epsilon_bound(plan, *self._how), most):
                self._mark = mark
                return
        cost = self.cost(needed)
        if cost > most:
            part = "" if most == self._budget else f"the {most:.6g} that up_to() allows of "
            what = " and ".join(f"{n} more of {e.brief}" for e, n in more.items())
            raise PrivacyBudgetExceeded(
                f"recording {what} would bring epsilon to {cost:.6g}, "
                f"above {part}the budget of {self._budget:.6g} at delta={self._delta:.6g}; nothing "
                "was released. Stop here, or plan fewer steps or more noise from the start."
            )
        self._mark = mark
        # Epsilon grows about like the root of the counts: guess, then correct by interpolation.
        budget, paid = most**2, cost**2
        factor = min(1.0, max(0.0, budget / paid - 1.0)) if paid else 1.0
        # The deltas of events are added, and epsilon is inf where they take all of it.
        lost = _lost(needed)
        further = _lost(ahead(1.0)) - lost
        factor = min(factor, 0.5 * (self._delta - lost) / further) if further > 0.0 else factor
        for _ in range(2):
            if factor * sum(needed.values()) < 1.0:
                break
            plan = ahead(factor)
            planned = self.cost(plan)
            if self.adopt(plan, planned, most):
                return
            factor *= 0.995 * (budget - paid) / (planned**2 - paid)
        self.adopt(needed, cost, most)


def _lost(counts: Counts) -> float:
    return math.fsum(n * e.delta for e, n in counts.items())


def least_noise(cost: Callable[[float], float], budget: float) -> float | None:
    """The least noise that fits a budget.

    :param cost: epsilon of the plan as a function of the noise multiplier, decreasing.
    :param budget: epsilon that it may reach.
    :returns: a noise multiplier whose cost is at most the budget and within 0.1% of it. 1e-4 if
        that fits already; ``None`` if not even 1e9 does.
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
