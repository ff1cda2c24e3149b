"""The ledger under load: time per record, alone, with a budget, with a journal; many kinds.

``python benchmarks/ledger.py [folder]`` prints a table. The journal is written to the folder.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian

EVENT = SubsampledGaussian(20.0, 0.001)


def seconds(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def record(accountant, count):
    for _ in range(count):
        accountant.record(EVENT)


def threads(accountant):
    workers = [threading.Thread(target=record, args=(accountant, 10_000)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def many_kinds(count, sampling):
    rng = np.random.default_rng(0)
    noises, rates = rng.uniform(0.8, 5.0, count), rng.uniform(0.001, 0.05, count)
    counts = rng.integers(1, 20, count)
    return {
        SubsampledGaussian(float(s), float(q), sampling): int(n)
        for s, q, n in zip(noises, rates, counts, strict=True)
    }


def main(folder):
    for budget in (None, 10.0):
        accountant = PrivacyAccountant(budget)
        spent, _ = seconds(record, accountant, 10**6)
        print(f"10^6 records, budget {budget}: {spent:.2f} us each", flush=True)
        assert accountant.num_releases == 10**6
    accountant = PrivacyAccountant(10.0)
    spent, _ = seconds(threads, accountant)
    print(f"8 threads x 10,000: {accountant.num_releases} in {spent:.2f} s", flush=True)
    path = Path(folder) / "journal"
    accountant = PrivacyAccountant()
    with accountant.journal(path):
        spent, _ = seconds(record, accountant, 2000)
    size = path.stat().st_size / 2000
    print(f"with a journal: {1e6 * spent / 2000:.0f} us and {size:.0f} bytes each", flush=True)
    spent, _ = seconds(PrivacyAccountant().journal, path)
    print(f"opening it: {1e6 * spent / 2000:.1f} us a line", flush=True)
    for relation, sampling in (
        ("add_or_remove_one", "poisson"),
        ("replace_one", "poisson"),
        ("replace_one", "fixed"),
    ):
        ledger = many_kinds(1000, sampling)
        bound, _ = seconds(composition.epsilon_bound, ledger, 1e-5, relation, "pld")
        spent, epsilon = seconds(composition.epsilon, ledger, 1e-5, relation, "pld")
        print(
            f"1,000 kinds, {sampling}, {relation}: epsilon {epsilon:.4f} in {spent:.1f} s "
            f"(and {bound:.1f} s for the moments)",
            flush=True,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
