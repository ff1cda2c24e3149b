"""Linear and logistic regression, from the features' weighted second moment.

With a conjugate Normal-Gamma prior, linear regression needs a single release. Logistic
regression is algorithm 5 of Park et al. 2020 (VIPS, arXiv 1611.00340). The augmentation of Polson,
Scott & Windle 2013 (arXiv 1205.0310) makes its likelihood conjugate to a Gaussian.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.mechanism.contributions import counted, weighted_gram
from pyro_dp.utils.linalg import (
    clipped_rows,
    floored,
    inverse,
    noise_radius,
    stacked,
    times,
    unstacked,
)
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
from pyro_dp.vips.models.polya_gamma import logit_information, polya_gamma_mean

_TOLERANCE, _MOST_ITERATIONS = 1e-13, 1000


def stacked_size(dim: int) -> int:
    """Number of coordinates of a symmetric matrix."""
    return dim * (dim + 1) // 2


@dataclass(frozen=True)
class WeightedSquares:
    """w_n x_n x_n' of B records, in the layout of :func:`~pyro_dp.utils.linalg.stacked`.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`; the matrices are never formed.
    """

    rows: Tensor  # x, (B, d) in float64
    weights: Tensor  # w, (B,)

    def norms(self) -> Tensor:
        return (self.weights.abs() * self.rows.square().sum(dim=1)).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # Masked elements become zero before anything can overflow.
        rows = counted(self.rows, weights)
        total = weighted_gram(rows, counted(self.weights.unsqueeze(1), weights) * weights)
        return stacked((total + total.T) / 2)

    def dense(self) -> Tensor:
        products = self.rows.unsqueeze(2) * self.rows.unsqueeze(1)
        return self.weights.unsqueeze(1) * torch.vmap(stacked)(products)


@dataclass(frozen=True)
class NoisySecondMoment:
    """A sum of outer products, positive semidefinite except for noise.

    It has two versions. :attr:`known` clips negative eigenvalues: it is the information of the
    records.
    :attr:`stepping` raises eigenvalues below the noise's spectral radius to this radius. The noise
    hides whether they are zero, and dividing by them would make a mean explode. Raising them
    shrinks the mean. It adds no information. Without noise both versions are the released sums.
    """

    values: Tensor  # eigenvalues, ascending, (d,)
    vectors: Tensor  # eigenvectors in columns, (d, d)
    radius: float  # spectral radius of the noise

    @staticmethod
    def of(coordinates: Tensor, dim: int, noise: float) -> "NoisySecondMoment":
        """From stacked coordinates (d (d + 1) / 2,) with noise of this deviation."""
        values, vectors = torch.linalg.eigh(unstacked(coordinates, dim))
        return NoisySecondMoment(values, vectors, noise_radius(noise, dim))

    @property
    def known(self) -> Tensor:
        """Eigenvalues with negative ones set to zero, (d,)."""
        return self.values.clamp(min=0.0)

    @property
    def stepping(self) -> Tensor:
        """Eigenvalues raised to at least the radius of the noise, (d,)."""
        return self.values.clamp(min=self.radius)

    def hides(self, precision: Tensor) -> Tensor:
        """Mark the coordinates with most of their variance at eigenvalues below the noise, (d,).

        :param precision: precision of the prior, a number.
        """
        variances = 1 / (precision + self.known)
        parts = self.vectors.square() * variances
        return parts[:, self.values < self.radius].sum(dim=1) > 0.5 * parts.sum(dim=1)

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix with these eigenvalues, (d, d)."""
        return (self.vectors * values) @ self.vectors.T


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
    static. So one step on all records gives the posterior. Without noise the posterior is exact.

    Data: ``x`` of shape (N, dim) and ``y`` of shape (N,).

    :param dim: number of features.
    :param x_bound: > 0.
    :param y_bound: > 0.
    :param weight_precision: of the weights' prior, in units of the noise's precision, > 0.
    :param concentration: of the noise precision's prior, > 0.
    :param rate: of the same prior, > 0.

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
        # The closest positive semidefinite matrix, for which no residual is negative.
        joint = floored(unstacked(statistics["second_moment"], self.dim + 1), 0.0)
        features, products, labels = joint[:-1, :-1], joint[:-1, -1], joint[-1, -1]
        prior = self.weight_precision / self.x_bound**2 * torch.eye(self.dim).to(joint)
        # This shrinks the mean in directions in which the features are below the noise.
        raised = floored(features, noise_radius(sd, self.dim))
        mean = inverse(prior + raised) @ products
        residual = labels - 2 * mean @ products + mean @ (prior + features) @ mean
        # At least its noise: u' E u has standard deviation sd |u|^2 for u = (mean, -1).
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
    :param rate: of the same prior, > 0.

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
        # Alternate between the two blocks of the posterior. This reads no data.
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
        """A change dA of the curvature acts on the mean like a change -dA mean of the labels' sums.
        This is (A - H) times the change of the mean. H is the information of the likelihood.
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
        # All weights determine the precision.
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
