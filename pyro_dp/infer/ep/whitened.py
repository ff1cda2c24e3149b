"""DPSEP's posterior from releases in its own geometry, with a bound that is read off the release.

Each release has noise of the posterior's shape, as its coordinates are whitened by the curvature
that was released before. All releases so far are combined (:mod:`pyro_dp.infer.ep.evidence`), and
meet the prior with the weight that noise leaves them: where it hides all, the prior remains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.infer.ep.evidence import Evidence, Look, evidence, power
from pyro_dp.infer.ep.norm_histograms import MeanHistogram, NormHistograms
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.release_plan import ReleasePlan
from pyro_dp.infer.ep.site_factors import LARGEST_FULL, Full
from pyro_dp.infer.posterior.explanation import NOISE, SAMPLING
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.norm_histogram import SHARE, SIZE
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import dense, inverse, restricted, unstacked

_LONGEST_STEP = 1.0  # roots of nats per record
_SHORTEST_STEP = 1e-12
_REFINED = 0.5  # of the way to the prior's factor at the posterior goes a step
_FARTHEST = 3.0  # of a step in a coordinate, in standard deviations of the prior at the first q
_TURNED = 0.3  # cosine, from which a step goes back on the one before: it was too long
# Bias from which intervals do not hold: chosen on the same data as the plan. Weights that do not
# depend on the outcome bias less.
_BIASED = {False: 0.2, True: 1.0}
_NEGLIGIBLE = 0.05  # noise in a direction, beside the posterior's variance there
_LEAST_SHARE = 1e-9  # where there is no noise
_IRRELEVANT = 1e-6  # curvature, in parts of the prior's
_FASTEST = 4.0  # change of the scale in one step
_TOO_MANY = (
    "There are {dim} latents. DPSEP releases all entries of their precision, which is of no use "
    "for more than {most}. Use DPSVI, or PaperDPSEP."
)
_ON_THE_WAY = "the last step was longer than the intervals are wide: take more steps"
_NORMS_ALONE = "norms of the records' parts are all that was released so far"
_GAUSSIANS = ("posterior", "aware", "prior", "first_prior")


@dataclass(frozen=True, eq=False)
class Frame:
    """Public coordinates, weight and bound of a release.

    :param root: W = M^-1/2, (d, d): a record's part is (W r, kappa W Lambda W).
    :param weight: kappa.
    :param bound: C.
    """

    root: Tensor
    weight: float
    bound: float

    @staticmethod
    def start(like: Tensor, dim: int, bound: float) -> "Frame":
        """The latents' own coordinates."""
        return Frame(torch.eye(dim).to(like), 1.0, bound)


@dataclass(frozen=True, eq=False)
class WhitenedApproximation:
    """q = prior * evidence; everything in it is public.

    :param problem: of the data at hand.
    :param size: N.
    :param plan: of the budget.
    :param posterior: q without the noise's uncertainty, on all latents.
    :param aware: q with it; both have the same mean.
    :param prior: as a factor, refined at q.
    :param first_prior: the same at the first q.
    :param looks: all releases but the first, which is of norms alone.
    :param histograms: of norms, one for each look, if there is noise.
    :param known: evidence of the records, from the second release on.
    :param frame: of the next release; None: that will be of norms alone.
    """

    problem: EPProblem
    size: int
    plan: ReleasePlan
    posterior: Gaussian
    aware: Gaussian
    prior: Gaussian
    first_prior: Gaussian
    looks: tuple[Look, ...] = ()
    histograms: NormHistograms = NormHistograms()
    known: Evidence | None = None
    scale: float = 1.0
    radius: float = 1.0
    frame: Frame | None = None

    @staticmethod
    def start(problem: EPProblem, size: int, plan: ReleasePlan) -> "WhitenedApproximation":
        """The guide's initial values are the first q.

        :param size: N.
        """
        mean, covariance = problem.guide.read()
        dim = len(problem.places)
        if dim > LARGEST_FULL:
            raise ModelError(_TOO_MANY.format(dim=dim, most=LARGEST_FULL))
        posterior = Gaussian.from_moments(mean, dense(covariance))
        prior = problem.prior.factor(mean, posterior.covariance)
        # Without noise there is nothing to trade a bound against.
        frame = Frame.start(posterior.eta, dim, math.inf) if plan.multiplier == 0 else None
        return WhitenedApproximation(
            problem, size, plan, posterior, posterior, prior, prior, frame=frame
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Of the next release: sites and histogram of norms; the first is of norms alone."""
        if self.frame is None:
            return (Block(SIZE, 1.0),)
        size = len(self.problem.places) + self.structure.size
        if self.frame.bound == math.inf:
            return (Block(size, math.inf),)
        return Block(size, self.frame.bound, 1.0 - SHARE), Block(SIZE, 1.0, SHARE)

    @property
    def num_blocks(self) -> int:
        """Of all releases but the first."""
        return 1 if self.plan.multiplier == 0 else 2

    @property
    def structure(self) -> Full:
        return Full(self.problem.widths)

    def at(self, size: int) -> tuple[Gaussian, Frame | None]:
        """Cavity and frame that each of ``size`` records' parts is made at."""
        share = 1 - 1 / size
        return self.posterior**share * self.prior ** (1 - share), self.frame

    def updated(
        self,
        released: Sequence[Tensor],
        at: Any,
        *,
        multiplier: float,
        sample_rate: float,
    ) -> tuple[float, "WhitenedApproximation"]:
        """With one more release, from whose noise all else follows.

        :param released: block by block.
        :param at: what :meth:`at` gave for it.
        :param multiplier: standard deviation of the noise in units of the bounds.
        :param sample_rate: of the records.
        :returns: the step's length, in roots of nats per record, and what comes of it.
        """
        noises = [block.noise(multiplier) for block in self.blocks]
        if self.frame is None:
            return 0.0, self._scaled(released[0], noises[0])
        look = self._look(released[0], at[0], noises[0], sample_rate)
        histograms = self.histograms
        for counts, sd in zip(released[1:], noises[1:], strict=True):
            histograms = histograms.with_one(counts, sd)
        return self._moved(look, histograms)

    def _scaled(self, counts: Tensor, sd: float) -> "WhitenedApproximation":
        """After the release of norms alone: the scale of what follows.

        :param counts: released histogram of the gradients' norms.
        :param sd: of its noise.
        """
        dim = len(self.problem.places)
        norms = MeanHistogram(counts, sd, self.size).opening_norms(dim)
        frame = Frame.start(self.posterior.eta, dim, 2 * norms.median)
        frame = replace(frame, weight=self.plan.curvature_share / norms.median)
        return replace(self, scale=norms.median**2, frame=frame)

    def _moved(
        self, look: Look, histograms: NormHistograms
    ) -> tuple[float, "WhitenedApproximation"]:
        looks = (*self.looks, look)
        before = self.known.curvature if self.known else None
        least = _IRRELEVANT * dense(self.prior.precision).diagonal()[self.problem.places].mean()
        known = evidence(looks, before, look.geometry, self.size, least.item())
        length, radius, mean = self._step(known)
        moved = replace(
            self,
            looks=looks,
            histograms=histograms,
            known=known,
            radius=radius,
            scale=self._new_scale(known),
            **self._posteriors(known, mean),
        )
        return length, replace(moved, frame=moved._next_frame())

    def hidden(self) -> int:
        """In how many directions the noise says more than the records."""
        if self.known is None:
            return len(self.problem.places)
        root = power(self.known.curvature, -0.5)
        left = torch.linalg.eigvalsh(root @ self.known.information @ root)
        return int((left < 0.5).sum())

    def noise_parts(self) -> dict[str, Tensor]:
        """Variances by privacy noise and by sampling, (d,) each, in proportion, by the last look.

        The noise in the gradient moves the mean by the posterior's covariance times it.
        """
        if self.known is None:
            return {NOISE: torch.ones_like(self.posterior.eta)}
        look, gain = self.looks[-1], self.posterior.covariance[:, self.problem.places]
        parts = {NOISE: look.privacy_noise, SAMPLING: look.sampling_noise(self.known.curvature)}
        return {name: (gain @ part * gain).sum(dim=1) for name, part in parts.items()}

    @property
    def unfinished(self) -> str | None:
        """Why the steps have not arrived, a clause; None: they have.

        The way from where the last release was made to where all of them point is to be no longer
        than one standard deviation, noise included, in each direction.
        """
        if self.known is None:
            return _NORMS_ALONE
        places = self.problem.places
        target = (self.prior * self._factor(self.known, self.known.information)).mean[places]
        way = target - self.looks[-1].mean
        covariance = restricted(self.aware.covariance, places)
        length = way @ torch.linalg.solve(covariance, way)
        return _ON_THE_WAY if length > len(way) else None

    def state(self) -> dict[str, Any]:
        """Everything that steps change, as tensors and numbers."""
        known, frame = self.known, self.frame
        return {
            "looks": [vars(look) for look in self.looks],
            "counts": self.histograms.state(),
            "known": vars(known) if known else None,
            "frame": vars(frame) if frame else None,
            "scale": self.scale,
            "radius": self.radius,
            "plan": vars(self.plan),
            "gaussians": {n: vars(getattr(self, n)) for n in _GAUSSIANS},
        }

    def require_same_latents(self, state: Mapping[str, Any]) -> None:
        """:raises ModelError: the state is of other latents."""
        if state["gaussians"]["posterior"]["eta"].shape != self.posterior.eta.shape:
            raise ModelError("The latents are not those of the saved run.")

    def resumed(self, state: Mapping[str, Any], device: torch.device) -> "WhitenedApproximation":
        """What :meth:`state` was taken of, on this problem."""
        state = pytree.tree_map_only(Tensor, lambda each: each.to(device), dict(state))
        known, frame = state["known"], state["frame"]
        gaussians: Any = {name: Gaussian(**state["gaussians"][name]) for name in _GAUSSIANS}
        return replace(
            self,
            plan=ReleasePlan(**state["plan"]),
            looks=tuple(Look(**each) for each in state["looks"]),
            histograms=NormHistograms.resumed(state["counts"]),
            known=Evidence(**known) if known else None,
            frame=Frame(**frame) if frame else None,
            scale=state["scale"],
            radius=state["radius"],
            **gaussians,
        )

    def moments(self, noise_aware: bool) -> tuple[Tensor, Tensor]:
        """Mean and covariance, (d, d).

        :param noise_aware: with the uncertainty that the noise adds.
        """
        covariance = (self.aware if noise_aware else self.posterior).covariance
        return self.posterior.mean, covariance

    def _look(self, released: Tensor, cavity: Gaussian, noise: float, rate: float) -> Look:
        frame, places = self.frame, self.problem.places
        assert frame is not None
        gradient, curvature = released.split([len(places), len(released) - len(places)])
        back = torch.linalg.inv(frame.root)
        curvature = back @ unstacked(curvature / frame.weight, len(places)) @ back
        return Look(
            cavity.mean[places],
            back @ gradient,
            curvature,
            back @ back,
            noise,
            noise / frame.weight,
            rate,
        )

    def _step(self, known: Evidence) -> tuple[float, float, Tensor]:
        """Length of the step to where the evidence points, the most it could be, and the mean."""
        start = self.posterior.mean
        aware = self.prior * self._factor(known, known.information)
        way = aware.mean - start
        seen, last = way[self.problem.places], self._last_way
        length, radius = self._length(seen, known), self.radius
        if last is not None:
            before = self._length(last, known)
            product = (seen @ known.curvature @ last).item() / self.size
            back = product < -_TURNED * max(before * length, _SHORTEST_STEP**2)
            radius = before / 2 if back else min(2 * radius, _LONGEST_STEP)
        share = min(
            1.0, radius / max(length, _SHORTEST_STEP), _FARTHEST / max(self._reach(way), 1.0)
        )
        return length, radius, start + way * share

    def _length(self, way: Tensor, known: Evidence) -> float:
        """In roots of nats per record."""
        return math.sqrt(max((way @ known.curvature @ way).item() / self.size, 0.0))

    def _reach(self, way: Tensor) -> float:
        """How far a step goes at most, in the scale that the prior has at the first q.

        Where the records say nothing a step is that of the prior, and in the tails of one that is
        not Gaussian, such as of a scale, its curvature says nothing, either.
        """
        precision = dense(self.first_prior.precision).diagonal()
        return (way.square() * precision.clamp(min=0.0)).max().sqrt().item()

    def _factor(self, known: Evidence, precision: Tensor) -> Gaussian:
        """The records' evidence with this precision, on all latents."""
        factor = Gaussian(precision @ known.estimate, precision)
        return factor.embedded(self.problem.places, self.problem.guide.size)

    def _posteriors(self, known: Evidence, mean: Tensor) -> dict[str, Any]:
        """At this mean, without and with the noise's uncertainty; and the prior there.

        A prior with a scale in it is refined where latents are as uncertain as they are, noise
        included, and goes half of the way: effects that noise has drawn to their mean would make
        the scale small, which draws them closer, and so on until it is lost.
        """
        factors = [self._factor(known, each) for each in (known.curvature, known.information)]
        covariance = inverse(self.prior.precision + factors[1].precision)
        refined = self.problem.prior.factor(mean, covariance)
        prior = self.prior ** (1 - _REFINED) * refined**_REFINED
        precisions = [prior.precision + factor.precision for factor in factors]
        plain, aware = (Gaussian(precision @ mean, precision) for precision in precisions)
        return {"posterior": plain, "aware": aware, "prior": prior}

    @property
    def _last_way(self) -> Tensor | None:
        """From the last look but one to where q is now."""
        if not self.looks:
            return None
        return self.posterior.mean[self.problem.places] - self.looks[-1].mean

    def _new_scale(self, known: Evidence) -> float:
        scale = known.curvature.trace().item() / self.size
        return min(max(scale, self.scale / _FASTEST), self.scale * _FASTEST)

    def _next_frame(self) -> Frame:
        """As all that was released until now suggests."""
        assert self.known is not None and self.frame is not None
        weight = self.plan.curvature_share / math.sqrt(self.scale)
        curvature, bound = self.known.curvature, self.frame.bound
        histogram, free = self._histogram, self.problem.moments.label_free
        if histogram is None:
            return Frame(_whitening(curvature, 1.0), weight, bound)
        norms = histogram.norms(self.scale, tail=not free)
        share = self.plan.noise_share(norms, self.scale, bound)
        root = _whitening(curvature, _NEGLIGIBLE / max(share, _LEAST_SHARE))
        bound = self.plan.bound(norms, self.scale, bound, label_free=free)
        return Frame(root, weight, bound)

    @property
    def clipped(self) -> ClippedFraction | None:
        """How many records' norms are above the bound of the last release; None: not known yet."""
        histogram = self._histogram
        if histogram is None or self.frame is None:
            return None
        return histogram.above(self.frame.bound)

    @property
    def is_biased(self) -> bool:
        """Whether what is cut off may move the posterior by more than its width, noise included."""
        histogram, free = self._histogram, self.problem.moments.label_free
        if histogram is None:
            return False
        assert self.frame is not None
        norms = histogram.norms(self.scale, tail=not free)
        return self.plan.bias(norms, self.scale, self.frame.bound) > _BIASED[free]

    @property
    def _histogram(self) -> MeanHistogram | None:
        """Of the records near the posterior; None: there is none yet."""
        if not self.histograms.counts:
            return None
        assert self.known is not None
        ways = torch.stack([look.mean for look in self.looks])
        ways = ways - self.posterior.mean[self.problem.places]
        distances = ((ways @ self.known.curvature) * ways).sum(dim=1) / self.size
        return self.histograms.mean(distances, self.size)


def _whitening(curvature: Tensor, factor: float) -> Tensor:
    """M^-1/2, (d, d): M is the curvature, in eigenvalues of mean 1, the small ones raised.

    Noise of the posterior's shape costs least where all records have like leverage. A direction
    that few records see (those of a rare value) makes theirs large: their weights fall, with them
    the curvature there, with it the noise, and leverage grows again until they are lost. So the
    geometry follows the curvature only as far as noise would matter otherwise.

    :param factor: by which they are raised, at most to the mean.
    """
    values, vectors = torch.linalg.eigh(curvature)
    values = values.maximum((factor * values).clamp(max=values.mean()))
    values = (values / values.mean()).clamp(min=1e-12)
    return (vectors / values.sqrt()) @ vectors.mT
