"""A mixture of Gaussians with unknown weights, means and precisions (Attias 1999; Bishop 10.2)."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.mechanism.contributions import Joined, OuterProducts
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.linalg import clipped_rows
from pyro_dp.utils.validation import require_count, require_scale
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Draws,
    Parts,
    Sds,
    Statistic,
    Sums,
    require_data,
    reviewed,
)

_CANDIDATES = 200  # from which each initial mean is chosen


@dataclass(frozen=True)
class MixturePosterior:
    """Dirichlet(weights), and for each coordinate of each component
    precision ~ Gamma(shape, rate), mean | precision ~ N(mean, 1 / (count precision)).
    """

    weights: Tensor  # (K,)
    mean: Tensor  # (K, D)
    count: Tensor  # (K, 1)
    shape: Tensor  # (K, 1)
    rate: Tensor  # (K, D)


@reviewed
class GaussianMixture(ConjugateModel):
    """Rows from a mixture of Gaussians with diagonal precisions::

        weights       ~ Dirichlet(concentration, ..., concentration)
        precisions_kd ~ Gamma(shape, rate)                                 k = 1..components
        means_kd      ~ Normal(0, (mean_precision precisions_kd)^-1/2)     d = 1..dim
        assignment_n  ~ Categorical(weights)                               n = 1..N
        x_nd          ~ Normal(means_kd, precisions_kd^-1/2)               k = assignment_n

    **Rows of x are clipped to Euclidean norm** ``radius``, in the Pyro model as well. Choose it
    without looking at the data.

    Let r be the probabilities of a record's assignment. Its statistics are r, r x'
    and r (x^2)'. Their norms are at most 1, radius and radius^2.

    The result of variational Bayes depends on its start: the means ``start``, or random means from
    the ball, far from each other and chosen without the data. After a random start some components
    may end with equal means.

    Data: ``x`` of shape (N, dim).

    :param components: K, the number of components.
    :param dim: D, the number of columns.
    :param radius: > 0.
    :param concentration: of the weights' prior, > 0.
    :param mean_precision: of the means' prior, in units of the component's precision, > 0.
    :param shape: of the precisions' prior, > 0.
    :param rate: of the precisions' prior, > 0. ``None``: shape (radius / 10)^2, for components with
        a standard deviation of about a tenth of the radius.
    :param start: means at the beginning, (K, D), from public knowledge.

    >>> start = torch.tensor([[-0.4], [0.4]])
    >>> mixture = GaussianMixture(components=2, dim=1, radius=1.0, start=start)
    >>> vips = VIPS(mixture, accountant=accountant, num_steps=60, noise=Noise(source=0))
    >>> result = vips.run(torch.tensor([[-0.5], [0.5]]).repeat(2500, 1), progress=False)
    >>> [f"{mean:.1f}" for mean in vips.posterior()["means"].mean.flatten().tolist()]
    ['-0.5', '0.5']
    """

    step_size = (0.0, 0.5)  # forget early steps, in which components look for clusters

    def __init__(
        self,
        components: int,
        dim: int,
        *,
        radius: float,
        concentration: float = 1.0,
        mean_precision: float = 0.01,
        shape: float = 1.0,
        rate: float | None = None,
        start: Tensor | None = None,
    ):
        self.components = require_count("components", components)
        self.dim = require_count("dim", dim)
        self.radius = require_scale("radius", radius)
        self.concentration = require_scale("concentration", concentration)
        self.mean_precision = require_scale("mean_precision", mean_precision)
        self.shape = require_scale("shape", shape)
        rate = self.shape * (self.radius / 10) ** 2 if rate is None else rate
        self.rate = require_scale("rate", rate)
        if start is not None:
            means = (self.components, self.dim)
            if not isinstance(start, Tensor) or start.shape != means or not start.isfinite().all():
                raise ConfigurationError(f"start must be a finite tensor of shape {means}.")
        self.start = start

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        shape = (self.components, self.dim)
        return {
            "counts": Statistic((self.components,), bound=1.0),
            "sums": Statistic(shape, bound=self.radius),
            "squares": Statistic(shape, bound=self.radius**2),
        }

    def check(self, *data: Tensor) -> None:
        require_data(self, data, x=self.dim)

    def initial_statistics(self, size: int) -> dict[str, Tensor]:
        """Statistics of components with equally many records, around different means."""
        means = self._spread_means() if self.start is None else self.start.detach().double().cpu()
        distances = torch.cdist(means, means) + 2 * self.radius * torch.eye(self.components)
        variance = distances.min() ** 2  # wide enough for every component to reach every record
        counts = torch.full((self.components,), size / self.components, dtype=torch.float64)
        return {
            "counts": counts,
            "sums": counts.unsqueeze(1) * means,
            "squares": counts.unsqueeze(1) * (means.square() + variance / self.dim),
        }

    def _spread_means(self) -> Tensor:
        """Means (K, D): each is the candidate that is farthest from the earlier ones."""
        directions = torch.randn(_CANDIDATES, self.dim, dtype=torch.float64)
        lengths = torch.rand(_CANDIDATES, 1, dtype=torch.float64) ** (1 / self.dim)
        candidates = lengths * torch.nn.functional.normalize(directions) * self.radius / 2
        chosen = candidates[:1]
        while len(chosen) < self.components:
            farthest = torch.cdist(candidates, chosen).amin(dim=1).argmax()
            chosen = torch.cat([chosen, candidates[farthest : farthest + 1]])
        return chosen

    def expected_statistics(self, posterior: MixturePosterior, draws: Draws, x: Tensor) -> Parts:
        x = clipped_rows(x.double(), self.radius)
        precision = posterior.shape / posterior.rate
        squared = (x.unsqueeze(1) - posterior.mean).square()  # (B, K, D)
        log_precision = (torch.digamma(posterior.shape) - posterior.rate.log()).sum(dim=1)
        density = log_precision - (precision * squared + 1 / posterior.count).sum(dim=2)
        r = torch.softmax(torch.digamma(posterior.weights) + density / 2, dim=1)  # (B, K)
        left, right = r.unsqueeze(2), x.unsqueeze(1)
        return {
            "counts": r,
            "sums": Joined([OuterProducts(left, right)]),
            "squares": Joined([OuterProducts(left, right.square())]),
        }

    def posterior(self, statistics: Sums, noise: Sds, size: int) -> MixturePosterior:
        counts = statistics["counts"].clamp(min=0.0).unsqueeze(1)
        sums, squares = statistics["sums"], statistics["squares"]
        # A mean of rows in the ball lies in the ball. Counts below their noise are unreliable.
        divisor = self.mean_precision + counts.clamp(min=noise["counts"])
        mean = clipped_rows(sums / divisor, self.radius)
        scatter = squares - 2 * mean * sums + (counts + self.mean_precision) * mean.square()
        variance = noise["squares"] ** 2 + (2 * mean * noise["sums"]) ** 2
        variance = variance + (mean.square() * noise["counts"]) ** 2
        scatter = torch.maximum(scatter, variance.sqrt())
        return MixturePosterior(
            weights=self.concentration + counts.squeeze(1),
            mean=mean,
            count=self.mean_precision + counts,
            shape=self.shape + counts / 2,
            rate=self.rate + scatter / 2,
        )

    def marginals(self, posterior: MixturePosterior) -> dict[str, Distribution]:
        shape = posterior.shape.expand_as(posterior.rate)
        scale = (posterior.rate / (posterior.shape * posterior.count)).sqrt()
        return {
            "weights": dist.Dirichlet(posterior.weights),
            "precisions": dist.Gamma(shape, posterior.rate).to_event(2),
            "means": dist.StudentT(2 * shape, posterior.mean, scale).to_event(2),
        }

    def guide(self, posterior: MixturePosterior) -> None:
        marginals = self.marginals(posterior)
        pyro.sample("weights", marginals["weights"])
        precisions = pyro.sample("precisions", marginals["precisions"])
        sd = (posterior.count * precisions).rsqrt()
        pyro.sample("means", dist.Normal(posterior.mean, sd).to_event(2))

    def model(self, x: Tensor) -> Tensor:
        """The Pyro model, which returns assignments; they are marked for enumeration."""
        shape = (self.components, self.dim)
        ones = x.new_ones(self.components)
        weights = pyro.sample("weights", dist.Dirichlet(self.concentration * ones))
        prior = dist.Gamma(self.shape * ones[0], self.rate * ones[0])
        precisions = pyro.sample("precisions", prior.expand(shape).to_event(2))
        sd = (self.mean_precision * precisions).rsqrt()
        means = pyro.sample("means", dist.Normal(0.0, sd).to_event(2))
        with pyro.plate("data", len(x)) as idx:
            assignment = pyro.sample(
                "assignment", dist.Categorical(weights), infer={"enumerate": "parallel"}
            )
            component = dist.Normal(means[assignment], precisions[assignment].rsqrt())
            pyro.sample("x", component.to_event(1), obs=clipped_rows(x[idx], self.radius))
        return assignment
