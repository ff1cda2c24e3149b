"""The state of torch: global generators, devices, the memory of tensors, and threads."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_MT19937_WORDS = 624


@contextlib.contextmanager
def forked_rng() -> Iterator[None]:
    """Restore the public generators (torch, numpy, Python) on exit."""
    on_devices, state = torch_states(), pyro.util.get_rng_state()
    try:
        yield
    finally:
        pyro.util.set_rng_state(state)
        set_torch_states(on_devices)


def torch_states() -> list[torch.Tensor]:
    """States of torch's global generators: the host's, and those of CUDA devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def set_torch_states(states: list[torch.Tensor]) -> None:
    """Restore the result of :func:`torch_states`."""
    on_host, *devices = states
    torch.set_rng_state(on_host)
    if devices and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(devices)


def state_of(generator: Any) -> Any:
    """The state of a generator of Python, numpy or torch, as an object that stays unchanged."""
    bits = getattr(generator, "bit_generator", generator)
    if isinstance(bits, np.random.BitGenerator):
        return bits.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    bits = getattr(generator, "bit_generator", generator)
    if isinstance(bits, np.random.BitGenerator):
        bits.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator of Python, numpy or torch."""
    bits = getattr(generator, "bit_generator", generator)
    if isinstance(bits, np.random.BitGenerator):
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed % 2**32)


@contextlib.contextmanager
def put_back(generators: Sequence[Any]) -> Iterator[None]:
    """Restore the states of these generators on exit."""
    states = [state_of(each) for each in generators]
    try:
        yield
    finally:
        for each, state in zip(generators, states, strict=True):
            set_state_of(each, state)


def seed_torch(seed: int) -> None:
    """Seed torch's global generators.

    ``torch.manual_seed`` records stack traces for unused devices. That takes longer than the
    draws of a model.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def private_rng(stream: np.random.Generator) -> Iterator[None]:
    """Seed the global generators privately inside the block, and restore their public state."""
    with forked_rng(), private_torch(stream):
        np.random.seed(stream.integers(2**32, size=8, dtype=np.uint32))
        random.seed(int(stream.integers(2**63)))
        yield


@contextlib.contextmanager
def private_torch(stream: np.random.Generator) -> Iterator[None]:
    """As :func:`private_rng`, for torch alone and ten times as fast."""
    before = torch_states()
    try:
        # The whole Mersenne Twister state: manual_seed() would keep 32 bits of its argument.
        words = stream.integers(2**32, size=_MT19937_WORDS, dtype=np.uint64)
        state = torch.Generator().manual_seed(0).get_state()
        state[24 : 24 + 8 * _MT19937_WORDS] = torch.from_numpy(words.view(np.uint8))
        torch.set_rng_state(state)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(stream.integers(2**63)))
        yield
    finally:
        set_torch_states(before)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. For the CPU this returns the tensor itself.

    A copy from pinned memory is asynchronous. From other memory torch waits for it.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_on(device: torch.device, numbers: int) -> int | None:
    """How many records of this size an accelerator processes at a time; None for no limit.

    It depends on the total memory, which is public. Free memory would reveal earlier batches.

    :param numbers: how many numbers a record has.
    """
    if device.type != "cuda":
        return None
    _, total = torch.cuda.mem_get_info(device)
    # A pass holds about 16 copies of each number (8 bytes), and may fill 1/8 of the memory.
    return max(1, min(2**20, total // (8 * 16 * 8 * max(1, numbers))))


def signed(word: int) -> int:
    """The int64 with the same 64 bits as a word in [0, 2^64)."""
    return (word + 2**63) % 2**64 - 2**63


def version(value: Any) -> int:
    """How often a tensor was overwritten; 0 if torch does not count that."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return 0
    return 0 if value.is_inference() else value._version


def address(tensor: Tensor) -> int:
    """The address of the memory that a tensor shares with its views; -1 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def rows_in_cache(size: int) -> int:
    """How many rows of ``size`` numbers to process at a time: about as many as fit the cache."""
    return max(1024, min(32768, 2**20 // size))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread per operation inside the block.

    A microbatch is too small for more. Several threads wait for each other and for NumPy's, and
    take up to ten times as long. (One Python thread per microbatch was not faster.)
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
