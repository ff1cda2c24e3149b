"""Hierarchies and products of latents: nothing set, beside NUTS on the data.

Ten models of 5,000 records. DPSEP at epsilon 1 and 4, delta = 1e-5, 20 seeds a cell. A row has the
distance of each latent's mean from that of NUTS, and the ratio of both sds. Latents are compared
in unconstrained coordinates, so a scale is compared by its logarithm. NUTS draws 2,000 times
without privacy; its moments are in results/hierarchies_nuts.csv.

    python benchmarks/hierarchies.py             # what is not yet in results/hierarchies.csv
    python benchmarks/hierarchies.py --only horseshoe --seeds 3
    python benchmarks/hierarchies.py --report
"""

import argparse
import csv
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import ROOT, write_section
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.distributions import biject_to
from tqdm.auto import tqdm

from pyro_dp import DPSEP, Noise, PrivacyAccountant
from pyro_dp.infer.posterior.posterior import element_names

RESULTS = ROOT / "benchmarks" / "results" / "hierarchies.csv"
EXACT = RESULTS.with_name("hierarchies_nuts.csv")
EPSILONS = (4.0, 1.0)
SIZE, GROUPS, SIDE, KNOTS = 5000, 20, 4, 10
DRAWS, WARMUP = 2000, 500
FIELDS = ("model", "epsilon", "seed", "latent", "away", "width", "status", "seconds")
CELLS = torch.arange(SIDE**2).reshape(SIDE, SIDE)
NODE1 = torch.cat([CELLS[:, :-1].flatten(), CELLS[:-1].flatten()])
NODE2 = torch.cat([CELLS[:, 1:].flatten(), CELLS[1:].flatten()])
GRID = torch.linspace(0.0, 1.0, KNOTS, dtype=torch.float64)


@dataclass(frozen=True)
class Example:
    """A model, and a function that draws its arguments."""

    model: Callable
    draw: Callable[[], tuple[Tensor, ...]]


def features(dim: int) -> Tensor:
    return 2 * torch.rand(SIZE, dim) - 1


def chance(logits: Tensor) -> Tensor:
    return torch.bernoulli(torch.sigmoid(logits))


# Varying intercepts, centred and not.


def intercepts(x, group, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    effect = pyro.sample("effect", dist.Normal(mu, scale).expand([GROUPS]).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w + effect[group]), obs=y)


def intercepts_not_centred(x, group, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    z = pyro.sample("z", dist.Normal(torch.zeros(GROUPS), 1.0).to_event(1))
    effect = pyro.deterministic("effect", mu + scale * z)
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w + effect[group]), obs=y)


def intercepts_data():
    x, group = features(3), torch.randint(0, GROUPS, (SIZE,))
    effect = 0.5 * torch.randn(GROUPS) - 0.3
    return x, group, chance(x[:, 0] + effect[group])


# Correlated intercepts and slopes of eight groups.


def random_slopes(x, group, y):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, torch.tensor(2.0)))
    z = pyro.sample("z", dist.Normal(torch.zeros(8, 2), 1.0).to_event(2))
    effects = pyro.deterministic("effects", mu + z @ (scale.unsqueeze(-1) * corr).mT)
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("people", len(x)):
        mean = effects[group, 0] + effects[group, 1] * x
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def random_slopes_data():
    x, group = 2 * torch.rand(SIZE) - 1, torch.randint(8, (SIZE,))
    tril = torch.tensor([[0.8, 0.0], [0.4, 0.5]])
    effects = torch.tensor([1.0, -1.0]) + torch.randn(8, 2) @ tril.T
    return x, group, effects[group, 0] + effects[group, 1] * x + 0.6 * torch.randn(SIZE)


# Radon in houses of counties (Gelman & Hill, chapter 12).


def radon(county, floor, log_radon):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    a = pyro.sample("a", dist.Normal(mu, scale).expand([GROUPS]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with pyro.plate("houses", len(county)):
        pyro.sample("log_radon", dist.Normal(a[county] + b * floor, sigma), obs=log_radon)


def radon_data():
    county, floor = torch.randint(GROUPS, (SIZE,)), torch.bernoulli(torch.full((SIZE,), 0.2))
    a = 1.4 + 0.3 * torch.randn(GROUPS)
    return county, floor, a[county] - 0.7 * floor + 0.7 * torch.randn(SIZE)


# Eight schools (Rubin 1981), with pupils as records.


def eight_schools(school, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    eta = pyro.sample("eta", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    theta = pyro.deterministic("theta", mu + tau * eta)
    with pyro.plate("pupils", len(y)):
        pyro.sample("y", dist.Normal(theta[school], 10.0), obs=y)


def eight_schools_data():
    school = torch.randint(8, (SIZE,))
    theta = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12]) / 3
    return school, theta[school] + 10 * torch.randn(SIZE)


# Ten coefficients. Two of them matter (Carvalho, Polson & Scott 2010).


def horseshoe(x, y):
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    lam = pyro.sample("lambda", dist.HalfCauchy(torch.ones(10)).to_event(1))
    z = pyro.sample("z", dist.Normal(torch.zeros(10), 1.0).to_event(1))
    beta = pyro.deterministic("beta", tau * lam * z)
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def horseshoe_data():
    x = features(10)
    return x, 1.5 * x[:, 0] - x[:, 3] + 0.5 * torch.randn(SIZE)


# Counts of cases by area, where neighbours are alike (Morris et al. 2019).


def spatial(area, exposure, y):
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(SIDE**2), 10.0).to_event(1))
    pyro.factor("neighbours", -0.5 * (phi[NODE1] - phi[NODE2]).square().sum())
    pyro.factor("centred", dist.Normal(0.0, 0.001 * SIDE**2).log_prob(phi.sum()))
    effect = pyro.deterministic("effect", beta0 + sigma * phi)
    with pyro.plate("practices", len(y)):
        pyro.sample("y", dist.Poisson(exposure * effect[area].exp()), obs=y)


def spatial_data():
    area, exposure = torch.randint(SIDE**2, (SIZE,)), 1 + 4 * torch.rand(SIZE)
    column, row = area % SIDE, area // SIDE
    return area, exposure, torch.poisson(exposure * torch.exp(-0.5 + 0.3 * (column - row) / SIDE))


# A choice among three.


def multinomial(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(4, 2), 2.0).to_event(2))
    with pyro.plate("people", len(x)):
        logits = torch.cat([torch.zeros(*x.shape[:-1], 1), x @ w], -1)
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def multinomial_data():
    x = torch.cat([torch.ones(SIZE, 1), features(3)], 1)
    w = torch.tensor([[0.0, 0.3, -0.5], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.5, 0.5]])
    return x, dist.Categorical(logits=x @ w).sample().double()


# A curve between knots: a random walk of unknown step, and a Gaussian process.


def between_knots(x: Tensor) -> Tensor:
    """Weights of the knots in linear interpolation, (N, KNOTS)."""
    return (1 - (x.unsqueeze(-1) - GRID).abs() * (KNOTS - 1)).clamp(min=0.0)


def spline(x, y):
    start = pyro.sample("start", dist.Normal(0.0, 2.0))
    step = pyro.sample("step", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(KNOTS - 1), 1.0).to_event(1))
    rest = start + step * z.cumsum(-1)
    curve = pyro.deterministic("curve", torch.cat([start.unsqueeze(-1), rest], -1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(between_knots(x) @ curve, sigma), obs=y)


def gaussian_process(x, y):
    length = pyro.sample("length", dist.LogNormal(-1.5, 0.5))
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(KNOTS), 1.0).to_event(1))
    distance = (GRID.unsqueeze(-1) - GRID) / length
    kernel = variance * torch.exp(-0.5 * distance**2) + 1e-4 * torch.eye(KNOTS)
    curve = pyro.deterministic("curve", torch.linalg.cholesky(kernel) @ z)
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(between_knots(x) @ curve, noise), obs=y)


def curve_data():
    x = torch.rand(SIZE)
    return x, torch.sin(6 * x) + 0.3 * torch.randn(SIZE)


EXAMPLES = {
    "intercepts": Example(intercepts, intercepts_data),
    "intercepts, not centred": Example(intercepts_not_centred, intercepts_data),
    "random slopes": Example(random_slopes, random_slopes_data),
    "radon": Example(radon, radon_data),
    "eight schools": Example(eight_schools, eight_schools_data),
    "horseshoe": Example(horseshoe, horseshoe_data),
    "spatial": Example(spatial, spatial_data),
    "multinomial": Example(multinomial, multinomial_data),
    "spline": Example(spline, curve_data),
    "Gaussian process": Example(gaussian_process, curve_data),
}


def data(name: str) -> tuple[Tensor, ...]:
    """The same for all runs."""
    pyro.set_rng_seed(0)
    return EXAMPLES[name].draw()


def exact(name: str) -> pd.DataFrame:
    """Mean and sd of each unconstrained latent by NUTS on the data."""
    pyro.clear_param_store()
    arguments, model = data(name), EXAMPLES[name].model
    kernel = NUTS(model, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
    chain = MCMC(kernel, num_samples=DRAWS, warmup_steps=WARMUP, disable_progbar=True)
    chain.run(*arguments)
    trace = pyro.poutine.trace(model).get_trace(*arguments)
    rows = []
    for latent, draws in chain.get_samples().items():
        own = biject_to(trace.nodes[latent]["fn"].support).inv(draws)
        flat, names = own.reshape(DRAWS, -1), element_names(latent, own.shape[1:])
        moments = zip(names, flat.mean(0).tolist(), flat.std(0).tolist(), strict=True)
        rows += [(name, *each) for each in moments]
    return pd.DataFrame(rows, columns=["model", "latent", "mean", "sd"])


def measured(name: str, epsilon: float, seed: int, reference: pd.DataFrame) -> list[tuple]:
    """A row for each latent."""
    arguments, model = data(name), EXAMPLES[name].model
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    inference = DPSEP(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference.run(*arguments, progress=False)
        found = inference.posterior()
    seconds, status = time.perf_counter() - began, found.status.level
    rows = []
    for latent, mean, sd in zip(
        found.names, found.mean.tolist(), found.stddev.tolist(), strict=True
    ):
        own = reference.loc[latent]
        rows.append((latent, (mean - own["mean"]) / own["sd"], sd / own["sd"], status, seconds))
    return rows


def run(names: list[str], seeds: int) -> None:
    """Append what is missing."""
    known = pd.read_csv(EXACT) if EXACT.exists() else pd.DataFrame({"model": []})
    for name in [each for each in names if each not in set(known.model)]:
        known = pd.concat([known, exact(name)])
        known.round(5).to_csv(EXACT, index=False)
    if not RESULTS.exists():
        RESULTS.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(RESULTS)[list(FIELDS[:3])].itertuples(index=False, name=None))
    cells = list(itertools.product(names, EPSILONS, range(seeds)))
    for name, epsilon, seed in tqdm([cell for cell in cells if cell not in done]):
        reference = known[known.model == name].set_index("latent")
        rows = measured(name, epsilon, seed, reference)
        with RESULTS.open("a", newline="") as file:
            for latent, away, width, status, seconds in rows:
                numbers = f"{away:.4g}", f"{width:.4g}", status, f"{seconds:.1f}"
                csv.writer(file, lineterminator="\n").writerow(
                    [name, epsilon, seed, latent, *numbers]
                )


def table() -> str:
    """For each cell: how far means are, how wide intervals are, and what the status says."""
    found = pd.read_csv(RESULTS)
    found["near"] = (found.away.abs() <= 0.5) & ((found.width - 1).abs() <= 0.5)
    lines = [
        "| model | epsilon | runs | median distance | largest | median width "
        "| within .5 sd | ok | s |"
    ]
    lines.append("|---" * 9 + "|")
    for (name, epsilon), cell in found.groupby(["model", "epsilon"], sort=False):
        ok = cell.groupby("seed").status.first().eq("ok")
        lines.append(
            f"| {name} | {epsilon:g} | {len(ok)} | {cell.away.abs().median():.2f} "
            f"| {cell.away.abs().max():.1f} | {cell.width.median():.2f} "
            f"| {cell.near.mean():.0%} | {ok.sum()} | {cell.seconds.median():.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if not options.report:
        run(options.only, options.seeds)
    print(table())
    write_section("hierarchies", table())


if __name__ == "__main__":
    main()
