"""Typed errors, and a warning. Texts name arguments, sites and settings, never a value of data."""


class PrivacyError(Exception):
    """An operation would break, or could not state, the privacy guarantee."""


class PrivacyBudgetExceeded(PrivacyError):
    """A release would cost more than the budget: it did not happen, the ledger is unchanged."""


class ModelError(PrivacyError, ValueError):
    """The model, the guide or the data do not fit a private plate of independent records."""


class ConfigurationError(PrivacyError, ValueError):
    """A setting is out of range or does not fit the others."""


class SchemaError(PrivacyError, ValueError):
    """A frame does not fit its schema: the text names the column, and shows no value."""


class ClusterError(PrivacyError, RuntimeError):
    """A process of a cluster died, stopped, failed, or is not where the others are."""


class NotPrivateWarning(UserWarning):
    """What a call returns was computed without noise: it is as secret as what it was computed from.

    Who has data that need no protection says so by
    ``warnings.simplefilter("ignore", NotPrivateWarning)``.
    """


class ConvergenceWarning(UserWarning):
    """A run ended before its posterior settled, or the noise hides most of it."""


class ClippingWarning(UserWarning):
    """A run clipped so many records that its posterior is drawn by the clipping."""


class ClusterWarning(UserWarning):
    """A cluster spends more time on talking than on computing."""
