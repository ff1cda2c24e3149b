"""Models and data for the tests of VIPS, and a VIPS whose releases are kept."""

import math

import numpy as np
import torch
from releases import Releases

from pyro_dp import VIPS, FullBatch, PrivacyAccountant
from pyro_dp.vips import (
    ConjugateModel,
    GaussianMixture,
    LatentDirichletAllocation,
    LinearRegression,
    LogisticRegression,
    SigmoidBeliefNetwork,
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
WORDS, TOPICS = 12, 3


def corpus(size, topics=TOPICS, words=WORDS, length=40, seed=0, eta=0.1, alpha=0.2):
    """Documents from the model, (N, V)."""
    random = np.random.default_rng(seed)
    beta = random.dirichlet(np.full(words, eta), topics)
    theta = random.dirichlet(np.full(topics, alpha), size)
    lengths = random.poisson(length, size)
    counts = [
        random.multinomial(n, p / p.sum()) for n, p in zip(lengths, theta @ beta, strict=True)
    ]
    return torch.from_numpy(np.array(counts)).double()


PIXELS, UNITS = 9, 3


def images_of(size, pixels=PIXELS, units=UNITS, seed=0, scale=3.0):
    """Images from a network, (N, J)."""
    torch.manual_seed(seed)
    weights = scale * torch.randn(pixels, units)
    biases = 0.3 * torch.randn(pixels)
    hidden = torch.bernoulli(torch.full((size, units), 0.5))
    return torch.bernoulli(torch.sigmoid((hidden - 0.5) @ weights.T + biases))


def topic_model(**options):
    settings = dict(length=20.0, clip=0.5, alpha=0.3, eta=0.1)
    return LatentDirichletAllocation(TOPICS, WORDS, **(settings | options))


# The models of records with latents of their own.
ALL = PROBLEMS | {
    "documents": (topic_model, lambda: (corpus(60),)),
    "images": (lambda: SigmoidBeliefNetwork(PIXELS, UNITS, sweeps=2), lambda: (images_of(60),)),
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
