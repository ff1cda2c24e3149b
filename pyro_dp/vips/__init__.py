"""VIPS: private variational Bayes for conjugate-exponential models, from noisy statistics."""

from pyro_dp.vips.conjugate_model import ConjugateModel, Draws, Statistic
from pyro_dp.vips.inference import VIPS
from pyro_dp.vips.models.gaussian_mixture import GaussianMixture
from pyro_dp.vips.models.latent_dirichlet_allocation import LatentDirichletAllocation
from pyro_dp.vips.models.regressions import LinearRegression, LogisticRegression
from pyro_dp.vips.models.sigmoid_belief_network import SigmoidBeliefNetwork
from pyro_dp.vips.site_posterior import SitePosterior

__all__ = [
    "VIPS",
    "ConjugateModel",
    "Draws",
    "GaussianMixture",
    "LatentDirichletAllocation",
    "LinearRegression",
    "LogisticRegression",
    "SigmoidBeliefNetwork",
    "SitePosterior",
    "Statistic",
]
