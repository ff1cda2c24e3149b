"""The approximate posterior of PaperDPSEP, and how released estimates move it.

Step lengths and the start of averaging depend on released numbers alone: post-processing.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.ep.site_factors import Structure
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.infer.posterior.explanation import SAMPLING
from pyro_dp.infer.posterior.posterior import CHECK, CLIPPING, DO_NOT_PUBLISH, NOISE, STEPS, Status
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.mechanism.contributions import Block
from pyro_dp.utils.linalg import Gaussian, apply, capped, dense, floored, inverse

_SIGNIFICANT = 3.0  # standard deviations of the noise
_RELEVANT = 0.01  # nats
_SETTLED = 1.0  # nats that one more step would gain
_LONGEST_WAY = 0.5  # share of the steps
_CURVED_WAY = 0.8
_STEERED = ("floor", "_way", "_averaged", "_anchor", "taken", "judged", "unsettled")


class StepControl:
    """Controls the steps by G, the gradient of the log posterior at the cavity means.

    *Overshooting.* From the anchor a to the mean m the log posterior changes by about
    (m - a)'(G_a + G_m) / 2. If it fell by more than noise explains, the estimate at m is rejected.
    The next step starts from a again. It is shorter, because :attr:`floor` raises the precision's
    eigenvalues more. A Gaussian posterior never overshoots.

    *Averaging.* While G' P^-1 G exceeds its noise, each estimate replaces the one before. This
    phase takes at most half of the steps, or four fifths if predictors are not linear, as in
    networks. After that, estimates are averaged.

    *Settling.* An estimate speaks against settling if it was rejected, or if its G' P^-1 G is more
    than one nat above the noise. Most estimates in the last half of the steps must not.

    :param curved: the predictors are not linear in the latents.
    :param floor: the first step's floor.
    """

    def __init__(self, num_steps: int, curved: bool, floor: float):
        self.floor = floor
        self._curved = curved
        self._way = math.ceil((_CURVED_WAY if curved else _LONGEST_WAY) * num_steps)
        self._averaged = 0
        self._last_half = num_steps // 2
        self.taken = 0  # steps
        self.judged = 0  # steps in the last half
        self.unsettled = 0  # judged steps that speak against settling
        self._anchor: tuple[Tensor, Tensor, float] | None = None

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STEERED}

    def load(self, state: Mapping[str, Any]) -> None:
        # States of older versions have fewer.
        vars(self).update({name: state[name] for name in _STEERED if name in state})

    @property
    def damping(self) -> float:
        """1 while estimates replace each other, then 1/2, 1/3, ...: their running average."""
        return 1 / max(1, self._averaged)

    @property
    def settled(self) -> bool:
        """Whether most estimates in the last half of the steps were accepted and near the mode."""
        return 2 * self.unsettled <= self.judged

    def accepts(self, mean: Tensor, gradient: Tensor, precision: Tensor, noise: Tensor) -> bool:
        """Whether to use an estimate.

        :param mean: m, the mean of its cavity, (d,).
        :param gradient: G there, (d,), with the noise of this step.
        :param precision: P, the posterior's estimated precision, (d, d) or (d,).
        :param noise: covariance of the gradient's noise, of the same shape.
        """
        accepted = self._accepts(mean, gradient, precision, noise)
        self.taken += 1
        if self.taken > self._last_half:
            self.judged += 1
            self.unsettled += not accepted or not (
                _excess(gradient, precision, noise) <= 2 * _SETTLED
            )
        return accepted

    def _accepts(self, mean: Tensor, gradient: Tensor, precision: Tensor, noise: Tensor) -> bool:
        self._way -= 1
        if self._averaged == 0 and self._anchor is not None:
            anchor, gradient_before, size_before = self._anchor
            step = mean - anchor
            gain = step @ (gradient_before + gradient)
            spread = (2 * step @ apply(noise, step)).clamp(min=0.0).sqrt()
            if gain < -_RELEVANT - _SIGNIFICANT * spread:
                self.floor = max(4 * self.floor, size_before)
                return False
        self.floor /= 2
        size = precision.mean() if precision.dim() == 1 else precision.diagonal().mean()
        self._anchor = mean, gradient, size.item()
        small = not self._curved and self._way > 0 and _excess(gradient, precision, noise) <= 0
        if self._averaged or (noise.any() and (self._way <= 0 or small)):
            self._averaged += 1
        return True


def _excess(gradient: Tensor, precision: Tensor, noise: Tensor) -> float:
    """G' P^-1 G, less the largest value that noise alone explains."""
    covariance = inverse(precision)
    squared = gradient @ apply(covariance, gradient)
    # The mean and variance that noise alone would give it.
    if covariance.dim() == 1:
        relative = covariance * noise
        mean, variance = relative.sum(), 2 * relative.square().sum()
    else:
        relative = covariance @ noise
        mean, variance = relative.trace(), 2 * (relative * relative.T).sum()
    return (squared - mean - _SIGNIFICANT * variance.sqrt()).item()


_GAUSSIANS = ("posterior", "prior", "factor")
_CHANGING = ("noise_variance", "sampling_variance", "_centre", "_stepping", "_radius", "_replaced")
_UNSETTLED = (
    "{count} of the last {judged} estimates were left aside, or made where the gradient stood out "
    "of the noise"
)


class AverageFactor:
    """f^N, a damped average of released estimates. All of it is public.

    :attr:`reported` enters the posterior. The next step starts from :meth:`projected`, which
    raises eigenvalues of the precision to the noise's spectral radius. This makes the step shorter,
    and adds no information about the latents. The score at the average cavity mean stays the same,
    because noise in the precision has no effect there.

    While estimates replace each other (damping 1), :meth:`projected` uses the average of all
    precisions so far, which has less noise than the last one.

    :param structure: the structure of the precision.
    :param initial: f^N before the first step.
    :param centre: mean of the initial posterior, (d,).
    """

    def __init__(self, structure: Structure, initial: Gaussian, centre: Tensor):
        self.structure = structure
        self.noise_variance = 0.0  # noise in a coordinate of eta, from a centred release
        self.sampling_variance = 0.0  # in eta, in units of the sum of the records' precisions
        self._average = initial
        self._centre = centre
        self._stepping = initial.precision
        self._radius: Tensor | float = 0.0  # the radius of the noise in it
        self._replaced = 0

    def state(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in _CHANGING}
        return numbers | {"_average": (self._average.eta, self._average.precision)}

    def load(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in _CHANGING})
        self._average = Gaussian(*state["_average"])

    @property
    def reported(self) -> Gaussian:
        """The average, without negative eigenvalues of the precision."""
        precision = floored(self._average.precision, 0.0)
        return self._average.with_precision(precision, self._centre)

    def hidden(self) -> int:
        """The number of directions in which the precision is below its noise."""
        stepping = self._stepping
        values = stepping if stepping.dim() == 1 else torch.linalg.eigvalsh(stepping)
        return int((values < self._radius).sum())

    def projected(self, least: float = 0.0) -> Gaussian:
        """The average, with eigenvalues of the precision at least at its noise and ``least``."""
        radius = torch.as_tensor(self._radius, dtype=torch.float64).clamp(min=least)
        return self._average.with_precision(floored(self._stepping, radius), self._centre)

    def update(
        self,
        estimate: Gaussian,
        cavity_mean: Tensor,
        damping: float,
        *,
        noise: float,
        weight: float,
        sample_rate: float,
    ) -> float:
        """f <- (1 - damping) f + damping f_hat, in natural parameters.

        :param noise: standard deviation of the noise in a coordinate of the estimate's eta.
        :param weight: kappa. A coordinate of the precision has noise / kappa.
        :returns: Euclidean norm of the change of (eta, kappa Lambda).
        """
        before = self._average
        self._average = before ** (1 - damping) * estimate**damping
        self._centre = (1 - damping) * self._centre + damping * cavity_mean
        self.noise_variance = _averaged(self.noise_variance, noise**2, damping)
        excess = (1 - sample_rate) / sample_rate
        self.sampling_variance = _averaged(self.sampling_variance, excess, damping)
        if damping == 1 and noise > 0:
            self._replaced += 1
            self._stepping = self._stepping + (estimate.precision - self._stepping) / self._replaced
            variance = noise**2 / self._replaced
        else:
            self._stepping, variance = self._average.precision, self.noise_variance
        self._radius = self.structure.noise_radius(variance**0.5 / weight)
        change = self._average / before
        coordinates = weight * self.structure.coordinates(change.precision)
        return torch.cat([change.eta, coordinates]).norm().item()


def _averaged(variance: float, new: float, damping: float) -> float:
    return (1 - damping) ** 2 * variance + damping**2 * new


@dataclass(frozen=True, eq=False)
class Approximation:
    """q = prior * f^N; everything in it is public.

    :param blocks: blocks of a release: sites, and possibly the bit of being within the bound.
    :param weight: kappa, as for :class:`SiteSum`; so is centred.
    :param steered: whether the step control chooses the damping.
    :param average: f^N of the latents that the likelihood depends on, from all estimates.
    :param posterior: q.
    :param prior: the prior as a factor, refined at the posterior of the step before.
    :param factor: f^N on all latents, projected for the next step.
    :param mean_noise: variance of the noise in the mean, (d,), for diagonal precisions.
    """

    problem: EPProblem
    blocks: tuple[Block, ...]
    weight: float
    centred: bool
    steered: bool
    average: AverageFactor
    control: StepControl
    posterior: Gaussian
    prior: Gaussian
    factor: Gaussian
    mean_noise: Tensor

    def site_sum(self, microbatch_size: int | None) -> SiteSum:
        return SiteSum(
            problem=self.problem,
            structure=self.average.structure,
            centred=self.centred,
            weight=self.weight,
            num_blocks=len(self.blocks),
            microbatch_size=microbatch_size,
        )

    def next_sum(self, sites: SiteSum) -> SiteSum:
        return sites

    def at(self, size: int) -> Gaussian:
        """The public cavity q / f of each of ``size`` records."""
        return self.posterior / self.factor ** (1 / size)

    def updated(
        self,
        released: Sequence[Tensor],
        at: Any,
        multiplier: float,
        *,
        damping: float | None,
        sample_rate: float,
    ) -> tuple[float, "Approximation"]:
        """f <- (1 - damping) f + damping f_hat, unless the step control rejects the estimate.

        :param released: one tensor a block; the first has the coordinates of f_hat^N.
        :param at: the cavity, from :meth:`at`.
        :param multiplier: sd of the noise in units of the bound.
        :param damping: None: the step control chooses it.
        :returns: Euclidean norm of the change of (eta, kappa Lambda), and the new approximation.
        """
        average, control = copy.copy(self.average), copy.copy(self.control)
        noise, mean = self.blocks[0].noise(multiplier), at.mean[self.problem.places]
        estimate = self._estimate(released[0], mean)
        change, noise_in_mean = 0.0, self.mean_noise
        if damping is not None or control.accepts(
            *self._judged(estimate, at.mean, noise, sample_rate)
        ):
            damping = control.damping if damping is None else damping
            noise_in_mean = self._mean_noise_after(damping * noise, damping)
            change = average.update(
                estimate, mean, damping, noise=noise, weight=self.weight, sample_rate=sample_rate
            )
        moved = replace(self, average=average, control=control, mean_noise=noise_in_mean)
        return change, moved.advanced()

    def moments(self, noise_aware: bool) -> tuple[Tensor, Tensor]:
        """Mean and covariance: (d, d), or (d,) for diagonal precisions."""
        mean = self.posterior.mean
        plain = inverse((self.prior * self.problem.on_all(self.average.reported)).precision)
        if not noise_aware:
            return mean, plain
        aware = (1 + self.average.sampling_variance) * plain + self._privacy_noise(mean, plain)
        return mean, capped(aware, self.prior.precision)

    def noise_parts(self) -> dict[str, Tensor]:
        """Variances by privacy noise and by sampling, (d,) each."""
        mean, plain = self.moments(False)
        noise = self._privacy_noise(mean, plain)
        variances = [dense(each).diagonal() for each in (noise, plain)]
        return {NOISE: variances[0], SAMPLING: self.average.sampling_variance * variances[1]}

    def status(self, clipped: ClippedFraction | None) -> Status:
        if not self.control.settled:
            counts = {"count": self.control.unsettled, "judged": self.control.judged}
            return Status(DO_NOT_PUBLISH, _UNSETTLED.format(**counts), STEPS)
        if clipped is not None and clipped.is_large:
            return Status(CHECK, f"clipped: {clipped}", CLIPPING)
        count, dim = self.average.hidden(), len(self.problem.places)
        if 2 * count > dim:
            reason = f"the noise may outweigh the data in {count} of {dim} directions"
            return Status(DO_NOT_PUBLISH, reason, NOISE)
        return Status()

    def state(self) -> dict[str, Any]:
        gaussians = {name: getattr(self, name) for name in _GAUSSIANS}
        return {
            "average": self.average.state(),
            "control": self.control.state(),
            "mean_noise": self.mean_noise,
            "gaussians": {f"_{n}": (each.eta, each.precision) for n, each in gaussians.items()},
        }

    def resumed(self, state: Mapping[str, Any]) -> "Approximation":
        """The approximation from a :meth:`state`, for this problem."""
        average, control = copy.copy(self.average), copy.copy(self.control)
        average.load(state["average"])
        control.load(state["control"])
        saved, noise = state["gaussians"], state["mean_noise"]
        gaussians: Any = {n: Gaussian(*saved[f"_{n}"]) for n in _GAUSSIANS}
        return replace(self, average=average, control=control, mean_noise=noise, **gaussians)

    def advanced(self) -> "Approximation":
        """The approximation with q = prior * f^N, and the prior refined at the last q."""
        prior = self.problem.prior.factor(self.posterior.mean, self.posterior.covariance)
        least = self.control.floor if self.steered else 0.0
        factor = self.problem.on_all(self.average.projected(least))
        return replace(self, prior=prior, factor=factor, posterior=prior * factor)

    def _estimate(self, released: Tensor, mean: Tensor) -> Gaussian:
        """f_hat^N from the released coordinates, at the cavity's mean."""
        structure = self.average.structure
        eta, coordinates = released.split([len(mean), structure.size])
        precision = structure.precision(coordinates / self.weight)
        if self.centred:
            eta = eta + apply(precision, mean)
        return Gaussian(eta, precision)

    def _judged(
        self, estimate: Gaussian, mean: Tensor, noise: float, rate: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of :meth:`StepControl.accepts`."""
        posterior = self.prior * self.problem.on_all(estimate)
        gradient = posterior.eta - apply(posterior.precision, mean)
        radius = self.average.structure.noise_radius(noise / self.weight)
        above_noise = Gaussian(estimate.eta, floored(estimate.precision, radius))
        precision = self.prior.precision + self.problem.on_all(above_noise).precision
        variance = torch.full_like(mean, noise**2)
        variance = variance if precision.dim() == 1 else torch.diag(variance)
        variance = variance + (1 - rate) / rate * self.problem.on_all(above_noise).precision
        return mean, gradient, precision, variance

    def _privacy_noise(self, mean: Tensor, plain: Tensor) -> Tensor:
        """Covariance of the noise in the mean, in the shape of ``plain``."""
        if plain.dim() == 1:
            return self.mean_noise
        extrapolated = None if self.centred else (mean, self.weight)
        return mean_noise(plain, self.problem.places, self.average.noise_variance, extrapolated)

    def _mean_noise_after(self, noise: float, damping: float) -> Tensor:
        """Variance of the noise in the mean after an update, for diagonal precisions.

        :param noise: standard deviation of the noise in a coordinate of the update of eta.
        """
        covariance, places = self.posterior.covariance, self.problem.places
        if covariance.dim() > 1:
            return self.mean_noise
        kept = 1 - damping * covariance * self.prior.precision
        added = torch.zeros_like(kept).index_copy(0, places, (noise * covariance[places]) ** 2)
        return kept**2 * self.mean_noise + added


def mean_noise(
    covariance: Tensor, places: Tensor, variance: float, extrapolated: tuple[Tensor, float] | None
) -> Tensor:
    """Covariance of the noise in the mean, (d, d).

    With Sigma the posterior's covariance and v the variance of the noise in a coordinate of eta::

        centred release      v Sigma^2
        uncentred            v Sigma (I + (|mu|^2 I + mu mu') / (2 kappa^2)) Sigma

    The mean is Sigma eta. Noise e in eta moves it by Sigma e. Noise E in the precision moves it by
    -Sigma E mu. In a centred release E mu also enters eta, which cancels this. E has variance
    v / kappa^2 on the diagonal and half of it off the diagonal.

    :param places: the coordinates with noise, on which the likelihood depends.
    :param extrapolated: mean (d,) and kappa of an uncentred release.
    """
    noise = torch.eye(len(places)).to(covariance)
    if extrapolated is not None:
        mean, weight = extrapolated
        mu = mean[places]
        noise = noise + (mu @ mu * noise + torch.outer(mu, mu)) / (2 * weight**2)
    gain = covariance[:, places]
    return variance * gain @ noise @ gain.T
