"""How long does a private step of a network take, beside Opacus and Pyro's SVI?

The same network, batches of 200 of 4,000 records, Adam, cross entropy, delta = 1e-5. Each run is a
process with one thread.

* step: the median of ten steps, in seconds of processor time.
* first: the sum of the first six steps.
* memory: the peak of the process in GB.

Opacus has two modes: hooks hold the gradients of all records, and ghost clipping computes norms.
It is no dependency of the package: without it, its columns are empty.

Two of Pyro's examples follow, with their own sizes: cvae, written anew from its tutorial, whose
masks are data, and lda. Opacus cannot take them.

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
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "tests"))

from zoo import documents

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


class AutoEncoder(nn.Module):
    """The loss of each record: a VAE as in Pyro's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(784, 400), nn.Softplus())
        self.encoder = nn.ModuleList([hidden, nn.Linear(400, 50), nn.Linear(400, 50)])
        self.decoder = nn.Sequential(nn.Linear(50, 400), nn.Softplus(), nn.Linear(400, 784))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder[0](x)
        return self.encoder[1](hidden), self.encoder[2](hidden).exp()

    def forward(self, x: Tensor) -> Tensor:
        q = dist.Normal(*self.encode(x))
        z = q.rsample()
        seen = dist.Bernoulli(logits=self.decoder(z), validate_args=False).log_prob(x)
        return (q.log_prob(z) - dist.Normal(0.0, 1.0).log_prob(z)).sum(-1) - seen.sum(-1)

    def pair(self, own: int | None) -> tuple[Callable, Callable]:
        def model(x: Tensor, _: Tensor) -> None:
            pyro.module("decoder", self.decoder)
            with pyro.plate("records", len(x), subsample_size=own) as i:
                z = pyro.sample("z", dist.Normal(torch.zeros(50), 1.0).expand([50]).to_event(1))
                pixels = dist.Bernoulli(logits=self.decoder(z), validate_args=False)
                pyro.sample("x", pixels.to_event(1), obs=x[i])

        def guide(x: Tensor, _: Tensor) -> None:
            pyro.module("encoder", self.encoder)
            with pyro.plate("records", len(x), subsample_size=own) as i:
                pyro.sample("z", dist.Normal(*self.encode(x[i])).to_event(1))

        return model, guide


def wide(inputs: int, *outputs: int) -> nn.ModuleList:
    """Two hidden layers of 500 units, and layers of outputs."""
    hidden = nn.Linear(inputs, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU()
    return nn.ModuleList([nn.Sequential(*hidden), *(nn.Linear(500, each) for each in outputs)])


class Completion(nn.Module):
    """cvae: three quarters of a digit, whose pixels are -1, follow from one quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline, self.decoder = wide(784, 784), wide(200, 784)
        self.prior, self.recognition = wide(784, 200, 200), wide(784, 200, 200)
        self.baseline.requires_grad_(False)

    @staticmethod
    def encode(net: nn.ModuleList, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        image = x.clone()
        image[x == -1] = y[x == -1]
        hidden = net[0](image.view(-1, 784))
        return net[1](hidden), net[2](hidden).exp()

    def model(self, x: Tensor, y: Tensor) -> None:
        pyro.module("net", self.train())
        with pyro.plate("data"):
            guess = self.baseline[1](self.baseline[0](x.view(-1, 784))).sigmoid().view(x.shape)
            z = pyro.sample("z", dist.Normal(*self.encode(self.prior, x, guess)).to_event(1))
            pixels = self.decoder[1](self.decoder[0](z)).sigmoid()
            unseen = pixels[(x == -1).view(-1, 784)].view(len(x), -1)
            seen = y[x == -1].view(len(x), -1)
            pyro.sample("y", dist.Bernoulli(unseen, validate_args=False).to_event(1), obs=seen)

    def guide(self, x: Tensor, y: Tensor) -> None:
        with pyro.plate("data"):
            pyro.sample("z", dist.Normal(*self.encode(self.recognition, x, y)).to_event(1))


def completion(method: str) -> tuple:
    net, y = Completion(), torch.rand(RECORDS, 28, 28)
    x = y.clone()
    x[:, 14:], x[:, :14, 14:] = -1, -1
    data = (x[:BATCH], y[:BATCH]) if method == "SVI" else (x, y)
    return net.model, net.guide, Trace_ELBO(), data, {"sampling": BATCH / RECORDS}


def topics(method: str) -> tuple:
    vars(documents).update(WORDS=1024, TOPICS=8, LENGTH=64)
    return *documents.lda(), TraceEnum_ELBO(), (*documents.lda_data(1000), 32), {}


EXAMPLES = {"cvae": completion, "lda": topics}
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
    "VAE": (AutoEncoder, lambda: torch.rand(RECORDS, 784)),
}


def by_pyro(method: str, network: str) -> Callable[[], object]:
    if network in EXAMPLES:
        return stepping(method, *EXAMPLES[network](method))
    net, x, y = made(network)
    own, data = BATCH if method == "SVI" else None, {"sampling": BATCH / RECORDS}
    if isinstance(net, AutoEncoder):
        return stepping(method, *net.pair(own), Trace_ELBO(), (x, y), data)

    def model(x: Tensor, y: Tensor) -> None:
        pyro.module("net", net)
        with pyro.plate("records", len(x), subsample_size=own) as i:
            pyro.sample("y", dist.Categorical(logits=net(x[i])), obs=y[i])

    def guide(x: Tensor, y: Tensor) -> None:
        pass

    return stepping(method, model, guide, Trace_ELBO(), (x, y), data)


def stepping(
    method: str, model: Callable, guide: Callable, loss: ELBO, data: tuple, options: dict
) -> Callable[[], object]:
    parts = model, guide, Adam({"lr": 1e-3}), loss
    if method == "SVI":
        svi = SVI(*parts)
    else:
        accountant, noise = PrivacyAccountant(delta=1e-5), Noise(1.0, source=0)
        svi = DPSVI(*parts, accountant=accountant, noise=noise, clip=1.0, **options)
    return lambda: svi.step(*data)


class MeanLoss:
    """The mean loss; the network returns each record's."""

    reduction = "mean"

    def __call__(self, losses: Tensor, _: Tensor) -> Tensor:
        return losses.mean() if self.reduction == "mean" else losses


def made(network: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, draw = NETWORKS[network]
    return make(), draw(), torch.randint(0, 2, (RECORDS,))


def by_torch(mode: str, network: str) -> Callable[[], object]:
    """Plain steps, or those of a mode of Opacus."""
    net, x, y = made(network)
    loss = MeanLoss() if isinstance(net, AutoEncoder) else nn.CrossEntropyLoss()
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
    by = by_pyro if method in ("SVI", "DPSVI") else by_torch
    step = by(method, network)
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
    for network in (*NETWORKS, *EXAMPLES):
        for method in ("SVI", "DPSVI") if network in EXAMPLES else METHODS:
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
