"""A run's planned steps, and its part of the budget.

The ledger reserves a run's planned releases with its first release. They count as if they had been
released, so a run may stop early because of its releases.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian, require_short_text
from pyro_dp.accounting.origins import OPEN, PLANNED, Origin, new_name
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.messages import Ledger, NoiseMultiplier, Settings
from pyro_dp.mechanism.peers import Alone
from pyro_dp.utils.errors import (
    ClusterError,
    ConfigurationError,
    PrivacyBudgetExceeded,
    PrivacyError,
)
from pyro_dp.utils.validation import require_count, same

gaussian = lru_cache(16)(SubsampledGaussian)  # most steps of a run have equal events


class Steps:
    """A plan of equal steps, with one release each.

    :param num_steps: None: there is no plan, and ``step`` may be called any number of times.
    :param bound: the largest norm of one record's contribution to a release.
    """

    kind = PLANNED  # for the ledger, if releases are reserved
    chooses = False  # whether the first step chooses num_steps, if it is None
    whole = False  # whether all releases share one part of the budget, with fixed noise

    def __init__(self, num_steps: int | None, sampling: str, bound: float):
        self.num_steps = None if num_steps is None else require_count("num_steps", num_steps)
        self.sampling, self.done, self._bound = sampling, 0, bound

    @property
    def bound(self) -> float:
        """The bound of the next release."""
        return self._bound

    @property
    def left(self) -> int | None:
        """Number of steps that are left; None: any number."""
        return None if self.num_steps is None else self.num_steps - self.done

    @property
    def finished(self) -> bool:
        return self.left is not None and self.left <= 0

    def rate(self, subsample: int, size: int) -> float:
        """The sample rate for N records, if the user sets none.

        :param subsample: the plate's ``subsample_size``.
        :param size: N.
        """
        return subsample / size

    def noise(self, sigma: float) -> float:
        """The noise multiplier of the next step, from that of the run."""
        return sigma

    def in_one(self, sigma: float) -> float:
        """The noise multiplier of one release on all records that costs as much as all steps."""
        assert self.num_steps is not None
        return sigma / math.sqrt(self.num_steps)

    def releases(self, rate: float, sigma: float) -> Counter[Event]:
        """The releases that are left."""
        assert self.left is not None  # calibrated noise and run() need a number of steps
        return Counter({gaussian(sigma, rate, self.sampling): self.left})

    def reserved(self, rate: float, sigma: float, whole: bool) -> Counter[Event] | None:
        """The reservation that the next release makes; None: it changes no reservation.

        :param whole: whether the run reserves all releases that are left.
        """
        return self.releases(rate, sigma) if whole else None

    def lose(self) -> None:
        """Count a release without a result."""

    def load(self, steps: int, lost: int) -> None:
        """Go on from a saved state.

        :param lost: number of releases that the ledger has beyond the state.
        """
        self.done = steps

    def agree(self, peers: Alone) -> None:
        """Agree with the peers on the releases that are left."""

    def catch_up(self, lost: int, held: Callable[[], float], peers: Alone) -> None:
        """Count the lost releases as spent.

        :param lost: number of releases that the ledger has beyond the run's state.
        :param held: returns the part of the cost that the ledger still reserves for the run.
        """

    def require_step(self, noise_multiplier: float | None, calibrates: bool) -> None:
        """:raises PrivacyBudgetExceeded: all steps are done for which noise was calibrated."""
        if calibrates and self.finished:
            raise PrivacyBudgetExceeded(
                f"The noise was calibrated for num_steps={self.num_steps}, which are done: start "
                "anew with the remaining budget."
            )


class Reservation:
    """A run's part of the budget.

    :param noise_multiplier: sigma; None: it is calibrated to the rest of the budget.
    :param now: returns the run's :class:`Origin`, for its ``reservation`` and ``plan``.
    :ivar whole: whether the next release reserves all releases that are left.
    :ivar lost: number of releases that the ledger counts, but that have no result.
    """

    def __init__(
        self,
        inference: str,
        accountant: PrivacyAccountant,
        peers: Alone,
        plan: Steps,
        noise_multiplier: float | None,
        now: Callable[..., Origin],
    ):
        self.inference, self.accountant, self._peers, self.plan = inference, accountant, peers, plan
        self.noise_multiplier = noise_multiplier
        self.calibrates = noise_multiplier is None
        self.whole = self.calibrates or plan.whole
        self._now = now
        self.name = new_name()
        self.origin: Origin | None = None  # from the first release on
        self.lost = 0

    def require_step(self) -> None:
        self.plan.require_step(self.noise_multiplier, self.calibrates)

    def calibrate(self, rate: float) -> float:
        """sigma. If it is not fixed yet, calibrate it to the rest of the budget, and fix it."""
        self.noise_multiplier = self.agreed(rate)
        return self.noise_multiplier

    def agreed(self, rate: float) -> float:
        """sigma. If it is not fixed yet, calibrate it, but leave it open."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return self._peers.agreed_noise(self.least(rate))

    def least(self, rate: float) -> float:
        """The smallest sigma with which the releases that are left fit the rest of the budget."""
        try:
            return self.accountant.least_noise(partial(self.plan.releases, rate), self.name)
        except PrivacyBudgetExceeded as error:
            if not self.lost:
                raise
            raise PrivacyBudgetExceeded(
                f"{error} {self.lost} releases in the journal came after the loaded state, or "
                "failed. They are paid for, and their results are lost. The present result can be "
                "used as it is."
            ) from None

    def catch_up(self) -> None:
        self.plan.catch_up(self.lost, self._held, self._peers)

    def _held(self) -> float:
        """The ledger's reservation for this run, in units of one release on all records.

        It is a ratio of costs sigma^-2, with sigma of the run for the release.
        """
        noise_multiplier = self.calibrate(1.0)
        return math.fsum(
            count * (noise_multiplier / event.noise_multiplier) ** 2
            for origin, events in self.accountant.reserved
            if origin.reservation == self.name
            for event, count in events.items()
            if isinstance(event, SubsampledGaussian)
        )

    def reserved(self, rate: float) -> Counter[Event] | None:
        """The reservation that the next release makes; None: it changes no reservation."""
        return self.plan.reserved(rate, self.calibrate(rate), self.whole)

    def begin_run(self) -> None:
        self.whole = self.whole or not self.calibrates

    def begin(self) -> Origin:
        """The run's origin for the ledger, made with its first release."""
        if self.origin is None:
            plan = self.plan.kind if self.whole else OPEN
            self.origin = self._now(reservation=self.name, plan=plan)
        return self.origin

    def note_result(self, clipped: ClippedFraction | None, status: str | None) -> None:
        if self.origin is not None:
            self.accountant.note_result(self.origin, clipped, status)

    def lose(self) -> None:
        """Count a release that failed. The steps that are left share the rest of the budget.

        Owners of a federation do not calibrate again. Their noise must be equal, and the release
        may count in some ledgers only.
        """
        self.lost += 1
        if self.plan.whole:
            self.plan.lose()
        elif self.calibrates and not self._peers.own_ledgers:
            self.noise_multiplier = None
        else:
            self.whole = False  # another step would not fit the budget, so the last one is refused

    def state(self) -> dict[str, Any]:
        """:raises PrivacyError: on a rank of a cluster whose accountant does not count."""
        if not self._peers.counts:
            raise PrivacyError(
                "state_dict: the ledger of a cluster is on rank 0. Save there, as in "
                "`if cluster.rank == 0: torch.save(...)`, and load it on all."
            )
        return {
            "version": 1,
            "steps": self.plan.done,
            "noise_multiplier": self.noise_multiplier,
            "reservation": self.name,
            "accountant": self.accountant.state_dict(),
        }

    def require(self, state: Any, names: Sequence[str]) -> None:
        """Check a state before it is loaded.

        :param names: names of the state's parts, beside those of :meth:`state`.
        :raises ConfigurationError: it is not a state, or belongs to another run.
        """
        needed = {"steps", "noise_multiplier", "accountant", *names}
        if not (
            isinstance(state, dict) and same(state.get("version"), 1) and needed <= state.keys()
        ):
            raise ConfigurationError(
                f"load_state_dict: this is no state_dict() of {self.inference}."
            )
        if not self.calibrates and not same(state["noise_multiplier"], self.noise_multiplier):
            raise ConfigurationError("noise_multiplier differs from that of the saved run.")
        require_short_text("reservation", state.get("reservation", self.name))
        require_count("steps", state["steps"], least=0)

    def load(self, state: dict[str, Any]) -> None:
        """Load a state, and first its ledger, which refuses a state with fewer releases.

        If a journal has releases beyond the state, they are paid for, but their results are lost.
        Then calibrated noise is calibrated again, for the steps and the budget that are left.
        """
        self.accountant.load_state_dict(state["accountant"])
        counted = sum(line["count"] for line in state["accountant"]["ledger"])
        self.lost = self.accountant.num_releases - counted
        self._peers.due = True
        self._take_over(state.get("reservation", self.name))
        self.whole = self.calibrates or self.plan.whole
        again = self.calibrates and self.lost and not self.plan.whole
        self.noise_multiplier = None if again else state["noise_multiplier"]
        self.plan.load(state["steps"], self.lost)

    def _take_over(self, name: str) -> None:
        if name != self.name:
            self.name, self.origin = name, None

    def share(self, settings: dict[str, Any]) -> None:
        """Agree on settings and noise with the peers. In a cluster, follow rank 0's ledger.

        :raises ClusterError: a setting differs between ranks, the noise changes between releases on
            samples, or the ledger cannot be read.
        """
        ours, peers = self.accountant, self._peers
        ledger = Ledger(ours.state_dict(), self.noise_multiplier, self.lost, self.name)
        if peers.own_ledgers:
            peers.common(Settings(settings), ledger)
            multipliers = peers.exchange(NoiseMultiplier(self.noise_multiplier))
            if any(each != multipliers[0] for each in multipliers):
                sampled = self.origin is not None and settings["sample_rate"] != 1.0
                if sampled or not self.calibrates:
                    raise ClusterError(
                        "The noise differs between holders. It is agreed before the first release, "
                        "and no holder may choose it later, in view of releases on samples. Start "
                        "all anew, with journals and the last states."
                    )
                self.noise_multiplier = None  # so the next release agrees on it anew
            return
        budget = {name: getattr(ours, name) for name in ("epsilon", "delta", "neighboring")}
        budget = {f"accountant.{name}": value for name, value in budget.items()}
        first = peers.common(Settings(settings | budget), ledger)
        if not peers.counts:
            try:
                ours.follow(first.accountant)
            except ConfigurationError as error:
                raise ClusterError(f"The ledger of rank 0 cannot be read. {error}") from error
            self.noise_multiplier, self.lost = first.noise_multiplier, first.lost
            self._take_over(first.reservation)
