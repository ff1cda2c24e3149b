"""Private means and variances behind scikit-learn's interface."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from contract import ReleaseContract
from releases import Releases
from scipy import stats
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_dp import (
    ConfigurationError,
    DPStandardScaler,
    FullBatch,
    ModelError,
    Noise,
    PrivacyAccountant,
    SubsampledGaussian,
)

_ALARM = 1e-8  # false-alarm rate of each Kolmogorov-Smirnov test
BOUNDS = ([-1.0, 0.0, 100.0], [3.0, 10.0, 300.0])


def data(size=400):
    x = np.random.default_rng(0).uniform(size=(size, 3))
    return np.array(BOUNDS[0]) + x * (np.array(BOUNDS[1]) - np.array(BOUNDS[0]))


def fitted(x, bounds=BOUNDS, accountant=None, noise=1.0):
    accountant = accountant or PrivacyAccountant()
    return DPStandardScaler(bounds, accountant=accountant, noise=noise).fit(x)


class TestContract(ReleaseContract):
    sampled = {"sampling": FullBatch()}
    bad_bounds = [3.0, (0.0, 0.0), (1.0, -1.0), (0.0, math.inf), (0.0, math.nan), ("a", "b")]
    bad_bounds += [([0.0, 0.0], [1.0, 1.0])]
    bad_settings = tuple(({"bounds": bounds}, "bounds") for bounds in bad_bounds)

    def make(self, variant="model", bounds=BOUNDS, num_steps=None, sampling=None, **options):
        return DPStandardScaler(bounds, **options)

    def data(self, variant="model"):
        return (torch.from_numpy(data(30)),)

    def result(self, scaler):
        return {"mean": torch.from_numpy(scaler.mean_), "var": torch.from_numpy(scaler.var_)}

    def step(self, scaler, data):
        scaler.fit(*data)

    def step_on(self, patch, scaler, data, batch):
        scaler.fit(data[0][batch])

    test_a_broken_record_adds_nothing = None  # each fit looks at all that it adds


def test_without_noise_it_is_the_standard_scaler():
    x = data()
    plain, ours = StandardScaler().fit(x), fitted(x, noise=0)
    for name in ("mean_", "var_", "scale_"):
        np.testing.assert_allclose(getattr(ours, name), getattr(plain, name))
    np.testing.assert_allclose(ours.transform(x), plain.transform(x))
    np.testing.assert_allclose(ours.inverse_transform(ours.transform(x)), x)


def test_values_beyond_the_bounds_count_as_the_bounds():
    x = data()
    x[0] = 1e308, -1e308, 1e9
    clipped = np.clip(x, *BOUNDS)
    ours, plain = fitted(x, noise=0), StandardScaler().fit(clipped)
    np.testing.assert_allclose([ours.mean_, ours.scale_], [plain.mean_, plain.scale_])


@pytest.mark.parametrize("dim", [1, 3, 20])
def test_one_record_moves_each_block_by_its_bound_and_no_more(dim, monkeypatch):
    """The worst records reach the declared bounds, whatever their values."""
    x = np.random.default_rng(1).uniform(-1.0, 1.0, size=(50, dim))
    seen, moved = Releases(monkeypatch), [0.0, 0.0]
    for outlier in (1.0, 1e300, 0.0, 0.3):
        for other in (-1.0, -1e300, 0.0):
            one, two = x.copy(), x.copy()
            one[7], two[7] = outlier, other
            for each in (one, two):
                fitted(each, (-1.0, 1.0), noise=0.0)
            fitted(np.delete(x, 7, axis=0), (-1.0, 1.0), noise=0.0)
            for k, block in enumerate(seen.blocks[0]):
                one, two, none = (sums[k] for sums in seen.sums[-3:])
                one_out = torch.linalg.vector_norm(one - none).item()
                replaced = torch.linalg.vector_norm(one - two).item()
                assert one_out <= block.bound * (1 + 1e-12)
                assert replaced <= 2 * block.bound * (1 + 1e-12)
                moved[k] = max(moved[k], one_out)
    assert [block.share for block in seen.blocks[0]] == [0.5, 0.5]
    bounds = [math.sqrt(dim), math.sqrt(dim) / 2]
    assert [block.bound for block in seen.blocks[0]] == pytest.approx(bounds)
    assert moved == pytest.approx(bounds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_noise_has_the_declared_scale(relation):
    """Two blocks of one event of multiplier 2, each with sqrt(2) times its noise."""
    dim, size, sigma, half = 50, 20_000, 2.0, 4.0
    x = np.tile([[half], [-half], [0.0], [0.0]], (size // 4, dim))  # mean 0, variance 1/2 of u
    accountant = PrivacyAccountant(neighboring=relation)
    fits = [fitted(x, (-half, half), accountant, sigma) for _ in range(40)]
    means = np.concatenate([each.mean_ / half for each in fits])
    squares = np.concatenate([(each.var_ + each.mean_**2) / half**2 - 0.5 for each in fits])
    for draws in (means, 2 * squares):
        draws /= sigma * math.sqrt(2 * dim) / size
        assert stats.kstest(draws, "norm").pvalue > _ALARM
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(draws * wrong, "norm").pvalue < _ALARM
    assert accountant.ledger == ((SubsampledGaussian(sigma, 1.0, "full"), 40),)


def test_a_variance_is_at_least_its_noise():
    ours = fitted(np.zeros((20_000, 50)), (-4.0, 4.0), noise=2.0)
    noise = 16.0 * 2.0 * math.sqrt(2 * 50) / 2 / 20_000
    assert ours.var_.min() == pytest.approx(noise)


def test_scales_are_never_tiny_nor_nan():
    """Noise that drowns everything, constant features, and the least and largest bounds."""
    constant = np.zeros((5, 4))
    for sigma in (0.0, 1.0, 1e6, 1e40):
        for half in (1e-150, 1.0, 1e150):
            ours = fitted(constant, (-half, half), noise=sigma)
            assert (ours.scale_ >= 0.99e-4 * half).all()
            assert (ours.scale_ <= 1.01 * half).all()
            assert (np.abs(ours.mean_) <= half).all()
            assert np.isfinite(ours.transform(constant)).all()


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(3),
        np.zeros((0, 3)),
        np.zeros((4, 0)),
        np.zeros((2, 3), complex),
        np.array([["secret-7", "b", "c"]]),
        [[1.0, 2.0], [3.0]],
        np.array([[1.0, math.nan, 3.0]]),
        torch.tensor([[1.0, math.inf, 3.0]]),
        torch.ones(2, 3).as_subclass(type("Scaled", (torch.Tensor,), {})),
    ],
    ids=["vector", "no rows", "no columns", "complex", "text", "ragged", "nan", "inf", "a class"],
)
def test_data_that_do_not_fit_cost_nothing(x):
    accountant = PrivacyAccountant()
    with pytest.raises(ModelError) as error:
        fitted(x, accountant=accountant)
    assert "secret" not in str(error.value)
    assert accountant.num_releases == 0


def test_tensors_stay_tensors_of_their_dtype():
    x = torch.from_numpy(data()).float().requires_grad_()
    ours = fitted(x, noise=Noise(1.0, source=1))
    z = ours.transform(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(ours.inverse_transform(z), x)
    again = fitted(x.detach().numpy(), noise=Noise(1.0, source=1))
    np.testing.assert_array_equal(again.mean_, ours.mean_)
    assert again.transform(x.detach().numpy()).dtype == np.float32
    assert ours.transform(torch.zeros(1, 3, dtype=torch.long)).is_floating_point()
    assert ours.transform([[0, 0, 0]]).dtype == float


def test_names_of_features():
    class Frame(np.ndarray):
        columns = ("age", "height", "weight")

    assert list(fitted(data()).get_feature_names_out()) == ["x0", "x1", "x2"]
    assert list(fitted(data()).get_feature_names_out(["a", "b", "c"])) == ["a", "b", "c"]
    ours = fitted(data().view(Frame))
    assert list(ours.get_feature_names_out()) == list(Frame.columns)
    assert list(ours.get_feature_names_out(Frame.columns)) == list(Frame.columns)
    for wrong in (["a"], ["a", "b", "c"]):
        with pytest.raises(ConfigurationError):
            ours.get_feature_names_out(wrong)
    assert not hasattr(ours.fit(data()), "feature_names_in_")


def test_before_fit_and_with_other_columns():
    unfitted = DPStandardScaler((0, 1), accountant=PrivacyAccountant(), noise=1.0)
    for use in (unfitted.transform, unfitted.inverse_transform, unfitted.get_feature_names_out):
        with pytest.raises(ConfigurationError, match="fit"):
            use(data())
    for wrong in (data()[:, :2], np.zeros(3), [["secret", "b", "c"]]):
        with pytest.raises(ModelError) as error:
            fitted(data()).transform(wrong)
        assert "secret" not in str(error.value)


def test_clones_share_the_accountant():
    accountant = PrivacyAccountant()
    ours = fitted(data(), accountant=accountant)
    other = clone(ours)
    assert other.accountant is accountant
    assert other.get_params() == ours.get_params()
    assert not hasattr(other, "mean_")
    other.set_params(noise=7.0).fit(data())
    assert ours.noise == 1.0
    assert accountant.num_releases == 2
    assert "7.0" in repr(other)
    with pytest.raises(ConfigurationError, match="least"):
        other.set_params(least=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_transform_and_do_not_fit(copied):
    ours = fitted(data(), noise=Noise(1.0, source=12345))
    other = copied(ours)
    np.testing.assert_array_equal(other.transform(data()), ours.transform(data()))
    assert other.accountant is None and other.noise == 1.0
    with pytest.raises(ConfigurationError, match="accountant"):
        other.fit(data())


def test_in_a_pipeline():
    x, accountant = data(), PrivacyAccountant()
    y = x[:, 0] > 1.0
    scaler = DPStandardScaler(BOUNDS, accountant=accountant, noise=Noise(1.0, source=0))
    pipeline = make_pipeline(scaler, LogisticRegression())
    assert clone(pipeline).fit(x, y).score(x, y) > 0.9
    assert pipeline.fit(x, y).predict(x).shape == (400,)
    assert list(pipeline[:-1].get_feature_names_out()) == ["x0", "x1", "x2"]
    pipeline.set_params(dpstandardscaler__noise=2.0).fit(x, y)
    assert accountant.ledger == (
        (SubsampledGaussian(1.0, 1.0, "full"), 2),
        (SubsampledGaussian(2.0, 1.0, "full"), 1),
    )
