"""VIPS: private variational Bayes for conjugate-exponential models, from noisy statistics."""

from pyro_dp.vips.conjugate_model import ConjugateModel, Draws, Statistic
from pyro_dp.vips.gaussian_mixture import GaussianMixture
from pyro_dp.vips.inference import VIPS
from pyro_dp.vips.linear_regression import LinearRegression
from pyro_dp.vips.logistic_regression import LogisticRegression

__all__ = [
    "VIPS",
    "ConjugateModel",
    "Draws",
    "GaussianMixture",
    "LinearRegression",
    "LogisticRegression",
    "Statistic",
]
