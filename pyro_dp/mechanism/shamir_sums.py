"""Sums by Shamir's secret sharing among the holders, through MPyC. Nobody sees an upload.

The protocol is the standard one (Shamir 1979, How to share a secret; for sums: Ben-Or, Goldwasser &
Wigderson 1988), implemented by MPyC. Shares are elements of a prime field, from the operating
system's generator. Each holder splits its upload into K shares and sends one to each holder. Any
K - 1 of these shares are uniform, whatever the upload is. Each holder adds up the shares it
received, and sends the result to all. The K results determine the total.

So K - 1 holders together learn no more about the last one's upload than the total reveals, even if
they deviate from the protocol. The reason: a holder's messages depend only on its upload, fresh
random numbers, and sums of the shares it received. A holder that deviates can make the total wrong.
(The total is one of integers, not modulo 2^64. For sums of 2^33 records and more, it also reveals
how often they have wrapped.)
"""

import asyncio
import functools
import importlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from pyro_dp.mechanism.federation import Numbers
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.validation import require_count, require_flag, require_number

T = TypeVar("T")
_LONGEST = 1e6  # seconds
_PRIME = 2**89 - 1  # sums of 2^24 integers of 64 bits do not wrap
_TALKS, _ADDS = b"t", b"a"  # the first byte of a message
_AT_A_TIME = 500  # numbers: MPyC takes more than twice as long for twice as many
_ELSEWHERE = (
    "The holders are not at the same point of the run, or one of them failed. All must make the "
    "same calls, in the same order, on the same inference. Nothing was opened."
)
_NO_MPYC = (
    "ShamirSums needs MPyC: pip install 'pyro_dp[federated]'. (AtTrustedAggregator does without, "
    "and needs somebody whom all holders trust.)"
)
_LOST = (
    "Holder {index} lost the others while {doing}: one of them died, stopped, or computed longer "
    "than timeout={timeout:g} seconds ({kind}). Releases in the ledger may have happened. "
    "Start all anew, with journals and the last states."
)


class ShamirSums:
    """A channel of a :class:`~pyro_dp.federated.Federation` in which the holders add up themselves.

    Nobody sees a holder's upload. All K holders must stay, so ``dropouts`` above 0 is refused.

    :param addresses: "host:port" of each holder, the same list for all. Each holder listens at its
        own address.
    :param index: this holder's position among them.
    :param encrypted: use TLS connections with certificates on both sides. MPyC reads
        ``party_<index>.crt``, the certificate of "MPyC party <index>", ``.key`` and ``mpyc_ca.crt``
        from the folder ``.config``. If False, anyone on the network can read and change all
        messages, including all shares of an upload. Use that on one machine only.
    :param timeout: the time in seconds that a holder waits for the others. It must be longer than a
        step.
    :raises ConfigurationError: MPyC is not installed, or an argument is out of range.
    :raises ClusterError: the others did not connect in time.

    >>> addresses = ["hospital-a:7000", "hospital-b:7000", "hospital-c:7000"]
    >>> def join(index):  # in each hospital; it waits for the others
    ...     return ShamirSums(addresses, index)
    """

    note = (
        "The sums of {holders} holders, each with a share of the noise, were added up by secret "
        "sharing. The noise allows for at most {dropouts} absent and {colluders} colluding "
        "holders."
    )

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        *,
        encrypted: bool = True,
        timeout: float = 600.0,
    ):
        self._addresses = list(addresses)
        if len(self._addresses) < 2:
            raise ConfigurationError("addresses: there must be two holders at least.")
        self.index = require_count("index", index, least=0)
        if self.index >= len(self._addresses):
            raise ConfigurationError("index must be less than the number of addresses.")
        self._timeout = require_number("timeout", timeout, above=0.0, below=_LONGEST)
        self._lost, self._all = False, list(range(len(self._addresses)))
        self._party = _party(self._addresses, self.index, require_flag("encrypted", encrypted))
        self._field = self._party.SecFld(_PRIME)
        self._heard("meeting", self._party.start())

    def begin(self, holders: int, dropouts: int) -> None:
        if holders != len(self._addresses):
            raise ConfigurationError("holders must be the number of addresses.")
        if dropouts:
            raise ConfigurationError(
                "dropouts must be 0, because the total lacks the shares of absent holders. "
                "(AtTrustedAggregator goes on without some.)"
            )

    def talk(self, public: bytes) -> dict[int, bytes]:
        return dict(enumerate(self._said("talking", _TALKS, public)))

    def add(self, upload: Numbers) -> tuple[Numbers, list[int]]:
        if len(set(self._said("agreeing", _ADDS, b"%d" % upload.size))) > 1:
            raise ClusterError("The uploads of the holders differ in size: nothing was opened.")
        total: list[int] = []
        for start in range(0, upload.size, _AT_A_TIME):
            own = [self._field(each % _PRIME) for each in upload[start:][:_AT_A_TIME].tolist()]
            shared = functools.reduce(self._party.vector_add, self._party.input(own))
            opened = self._heard("adding up", _awaited(self._party.output(shared)))
            total += [_in_64_bits(int(each)) for each in opened]
        return np.array(total, np.int64), self._all

    def leave(self) -> None:
        """Close the connections. The error keeps MPyC from sending a last message, a pickle."""
        self._heard("leaving", self._party.__aexit__(ClusterError, None, None))

    def _said(self, doing: str, does: bytes, own: bytes) -> list[bytes]:
        """Each holder's message to this one.

        :param does: the kind of this call, as a byte.
        :raises ClusterError: the holders make calls of different kinds.
        """
        messages = self._party.coroutine(_exchanged)(self._party, does + own)
        received = self._heard(doing, _awaited(messages))
        if any(each[:1] != does for each in received):
            raise ClusterError(_ELSEWHERE)
        return [each[1:] for each in received]

    def _heard(self, doing: str, what: Coroutine[Any, Any, T]) -> T:
        text = _LOST.format(index=self.index, doing=doing, timeout=self._timeout, kind="{kind}")
        if self._lost:
            what.close()
            raise ClusterError(text.format(kind="before"))
        try:
            return self._party.run(asyncio.wait_for(what, self._timeout))  # type: ignore[no-any-return]
        except BaseException as error:
            self._lost = True
            if isinstance(error, Exception):
                raise ClusterError(text.format(kind=type(error).__name__)) from error
            raise


def _party(addresses: list[str], index: int, encrypted: bool) -> Any:
    """MPyC's runtime. It reads its settings from the command line."""
    settings = [part for address in addresses for part in ("-P", address)]
    settings += ["-I", str(index), "--no-log", *(["--ssl"] if encrypted else [])]
    before, sys.argv = sys.argv, ["", "--no-log"]
    try:
        runtime = importlib.import_module("mpyc.runtime")  # which sets up a runtime of one party
        sys.argv = ["", *settings]
        party = runtime.setup()
    except ImportError:
        raise ConfigurationError(_NO_MPYC) from None
    finally:
        sys.argv = before
    party.threshold = len(addresses) - 1  # possible because sums need no honest majority
    if encrypted:
        party.set_protocol = functools.partial(_set_certified, party.set_protocol)
    return party


def _set_certified(set_protocol: Callable[[int, Any], None], index: int, connection: Any) -> None:
    """Check that a peer's certificate is that of its index.

    MPyC does not check it, so one holder could pretend to be all others.

    :raises ConnectionError: the certificate is for another index.
    """
    subject = connection.transport.get_extra_info("peercert")["subject"]
    if (("commonName", f"MPyC party {index}"),) not in subject:
        raise ConnectionError(f"The certificate is not that of holder {index}.")
    set_protocol(index, connection)


async def _exchanged(party: Any, own: bytes) -> asyncio.Future:  # type: ignore[type-arg]  # for MPyC
    """Send raw bytes to each other holder, and receive theirs.

    Each message goes directly from one holder to another, so a third one cannot change it. In
    secret sharing it could. MPyC's own messages are pickles, which are unsafe to read from others.
    """
    others = [each.pid for each in party.parties if each.pid != party.pid]
    for holder in others:
        party._send_message(holder, own)
    received = {holder: party._receive_message(holder) for holder in others} | {party.pid: own}
    return await party.gather([received[i] for i in sorted(received)])  # type: ignore[no-any-return]


async def _awaited(future: Any) -> Any:
    return await future


def _in_64_bits(element: int) -> int:
    """A sum of 64-bit integers, from a field element, wrapped as in 64-bit arithmetic."""
    signed = element if element <= _PRIME // 2 else element - _PRIME
    return (signed + 2**63) % 2**64 - 2**63
