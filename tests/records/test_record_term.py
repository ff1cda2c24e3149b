"""Per-record gradients: the vectorised form against the one-record loop."""

import dataclasses
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    PROBLEMS,
    Problem,
    eager,
    looked_at,
    new_paper_dpsvi,
    new_resting,
    require_equals_svi,
    require_same_gradients,
)
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_mean
from releases import gradients, require_bound

from pyro_dp import DPSEP, Clip, Execution, FullBatch, ModelError, Noise, PrivacyAccountant
from pyro_dp.infer.svi.eager_step import LatentCoordinates, ParameterCoordinates
from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.record_term import Batch
from pyro_dp.records.torch_modes import RecordMode

LOSS_DIFFERS = {"VAE", "VAE, mean field", "hierarchical", "particles", "subsample_size"}


def flat(blocks):
    return torch.cat([block.reshape(len(block), -1) for block in blocks], dim=1)


def prepared(name, **options):
    """A DPSVI that has passed its checks, and its problem."""
    problem = PROBLEMS[name]()
    svi = problem.paper_dpsvi(noise=Noise(0, source=0), **options)
    svi._look_at(problem.data, {})
    return svi, problem


@pytest.mark.parametrize("name", PROBLEMS)
def test_vectorized_equals_loop(name):
    """On the same global and local draws; no used parameter has a zero gradient."""
    svi, _ = prepared(name)
    term, indices = svi._kept.prepared.term, torch.tensor([0, 3, 4, 11, 29])
    assert term.vectorizes
    particle = eager(svi).draw()[0]
    batch = Batch(indices, term.records.rows(indices))
    vectorized = term.vectorized(particle, batch)
    looped = term.looped(particle, dataclasses.replace(batch, values=vectorized.sampled))
    require_same_gradients(vectorized, looped)
    for key, gradient in (vectorized.latents | vectorized.parameters).items():
        assert gradient.abs().max() > 0, f"{key} is used, but its gradient is zero"


def test_a_record_that_fails_changes_no_other_record():
    """In the loop, torch's derivative of a singular matrix's determinant is zero."""

    def model(x):
        w = pyro.sample("w", dist.Normal(1.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            a, b, c, d = x[idx].unbind(-1)
            rows = torch.stack([w * a, b], -1), torch.stack([c, 2 * d + d**2 - d**2], -1)
            mean = torch.linalg.det(torch.stack(rows, -2))
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.full_like(mean, 3.0))

    x = torch.tensor([[2.0, 2.0, 1.0, 0.5]]).repeat(7, 1)
    x[[0, 3, 6]] = torch.tensor([1.0, 0.3, 0.2, 1.0])  # the checks run on these
    x[4] = 1e308
    guide = AutoDelta(model, init_loc_fn=init_to_mean)
    term, particle = looked_at(new_paper_dpsvi(model, guide), x)
    indices = torch.arange(7)
    found = term.gradients(particle, Batch(indices, [x])).latents["w"]
    alone = [term.gradients(particle, Batch(i, [x[i]])).latents["w"] for i in indices.split(1)]
    assert found[1].abs() > 1 and found.isnan().nonzero().tolist() == [[4]]
    torch.testing.assert_close(found, torch.cat(alone), equal_nan=True)


def test_a_term_stays_what_was_checked():
    """A checked term cannot be changed, or used on other records."""
    svi, _ = prepared("AutoNormal")
    term = svi._kept.prepared.term
    assert term.records is svi._kept.prepared.records
    for field in dataclasses.fields(term):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(term, field.name, None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_parameter_coordinates(name):
    """Pulled back per record = that record's loss, differentiated through the guide."""
    svi, _ = prepared(name, clip=Clip(math.inf, of="parameters"))
    term, records = svi._kept.prepared.term, svi._kept.prepared.records
    particle = eager(svi).draw()[0]
    indices = torch.tensor([1, 7])
    rows = records.rows(indices)
    gradients = term.gradients(particle, Batch(indices, rows))
    coordinates = ParameterCoordinates([particle], term, svi._kept.prepared.parameters)
    per_record = flat(coordinates.per_record([gradients]))
    assert per_record.shape == (2, coordinates.size)
    for b, index in enumerate(indices):
        row, draws = [row[b] for row in rows], LocalDraws([x[b] for x in gradients.sampled])
        shown = term.shown(particle, particle.latents, index, row, RecordMode(draws))
        with shown as (model, guide, args, kwargs):
            loss = term.loss.differentiable_loss(model, guide, *args, **kwargs)
        leaves = list(term.released.values())
        expected = torch.autograd.grad(
            loss, leaves, allow_unused=True, materialize_grads=True, retain_graph=True
        )
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(per_record[b], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    # The others draw locally, or several times, or Pyro takes a part of their records.
    [n for n in PROBLEMS if n not in LOSS_DIFFERS],
)
def test_loss_adds_up(name):
    """The term outside plus all records' terms is Pyro's loss under the same seed."""
    svi, problem = prepared(name)
    pyro.set_rng_seed(3)
    expected = problem.loss.differentiable_loss(problem.model, problem.guide, *problem.data)
    pyro.set_rng_seed(3)
    particle = eager(svi).draw()[0]
    batch = Batch(torch.arange(30), svi._kept.prepared.records.rows(torch.arange(30)))
    losses = svi._kept.prepared.term.vectorized(particle, batch).losses
    torch.testing.assert_close(particle.loss + losses.sum(), torch.as_tensor(expected))


def test_several_particles_are_blocks():
    """Latents: K blocks of (1/K) times each particle's gradient. Parameters: their mean."""
    svi, _ = prepared("particles")
    own = (svi._kept.prepared.term, svi._kept.prepared.parameters)
    drawn = eager(svi).draw()
    assert len(drawn) == 3
    indices = torch.arange(4)
    batch = Batch(indices, svi._kept.prepared.records.rows(indices))
    each = [svi._kept.prepared.term.gradients(p, batch) for p in drawn]
    latents, parameters = LatentCoordinates(drawn, *own), ParameterCoordinates(drawn, *own)
    torch.testing.assert_close(latents.per_record(each), [g.latents["w"] / 3 for g in each])
    alone = [
        flat(ParameterCoordinates([p], *own).per_record([g]))
        for p, g in zip(drawn, each, strict=True)
    ]
    torch.testing.assert_close(flat(parameters.per_record(each)), sum(alone) / 3)


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceEnum_ELBO])
def test_score_function_of_a_global_site(loss):
    """A discrete global latent under privatize="parameters": l_i times the score.

    Its terms have no derivative, which Pyro's own TraceEnum_ELBO refuses.
    """

    def model(x):
        k = pyro.sample("k", dist.Bernoulli(0.5))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(k, 1.0), obs=x[idx])

    def guide(x):
        logit = pyro.param("logit", torch.tensor(0.3))
        pyro.sample("k", dist.Bernoulli(logits=logit))

    x = torch.randn(10)
    own = dict(noise=0, clip=Clip(math.inf, of="parameters"), sampling=FullBatch())
    svi = new_paper_dpsvi(model, guide, loss=loss(), **own)
    term, particle = looked_at(svi, x)
    gradients = term.gradients(particle, Batch(torch.arange(10), [x]))
    coordinates = ParameterCoordinates([particle], term, svi._kept.prepared.parameters)
    k = particle.fixed["k"]
    loss = -dist.Normal(k, 1.0).log_prob(x)
    score = k - torch.sigmoid(torch.tensor(0.3))
    (per_record,) = coordinates.per_record([gradients])
    torch.testing.assert_close(per_record, loss * score)


def _sequential(x):
    """Control flow on values, in a sequential plate."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    for i in pyro.plate("data", len(x)):
        pyro.sample(f"x_{i}", dist.Normal(w if x[i] > 0 else 2 * w, 1.0), obs=x[i])


def test_falls_back_to_the_loop():
    """A model that cannot be vectorised warns once, and is exact."""
    x = torch.randn(12)

    def make():
        return Problem(_sequential, AutoNormal(_sequential), (x,))

    with pytest.warns(UserWarning, match="one record at a time") as caught:
        require_equals_svi(make, steps=3)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "distribution",
    [
        lambda w: dist.Normal(w, 1.0),
        lambda w: dist.Laplace(w, 1.0),
        lambda w: dist.Uniform(w, w + 1.0),
        lambda w: dist.Exponential(w.exp()),
        lambda w: dist.LogNormal(w, 1.0),
        lambda w: dist.Cauchy(w, 1.0),
        lambda w: dist.Gumbel(w, 1.0),
        lambda w: dist.StudentT(3.0, w, 1.0),
        lambda w: dist.Gamma(w.exp(), 1.0),
        lambda w: dist.Beta(w.exp(), 1.0),
        lambda w: dist.MultivariateNormal(w.expand(2), torch.eye(2)),
        lambda w: dist.LowRankMultivariateNormal(w.expand(2), torch.ones(2, 1), torch.ones(2)),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
def test_reparameterised_local_draws(distribution):
    """A record's latent may have any distribution: vectorised, or in the loop, with a gradient."""

    def model(x):
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", distribution(torch.zeros(())))
            pyro.sample("x", dist.Normal(z.reshape(1, -1).sum(-1), 1.0), obs=x[idx])

    def guide(x):
        w = pyro.param("w", torch.tensor(0.2))
        with pyro.plate("data", len(x)):
            pyro.sample("z", distribution(w))

    x = torch.zeros(6)  # so only the draws differ
    # Clipped, gradients of +-1 may cancel.
    svi = new_paper_dpsvi(model, guide, noise=0.0, clip=math.inf, sampling=FullBatch())
    start = torch.tensor(0.2)
    svi.step(x)
    assert (pyro.param("w") - start).abs() > 0
    particle = eager(svi).draw()[0]
    batch = Batch(torch.arange(6), [x])
    gradients = svi._kept.prepared.term.gradients(particle, batch).parameters["w"]
    assert len(gradients.unique()) == 6, "every record has its own draw"


def test_draws_in_place():
    """A model may fill a tensor of its own: by the loop, with the draws of each record."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            jitter = torch.empty(1)
            jitter.normal_()
            pyro.sample("x", dist.Normal(w + jitter, 1.0), obs=x[idx])

    x = torch.zeros(5)
    svi = new_paper_dpsvi(model, AutoNormal(model))
    with pytest.warns(UserWarning, match="one record at a time"):
        term, particle = looked_at(svi, x)
    torch.manual_seed(0)
    gradients = term.gradients(particle, Batch(torch.arange(5), [x])).latents["w"]
    torch.manual_seed(0)
    jitter = torch.cat([torch.randn(1) for _ in range(5)])
    torch.testing.assert_close(gradients, particle.latents["w"].detach() + jitter)


@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.empty(1).normal_(generator=g),
        lambda g: torch.bernoulli(torch.full((1,), 0.5), generator=g),
        lambda g: torch.randint(5, (1,), generator=g),
    ],
)
def test_a_generator_of_the_users_is_not_moved(draw):
    """Its state would count the records. A Python generator hides it from other checks."""
    own = torch.Generator().manual_seed(7)
    numbers = (draw(own) for _ in itertools.count())

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(w + 0.0 * next(numbers), 1.0), obs=x[idx])

    x = torch.randn(5)
    term, particle = looked_at(new_paper_dpsvi(model, AutoNormal(model)), x)
    state = own.get_state()
    term.gradients(particle, Batch(torch.arange(5), [x]))
    assert torch.equal(own.get_state(), state)


class Hook:
    """A derivative that keeps something: the largest so far, or the first."""

    def __init__(self, largest):
        self.largest, self.first = largest, None

    def scaled(self, gradient):
        """Takes a number, and so records run one at a time."""
        self.largest = max(self.largest, float(gradient.abs().max()))
        return gradient / self.largest

    def kept(self, gradient):
        self.first = gradient if self.first is None else self.first
        return gradient


def with_hook(hook):
    def model(x):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            mean = 1.0 * loc
            if mean.requires_grad:
                mean.register_hook(hook)
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    return model


def new_dpsep(model):
    own = dict(accountant=PrivacyAccountant(), noise=1.0, moments="stein")
    return DPSEP(model, AutoNormal(model), **own)


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
def test_a_derivative_that_keeps_something(monkeypatch):
    """The checks do not see it, and it is put back after each record."""
    x, hook = torch.linspace(-2.0, 2.0, 24), Hook(100.0)
    x[5] = 1e4
    model = with_hook(hook.scaled)
    new_dpsep(model).step(x)
    assert hook.largest == 100.0
    svi = new_resting(model, clip=0.5)
    require_bound(gradients(monkeypatch, svi, x), len(x), [3, 5])
    assert hook.largest == 100.0
    hook.largest, x[-1] = 1.0, 50.0  # which the checks look at
    with pytest.raises(ModelError, match="'largest' of Hook changes with the data"):
        new_resting(model).step(x)


@pytest.mark.long
@pytest.mark.every_commit
def test_a_derivative_of_all_records_keeps_nothing():
    x, hook = torch.linspace(-2.0, 2.0, 24), Hook(1.0)
    model = with_hook(hook.kept)
    new_paper_dpsvi(model, AutoNormal(model), execution=Execution(jit="none")).step(x)
    assert hook.first is None
    new_dpsep(model).step(x)
    assert hook.first is None
