"""Draws of guides in graphs: those of Pyro's own code, of every family of distributions."""

import math
import random
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import Problem, eager, new_paper_dpsvi, start, values
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoNormal
from releases import take
from test_traced_step import NOISY, assert_same, contributions, new
from torch import nn

from pyro_dp import Clip, Execution, FullBatch
from pyro_dp.infer.svi.traced_step import TracedStep

# Guides of a latent of three elements, from two positive parameters.
FAMILIES = {
    "Beta": lambda a, b: dist.Beta(a, b),
    "Cauchy": lambda a, b: dist.Cauchy(a, b),
    "Chi2": lambda a, b: dist.Chi2(a + b),
    "Dirichlet": lambda a, b: dist.Dirichlet(a * b),
    "Exponential": lambda a, b: dist.Exponential(a / b),
    "FisherSnedecor": lambda a, b: dist.FisherSnedecor(a, b + 4),
    "Gamma": lambda a, b: dist.Gamma(a, b),
    "Gumbel": lambda a, b: dist.Gumbel(a, b),
    "HalfCauchy": lambda a, b: dist.HalfCauchy(a * b),
    "HalfNormal": lambda a, b: dist.HalfNormal(a * b),
    "InverseGamma": lambda a, b: dist.InverseGamma(a + 1, b),
    "Kumaraswamy": lambda a, b: dist.Kumaraswamy(a, b),
    "Laplace": lambda a, b: dist.Laplace(a, b),
    "Logistic": lambda a, b: dist.Logistic(a, b),
    "LogNormal": lambda a, b: dist.LogNormal(a, b),
    "MultivariateNormal": lambda a, b: dist.MultivariateNormal(a, torch.diag(b)),
    "Normal": lambda a, b: dist.Normal(a, b),
    "StudentT": lambda a, b: dist.StudentT(a + 1, b, a),
    "Weibull": lambda a, b: dist.Weibull(a, b + 1),
}
COUNTS = {
    "Bernoulli": lambda a, b: dist.Bernoulli(a / (a + b)),
    "Binomial": lambda a, b: dist.Binomial(5, a / (a + b)),
    "Geometric": lambda a, b: dist.Geometric(a / (a + b)),
    "Poisson": lambda a, b: dist.Poisson(a * b),
}


def problem_of(family):
    def guide(y):
        a = pyro.param("a", torch.tensor([1.5, 2.0, 3.0]), constraint=constraints.positive)
        b = pyro.param("b", torch.tensor([1.0, 0.7, 0.5]), constraint=constraints.positive)
        own = family(a, b)
        pyro.sample("w", own.to_event(1 - own.event_dim))

    slope = torch.tensor([0.1, 0.2, 0.4])

    def model(y):
        prior = family(torch.full((3,), 2.0), torch.ones(3))
        w = pyro.sample("w", prior.to_event(1 - prior.event_dim))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w @ slope, 1.0), obs=y)

    return Problem(model, guide, (torch.randn(24),))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_guide_of_each_family(name):
    """Equal to SVI on the same seed, and traced."""
    ends = []
    for plain in (True, False):
        made = start(lambda: problem_of(FAMILIES[name]))
        optim = pyro.optim.Adam({"lr": 0.02})
        if plain:
            svi = pyro.infer.SVI(made.model, made.guide, optim, made.loss)
        else:
            settings = dict(sampling=FullBatch(), clip=math.inf)
            _, svi = new(lambda: problem_of(FAMILIES[name]), "trace", **settings)
        pyro.set_rng_seed(3)
        for _ in range(5):
            svi.step(*made.data)
        ends.append(values())
    assert isinstance(svi._kept.prepared.step, TracedStep)
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_latents_without_a_reparameterisation(name):
    clip = Clip(0.5, of="parameters")
    svi = assert_same(lambda: problem_of(COUNTS[name]), clip=clip, **NOISY)
    assert isinstance(svi._kept.prepared.step, TracedStep)


@pytest.mark.long
def test_draws_are_fresh_and_at_the_parameters():
    made, svi = new(lambda: problem_of(FAMILIES["Gamma"]), "trace", **NOISY)
    svi._look_at(made.data, {})
    step = svi._kept.prepared.step
    ((one,),), ((other,),) = step.draw(), step.draw()
    assert not torch.equal(one, other)
    pyro.get_param_store()["a"].unconstrained().data.fill_(math.log(1e6))
    ((moved,),) = step.draw()
    torch.testing.assert_close(moved, torch.full((3,), 1e6), rtol=0.02, atol=0.0)


# Within the plate


class Encoder(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.layer = nn.Linear(2, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return nn.functional.softplus(self.layer(self.dropout(x))) + 0.5


def amortised(prior, own, size, dropout=0.0):
    """Latents of each record, drawn by rejection at what the record is."""

    def make():
        net = Encoder(size, dropout)

        def guide(x):
            pyro.module("net", net)
            with pyro.plate("data", len(x)):
                pyro.sample("z", own(net(x)))

        def model(x):
            loc = pyro.param("loc", torch.zeros(2))
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", prior().expand([len(x)]))
                mean = loc + z[..., :2]
                pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

        return Problem(model, guide, (torch.randn(30, 2),))

    return make


LOCAL = {
    "Gamma": amortised(
        lambda: dist.Gamma(torch.ones(2), 1.0).to_event(1),
        lambda c: dist.Gamma(c, 1.0).to_event(1),
        2,
    ),
    "Dirichlet": amortised(lambda: dist.Dirichlet(torch.ones(3)), dist.Dirichlet, 3),
    "dropout": amortised(
        lambda: dist.Normal(torch.zeros(2), 1.0).to_event(1),
        lambda c: dist.Normal(c, 0.3).to_event(1),
        2,
        dropout=0.3,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("privatize", ["latents", "parameters"])
def test_records_draw_by_rejection(name, privatize):
    """A graph draws, another computes. With the same draws, Pyro's code has the same numbers."""
    made, svi = new(LOCAL[name], "trace", clip=Clip(0.5, of=privatize, loss=2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):  # which compare
            svi.step(*made.data)
    assert isinstance(svi._kept.prepared.step, TracedStep)
    number = 2 if name == "dropout" else 1
    assert svi._kept.prepared.term.samples == number and svi._kept.prepared.term.vectorizes


def sums(svi, batch, seed):
    """Sums of these records, with private draws from this seed."""
    svi._kept.prepared.step._unchecked = 0
    return contributions(svi, batch, seed=seed)[0]


@pytest.mark.every_commit
@pytest.mark.long
@pytest.mark.parametrize("name", LOCAL)
def test_private_draws_leave_the_public_generator_alone(name):
    made, svi = new(LOCAL[name], "trace")
    svi._look_at(made.data, {})
    one, again, other = (sums(svi, [1, 4, 8], seed) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.slow
def test_a_gamma_of_records_is_a_gamma():
    """Means of the contributions agree with Pyro's code, which draws for itself."""
    made, svi = new(LOCAL["Gamma"], "trace", clip=1e6)
    svi._look_at(made.data, {})
    found = torch.stack([sums(svi, range(30), seed) for seed in range(100)])
    fast, slow = svi._kept.prepared.step, eager(svi)
    object.__setattr__(svi._kept.prepared, "step", slow)
    slow._unchecked = 0
    expected = torch.stack([sums(svi, range(30), seed) for seed in range(100)])
    object.__setattr__(svi._kept.prepared, "step", fast)
    error = (found.var(0) / 100 + expected.var(0) / 100).sqrt()
    assert ((found.mean(0) - expected.mean(0)).abs() < 5 * error + 1e-9).all()


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
@pytest.mark.parametrize("jit, at_once", [("none", False), ("none", True), ("trace", True)])
def test_no_generator_of_numpy_or_python_sees_the_batch(jit, at_once):
    """Whether it is global or the model's own, and how many microbatches there are."""
    own = (random.Random(0), np.random.default_rng(0), np.random.RandomState(0))
    reseeded, bits = torch.Generator(), np.random.PCG64(0)

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            drawn = [each.random() for each in (random, np.random, *own)]
            reseeded.manual_seed(own[0].getrandbits(60))
            bits.random_raw()
            if not at_once:
                x[idx].tolist()
            pyro.sample("x", dist.Normal(w + 0.0 * sum(drawn), 1.0), obs=x[idx])

    def states():
        numpys = (np.random.get_state(), own[1].bit_generator.state, own[2].get_state())
        others = own[0].getstate(), reseeded.initial_seed(), bits.state
        return repr((random.getstate(), *numpys, *others))

    found = []
    for batch in ([], [1], range(20)):
        for each, seed in zip((random, np.random, own[0], own[2]), range(4), strict=True):
            each.seed(seed)
        own[1].bit_generator.state = bits.state = np.random.PCG64(0).state
        svi = new_paper_dpsvi(model, AutoNormal(model), execution=Execution(4, jit=jit))
        with pytest.MonkeyPatch.context() as patch:
            take(patch, list(batch))
            svi.step(torch.linspace(0.0, 1.0, 20))
        assert svi._kept.prepared.term.vectorizes == at_once
        found.append(states())
    assert len(set(found)) == 1
