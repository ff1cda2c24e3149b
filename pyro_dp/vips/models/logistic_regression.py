"""Logistic regression by Pólya-Gamma augmentation.

Algorithm 5 of Park et al. 2020 (VIPS, arXiv 1611.00340). The augmentation of Polson, Scott & Windle
2013 (arXiv 1205.0310) makes the likelihood conjugate to a Gaussian.

Fisher's information follows from the released curvature. With c^2 = u^2 + t, u = x . w, the E-step
of a record is E[omega] = g(c^2). It moves with the weights. The information is sum_n h(u_n) x_n
x_n', h(u) = g(c^2) + 2 u^2 g'(c^2). For t = 0 it is that of the logistic likelihood. The release is
sum_n g(c_n^2) x_n x_n'. The step from one to the other needs the rows, or their distribution. Here
they count as Gaussian, with second moments that match the release.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.utils.linalg import clipped_rows, times
from pyro_dp.utils.torch_state import rows_in_cache
from pyro_dp.utils.validation import require_count, require_scale
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Draws,
    Sds,
    Statistic,
    Sums,
    require_binary,
    require_data,
    reviewed,
)
from pyro_dp.vips.models.noisy_sums import NoisySecondMoment, WeightedSquares, stacked_size

_FARTHEST, _NODES = 8.0, 1001  # standard deviations, for sums over a Gaussian's density
_SMALL = 1e-5  # a difference of c^2
_BISECTIONS = 60
_TOLERANCE, _MOST_ITERATIONS = 1e-13, 1000


def polya_gamma_mean(squared: Tensor) -> Tensor:
    """Mean of PG(1, c), tanh(c / 2) / (2 c), from c^2: at most 1/4."""
    c = squared.clamp(min=0.0).sqrt()
    near_zero = 0.25 - squared / 48  # the next term is c^4 / 480
    return torch.where(c < 1e-3, near_zero, torch.tanh(c / 2) / (2 * c))


def logit_information(curvature: Tensor, mean: Tensor, covariance: Tensor, size: int) -> Tensor:
    """(d, d), nowhere larger than the curvature, which is positive definite.

    :param mean: the weights', (d,), as the covariance, (d, d).
    """
    nodes = torch.linspace(-_FARTHEST, _FARTHEST, _NODES).to(mean)
    squared = nodes.square()
    weights = torch.softmax(-squared / 2, dim=0)
    spread = (4 * (covariance * curvature).sum() / size).item()  # t, as omega is about 1/4

    def moments(variance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """E[k(u)] and E[k(u) u^2] / variance, for k = g and k = h."""
        g = polya_gamma_mean(variance * squared + spread)
        slope = (polya_gamma_mean(variance * squared + spread + _SMALL) - g) / _SMALL
        h = g + 2 * variance * squared * slope
        return weights @ g, weights @ (g * squared), weights @ h, weights @ (h * squared)

    # The variance of u follows from the released E[g u^2], and no row is longer than 1.
    released = (mean @ curvature @ mean).item() / size
    least, most = 0.0, max((mean @ mean).item(), 1e-12)
    for _ in range(_BISECTIONS):
        variance = (least + most) / 2
        below = variance * moments(variance)[1].item() < released
        least, most = (variance, most) if below else (least, variance)
    g, g_along, h, h_along = moments(most)
    # The rows' second moments S: `curvature / N = S g + along along' (g_along - g) / variance`.
    along = curvature @ mean / (size * g_along)  # S mean
    outer = torch.outer(along, along) / most
    second_moment = (curvature / size - outer * (g_along - g)) / g
    information = size * (second_moment * h + outer * (h_along - h))
    return _within(information, curvature, least=(h_along / g_along).item())


def _within(information: Tensor, curvature: Tensor, least: float) -> Tensor:
    """Clamp to between ``least`` times the curvature and the curvature, against noise."""
    root = torch.linalg.cholesky(curvature)
    half = torch.linalg.solve_triangular(root, information, upper=False)
    ratio = torch.linalg.solve_triangular(root, half.mT, upper=False)
    values, vectors = torch.linalg.eigh((ratio + ratio.mT) / 2)
    back = root @ vectors
    return (back * values.clamp(least, 1.0)) @ back.mT


@dataclass(frozen=True)
class LogisticPosterior:
    """q(weights) q(precision) = N(mean, covariance) Gamma(concentration, rate)."""

    mean: Tensor  # (d,)
    covariance: Tensor  # (d, d)
    concentration: Tensor
    rate: Tensor


@reviewed
class LogisticRegression(ConjugateModel):
    """Binary labels regressed on features, with a Gaussian prior of unknown precision::

        precision ~ Gamma(concentration, rate)
        weights_j ~ Normal(0, precision^-1/2)                  j = 1..dim
        y_n       ~ Bernoulli(logit = x_n . weights)           n = 1..N

    **Rows of x are clipped to Euclidean norm 1**, in the Pyro model as well. Scale the features
    until few rows are longer. There is no intercept unless you add a column.

    A record has two statistics. The first, (y - 1/2) x, has norm at most 1/2 and is static. The
    second, E[omega] x x', has norm at most 1/4. Here omega is the record's Pólya-Gamma variable, of
    mean tanh(c / 2) / (2 c), c^2 = E[(x . weights)^2].

    Data: ``x`` of shape (N, dim), and labels ``y`` of shape (N,), each 0 or 1.

    :param dim: number of features.
    :param concentration: of the precision's prior, > 0. If it and ``rate`` are both large, the
        precision is practically fixed.
    :param rate: the same.

    >>> x = torch.linspace(-1.0, 1.0, 5000)[:, None]
    >>> y = (x[:, 0] + torch.sin(1e3 * x[:, 0]) > 0).float()
    >>> regression = LogisticRegression(dim=1)
    >>> vips = VIPS(regression, accountant=accountant, num_steps=20, noise=Noise(source=0))
    >>> result = vips.run(x, y, progress=False)
    >>> bool(vips.posterior()["weights"].mean > 1.0)
    True
    """

    def __init__(self, dim: int, *, concentration: float = 1.0, rate: float = 1.0):
        self.dim = require_count("dim", dim)
        self.microbatch_size = rows_in_cache(dim)
        self.concentration = require_scale("concentration", concentration)
        self.rate = require_scale("rate", rate)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        return {
            "labels": Statistic((self.dim,), bound=0.5, static=True),
            "curvature": Statistic((stacked_size(self.dim),), bound=0.25),
        }

    def check(self, *data: Tensor) -> None:
        require_data(self, data, x=self.dim, y=None)
        require_binary("y", data[1], "recode other labels, as in (y > 0)")

    def static_statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"labels": (y.double() - 0.5).unsqueeze(1) * clipped_rows(x.double(), 1.0)}

    def expected_statistics(
        self, posterior: LogisticPosterior, draws: Draws, x: Tensor, y: Tensor
    ) -> dict[str, WeightedSquares]:
        x = clipped_rows(x.double(), 1.0)
        second_moment = posterior.covariance + torch.outer(posterior.mean, posterior.mean)
        squared = (times(x, second_moment) * x).sum(dim=1)
        return {"curvature": WeightedSquares(x, polya_gamma_mean(squared))}

    def posterior(self, statistics: Sums, noise: Sds, size: int) -> LogisticPosterior:
        curvature = NoisySecondMoment.of(statistics["curvature"], self.dim, noise["curvature"])
        vectors = curvature.vectors
        labels = vectors.T @ statistics["labels"]
        concentration = self.concentration + self.dim / 2
        precision: Tensor | float = self.concentration / self.rate
        # The two blocks of the posterior need each other, and no data.
        for _ in range(_MOST_ITERATIONS):
            mean = labels / (precision + curvature.stepping)
            variance = 1 / (precision + curvature.known)
            rate = self.rate + (mean.square().sum() + variance.sum()) / 2
            before, precision = precision, concentration / rate
            if abs(precision - before) <= _TOLERANCE * precision:
                break
        return LogisticPosterior(
            mean=vectors @ mean,
            covariance=curvature.matrix(variance),
            concentration=torch.full_like(rate, concentration),
            rate=rate,
        )

    def feedback(
        self, posterior: LogisticPosterior, statistics: Sums, noise: Sds, size: int
    ) -> dict[tuple[str, str], Tensor]:
        """A change dA of the curvature acts on the mean as one of the labels' sums by -dA mean.
        That is (A - H) times the change of the mean, H the information of the likelihood.
        """
        known = NoisySecondMoment.of(statistics["curvature"], self.dim, noise["curvature"])
        curvature = known.matrix(known.stepping)
        information = logit_information(curvature, posterior.mean, posterior.covariance, size)
        return {("labels", "weights"): curvature - information}

    def hidden(
        self, posterior: LogisticPosterior, statistics: Sums, noise: Sds
    ) -> dict[str, Tensor]:
        known = NoisySecondMoment.of(statistics["curvature"], self.dim, noise["curvature"])
        weights = known.hides(posterior.concentration / posterior.rate)
        # The precision is that of all weights.
        return {"weights": weights, "precision": weights.any()}

    def marginals(self, posterior: LogisticPosterior) -> dict[str, Distribution]:
        return {
            "precision": dist.Gamma(posterior.concentration, posterior.rate),
            "weights": dist.MultivariateNormal(posterior.mean, posterior.covariance),
        }

    def model(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The Pyro model, which returns labels. Without ``y`` it samples them."""
        concentration, rate = x.new_tensor(self.concentration), x.new_tensor(self.rate)
        precision = pyro.sample("precision", dist.Gamma(concentration, rate))
        prior = dist.Normal(0.0, precision.rsqrt()).expand([self.dim]).to_event(1)
        weights = pyro.sample("weights", prior)
        with pyro.plate("data", len(x)) as idx:
            logits = clipped_rows(x[idx], 1.0) @ weights.to(x.dtype)
            observed = None if y is None else y[idx].to(x.dtype)
            return pyro.sample("y", dist.Bernoulli(logits=logits), obs=observed)
