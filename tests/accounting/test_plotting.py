"""Epsilon against releases, and the trade-off curve."""

import sys

import numpy as np
import pytest
from ledgers import ledger

from pyro_dp import ApproximateDP, ConfigurationError, PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.figures import growth
from pyro_dp.accounting.trade_off import trade_off
from pyro_dp.utils.display import up

STEP, FULL = SubsampledGaussian(2.0, 0.1), SubsampledGaussian(8.0, 1.0, "full")


def test_epsilon_grows_along_the_ledger():
    accountant = ledger((FULL, 2), (STEP, 100), (FULL, 1), (ApproximateDP(0.3, 1e-6, "x"), 1))
    numbers, epsilons = growth(accountant)
    assert (numbers[0], epsilons[0]) == (0, 0.0)
    assert numbers[-1] == 104
    assert epsilons[-1] == pytest.approx(accountant.get_epsilon())
    assert (np.diff(epsilons) > 0).all()
    assert len(numbers) <= 36
    at = dict(zip(numbers.tolist(), epsilons, strict=True))
    # Equal events are one line of the ledger, the first one's.
    assert at[3] == ledger((FULL, 3)).get_epsilon()
    assert at[103] == ledger((FULL, 3), (STEP, 100)).get_epsilon()


def test_points_of_long_and_of_short_ledgers():
    many = ledger(*[(SubsampledGaussian(50.0 + k, 1.0, "full"), 1) for k in range(100)])
    assert len(growth(many)[0]) == 30
    assert growth(many)[0][[0, -1]].tolist() == [0, 100]
    assert growth(PrivacyAccountant())[0].tolist() == [0]
    assert growth(ledger((FULL, 2)))[0].tolist() == [0, 1, 2]


def test_a_look_ends_the_curve():
    accountant = ledger((FULL, 2))
    accountant.record_nonprivate("x")
    numbers, epsilons = growth(accountant)
    assert numbers.tolist() == [0, 1, 2, 3]
    assert np.isfinite(epsilons).tolist() == [True, True, True, False]


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_panels():
    pytest.importorskip("matplotlib")
    accountant = ledger((STEP, 50), epsilon=3.0)
    left, right = accountant.plot().axes
    lines = {line.get_label(): line.get_xydata() for line in left.lines + right.lines}
    np.testing.assert_array_equal(lines["spent"], np.column_stack(growth(accountant)))
    assert (lines["budget"][:, 1] == 3.0).all()
    np.testing.assert_array_equal(lines["perfect privacy"], [[0.0, 1.0], [1.0, 0.0]])
    curve = lines["least errors of an attacker"]
    np.testing.assert_array_equal(curve[:, 1], trade_off(accountant, curve[:, 0]))
    ((alpha, missed),) = lines["5% false positives"]
    assert (alpha, missed) == (0.05, trade_off(accountant, 0.05))
    assert "1e-05" in left.get_ylabel()
    assert "nats" in left.get_ylabel()
    assert "type I " in right.get_xlabel()
    assert "type II " in right.get_ylabel()
    assert up(accountant.get_epsilon()) in left.get_title()


def test_extremes():
    pytest.importorskip("matplotlib")
    empty = PrivacyAccountant().plot()
    assert empty.axes[0].get_title().endswith("epsilon = 0")
    assert "5.0%" in empty.axes[1].get_title()
    looked = ledger((FULL, 2))
    looked.record_nonprivate("x")
    left, right = looked.plot().axes
    assert "no guarantee" in left.get_title()
    assert "a look without noise" in labels(left)
    assert "100.0%" in right.get_title()
    noiseless = ledger((SubsampledGaussian(0.0, 1.0, "full"), 1)).plot()
    assert "no guarantee from here on" in labels(noiseless.axes[0])
    noiseless.canvas.draw()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="matplotlib"):
        PrivacyAccountant().plot()
