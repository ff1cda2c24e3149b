"""How long does a private step of a network take, beside Opacus and Pyro's SVI?

The same network, batches of 200 of 4,000 records, Adam, cross entropy, delta = 1e-5. Each run is a
process with one thread.

* step: the median of ten steps, in seconds of processor time.
* first: the sum of the first six steps.
* memory: the peak of the process in GB.

Opacus has two modes: hooks hold the gradients of all records, and ghost clipping computes norms.
It is no dependency of the package: without it, its columns are empty.

    python benchmarks/networks.py
"""

import importlib.util
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_dp import DPSVI, Noise, PrivacyAccountant

RECORDS, BATCH, STEPS = 4_000, 200, 10
METHODS = ("torch", "SVI", "hooks", "ghost", "DPSVI")


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5_000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.out = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(x)).mean(-2))


class TwoLayers(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(*[self._layer() for _ in range(2)])

    @staticmethod
    def _layer() -> nn.Module:
        return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1_000, 32)
        self.layer = kind(32, 64, batch_first=True)
        self.out = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(x))[0][..., -1, :])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(self._block() for _ in range(3))
        self.out = nn.Linear(16, 2)

    @staticmethod
    def _block() -> nn.Module:
        one = nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        two = nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
        return nn.Sequential(*one, *two)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.mean((-2, -1)))


def perceptron(one: int = 1_536, two: int = 1_408) -> nn.Module:
    layers = nn.Linear(784, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(two, 2))


def convolutions() -> nn.Module:
    one = nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
    two = nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*one, *two, nn.Flatten(-3), nn.Linear(512, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding and transformer": (Transformer, lambda: torch.randint(0, 5_000, (RECORDS, 20))),
    "two transformer layers": (TwoLayers, lambda: torch.randint(0, 5_000, (RECORDS, 20))),
    "perceptron": (perceptron, lambda: torch.randn(RECORDS, 784)),
    "perceptron of 10^7 weights": (
        partial(perceptron, 3_072, 2_464),
        lambda: torch.randn(RECORDS, 784),
    ),
    "residual, group norm": (Residual, lambda: torch.randn(RECORDS, 1, 28, 28)),
    "convolutions": (convolutions, lambda: torch.randn(RECORDS, 1, 28, 28)),
    "LSTM": (Recurrent, lambda: torch.randint(0, 1_000, (RECORDS, 20))),
    "GRU": (partial(Recurrent, nn.GRU), lambda: torch.randint(0, 1_000, (RECORDS, 20))),
}


def by_pyro(method: str, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    own = BATCH if method == "SVI" else None

    def model(x: Tensor, y: Tensor) -> None:
        pyro.module("net", net)
        with pyro.plate("records", len(x), subsample_size=own) as i:
            pyro.sample("y", dist.Categorical(logits=net(x[i])), obs=y[i])

    def guide(x: Tensor, y: Tensor) -> None:
        pass

    parts = model, guide, Adam({"lr": 1e-3}), Trace_ELBO()
    if method == "SVI":
        svi = SVI(*parts)
    else:
        svi = DPSVI(
            *parts,
            accountant=PrivacyAccountant(delta=1e-5),
            noise=Noise(1.0, source=0),
            clip=1.0,
            sampling=BATCH / RECORDS,
        )
    return lambda: svi.step(x, y)


def by_torch(mode: str, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Plain steps, or those of a mode of Opacus."""
    loss = nn.CrossEntropyLoss()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH)
    if mode != "torch":
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        net = ModuleValidator.fix(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    if mode != "torch":
        own = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        parts = PrivacyEngine().make_private(
            module=net,
            optimizer=optimizer,
            data_loader=loader,
            criterion=loss,
            grad_sample_mode=mode,
            **own,
        )
        net, optimizer = parts[0], parts[1]
        loss = parts[2] if mode == "ghost" else loss
    batches = iter(list(loader))

    def step() -> None:
        own_x, own_y = next(batches)
        optimizer.zero_grad()
        loss(net(own_x), own_y).backward()
        optimizer.step()

    return step


def measured(network: str, method: str) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    make, draw = NETWORKS[network]
    net, x, y = make(), draw(), torch.randint(0, 2, (RECORDS,))
    if method not in ("SVI", "DPSVI"):
        step = by_torch(method, net, x, y)
    else:
        step = by_pyro(method, net, x, y)
    times = []
    for _ in range(6 + STEPS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return {
        "step": sorted(times[6:])[STEPS // 2],
        "first": sum(times[:6]),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measured(*sys.argv[1:])))
        return
    rows = []
    for network in NETWORKS:
        for method in METHODS:
            if method in ("hooks", "ghost") and not importlib.util.find_spec("opacus"):
                continue
            command = [sys.executable, __file__, network, method]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows.append({"network": network, "method": method} | json.loads(done.stdout))
            print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(ROOT / "benchmarks" / "results" / "networks.csv", index=False, float_format="%.4g")
    lines = ["| network | " + " | ".join(METHODS) + " |", "|---" * (1 + len(METHODS)) + "|"]
    for network, own in frame.groupby("network", sort=False):
        own = own.set_index("method")
        cells = [
            "{step:.3f}, {first:.1f}, {memory:.2f}".format(**own.loc[m]) if m in own.index else ""
            for m in METHODS
        ]
        lines.append(f"| {network} | " + " | ".join(cells) + " |")
    write_section("networks", "\n".join(["Step, first six, memory.", "", *lines]))


if __name__ == "__main__":
    main()
