"""Models as people write them: the same optimisation path as ``pyro.infer.SVI``'s."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    Problem,
    fit_paper_dpsvi,
    handwritten_guide,
    logistic,
    regression_data,
    require_equals_svi,
)
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.transforms import AffineTransform, SigmoidTransform
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal, AutoStructured
from pyro.infer.reparam import LocScaleReparam
from torch import nn

from pyro_dp import Clip


def weights(x, name="w"):
    return pyro.sample(name, dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))


def scaled_and_masked(x, y):
    with poutine.scale(scale=0.3):
        w = weights(x)
        with pyro.plate("data", len(x)) as idx, poutine.mask(mask=x[idx, 0] > 0):
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def with_factor(x, y):
    w = weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.factor("factor", dist.Bernoulli(logits=x[idx] @ w).log_prob(y[idx]) - 0.1 * w.sum())
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def with_subsample(x, y):
    w = weights(x)
    with pyro.plate("data", len(x)):
        features = pyro.subsample(x, event_dim=1)
        pyro.sample("y", dist.Bernoulli(logits=features @ w), obs=pyro.subsample(y, event_dim=0))


def constrained(x, y):
    probs = pyro.sample("probs", dist.Dirichlet(torch.ones(3)))
    chol = pyro.sample("chol", dist.LKJCholesky(3, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    bounded = pyro.sample("bounded", dist.Uniform(-2.0, 3.0))
    w = chol @ probs * scale + bounded
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def several_plates(x, y):
    with pyro.plate("features", x.shape[1], dim=-2):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x), dim=-3) as idx:
        pyro.sample("y", dist.Bernoulli(logits=(x[idx] @ w)[..., None]), obs=y[idx][:, None, None])


def depends_on_a_latent(x, y):
    top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
    mean = pyro.sample("mean", dist.Uniform(0.0, top))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])


def depends_on_a_latent_guide(x, y):
    top = pyro.sample("top", dist.LogNormal(pyro.param("t", torch.tensor(0.1)), 0.3))
    base = dist.Normal(pyro.param("m", torch.tensor(0.2)), 0.3)
    inside = [SigmoidTransform(), AffineTransform(0.0, top)]
    pyro.sample("mean", dist.TransformedDistribution(base, inside))


def reparameterised(x, y):
    with poutine.reparam(config={"w": LocScaleReparam(0.3)}):
        with pyro.plate("features", x.shape[1]):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def auto(model, kind=AutoNormal, loss=None, **needs):
    return lambda: Problem(model, kind(model), regression_data(), loss or Trace_ELBO(), needs)


def network(build):
    """A deterministic network of the features, with ``pyro.module``."""

    def make():
        net = build()

        def model(x, y):
            pyro.module("net", net)
            with pyro.plate("data", len(x)) as idx:
                out = net(x[idx])
                pyro.sample("y", dist.Bernoulli(logits=out.sum(-1)), obs=y[idx])

        return Problem(model, lambda x, y: None, regression_data())

    return make


def tied():
    encoder, decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    decoder.weight = encoder.weight
    return nn.Sequential(encoder, nn.Tanh(), decoder)


def frozen():
    def guide(x, y):
        pyro.param("scale", torch.ones(3), constraint=constraints.positive).unconstrained()
        store = pyro.get_param_store()
        store["scale"].unconstrained().requires_grad_(False)
        handwritten_guide(x, y)

    return Problem(logistic, guide, regression_data())


def named_beforehand():
    pyro.param("prior", torch.tensor(0.7), constraint=constraints.positive)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, pyro.param("prior")).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    return Problem(model, AutoNormal(model), regression_data())


MODELS = {
    "scale and mask": auto(scaled_and_masked),
    "scale and mask, mean field": lambda: Problem(
        scaled_and_masked, handwritten_guide, regression_data(), TraceMeanField_ELBO()
    ),
    "factor in the plate": auto(with_factor),
    "pyro.subsample": auto(with_subsample),
    "constrained": auto(constrained),
    "constrained, full rank": auto(constrained, AutoMultivariateNormal),
    "constrained, AutoDelta": auto(constrained, AutoDelta),
    "AutoStructured": auto(logistic, AutoStructured),
    "several plates": auto(several_plates, plate="data"),
    "support that depends on a latent": lambda: Problem(
        depends_on_a_latent, depends_on_a_latent_guide, regression_data()
    ),
    "reparameterisation": auto(reparameterised),
    "normalising layers": network(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.GroupNorm(1, 6))
    ),
    "convolution": network(
        lambda: nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(-2))
    ),
    "tied weights": network(tied),
    "autoguide in a block": lambda: Problem(
        logistic, poutine.block(AutoNormal(logistic), hide=["y"]), regression_data()
    ),
    "autoguide in a partial": lambda: Problem(
        logistic, functools.partial(AutoNormal(logistic)), regression_data()
    ),
    "frozen parameter": frozen,
    "parameter made beforehand": named_beforehand,
}


@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_svi(name, privatize):
    clip = Clip(math.inf, of=privatize)
    require_equals_svi(MODELS[name], steps=5, rtol=1e-7, atol=1e-9, clip=clip)


@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
@pytest.mark.parametrize(
    "observation",
    [
        lambda w: dist.StudentT(3.0, w, 1.0),
        lambda w: dist.NegativeBinomial(3.0, logits=w),
        lambda w: dist.ZeroInflatedPoisson(w.exp(), gate=torch.tensor(0.3)),
        lambda w: dist.Geometric(logits=w),
        lambda w: dist.VonMises(w, 1.0),
        lambda w: dist.Categorical(logits=torch.stack([w, -w], -1)),
        lambda w: dist.OrderedLogistic(w, torch.tensor([-1.0, 1.0])),
    ],
)
def test_observations(observation):
    """Integers, counts, angles."""

    def make():
        values = observation(torch.zeros(())).sample((20,))

        def model(y):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(y)) as idx:
                pyro.sample("y", observation(w.expand(len(idx))), obs=y[idx])

        return Problem(model, AutoNormal(model), (values,))

    require_equals_svi(make, steps=3, rtol=1e-6)


@pytest.mark.long
def test_no_grad_around_a_step():
    """A step that pays must also learn."""
    x, y = regression_data()
    problem = Problem(logistic, handwritten_guide, (x, y))
    expected = fit_paper_dpsvi(lambda: problem, steps=2)
    with torch.no_grad():
        ours = fit_paper_dpsvi(lambda: problem, steps=2)
    torch.testing.assert_close(ours, expected)
