"""Records far above the bound: their rows keep it, and the status reports what is cut off."""

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_value
from seeded import seeded

from pyro_dp import DPSEP, PrivacyAccountant
from pyro_dp.infer.ep.look_plan import LookPlan
from pyro_dp.infer.ep.norm_counts import (
    FROM,
    KEPT,
    ExtremeCounts,
    WithExtremes,
    extreme_excess,
)
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.ep.seen_looks import SeenLooks
from pyro_dp.infer.posterior.looks import Look, with_last
from pyro_dp.mechanism.contributions import Kept, Rows
from pyro_dp.mechanism.norm_histogram import SIZE, Norms

BOUND = 0.7


def rows_of(ratios):
    """Records whose parts are this many times as long as the bound, clipped and counted."""
    parts = torch.nn.functional.normalize(torch.randn(len(ratios), 3), dim=1)
    lengths = torch.tensor(ratios, dtype=torch.float64).unsqueeze(1)
    rows = Rows(BOUND * lengths * parts)
    clipped = Kept(rows, rows.norms(), (1 / lengths).clamp(max=1.0))
    return WithExtremes(clipped, lengths, torch.tensor(BOUND, dtype=torch.float64))


def test_a_row_keeps_the_bound_and_counts_in_one_class():
    rows = rows_of([0.5, 1.0, 3.99, 4.0, 15.9, 16.0, 1e9])
    dense = rows.dense()
    torch.testing.assert_close(rows.norms().squeeze(1), dense.norm(dim=1))
    assert dense.norm(dim=1).max() <= BOUND * (1 + 1e-12)
    parts, counts = dense.split([3, len(FROM)], dim=1)
    assert (counts > 0).tolist() == [[False] * 2] * 3 + [[True, False]] * 2 + [[False, True]] * 2
    torch.testing.assert_close(parts.norm(dim=1)[2:] / BOUND, torch.tensor([1.0] + [KEPT] * 4))


def test_a_sum_is_that_of_the_rows():
    rows = rows_of([0.5, 5.0, 50.0])
    weights = torch.tensor([[1.0], [0.5], [0.25]], dtype=torch.float64)
    torch.testing.assert_close(rows.weighted_sum(weights), (rows.dense() * weights).sum(dim=0))


def test_the_excess_is_that_of_classes_with_significantly_more_records_than_the_fit():
    norms = Norms.of(np.array([1.0, 5.0]), np.array([990.0, 10.0]))

    def excess(*counts):
        bounds = np.array([1.0, 7.0])
        found = ExtremeCounts(torch.tensor(counts), 5.0, 1.0).excess(norms, bounds)
        assert 0.0 <= found[1] < found[0] or found[0] == 0.0
        return found[0]

    assert excess(19.0, 9.0) == 0.0  # each within 2.75 standard deviations, and their sum
    assert excess(30.0, 0.0) == pytest.approx(20 * (1.5 * 4 - 1))
    assert excess(0.0, 20.0) == pytest.approx(20 * (1.5 * 16 - 1))
    assert excess(20.0, 12.0) == pytest.approx(10 * 5 + 12 * 23)  # their sum
    assert excess(-100.0, 0.0) == 0.0


def test_looks_of_one_bound_are_one_count():
    norms = Norms.of(np.ones(1), np.full(1, 1e4))

    def excess(*seen):
        counts = [ExtremeCounts(torch.tensor([n, 0.0]), sd, bound) for n, sd, bound in seen]
        return extreme_excess(counts, norms, np.ones(1))[0]

    mean = (8 / 4 + 5) / (1 / 4 + 1)
    assert excess((8.0, 2.0, 1.0), (5.0, 1.0, 1.1)) == pytest.approx(mean * (6 * 1.1 - 1))
    assert excess((8.0, 2.0, 1.0), (5.0, 1.0, 2.0)) == pytest.approx(5 * (12 - 1))
    assert excess((8.0, 4.0, 1.0), (8.0, 4.0, 1.1)) == pytest.approx(8 * (6 * 1.1 - 1))
    assert excess((8.0, 4.0, 1.0)) == 0.0 == excess()


def test_counts_with_a_small_bound_see_records_that_a_larger_one_keeps():
    norms = Norms.of(np.ones(1), np.full(1, 1e4))
    low = ExtremeCounts(torch.tensor([10.0, 0.0]), 1.0, 1.0)
    high = ExtremeCounts(torch.tensor([0.0, 0.0]), 1.0, 5.0)
    bounds = np.array([1.0, 5.0, 10.0])
    assert extreme_excess((low, high), norms, bounds) == pytest.approx([50.0, 12.8, 3.2])
    plan = LookPlan(dim=10, size=10_000, multiplier=1.0, residuals=Residuals.NORMAL)
    many = ExtremeCounts(torch.tensor([0.0, 10.0]), 1.0, 1.0)
    assert plan.bound(norms, 1.0, [many]) > 5 * plan.bound(norms, 1.0)
    one_sided = replace(plan, residuals=Residuals.OTHER)  # a rest of the bias would stay
    assert one_sided.bound(norms, 1.0, [many]) == one_sided.bound(norms, 1.0)
    unsure = Norms(np.array([1.0, 3.0]), np.array([[9.0, 0.0], [0.0, 9.0]]), np.array([0.5, 0.5]))
    assert plan.excess(unsure, np.array([2.0])) == pytest.approx(9 / 2)
    assert one_sided.excess(unsure, np.array([2.0])) == pytest.approx(9 / math.sqrt(2))
    few = ExtremeCounts(torch.tensor([0.0, 3.5]), 1.0, 1.0)  # these may be noise
    assert plan.bound(norms, 1.0, [few]) == plan.bound(norms, 1.0)


def test_what_extreme_records_lose_is_a_bias_of_looks_near_them():
    plan = LookPlan(dim=2, size=1000, multiplier=1.0, residuals=Residuals.NORMAL)
    eye, zeros = torch.eye(2), torch.zeros(2)
    look = Look(zeros, zeros, 1000 * eye, eye, 1.0, 1.0, bound=1.0)
    counts = torch.zeros(SIZE)
    counts[SIZE // 2 - 1] = 1000.0  # norms just below the bound
    far = replace(look, point=torch.ones(2))
    pooled = with_last([far, look], None, plan.size, plan.bend)
    seen = SeenLooks(
        plan,
        looks=(far, look),
        histograms=((counts, 0.01), (counts, 0.01)),
        extremes=(ExtremeCounts(torch.tensor([500.0, 0.0]), 1.0, 1.0),) * 2,
        pooled=pooled,
    )
    lost = 500 * (6 - 1)
    assert seen.squared_bias(1.0) == pytest.approx(plan.squared_bias(lost), rel=0.01)
    assert len(seen.extremes_near(zeros)) == 1
    assert replace(seen, extremes=()).squared_bias(1.0) < 1e-3 * plan.squared_bias(lost)


def visits(cap):
    """Counts that grow with log1p(contacts), modelled as if they grew with contacts."""
    rng = np.random.default_rng(183)
    contacts = np.floor(np.exp(math.log(3) + 0.87 * rng.standard_normal(15_000)))
    other = rng.standard_normal(len(contacts))
    y = rng.poisson(np.exp(-1 + 0.8 * np.log1p(contacts) + 0.3 * other))
    x = np.c_[np.minimum(contacts, cap) / 10, other, np.ones(len(y))]
    return torch.tensor(x), torch.tensor(y, dtype=torch.float64)


def poisson(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).clamp(max=12).exp()), obs=y)


def exact_mean(x, y):
    w = torch.zeros(3)
    for _ in range(100):
        mean = (x @ w).exp()
        precision = (x * mean[:, None]).mT @ x + torch.eye(3) / 4
        step = torch.linalg.solve(precision, x.mT @ (y - mean) - w / 4)
        w = w + step * min(1.0, 2.0 / step.norm().item())
    return w


@pytest.mark.slow
@pytest.mark.parametrize("cap", [math.inf, 20])
def test_a_few_extreme_records_are_no_longer_missed(cap):
    """Without these counts, 21 of 15,000 records move the mean by 25 standard deviations."""
    data = visits(cap)
    sep = seeded(DPSEP, poisson, AutoMultivariateNormal, *data, epsilon=1.0)
    posterior = sep.posterior()
    assert posterior.status.is_ok == (cap == 20)
    if not posterior.status.is_ok:
        assert "clipping may shift the mean" in str(posterior.status)
    assert ((posterior.mean - exact_mean(*data)).abs() < 4 * posterior.stddev).all()
    state = sep.state_dict()
    assert state["extremes"][-1]["counts"].shape == (len(FROM),)
    again = DPSEP(poisson, AutoMultivariateNormal(poisson), accountant=PrivacyAccountant(1.0, 1e-5))
    for older in (state["extremes"][-1], None):  # the last count alone, or none
        again.load_state_dict({**state, "extremes": older})


def linear(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


@pytest.mark.long
@pytest.mark.every_commit
def test_a_bound_keeps_most_of_a_few_records_of_large_leverage():
    """They decide a coefficient. A bound that clipped them moved its mean by 8.8 sds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=generator)
    x[:12, 0] = 60.0
    y = 0.5 * x[:, 1] + torch.randn(20_000, generator=generator)
    y[:12] += 0.05 * 60.0
    found = seeded(DPSEP, linear, AutoMultivariateNormal, x, y, epsilon=4.0).posterior()
    precision = x.mT @ x + torch.eye(3)
    exact = torch.linalg.solve(precision, x.mT @ y)
    away = found.mean - exact
    assert found.status.is_ok
    assert away @ precision @ away < 40  # 78 if the bound follows the histogram alone
    assert (away.abs() < 3 * found.stddev).all()


@pytest.mark.long
@pytest.mark.every_commit
def test_early_looks_with_small_bounds_do_not_bias_the_mean():
    """These looks have little noise, and clip many large counts."""
    rng = np.random.default_rng(0)
    features = np.c_[rng.standard_normal((6_000, 2)), np.ones(6_000)]
    mean = np.exp(features @ [0.5, -0.3, 0.3])
    counts = rng.negative_binomial(0.3, 1 / (1 + mean / 0.3))
    x, y = torch.tensor(features), torch.tensor(counts, dtype=torch.float64)
    exact = exact_mean(x, y)
    guide = AutoMultivariateNormal(poisson, init_loc_fn=init_to_value(values={"w": exact}))
    sep = seeded(DPSEP, poisson, lambda _: guide, x, y, epsilon=4.0)
    away = sep.posterior().mean - exact
    precision = (x * (x @ exact).exp()[:, None]).mT @ x
    assert 0.5 * away @ precision @ away < 15  # nats; 39 if looks are weighted by noise alone
    assert sep.evidence.looks[0].squared_bias > sep.evidence.looks[-1].squared_bias
