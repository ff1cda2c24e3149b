"""The bound against simulated noise, and the KL of clipping against torch's own."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

_PATH = Path(__file__).parents[2] / "benchmarks" / "paper_bounds.py"
_SPEC = importlib.util.spec_from_file_location("paper_bounds", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
clipped_kl, sep_kl_bound = _MODULE.clipped_kl, _MODULE.sep_kl_bound

DRAWS, BETA = 2000, 0.05


def posterior(d, condition, seed=0):
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    precision = axes @ torch.diag(torch.logspace(0, math.log10(condition), d)) @ axes.mT
    return (precision + precision.mT) / 2, 2 * torch.randn(d, generator=generator)


def bound(precision, mean, eta_noise, precision_noise, **options):
    options |= {"eta_noise": eta_noise, "precision_noise": precision_noise}
    return sep_kl_bound(precision, mean, beta=BETA, **options)


def scales(precision, size):
    """Noise that moves the precision, relative to itself, by about ``size``; the mean likewise."""
    variances = 1 / torch.linalg.eigvalsh(precision)
    total, largest = float(variances.sum()), float(variances.max())
    return size * math.sqrt(len(precision) / total), size / math.sqrt(2 * largest * total)


def noisy_kl(precision, mean, centre, eta_noise, precision_noise):
    """(2, DRAWS): forward and reverse, inf where the noisy precision is indefinite."""
    d = len(mean)
    generator = torch.Generator().manual_seed(1)
    noise = torch.zeros(DRAWS, d, d)
    rows, columns = torch.triu_indices(d, d)  # coordinates, off-diagonals times sqrt 2
    noise[:, rows, columns] = precision_noise * torch.randn(DRAWS, len(rows), generator=generator)
    noise = torch.where(torch.eye(d, dtype=torch.bool), noise, noise / math.sqrt(2))
    noise = noise.triu() + noise.triu(1).mT
    eta = precision @ mean + eta_noise * torch.randn(DRAWS, d, generator=generator)
    eta = eta + noise @ centre
    root, failed = torch.linalg.cholesky_ex(precision + noise)
    fine = failed == 0
    covariance = torch.cholesky_inverse(root[fine])
    private = MultivariateNormal(
        (covariance @ eta[fine][..., None])[..., 0], precision_matrix=(precision + noise)[fine]
    )
    public = MultivariateNormal(mean, precision_matrix=precision)
    kl = torch.full((2, DRAWS), math.inf)
    kl[0, fine] = kl_divergence(public, private)
    kl[1, fine] = kl_divergence(private, public)
    return kl


@pytest.mark.parametrize("d", [1, 2, 5, 20])
@pytest.mark.parametrize("condition", [1, 1e4])
@pytest.mark.parametrize("size", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("centred", [True, False])
def test_the_kl_exceeds_the_bound_no_more_often_than_stated(d, condition, size, centred):
    precision, mean = posterior(d, condition)
    centre = mean + 0.01 if centred else torch.zeros(d)
    eta_noise, precision_noise = scales(precision, size)
    kl = noisy_kl(precision, mean, centre, eta_noise, precision_noise)
    for reverse in (False, True):
        noise = eta_noise, precision_noise
        most = bound(precision, mean, *noise, centre=centre, reverse=reverse)
        assert (kl[int(reverse)] > most).double().mean() <= BETA
        quantile = float(kl[int(reverse)].quantile(1 - BETA))
        assert most <= quantile * (3.0 if size == 0.02 else 10.0)  # and says something


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("d", [2, 20])
def test_simulation_rejects_two_thirds_of_the_noise(block, d):
    precision, mean = posterior(d, 1)
    noise = [scale * (i == block) for i, scale in enumerate(scales(precision, 0.02))]
    kl = noisy_kl(precision, mean, mean, *noise)
    most = bound(precision, mean, *(scale * 2 / 3 for scale in noise))
    assert (kl[0] > most).double().mean() > 2 * BETA


def test_simulation_rejects_the_centred_bound_for_an_uncentred_release():
    precision, mean = posterior(5, 1)
    noise = scales(precision, 0.02)[1]
    kl = noisy_kl(precision, mean, torch.zeros(5), 0.0, noise)
    assert (kl[0] > bound(precision, mean, 0.0, noise)).double().mean() > 0.5


@pytest.mark.parametrize("reverse", [False, True])
def test_one_dimension_in_closed_form(reverse):
    z = 2.3940  # normal, two-sided at BETA / 3
    r = 0.2 * z / 2.0
    terms = [-math.log1p(-r) - r, 1 / (1 - r)]
    if reverse:
        terms = [math.log1p(-r) + r / (1 - r), 1 / (1 - r) ** 2]
    options = {"centre": torch.tensor([3.0]), "reverse": reverse}
    found = bound(torch.tensor([[2.0]]), torch.ones(1), 0.3, 0.2, **options)
    offset = (0.3**2 + 0.2**2 * 2.0**2) / 2.0 * z**2  # E (mean - centre) adds to e
    assert found == pytest.approx(0.5 * (terms[0] + offset * terms[1]), rel=1e-4)


@pytest.mark.parametrize(("d", "most"), [(1, 1 / 2.394), (20, 1 / (math.sqrt(40) + 2.128))])
def test_too_much_noise_for_a_bound_is_infinite(d, most):
    below, above = (bound(torch.eye(d), torch.zeros(d), 0.0, s * most) for s in (0.999, 1.001))
    assert math.isfinite(below) and above == math.inf


def sites(size=20, d=3):
    """Sites of a linear-Gaussian regression, the last one an outlier."""
    x = torch.randn(size, d)
    y = x @ torch.linspace(-1, 1, d) + torch.randn(size)
    y[-1] += 30.0
    return torch.zeros(d), torch.eye(d), y[:, None] * x, x[:, :, None] * x[:, None, :]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_clipped_kl_is_that_of_the_two_posteriors(centred, weight):
    eta, precision, site_eta, site_precision = sites()
    point = torch.linspace(-1, 1, 3) if centred else torch.zeros(3)
    centre = point if centred else None
    clipped_eta, clipped_precision = eta.clone(), precision.clone()
    scaled = 0
    for h, p in zip(site_eta, site_precision, strict=True):
        scale = min(1.0, 4.0 / float(torch.cat([h - p @ point, weight * p.flatten()]).norm()))
        clipped_eta, clipped_precision = clipped_eta + scale * h, clipped_precision + scale * p
        scaled += scale < 1
    assert 0 < scaled < 20
    ends = [(eta + site_eta.sum(0), precision + site_precision.sum(0))]
    ends.append((clipped_eta, clipped_precision))
    normals = [MultivariateNormal(torch.linalg.solve(p, h), precision_matrix=p) for h, p in ends]
    for reverse in (False, True):
        options = dict(max_factor_norm=4.0, centre=centre, weight=weight, reverse=reverse)
        kl = clipped_kl(eta, precision, site_eta, site_precision, **options)
        expected = kl_divergence(*(reversed(normals) if reverse else normals))
        assert kl == pytest.approx(float(expected), rel=1e-9)


def test_nothing_clipped_is_no_distance():
    values = sites()
    assert clipped_kl(*values, max_factor_norm=math.inf) == 0.0
    assert clipped_kl(*values, max_factor_norm=1e4) == 0.0
    zeros = tuple(torch.zeros_like(x) for x in values[2:])
    assert clipped_kl(*values[:2], *zeros, max_factor_norm=1.0) == 0.0


def test_clipping_that_leaves_no_gaussian_is_infinite():
    precisions = torch.tensor([5.0, -0.7, -0.7]).reshape(3, 1, 1)  # the first holds the others up
    values = torch.zeros(1), torch.tensor([[0.1]]), torch.zeros(3, 1), precisions
    assert math.isfinite(clipped_kl(*values, max_factor_norm=2.0))
    assert clipped_kl(*values, max_factor_norm=1.0) == math.inf
