"""Code that overwrites tensors while all records run at once."""

import operator

import pytest
import torch

from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.torch_modes import RecordMode


def _set_item(x, y):
    x[1:] = y[1:]
    return x


def _masked(x, y):
    x.masked_fill_(y > 0, 7.0)
    return x


WRITES = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "add_": lambda x, y: (x.add_(y), x)[1],
    "add_, by name": lambda x, y: x.add_(other=y),
    "copy_": lambda x, y: (x.copy_(y), x)[1],
    "item": _set_item,
    "masked": _masked,
    "twice": lambda x, y: operator.iadd(_set_item(x, y), y),
}


def at_once(function, rows):
    def one(row):
        with RecordMode(LocalDraws()):
            return function(row)

    return torch.vmap(one)(rows)


@pytest.mark.parametrize("name", WRITES)
def test_what_is_alike_for_all_becomes_one_of_each(name):
    """Under its own name and under others; the gradient, too."""
    rows = torch.rand(3, 4) + 0.5

    def gradient(row):
        def total(row):
            x = torch.full((4,), 2.0)
            other = x
            result = WRITES[name](x, row)
            return (result * row).sum() + (x * other).sum() + x[2]

        return torch.func.grad(total)(row)

    expected = torch.stack([gradient(row) for row in rows])
    torch.testing.assert_close(at_once(gradient, rows), expected)


@pytest.mark.parametrize("operation", [operator.ior, operator.iand, operator.ixor])
def test_masks(operation):
    rows = torch.tensor([[True, False, True], [False, False, True]])

    def masked(row):
        return operation(torch.tensor([True, False, False]), row)

    expected = torch.stack([masked(row) for row in rows])
    assert torch.equal(at_once(masked, rows), expected)


def test_what_all_share_is_not_written_to():
    """A tensor from outside keeps its numbers, and a value shared by all stays one."""
    shared = torch.zeros(4)

    def changed(row):
        constant = torch.ones(4)
        constant += 1
        assert constant.sum() == 8  # a number can be read out of it
        return operator.iadd(shared, row) + constant

    rows = torch.rand(3, 4)
    torch.testing.assert_close(at_once(changed, rows), rows + 2)
    assert torch.equal(shared, torch.zeros(4))
