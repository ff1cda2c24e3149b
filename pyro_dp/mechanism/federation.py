"""A federation: owners of data who fit one model together, and show each other only releases.

A step without failures has two rounds: the agreement and the uploads. If a holder fails, the others
do not learn the cause, because an error may reveal data.
"""

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.messages import UNREADABLE, CalibratedNoise, Ledger, Seed, Settings
from pyro_dp.mechanism.peers import Peers
from pyro_dp.utils.errors import ClusterError, ClusterWarning, ConfigurationError
from pyro_dp.utils.torch_state import forked_rng, set_torch_states, torch_states
from pyro_dp.utils.validation import require_count

Numbers = NDArray[np.int64]


class Channel(Protocol):
    """A holder's connection to the others: it exchanges messages, and adds up uploads.

    All holders make the same calls in the same order, and each call waits for the others.

    :ivar index: the holder's, from 0 to K - 1.
    :ivar note: a text for the ledger that says against whom the guarantee holds. It is formatted
        with ``holders``, ``dropouts`` and ``colluders``.

    >>> class TwiceMyself:  # to try a script alone: the other holder sends and adds the same
    ...     index, note = 0, "A trial of one holder as {holders}: no guarantee towards others."
    ...     def begin(self, holders, dropouts): ...
    ...     def talk(self, public): return {0: public, 1: public}
    ...     def add(self, upload): return 2 * upload, [0, 1]
    ...     def leave(self): ...
    >>> federation = Federation(TwiceMyself(), holders=2)
    >>> federation.exchange("ready")
    ['ready', 'ready']
    """

    index: int
    note: str

    def begin(self, holders: int, dropouts: int) -> None:
        """:raises ConfigurationError: it does not support so many holders or drop-outs."""

    def talk(self, public: bytes) -> dict[int, bytes]:
        """Send a message to all holders. Returns those of all present holders, by index.

        No holder may be able to change the messages between two others.

        :raises ClusterError: too few holders are left, or the connection is lost.
        """

    def add(self, upload: Numbers) -> tuple[Numbers, list[int]]:
        """The sum of all present holders' uploads modulo 2^64, (n,), and these holders' indices.

        :param upload: (n,) in int64.
        :raises ClusterError: too few holders are left, the connection is lost, or sizes differ.
        """

    def leave(self) -> None:
        """The last call."""


class Federation:
    """K holders of data who fit one posterior together, seen from one of them.

    Write ``DPSEP(model, guide, accountant=accountant, noise=Noise(source="system"),
    execution=Execution(peers=federation))``, likewise :class:`VIPS` and :class:`DPSVI`. Each holder
    runs the same script on its own machine, and passes its own records to ``run``. All get the same
    posterior, that of all their records. Records and exact sums never leave their owner.

    In a step each holder draws from its own records and adds up their contributions, as integers.
    Its own accountant and journal count the release, and refuse it beyond its own budget. Then it
    adds its share of the noise, a discrete Gaussian of variance sigma^2 / (K - t - c), and uploads
    only this noisy sum. The channel adds up the uploads and returns the total to all. Even if t
    holders drop out, the shares of those that do not collude add up to a variance of sigma^2. If
    fewer drop out, the noise is larger, and posteriors allow for it.

    Make it before model and guide. It sets torch's global generators to states that all holders
    have agreed on, so all can predict later draws from them. Prepare your data before, or with a
    generator of your own.

    **Guarantee.** It protects one record of one holder, as that holder's accountant states. It
    holds against anyone who sees all releases, including the other holders. Each of these can
    subtract its own share of the noise, and at most c of them may work together. The other shares
    add up to noise of variance at least sigma^2, up to the factor of
    :mod:`pyro_dp.mechanism.fixed_point` for each share. Proof: docs/proofs/integers.md.

    **The adding party.** With :class:`ShamirSums` nobody sees an upload: the holders add up among
    themselves. With :class:`AtTrustedAggregator` the aggregator sees each upload, which has only
    one share of the noise. So the guarantee against the aggregator is weaker. The ledger says so.

    **Not protected.** Each holder's number of records, column types, the time at which it answers,
    and whether its part of a step failed. Also everything that :class:`DPSEP` and the other
    inferences do not protect.

    **Failures.** If a holder stays away for longer than the channel waits, it is left out for good,
    and its records count as absent. If more than t holders are absent, no total is computed, and
    all raise a :class:`ClusterError`. A release counts in a holder's ledger before it is uploaded.

    :param channel: the connection to the other holders.
    :param holders: K, at least 2.
    :param dropouts: t, the number of holders that may stay away.
    :param colluders: c, the number of holders that may work together against another one. It is at
        least 1, because each holder has its own share of the noise.
    :raises ConfigurationError: numbers are out of range, or differ between holders.
    :raises ClusterError: the other holders did not connect in time.

    >>> def join(addresses, index):  # in each hospital; it waits for the others
    ...     return Federation(ShamirSums(addresses, index), holders=len(addresses))
    """

    def __init__(self, channel: Channel, *, holders: int, dropouts: int = 0, colluders: int = 1):
        self.size = require_count("holders", holders, least=2)
        self.dropouts = require_count("dropouts", dropouts, least=0)
        self.colluders = require_count("colluders", colluders)
        self.honest = holders - dropouts - colluders
        if self.honest < 1:
            raise ConfigurationError(
                "dropouts + colluders must be less than holders. Otherwise no share of the noise "
                "would be left to count."
            )
        self.rank = require_count("channel.index", channel.index, least=0)
        if self.rank >= holders:
            raise ConfigurationError("channel.index must be less than holders.")
        self._channel, self._over = channel, False
        self._channel.begin(self.size, self.dropouts)
        self.present = list(range(holders))
        numbers = [holders, dropouts, colluders]
        if any(each != numbers for each in self.tell_all(numbers)):
            raise ConfigurationError(
                "Federation: holders, dropouts or colluders differ between the holders, but they "
                "determine the noise that each must add. Pass the same numbers everywhere."
            )
        set_torch_states(self.agreed_states())

    @property
    def note(self) -> str:
        numbers = {"dropouts": self.dropouts, "colluders": self.colluders}
        return self._channel.note.format(holders=self.size, **numbers)

    @property
    def noise_factor(self) -> float:
        """Noise in the sums if nobody drops out, in units of the noise that the guarantee counts.

        It is a ratio of standard deviations.
        """
        return math.sqrt(self.size / self.honest)

    def tell_all(self, numbers: list[int]) -> list[list[int]]:
        received = self._talk([int(each) for each in numbers])
        for holder, each in received.items():
            counted = isinstance(each, list) and len(each) == len(numbers)
            if not counted or any(type(x) is not int or not 0 <= x < 2**63 for x in each):
                raise ClusterError(UNREADABLE.format(speaker=f"holder {holder}"))
        return [received[holder] for holder in self.present]

    def exchange(self, public: Any) -> list[Any]:
        """:raises ClusterError: a holder is missing."""
        received = self._talk(public)
        for holder in range(self.size):
            if holder not in received:
                raise ClusterError(
                    f"Holder {holder} is missing, and data can only be prepared together: start "
                    "all anew, without it."
                )
        return [received[holder] for holder in range(self.size)]

    def agreed_states(self) -> list[Tensor]:
        """States of torch's generators, from random numbers of all holders."""
        seeds = Seed(int.from_bytes(os.urandom(8), "little")).of_all(self.exchange, "holder")
        seed = hashlib.sha256(repr([each.bits for each in seeds]).encode()).digest()[:8]
        with forked_rng():
            torch.manual_seed(int.from_bytes(seed, "little") >> 1)
            return torch_states()

    def add(self, upload: Tensor) -> Tensor:
        """The sum of all present holders' uploads.

        :param upload: (n,) in int64, this holder's sums with its share of the noise.
        """
        with self._in_step():
            total, present = self._channel.add(upload.cpu().numpy())
        self._left(present)
        whole = isinstance(total, np.ndarray) and total.dtype == np.int64
        if not (whole and total.shape == upload.shape):
            raise ClusterError("The channel's total is not the sum of the uploads.")
        return torch.from_numpy(total)

    def leave(self) -> None:
        """Tell the channel that this holder is done. A lost connection no longer matters."""
        if not self._over:
            self._over = True
            with contextlib.suppress(ClusterError):
                self._channel.leave()

    def _talk(self, public: Any) -> dict[int, Any]:
        own = io.BytesIO()
        torch.save(public, own)
        with self._in_step():
            received = self._channel.talk(own.getvalue())
        self._left(list(received))
        return {holder: _read(holder, content) for holder, content in received.items()}

    def _left(self, present: list[int]) -> None:
        """Note which holders are left.

        :raises ClusterError: they are too few, or an absent holder came back.
        """
        if len(set(present)) < self.size - self.dropouts or not set(present) <= set(self.present):
            raise ClusterError(
                f"Only {len(set(present))} holders are left, fewer than holders - dropouts: their "
                "shares of the noise would be too little, and the total is not used. Start all "
                "anew, with journals and the last states."
            )
        self.present = sorted(set(present))

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """If this holder is interrupted inside the block, it cannot go on: it is out of step."""
        if self._over:
            raise ClusterError(
                "This holder left the federation, or was interrupted: make a new Federation at all "
                "holders."
            )
        try:
            yield
        except ClusterError:
            raise
        except BaseException:
            self._over = True
            raise

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError("A Federation belongs to its process: make one in each.")

    def __repr__(self) -> str:
        return (
            f"Federation(index={self.rank}, holders={self.size}, dropouts={self.dropouts}, "
            f"colluders={self.colluders})"
        )


def _read(holder: int, content: bytes) -> Any:
    """Read a holder's message as plain values and tensors. It cannot contain code."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ClusterError(UNREADABLE.format(speaker=f"holder {holder}")) from error


class Holders(Peers):
    """One inference in a federation, seen from one of its holders."""

    _speaker = "holder"
    own_ledgers = True
    _group: Federation

    def __init__(self, federation: Federation, accountant: PrivacyAccountant):
        super().__init__(federation, accountant)
        self.note, self.noise_factor = federation.note, federation.noise_factor

    def common(self, settings: Settings, ledger: Ledger) -> Ledger:
        """No holder alone can choose the generator of public draws.

        :returns: this holder's ledger.
        """
        self._require_equal(settings, self.exchange(settings))
        self._draws = self._group.agreed_states()
        set_torch_states(self._draws)
        return ledger

    def agreed_noise(self, noise_multiplier: float) -> float:
        """The largest multiplier of all holders, because the rests of their budgets may differ."""
        return max(each.sigma for each in self.exchange(CalibratedNoise(noise_multiplier)))

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """:raises PrivacyBudgetExceeded: this holder's budget does not cover the release."""
        self._accountant.require_room(event)
        # The computing time stays secret, because it depends on the number of sampled records.
        self._agree_on(clipped, event, step, public, 0.0)
        assert isinstance(clipped, FixedPointSum)  # require_fit demands secure mode
        clipped.in_shares(self._group.honest, self._group.add)

    def warnings(self) -> list[Warning]:
        left, holders = len(self._group.present), self._group.size
        if left == holders:
            return []
        text = (
            f"Only {left} of the {holders} holders stayed to the end. The others' records count as "
            "absent since they left, so the posterior moves away from them."
        )
        return [ClusterWarning(text)]

    def _say_failed(self, ranks: list[int], error: BaseException | None) -> None:
        if error is None:
            holders = " and ".join(str(self._group.present[rank]) for rank in ranks)
            raise ClusterError(
                f"Holder {holders} failed, so all holders abandoned what they were doing. Its own "
                "error says why."
            )
