"""What reports and pictures read of an accountant."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pyro_dp.accounting.ledger import LedgerEntry


@runtime_checkable
class PrivacyCurve(Protocol):
    """A ledger, and the epsilon at each delta that it costs: a :class:`PrivacyAccountant`."""

    @property
    def epsilon(self) -> float | None: ...

    @property
    def delta(self) -> float: ...

    @property
    def neighboring(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def ledger(self) -> Sequence[LedgerEntry]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def get_epsilon(self, delta: float | None = None) -> float: ...

    def get_delta(self, epsilon: float) -> float: ...
