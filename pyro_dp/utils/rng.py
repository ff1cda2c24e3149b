"""The global random generators: left as they were, or private for a while."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pyro
import torch

_MT19937_WORDS = 624


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


def torch_states() -> list[torch.Tensor]:
    """Of torch's global generators: the host's, and those of devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def set_torch_states(states: list[torch.Tensor]) -> None:
    """As they were."""
    on_host, *devices = states
    torch.set_rng_state(on_host)
    if devices and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(devices)


@contextlib.contextmanager
def private_rng(stream: np.random.Generator) -> Iterator[None]:
    """Within: the global generators are seeded privately. Public state is restored on exit."""
    with forked_rng():
        # The whole Mersenne Twister state: manual_seed() would keep 32 bits of its argument.
        words = stream.integers(2**32, size=_MT19937_WORDS, dtype=np.uint64)
        state = torch.Generator().manual_seed(0).get_state()
        state[24 : 24 + 8 * _MT19937_WORDS] = torch.from_numpy(words.view(np.uint8))
        torch.set_rng_state(state)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(stream.integers(2**63)))
        np.random.seed(stream.integers(2**32, size=8, dtype=np.uint32))
        random.seed(int(stream.integers(2**63)))
        yield
