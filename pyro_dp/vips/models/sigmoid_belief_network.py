"""Sigmoid belief network: binary images from binary hidden units.

Algorithm 6 of Park et al. 2020 (VIPS, arXiv 1611.00340). Model and prior are from Gan et al.
2015 (AISTATS), the augmentation from Polson, Scott & Windle 2013 (arXiv 1205.0310).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution, Gamma
from torch import Tensor

from pyro_dp.mechanism.contributions import Joined, OuterProducts
from pyro_dp.utils.errors import warn_not_private
from pyro_dp.utils.linalg import cholesky, floored
from pyro_dp.utils.validation import require_count, require_scale
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Draws,
    Parts,
    Sds,
    Statistic,
    Sums,
    require_binary,
    require_data,
    reviewed,
)
from pyro_dp.vips.models.polya_gamma import polya_gamma_mean

_HALF = 0.5  # shape of a ratio of gammas whose root is half-Cauchy


@dataclass(frozen=True)
class ShrinkagePrior:
    """The prior of J times K weights (Armagan, Dunson & Clyde 2011, arXiv 1107.4976)::

        spread         ~ Gamma(1/2, 1)
        scales_k       ~ Gamma(1/2, spread)                     k = 1..K
        rates_jk       ~ Gamma(a, scales_k)                     j = 1..J
        precisions_jk  ~ Gamma(b, rates_jk)
        weights_jk     ~ Normal(0, precisions_jk^-1/2)

    They write it with a gamma variable for the variance, whose posterior is a generalised inverse
    Gaussian. The prior is the same: in both forms the variance is a ratio of a Gamma(a) to a
    Gamma(b) variable. With precisions all posteriors are gammas.
    """

    a: float  # > 0; a smaller one puts more weights near zero
    b: float  # > 0; a smaller one makes some weights larger

    def sample(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """The Pyro model of the weights, (J, K)."""
        one = like.new_ones(())
        spread = pyro.sample("spread", Gamma(_HALF * one, one))
        scales = pyro.sample("scales", Gamma(_HALF * one, spread).expand([columns]).to_event(1))
        rates = Gamma(self.a * one, scales).expand([rows, columns]).to_event(2)
        rates = pyro.sample("rates", rates)
        precisions = pyro.sample("precisions", Gamma(self.b * one, rates).to_event(2))
        return pyro.sample("weights", dist.Normal(0.0, precisions.rsqrt()).to_event(2))

    def posterior(
        self, squares: Tensor, before: Mapping[str, Distribution] | None = None
    ) -> dict[str, Distribution]:
        """Gammas of the prior's sites after one round of variational Bayes, at first from ones.

        :param squares: expectations of the squared weights, (J, K).
        """
        one = squares.new_ones(())
        rows, columns = squares.shape
        spread, scales, precisions = one, squares.new_ones(columns), torch.ones_like(squares)
        if before is not None:
            names = ("spread", "scales", "precisions")
            spread, scales, precisions = (before[name].mean for name in names)
        rates = Gamma((self.a + self.b) * one, precisions + scales)
        scales = Gamma((_HALF + rows * self.a) * one, spread + rates.mean.sum(dim=0))
        spread = Gamma((_HALF + columns * _HALF) * one, one + scales.mean.sum())
        precisions = Gamma((self.b + 0.5) * one, rates.mean + squares / 2)
        return {
            "spread": spread,
            "scales": scales.to_event(1),
            "rates": rates.to_event(2),
            "precisions": precisions.to_event(2),
        }


_ROUNDS = 60  # rounds of variational Bayes within the M-step
_MOST_SHORTENING = 0.9  # ratio of successive moves that extrapolation assumes at most
_LEAST_CURVATURE = 0.005  # at a logit of 100
_GROUPS = 10  # groups of pixels, for the accuracy
_INITIAL_WEIGHT = 0.5  # standard deviation of the random weights of the first E-step


def hidden_units(field: Tensor, coupling: Tensor, sweeps: int) -> Tensor:
    """Means of independent hidden units of value -1/2 or 1/2, (B, K).

    This is variational Bayes for p(x) proportional to exp(field . x - x' coupling x / 2). Units
    start at zero and are updated in turn, for a fixed number of sweeps.

    :param field: field of each image, (B, K).
    :param coupling: (K, K), symmetric; its diagonal does not matter, since x^2 is 1/4.
    """
    between = coupling - torch.diag(coupling.diagonal())
    means = torch.zeros_like(field)
    for _ in range(sweeps):
        for k in range(field.shape[1]):
            means[:, k] = torch.tanh((field[:, k] - means @ between[:, k]) / 2) / 2
    return means


def noisy_regression(
    information: Tensor, sums: Tensor, noise: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Gaussian posteriors of J vectors w_j ~ N(0, diag(precision_j)^-1): means and covariances.

    Without noise the likelihood is exp(sums_j . w - w' information_j w / 2). With noise in the sums
    it is N(sums_j; information_j w, information_j + diag(noise)), as a function of w.

    :param information: (J, d, d).
    :param sums: (J, d).
    :param noise: variances, (d,); all zero or all positive.
    :param precision: (J, d).
    """
    sums = sums.unsqueeze(2)
    if noise.any():
        gain = torch.linalg.solve(information + torch.diag(noise), information).mT
        information, sums = gain @ information, gain @ sums
    symmetric = (information + information.mT) / 2 + torch.diag_embed(precision)
    covariance = torch.cholesky_inverse(cholesky(symmetric))
    return (covariance @ sums).squeeze(2), covariance


@dataclass(frozen=True)
class NetworkPosterior:
    """Gaussians of (weights_j, biases_j), of each pixel, and of the hidden units' biases; the
    precisions of the weights; and each pixel's mean Pólya-Gamma variable.
    """

    mean: Tensor  # (J, K + 1)
    covariance: Tensor  # (J, K + 1, K + 1)
    hidden_mean: Tensor  # (K,)
    hidden_variance: Tensor  # (K,)
    shrinkage: Mapping[str, Distribution]
    curvature: Tensor  # (J,)


@reviewed
class SigmoidBeliefNetwork(ConjugateModel):
    """Binary images with one layer of hidden units::

        weights          ~ ShrinkagePrior(a, b), (J, K)
        biases_j         ~ Normal(0, bias_scale)                         j = 1..pixels
        hidden_biases_k  ~ Normal(0, bias_scale)                         k = 1..units
        hidden_nk        ~ Bernoulli(logit = hidden_biases_k)            n = 1..N
        images_nj        ~ Bernoulli(logit = weights_j . (hidden_n - 1/2) + biases_j)

    Hidden units are centred, which defines the meaning of the biases.

    Let y = image - 1/2 and x = E[hidden] - 1/2. A record's statistics are y (static), x, x_k x_l
    for all pairs, and y x'. The other second moments are constants, since (hidden - 1/2)^2 is 1/4.
    The bounds are the largest norms for binary images: sqrt(J) / 2 (which every image has), sqrt(K)
    / 2, sqrt(K (K - 1) / 2) / 4 and sqrt(J K) / 4.

    **One Pólya-Gamma distribution for each pixel.** The paper has one for each pixel of each
    record, and so needs a matrix of second moments for each pixel: J (K + 1) (K + 2) / 2 numbers of
    norm up to sqrt(J) (K + 1) / 4. Here the records share it, which is variational Bayes in a
    smaller family, and K (K + 1) / 2 numbers suffice.

    **M-step.** Noisy second moments are projected to matrices without negative eigenvalues. The
    noise of the other statistics has a public size, and the posterior of weights and biases treats
    it as measurement noise. (If statistics were taken as exact, weights would grow without limit.
    On scikit-learn's digits at epsilon 4, accuracy for hidden pixels fell from 0.85 to 0.53.)

    Data: ``images`` of shape (N, pixels), each 0 or 1.

    :param pixels: J, the number of pixels in an image.
    :param units: K, number of hidden units.
    :param a: parameter of the prior of the weights, > 0. A smaller one puts more weights near zero.
    :param b: parameter of the prior of the weights, > 0. A smaller one makes some weights larger;
        a = b = 1/2 is the horseshoe.
    :param bias_scale: > 0.
    :param sweeps: number of sweeps of the E-step over the hidden units of each record.

    >>> images = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]).repeat(1000, 1)
    >>> network = SigmoidBeliefNetwork(pixels=4, units=1)
    >>> vips = VIPS(network, accountant=accountant, num_steps=5, noise=Noise(source=0))
    >>> result = vips.run(images, progress=False)
    >>> vips.posterior()["weights"].mean.shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        pixels: int,
        units: int,
        *,
        a: float = 0.5,
        b: float = 0.5,
        bias_scale: float = 5.0,
        sweeps: int = 10,
    ):
        self.pixels = require_count("pixels", pixels)
        self.units = require_count("units", units)
        self.sweeps = require_count("sweeps", sweeps)
        self.prior = ShrinkagePrior(require_scale("a", a), require_scale("b", b))
        self.bias_scale = require_scale("bias_scale", bias_scale)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        pixels, units = self.pixels, self.units
        pairs = units * (units - 1) // 2
        found = {
            "images": Statistic((pixels,), math.sqrt(pixels) / 2, static=True),
            "hidden": Statistic((units,), math.sqrt(units) / 2),
            "products": Statistic((pixels, units), math.sqrt(pixels * units) / 4),
        }
        return found | ({"pairs": Statistic((pairs,), math.sqrt(pairs) / 4)} if pairs else {})

    def check(self, *data: Tensor) -> None:
        require_data(self, data, images=self.pixels)
        require_binary("images", data[0], "cut grey values at a threshold")

    def initial_statistics(self, size: int) -> dict[str, Tensor]:
        """Statistics that give small random weights."""
        found = dict(super().initial_statistics(size))
        weights = _INITIAL_WEIGHT * torch.randn(self.pixels, self.units, dtype=torch.float64)
        return found | {"products": size * weights / 16}

    def static_statistics(self, images: Tensor) -> dict[str, Tensor]:
        return {"images": images.double() - 0.5}

    def expected_statistics(
        self, posterior: NetworkPosterior, draws: Draws, images: Tensor
    ) -> Parts:
        y = images.double() - 0.5
        mean = posterior.mean
        squares = posterior.covariance + mean.unsqueeze(2) * mean.unsqueeze(1)
        curved = torch.einsum("j,jkl->kl", posterior.curvature, squares)
        field = y @ mean[:, :-1] + posterior.hidden_mean - curved[:-1, -1]
        x = hidden_units(field, curved[:-1, :-1], self.sweeps)  # (B, K)
        first, second = torch.triu_indices(self.units, self.units, offset=1)
        return {
            "hidden": x,
            "products": Joined([OuterProducts(y.unsqueeze(2), x.unsqueeze(1))]),
            "pairs": x[:, first] * x[:, second],
        }

    def posterior(self, statistics: Sums, noise: Sds, size: int) -> NetworkPosterior:
        statistics = _possible(statistics, size)
        moments = self._second_moments(statistics, size)
        sums = torch.cat([statistics["products"], statistics["images"].unsqueeze(1)], dim=1)
        sds = moments.new_tensor([noise["products"]] * self.units + [noise["images"]])
        squares = moments.new_ones(self.pixels, self.units)
        bias = moments.new_full((self.pixels, 1), self.bias_scale**-2)
        frequencies = 0.5 + statistics["images"] / size
        predictor = torch.logit(frequencies, eps=0.5 / size)
        curvature = polya_gamma_mean(predictor.square())
        shrinkage: Any = None
        move = torch.zeros_like(curvature)
        # Alternate between the blocks of the posterior. This reads no data.
        for _ in range(_ROUNDS):
            shrinkage = self.prior.posterior(squares, shrinkage)
            precision = torch.cat([shrinkage["precisions"].mean, bias], dim=1)
            mean, covariance = noisy_regression(
                curvature[:, None, None] * moments, sums, sds.square(), precision
            )
            outer = covariance + mean.unsqueeze(2) * mean.unsqueeze(1)
            squares = outer.diagonal(dim1=1, dim2=2)[:, :-1]
            before = move
            squared = (outer * moments).sum(dim=(1, 2)) / size
            move = (polya_gamma_mean(squared) / curvature).log()
            curvature = curvature * (move * _far_ahead(move, before)).exp()
            curvature = curvature.clamp(_LEAST_CURVATURE, 0.25)
        hidden_mean, hidden_variance = self._hidden_biases(statistics["hidden"], noise, size)
        return NetworkPosterior(
            mean, covariance, hidden_mean, hidden_variance, shrinkage, curvature
        )

    def _second_moments(self, statistics: Sums, size: int) -> Tensor:
        """Sum over records of (x, 1) (x, 1)', (K + 1, K + 1), without a negative eigenvalue."""
        moments = torch.zeros(self.units + 1, self.units + 1).to(statistics["hidden"])
        first, second = torch.triu_indices(self.units, self.units, offset=1)
        if len(first):
            moments[first, second] = statistics["pairs"]
        moments[:-1, -1] = statistics["hidden"]
        moments = moments + moments.T
        moments.diagonal()[:-1] = size / 4
        moments[-1, -1] = size
        return floored(moments, 0.0)

    def _hidden_biases(self, sums: Tensor, noise: Sds, size: int) -> tuple[Tensor, Tensor]:
        """Means and variances of the Gaussians of the hidden units' biases, (K,) each."""
        precision = sums.new_full((self.units, 1), self.bias_scale**-2)
        curvature = sums.new_full((self.units,), 0.25)
        noises = sums.new_tensor([noise["hidden"] ** 2])
        for _ in range(_ROUNDS):
            information = size * curvature[:, None, None]
            mean, variance = noisy_regression(information, sums.unsqueeze(1), noises, precision)
            mean, variance = mean.squeeze(1), variance[:, 0, 0]
            curvature = polya_gamma_mean(mean.square() + variance)
        return mean, variance

    def marginals(self, posterior: NetworkPosterior) -> dict[str, Distribution]:
        mean, covariance = posterior.mean, posterior.covariance
        weights = dist.MultivariateNormal(mean[:, :-1], covariance[:, :-1, :-1])
        hidden = dist.Normal(posterior.hidden_mean, posterior.hidden_variance.sqrt())
        return {
            **posterior.shrinkage,
            "weights": weights.to_event(1),
            "biases": dist.Normal(mean[:, -1], covariance[:, -1, -1].sqrt()).to_event(1),
            "hidden_biases": hidden.to_event(1),
        }

    def guide(self, posterior: NetworkPosterior) -> None:
        marginals = self.marginals(posterior)
        del marginals["biases"], marginals["weights"]
        for name, marginal in marginals.items():
            pyro.sample(name, marginal)
        joint = dist.MultivariateNormal(posterior.mean, posterior.covariance).to_event(1)
        both = pyro.sample("weights_and_biases", joint, infer={"is_auxiliary": True})
        pyro.sample("weights", dist.Delta(both[..., :-1], event_dim=2))
        pyro.sample("biases", dist.Delta(both[..., -1], event_dim=1))

    def model(self, images: Tensor) -> Tensor:
        """The Pyro model.

        :returns: probabilities of the pixels, (N, J).
        """
        like = torch.zeros((), dtype=torch.float64, device=images.device)
        weights = self.prior.sample(like, self.pixels, self.units)
        normal = dist.Normal(like, self.bias_scale)
        biases = pyro.sample("biases", normal.expand([self.pixels]).to_event(1))
        hidden_biases = pyro.sample("hidden_biases", normal.expand([self.units]).to_event(1))
        with pyro.plate("data", len(images)) as idx:
            hidden = pyro.sample("hidden", dist.Bernoulli(logits=hidden_biases).to_event(1))
            pixels = dist.Bernoulli(logits=(hidden - 0.5) @ weights.mT + biases)
            pyro.sample("images", pixels.to_event(1), obs=images[idx].to(like.dtype))
        return pixels.probs

    def pixel_accuracy(
        self, posterior: Mapping[str, Distribution], images: Tensor, *, seed: int = 0
    ) -> float:
        """Fraction of hidden pixels of new images that are predicted correctly.

        The pixels are split at random into ten groups. For each group, the other pixels determine
        the hidden units at the posterior means, and these predict the group. **The result is not
        private: use images that need no protection.** A :class:`NotPrivateWarning` says so.

        :param posterior: ``vips.posterior()``.
        :param images: images outside the fit, (M, pixels).
        :param seed: seed for the groups.
        :raises ModelError: the images do not fit.
        """
        self.check(images)
        warn_not_private("pixel_accuracy", "images", "some that need no protection")
        names = ("weights", "biases", "hidden_biases")
        weights, biases, hidden_biases = (posterior[name].mean.double() for name in names)
        x = torch.tanh(hidden_biases / 2) / 2  # before any pixel is seen
        spread = weights.square() @ (0.25 - x.square())
        curvature = polya_gamma_mean((weights @ x + biases).square() + spread)
        y = images.double() - 0.5
        generator = torch.Generator().manual_seed(seed)
        groups = torch.randperm(self.pixels, generator=generator).tensor_split(_GROUPS)
        right = 0
        for group in groups:
            seen = torch.ones(self.pixels, dtype=torch.bool)
            seen[group] = False
            curved = weights[seen] * curvature[seen].unsqueeze(1)
            field = y[:, seen] @ weights[seen] + hidden_biases - curved.T @ biases[seen]
            x = hidden_units(field, curved.T @ weights[seen], self.sweeps)
            predicted = x @ weights[group].T + biases[group] > 0
            right += (predicted == (y[:, group] > 0)).sum().item()
        return right / images.numel()


def _possible(statistics: Sums, size: int) -> dict[str, Tensor]:
    """Clamp sums to what records with values of -1/2 and 1/2 can reach. Noise may exceed that, and
    no weights would be large enough to explain the result.
    """
    largest = {"images": size / 2, "hidden": size / 2, "products": size / 4, "pairs": size / 4}
    return {name: sums.clamp(-largest[name], largest[name]) for name, sums in statistics.items()}


def _far_ahead(move: Tensor, before: Tensor) -> Tensor:
    """How many moves to take at once if moves shrink by a constant factor (Aitken)."""
    factor = torch.where(before == 0, 0.0, move / before)
    return 1 / (1 - factor.clamp(0.0, _MOST_SHORTENING))
