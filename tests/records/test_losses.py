"""Losses that users write themselves, and those of Pyro that are taken as others."""

import functools

import pyro
import pytest
import torch
from problems import (
    VAE,
    Problem,
    eager,
    handwritten_guide,
    linear,
    logistic,
    logistic_whole,
    looked_at,
    mixture,
    new_paper_dpsvi,
    points,
    regression_data,
    require_equals_svi,
)
from pyro import poutine
from pyro.infer import (
    ELBO,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyro_dp import DPSVI, Execution, FullBatch, PrivacyAccountant
from pyro_dp.records.losses import as_elbo
from pyro_dp.records.record_term import Batch
from pyro_dp.utils.errors import ConfigurationError, ModelError


def traces(model, guide, *args, **kwargs):
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    replayed = poutine.replay(model, trace=guide_trace)
    return poutine.trace(replayed).get_trace(*args, **kwargs), guide_trace


def simple_elbo(model, guide, *args, **kwargs):
    """The loss of Pyro's tutorial "Customizing SVI objectives"."""
    model_trace, guide_trace = traces(model, guide, *args, **kwargs)
    return -1 * (model_trace.log_prob_sum() - guide_trace.log_prob_sum())


def annealed(model, guide, *args, beta=0.3, **kwargs):
    """The same, with the latents' terms scaled."""
    model_trace, guide_trace = traces(model, guide, *args, **kwargs)
    elbo = 0.0
    for trace, sign in ((model_trace, 1.0), (guide_trace, -1.0)):
        trace.compute_log_prob()
        for site in trace.nodes.values():
            if site["type"] == "sample":
                factor = 1.0 if site["is_observed"] else beta
                elbo = elbo + sign * factor * site["log_prob_sum"]
    return -elbo


def scaled(model, guide, *args, **kwargs):
    """Made of one of Pyro's own."""
    return 0.5 * Trace_ELBO().differentiable_loss(model, guide, *args, **kwargs)


class Halved:
    """Part of subclasses that change the outcome."""

    factor = 0.5

    def differentiable_loss(self, model, guide, *args, **kwargs):
        return self.factor * super().differentiable_loss(model, guide, *args, **kwargs)

    def loss_and_grads(self, model, guide, *args, **kwargs):
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return loss.item()


class Half(Halved, Trace_ELBO):
    pass


class HalfEnum(Halved, TraceEnum_ELBO):
    pass


class Inner(TraceMeanField_ELBO):
    """A subclass that changes a part of the computation."""

    def _differentiable_loss_particle(self, model_trace, guide_trace):
        loss, surrogate = super()._differentiable_loss_particle(model_trace, guide_trace)
        return 2 * loss, 2 * surrogate


def of_regression(loss, model=logistic, guide=handwritten_guide):
    return lambda: Problem(model, guide, regression_data(), loss, {})


OWN = {
    "simple_elbo": of_regression(simple_elbo),
    "annealed": of_regression(annealed),
    "a partial function": of_regression(functools.partial(annealed, beta=2.0)),
    "differentiable_loss": of_regression(Trace_ELBO().differentiable_loss),
    "scaled": of_regression(scaled, logistic_whole),
    "subclass": of_regression(Half()),
    "subclass, within": of_regression(Inner()),
    "subclass, mixture": lambda: Problem(
        mixture,
        AutoNormal(poutine.block(mixture, hide=["z"])),
        points(),
        HalfEnum(max_plate_nesting=1),
        {},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("jit", ["none", "trace"])
@pytest.mark.parametrize("name", OWN)
def test_own_loss_equals_svi(name, jit):
    """The same parameters after 20 steps without noise, vectorised, from graphs, too."""
    require_equals_svi(OWN[name], steps=20, execution=Execution(jit=jit))


@pytest.mark.long
@pytest.mark.parametrize("loss", [simple_elbo, annealed, scaled, Half()])
def test_own_loss_of_latents_per_record(loss):
    """Vectorised, with each record's own draws: the numbers of the loop."""
    vae = VAE()
    svi = new_paper_dpsvi(vae.model, vae.guide, loss=loss, sampling=FullBatch())
    svi._look_at((torch.bernoulli(torch.full((12, 6), 0.5)),), {})
    assert svi._kept.prepared.term.vectorizes  # and was compared


@pytest.mark.long
def test_the_loss_is_what_it_is_now():
    """Annealing by an attribute, with graphs and without."""
    for jit in ("none", "trace"):
        pyro.clear_param_store()
        loss = Half()
        own = dict(loss=loss, noise=0, execution=Execution(jit=jit))
        svi, data = new_paper_dpsvi(logistic, handwritten_guide, **own), regression_data()
        svi.step(*data)
        particle, chosen = eager(svi).draw()[0], torch.arange(3)
        batch = Batch(chosen, svi._kept.prepared.records.rows(chosen))
        before = svi._kept.prepared.term.gradients(particle, batch).losses
        loss.factor = 1.0
        svi._look_at(data, {})
        after = svi._kept.prepared.term.gradients(particle, batch).losses
        torch.testing.assert_close(after, 2 * before)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (JitTrace_ELBO, Trace_ELBO),
        (JitTraceMeanField_ELBO, TraceMeanField_ELBO),
        (JitTraceEnum_ELBO, TraceEnum_ELBO),
        (TraceGraph_ELBO, Trace_ELBO),
        (JitTraceGraph_ELBO, Trace_ELBO),
    ],
)
def test_taken_as(kind, expected):
    """Pyro's jit is not used; ours is."""
    taken = as_elbo(kind(num_particles=3, max_plate_nesting=2))
    assert type(taken) is type(as_elbo(taken.differentiable_loss)) is expected
    assert (taken.num_particles, taken.max_plate_nesting) == (3, 2)


def squared(model, guide, *args):
    return simple_elbo(model, guide, *args).square()


def weighted_by_the_whole(model, guide, *args):
    """A score function: its value is right, and its derivative no sum."""
    loss = simple_elbo(model, guide, *args)
    score = poutine.trace(guide).get_trace(*args).log_prob_sum()
    return loss + loss.detach() * (score - score.detach())


def test_a_loss_that_is_no_sum_is_refused():
    """The error comes before anything is spent. Others are in first_attempts.py."""
    accountant = PrivacyAccountant(epsilon=1.0)
    svi = new_paper_dpsvi(logistic_whole, handwritten_guide, loss=squared, accountant=accountant)
    with pytest.raises(ModelError, match="Only a sum over sites can be clipped record by record"):
        svi.step(*regression_data())
    assert accountant.get_epsilon() == 0


def test_several_runs_are_refused():
    svi = new_paper_dpsvi(logistic, handwritten_guide, loss=weighted_by_the_whole)
    with pytest.raises(ModelError, match="it runs the guide 2 times"):
        svi.step(*regression_data())


def test_particles_of_an_own_subclass():
    """They are taken one by one: a release has K blocks, as with Pyro's particles."""
    svi = new_paper_dpsvi(
        logistic, handwritten_guide, loss=Half(num_particles=3), sampling=FullBatch()
    )
    svi._look_at(regression_data(), {})
    assert len(eager(svi).draw()) == 3


class Gradients(ELBO):
    def _get_trace(self, *args):
        raise NotImplementedError

    def loss_and_grads(self, model, guide, *args):
        return 0.0


class Later(Trace_ELBO):
    def loss_and_grads(self, model, guide, *args):
        return 0.0


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        *((loss, "differentiable_loss") for loss in (Gradients(), Later(), ReweightedWakeSleep())),
        (RenyiELBO(num_particles=2), "no sum over records"),
        *((loss, "loss must be one of") for loss in (0.5, "Trace_ELBO", Trace_ELBO)),
    ],
)
def test_losses_that_are_refused(loss, named):
    with pytest.raises(ConfigurationError, match=named):
        new_paper_dpsvi(logistic, handwritten_guide, loss=loss)


def test_a_loss_may_hold_no_data():
    data = regression_data()

    def loss(model, guide, *args):
        return simple_elbo(model, guide, *args) * data[1].mean()

    with pytest.raises(ModelError, match="'data'"):
        new_paper_dpsvi(logistic, handwritten_guide, loss=loss).step(*data)


@pytest.mark.long
@pytest.mark.every_commit
def test_a_loss_keeps_nothing_of_a_record():
    """A loss may store something of placeholders. Its notes of a record are put back."""
    kept = []

    def notes(model, guide, *args):
        loss = simple_elbo(model, guide, *args)
        kept.append(loss.detach())
        return loss

    seen, (x, y) = [], regression_data()
    for scale in (1.0, 3.0):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        kept.clear()
        own = dict(loss=notes, execution=Execution(jit="none"))
        new_paper_dpsvi(logistic, handwritten_guide, **own).step(scale * x, y)
        seen.append(list(kept))
    assert seen[0] and seen[0] == seen[1]


def test_a_record_for_which_a_loss_has_two_numbers_is_broken():
    """An error would tell that there is such a record, and which one it is."""

    def loss(model, guide, *args):
        found = simple_elbo(model, guide, *args)
        return torch.zeros(2) if found > 1e3 else found

    x, y = regression_data()
    svi = new_paper_dpsvi(logistic, handwritten_guide, loss=loss)
    (term, particle), indices = looked_at(svi, x, y), torch.tensor([3, 7])
    x[7] = 1e6 * (1 - 2 * y[7])
    found = term.gradients(particle, Batch(indices, term.records.rows(indices)))
    assert found.losses.isnan().tolist() == [False, True]


def test_a_loss_that_depends_on_what_it_kept_is_refused():
    kept = [torch.zeros(())]

    def remembers(model, guide, *args):
        loss = simple_elbo(model, guide, *args)
        kept.append(loss.detach())
        return loss + kept[-2]

    with pytest.raises(ModelError):
        new_paper_dpsvi(logistic, handwritten_guide, loss=remembers).step(*regression_data())


@pytest.mark.long
def test_no_posterior_of_an_own_loss():
    """The guide holds what the optimizer found, and says so."""
    guide = AutoMultivariateNormal(linear)
    svi = DPSVI(
        linear, guide, loss=annealed, accountant=PrivacyAccountant(epsilon=5.0), num_steps=30
    )
    with pytest.warns(UserWarning, match="do not include the privacy noise"):
        svi.run(*regression_data(200), progress=False)
