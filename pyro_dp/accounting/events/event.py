"""The protocol of a ledger's event: an inert record with its cost, and its words."""

import abc
from typing import Any, ClassVar

from pyro_dp.utils.errors import ConfigurationError

LONGEST_TEXT = 200


class Event(abc.ABC):
    """One release, or one look at the data without noise. Each kind is a frozen dataclass.

    :cvar kind: its name in saved ledgers, which also hold its fields.
    :ivar sample_rate: the probability that a record takes part.
    :cvar dots: (gap, relation) to its privacy loss distribution by ``dp_accounting``, on a grid of
        losses; None: the second opinion is not asked about such releases.
    """

    kind: ClassVar[str]
    delta: float  # the probability of an infinite loss
    dots: Any = None
    sample_rate: float = 1.0

    @abc.abstractmethod
    def pair(self, neighboring: str) -> Any:
        """A pair that dominates one release, apart from ``delta``; None: there is no guarantee.

        It is a :class:`~pyro_dp.accounting.gaussian_pairs.DominatingPair`, that of a removal under
        ``add_or_remove_one``, or a pair of :mod:`pyro_dp.accounting.bounded_pairs`.

        :param neighboring: the relation, see :data:`pyro_dp.accounting.composition.NEIGHBORING`.
        :raises ConfigurationError: the event does not fit the relation.
        """

    @property
    @abc.abstractmethod
    def brief(self) -> str:
        """A line of text."""


def require_short_text(name: str, value: Any, longest: int = LONGEST_TEXT) -> None:
    if not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= longest):
        raise ConfigurationError(f"{name} must be one line of text of 1 to {longest} characters.")
