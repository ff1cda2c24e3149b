"""Three hospitals, each a process of this machine, and the server between them (notebook 8).

Real hospitals have machines of their own and a network; docs/owners.md says what goes where. Here
each is a fork of the notebook's kernel and talks to it through a pipe: Linux and macOS.
"""

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pyro_dp import PrivacyError
from pyro_dp.federated import TrustedAggregator

_fork = multiprocessing.get_context("fork")


class PipeLine:
    """A hospital's line to the server: what it says, and the answer."""

    def __init__(self, index: int, pipe: Connection):
        self.index, self._pipe = index, pipe

    def ask(self, message: bytes) -> bytes:
        self._pipe.send_bytes(message)
        return self._pipe.recv_bytes()


def together(
    body: Callable[[int, PipeLine], Any], *, holders: int = 3, dropouts: int = 0
) -> tuple[list[Any], list[dict[int, bytes]]]:
    """Run ``body(index, line)`` in a process for each hospital, and the server here.

    :returns: what each hospital returned: None of one that was lost, and of one that refused what
        it said; and what the server saw: the messages of each round.
    """
    lines, results, processes = {}, {}, []
    for index in range(holders):
        ours, theirs = _fork.Pipe()
        told, tell = _fork.Pipe(duplex=False)
        closed = [ours, told, *lines.values(), *results.values()]
        process = _fork.Process(target=_be, args=(body, index, theirs, tell, closed))
        process.start()
        theirs.close()
        tell.close()
        lines[index], results[index] = ours, told
        processes.append(process)
    seen = _serve(TrustedAggregator(holders, dropouts), lines)
    said = [_received(results[index]) for index in range(holders)]
    found = [None if each is None else pickle.loads(each) for each in said]
    for process in processes:
        process.join()
    return found, seen


def _be(
    body: Callable[[int, PipeLine], Any],
    index: int,
    line: Connection,
    tell: Connection,
    closed: list[Connection],
) -> None:
    for each in closed:
        each.close()  # of others: a pipe ends when all who have it are gone
    try:
        found = body(index, PipeLine(index, line))
    except PrivacyError as error:
        found = f"{type(error).__name__}: {error}"
    tell.send_bytes(pickle.dumps(found))


def _serve(server: TrustedAggregator, lines: dict[int, Connection]) -> list[dict[int, bytes]]:
    seen = []
    while not server.done and lines:
        messages = {i: said for i in list(lines) if (said := _received(lines[i])) is not None}
        for lost in lines.keys() - messages.keys():
            lines.pop(lost).close()
        seen.append(messages)
        for index, answer in server.answer(messages).items():
            lines[index].send_bytes(answer)
    return seen


def _received(pipe: Connection) -> bytes | None:
    """None where the other end is gone."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None
