"""A trusted aggregator, a holder's channel through it, and the messages between them.

Messages go in rounds: each holder sends one, and waits for one answer. A message is a line of JSON
with its kind, followed by bytes:

* ``talk``: a public value. The answer has the values of all holders.
* ``add``: 64-bit integers, a holder's sum with its share of the noise. The answer is the total
  modulo 2^64. The aggregator stores nothing.
* ``leave``: a holder's last message.

The aggregator does not interpret public values. Holders read them as plain values and tensors
(``torch.load(weights_only=True)``), never as code.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyro_dp.mechanism.federation import Numbers
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

_LONGEST = 1e6  # seconds
NUMBERS = np.dtype("<i8")
_WHY = {
    "too few": (
        "Only {left} holders are left, fewer than holders - dropouts. Their shares of the noise "
        "would be too little, so no total is computed any more. Releases in the ledger may have "
        "happened. Start all anew, with journals and the last states, or with fewer holders."
    ),
    "left out": (
        "This holder stayed away for longer than the aggregator waits, and was left out. The "
        "others' results no longer count its records."
    ),
    "mixed": (
        "The holders are not at the same point of the run, or one of them failed. All must make "
        "the same calls, in the same order, on the same inference. Nothing was opened."
    ),
    "other numbers": "holders or dropouts differ from those at the aggregator.",
}
_DAMAGED = "The aggregator's answer cannot be read, or does not match the question."


@dataclass(frozen=True)
class Message:
    """A message or an answer.

    :param kind: "talk", "add" or "leave". An answer may also be "failed", with the reason in
        ``facts``.
    :param facts: the other fields of the line, numbers and texts.
    :param content: the bytes after the line.
    """

    kind: str
    facts: Mapping[str, Any]
    content: bytes = b""

    def packed(self) -> bytes:
        return json.dumps({"kind": self.kind, **self.facts}).encode() + b"\n" + self.content

    @staticmethod
    def read(data: bytes) -> "Message":
        """:raises ValueError: these bytes are not a message."""
        line, mark, content = data.partition(b"\n")
        facts = json.loads(line)
        if not (mark and isinstance(facts, dict) and isinstance(facts.get("kind"), str)):
            raise ValueError
        return Message(facts.pop("kind"), facts, content)

    def numbers(self) -> NDArray[np.int64]:
        """:raises ValueError: the content does not consist of 64-bit integers."""
        return np.frombuffer(self.content, NUMBERS).astype(np.int64)


class TrustedAggregator:
    """Adds up the uploads of K holders of data, and returns only the total.

    **It is trusted.** It sees each holder's sum with only that holder's share of the noise, which
    is less noise than the guarantee has. So it must be run by a third party that every holder
    trusts with such numbers. The connections to it must be encrypted. It sees no record and needs
    no ledger. It cannot get more from a holder than that holder's accountant allows, nor choose
    what holders compute. Nobody checks whether its totals are right.

    If a holder stays away once, it is left out for good. If fewer than ``holders - dropouts`` are
    left, no total is computed any more: their shares of the noise would be too little.

    :param holders: K, at least 2.
    :param dropouts: t, the number that may stay away. The holders must use the same numbers.
    :param timeout: the time in seconds that a round waits for messages.
    :raises ConfigurationError: an argument is out of range.

    >>> aggregator = TrustedAggregator(holders=2)
    >>> talk = b'{"kind": "talk"}\\n'  # as AtTrustedAggregator sends it
    >>> answers = aggregator.answer({0: talk + b"one", 1: talk + b"two"})
    >>> answers[0] == answers[1], aggregator.done
    (True, False)
    """

    def __init__(self, holders: int, dropouts: int = 0, timeout: float = 600.0):
        self.holders = require_count("holders", holders, least=2)
        self.dropouts = require_count("dropouts", dropouts, least=0)
        self.timeout = require_number("timeout", timeout, above=0.0, below=_LONGEST)
        if dropouts > holders - 2:
            raise ConfigurationError("dropouts: at least two holders must be left to add up.")
        self._left = set(range(holders))
        self._closed = False

    @property
    def done(self) -> bool:
        """Whether the last answers have been sent."""
        return self._closed or not self._left

    def answer(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Answer the messages of one round.

        :param messages: the present holders' messages, by their index from 0 to K - 1.
        :returns: the answer to each.
        """
        there = {index: _read(each) for index, each in messages.items() if index in self._left}
        self._left &= there.keys()
        leaving = [index for index, each in there.items() if each.kind == "leave"]
        self._left -= set(leaving)
        stay = {index: there[index] for index in sorted(self._left)}
        if stay and len(stay) < self.holders - self.dropouts:
            self._closed = True
        answer = self._failed("too few") if self._closed else self._answer(stay)
        said = dict.fromkeys(messages, self._failed("left out")) | dict.fromkeys(stay, answer)
        said |= dict.fromkeys(leaving, Message("leave", {}))
        return {index: each.packed() for index, each in said.items()}

    def _answer(self, stay: Mapping[int, Message]) -> Message:
        """The answer to the holders that stay, if they are enough."""
        present = {"present": list(stay)}
        if all(each.kind == "talk" for each in stay.values()):
            sizes = [len(each.content) for each in stay.values()]
            content = b"".join(each.content for each in stay.values())
            return Message("talk", present | {"sizes": sizes}, content)
        if not all(each.kind == "add" for each in stay.values()):
            return self._failed("mixed")
        own = {"holders": self.holders, "dropouts": self.dropouts}
        if any(each.facts != own for each in stay.values()):
            return self._failed("other numbers")
        if len({len(each.content) for each in stay.values()}) > 1:
            return self._failed("mixed")
        total = np.zeros(len(next(iter(stay.values())).content) // NUMBERS.itemsize, np.int64)
        for each in stay.values():
            total += each.numbers()  # modulo 2^64, as the holders' sums are
        return Message("add", present, total.astype(NUMBERS).tobytes())

    def _failed(self, reason: str) -> Message:
        return Message("failed", {"reason": reason, "left": len(self._left)})


def _read(data: bytes) -> Message:
    try:
        message = Message.read(data)
        if message.kind == "add":
            message.numbers()
    except (ValueError, RecursionError):
        return Message("damaged", {})
    return message


class Line(Protocol):
    """A holder's connection to the aggregator, such as a :class:`FlowerLine`."""

    index: int

    def ask(self, message: bytes) -> bytes: ...


class AtTrustedAggregator:
    """A channel of a :class:`~pyro_dp.federated.Federation` through a :class:`TrustedAggregator`.

    The aggregator sees this holder's uploads, which have only one share of the noise. Against the
    aggregator, a release has the noise multiplier sigma / sqrt(K - t - c).

    :param line: the connection to the aggregator. It must be encrypted outside of the machine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FlowerLine(f"{folder}/line", index=1) as line:
    ...     channel = AtTrustedAggregator(line)  # then: Federation(channel, holders=3)
    ...     print(channel.index)
    1
    """

    note = (
        "A trusted aggregator added up the sums of {holders} holders, each with a share of the "
        "noise. The noise allows for at most {dropouts} absent and {colluders} colluding holders. "
        "The guarantee holds towards everyone except the aggregator, which sees single shares."
    )

    def __init__(self, line: Line):
        self.index = line.index
        self._line = line
        self._facts: dict[str, int] = {}
        self._closed = False

    def begin(self, holders: int, dropouts: int) -> None:
        self._facts = {"holders": holders, "dropouts": dropouts}

    def talk(self, public: bytes) -> dict[int, bytes]:
        answer, present = self._answer(Message("talk", {}, public))
        sizes = _counts(answer, "sizes")
        if len(sizes) != len(present):
            raise ClusterError(_DAMAGED)
        found, start = {}, 0
        for holder, size in zip(present, sizes, strict=True):
            found[holder] = answer.content[start : start + size]
            start += size
        return found

    def add(self, upload: Numbers) -> tuple[Numbers, list[int]]:
        message = Message("add", self._facts, upload.astype(NUMBERS).tobytes())
        answer, present = self._answer(message)
        if len(answer.content) != len(message.content):
            raise ClusterError(_DAMAGED)
        return answer.numbers(), present

    def leave(self) -> None:
        if not self._closed:
            self._line.ask(Message("leave", {}).packed())

    def _answer(self, message: Message) -> tuple[Message, list[int]]:
        try:
            answer = Message.read(self._line.ask(message.packed()))
        except (ValueError, RecursionError) as error:
            raise ClusterError(_DAMAGED) from error
        if answer.kind == "failed":
            reason = answer.facts.get("reason")
            self._closed = reason in ("too few", "left out")
            text = _WHY[reason] if isinstance(reason, str) and reason in _WHY else _DAMAGED
            raise ClusterError(text.format(left=answer.facts.get("left")))
        if answer.kind != message.kind:
            raise ClusterError(_DAMAGED)
        return answer, _counts(answer, "present")


def _counts(answer: Message, name: str) -> list[int]:
    numbers = answer.facts.get(name)
    if not isinstance(numbers, list) or any(type(each) is not int or each < 0 for each in numbers):
        raise ClusterError(_DAMAGED)
    return numbers
