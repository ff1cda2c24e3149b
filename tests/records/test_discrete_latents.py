"""Discrete latents of a record that the guide enumerates or draws: Pyro's losses, vectorised."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import Problem, eager, require_equals_svi, require_same_gradients, start
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate
from torch.nn.functional import pad
from zoo.images import SSVAE, images

from pyro_dp import Execution, Noise, RowAdam
from pyro_dp.records.record_term import Batch

N = 12


def semi_supervised(how="parallel"):
    """z depends on the class that is summed over."""
    made = SSVAE()
    return made.model, config_enumerate(made.guide, how, expand=True), images(N)


def dirichlet_process(marks, how="parallel"):
    """A row of probabilities for each record, in the guide."""

    def model(x):
        with pyro.plate("sticks", 2):
            beta = pyro.sample("beta", dist.Beta(1.0, 1.0))
        with pyro.plate("clusters", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            weights = pad(beta, (0, 1), value=1) * pad((1 - beta).cumprod(-1), (1, 0), value=1)
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("x", dist.Normal(mu[z], 1.0).to_event(1), obs=x)

    def guide(x):
        kappa = pyro.param("kappa", torch.ones(2), constraint=constraints.positive)
        tau = pyro.param("tau", torch.tensor([[-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        phi = pyro.param("phi", lambda: torch.ones(len(x), 3) / 3, constraint=constraints.simplex)
        with pyro.plate("sticks", 2):
            pyro.sample("beta", dist.Beta(1 + kappa, 1 + kappa))
        with pyro.plate("clusters", 3):
            pyro.sample("mu", dist.Normal(tau, 0.1).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Categorical(phi))

    return model, config_enumerate(guide, how) if marks else guide, (torch.randn(N, 2),)


def dawid_skene(marks, how="parallel"):
    """Items with a true class, judged by four annotators with error rates of their own."""

    def model(y):
        with pyro.plate("annotators", 4, dim=-1), pyro.plate("classes", 3, dim=-2):
            errs = pyro.sample("errs", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("items", len(y), dim=-2) as idx:
            z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
            with pyro.plate("judgements", 4, dim=-1) as j:
                pyro.sample("y", dist.Categorical(logits=errs[z, j] + torch.eye(3)[z]), obs=y[idx])

    def guide(y):
        loc = pyro.param("loc", torch.zeros(3, 4, 3))
        slope = pyro.param("slope", torch.linspace(-0.2, 0.3, 3))
        with pyro.plate("annotators", 4, dim=-1), pyro.plate("classes", 3, dim=-2):
            pyro.sample("errs", dist.Normal(loc, 0.1).to_event(1))
        with pyro.plate("items", len(y), dim=-2) as idx:
            counts = torch.eye(3)[y[idx]].sum(-2, keepdim=True)
            pyro.sample("z", dist.Categorical(logits=counts * slope))

    made = (model, config_enumerate(guide, how) if marks else guide, (torch.randint(3, (N, 4)),))
    return *made, 2, {"plate": "items"}


def chain():
    """Two enumerated latents under a nested plate; the second depends on the first."""

    def model(x):
        with pyro.plate("data", len(x), dim=-2) as idx:
            a = pyro.sample("a", dist.Bernoulli(0.3))
            with pyro.plate("visits", 3, dim=-1):
                b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a))
                w = pyro.param("w", torch.tensor(0.5))
                pyro.sample("x", dist.Normal(w * b + a, 1.0), obs=x[idx])

    @config_enumerate
    def guide(x):
        with pyro.plate("data", len(x), dim=-2) as idx:
            p = pyro.param("p", torch.tensor(0.1))
            a = pyro.sample("a", dist.Bernoulli(logits=p + x[idx].mean(-1, keepdim=True)))
            q = pyro.param("q", torch.tensor([0.1, -0.3]))
            with pyro.plate("visits", 3, dim=-1):
                pyro.sample("b", dist.Bernoulli(logits=q[a.long()] + x[idx]))

    return model, guide, (torch.randn(N, 3),), 2, {"plate": "data"}


def half_and_half():
    """One latent is summed out of the model, one is enumerated in the guide, one is drawn."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            a = pyro.sample("a", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            b = pyro.sample("b", dist.Bernoulli(0.6))
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(w[a.long()] + b + effect, 1.0), obs=x[idx])

    def guide(x):
        loc = pyro.param("loc", torch.zeros(2))
        pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))
        slope = pyro.param("slope", torch.tensor([0.5, 0.1]))
        with pyro.plate("data", len(x)) as idx:
            b = pyro.sample(
                "b", dist.Bernoulli(logits=slope[0] * x[idx]), infer={"enumerate": "parallel"}
            )
            pyro.sample("effect", dist.Normal(slope[1] * x[idx] + b, 1.0))

    return model, guide, (torch.randn(N),)


ENUMERATED = {
    "semi-supervised": semi_supervised,
    "semi-supervised, sequential": lambda: semi_supervised("sequential"),
    "Dirichlet process": lambda: dirichlet_process(True),
    "Dirichlet process, sequential": lambda: dirichlet_process(True, "sequential"),
    "Dawid-Skene": lambda: dawid_skene(True),
    "chain": chain,
    "half and half": half_and_half,
}


def problem(made, loss=TraceEnum_ELBO):
    model, guide, data, nesting, needs = *made, *(1, {})[len(made) - 3 :]
    return Problem(model, guide, data, loss(max_plate_nesting=nesting), needs)


def prepared(make, loss=TraceEnum_ELBO, **options):
    made = start(lambda: problem(make(), loss))
    svi = made.paper_dpsvi(noise=Noise(0, source=0), **options)
    svi._look_at(made.data, {})
    return svi


def both(svi, chosen=range(5)):
    """Gradients of some records, vectorised and by Pyro's own loss, on the same draws."""
    term, particle = svi._kept.prepared.term, eager(svi).draw()[0]
    assert term.vectorizes
    batch = _batch(svi, torch.tensor(list(chosen)))
    vectorized = term.vectorized(particle, batch)
    return vectorized, term.looped(particle, replace(batch, values=vectorized.sampled))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENUMERATED)
def test_enumerated_in_the_guide(name):
    """Each record's term is Pyro's, to its derivative in every parameter."""
    vectorized, looped = both(prepared(ENUMERATED[name]))
    require_same_gradients(vectorized, looped)
    for part in (vectorized.latents, vectorized.parameters, vectorized.local):
        for key, gradient in part.items():
            assert gradient.abs().max() > 0, key


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n for n in ENUMERATED if not n.startswith(("semi", "half"))],  # which draw per record
)
@pytest.mark.parametrize("jit", ["none", "trace"])
@pytest.mark.filterwarnings("ignore:jit='trace' does not apply")
def test_enumerated_equals_svi(name, jit):
    """The same parameters after 20 steps without noise, from graphs and without them."""

    def make():
        return problem(ENUMERATED[name]())

    optim = pyro.optim.Adam({"lr": 0.02}), RowAdam(lr=0.02)
    require_equals_svi(make, steps=20, optim=optim, execution=Execution(jit=jit))


def visits():
    """A drawn latent per visit of a record, below one of the record itself."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), dim=-2) as idx:
            a = pyro.sample("a", dist.Bernoulli(0.3))
            with pyro.plate("visits", 3, dim=-1):
                b = pyro.sample("b", dist.Bernoulli(0.2 + 0.5 * a))
                pyro.sample("x", dist.Normal(w * b + a, 1.0), obs=x[idx])

    def guide(x):
        loc = pyro.param("loc", torch.tensor(0.5))
        pyro.sample("w", dist.Normal(loc, 0.1))
        p = pyro.param("p", torch.tensor([0.1, 0.3]))
        with pyro.plate("data", len(x), dim=-2) as idx:
            pyro.sample("a", dist.Bernoulli(logits=p[0] * x[idx].mean(-1, keepdim=True)))
            with pyro.plate("visits", 3, dim=-1):
                pyro.sample("b", dist.Bernoulli(logits=p[1] * x[idx]))

    return model, guide, (torch.randn(N, 3),), 2, {"plate": "data"}


DRAWN = {
    "Dirichlet process": lambda: dirichlet_process(False),
    "Dawid-Skene": lambda: dawid_skene(False),
    "visits": visits,
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceEnum_ELBO])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_in_the_guide(name, loss):
    """By the score function, weighted with what stands in the same plates: Pyro's, on its draws."""
    svi = prepared(DRAWN[name], loss, execution=Execution(jit="none"))
    assert svi._kept.prepared.term.vectorizes
    for i in range(4):  # one at a time: the draw itself comes from torch
        require_same_gradients(*both(svi, [i]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceEnum_ELBO])
def test_the_score_function_is_unbiased(loss):
    """Its mean over many draws is the derivative of the ELBO, which enumeration gives."""
    svi = prepared(DRAWN["Dirichlet process"], loss, execution=Execution(jit="none"))
    particle, chosen = eager(svi).draw()[0], torch.zeros(20_000, dtype=torch.long)
    torch.manual_seed(0)
    gradient = svi._kept.prepared.term.vectorized(particle, _batch(svi, chosen)).local["phi"]
    exact = prepared(ENUMERATED["Dirichlet process"])
    batch = _batch(exact, chosen[:1])
    expected = exact._kept.prepared.term.vectorized(particle, batch).local["phi"]
    error = gradient.std(0) / math.sqrt(len(chosen))
    assert ((gradient.mean(0) - expected[0]).abs() < 4 * error).all()


def _batch(svi, chosen):
    prepared = svi._kept.prepared
    rows = prepared.records.rows(chosen, distinct=False)
    return Batch(chosen, rows, local_rows=prepared.term.local.rows(chosen))
