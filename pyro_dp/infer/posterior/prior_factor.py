"""The prior as a Gaussian factor."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import apply, cholesky, floored

_NUM_DRAWS = 16
_LEAST_PRECISION = 1e-4  # of a prior that is not log-concave


class Prior:
    """A density of unconstrained latents, refined as a Gaussian factor.

    A Gaussian prior is its own factor. Any other one (a constrained latent, a hierarchy) gets

        Lambda_0 = -E_q[hess log p],    eta_0 = E_q[grad log p] + Lambda_0 m

    at the current posterior q = N(m, V): expectation propagation's update in the limit of small
    powers (Minka 2004, power EP), which needs no cavity. It costs no privacy: no record enters.

    :param log_prob: log density of the flat vector (d,) of unconstrained latents.
    :param mean: of the first posterior, (d,).
    :param exact: whether the density is computed in float64.
    :raises ModelError: the density is flat or linear somewhere.
    """

    def __init__(self, log_prob: Callable[[Tensor], Tensor], mean: Tensor, exact: bool = True):
        self._log_prob = log_prob
        half = torch.randn(_NUM_DRAWS // 2, len(mean), dtype=torch.float64)
        self._draws = torch.cat([half, -half]).to(mean.device)
        at_mean = self._derivatives(mean)
        # Far away in the prior's own scale, where one that is not Gaussian shows it.
        scale = at_mean[1].diagonal().abs().clamp(min=1e-12).rsqrt()
        elsewhere = [self._derivatives(mean + self._draws[0] * s) for s in (1.0, scale)]
        same = all(_agree(at_mean[1], h, 1e-8 if exact else 1e-4) for _, h in elsewhere)
        if same and not (torch.linalg.eigvalsh(at_mean[1]) < 0).all():
            raise ModelError(
                "The log density of the prior is flat or linear somewhere (Laplace?). "
                "Expectation propagation needs a smooth prior, such as Normal or StudentT. "
                "DPSVI takes any."
            )
        self._gaussian = at_mean if same else None
        self._centre = mean
        self._latest: tuple[Tensor, Tensor] | None = None

    @property
    def is_gaussian(self) -> bool:
        """Whether it is its own factor."""
        return self._gaussian is not None

    def factor(self, mean: Tensor, covariance: Tensor) -> Gaussian:
        """Of the kind (full or diagonal) that the covariance has.

        :param mean: of the current posterior, (d,).
        :param covariance: (d, d) or (d,).
        """
        if self._gaussian is not None:
            gradient, hessian = self._gaussian
            gradient = gradient + hessian @ (mean - self._centre)
            least = 0.0
        else:
            root = covariance.sqrt().diag() if covariance.dim() == 1 else cholesky(covariance)
            found = [self._derivatives(mean + root @ draw) for draw in self._draws]
            found = [(g, h) for g, h in found if g.isfinite().all() and h.isfinite().all()]
            # Where the density cannot be evaluated, as far out, the factor stays as it was.
            found = found or [self._latest or self._derivatives(self._centre)]
            gradient, hessian = (sum(each) / len(found) for each in zip(*found, strict=True))
            self._latest = gradient, hessian
            least = _LEAST_PRECISION
        precision = -hessian.diagonal() if covariance.dim() == 1 else -hessian
        precision = floored(precision, least)
        return Gaussian(gradient + apply(precision, mean), precision)

    def _derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient (d,) and Hessian (d, d) of the log density."""

        def gradient(z):
            value = torch.func.jacrev(self._log_prob)(z)
            return value, value

        hessian, value = torch.func.jacrev(gradient, has_aux=True)(z)
        return value.detach(), ((hessian + hessian.mT) / 2).detach()


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two Hessians are equal up to rounding, each entry in the scale of its latents."""
    scale = (one.diagonal().abs() + other.diagonal().abs()).sqrt()
    return bool(((one - other).abs() <= tolerance * torch.outer(scale, scale)).all())
