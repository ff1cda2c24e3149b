"""Numbers that each record's own mask selects: all records at once, and as one by one."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    Problem,
    looked_at,
    new_resting,
    require_equals_svi,
    require_same_gradients,
)
from pyro.infer.autoguide import AutoNormal
from releases import gradients, require_bound

from pyro_dp import Execution
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.records.record_term import Batch

JIT = pytest.mark.parametrize("jit", ["none", "trace"])
ONE_BY_ONE = "one record at a time"


def weights():
    return [pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("w", "v")]


def selected(x, y):
    """Two equal masks; the logarithms of what they leave out are NaN."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        mean = (w + v * x)[x > 0].view(len(x), -1)
        seen = x.masked_select(x > 0).log().view(len(x), -1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=seen)


def averaged(x, y):
    w, v = weights()
    with pyro.plate("people", len(x)):
        terms = dist.Normal(w + v * y, 1.0).log_prob(x)[x > 0].view(len(x), -1)
        pyro.factor("y", terms.mean(-1))


def assigned(x, y):
    w, v = weights()
    with pyro.plate("people", len(x)):
        mean = w * x
        mean[x > 0] = v * y[x > 0]
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=x)


def by_index(x, y):
    """It writes as many numbers as the mask has."""
    w, _ = weights()
    with pyro.plate("people", len(x)) as i:
        mean = torch.zeros(len(i))
        positive = x[i, 0] > 0
        mean[positive] = w * x[i, 0][positive]
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[i, 0])


def paired(x, y):
    """Masks that differ in some records: numbers meet in their order."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        mean = (w + v * x)[x > 0].view(len(x), -1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y[y > 0].view(len(y), -1))


def in_order(x, y):
    w, v = weights()
    with pyro.plate("people", len(x)):
        mean = (w + v * x)[x > 0].cumsum(0).view(len(x), -1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=mean.detach())


def counted(x, y):
    w, v = weights()
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(w + v, 1.0).mask(x[x > 0].numel() > 0), obs=x[:, 0])


def by_hand(x, y):
    """A mean by the number of what is selected."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        terms = (w + v * x - y)[x > 0].square()
        pyro.factor("y", -terms.view(len(x), -1).sum(-1) / (terms.shape[0] / len(x)))


def over_others(x, y):
    """A sum that leaves what is selected."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        twice = w * torch.ones(2, 1, 1) * x[x > 0].view(len(x), -1)
        pyro.factor("y", -(twice.sum(axis=0) + v).square().sum(axis=-1))


def mirrored(x, y):
    """Numbers of two masks, which differ in most records."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        mask = x > 0
        both = x[mask] * x[mask.flip(-1)] * w + v
        pyro.factor("y", -both.square().view(len(x), -1).sum(-1))


def rooted(x, y):
    """Only selected numbers have a root."""
    w, v = weights()
    with pyro.plate("people", len(x)):
        roots = (w.square() * x[x > 0] + 1e-300).sqrt().view(len(x), -1)
        pyro.factor("y", -roots.sum(-1) - v.square())


MODELS = [selected, averaged, assigned, by_index]


def data(size=24):
    """Two positive numbers of five in each row of x; y is positive there but in row 3."""
    torch.manual_seed(5)
    order = torch.rand(size, 5).argsort(1)
    x = torch.where(order < 2, 1.0, -1.0) * (0.5 + torch.rand(size, 5))
    y = x.abs() * x.sign()
    y[3] = y[3].roll(1)
    return x, y


def make(model):
    own = data()
    return lambda: Problem(model, AutoNormal(model), own)


def batch(x, y):
    return Batch(torch.arange(len(x)), [x, y])


@pytest.mark.long
@JIT
@pytest.mark.parametrize("model", MODELS)
def test_equals_svi(model, jit):
    require_equals_svi(make(model), steps=6, execution=Execution(jit=jit))


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_a_graph(model):
    svi = new_resting(model, execution=Execution(jit="trace"))
    svi.step(*data())
    assert type(svi._kept.prepared.step) is TracedStep


@pytest.mark.filterwarnings("ignore:The model branches on values of a record")
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
@pytest.mark.parametrize("model", [*MODELS, paired, by_hand, over_others, mirrored, rooted])
def test_all_at_once_is_the_loop(model):
    """Or the loop itself, where only that gives its numbers."""
    svi, own = new_resting(model), data()
    if model is rooted:
        own[0][7] = -own[0][7].abs()  # nothing is selected
    term, particle = looked_at(svi, *own)
    assert term.vectorizes == (model not in (by_hand, over_others))
    found = term.gradients(particle, batch(*own))
    require_same_gradients(found, term.looped(particle, batch(*own)))


@pytest.mark.filterwarnings("ignore:The model branches on values of a record")
def test_masks_that_differ_are_noticed():
    svi, own = new_resting(paired), data()
    term, particle = looked_at(svi, *own)
    apart = term.at_once(particle, batch(*own)).apart
    assert apart.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(("model", "name"), [(in_order, "cumsum"), (counted, "numel")])
def test_other_functions_take_records_one_by_one(model, name):
    svi = new_resting(model)
    with pytest.warns(UserWarning, match=rf"{ONE_BY_ONE}.*: {name}\(\) of numbers"):
        svi.step(*data())


@pytest.mark.every_commit
@pytest.mark.long
@JIT
def test_a_record_that_selects_nothing_adds_its_empty_sum(monkeypatch, jit):
    """Its gradient is zero, and others keep theirs."""

    def model(x, y):
        w, v = weights()
        with pyro.plate("people", len(x)):
            terms = dist.Normal(w + v * y, 1.0).log_prob(x)[x > 0].view(len(x), -1)
            pyro.factor("y", terms.sum(-1))

    x, y = data()
    svi = new_resting(model, clip=0.5, execution=Execution(jit=jit))
    svi.step(x, y)
    x.numpy()[5] = -1.0  # after the checks, which torch does not notice
    gradient, everyone = gradients(monkeypatch, svi, x, y), list(range(len(x)))
    without = gradient([i for i in everyone if i != 5])
    torch.testing.assert_close(gradient(everyone), without)
    assert without.isfinite().all()


@JIT
@pytest.mark.filterwarnings("ignore:The model branches on values of a record")
@pytest.mark.parametrize("model", [selected, paired])
def test_sensitivity(monkeypatch, model, jit):
    """A record moves the sum by its bound at most, also one whose masks differ."""
    own, svi = data(), new_resting(model, clip=0.5, execution=Execution(jit=jit))
    require_bound(gradients(monkeypatch, svi, *own), len(own[0]), (0, 3))
