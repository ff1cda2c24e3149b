"""Streams: distinct, private, and nothing seen of them from outside.

Noise from counters: the published vectors of the cipher, and normals of it.
"""

import random

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_dp import ConfigurationError
from pyro_dp.mechanism import streams
from pyro_dp.mechanism.streams import Randomness, counted_normals, drawn, normals, threefry
from pyro_dp.utils.torch_state import forked_rng, private_rng, signed

CPU = torch.device("cpu")
ONES = 2**64 - 1
PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)


def first(randomness, purpose="noise", position=0):
    return tuple(randomness.stream(purpose, position).integers(2**63, size=4))


def test_streams_differ_by_purpose_and_position():
    source = Randomness(7)
    purposes = ("noise", "sampling", "local")
    streams = {first(source, purpose, position) for purpose in purposes for position in range(50)}
    assert len(streams) == 150


def test_operating_system_entropy_never_repeats():
    """Also for the same position of the same object, as after a fork or a restored state."""
    source = Randomness()
    assert len({first(source) for _ in range(50)} | {first(Randomness()) for _ in range(50)}) == 100


def test_seeds_repeat():
    assert first(Randomness(3)) == first(Randomness(3)) != first(Randomness(4))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert first(Randomness(generators[0])) == first(Randomness(generators[1]))


def test_one_generator_in_two_runs_gives_two_streams():
    generator = torch.Generator().manual_seed(3)
    assert first(Randomness(generator)) != first(Randomness(generator))


@pytest.mark.parametrize("generator", [-1, 1.5, "seed", True])
def test_bad_generator(generator):
    with pytest.raises(ConfigurationError, match="generator"):
        Randomness(generator)


def public_draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


@pytest.mark.parametrize("consumed", [0, 1, 1000])
def test_private_draws_do_not_move_public_generators(consumed):
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = public_draws()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with private_rng(np.random.default_rng(1)):
        torch.randn(consumed), np.random.rand(consumed), [random.random() for _ in range(consumed)]
    assert public_draws() == expected


def test_private_rng_uses_more_than_32_bits():
    """Two streams that agree in the seed that torch would keep give different draws."""

    class Words:
        def __init__(self, last):
            self.words = np.zeros(624, dtype=np.uint64)
            self.words[[0, -1]] = 1, last

        def integers(self, *_, size=None, dtype=np.uint64):
            return self.words[:size].astype(dtype) if size else 0

    draws = []
    for last in (1, 2):
        with private_rng(Words(last)):
            draws.append(torch.rand(1000))
    assert not torch.equal(*draws)


def test_private_rng_is_uniform():
    with private_rng(np.random.default_rng(1)):
        assert stats.kstest(torch.rand(20_000).numpy(), "uniform").pvalue > 1e-8


def test_forked_rng_restores_after_an_error():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError), forked_rng():
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.rand(2), expected)


def test_local_draws():
    """Draws come in the order of use, and are of the requested kind."""
    stream = np.random.default_rng(0)
    normal, uniform, other = (
        drawn(stream, kind, (2000, 11), CPU) for kind in ("normal", "uniform", "normal")
    )
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-8
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-8
    assert normal.dtype == torch.float64 and not torch.equal(normal, other)
    correlation = np.corrcoef(normal.numpy(), rowvar=False) - np.eye(11)
    assert np.abs(correlation).max() < 6.5 / np.sqrt(2000)


def counted(size, seed=0):
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


@pytest.mark.long
def test_they_are_standard_normals():
    found = counted(400_001).numpy()
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
    assert torch.equal(first, counted(1000))
    assert not torch.equal(first, counted(1000, seed=1))


def test_parts_do_not_show(monkeypatch):
    whole = counted(1001)
    monkeypatch.setattr(streams, "_BLOCK", 100)
    assert torch.equal(counted(1001), whole)


def test_on_the_cpu_they_are_those_of_the_stream():
    for size in (10, 2 * streams._FEW):
        found = normals(np.random.default_rng(0), size, 1.7, CPU)
        expected = 1.7 * np.random.default_rng(0).standard_normal(size)
        assert np.array_equal(found.numpy(), expected)
