"""A holder's side of a trusted aggregator: what it asks, and what it makes of the answers."""

from pyro_dp.mechanism.federation import Numbers
from pyro_dp.mechanism.flower_line import FlowerLine
from pyro_dp.mechanism.trusted_aggregator import NUMBERS, Message
from pyro_dp.utils.errors import ClusterError

_NOTE = (
    "A trusted aggregator added up the sums of {holders} holders, each with a share of the "
    "noise. The noise allows for at most {dropouts} absent and {colluders} colluding holders. "
    "The guarantee holds towards everyone except the aggregator, which sees single shares."
)
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
        "The holders are not at the same point of the run, or one of them failed. All must make "
        "the same calls, in the same order, on the same inference. Nothing was opened."
    ),
    "other numbers": "holders or dropouts differ from what the aggregator was told.",
}
_DAMAGED = "What the aggregator answered cannot be read, or does not belong to what was asked."


class AtTrustedAggregator:
    """A channel of a :class:`~pyro_dp.federated.Federation` through a :class:`TrustedAggregator`.

    The aggregator sees this holder's uploads, sums under a share of the noise alone: a release
    counts towards it as one of noise multiplier sigma / sqrt(K - t - c).

    :param line: to the aggregator; it must be encrypted where it leaves the machine.

    >>> import tempfile
    >>> from pyro_dp.federated import AtTrustedAggregator, FlowerLine
    >>> with tempfile.TemporaryDirectory() as folder, FlowerLine(f"{folder}/line", index=1) as line:
    ...     channel = AtTrustedAggregator(line)  # then: Federation(channel, holders=3)
    ...     print(channel.index)
    1
    """

    note = _NOTE

    def __init__(self, line: FlowerLine):
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
