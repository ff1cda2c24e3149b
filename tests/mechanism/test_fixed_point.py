"""Sums in integers: what a record can change, exactly, and the noise."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from sums import exact_sums

import pyro_dp.mechanism.fixed_point
from pyro_dp import ConfigurationError, PrivacyAccountant, PrivacyError, SubsampledGaussian
from pyro_dp.infer.ep.site_factors import STRUCTURES, LowRank
from pyro_dp.mechanism.clipping import ClippedSum, clipped_sums
from pyro_dp.mechanism.contributions import Block, Joined, Kept, OuterProducts, Rows
from pyro_dp.mechanism.fixed_point import FixedPointSum, rounded_sums
from pyro_dp.mechanism.release import release
from pyro_dp.mechanism.system_random import SystemGenerator
from pyro_dp.vips.models.latent_dirichlet_allocation import Documents, WordCounts
from pyro_dp.vips.models.regressions import WeightedSquares

_ALARM = 1e-8
_UNITS = 2**30


def units(bound, *values):
    """The integers of a sum before its release."""
    total = FixedPointSum([Block(v.shape[1], bound, 1 / len(values)) for v in values])
    total.add(*values)
    return total._totals


def squared_norm(vector):
    """Exactly, in Python's integers."""
    return sum(int(v) ** 2 for v in vector)


@pytest.mark.parametrize("bound", [1e-6, 0.1, 1 / 3, 1.0, 7.7, 1e6])
@pytest.mark.parametrize("size", [1, 3, 1000, 10_000])
def test_no_record_reaches_beyond_the_bound(size, bound):
    """Equal coordinates at the bound, and a hair around it, are where rounding could exceed it."""
    edge = bound / math.sqrt(size)
    for value in (edge, math.nextafter(edge, 1e9), edge * (1 + 1e-13), edge * (1 + 1e-9)):
        for sign in (1, -1):
            (sums,) = units(bound, torch.full((1, size), sign * value))
            assert squared_norm(sums) <= _UNITS**2
            assert squared_norm(sums) > 0.999 * _UNITS**2


@pytest.mark.parametrize("size", [2, 100, 10_000])
def test_norms_that_are_rounded_to_the_bound(size):
    """Coordinates on the grid, whose norm exceeds the bound by less than a float64 can tell."""
    row = torch.full((1, size), 1 / _UNITS)
    row[0, 0] = 1.0
    assert torch.linalg.vector_norm(row) - 1.0 < 1e-13
    assert squared_norm(units(1.0, row)[0]) <= _UNITS**2


def test_the_order_of_records_is_no_part_of_the_sum():
    """In floating point the order changes the rounding, which may tell who is there."""
    values = torch.randn(1000, 5)
    whole, parts = units(1.0, values)[0], FixedPointSum([Block(5, 1.0)])
    for part in values.flip(0).split(7):
        parts.add(part)
    assert torch.equal(parts._totals[0], whole)
    plain = [ClippedSum([Block(5, 1.0)]) for _ in range(2)]
    plain[0].add(values)
    plain[1].add(values.flip(0))
    assert not torch.equal(exact_sums(plain[0])[0], exact_sums(plain[1])[0])


def test_values_are_those_of_the_plain_sum():
    values, losses = 2 * torch.randn(100, 5), torch.randn(100, 1)
    blocks = [Block(5, 1.5, 0.5), Block(1, 0.3, 0.5)]
    plain, grid = ClippedSum(blocks), FixedPointSum(blocks)
    plain.add(values, losses)
    grid.add(values, losses)
    for one, other, block in zip(exact_sums(plain), exact_sums(grid), blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=block.bound * grid.rounding(100))


@pytest.mark.parametrize("bad", [0.0, 5.0, math.nan, math.inf])
def test_padding_is_zero(bad):
    values, weights = torch.randn(5, 3), torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0]])
    values[3:] = bad
    (sums,) = FixedPointSum.clipped_sums([Rows(values)], [1.0], weights.double())
    assert torch.equal(sums, units(1.0, values[:3])[0])


def _kinds():
    """Blocks that are not held as they are, and how many coordinates each has."""
    torch.manual_seed(0)
    outer = OuterProducts(torch.randn(6, 4, 1), torch.randn(6, 1, 5))
    product = OuterProducts(torch.randn(6, 4, 2), torch.randn(6, 2, 5), transposed=True)
    counts = torch.tensor([[1, 0, 2, 3], [0, 0, 0, 0], [5, 1, 0, 0]] * 2)
    documents = Documents.of(counts)
    jacobian, inner = torch.randn(6, 2, 4), torch.randn(6, 2, 2)
    sites = LowRank(jacobian, inner + inner.mT, torch.randn(6, 2))
    full = STRUCTURES["full"]([4]).rows(sites.residual, sites, 0.7)
    return {
        "outer product": Joined([outer]),
        "joined": Joined([product, Rows(torch.randn(6, 3)), outer]),
        "word counts": WordCounts(documents, torch.rand(len(documents.word), 3)),
        "squares": WeightedSquares(torch.randn(6, 4), torch.randn(6)),
        "sites": full,
    }


@pytest.mark.parametrize("name", _kinds())
def test_whatever_holds_a_block_can_write_it_out(name):
    """Norms and weighted sums are those of the rows."""
    block, weights = _kinds()[name], torch.rand(6, 1, dtype=torch.float64)
    rows = block.dense()
    assert rows.dtype == torch.float64
    torch.testing.assert_close(block.weighted_sum(weights), (rows * weights).sum(dim=0))
    torch.testing.assert_close(block.norms(), rows.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    "scales",
    [
        *((1.0, 1.0), (1e-30, 1e30), (1e120, 1e-120), (1e200, 1e-200)),
        *((1e-160, 1e153), (1e153, 1e-160), (1e-310, 1e150), (1e150, 1e-165), (1e-200, 1e-200)),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_product_keeps_the_bound_exactly(scales, fused):
    """Also where a factor's squares overflow, or are lost."""
    left, right = (
        torch.randn(300, size) * scale for size, scale in zip((4, 5), scales, strict=True)
    )
    block = Joined(
        [OuterProducts(left.unsqueeze(2), right.unsqueeze(1)), Rows(torch.randn(300, 2))]
    )
    for bound in (0.3, 3.0):
        (whole,) = rounded_sums([block], [bound], fused=fused)
        for record in (0, 7):
            alone = torch.zeros(300, 1)
            alone[record] = 1.0
            (own,) = rounded_sums([block], [bound], alone, fused=fused)
            (others,) = rounded_sums([block], [bound], 1 - alone, fused=fused)
            assert torch.equal(own + others, whole)
            assert squared_norm(own) <= _UNITS**2
    (plain,) = clipped_sums([block], [3.0])
    torch.testing.assert_close(whole * (3.0 / _UNITS), plain, rtol=0.0, atol=300 * 3.0 / _UNITS)


@pytest.mark.parametrize("fused", [False, True])
def test_a_product_of_which_squares_are_lost_keeps_the_bound(fused):
    """A double near 1e-320 has some ten bits. A norm that is too small would break the bound."""
    bound = 1e-6
    for seed in range(20):
        torch.manual_seed(seed)
        left, right = 3e-160 * torch.randn(1, 4, 1), 3e153 * torch.randn(1, 1, 5)
        assert ((left @ right).norm() > bound).all()
        (own,) = rounded_sums([Joined([OuterProducts(left, right)])], [bound], fused=fused)
        assert squared_norm(own) <= _UNITS**2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_factor_breaks_no_other_record(broken, fused):
    for place in range(2):
        factors = [torch.randn(3, 4, 1), torch.randn(3, 1, 5)]
        whole = [factor[[0, 2]] for factor in factors]
        factors[place][1, 0, 0] = broken
        (found,) = rounded_sums([Joined([OuterProducts(*factors)])], [1.0], fused=fused)
        (expected,) = rounded_sums([Joined([OuterProducts(*whole)])], [1.0], fused=fused)
        assert torch.equal(found, expected)


def test_norms_that_are_kept_do_not_replace_those_of_rows():
    """If all coordinates are written out, so are their norms: a formula's may be rounded."""
    block = WeightedSquares(torch.randn(1, 4), torch.tensor([5.0]))
    (whole,) = rounded_sums([Kept(block, 0.9 * block.norms())], [1.0])
    (scaled,) = rounded_sums([Kept(block, 0.9 * block.norms(), torch.ones(1, 1))], [1.0])
    assert torch.equal(whole, scaled)
    assert 0.999 * _UNITS**2 < squared_norm(whole) <= _UNITS**2


def impossible_at_one(outputs):
    """Outputs that 1.0 plus a float64 cannot have: sums above 2^-2 end at the bit 2^-54."""
    return [not (float(v) * 2.0**54).is_integer() for v in outputs if abs(v) < 0.25]


@pytest.mark.long
def test_precision_tells_nothing(stream):
    """The attack of Haney et al. 2022: which outputs can a sum of 0 have, and one of 1 not?

    With noise of floating-point numbers many; with integers on a grid none.
    """
    size = 20_000

    def plain(value):
        total = ClippedSum([Block(1, 1.0) for _ in range(1)])
        total.add(torch.tensor([[value]]))
        event, noise = SubsampledGaussian(1.0), np.random.default_rng()
        return release(total, accountant=PrivacyAccountant(), event=event, noise=noise)[0].item()

    for value in (0.0, 1.0):
        tell = impossible_at_one([plain(value) for _ in range(200)])
        assert any(tell) == (value == 0.0)

    def secure(value):
        total = FixedPointSum([Block(size, math.sqrt(size))])  # whose coordinates can all be 1
        total.add(torch.full((1, size), value))
        event = SubsampledGaussian(1 / math.sqrt(size))  # noise of 1
        return release(total, accountant=PrivacyAccountant(), event=event, noise=stream)[0]

    grid = math.sqrt(size) / _UNITS
    for value in (0.0, 1.0):
        whole = secure(value).numpy() / grid
        assert (np.abs(whole - np.round(whole)) < 1e-5).all()
        # Small outputs, even and odd multiples, come up from both.
        near = np.round(whole[np.abs(whole * grid) < 0.25])
        assert 0.4 < np.mean(near % 2) < 0.6


@pytest.mark.parametrize(
    ("sigma", "bound", "text"),
    [*((sigma, 1.0, "multiplier") for sigma in (0.0, 1e-9, 1e9)), (1.0, math.inf, "bound")],
)
def test_noise_that_does_not_fit_is_refused_before_it_is_recorded(stream, sigma, bound, text):
    accountant, event = PrivacyAccountant(), SubsampledGaussian(sigma)
    with pytest.raises(ConfigurationError, match=text):
        release(FixedPointSum([Block(1, bound)]), accountant=accountant, event=event, noise=stream)
    assert accountant.ledger == ()


def test_the_most_noise_stays_in_the_integers(stream):
    total, event = FixedPointSum([Block(20_000, 1.0)]), SubsampledGaussian(2.0**26)
    (noise,) = release(total, accountant=PrivacyAccountant(), event=event, noise=stream)
    assert stats.kstest(noise.numpy() / 2.0**26, "norm").pvalue > _ALARM


@pytest.mark.long
@pytest.mark.every_commit
def test_discrete_noise_costs_what_continuous_noise_costs():
    """The module's argument: a discrete draw's normalising sum hardly depends on its centre."""
    with mpmath.workdps(300):

        def total(place):
            return mpmath.fsum(mpmath.exp(-((k - place) ** 2) / 32) for k in range(-200, 201))

        sums = [total(mpmath.mpf(i) / 16) for i in range(17)]
        assert max(sums) / min(sums) - 1 < mpmath.mpf(10) ** -136


@pytest.mark.parametrize("shares", [1, 4, 9])
@pytest.mark.parametrize("sigma", [2.0**-14, 0.3, 1.0, 123.456, 2.0**26])
def test_there_is_room_for_what_a_discrete_draw_costs(monkeypatch, stream, sigma, shares):
    """s^2 - 16 >= (sigma 2^30)^2, for the shares together."""
    scales = []

    def spy(scale, size, stream):
        scales.append(scale)
        return np.zeros(size, np.int64)

    monkeypatch.setattr(pyro_dp.mechanism.fixed_point, "discrete_gaussian", spy)
    total = FixedPointSum([Block(1, 1.0)])
    total.in_shares(shares, lambda units: units)
    event = SubsampledGaussian(sigma)
    release(total, accountant=PrivacyAccountant(), event=event, noise=stream)
    (scale,) = scales
    assert shares * (scale**2 - 16) >= Fraction(sigma * _UNITS) ** 2


def test_a_share_of_the_noise_must_be_large_enough_by_itself(stream):
    accountant, total = PrivacyAccountant(), FixedPointSum([Block(1, 1.0)])
    total.in_shares(4, lambda units: units)
    event = SubsampledGaussian(1.5 * 2.0**-16)
    with pytest.raises(ConfigurationError, match="multiplier"):
        release(total, accountant=accountant, event=event, noise=stream)
    assert accountant.ledger == ()


@pytest.mark.parametrize(
    ("kind", "noise"), [(ClippedSum, SystemGenerator()), (FixedPointSum, np.random.default_rng(0))]
)
def test_noise_of_the_other_kind_is_refused(kind, noise):
    total, event = kind([Block(1, 1.0)]), SubsampledGaussian(1.0)
    with pytest.raises(PrivacyError, match="FixedPointSum"):
        release(total, accountant=PrivacyAccountant(), event=event, noise=noise)
