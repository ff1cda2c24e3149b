"""Whole steps of DPSVI against Pyro's non-private SVI.step, and against a compiled gradient.

    python benchmarks/speed.py                   # prints the table and writes it to RESULTS.md
    python benchmarks/speed.py --device cuda     # the same table there; prints only

A step is everything: sampling records, gradient, clip, noise, accounting, optimizer. Contenders
take turns in blocks of steps within one process, on one thread; the table has the median step. Each
setting runs in a process of its own; compile time (the whole first step) and peak memory are
apart. The floor is a compiled gradient of the batch's log likelihood in plain torch, without
privacy, optimizer or draws, on rows that are at hand.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro import poutine
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.nn import functional

from pyro_dp import Execution, Noise, PaperDPSVI, PrivacyAccountant
from pyro_dp.graphs.tracing import Compiler, trace

SETTINGS = ("logistic", "network", "vae", "mixture")
CONTENDERS = ("SVI", "SVI, no validation", "none", "trace", "compile")
SECURE = ", secure"  # after a contender's name
BLOCK, BLOCKS, WARM = 20, 10, 10
# ms per step of d3p (JAX) on the same kind of machine, one core: Poisson batches, a plain slice.
D3P = {
    ("logistic", 200): (5.2, 0.33),
    ("logistic", 2000): (9.2, 3.1),
    ("network", 200): (7.1, 2.5),
    ("network", 2000): (69.0, 59.0),
}


@dataclass
class Setting:
    """A model and its data.

    :param floor: log likelihood of a batch, from latents and rows, in plain torch.
    :param latents: shapes of these latents.
    """

    model: Callable
    guide: Callable
    loss: ELBO
    data: tuple[Tensor, ...]
    floor: Callable
    latents: list[tuple[int, ...]]


def logistic(batch: int, device: str) -> Setting:
    def model(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(x), subsample_size=batch, device=device) as i:
            pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    def floor(latents, rows):
        (w,), (x, y) = latents, rows
        return -functional.binary_cross_entropy_with_logits(x @ w, y, reduction="sum")

    x = torch.randn(50_000, 100, device=device)
    y = torch.bernoulli(torch.sigmoid(x @ torch.randn(100, device=device) / 10))
    return Setting(model, AutoNormal(model), Trace_ELBO(), (x, y), floor, [(100,)])


def network(batch: int, device: str) -> Setting:
    def predict(x, w1, b1, w2, b2):
        return torch.tanh(x @ w1 + b1) @ w2 + b2

    def model(x, y):
        zero = x.new_zeros(())
        w1 = pyro.sample("w1", dist.Normal(zero, 1.0).expand([9, 50]).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(zero, 1.0).expand([50]).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(zero, 1.0).expand([50]).to_event(1))
        b2 = pyro.sample("b2", dist.Normal(zero, 1.0))
        with pyro.plate("data", len(x), subsample_size=batch, device=device) as i:
            pyro.sample("y", dist.Normal(predict(x[i], w1, b1, w2, b2), 0.5), obs=y[i])

    def floor(latents, rows):
        x, y = rows
        return -2 * (predict(x, *latents) - y).square().sum()

    x = torch.randn(45_000, 9, device=device)
    data = x, torch.sin(x.sum(1))
    return Setting(model, AutoNormal(model), Trace_ELBO(), data, floor, [(9, 50), (50,), (50,), ()])


def vae(batch: int, device: str) -> Setting:
    encoder = nn.Sequential(nn.Linear(784, 400), nn.Softplus(), nn.Linear(400, 40)).to(device)
    decoder = nn.Sequential(nn.Linear(20, 400), nn.Softplus(), nn.Linear(400, 784)).to(device)

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x), subsample_size=batch, device=device) as i:
            images = x[i]
            prior = dist.Normal(x.new_zeros(len(images), 20), 1.0).to_event(1)
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=images)

    def guide(x):
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x), subsample_size=batch, device=device) as i:
            loc, scale = encoder(x[i]).chunk(2, dim=-1)
            pyro.sample("z", dist.Normal(loc, functional.softplus(scale)).to_event(1))

    def floor(latents, rows):
        a, b, c, d, e, f, g, h = latents
        (x,) = rows
        loc, scale = (functional.softplus(x @ a.T + b) @ c.T + d).chunk(2, dim=-1)
        scale = functional.softplus(scale)
        z = loc + scale * torch.ones_like(loc)
        logits = functional.softplus(z @ e.T + f) @ g.T + h
        divergence = (loc**2 + scale**2 - 1).sum() / 2 - scale.log().sum()
        return -functional.binary_cross_entropy_with_logits(logits, x, reduction="sum") - divergence

    shapes = [tuple(p.shape) for net in (encoder, decoder) for p in net.parameters()]
    x = torch.bernoulli(torch.full((60_000, 784), 0.3, device=device))
    return Setting(model, guide, Trace_ELBO(), (x,), floor, shapes)


def mixture(batch: int, device: str) -> Setting:
    def model(x):
        weights = pyro.sample("weights", dist.Dirichlet(x.new_ones(5)))
        with pyro.plate("components", 5):
            locs = pyro.sample("locs", dist.Normal(x.new_zeros(2), 3.0).to_event(1))
            scales = pyro.sample("scales", dist.LogNormal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x), subsample_size=batch, device=device) as i:
            z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
            component = dist.Normal(locs[z], scales[z].unsqueeze(-1)).to_event(1)
            pyro.sample("x", component, obs=x[i])

    def floor(latents, rows):
        weights, locs, scales = latents
        (x,) = rows
        scaled = (x.unsqueeze(1) - locs) / scales.exp().unsqueeze(-1)
        each = -scaled.square().sum(-1) / 2 - 2 * scales + weights.log_softmax(0)
        return each.logsumexp(1).sum()

    x = torch.randn(20_000, 2, device=device) + 2 * torch.randint(-1, 2, (20_000, 2), device=device)
    guide = AutoNormal(poutine.block(model, hide=["z"]))
    loss = TraceEnum_ELBO(max_plate_nesting=1)
    return Setting(model, guide, loss, (x,), floor, [(5,), (5, 2), (5,)])


MAKE = {"logistic": logistic, "network": network, "vae": vae, "mixture": mixture}


class Contender:
    """A method of taking steps, with a parameter store of its own."""

    def __init__(self, name: str, setting: str, batch: int, device: str):
        self._store = pyro.get_param_store()
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        problem = MAKE[setting](batch, device)
        self._data, self._validates = problem.data, name == "SVI"
        adam = pyro.optim.Adam({"lr": 1e-3})
        if name.startswith("SVI"):
            self.inference = SVI(problem.model, problem.guide, adam, problem.loss)
        else:
            self.inference = PaperDPSVI(
                problem.model,
                problem.guide,
                adam,
                problem.loss,
                accountant=PrivacyAccountant(epsilon=1000.0),
                noise=Noise(1.0, source="system" if name.endswith(SECURE) else None),
                execution=Execution(jit=name.removesuffix(SECURE)),
            )
        start = time.perf_counter()
        with pyro.validation_enabled(self._validates):
            self.inference.step(*self._data)
        self.first = time.perf_counter() - start
        self._state = self._store.get_state()

    def times(self, count: int, device: str) -> list[float]:
        """The times of so many steps, in ms."""
        results = []
        with self._store.scope(self._state) as state, pyro.validation_enabled(self._validates):
            for _ in range(count):
                start = time.perf_counter()
                self.inference.step(*self._data)
                if device == "cuda":
                    torch.cuda.synchronize()
                results.append(1e3 * (time.perf_counter() - start))
        self._state = state
        return results


def gradient_times(contender: Contender, setting: str, batch: int, device: str) -> tuple:
    """The clipped gradient sum of a compiled step, and the floor, on rows at hand: medians, ms."""
    problem = MAKE[setting](batch, device)
    rows = [x[:batch].contiguous() for x in problem.data]
    latents = [0.1 * torch.randn(shape, device=device) for shape in problem.latents]

    def gradient(*inputs: Tensor) -> list[Tensor]:
        given, rows = list(inputs[: len(latents)]), list(inputs[len(latents) :])
        return list(torch.func.grad(lambda z: problem.floor(z, rows))(given))

    inputs = [*latents, *rows]
    floor = Compiler(enabled=True)(trace(gradient, inputs), inputs)
    passes = contender.inference._kept.prepared.step._passes
    captured = []
    graph, passes._graph = passes._graph, lambda *given: captured.append(given) or graph(*given)
    contender.times(1, device)
    passes._graph = graph
    results = {}
    with torch.no_grad():
        for _ in range(BLOCKS):
            calls = ((graph, "sum", captured[0]), (floor, "floor", inputs))
            for function, name, given in calls:
                for _ in range(BLOCK):
                    start = time.perf_counter()
                    function(*given)
                    if device == "cuda":
                        torch.cuda.synchronize()
                    results.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
    return statistics.median(results["sum"]), statistics.median(results["floor"])


def run(setting: str, batch: int, device: str, names: list[str]) -> dict:
    """One cell of the table, in this process."""
    torch.set_num_threads(1)
    contenders = {name: Contender(name, setting, batch, device) for name in names}
    times = {name: [] for name in names}
    for name in names:
        contenders[name].times(WARM, device)
    for _ in range(BLOCKS):
        for name in names:
            times[name] += contenders[name].times(BLOCK, device)
    result = {
        "ms": {name: statistics.median(each) for name, each in times.items()},
        "first": {name: each.first for name, each in contenders.items()},
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if len(names) > 1 and "compile" in names:
        result["gradient"] = gradient_times(contenders["compile"], setting, batch, device)
    if setting == "logistic" and batch == 200 and "compile" in names:
        start = time.perf_counter()
        contenders["compile"].times(2000, device)
        result["2000 steps"] = time.perf_counter() - start
    return result


def in_process(setting: str, batch: int, device: str, names: list[str]) -> dict:
    command = [sys.executable, __file__, "--cell", setting, str(batch), "--device", device]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [*command, "--contenders", *names],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ).stdout
    return json.loads(output.splitlines()[-1])


def table(cells: dict[tuple[str, int], dict]) -> str:
    head = ["setting", "batch", *CONTENDERS, "trace / SVI", "compile / SVI", "clipped sum / floor"]
    head += [
        "d3p: Poisson, slice",
        "first step: trace, compile (s)",
        "peak memory: SVI, compile (MB)",
    ]
    lines = [head, ["---"] * len(head)]
    for (setting, batch), cell in cells.items():
        ms, (clipped, floor) = cell["ms"], cell["gradient"]
        lines.append(
            [
                setting,
                str(batch),
                *(f"{ms[name]:.3g}" if name in ms else "-" for name in CONTENDERS),
                f"{ms['trace'] / ms['SVI']:.2f}",
                f"{ms['compile'] / ms['SVI']:.2f}",
                f"{clipped:.3g} / {floor:.3g} = {clipped / floor:.1f}",
                ", ".join(f"{x:g}" for x in D3P.get((setting, batch), ())) or "-",
                f"{cell['first']['trace']:.1f}, {cell['first']['compile']:.1f}",
                ", ".join(f"{mb:.0f}" for mb in cell["peak"].values()),
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    whole = cells.get(("logistic", 200), {}).get("2000 steps")
    if whole:
        text += f"\n\n2,000 compiled steps of logistic regression, batch 200: {whole:.2f} s."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--batches", nargs="+", type=int, default=[200, 2000])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cell", nargs=2, metavar=("SETTING", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    options = parser.parse_args()
    if options.cell:
        setting, batch = options.cell
        print(json.dumps(run(setting, int(batch), options.device, options.contenders)))
        return
    cells = {}
    for setting in options.settings:
        for batch in options.batches:
            # Gradients of every record of a VAE, stored: half a gigabyte for 200 records.
            names = [name for name in CONTENDERS if (setting, name) != ("vae", "none")]
            cell = in_process(setting, batch, options.device, names)
            cell["peak"] = {
                name: in_process(setting, batch, options.device, [name])["memory"]
                for name in ("SVI", "compile")
            }
            cells[setting, batch] = cell
            print(table(cells), flush=True)
    whole = len(options.settings) == len(SETTINGS) and options.batches == [200, 2000]
    if whole and options.device == "cpu":
        write_section("speed", table(cells))


if __name__ == "__main__":
    main()
