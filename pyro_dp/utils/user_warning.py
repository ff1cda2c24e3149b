"""Warnings that show the user's line, however deep in the package they arise."""

import sys
import warnings

_PACKAGE = __name__.split(".")[0]


def warn_user(warning: Warning) -> None:
    """Warn at the innermost line outside of the package."""
    frame, level = sys._getframe(1), 3
    while frame.f_back is not None and _is_ours(frame.f_back.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def _is_ours(module: str) -> bool:
    # A decorator's context manager lies between two of our frames.
    return module.split(".")[0] in (_PACKAGE, "contextlib", "torch")
