"""Rows that stand for the data are public."""

import pytest
import torch

from pyro_dp.records import stand_ins
from pyro_dp.records.stand_ins import is_table, placeholder, spacing, varied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_placeholders(dtype):
    table = torch.tensor([[5.0, 0.0], [7.0, 3.0]]).to(dtype)
    shown = placeholder(table)
    assert shown.shape == table.shape and shown.dtype == dtype
    assert torch.equal(shown, torch.full_like(table, 1 if dtype.is_floating_point else 0))


def test_what_has_no_rows_stays():
    for leaf in (3, "name", None, torch.tensor(2.0)):
        assert not is_table(leaf) and placeholder(leaf) is leaf


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_varied_rows(monkeypatch, shape, dtype, overlapping):
    """The first row is the same for all seeds; others that are looked at have nothing of it."""
    if overlapping:
        monkeypatch.setattr(stand_ins, "_MOST_SEPARATE", 0)
    table, length = torch.zeros(100, *shape, dtype=dtype), 100
    one, other = (varied(table, length, seed) for seed in (1, 2))
    assert one.shape == other.shape == (length, *shape) and one.dtype == dtype
    assert torch.equal(one[0], other[0])
    step = spacing(table, length)
    assert step == (torch.Size(shape).numel() if overlapping else 1)
    if dtype.is_floating_point:
        assert ((one >= 0.25) & (one <= 1.0)).all()
        for i in (step, 2 * step):
            assert not (one[i] == other[i]).any() and not (one[i] == one[0]).any()
        assert not torch.isclose(one.mean(0), other.mean(0), rtol=1e-6, atol=0.0).any()
    else:
        assert set(one.flatten().tolist()) == {0, 1}
        assert not varied(table, length, 1, integers=False).any()


def test_many_rows_take_little_memory():
    rows = varied(torch.zeros(1, 50), 10**6, seed=0)
    assert rows.untyped_storage().nbytes() < 10**7 * rows.element_size()
