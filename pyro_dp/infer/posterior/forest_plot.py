"""A posterior as a picture: an interval for each element of a site."""

from collections.abc import Sequence
from typing import Any

from pyro_dp.infer.posterior.intervals import Line
from pyro_dp.infer.posterior.status import Status
from pyro_dp.utils.display import MOST_ROWS, first_of, with_rows


def forest_plot(lines: Sequence[Line], level: float, status: Status) -> Any:
    """Dark: the interval without the noise. Light: what the noise adds. Hollow: not ok.

    :param level: of the intervals.
    :param status: of the posterior, which stands below.
    :returns: a ``matplotlib.figure.Figure``, which belongs to no window.
    """
    shown = lines[:MOST_ROWS]
    figure = with_rows("posterior.plot()", len(shown))
    axes = figure.subplots()
    wide, narrow = [line.aware for line in shown], [line.plain for line in shown]
    _bars(axes, wide, width=1.5, color="C1", label=f"{level:.0%} interval, with the noise")
    _bars(axes, narrow, width=4.0, color="C0", label="without the noise")
    medians, fill = [line.median for line in shown], "C3" if status.is_ok else "white"
    axes.plot(medians, range(len(shown)), "o", color="C3", markerfacecolor=fill, label="median")
    axes.set_yticks(range(len(shown)), [line.name for line in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_title(first_of(len(lines)))
    axes.set_xlabel(status.line, fontsize="small", wrap=True)
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
