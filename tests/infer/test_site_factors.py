"""Factors of single records: what they hand to the release, and the bound it rests on."""

import math
from fractions import Fraction

import pytest
import torch
from sums import exact_sums

from pyro_dp.infer.ep.site_factors import Diagonal, Full, LowRank, Shared
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.utils.linalg import dense

WIDTHS = [2, 1, 3]  # the latent sites', 6 coordinates
STRUCTURES = [Full, Diagonal, Shared]


def low_rank(rank, count=5, dim=6):
    """Records with an indefinite A, and the same with matrices of their own, and these."""
    jacobian, inner = torch.randn(count, rank, dim), torch.randn(count, rank, rank)
    inner, residual = inner + inner.mT, torch.randn(count, rank)
    matrices = jacobian.mT @ inner @ jacobian
    own = (jacobian.mT @ residual.unsqueeze(2)).squeeze(2)
    explicit = LowRank(torch.eye(dim).expand(count, dim, dim), matrices, own)
    return LowRank(jacobian, inner, residual), explicit, matrices


def exact_squared_norm(jacobian, inner):
    """|J' A J|^2 of one record in rational arithmetic: tr(A G A G) with G = J J'."""
    rows = [[Fraction(x) for x in row] for row in jacobian.tolist()]
    a = [[Fraction(x) for x in row] for row in inner.tolist()]
    places = range(len(rows))
    gram = [[sum(x * y for x, y in zip(r, s, strict=True)) for s in rows] for r in rows]
    root = [[sum(a[i][k] * gram[k][j] for k in places) for j in places] for i in places]
    return sum(root[i][j] * root[j][i] for i in places for j in places)


def cancelling(gap, size=1e12, dim=6):
    """J1 ~ J2, and A takes their difference, which is small."""
    first = torch.randn(dim)
    jacobian = torch.stack([first, first + gap * torch.randn(dim)])
    return jacobian, size * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_low_rank_is_dense(rank):
    factors, explicit, matrices = low_rank(rank)
    vector, weights = torch.randn(6), torch.rand(5, 1)
    torch.testing.assert_close(factors.residual, explicit.residual)
    for each in (factors, explicit):
        torch.testing.assert_close(each.times(vector), matrices @ vector)
        torch.testing.assert_close(each.diagonal(), matrices.diagonal(dim1=1, dim2=2))
        torch.testing.assert_close(each.matrices(), matrices)
        torch.testing.assert_close(each.squared_norm(), matrices.square().sum(dim=(1, 2)))
        total = (weights.unsqueeze(2) * matrices).sum(dim=0)
        torch.testing.assert_close(each.weighted_precision(weights), total)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_centred_residuals_that_are_clipped_have_mean_zero(rank):
    """Exponential outcomes are skewed. The limit is six standard errors."""
    count, bound = 200_000, torch.tensor(1.2)
    draws = 1 - torch.distributions.Exponential(torch.ones(2 * count, rank)).sample()
    simulated, fresh = draws.split(count)
    jacobian = torch.randn(rank, 4)
    jacobian = rank * jacobian / jacobian.norm()
    parts = jacobian[None], torch.zeros(1, rank, rank), torch.zeros(1, rank)
    sites = LowRank(*parts, simulated=simulated.unsqueeze(1))
    shift = sites.centred(torch.zeros(1, 1), bound).residual  # (1, 4), from a residual of zero

    def clipped(rows):
        return rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)

    limit = 6 * math.sqrt(2 / count) * bound
    assert clipped(fresh @ jacobian).mean(dim=0).norm() > 4 * limit
    assert clipped(fresh @ jacobian + shift).mean(dim=0).norm() < limit


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_the_norm_is_never_below_the_true_one(gap, size):
    """Sensitivity rests on this. Here the sum is nothing but rounding."""
    for _ in range(20):
        jacobian, inner = cancelling(gap, size)
        factors = LowRank(jacobian[None], inner[None], torch.zeros(1, 2))
        assert Fraction(factors.squared_norm().item()) >= exact_squared_norm(jacobian, inner)


def test_the_norm_of_one_row_is_never_below_the_true_one():
    jacobian, inner = torch.randn(200, 1, 6), torch.randn(200, 1, 1)
    found = LowRank(jacobian, inner, torch.zeros(200, 1)).squared_norm()
    for norm, row, own in zip(found.tolist(), jacobian, inner, strict=True):
        assert Fraction(norm) >= exact_squared_norm(row, own)


def test_the_norm_of_a_row_whose_squares_underflow_beside_a_huge_residual():
    jacobian, residual = torch.full((1, 1, 900), 1.4e-162), torch.full((1, 1), 1e152)
    gradients = LowRank(jacobian, torch.zeros(1, 1, 1), residual).gradients()
    assert gradients.squared_norms() >= gradients.dense().square().sum() > 0


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-6])
def test_a_record_of_cancelling_parts_is_within_the_bound(gap, structure):
    jacobian, inner = cancelling(gap)
    factors = LowRank(jacobian[None], inner[None], torch.randn(1, 2))
    kept = structure(WIDTHS)
    total = ClippedSum([Block(6 + kept.size, 1.0)])
    total.add(kept.rows(factors.residual, factors, 0.5))
    assert exact_sums(total)[0].norm() <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["jacobian", "precision"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_broken_record_of_weight_zero_does_not_matter(rank, part, bad):
    parts = {"jacobian": torch.randn(5, rank, 6), "precision": torch.randn(5, rank, rank)}
    parts["precision"] = parts["precision"] + parts["precision"].mT
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0]).unsqueeze(1)
    without = LowRank(**parts, residual=torch.zeros(5, rank)).weighted_precision(weights)
    parts[part][2, 0, 0] = bad
    broken = LowRank(**parts, residual=torch.zeros(5, rank))
    torch.testing.assert_close(broken.weighted_precision(weights), without)
    assert broken.squared_norm().isfinite().tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_matrix_of_weight_zero_does_not_matter(bad):
    _, factors, matrices = low_rank(2)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0]).unsqueeze(1)
    without = factors.weighted_precision(weights)
    matrices[2, 1, 0] = bad
    torch.testing.assert_close(factors.weighted_precision(weights), without)


def kept_precision(structure, matrix):
    """The part of one matrix that a structure keeps: (d, d), or its diagonal."""
    if structure is Full:
        return matrix
    if structure is Diagonal:
        return matrix.diagonal()
    return torch.cat([part.mean().expand(len(part)) for part in matrix.diagonal().split(WIDTHS)])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bound", [0.5, 10.0, math.inf])
@pytest.mark.parametrize("kind", ["low rank", "dense"])
def test_clipping_is_that_of_one_vector_after_the_other(structure, bound, kind):
    """Also of a broken record, which adds nothing."""
    factors, explicit, matrices = low_rank(2)
    explicit.residual[3] = factors.residual[3] = math.nan
    eta, weight, kept = explicit.residual, 0.7, structure(WIDTHS)
    expected = torch.zeros(6 + kept.size)
    for n in (0, 1, 2, 4):
        coordinates = kept.coordinates(kept_precision(structure, matrices[n]))
        vector = torch.cat([eta[n], weight * coordinates])
        expected += vector * min(1.0, bound / vector.norm().item())
    total = ClippedSum([Block(6 + kept.size, bound)])
    total.add(kept.rows(eta, factors if kind == "low rank" else explicit, weight))
    torch.testing.assert_close(exact_sums(total)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_coordinates_have_the_frobenius_norm(structure):
    precision = kept_precision(structure, low_rank(3)[2][0])
    kept = structure(WIDTHS)
    coordinates = kept.coordinates(precision)
    assert coordinates.shape == (kept.size,)
    torch.testing.assert_close(coordinates.norm(), dense(precision).norm())
    torch.testing.assert_close(kept.precision(coordinates), precision)


def radius_of_noise(kept, sd, draws=200):
    """Spectral radii of noise, (draws,) times sd; per coordinate for a diagonal."""
    matrices = [kept.precision(sd * torch.randn(kept.size)) for _ in range(draws)]
    if matrices[0].dim() == 2:
        return torch.stack([torch.linalg.eigvalsh(m).abs().max() for m in matrices])
    return torch.stack(matrices).abs()


def test_noise_radius_of_a_full_precision():
    kept = Full([30])
    simulated = radius_of_noise(kept, 0.3).mean().item()
    assert kept.noise_radius(0.3) == pytest.approx(simulated, rel=0.1)


@pytest.mark.parametrize("dim", [1, 5, 100])
def test_noise_radius_of_a_diagonal(dim):
    kept = Diagonal([dim])
    simulated = radius_of_noise(kept, 0.3).amax(1).mean().item()
    assert simulated < kept.noise_radius(0.3) < 2 * simulated


@pytest.mark.parametrize("widths", [[4], [2, 1, 9], [3] * 30])
def test_noise_radius_of_shared_precisions(widths):
    """A number for each coordinate: noise in the mean over a site is smaller by sqrt(d_s)."""
    kept = Shared(widths)
    relative = radius_of_noise(kept, 0.3) / kept.noise_radius(0.3)
    assert 0.5 < relative.amax(1).mean() < 1.0
