"""Audits of the package, and of the package with faults planted in it.

Logistic regression; the canary's feature is one that no other record has. Eight parts, each a table
in results/audit.json:

* ``steps``: one full-batch step of DPSVI at several claimed epsilons, 10,000 trials.
* ``runs``: bounds for whole runs of DPSVI, DPSEP and VIPS at several claimed epsilons.
* ``whitened``: one release of DPSEP without a bound, sites and histogram together. Its frame is far
  from the data's. Canaries are long, short, common, and mislabelled. The attacker knows both sums,
  and scores a release along their difference.
* ``looks``: whole runs of DPSEP with nothing set, all releases seen. The attacker has all other
  records, and scores by the exact likelihood ratio. No attack is better.
* ``extremes``: the same with Poisson counts, and a canary that is counted as extreme.
* ``curve``: one full-batch step of DPSVI at a claimed epsilon of 4, 50,000 trials, five times.
* ``noise``: audits of a Gaussian mechanism with less noise than it claims, and 200 audits of a true
  claim. Each takes 10,000 trials, or one run with 1,000 canaries.
* ``faults``: bounds for faults that replace functions of the package.

    python benchmarks/audit.py --parts looks extremes --share 1.0

Without --parts, the figure and the table are made again from the results.
"""

import argparse
import contextlib
import json
import math
import operator
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, init_to_value
from scipy.special import ndtr, ndtri

from pyro_dp import (
    DPSEP,
    AuditResult,
    ConvergenceWarning,
    FixedSizeSampling,
    Noise,
    NotPrivateWarning,
    PaperDPSEP,
    PaperDPSVI,
    PoissonSampling,
    PrivacyAccountant,
    SubsampledGaussian,
    audit,
    audit_one_run,
)
from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.mechanism import clipping, releases
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.release import release
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.vips import VIPS, LogisticRegression

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "audit.json"
FIGURE = ROOT / "benchmarks" / "figures" / "audit.png"
SIZE, DIM, LONG = 100, 4, 20.0
SAMPLINGS = {"poisson": PoissonSampling, "fixed": FixedSizeSampling}
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
CANARIES = {
    "long": (1e4 * torch.eye(DIM)[0], 1.0),
    "short": (1e-3 * torch.eye(DIM)[0], 1.0),
    "common": (0.5 * torch.ones(DIM), 1.0),
    "mislabelled": (3.0 * torch.ones(DIM), 0.0),
}


def records(seed: int = 0) -> tuple:
    """Features and labels, the first record empty, the first feature unused; and the canary."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(SIZE, DIM, generator=generator) * 2 - 1
    x[:, 0] = 0.0
    truth = torch.randn(DIM, generator=generator)
    y = torch.bernoulli(torch.sigmoid(x @ truth), generator=generator)
    x[0] = 0.0
    return (x, y), (LONG * torch.eye(DIM)[0], 1.0)


def model(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def shrunk(x, y):
    """Records see a product of two latents."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    w = pyro.deterministic("w", scale * z)
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def linear(x, y):
    """Records see real latents and a constrained one."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, sigma), obs=y[idx])


def counts(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Poisson((x[idx] @ w).clamp(max=20.0).exp()), obs=y[idx])


class Repeated:
    """Runs of DPSVI from the same start; noise and sampling are fresh in each.

    A DPSVI for each of the two data sets takes all steps, since its first step takes as long as a
    thousand later ones. Each run resets the parameters. Plain gradient ascent has no
    other state.

    :param event: each step's event.
    :param num_steps: number of steps of a run.
    :param seed: seed for noise and sampling, to reproduce the tables.
    :param path: return the first coordinate after each step instead of at the end.
    """

    def __init__(
        self, event, num_steps=1, seed=0, *, lr=1.0, neighboring="add_or_remove_one", path=False
    ):
        self.event, self.num_steps, self.lr = event, num_steps, lr
        self.generator = torch.Generator().manual_seed(seed)
        self.neighboring, self.path = neighboring, path
        self.known = {}

    def prepare(self, x):
        return x

    def __call__(self, x, y):
        if id(x) not in self.known:
            name = f"{id(self)}_{len(self.known)}"
            self.known[id(x)] = (self.prepare(x), *self.svi(name))
        prepared, svi, parameters = self.known[id(x)]
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        path = []
        for _ in range(self.num_steps):
            svi.step(prepared, y)
            path.append(parameters[0][0].item())
        return np.array(path) if self.path else path[-1]

    def svi(self, name):
        parameters = [pyro.param(f"{each}_{name}", torch.zeros(DIM)) for each in ("loc", "log")]

        def guide(x, y):
            loc, log = (pyro.param(f"{each}_{name}") for each in ("loc", "log"))
            pyro.sample("w", dist.Normal(loc, (log - 5.0).exp()).to_event(1))

        svi = PaperDPSVI(
            model,
            guide,
            pyro.optim.SGD({"lr": self.lr}),
            Trace_ELBO(),
            accountant=PrivacyAccountant(neighboring=self.neighboring),
            noise=Noise(self.event.noise_multiplier, source=self.generator),
            sampling=SAMPLINGS[self.event.sampling](self.event.sample_rate),
        )
        return svi, parameters


class Centred(Repeated):
    def prepare(self, x):
        return x - x.mean(dim=0)


class WhitenedRelease:
    """Looks of DPSEP, all from the same posterior and in the same frame.

    :param frame: W, kappa, C and tau, which may be anything that was released before.
    """

    def __init__(self, event: SubsampledGaussian, frame: Frame, seed: int, model=model):
        self.event, self.frame, self.model = event, frame, model
        self.noise = np.random.default_rng([seed, 1])  # apart from the coins
        self.known = {}

    def __call__(self, x, y):
        if id(x) not in self.known:
            self.known[id(x)] = self.clipped(x, y)
        released = release(
            self.known[id(x)], accountant=PrivacyAccountant(), event=self.event, noise=self.noise
        )
        return [block.numpy() for block in released]

    def clipped(self, x, y) -> clipping.ClippedSum:
        pyro.clear_param_store()
        sep = DPSEP(
            self.model,
            AutoDiagonalNormal(
                self.model, init_loc_fn=init_to_value(values={"w": torch.ones(DIM)})
            ),
            accountant=PrivacyAccountant(),
            noise=1.0,
        )
        prepared = sep._look_at((x, y), {})
        known = replace(sep._fit.approximation, frame=self.frame)
        # Without the canary, its slot is empty.
        batch = torch.arange(len(x)) if x[0].any() else torch.arange(1, len(x))
        clipped = clipping.ClippedSum(known.blocks)
        prepared.sites.add(clipped, known.at(len(x)), batch, np.random.default_rng(0))
        return clipped

    def along(self, data, neighbour) -> Callable:
        """The best score: along the difference of the sums, each block in units of its noise."""
        one, other = (self.clipped(*each) for each in (data, neighbour))
        ways = [
            (a - b).numpy() / (block.bound**2 / block.share)
            for a, b, block in zip(one._totals, other._totals, one.blocks, strict=True)
        ]
        return lambda released: sum(way @ block for way, block in zip(ways, released, strict=True))


class AllLooks:
    """Runs of DPSEP with nothing set: the log likelihood ratio of everything that was released.

    :param canary: the record that took part or not; (feature, outcome).
    """

    def __init__(self, data, canary, epsilon: float, seed: int, model=model):
        self.epsilon, self.model = epsilon, model
        self.generator = torch.Generator().manual_seed(seed)
        self.data = tuple(column.clone() for column in data)
        self.data[0][0], self.data[1][0] = canary
        self.accountant = PrivacyAccountant(epsilon)

    def __call__(self, x, y) -> float:
        pyro.clear_param_store()
        self.accountant = PrivacyAccountant(self.epsilon)
        sep = Attacked(
            self.model,
            AutoDiagonalNormal(self.model),
            accountant=self.accountant,
            noise=Noise(source=self.generator),
        )
        sep.canary = bool(x[0].any())
        sep.run(*self.data, progress=False)
        return sep.ratio


class Attacked(DPSEP):
    """It has all records. The first one takes part, or not."""

    canary = True
    ratio = 0.0

    def _release(self, clipped, *given):
        known, records = self._fit.approximation, torch.arange(SIZE)
        own, at = (ClippedSum, np.random.default_rng(0)), known.at(SIZE)
        prepared = self._kept.prepared
        parts = prepared.clipped_sum(known, at, records[:1], *own)._totals
        clipped = prepared.clipped_sum(known, at, records[int(not self.canary) :], *own)
        totals = [total.clone() for total in clipped._totals]
        released = super()._release(clipped, *given)
        for block, total, part, noisy in zip(clipped.blocks, totals, parts, released, strict=True):
            way = part / block.noise(self._releases.last.noise_multiplier) ** 2
            middle = total + (0.5 - self.canary) * part
            self.ratio += (way @ (noisy - middle)).item()
        return released


def claims(event: SubsampledGaussian, count: int = 1, **settings) -> PrivacyAccountant:
    accountant = PrivacyAccountant(**settings)
    accountant.record(event, count)
    return accountant


def full_batch(epsilon: float) -> SubsampledGaussian:
    sigma = PrivacyAccountant(epsilon).noise_multiplier(num_steps=1, sampling="full")
    return SubsampledGaussian(sigma, 1.0, "full")


def summary(result: AuditResult, **more) -> dict:
    return more | {
        "claimed": result.claimed_epsilon,
        "bound": result.bound,
        "coins": result.coins,
        "guesses": result.guesses,
        "correct": result.correct,
    }


def dpsvi_runs(epsilon: float, seed: int, trials: int) -> AuditResult:
    """Ten steps with a sample rate of 0.2."""
    sigma = PrivacyAccountant(epsilon).noise_multiplier(num_steps=10, sample_rate=0.2)
    event = SubsampledGaussian(sigma, 0.2)
    make_run = Repeated(event, 10, seed, lr=0.05)
    return run(make_run, claims(event, 10), trials, seed, score=float)


def dpsep_runs(epsilon: float, seed: int, trials: int) -> AuditResult:
    """Three steps on the full batch, from a new guide."""
    generator = torch.Generator().manual_seed(seed)

    def make_run(x, y):
        pyro.clear_param_store()
        guide = AutoDiagonalNormal(model)
        accountant = PrivacyAccountant(epsilon)
        sep = PaperDPSEP(
            model,
            guide,
            accountant=accountant,
            num_steps=3,
            clip=1.0,
            noise=Noise(source=generator),
        )
        sep.run(x, y, progress=False)
        make_run.accountant = accountant
        return guide.loc[0].item()

    make_run(*records(seed)[0])
    return run(make_run, make_run.accountant, trials, seed, score=float)


def vips_runs(epsilon: float, seed: int, trials: int) -> AuditResult:
    """Three steps on the full batch."""
    generator = torch.Generator().manual_seed(seed)

    def make_run(x, y):
        accountant = PrivacyAccountant(epsilon)
        logistic = LogisticRegression(DIM)
        vips = VIPS(logistic, accountant=accountant, num_steps=3, noise=Noise(source=generator))
        vips.run(x, y, progress=False)
        make_run.accountant = accountant
        return vips.posterior(noise_aware=False)["weights"].mean

    make_run(*records(seed)[0])
    return run(make_run, make_run.accountant, trials, seed)


def run(make_run, claim, trials, seed=0, data=None, canary=None, **settings) -> AuditResult:
    original, known = records(seed)
    pyro.set_rng_seed(seed)
    start = time.perf_counter()
    result = audit(
        make_run, data or original, canary or known, num_trials=trials, claim=claim, seed=seed,
        progress=False, **settings,
    )  # fmt: skip
    print(f"  {time.perf_counter() - start:.0f} s: {result}", flush=True)
    return result


def steps(share: float) -> list[dict]:
    """Several data sets at each epsilon."""
    rows = []
    for epsilon in EPSILONS:
        event = full_batch(epsilon)
        for seed in range(10, 14):
            make_run = Repeated(event, seed=seed)
            result = run(make_run, claims(event), int(share * 10_000), seed, score=float)
            rows.append(summary(result, inference="DPSVI, one step", seed=seed))
    return rows


def runs(share: float) -> list[dict]:
    rows = []
    for name, function, trials, seeds in (
        ("DPSVI", dpsvi_runs, 1000, 4),
        ("VIPS", vips_runs, 1000, 1),
        ("DPSEP", dpsep_runs, 200, 1),
    ):
        for epsilon in EPSILONS:
            for seed in range(seeds):
                result = function(epsilon, seed, max(100, int(share * trials)))
                rows.append(summary(result, inference=name, seed=seed))
    return rows


def worlds(canary: tuple, seed: int) -> tuple[tuple, tuple]:
    """Records without the canary, and with it."""
    (x, y), _ = records(seed)
    with_it = x.clone(), y.clone()
    with_it[0][0], with_it[1][0] = canary
    return (x, y), with_it


def any_frame(seed: int) -> Frame:
    """One that has nothing to do with the data."""
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(DIM, DIM, generator=rng)
    return Frame(root @ root.T + 0.1 * torch.eye(DIM), 0.5, 0.8, 0.1)


def whitened(share: float) -> list[dict]:
    """Four canaries at each epsilon, each in a frame of its own."""
    rows = []
    for epsilon in EPSILONS:
        event = full_batch(epsilon)
        for seed, (name, canary) in enumerate(CANARIES.items()):
            (x, y), with_it = worlds(canary, seed)
            make_run = WhitenedRelease(event, any_frame(seed), seed)
            score = make_run.along(with_it, (x, y))
            trials = int(share * 10_000)
            result = run(
                make_run, claims(event), trials, seed, data=(x, y), canary=canary, score=score
            )
            rows.append(summary(result, inference=f"DPSEP, whitened, {name} canary", seed=seed))
    return rows


def looks(share: float) -> list[dict]:
    """Four canaries at each epsilon."""
    rows = []
    for epsilon in EPSILONS:
        for seed, (name, canary) in enumerate(CANARIES.items()):
            data, _ = records(seed)
            make_run = AllLooks(data, canary, epsilon, seed)
            make_run(*data)
            result = run(
                make_run,
                make_run.accountant,
                max(100, int(share * 300)),
                seed,
                data=data,
                canary=canary,
                score=float,
            )
            rows.append(summary(result, inference=f"DPSEP, all looks, {name} canary", seed=seed))
    return rows


def extremes(share: float) -> list[dict]:
    """A count of a thousand among small ones: the coordinates of extreme records show it."""
    rows, canary = [], (0.5 * torch.ones(DIM), 1000.0)
    for seed, epsilon in enumerate(EPSILONS):
        data, _ = records(seed)
        make_run = AllLooks(data, canary, epsilon, seed, counts)
        make_run(*data)
        trials = max(100, int(share * 300))
        result = run(
            make_run, make_run.accountant, trials, seed, data=data, canary=canary, score=float
        )
        rows.append(summary(result, inference="DPSEP, all looks, extreme count", seed=seed))
    return rows


def curve(share: float) -> list[dict]:
    rows, event = [], full_batch(4.0)
    for seed in range(5):
        trials = int(share * 50_000)
        result = run(Repeated(event, seed=seed), claims(event), trials, seed, score=float)
        rates = result.rates
        names = ("thresholds", "false_positive", "false_negative")
        names += ("false_positive_limits", "false_negative_limits")
        rows.append(summary(result, seed=seed, sigma=event.noise_multiplier))
        rows[-1]["rates"] = {name: getattr(rates, name).tolist() for name in names}
        rows[-1] |= consistent(rows[-1])
    return rows


def consistent(row: dict) -> dict:
    """Whether the exact curve of the Gaussian goes through all the boxes of limits.

    Claimed are error rates on or above it. A box that is altogether below contradicts the claim;
    one that is altogether above shows an attack that is worse than the best.
    """
    low_alpha, high_alpha = np.array(row["rates"]["false_positive_limits"])
    low_beta, high_beta = np.array(row["rates"]["false_negative_limits"])
    mu = 1.0 / row["sigma"]
    least, most = (ndtr(ndtri(1.0 - alpha) - mu) for alpha in (high_alpha, low_alpha))
    return {
        "points": len(low_alpha),
        "points_below": int((high_beta < least).sum()),
        "points_above": int((low_beta > most).sum()),
    }


@contextlib.contextmanager
def noise_scaled(scale: float):
    """The release draws this part of the noise that it accounts for."""
    original = releases.release

    class Scaled:
        def __init__(self, noise):
            self.noise = noise

        def standard_normal(self, size):
            return scale * self.noise.standard_normal(size)

    def release(clipped, *, accountant, event, noise):
        return original(clipped, accountant=accountant, event=event, noise=Scaled(noise))

    with mock.patch.object(releases, "release", release):
        yield


@contextlib.contextmanager
def unclipped():
    original = clipping.clipped_sums

    def sums(values, bounds, weights=None):
        return original(values, [math.inf] * len(bounds), weights)

    with mock.patch.object(clipping.ClippedSum, "clipped_sums", staticmethod(sums)):
        yield


@contextlib.contextmanager
def fixed_order():
    """Single-record steps: record 0, 1, 2, ... and from the start again."""
    places = iter(())

    def draw(self, stream):
        nonlocal places
        place = next(places, None)
        if place is None:
            places = iter(range(self.size))
            place = next(places)
        return torch.tensor([place])

    with mock.patch.object(RecordSampler, "draw", draw):
        yield


def faults(share: float) -> list[dict]:
    rows = []

    def add(fault: str, result: AuditResult) -> None:
        rows.append(summary(result, fault=fault))

    def trials(count: int) -> int:
        return max(100, int(share * count))

    for epsilon in (1.0, 4.0):
        event = full_batch(epsilon)
        claim = claims(event)
        add("none", run(Repeated(event), claim, trials(10_000), score=float))
        with noise_scaled(0.0):
            add("no noise", run(Repeated(event), claim, trials(5000), score=float))
        with noise_scaled(0.5):
            add("half the noise", run(Repeated(event), claim, trials(50_000), score=float))
        with unclipped():
            add("no clipping", run(Repeated(event), claim, trials(5000), score=float))
        # Which moves the mean by LONG, hence the sum by up to C for each of the others.
        canary = (SIZE * LONG * torch.eye(DIM)[0], 1.0)
        data = (records()[0][0], torch.ones(SIZE))
        make_run = Centred(event)
        result = run(make_run, claim, trials(5000), data=data, canary=canary, score=abs)
        add("features minus their mean", result)

    # All others are at the bound -C, and so is the record that the canary replaces. Small steps
    # keep the gradient of every record longer than C. Honest runs are scored by the sum of all.
    event = SubsampledGaussian(1.0, 1.0 / SIZE)
    claim = claims(event, SIZE, neighboring="replace_one")
    data = (-LONG * torch.eye(DIM)[[0] * SIZE], torch.ones(SIZE))
    settings = dict(lr=1e-6, neighboring="replace_one", path=True)
    for fault, plant, step in (
        ("none (Poisson)", contextlib.nullcontext, -1),
        ("fixed order counted as Poisson", fixed_order, 0),
    ):
        with plant():
            make_run = Repeated(event, SIZE, **settings)
            score = operator.itemgetter(step)
            add(fault, run(make_run, claim, trials(1000), data=data, score=score))
    return rows


def noise(share: float) -> list[dict]:
    """Sums with noise of their own; nothing of the package but the audit."""
    rows = []
    for epsilon in EPSILONS:
        event = full_batch(epsilon)
        for part in (1.0, 0.9, 0.8):
            results = [_noisy(event, part, int(share * 10_000), seed) for seed in range(200)]
            rows.append(found("10,000 runs", epsilon, part, results))
        for confidence in (0.999, 0.95):
            results = [_canaries(event, confidence, seed) for seed in range(200)]
            rows.append(found(f"one run, {confidence:g}", epsilon, 1.0, results))
    return rows


def _noisy(event: SubsampledGaussian, part: float, trials: int, seed: int) -> AuditResult:
    draw, sigma = np.random.default_rng([seed, 1]), part * event.noise_multiplier
    return audit(
        lambda x: x[0] + sigma * draw.standard_normal(), [np.zeros(1)], [1.0], num_trials=trials,
        score=float, claim=claims(event), seed=seed, progress=False,
    )  # fmt: skip


def _canaries(event: SubsampledGaussian, confidence: float, seed: int) -> AuditResult:
    draw = np.random.default_rng([seed, 1])
    return audit_one_run(
        lambda x: x.sum(0) + event.noise_multiplier * draw.standard_normal(len(x)),
        [np.zeros((1000, 1000))], [np.eye(1000)], lambda sums: sums, confidence=confidence,
        claim=claims(event), seed=seed,
    )  # fmt: skip


def found(name: str, epsilon: float, part: float, results: list[AuditResult]) -> dict:
    return {
        "audit": name,
        "claimed": epsilon,
        "noise": part,
        "audits": len(results),
        "contradicted": sum(each.contradicts_claim for each in results),
        "bound": float(np.median([each.bound for each in results])),
        "point": float(np.median([each.point_bound for each in results])),
        "allowed": float(np.median([each.curve.noise_share for each in results])),
    }


PARTS = {
    "steps": steps,
    "runs": runs,
    "whitened": whitened,
    "looks": looks,
    "extremes": extremes,
    "curve": curve,
    "noise": noise,
    "faults": faults,
}


ATTACKED = ("steps", "runs", "whitened", "looks", "extremes")


def table(results: dict) -> str:
    lines = ["| fault | claimed epsilon | bound (99.9%) | coins | guesses | correct |"]
    lines.append("| --- " * 6 + "|")
    for row in results["faults"]:
        cells = [row["fault"], f"{row['claimed']:.2f}", f"{row['bound']:.2f}"]
        cells += [f"{row[name]:,}" for name in ("coins", "guesses", "correct")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| inference | claimed epsilon | bounds (99.9%) |", "| --- | --- | --- |"]
    groups = {}
    for row in sum((results[name] for name in ATTACKED), []):
        key = (row["inference"], f"{row['claimed']:.2f}")
        groups.setdefault(key, []).append(f"{row['bound']:.2f}")
    for (inference, claimed), bounds in groups.items():
        lines.append(f"| {inference} | {claimed} | {', '.join(bounds)} |")
    lines += ["", "One step at a claimed epsilon of 4, 50,000 trials, five times: "]
    lines[-1] += ", ".join(f"{row['bound']:.2f}" for row in results["curve"]) + "."
    head = "| audit | claimed epsilon | noise | audits | contradicted "
    head += "| bound | at this delta alone | noise allowed |"
    lines += ["", head, "| --- " * 8 + "|"]
    for row in results["noise"]:
        cells = [row["audit"], f"{row['claimed']:g}", f"{row['noise']:g}", f"{row['audits']}"]
        cells += [
            f"{row['contradicted']}",
            *(f"{row[n]:.2f}" for n in ("bound", "point", "allowed")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    below = sum(row["points_below"] for row in results["curve"])
    above = sum(row["points_above"] for row in results["curve"])
    points = sum(row["points"] for row in results["curve"])
    lines.append(
        f"The audit has {points} points: {below} lie below the claimed curve and {above} above it."
    )
    return "\n".join(lines)


def figure(results: dict) -> None:
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    row = results["curve"][0]
    rates = {name: np.array(value) for name, value in row["rates"].items()}
    alpha = np.geomspace(1e-4, 0.999, 300)
    left.plot(alpha, ndtr(ndtri(1 - alpha) - 1 / row["sigma"]), color="#0072B2", label="claimed")
    for bound, label in ((row["bound"], f"epsilon = {row['bound']:.2f} (bound)"),):
        excluded = np.maximum(1 - 1e-5 - np.exp(bound) * alpha, np.exp(-bound) * (1 - 1e-5 - alpha))
        left.plot(alpha, np.maximum(0, excluded), color="#D55E00", label=label)
    left.errorbar(
        rates["false_positive"],
        rates["false_negative"],
        xerr=np.abs(rates["false_positive_limits"] - rates["false_positive"]),
        yerr=np.abs(rates["false_negative_limits"] - rates["false_negative"]),
        fmt="o", markersize=3, linewidth=0.8, color="0.2", label="attack (99.9% limits, jointly)",
    )  # fmt: skip
    left.set(xscale="log", xlim=(1e-4, 1), xlabel="false-positive rate")
    left.set(ylabel="false-negative rate", title="One step, claimed epsilon 4")
    left.legend()
    for name, marker in (("DPSVI, one step", "."), ("DPSVI", "o"), ("VIPS", "s"), ("DPSEP", "^")):
        rows = results["steps"] + results["runs"]
        rows = [row for row in rows if row["inference"] == name]
        right.plot(
            [row["claimed"] for row in rows], [row["bound"] for row in rows], marker,
            color="#0072B2", alpha=0.7, label=name,
        )  # fmt: skip
    rows = [row for row in results["faults"] if not row["fault"].startswith("none")]
    right.plot(
        [row["claimed"] for row in rows], [row["bound"] for row in rows], "x", color="#D55E00",
        label="with a planted fault",
    )  # fmt: skip
    right.plot([0, 8.5], [0, 8.5], color="0.6", linestyle=":", label="bound = claim")
    right.set(xlabel="claimed epsilon", ylabel="audit's lower bound (99.9%)")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(FIGURE, dpi=150)


def main() -> None:
    warnings.simplefilter("ignore", NotPrivateWarning)  # made-up data
    warnings.simplefilter("ignore", ConvergenceWarning)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=[], choices=tuple(PARTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, for a quick look")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in options.parts:
        print(part, flush=True)
        results[part] = PARTS[part](options.share)
        if options.share == 1.0:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if PARTS.keys() <= results.keys():
        print(table(results))
        figure(results)


if __name__ == "__main__":
    main()
