"""How close DPSVI comes to the exact posterior: logistic regression, N=20,000, d=10.

Nine standard normal features and an intercept, w ~ N(0, 0.7^2 I), prior N(0, I), diagonal guide,
delta=1e-5, add/remove. The table has KL(q || Laplace posterior) in nats, in two parts: that of the
mean and that of the standard deviations. It also has the geometric mean of sd(q) / sd(posterior),
for both releases. The Laplace posterior stands in for the exact one, and at this N no difference
is visible here. Step size, bound, rate and number of steps were chosen once, on these simulated
problems, for all epsilons and both releases: a public choice.

    python benchmarks/dpsvi_logistic.py --epsilon 1
"""

import argparse
import math
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, init_to_value

from pyro_dp import Clip, Noise, PaperDPSVI, PrivacyAccountant

SIZE, DIM = 20_000, 10
STEPS, RATE, BOUND, STEP_SIZE, DECAY, INITIAL_SD = 2000, 0.05, 3.0, 0.03, 0.003, 0.02


def simulate(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, DIM - 1, generator=generator)
    x = torch.cat([x, torch.ones(SIZE, 1)], dim=1)
    w = 0.7 * torch.randn(DIM, generator=generator)
    return x, torch.bernoulli(torch.sigmoid(x @ w), generator=generator)


def model(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([DIM]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def laplace(x, y):
    """Mean and precision of the Laplace posterior, by Newton's method."""
    x, y = x.double(), y.double()
    mean = torch.zeros(DIM, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(x @ mean)
        precision = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(DIM)
        mean = mean + torch.linalg.solve(precision, x.T @ (y - p) - mean)
    return mean, precision


def fit(x, y, epsilon, privatize, seed):
    """Mean and sd of the private posterior."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = init_to_value(values={"w": torch.zeros(DIM)})
    guide = AutoDiagonalNormal(model, init_loc_fn=start, init_scale=INITIAL_SD)
    adam = {"lr": STEP_SIZE, "lrd": DECAY ** (1 / STEPS), "clip_norm": math.inf}
    svi = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam | {"betas": (0.9, 0.99)}),
        Trace_ELBO(),
        accountant=PrivacyAccountant(epsilon=epsilon, delta=1e-5),
        num_steps=STEPS,
        sampling=RATE,
        clip=Clip(BOUND, of=privatize),
        noise=Noise(source=seed),
    )
    svi.run(x, y, progress=False)
    posterior = guide.get_posterior()
    return posterior.mean.detach().double(), posterior.stddev.detach().double()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("release     KL (mean over seeds)  means' part  sds' part  sd ratio  s per run")
    for privatize in ("latents", "parameters"):
        rows, start = [], time.perf_counter()
        for seed in range(options.seeds):
            x, y = simulate(seed)
            mean, sd = fit(x, y, options.epsilon, privatize, seed)
            target, precision = laplace(x, y)
            shift = 0.5 * (mean - target) @ precision @ (mean - target)
            spread = 0.5 * (precision.diagonal() @ sd**2 - DIM - torch.logdet(precision))
            spread = spread - sd.log().sum()
            ratio = (sd / torch.linalg.inv(precision).diagonal().sqrt()).log().mean().exp()
            rows.append(torch.stack([shift + spread, shift, spread, ratio]))
        seconds = (time.perf_counter() - start) / options.seeds
        rows = torch.stack(rows)
        error = rows[:, 0].std() / math.sqrt(options.seeds)
        kl, shift, spread, ratio = rows.mean(0)
        print(
            f"{privatize:<12}{kl:>10.2f} +- {error:.2f}{shift:>18.2f}{spread:>12.2f}{ratio:>10.3f}"
            f"{seconds:>9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
