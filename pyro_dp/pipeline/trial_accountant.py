"""The accountant of one trial of a private selection."""

import math
from collections.abc import Mapping
from typing import Any

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event, SubsampledGaussian
from pyro_dp.utils.errors import PrivacyBudgetExceeded, PrivacyError
from pyro_dp.utils.validation import require_count

_ROUNDING = 1e-9
NOTE = "This is the ledger of one trial of a private_selection: it lacks what the selection cost."


class TrialAccountant(PrivacyAccountant):
    """Admits the declared releases, and no other.

    :param declared: the declared releases, with counts.
    :param ours: the accountant of the data set.
    :param start: a number of 128 bits, drawn for this trial. So no two trials derive a stream from
        the same position, and no position reveals a trial's number.
    """

    silent = True

    def __init__(
        self, declared: Mapping[SubsampledGaussian, int], ours: PrivacyAccountant, start: int
    ):
        super().__init__(delta=ours.delta, neighboring=ours.neighboring, engine=ours.engine)
        self._left: dict[Event, int] = dict(declared.items())
        # Gaussian sums over all records compose by their precision, however it is shared out.
        self._precision = math.fsum(n * _precision(e) for e, n in declared.items())
        self._start = start + (1 << 128)  # beyond the positions of other accountants
        self.refused = self.continued = False
        self.note(NOTE)

    def record(self, event: Any, count: int = 1, *, neighboring: str | None = None) -> None:
        """:raises PrivacyBudgetExceeded: it was not declared, or the trial is over."""
        count = require_count("count", count, least=0)
        with self._lock:
            left = self._left.get(event, 0) if type(event) is SubsampledGaussian else 0
            precision = count * _precision(event)
            admitted = count <= left
            if precision:
                admitted = precision <= self._precision * (1 + _ROUNDING)
            if not admitted:
                self.refused = True
                raise PrivacyBudgetExceeded(
                    "a trial of private_selection may release what was declared in releases, and "
                    "no more, and only while it runs."
                )
            super().record(event, count)
            self._left[event] = left - count
            self._precision = max(self._precision - precision, 0.0)

    def note_earlier_values(self, text: str) -> None:
        """:raises PrivacyError: always: trials that go on from each other cost more than one."""
        self.continued = True
        raise PrivacyError(text)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """:raises PrivacyError: always."""
        raise PrivacyError("A trial of private_selection starts afresh: it cannot load a state.")

    def close(self) -> None:
        """Refuse all further releases: the selection has its winner."""
        with self._lock:
            self._left, self._precision = {}, 0.0


def _precision(event: Event) -> float:
    """Precision of a Gaussian sum's noise, in units of its bound; 0 for samples and others."""
    if type(event) is not SubsampledGaussian or event.sample_rate < 1.0:
        return 0.0
    sigma = event.noise_multiplier
    return sigma**-2 if sigma else math.inf
