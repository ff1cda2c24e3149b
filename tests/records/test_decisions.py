"""Branches on a record's values: all at once and in graphs, and each record by its own values."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    Problem,
    fit_paper_dpsvi,
    fit_svi,
    looked_at,
    new_resting,
    require_same_gradients,
)
from pyro.infer.autoguide import AutoNormal
from releases import Releases, gradients, require_bound, take

from pyro_dp import Execution, FullBatch, ModelError, Noise
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.records.record_term import Batch, RecordTerm

APART = "ignore:The model branches on values of a record"
JIT = pytest.mark.parametrize("jit", ["none", "trace"])


def weights():
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    return w, pyro.sample("v", dist.Normal(0.0, 1.0))


def asserts(x):
    """Outside the plate it asks a placeholder."""
    assert x.max() <= 1e9
    w, v = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w + v, 1.0), obs=x)


def two_ways(x):
    """A placeholder, of ones, goes the first, and has nothing to do with v."""
    w, v = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w if x.max() > 0 else 2 * v, 1.0), obs=x)


def four_ways(x):
    w, v = weights()
    with pyro.plate("data", len(x)):
        mean = w if x.max() > 0 else 2 * v
        if x.min() < -1:
            mean = mean - w
        elif not (x > 1).all():
            mean = mean * 2
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def masked(x):
    w, v = weights()
    with pyro.plate("data", len(x)):
        mean = v * torch.ones(len(x))
        mean[x > 0] = w
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def by_a_public_draw(x):
    w, v = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w if (x > w).all() else v, 1.0), obs=x)


MODELS = {
    asserts: lambda x, w, v: w + v,
    two_ways: lambda x, w, v: torch.where(x > 0, w, 2 * v),
    four_ways: lambda x, w, v: (
        torch.where(x > 0, w, 2 * v) * torch.where((x < -1) | (x > 1), 1.0, 2.0)
        - torch.where(x < -1, w, 0.0)
    ),
    masked: lambda x, w, v: torch.where(x > 0, w, v),
    by_a_public_draw: lambda x, w, v: torch.where(x > w, w, v),
}


def without_branches(mean):
    def model(x):
        w, v = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean(x, w, v), 1.0), obs=x)

    return model


def make(model, size=24):
    torch.manual_seed(5)
    x = 1.5 * torch.randn(size)
    return lambda: Problem(model, AutoNormal(model), (x,))


@pytest.mark.slow
@pytest.mark.filterwarnings(APART)
@pytest.mark.filterwarnings("ignore:jit='trace' does not apply to the guide")
@JIT
@pytest.mark.parametrize("model", MODELS)
def test_equals_svi(model, jit):
    ours = fit_paper_dpsvi(make(model), steps=6, execution=Execution(jit=jit))
    torch.testing.assert_close(ours, fit_svi(make(without_branches(MODELS[model])), steps=6))


@pytest.mark.slow
@pytest.mark.filterwarnings(APART)
@pytest.mark.filterwarnings("ignore:jit='trace' does not apply to the guide")
@pytest.mark.parametrize("model", MODELS)
def test_a_graph_for_each(model):
    """In each case the records have a graph."""
    svi = new_resting(model, execution=Execution(jit="trace"))
    svi.step(*make(model)().data)
    step = svi._kept.prepared.step
    assert isinstance(step, TracedStep)
    assert (type(step) is TracedStep) == (model is not by_a_public_draw)


@pytest.mark.long
@pytest.mark.parametrize(("model", "warns"), [(asserts, False), (two_ways, True)])
def test_what_is_slow_warns_once(model, warns):
    svi, data = new_resting(model), make(model)().data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            svi.step(*data)
    assert ["for the curator only" in str(each.message) for each in caught] == [True] * warns


@pytest.mark.every_commit
@pytest.mark.slow
@pytest.mark.filterwarnings(APART)
@JIT
def test_a_record_takes_its_way_by_its_own_values(monkeypatch, jit):
    """Records that take another branch run separately, and no others, in every batch."""
    model, (x,) = four_ways, make(four_ways)().data
    apart = set((~((x > 0) & (x <= 1))).nonzero().squeeze(1).tolist())
    assert 0 < len(apart) < len(x)
    svi = new_resting(model, execution=Execution(jit=jit))
    for _ in range(4):  # the first ones are checked
        svi.step(x)
    taken = []

    def looped(term, particle, batch, **options):
        taken.append(batch.indices.tolist())
        return original(term, particle, batch, **options)

    original = RecordTerm.looped
    monkeypatch.setattr(RecordTerm, "looped", looped)
    for batch in (list(range(len(x))), [0, 3, 4], [i for i in range(len(x)) if i not in apart]):
        taken.clear()
        take(monkeypatch, batch)
        svi.step(x)
        assert sum(taken, []) == [i for i in batch if i in apart]


@pytest.mark.every_commit
@pytest.mark.slow
@pytest.mark.filterwarnings(APART)
@JIT
def test_sensitivity(monkeypatch, jit):
    """A record moves the sum by its bound at most, in every branch."""
    (x,) = make(four_ways)().data
    svi = new_resting(four_ways, clip=0.5, execution=Execution(jit=jit))
    require_bound(gradients(monkeypatch, svi, x), len(x), range(6))


@pytest.mark.long
@pytest.mark.every_commit
@JIT
def test_a_record_that_fails_an_assertion_counts_as_zero(monkeypatch, jit):
    def model(x):
        w, v = weights()
        with pyro.plate("data", len(x)):
            assert x.max() < 1e6
            pyro.sample("x", dist.Normal(w + v, 1.0), obs=x)

    (x,) = make(model)().data
    svi = new_resting(model, execution=Execution(jit=jit))
    svi.step(x)
    x.numpy()[5] = 1e7  # after the checks, which torch does not notice
    gradient, everyone = gradients(monkeypatch, svi, x), list(range(len(x)))
    with_it, without = gradient(everyone), gradient([i for i in everyone if i != 5])
    torch.testing.assert_close(with_it, without)


def catches(x):
    """If records run at once, one of them raises for all."""
    w, v = weights()
    with pyro.plate("data", len(x)):
        try:
            mean = w + v + 0 * torch.linalg.cholesky(x.reshape(-1, 1, 1)).sum()
        except RuntimeError:
            mean = w - v
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


@pytest.mark.slow
@pytest.mark.every_commit
@JIT
def test_an_error_that_the_model_catches_is_one_records(monkeypatch, jit):
    x = make(catches)().data[0].abs()
    svi = new_resting(catches, clip=0.5, execution=Execution(jit=jit))
    for _ in range(4):  # the first ones are checked
        svi.step(x)
    x.numpy()[5] = -1.0  # after the checks, which torch does not notice
    require_bound(gradients(monkeypatch, svi, x), len(x), [4, 5])


@pytest.mark.long
def test_an_error_that_the_model_catches_on_some_record_is_refused():
    x = make(catches)().data[0].abs()
    x[5] = -1.0
    with pytest.raises(ModelError, match="catches an error of torch"):
        new_resting(catches).step(x)


@pytest.mark.long
def test_graphs_have_no_error_that_the_model_catches():
    """The branch of the placeholder, which is all ones, does not decide for records."""

    def model(x):
        w, v = weights()
        with pyro.plate("data", len(x)):
            try:
                mean = w + 0 * torch.linalg.cholesky(-x.reshape(-1, 1, 1)).sum()
            except RuntimeError:
                mean = 2 * v
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    svi = new_resting(model, execution=Execution(jit="trace"))
    with pytest.warns(UserWarning, match="catches an error of torch"):
        svi.step(make(model)().data[0].abs())


@pytest.mark.long
@pytest.mark.filterwarnings(APART)
def test_all_at_once_is_the_loop():
    """The batch has records of all branches."""
    svi = new_resting(four_ways)
    (x,) = make(four_ways)().data
    term, particle = looked_at(svi, x)
    assert term.vectorizes and term.answers == (True, False, False)
    batch = Batch(torch.arange(len(x)), [x])
    found = term.vectorized(particle, batch)
    require_same_gradients(found, term.looped(particle, batch))
    assert math.isfinite(found.losses.sum())


@pytest.mark.slow
@pytest.mark.filterwarnings(APART)
@pytest.mark.filterwarnings("ignore:jit='trace' does not apply to the guide")
@JIT
def test_a_branch_by_a_local_draw(monkeypatch, jit):
    """Half of all records take it: one that runs separately keeps its earlier draws."""

    def model(x):
        w, v = weights()
        with pyro.plate("data", len(x)):
            if (torch.randn(len(x)) > 0).all():
                chosen = w + 0 * torch.randn(2).sum()
            else:
                chosen = v + 0 * torch.randn(3)[2:]
            pyro.sample("x", dist.Normal(chosen, 1.0), obs=x)

    x, seen = torch.full((300,), 1000.0), Releases(monkeypatch)
    svi = new_resting(model, clip=1e6, sampling=FullBatch(), execution=Execution(jit=jit))
    for _ in range(4):  # the first ones are checked
        svi.step(x)
        assert isinstance(svi._kept.prepared.step, TracedStep) == (jit == "trace")
        of_w, of_v = (total.item() / -1000.0 for total in seen.sums[-1][0])
        assert abs(of_w + of_v - 300) < 3 and abs(of_w - of_v) < 6.5 * math.sqrt(300)


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.filterwarnings(APART)
@JIT
def test_draws_after_a_branch_are_new(monkeypatch, jit):
    """A run that can be repeated has one source for those before and after."""

    def model(x):
        w, v = weights()
        with pyro.plate("data", len(x)):
            mean = w + v + 0 * torch.randn(1)
            if x.min() < 0:
                mean = mean + torch.randn(1)
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    seen, single = [], RecordTerm.single

    def kept(term, particle, record, draws, **options):
        found = single(term, particle, record, draws, **options)
        seen.extend(each.item() for each in draws.sampled)
        return found

    x = torch.linspace(1.0, -10.0, 12)
    svi = new_resting(
        model, noise=Noise(1.0, source=0), sampling=FullBatch(), execution=Execution(4, jit=jit)
    )
    monkeypatch.setattr(RecordTerm, "single", kept)
    for _ in range(4):  # the first ones are checked
        seen.clear()
        svi.step(x)
    assert len(seen) == 2 * (x < 0).sum() and len(set(seen)) == len(seen)
