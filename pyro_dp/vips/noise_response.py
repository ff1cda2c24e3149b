"""The first-order response of a posterior to noise in released statistics (post-processing).

With s the mixed statistics and theta the means of all sites, let D = d theta / d s be the slope of
the M-step. Noise also moves the next E-step, and so the next statistics. Let J = D d s_hat / d
theta, s_hat the exact sums of the E-step, and rho_t the weights of the steps. A deviation of the
means evolves as

    delta_t = (1 - rho_t) delta_(t-1) + rho_t (J delta_(t-1) + D e_t),

e_t the noise of step t. Static statistics are the same in every step. Their noise acts as a
deviation D b, to which the E-step responds in every step. At a fixed point both end up as (I -
J)^-1 D times the mean noise. The same response corrects variational Bayes itself, whose covariance
V leaves out dependence between sites and records' latents. The corrected one is (I - J)^-1 V
(linear response, Giordano, Broderick & Jordan 2018, arXiv 1709.02536).

D comes from finite differences of the M-step, which is public code on released numbers. J needs the
records: a model estimates it from released numbers (:meth:`ConjugateModel.feedback`).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.infer.posterior.posterior import (
    CHECK,
    DO_NOT_PUBLISH,
    NOISE,
    NOTHING_TO_CHECK,
    STEPS,
    Status,
)
from pyro_dp.utils.linalg import cholesky, floored
from pyro_dp.vips.e_step import MixedStatistics
from pyro_dp.vips.site_posterior import SitePosterior, centre, covariance, widened

_STEP = 1e-3  # step of finite differences, as a share of the noise
_MOST_DIRECTIONS = 300  # with more, random directions represent the noise
_RANDOM = 200  # number of random directions
_ROUGH = 30  # the same, if the response of the E-step is left out
_TINY = 1e-100  # avoids a division by zero
_PROBES = 8  # random directions that measure the nonlinearity

Covariances = Mapping[str, Tensor]
_HIDDEN = "the privacy noise may outweigh the data in {some} of {all} intervals"
_NOT_CONVERGED = (
    "the steps have not converged in {some} of {all} intervals, so take more, or a step_size that "
    "forgets the first ones"
)
_NO_NOISE = "{some} of {all} intervals leave out the noise, whose effect on their family is unknown"
_NO_FEEDBACK = "{some} of {all} intervals leave out how the E-step responds to the noise"
_NONLINEAR = "the noise is too large for a first-order estimate in {some} of {all} intervals"
_LARGE = 0.5  # standard deviations that a status reports


@dataclass(frozen=True)
class Moved:
    """How each site that can be widened changes, by name, (*site shape, R) each."""

    spread: dict[str, Tensor]  # root of the covariance that linear response adds
    noise: dict[str, Tensor]  # root of the covariance of the noise in its centre
    remaining: dict[str, Tensor]  # distance of the centre from the limit of the steps, R = 1
    nonlinearity: dict[str, Tensor]  # rms effect of the noise beyond first order, R = 1


class NoiseResponse:
    """Computes the response of the sites' means.

    :param m_step: marginals by site, from the values of the statistics.
    :param static: names of statistics whose noise is the same in every step.
    :param weights: rho_t of the steps so far.
    :param first: values of the statistics after the first step, or None.
    """

    def __init__(
        self,
        m_step: Callable[[dict[str, Tensor]], Mapping[str, Distribution]],
        mixed: MixedStatistics,
        static: Collection[str],
        weights: Sequence[float],
        first: dict[str, Tensor] | None,
    ):
        self._m_step, self._mixed, self._weights, self._first = m_step, mixed, weights, first
        self._static = [name for name in mixed.values if name in static]
        self._fresh = [name for name in mixed.values if name not in static]
        # A separate generator makes each call of posterior() return the same numbers.
        self._generator = torch.Generator().manual_seed(0)
        self._shapes = {site: point.shape for site, point in self._centres(mixed.values).items()}
        self._theta = self._flat(mixed.values)

    def moved(
        self, feedback: Mapping[tuple[str, str], Tensor] | None, marginals: Covariances
    ) -> Moved:
        """Estimate the response.

        :param feedback: d s_hat / d theta by (statistic, site), or None to leave it out.
        :param marginals: covariances V of the sites in the feedback, (n, n) each.
        """
        none = torch.zeros_like(self._theta).unsqueeze(1)
        spread = remaining = nonlinearity = none
        if feedback:
            response = self._feedback(feedback)
            static, fresh = self._slopes(self._static), self._slopes(self._fresh)
            noise = cholesky(self._accumulated(static, fresh, response))
            spread, remaining = self._spread(response, marginals), self._remaining(response)
        else:
            names = [*self._static, *self._fresh]
            noise = self._slopes(names, _ROUGH if feedback is None else _RANDOM)
        if feedback is not None:
            nonlinearity = self._nonlinearity()
        return Moved(*map(self._by_site, (spread, noise, remaining, nonlinearity)))

    def _accumulated(self, static: Tensor, fresh: Tensor, response: Tensor) -> Tensor:
        """Covariance of the means' noise after all steps, (n, n).

        :param static: D times a root of the static noise, (n, R).
        :param fresh: D times a root of the mixed noise of all other statistics.
        """
        identity = torch.eye(len(response)).to(response)
        later, steady, total = identity, identity, torch.zeros_like(response)
        alone, norm = 1.0, 0.0  # as if J were zero
        for weight in reversed(self._weights):
            gain = weight * later @ fresh
            total = total + gain @ gain.mT
            steady = steady + weight * later @ response
            norm += (weight * alone) ** 2
            later = later @ ((1 - weight) * identity + weight * response)
            alone *= 1 - weight
        steady = steady @ static
        return total / norm + steady @ steady.mT

    def _remaining(self, response: Tensor) -> Tensor:
        """Distance from the limit of the steps, (n, 1).

        Let P be the product of I - rho_t (I - J) over all steps but the first. Then theta_T -
        theta_1 is (P - I) times the first deviation, and P times that deviation remains.
        """
        if self._first is None:
            return torch.zeros_like(self._theta).unsqueeze(1)
        if len(self._weights) == 1:
            return self._theta.unsqueeze(1)
        identity = torch.eye(len(response)).to(response)
        left = identity
        for weight in self._weights[1:]:
            left = ((1 - weight) * identity + weight * response) @ left
        gone = (self._theta - self._flat(self._first)).unsqueeze(1)
        return left @ torch.linalg.solve(left - identity, gone)

    def _spread(self, response: Tensor, marginals: Covariances) -> Tensor:
        """Root of (I - J)^-1 V - V, (n, n)."""
        root = torch.zeros_like(response)
        for site, matrix in marginals.items():
            own = self._slices[site]
            identity = torch.eye(len(matrix)).to(response)
            linear = torch.linalg.solve(identity - response[own, own], matrix)
            added = floored((linear + linear.mT) / 2 - matrix, 0.0)
            root[own, own] = cholesky(added)
        return root

    def _feedback(self, feedback: Mapping[tuple[str, str], Tensor]) -> Tensor:
        """J, (n, n)."""
        response = self._theta.new_zeros(len(self._theta), len(self._theta))
        for (statistic, site), block in feedback.items():
            response[:, self._slices[site]] += self._along({statistic: block})
        return response

    def _slopes(self, names: Sequence[str], random: int = _RANDOM) -> Tensor:
        """D times a root of the noise in these statistics, (n, R)."""
        sizes = [self._mixed.values[name].numel() for name in names]
        if not names:
            return self._theta.new_zeros(len(self._theta), 0)
        if sum(sizes) <= _MOST_DIRECTIONS:
            root = torch.eye(sum(sizes), dtype=self._theta.dtype)
        else:
            root = self._normal((sum(sizes), random)) / math.sqrt(random)
        parts = zip(names, root.to(self._theta).split(sizes), strict=True)
        return self._along({name: self._mixed.noise[name] * part for name, part in parts})

    def _along(self, directions: Mapping[str, Tensor]) -> Tensor:
        """Derivatives of the means, (n, R), along the columns of each direction (size, R)."""
        noise = self._mixed.noise
        moves = []
        for columns in zip(*(each.T for each in directions.values()), strict=True):
            column = dict(zip(directions, columns, strict=True))
            lengths = [x.abs().max().item() / noise[name] for name, x in column.items()]
            step = _STEP / max(*lengths, _TINY)
            moves.append((self._flat(self._moved(column, step)) - self._theta) / step)
        return torch.stack(moves, dim=1)

    def _nonlinearity(self) -> Tensor:
        """Root mean square of (theta(s + e) + theta(s - e)) / 2 - theta(s), (n, 1)."""
        found = []
        for _ in range(_PROBES):
            error = {
                name: self._mixed.noise[name] * self._normal(value.shape).to(value)
                for name, value in self._mixed.values.items()
            }
            ends = self._flat(self._moved(error, 1.0)) + self._flat(self._moved(error, -1.0))
            found.append(ends / 2 - self._theta)
        return torch.stack(found).square().mean(dim=0).sqrt().unsqueeze(1)

    def _moved(self, direction: Mapping[str, Tensor], step: float) -> dict[str, Tensor]:
        """The values of the statistics, after a step in this direction."""
        old = self._mixed.values
        return old | {n: old[n] + step * x.reshape_as(old[n]) for n, x in direction.items()}

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self._theta.dtype)

    @property
    def _slices(self) -> dict[str, slice]:
        """The slice of each site in the flat vector of means."""
        found, start = {}, 0
        for site, shape in self._shapes.items():
            found[site] = slice(start, start + shape.numel())
            start += shape.numel()
        return found

    def _by_site(self, rows: Tensor) -> dict[str, Tensor]:
        shapes = self._shapes
        return {n: rows[p].reshape(*shapes[n], -1) for n, p in self._slices.items()}

    def _flat(self, values: dict[str, Tensor]) -> Tensor:
        return torch.cat([each.flatten() for each in self._centres(values).values()])

    def _centres(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {site: centre(each) for site, each in self._m_step(values).items()}
        return {site: point for site, point in found.items() if point is not None}


def noise_aware(
    marginals: Mapping[str, Distribution],
    response: NoiseResponse,
    feedback: Mapping[tuple[str, str], Tensor] | None,
    hidden: Mapping[str, Tensor],
) -> SitePosterior:
    """Widen the marginals of variational Bayes by the response.

    :param feedback: as from :meth:`ConjugateModel.feedback`; ``hidden`` likewise.
    """
    sites = {site for _, site in feedback or {}}
    moved = response.moved(feedback, {site: covariance(marginals[site]) for site in sites})
    plain, aware, nonlinear, unconverged, no_noise, no_feedback = {}, {}, {}, {}, {}, {}
    for site, marginal in marginals.items():
        everywhere = torch.ones(marginal.batch_shape + marginal.event_shape, dtype=torch.bool)
        if site not in moved.noise:
            plain[site] = aware[site] = marginal
            no_noise[site] = everywhere
            continue
        added = torch.cat([moved.spread[site], moved.remaining[site]], dim=-1)
        plain[site] = widened(marginal, added)
        aware[site] = widened(plain[site], moved.noise[site])
        large = _LARGE * aware[site].variance.sqrt()
        nonlinear[site] = moved.nonlinearity[site].squeeze(-1) > large
        unconverged[site] = moved.remaining[site].squeeze(-1).abs() > large
        if feedback is None:
            no_feedback[site] = everywhere
    status = _status(
        sum((each.batch_shape + each.event_shape).numel() for each in marginals.values()),
        {
            (_HIDDEN, NOISE): hidden,
            (_NOT_CONVERGED, STEPS): unconverged,
            (_NONLINEAR, NOISE): nonlinear,
            (_NO_NOISE, NOISE): no_noise,
            (_NO_FEEDBACK, NOISE): no_feedback,
        },
    )
    return SitePosterior(aware, plain=plain, status=status)


def _status(count: int, found: Mapping[tuple[str, str], Mapping[str, Tensor]]) -> Status:
    """The status of ``count`` elements.

    :param found: by (text, cause) of a problem, and by site, the elements that have this problem.
    """
    for (text, cause), masks in found.items():
        some = sum(int(mask.sum()) for mask in masks.values())
        if some:
            most = text == _HIDDEN and 2 * some > count
            level = DO_NOT_PUBLISH if most else CHECK
            return Status(level, text.format(some=some, all=count), cause)
    return NOTHING_TO_CHECK
