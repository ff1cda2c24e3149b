"""Stein's sites by closed forms, against derivatives of one record after the other."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import transforms
from pyro.infer.autoguide import AutoMultivariateNormal
from torch.nn.functional import pad

from pyro_dp import DPSEP, Noise, PrivacyAccountant
from pyro_dp.infer.ep.few_predictors import ALIKE, MIXED, OTHER
from pyro_dp.infer.ep.stein_sites import SteinSites

SIZE, DIM = 40, 2
pytestmark = pytest.mark.long  # each prepares a DPSEP
NODES = torch.tensor([-0.8, 0.1, 0.7])


def weights(name="w", shape=(DIM,)):
    return pyro.sample(name, dist.Normal(0.0, 1.0).expand(list(shape)).to_event(len(shape)))


def positive(name):
    return pyro.sample(name, dist.LogNormal(-0.5, 0.5))


def ordered(x, y):
    w = weights()
    base = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    cuts = pyro.sample("c", dist.TransformedDistribution(base, transforms.OrderedTransform()))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.OrderedLogistic(x[i] @ w, cuts), obs=y[i])


def labels(x, y):
    """There are more logits than a quadrature takes."""
    w = weights(shape=(DIM, 3))
    with pyro.plate("data", len(x)) as i:
        pyro.sample("y", dist.Categorical(logits=pad(x[i] @ w, (0, 1))), obs=y[i])


def means(x, y):
    """Groups on a line, and how many are in each."""
    locs, shares, scale = weights("locs", (3,)), weights("shares"), positive("scale")
    with pyro.plate("data", len(y)) as i:
        groups = dist.Categorical(logits=pad(shares, (0, 1)).expand(len(i), 3))
        each = dist.Normal(locs.expand(len(i), 3), scale)
        pyro.sample("y", dist.MixtureSameFamily(groups, each), obs=y[i])


def missing(outcome, weight=None, clamp=math.inf):
    """A regression on a number that may be missing: it is a Gaussian at three nodes.

    A row has one version of itself for each node.
    """

    def model(x, y, known, z):
        w, v, scale, count = weights(), weights("v"), positive("scale"), positive("count")
        with pyro.plate("data", len(x)) as i:
            rows = x[i].clamp(-clamp, clamp)
            given = dist.Normal(rows[..., 0, :] @ v, scale)
            away = (NODES.to(x) - given.loc[..., None]) / scale
            pyro.sample("z", given.mask(known[i]), obs=z[i])
            each = outcome(rows @ w, count)
            mixture = dist.MixtureSameFamily(dist.Categorical(logits=-(away**2) / 2), each)
            with poutine.scale(scale=weight(z[i]) if weight else 1.0):
                pyro.sample("y", mixture, obs=y[i])

    return model


OUTCOMES = {
    "binary": lambda eta, count: dist.Bernoulli(logits=eta),
    "count": lambda eta, count: dist.Poisson(eta.exp()),
    "overdispersed": lambda eta, count: dist.NegativeBinomial(count, logits=eta - count.log()),
    "number": lambda eta, count: dist.Normal(eta, count),
}
MODELS = {"ordered": ordered, "labels": labels, "means": means}
MODELS |= {f"missing, {name}": missing(outcome) for name, outcome in OUTCOMES.items()}
BINARY = MODELS["missing, binary"]


def data(model, dtype=torch.float64):
    x = torch.randn(SIZE, DIM, dtype=dtype)
    y = torch.randint(0, 4 if model in (ordered, labels) else 2, (SIZE,))
    if model not in (ordered, labels):
        y = y.to(dtype)
    if model in (ordered, labels, means):
        return x, y
    known, z = torch.arange(SIZE) % 3 > 0, torch.rand(SIZE, dtype=dtype)
    filled = x[:, None].repeat(1, 3, 1)
    filled[..., 1] = torch.where(known[:, None], z[:, None], NODES.to(dtype))
    return filled, y, known, z


def prepared(model, tensors=None):
    """The moments of a DPSEP that has seen such data, indices of all records, and their rows."""
    pyro.clear_param_store()
    tensors = data(model) if tensors is None else tensors
    guide = AutoMultivariateNormal(model, init_scale=0.1)
    sep = DPSEP(model, guide, accountant=PrivacyAccountant(), noise=Noise(1.0, source=0))
    moments = sep._look_at(tensors, {}).problem.moments
    assert moments.name == "stein"
    return moments, torch.arange(SIZE), list(tensors)


def sites(moments, *, scale=0.1, shift=0.0):
    """In a cavity and a frame without symmetries."""
    dim = moments._draws.shape[1]
    root = scale * (torch.eye(dim) + 0.3 * torch.randn(dim, dim).tril()).double()
    half = torch.randn(dim, dim, dtype=torch.float64)
    frame = half @ half.T / dim + torch.eye(dim)
    mean = 0.3 * torch.randn(dim, dtype=torch.float64) + shift
    return SteinSites(moments, mean, root, frame)


def agree(one, other, tolerance=1e-9):
    torch.testing.assert_close(one.residual, other.residual, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one.matrices(), other.matrices(), rtol=tolerance, atol=tolerance)
    norms = one.squared_norm(), other.squared_norm()
    torch.testing.assert_close(*norms, rtol=max(tolerance, 1e-8), atol=max(tolerance, 1e-8))


def compare(found, indices, rows, tolerance=1e-9):
    """Each record has the site that the slow path gives it."""
    kinds = found.found_kinds(indices, rows)
    for kind in kinds.unique().tolist():
        chosen = [x[kinds == kind] for x in (indices, *rows)]
        one, other = (found.factors(k, chosen[0], chosen[1:]) for k in (kind, OTHER))
        agree(one, other, tolerance)
    return kinds


# Residuals choose how a look is clipped, and a concave likelihood how a step avoids saddles.
KINDS = {
    "ordered": ("other", False),
    "missing, binary": ("scaled", True),
    "missing, count": ("summed", True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_sites_are_those_of_derivatives(name):
    moments, indices, rows = prepared(MODELS[name])
    assert moments.design is not None
    assert KINDS.get(name) in (None, (moments.residuals, moments.concave))
    for scale in (1e-3, 0.3, 4.0):  # in the last, records say more than draws do
        kinds = compare(sites(moments, scale=scale), indices, rows)
        expected = {ALIKE, MIXED} if name.startswith("missing") else {MIXED}
        assert set(kinds.tolist()) == expected


@pytest.mark.long
def test_in_single_precision():
    torch.set_default_dtype(torch.float32)
    moments, *records = prepared(BINARY, data(BINARY, torch.float32))
    compare(sites(moments), *records, tolerance=3e-5)


@pytest.mark.long
@pytest.mark.every_commit
def test_every_record_counts_once():
    """Kinds take turns, in parts of any length."""
    moments, indices, rows = prepared(BINARY)
    found = sites(moments)
    found._sizes = dict.fromkeys(found._sizes, 5)
    whole = found.factors(OTHER, indices, rows)
    parts = list(found.each(indices, rows))
    assert len(parts) > 2
    total = sum(part.residual.sum(dim=0) for part in parts)
    torch.testing.assert_close(total, whole.residual.sum(dim=0))
    total = sum(part.weighted_precision(torch.ones(len(part.residual), 1)) for part in parts)
    torch.testing.assert_close(total, whole.matrices().sum(dim=0))


@pytest.mark.long
@pytest.mark.every_commit
def test_a_kind_does_not_tell_who_else_takes_part(monkeypatch):
    """It is found when a record takes part first, even if others would be found otherwise now."""
    moments, _, rows = prepared(BINARY)
    found, first, later = sites(moments), torch.arange(6), torch.arange(4, 9)
    list(found.each(first, [x[first] for x in rows]))
    before = moments.design.kinds.clone()
    monkeypatch.setattr(found, "found_kinds", lambda x, _: torch.full_like(x, OTHER).byte())
    list(found.each(later, [x[later] for x in rows]))
    assert torch.equal(moments.design.kinds[:6], before[:6])
    assert (moments.design.kinds[6:9] == OTHER).all()


@pytest.mark.long
@pytest.mark.every_commit
def test_a_broken_record_is_alone():
    moments, indices, whole = prepared(BINARY)
    rows = [x.clone() for x in whole]
    rows[0][3, 1, 1], rows[3][4], rows[1][5] = math.nan, math.inf, math.nan
    found = sites(moments)
    kinds, before = (found.found_kinds(indices, x) for x in (rows, whole))
    healthy = ~torch.isin(indices, torch.tensor([3, 4, 5]))
    assert torch.equal(kinds[healthy], before[healthy])
    finite = sum(int(x.residual.isfinite().all(dim=1).sum()) for x in found.each(indices, rows))
    assert SIZE - 3 <= finite < SIZE


@pytest.mark.long
def test_a_record_on_which_closed_forms_fail_has_its_own_derivatives(monkeypatch):
    moments, indices, rows = prepared(BINARY)
    found = sites(moments)
    expected = sum(x.residual.sum(dim=0) for x in found.each(indices, rows))
    factors = SteinSites.factors

    def failing(self, kind, indices, rows):
        if kind != OTHER and (indices == 7).any():
            raise ArithmeticError("record 7")
        return factors(self, kind, indices, rows)

    monkeypatch.setattr(SteinSites, "factors", failing)
    parts = list(found.each(indices, rows))
    assert sum(len(x.residual) for x in parts) == SIZE
    torch.testing.assert_close(sum(x.residual.sum(dim=0) for x in parts), expected)


@pytest.mark.long
def test_records_that_are_not_straight_have_their_own_derivatives():
    """Beyond 3 predictors are no longer affine in the row."""
    model = missing(OUTCOMES["binary"], clamp=3.0)
    tensors = data(model)
    tensors[0][1], tensors[0][2] = 5.0, 20.0
    moments, *records = prepared(model, tensors)
    assert moments.design is not None
    kinds = compare(sites(moments), *records)
    assert kinds[1] == kinds[2] == OTHER and (kinds != OTHER).sum() > SIZE - 10


@pytest.mark.long
def test_a_mixture_of_another_weight_has_its_own_derivatives():
    """The logarithm of a sum has a factor, which no average has."""
    assert prepared(missing(OUTCOMES["binary"], weight=lambda z: 0.5))[0].design is None


@pytest.mark.long
def test_each_record_has_a_weight():
    model = missing(OUTCOMES["binary"], weight=lambda z: z)
    tensors = data(model)
    tensors[3][:9] = 1.0
    moments, *records = prepared(model, tensors)
    assert moments.design is not None
    kinds = compare(sites(moments), *records)
    assert torch.equal(kinds == OTHER, torch.arange(SIZE) >= 9)


def test_what_has_no_rule_is_left_alone():
    def model(x, y):
        locs = weights("locs", (3,))
        with pyro.plate("data", len(y)) as i:
            groups = dist.Categorical(logits=torch.ones(len(i), 3).to(x))
            each = dist.Normal(locs.sin().expand(len(i), 3), 1.0)
            pyro.sample("y", dist.MixtureSameFamily(groups, each), obs=y[i])

    assert prepared(model, data(means))[0].design is None
