"""A posterior as a picture: an interval for each element of a site."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyro_dp.infer.posterior.intervals import Line
from pyro_dp.infer.posterior.table import by_reason, listed
from pyro_dp.utils.figure import MOST_ROWS, first_of, with_rows


def forest_plot(lines: Sequence[Line], level: float, reasons: Mapping[str, str]) -> Any:
    """Dark: the interval without the noise. Light: what the noise adds. Hollow: doubtful.

    :param level: of the intervals.
    :param reasons: of doubts, by coordinate.
    :returns: a ``matplotlib.figure.Figure``, which belongs to no window.
    """
    shown = lines[:MOST_ROWS]
    figure = with_rows("posterior.plot()", len(shown))
    axes = figure.subplots()
    sure = [place for place, line in enumerate(shown) if not line.doubtful]
    doubtful = [place for place, line in enumerate(shown) if line.doubtful]
    wide, narrow = [line.aware for line in shown], [line.plain for line in shown]
    _bars(axes, wide, width=1.5, color="C1", label=f"{level:.0%} interval, with the noise")
    _bars(axes, narrow, width=4.0, color="C0", label="without the noise")
    for places, fill, label in ((sure, "C0", "median"), (doubtful, "white", "doubtful")):
        if places:
            medians = [shown[place].median for place in places]
            axes.plot(medians, places, "o", color="C3", markerfacecolor=fill, label=label)
    axes.set_yticks(range(len(shown)), [line.name for line in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_title(first_of(len(lines)))
    notes = [f"doubtful: {listed(names)}: {why}" for why, names in by_reason(reasons).items()]
    axes.set_xlabel("\n".join(notes), fontsize="small", wrap=True)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _bars(axes: Any, ends: Sequence[tuple[float, float]], **style: Any) -> None:
    lower, upper = zip(*ends, strict=True)
    axes.hlines(
        range(len(ends)),
        lower,
        upper,
        linewidth=style["width"],
        color=style["color"],
        label=style["label"],
    )
