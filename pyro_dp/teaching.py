"""Helpers of the tutorials: a figure style, three plots, and hospitals on one machine.

Nothing else in the package imports this module. It imports matplotlib when the first figure is
drawn.
"""

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pyro_dp.federated import TrustedAggregator
from pyro_dp.utils.errors import ClusterError, PrivacyError

# Okabe and Ito's colours. Lines and markers also differ, for readers without colour vision.
BLACK, GREY, BLUE, ORANGE = "#222222", "#777777", "#0072B2", "#D55E00"
GREEN, PURPLE = "#009E73", "#CC79A7"
_COLOURS = BLUE, ORANGE, GREEN, BLACK
_STYLE: Any = {  # a white background is also readable on a dark page
    "figure.dpi": 80,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.8, **shared: Any
) -> Iterator[Any]:
    """Make a figure, yield its axes, and show it at the end of the block.

    :param shared: arguments of ``matplotlib.pyplot.subplots``, such as ``sharey=True``.
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        _, axes = plt.subplots(
            rows, columns, figsize=(width, height), layout="constrained", **shared
        )
        yield axes
        plt.show()


def lines(axes: Any, x: Any, curves: Mapping[str, Any], **labels: Any) -> None:
    """Draw a curve over ``x`` for each label.

    :param labels: arguments of ``axes.set``, such as ``xlabel``.
    """
    looks = zip(_COLOURS, ("-", "--", "-.", ":"), strict=True)
    for (label, y), (colour, dash) in zip(curves.items(), looks, strict=False):
        axes.plot(np.asarray(x), np.asarray(y), dash, color=colour, lw=2, label=label)
    axes.set(**labels)
    axes.legend()


def histograms(axes: Any, samples: Mapping[str, Any], bins: Any = 40, **labels: Any) -> None:
    """Draw a density histogram of each label's samples, in common bins."""
    values = [np.asarray(each) for each in samples.values()]
    edges = np.histogram_bin_edges(np.concatenate(values), bins)
    for label, each, colour, hatch in zip(
        samples, values, _COLOURS, ("//", "", ".."), strict=False
    ):
        style = dict(histtype="stepfilled", alpha=0.45, color=colour, hatch=hatch)
        axes.hist(np.clip(each, edges[0], edges[-1]), edges, density=True, label=label, **style)
    axes.set(yticks=[], **labels)
    axes.legend()


def intervals(axes: Any, fits: Mapping[str, Any], names: Sequence[str], **labels: Any) -> None:
    """Draw a row for each name, with the 95% interval of each fit.

    :param fits: means and standard deviations, both of shape (len(names),), by label. The first fit
        is the reference, and is black.
    """
    rows = np.arange(len(names))
    for k, (label, (mean, sd)) in enumerate(fits.items()):
        colour = (BLACK, BLUE, ORANGE, GREEN, GREY, PURPLE)[k]
        style = dict(fmt="oDsv^P"[k], color=colour, ms=5, capsize=2.5, label=label)
        height = rows + 0.8 * ((k + 0.5) / len(fits) - 0.5)
        axes.errorbar(np.asarray(mean), height, xerr=1.96 * np.asarray(sd), **style)
    for row in rows[:-1]:
        axes.axhline(row + 0.5, color="#dddddd", lw=0.8)
    axes.set(yticks=rows, yticklabels=names, ylim=(len(names) - 0.5, -0.5), **labels)
    axes.legend(bbox_to_anchor=(1.0, 1.0), loc="upper left")


class PipeLine:
    """A hospital's line to the server: it sends a message and waits for the answer."""

    def __init__(self, index: int, pipe: Connection):
        self.index, self._pipe = index, pipe

    def ask(self, message: bytes) -> bytes:
        try:
            self._pipe.send_bytes(message)
            return self._pipe.recv_bytes()
        except (OSError, EOFError) as error:
            raise ClusterError("The aggregator has gone. Start all holders again.") from error


def together(
    body: Callable[[int, PipeLine], Any], *, holders: int = 3, dropouts: int = 0
) -> tuple[list[Any], list[dict[int, bytes]]]:
    """Run ``body(index, line)`` in a process for each hospital, and the server here.

    Real hospitals have machines and a network. Here each hospital is a fork of this process (Linux
    and macOS).

    :returns: the result of each hospital, and the messages that the server saw in each round. The
        result is None after a crash, and a text after a refusal.
    """
    fork = multiprocessing.get_context("fork")
    lines: dict[int, Connection] = {}
    results: dict[int, Connection] = {}
    processes = []
    for index in range(holders):
        ours, theirs = fork.Pipe()
        result, answer = fork.Pipe(duplex=False)
        closed = [ours, result, *lines.values(), *results.values()]
        process = fork.Process(target=_hospital, args=(body, index, theirs, answer, closed))
        process.start()
        theirs.close()
        answer.close()
        lines[index], results[index] = ours, result
        processes.append(process)
    seen = _serve(TrustedAggregator(holders, dropouts), lines)
    sent = [_received(results[index]) for index in range(holders)]
    for process in processes:
        process.join()
    return [None if each is None else pickle.loads(each) for each in sent], seen


def _hospital(
    body: Callable[[int, PipeLine], Any],
    index: int,
    line: Connection,
    answer: Connection,
    closed: list[Connection],
) -> None:
    for each in closed:
        each.close()  # a pipe ends when every process has closed it
    try:
        found = body(index, PipeLine(index, line))
    except PrivacyError as error:
        found = f"{type(error).__name__}: {error}"
    answer.send_bytes(pickle.dumps(found))


def _serve(server: TrustedAggregator, lines: dict[int, Connection]) -> list[dict[int, bytes]]:
    seen = []
    while not server.done and lines:
        messages = {i: sent for i in list(lines) if (sent := _received(lines[i])) is not None}
        for lost in lines.keys() - messages.keys():
            lines.pop(lost).close()
        seen.append(messages)
        for index, answer in server.answer(messages).items():
            with suppress(OSError):  # the hospital has gone
                lines[index].send_bytes(answer)
    for line in lines.values():
        line.close()  # nobody waits for another answer
    return seen


def _received(pipe: Connection) -> bytes | None:
    """None if the other process has gone."""
    try:
        return pipe.recv_bytes()
    except (OSError, EOFError):
        return None
