"""DPEM: equality with EM, recovery, sensitivity, noise, impossible estimates, state.

It is the smallest inference without a Pyro model: mutations of what all inferences share are caught
here first.
"""

import numpy as np
import pytest
import torch
from contract import InferenceContract
from dpem import DPEM
from scipy import stats

from pyro_dp import Execution, ModelError, Noise, PrivacyAccountant

CENTRES = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [0.0, -2.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SCALES = {"radius": 4.0, "start_variance": 4.0, "least_variance": 1e-3}


def points(n=60, scale=0.5):
    z = torch.multinomial(WEIGHTS, n, replacement=True)
    return CENTRES[z] + scale * torch.randn(n, 2)


def em(start=CENTRES / 2, **options):
    plain = {"accountant": PrivacyAccountant(), "num_steps": 10, "noise": 0}
    return DPEM(start, **SCALES | plain | options)


class TestContract(InferenceContract):
    bound = "radius"
    outliers = ([1e6, 1e6], [1e200, -1e200], [0.0, 0.0], [-4.0, 4.0])
    bad_settings = (
        ({"start_variance": 0.0}, "start_variance"),
        ({"least_variance": np.ones(2)}, "least_variance"),
        ({"radius": "1"}, "radius"),
        ({"execution": Execution(jit="trace")}, "DPEM has no use for Execution.jit"),
    )

    def make(self, variant="model", start=CENTRES / 2, **options):
        return DPEM(start, **SCALES | options)

    def data(self, variant="model"):
        return (points(),)

    def result(self, dpem):
        return {"weights": dpem.weights, "locs": dpem.locs, "covariances": dpem.covariances}

    def damage(self, state):
        yield {"radius": 3.0}, "radius differs"
        yield {"locs": torch.zeros(4, 2)}, "start"
        for name in ("weights", "locs", "covariances", "radius"):
            for value in ("1", 1.5, torch.full((3, 2), torch.nan), torch.zeros(7)):
                yield {name: value}, None

    def test_a_long_row_moves_all_that_it_may(self):
        """The bounds of the blocks are tight, for a row in a component's direction. A row whose
        square overflows is no broken record."""
        (x,) = self.data()

        def norms(length):
            far = torch.cat([x[:4], length * CENTRES[:1], x[5:]])
            blocks, sums = self.sums("model", (far,), [4], start=CENTRES, start_variance=0.25)
            return [(a.norm() / b.bound).item() for a, b in zip(sums, blocks, strict=True)]

        assert norms(1e6) == pytest.approx([1.0] * 3, abs=1e-6)
        assert norms(1e200)[0] > 0


def textbook(x, weights, locs, covariances):
    """One iteration of EM, component by component."""
    joint = np.stack(
        [
            w * stats.multivariate_normal(m, c).pdf(x)
            for w, m, c in zip(weights, locs, covariances, strict=True)
        ],
        axis=1,
    )
    r = joint / joint.sum(axis=1, keepdims=True)
    locs = np.stack([np.average(x, axis=0, weights=r[:, k]) for k in range(len(weights))])
    covariances = np.stack([np.cov(x.T, aweights=r[:, k], bias=True) for k in range(len(weights))])
    return r.mean(axis=0), locs, covariances


def test_equals_em():
    """sigma=0, all rows: the textbook's, from the same start."""
    x = torch.randn(300, 2) + 2 * torch.randint(-1, 2, (300, 1))
    start = torch.linspace(-2, 2, 3).unsqueeze(1) * torch.ones(2)
    ours = em(start, radius=50.0, start_variance=1.5, least_variance=1e-9)
    expected = np.full(3, 1 / 3), start.numpy(), 1.5 * np.eye(2)[None].repeat(3, 0)
    for _ in range(8):
        ours.step(x)
        expected = textbook(x.numpy(), *expected)
    found = (ours.weights, ours.locs, ours.covariances)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=1e-8)


def test_recovers_separated_components():
    """epsilon=1, N=20,000."""
    dpem = em(accountant=PrivacyAccountant(epsilon=1.0), sampling=0.2, noise=Noise(source=0))
    dpem.run(points(20_000), progress=False)
    assert (dpem.locs - CENTRES).norm(dim=1).max() < 0.15
    assert (dpem.weights - WEIGHTS).abs().max() < 0.03
    assert (dpem.covariances - 0.25 * torch.eye(2)).abs().max() < 0.3
    assert dpem.accountant.get_epsilon() <= 1.0


@pytest.mark.every_case
@pytest.mark.parametrize("dim", [1, 6])
@pytest.mark.parametrize("epsilon", [1e-3, 10.0])
def test_never_an_impossible_estimate(epsilon, dim):
    """A component that noise alone could have made stays where it was."""
    accountant = PrivacyAccountant(epsilon=epsilon)
    dpem = em(torch.randn(4, dim), accountant=accountant, num_steps=30, noise=Noise(source=0))
    x = torch.randn(50, dim)
    for _ in range(30):
        dpem.step(x)
        assert dpem.weights.min() > 0 and dpem.weights.sum().item() == pytest.approx(1.0)
        assert dpem.locs.norm(dim=1).max() <= dpem.radius * (1 + 1e-9)
        values = torch.linalg.eigvalsh(dpem.covariances)
        assert values.min() > dpem.least_variance * (1 - 1e-6)
        assert values.max() < dpem.radius**2 * (1 + 1e-6)


def test_a_component_without_rows():
    dpem = em(torch.tensor([[1.0, 1.0], [-3.9, 0.0], [1.0, 1.0]]), start_variance=0.01)
    dpem.run(torch.ones(30, 2), progress=False)
    assert torch.equal(dpem.locs[1], torch.tensor([-3.9, 0.0]))


@pytest.mark.parametrize("x", [torch.zeros(5, 3), torch.zeros(2)])
def test_bad_data(x):
    dpem = em(noise=1.0)
    with pytest.raises(ModelError, match="rows of 2"):
        dpem.step(x)
    assert dpem.accountant.num_releases == 0
