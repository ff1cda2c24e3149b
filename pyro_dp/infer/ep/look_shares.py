"""The budget of DPSEP's looks: each takes a share of it, and their number is not fixed."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.origins import ADAPTIVE
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.look_plan import LEAST_SHARE
from pyro_dp.infer.ep.stochastic_ep import Fit
from pyro_dp.mechanism.messages import Flag, Share
from pyro_dp.mechanism.peers import Alone
from pyro_dp.mechanism.reservation import Steps
from pyro_dp.utils.errors import PrivacyBudgetExceeded

_DONE = "The run is finished: read posterior(). A new run needs new budget."
_ALL_LOST = (
    "Nothing remains of the run's budget. {lost} releases in the journal came after the loaded "
    "state, or failed. They are paid for, and their results are lost. The present result can be "
    "used as it is."
)


class LookShares(Steps):
    """Looks, which share the budget as the run's state says.

    :param fit: the run's, which has that state.
    """

    kind = ADAPTIVE
    whole = True  # also in a loop: Theorem 1 needs mu beforehand

    def __init__(self, fit: Fit[EPState], *own: Any):
        super().__init__(*own)
        self._fit = fit
        self._behind = False  # the state is older than the ledger

    @property
    def bound(self) -> float:
        known = self._fit.known
        if known is None:  # a rank of a cluster that has looked compares its own
            saved = (self._fit.loaded or {}).get("frame")
            return saved["bound"] if isinstance(saved, Mapping) else math.inf
        return math.inf if known.frame is None else known.frame.bound

    @property
    def finished(self) -> bool:
        return self._fit.known is not None and self._fit.known.finished

    def noise(self, sigma: float) -> float:
        return _noise(sigma, self._fit.approximation.share)

    def releases(self, rate: float, sigma: float) -> Counter[Event]:
        left = 1.0 if self._fit.known is None else 1.0 - self._fit.known.spent
        return Counter({_sum_of_all(sigma, left): 1})

    def reserved(self, rate: float, sigma: float, whole: bool) -> Counter[Event]:
        """The next look, and all later ones as one release."""
        known = self._fit.approximation
        shares = known.share, 1.0 - known.spent - known.share
        return Counter(_sum_of_all(sigma, share) for share in shares if share > LEAST_SHARE)

    def lose(self) -> None:
        """Count the lost look as spent. The looks to come share the rest."""
        known = self._fit.approximation
        spent = min(known.spent + known.share, 1.0)
        self._fit.known = _with_spent(known, spent)

    def load(self, steps: int, lost: int) -> None:
        """Releases in the ledger beyond the state are spent."""
        super().load(steps, lost)
        self._behind = lost > 0

    def agree(self, peers: Alone) -> None:
        self._behind = any(each.value for each in peers.exchange(Flag(self._behind)))

    def catch_up(self, lost: int, held: Callable[[], float], peers: Alone) -> None:
        """Ranks go on with the largest share that one of them has spent."""
        if not self._behind:
            return
        known = self._fit.approximation
        spent = known.spent
        if lost:
            left = held()
            if left <= LEAST_SHARE:
                raise PrivacyBudgetExceeded(_ALL_LOST.format(lost=lost))
            spent = max(spent, 1.0 - left)
        spent = max(each.value for each in peers.exchange(Share(spent)))
        self._fit.known, self._behind = _with_spent(known, spent), False

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        if self.finished and noise_multiplier != 0:
            raise PrivacyBudgetExceeded(_DONE)


def _with_spent(known: EPState, spent: float) -> EPState:
    return replace(known, spent=spent, share=min(known.share, 1.0 - spent))


def _noise(sigma: float, share: float) -> float:
    """Noise multiplier of a release that takes this share of the budget."""
    return sigma / math.sqrt(max(share, LEAST_SHARE))


def _sum_of_all(sigma: float, share: float) -> SubsampledGaussian:
    return SubsampledGaussian(_noise(sigma, share), 1.0, "full")
