"""Trials that need processes of their own: scripts of this folder, each run once in a test run.

A script begins with seconds of imports, and forks, which a test's process should not. Its results
are kept for all processes of the test run, in a folder that pytest makes (:mod:`conftest`).
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

folder: Path | None = None  # set before the first test


@functools.cache
def found_by(script: str, *trials: str) -> dict:
    """The script's results for these trials, by their names."""
    kept = folder / f"{Path(script).stem}_{'_'.join(trials)[:100]}.json"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_text(_run(script, *trials))
    return json.loads(kept.read_text())


def _run(script: str, *trials: str) -> str:
    # Killed trials cannot tidy up, so their temporary folder is removed with all its files.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        done = subprocess.run(
            [sys.executable, script, *trials],
            env=os.environ | {"TMPDIR": own},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Ports of this machine that no server has yet."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
