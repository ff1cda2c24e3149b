"""Graphs that call torch's own functions."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dp.graphs import tracing
from pyro_dp.graphs.tracing import called_by_torch


def _function(x, y):
    z = (x * y + 1.5 - y / 2).exp().clamp(0.1, 3.0)
    w = torch.where(z > 1, z.pow(2), 2.0 - z).sum(-1, keepdim=True)
    mask = (w > 0) & torch.isfinite(w)
    parts = torch.cat([z.transpose(0, 1).unsqueeze(0).permute(2, 0, 1).reshape(4, 3), w], -1)
    parts = parts.clone()
    parts[:, 0] += 1.0
    return [z.float(), w, mask, parts.cumsum(0), parts.prod(1), torch.stack([z, x]).squeeze(0)]


def test_the_same_kernels_give_the_same_bits():
    inputs = torch.randn(4, 3), torch.randn(4, 3)
    graph = make_fx(_function)(*inputs)
    code = graph.code
    for found, expected in zip(called_by_torch(graph)(*inputs), graph(*inputs), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert graph.code == code


def test_it_has_functions_for_what_is_frequent():
    graph = make_fx(_function)(torch.randn(4, 3), torch.randn(4, 3))
    overloads = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    known = [each for each in overloads if each in tracing._FUNCTIONS]
    assert len(known) > 0.6 * len(overloads)


def test_modes_of_the_caller_do_not_matter():
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            pytest.fail("a mode saw the graph")

    inputs = torch.randn(4, 3), torch.randn(4, 3)
    call = called_by_torch(make_fx(_function)(*inputs))
    with Refusing():
        call(*inputs)
