"""Empty figures of matplotlib, which belong to no window, and how many rows one shows."""

from typing import Any

from pyro_dp.utils.errors import ConfigurationError

MOST_ROWS = 60
_ROW, _MARGIN = 0.25, 1.2  # inches
_WIDTH, _HEIGHT = 7.0, 4.5


def figure(call: str, height: float = _HEIGHT) -> Any:
    """
    :param call: of the user's, for an error.
    :param height: in inches.
    :returns: a ``matplotlib.figure.Figure``.
    :raises ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            f"{call} needs matplotlib, which is not installed: pip install matplotlib."
        ) from None
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def with_rows(call: str, rows: int) -> Any:
    """A figure as high as so many rows need."""
    return figure(call, _MARGIN + _ROW * rows)


def first_of(count: int) -> str:
    """A title that says if not all rows are shown."""
    return f"The first {MOST_ROWS} of {count}" if count > MOST_ROWS else ""
