"""A federation: owners who fit one model together, and show each other only what is released."""

import contextlib
import io
import math
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from pyro_dp.mechanism.trusted_aggregator import NUMBERS, Message
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.rng import set_torch_states, torch_states
from pyro_dp.utils.validation import require_count

_WHY = {
    "too few": (
        "Only {left} holders are left, fewer than holders - dropouts: their shares of the noise "
        "would be too little, and nothing is opened any more. What the ledger counts may have been "
        "released. Start all anew, with journals and the last states, or with fewer holders."
    ),
    "left out": (
        "This holder stayed away for longer than the aggregator waits, and was left out. What the "
        "others find does not count its records any more."
    ),
    "mixed": (
        "The holders are not at the same place of the run, or one of them failed: all must make "
        "the same calls, in the same order, on the same inference. Nothing was opened."
    ),
    "other numbers": "holders or dropouts differ from what the aggregator was told.",
}
_DAMAGED = "What the aggregator answered cannot be read, or does not belong to what was asked."
_OTHER_NUMBERS = (
    "Federation: holders, dropouts or colluders differ between the holders, and with them the "
    "noise that each must add. Pass the same numbers everywhere."
)
_OVER = "This holder left the federation: make a new one, at all holders."
_ABSENT = (
    "Holder {holder} is missing, and the data can only be looked at together: start all anew, "
    "without it."
)


class Line(Protocol):
    """One holder's line to the aggregator.

    :ivar index: of the holder, from 0 to K - 1.
    """

    index: int

    def ask(self, message: bytes) -> bytes:
        """Send a message, and wait for the answer.

        :raises ClusterError: the line is lost.
        """


class Federation:
    """K holders of data who fit one posterior together, seen from one of them.

    ``DPSEP(model, guide, accountant=accountant, secure=True, cluster=federation)``, likewise
    :class:`VIPS` and :class:`DPSVI`: each holder runs the same script on a machine of its own and
    passes its own records to ``run``. All find the same posterior, of the records of them all.
    Records and exact sums never leave their owner.

    In a step each holder draws records from its own and adds up what they contribute, in integers.
    Its own accountant, and journal, counts the release, and refuses it beyond its own budget,
    whatever others ask for. Then it adds its share of the noise, discrete Gaussian of variance
    sigma^2 / (K - t - c), and only that goes to the aggregator, which adds up and tells all the
    total. With t drop-outs the shares of those that are left, and that do not collude, still make
    sigma^2; with none there is more noise than sigma^2, which posteriors count in.

    Make it before model and guide: torch's global generator becomes that of the first holder.

    **Guarantee.** For one record of one holder, as each holder's own accountant states it, towards
    whoever sees all that is released: also towards at most c of the other holders who work together
    and subtract their own shares of the noise. Shares are drawn as in
    :mod:`pyro_dp.mechanism.fixed_point`: each is continuous Gaussian noise of variance at least
    sigma^2 / (K - t - c) and further processing, up to the factor stated there, once for each
    share. The sum of continuous shares is Gaussian noise of variance at least sigma^2, and the
    ledger's event states an upper bound as ever. (Kairouz, Liu & Steinke 2021, arXiv 2102.06387,
    compare the sum of n discrete Gaussians of scale s with one: their densities differ by a factor
    of at most exp(10 n exp(-pi^2 s^2)), and s is at least 2^13 units of the grid.)

    **Towards the aggregator** it is weaker: it sees each holder's sum under a share of the noise
    alone, as :class:`TrustedAggregator` says. No protocol hides the shares from it; :class:`Line`
    is where one would go.

    **Not protected.** Each holder's number of records, column types, the time at which it answers,
    and whether its part of a step failed; all that :class:`DPSEP` and its like do not protect.

    **What goes wrong.** Who stays away for longer than the aggregator waits is left out for good;
    its records count as absent from then on. With more than t of them nothing is opened, and all
    get a :class:`ClusterError`. A release counts in a holder's ledger before it leaves that holder.

    :param line: to the aggregator.
    :param holders: K, at least 2.
    :param dropouts: t: so many holders may stay away.
    :param colluders: c: so many holders may work together against another one.
    :raises ConfigurationError: numbers are out of range, or differ between holders.
    :raises ClusterError: the aggregator or other holders did not come.
    """

    def __init__(self, line: Line, *, holders: int, dropouts: int = 0, colluders: int = 0):
        self.size = require_count("holders", holders, least=2)
        self.dropouts = require_count("dropouts", dropouts, least=0)
        self.colluders = require_count("colluders", colluders, least=0)
        self.honest = holders - dropouts - colluders
        if self.honest < 1:
            raise ConfigurationError(
                "dropouts + colluders must be less than holders: nobody would be left whose noise "
                "counts."
            )
        self.rank = require_count("line.index", line.index, least=0)
        if self.rank >= holders:
            raise ConfigurationError("line.index must be less than holders.")
        self._line = line
        self.present = list(range(holders))
        self._over = False
        numbers = [holders, dropouts, colluders]
        if any(each != numbers for each in self.tell_all(numbers)):
            raise ConfigurationError(_OTHER_NUMBERS)
        set_torch_states(self.exchange(torch_states() if self.rank == 0 else None)[0])

    @property
    def noise_factor(self) -> float:
        """The noise in the sums where nobody drops out, over that which the guarantee counts."""
        return math.sqrt(self.size / self.honest)

    def tell_all(self, numbers: list[int]) -> list[list[int]]:
        """A few numbers of each holder that is present, to all."""
        plain = [int(each) for each in numbers]
        return [_read(each) for each in self._talk(plain).values()]

    def exchange(self, public: Any) -> list[Any]:
        """Something public of each holder, to all; by rank.

        :raises ClusterError: one is missing.
        """
        said = self._talk(public)
        for holder in range(self.size):
            if holder not in said:
                raise ClusterError(_ABSENT.format(holder=holder))
        return [_read(said[holder]) for holder in range(self.size)]

    def add(self, upload: Tensor) -> Tensor:
        """The sum of what all present holders upload.

        :param upload: sums with this holder's share of the noise, in int64, of any size.
        """
        facts = {"holders": self.size, "dropouts": self.dropouts}
        content = upload.cpu().numpy().astype(NUMBERS).tobytes()
        answer = self._answer(Message("add", facts, content))
        total = answer.numbers()
        if total.size != upload.numel():
            raise ClusterError(_DAMAGED)
        return torch.from_numpy(total.astype(np.int64))

    def leave(self) -> None:
        """Say that this holder is done; a lost line is none of its business any more."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(ClusterError):
            self._line.ask(Message("leave", {}).packed())

    def _talk(self, public: Any) -> dict[int, bytes]:
        own = io.BytesIO()
        torch.save(public, own)
        answer = self._answer(Message("talk", {}, own.getvalue()))
        sizes, start, found = answer.facts.get("sizes", []), 0, {}
        if len(sizes) != len(self.present):
            raise ClusterError(_DAMAGED)
        for holder, size in zip(self.present, sizes, strict=True):
            found[holder] = answer.content[start : start + size]
            start += size
        return found

    def _answer(self, message: Message) -> Message:
        if self._over:
            raise ClusterError(_OVER)
        try:
            answer = Message.read(self._line.ask(message.packed()))
        except ValueError as error:
            raise ClusterError(_DAMAGED) from error
        if answer.kind == "failed":
            reason = answer.facts.get("reason", "")
            self._over = reason in ("too few", "left out")
            text = _WHY.get(reason, _DAMAGED)
            raise ClusterError(text.format(left=answer.facts.get("left")))
        present = answer.facts.get("present", [])
        if answer.kind != message.kind or not set(present) <= set(self.present):
            raise ClusterError(_DAMAGED)
        if len(present) < self.size - self.dropouts:
            raise ClusterError(_WHY["too few"].format(left=len(present)))
        self.present = present
        return answer

    def __reduce__(self) -> NoReturn:
        raise ConfigurationError("A Federation belongs to its process: make one in each.")

    def __repr__(self) -> str:
        return (
            f"Federation(index={self.rank}, holders={self.size}, dropouts={self.dropouts}, "
            f"colluders={self.colluders})"
        )


def _read(content: bytes) -> Any:
    """What a holder sent: plain values and tensors, and no code."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ClusterError(_DAMAGED) from error
