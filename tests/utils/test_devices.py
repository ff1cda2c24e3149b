"""The host's part of work on an accelerator, tested without one."""

import torch

from pyro_dp.utils.torch_state import rows_on, sent, signed


def test_words_and_numbers_have_the_same_bits():
    for word in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert signed(word) % 2**64 == word
        assert -(2**63) <= signed(word) < 2**63


def test_what_is_sent_to_the_cpu_is_there():
    tensor = torch.ones(3)
    assert sent(tensor, torch.device("cpu")) is tensor


def test_passes_follow_from_the_whole_memory(monkeypatch):
    """Free memory would reveal how large the earlier batches were."""
    gigabytes, cuda = 80 * 10**9, torch.device("cuda", 0)
    found = []
    for free in (gigabytes, 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, gigabytes))
        found.append([rows_on(cuda, numbers) for numbers in (0, 1000, 10**6, 10**12)])
    assert found[0] == found[1] == [2**20, 78125, 78, 1]
    assert rows_on(torch.device("cpu"), 1000) is None
