"""The state of DPSEP: its looks so far, their posterior, and the plan of the next look.

All of it is public. States are immutable: :meth:`EPState.learned` makes a new one from a release.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.infer.ep.look_plan import (
    FIRST,
    LEAST_SHARE,
    MOST_LOOKS,
    MOST_WITHOUT_NOISE,
    OPENING,
    Frame,
    LookPlan,
)
from pyro_dp.infer.ep.norm_counts import ExtremeCounts
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.seen_looks import SeenLooks, opened
from pyro_dp.infer.ep.site_factors import LARGEST_FULL, Full
from pyro_dp.infer.ep.site_sum import OpeningSum, SiteSum, WhitenedSum
from pyro_dp.infer.posterior.looks import Look, PooledLooks, next_step
from pyro_dp.infer.posterior.posterior import CLIPPING, NOISE
from pyro_dp.infer.posterior.prior_factor import combined
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.norm_histogram import SHARE, SIZE, Norms
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import Gaussian, dense, inverse, restricted

_LARGEST_SCORE = 10.0  # norm of a score, relative to the root of the curvature; few are larger
_FIRST_SD = 0.1  # largest standard deviation of the first q
_SHORTEST_STEP = 1e-12
_ARRIVED = 1e-9  # roots of nats per record: without noise, the last step
_FARTHEST = 3.0  # longest step in a coordinate, in standard deviations of the first prior
_SHORT = 0.25  # longest step without clipping, because derivatives may be of any size
_TURNED = 0.3  # minus the cosine with the last step, if that step was too long
_FASTEST = 4.0  # change of the scale in one step
_GROWTH = 2.0  # factor by which the share grows from look to look
_FINAL = 0.45  # a look that would take this fraction of the rest takes all of it
_FAR = 4.0  # looks stay small while a step gains this multiple of the nats that its noise costs
_WASTED = 1.4  # looks stay small above this ratio of the noise to that in better coordinates
_MOST_ALIKE = 3  # consecutive looks of one share; more of them would resolve nothing new
_UNRESOLVED = 1.0  # relative noise of the curvature
_TOO_MANY = (
    "There are {dim} latents. All entries of their precision are released, which is of no use for "
    "more than {most}. Use DPSVI, or PaperDPSEP with precision='diagonal'."
)
_GAUSSIANS = ("posterior", "aware", "prior", "first_prior")


@dataclass(frozen=True, eq=False)
class Stride:
    """The last step, and the longest next one.

    :param radius: longest step, in roots of nats per record.
    :param way: the last step in the latents of the likelihood, (d,); None: there was none.
    """

    radius: float = math.inf
    way: Tensor | None = None

    def next_radius(self, step: Tensor, pooled: PooledLooks, longest: float) -> float:
        """The longest next step: half the last one if the step turns back, else twice as long."""
        if self.way is None:
            return min(self.radius, longest)
        before = pooled.length(self.way)
        product = (step @ pooled.curvature @ self.way).item() / pooled.size
        back = product < -_TURNED * max(before * pooled.length(step), _SHORTEST_STEP**2)
        return before / 2 if back else min(2 * self.radius, longest)


@dataclass(frozen=True, eq=False)
class EPState:
    """q = prior * evidence.

    :param posterior: q on all latents, without the uncertainty of the noise.
    :param aware: q with this uncertainty, and the same mean.
    :param prior: the prior as a factor, refined at q.
    :param first_prior: the prior as a factor at the first q.
    :param first_mean: mean of the first q, (d,).
    :param spent: the spent share of the budget.
    :param share: the next look's share of the budget.
    :param frame: the next look's frame; None: the next look is the opening.
    :param alike: number of consecutive looks of this share, the next one included.
    """

    problem: EPProblem
    seen: SeenLooks
    posterior: Gaussian
    aware: Gaussian
    prior: Gaussian
    first_prior: Gaussian
    first_mean: Tensor
    spent: float = 0.0
    share: float = OPENING
    alike: int = 1
    frame: Frame | None = None
    stride: Stride = Stride()

    @staticmethod
    def start(problem: EPProblem, size: int, multiplier: float, *, new: bool) -> "EPState":
        """The state before the opening. q has the guide's initial values.

        :param multiplier: as for :class:`LookPlan`; so is size.
        :param new: nothing has used the guide yet, and q begins at :meth:`EPProblem.start`.
        """
        mean, covariance = problem.guide.read()
        covariance = _narrowed(dense(covariance))
        dim = len(problem.places)
        if dim > LARGEST_FULL:
            raise ModelError(_TOO_MANY.format(dim=dim, most=LARGEST_FULL))
        posterior = Gaussian.from_moments(mean, covariance)
        prior = problem.prior.factor(mean, posterior.covariance)
        if new:
            posterior = Gaussian.from_moments(problem.start(mean), covariance)
        seen = SeenLooks(LookPlan(dim, size, multiplier, problem.moments.residuals))
        first = EPState(problem, seen, posterior, posterior, prior, prior, posterior.mean)
        # Without noise, nothing is clipped, and there is no opening.
        return first if multiplier else replace(first, frame=first._first_frame(), share=0.0)

    @property
    def plan(self) -> LookPlan:
        return self.seen.plan

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the next look. The opening has histograms of norms alone."""
        if self.frame is None:
            groups = self.problem.groups
            return tuple(Block(SIZE, 1.0, 1 / len(groups)) for _ in groups)
        bound = self.frame.bound
        size = len(self.problem.places) + Full(self.problem.widths).size + 1
        if bound == math.inf:  # nothing is clipped
            return (Block(size, bound),)
        return Block(size + self.plan.num_extremes, bound, 1.0 - SHARE), Block(SIZE, 1.0, SHARE)

    def site_sum(self, microbatch_size: int | None) -> SiteSum:
        """The sum that computes looks."""
        count = 1 if self.plan.multiplier == 0 else 2
        return WhitenedSum(problem=self.problem, num_blocks=count, microbatch_size=microbatch_size)

    def next_sum(self, sites: SiteSum) -> SiteSum:
        """The sum that computes the next look or the opening."""
        if self.frame is not None:
            return sites
        count, size = len(self.problem.groups), sites.microbatch_size
        return OpeningSum(problem=self.problem, num_blocks=count, microbatch_size=size)

    @property
    def finished(self) -> bool:
        """Whether no look is left."""
        if self.plan.multiplier > 0:
            return self.spent >= 1.0
        last, seen = self.stride.way, self.seen
        arrived = last is not None and seen.required_pooled.length(last) < _ARRIVED
        return arrived or len(seen.looks) >= MOST_WITHOUT_NOISE

    def at(self, size: int) -> tuple[Gaussian, Frame]:
        """Cavity and frame of each of ``size`` records. The prior decides the opening's frame."""
        share = 1 - 1 / size
        cavity = self.posterior**share * self.prior ** (1 - share)
        return cavity, self.frame or self._first_frame()

    def learned(
        self,
        released: Sequence[Tensor],
        at: tuple[Gaussian, Frame],
        multiplier: float,
    ) -> tuple[float, "EPState"]:
        """The state after one more look, from its noisy numbers alone.

        :param released: one tensor a block.
        :param at: cavity and frame of the look.
        :returns: the step's length, in roots of nats per record, and the state after it.
        """
        multiplier /= math.sqrt(max(self.share, LEAST_SHARE))
        noises = [block.noise(multiplier) for block in self.blocks]
        spent = min(self.spent + self.share, 1.0)
        if self.frame is None:
            root, size = self._first_frame().root, self.plan.size
            q, scale, frame = opened(released, noises, self.problem, self.posterior, root, size)
            seen = replace(self.seen, scale=scale)
            moved = replace(self, posterior=q, aware=q, frame=frame, seen=seen)
            return 0.0, replace(moved, spent=spent, share=FIRST)
        point = at[0].mean[self.problem.places]
        seen = self.seen.with_look(point, self.frame, released, noises)
        return replace(self, seen=seen, spent=spent)._moved()

    def _moved(self) -> tuple[float, "EPState"]:
        """The length of the step to the mode of all looks, and the state after the step."""
        pooled, places, final = self.seen.required_pooled, self.problem.places, self._has_spent
        prior, aware = self._target(pooled)
        full = aware.mean - self.posterior.mean
        step = aware.mean[places] - self.seen.looks[-1].point
        # Lengths are in roots of nats per record.
        unclipped = self.plan.multiplier == 0 and self._may_have_saddles
        longest = _SHORT if unclipped else self.plan.kind.longest
        length, radius = pooled.length(step), self.stride.next_radius(step, pooled, longest)
        in_prior = max(_largest(full, self.first_prior), 1.0)
        part = min(1.0, radius / max(length, _SHORTEST_STEP), _FARTHEST / in_prior)
        mean = aware.mean if final else self.posterior.mean + part * full
        before, scale = self.seen.scale, pooled.curvature.trace().item() / self.plan.size
        scale = min(max(scale, before / _FASTEST), before * _FASTEST)
        moved = replace(
            self,
            seen=replace(self.seen, scale=scale),
            stride=Stride(radius, part * step),
            **self._posteriors(pooled, prior, mean),
        )
        return length, moved if final else moved._planned(step, part < 1)

    def _planned(self, step: Tensor, shortened: bool) -> "EPState":
        """The state with the next look's frame and share."""
        pooled, scale = self.seen.required_pooled, self.seen.scale
        precision = self.prior_seen() + pooled.curvature
        bound = self.required_frame.bound
        if bound == math.inf:
            ones = Norms.of(np.ones(1), np.full(1, float(self.plan.size)))
            root = self.plan.root(precision, pooled.curvature_noise, ones, scale, 1.0)
            return replace(self, frame=Frame.of(root, scale, bound))
        point = self.posterior.mean[self.problem.places]
        norms = self.seen.norms(point)
        root = self.plan.root(precision, pooled.curvature_noise, norms, scale, bound)
        near = self.seen.extremes_near(point)
        bound = self.plan.bound(norms, scale, near, self.dispersion)
        frame = Frame.of(root, scale, bound, pooled.relative_noise)
        gain = math.inf if shortened else 0.5 * (step @ precision @ step).item()
        share = self._next_share(frame, precision, gain)
        alike = self.alike + 1 if share == self.share else 1
        return replace(self, frame=frame, share=share, alike=alike)

    def _next_share(self, frame: Frame, precision: Tensor, gain: float) -> float:
        """The next look's share of the budget.

        :param frame: the next look's frame.
        :param gain: nats gained by the step after the last look; infinite if it was shortened.
        """
        share, plan, left, looks = self.share, self.plan, 1.0 - self.spent, self.seen.looks
        covariance, metric = inverse(precision), inverse(frame.root @ frame.root)
        # The trace of a product of symmetric matrices is the sum of their elements' products.
        sd = plan.multiplier * frame.bound
        noise = 0.5 * (covariance * metric).sum().item() * sd**2 / share
        geometry = looks[-1].geometry
        traces = (covariance * geometry).sum() * (inverse(geometry) * precision).sum()
        stays = gain > _FAR * noise or traces.item() / plan.dim**2 > _WASTED
        # Do not repeat a look that resolves nothing. Unbounded residuals are an exception: their
        # norms fall while the posterior moves, and early looks stay small.
        noisy = self.seen.required_pooled.relative_noise >= _UNRESOLVED
        unresolved = plan.residuals == Residuals.BOUNDED and noisy
        if unresolved or self.alike >= _MOST_ALIKE or not stays:
            share *= _GROWTH
        return left if len(looks) + 1 >= MOST_LOOKS or share >= _FINAL * left else share

    @property
    def _has_spent(self) -> bool:
        return self.plan.multiplier > 0 and self.spent >= 1.0

    @property
    def _may_have_saddles(self) -> bool:
        """Whether steps must allow for a log likelihood that is not concave.

        For moments from draws, they need not with noise: early looks are small, and many are pooled
        before steps are long.
        """
        moments = self.problem.moments
        return not moments.concave or (moments.careful and self.plan.multiplier == 0)

    def _target(self, pooled: PooledLooks) -> tuple[Gaussian, Gaussian]:
        """The prior's factor, and prior * evidence with the uncertainty of the noise."""
        turns = self.problem.moments.turns
        steps = self._may_have_saddles and not (turns or self._has_spent)
        first = dense(self.first_prior.precision).diagonal()[self.problem.places].clamp(min=1e-6)

        def evidence(mean: Tensor) -> Gaussian:
            if steps:
                return self.problem.on_all(next_step(pooled, self.seen.looks[-1], first))
            return self.problem.on_all(pooled.factor(pooled.information(mean[self.problem.places])))

        mean, prior = self.posterior.mean, self.prior
        if len(self.problem.places) < len(mean):
            # An early look may have moved a hierarchy's scale too far for the search to return.
            mean, prior = self.first_mean.clone(), self.first_prior
            mean[self.problem.places] = pooled.estimate
        return combined(self.problem.prior, evidence, mean, prior)

    def _posteriors(self, pooled: PooledLooks, prior: Gaussian, mean: Tensor) -> dict[str, Any]:
        """The prior, and q at this mean, without and with the uncertainty of the noise."""
        seen = mean[self.problem.places]
        bias = self.squared_bias * pooled.geometry + pooled.nonquadratic_error(seen)
        information = pooled.information(seen, bias)
        kept = pooled.curvature, information
        factors = [self.problem.on_all(pooled.factor(each)) for each in kept]
        precisions = [prior.precision + factor.precision for factor in factors]
        plain, aware = (Gaussian(precision @ mean, precision) for precision in precisions)
        return {"posterior": plain, "aware": aware, "prior": prior}

    @property
    def squared_bias(self) -> float:
        return self.seen.squared_bias(self.required_frame.bound, self.dispersion)

    @property
    def dispersion(self) -> float:
        """A lower limit of the scores' variance, relative to the curvature.

        If the model holds, the two are equal (the information identity; White 1982). Norms of
        bounded residuals do not depend on the outcome, and give no limit. The limit assumes equal
        curvatures of all records. In a mixture or an integral, unequal ones cancel in the sum.
        """
        bounded = self.plan.residuals == Residuals.BOUNDED
        if not self.seen.histograms or bounded or not self.problem.moments.concave:
            return 0.0
        frame, pooled = self.required_frame, self.seen.required_pooled
        point = self.posterior.mean[self.problem.places]
        curvature = (frame.root @ pooled.curvature @ frame.root).trace().item() / self.plan.size
        most = _LARGEST_SCORE * math.sqrt(curvature)
        squared = self.seen.histogram(point).least_mean_square(most)
        scores = squared - frame.counted**2 - (frame.weight * curvature) ** 2
        return scores / curvature

    def noise_parts(self) -> dict[str, Tensor]:
        """Contributions of privacy noise and clipping to the variances of the mean, (d,) each."""
        pooled, places = self.seen.pooled, self.problem.places
        if pooled is None:
            return {NOISE: torch.ones_like(self.posterior.eta)}
        gain = self.posterior.covariance[:, places]
        noise = pooled.noise(self.posterior.mean[places])
        parts = {NOISE: noise, CLIPPING: self.squared_bias * pooled.geometry}
        return {name: (gain @ part * gain).sum(dim=1) for name, part in parts.items()}

    def prior_seen(self) -> Tensor:
        """Precision of the marginal prior of the likelihood's latents, (d, d)."""
        places, precision = self.problem.places, dense(self.prior.precision)
        if len(places) == len(precision):
            return restricted(precision, places)
        return inverse(restricted(inverse(precision), places))

    def _first_frame(self) -> Frame:
        """A frame in units of the prior, without a bound."""
        precision = dense(self.prior.precision).diagonal()[self.problem.places]
        return Frame.of(torch.diag(precision.clamp(min=1e-6).rsqrt()), 1.0, math.inf)

    @property
    def clipped(self) -> ClippedFraction | None:
        """The fraction of norms above the last look's bound; None without histograms."""
        if not self.seen.histograms or self.frame is None:
            return None
        histogram = self.seen.histogram(self.posterior.mean[self.problem.places])
        return histogram.above(self.frame.bound)

    @property
    def required_frame(self) -> Frame:
        assert self.frame is not None
        return self.frame

    def state(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "looks": [vars(look) for look in seen.looks],
            "counts": list(seen.histograms),
            "extremes": [vars(each) for each in seen.extremes],
            "pooled": vars(seen.pooled) if seen.pooled else None,
            "frame": vars(self.frame) if self.frame else None,
            "plan": vars(self.plan),
            "gaussians": {n: vars(getattr(self, n)) for n in _GAUSSIANS},
            "numbers": {n: getattr(self, n) for n in ("first_mean", "spent", "share", "alike")}
            | {"scale": seen.scale, "weight": seen.weight, **vars(self.stride)},
        }

    def resumed(self, state: Mapping[str, Any]) -> "EPState":
        pooled, frame = state["pooled"], state["frame"]
        extremes = state.get("extremes") or []  # the oldest states have none
        extremes = [extremes] if isinstance(extremes, Mapping) else extremes
        gaussians: Any = {name: Gaussian(**state["gaussians"][name]) for name in _GAUSSIANS}
        numbers = dict(state["numbers"])
        seen = SeenLooks(
            plan=LookPlan(**state["plan"]),
            looks=tuple(Look(**each) for each in state["looks"]),
            histograms=tuple((counts, sd) for counts, sd in state["counts"]),
            extremes=tuple(ExtremeCounts(**each) for each in extremes),
            pooled=PooledLooks(**pooled) if pooled else None,
            scale=numbers.pop("scale"),
            weight=numbers.pop("weight"),
        )
        stride = Stride(numbers.pop("radius"), numbers.pop("way"))
        frame = Frame(**frame) if frame else None
        return replace(self, seen=seen, stride=stride, frame=frame, **numbers, **gaussians)

    def moments(self, noise_aware: bool) -> tuple[Tensor, Tensor]:
        """Mean and covariance, (d, d)."""
        covariance = (self.aware if noise_aware else self.posterior).covariance
        return self.posterior.mean, covariance


def _narrowed(covariance: Tensor) -> Tensor:
    """The covariance with sds of at most an autoguide's initial sd, (d, d).

    The spread of a wide q enters the residuals. An unknown scale would begin at this spread, and
    need all looks to fall.
    """
    shrunk = (_FIRST_SD / covariance.diagonal().sqrt()).clamp(max=1.0)
    return covariance * torch.outer(shrunk, shrunk)


def _largest(step: Tensor, prior: Gaussian) -> float:
    """The largest coordinate of a step, in standard deviations of the first prior.

    Without information from records, the prior decides the step. A prior that is not Gaussian, such
    as a scale's, has tails whose curvature is no guide to a step.
    """
    precision = dense(prior.precision).diagonal()
    return (step.square() * precision.clamp(min=0.0)).max().sqrt().item()
