"""What an accelerator asks of the host: copies that wait for nothing, and parts that fit."""

import torch
from torch import Tensor

_BYTES = 8  # of a number
_HELD = 16  # times that a pass holds each number of a record, in all that it computes
_SHARE = 8  # a pass takes an eighth of the memory
_MOST = 2**20  # records: more of them gain nothing


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's, on a device; itself, where that is the CPU.

    A copy from pinned memory is one more entry of what the device has to do. For one from other
    memory torch waits until all that is done.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_on(device: torch.device, numbers: int) -> int | None:
    """How many records of so many numbers an accelerator works on at a time; None: no limit.

    It follows from its whole memory, which is public: how much is free tells of earlier batches.

    :param numbers: of a record's data and of its part of a release.
    """
    if device.type != "cuda":
        return None
    _, total = torch.cuda.mem_get_info(device)
    return max(1, min(_MOST, total // (_SHARE * _HELD * _BYTES * max(1, numbers))))


def signed(word: int) -> int:
    """The number of int64 with the same 64 bits: what torch computes with in place of words.

    :param word: in [0, 2^64).
    """
    return (word + 2**63) % 2**64 - 2**63
