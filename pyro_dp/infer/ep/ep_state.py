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
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import LARGEST_FULL, Full
from pyro_dp.infer.posterior.explanation import CLIPPING as _CLIPPING_SHARE
from pyro_dp.infer.posterior.explanation import NOISE as _NOISE_SHARE
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.posterior.looks import (
    Look,
    PooledLooks,
    next_step,
    powers,
    squared_distances,
    with_last,
)
from pyro_dp.infer.posterior.prior_factor import combined
from pyro_dp.infer.posterior.summary import (
    CHECK,
    CLIPPING,
    DO_NOT_PUBLISH,
    MODEL,
    NOISE,
    STEPS,
    Status,
)
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
_LITTLE = 0.8  # an interval this close to the prior's width counts as the prior's
_FAR_AWAY = 4.0  # longest trusted last step, in squared standard deviations per direction
_LARGEST_NOISE = 1.5  # a matrix's noise, relative to its mean
_MEDIAN = 0.455  # a squared standard normal number has this median
_FAR_TOO_SMALL = 3.0  # median of the squared residuals, in units of the scale
_TOO_NARROW = 1.5  # variance of the estimate, relative to the posterior's
_LARGEST_SCORE = 10.0  # norm of a score, over the root of the curvature; few are larger
_FASTEST = 4.0  # change of the scale in one step
_NOT_CONCAVE = "the log likelihood is not concave in {count} of {dim} directions at the last look"
_TOO_MANY = (
    "There are {dim} latents. All entries of their precision are released, which is of no use for "
    "more than {most}. Use DPSVI, or PaperDPSEP with precision='diagonal'."
)
_CURVED = (
    "records see products or sums of curves of the {dim} latents, and the evidence is quadratic. "
    "Name what they see by pyro.deterministic, outside the plate"
)
_OVERDISPERSED = (
    "outcomes vary at least {dispersion:.1f} times as much as the model says, and intervals may be "
    "{ratio:.1f} times too narrow"
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
            return 0.0, replace(self._opened(released, noises), spent=spent, share=FIRST)
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

    def _opened(self, released: Sequence[Tensor], noises: Sequence[float]) -> "EPState":
        """The state after the opening, which sets the scale of the looks to come.

        :param released: a histogram of the parts' norms for each group of coordinates.
        :param noises: standard deviations of their noise.
        """
        root, groups, size = self._prior_root(), self.problem.groups, self.plan.size
        medians = [
            MeanHistogram(counts, sd, size).opening_norms(len(group)).median
            for counts, sd, group in zip(released, noises, groups, strict=True)
        ]
        opened, medians = self._rescaled(root, medians)
        median = medians[0]
        if len(groups) > 1:  # each has parts of norm 1 then
            for group, own in zip(groups, medians, strict=True):
                root[group] /= own
            median = math.sqrt(len(groups))
        frame = Frame.of(root, median**2, 2 * median)
        return replace(opened, scale=median**2, frame=frame)

    def _rescaled(self, root: Tensor, medians: list[float]) -> tuple["EPState", list[float]]:
        """The state with a residuals' scale that fits the opening, and the norms there.

        If the first scale is far too small, all scores are large, and looks would be clipped until
        they have climbed. The score of the scale's logarithm is Z^2 - 1 with Z the residual in
        units of the scale, and Fisher's information is 2. So the norm's median says Z^2's.

        :param root: the opening's W, (d, d).
        :param medians: medians of the norms, one for each group of coordinates.
        """
        slope, groups, places = (
            self.problem.moments.log_scale,
            self.problem.groups,
            self.problem.places,
        )
        if slope is None or len(groups) == 1:
            return self, medians
        if slope.nonzero().squeeze(1).tolist() != groups[1].tolist():
            return self, medians
        along = root @ slope
        length = along.norm().item()
        squared = 1 + math.sqrt(max((medians[1] / length) ** 2 - 2, 0.0))
        if squared < _FAR_TOO_SMALL:
            return self, medians
        factor = squared / _MEDIAN  # by which the variance rises
        way = torch.zeros_like(self.posterior.mean)
        way[places] = root @ along * (0.5 * math.log(factor) / length**2)
        mean = self.posterior.mean + way
        moved = Gaussian(self.posterior.precision @ mean, self.posterior.precision)
        smaller = math.sqrt((_MEDIAN + 1) / (factor * (squared + 1)))
        usual = length * math.sqrt(2 + (1 - _MEDIAN) ** 2)
        return replace(self, posterior=moved, aware=moved), [smaller * medians[0], usual]

    def _look(
        self, released: Tensor, point: Tensor, noise: float, histograms: NormHistograms
    ) -> tuple[Look, float, ExtremeCounts | None]:
        """The look in the latents' coordinates, divided by the mean weight.

        :returns: the look, the mean weight, and the number of extreme records so far.
        """
        frame, dim, size = self._required_frame, self.plan.dim, self.plan.size
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
        pooled, places = self._required_pooled, self.problem.places
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
        frame, pooled = self._required_frame, self._required_pooled
        precision = self._prior_seen() + pooled.curvature
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
        mean = self._histogram(point, histograms, looks)
        return mean.norms(self.scale, self.plan.residuals)

    def _histogram(
        self, point: Tensor, histograms: NormHistograms, looks: Sequence[Look | Tensor]
    ) -> MeanHistogram:
        points = torch.stack([x.point if isinstance(x, Look) else x for x in looks])
        ways = points - point
        curvature = self._prior_seen() if self.pooled is None else self.pooled.curvature
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

        def evidence(mean: Tensor) -> Gaussian:
            if steps:
                return self._embedded(next_step(pooled, self.looks[-1]))
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
        frame = self._required_frame
        if frame.bound == math.inf:
            return 0.0
        norms = self._norms(self.looks[-1].point, self.histograms, self.looks)
        excess = norms.excess(np.array([frame.bound]))[0].item()
        if self.extremes is not None:
            excess += self.extremes.excess(norms)
        return self.plan.squared_bias(excess / self.weight)

    @property
    def status(self) -> Status:
        """Whether the posterior can be published."""
        if self.pooled is None:
            return Status(DO_NOT_PUBLISH, "there was no look at the data yet", STEPS)
        places, pooled = self.problem.places, self.pooled
        prior = dense(self.prior.precision).diagonal()[places]
        variances = self.aware.covariance.diagonal()[places]
        remains = (variances * prior).sqrt().median().item()
        if remains > _LITTLE:
            reason = (
                f"the data said little: intervals are {remains:.2f} times as wide as the prior's"
            )
            return Status(DO_NOT_PUBLISH, reason, NOISE)
        mean = self.posterior.mean[places]
        way = mean - self.looks[-1].point
        precision = self._prior_seen() + pooled.information(mean)
        step = (way @ precision @ way).item() / self.plan.dim
        if step > _FAR_AWAY or not self.finished:
            reason = f"the mean still moved by {math.sqrt(step):.1f} standard deviations in the end"
            return Status(CHECK, reason, STEPS)
        if count := self._num_convex():
            reason = _NOT_CONCAVE.format(count=count, dim=self.plan.dim)
            return Status(CHECK, reason, STEPS)
        bent = pooled.relative(pooled.bending(mean), mean)
        cut = pooled.relative(self.squared_bias * pooled.geometry, mean)
        if bent + cut > 1:
            share = math.sqrt(bent + cut)
            if cut > bent:
                reason = f"clipping may shift the mean by {share:.1f} standard deviations"
                return Status(CHECK, reason, CLIPPING)
            reason = f"the search may have missed the mean by {share:.1f} standard deviations"
            return Status(CHECK, reason, STEPS)
        dispersion = self._dispersion()
        varies = 1 + (dispersion - 1) * pooled.relative(pooled.curvature, mean)
        if varies > _TOO_NARROW:
            ratios = {"dispersion": dispersion, "ratio": math.sqrt(varies)}
            return Status(CHECK, _OVERDISPERSED.format(**ratios), MODEL)
        if self.problem.moments.turns and self.plan.multiplier > 0:
            return Status(CHECK, _CURVED.format(dim=self.plan.dim), STEPS)
        return Status()

    def _dispersion(self) -> float:
        """At least so large is the scores' variance, relative to the curvature.

        If the model holds, the two are equal (the information identity; White 1982). Norms of
        bounded residuals do not depend on the outcome, and say nothing.

        Records' curvatures count as if they were all alike.
        """
        if not self.histograms.counts or self.plan.residuals == Residuals.BOUNDED:
            return 0.0
        frame, pooled = self._required_frame, self._required_pooled
        point = self.posterior.mean[self.problem.places]
        curvature = (frame.root @ pooled.curvature @ frame.root).trace().item() / self.plan.size
        histogram = self._histogram(point, self.histograms, self.looks)
        squared = histogram.least_mean_square(_LARGEST_SCORE * math.sqrt(curvature))
        scores = squared - frame.counted**2 - (frame.weight * curvature) ** 2
        return scores / curvature

    def _num_convex(self) -> int:
        """The number of directions in which the posterior's log density is convex at the last look.

        The noise's largest eigenvalue is about sqrt(2 d) times its standard deviation.
        """
        last = self.looks[-1]
        (root,) = powers(last.geometry, (-0.5,))
        values = torch.linalg.eigvalsh(root @ (last.curvature + self._prior_seen()) @ root)
        return int(
            (values < -_LARGEST_NOISE * last.curvature_sd * math.sqrt(2 * self.plan.dim)).sum()
        )

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
        curvature = self._required_pooled.curvature
        return math.sqrt(max((way @ curvature @ way).item() / self.plan.size, 0.0))

    def _reach(self, way: Tensor) -> float:
        """The largest coordinate of a step, in standard deviations of the first prior.

        The prior decides the step if the records say nothing. A prior that is not Gaussian,
        such as that of a scale, has tails whose curvature says nothing, either.
        """
        precision = dense(self.first_prior.precision).diagonal()
        return (way.square() * precision.clamp(min=0.0)).max().sqrt().item()

    def _prior_seen(self) -> Tensor:
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
            self._required_pooled.curvature,
            self.plan.size,
        )
        return self.histograms.mean(distances, self.plan.size).above(self.frame.bound)

    @property
    def _required_frame(self) -> Frame:
        assert self.frame is not None
        return self.frame

    @property
    def _required_pooled(self) -> PooledLooks:
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
