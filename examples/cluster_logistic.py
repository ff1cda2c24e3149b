"""A private logistic regression by several processes, each with a part of the records.

    torchrun --nproc-per-node 2 examples/cluster_logistic.py

Each process makes up its shard; a real one would read a file. Rank 0 has the ledger and its
journal. After a crash, start the script again with any number of processes, and the run continues.
"""

import os
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

import pyro_dp

WEIGHTS = torch.tensor([1.0, -1.0, 0.5])
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "cluster_logistic")


def model(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):  # len(x) is that of all shards together
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def my_records(rank, count=20_000):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, 3, generator=generator)
    y = torch.rand(count, generator=generator) < torch.sigmoid(x @ WEIGHTS)
    return x, y.float()


def main():
    cluster = pyro_dp.Cluster(timeout=60)  # before model and guide
    accountant = pyro_dp.PrivacyAccountant(epsilon=1.0)
    first = cluster.rank == 0
    if first:
        FOLDER.mkdir(exist_ok=True)
        accountant.journal(FOLDER / "journal")
    guide = AutoMultivariateNormal(model)
    dpsep = pyro_dp.DPSEP(
        model, guide, accountant=accountant, execution=pyro_dp.Execution(peers=cluster)
    )
    path = FOLDER / "state.pt"
    known = first and path.exists()  # after a crash; ranks without this file get it
    state = cluster.exchange(torch.load(path, weights_only=True) if known else None)[0]
    if state is not None:
        dpsep.load_state_dict(state)

    def save(step):
        if first and step.step % 5 == 0:
            torch.save(dpsep.state_dict(), path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    dpsep.run(*my_records(cluster.rank), progress=False, callbacks=[save])
    if first:  # every rank has the posterior, and one prints it
        print(dpsep.posterior())
        print(f"epsilon = {accountant.get_epsilon():.3f} of 1, by {cluster.size} processes")


if __name__ == "__main__":
    main()
