"""Streams of random numbers, and the draws that come from each.

* *Privacy noise* and *record sampling* are private: each has a stream of its own, from 256 bits of
  operating-system entropy, made afresh for every release. A stream is never saved, restored or
  shared, so that a forked or resumed process cannot repeat one. Many numbers of noise on an
  accelerator are a function of counters and of 128 bits of the noise's stream
  (:func:`counted_normals`).
* *Local draws* (of latents that belong to one record, of dropout) come from private generators in
  order of use. They are independent and never seen. So those of two neighbouring batches can be
  matched record by record, and the bound on a record's effect holds for any fixed draws.
* *Global draws* (the guide's latents, initial values) are public and come from torch's global
  generator. No private draw touches it: its state after a step must not tell anything about the
  batch.

A bare ``torch.Generator`` keeps 32 bits of its seed on the CPU and is no source of privacy noise.
"""

import math
import os
from typing import Any, Literal, get_args, overload

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from pyro_dp.mechanism.system_random import Stream, SystemGenerator
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.torch_state import sent, signed
from pyro_dp.utils.validation import same

_Purpose = Literal["noise", "sampling", "local"]
_PURPOSES = get_args(_Purpose)


class Randomness:
    """The private streams of one inference.

    :param source: as of :class:`Noise`. A ``torch.Generator`` is advanced, so two inferences that
        are handed the same object get different streams.
    :param rank: the process's in a cluster. The sample of one rank must reveal nothing about
        another's. So each has streams of its own, even with equal seeds.
    """

    def __init__(self, source: torch.Generator | int | str | None = None, rank: int = 0):
        self.secure = same(source, "system")
        self._key = None if source is None or self.secure else _key(source)
        self._rank = (rank,) if rank else ()

    @property
    def seeded(self) -> bool:
        return self._key is not None

    @overload
    def stream(self, purpose: Literal["local"], position: int) -> np.random.Generator: ...

    @overload
    def stream(self, purpose: _Purpose, position: int) -> Stream: ...

    def stream(self, purpose: _Purpose, position: int) -> Stream:
        """A fresh stream for one purpose of one release.

        Local draws need not stand up to guessing (see above): theirs is always a numpy generator.

        :param purpose: "noise", "sampling" or "local".
        :param position: number of releases in the ledger before this one. A repeatable run derives
            its streams from (seed, position), so that inferences that share an accountant never
            share a stream.
        """
        if self.secure and purpose != "local":
            return SystemGenerator()
        seed: ISeedSequence
        if self._key is None:
            seed = _SystemEntropy()
        else:
            place = (_PURPOSES.index(purpose), position, *self._rank)
            seed = np.random.SeedSequence(self._key, spawn_key=place)
        # numpy takes any ISeedSequence, but does not say so in its types.
        return np.random.Generator(np.random.PCG64DXSM(seed))  # type: ignore[arg-type]


class _SystemEntropy(ISeedSequence):
    """Fills the whole state of a bit generator from the operating system."""

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        return np.frombuffer(os.urandom(n_words * np.dtype(dtype).itemsize), dtype)


def _key(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        words = torch.randint(2**32, (4,), generator=generator, device=generator.device)
        return sum(word << (32 * i) for i, word in enumerate(words.tolist()))
    if isinstance(generator, int) and not isinstance(generator, bool) and generator >= 0:
        return generator
    raise ConfigurationError("generator: pass a torch.Generator, a non-negative int or None.")


def drawn(
    stream: np.random.Generator, kind: str, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Local draws: standard normals, or uniforms on (0, 1], in float64.

    :param stream: a private one for local draws.
    """
    numbers = stream.normal(size=shape) if kind == "normal" else 1.0 - stream.random(shape)
    return sent(torch.from_numpy(numbers), device)


_FEW = 2**14  # normals: the host draws them in the time of a hundred short operations
_BLOCK = 2**22  # pairs at a time
_PARITY = 0x1BD11BDAA9FC1A22
_ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
_ROUNDS = 20
_WORD = 2**64
_POSITIVE = 2**63 - 1


def normals(stream: np.random.Generator, size: int, sd: float, device: torch.device) -> Tensor:
    """Independent normals of mean zero, (size,) in float64, private.

    On an accelerator, the host draws and sends few of them. Many are :func:`counted_normals`.

    :param stream: the private stream of one release.
    """
    if device.type != "cpu" and size > _FEW:
        return counted_normals(stream, size, device).mul_(sd)
    drawn = stream.standard_normal(size)
    drawn *= sd
    return sent(torch.from_numpy(drawn), device)


def counted_normals(stream: np.random.Generator, size: int, device: torch.device) -> Tensor:
    """Standard normals on a device: a function of counters, under a key of 128 bits of the stream.

    The function is Threefry-2x64 with 20 rounds (Salmon, Moraes, Dror & Shaw 2011, Parallel random
    numbers: as easy as 1, 2, 3). No statistical test has distinguished this block cipher from
    random bits. Like the stream itself it is no cryptographic generator, which secure mode has.
    Box and Muller's transform makes two normals of two words. The radius has 63 random bits, and is
    cut off at 9.4, beyond which a pair lies with probability 6e-20. Every device finds the same
    numbers up to rounding.
    """
    key = tuple(int(word) for word in stream.integers(_WORD, size=2, dtype=np.uint64))
    half = (size + 1) // 2
    found = torch.empty(2, half, dtype=torch.float64, device=device)
    for start in range(0, half, _BLOCK):
        part = found[:, start : start + _BLOCK]
        counters = torch.arange(start, start + part.shape[1], device=device)
        _box_muller(*threefry(key, counters, torch.zeros_like(counters)), out=part)
    return found.view(-1)[:size]


def threefry(key: tuple[int, ...], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each counter of two words, all (n,) in int64: their 64 bits.

    :param key: two words, as numbers from 0.
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    # Additions of int64 are those of words: modulo 2^64.
    first, second = first + signed(keys[0]), second + signed(keys[1])
    for i in range(_ROUNDS):
        bits = _ROTATIONS[i % len(_ROTATIONS)]
        first += second
        upper = second << bits
        second >>= 64 - bits  # which brings copies of the sign
        second &= 2**bits - 1
        second |= upper
        second ^= first
        if i % 4 == 3:
            number = i // 4 + 1
            first += signed(keys[number % 3])
            second += signed(keys[(number + 1) % 3] + number)
    return first, second


def _box_muller(first: Tensor, second: Tensor, out: Tensor) -> None:
    """:param out: (2, n)."""
    radius = (first & _POSITIVE).double().add_(0.5).mul_(2.0**-63)  # uniform on (0, 1]
    radius = radius.log_().mul_(-2.0).sqrt_()
    angle = second.double().mul_(math.pi * 2.0**-63)  # on [-pi, pi]
    torch.mul(radius, angle.cos(), out=out[0])
    torch.mul(radius, angle.sin(), out=out[1])
