"""What every posterior tells of itself: intervals of its sites, a table, a picture."""

import abc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyro_dp.infer.posterior.intervals import Interval, Line, forest_plot, html_table, lines, table
from pyro_dp.infer.posterior.status import Status
from pyro_dp.utils.validation import require_number

_LEVEL = 0.95


class Summary(abc.ABC):
    """What can be made of quantiles with and without the noise: a mixin of posteriors."""

    @property
    @abc.abstractmethod
    def plain(self) -> "Summary":
        """The same posterior without the uncertainty that the privacy noise adds."""

    @property
    @abc.abstractmethod
    def status(self) -> Status:
        """Whether the intervals can be published."""

    @abc.abstractmethod
    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Of each element of each site, in the model's own space.

        :param probabilities: P numbers in (0, 1).
        :returns: by site, ``(P, *site shape)``.
        """

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

        The dark part is the interval without the noise, the light one what the noise adds. The
        status stands below. Markers are hollow if it is not ok.

        :param level: of the intervals, in (0, 1).
        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("posterior.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed, or level is out of range.
        """
        return forest_plot(self._lines(level), level, self.status)

    def __repr__(self) -> str:
        return table(self._lines(_LEVEL), _LEVEL, self.status)

    def _repr_html_(self) -> str:
        """As it prints, for notebooks."""
        return html_table(self._lines(_LEVEL), _LEVEL, self.status)

    def _lines(self, level: float) -> list[Line]:
        lower, upper = _ends(level)
        probabilities = (lower, 0.5, upper)
        plain = self.plain.quantiles(probabilities)
        return list(lines(self.quantiles(probabilities), plain))


def _ends(level: float) -> tuple[float, float]:
    require_number("level", level, above=0.0, below=1.0)
    return (1 - level) / 2, (1 + level) / 2
