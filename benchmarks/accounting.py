"""Random ledgers: the accountant's epsilon and delta between independent bounds.

``python benchmarks/accounting.py [cases] [seed]`` prints a table and exits with 1 on a violation.

The bounds share no code with the package:

* *lower*: outcomes are merged into cells, which only loses information. Each cell's loss is rounded
  down to a grid. A plain FFT in extended precision convolves the steps. Its rounding error and the
  mass that wraps around upwards are subtracted. The edges put each cell's loss just above a grid
  point, so little is lost.
* *reference*: ``dp_accounting``, pessimistic; for ``replace_one`` with the profiles written out
  below. For ``add_or_remove_one`` also its optimistic mode, as a second lower bound.
"""

import math
import sys
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import fft
from scipy.special import logsumexp, ndtr, ndtri_exp

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import SubsampledGaussian

POINTS = 1 << 17
KINDS = ("poisson, add or remove", "poisson, replace", "fixed, replace", "mixed")


class Branch(NamedTuple):
    """P = (1-a) N(0, s^2) + a N(1, s^2) against Q = (1-b) N(0, s^2) + b N(-1, s^2).

    The loss increases with the outcome. It is >= 0 (``sign`` 1), <= 0 (-1) or anything (0).
    """

    s: float
    a: float
    b: float
    sign: int = 0

    def loss(self, x):
        def density(weight, exponent):
            with np.errstate(divide="ignore"):
                return np.logaddexp(np.log1p(-weight), np.log(weight) + exponent)

        up = density(self.a, (x - 0.5) / self.s**2)
        return up - density(self.b, -(x + 0.5) / self.s**2)

    def tails(self, x, weight, mean):
        """P(X <= x) and P(X > x) of one of the mixtures."""
        z, w = x / self.s, (x - mean) / self.s
        return [(1 - weight) * ndtr(t * z) + weight * ndtr(t * w) for t in (1, -1)]

    def masses(self, x):
        """P and Q between the outcomes x."""
        for weight, mean in ((self.a, 1.0), (self.b, -1.0)):
            low, high = self.tails(x, weight, mean)
            yield np.where(low[1:] < 0.5, np.diff(low), -np.diff(high))

    def ends(self, log_tail):
        reach = -float(ndtri_exp(log_tail)) * self.s
        zero = 0.5 if self.b == 0.0 else -0.5 if self.a == 0.0 else 0.0
        low = zero if self.sign > 0 else -reach - (self.b > 0)
        return low, zero if self.sign < 0 else reach + (self.a > 0)

    def outcomes(self, losses, ends):
        low, high = (np.full(len(losses), end) for end in ends)
        for _ in range(52):
            middle = 0.5 * (low + high)
            up = self.loss(middle) < losses
            low, high = np.where(up, middle, low), np.where(up, high, middle)
        return high


class Step(NamedTuple):
    branches: tuple[Branch, ...]
    atom: float  # probability of loss 0 beside the branches

    def delta(self, eps):
        """The exact profile at epsilons."""
        if len(self.branches) == 2:  # these hold for positive epsilons
            value = Step(self.branches[:1], 0.0).delta(np.abs(eps))
            return np.where(eps < 0.0, -np.expm1(eps) + np.exp(np.minimum(eps, 0.0)) * value, value)
        branch = self.branches[0]
        x = branch.outcomes(eps, branch.ends(-700.0))
        p, q = branch.tails(x, branch.a, 1.0)[1], branch.tails(x, branch.b, -1.0)[1]
        return p - np.exp(eps) * q


def remove(s, q):
    return Step((Branch(s, q, 0.0),), 0.0)


def add(s, q):
    return Step((Branch(s, 0.0, q),), 0.0)


def replace(s, q):
    return Step((Branch(s, q, q),), 0.0)


def fixed(s, q):
    """The profile of Zhu, Dong & Wang (2022) for subsets without replacement."""
    p, r = (1 - q) * ndtr(-0.5 / s) + q * ndtr(0.5 / s), ndtr(-0.5 / s)
    return Step((Branch(s, q, 0.0, 1), Branch(s, 0.0, q, -1)), max(0.0, 1.0 - p - r))


def moments(step, rates):
    """log E exp(rate * loss) under P by a Riemann sum; it only positions windows."""
    logs = [np.log(step.atom) + 0.0 * rates] if step.atom else []
    for branch in step.branches:
        low, high = branch.ends(-90.0)
        x = np.linspace(low, high, 20_001)
        (p, _) = branch.masses(x)
        with np.errstate(divide="ignore"):
            logs.append(logsumexp(rates[:, None] * branch.loss(x[:-1]) + np.log(p), axis=1))
    return logsumexp(logs, axis=0)


def window(ledger, delta):
    """Composed losses outside of this hold 1e-6 of delta on either side, about."""
    rates = np.geomspace(1e-3, 1e6, 60)
    up = sum(n * moments(step, rates) for step, n in ledger)
    down = sum(n * moments(step, -rates) for step, n in ledger)
    log_cut = math.log(delta * 1e-6)
    return np.max((log_cut - down) / rates), np.min((up - log_cut) / rates)


def merged(branch, gap, log_tail):
    """Grid indices and probabilities, each with at most the loss that its outcomes have merged."""
    ends = branch.ends(log_tail)
    least, most = branch.loss(np.array(ends))
    ticks = np.arange(math.floor(least / gap), math.ceil(most / gap) + 1)
    shift = np.zeros(len(ticks) + 1)
    for _ in range(4):
        edges = np.append(ticks - 0.5, ticks[-1] + 0.5) * gap + shift
        p, q = branch.masses(np.maximum.accumulate(branch.outcomes(edges, ends)))
        with np.errstate(all="ignore"):
            exact = np.log(p) - np.log(q)
        short = np.where(np.isfinite(exact), np.maximum(0.0, ticks * gap - exact), 0.0)
        shift += 1.05 * np.maximum(np.append(short, 0.0), np.append(0.0, short))
        shift = np.minimum(shift, 0.45 * gap)
    some = np.isfinite(exact)
    return np.floor(exact[some] / gap + 1e-7).astype(int), p[some]


class Lower:
    """Lower bounds of a composition's epsilon and delta."""

    def __init__(self, ledger, delta, points=POINTS):
        low, high = window(ledger, delta)
        self.gap = gap = (high - low) / (points - 128)
        low -= 64.0 * gap  # a cell's loss is rounded down, but few by a whole cell
        self.first = math.floor(low / gap)
        size, spectrum = fft.next_fast_len(points, real=True), 1.0
        total = sum(n for _, n in ledger)
        rates = np.geomspace(1e-3, 1e6, 60)
        below = rates * low  # Chernoff bound of log P(loss < low), for what wraps around upwards
        for step, n in ledger:
            probs = np.zeros(size, np.longdouble)
            probs[0] = step.atom
            logs = [np.log(step.atom) + 0.0 * rates] if step.atom else []
            for branch in step.branches:
                ticks, p = merged(branch, gap, math.log(delta * 1e-6 / total))
                np.add.at(probs, ticks % size, p)
                logs.append(logsumexp(np.log(p) - rates[:, None] * gap * ticks, axis=1))
            below = below + n * logsumexp(logs, axis=0)
            spectrum = spectrum * _power(fft.rfft(probs), n)
        probs = np.roll(fft.irfft(spectrum, size), -self.first)
        self.losses = gap * (self.first + np.arange(size)).astype(np.longdouble)
        self.above = np.cumsum(probs[::-1])[::-1]
        self.dual = np.cumsum((probs * np.exp(-(self.losses - self.losses[0])))[::-1])[::-1]
        self.error = math.exp(min(0.0, np.min(below))) + 1e-18 * (total + 100)

    def delta(self, eps):
        i = max(0, math.ceil(float(eps) / self.gap) - self.first)
        if i >= len(self.losses):
            return 0.0
        with np.errstate(all="ignore"):
            value = self.above[i] - np.exp(np.longdouble(eps - self.losses[0])) * self.dual[i]
        return min(1.0, float(value - self.error)) if value > self.error else 0.0

    def epsilon(self, delta):
        low, high = 0.0, max(0.0, float(self.losses[-1]))
        if self.delta(low) <= delta:
            return 0.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return low


def _power(z, n):
    result = 1.0
    while n:
        if n & 1:
            result = result * z
        z, n = z * z, n >> 1
    return result


def written_out(step, gap, delta, total):
    """The step's pessimistic distribution by ``dp_accounting``, from its profile."""
    tail = math.log(delta * 1e-5 / total)
    ends = [branch.loss(np.array(branch.ends(tail))) for branch in step.branches]
    first, last = math.floor(np.min(ends) / gap), math.ceil(np.max(ends) / gap)
    deltas = step.delta(np.arange(first, last + 1) * gap)
    deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(gap, first, last, deltas)


def theirs(events, ledgers, gap, delta, pessimistic=True):
    """The composition by ``dp_accounting``: an object with its epsilon and delta."""
    total = sum(n for _, n in ledgers[0])
    if len(ledgers) == 2:
        parts = [
            privacy_loss_distribution.from_gaussian_mechanism(
                event.noise_multiplier,
                sampling_prob=event.sample_rate,
                value_discretization_interval=gap,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
                log_mass_truncation_bound=math.log(delta * 1e-5 / total),
            ).self_compose(n)
            for event, n in events
        ]
    else:
        parts = [written_out(step, gap, delta, total).self_compose(n) for step, n in ledgers[0]]
    whole = parts[0]
    for part in parts[1:]:
        if len(ledgers) == 1:
            whole, part = whole.to_dense_pmf(), part.to_dense_pmf()
        whole = whole.compose(part)
    return whole


def dominating(event, relation):
    """The pairs of one event, one per direction."""
    s, q = event.noise_multiplier, event.sample_rate
    if relation == "add_or_remove_one":
        return remove(s, q), add(s, q)
    return (fixed(s / 2, q),) if event.sampling == "fixed" else (replace(s, q),)


def draw(rng, kind):
    """A ledger, its relation and delta."""
    mixed = kind == 3
    by_one = kind == 0 or (mixed and rng.random() < 0.4)
    relation = "add_or_remove_one" if by_one else "replace_one"
    events = {}
    for _ in range(rng.integers(2, 5) if mixed else 1):
        fixed_size = kind == 2 or (mixed and not by_one and rng.random() < 0.5)
        rate = 1.0 if rng.random() < 0.05 else 10.0 ** rng.uniform(-4, 0)
        sigma = math.exp(rng.uniform(math.log(0.3), math.log(50)))
        event = SubsampledGaussian(sigma, rate, "fixed" if fixed_size else "poisson")
        events[event] = round(10.0 ** rng.uniform(0, 5))
    return events, relation, 10.0 ** rng.uniform(-12, -3)


def check(events, relation, delta, points=POINTS, with_theirs=True):
    """
    :returns: values by name; a bound is absent where it would be too expensive or says nothing.
    """
    out = {"steps": sum(events.values())}
    start = time.perf_counter()
    composition._pld_epsilon.cache_clear()
    composition._pld_delta.cache_clear()
    out["epsilon"] = composition.epsilon(events, delta, relation, "pld")
    out["seconds"] = time.perf_counter() - start
    eps = min(out["epsilon"], 500.0)
    out["delta"] = composition.delta(events, eps, relation, "pld")
    sides = [dominating(event, relation) for event in events]
    ledgers = [list(zip(side, events.values(), strict=True)) for side in zip(*sides, strict=True)]
    for size in (points, 8 * points):  # the finer one only where the coarser one says little
        lowers = [Lower(ledger, delta, size) for ledger in ledgers]
        out["lower epsilon"] = max(lower.epsilon(delta) for lower in lowers)
        if out["steps"] < 100 or out["lower epsilon"] >= 0.99 * out["epsilon"]:
            break
    out["lower delta"] = max(lower.delta(eps) for lower in lowers)
    gap = 4.0 * min(lower.gap for lower in lowers)
    widest = max(
        float(np.ptp(branch.loss(np.array(branch.ends(-50.0)))))
        for step, _ in ledgers[0]
        for branch in step.branches
    )
    most = 100_000
    if with_theirs and widest / gap < most:
        start = time.perf_counter()
        with np.errstate(all="ignore"):
            reference = theirs(events.items(), ledgers, gap, delta)
        out["their epsilon"] = reference.get_epsilon_for_delta(delta)
        out["their seconds"] = time.perf_counter() - start
        granted = max(1e-300, delta - 2e-16 * out["steps"])
        out["their largest epsilon"] = reference.get_epsilon_for_delta(granted)
        out["their delta"] = reference.get_delta_for_epsilon(eps)
        if len(ledgers) == 2:
            with np.errstate(all="ignore"):
                optimistic = theirs(events.items(), ledgers, gap, delta, False)
            out["their lower epsilon"] = optimistic.get_epsilon_for_delta(delta)
    return out


def violations(out):
    """List the bounds that a checked case violates.

    ``dp_accounting`` has rounding errors of about 1e-16 per step in delta, of either sign. Its
    pessimistic values are allowed twice that, and its lower bound of epsilon 0.01%.
    """
    wrong = []
    for name, small in (("epsilon", 1e-9), ("delta", 0.0)):
        if out[name] < out[f"lower {name}"] * (1.0 - 1e-12) - small:
            wrong.append(f"{name} below the lower bound")
    if out["epsilon"] < out.get("their lower epsilon", 0.0) * (1.0 - 1e-4) - 1e-9:
        wrong.append("epsilon below dp_accounting's lower bound")
    if out["epsilon"] > 1.001 * out.get("their largest epsilon", math.inf) + 1e-7:
        wrong.append("epsilon above the reference")
    if out["delta"] > 1.001 * out.get("their delta", math.inf) + 2e-16 * out["steps"]:
        wrong.append("delta above the reference")
    return wrong


def main(cases=400, seed=0):
    """Check random ledgers and print a table, a row for each kind of ledger."""
    rng, rows, wrong = np.random.default_rng(seed), defaultdict(list), []
    for case in range(cases):
        kind = case % len(KINDS)
        events, relation, delta = draw(rng, kind)
        out = check(events, relation, delta)
        rows[KINDS[kind]].append(out)
        found = violations(out)
        if found:
            wrong.append((events, relation, delta, found, out))
    print(
        "kind | cases | violations | excess of epsilon: median, 90%, most | excess of delta: same"
    )
    print("     | against dp_accounting: cases, most above, most below | mean seconds: ours, its")
    for kind, outs in rows.items():
        print(f"{kind} | {len(outs)} | {sum(bool(violations(o)) for o in outs)}", end="")
        for name in ("epsilon", "delta"):
            excess = [o[name] / o["lower " + name] - 1.0 for o in outs if o["lower " + name] > 1e-8]
            print(" | " + ", ".join(f"{v:.1e}" for v in np.quantile(excess, [0.5, 0.9, 1])), end="")
        both = [o for o in outs if o.get("their epsilon", 0.0) > 1e-6]
        ratios = [o["epsilon"] / o["their epsilon"] - 1.0 for o in both]
        times = [np.mean([o[name] for o in both]) for name in ("seconds", "their seconds")]
        print(f" | {len(both)}, {max(ratios):.1e}, {min(ratios):.1e}", end="")
        print(f" | {times[0]:.3f}, {times[1]:.3f}", flush=True)
    for case in wrong:
        print("violation:", *case)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
