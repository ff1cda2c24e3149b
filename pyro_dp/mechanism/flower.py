"""The aggregator of a federation within Flower's ServerApp (the extra ``flower``).

Flower carries bytes, and holders are reached by relays (:mod:`pyro_dp.mechanism.flower_relay`).
Flower's own SecAgg+ is not used: it rounds stochastically, works modulo 2^32 at most, and draws its
masks from seeds of 32 bits.
"""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pyro_dp.mechanism.flower_relay import ANSWER, BEGIN, FAILED, LAST, NAME, content
from pyro_dp.utils.errors import ClusterError

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

_LOOK = 0.2  # seconds between looks for replies


class Aggregator(Protocol):
    """Adds up what holders send; it knows nothing of how messages travel.

    :ivar holders: K; their indices are 0 to K - 1.
    :ivar timeout: in seconds: so long does a round wait for messages.
    """

    holders: int
    timeout: float

    @property
    def done(self) -> bool:
        """Whether the last answers have been given."""

    def answer(self, messages: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """One round: the messages of the holders that are there, and the answer to each."""


def server_app(aggregator: Aggregator) -> "ServerApp":
    """Flower's ServerApp with an aggregator in it: it goes round by round until that is done.

    In a round each holder sends one message and gets one answer. A holder whose process is gone,
    or whose message does not come within ``aggregator.timeout`` (which includes what Flower takes,
    seconds), is left out from then on.

    :raises ClusterError: (within the run) too few SuperNodes came within the time of a round, two
        holders have one index, or no holder is left.

    >>> from pyro_dp.federated import TrustedAggregator, server_app
    >>> app = server_app(TrustedAggregator(holders=3))  # named in pyproject.toml, as Flower asks
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: "Grid", context: "Context") -> None:
        lead(Nodes(grid, aggregator.timeout), aggregator)

    app.main()(main)
    return app


class Nodes:
    """The SuperNodes of a run, asked all at once; by Flower's numbers of them."""

    def __init__(self, grid: "Grid", timeout: float):
        self._grid = grid
        self._timeout = timeout
        self._rounds = 0

    def meet(self, count: int) -> Iterable[int]:
        """All that are there, as soon as there are enough."""
        deadline = time.monotonic() + self._timeout
        while len(nodes := list(self._grid.get_node_ids())) < count:
            if time.monotonic() > deadline:
                raise ClusterError(f"There are {len(nodes)} SuperNodes, for {count} holders.")
            time.sleep(_LOOK)
        return nodes

    def ask(self, kind: bytes, answers: Mapping[int, bytes]) -> dict[int, tuple[int, bytes]]:
        """The holder's index, and its message, of each node that sent one in time."""
        from flwr.app import Message, MessageType

        deadline = time.monotonic() + self._timeout
        letters = [
            Message(
                content(kind=kind, answer=answer, timeout=self._timeout),
                node,
                MessageType.TRAIN,
                ttl=self._timeout,
                group_id=str(self._rounds),
            )
            for node, answer in answers.items()
        ]
        self._rounds += 1
        found, waiting = {}, set(self._grid.push_messages(letters))
        while waiting and time.monotonic() < deadline:
            time.sleep(_LOOK)
            for reply in self._grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                if reply.has_content():  # else its relay failed, and its SuperNode's log says why
                    said: Any = reply.content.config_records[NAME]
                    found[reply.metadata.src_node_id] = (said["index"], said["message"])
        return found


def lead(nodes: Nodes, aggregator: Aggregator) -> None:
    """Rounds until the aggregator is done."""
    there = nodes.meet(aggregator.holders)
    found = nodes.ask(BEGIN, dict.fromkeys(there, b""))
    index_of = {node: index for node, (index, _) in found.items()}
    try:
        node_of = _by_index(index_of, aggregator.holders)
        while found:
            messages = {index_of[node]: message for node, (_, message) in found.items()}
            answers = aggregator.answer(messages)
            last = aggregator.done
            found = nodes.ask(
                LAST if last else ANSWER, {node_of[index]: answers[index] for index in messages}
            )
            if last:
                return
        raise ClusterError("No holder is left.")
    except Exception as error:  # they need not wait for it
        nodes.ask(FAILED, dict.fromkeys(found, f"the aggregator failed ({error})".encode()))
        raise


def _by_index(index_of: Mapping[int, int], holders: int) -> dict[int, int]:
    node_of = {index: node for node, index in index_of.items()}
    if len(node_of) < len(index_of) or not node_of.keys() <= set(range(holders)):
        raise ClusterError(
            f"Each holder needs an index of its own, from 0 to {holders - 1}: there are "
            f"{sorted(index_of.values())}."
        )
    return node_of
