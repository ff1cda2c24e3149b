"""Which graphs are affine in their first input."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dp.graphs.factorisation import affine_nodes

Z, ROWS, GROUP = torch.randn(5), torch.randn(7, 4), torch.tensor([0, 1, 1, 0, 1, 0, 0])


def is_affine(function, *inputs):
    moving, affine = affine_nodes(make_fx(function)(*inputs))
    return moving == affine


def _glm(z, x):
    return [x @ z[:4] + z[4], 2 - x * z[4:]]


def _squared_rows(z, x):
    return [(x**2).exp() @ z[:4]]


@pytest.mark.parametrize(
    "function",
    [
        _glm,
        lambda z, x: [x @ z[:4] + torch.stack([z[4], -z[4] / 3])[GROUP]],
        _squared_rows,
    ],
)
def test_affine(function):
    assert is_affine(function, Z, ROWS)


@pytest.mark.parametrize(
    "function",
    [
        lambda z, x: [(x @ z[:4]).clamp(-30.0, 30.0)],
        lambda z, x: [(x @ z[:4]) * z[4]],
        lambda z, x: [x / z[:4]],
        lambda z, x: [torch.where(z[4] > 0, x @ z[:4], x @ z[1:])],
        lambda z, x: [x @ z[:4] ** 2],
    ],
)
def test_not_affine(function):
    assert not is_affine(function, Z, ROWS)


def test_in_another_input():
    assert is_affine(lambda x, z: _glm(z, x), ROWS, Z)
    assert not is_affine(lambda x, z: _squared_rows(z, x), ROWS, Z)
