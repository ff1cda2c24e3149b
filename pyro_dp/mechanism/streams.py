"""The streams of random numbers, private and public.

* *Privacy noise* and *record sampling* are private. Each release has a new stream for each, from
  256 bits of operating-system entropy. Streams are never saved, restored or shared, so a forked or
  resumed process cannot repeat one. On an accelerator, much noise is a function of counters under a
  key of 128 bits, drawn from the noise stream (:func:`counted_normals`).
* *Local draws* (of latents that belong to one record, of dropout) come from private generators in
  order of use. They are independent and never published. So the draws of two neighbouring batches
  can be matched record by record. The bound on a record's effect holds for any fixed draws.
* *Global draws* (the guide's latents, initial values) are public, and come from torch's global
  generator. Private draws never use it, because its state after a step must not reveal anything
  about the batch.

A bare ``torch.Generator`` on the CPU keeps only 32 bits of its seed. So it never draws noise.
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

    :param source: see :class:`Noise`. A ``torch.Generator`` is advanced, so two inferences with the
        same generator get different streams.
    :param rank: this process's rank in a cluster. Each rank has its own streams, even with equal
        seeds, because the sample of one must reveal nothing about another's.
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
        """A new stream for one purpose of one release.

        Local draws always come from a numpy generator, because the guarantee does not depend on
        their secrecy.

        :param purpose: "noise", "sampling" or "local".
        :param position: number of releases in the ledger before this one. A seeded run derives its
            streams from (seed, position). So inferences that share an accountant never share a
            stream.
        """
        if self.secure and purpose != "local":
            return SystemGenerator()
        seed: ISeedSequence
        if self._key is None:
            seed = _SystemEntropy()
        else:
            place = (_PURPOSES.index(purpose), position, *self._rank)
            seed = np.random.SeedSequence(self._key, spawn_key=place)
        # numpy takes any ISeedSequence, but its annotations do not say so.
        return np.random.Generator(np.random.PCG64DXSM(seed))  # type: ignore[arg-type]


class _SystemEntropy(ISeedSequence):
    """A seed sequence that fills the whole state of a bit generator from the operating system."""

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
    """Local draws in float64: standard normals if ``kind`` is "normal", else uniforms on (0, 1]."""
    numbers = stream.normal(size=shape) if kind == "normal" else 1.0 - stream.random(shape)
    return sent(torch.from_numpy(numbers), device)


_FEW = 2**14  # normals that the host draws quickly, in the time of a hundred short operations
_BLOCK = 2**22  # pairs of normals that are computed at a time
_PARITY = 0x1BD11BDAA9FC1A22
_ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
_ROUNDS = 20
_WORD = 2**64
_POSITIVE = 2**63 - 1


def normals(stream: np.random.Generator, size: int, sd: float, device: torch.device) -> Tensor:
    """Independent normals of mean zero, (size,) in float64: the noise of one release.

    For an accelerator, the host draws a few numbers and sends them. The accelerator computes many
    numbers itself (:func:`counted_normals`).

    :param stream: the private noise stream of the release.
    :param sd: their standard deviation.
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
    random bits. Like the stream itself, it is not a cryptographic generator; secure mode uses one.
    The Box-Muller transform turns two words into two normals. The radius has 63 random bits, and is
    at most 9.4. A pair of normals exceeds that with probability 6e-20. All devices compute the same
    numbers, up to rounding.
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
    """Two random words for each counter of two words. All are (n,), with 64 bits in an int64.

    :param key: two words, as unsigned numbers.
    """
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    # int64 addition wraps modulo 2^64, as that of words does.
    first, second = first + signed(keys[0]), second + signed(keys[1])
    for i in range(_ROUNDS):
        bits = _ROTATIONS[i % len(_ROTATIONS)]
        first += second
        upper = second << bits
        second >>= 64 - bits  # an arithmetic shift, which fills in copies of the sign
        second &= 2**bits - 1
        second |= upper
        second ^= first
        if i % 4 == 3:
            number = i // 4 + 1
            first += signed(keys[number % 3])
            second += signed(keys[(number + 1) % 3] + number)
    return first, second


def _box_muller(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Write the normals of these words into ``out``, (2, n)."""
    radius = (first & _POSITIVE).double().add_(0.5).mul_(2.0**-63)  # uniform on (0, 1]
    radius = radius.log_().mul_(-2.0).sqrt_()
    angle = second.double().mul_(math.pi * 2.0**-63)  # on [-pi, pi]
    torch.mul(radius, angle.cos(), out=out[0])
    torch.mul(radius, angle.sin(), out=out[1])
