"""Private Bayesian networks on UCI regressions: Tables 3, 4, 8 and 9 of DP-SEP.

The tables have test RMSE in the target's units and test log-likelihood in nats per record, after
Vinaroz & Park (DP-SEP, TMLR 2022, arXiv 2111.13219). Networks have one hidden layer of 50 rectified
units (100 for Protein), Gaussian priors and Gaussian noise. Methods are SEP, SEP with clipping,
DPSEP, and DPSVI for comparison, at epsilon=1, delta=1e-5, add or remove one record. Splits are
those of the PBP papers.

    f(x) = relu(x W1 / sqrt(d) + b1) w2 / sqrt(h) + b2,   all weights N(0, 1)

The scaling keeps the norm of a record's Jacobian near 1 whatever d and h, so that one C serves all.
RMSE is that of the network at the posterior mean, the log-likelihood that of the density averaged
over draws of the posterior.

Some numbers are assumed to be public, as in the paper, and epsilon does not cover them. These are
the moments of the training part that standardise inputs and target, N, the noise's standard
deviation, and the settings. The settings were chosen on a tenth of the training part of split 0
(--tune), never on test parts. Rows "nothing set" set only the start of the guide, which
distinguishes hidden units.

--elbo compares ELBOs on the training part of split 0. DPSVI has nothing set and epsilon 4. SVI
takes 2,000 full steps of Adam from the same start.
"""

import argparse
import math
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from torch import Tensor

from pyro_dp import DPSEP, DPSVI, Factors, Noise, PaperDPSEP, PaperDPSVI, PrivacyAccountant

ROOT = Path(__file__).resolve().parents[1]
EPSILON, DELTA, DRAWS = 1.0, 1e-5, 100
NOTHING_SET = {"DPSEP, nothing set": DPSEP, "DPSVI, nothing set": DPSVI}
METHODS = ("SEP", "clipped SEP", "DPSEP", "DPSVI", *NOTHING_SET)
# Standard deviation of the noise on the standardised target, hidden units, rate of minibatches.
DATA = {
    "kin8nm": (0.6, 50, 0.2),
    "power": (0.3, 50, 0.2),
    "wine_red": (0.8, 50, 0.2),
    "naval": (0.8, 50, 0.2),
    "protein": (0.8, 100, 0.1),
}
# In units of 1 / noise: norms of residuals and of precisions' square roots are.
BOUND_SEP, BOUND_SVI = 1.5, 1.0
WEIGHT = 0.5  # kappa C
STEPS_SEP, STEPS_PLAIN = 100, 40
STEPS_ELBO, EPSILON_ELBO = 2000, 4.0
STEPS_SVI, RATE_SVI, STEP_SIZE, DECAY, INITIAL_SD = 1000, 0.1, 0.1, 0.1, 0.05


def predict(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    hidden = torch.relu(x @ w1 / math.sqrt(w1.shape[-2]) + b1.unsqueeze(-2))
    return (hidden @ w2.unsqueeze(-1)).squeeze(-1) / math.sqrt(w1.shape[-1]) + b2.unsqueeze(-1)


def network(inputs: int, hidden: int, noise: float):
    def model(x, y):
        w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([inputs, hidden]).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(0.0, 1.0).expand([hidden]).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(0.0, 1.0).expand([hidden]).to_event(1))
        b2 = pyro.sample("b2", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", dist.Normal(predict(x[i], w1, b1, w2, b2), noise), obs=y[i])

    return model


def fit_sep(model, x, y, noise: float, rate: float, method: str, seed: int) -> Tensor:
    """Posterior mean, then draws, (1 + DRAWS, d), in the order of the model's sites."""
    private = method == "DPSEP"
    clipped = method != "SEP"
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    bound = BOUND_SEP / noise if clipped else math.inf
    inference = PaperDPSEP(
        model,
        guide,
        accountant=PrivacyAccountant(epsilon=EPSILON if private else None, delta=DELTA),
        num_steps=STEPS_SEP if private else STEPS_PLAIN,
        noise=Noise(None if private else 0, source=seed),
        clip=bound,
        factors=Factors(weight=WEIGHT / bound if clipped else None),
        sampling=rate if private else 1.0,
    )
    inference.run(x, y, progress=False)
    posterior = inference.posterior(noise_aware=False)
    return torch.cat([posterior.mean.unsqueeze(0), posterior.sample((DRAWS,))])


def fit_svi(model, x, y, noise: float, seed: int) -> Tensor:
    """As :func:`fit_sep`."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=INITIAL_SD)
    adam = {"lr": STEP_SIZE, "lrd": DECAY ** (1 / STEPS_SVI), "clip_norm": math.inf}
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam),
        Trace_ELBO(),
        accountant=PrivacyAccountant(epsilon=EPSILON, delta=DELTA),
        num_steps=STEPS_SVI,
        sampling=RATE_SVI,
        clip=BOUND_SVI / noise,
        noise=Noise(source=seed),
    )
    inference.run(x, y, progress=False)
    with torch.no_grad():
        draws = [guide.median(), *(guide() for _ in range(DRAWS))]
    return torch.stack([torch.cat([v.flatten() for v in draw.values()]) for draw in draws])


def fit_automatic(kind: type, model, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """As :func:`fit_sep`, with no setting but a start that tells hidden units apart."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    accountant = PrivacyAccountant(epsilon=EPSILON, delta=DELTA)
    inference = kind(model, guide, accountant=accountant, noise=Noise(source=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inference.run(x, y, progress=False)
        posterior = inference.posterior(noise_aware=False)
    return torch.cat([posterior.mean.unsqueeze(0), posterior.sample((DRAWS,))])


def scores(draws: Tensor, x: Tensor, y: Tensor, hidden: int, noise: float, scale: float):
    """Test RMSE in the target's units, and mean log-likelihood of a record in nats."""
    inputs = x.shape[1]
    sizes = [inputs * hidden, hidden, hidden, 1]
    w1, b1, w2, b2 = draws.split(sizes, dim=1)
    w1 = w1.reshape(-1, inputs, hidden)
    outputs = torch.stack([predict(x, *w) for w in zip(w1, b1, w2, b2.squeeze(1), strict=True)])
    rmse = (outputs[0] - y).square().mean().sqrt() * scale
    densities = torch.distributions.Normal(outputs[1:], noise).log_prob(y)
    log_likelihood = densities.logsumexp(0).mean() - math.log(len(draws) - 1) - math.log(scale)
    return rmse.item(), log_likelihood.item()


def run(name: str, folder: Path, split: int, method: str, tune: bool = False) -> list:
    noise, hidden, rate = DATA[name]
    (x, y), (test_x, test_y), scale = load(name, folder, split, tune)
    pyro.clear_param_store()
    pyro.set_rng_seed(split)
    model, start = network(x.shape[1], hidden, noise), time.time()
    if method == "DPSVI":
        draws = fit_svi(model, x, y, noise, split)
    elif method in NOTHING_SET:
        draws = fit_automatic(NOTHING_SET[method], model, x, y, split)
    else:
        draws = fit_sep(model, x, y, noise, rate, method, split)
    seconds = time.time() - start
    return [name, method, split, *scores(draws, test_x, test_y, hidden, noise, scale), seconds]


def load(name: str, folder: Path, split: int, tune: bool):
    """Standardised training and test parts, and the target's standard deviation."""
    table = pd.read_csv(folder / f"{name}.csv.gz").to_numpy()
    test = np.zeros(len(table), dtype=bool)
    test[np.load(folder / f"{name}_splits.npz")["test_index"][split]] = True
    train, test = table[~test], table[test]
    if tune:
        order = np.random.default_rng(0).permutation(len(train))
        test, train = train[order[: len(train) // 10]], train[order[len(train) // 10 :]]
    mean, scale = train.mean(0), train.std(0)
    scale[scale < 1e-12] = 1.0  # constant columns
    parts = [torch.tensor((part - mean) / scale) for part in (train, test)]
    return *((part[:, :-1], part[:, -1]) for part in parts), scale[-1]


def elbos(name: str, folder: Path, seed: int = 0) -> list:
    """The ELBOs of SVI and of DPSVI on the training part of split 0."""
    noise, hidden, _ = DATA[name]
    (x, y), _, _ = load(name, folder, 0, tune=False)
    model = network(x.shape[1], hidden, noise)

    def fresh() -> AutoNormal:
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        return AutoNormal(model, init_loc_fn=init_to_sample)

    guide = fresh()
    adam = pyro.optim.ClippedAdam({"lr": STEP_SIZE, "lrd": DECAY ** (1 / STEPS_ELBO)})
    svi = SVI(model, guide, adam, Trace_ELBO())
    for _ in range(STEPS_ELBO):
        svi.step(x, y)
    found = [-Trace_ELBO(num_particles=DRAWS).loss(model, guide, x, y)]
    guide = fresh()
    accountant = PrivacyAccountant(epsilon=EPSILON_ELBO, delta=DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        DPSVI(model, guide, accountant=accountant, noise=Noise(source=seed)).run(
            x, y, progress=False
        )
    found.append(-Trace_ELBO(num_particles=DRAWS).loss(model, guide, x, y))
    return [name, *found]


def compare_elbos(names: list[str], folder: Path, path: Path) -> None:
    columns = ["data", "SVI", "DPSVI"]
    runs = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    for name in names:
        runs = runs[runs.data != name]
        runs.loc[len(runs) + 1] = elbos(name, folder)
        runs.round(1).to_csv(path, index=False, lineterminator="\n")
        print(runs.assign(change=(runs.DPSVI - runs.SVI) / runs.SVI.abs()), flush=True)


def report(runs: pd.DataFrame) -> None:
    for value, digits in (("rmse", 4), ("log_likelihood", 3)):
        print(f"\n{value}: mean (standard error) over splits\n")
        lines = [["data", "splits", *METHODS], ["---"] * (len(METHODS) + 2)]
        for name, part in runs.groupby("data", sort=False):
            cells = []
            for method in METHODS:
                found = part[part.method == method][value]
                cells.append(
                    f"{found.mean():.{digits}f} ({found.sem():.{digits}f})" if len(found) else "-"
                )
            lines.append([name, f"{part.split.nunique()}", *cells])
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--splits", type=int, default=5, help="splits, at most 3 for protein")
    parser.add_argument("--names", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--elbo", action="store_true", help="of SVI and DPSVI, epsilon 4")
    parser.add_argument("--tune", action="store_true", help="on a tenth of the training part")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if options.elbo:
        compare_elbos(options.names, options.data, options.output / "sep_uci_elbo.csv")
        return
    cases = [
        (name, split, method)
        for split in range(1 if options.tune else options.splits)
        for name in options.names
        for method in options.methods
        if name != "protein" or split < 3
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "sep_uci.csv"
    columns = ["data", "method", "split", "rmse", "log_likelihood", "seconds"]
    old = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    again = [(old.data == n) & (old.split == s) & (old.method == m) for n, s, m in cases]
    rows = old[~np.logical_or.reduce(again)].to_numpy().tolist()
    for name, split, method in cases:
        rows.append(run(name, options.data, split, method, options.tune))
        print(*(f"{x:.4f}" if isinstance(x, float) else x for x in rows[-1]), flush=True)
        runs = pd.DataFrame(rows, columns=columns)
        if not options.tune:
            runs.to_csv(path, index=False)
    report(runs)


if __name__ == "__main__":
    main()
