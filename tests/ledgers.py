"""Accountants that tests compare, and threads that share one."""

import threading

from pyro_dp import PrivacyAccountant
from pyro_dp.accounting.origins import Origin


def ledger(*entries, **settings):
    """An accountant of events and their counts."""
    accountant = PrivacyAccountant(**settings)
    for event, count in entries:
        accountant.record(event, count)
    return accountant


def loaded(state, **settings):
    accountant = PrivacyAccountant(**settings)
    accountant.load_state_dict(state)
    return accountant


def a_run(method="DPSVI", **said):
    """A run that begins."""
    return Origin.now(method, **{"seeded": False, "secure": False} | said)


def record(accountant, origin, event, count=1, bound=None, reserves=None):
    """A release of this run."""
    with accountant.next_position(origin, bound, reserves):
        accountant.record(event, count)


def told(accountant):
    """Each run's releases, in words that compare."""
    return [(origin and origin.saved(), part) for origin, part in accountant.runs()]


def reopened(path, **settings):
    """An accountant that has read a journal, which is closed again."""
    accountant = PrivacyAccountant(**settings)
    accountant.journal(path).close()
    return accountant


def in_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
