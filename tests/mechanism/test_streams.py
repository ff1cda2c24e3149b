"""Streams: distinct, private, and nothing seen of them from outside."""

import random

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_dp import ConfigurationError
from pyro_dp.mechanism.streams import Randomness, drawn
from pyro_dp.utils.torch_state import forked_rng, private_rng


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
    """In the order of use, and of the kind that is asked for."""
    stream, cpu = np.random.default_rng(0), torch.device("cpu")
    normal, uniform, other = (
        drawn(stream, kind, (2000, 11), cpu) for kind in ("normal", "uniform", "normal")
    )
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-8
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-8
    assert normal.dtype == torch.float64 and not torch.equal(normal, other)
    correlation = np.corrcoef(normal.numpy(), rowvar=False) - np.eye(11)
    assert np.abs(correlation).max() < 6.5 / np.sqrt(2000)
