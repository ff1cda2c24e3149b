"""Observations other than ``obs=y[idx]``: by condition, whole, with values missing."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import Problem, looked_at, new_paper_dpsvi, regression_data, require_equals_svi
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal

from pyro_dp import Execution, FullBatch
from pyro_dp.records.record_term import Batch


def coefficients(x):
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))


def whole(x, y=None):
    w = coefficients(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def indexed(x):
    w = coefficients(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w))


def partly_whole(x, y):
    w = coefficients(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y)


def vectors(x, y):
    """Outcomes of several numbers, and a plate in the plate."""
    w = coefficients(x)
    with pyro.plate("data", len(x), dim=-2) as idx:
        mean = (x[idx] @ w)[:, None, None]
        with pyro.plate("visits", 4, dim=-1):
            pyro.sample("y", dist.Normal(mean.expand(-1, 1, 2), 1.0).to_event(1), obs=y)


def conditioned_whole(x, y):
    return pyro.condition(whole, data={"y": y})(x)


def conditioned_indexed(x, y):
    return pyro.condition(indexed, data={"y": y})(x)


def means(x, y):
    loc = pyro.param("loc", torch.zeros(x.shape[1]))
    pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))


def regression(model):
    return lambda: Problem(model, means, regression_data())


def _vectors():
    x, _ = regression_data()
    return Problem(vectors, means, (x, torch.randn(30, 4, 2)), Trace_ELBO(), {"plate": "data"})


OBSERVED = {
    "conditioned, whole": regression(conditioned_whole),
    "conditioned, indexed": regression(conditioned_indexed),
    "partly whole": regression(partly_whole),
    "vectors": _vectors,
}


@pytest.mark.long
@pytest.mark.parametrize("jit", ["none", "trace"])
@pytest.mark.parametrize("name", OBSERVED)
def test_observed_equals_svi(name, jit):
    require_equals_svi(OBSERVED[name], steps=20, atol=1e-10, execution=Execution(jit=jit))


@pytest.mark.parametrize("name", OBSERVED)
def test_a_record_reads_its_own_outcome(name):
    """A record reads only its own outcome, however it is observed."""
    problem = OBSERVED[name]()
    (term, particle), chosen = looked_at(problem.paper_dpsvi(), *problem.data), torch.arange(30)
    x, y = problem.data
    other = y.clone()
    other[7] = 1 - other[7]
    before = term.gradients(particle, Batch(chosen, [x, y])).losses
    after = term.gradients(particle, Batch(chosen, [x, other])).losses
    assert torch.equal(before != after, chosen == 7)


def missing():
    """Outcomes with a third missing; a number stands for each of these."""
    x, y = regression_data()
    return x, y, torch.rand(30) > 0.3


def continuous(x, y, seen):
    w = coefficients(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx], obs_mask=seen[idx])


def continuous_whole(x, y, seen):
    w = coefficients(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y, obs_mask=seen)


@config_enumerate
def discrete(x, y, seen):
    w = coefficients(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx], obs_mask=seen[idx])


@config_enumerate
def discrete_whole(x, y, seen):
    w = coefficients(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y, obs_mask=seen)


def guessing(family, how=None):
    """A guide that has the missing outcomes, by a regression of its own."""

    def guide(x, y, seen):
        means(x, y)
        own = pyro.param("own", torch.full((x.shape[1],), 0.1))
        with pyro.plate("data", len(x)) as idx, poutine.mask(mask=~seen[idx]):
            pyro.sample("y_unobserved", family(x[idx] @ own), infer={"enumerate": how})

    return guide


def normal(mean):
    return dist.Normal(mean, 1.0)


def bernoulli(logits):
    return dist.Bernoulli(logits=logits)


def only_means(x, y, seen):
    means(x, y)


MISSING = {
    "AutoNormal": (continuous, None, Trace_ELBO),
    "AutoNormal, whole": (continuous_whole, None, Trace_ELBO),
    "guide": (continuous, guessing(normal), Trace_ELBO),
    "guide, TraceEnum": (continuous, guessing(normal), TraceEnum_ELBO),
    "guide, mean field": (continuous, guessing(normal), TraceMeanField_ELBO),
    "discrete, summed out": (discrete, only_means, TraceEnum_ELBO),
    "discrete, summed out, whole": (discrete_whole, only_means, TraceEnum_ELBO),
    "discrete, guide": (discrete, guessing(bernoulli, "parallel"), TraceEnum_ELBO),
    "discrete, drawn": (discrete, guessing(bernoulli), TraceEnum_ELBO),
}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.filterwarnings("ignore:jit='trace' does not apply")
def test_missing_outcomes(name):
    """They are vectorised; the number that stands for a missing outcome has no effect."""
    model, guide, loss = MISSING[name]
    x, y, seen = missing()
    guide = AutoNormal(model) if guide is None else guide
    loss = loss(max_plate_nesting=1)
    own = dict(sampling=FullBatch(), execution=Execution(jit="none"))
    svi, chosen = new_paper_dpsvi(model, guide, loss=loss, **own), torch.arange(30)
    term, particle = looked_at(svi, x, y, seen)
    assert term.vectorizes
    local = term.local.rows(chosen)

    def latents(outcomes):
        rows = [x, outcomes, seen]
        torch.manual_seed(0)
        found = term.vectorized(particle, Batch(chosen, rows, local_rows=local))
        return found.latents["w"]

    gradients, others = latents(y), latents(torch.where(seen, y, 1 - y))
    torch.testing.assert_close(gradients, others, rtol=0, atol=1e-12)
    if "summed" in name:
        assert gradients[~seen].abs().max() < 1e-12
    assert (gradients[seen].abs().amax(-1) > 0).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["discrete, summed out", "discrete, summed out, whole", "discrete, guide"]
)
def test_missing_outcomes_equal_svi(name):
    """If no record draws, parameters are the same as with SVI."""
    model, guide, loss = MISSING[name]

    def make():
        return Problem(model, guide, missing(), loss(max_plate_nesting=1))

    require_equals_svi(make, steps=20, atol=1e-10)
