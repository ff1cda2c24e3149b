"""The plan of a run: the steps that are done, and the releases that are left."""

import functools
import math
from collections import Counter
from collections.abc import Callable

from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.accounting.origins import PLANNED
from pyro_dp.mechanism.peers import Alone
from pyro_dp.utils.errors import PrivacyBudgetExceeded
from pyro_dp.utils.validation import require_count

gaussian = functools.lru_cache(16)(SubsampledGaussian)  # steps are alike


class Steps:
    """Steps with one release each, which are alike.

    :param num_steps: None: as many as are asked for.
    :param sampling: its kind.
    :param bound: the largest norm of one record's part of a release.
    :ivar done: number of steps done.
    """

    kind = PLANNED  # for the ledger, if releases are reserved
    chooses = False  # whether the first step chooses num_steps, where it is None
    whole = False  # whether one share of the budget, with noise that stays, is for all releases

    def __init__(self, num_steps: int | None, sampling: str, bound: float):
        self.num_steps = None if num_steps is None else require_count("num_steps", num_steps)
        self.sampling, self.done, self._bound = sampling, 0, bound

    @property
    def bound(self) -> float:
        """That of the next release."""
        return self._bound

    @property
    def left(self) -> int | None:
        """Number of steps; None: as many as are asked for."""
        return None if self.num_steps is None else self.num_steps - self.done

    @property
    def finished(self) -> bool:
        return self.left is not None and self.left <= 0

    def rate(self, subsample: int, size: int) -> float:
        """The sample rate of N records, if the user sets none."""
        return subsample / size

    def noise(self, sigma: float) -> float:
        """The next step's, from that of the run."""
        return sigma

    def in_one(self, sigma: float) -> float:
        """Noise of one release that costs as much as all steps."""
        assert self.num_steps is not None
        return sigma / math.sqrt(self.num_steps)

    def releases(self, rate: float, sigma: float) -> Counter[Event]:
        """Those that are left."""
        assert self.left is not None  # calibration and runs have a number
        return Counter({gaussian(sigma, rate, self.sampling): self.left})

    def reserved(self, rate: float, sigma: float, whole: bool) -> Counter[Event] | None:
        """The run's reservation with its next release; None: none is whole, and it stays."""
        return self.releases(rate, sigma) if whole else None

    def lose(self) -> None:
        """Count a release without a result."""

    def load(self, steps: int, lost: int) -> None:
        """Go on after a saved state, beyond which the ledger has so many releases."""
        self.done = steps

    def agree(self, peers: Alone) -> None:
        """Agree with the peers on the releases that are left."""

    def catch_up(self, lost: int, held: Callable[[], float], peers: Alone) -> None:
        """Count as spent what the ledger has beyond the run's state: so many lost releases."""

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        """:raises PrivacyBudgetExceeded: none is left of those that the noise is for."""
        if calibrates and self.finished:
            raise PrivacyBudgetExceeded(
                f"The noise was calibrated for num_steps={self.num_steps}, which are done: start "
                "anew with the remaining budget."
            )
