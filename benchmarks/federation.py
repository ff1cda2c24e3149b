"""The cost of several owners: the time of a sum by secret sharing, and of a step of a fit.

    python benchmarks/federation.py

Three holders, processes of one machine, over the loopback and without TLS; medians. A step has two
rounds, an agreement and a sum.
"""

import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from federation_runs import _addresses, started  # noqa: E402

from pyro_dp import VIPS, Execution, Noise, PrivacyAccountant  # noqa: E402
from pyro_dp.federated import Federation, ShamirSums  # noqa: E402
from pyro_dp.vips import LogisticRegression  # noqa: E402

HOLDERS = 3
SIZES = (1, 300, 5_000)
RECORDS, DIM, STEPS = 10_000, 20, 30


def sums(index, addresses):
    """Seconds of a sum, by its size."""
    channel = ShamirSums(addresses, index, encrypted=False)
    found = {}
    for size in SIZES:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            channel.add(np.ones(size, np.int64))
            times.append(time.perf_counter() - start)
        found[size] = statistics.median(times)
    channel.leave()
    return found


def steps(index, addresses):
    """Seconds of a step of VIPS, alone with all records, and in the federation."""
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(RECORDS, DIM, generator=generator) / DIM**0.5 / 3
    y = (torch.rand(RECORDS, generator=generator) < 0.5).double()

    def fit(peers, *data):
        vips = VIPS(
            LogisticRegression(DIM),
            accountant=PrivacyAccountant(),
            num_steps=STEPS,
            noise=Noise(50.0, source="system"),
            execution=Execution(peers=peers),
        )
        vips.run(*data, progress=False)
        return statistics.median(vips.last_run.step_seconds)

    federation = Federation(ShamirSums(addresses, index, encrypted=False), holders=HOLDERS)
    together = fit(federation, x, y)
    federation.leave()
    alone = fit(None, x.repeat(HOLDERS, 1), y.repeat(HOLDERS)) if index == 0 else None
    return together, alone


def main():
    addresses = _addresses(HOLDERS)
    found = started(HOLDERS, lambda index: sums(index, addresses))()
    for size, seconds in found[0].value.items():
        print(f"sum of {size} numbers: {1e3 * seconds:.1f} ms")
    addresses = _addresses(HOLDERS)
    found = started(HOLDERS, lambda index: steps(index, addresses))()
    together, alone = found[0].value
    print(
        f"VIPS, 3 x {RECORDS} x {DIM}: {1e3 * together:.0f} ms a step, one owner {1e3 * alone:.0f}"
    )


if __name__ == "__main__":
    main()
