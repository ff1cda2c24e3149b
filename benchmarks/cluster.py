"""The speed of several processes, and the time of their steps.

    python benchmarks/cluster.py            # one process against two ranks, in turn
    python benchmarks/cluster.py --ranks 4 --records 2000000 --dim 50

It prints records a second of DPSEP and VIPS on all records, which the ranks share out. It also
prints milliseconds of a DPSVI step with 1,000 records on each rank, and in one process with 1,000.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import pyro_dp
from pyro_dp.vips import LogisticRegression

REPEATS = 3
OWN = 100_000  # records of DPSVI on each rank


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def records(count, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True)
    y = torch.rand(count, generator=generator) < torch.sigmoid(3 * x[:, 0])
    return x, y.double()


def measured(method, count, dim, cluster):
    """Median seconds of a step, the first ones left out, on this rank's part of the records."""
    ranks, rank = (1, 0) if cluster is None else (cluster.size, cluster.rank)
    pyro.clear_param_store()
    torch.manual_seed(0)
    own = dict(
        accountant=pyro_dp.PrivacyAccountant(delta=1e-8),
        noise=10.0,
        execution=pyro_dp.Execution(peers=cluster),
    )
    share = OWN if method == "DPSVI" else count // ranks
    data = records(share, dim, rank)
    if method == "DPSVI":
        guide, optim = AutoDiagonalNormal(model), pyro.optim.Adam({"lr": 0.01})
        inference = pyro_dp.PaperDPSVI(
            model, guide, optim, sampling=1000 / OWN, num_steps=300, clip=1.0, **own
        )
    elif method == "DPSEP":
        inference = pyro_dp.DPSEP(model, AutoMultivariateNormal(model), **own)
    else:
        inference = pyro_dp.VIPS(LogisticRegression(dim), num_steps=6, **own)
    result = inference.run(*data, progress=False)
    return statistics.median(result.step_seconds[2 if method != "DPSVI" else 20 :])


def launched(ranks, given):
    """The times of each method, by so many ranks; None: a process without a cluster."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        own = [__file__, "--write", file.name, "--records", str(given.records)]
        own += ["--dim", str(given.dim)]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run(
            [sys.executable, *([] if ranks is None else launch), *own],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        return json.loads(Path(file.name).read_text())


def measure(given):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cluster = pyro_dp.Cluster(timeout=300) if "RANK" in os.environ else None
    found = {
        method: measured(method, given.records, given.dim, cluster)
        for method in ("DPSVI", "DPSEP", "VIPS")
    }
    if cluster is None or cluster.rank == 0:
        Path(given.write).write_text(json.dumps(found))


def main(given):
    one, several = [], []
    for _ in range(REPEATS):
        one.append(launched(None, given))
        several.append(launched(given.ranks, given))
    print(f"| N = {given.records:,}, d = {given.dim} | 1 process | {given.ranks} ranks | ratio |")
    print("|---|---|---|---|")
    for method in ("DPSEP", "VIPS"):
        before, after = (min(each[method] for each in runs) for runs in (one, several))
        rates = (f"{given.records / seconds / 1e6:.2f}" for seconds in (before, after))
        print(
            f"| {method}, million records a second | {' | '.join(rates)} | {before / after:.2f} |"
        )
    before, after = (1e3 * min(each["DPSVI"] for each in runs) for runs in (one, several))
    print(
        f"| DPSVI, ms a step of 1,000 records a rank | {before:.2f} | {after:.2f} | "
        f"{after - before:.2f} ms more |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--dim", type=int, default=20)
    parser.add_argument("--write")
    chosen = parser.parse_args()
    measure(chosen) if chosen.write else main(chosen)
