"""A private logistic regression by several owners, who share only noisy totals.

Each owner runs it on a separate machine, with the same addresses in the same order:

    python examples/federated_logistic.py 0 hospital-a:7000 hospital-b:7000 hospital-c:7000

Each holder makes up its records; a real one would read a file. Connections are encrypted with
the certificates in the folder .config (docs/owners.md says how to make them). To try it on one
machine, with addresses like 127.0.0.1:7000, add --plain. Each holder has a separate ledger, journal
and states. Restart all holders after a crash: they continue from the last state that all have.
"""

import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

import pyro_dp
from pyro_dp.federated import Federation, ShamirSums

WEIGHTS = torch.tensor([1.0, -1.0, 0.5])


def model(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):  # len(x) is that of all holders together
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def my_records(index, count=5_000):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(count, 3, generator=generator)
    y = torch.rand(count, generator=generator) < torch.sigmoid(x @ WEIGHTS)
    return x, y.float()


def main(index, addresses, encrypted):
    folder = Path(f"federated_{index}")
    folder.mkdir(exist_ok=True)
    channel = ShamirSums(addresses, index, encrypted=encrypted)
    # Before model and guide. Any two of three may work together against the third one.
    federation = Federation(channel, holders=len(addresses), colluders=len(addresses) - 1)
    accountant = pyro_dp.PrivacyAccountant(epsilon=1.0)
    accountant.journal(folder / "journal")
    guide = AutoMultivariateNormal(model)
    dpsep = pyro_dp.DPSEP(
        model,
        guide,
        accountant=accountant,
        noise=pyro_dp.Noise(source="system"),
        execution=pyro_dp.Execution(peers=federation),
    )
    own = [int(path.stem) for path in folder.glob("*.pt")]
    all_have = set.intersection(*map(set, federation.exchange(own)))
    if all_have:
        dpsep.load_state_dict(torch.load(folder / f"{max(all_have)}.pt", weights_only=True))

    def save(step):
        if step.step % 5 == 0:
            torch.save(dpsep.state_dict(), folder / "new")
            (folder / "new").rename(folder / f"{step.step}.pt")

    dpsep.run(*my_records(index), progress=False, callbacks=[save])
    federation.leave()
    print(dpsep.posterior())
    print(f"epsilon = {accountant.get_epsilon():.3f} of 1, by {federation.size} holders")


if __name__ == "__main__":
    plain = "--plain" in sys.argv
    given = [each for each in sys.argv[1:] if each != "--plain"]
    main(int(given[0]), given[1:], encrypted=not plain)
