"""Derivatives that are carried forward through a traced graph, against automatic ones."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from pyro_dp.graphs.jets import ALONG, Jet, JetGraph
from pyro_dp.graphs.tracing import NotTraceable

LENGTH, DRAWS, COUNT = 7, 3, 5
ROWS = torch.rand(LENGTH, 4) + 0.5
FUNCTIONS = {
    "curves": lambda a, x: (a[:, :1].exp() * x + a[:, 1:]).sigmoid() / (1 + a[:, :1] ** 2),
    "logarithms": lambda a, x: (a[:, :1] ** 2 + 1).log() - (a[:, 1:].exp() + x).reciprocal(),
    "powers": lambda a, x: 3.0 - (a[:, 1:].exp() * x) ** 3 / a[:, :1].exp(),
    "softmax": lambda a, x: (a[:, :1] * x - a[:, 1:]).log_softmax(-1),
    "sums of exponentials": lambda a, x: (a[:, :1] * x).logsumexp(-1, keepdim=True) - a,
    "axes": lambda a, x: pad(a.exp(), (1, 1)).cumsum(1)[:, 1:4, None].view(-1, 1, 3)[:, 0],
    "joined": lambda a, x: torch.cat([a[:, :1].exp(), a[:, 1:] * x, x], 1)[:, [2, 0, 0, 1]],
}


def written_through_a_view(x):
    """The result does not depend on the write, as far as a graph's edges tell."""
    found = torch.zeros(len(x), 2)
    found[:, 0] = x[:, 0]
    return found


REFUSED = {
    "whole sums": lambda a, x: a.exp().sum(0, keepdim=True).expand(LENGTH, 2),
    "unknown": lambda a, x: a.sin(),
    "written": lambda a, x: a * written_through_a_view(x),
    "padded": lambda a, x: pad(a.exp(), (0, 1), value=1.0),
}


def graph_of(function):
    graph = make_fx(function)(torch.randn(LENGTH, 2), ROWS)
    leaf, _ = graph.graph.find_nodes(op="placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    return JetGraph(graph, [output.args[0]], [leaf])


def leaf_of(values):
    """Two directions, of (2, J, B)."""
    one, other = torch.eye(2)
    return Jet(values, {0: one[:, None, None], 1: other[:, None, None]})


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    function, values = FUNCTIONS[name], torch.randn(2, DRAWS, COUNT)
    (found,) = graph_of(function)([ROWS, ROWS], [leaf_of(values)], COUNT)
    shape = torch.broadcast_shapes(found.value.shape, (1, DRAWS, COUNT))
    for j in range(DRAWS):
        for b in range(COUNT):

            def of(a, b=b):
                return function(a[None], ROWS[b : b + 1])[0]

            a = values[:, j, b]
            gradient = torch.func.jacrev(of)(a)
            hessian = torch.func.jacrev(torch.func.jacrev(of))(a)
            torch.testing.assert_close(found.value.expand(shape)[:, j, b], of(a))
            for i in range(2):
                own = torch.as_tensor(found.first.get(i, 0.0)).expand(shape)[:, j, b]
                torch.testing.assert_close(own, gradient[:, i])
                for k in range(i, 2):
                    own = torch.as_tensor(found.second.get((i, k), 0.0)).expand(shape)[:, j, b]
                    torch.testing.assert_close(own, hessian[:, i, k])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(NotTraceable):
        graph_of(REFUSED[name])([ROWS, ROWS], [leaf_of(torch.randn(2, DRAWS, COUNT))], COUNT)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: a.log_softmax(-1),
        lambda a, x: torch.cat([a, x], 1),
        lambda a, x: a[:, None].transpose(1, 2) * x[:, None, :2],
        lambda a, x: a[:, :, None].view(-1, 2, 1) * x[:, None, :2],
        lambda a, x: a.cumsum(1),
    ],
)
def test_a_whole_axis_stays_where_it_is(function):
    """Each of its elements has its own derivative."""
    leaf = Jet(torch.randn(2, DRAWS, COUNT), {ALONG: 1.0})
    with pytest.raises(NotTraceable):
        graph_of(function)([ROWS, ROWS], [leaf], COUNT)


def test_a_whole_axis_may_be_shorter():
    function = lambda a, x: (a[:, None, :] * x[:, None, :1]).exp().view(-1, 2)  # noqa: E731
    values = torch.randn(1, DRAWS, COUNT)
    (found,) = graph_of(function)([ROWS, ROWS], [Jet(values, {ALONG: 1.0})], COUNT)
    expected = (values * ROWS[:COUNT, 0]).exp()
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(found.first[ALONG], expected * ROWS[:COUNT, 0])
