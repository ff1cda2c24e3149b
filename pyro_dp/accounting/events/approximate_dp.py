"""A release that is (epsilon, delta)-DP by itself: the entry of a ledger, and its pair."""

import math
from dataclasses import dataclass
from typing import Any

from pyro_dp.accounting.bounded_pairs import Response
from pyro_dp.accounting.events.event import Event, require_short_text
from pyro_dp.utils.display import up
from pyro_dp.utils.validation import require_number


@dataclass(frozen=True)
class ApproximateDP(Event):
    """A release that is (epsilon, delta)-DP by itself, such as a private selection.

    The statement must hold under the accountant's own relation, for every outcome of earlier
    releases. It must have been fixed without looking at them.

    Several of them cost less than the sum of their epsilons. The engine ``"pld"`` composes them
    tightly, with each other and with runs: see :mod:`pyro_dp.accounting.bounded_pairs`.

    :param epsilon: in nats, >= 0.
    :param delta: in [0, 1).
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.

    >>> from pyro_dp import ApproximateDP, PrivacyAccountant
    >>> accountant = PrivacyAccountant(epsilon=1.0, delta=1e-5)
    >>> accountant.record(ApproximateDP(0.3, 0.0, "a histogram by another library"))
    >>> round(accountant.get_epsilon(), 3)
    0.3
    """

    kind = "approximate_dp"

    epsilon: float
    delta: float
    name: str

    def __post_init__(self) -> None:
        eps = require_number("epsilon", self.epsilon, above=0.0, below=math.inf, or_equal=True)
        delta = require_number("delta", self.delta, above=0.0, below=1.0, or_equal=True)
        require_short_text("name", self.name)
        object.__setattr__(self, "epsilon", eps)
        object.__setattr__(self, "delta", delta)

    @property
    def brief(self) -> str:
        return f"{self.name} (epsilon = {up(self.epsilon)}, delta = {self.delta:.4g})"

    def pair(self, neighboring: str) -> Response:
        return Response(self.epsilon)

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import common, privacy_loss_distribution

        stated = common.DifferentialPrivacyParameters(self.epsilon, self.delta)
        return privacy_loss_distribution.from_privacy_parameters(stated, gap)
