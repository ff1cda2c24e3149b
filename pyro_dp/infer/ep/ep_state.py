"""The state of DPSEP: its looks so far, their posterior, and the plan of the next look.

Everything here is public. A state is a value: :meth:`EPState.learned` makes a new one from a
release.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.infer.ep.look_plan import (
    FIRST,
    MOST_WITHOUT_NOISE,
    OPENING,
    Arrival,
    Frame,
    LookPlan,
)
from pyro_dp.infer.ep.norm_counts import ExtremeCounts, MeanHistogram, NormHistograms
from pyro_dp.infer.ep.opening import opened
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import LARGEST_FULL, Full
from pyro_dp.infer.ep.site_sum import OpeningSum, SiteSum, WhitenedSum
from pyro_dp.infer.posterior.explanation import CLIPPING as _CLIPPING_SHARE
from pyro_dp.infer.posterior.explanation import NOISE as _NOISE_SHARE
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.posterior.looks import (
    Look,
    PooledLooks,
    next_step,
    squared_distances,
    with_last,
)
from pyro_dp.infer.posterior.prior_factor import combined
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.norm_histogram import SHARE, SIZE, Norms
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import dense, inverse, restricted, unstacked

_SHORTEST_STEP = 1e-12
_ARRIVED = 1e-9  # roots of nats per record: without noise, the last step
_FARTHEST = 3.0  # longest step in a coordinate, in standard deviations of the first prior
_SHORT = 0.25  # without clipping, derivatives of any size may lie beyond this step
_TURNED = 0.3  # a step of this cosine with the last one turns back: that one was too long
_FASTEST = 4.0  # change of the scale in one step
_TOO_MANY = (
    "There are {dim} latents. All entries of their precision are released, which is of no use for "
    "more than {most}. Use DPSVI, or PaperDPSEP with precision='diagonal'."
)
_GAUSSIANS = ("posterior", "aware", "prior", "first_prior")


@dataclass(frozen=True, eq=False)
class EPState:
    """q = prior * evidence.

    :param problem: model, guide and prior for the present data.
    :param plan: its settings, which are public.
    :param posterior: q without the noise's uncertainty, on all latents.
    :param aware: q with it; both have the same mean.
    :param prior: the prior as a factor, refined at q.
    :param first_prior: the same at the first q.
    :param spent: share of the budget that is spent.
    :param share: share of the budget for the next look.
    :param frame: the next look's; None: the next look is the opening.
    :param looks: all looks without the opening, which reads norms alone.
    :param histograms: histograms of norms, one for each look, if there is noise.
    :param extremes: number of extreme records; None: no look has counted them.
    :param pooled: all looks together; None: there is no look yet.
    :param scale: mean curvature of a record, all directions together.
    :param alike: number of looks of this share, one after the other, with the next one.
    :param radius: longest step, in roots of nats per record.
    :param way: the last step, (d,), on the latents that records see; None: there was none.
    :param weight: mean weight of the records in the last look.
    """

    problem: EPProblem
    plan: LookPlan
    posterior: Gaussian
    aware: Gaussian
    prior: Gaussian
    first_prior: Gaussian
    spent: float = 0.0
    share: float = OPENING
    alike: int = 1
    frame: Frame | None = None
    looks: tuple[Look, ...] = ()
    histograms: NormHistograms = NormHistograms()
    extremes: ExtremeCounts | None = None
    pooled: PooledLooks | None = None
    scale: float = 1.0
    radius: float = math.inf
    way: Tensor | None = None
    weight: float = 1.0

    @staticmethod
    def start(problem: EPProblem, size: int, multiplier: float, *, new: bool) -> "EPState":
        """The guide's initial values are the first q, or :meth:`EPProblem.start`.

        :param size: N.
        :param new: whether the guide has been used for nothing before.
        :param multiplier: noise of one release of the whole budget, in units of its bound.
        """
        mean, covariance = problem.guide.read()
        dim = len(problem.places)
        if dim > LARGEST_FULL:
            raise ModelError(_TOO_MANY.format(dim=dim, most=LARGEST_FULL))
        posterior = Gaussian.from_moments(mean, dense(covariance))
        prior = problem.prior.factor(mean, posterior.covariance)
        if new:
            posterior = Gaussian.from_moments(problem.start(mean), dense(covariance))
        plan = LookPlan(dim, size, multiplier, problem.moments.residuals)
        first = EPState(problem, plan, posterior, posterior, prior, prior)
        if multiplier == 0:  # without noise, clipping gains nothing
            frame = Frame.of(first._prior_root(), 1.0, math.inf)
            return replace(first, frame=frame, share=0.0)
        return first

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the next look. The opening has histograms of norms alone."""
        if self.frame is None:
            groups = self.problem.groups
            return tuple(Block(SIZE, 1.0, 1 / len(groups)) for _ in groups)
        bound = self.frame.bound
        size = len(self.problem.places) + self.structure.size + 1
        if bound == math.inf:  # nothing is clipped
            return (Block(size, bound),)
        return Block(size + self.plan.num_extremes, bound, 1.0 - SHARE), Block(SIZE, 1.0, SHARE)

    @property
    def num_blocks(self) -> int:
        """How many blocks each look has, without the opening."""
        return 1 if self.plan.multiplier == 0 else 2

    @property
    def structure(self) -> Full:
        return Full(self.problem.widths)

    def site_sum(self, microbatch_size: int | None) -> WhitenedSum:
        """The sum that computes the looks."""
        return WhitenedSum(
            problem=self.problem,
            structure=self.structure,
            num_blocks=self.num_blocks,
            microbatch_size=microbatch_size,
        )

    def next_sum(self, sites: SiteSum) -> SiteSum:
        """That of the next look, or of the opening."""
        if self.frame is not None:
            return sites
        return OpeningSum(
            problem=self.problem,
            structure=self.structure,
            num_blocks=len(self.problem.groups),
            microbatch_size=sites.microbatch_size,
        )

    @property
    def finished(self) -> bool:
        """Whether no look is left."""
        if self.plan.multiplier == 0:
            arrived = self.way is not None and self._length(self.way) < _ARRIVED
            return arrived or len(self.looks) >= MOST_WITHOUT_NOISE
        return self.spent >= 1.0

    def at(self, size: int) -> tuple[Gaussian, Frame]:
        """Cavity and frame that each of ``size`` records' parts is made at.

        Before the opening there are no norms, and the frame follows from the prior.
        """
        share = 1 - 1 / size
        frame = self.frame or Frame.of(self._prior_root(), 1.0, math.inf)
        return self.posterior**share * self.prior ** (1 - share), frame

    def learned(
        self, released: Sequence[Tensor], at: tuple[Gaussian, Frame], multiplier: float
    ) -> tuple[float, "EPState"]:
        """The state after one more look. All else follows from its noisy numbers.

        :param released: the release, block by block.
        :param at: cavity and frame of the look.
        :param multiplier: standard deviation of the noise in units of the bounds.
        :returns: the step's length, in roots of nats per record, and the state after it.
        """
        noises = [block.noise(multiplier) for block in self.blocks]
        spent = min(self.spent + self.share, 1.0)
        if self.frame is None:
            own = self.problem, self.posterior, self._prior_root(), self.plan.size
            first, scale, frame = opened(released, noises, *own)
            found = replace(self, posterior=first, aware=first, scale=scale, frame=frame)
            return 0.0, replace(found, spent=spent, share=FIRST)
        histograms = self.histograms
        for counts, sd in zip(released[1:], noises[1:], strict=True):
            histograms = histograms.with_one(counts, sd)
        point = at[0].mean[self.problem.places]
        look, weight, extremes = self._look(released[0], point, noises[0], histograms)
        seen = replace(
            self,
            looks=(*self.looks, look),
            histograms=histograms,
            extremes=extremes,
            weight=weight,
            spent=spent,
        )
        looks = seen._with_biases()
        pooled = with_last(looks, self.pooled, self.plan.size, self.plan.bend)
        return replace(seen, looks=looks, pooled=pooled)._moved()

    def _look(
        self, released: Tensor, point: Tensor, noise: float, histograms: NormHistograms
    ) -> tuple[Look, float, ExtremeCounts | None]:
        """The look in the latents' coordinates, divided by the mean weight.

        :returns: the look, the mean weight, and the number of extreme records so far.
        """
        frame, dim, size = self.required_frame, self.plan.dim, self.plan.size
        seen = dim + self.structure.size + 1
        gradient, curvature, total = released[:seen].split([dim, self.structure.size, 1])
        weight, extremes = 1.0, None
        if frame.bound < math.inf:
            norms = self._norms(point, histograms, (*self.looks, point))
            predicted = norms.weight(np.array([frame.bound]))[0]
            unit = frame.counted * size
            weight = self.plan.mean_weight(total.item() / unit, noise / unit, predicted)
            if self.plan.num_extremes:
                counts = ExtremeCounts.read(released[seen:], noise, frame.bound)
                extremes = counts.after(self.extremes)
        back = torch.linalg.inv(frame.root)
        curvature = back @ unstacked(curvature / frame.weight, dim) @ back
        sd = noise / weight
        look = Look(
            point=point,
            score=back @ gradient / weight,
            curvature=curvature / weight,
            geometry=back @ back,
            score_sd=sd,
            curvature_sd=sd / frame.weight,
            bound=frame.bound,
        )
        return look, weight, extremes

    def _with_biases(self) -> tuple[Look, ...]:
        """The looks, with the bias that clipping to their bounds causes, by all histograms.

        An early look has little noise for its share if its bound is small. Without its bias, it
        would count too much.
        """
        if self.plan.multiplier == 0:
            return self.looks
        bounds = np.array([look.bound for look in self.looks])
        norms = self._norms(self.looks[-1].point, self.histograms, self.looks)
        excess = norms.excess(bounds) / norms.weight(bounds)
        return tuple(
            replace(look, squared_bias=self.plan.squared_bias(each.item()))
            for look, each in zip(self.looks, excess, strict=True)
        )

    def _moved(self) -> tuple[float, "EPState"]:
        """The length of the step to which all looks point, and the state after it."""
        pooled, places = self.required_pooled, self.problem.places
        prior, aware = self._target(pooled)
        start = self.looks[-1].point
        full = aware.mean - self.posterior.mean
        seen = aware.mean[places] - start
        # In roots of nats per record.
        unclipped = self.plan.multiplier == 0 and self._may_have_saddles
        longest = _SHORT if unclipped else self.plan.longest_step
        length, radius = self._length(seen), min(self.radius, longest)
        if self.way is not None:
            before = self._length(self.way)
            product = (seen @ pooled.curvature @ self.way).item() / self.plan.size
            back = product < -_TURNED * max(before * length, _SHORTEST_STEP**2)
            radius = before / 2 if back else min(2 * radius, longest)
        part = min(
            1.0, radius / max(length, _SHORTEST_STEP), _FARTHEST / max(self._reach(full), 1.0)
        )
        final = self._has_spent
        mean = aware.mean if final else self.posterior.mean + part * full
        scale = pooled.curvature.trace().item() / self.plan.size
        moved = replace(
            self,
            radius=radius,
            way=part * seen,
            scale=min(max(scale, self.scale / _FASTEST), self.scale * _FASTEST),
            **self._posteriors(pooled, prior, mean),
        )
        return length, moved if final else moved._planned(seen, part < 1)

    def _planned(self, step: Tensor, shortened: bool) -> "EPState":
        """The state with the next look's frame and share."""
        frame, pooled = self.required_frame, self.required_pooled
        precision = self.prior_seen() + pooled.curvature
        bound = frame.bound
        if bound == math.inf:
            ones = Norms(np.ones(1), np.full(1, float(self.plan.size)))
            root = self.plan.root(precision, pooled.curvature_noise, ones, self.scale, 1.0)
            return replace(self, frame=Frame.of(root, self.scale, bound))
        norms = self._norms(self.posterior.mean[self.problem.places], self.histograms, self.looks)
        root = self.plan.root(precision, pooled.curvature_noise, norms, self.scale, bound)
        bound = self.plan.bound(norms, self.scale)
        frame = Frame.of(root, self.scale, bound, pooled.relative_noise)
        gain = 0.5 * (step @ precision @ step).item()
        look = self.looks[-1]
        noise = pooled.relative_noise
        before = Arrival(self.share, look.geometry, precision, gain, shortened, noise, self.alike)
        share = self.plan.share(frame, before, 1.0 - self.spent, len(self.looks))
        alike = self.alike + 1 if share == self.share else 1
        return replace(self, frame=frame, share=share, alike=alike)

    def _norms(
        self, point: Tensor, histograms: NormHistograms, looks: Sequence[Look | Tensor]
    ) -> Norms:
        """Norms of the records' parts at a point, from all histograms."""
        mean = self.histogram(point, histograms, looks)
        return mean.norms(self.scale, self.plan.residuals)

    def histogram(
        self, point: Tensor, histograms: NormHistograms, looks: Sequence[Look | Tensor]
    ) -> MeanHistogram:
        points = torch.stack([x.point if isinstance(x, Look) else x for x in looks])
        ways = points - point
        curvature = self.prior_seen() if self.pooled is None else self.pooled.curvature
        distances = ((ways @ curvature) * ways).sum(dim=1) / self.plan.size
        return histograms.mean(distances, self.plan.size)

    @property
    def _has_spent(self) -> bool:
        return self.plan.multiplier > 0 and self.spent >= 1.0

    @property
    def _may_have_saddles(self) -> bool:
        """Whether to take care that the log likelihood is not concave.

        Noise makes early looks small, and many are pooled before steps are long. That is care
        enough for draws.
        """
        moments = self.problem.moments
        return not moments.concave or (moments.careful and self.plan.multiplier == 0)

    def _target(self, pooled: PooledLooks) -> tuple[Gaussian, Gaussian]:
        """The prior's factor, and prior * evidence, which is a Gaussian with the noise in it."""
        turns = self.problem.moments.turns
        steps = self._may_have_saddles and not (turns or self._has_spent)
        first = dense(self.first_prior.precision).diagonal()[self.problem.places].clamp(min=1e-6)

        def evidence(mean: Tensor) -> Gaussian:
            if steps:
                return self._embedded(next_step(pooled, self.looks[-1], first))
            return self._factor(pooled, pooled.information(mean[self.problem.places]))

        return combined(self.problem.prior, evidence, self.posterior.mean, self.prior)

    def _factor(self, pooled: PooledLooks, precision: Tensor) -> Gaussian:
        """The records' evidence with this precision, on all latents."""
        return self._embedded(Gaussian(precision @ pooled.estimate, precision))

    def _embedded(self, factor: Gaussian) -> Gaussian:
        """A factor of the latents that records see, on all."""
        return factor.embedded(self.problem.places, self.problem.guide.size)

    def _posteriors(self, pooled: PooledLooks, prior: Gaussian, mean: Tensor) -> dict[str, Any]:
        """The prior, and the posteriors at this mean, without and with the noise's uncertainty."""
        seen = mean[self.problem.places]
        bias = self.squared_bias * pooled.geometry + pooled.bending(seen)
        information = pooled.information(seen, bias)
        factors = [self._factor(pooled, each) for each in (pooled.curvature, information)]
        precisions = [prior.precision + factor.precision for factor in factors]
        plain, aware = (Gaussian(precision @ mean, precision) for precision in precisions)
        return {"posterior": plain, "aware": aware, "prior": prior}

    @property
    def squared_bias(self) -> float:
        """Squared bias of the score in a direction by clipping, in coordinates M^1/2 z."""
        frame = self.required_frame
        if frame.bound == math.inf:
            return 0.0
        norms = self._norms(self.looks[-1].point, self.histograms, self.looks)
        excess = norms.excess(np.array([frame.bound]))[0].item()
        if self.extremes is not None:
            excess += self.extremes.excess(norms)
        return self.plan.squared_bias(excess / self.weight)

    def noise_parts(self) -> dict[str, Tensor]:
        """Variances (d,) of the mean by privacy noise and by clipping, in proportion."""
        if self.pooled is None:
            return {_NOISE_SHARE: torch.ones_like(self.posterior.eta)}
        places = self.problem.places
        gain = self.posterior.covariance[:, places]
        noise = self.pooled.noise(self.posterior.mean[places])
        parts = {_NOISE_SHARE: noise, _CLIPPING_SHARE: self.squared_bias * self.pooled.geometry}
        return {name: (gain @ part * gain).sum(dim=1) for name, part in parts.items()}

    def _length(self, way: Tensor) -> float:
        """Length of a step, in roots of nats per record."""
        curvature = self.required_pooled.curvature
        return math.sqrt(max((way @ curvature @ way).item() / self.plan.size, 0.0))

    def _reach(self, way: Tensor) -> float:
        """The largest coordinate of a step, in standard deviations of the first prior.

        The prior decides the step if the records say nothing. A prior that is not Gaussian,
        such as that of a scale, has tails whose curvature says nothing, either.
        """
        precision = dense(self.first_prior.precision).diagonal()
        return (way.square() * precision.clamp(min=0.0)).max().sqrt().item()

    def prior_seen(self) -> Tensor:
        """Precision of the prior of the latents that records see, (d, d)."""
        places, precision = self.problem.places, dense(self.prior.precision)
        if len(places) == len(precision):
            return restricted(precision, places)
        return inverse(restricted(inverse(precision), places))

    def _prior_root(self) -> Tensor:
        precision = dense(self.prior.precision).diagonal()[self.problem.places]
        return torch.diag(precision.clamp(min=1e-6).rsqrt())

    @property
    def clipped(self) -> ClippedFraction | None:
        """How many records' norms exceed the last look's bound; None: there is no histogram."""
        if not self.histograms.counts or self.frame is None:
            return None
        distances = squared_distances(
            self.looks,
            self.posterior.mean[self.problem.places],
            self.required_pooled.curvature,
            self.plan.size,
        )
        return self.histograms.mean(distances, self.plan.size).above(self.frame.bound)

    @property
    def required_frame(self) -> Frame:
        assert self.frame is not None
        return self.frame

    @property
    def required_pooled(self) -> PooledLooks:
        assert self.pooled is not None
        return self.pooled

    def state(self) -> dict[str, Any]:
        """Everything that looks change, as tensors and numbers."""
        return {
            "looks": [vars(look) for look in self.looks],
            "counts": list(self.histograms.counts),
            "extremes": vars(self.extremes) if self.extremes else None,
            "pooled": vars(self.pooled) if self.pooled else None,
            "frame": vars(self.frame) if self.frame else None,
            "plan": vars(self.plan),
            "gaussians": {n: vars(getattr(self, n)) for n in _GAUSSIANS},
            "numbers": {n: getattr(self, n) for n in _NUMBERS},
        }

    @staticmethod
    def saved_dim(state: Mapping[str, Any]) -> int:
        """How many coordinates the latents of a saved run have."""
        return len(state["gaussians"]["posterior"]["eta"])

    def resumed(self, state: Mapping[str, Any], device: torch.device) -> "EPState":
        """The state that :meth:`state` returned, on this problem."""
        state = pytree.tree_map_only(Tensor, lambda each: each.to(device), dict(state))
        pooled, frame = state["pooled"], state["frame"]
        extremes = state.get("extremes")  # older states have none
        gaussians: Any = {name: Gaussian(**state["gaussians"][name]) for name in _GAUSSIANS}
        return replace(
            self,
            plan=LookPlan(**state["plan"]),
            looks=tuple(Look(**each) for each in state["looks"]),
            histograms=NormHistograms(tuple((counts, sd) for counts, sd in state["counts"])),
            extremes=ExtremeCounts(**extremes) if extremes else None,
            pooled=PooledLooks(**pooled) if pooled else None,
            frame=Frame(**frame) if frame else None,
            **state["numbers"],
            **gaussians,
        )

    def moments(self, noise_aware: bool) -> tuple[Tensor, Tensor]:
        """Mean and covariance, (d, d).

        :param noise_aware: whether to include the uncertainty that the noise adds.
        """
        covariance = (self.aware if noise_aware else self.posterior).covariance
        return self.posterior.mean, covariance


_NUMBERS = ("spent", "share", "alike", "scale", "radius", "way", "weight")
