"""A SuperLink and SuperNodes of Flower on the loopback; run as a script, this is a holder.

It ends its processes by process group; all waiting has an end.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from trials import free_ports

from pyro_dp.mechanism.flower import FlowerLine

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "federated"
SECONDS = 600  # for any wait
SUMS = """
import numpy as np
from pyro_dp.mechanism.flower import server_app

class Sums:
    holders, timeout, rounds = 3, 120.0, 0

    @property
    def done(self):
        return self.rounds == {rounds}

    def answer(self, messages):
        self.rounds += 1
        with np.errstate(over="ignore"):
            total = sum(np.frombuffer(each, np.int64) for each in messages.values())
        return dict.fromkeys(messages, total.tobytes())

app = server_app(Sums())
"""


class Flower:
    """A SuperLink, and a SuperNode for each holder.

    :param folder: for all files, with a short path: sockets lie in folders of it.
    """

    def __init__(self, folder: Path, holders: int):
        self.folder = folder
        self.lines = [folder / str(index) / "line" for index in range(holders)]
        self._started: list[subprocess.Popen] = []
        self._logs: list[Path] = []
        runtime, fleet, *ports = free_ports(2 + holders)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{runtime}"\ninsecure = true\n'
        )
        try:
            self.start(
                "flower-superlink",
                *("--insecure", "--disable-runtime-dependency-installation"),
                *("--host", "127.0.0.1", "--port", str(runtime)),
                *("--fleet-api-address", f"127.0.0.1:{fleet}"),
            )
            _wait_for(runtime)
            if not _is_open(fleet):
                fleet = runtime  # one port for all, in later versions
            for port, line in zip(ports, self.lines, strict=True):
                self.start(
                    "flower-supernode",
                    *("--insecure", "--superlink", f"127.0.0.1:{fleet}"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *("--node-config", f'line="{line}"'),
                )
        except BaseException:
            self.close()
            raise

    def start(self, *command: str) -> subprocess.Popen:
        """A process in a group of its own, which ends with all others; its log is a file."""
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".log", delete=False) as log:
            started = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        self._started.append(started)
        self._logs.append(Path(log.name))
        return started

    def log(self, started: subprocess.Popen) -> Path:
        return self._logs[self._started.index(started)]

    def run(self, app: Path) -> None:
        """Start a run of an app; it goes on in the SuperLink."""
        self.start("flwr", "run", str(app), "here").wait(SECONDS)

    def logs(self) -> str:
        """The ends of all."""
        ends = zip(self._started, self._logs, strict=True)
        return "\n".join(f"== {each.args}\n{log.read_text()[-3000:]}" for each, log in ends)

    def close(self) -> None:
        for each in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
        for each in self._started:
            each.wait()

    def _environment(self) -> dict[str, str]:
        beside = str(Path(sys.executable).parent)
        return os.environ | {
            "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }


@contextlib.contextmanager
def flower(holders: int) -> Iterator[Flower]:
    with tempfile.TemporaryDirectory() as folder:
        started = Flower(Path(folder), holders)
        try:
            yield started
        finally:
            started.close()


def sums(rounds: int, size: int, killed: Sequence[int] = ()) -> list[list[list[float]]]:
    """Three holders, each a process, send arrays of ``size`` and get their sum back.

    :param killed: these end themselves before the message in the middle.
    :returns: by holder and round, the first and last number of the sum.
    :raises RuntimeError: a holder that was not killed failed.
    """
    with flower(3) as started:
        app = started.folder / "app"
        shutil.copytree(EXAMPLE / "app", app)
        (app / "server.py").write_text(SUMS.format(rounds=rounds))
        found = [started.folder / f"found{index}" for index in range(3)]
        holders = []
        for index, (line, path) in enumerate(zip(started.lines, found, strict=True)):
            end = rounds // 2 if index in killed else -1
            plan = [str(each) for each in (index, line, path, rounds, size, end)]
            holders.append(started.start(sys.executable, __file__, *plan))
        started.run(app)
        for index, holder in enumerate(holders):
            expected = -signal.SIGKILL if index in killed else 0
            if holder.wait(SECONDS) != expected:
                raise RuntimeError(started.logs())
        return [[json.loads(row) for row in path.read_text().splitlines()] for path in found]


def example() -> list[str]:
    """Each holder's output in the example.

    :raises RuntimeError: one failed.
    """
    with flower(3) as started:
        script = str(EXAMPLE / "holder.py")
        holders = [
            started.start(sys.executable, script, str(index), str(line.parent))
            for index, line in enumerate(started.lines)
        ]
        started.run(EXAMPLE / "app")
        ends = [holder.wait(SECONDS) for holder in holders]
        if any(ends):
            raise RuntimeError(started.logs())
        return [started.log(holder).read_text() for holder in holders]


def message(index: int, step: int, size: int) -> np.ndarray:
    """Numbers whose sums leave 64 bits."""
    return np.arange(size, dtype=np.int64) + (index + 1) * (2**61 + step)


def _hold(index: int, line: str, path: str, rounds: int, size: int, end: int) -> None:
    with open(path, "w") as found, FlowerLine(line, index, timeout=SECONDS) as opened:
        for step in range(rounds):
            if step == end:
                os.kill(os.getpid(), signal.SIGKILL)
            total = np.frombuffer(opened.ask(message(index, step, size).tobytes()), np.int64)
            print(json.dumps([int(total[0]), int(total[-1])]), file=found, flush=True)


def _wait_for(port: int) -> None:
    limit = time.monotonic() + SECONDS
    while not _is_open(port):
        if time.monotonic() > limit:
            raise TimeoutError("the SuperLink did not start")
        time.sleep(0.2)


def _is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    _hold(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
