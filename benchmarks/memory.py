"""Data that do not fit into memory: the memory that a run needs, and its speed.

    python benchmarks/memory.py --records 100000000

N x 20 features in float32 and labels are in a mapped file and in Parquet with 64 row groups. Each
method runs in a process of its own with one thread. The operating system holds it to 1.5 GB of
anonymous memory (RLIMIT_DATA), checks included. The reference holds at most 5,000,000 records in
memory, without a limit.

A rate is that of the steps after the first, by processor time (that of the system included). The
page cache is warm if the file fits it. The first step includes checks and tracing. Rates are of
medians. A long run reads rows ahead twice more, and its rate is of the mean.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoNormal

import pyro_dp
from pyro_dp import DPSEP, DPSVI, VIPS, PrivacyAccountant
from pyro_dp.vips import LogisticRegression

DIM, GROUPS, LIMIT, BATCH = 20, 64, 1_500_000_000, 1000
MOST_IN_MEMORY = 5_000_000
LONG = "DPSVI, long"
# A long run ends with a step whose rows are read alone, after two times 2,522 that share a pass.
STEPS = {"DPSEP": 3, "VIPS": 3, "DPSVI": 100, LONG: 5045}
SOURCES = ("in memory", "mapped", "Parquet")


def model(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def write(folder: Path, size: int) -> None:
    """The same numbers in both forms, a part at a time."""
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (size, DIM))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (size,))
    weights = np.linspace(-1.0, 1.0, DIM, dtype=np.float32)
    for start in range(0, size, 2**18):
        rng = np.random.default_rng(start)
        rows = rng.standard_normal((min(2**18, size - start), DIM), np.float32)
        x[start : start + len(rows)] = rows / np.sqrt(DIM)
        y[start : start + len(rows)] = rows @ weights + rng.logistic(size=len(rows)) > 0
    x.flush()
    y.flush()


def write_parquet(folder: Path, size: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    names = [f"x{j}" for j in range(DIM)]
    schema = pa.schema([(name, pa.float32()) for name in (*names, "y")])
    group = -(-size // GROUPS)
    with pq.ParquetWriter(folder / "data.parquet", schema, compression="none") as writer:
        for start in range(0, size, group):
            rows = x[start : start + group]
            arrays = [pa.array(np.ascontiguousarray(rows[:, j])) for j in range(DIM)]
            table = pa.table([*arrays, pa.array(y[start : start + group])], schema=schema)
            writer.write_table(table, row_group_size=group)


def data(source: str, folder: Path) -> tuple:
    if source == "Parquet":
        return pyro_dp.columns(folder / "data.parquet", [f"x{j}" for j in range(DIM)], "y")
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    if source == "mapped":
        return x, y
    size = min(len(x), MOST_IN_MEMORY)
    return torch.from_numpy(x[:size].copy()), torch.from_numpy(y[:size].copy())


def inference(method: str, size: int):
    own = {"accountant": PrivacyAccountant(delta=1e-10), "noise": 1.0}
    if method == "DPSEP":
        return DPSEP(model, AutoNormal(model), **own)
    own["num_steps"] = STEPS[method]
    if method == "VIPS":
        return VIPS(LogisticRegression(DIM), **own)
    return DPSVI(model, AutoNormal(model), sampling=BATCH / size, **own)


def measure(source: str, method: str, folder: Path) -> dict:
    """Seconds of the steps, and the most anonymous memory that the process had."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if source != "in memory":
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    x, y = data(source, folder)
    run, times = inference(method, len(x)), []
    for _ in range(STEPS[method]):
        start = time.perf_counter(), time.process_time()
        run.step(x, y)
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    usual = statistics.mean if method == LONG else statistics.median
    wall, processor = (usual(each[1:]) for each in zip(*times, strict=True))
    size = BATCH if method.startswith("DPSVI") else len(x)
    found = {"first": times[0][0], "wall": wall, "rate": size / processor, "peak": _peak()}
    return {"records": len(x)} | found


def _peak() -> float:
    """Peak private memory in MB, to which the limit applies."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) / 1000


def table(found: dict) -> str:
    lines = [
        "| method | data | records | first step, s | later steps, s | records a processor second "
        "| rate / in memory | private memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in STEPS:
        reference = found.get(("in memory", method), {"rate": math.nan})["rate"]
        for source in SOURCES:
            one = found.get((source, method))
            if one is None:
                continue
            lines.append(
                f"| {method} | {source} | {one['records']:,} | {one['first']:.3g} "
                f"| {one['wall']:.3g} | {one['rate']:,.0f} | {one['rate'] / reference:.2f} "
                f"| {one['peak']:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where files are made; else a temporary one")
    parser.add_argument("--sources", nargs="*", default=SOURCES, choices=SOURCES)
    parser.add_argument("--methods", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--measure", nargs=2)
    parser.add_argument("--dry", action="store_true", help="print the table, and write no section")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*given.measure, given.folder)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder, found = Path(made), {}
        write(folder, given.records)
        if "Parquet" in given.sources:
            write_parquet(folder, given.records)
        for method in given.methods:
            for source in given.sources:  # which are compared: one after the other
                command = [sys.executable, __file__, "--measure", source, method, "--folder", made]
                # Arrow's own pool reserves a GB and uses little of it.
                own = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
                environment = os.environ | own
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                found[source, method] = json.loads(done.stdout.splitlines()[-1])
                print(source, method, found[source, method], flush=True)
    text = table(found)
    print(text)
    if not given.dry:
        write_section("memory", text)


if __name__ == "__main__":
    main()
