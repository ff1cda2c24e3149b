"""DPSEP on regressions: distance to the exact posterior, stability, coverage of intervals.

Nine standard normal features and an intercept, prior N(0, I), w ~ N(0, 0.7^2 I), or N(0, 0.2^2 I)
for Poisson. Runs have delta=1e-5, add/remove, full batches. The bound C and the number of steps
were chosen once, on simulated data: public choices. All other settings are defaults.

    python benchmarks/sep_regression.py kl          # KL(q || posterior), against DPSVI
    python benchmarks/sep_regression.py stability   # few records
    python benchmarks/sep_regression.py coverage    # of 95% intervals
"""

import argparse
import csv
import itertools
import math
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, init_to_value

from pyro_dp import Noise, PaperDPSEP, PaperDPSVI, PrivacyAccountant

DIM, STEPS = 10, 30
BOUND = {"logistic": 3.5, "probit": 4.5, "poisson": 12.0}
SVI_BOUND = {"logistic": 3.0, "poisson": 12.0}
RESULTS = Path(__file__).parent / "results"


def observation(kind, predictor):
    if kind == "logistic":
        return dist.Bernoulli(logits=predictor)
    if kind == "probit":
        return dist.Bernoulli(probs=dist.Normal(0.0, 1.0).cdf(predictor).clamp(1e-12, 1 - 1e-12))
    return dist.Poisson(predictor.exp())


def simulate(kind, size, seed, correlation=0.0):
    """Features (N, 10), observations (N,), coefficients (10,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, DIM - 1, generator=generator)
    if correlation:
        common = torch.randn(size, 1, generator=generator)
        x = math.sqrt(1 - correlation) * x + math.sqrt(correlation) * common
    x = torch.cat([x, torch.ones(size, 1)], dim=1)
    w = (0.2 if kind == "poisson" else 0.7) * torch.randn(DIM, generator=generator)
    fn = observation(kind, x @ w)
    if kind == "poisson":
        return x, torch.poisson(fn.rate, generator=generator), w
    return x, torch.bernoulli(fn.probs, generator=generator), w


def model_of(kind):
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([DIM]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", observation(kind, x[idx] @ w), obs=y[idx])

    return model


def laplace(kind, x, y):
    """Mean and precision of the Laplace posterior, by Newton's method."""

    def log_joint(w):
        return observation(kind, x @ w).log_prob(y).sum() - 0.5 * w @ w

    mean = torch.zeros(DIM)
    for _ in range(30):
        gradient = torch.func.grad(log_joint)(mean)
        precision = -torch.func.hessian(log_joint)(mean)
        mean = mean + torch.linalg.solve(precision, gradient)
    return mean, precision


def exact(kind, x, y, draws=10_000):
    """Mean and precision of the posterior, by importance sampling from its Laplace posterior."""
    mean, precision = laplace(kind, x, y)
    proposal = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(draws // 2, DIM, generator=generator)
    w = mean + torch.cat([noise, -noise]) @ torch.linalg.cholesky(torch.linalg.inv(precision)).T
    log_weight = -proposal.log_prob(w) - 0.5 * w.square().sum(1)
    for part in torch.arange(draws).split(500):
        predictor = x @ w[part].T
        log_weight[part] += observation(kind, predictor).log_prob(y[:, None]).sum(0)
    weight = torch.softmax(log_weight, 0)
    centre = weight @ w
    covariance = (weight[:, None] * (w - centre)).T @ (w - centre)
    return centre, torch.linalg.inv(covariance)


def kl(mean, covariance, target, precision):
    """KL(q || target) in nats."""
    shift = mean - target
    spread = torch.trace(precision @ covariance) - len(mean)
    return 0.5 * (shift @ precision @ shift + spread - torch.logdet(precision @ covariance)).item()


def accountant_for(epsilon):
    return PrivacyAccountant(epsilon=None if math.isinf(epsilon) else epsilon, delta=1e-5)


def fit(kind, x, y, epsilon, seed, guide_class=AutoMultivariateNormal, bound=None):
    """The inference after its last step, and its guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of(kind)
    guide = guide_class(model)
    private = not math.isinf(epsilon)
    inference = PaperDPSEP(
        model,
        guide,
        accountant=accountant_for(epsilon),
        num_steps=STEPS,
        noise=Noise(None if private else 0, source=seed),
        clip=(bound or BOUND[kind]) if private else math.inf,
    )
    inference.run(x, y, progress=False)
    return inference, guide


def fit_dpsvi(kind, x, y, epsilon, seed, bound=None):
    """Mean and covariance; the settings of dpsvi_logistic.py."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = model_of(kind)
    guide = AutoMultivariateNormal(
        model, init_loc_fn=init_to_value(values={"w": torch.zeros(DIM)}), init_scale=0.02
    )
    adam = {"lr": 0.03, "lrd": 0.003 ** (1 / 2000), "clip_norm": math.inf, "betas": (0.9, 0.99)}
    private = not math.isinf(epsilon)
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam),
        Trace_ELBO(),
        accountant=accountant_for(epsilon),
        num_steps=2000,
        noise=Noise(None if private else 0, source=seed),
        sampling=0.05,
        clip=(bound or SVI_BOUND[kind]) if private else math.inf,
    )
    inference.run(x, y, progress=False)
    posterior = guide.get_posterior()
    return posterior.mean.detach(), posterior.covariance_matrix.detach()


def compare(options):
    """KL to the posterior: without privacy; at each epsilon; against DPSVI."""
    print("problem   epsilon   DPSEP KL (se)      sd ratio   DPSVI KL (se)")
    for kind in ("logistic", "probit", "poisson"):
        for epsilon in (math.inf, 4.0, 1.0, 0.3):
            rows = []
            for seed in range(options.seeds):
                x, y, _ = simulate(kind, 20_000, seed)
                if math.isinf(epsilon):
                    target, precision = exact(kind, x, y)
                else:
                    target, precision = laplace(kind, x, y)
                q = fit(kind, x, y, epsilon, seed)[0].posterior(noise_aware=False)
                ratio = q.stddev / torch.linalg.inv(precision).diagonal().sqrt()
                other = math.nan
                if options.dpsvi and kind != "probit" and not math.isinf(epsilon):
                    other = kl(*fit_dpsvi(kind, x, y, epsilon, seed), target, precision)
                own = kl(q.mean, q.covariance_matrix, target, precision)
                rows.append([own, ratio.log().mean().exp().item(), other])
            rows = torch.tensor(rows)
            mean, error = rows.mean(0), rows.std(0) / math.sqrt(len(rows))
            print(
                f"{kind:<10}{epsilon:>7}{mean[0]:>10.4f} ({error[0]:.4f}){mean[1]:>11.3f}"
                f"{mean[2]:>12.2f} ({error[2]:.2f})",
                flush=True,
            )


def stability(options):
    """Does anything explode where there are few records?"""
    print("     N  epsilon  largest |mean| / prior sd  largest sd / prior sd  accuracy - prior's")
    for size, epsilon in ((5000, 1.0), (5000, 0.3), (1000, 1.0)):
        means, sds, gains = [], [], []
        for seed in range(20):
            x, y, _ = simulate("logistic", size, seed)
            q = fit("logistic", x, y, epsilon, seed)[0].posterior(noise_aware=False)
            means.append(q.mean.abs().max().item())
            sds.append(q.stddev.max().item())
            accuracy = ((x @ q.mean > 0) == (y > 0.5)).double().mean()
            prior = max(y.mean().item(), 1 - y.mean().item())  # w = 0 decides for one class
            gains.append(accuracy.item() - prior)
        print(f"{size:>6}{epsilon:>9}{max(means):>20.2f}{max(sds):>28.3f}{min(gains):>24.3f}")


def coverage(options):
    """Share of the true coefficients in their 95% intervals, and widths against the posterior's."""
    print("guide  correlation  N  epsilon  plain  aware  plain width  aware width", flush=True)
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"sep_coverage_{options.correlation:g}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["guide", "correlation", "size", "epsilon", "plain", "aware", "w_p", "w_a"])
        correlation = options.correlation
        guide = AutoDiagonalNormal if correlation else AutoMultivariateNormal
        for size, epsilon in itertools.product((20_000, 5000), (math.inf, 1.0, 0.3)):
            rows = []
            for seed in range(options.seeds):
                x, y, w = simulate("logistic", size, 1000 + seed, correlation)
                inference, fitted = fit("logistic", x, y, epsilon, seed, guide)
                _, precision = laplace("logistic", x, y)
                sd = torch.linalg.inv(precision).diagonal().sqrt()
                plain, aware = inference.posterior(False), inference.posterior(True)
                inside = [
                    ((q.mean - w).abs() <= 1.96 * q.stddev).double().mean().item()
                    for q in (plain, aware)
                ]
                rows.append([*inside, *((q.stddev / sd).mean().item() for q in (plain, aware))])
            mean = torch.tensor(rows).mean(0).tolist()
            cells = [guide.__name__, correlation, size, epsilon]
            table.writerow([*cells, *(f"{value:.4f}" for value in mean)])
            print(*cells, *(f"{value:.3f}" for value in mean), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kl", "stability", "coverage"))
    parser.add_argument("--seeds", type=int)
    parser.add_argument(
        "--correlation", type=float, default=0.0, help="of features, for coverage; diagonal guide"
    )
    parser.add_argument("--no-dpsvi", dest="dpsvi", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    options.seeds = options.seeds or {"kl": 8, "coverage": 100}.get(options.what, 20)
    {"kl": compare, "stability": stability, "coverage": coverage}[options.what](options)


if __name__ == "__main__":
    main()
