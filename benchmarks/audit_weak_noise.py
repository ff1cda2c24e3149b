"""Audits of what the package releases, with the noise that it claims and with less.

Eight mechanisms release the sums of a data set with a canary, and of the same data without it. The
attacker has both sums to the last digit, and scores along their difference: against Gaussian noise
no score is better. The package makes the sums and the release. The benchmark scales its noise.

* One full-batch step of ``DPSVI``, and the first release of one of ``VIPS``.
* One release of ``DPSEP`` without a bound, sites and histogram of norms together. Two more audits
  see one of the two blocks alone, with noise that gives this block the claimed epsilon.
* The same at a deterministic site, and the first release of a run, which is two histograms.
* The one release of ``Synthesizer``, and that of ``DPStandardScaler``.
* Whole runs of ``private_selection``, with one Gaussian sum in each trial. Only the winner is seen.

"Exact" is the epsilon that the attacked release has with the noise that it got. If it is below the
claim, no audit of these outputs can refute the claim.

Each audit has fresh noise and coins. They are independent: ``[seed, 1]`` and ``seed``.

    python benchmarks/audit_weak_noise.py
    python benchmarks/audit_weak_noise.py --report
"""

import argparse
import contextlib
import csv
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pyro
import torch
from audit import (
    CANARIES,
    DIM,
    SIZE,
    WhitenedRelease,
    any_frame,
    claims,
    full_batch,
    linear,
    model,
    records,
    shrunk,
    worlds,
)
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from scipy import optimize, stats

import pyro_dp.mechanism.releases
from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    AuditResult,
    ConvergenceWarning,
    DPStandardScaler,
    FullBatch,
    Noise,
    NotPrivateWarning,
    PrivacyAccountant,
    PrivacyWarning,
    SubsampledGaussian,
    TruncatedNegativeBinomial,
    audit,
    private_selection,
)
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.release import release
from pyro_dp.tabular import Category, Schema, Synthesizer
from pyro_dp.vips import LogisticRegression

RESULTS = Path(__file__).parent / "results" / "audit_weak_noise.csv"
EPSILON, TRIALS, SELECTIONS = 4.0, 10_000, 3000
WORLDS = [np.zeros(1)], [1.0]  # a run gets whether the canary takes part
NO_CANARY, CANARY = 0, 1


class Scaled:
    """A stream of noise with this part of its standard deviation."""

    def __init__(self, part: float, seed: int):
        self.part, self.stream = part, np.random.default_rng([seed, 1])

    def standard_normal(self, size):
        return self.part * self.stream.standard_normal(size)


class Sums:
    """The sums of one step with and without the canary, before the noise.

    :param worlds: the clipped sum without the canary, and with it.
    :param event: the release as the ledger has it.
    """

    def __init__(self, worlds: tuple[ClippedSum, ClippedSum], event: SubsampledGaussian):
        self.worlds, self.event = worlds, event
        self.claim = event
        self.ways = [
            (one - other).numpy() / (block.bound**2 / block.share)
            for one, other, block in zip(
                worlds[CANARY]._totals, worlds[NO_CANARY]._totals, worlds[CANARY].blocks,
                strict=True,
            )
        ]  # fmt: skip

    @property
    def reach(self) -> float:
        """The norm of the canary's part, as a share of what one record may have."""
        blocks = self.worlds[CANARY].blocks
        return sum(
            float(way @ way) * block.bound**2 / block.share
            for way, block in zip(self.ways, blocks, strict=True)
        ) ** 0.5  # fmt: skip

    def exact(self, part: float) -> float:
        """Epsilon of a release with this part of its noise."""
        noise = part * self.claim.noise_multiplier
        return claims(replace(self.claim, noise_multiplier=noise)).get_epsilon()

    def score(self, released: list) -> float:
        return sum(float(way @ one.numpy()) for way, one in zip(self.ways, released, strict=True))

    def audited(self, part: float, seed: int) -> AuditResult:
        noise = Scaled(part, seed)

        def run(included):
            return release(
                self.worlds[int(included[0])], accountant=PrivacyAccountant(), event=self.event,
                noise=noise,
            )  # fmt: skip

        return audit(
            run, *WORLDS, num_trials=TRIALS, score=self.score, claim=claims(self.claim), seed=seed,
            progress=False,
        )  # fmt: skip


class OneBlock(Sums):
    """The same, if the attacker sees one block.

    :param place: which block, counted from 0.
    """

    def __init__(self, sums: Sums, place: int):
        self._share = sums.worlds[CANARY].blocks[place].share
        sigma = sums.event.noise_multiplier * self._share**0.5
        joint = replace(sums.event, noise_multiplier=sigma)
        super().__init__(sums.worlds, joint)
        self.claim = sums.event
        self.ways = [way * (i == place) for i, way in enumerate(self.ways)]

    @property
    def reach(self) -> float:
        return super().reach / self._share**0.5


@contextlib.contextmanager
def kept() -> Iterator[list]:
    """Clipped sums and events of all releases."""
    releases = []

    def keeping(clipped, *, event, **settings):
        releases.append((clipped, event))
        return release(clipped, event=event, **settings)

    with mock.patch.object(pyro_dp.mechanism.releases, "release", keeping):
        yield releases


def released(infer: Callable, with_it, without) -> Sums:
    """The first release of a run on either data set. Both runs start from the same state."""
    found = []
    for data in (without, with_it):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        with kept() as releases:
            infer(data)
        found.append(releases[0])
    (other, event), (one, _) = found
    return Sums((other, one), event)


def rows() -> tuple:
    """A regression's data with the canary in front."""
    (x, y), canary = records()
    x[0], y[0] = canary
    return x, y


def gradients() -> Sums:
    def infer(data):
        svi = DPSVI(
            model, AutoDiagonalNormal(model, init_scale=0.01), pyro.optim.SGD({"lr": 0.1}),
            Trace_ELBO(), accountant=PrivacyAccountant(), num_steps=1, sampling=FullBatch(),
            noise=Noise(full_batch(EPSILON).noise_multiplier, source=0), clip=0.5,
        )  # fmt: skip
        svi.run(*data, progress=False)

    x, y = rows()
    return released(infer, (x, y), (x[1:], y[1:]))


def statistics() -> Sums:
    def infer(data):
        vips = VIPS(
            LogisticRegression(DIM), accountant=PrivacyAccountant(), num_steps=1,
            sampling=FullBatch(), noise=Noise(full_batch(EPSILON).noise_multiplier, source=0),
        )  # fmt: skip
        vips.run(*data, progress=False)

    x, y = rows()
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    return released(infer, (x, y), (x[1:], y[1:]))


def sites(model: Callable = model) -> Sums:
    seed, event = 3, full_batch(EPSILON)  # the seed of this canary in audit.py
    made = WhitenedRelease(event, any_frame(seed), seed, model)
    without, with_it = (made.clipped(*each) for each in worlds(CANARIES["mislabelled"], seed))
    return Sums((without, with_it), event)


def opening() -> Sums:
    """The first release for a regression with an unknown scale: two histograms of norms."""

    def infer(data):
        sigma = full_batch(EPSILON).noise_multiplier / 10  # the opening has ten times the noise
        DPSEP(
            linear, AutoDiagonalNormal(linear), accountant=PrivacyAccountant(),
            noise=Noise(sigma, source=0),
        ).step(*data)  # fmt: skip

    x, y = rows()
    return released(infer, (x, y), (x[1:], y[1:]))


def margins() -> Sums:
    schema = Schema({name: Category(tuple("abc")) for name in ("first", "second", "third")})
    codes = np.random.default_rng(0).integers(3, size=(SIZE, 3))
    frame = pd.DataFrame(np.array(list("abc"))[codes], columns=schema.names)

    def infer(data):
        Synthesizer(
            schema, accountant=PrivacyAccountant(EPSILON), components=2, noise=Noise(source=0)
        ).fit(data)  # fmt: skip

    return released(infer, frame, frame[1:])


def moments() -> Sums:
    x = np.random.default_rng(0).uniform(-1.0, 1.0, (SIZE, DIM))
    x[0] = 1.0
    sigma = full_batch(EPSILON).noise_multiplier

    def infer(data):
        DPStandardScaler(
            (-1.0, 1.0), accountant=PrivacyAccountant(), noise=Noise(sigma, source=0)
        ).fit(data)  # fmt: skip

    return released(infer, x, x[1:])


class Winner:
    """The best of a random number of Gaussian sums, two on average; its score is the sum."""

    reach = 1.0
    event = SubsampledGaussian(1.5)

    def __init__(self):
        self.trials = TruncatedNegativeBinomial(mean=2.0)
        self.worlds = []
        for value in (0.0, 1.0):
            clipped = ClippedSum([Block(1, 1.0)])
            clipped.add(torch.tensor([[value]]))
            self.worlds.append(clipped)

    def selected(self, world: ClippedSum, noise: Scaled, accountant: PrivacyAccountant) -> float:
        def trial(setting, own):
            (total,) = release(world, accountant=own, event=self.event, noise=noise)
            return total.item(), total.item()

        best = private_selection(
            trial, [0], releases={self.event: 1}, accountant=accountant, trials=self.trials,
            generator=int(noise.stream.integers(2**31)),
        )  # fmt: skip
        return best.score

    def exact(self, part: float) -> float:
        """Epsilon of the largest of K sums, K of a logarithmic law, from its two densities."""
        sd, delta = part * self.event.noise_multiplier, claims(self.event).delta

        def excess(rest):
            return (rest - 1) / (rest * np.log(rest)) - self.trials.mean

        more = 1 - optimize.brentq(excess, 1e-6, 1 - 1e-6)
        x = np.linspace(-15 * sd, 1 + 15 * sd, 400_001)

        def density(mean):
            z = (x - mean) / sd
            one = stats.norm.pdf(z) / sd
            return one * more / -np.log1p(-more) / (1 - more * stats.norm.cdf(z))

        def epsilon(p, q):
            def beyond(eps):
                return np.trapezoid(np.maximum(p - np.exp(eps) * q, 0), x) - delta

            return optimize.brentq(beyond, 0, 50)

        worlds = density(0.0), density(1.0)
        return max(epsilon(*worlds), epsilon(*worlds[::-1]))

    def audited(self, part: float, seed: int) -> AuditResult:
        noise, claim = Scaled(part, seed), PrivacyAccountant()
        self.selected(self.worlds[CANARY], noise, claim)
        return audit(
            lambda included: self.selected(
                self.worlds[int(included[0])], noise, PrivacyAccountant()
            ),
            *WORLDS, num_trials=SELECTIONS, score=float, claim=claim, seed=seed, progress=False,
        )  # fmt: skip


MECHANISMS = {
    "DPSVI, one step": gradients,
    "DPSEP, one release": sites,
    "DPSEP, its sites": lambda: OneBlock(sites(), 0),
    "DPSEP, its histogram": lambda: OneBlock(sites(), 1),
    "DPSEP at a deterministic site": lambda: sites(shrunk),
    "DPSEP, its opening": opening,
    "DPSEP, norms of real latents": lambda: OneBlock(opening(), 0),
    "DPSEP, norms of a scale": lambda: OneBlock(opening(), 1),
    "VIPS, first release": statistics,
    "Synthesizer": margins,
    "DPStandardScaler": moments,
    "private_selection": Winner,
}
PARTS = {  # others have 1 and .8 of the noise
    "private_selection": (1.0, 0.8, 0.2),
    "DPSEP, its sites": (1.0, 0.8, 0.5),
    "DPSEP, its histogram": (1.0, 0.8, 0.5),
    "DPSEP, norms of real latents": (1.0, 0.8, 0.5),
    "DPSEP, norms of a scale": (1.0, 0.8, 0.5),
}


def measured(names: list[str], audits: int) -> list[dict]:
    lines = []
    for name in names:
        mechanism = MECHANISMS[name]()
        for part in PARTS.get(name, (1.0, 0.8)):
            start = time.perf_counter()
            results = [mechanism.audited(part, seed) for seed in range(audits)]
            lines.append(
                {
                    "mechanism": name,
                    "noise": part,
                    "runs": results[0].coins * 5 // 4,
                    "reach": round(mechanism.reach, 3),
                    "claimed": round(results[0].claimed_epsilon, 3),
                    "exact": round(mechanism.exact(part), 3),
                    "audits": audits,
                    "below": sum(each.bound < each.claimed_epsilon for each in results),
                    "found": sum(each.contradicts_claim for each in results),
                    "bound": round(float(np.median([each.bound for each in results])), 3),
                }
            )
            print(f"{time.perf_counter() - start:.0f} s", lines[-1], flush=True)
    return lines


def report(lines: list[dict]) -> str:
    text = ["| released by | claimed | runs | noise | exact | median bound | below | found |"]
    text.append("| --- " * 8 + "|")
    for row in lines:
        counts = [f"{row[each]} of {row['audits']}" for each in ("below", "found")]
        cells = [row["mechanism"], f"{float(row['claimed']):.2f}", f"{int(row['runs']):,}"]
        cells += [f"{float(row['noise']):g}", f"{float(row['exact']):.2f}"]
        cells += [f"{float(row['bound']):.2f}", *counts]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    for category in (NotPrivateWarning, ConvergenceWarning, PrivacyWarning):
        warnings.simplefilter("ignore", category)  # made-up data
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audits", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(MECHANISMS), choices=list(MECHANISMS))
    parser.add_argument("--report", action="store_true", help="print the table of the stored CSV")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if not options.report:
        lines = measured(options.only, options.audits)
        if RESULTS.exists():
            with RESULTS.open(newline="") as file:
                old = [row for row in csv.DictReader(file) if row["mechanism"] not in options.only]
            lines = sorted([*old, *lines], key=lambda row: list(MECHANISMS).index(row["mechanism"]))
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, lines[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    with RESULTS.open(newline="") as file:
        print(report(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
