"""Models and data for the tests of VIPS, and a VIPS whose releases are kept."""

import math

import torch
from releases import Releases

from pyro_dp import VIPS, FullBatch, PrivacyAccountant
from pyro_dp.vips import (
    ConjugateModel,
    GaussianMixture,
    LinearRegression,
    LogisticRegression,
    Statistic,
)


def regression_rows(size, dim):
    """Rows within the unit ball."""
    x = torch.nn.functional.normalize(torch.randn(size, dim))
    return x * torch.rand(size, 1).sqrt()


def logistic_data(size=60, dim=3, scale=2.0):
    torch.manual_seed(1)
    x, w = regression_rows(size, dim), scale * torch.randn(dim)
    return x, torch.bernoulli(torch.sigmoid(x @ w))


def linear_data(size=60, dim=3):
    torch.manual_seed(2)
    x, w = 2 * regression_rows(size, dim), torch.randn(dim)
    return x, (x @ w + 0.3 * torch.randn(size)).clamp(-5.0, 5.0)


MEANS = torch.tensor([[-3.0, -2.0], [0.0, 3.0], [3.0, -1.0]], dtype=torch.float64)
SDS = torch.tensor([[0.5, 0.3], [0.4, 0.4], [0.3, 0.6]], dtype=torch.float64)


def mixture_data(size=60):
    torch.manual_seed(3)
    component = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), size, replacement=True)
    return (MEANS[component] + SDS[component] * torch.randn(size, 2),)


# Model and data. Poisson sampling makes the static statistics of the first two join each step.
PROBLEMS = {
    "logistic": (lambda: LogisticRegression(3), logistic_data),
    "linear": (lambda: LinearRegression(3, x_bound=2.0, y_bound=5.0), linear_data),
    "mixture": (lambda: GaussianMixture(3, 2, radius=6.0), mixture_data),
}


class Totals(ConjugateModel):
    """A static and an expected statistic, and a posterior that is what was released."""

    def __init__(self, width=4, bounds=(2.0, 0.5)):
        self.width, self.bounds = width, bounds

    @property
    def statistics(self):
        return {
            "once": Statistic((self.width,), self.bounds[0], static=True),
            "each": Statistic((2, 3), self.bounds[1]),
        }

    def check(self, *data):
        pass

    def static_statistics(self, x):
        return {"once": x[:, :1].expand(-1, self.width)}

    def expected_statistics(self, posterior, draws, x):
        return {"each": draws.normal(0, 6).reshape(-1, 2, 3) * x[:, :1, None]}

    def posterior(self, statistics, noise, size):
        return dict(statistics), dict(noise), size

    def marginals(self, posterior):
        return {}

    def model(self, x):
        pass


class Fixture(Releases):
    """A VIPS whose releases are kept."""

    def __init__(self, monkeypatch, model, **options):
        super().__init__(monkeypatch)
        settings = dict(accountant=PrivacyAccountant(), num_steps=10, noise=0)
        self.vips = VIPS(model, **settings | options)


def fitted(model, data, steps, **options):
    """Variational Bayes without noise, on all records."""
    settings = dict(accountant=PrivacyAccountant(), noise=0, sampling=FullBatch()) | options
    vips = VIPS(model, num_steps=steps, **settings)
    vips.run(*data, progress=False)
    return vips


def scaled_distance(model, sums, others):
    """Distance of two joint sums in units of what one record may move them: at most 1."""
    bounds = [each.bound for each in model.statistics.values()]
    squares = [
        ((one - other) / bound).square().sum().item() / len(bounds)
        for one, other, bound in zip(sums, others, bounds, strict=True)
    ]
    return math.sqrt(sum(squares))
