"""Streams of random numbers: who draws what from where.

* *Privacy noise*, *record sampling* and *local draws* (latents that belong to one record) are private: each has its own
  stream, from 256 bits of operating-system entropy, made afresh for every release. A stream is never saved, restored or
  shared, so a forked or resumed process cannot repeat one.
* *Global draws* (the guide's latents, initial values) are public and come from torch's global generator. No private
  draw touches it: its state after a step must not tell how many records were in the batch.

A bare ``torch.Generator`` keeps 32 bits of its seed on the CPU and is no source of privacy noise.
"""

import contextlib
import secrets
from collections.abc import Iterator

import numpy as np
import pyro
import torch

from pyro_dp.errors import ConfigurationError

_PURPOSES = ("noise", "sampling", "local")
_MT19937_WORDS = 624


class Randomness:
    """The private streams of one inference.

    :param generator: ``None`` for operating-system entropy; a ``torch.Generator`` or an ``int`` for a repeatable run. A
        ``torch.Generator`` is advanced, so two inferences that are handed the same object get different streams.
    """

    def __init__(self, generator: torch.Generator | int | None = None):
        self._key = None if generator is None else _key(generator)

    @property
    def seeded(self) -> bool:
        return self._key is not None

    def stream(self, purpose: str, position: int) -> np.random.Generator:
        """A fresh stream for one purpose of one release.

        :param purpose: "noise", "sampling" or "local".
        :param position: number of releases in the ledger before this one. A repeatable run derives its streams from
            (seed, position), so that inferences that share an accountant never share a stream.
        """
        entropy = secrets.randbits(256) if self._key is None else self._key
        spawn_key = (_PURPOSES.index(purpose), position)
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy, spawn_key=spawn_key)))


def _key(generator: torch.Generator | int) -> int:
    if isinstance(generator, torch.Generator):
        words = torch.randint(2**32, (4,), generator=generator, device=generator.device)
        return sum(word << (32 * i) for i, word in enumerate(words.tolist()))
    if isinstance(generator, int) and not isinstance(generator, bool) and generator >= 0:
        return generator
    raise ConfigurationError("generator: pass a torch.Generator, a non-negative int or None.")


@contextlib.contextmanager
def forked_rng() -> Iterator[None]:
    """Restore the public generators (torch, numpy, Python) on exit."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    state = pyro.util.get_rng_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            pyro.util.set_rng_state(state)


@contextlib.contextmanager
def private_rng(stream: np.random.Generator) -> Iterator[None]:
    """Within: torch's global generators are seeded privately. Public state is restored on exit."""
    with forked_rng():
        # The whole Mersenne Twister state is set, because manual_seed() keeps 32 bits of its argument.
        words = stream.integers(2**32, size=_MT19937_WORDS, dtype=np.uint64)
        state = torch.Generator().manual_seed(0).get_state()
        state[24 : 24 + 8 * _MT19937_WORDS] = torch.from_numpy(words.view(np.uint8))
        torch.set_rng_state(state)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(stream.integers(2**63)))
        yield
