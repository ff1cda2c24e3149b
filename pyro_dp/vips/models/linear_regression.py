"""Linear regression with a conjugate Normal-Gamma prior: one release is all that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.utils.linalg import clipped_rows, floored, inverse, noise_radius, stacked, unstacked
from pyro_dp.utils.torch_state import rows_in_cache
from pyro_dp.utils.validation import require_count, require_scale
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Sds,
    Statistic,
    Sums,
    require_data,
    reviewed,
)
from pyro_dp.vips.models.noisy_sums import NoisySecondMoment, WeightedSquares, stacked_size


@dataclass(frozen=True)
class NormalGamma:
    """precision ~ Gamma(concentration, rate); weights ~ N(mean, scale / precision)."""

    mean: Tensor  # (d,)
    scale: Tensor  # (d, d)
    concentration: Tensor
    rate: Tensor


@reviewed
class LinearRegression(ConjugateModel):
    """Real labels regressed on features, with noise of unknown precision::

        precision ~ Gamma(concentration, rate)
        weights_j ~ Normal(0, (weight_precision precision)^-1/2)     j = 1..dim
        y_n       ~ Normal(x_n . weights, precision^-1/2)            n = 1..N

    **Rows of x are clipped to Euclidean norm** ``x_bound``, **labels to** [-y_bound, y_bound], in
    the Pyro model as well. Choose the bounds without looking at the data. There is no intercept
    unless you add a column.

    A record's only statistic is z z', z = (x / x_bound, y / y_bound), of norm ``|z|^2`` <= 2. It is
    static. So one step on all records gives the posterior, which is exact without noise.

    Data: ``x`` of shape (N, dim) and ``y`` of shape (N,).

    :param dim: number of features.
    :param x_bound: > 0.
    :param y_bound: > 0.
    :param weight_precision: of the weights' prior, in units of the noise's precision, > 0.
    :param concentration: of the noise precision's prior, > 0.
    :param rate: the same.

    >>> LinearRegression(dim=3, x_bound=1.0, y_bound=2.0).statistics["second_moment"].bound
    2.0
    """

    def __init__(
        self,
        dim: int,
        *,
        x_bound: float,
        y_bound: float,
        weight_precision: float = 1.0,
        concentration: float = 1.0,
        rate: float = 1.0,
    ):
        self.dim = require_count("dim", dim)
        self.microbatch_size = rows_in_cache(dim)
        self.x_bound = require_scale("x_bound", x_bound)
        self.y_bound = require_scale("y_bound", y_bound)
        self.weight_precision = require_scale("weight_precision", weight_precision)
        self.concentration = require_scale("concentration", concentration)
        self.rate = require_scale("rate", rate)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        size = stacked_size(self.dim + 1)
        return {"second_moment": Statistic((size,), bound=2.0, static=True)}

    def check(self, *data: Tensor) -> None:
        require_data(self, data, x=self.dim, y=None)

    def static_statistics(self, x: Tensor, y: Tensor) -> dict[str, WeightedSquares]:
        x = clipped_rows(x.double(), self.x_bound) / self.x_bound
        y = y.double().clamp(-self.y_bound, self.y_bound) / self.y_bound
        joint = torch.cat([x, y.unsqueeze(1)], dim=1)
        return {"second_moment": WeightedSquares(joint, torch.ones_like(y))}

    def posterior(self, statistics: Sums, noise: Sds, size: int) -> NormalGamma:
        sd = noise["second_moment"]
        # The closest matrix that could be a sum of squares: then no residual is negative.
        joint = floored(unstacked(statistics["second_moment"], self.dim + 1), 0.0)
        features, products, labels = joint[:-1, :-1], joint[:-1, -1], joint[-1, -1]
        prior = self.weight_precision / self.x_bound**2 * torch.eye(self.dim).to(joint)
        # In directions where the features are below the noise, the mean is kept small.
        raised = floored(features, noise_radius(sd, self.dim))
        mean = inverse(prior + raised) @ products
        residual = labels - 2 * mean @ products + mean @ (prior + features) @ mean
        # Its own noise: u' E u has standard deviation sd |u|^2, u = (mean, -1).
        residual = residual.clamp(min=sd * (1 + mean @ mean))
        return NormalGamma(
            mean=mean * (self.y_bound / self.x_bound),
            scale=inverse(prior + features) / self.x_bound**2,
            concentration=torch.full_like(labels, self.concentration + size / 2),
            rate=self.rate + residual * self.y_bound**2 / 2,
        )

    def hidden(self, posterior: NormalGamma, statistics: Sums, noise: Sds) -> dict[str, Tensor]:
        joint = floored(unstacked(statistics["second_moment"], self.dim + 1), 0.0)
        sd = noise["second_moment"]
        features = NoisySecondMoment.of(stacked(joint[:-1, :-1]), self.dim, sd)
        weights = features.hides(joint.new_tensor(self.weight_precision / self.x_bound**2))
        # Variance that the features do not explain belongs to the noise.
        return {"weights": weights, "precision": weights.any()}

    def marginals(self, posterior: NormalGamma) -> dict[str, Distribution]:
        spread = posterior.scale * (posterior.rate / posterior.concentration)
        return {
            "precision": dist.Gamma(posterior.concentration, posterior.rate),
            "weights": dist.MultivariateStudentT(
                2 * posterior.concentration, posterior.mean, torch.linalg.cholesky(spread)
            ),
        }

    def guide(self, posterior: NormalGamma) -> None:
        precision = pyro.sample("precision", dist.Gamma(posterior.concentration, posterior.rate))
        root = torch.linalg.cholesky(posterior.scale) * precision.rsqrt()[..., None, None]
        pyro.sample("weights", dist.MultivariateNormal(posterior.mean, scale_tril=root))

    def model(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The Pyro model, which returns labels. Without ``y`` it samples them."""
        concentration, rate = x.new_tensor(self.concentration), x.new_tensor(self.rate)
        precision = pyro.sample("precision", dist.Gamma(concentration, rate))
        sd = (self.weight_precision * precision).rsqrt()
        weights = pyro.sample("weights", dist.Normal(0.0, sd).expand([self.dim]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            mean = clipped_rows(x[idx], self.x_bound) @ weights.to(x.dtype)
            observed = None if y is None else y[idx].clamp(-self.y_bound, self.y_bound)
            return pyro.sample("y", dist.Normal(mean, precision.rsqrt().to(x.dtype)), obs=observed)
