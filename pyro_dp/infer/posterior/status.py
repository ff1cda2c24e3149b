"""Whether a posterior can be published: one word, and one line that says why."""

from collections.abc import Iterable
from dataclasses import dataclass

OK, CHECK, DO_NOT_PUBLISH = "ok", "check", "do not publish"
LEVELS = (OK, CHECK, DO_NOT_PUBLISH)
STEPS, NOISE, CLIPPING = "steps", "privacy noise", "clipping"  # causes

REMEDIES = {
    STEPS: "A larger epsilon, more records or other coordinates would help.",
    NOISE: "Fewer latents, more records or a larger epsilon would help.",
    CLIPPING: "A larger epsilon, more records, or features without extreme values would help.",
}


@dataclass(frozen=True)
class Status:
    """How good a posterior is, by released numbers alone.

    :param level: ``"ok"``, ``"check"`` or ``"do not publish"``.
    :param reason: a clause with a number; empty for ``"ok"``.
    :param cause: ``"steps"``, ``"privacy noise"`` or ``"clipping"``; empty if it is none of them.

    >>> from pyro_dp.infer.posterior.status import Status
    >>> print(Status("check", "the last step was 3.2 interval widths long", "steps"))
    check: the last step was 3.2 interval widths long
    """

    level: str = OK
    reason: str = ""
    cause: str = ""

    @staticmethod
    def worst(of: Iterable["Status"]) -> "Status":
        """The first of those with the worst level."""
        return max(of, key=lambda status: LEVELS.index(status.level))

    @property
    def is_ok(self) -> bool:
        """Whether there is nothing to check."""
        return self.level == OK

    def __str__(self) -> str:
        return f"{self.level}: {self.reason}" if self.reason else self.level

    @property
    def line(self) -> str:
        """The last line of a text that shows a posterior."""
        return f"status: {self}"


NOTHING_TO_CHECK = Status()
