"""The summary of a posterior: its status, its intervals, and their table and picture."""

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from pyro_dp.utils.display import MOST_ROWS, Displayed, Table, first_of, numbers, with_rows
from pyro_dp.utils.validation import require_number

OK, CHECK, DO_NOT_PUBLISH = "ok", "check", "do not publish"
LEVELS = (OK, CHECK, DO_NOT_PUBLISH)
STEPS, NOISE, CLIPPING, MODEL = "steps", "privacy noise", "clipping", "model"  # causes

REMEDIES = {
    STEPS: "A new run needs new budget: more records, a larger epsilon, a simpler model, or "
    "features scaled alike (PrivateGLM scales them).",
    NOISE: "A new run needs new budget: fewer latents, more records or a larger epsilon.",
    CLIPPING: "A new run needs new budget: lower bounds where a few records are far above all "
    "others, more records or a larger epsilon.",
    MODEL: "A new run needs new budget and a model with more variance: a negative binomial for "
    "counts, or an unknown scale for numbers.",
    "": "Another prior costs nothing (Evidence.posterior). Another model needs new budget.",
}
_PUBLISH = {
    CHECK: "You may publish it together with its status.",
    DO_NOT_PUBLISH: "You may publish this status, but not the intervals.",
}
MOST_LINES = 30
_LEVEL = 0.95


@dataclass(frozen=True)
class Status:
    """How good a posterior is, by released numbers alone.

    :param level: ``"ok"``, ``"check"`` or ``"do not publish"``.
    :param reason: a clause with a number; empty if there is nothing to say.
    :param cause: ``"steps"``, ``"privacy noise"``, ``"clipping"``, ``"model"``, or empty.

    >>> from pyro_dp.infer.posterior.summary import Status
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
        """The status in a text that shows a posterior."""
        return f"status: {self}"

    @property
    def lines(self) -> list[str]:
        """The same, and the next step if there is something to check."""
        next_step = [] if self.is_ok else [f"next: {_PUBLISH[self.level]} {REMEDIES[self.cause]}"]
        return [self.line, *next_step]


NOTHING_TO_CHECK = Status()


class Interval(NamedTuple):
    """Intervals of a site's elements, in the model's own space: two tensors of the site's shape.

    :param lower: lower ends of the intervals.
    :param upper: upper ends of the intervals.
    """

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Line:
    """One element of a site.

    :param name: ``"w[3]"``.
    :param plain: ends of its interval without the noise.
    :param aware: ends of its interval.
    """

    name: str
    median: float
    plain: tuple[float, float]
    aware: tuple[float, float]

    @property
    def privacy(self) -> float:
        """The share of privacy in the interval's squared width, in [0, 1]."""
        without, width = (end - start for start, end in (self.plain, self.aware))
        if not 0.0 < width < math.inf:
            return 0.0
        return max(1.0 - (without / width) ** 2, 0.0)


def element_names(site: str, shape: Sequence[int]) -> list[str]:
    """``"w[0]"``, ``"w[1, 2]"``; ``"w"`` for a single number without a shape."""
    if not len(shape):
        return [site]
    places = product(*(range(length) for length in shape))
    return [f"{site}[{', '.join(map(str, place))}]" for place in places]


class Summary(Displayed):
    """Intervals, tables and plots from quantiles with and without the noise: a mixin."""

    @property
    @abc.abstractmethod
    def plain(self) -> "Summary":
        """The same posterior without the uncertainty that the privacy noise adds."""

    _status: Status

    @property
    def status(self) -> Status:
        """Whether the intervals can be published. It follows from released numbers alone."""
        return self._status

    @abc.abstractmethod
    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Quantiles of each element of each site, ``(P, *site shape)``, at P probabilities."""

    def intervals(self, level: float = _LEVEL) -> dict[str, Interval]:
        """Central intervals of the elements of each site, in the model's own space.

        :param level: probability that an interval holds its element, in (0, 1).
        :returns: by site.
        :raises ConfigurationError: level is out of range.
        """
        found = self.quantiles(_ends(level))
        return {site: Interval(ends[0], ends[1]) for site, ends in found.items()}

    def plot(self, level: float = _LEVEL) -> Any:
        """A forest plot: each element's interval, and the part of it that privacy added.

        The dark part is the interval without the noise, the light one the widening by the noise.
        The status stands below. Markers are hollow if it is not ok.

        :param level: the intervals' level, in (0, 1).
        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("posterior.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed, or level is out of range.
        """
        lines, status = self._lines(level), self.status
        shown = lines[:MOST_ROWS]
        figure = with_rows("posterior.plot()", len(shown))
        axes, places = figure.subplots(), range(len(shown))
        for ends, width, color, label in (
            ([line.aware for line in shown], 1.5, "C1", f"{level:.0%} interval, with the noise"),
            ([line.plain for line in shown], 4.0, "C0", "without the noise"),
        ):
            lower, upper = zip(*ends, strict=True)
            axes.hlines(places, lower, upper, linewidth=width, color=color, label=label)
        medians, fill = [line.median for line in shown], "C3" if status.is_ok else "white"
        axes.plot(medians, places, "o", color="C3", markerfacecolor=fill, label="median")
        axes.set_yticks(places, [line.name for line in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_title(first_of(len(lines)))
        axes.set_xlabel(status.line, fontsize="small", wrap=True)
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")
        return figure

    def _blocks(self) -> list[Table | str]:
        """A row for each element, and the status."""
        lines = self._lines(_LEVEL)
        shown = lines[:MOST_LINES]
        rows, head = [], ("", "median", f"{_LEVEL:.0%} interval", "privacy")
        includes = self.status.is_ok or any(line.plain != line.aware for line in lines)
        medians = numbers([line.median for line in shown])
        ends = numbers([end for line in shown for end in line.aware])
        for line, median, low, high in zip(shown, medians, ends[::2], ends[1::2], strict=True):
            privacy = f"{line.privacy:.0%}" if includes else "-"
            rows.append((line.name, median, f"{low} to {high}", privacy))
        more = len(lines) - len(shown)
        below = [f"... and {more} more: posterior.intervals()"] * (more > 0)
        return [Table(head, rows, "Posterior"), *below, *self.status.lines]

    def _lines(self, level: float) -> list[Line]:
        """Lines of all elements, site by site."""
        lower, upper = _ends(level)
        at, lines = (lower, 0.5, upper), list[Line]()
        aware, plain = self.quantiles(at), self.plain.quantiles(at)
        for site, own in aware.items():
            names = element_names(site, own.shape[1:])
            ends, without = (each.reshape(3, -1).T.tolist() for each in (own, plain[site]))
            for name, (low, mid, high), (start, _, end) in zip(names, ends, without, strict=True):
                lines.append(Line(name, mid, (start, end), (low, high)))
        return lines


def _ends(level: float) -> tuple[float, float]:
    require_number("level", level, above=0.0, below=1.0)
    return (1 - level) / 2, (1 + level) / 2
