"""Parameters of single records: what the privacy wall lets through, and how rows learn."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import through_a_file
from problems import (
    Fixture,
    Problem,
    fit_paper_dpsvi,
    fit_svi,
    handwritten_guide,
    new_paper_dpsvi,
    regression_data,
    start,
    values,
)
from pyro.distributions import constraints
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.nn import PyroModule, PyroParam
from record_draws import by_index
from releases import batches, take
from sums import exact_sums
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import pyro_dp.mechanism.sampling
from pyro_dp import (
    DPSEP,
    AdaptiveClip,
    Clip,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    FullBatch,
    ModelError,
    Noise,
    PoissonSampling,
    PrivacyAccountant,
    RowAdam,
)
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.records.record_term import Batch, RecordTerm

SETTINGS = {"noise": Noise(0, source=0), "execution": Execution(jit="none")}
SIZE = 30
BATCH = [1, 4, 8, 20]


def effects(x, y):
    """Random effects: an intercept per record."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=(x[idx] * w).sum(-1) + effect), obs=y[idx])


def whole_effects(x, y):
    """The same, on whole tensors."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=(x * w).sum(-1) + effect), obs=y)


def unindexed(x, y):
    handwritten_guide(x, y)
    loc = pyro.param("own_loc", lambda: torch.zeros(len(x)))
    scale = pyro.param("own_scale", lambda: torch.ones(len(x)), constraint=constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("effect", dist.Normal(loc, scale))


def indexed(x, y):
    handwritten_guide(x, y)
    loc = pyro.param("own_loc", lambda: torch.zeros(len(x)))
    scale = pyro.param("own_scale", lambda: torch.ones(len(x)), constraint=constraints.positive)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("effect", dist.Normal(loc[idx], scale[idx]))


def in_plate(x, y):
    """Pyro takes the plate's part of such parameters itself."""
    handwritten_guide(x, y)
    start = torch.ones(len(x))
    with pyro.plate("data", len(x)):
        loc = pyro.param("own_loc", lambda: 0.1 * start, event_dim=0)
        scale = pyro.param("own_scale", start, constraint=constraints.positive, event_dim=0)
        pyro.sample("effect", dist.Normal(loc, scale))


class Module(PyroModule):
    """``PyroParam``, ``nn.Parameter`` and ``nn.Embedding``."""

    def __init__(self):
        super().__init__()
        self.own_loc = PyroParam(torch.zeros(SIZE))
        self.own_scale = PyroParam(torch.ones(SIZE), constraint=constraints.positive)
        self.shift = nn.Parameter(torch.zeros(SIZE, 1))
        self.table = PyroModule[nn.Embedding](SIZE, 2)
        nn.init.zeros_(self.table.weight)

    def forward(self, x, y):
        handwritten_guide(x, y)
        with pyro.plate("data", len(x)) as idx:
            loc = self.own_loc[idx] + self.shift[idx, 0] + self.table(idx).sum(-1)
            pyro.sample("effect", dist.Normal(loc, self.own_scale.index_select(0, idx)))


def point(x, y):
    """Point estimates: nothing is drawn."""
    pyro.sample("w", dist.Delta(pyro.param("w_at", torch.ones(x.shape[1]))).to_event(1))
    at = pyro.param("own_at", lambda: torch.linspace(-1, 1, len(x)))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("effect", dist.Delta(at[idx]))


# Makers of a guide, and the names of its local parameters.
GUIDES = {
    "indexed": (lambda: indexed, {"own_loc", "own_scale"}),
    "in plate": (lambda: in_plate, {"own_loc", "own_scale"}),
    "AutoNormal": (
        lambda: AutoNormal(effects),
        {"AutoNormal.locs.effect", "AutoNormal.scales.effect"},
    ),
    "AutoDelta": (lambda: AutoDelta(effects), {"AutoDelta.effect"}),
    "module": (Module, {"own_loc", "own_scale", "shift", "table.weight"}),
    "point": (lambda: point, {"own_at"}),
    "unindexed": (lambda: unindexed, {"own_loc", "own_scale"}),
    "indexed, of whole tensors": (lambda: indexed, {"own_loc", "own_scale"}),
    "AutoNormal, of whole tensors": (
        lambda: AutoNormal(whole_effects),
        {"AutoNormal.locs.effect", "AutoNormal.scales.effect"},
    ),
}
WHOLE = {name for name in GUIDES if name == "unindexed" or "whole" in name}


def model_of(name):
    return whole_effects if name in WHOLE else effects


@pytest.fixture(params=["none", pytest.param("trace", marks=pytest.mark.slow)], autouse=True)
def _jit(request, monkeypatch):
    """Run all tests with Pyro's code and with graphs."""
    monkeypatch.setitem(SETTINGS, "execution", Execution(jit=request.param))


def with_rows(*settings):
    return pyro.optim.Adam({"lr": 0.01}), RowAdam(*settings)


def new(monkeypatch, guide=indexed, model=effects, batch=None, **options):
    """A DPSVI whose releases are kept; on a fixed batch of records, if there is one."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    settings = SETTINGS | dict(optim=with_rows(0.1), sampling=0.5)
    fixture = Fixture(monkeypatch, model, guide, **settings | options)
    if batch is not None:
        take(monkeypatch, batch)
    return fixture


def leaves(svi):
    return svi._kept.prepared.term.local.leaves


def rows(svi):
    return {name: leaf.detach().clone() for name, leaf in leaves(svi).items()}


# Which parameters are local


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", GUIDES)
def test_rows_are_found_and_no_part_of_a_release(monkeypatch, name):
    make, expected = GUIDES[name]
    for privatize in ("latents", "parameters"):
        own = dict(sampling=FullBatch(), clip=Clip(0.5, of=privatize))
        fixture = new(monkeypatch, make(), model_of(name), **own)
        fixture.svi.step(*regression_data())
        prepared = fixture.svi._kept.prepared
        assert leaves(fixture.svi).keys() == expected and prepared.term.vectorizes
        assert not expected & prepared.parameters.keys()
        globals_ = sum(leaf.numel() for leaf in prepared.parameters.values())
        assert fixture.released[0][0].numel() == (3 if privatize == "latents" else globals_)


@pytest.mark.slow
def test_nested_plates_and_other_dimensions(monkeypatch):
    """The private dimension is not always the first; constraints of events change shapes."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), dim=-2) as idx:
            pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
            with pyro.plate("visits", x.shape[1], dim=-1):
                z = pyro.sample("z", dist.Normal(w, 1.0))
                pyro.sample("x", dist.Normal(z + pi[..., 0], 1.0), obs=x[idx])

    def guide(x):
        size, visits = x.shape
        pyro.sample("w", dist.Normal(pyro.param("w_loc", torch.tensor(0.0)), 1.0))
        with pyro.plate("data", size, dim=-2) as idx:
            at = pyro.param(
                "pi_at", torch.ones(size, 1, 3) / 3, constraint=constraints.simplex, event_dim=1
            )
            pyro.sample("pi", dist.Delta(at, event_dim=1))
            across = pyro.param("across", torch.zeros(visits, size))
            with pyro.plate("visits", visits, dim=-1):
                loc = pyro.param("z_loc", torch.zeros(size, visits), event_dim=0)
                pyro.sample("z", dist.Normal(loc + across[:, idx].T, 1.0))

    sampling = PoissonSampling(0.5, plate="data")
    svi, x = new(monkeypatch, guide, model, BATCH, sampling=sampling).svi, torch.randn(SIZE, 4)
    svi._look_at((x,), {})
    before = rows(svi)
    svi.step(x)
    dims = {"pi_at": 0, "across": 1, "z_loc": 0}
    assert svi._kept.prepared.term.local.dims == dims
    assert svi._kept.prepared.term.vectorizes
    for name, now in rows(svi).items():
        moved = (now != before[name]).movedim(dims[name], 0).reshape(SIZE, -1).any(1)
        assert moved.nonzero().flatten().tolist() == BATCH


@pytest.mark.long
def test_parameters_of_the_model(monkeypatch):
    """Effects without a prior."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        effect = pyro.param("effect", lambda: torch.zeros(len(x)))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + effect[idx]), obs=y[idx])

    fixture = new(monkeypatch, handwritten_guide, model, sampling=FullBatch())
    fixture.svi.step(*regression_data())
    assert leaves(fixture.svi).keys() == {"effect"}
    assert (leaves(fixture.svi)["effect"] != 0).all()


@pytest.mark.parametrize(
    "read",
    [
        lambda loc, idx: loc[idx - 1],
        lambda loc, idx: loc[idx] - loc.mean(0),
        lambda loc, idx: loc[idx] + loc[0],
    ],
)
def test_reading_rows_of_others_is_refused(monkeypatch, read):
    def guide(x, y):
        handwritten_guide(x, y)
        loc = pyro.param("own_loc", torch.zeros(len(x)))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("effect", dist.Normal(read(loc, idx), 1.0))

    fixture = new(monkeypatch, guide)
    with pytest.raises(ModelError, match="'own_loc'.*loc\\[idx\\]"):
        fixture.svi.step(*regression_data())
    assert fixture.svi.accountant.num_releases == 0


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda loc: loc.mean(), "'own_loc'"),
        (lambda loc: torch.sign(loc.detach().sum()), "'w' of the guide.*private row"),
    ],
)
def test_global_sites_that_read_rows_are_refused(monkeypatch, read, named):
    def guide(x, y):
        loc = pyro.param("own_loc", torch.zeros(len(x)))
        pyro.sample("w", dist.Normal(read(loc), 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("effect", dist.Normal(loc[idx], 1.0))

    with pytest.raises(ModelError, match=named):
        new(monkeypatch, guide).svi.step(*regression_data())


def test_initial_rows_from_the_data_are_refused(monkeypatch):
    def guide(x, y):
        handwritten_guide(x, y)
        loc = pyro.param("own_loc", lambda: y.clone())
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("effect", dist.Normal(loc[idx], 1.0))

    with pytest.raises(ModelError, match="initial value.*'own_loc'"):
        new(monkeypatch, guide).svi.step(*regression_data())


@pytest.mark.long
def test_expectation_propagation_has_no_place_for_them():
    with pytest.raises(ModelError):
        DPSEP(effects, point, accountant=PrivacyAccountant(), noise=1.0).step(*regression_data())


# The wall


def test_a_record_sees_its_own_row_only():
    """Every kind of read has only that row, by construction."""
    store = pyro.get_param_store()
    pyro.param("a", torch.arange(5.0))
    pyro.param("b", torch.arange(1.0, 6.0), constraint=constraints.positive)
    found = {name: store[name].unconstrained() for name in ("a", "b")}
    local = LocalParameters(5, found, {"a": 0, "b": 0}, {"b": constraints.positive})
    leaf, idx = found["a"], torch.tensor([3])
    with local.shown({"a": torch.tensor(7.0), "b": torch.tensor(0.5)}):
        a, b = pyro.param("a"), pyro.param("b")
        for read in (
            *(a[2], a[idx], a[idx - 1], a[:2], a[1:].flip(0), a[..., idx], a[a > 0], a[None]),
            *(a.mean(0), a.max(), a.sort().values, a.data, a.detach(), a.index_select(0, idx)),
            *(a.gather(0, idx), a.take(idx), torch.index_select(a, 0, idx), torch.stack([a, a])),
            *(leaf[2], leaf[idx - 1], leaf.data, leaf.mean(), torch.tensor(leaf.tolist())),
            *(store["a"], store["a"][1], torch.from_numpy(leaf.detach().numpy()), list(leaf)[1]),
            nn.functional.embedding(idx - 1, leaf[:, None]),
        ):
            assert (read == 7.0).all()
        for read in (b, b[idx - 1], b[4], b.mean(), store["b"], store["b"][1]):
            torch.testing.assert_close(read, torch.full_like(read, math.exp(0.5)))
    assert torch.equal(leaf.detach(), torch.arange(5.0))


HOSTILE = [1e6, -1e300, math.nan, math.inf]


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.one_in(12)
@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", GUIDES)
def test_sensitivity_to_local_state(monkeypatch, name, privatize):
    """In any state of record 4, its part of the sums is at most C, in every block.

    Without it in the batch, its state does not matter at all.
    """
    by_index(monkeypatch)
    clip, data = Clip(AdaptiveClip(initial=0.5), of=privatize, loss=2.0), regression_data()
    svi = new(monkeypatch, GUIDES[name][0](), model_of(name), clip=clip).svi
    svi._look_at(data, {})
    usual, draws = rows(svi), svi._kept.prepared.step.draw()

    def sums(batch, state=None):
        clipped = ClippedSum(svi._moves.policy.blocks(svi._kept.prepared.step.size(draws)))
        with torch.no_grad():
            for key, leaf in leaves(svi).items():
                leaf.copy_(usual[key])
                if state is not None:
                    leaf[4] = state
        public = torch.get_rng_state()
        svi._kept.prepared.step.add(
            clipped, draws, torch.tensor(batch), lambda: np.random.default_rng(0)
        )
        assert torch.equal(torch.get_rng_state(), public)
        return exact_sums(clipped)

    without, own = sums([1, 8, 20]), sums(BATCH)
    for state in HOSTILE:
        hostile = sums(BATCH, state)
        for bound, none, one, other in zip((0.5, 2.0, 0.5), without, own, hostile, strict=True):
            assert torch.linalg.vector_norm(one - none) > 0
            assert torch.linalg.vector_norm(other - none) <= bound * (1 + 1e-12)
            assert torch.linalg.vector_norm(other - one) <= 2 * bound * (1 + 1e-12)
        if not math.isfinite(state):
            assert all(map(torch.equal, hostile, without))
        assert all(map(torch.equal, sums([1, 8, 20], state), without))


@pytest.mark.every_commit
@pytest.mark.slow
def test_public_draws_do_not_depend_on_local_state(monkeypatch):
    """Neither the draws, nor the loss outside, nor how much of the public stream they take."""
    data, seen = regression_data(), []
    for state in (0.0, *HOSTILE):
        svi = new(monkeypatch).svi
        svi._look_at(data, {})
        with torch.no_grad():
            for leaf in leaves(svi).values():
                leaf.fill_(state)
        (particle,) = svi._kept.prepared.step.eager.draw()
        seen.append((particle.latents["w"].detach(), particle.loss.detach(), torch.get_rng_state()))
    for other in seen[1:]:
        assert all(map(torch.equal, other, seen[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexed", "AutoNormal"])
def test_neighbouring_data_over_many_steps(monkeypatch, name):
    """With the same releases: other records' rows are the same, and sums differ by one record."""
    by_index(monkeypatch)
    x, y = regression_data()
    replaced = x.clone()
    replaced[4] = 1e6
    batches = [[1, 4, 8], [4], [2, 4, 20], [1, 2, 8], [4, 20]]
    runs = []
    for data, skipped in (((x, y), False), ((replaced, y), False), ((x, y), True)):
        fixture = new(monkeypatch, GUIDES[name][0](), model_of(name))
        fixture.svi.optim = pyro.optim.SGD({"lr": 0.0})  # as if the releases were the same
        for batch in batches:
            take(monkeypatch, [i for i in batch if not (skipped and i == 4)])
            fixture.svi.step(*data)
        runs.append((fixture.sums, rows(fixture.svi)))
    (sums, own), (other_sums, other), (fewer_sums, fewer) = runs
    for one, two, three in zip(sums, other_sums, fewer_sums, strict=True):
        assert torch.linalg.vector_norm(one[0] - three[0]) <= 0.5 * (1 + 1e-12)
        assert torch.linalg.vector_norm(two[0] - three[0]) <= 0.5 * (1 + 1e-12)
    others = [i for i in range(SIZE) if i != 4]
    for leaf in own:
        assert torch.equal(own[leaf][others], other[leaf][others])
        assert torch.equal(own[leaf][others], fewer[leaf][others])
        assert not torch.equal(own[leaf][4], other[leaf][4])


@pytest.mark.slow
@pytest.mark.every_commit
def test_state_of_others_never_reaches_a_record(monkeypatch):
    """Gradients of records 1 and 8 while all others hold NaN."""
    data = regression_data()
    gradients = []
    for hostile in (False, True):
        fixture = new(monkeypatch, sampling=FullBatch())
        fixture.svi._look_at(data, {})
        svi = fixture.svi
        prepared, indices = svi._kept.prepared, torch.tensor([1, 8])
        with torch.no_grad():
            for leaf in leaves(svi).values():
                if hostile:
                    leaf[[i for i in range(SIZE) if i not in (1, 8)]] = math.nan
        particle = prepared.step.eager.draw()[0]
        assert math.isfinite(particle.loss.item())
        local = prepared.term.local.rows(indices)
        batch = Batch(indices, prepared.records.rows(indices), local_rows=local)
        torch.manual_seed(0)
        for way in (prepared.term.vectorized, prepared.term.looped):
            found = way(particle, batch)
            batch = replace(batch, values=batch.values or found.sampled)
            gradients.append({**found.latents, **found.local, "loss": found.losses})
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            torch.testing.assert_close(other[name], value)
            assert value.isfinite().all()


@pytest.mark.every_commit
@pytest.mark.slow
def test_what_is_kept_for_the_parameters_comes_from_constants(monkeypatch):
    """A parameter that is created later, on new arguments, does not start at private values."""

    def guide(x, y, more):
        indexed(x, y)
        if more:
            pyro.param("late", lambda: pyro.param("own_loc").detach().mean())

    def model(x, y, more):
        effects(x, y)

    starts = []
    for row in (0.0, 1e3):
        svi, data = new(monkeypatch, guide, model, sampling=FullBatch()).svi, regression_data()
        svi.step(*data, False)
        with torch.no_grad():
            leaves(svi)["own_loc"].fill_(row)
        svi._look_at((*data, True), {})
        starts.append(pyro.param("late").item())
    assert starts[0] == starts[1]


@pytest.mark.long
@pytest.mark.every_commit
def test_no_index_is_left_behind(monkeypatch):
    """Plates note on parameters which rows they took; that would tell who was sampled."""
    svi = new(monkeypatch, in_plate, batch=BATCH).svi
    svi.step(*regression_data())
    for leaf in leaves(svi).values():
        assert not hasattr(leaf, "_pyro_subsample")
        assert leaf.grad is None


# How rows learn


class _FixedDraws(TorchFunctionMode):
    """One normal for each record, always the same; other draws as usual."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.normal_ and args[0].shape == (SIZE,):
            return args[0].copy_(_NORMALS)
        return func(*args, **(kwargs or {}))


_NORMALS = torch.linspace(-2, 2, SIZE, dtype=torch.float64)


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", GUIDES)
def test_equals_svi(monkeypatch, name, privatize):
    """sigma=0, C=inf, all records: Pyro's own path under the same seed and the same local draws."""
    loss = Trace_ELBO if (privatize == "latents") == (len(name) % 2 == 0) else TraceMeanField_ELBO

    def make():
        return Problem(model_of(name), GUIDES[name][0](), regression_data(), loss(), {})

    gradients = RecordTerm.gradients

    def fixed(self, particle, batch):
        values = [_NORMALS[batch.indices]] * self.samples
        return gradients(self, particle, replace(batch, values=values))

    monkeypatch.setattr(RecordTerm, "gradients", fixed)
    ours = fit_paper_dpsvi(make, steps=12, clip=Clip(math.inf, of=privatize))
    with _FixedDraws():
        theirs = fit_svi(make, steps=12)
    assert ours.keys() == theirs.keys() and GUIDES[name][1] <= ours.keys()
    start(make)
    before = values()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-8, atol=1e-9)
        assert (value != before[key]).any()


@pytest.mark.slow
def test_unsampled_rows_do_not_move(monkeypatch):
    fixture = new(monkeypatch, noise=Noise(1.0, source=0), sampling=0.2)
    svi, data = fixture.svi, regression_data()
    svi._look_at(data, {})
    sampled = batches(monkeypatch)
    counts = torch.zeros(SIZE, dtype=torch.long)
    for _ in range(20):
        before, state = rows(svi), svi._moves.rows.state_dict()
        svi.step(*data)
        moved = torch.zeros(SIZE, dtype=torch.bool)
        moved[sampled[-1]] = True
        counts += moved
        for name, now in rows(svi).items():
            assert torch.equal(now != before[name], moved)
        for name, own in svi._moves.rows.state_dict().items():
            assert torch.equal(own["steps"], counts)
            for key in ("mean", "square"):
                assert torch.equal(own[key][~moved], state[name][key][~moved])
    assert counts.min() < counts.max()


@pytest.mark.long
def test_a_row_moves_as_if_it_were_trained_alone(monkeypatch):
    """Against torch.optim.Adam on this row, in the steps in which its record was sampled."""
    x, y = regression_data()
    fixture = new(monkeypatch, point, optim=with_rows(0.3, (0.8, 0.9), 1e-3))
    svi, weights, sampled = fixture.svi, [], batches(monkeypatch)
    svi.optim = pyro.optim.SGD({"lr": 0.05})
    svi._look_at((x, y), {})
    begin = rows(svi)["own_at"]
    for _ in range(25):
        weights.append(pyro.param("w_at").detach().clone())
        svi.step(x, y)
    for i in (0, 7, 29):
        alone = begin[i].clone().requires_grad_()
        adam = torch.optim.Adam([alone], lr=0.3, betas=(0.8, 0.9), eps=1e-3)
        for w, batch in zip(weights, sampled, strict=True):
            if i in batch:
                adam.zero_grad()
                likelihood = dist.Bernoulli(logits=x[i] @ w + alone).log_prob(y[i])
                (-likelihood - dist.Normal(0.0, 1.0).log_prob(alone)).backward()
                adam.step()
        torch.testing.assert_close(rows(svi)["own_at"][i], alone.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_microbatches_change_nothing(monkeypatch):
    by_index(monkeypatch)
    runs, data = [], regression_data()
    for size in (None, 1, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            execution = replace(SETTINGS["execution"], microbatch_size=size)
            fixture = new(monkeypatch, sampling=FullBatch(), execution=execution)
            for _ in range(2):
                fixture.svi.step(*data)
        runs.append(rows(fixture.svi) | {"w": pyro.param("loc").detach().clone()})
    for other in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(other[name], value)


@pytest.mark.long
def test_particles_are_averaged(monkeypatch):
    """Without draws, K particles are one."""
    runs, data = [], regression_data()
    for particles in (1, 3):
        loss = Trace_ELBO(num_particles=particles)
        options = dict(loss=loss, sampling=FullBatch(), clip=math.inf)
        fixture = new(monkeypatch, point, **options)
        for _ in range(3):
            fixture.svi.step(*data)
        runs.append(rows(fixture.svi)["own_at"])
    torch.testing.assert_close(*runs)


def test_a_row_whose_gradient_is_not_finite_stays(monkeypatch):
    """A row that became NaN would stay NaN."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(w / x[idx], 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[idx])

    def guide(x):
        pyro.sample("w", dist.Normal(pyro.param("w_loc", torch.tensor(1.0)), 1.0))
        own = pyro.param("own", torch.zeros(len(x)))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(own[idx], 1.0))

    x = torch.randn(10)
    x[3] = 0.0
    svi = new(monkeypatch, guide, model, sampling=FullBatch()).svi
    for _ in range(3):
        svi.step(x)
    assert torch.equal(rows(svi)["own"] != 0, torch.arange(10) != 3)
    assert rows(svi)["own"].isfinite().all()


# What leaves the curator


@pytest.mark.long
def test_state_without_and_with_the_rows(monkeypatch):
    data = regression_data()
    svi = new(monkeypatch, noise=Noise(1.0, source=0)).svi
    for _ in range(3):
        svi.step(*data)
    public, private = svi.state_dict(), svi.state_dict(include_private_local_state=True)
    names = {"own_loc", "own_scale"}
    assert "private_local_state" not in public
    assert public["parameters"].keys() == private["parameters"].keys() == {"loc", "scale"}
    assert not names & (public["parameters"].keys() | public["optimizer"].keys())
    tensors = (x for x in pytree.tree_leaves(public) if isinstance(x, torch.Tensor))
    assert not any(tensor.shape[:1] == (SIZE,) for tensor in tensors)
    assert private["private_local_state"].keys() == names
    assert {k for k in private if k != "private_local_state"} == public.keys()


@pytest.mark.long
@pytest.mark.parametrize("private", [True, False])
def test_state_round_trip(monkeypatch, private):
    """A curator's state continues the rows; a public one starts them afresh."""
    data = regression_data()
    first = new(monkeypatch, sampling=FullBatch()).svi
    for _ in range(3):
        first.step(*data)
    state = through_a_file(first.state_dict(include_private_local_state=private))
    kept = rows(first)

    resumed = new(monkeypatch, sampling=FullBatch()).svi
    resumed.load_state_dict(state)
    if private:
        waiting = resumed.state_dict(include_private_local_state=True)["private_local_state"]
        assert torch.equal(waiting["own_loc"]["value"], kept["own_loc"])
    resumed._look_at(data, {})
    moments = resumed._moves.rows.state_dict()
    for name, value in rows(resumed).items():
        assert torch.equal(value, kept[name] if private else torch.zeros(SIZE))
        assert (moments[name]["steps"] == (3 if private else 0)).all()
    resumed.step(*data)
    back = first.state_dict(include_private_local_state=True)
    resumed.load_state_dict(back | {"accountant": resumed.accountant.state_dict()})
    assert torch.equal(rows(resumed)["own_scale"], kept["own_scale"])


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize(
    "damage",
    [
        None,
        {"own_loc": 3},
        {"own_loc": {"value": torch.zeros(SIZE)}},
        {"own_loc": dict.fromkeys(("value", "steps", "mean", "square"), 1.0)},
        {"own_loc": dict.fromkeys(("value", "steps", "mean", "square"), torch.zeros(3))},
    ],
)
def test_damaged_state(monkeypatch, damage):
    svi = new(monkeypatch).svi
    svi.step(*regression_data())
    before = rows(svi)
    with pytest.raises(ConfigurationError, match="private local state|own_loc"):
        svi.load_state_dict(svi.state_dict() | {"private_local_state": damage})
    assert all(torch.equal(value, before[name]) for name, value in rows(svi).items())


def test_the_ledger_says_what_is_not_covered(monkeypatch):
    fixture = new(monkeypatch)
    fixture.svi.step(*regression_data())
    accountant = fixture.svi.accountant
    for text in (repr(accountant), " ".join(accountant.state_dict()["notes"])):
        assert "'own_loc', 'own_scale'" in text and "Predictive" in text and "not cover" in text


@pytest.mark.long
def test_the_curator_can_use_the_guide(monkeypatch):
    """The parameter store holds the rows; Predictive draws for the training records."""
    data = regression_data()
    svi = new(monkeypatch, sampling=FullBatch()).svi
    for _ in range(5):
        svi.step(*data)
    assert (pyro.param("own_loc") != 0).all()
    draws = Predictive(effects, guide=indexed, num_samples=7)(*data)
    assert draws["effect"].shape == (7, SIZE)


def test_fixed_batches_are_refused(monkeypatch):
    accountant = PrivacyAccountant(neighboring="replace_one")
    fixture = new(monkeypatch, sampling=FixedSizeSampling(0.5), accountant=accountant)
    says = "FixedSizeSampling.*own_loc.*PoissonSampling or FullBatch"
    with pytest.raises(ConfigurationError, match=says):
        fixture.svi.step(*regression_data())
    assert accountant.num_releases == 0


def require_same_by_graphs(monkeypatch, make, model, data, **options):
    """Parameters and rows at the end of a run, by Pyro's code and by graphs."""
    ends = []
    for jit in ("none", "trace"):
        fixture = new(monkeypatch, make(), model, execution=Execution(jit=jit), **options)
        for _ in range(5):
            fixture.svi.step(*data)
        ends.append(values() | rows(fixture.svi))
    assert isinstance(fixture.svi._kept.prepared.step, TracedStep)
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-10)


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexed", "module", "AutoNormal, of whole tensors"])
@pytest.mark.parametrize("privatize", ["latents", "parameters"])
def test_graphs_give_the_same_rows(monkeypatch, name, privatize):
    """Globals agree, too, with noise, two particles and padded batches."""
    by_index(monkeypatch)
    options = dict(noise=Noise(1.0, source=0), clip=Clip(0.5, of=privatize, loss=2.0))
    options["loss"], make = Trace_ELBO(num_particles=2), GUIDES[name][0]
    require_same_by_graphs(monkeypatch, make, model_of(name), regression_data(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("source", [0, "system"])
def test_graphs_of_records_that_share_nothing(monkeypatch, source):
    """All parameters are rows: a release without coordinates, and the same rows."""

    def model(x):
        with pyro.plate("data", len(x)):
            rate = pyro.sample("rate", dist.Beta(1.0, 1.0))
            pyro.sample("x", dist.Binomial(10, rate), obs=x)

    def guide(x):
        a = pyro.param("a", torch.full((len(x),), 2.0), constraint=constraints.positive)
        with pyro.plate("data", len(x)):
            pyro.sample("rate", dist.Delta(a / (1 + a)))

    options = dict(noise=Noise(1.0, source=source), sampling=FullBatch())
    data = (torch.arange(1.0, SIZE + 1) % 10,)
    require_same_by_graphs(monkeypatch, lambda: guide, model, data, **options)


@pytest.mark.every_commit
@pytest.mark.slow
def test_a_graph_holds_no_rows(monkeypatch):
    """It is traced on constants: other rows make other contributions, by the same graph."""
    by_index(monkeypatch)
    fixture = new(monkeypatch, sampling=FullBatch(), execution=Execution(jit="trace"))
    fixture.svi.step(*regression_data())
    step, sums = fixture.svi._kept.prepared.step, []
    step._unchecked = 0
    for value in (0.0, 5.0):
        with torch.no_grad():
            for leaf in leaves(fixture.svi).values():
                leaf.fill_(value)
        pyro.set_rng_seed(1)
        draws = step.draw()
        for each in (step, step.eager):
            given = draws if each is step else step._particles(draws)
            clipped = ClippedSum(fixture.svi._moves.policy.blocks(step.size(draws)))
            each.add(clipped, given, torch.tensor(BATCH), lambda: np.random.default_rng(0))
            sums.append(exact_sums(clipped)[0])
    torch.testing.assert_close(sums[::2], sums[1::2])
    assert (sums[0] - sums[2]).abs().max() > 1e-3


@pytest.mark.slow
def test_a_cleared_store_starts_afresh(monkeypatch):
    svi, data = new(monkeypatch, sampling=FullBatch()).svi, regression_data()
    svi.step(*data)
    pyro.clear_param_store()
    svi.step(*data)
    assert (svi._moves.rows.state_dict()["own_loc"]["steps"] == 1).all()
    assert pyro.param("own_loc").unconstrained() is leaves(svi)["own_loc"]


@pytest.mark.long
def test_new_arguments_keep_the_moments(monkeypatch):
    svi, data = new(monkeypatch, sampling=FullBatch()).svi, regression_data()
    svi.step(*data)
    svi.step(*(each.clone() for each in data))
    assert (svi._moves.rows.state_dict()["own_loc"]["steps"] == 2).all()


@pytest.mark.long
@pytest.mark.every_commit
def test_nothing_moves_if_the_budget_is_spent(monkeypatch):
    own = dict(accountant=PrivacyAccountant(epsilon=1.0), noise=Noise(5.0, source=0))
    svi, data = new(monkeypatch, sampling=FullBatch(), **own).svi, regression_data()
    with pytest.raises(pyro_dp.PrivacyBudgetExceeded):
        while True:
            svi.step(*data)
            before = rows(svi)
    assert all(torch.equal(value, before[name]) for name, value in rows(svi).items())


# Once private, always private


def _flagged(x, with_rows=True):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("people", 12) as idx:
        z = pyro.sample("z", dist.Normal(mu, 1.0)) if with_rows else mu
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[idx])


class _Flagged:
    """A guide with rows, whose mean it may read outside the plate."""

    outside = False

    def __call__(self, x, with_rows=True):
        a = pyro.param("a", torch.tensor(0.0))
        loc = pyro.param("loc", torch.zeros(12))
        if self.outside:
            a = a + pyro.get_param_store()["loc"].detach().mean()
        pyro.sample("mu", dist.Normal(a, 1.0))
        with pyro.plate("people", 12) as idx:
            if with_rows:
                pyro.sample("z", dist.Normal(loc[idx], 1.0))


def _trained():
    """After some steps in which rows were learnt."""
    own = dict(optim=pyro.optim.Adam({"lr": 0.5}), execution=Execution(jit="none"))
    svi = new_paper_dpsvi(_flagged, _Flagged(), sampling=FullBatch(), **own)
    x = torch.randn(12)
    for _ in range(3):
        svi.step(x)
    assert svi.state_dict()["parameters"].keys() == {"a"}
    return svi, x


@pytest.mark.long
@pytest.mark.every_commit
def test_rows_that_are_not_used_any_more_stay_private():
    svi, x = _trained()
    svi.step(x, False)
    assert svi.state_dict()["parameters"].keys() == {"a"}
    assert svi.state_dict()["optimizer"].keys() == {"a"}


@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_that_are_used_elsewhere_later_are_refused(frozen):
    svi, x = _trained()
    svi.guide.outside = True
    pyro.get_param_store()["loc"].unconstrained().requires_grad_(not frozen)
    with pytest.raises(ModelError, match="'mu'.*private row per record"):
        svi.step(x.clone())


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_of_another_inference_are_private_too(frozen):
    _, x = _trained()
    leaf = pyro.get_param_store()["loc"].unconstrained().requires_grad_(not frozen)
    before = leaf.detach().clone()

    def guide(x, with_rows):
        start = pyro.get_param_store()["loc"].mean()
        pyro.sample("mu", dist.Normal(start + pyro.param("b", torch.tensor(0.0)), 1.0))

    own = dict(optim=with_rows(), sampling=FullBatch(), execution=Execution(jit="none"))
    second = new_paper_dpsvi(_flagged, guide, **own)
    with pytest.raises(ModelError, match="'mu'.*private row per record"):
        second.step(x, False)
    assert second.accountant.num_releases == 0
    assert torch.equal(leaf, before)
    with pytest.raises(ModelError, match="'loc'.*12 records, but there are 7"):
        new_paper_dpsvi(effects, point).step(*regression_data(size=7))


@pytest.mark.long
def test_frozen_rows_do_not_move():
    svi, x = _trained()
    leaf = pyro.get_param_store()["loc"].unconstrained().requires_grad_(False)
    before = leaf.clone()
    svi.step(x)
    assert torch.equal(leaf, before)


# Settings


def test_settings_of_rows_are_those_of_the_optimizer():
    cases = [
        ({"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.1}, RowAdam(0.3, (0.5, 0.6), 0.1)),
        (lambda name: {"lr": 0.2 if "own" in name else 0.1}, RowAdam(0.2)),
        ({}, RowAdam(0.001)),
    ]
    for settings, expected in cases:
        assert RowAdam.like(pyro.optim.Adam(settings), "own_loc") == expected


@pytest.mark.parametrize(
    "optim",
    [
        pyro.optim.SGD({"lr": 0.1}),
        pyro.optim.ClippedAdam({"lr": 0.1}),
        pyro.optim.Adam({"lr": 0.1, "weight_decay": 0.1}),
        pyro.optim.Adam(lambda module, name: {"lr": 0.1}),
    ],
)
def test_other_optimizers_need_settings(optim):
    svi = new_paper_dpsvi(effects, indexed, optim=optim)
    with pytest.raises(ConfigurationError, match="optim.*RowAdam"):
        svi.step(*regression_data())
    assert svi.accountant.num_releases == 0


def test_bad_settings():
    bad = {"lr": [0.0, math.nan], "eps": [0.0], "betas": [(0.9, 1.0), (-0.1, 0.9), 0.9]}
    for name, given in bad.items():
        for value in given:
            with pytest.raises(ConfigurationError, match=f"RowAdam.{name}"):
                RowAdam(**{name: value})


def test_there_is_one_optimizer_of_each_kind(monkeypatch):
    with pytest.raises(ConfigurationError, match="optim must be"):
        new(monkeypatch, optim=(pyro.optim.Adam({}), pyro.optim.Adam({})))
