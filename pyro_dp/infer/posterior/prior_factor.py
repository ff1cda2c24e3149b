"""The prior as a factor: what lies outside the private plate, which holds no data."""

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor

from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.records.messengers import OneRecord, Outside
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import apply, cholesky, floored

_NUM_DRAWS = 16
_LEAST_PRECISION = 1e-4  # of a prior that is not log-concave


class Prior:
    """Prior density of the guide's unconstrained latents, refined as a Gaussian factor.

    A Gaussian prior is its own factor. Any other one (a constrained latent, a hierarchy) gets

        Lambda_0 = -E_q[hess log p],    eta_0 = E_q[grad log p] + Lambda_0 m

    at the current posterior q = N(m, V): expectation propagation's update in the limit of small
    powers (Minka 2004, power EP), which needs no cavity. It costs no privacy: no record enters.

    :param model: run on placeholders, outside its private plate.
    :param dtypes: of the latents, by name.
    """

    def __init__(
        self,
        model: Callable,
        guide: GaussianGuide,
        records: Records,
        dtypes: dict[str, torch.dtype],
    ):
        self._model, self._guide, self._records, self._dtypes = model, guide, records, dtypes
        half = torch.randn(_NUM_DRAWS // 2, guide.size, dtype=torch.float64)
        self._draws = torch.cat([half, -half]).to(records.device)
        mean, _ = guide.read()
        at_mean = self._derivatives(mean)
        # Far away in the prior's own scale, where one that is not Gaussian shows it.
        scale = at_mean[1].diagonal().abs().clamp(min=1e-12).rsqrt()
        elsewhere = [self._derivatives(mean + self._draws[0] * s) for s in (1.0, scale)]
        exact = all(dtype == torch.float64 for dtype in dtypes.values())
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

    def _log_prob(self, z: Tensor) -> Tensor:
        plate, device = self._records.plate, self._records.device
        unconstrained = self._guide.split(z)
        values, log_volume = {}, 0.0
        for latent in self._guide.latents:
            u = unconstrained[latent.name].to(self._dtypes[latent.name])
            values[latent.name] = latent.transform(u)
            volume = latent.transform.log_abs_det_jacobian(u, values[latent.name])
            log_volume = log_volume + volume.sum()
        args, kwargs = self._records.arguments(self._records.placeholder())
        model = Outside(plate)(poutine.condition(self._model, data=values))
        with (
            OneRecord(plate, torch.zeros(1, dtype=torch.long, device=device)),
            guarded("Running the model on placeholder data", public=True),
        ):
            log_prob = poutine.trace(model).get_trace(*args, **kwargs).log_prob_sum()
        return (log_prob + log_volume).double()


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two Hessians are equal up to rounding, each entry in the scale of its latents."""
    scale = (one.diagonal().abs() + other.diagonal().abs()).sqrt()
    return bool(((one - other).abs() <= tolerance * torch.outer(scale, scale)).all())
