"""Runs that are killed, and processes that share a journal: ``python killed_runs.py FOLDER KILLS``.

A process of its own, which imports once and forks a child per trial. Prints what it found as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import cluster_runs
import pyro
import torch

from pyro_dp import PrivacyAccountant, PrivacyError, SubsampledGaussian
from pyro_dp.mechanism import releases

EVENT = SubsampledGaussian(5.0, 0.5)
KILLS_PER_JOURNAL = 10


def train(folder, steps):
    """Goes on from journal and checkpoint. Every released value is written down at once."""
    released = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    exact = releases.release

    def release(*args, **kwargs):
        values = exact(*args, **kwargs)
        os.write(released, f"{values[0][0].item()}\n".encode())
        return values

    releases.release = release
    accountant = PrivacyAccountant()
    accountant.journal(folder / "journal")
    svi = cluster_runs.make(
        "svi with an optim", accountant, None, "none", num_steps=None, noise=5.0, sampling=0.5
    )
    checkpoint, written = folder / "checkpoint", folder / "checkpoint.new"
    if checkpoint.exists():
        svi.load_state_dict(torch.load(checkpoint, weights_only=True))
    data = cluster_runs.data()
    for _ in range(steps):
        svi.step(*data)
        if svi._steps % 3 == 0:
            torch.save(svi.state_dict(), written)
            os.replace(written, checkpoint)


def forked(function, *args):
    """The process that runs a function; its exit status is 1 where that raises."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*args)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return pid


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lines(path):
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def counted(path):
    """The counts of a resumed accountant."""
    accountant = PrivacyAccountant()
    with accountant.journal(path):
        return accountant.num_releases


def kill(folder, rng):
    """Kill a run at a random moment: while it starts, or within a step after the first ones."""
    started, wanted = time.monotonic(), rng.choice([0, 0, 1, 2, 3, 5, 8])
    before = lines(folder / "released")
    pid = forked(train, folder, 10**6)
    while lines(folder / "released") < before + wanted and time.monotonic() < started + 20:
        time.sleep(1e-3)
    time.sleep(rng.uniform(0.0, 0.02 if wanted else 0.1))
    os.kill(pid, signal.SIGKILL)
    assert status(pid) == -signal.SIGKILL
    return counted(folder / "journal"), lines(folder / "released")


def killed_runs(folder, kills):
    rng, found = random.Random(kills), {"trials": [], "finished": 0}
    for start in range(0, kills, KILLS_PER_JOURNAL):
        place = folder / str(start)
        place.mkdir()
        for number in range(start, min(kills, start + KILLS_PER_JOURNAL)):
            found["trials"].append([*kill(place, rng), number - start + 1])
        before = counted(place / "journal")
        same = status(forked(train, place, 4)) == 0 and counted(place / "journal") == before + 4
        found["finished"] += same
    return found


def shared_journals(folder):
    accountant = PrivacyAccountant()
    journal = accountant.journal(folder / "shared")
    accountant.record(EVENT)

    def refused(function, *args):
        def check():
            try:
                function(*args)
            except PrivacyError:
                return
            raise AssertionError("not refused")

        return status(forked(check)) == 0

    found = {"child": refused(accountant.record, EVENT)}
    found["second"] = refused(PrivacyAccountant().journal, folder / "shared")
    accountant.record(EVENT)
    journal.close()
    found["after"] = counted(folder / "shared") == 2

    def sleep():
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "asleep").touch()
        time.sleep(60)

    def leave_orphan():
        ours = PrivacyAccountant()
        ours.journal(folder / "orphan")
        forked(sleep)
        while not (folder / "asleep").exists():  # until then it may still hold the lock
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGKILL)

    status(forked(leave_orphan))
    orphan = int((folder / "pid").read_text())
    found["orphan"] = counted(folder / "orphan") == 0
    os.kill(orphan, signal.SIGKILL)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    folder = Path(sys.argv[1])
    (folder / "first").mkdir()
    exact = releases.release
    train(folder / "first", 1)  # what is imported late is imported once
    releases.release = exact
    pyro.clear_param_store()
    print(json.dumps(shared_journals(folder) | killed_runs(folder, int(sys.argv[2]))))
