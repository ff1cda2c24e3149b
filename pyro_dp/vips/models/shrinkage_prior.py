"""The three-parameter-beta-normal prior: many weights are small and a few are not."""

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Distribution, Gamma
from torch import Tensor

_HALF = 0.5  # shape of a ratio of gammas whose root is half-Cauchy


@dataclass(frozen=True)
class ShrinkagePosterior:
    """Independent gammas of the shapes of the prior's sites."""

    spread: Gamma  # ()
    scales: Gamma  # (K,)
    rates: Gamma  # (J, K)
    precisions: Gamma  # (J, K)

    def marginals(self) -> dict[str, Distribution]:
        return {
            "spread": self.spread,
            "scales": self.scales.to_event(1),
            "rates": self.rates.to_event(2),
            "precisions": self.precisions.to_event(2),
        }


@dataclass(frozen=True)
class ShrinkagePrior:
    """The prior of J times K weights (Armagan, Dunson & Clyde 2011, arXiv 1107.4976)::

        spread         ~ Gamma(1/2, 1)
        scales_k       ~ Gamma(1/2, spread)                     k = 1..K
        rates_jk       ~ Gamma(a, scales_k)                     j = 1..J
        precisions_jk  ~ Gamma(b, rates_jk)
        weights_jk     ~ Normal(0, precisions_jk^-1/2)

    There the variance is the gamma variable, and its posterior a generalised inverse Gaussian. The
    prior is the same: the variance is, in both, a ratio of a Gamma(a) to a Gamma(b) variable. With
    precisions all posteriors are gammas.

    :param a: > 0; the smaller, the more weights are next to zero.
    :param b: > 0; the smaller, the larger some are. a = b = 1/2 is the horseshoe.
    """

    a: float
    b: float

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
        self, squares: Tensor, before: ShrinkagePosterior | None = None
    ) -> ShrinkagePosterior:
        """One round of variational Bayes.

        :param squares: expectations of the squared weights, (J, K).
        :param before: ``None`` to start with scales of one.
        """
        one = squares.new_ones(())
        rows, columns = squares.shape
        scales = before.scales.mean if before else squares.new_ones(columns)
        spread = before.spread.mean if before else one
        precisions = before.precisions.mean if before else torch.ones_like(squares)
        rates = Gamma((self.a + self.b) * one, precisions + scales)
        scales = Gamma((_HALF + rows * self.a) * one, spread + rates.mean.sum(dim=0))
        spread = Gamma((_HALF + columns * _HALF) * one, one + scales.mean.sum())
        precisions = Gamma((self.b + 0.5) * one, rates.mean + squares / 2)
        return ShrinkagePosterior(spread, scales, rates, precisions)
