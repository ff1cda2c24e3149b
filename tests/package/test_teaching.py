"""The helpers of the course; its notebooks are tested by ``test_tutorials.py``."""

import numpy as np
import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from pyro_dp import PrivacyError, teaching  # noqa: E402


@pytest.fixture
def axes(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    with teaching.figure(1, 3) as found:
        yield found
    plt.close("all")


def test_plots_have_their_numbers(axes):
    teaching.lines(axes[0], [1, 2], {"a": [3, 4], "b": [5, 6]}, xlabel="x")
    assert [line.get_ydata().tolist() for line in axes[0].lines] == [[3, 4], [5, 6]]
    assert axes[0].get_xlabel() == "x"
    teaching.histograms(axes[1], {"a": [0.0, 1.0, 1.0], "b": [0.0, 9.0]}, np.array([0.0, 1.0, 2.0]))
    heights = [patch.get_path().vertices[:, 1].max() for patch in axes[1].patches]
    assert heights == pytest.approx([2 / 3, 1 / 2])  # what lies outside is in the last bin
    fits = {"exact": ([0.0, 1.0], [1.0, 2.0]), "other": ([0.5, 1.0], [1.0, 1.0])}
    teaching.intervals(axes[2], fits, ["a", "b"])
    bars = [bar for bar in axes[2].collections if hasattr(bar, "get_segments")]
    ends = [segment[:, 0].tolist() for bar in bars for segment in bar.get_segments()]
    assert np.ravel(ends) == pytest.approx([-1.96, 1.96, -2.92, 4.92, -1.46, 2.46, -0.96, 2.96])


def test_style_is_put_back(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    before = plt.rcParams["legend.frameon"]
    with teaching.figure():
        assert plt.rcParams["legend.frameon"] != before
    assert plt.rcParams["legend.frameon"] == before
    plt.close("all")


@pytest.mark.every_case
def test_hospitals_are_processes():
    def body(index, line):
        if index == 1:
            raise PrivacyError("no")
        return index

    results, seen = teaching.together(body)
    assert results == [0, "PrivacyError: no", 2]
    assert seen == [{}]
