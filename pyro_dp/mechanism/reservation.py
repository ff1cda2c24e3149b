"""A run's plan, and its part of the budget: its noise, and what the ledger reserves for it."""

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

_RESULTS_LOST = (
    " {lost} releases in the journal came after the loaded state, or failed. They are paid for, "
    "and their results are lost. The present result can be used as it is."
)
_OTHER_NOISE = (
    "The noise differs between holders. It is agreed before the first release, and no holder may "
    "choose it later, in view of releases on samples. Start all anew, with journals and the last "
    "states."
)
gaussian = lru_cache(16)(SubsampledGaussian)  # steps are alike


class Steps:
    """Steps with one release each, which are alike.

    :param num_steps: None: as many as are asked for.
    :param bound: the largest norm of one record's part of a release.
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


class Reservation:
    """A run's part of the budget.

    :param noise_multiplier: sigma; None: it is calibrated to the rest of the budget.
    :param now: makes the run's origin, from its reservation and plan.
    :ivar whole: the next release reserves all that are left.
    :ivar lost: number of releases that the ledger counts, but without a result.
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
        """sigma. If needed, it is calibrated once, to the rest of the budget."""
        self.noise_multiplier = self.agreed(rate)
        return self.noise_multiplier

    def agreed(self, rate: float) -> float:
        """As :meth:`calibrate`, which the next release may do anew."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return self._peers.agreed_noise(self.least(rate))

    def least(self, rate: float) -> float:
        """The smallest noise with which the releases that are left fit the rest of the budget."""
        try:
            return self.accountant.least_noise(partial(self.plan.releases, rate), self.name)
        except PrivacyBudgetExceeded as error:
            text = _RESULTS_LOST.format(lost=self.lost) if self.lost else ""
            raise PrivacyBudgetExceeded(f"{error}{text}") from None

    def catch_up(self) -> None:
        self.plan.catch_up(self.lost, self._held, self._peers)

    def _held(self) -> float:
        """The part that the ledger holds for this run, of one release on all records."""
        noise_multiplier = self.calibrate(1.0)
        return math.fsum(
            count * (noise_multiplier / event.noise_multiplier) ** 2
            for origin, events in self.accountant.reserved
            if origin.reservation == self.name
            for event, count in events.items()
            if isinstance(event, SubsampledGaussian)
        )

    def reserved(self, rate: float) -> Counter[Event] | None:
        """With the next release; None: it does not change."""
        return self.plan.reserved(rate, self.calibrate(rate), self.whole)

    def begin_run(self) -> None:
        self.whole = self.whole or not self.calibrates

    def begin(self) -> Origin:
        if self.origin is None:
            plan = self.plan.kind if self.whole else OPEN
            self.origin = self._now(reservation=self.name, plan=plan)
        return self.origin

    def note_result(self, clipped: ClippedFraction | None, status: str | None) -> None:
        if self.origin is not None:
            self.accountant.note_result(self.origin, clipped, status)

    def lose(self) -> None:
        """Count a release that failed. The steps that are left share the rest of the budget.

        Owners do not calibrate again: another one may not have paid, and noise must be equal.
        """
        self.lost += 1
        if self.plan.whole:
            self.plan.lose()
        elif self.calibrates and not self._peers.own_ledgers:
            self.noise_multiplier = None
        else:
            self.whole = False  # one step more would not fit the budget: the last is refused

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
        """
        :param names: those of the state's parts, beside those of :meth:`state`.
        :raises ConfigurationError: it is no state, or that of another run.
        """
        known = {"steps", "noise_multiplier", "accountant", *names}
        if not (
            isinstance(state, dict) and same(state.get("version"), 1) and known <= state.keys()
        ):
            raise ConfigurationError(
                f"load_state_dict: this is no state_dict() of {self.inference}."
            )
        if not self.calibrates and not same(state["noise_multiplier"], self.noise_multiplier):
            raise ConfigurationError("noise_multiplier differs from that of the saved run.")
        require_short_text("reservation", state.get("reservation", self.name))
        require_count("steps", state["steps"], least=0)

    def load(self, state: dict[str, Any]) -> None:
        """Load the ledger first: it refuses a state that would lower it.

        Releases in a journal beyond the state are paid for and lost. Then the noise of a calibrated
        run is calibrated again, for the steps and the budget that are left.
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
        """Agree on settings and noise with the peers, and in a cluster follow rank 0's ledger.

        :raises ClusterError: a setting differs between ranks, the noise changes between releases on
            samples, or the ledger cannot be read.
        """
        ours, peers = self.accountant, self._peers
        ledger = Ledger(ours.state_dict(), self.noise_multiplier, self.lost, self.name)
        if peers.own_ledgers:
            peers.common(Settings(settings), ledger)
            known = peers.exchange(NoiseMultiplier(self.noise_multiplier))
            if any(each != known[0] for each in known):
                sampled = self.origin is not None and settings["sample_rate"] != 1.0
                if sampled or not self.calibrates:
                    raise ClusterError(_OTHER_NOISE)
                self.noise_multiplier = None  # and is agreed anew
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
