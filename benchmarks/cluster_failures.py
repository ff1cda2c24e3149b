"""Ranks that are killed, stopped, fail or have other data, at each stage of a step.

    python benchmarks/cluster_failures.py             # processes of its own
    python benchmarks/cluster_failures.py --torchrun  # the same under torchrun

It prints a line for each run: the failure and its rank, the fate of the other ranks, and after how
long. The line counts draws of noise and releases in the journal, at the failure and at the end. It
says whether another number of ranks went on from journal and checkpoint. The last line counts the
runs, and those with a fault.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from cluster_runs import POINTS, Failure, counted, fails, fresh, train, warm_up  # noqa: E402

METHODS = ("svi", "sep", "vips", "svi with an optim")
ON_FIRST = ("counted",)  # the others draw no noise
SIZE = 3


def matrix() -> list[Failure]:
    """Each rank but the last, killed and stopped at each point, and what else can be wrong."""
    found = [
        Failure(how, rank, point, late)
        for how, point, rank in itertools.product(("killed", "stopped"), POINTS, (0, 1))
        if rank == 0 or point not in ON_FIRST
        for late in [point not in ("meeting", "looking", "building")]
    ]
    found += [Failure("raises", 0, point) for point in ("sampling", "counted")]
    found += [Failure("raises", 1, point) for point in ("sampling", "agreeing", "shared")]
    found += [Failure("raises", rank, "building", False) for rank in (0, 1)]
    found += [Failure("interrupted", rank, "sampling") for rank in (0, 1)]
    for how in ("NaN", "changed", "shorter", "spent"):
        found += [Failure(how, rank) for rank in (0, 1)]
    return found


def by_processes() -> int:
    wrong = 0
    warm_up()
    for number, failure in enumerate(matrix()):
        method, again = METHODS[number % len(METHODS)], 1 + number % 3
        options = {"jit": "none"} if method != "vips" else {}
        verdict = fails(method, failure, size=SIZE, again=again, **options)
        said = verdict.wrong(failure)
        wrong += bool(said)
        others = [each for rank, each in enumerate(verdict.ended) if rank != failure.rank]
        kinds = "/".join(str(each.error) for each in others)
        print(
            f"{number + 1:3d} {method:18s} rank {failure.rank} {failure.how:11s} "
            f"{failure.point:10s} {'late ' if failure.late else 'first'} others: {kinds} "
            f"after {verdict.slowest:4.1f} s; released {verdict.released}, counted "
            f"{verdict.counted}, goes on with {again}: {'as it must be' if not said else said}",
            flush=True,
        )
    print(f"{len(matrix())} runs, {wrong} not as they must be")
    return wrong


def by_torchrun() -> int:
    """The launcher ends the others as soon as one has died; so only the counts are judged."""
    wrong, runs = 0, 0
    cases = itertools.product(("killed", "raises"), ("building", "sampling", "added up", "shared"))
    for how, point in [*cases, ("killed", "counted"), ("stopped", "adding up")]:
        rank, method = runs % 2, METHODS[runs % 3]
        rank = 0 if point in ON_FIRST else rank
        folder = Path(tempfile.mkdtemp(prefix="cluster"))
        failure = dict(how=how, rank=rank, point=point, late=point != "building")
        statuses, seconds = [], []
        for size, given in ((2, failure), (3 - runs % 2 * 2, None)):
            own = json.dumps({"folder": str(folder), "method": method, "failure": given})
            begun = time.monotonic()
            command = ["--standalone", "--nproc-per-node", str(size), __file__, "--rank", own]
            launch = [sys.executable, "-m", "torch.distributed.run", *command]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(launch, capture_output=True, timeout=240, env=environment)
            statuses.append(done.returncode)
            seconds.append(time.monotonic() - begun)
        drawn = (folder / "released").read_text().splitlines()
        early = sum(n > int(each.split()[1]) for n, each in enumerate(drawn, start=1))
        total, ledger = len(drawn), counted(folder / "journal")
        good = statuses[0] and not statuses[1] and ledger >= total and not early
        wrong, runs = wrong + (not good), runs + 1
        print(
            f"{runs:3d} {method:18s} rank {rank} {how:11s} {point:10s} launcher: {statuses} after "
            f"{seconds[0]:.0f} s; released {total}, counted {ledger}: "
            f"{'as it must be' if good else 'WRONG'}",
            flush=True,
        )
    print(f"{runs} runs, {wrong} not as they must be")
    return wrong


def be_rank(given: str) -> None:
    """One process of torchrun's."""
    own = json.loads(given)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    fresh()
    failure = own["failure"] and Failure(**own["failure"])
    cuts = [0, *(10 + 15 * i for i in range(size - 1)), 60]
    options = {"jit": "none"} if own["method"] != "vips" else {}
    train(rank, own["method"], Path(own["folder"]), cuts, failure, **options)


if __name__ == "__main__":
    # In the background of a shell interrupts are ignored, and children do as their parent.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser()
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--rank")
    chosen = parser.parse_args()
    if chosen.rank:
        be_rank(chosen.rank)
    else:
        sys.exit(bool(by_torchrun() if chosen.torchrun else by_processes()))
