"""A relay between Flower's messages and a holder's process, which has the data.

In Flower the server asks, and a new process answers each message. But a holder's fit is a single
process that keeps its data. So the fit listens at a local socket, as a
:class:`~pyro_dp.mechanism.flower.FlowerLine`. The relay, which Flower starts, brings it the
aggregator's answer and takes its next message. Only bytes go over the socket, with their length
first. No object is unpickled at either end.

This module imports no other module of the package and can be loaded alone. Importing torch would
take seconds in each round.
"""

import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp

NAME = "line"  # the key in a Flower message
# A relay asks for the first message, or brings an answer, the last answer, or a failure's cause.
BEGIN, ANSWER, LAST, FAILED = b"B", b"A", b"L", b"F"
LONGEST = 2**31 - 2**16  # bytes: Flower carries objects below 2 GiB
INDEX_BYTES = 8  # before a holder's message


def client_app() -> "ClientApp":
    """A holder's Flower ClientApp, which is only a relay to the holder's process.

    Configure the SuperNode with that process's address: ``--node-config 'line="/run/fit/line"'``.
    If the process is gone, or sends nothing in time, Flower gets an error instead of a reply.

    >>> app = client_app()  # name it in pyproject.toml, for Flower
    """
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def relay(message: "Message", context: "Context") -> "Message":
        address = context.node_config.get("line")
        if not isinstance(address, str):
            raise ValueError("This SuperNode has no line: start it with --node-config 'line=...'")
        record: Any = message.content.config_records[NAME]
        index, reply = carry(address, record["kind"], record["answer"], record["timeout"])
        return Message(content(index=index, message=reply), reply_to=message)

    app.train()(relay)
    return app


def content(**values: bytes | float) -> "RecordDict":
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({NAME: ConfigRecord(dict(values))})


def carry(address: str, kind: bytes, answer: bytes, timeout: float) -> tuple[int, bytes]:
    """Bring an answer to a holder, and take its next message.

    :param kind: with BEGIN, wait until the holder's process listens. After LAST and FAILED there is
        no next message, and an empty one is returned.
    :param timeout: in seconds, for the whole exchange.
    :returns: the holder's index and message.
    :raises OSError: its process is gone, or sent nothing in time.
    """
    deadline = time.monotonic() + timeout
    with _call(address, deadline, patient=kind == BEGIN) as line:
        send(line, kind + answer, deadline)
        if kind in (LAST, FAILED):
            return 0, b""
        found = receive(line, deadline)
    return int.from_bytes(found[:INDEX_BYTES], "big"), found[INDEX_BYTES:]


def send(line: socket.socket, said: bytes, deadline: float) -> None:
    """:raises OSError: the other end is gone, or did not take it in time."""
    line.settimeout(left(deadline))
    line.sendall(len(said).to_bytes(8, "big"))
    line.settimeout(left(deadline))
    line.sendall(said)


def receive(line: socket.socket, deadline: float) -> bytes:
    """:raises OSError: the other end is gone, or sent nothing, or no message, in time."""
    size = int.from_bytes(_exactly(line, 8, deadline), "big")
    if size > LONGEST:
        raise ConnectionError("the line carried no valid message")
    return bytes(_exactly(line, size, deadline))


def left(deadline: float) -> float:
    """:returns: seconds, above 0.
    :raises TimeoutError: there are none.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("nothing came in time")
    return seconds


def _call(address: str, deadline: float, patient: bool) -> socket.socket:
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(left(deadline))
            line.connect(address)
            return line
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            if not patient:
                raise
        except BaseException:
            line.close()
            raise
        time.sleep(min(0.2, left(deadline)))


def _exactly(line: socket.socket, size: int, deadline: float) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        line.settimeout(left(deadline))
        count = line.recv_into(rest)
        if not count:
            raise ConnectionError("the other end of the line was closed")
        rest = rest[count:]
    return found
