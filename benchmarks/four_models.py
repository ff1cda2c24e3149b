"""DPSVI if nobody sets anything, beside a recipe that was tuned: four models, simulated data.

* hierarchy: 20 groups and 4 features, N = 20,000. Outcomes are y ~ Bernoulli(logit = x beta +
  b[group]), b_j ~ N(mu, tau), mu ~ N(0, 2). The 26 latents b, mu, log tau and beta are global.
* poisson, probit: ten coefficients, N = 20,000.
* mixture: three Gaussians in the plane, N = 5,000. The 9 latents are weights, means and a common
  scale. Assignments are enumerated. Both methods start at the same rough guess of the means.

All have delta=1e-5, add or remove one record, AutoMultivariateNormal.

The recipe is that of sep_adult.py. Adam's step size falls from .03 to .003 of it in 2000 steps,
with records at rate .05 and a narrow start at zero. Each model has a C of its own (3, 12, 4.5, 3).
DPSVI has no setting.

The table has KL(q || exact posterior) in nats. It is that from the Laplace posterior in closed
form, plus a difference from 300 draws of q in pairs. Importance sampling gives the exact
posterior's constant. The mixture's posterior is no Gaussian. There the table has the loss in log
density of new records against the truth, in nats per 1000 records.

    python benchmarks/four_models.py
"""

import argparse
import csv
import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from common import write_section
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_value
from torch import Tensor
from torch.distributions import MultivariateNormal
from tqdm.auto import tqdm

from pyro_dp import DPSVI, Noise, PaperDPSVI, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "four_models.csv"
EPSILONS = (0.3, 1.0, 4.0)
METHODS = ("DPSVI", "DPSVI, tuned")
FIELDS = ("data", "method", "epsilon", "seed", "plain", "aware")
STEPS, STEP_SIZE, DECAY = 2000, 0.03, 0.003
FEATURES, GROUPS = 4, 20


def observation(kind: str, predictor: Tensor) -> dist.Distribution:
    if kind == "poisson":
        return dist.Poisson(predictor.clamp(max=20.0).exp())
    return dist.Bernoulli(probs=torch.special.ndtr(predictor).clamp(1e-12, 1 - 1e-12))


def regression(kind: str) -> Callable:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", observation(kind, x[i] @ w), obs=y[i])

    return model


class Regression:
    """Ten coefficients and a linear predictor."""

    def __init__(self, kind: str, seed: int, size: int = 20_000):
        rng = torch.Generator().manual_seed(seed)
        self.kind, self.bound = kind, {"poisson": 12.0, "probit": 4.5}[kind]
        x = torch.cat([torch.randn(size, 9, generator=rng), torch.ones(size, 1)], dim=1)
        w = {"poisson": 0.2, "probit": 0.7}[kind] * torch.randn(10, generator=rng)
        fn = observation(kind, x @ w)
        draw = torch.poisson if kind == "poisson" else torch.bernoulli
        self.data = x, draw(fn.mean, generator=rng)
        self.model = regression(kind)
        self.start = {"w": torch.zeros(10)}
        self.reference = Reference(self.log_joint, torch.zeros(10))

    def log_joint(self, w: Tensor) -> Tensor:
        x, y = self.data
        return observation(self.kind, x @ w).log_prob(y).sum() - 0.5 * w @ w

    def score(self, q: MultivariateNormal) -> float:
        return self.reference.kl(q)


class Hierarchy:
    """Latents beta (4), b (20), mu, log tau."""

    bound = 3.0

    def __init__(self, seed: int, size: int = 20_000):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(size, FEATURES, generator=rng)
        sizes = torch._sample_dirichlet(torch.full((GROUPS,), 3.0), generator=rng)
        group = torch.multinomial(sizes, size, replacement=True, generator=rng)
        b = 0.8 * torch.randn(GROUPS, generator=rng) - 0.5
        beta = 0.7 * torch.randn(FEATURES, generator=rng)
        y = torch.bernoulli(torch.sigmoid(x @ beta + b[group]), generator=rng)
        self.data = x, group, y
        self.start = {"beta": torch.zeros(FEATURES), "b": torch.zeros(GROUPS)}
        self.start |= {"mu": torch.zeros(()), "log_tau": torch.zeros(())}
        self.reference = Reference(self.log_joint, torch.zeros(FEATURES + GROUPS + 2))

    @staticmethod
    def model(x: Tensor, group: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([FEATURES]).to_event(1))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        log_tau = pyro.sample("log_tau", LogHalfNormal())
        b = pyro.sample("b", dist.Normal(mu, log_tau.exp()).expand([GROUPS]).to_event(1))
        with pyro.plate("data", len(x)) as i:
            logits = x[i] @ beta + b[group[i]]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    def log_joint(self, z: Tensor) -> Tensor:
        """The latents in the model's order: beta, mu, log tau, b."""
        beta, mu, log_tau, b = z.split([FEATURES, 1, 1, GROUPS])
        x, group, y = self.data
        logits = x @ beta + b[group]
        prior = -beta @ beta / 2 - mu**2 / 8 - (2 * log_tau).exp() / 2 + log_tau
        prior = prior - GROUPS * log_tau - ((b - mu) * (-log_tau).exp()).square().sum() / 2
        return (y * logits - torch.nn.functional.softplus(logits)).sum() + prior.squeeze()

    def score(self, q: MultivariateNormal) -> float:
        return self.reference.kl(q)


class LogHalfNormal(dist.TorchDistribution):
    """log tau for tau ~ HalfNormal(1): a latent on the whole line."""

    support = dist.constraints.real
    arg_constraints: dict = {}
    has_rsample = True

    def rsample(self, sample_shape=()) -> Tensor:
        return torch.randn(tuple(sample_shape)).abs().log()

    def log_prob(self, value: Tensor) -> Tensor:
        return math.log(2 / math.pi) / 2 - (2 * value).exp() / 2 + value


class Mixture:
    bound = 3.0

    def __init__(self, seed: int, size: int = 5_000):
        rng = torch.Generator().manual_seed(seed)
        self._weights = torch._sample_dirichlet(torch.full((3,), 5.0), generator=rng)
        means = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.5, -2.0]])
        self._means = means + 0.5 * torch.randn(3, 2, generator=rng)
        self.data = (self._drawn(size, rng),)
        self.new = self._drawn(4000, rng)
        guess = torch.tensor([[1.0, 0.0], [-0.5, 1.0], [-0.7, -1.0]])
        self.start = {"logits": torch.zeros(2), "means": guess, "log_sd": torch.zeros(())}

    def _drawn(self, size: int, rng: torch.Generator) -> Tensor:
        kind = torch.multinomial(self._weights, size, replacement=True, generator=rng)
        return self._means[kind] + 0.8 * torch.randn(size, 2, generator=rng)

    @staticmethod
    @config_enumerate
    def model(x: Tensor) -> None:
        logits = pyro.sample("logits", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        means = pyro.sample("means", dist.Normal(0.0, 3.0).expand([3, 2]).to_event(2))
        log_sd = pyro.sample("log_sd", dist.Normal(0.0, 1.0))
        weights = torch.cat([logits, logits.new_zeros(1)]).softmax(0)
        with pyro.plate("data", len(x)) as i:
            kind = pyro.sample("kind", dist.Categorical(weights))
            fn = dist.Normal(means[kind], log_sd.exp()).to_event(1)
            pyro.sample("x", fn, obs=x[i])

    def _density(self, logits: Tensor, means: Tensor, log_sd: Tensor) -> Tensor:
        """Log densities of new records, (N,)."""
        apart = (self.new.unsqueeze(1) - means).square().sum(dim=2)
        each = torch.log_softmax(logits, 0) - 2 * log_sd - math.log(2 * math.pi)
        return (each - apart * (-2 * log_sd).exp() / 2).logsumexp(dim=1)

    def score(self, q: MultivariateNormal) -> float:
        draws = q.mean + torch.randn(100, 9, generator=_rng()) @ q.scale_tril.mT
        logits, means, log_sd = draws.split([2, 6, 1], dim=1)
        logits = torch.cat([logits, torch.zeros(len(draws), 1)], dim=1)
        each = [
            self._density(a, m.view(3, 2), s.clamp(-6, 6))
            for a, m, s in zip(logits, means, log_sd, strict=True)
        ]
        mean = torch.stack(each).logsumexp(dim=0) - math.log(len(draws))
        truth = self._density(self._weights.log(), self._means, torch.tensor(0.8).log())
        return 1000 * (truth - mean).mean().item()


class Reference:
    """A posterior density of d latents, its Laplace approximation and its constant.

    :param log_joint: (d,) to a number.
    """

    def __init__(self, log_joint: Callable[[Tensor], Tensor], start: Tensor):
        self._log_joint = torch.func.vmap(log_joint, chunk_size=50)
        mode = start
        for _ in range(200):
            gradient = torch.func.grad(log_joint)(mode)
            precision = -torch.func.hessian(log_joint)(mode)
            values, vectors = torch.linalg.eigh(precision)
            step = vectors @ ((vectors.mT @ gradient) / values.abs().clamp(min=1.0))
            while log_joint(mode + step) < log_joint(mode) - 1e-9:
                step = step / 2
            mode = mode + step
            if step.abs().max() < 1e-8:
                break
        self._top = log_joint(mode)
        self._laplace = MultivariateNormal(mode, precision_matrix=precision)
        noise = torch.randn(2000, len(mode), generator=_rng())
        proposal = MultivariateNormal(mode, covariance_matrix=1.21 * torch.linalg.inv(precision))
        points = mode + noise @ proposal.scale_tril.mT
        weight = self._left(points) + self._laplace.log_prob(points) - proposal.log_prob(points)
        self._constant = weight.logsumexp(dim=0) - math.log(len(points))

    def _left(self, points: Tensor) -> Tensor:
        """Log density without its constant, over that of the Laplace posterior."""
        laplace = self._laplace.log_prob(points) - self._laplace.log_prob(self._laplace.mean)
        return self._log_joint(points) - self._top - laplace

    def kl(self, q: MultivariateNormal) -> float:
        noise = torch.randn(150, len(q.mean), generator=_rng())
        points = q.mean + torch.cat([noise, -noise]) @ q.scale_tril.mT
        near = torch.distributions.kl_divergence(q, self._laplace)
        return (near - self._left(points).mean() + self._constant).item()


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


PROBLEMS = {
    "hierarchy": Hierarchy,
    "poisson": lambda seed: Regression("poisson", seed),
    "probit": lambda seed: Regression("probit", seed),
    "mixture": Mixture,
}


def fitted(problem, method: str, epsilon: float, seed: int) -> tuple[float, float]:
    """Score without the noise in the width, and with it."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    accountant, mixture = PrivacyAccountant(epsilon=epsilon, delta=1e-5), type(problem) is Mixture
    start = init_to_value(values=problem.start)
    model = problem.model
    seen = pyro.poutine.block(model, hide=["kind"])
    if method == "DPSVI":
        guide = AutoMultivariateNormal(seen, **({"init_loc_fn": start} if mixture else {}))
        inference = DPSVI(model, guide, accountant=accountant, noise=Noise(source=seed))
        inference.run(*problem.data, progress=False)
        posteriors = inference.posterior(noise_aware=False), inference.posterior()
        return tuple(problem.score(_ordinary(each)) for each in posteriors)
    guide = AutoMultivariateNormal(seen, init_loc_fn=start, init_scale=0.02)
    adam = {"lr": STEP_SIZE, "lrd": DECAY ** (1 / STEPS), "clip_norm": math.inf}
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.ClippedAdam(adam | {"betas": (0.9, 0.99)}),
        TraceEnum_ELBO(max_plate_nesting=1) if mixture else None,
        accountant=accountant,
        num_steps=STEPS,
        sampling=0.05,
        clip=problem.bound,
        noise=Noise(source=seed),
    )
    inference.run(*problem.data, progress=False)
    score = problem.score(_ordinary(guide.get_posterior()))
    return score, score


def _ordinary(q: MultivariateNormal) -> MultivariateNormal:
    return MultivariateNormal(q.mean.detach(), scale_tril=q.scale_tril.detach())


def run(options: argparse.Namespace) -> None:
    """Append what is missing."""
    if not options.out.exists():
        options.out.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(options.out)[list(FIELDS[:4])].itertuples(index=False, name=None))
    for name, seed in tqdm(list(itertools.product(options.data, range(options.seeds)))):
        cells = itertools.product(options.methods, EPSILONS)
        cells = [cell for cell in cells if (name, *cell, seed) not in done]
        if not cells:
            continue
        problem = PROBLEMS[name](seed)
        for method, epsilon in cells:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores = fitted(problem, method, epsilon, seed)
            with options.out.open("a") as file:
                row = [name, method, epsilon, seed, *(f"{score:.6g}" for score in scores)]
                csv.writer(file).writerow(row)


def report(path: Path) -> str:
    """Mean, median and maximum of each cell."""
    header = ["model", "method", *(f"epsilon = {epsilon:g}" for epsilon in EPSILONS), "runs"]
    lines = [header, ["---"] * len(header)]
    for (name, method), part in pd.read_csv(path).groupby(["data", "method"], sort=False):
        cells = []
        for epsilon in EPSILONS:
            scores = part.plain[part.epsilon == epsilon]
            cells.append(f"{scores.mean():.3g} ({scores.median():.3g}; {scores.max():.3g})")
        lines.append([name, method, *cells, str(part.groupby("epsilon").size().min())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="make the table of what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if not options.report:
        run(options)
    table = report(options.out)
    print(table)
    if options.out == RESULTS:
        write_section("four models", table)


if __name__ == "__main__":
    main()
