"""Regressions: one outcome, some features."""

from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.transforms import affine_autoregressive, iterated
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
)
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.nn.functional import pad, softplus

from .entry import Entry, plain


def features(size: int, dim: int) -> torch.Tensor:
    """In [-1, 1], the last one constant."""
    return torch.cat([2 * torch.rand(size, dim - 1) - 1, torch.ones(size, 1)], dim=1)


# Income of countries by ruggedness of the terrain.


def ruggedness_model(is_cont_africa, ruggedness, log_gdp=None):
    """Pyro tutorial intro_long, with its custom_guide."""
    a = pyro.sample("a", dist.Normal(0.0, 10.0))
    b_a = pyro.sample("bA", dist.Normal(0.0, 1.0))
    b_r = pyro.sample("bR", dist.Normal(0.0, 1.0))
    b_ar = pyro.sample("bAR", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
    mean = a + b_a * is_cont_africa + b_r * ruggedness + b_ar * is_cont_africa * ruggedness
    with pyro.plate("data", len(ruggedness)):
        return pyro.sample("obs", dist.Normal(mean, sigma), obs=log_gdp)


def ruggedness_guide(is_cont_africa, ruggedness, log_gdp=None):
    a_loc = pyro.param("a_loc", lambda: torch.tensor(0.0))
    a_scale = pyro.param("a_scale", lambda: torch.tensor(1.0), constraint=constraints.positive)
    sigma_loc = pyro.param("sigma_loc", lambda: torch.tensor(0.0))
    weights_loc = pyro.param("weights_loc", lambda: torch.randn(3))
    weights_scale = pyro.param(
        "weights_scale", lambda: torch.ones(3), constraint=constraints.positive
    )
    pyro.sample("a", dist.Normal(a_loc, a_scale))
    pyro.sample("bA", dist.Normal(weights_loc[0], weights_scale[0]))
    pyro.sample("bR", dist.Normal(weights_loc[1], weights_scale[1]))
    pyro.sample("bAR", dist.Normal(weights_loc[2], weights_scale[2]))
    pyro.sample("sigma", dist.LogNormal(sigma_loc, torch.tensor(0.05)))


def ruggedness_data(size):
    africa, rugged = torch.bernoulli(torch.full((size,), 0.3)), 2 * torch.rand(size)
    mean = 9.2 - 1.9 * africa - 0.2 * rugged + 0.4 * africa * rugged
    return africa, rugged, mean + 0.9 * torch.randn(size)


# A class by some features.


def logistic(x, y=None):
    """Pyro docs of MCMC and SVI, whole tensors."""
    coefs = pyro.sample("coefs", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", x.shape[0]):
        return pyro.sample("y", dist.Bernoulli(logits=x @ coefs), obs=y)


def logistic_data(size):
    x = features(size, 5)
    return x, torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5, 0.0, 0.3])))


# Errors with long tails.


def student_t(x, y):
    """Gelman et al., Bayesian Data Analysis, chapter 17."""
    beta = pyro.sample("beta", dist.Normal(0, 2).expand([x.size(1)]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", x.size(0)):
        pyro.sample("y", dist.StudentT(nu, x @ beta, sigma), obs=y)


def student_t_data(size):
    x = features(size, 4)
    noise = dist.StudentT(torch.tensor(4.0), 0.0, 0.5).sample((size,))
    return x, x @ torch.tensor([1.0, -0.5, 0.0, 2.0]) + noise


# Ten coefficients; two matter.


def horseshoe(x, y):
    """Carvalho, Polson & Scott 2010; Pyro example sparse_regression."""
    dim = x.shape[1]
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(1.0)))
    with pyro.plate("coefficients", dim):
        lam = pyro.sample("lambda", dist.HalfCauchy(torch.tensor(1.0)))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    beta = pyro.deterministic("beta", tau * lam * z)
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.tensor(1.0)))
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Normal((beta * x).sum(-1), sigma), obs=y)


def horseshoe_data(size):
    x = 2 * torch.rand(size, 10) - 1
    return x, 1.5 * x[:, 0] - x[:, 3] + 0.5 * torch.randn(size)


# A positive outcome with a log link.


def gamma(x, y):
    """McCullagh & Nelder, chapter 8: insurance claims."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    shape = pyro.sample("shape", dist.Exponential(0.5))
    mu = torch.exp(alpha + x.matmul(beta))
    with pyro.plate("claims", len(y)):
        pyro.sample("y", dist.Gamma(shape, shape / mu), obs=y)


def gamma_data(size):
    x = features(size, 4)[:, :3]
    mu = torch.exp(1 + x @ torch.tensor([0.5, -0.3, 0.0]))
    return x, dist.Gamma(2.0, 2.0 / mu).sample()


# A share, between zero and one.


def beta(x, y):
    """Ferrari & Cribari-Neto 2004."""
    coef = pyro.sample("coef", dist.Normal(0.0, 1.5).expand([x.shape[1]]).to_event(1))
    phi = pyro.sample("phi", dist.LogNormal(2.0, 1.0))
    mu = torch.sigmoid(x @ coef)
    with pyro.plate("obs", x.shape[0]):
        pyro.sample("y", dist.Beta(mu * phi, (1 - mu) * phi), obs=y)


def beta_data(size):
    x = features(size, 4)
    mu = torch.sigmoid(x @ torch.tensor([0.7, -0.7, 0.0, -0.5]))
    return x, dist.Beta(8 * mu, 8 * (1 - mu)).sample().clamp(1e-3, 1 - 1e-3)


# Outcomes that are not there for everyone.


def missing(x, y, observed):
    """Pyro docs of pyro.sample: obs_mask."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y, obs_mask=observed)


def missing_guide(x, y, observed):
    """The autoguides ignore the mask: under them the ELBO has no bound."""
    loc = pyro.param("loc", torch.zeros(x.shape[1]))
    scale = pyro.param("scale", torch.ones(x.shape[1]), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(loc, scale).to_event(1))
    sigma_loc = pyro.param("sigma_loc", torch.tensor(0.0))
    sigma_scale = pyro.param("sigma_scale", torch.tensor(0.1), constraint=constraints.positive)
    sigma = pyro.sample("sigma", dist.LogNormal(sigma_loc, sigma_scale))
    with pyro.plate("people", len(x)), pyro.poutine.mask(mask=~observed):
        pyro.sample("y_unobserved", dist.Normal(x @ w, sigma))


def missing_data(size):
    x = features(size, 3)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.7 * torch.randn(size)
    observed = torch.rand(size) < 0.7
    return x, torch.where(observed, y, torch.zeros(())), observed


# One of several choices.


def multinomial(x, choice):
    """McFadden 1974: choices of travellers."""
    num_classes = 3
    weight = pyro.sample("weight", dist.Normal(torch.zeros(x.shape[1], num_classes), 1).to_event(2))
    with pyro.plate("travellers", len(x)):
        pyro.sample("choice", dist.Categorical(logits=x @ weight), obs=choice)


def multinomial_data(size):
    x = features(size, 4)
    weight = torch.tensor([[1.0, 0, -1], [0, 1, 0], [0.5, -0.5, 0], [0.5, 0, -0.5]])
    return x, dist.Categorical(logits=x @ weight).sample()


# Grades in order.


def ordered_probit(x, grade):
    """McKelvey & Zavoina 1975."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    cuts = pyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(3), 2.0).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    below = dist.Normal(0.0, 1.0).cdf(cuts - (x @ slope).unsqueeze(-1))
    probs = (pad(below, (0, 1), value=1.0) - pad(below, (1, 0))).clamp(min=1e-6)
    with pyro.plate("data", len(x)):
        pyro.sample("grade", dist.Categorical(probs), obs=grade)


def ordered_probit_data(size):
    x = features(size, 4)[:, :3]
    z = x @ torch.tensor([1.0, -0.5, 0.2]) + torch.randn(size)
    return x, torch.bucketize(z, torch.tensor([-1.0, 0.0, 1.0]))


# A posterior that is not Gaussian.


def saturation(x, y):
    top = pyro.sample("top", dist.Normal(1.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(top * torch.tanh(softplus(slope) * x), sigma), obs=y)


def saturation_data(size):
    x = torch.rand(size)
    return x, 1.5 * torch.tanh(0.8 * x) + 0.4 * torch.randn(size)


def flow(model):
    return AutoNormalizingFlow(model, partial(iterated, 2, affine_autoregressive))


# Counts with too many zeros or too much spread.


def zero_inflated(x, y):
    """Lambert 1992; catches of fish of the UCLA statistics pages."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("visitors", len(x)):
        pyro.sample("fish", dist.ZeroInflatedPoisson(torch.exp(x @ beta), gate=gate), obs=y)


def zero_inflated_data(size):
    x = features(size, 3)
    caught = torch.poisson(torch.exp(x @ torch.tensor([0.7, -0.4, 0.5])))
    return x, caught * torch.bernoulli(torch.full((size,), 0.6))


def negative_binomial(x, y):
    """UCLA statistics pages: days of absence from school."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), torch.ones(())).to_event(1))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 1.0))
    mean = (intercept + x @ beta).exp()
    with pyro.plate("days", len(y)):
        pyro.sample("y", dist.GammaPoisson(concentration, concentration / mean), obs=y)


def negative_binomial_data(size):
    x = features(size, 4)[:, :3]
    mean = torch.exp(1 + x @ torch.tensor([0.5, -0.5, 0.0]))
    return x, torch.poisson(dist.Gamma(1.5, 1.5 / mean).sample())


# Times until something happens; some are censored.


def weibull(x, time, event):
    """Klein & Moeschberger, Survival Analysis, chapter 12: Weibull."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    scale = torch.exp(x @ beta)
    with pyro.plate("patients", len(x)):
        with poutine.mask(mask=event):
            pyro.sample("time", dist.Weibull(scale, shape), obs=time)
        with poutine.mask(mask=~event):
            pyro.factor("survived", -((time / scale) ** shape))


def weibull_data(size):
    x = features(size, 4)
    time = dist.Weibull(torch.exp(x @ torch.tensor([0.6, -0.4, 0.0, 1.0])), 1.5).sample()
    end = 1 + 5 * torch.rand(size)
    return x, torch.minimum(time, end), time < end


# Bayesian neural networks.


class BNN(PyroModule):
    def __init__(self, in_dim=3, out_dim=1, hid_dim=8, prior_scale=3.0):
        super().__init__()
        self.activation = nn.Tanh()
        self.layer1 = PyroModule[nn.Linear](in_dim, hid_dim)
        self.layer2 = PyroModule[nn.Linear](hid_dim, out_dim)
        prior = dist.Normal(0.0, prior_scale)
        self.layer1.weight = PyroSample(prior.expand([hid_dim, in_dim]).to_event(2))
        self.layer1.bias = PyroSample(prior.expand([hid_dim]).to_event(1))
        self.layer2.weight = PyroSample(prior.expand([out_dim, hid_dim]).to_event(2))
        self.layer2.bias = PyroSample(prior.expand([out_dim]).to_event(1))

    def forward(self, x, y=None):
        mu = self.layer2(self.activation(self.layer1(x))).squeeze(-1)
        sigma = pyro.sample("sigma", dist.Gamma(0.5, 1.0))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mu, sigma * sigma), obs=y)
        return mu


def network():
    model = BNN()
    return model, AutoDiagonalNormal(model)


def network_data(size):
    x = features(size, 3)
    return x, torch.sin(3 * x[:, 0]) * x[:, 1] + 0.3 * torch.randn(size)


ENTRIES = (
    plain("linear regression", ruggedness_model, ruggedness_guide, ruggedness_data),
    plain("logistic regression", logistic, AutoMultivariateNormal, logistic_data, dpsep=True),
    plain("Student-t regression", student_t, AutoNormal, student_t_data, dpsep=True),
    plain("horseshoe regression", horseshoe, AutoNormal, horseshoe_data, dpsep=True),
    plain("gamma regression", gamma, AutoNormal, gamma_data, dpsep=True),
    plain("beta regression", beta, AutoMultivariateNormal, beta_data, dpsep=True),
    plain("regression with missing outcomes", missing, missing_guide, missing_data),
    plain("multinomial logit", multinomial, AutoNormal, multinomial_data, dpsep=True),
    plain("ordered probit", ordered_probit, AutoNormal, ordered_probit_data, dpsep=True),
    Entry(
        "flow guide",
        "Pyro tutorial svi_flow_guide",
        lambda: (saturation, flow(saturation)),
        saturation_data,
    ),
    plain("zero-inflated Poisson", zero_inflated, AutoNormal, zero_inflated_data, dpsep=True),
    plain(
        "negative binomial",
        negative_binomial,
        AutoMultivariateNormal,
        negative_binomial_data,
        dpsep=True,
    ),
    plain("survival with censoring", weibull, AutoMultivariateNormal, weibull_data, dpsep=True),
    Entry(
        "Bayesian neural network",
        "Pyro tutorial bayesian_regression; PyroModule layers of the UvA tutorials",
        network,
        network_data,
    ),
)
