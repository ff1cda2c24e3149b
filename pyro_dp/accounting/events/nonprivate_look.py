"""A look at the data without noise: the entry of a ledger, after which there is no guarantee."""

from dataclasses import dataclass

from pyro_dp.accounting.events.event import Event, require_short_text


@dataclass(frozen=True)
class NonPrivateLook(Event):
    """Somebody looked at a number of the data without noise: no guarantee is left.

    :param what: the number, in a short text, which is public.
    :param time: the time of the look (UTC, ISO 8601), or an empty text.
    :raises ConfigurationError: if a text is not a short line.

    >>> from pyro_dp import NonPrivateLook, PrivacyAccountant
    >>> accountant = PrivacyAccountant(epsilon=1.0)
    >>> accountant.record(NonPrivateLook("a mean that was on a slide", "2026-01-31T12:00:00"))
    >>> accountant.get_epsilon()
    inf
    """

    kind = "nonprivate_look"
    delta = 0.0

    what: str
    time: str = ""

    def __post_init__(self) -> None:
        require_short_text("what", self.what)
        if self.time != "":
            require_short_text("time", self.time)

    @property
    def brief(self) -> str:
        return f"non-private look: {self.what}" + (f" ({self.time})" if self.time else "")

    def pair(self, neighboring: str) -> None:
        return None
