"""A federation through Flower (the extra ``flower``): a holder's line, and the aggregator's app.

Flower only carries bytes. A relay (:mod:`pyro_dp.mechanism.flower_relay`) passes them to the
holder's process. Flower's SecAgg+ is not used: it rounds stochastically, works modulo 2^32 at most,
and draws its masks from seeds of 32 bits.
"""

import os
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyro_dp.mechanism.flower_relay import (
    ANSWER,
    BEGIN,
    FAILED,
    INDEX_BYTES,
    LAST,
    LONGEST,
    NAME,
    content,
    left,
    receive,
    send,
)
from pyro_dp.mechanism.trusted_aggregator import TrustedAggregator
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.validation import require_count, require_number

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

_LONGEST_TIMEOUT = 1e6  # seconds
_LONGEST_PATH = 107  # bytes of a socket's address, on Linux
_POLL = 0.2  # seconds between two requests for replies


class FlowerLine:
    """A holder's line to the aggregator of its federation, through Flower.

    Make it in the process that has the data. Give the holder's SuperNode the same address, where
    :mod:`pyro_dp.mechanism.flower_relay` runs. Flower's processes see the messages passed to
    :meth:`ask`, and no other data of the holder.

    **Access.** Anyone who may enter the socket's folder can use the line. If the folder is missing,
    it is created for its owner alone. A folder that everyone may enter is refused. A SuperNode runs
    code that comes with a run of the federation. Let it run as another user who cannot read the
    data, in a group that may enter this folder.

    **Not protected.** Nothing is encrypted here. Anyone who runs the SuperNode or the SuperLink
    sees messages, and can send any answer.

    :param address: the path of the socket, at most 107 bytes.
    :param index: this holder's, from 0 to K - 1.
    :param timeout: the time in seconds, > 0 and < 1e6, that :meth:`ask` waits. It must exceed the
        time that the aggregator waits for the slowest holder, and the time until the run begins.
    :raises ConfigurationError: a setting is out of range, everyone may enter the folder, or another
        process listens there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FlowerLine(f"{folder}/line", index=0) as line:
    ...     channel = AtTrustedAggregator(line)  # then: Federation(channel, holders=...)
    ...     print(line)
    FlowerLine(index=0, timeout=1800)
    """

    def __init__(self, address: str | os.PathLike[str], index: int, timeout: float = 1800.0):
        self.index = require_count("index", index, least=0)
        self.timeout = require_number("timeout", timeout, above=0.0, below=_LONGEST_TIMEOUT)
        self._address = Path(address).absolute()
        self._relay: socket.socket | None = None  # the connection that waits for the next message
        self._begun = self._over = False
        _require_private_folder(self._address)
        self._listener = _listen(self._address)

    def ask(self, message: bytes) -> bytes:
        """Send a message of less than 2 GiB, and wait for the aggregator's answer.

        :raises ClusterError: the line is lost or closed, nothing came within ``timeout``, the
            aggregator failed, or it has already sent its last answer.
        """
        if self._over:
            raise ClusterError(f"Holder {self.index}'s line is over: make a new one.")
        if len(message) >= LONGEST - 8:
            raise ConfigurationError(f"message has {len(message)} bytes: Flower carries 2 GiB.")
        try:
            return self._ask(message, time.monotonic() + self.timeout)
        except TimeoutError as error:
            raise self._lost(f"nothing came within timeout={self.timeout:g} seconds") from error
        except OSError as error:
            raise self._lost(f"its relay is gone ({type(error).__name__})") from error
        except BaseException:  # this holder is out of step with the aggregator
            self.close()
            raise

    def close(self) -> None:
        """Leave the federation. The aggregator goes on without this holder."""
        if not self._over:
            self._over = True
            self._hang_up()
            self._listener.close()
            self._address.unlink(missing_ok=True)

    def _ask(self, message: bytes, deadline: float) -> bytes:
        if self._begun:
            self._deliver(message, deadline)
        while True:
            try:
                kind, answer = self._next_relay(deadline)
                if kind == BEGIN and not self._begun:
                    self._deliver(message, deadline)
                    continue
            except ConnectionError:
                if self._begun:
                    raise
                continue  # the relay's run ended before it began; the next run's relay asks again
            if kind == BEGIN:
                raise self._lost("another run began while this fit was in the middle of one")
            if kind == FAILED:
                raise self._lost(answer.decode(errors="replace"))
            self._begun = True
            if kind == LAST:
                self.close()
            return answer

    def _next_relay(self, deadline: float) -> tuple[bytes, bytes]:
        self._hang_up()
        self._listener.settimeout(left(deadline))
        self._relay, _ = self._listener.accept()
        found = receive(self._relay, deadline)
        if found[:1] not in (BEGIN, ANSWER, LAST, FAILED):
            raise ConnectionError("the line carried no valid message")
        return found[:1], found[1:]

    def _deliver(self, message: bytes, deadline: float) -> None:
        assert self._relay is not None
        send(self._relay, self.index.to_bytes(INDEX_BYTES, "big") + message, deadline)

    def _hang_up(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _lost(self, why: str) -> ClusterError:
        self.close()
        return ClusterError(
            f"Holder {self.index} lost the aggregator: {why}. At most the uploads in this holder's "
            "ledger have left it. The logs of its SuperNode and of Flower's run say more."
        )

    def __enter__(self) -> "FlowerLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FlowerLine(index={self.index}, timeout={self.timeout:g})"


def _require_private_folder(address: Path) -> None:
    folder = address.parent
    if len(os.fsencode(address)) > _LONGEST_PATH:
        raise ConfigurationError(f"address must have at most {_LONGEST_PATH} bytes in all.")
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
    if not folder.is_dir() or folder.stat().st_mode & stat.S_IRWXO:
        raise ConfigurationError(
            "address must lie in a folder that only its owner, or a group, may enter: make one, "
            "or chmod o-rwx."
        )


def _listen(address: Path) -> socket.socket:
    if address.is_socket():  # left by a killed process, unless something answers
        with socket.socket(socket.AF_UNIX) as there:
            if there.connect_ex(os.fspath(address)) == 0:
                raise ConfigurationError("address: another process listens there.")
        address.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(address))
        address.chmod(0o660)  # the folder's permissions decide on access
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"address: no socket can be made there ({error}).") from error
    return listener


def server_app(aggregator: TrustedAggregator) -> "ServerApp":
    """A Flower ServerApp that runs an aggregator, round by round.

    In a round each holder sends one message and gets one answer. If a holder's process is gone, or
    its message does not come within ``aggregator.timeout``, it is left out from then on. Flower
    itself takes seconds of that time.

    :raises ClusterError: (within the run) too few SuperNodes connected within the time of a round,
        two holders have the same index, or no holder is left.

    >>> app = server_app(TrustedAggregator(holders=3))  # name it in pyproject.toml, for Flower
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: "Grid", context: "Context") -> None:
        lead(Nodes(grid, aggregator.timeout), aggregator)

    app.main()(main)
    return app


class Nodes:
    """Sends messages to the SuperNodes of a run, which have Flower's numbers."""

    def __init__(self, grid: "Grid", timeout: float):
        self._grid = grid
        self._timeout = timeout
        self._rounds = 0

    def meet(self, count: int) -> Iterable[int]:
        deadline = time.monotonic() + self._timeout
        while len(nodes := list(self._grid.get_node_ids())) < count:
            if time.monotonic() > deadline:
                raise ClusterError(f"There are {len(nodes)} SuperNodes, for {count} holders.")
            time.sleep(_POLL)
        return nodes

    def ask(self, kind: bytes, answers: Mapping[int, bytes]) -> dict[int, tuple[int, bytes]]:
        """Send each node an answer. Returns the next message of each, with the holder's index.

        Nodes that send no message in time are missing from the result.
        """
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
            time.sleep(_POLL)
            for reply in self._grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                if reply.has_content():  # otherwise its relay failed; the SuperNode's log says why
                    record: Any = reply.content.config_records[NAME]
                    found[reply.metadata.src_node_id] = (record["index"], record["message"])
        return found


def lead(nodes: Nodes, aggregator: TrustedAggregator) -> None:
    """Run an aggregator over these nodes until it is done.

    :raises ClusterError: see :func:`server_app`.
    """
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
    except Exception as error:  # the holders must not wait until their timeout
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
