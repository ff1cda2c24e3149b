"""A private logistic regression by three owners of data, who trust an aggregator, over Flower.

To try it, run everything on one machine:

    pip install "pyro-dp[flower]"
    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
    export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1

All owners trust the aggregator with their sums, which have only a part of the noise. It starts a
SuperLink:

    flower-superlink --insecure --disable-runtime-dependency-installation \
        --host 127.0.0.1 --port 8000 --fleet-api-address 127.0.0.1:9092

Each holder, here the one of index 0, starts a SuperNode and this script, and leaves both running:

    flower-supernode --insecure --superlink 127.0.0.1:9092 --host 127.0.0.1 --port 9100 \
        --node-config "line=\"$PWD/holder0/line\""
    python examples/federated/holder.py 0 holder0

(The others have index 1 and 2, with other ports and folders.) When all holders have joined, the
aggregator, whose ``~/.flwr/config.toml`` has the lines

    [superlink.here]
    address = "127.0.0.1:8000"
    insecure = true

starts the run, which ends when the holders leave. ``flwr log`` shows its messages.

    flwr run examples/federated/app here

(Since Flower 1.41 the SuperLink has one port, and SuperNodes call 127.0.0.1:8000.)

**Between machines** use TLS instead of ``--insecure``, and SuperNodes with keys. Without them,
anybody who reaches the ports may read and answer. A SuperNode runs code that it receives. So
run it as a user who cannot read the data, with a group that may enter the folder of the line.

Every round takes about 5 seconds. Flower looks for messages every 3 seconds, and starts a process
for each. A look of DPSEP or a step of VIPS needs two rounds.
"""

import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

import pyro_dp
from pyro_dp.federated import AtTrustedAggregator, Federation, FlowerLine

WEIGHTS = torch.tensor([1.0, -1.0, 0.5])


def model(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):  # len(x) is that of all holders together
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def my_records(index, count=20_000):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(count, 3, generator=generator)
    y = torch.rand(count, generator=generator) < torch.sigmoid(x @ WEIGHTS)
    return x, y.float()


def main(index, folder):
    with FlowerLine(folder / "line", index) as line:
        # Before model and guide.
        federation = Federation(AtTrustedAggregator(line), holders=3, dropouts=1)
        accountant = pyro_dp.PrivacyAccountant(epsilon=1.0)  # only for this holder
        accountant.journal(folder / "journal")
        guide = AutoMultivariateNormal(model)
        dpsep = pyro_dp.DPSEP(
            model,
            guide,
            accountant=accountant,
            noise=pyro_dp.Noise(source="system"),
            execution=pyro_dp.Execution(peers=federation),
        )
        dpsep.run(*my_records(index), progress=False)
        federation.leave()
    print(dpsep.posterior())
    print(f"epsilon = {accountant.get_epsilon():.3f} of 1, of holder {index}")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
