"""Noise from counters: the published vectors of the cipher, and normals of it."""

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_dp.mechanism import streams
from pyro_dp.mechanism.streams import counted_normals, normals, threefry
from pyro_dp.utils.torch_state import signed

CPU = torch.device("cpu")
ONES = 2**64 - 1
PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)


def drawn(size, seed=0):
    return counted_normals(np.random.default_rng(seed), size, CPU)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0xC2B6E3A8C2C69865, 0x6F81ED42F350084D)),
        ((ONES, ONES), (ONES, ONES), (0xE02CB7C4D95D277A, 0xD06633D0893B8B68)),
        (PI[:2], PI[2:], (0x263C7D30BB0F0AF1, 0x56BE8361D3311526)),
    ],
)
def test_threefry_has_the_published_outputs(counter, key, expected):
    """They are from Random123, the authors' library: kat_vectors, threefry2x64 with 20 rounds."""
    words = [torch.tensor([signed(word)] * 3) for word in counter]
    found = threefry(key, *words)
    assert [each.tolist() for each in found] == [[signed(word)] * 3 for word in expected]
    assert [each.tolist() for each in words] == [[signed(word)] * 3 for word in counter]


def test_they_are_standard_normals():
    found = drawn(400_001).numpy()
    assert found.shape == (400_001,)
    assert stats.kstest(found, "norm").pvalue > 0.01
    for factor in (2 / 3, 1.5):
        assert stats.kstest(factor * found, "norm").pvalue < 1e-9
    half = len(found) // 2  # the two numbers of a pair are of one radius
    pairs = np.stack([found[:half], found[half + 1 :][:half]])
    assert abs(np.corrcoef(pairs)[0, 1]) < 0.01
    assert abs(np.corrcoef(pairs**2)[0, 1]) < 0.01
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.01


def test_radii_reach_far_and_never_fail():
    ends = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    first, second = ends.repeat_interleave(4), ends.repeat(4)
    out = torch.empty(2, 16)
    streams._box_muller(first, second, out=out)
    assert out.isfinite().all()
    assert out.norm(dim=0).max() == pytest.approx(9.419, abs=1e-3)  # sqrt(2 ln 2^64)


def test_each_release_has_a_key_of_its_own():
    stream = np.random.default_rng(0)
    first, second = (counted_normals(stream, 1000, CPU) for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    assert torch.equal(first, drawn(1000))
    assert not torch.equal(first, drawn(1000, seed=1))


def test_parts_do_not_show(monkeypatch):
    whole = drawn(1001)
    monkeypatch.setattr(streams, "_BLOCK", 100)
    assert torch.equal(drawn(1001), whole)


def test_on_the_cpu_they_are_those_of_the_stream():
    for size in (10, 2 * streams._FEW):
        found = normals(np.random.default_rng(0), size, 1.7, CPU)
        expected = 1.7 * np.random.default_rng(0).standard_normal(size)
        assert np.array_equal(found.numpy(), expected)
