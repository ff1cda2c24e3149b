"""Do VIPS's intervals cover the truth? Regressions, 95% intervals, with the noise and without.

Nine standard normal features and an intercept are clipped to norm 5 and divided by it. Coefficients
are N(0, 0.7^2) before that. Labels are drawn from the model; those of the linear regression have
noise 0.5. Runs have delta=1e-5, add or remove one record, all records in every step. Settings are
defaults, except that the logistic regression takes 30 steps. It runs with its Gamma(1, 1) prior on
the weights' precision, and with a practically fixed precision, 1 before the rows were scaled.
Each data set has ten coefficients, and a noise of its own.

    python benchmarks/vips_coverage.py
"""

import argparse

import torch
from common import write_section
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import VIPS, Noise, PrivacyAccountant
from pyro_dp.utils.linalg import clipped_rows
from pyro_dp.vips import ConjugateModel, LinearRegression, LogisticRegression

DIM, RADIUS, STEPS = 10, 5.0, 30
SPREAD, NOISE, LABELS = 0.7, 0.5, 10.0
KNOWN = 1e6  # concentration of a prior that practically fixes the precision
CELLS = [(20_000, 1.0), (20_000, 0.3), (5_000, 1.0), (5_000, 0.3), (5_000, 0.1)]
MODELS = {
    "logistic": lambda: LogisticRegression(DIM),
    "logistic, fixed precision": lambda: LogisticRegression(
        DIM, concentration=KNOWN, rate=KNOWN * RADIUS**2
    ),
    "linear": lambda: LinearRegression(DIM, x_bound=1.0, y_bound=LABELS),
}


def simulate(kind: str, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows within the unit ball (N, 10), labels (N,), and the coefficients (10,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, DIM - 1, generator=generator)
    x = clipped_rows(torch.cat([x, torch.ones(size, 1)], dim=1), RADIUS) / RADIUS
    w = SPREAD * RADIUS * torch.randn(DIM, generator=generator)
    if kind == "linear":
        return x, x @ w + NOISE * torch.randn(size, generator=generator), w
    return x, torch.bernoulli(torch.sigmoid(x @ w), generator=generator), w


def covered(model: ConjugateModel, kind: str, size: int, epsilon: float, seed: int) -> Tensor:
    """Whether each coefficient is in the plain and noise-aware intervals, and not ok: (10, 3)."""
    x, y, w = simulate(kind, size, seed)
    vips = VIPS(
        model,
        accountant=PrivacyAccountant(epsilon=epsilon, delta=1e-5),
        num_steps=1 if kind == "linear" else STEPS,
        noise=Noise(source=seed),
    )
    vips.run(x, y, progress=False)
    lower, upper = vips.posterior(noise_aware=False).intervals()["weights"]
    plain = (lower < w) & (w < upper)
    posterior = vips.posterior()
    lower, upper = posterior.intervals()["weights"]
    to_check = torch.full_like(plain, not posterior.status.is_ok)
    return torch.stack([plain, (lower < w) & (w < upper), to_check], dim=1)


def row(kind: str, size: int, epsilon: float, seeds: int) -> list[str]:
    found = [covered(MODELS[kind](), kind, size, epsilon, seed) for seed in range(seeds)]
    plain, aware, to_check = torch.cat(found).T
    parts = [plain, aware, aware[~to_check], aware[to_check]]
    shares = [f"{part.double().mean():.3f}" if len(part) else "" for part in parts]
    return [kind, f"{size:,}", f"{epsilon:g}", *shares, f"{to_check.double().mean():.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=100, help="data sets of a cell (default 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    header = [
        "model",
        "N",
        "epsilon",
        "plain",
        "noise-aware",
        "not marked",
        "marked",
        "share marked",
    ]
    lines = [header, ["---"] * len(header)]
    for kind in MODELS:
        for size, epsilon in tqdm(CELLS, desc=kind):
            lines.append(row(kind, size, epsilon, options.seeds))
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(table)
    write_section("vips_coverage", table)


if __name__ == "__main__":
    main()
