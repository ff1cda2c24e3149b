"""Numbers of data without noise: what the ledger and the caller are told before they are read."""

import warnings

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.utils.errors import NotPrivateWarning


def mark_look(accountant: PrivacyAccountant, what: str, *, stacklevel: int) -> None:
    """End the guarantee of the data of this ledger: epsilon is infinite from here on.

    :param what: will be looked at: a line of text, which is public.
    :param stacklevel: as for a warning of the caller's own.
    """
    accountant.record_nonprivate(what)
    warnings.warn(
        "The privacy guarantee ends: epsilon is infinite from now on. Read without noise, as "
        f"the ledger says: {what}.",
        NotPrivateWarning,
        stacklevel=stacklevel + 1,
    )


def warn_not_private(function: str, about: str, instead: str) -> None:
    """For functions that know no ledger; to be called by the function itself.

    :param function: its name.
    :param about: what its result tells about.
    :param instead: of what else it should be computed.
    """
    warnings.warn(
        f"{function}() adds no noise, and no ledger counts what it reveals about the {about}. "
        f"Use {instead}, or keep the result to yourself.",
        NotPrivateWarning,
        stacklevel=3,
    )
