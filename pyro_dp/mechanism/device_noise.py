"""Normals of a private stream, on the device where the sums are.

On the CPU they are the stream's own. So they are elsewhere where they are few: they are sent in
less time than an accelerator takes to begin. Many are a function of counters there, keyed by 128
bits that the stream draws for the purpose: nothing is sent, and the host does not wait.

The function is Threefry-2x64 with 20 rounds (Salmon, Moraes, Dror & Shaw 2011, Parallel random
numbers: as easy as 1, 2, 3), a block cipher of which no statistical test has told the output from
random bits; like the stream itself it is no cryptographic generator, which ``secure=True`` has.
Box and Muller's transform makes two normals of two words. The radius has 63 random bits, and is
cut off at 9.4, beyond which a pair lies with probability 6e-20.
"""

import math

import numpy as np
import torch
from torch import Tensor

from pyro_dp.utils.torch_state import sent, signed

_FEW = 2**14  # normals: the host draws them in the time of a hundred short operations
_BLOCK = 2**22  # pairs at a time
_PARITY = 0x1BD11BDAA9FC1A22
_ROTATIONS = (16, 42, 12, 31, 16, 32, 24, 21)
_ROUNDS = 20
_WORD = 2**64
_POSITIVE = 2**63 - 1


def normals(stream: np.random.Generator, size: int, sd: float, device: torch.device) -> Tensor:
    """Independent normals of mean zero, (size,) in float64, private.

    :param stream: the private stream of one release.
    :param sd: their standard deviation.
    """
    if device.type != "cpu" and size > _FEW:
        return counted_normals(stream, size, device).mul_(sd)
    drawn = stream.standard_normal(size)
    drawn *= sd
    return sent(torch.from_numpy(drawn), device)


def counted_normals(stream: np.random.Generator, size: int, device: torch.device) -> Tensor:
    """Standard normals from counters, on every device the same but for rounding."""
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
