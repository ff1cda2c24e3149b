"""Pictures of the course, by notebook. Plain matplotlib: nothing here is about privacy.

Colours are Okabe and Ito's, and nothing is told by colour alone. Backgrounds stay white, so that
pictures can be read on dark pages.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

BLACK, GREY, ORANGE, BLUE, GREEN = "#222222", "#777777", "#D55E00", "#0072B2", "#009E73"

plt.rcParams.update(
    {
        "figure.dpi": 80,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


# 1. Swap SVI for DPSVI


def intervals(fits: Mapping[str, tuple], names: Sequence[str], xlabel: str, title: str) -> None:
    """A row for each coefficient, with an interval of each fit: mean and 1.96 sd.

    :param fits: mean and standard deviation, of shape (len(names),) each, by the fit's label. The
        first one is the reference, and is drawn in black.
    """
    fig, ax = plt.subplots(figsize=(9, 1.0 + 0.95 * len(names)), layout="constrained")
    rows = np.arange(len(names))
    looks = zip((BLACK, GREY, GREEN, BLUE, ORANGE), "oDv^s", strict=True)
    for k, ((label, (mean, sd)), (colour, marker)) in enumerate(zip(fits.items(), looks)):
        place = rows + 0.8 * ((k + 0.5) / len(fits) - 0.5)
        style = dict(fmt=marker, color=colour, ms=5, capsize=2.5, label=label)
        ax.errorbar(np.asarray(mean), place, xerr=1.96 * np.asarray(sd), **style)
    for row in rows[:-1]:
        ax.axhline(row + 0.5, color="#dddddd", lw=0.8)
    ax.axvline(0.0, color=BLACK, lw=0.8, ls=":")
    ax.set(title=title, xlabel=xlabel, yticks=rows, yticklabels=names)
    ax.invert_yaxis()
    fig.legend(loc="outside right center")
    plt.show()
