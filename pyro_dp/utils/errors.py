"""Typed errors and warnings. Texts name arguments, sites and settings, never a value of data."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

CURATOR = "(This message depends on the data: it is for the curator only.)"


class PrivacyError(Exception):
    """An operation would break, or could not state, the privacy guarantee.

    >>> issubclass(ConfigurationError, PrivacyError)  # catching it catches all of ours
    True
    """


class PrivacyBudgetExceeded(PrivacyError):
    """A release would exceed the budget. It did not happen, and the ledger is unchanged.

    >>> PrivacyAccountant(epsilon=0.1).record(SubsampledGaussian(1.0))
    Traceback (most recent call last):
        ...
    PrivacyBudgetExceeded: ...
    """


class ModelError(PrivacyError, ValueError):
    """The model, the guide or the data do not fit a private plate of independent records.

    >>> columns(torch.zeros(3, 2), "age")
    Traceback (most recent call last):
        ...
    ModelError: ...
    """


class ConfigurationError(PrivacyError, ValueError):
    """A setting is out of range or does not fit the others.

    >>> PrivacyAccountant(epsilon=1.0, delta=2.0)
    Traceback (most recent call last):
        ...
    ConfigurationError: ...
    """


class SchemaError(PrivacyError, ValueError):
    """A frame does not fit its schema. The text names the column, and shows no value.

    >>> Schema({"age": Number(0, 120)}).encode(pd.DataFrame({"age": ["young", "old"]}))
    Traceback (most recent call last):
        ...
    SchemaError: ...
    """


class ClusterError(PrivacyError, RuntimeError):
    """A process of a cluster died, stopped or failed, or is out of step with the others.

    >>> issubclass(ClusterError, PrivacyError)
    True
    """


class NotPrivateWarning(UserWarning):
    """A call returned a result without noise. The result is as secret as the data.

    >>> warnings.simplefilter("ignore", NotPrivateWarning)  # for data that need no protection
    """


class PrivacyWarning(UserWarning):
    """A guarantee holds as stated, but protects less than a reader may think.

    >>> warnings.simplefilter("error", PrivacyWarning)  # before anything is released
    """


class ConvergenceWarning(UserWarning):
    """A run ended before its posterior settled, or the noise dominates it.

    >>> warnings.simplefilter("error", ConvergenceWarning)  # to stop a script
    """


class ClippingWarning(UserWarning):
    """A run clipped so many records that its posterior is biased by the clipping.

    >>> warnings.simplefilter("error", ClippingWarning)  # to stop a script
    """


class ClusterWarning(UserWarning):
    """A cluster spends more time on communication than on computation.

    >>> warnings.simplefilter("ignore", ClusterWarning)  # for trials on small data
    """


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def warn_user(warning: Warning) -> None:
    """Warn at the innermost line outside of the package."""
    frame, level = sys._getframe(1), 3
    while frame.f_back is not None and _is_ours(frame.f_back.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def warn_not_private(function: str, about: str, instead: str) -> None:
    """Warn that the result of a function is not private, and that no ledger counts it.

    :param about: the data that the result reveals. ``instead`` names safer data.
    """
    warnings.warn(
        f"{function}() adds no noise, and no ledger counts what it reveals about the {about}. "
        f"Use {instead}, or keep the result to yourself.",
        NotPrivateWarning,
        stacklevel=3,
    )


def _is_ours(module: str) -> bool:
    # A decorator's context manager lies between two of our frames.
    return module.split(".")[0] in ("pyro_dp", "contextlib", "torch")
