"""Sites by one product of a batch's rows, against one record after the other."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import glm
from pyro.infer.autoguide import AutoMultivariateNormal
from sums import exact_sums

from pyro_dp import DPSEP, Execution, Factors, PaperDPSEP, PrivacyAccountant
from pyro_dp.infer.ep import linear_sites
from pyro_dp.infer.ep.element_sites import by_quadrature, element_sites
from pyro_dp.infer.ep.linear_design import _looked_up
from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.infer.ep.site_sum import SiteSum
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.fixed_point import FixedPointSum

SIZE, DIM = 60, 3


def weights(shape=(DIM,)):
    prior = dist.Normal(0.0, 1.0).expand(list(shape)).to_event(len(shape))
    return pyro.sample("w", prior)


def logistic(x, y):
    w, b = weights(), pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w + b), obs=y[i])


probabilities = glm(lambda mean: dist.Bernoulli(torch.sigmoid(mean)))


def with_offset(x, y, z):
    w = weights()
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w + z[i].square()), obs=y[i])


def clamped(x, y):
    """Linear where public rows are, and not for all records."""
    w = weights()
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i].clamp(-3.0, 3.0) @ w), obs=y[i])


poisson = glm(lambda mean: dist.Poisson((0.3 * mean).exp()))
gaussian = glm(lambda mean: dist.Normal(mean, 0.7))
student = glm(lambda mean: dist.StudentT(4.0, mean, 0.7))


def overdispersed(x, y):
    w, total = weights(), pyro.sample("total", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.NegativeBinomial(total, logits=x[i] @ w - total.log()), obs=y[i])


def categorical(x, y):
    w = weights((2, DIM))
    with pyro.plate("data", len(x)) as i:
        logits = torch.cat([(x[i].unsqueeze(-2) * w).sum(-1), torch.zeros(len(i), 1)], dim=-1)
        pyro.sample("y", dist.Categorical(logits=logits), obs=y[i])


def in_groups(x, y, z):
    """Each group, an integer, has an intercept of its own."""
    w, u = weights(), pyro.sample("u", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w + u[z[i]]), obs=y[i])


def masked(x, y, z):
    w = weights()
    with pyro.plate("data", len(x)) as i:
        likelihood = dist.Bernoulli(logits=x[i] @ w).mask(z[i] > 0)
        pyro.sample("y", likelihood, obs=y[i])


def two_elements(x, y, z):
    """A record of two observations; one has a weight."""
    w = weights()
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])
        with pyro.poutine.scale(scale=0.5):
            pyro.sample("z", dist.Normal(x[i, 0] * w[1], 2.0), obs=z[i])


MODELS = {"probabilities": probabilities, "poisson": poisson, "gaussian": gaussian} | {
    each.__name__: each
    for each in (logistic, with_offset, clamped, categorical, in_groups, masked, two_elements)
}


def data(model, size=SIZE):
    """Data with outliers; one is broken."""
    x = torch.randn(size, DIM)
    x[1], x[2], x[3], x[4, 1] = 30 * x[1], 1e3 * x[2], 1e-6 * x[3], math.nan
    y = torch.bernoulli(torch.full((size,), 0.4))
    if model is poisson:
        x[1:3] /= 1e3
        y = torch.poisson(torch.ones(size))
    if model is categorical:
        y = torch.randint(0, 3, (size,))
    if model is in_groups:
        return x, y, torch.arange(size) % 4
    if model in (with_offset, masked, two_elements):
        return x, y, torch.randn(size)
    return x, y


def sites_of(model, tensors, *, scale=0.1, **options):
    """Prepared sites, and where DPSEP would make them in a look."""
    pyro.clear_param_store()
    finite = [torch.nan_to_num(x) if x.is_floating_point() else x for x in tensors]
    kind, steps = (PaperDPSEP, {"num_steps": 9}) if "clip" in options else (DPSEP, {})
    guide, own = AutoMultivariateNormal(model, init_scale=scale), steps | options
    sep = kind(model, guide, accountant=PrivacyAccountant(), noise=1.0, **own)
    prepared = sep._look_at(tuple(finite), {})
    for column, given in zip(prepared.records.columns, tensors, strict=True):
        column.tensor.copy_(given)  # a NaN that no check saw
    return sep, prepared.sites


def sums(sites, at, blocks, indices, fast=True, kind=ClippedSum):
    clipped = kind(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_sites, "_OUTCOMES", 0)  # the slow path does not centre residuals
        if not fast:
            patch.setattr(SiteSum, "_linear", lambda self, public: None)
        sites.add(clipped, at, indices, np.random.default_rng(0))
    return exact_sums(clipped)


def look_of(sep, bound=2.0):
    """Cavity and frame of a look with this bound, and its blocks."""
    known = sep._fit.approximation
    dim = len(known.problem.places)
    root = torch.randn(dim, dim)
    frame = Frame(root @ root.T + torch.eye(dim), 0.7, bound, 0.2 * bound)
    return (known.at(SIZE)[0], frame), replace(known, frame=frame).blocks


def both(model, tensors, *, bounds=(2.0,), scale=0.1, options=None, kind=ClippedSum, indices=None):
    """All sums by the fast path, and by the slow one."""
    sep, sites = sites_of(model, tensors, scale=scale, **(options or {}))
    assert sites._moments.design is not None
    known, found = sep._fit.approximation, ([], [])
    indices = torch.arange(len(tensors[0])) if indices is None else indices
    for bound in bounds:
        at, blocks = (known.at(SIZE), known.blocks) if options else look_of(sep, bound)
        for each, fast in zip(found, (True, False), strict=True):
            each += sums(sites, at, blocks, indices, fast, kind)
    return found


def close(found, tolerance=1e-9):
    for one, other in zip(*found, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * scale)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_fast_sum_is_the_slow_one(model):
    """All blocks agree, the histogram included, with outliers and a broken record."""
    close(both(model, data(model), bounds=(0.05, 2.0)))


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    "options",
    [
        *({"scale": scale} for scale in (1e-4, 0.3, 2.0)),  # cavities of any width
        {"indices": torch.tensor([0, 2, 3, 4, 7, 50])},
    ],
)
def test_other_cavities_and_batches(options):
    close(both(logistic, data(logistic), **options))


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("model", [logistic, categorical])
def test_with_a_bound_of_ones_own(model, centred):
    options = {"clip": 1.5, "factors": Factors(centred=centred)}
    close(both(model, data(model), options=options))


@pytest.mark.long
def test_in_integers():
    close(both(logistic, data(logistic), kind=FixedPointSum), tolerance=1e-6)


@pytest.mark.every_commit
@pytest.mark.long
def test_one_record_adds_the_bound_at_most():
    """Both relations follow: zeroed out it is C, replaced 2 C."""
    sep, sites = sites_of(logistic, data(logistic))
    at, blocks = look_of(sep, 0.5)
    everyone = torch.arange(SIZE)
    whole = sums(sites, at, blocks, everyone)
    largest = 0.0
    for n in range(12):  # the others have no outliers, either
        part = whole[0] - sums(sites, at, blocks, everyone[everyone != n])[0]
        alone = sums(sites, at, blocks, torch.tensor([n]))
        torch.testing.assert_close(part, alone[0], rtol=0.0, atol=1e-12)  # no record moves others
        assert alone[0].norm() <= 0.5 * (1 + 1e-12)
        assert alone[1].sum() == pytest.approx(0 if n == 4 else 1)
        largest = max(largest, part.norm().item())
    assert largest > 0.49


def saturated(x, y):
    """Linear on public rows, and constant where a predictor is large."""
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=(x @ w).clamp(-3.0, 3.0)), obs=y)


@pytest.mark.long
@pytest.mark.every_commit
def test_no_record_decides_how_another_one_is_taken():
    """A record with a curved predictor does not change how the others are taken."""
    x, y = torch.randn(SIZE, DIM), torch.ones(SIZE)
    x[0] *= 1e3
    runs = []
    for indices in (torch.arange(SIZE), torch.arange(1, SIZE)):
        torch.manual_seed(0)
        sep, sites = sites_of(saturated, (x, y))
        ((cavity, own), blocks), found = look_of(sep, 0.5), []
        for shift in (0.0, 1.5):  # in the second step many predictors are beyond 3
            moved = replace(cavity, eta=cavity.eta + shift * cavity.precision.sum(-1))
            found.append(torch.cat(sums(sites, (moved, own), blocks, indices)[:1]))
        runs.append(found)
    for one, other in zip(*runs, strict=True):
        assert (one - other).norm() <= 0.5 * (1 + 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("model, kept", [(logistic, True), (saturated, False)])
def test_records_are_known_to_be_straight_where_the_code_is_affine(model, kept):
    sep, sites = sites_of(model, data(model))
    sums(sites, *look_of(sep, 0.5), torch.arange(SIZE))
    assert sites._moments.design.affine is kept
    assert sites._moments.design.straight.any() == kept


def by_both(*given):
    """The parts of sites as they are made, and by quadrature."""
    parts = (function(*given) for function in (element_sites, by_quadrature))
    return zip(*parts, strict=True)


@pytest.mark.long
@pytest.mark.parametrize("model", [logistic, gaussian])
def test_elements_without_a_search_are_those_of_quadrature(model):
    """They agree for usual outcomes, and for surprising ones."""
    _, sites = sites_of(model, data(gaussian))
    (family,) = sites._moments.families
    mean = torch.linspace(-14, 14, 57).reshape(57, 1, 1)
    value, weight = (torch.arange(57) % 2).double().unsqueeze(1), torch.ones(57, 1)
    rest = [value, weight] if model is logistic else [torch.full((57, 1), 0.7), value, weight]
    for variance in (0.0, 1e-8, 0.01, 0.24, 0.26, 9.0):
        spread = torch.full((57, 1, 1, 1), variance)
        for one, other in by_both(family, mean, spread, rest):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("model", [poisson, overdispersed, student])
def test_few_nodes_where_they_are_enough(model):
    x, y = data(gaussian)
    _, sites = sites_of(model, (x, y.round().abs()))
    (family,) = sites._moments.families
    mean = torch.linspace(-1, 1, 57 * family.rank).reshape(57, 1, family.rank)
    constants = [torch.full((57, 1), {"df": 4.0}.get(name, 0.7)) for name in family.constants]
    rest = [*constants, torch.arange(57.0).unsqueeze(1) % 9, torch.ones(57, 1)]
    for variance in (0.0, 1e-8, 1e-4, 1e-3, 0.01, 1.0):
        spread = variance * (torch.eye(family.rank) + 0.4).expand(57, 1, -1, -1)
        for one, other in by_both(family, mean, spread, rest):
            size = other.abs().flatten(1).amax(dim=1)
            assert ((one - other).abs().flatten(1).amax(dim=1) <= 1e-6 * (1 + size)).all()


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_huge_count_adds_the_same_alone_and_among_others():
    """The largest counts have no mode that is found, and their moments are rounding errors."""
    x, y = torch.randn(SIZE + 1, DIM), torch.poisson(torch.ones(SIZE + 1))
    sep, sites = sites_of(overdispersed, (x, y))
    at, blocks = look_of(sep, 0.5)
    everyone, one = torch.arange(SIZE + 1), torch.tensor([7])
    for count, fast in itertools.product((1e4, 3e7, 1e8, 3e9), (True, False)):
        sites._term.records.columns[1].tensor[7] = count
        whole, others, alone = (
            torch.cat(sums(sites, at, blocks, chosen, fast)[:1])
            for chosen in (everyone, everyone[everyone != 7], one)
        )
        assert (whole - others - alone).norm() <= 1e-8
        assert bool(alone.any()) is (count < 1e7)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("fast", [True, False])
def test_a_count_moves_no_other_where_all_are_huge(fast):
    """Last bits depend on a record's position, and would decide the site of each."""
    x, y = torch.randn(SIZE, DIM), torch.poisson(torch.ones(SIZE))
    sep, sites = sites_of(glm(lambda mean: dist.Poisson(mean.exp())), (x, y))
    sites._term.records.columns[1].tensor.copy_(1e37 * (1 + torch.rand(SIZE)))
    at, blocks = look_of(sep)
    whole, others, alone = (
        sums(sites, at, blocks, chosen, fast)
        for chosen in (torch.arange(SIZE), torch.arange(1, SIZE), torch.tensor([0]))
    )
    for one, *parts in zip(whole, others, alone, strict=True):
        torch.testing.assert_close(one, sum(parts), rtol=0.0, atol=1e-8)


@pytest.mark.long
def test_predictors_that_are_not_linear_have_no_design():
    def squares(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", dist.Bernoulli(logits=x[i].square() @ w), obs=y[i])

    def curved(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", dist.Normal((x[i] @ w).square(), 1.0), obs=y[i])

    for model in (squares, curved):
        assert sites_of(model, data(logistic))[1]._moments.design is None


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("group", [4, -9])
def test_a_group_that_does_not_exist_breaks_its_own_record_alone(group):
    x, y, z = data(in_groups)
    sep, sites = sites_of(in_groups, (x, y, z))
    at, blocks = look_of(sep)
    expected = sums(sites, at, blocks, torch.cat([torch.arange(7), torch.arange(8, SIZE)]))
    z[7] = group
    sites._term.records.columns[2].tensor.copy_(z)
    close([sums(sites, at, blocks, torch.arange(SIZE)), expected])


@pytest.mark.long
def test_what_a_model_refers_to_may_change():
    """The graph of the design was traced with the old value."""
    sharpness = [1.0]

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", dist.Bernoulli(logits=sharpness[0] * (x[i] @ w)), obs=y[i])

    sep, sites = sites_of(model, data(logistic))
    at, blocks = look_of(sep)
    before = sums(sites, at, blocks, torch.arange(SIZE))[0]
    sharpness[0] = 2.0
    after = sums(sites, at, blocks, torch.arange(SIZE))[0]
    assert (after - before).norm() > 1e-3
    close([[after], sums(sites, at, blocks, torch.arange(SIZE), fast=False)[:1]])


@pytest.mark.long
def test_a_model_that_writes_to_its_row_leaves_the_data_alone():
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as i:
            row = x[i]
            row *= 2.0
            pyro.sample("y", dist.Bernoulli(logits=row @ w), obs=y[i])

    x, y = data(logistic)
    x[4] = 0.0
    kept = x.clone()
    sep, sites = sites_of(model, (x, y))
    sums(sites, *look_of(sep), torch.arange(SIZE))
    assert torch.equal(x, kept)


@pytest.mark.long
def test_threads_change_nothing(monkeypatch):
    sep, sites = sites_of(clamped, data(clamped), execution=Execution(7))
    at, blocks = look_of(sep)
    one = sums(sites, at, blocks, torch.arange(SIZE))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = sums(sites, at, blocks, torch.arange(SIZE))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_an_index_out_of_range_has_no_row():
    for table in (torch.ones(3, 2), torch.ones(3, 2, 4)):
        found = _looked_up(table, torch.tensor([0, 2, 3, -1]))
        assert found[:2].eq(1.0).all() and found[2:].isnan().all()
