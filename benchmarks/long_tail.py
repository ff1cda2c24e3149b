"""A feature with a long tail, nothing set: is a run that misses the exact slope still ok?

15,000 clients have up to 79 contacts (log normal), and 21 have more than 40. Visits are Poisson,
and their rate goes with log1p(contacts). The model has a rate that is log linear in contacts
instead. So the 21 clients decide the exact slope. "Capped": contacts are at most 20, declared
beforehand. "Up to 40": the 21 clients are left out, and the tail is shorter.

"Off" is the largest distance of a coefficient's mean from the exact posterior's mean (Laplace), in
standard deviations of the private posterior. "Width" is the median of its standard deviations over
the exact ones. We use delta=1e-5, add or remove one record, prior N(0, 2^2), and 20 seeds. The
significance of extreme records was chosen on data sets like this one, and on protein and randhie of
no_settings.py.

    python benchmarks/long_tail.py --write
"""

import argparse
import itertools
import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

from pyro_dp import DPSVI, Noise, PrivacyAccountant

EPSILONS = (0.3, 1.0, 4.0)
SIZE, DIM, FAR = 15_000, 3, 40
HEAD = ["contacts", "epsilon", "slope", "off: median (largest)", "95% hold", "width", "ok"]


def clients(kind: str) -> tuple[Tensor, Tensor]:
    """Features (N, 3) and visits (N,)."""
    rng = np.random.default_rng(183)
    contacts = np.floor(np.exp(math.log(3) + 0.87 * rng.standard_normal(SIZE)))
    other = rng.standard_normal(SIZE)
    visits = rng.poisson(np.exp(-1 + 0.8 * np.log1p(contacts) + 0.3 * other))
    kept = contacts <= FAR if kind == "up to 40" else np.ones(SIZE, dtype=bool)
    shown = np.minimum(contacts, 20) if kind == "capped" else contacts
    x = np.c_[shown / 10, other, np.ones(SIZE)]
    return torch.tensor(x[kept]), torch.tensor(visits[kept], dtype=torch.float64)


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(DIM), 2.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).clamp(max=12.0).exp()), obs=y)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode, and standard deviations of the Gaussian there, by Newton's method."""
    w = torch.zeros(DIM)
    for _ in range(100):
        mean = (x @ w).exp()
        precision = (x * mean[:, None]).mT @ x + torch.eye(DIM) / 4
        step = torch.linalg.solve(precision, x.mT @ (y - mean) - w / 4)
        w = w + step * min(1.0, 2.0 / step.norm().item())
    return w, precision.inverse().diagonal().sqrt()


def measured(x: Tensor, y: Tensor, epsilon: float, seed: int) -> tuple[Tensor, Tensor, bool]:
    """Means, standard deviations, and whether the run is ok."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    svi = DPSVI(
        model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=seed)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi.run(x, y, progress=False)
    found = svi.posterior()
    return found.mean, found.stddev, found.status.is_ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    lines = [HEAD, ["---"] * len(HEAD)]
    for kind, epsilon in itertools.product(("as they are", "capped", "up to 40"), EPSILONS):
        x, y = clients(kind)
        mean, sd = exact(x, y)
        runs = [measured(x, y, epsilon, seed) for seed in range(options.seeds)]
        means, sds = (torch.stack(each) for each in zip(*(run[:2] for run in runs), strict=True))
        off = ((means - mean) / sds).abs()
        farthest = off.amax(dim=1)
        figures = [f"{mean[0]:.2f}", f"{farthest.median():.1f} ({farthest.max():.1f})"]
        figures += [f"{(off <= 1.96).double().mean():.2f}", f"{(sds / sd).median():.1f}"]
        figures.append(f"{sum(ok for *_, ok in runs)} of {len(runs)}")
        lines.append([kind, f"{epsilon:g}", *figures])
        print(" | ".join(lines[-1]), flush=True)
    if options.write:
        write_section("long tail", "\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
