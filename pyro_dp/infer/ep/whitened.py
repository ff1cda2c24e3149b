"""DPSEP's posterior from releases in its own geometry, with a bound that is read off the release.

Each release has noise of the posterior's shape, as its coordinates are whitened by the curvature
that was released before. All releases so far are combined (:mod:`pyro_dp.infer.ep.evidence`), and
meet the prior with the weight that noise leaves them: where it hides all, the prior remains.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.infer.ep.evidence import Evidence, Look, evidence, power
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.release_plan import ReleasePlan
from pyro_dp.infer.ep.site_factors import Full
from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.mechanism.norm_histogram import Norms
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import dense, inverse, unstacked

_LONGEST_STEP = 1.0  # root of nats per record
_TURNED = 0.3  # cosine, from which a step goes back on the one before: it was too long
_NEAR = 0.1  # squared distance from which norms are of other records, so to speak
_SPREAD = 2.0  # of the first guess of norms, in nats
_SPREAD_LATER = 0.4
_TYPICAL = 0.8  # norm of a record's gradient, over the root of its curvature
_IRRELEVANT = 1e-6  # curvature, in parts of the prior's
_FASTEST = 4.0  # change of the scale in one step
_GAUSSIANS = ("posterior", "aware", "prior")


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


@dataclass(frozen=True, eq=False)
class WhitenedApproximation:
    """q = prior * evidence; everything in it is public.

    :param problem: of the data at hand.
    :param size: N.
    :param posterior: q without the noise's uncertainty, on all latents.
    :param aware: q with it; both have the same mean.
    :param prior: as a factor, refined at q.
    :param looks: all releases but the first, which is of norms alone.
    :param counts: released histograms, and the standard deviation of their noise.
    :param known: evidence of the records, from the second release on.
    :param frame: of the next release; None: that will be of norms alone.
    """

    problem: EPProblem
    size: int
    posterior: Gaussian
    aware: Gaussian
    prior: Gaussian
    looks: tuple[Look, ...] = ()
    counts: tuple[tuple[Tensor, float], ...] = ()
    known: Evidence | None = None
    scale: float = 1.0
    radius: float = 1.0
    frame: Frame | None = None

    @staticmethod
    def start(problem: EPProblem, size: int, exact: bool) -> "WhitenedApproximation":
        """The guide's initial values are the first q.

        :param exact: there is no noise, and no bound.
        """
        mean, covariance = problem.guide.read()
        posterior = Gaussian.from_moments(mean, dense(covariance))
        prior = problem.prior.factor(mean, posterior.covariance)
        identity = torch.eye(len(problem.places)).to(mean)
        frame = Frame(identity, 1.0, math.inf) if exact else None
        return WhitenedApproximation(problem, size, posterior, posterior, prior, frame=frame)

    @property
    def structure(self) -> Full:
        return Full(self.problem.widths)

    def at(self, size: int) -> tuple[Gaussian, Frame | None]:
        """Cavity and frame that each of ``size`` records' parts is made at."""
        share = 1 - 1 / size
        return self.posterior**share * self.prior ** (1 - share), self.frame

    def first(self, counts: Tensor, sd: float, plan: ReleasePlan) -> "WhitenedApproximation":
        """After the release of norms alone: the scale of what follows.

        :param counts: released histogram of the gradients' norms.
        :param sd: of its noise.
        """
        guess = math.sqrt(len(self.problem.places))
        typical = Norms.read(counts.cpu().numpy(), sd, self.size, guess, _SPREAD).median
        identity = torch.eye(len(self.problem.places)).to(self.posterior.eta)
        frame = Frame(identity, plan.curvature_share / typical, 2 * typical)
        return replace(self, scale=typical**2, frame=frame)

    def updated(
        self,
        released: Tensor,
        counts: Tensor | None,
        cavity: Gaussian,
        plan: ReleasePlan,
        *,
        noise: float,
        counts_sd: float,
        rate: float,
    ) -> tuple[float, "WhitenedApproximation"]:
        """With one more release.

        :param released: whitened gradient and curvature, in the coordinates of the frame.
        :param counts: histogram of norms; None: the bound stays.
        :param cavity: at which it was made.
        :param noise: standard deviation of the noise in a coordinate of the gradient.
        :param counts_sd: of the noise in a bin.
        :param rate: of sampling.
        :returns: the step's length, in roots of nats per record, and what comes of it.
        """
        assert self.frame is not None
        look = self._look(released, cavity, noise, rate)
        looks = (*self.looks, look)
        before = self.known.curvature if self.known else None
        least = _IRRELEVANT * dense(self.prior.precision).diagonal()[self.problem.places].mean()
        known = evidence(looks, before, look.geometry, self.size, least.item())
        length, radius, posterior, aware, prior = self._moved(known, cavity)
        moved = replace(
            self,
            posterior=posterior,
            aware=aware,
            prior=prior,
            looks=looks,
            known=known,
            radius=radius,
            scale=self._new_scale(known),
        )
        if counts is not None:
            moved = replace(moved, counts=(*self.counts, (counts, counts_sd)))
        return length, replace(moved, frame=moved._next_frame(plan))

    def hidden(self) -> int:
        """In how many directions the noise says more than the records."""
        if self.known is None:
            return len(self.problem.places)
        root = power(self.known.curvature, -0.5)
        left = torch.linalg.eigvalsh(root @ self.known.information @ root)
        return int((left < 0.5).sum())

    def state(self) -> dict[str, Any]:
        """Everything that steps change, as tensors and numbers."""
        known, frame = self.known, self.frame
        return {
            "looks": [vars(look) for look in self.looks],
            "counts": list(self.counts),
            "known": vars(known) if known else None,
            "frame": vars(frame) if frame else None,
            "scale": self.scale,
            "radius": self.radius,
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
        return replace(
            self,
            looks=tuple(Look(**each) for each in state["looks"]),
            counts=tuple((counts, sd) for counts, sd in state["counts"]),
            known=Evidence(**known) if known else None,
            frame=Frame(**frame) if frame else None,
            scale=state["scale"],
            radius=state["radius"],
            **{name: Gaussian(**state["gaussians"][name]) for name in _GAUSSIANS},
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

    def _moved(
        self, known: Evidence, cavity: Gaussian
    ) -> tuple[float, float, Gaussian, Gaussian, Gaussian]:
        """Length of the step, the most it could be, q without and with noise, and the prior."""
        places, dim = self.problem.places, self.problem.guide.size
        information = known.information
        factor = Gaussian(information @ known.estimate, information).embedded(places, dim)
        start = self.posterior.mean
        step = (self.prior * factor).mean - start
        seen, last = step[places], self._last_way
        length = math.sqrt(max((seen @ known.curvature @ seen).item() / self.size, 0.0))
        radius = self.radius
        if last is not None:
            turned = (seen @ known.curvature @ last).item()
            before = math.sqrt(max((last @ known.curvature @ last).item() / self.size, 1e-24))
            back = turned / (self.size * before * max(length, 1e-12)) < -_TURNED
            radius = before / 2 if back else min(2 * radius, _LONGEST_STEP)
        mean = start + step * min(1.0, radius / max(length, 1e-12))
        precision = factor.precision.new_zeros(dim, dim)
        precision[places.unsqueeze(1), places] = known.curvature
        prior = self.problem.prior.factor(mean, inverse(self.prior.precision + precision))
        plain = prior.precision + precision
        aware = prior.precision + factor.precision
        plain, aware = Gaussian(plain @ mean, plain), Gaussian(aware @ mean, aware)
        return length, radius, plain, aware, prior

    @property
    def _last_way(self) -> Tensor | None:
        """From the last look but one to where q is now."""
        if not self.looks:
            return None
        return self.posterior.mean[self.problem.places] - self.looks[-1].mean

    def _new_scale(self, known: Evidence) -> float:
        scale = known.curvature.trace().item() / self.size
        return min(max(scale, self.scale / _FASTEST), self.scale * _FASTEST)

    def _next_frame(self, plan: ReleasePlan) -> Frame:
        """As all that was released until now suggests."""
        assert self.known is not None and self.frame is not None
        curvature = self.known.curvature
        geometry = curvature * (len(curvature) / curvature.trace())
        weight = plan.curvature_share / math.sqrt(self.scale)
        frame = Frame(power(geometry, -0.5), weight, self.frame.bound)
        if not self.counts:
            return frame
        norms = self._norms()
        free = self.problem.moments.label_free
        bound = plan.bound(norms, self.scale, frame.bound, label_free=free)
        return replace(frame, bound=bound)

    def _norms(self) -> Norms:
        """Of the records near the posterior, by all histograms that were made there."""
        ways = (
            torch.stack([look.mean for look in self.looks])
            - self.posterior.mean[self.problem.places]
        )
        distances = ((ways @ self.known.curvature) * ways).sum(dim=1) / self.size
        sds = torch.tensor([sd for _, sd in self.counts]).to(distances).clamp(min=1e-6)
        weights = 1 / ((1 + (distances / _NEAR) ** 2) * sds**2)
        weights = weights / weights.sum()
        counts = torch.tensordot(weights, torch.stack([each for each, _ in self.counts]), dims=1)
        sd = (weights * sds).norm().item()
        typical = _TYPICAL * math.sqrt(self.scale)
        return Norms.read(counts.cpu().numpy(), sd, self.size, typical, _SPREAD_LATER)
