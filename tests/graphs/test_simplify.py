"""Simpler graphs give the same numbers."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_dp.graphs.simplify import simplify
from pyro_dp.graphs.tracing import trace


def simplified(function, *inputs):
    """The graph, and how many operations it had and has; its results are checked."""
    graph = make_fx(function)(*inputs)
    before = len(operations(graph))
    simplify(graph)
    for _ in range(2):  # nothing is kept from one call to the next
        fresh = [torch.randn_like(x) if x.is_floating_point() else x.clone() for x in inputs]
        found = graph(*(x.clone() for x in fresh))
        torch.testing.assert_close(found, function(*fresh), rtol=0.0, atol=0.0, equal_nan=True)
    return graph, before, len(operations(graph))


def operations(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: [(x * 1).exp() / 1 + 0 - 0], 1),
        (lambda x: [x.view(4, 3).expand(4, 3).permute(0, 1).detach().exp()], 1),
        (lambda x: [x * torch.ones(3) * torch.zeros(4, 3).exp()], 2),
        (lambda x: [x + torch.tensor([1.0, 2.0, 3.0]) * 2], 1),
        (lambda x: [torch.zeros_like(x).sum() + torch.full_like(x, 2.0)], 0),
        (lambda x: [x.exp() * x.exp().sum(), x.exp().sum()], 3),
        (lambda x: [x.exp(), x.sin(), x.exp() + x.sin()], 3),
        (lambda x: [x.clone().exp() * torch.empty(4, 3).copy_(x)], 2),
        (lambda x: [torch.empty(4, 3).copy_(x).add_(1.0) * x], 3),
        (lambda x: [torch.empty(4, 3).copy_(torch.ones(4, 3).float().double()) * x], 1),
    ],
)
def test_fewer_operations(function, left):
    _, before, after = simplified(function, torch.ones(4, 3))
    assert before > after == left


def test_what_is_refused_is_different():
    """Equal in Python is not equal in a graph: 2, 2.0 and True; 0.0 and -0.0; other arguments."""
    simplified(lambda n: [n * 2, n * 2.0, n + 1, n + True], torch.arange(3))
    simplified(lambda x: [1 / (x * 0.0), 1 / (x * -0.0)], torch.ones(3))
    simplified(lambda x: [x.sum(0), x.sum(1), x.sum(0, keepdim=True)], torch.ones(3, 3))
    simplified(lambda x: [x - 1, 1 - x, torch.add(x, x, alpha=2), x + x], torch.ones(3))
    simplified(lambda x: [x * torch.nan, x * torch.nan], torch.ones(3))


def test_copies_that_matter_are_kept():
    """A tensor is written to later, or handed out, or its memory has other users."""
    x = torch.ones(4, 3)

    def written(x):
        kept = x.clone()
        changed = x.clone()
        changed[0] += 1.0
        return [kept + changed]

    def partly(x):
        whole = torch.zeros(5, 3)
        whole[:4].copy_(x)
        return [whole]

    def seen_before(x):
        made = torch.empty(4, 3)
        row = made[0]
        made.copy_(x)
        return [row + 1, made.double()]

    for function in (written, partly, seen_before, lambda x: [torch.empty(4, 3).copy_(x[:1])]):
        simplified(function, x)
    for function in (lambda x: [x.clone()], lambda x: [x.clone().view(12)]):
        graph, _, _ = simplified(function, x)
        assert graph(x)[0].data_ptr() != x.data_ptr()
    graph, _, _ = simplified(lambda x: [torch.empty(3, 4).mT.copy_(x)], x)
    assert graph(x)[0].stride() == (1, 4)


def test_numbers_that_become_tensors_are_constants():
    def with_number(*, of):
        graph = make_fx(lambda x: [x / torch.ones(())])(torch.ones(3))
        (ones,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)
        ones.target, ones.args, ones.kwargs = of, (4,), {"dtype": torch.float64}
        simplify(graph)
        return graph, len(operations(graph))

    graph, after = with_number(of=torch.ops.aten._to_copy.default)
    assert after == 1 and torch.equal(graph(torch.ones(3))[0], torch.full((3,), 0.25))
    _, after = with_number(of=torch.ops.aten.randn.default)
    assert after == 2


def test_operations_that_change_the_type_are_kept():
    """1 and 0 are neutral where nothing is promoted."""
    for function in (lambda n: [n * 1.0], lambda n: [n + 0.0], lambda n: [n / 1], lambda n: [n**1]):
        graph, _, after = simplified(function, torch.arange(3))
        assert after == 1 or graph(torch.arange(3))[0].dtype == torch.int64
    simplified(lambda b: [b * 1, b + 0], torch.ones(3, dtype=torch.bool))
    simplified(lambda x: [x * torch.ones(3, dtype=torch.float64)], torch.ones(3).float())
    simplified(lambda x: [x * torch.ones(1), x.sum() + torch.zeros(4, 3)], torch.ones(4, 3))


def _written_constant(x):
    total = torch.zeros(4)
    total.add_(x)
    return [total * 2]


def _written_part(x):
    total = torch.zeros(4)
    total[1:].add_(x[1:])
    return [total * x]


def _written_chunk(x):
    total = torch.zeros(4)
    first, _ = total.chunk(2)
    first.add_(x[:2])
    return [total * x]


def _written_element(x):
    total = torch.ones(2, 4)
    for row in total.unbind():
        row.mul_(x)
    return [total]


def _written_output(x):
    total = torch.ones(4)
    before = total * x
    torch.mul(x, 2.0, out=total)
    return [before, total * x]


def _neutral_copy(x):
    y = x.clone()
    z = y * 1
    y.add_(1)
    return [y, z]


def _neutral_copy_of_a_part(x):
    y = x.clone()
    z = y * 1
    y.chunk(2)[0].add_(1)
    return [y, z]


def _written_copy_of_a_neutral(x):
    y = x.exp()
    z = y + 0
    z.add_(1)
    return [y, z]


def _written_one_of_two(x):
    y, z = x.exp(), x.exp()
    y.add_(1)
    return [y, z]


def _read_before_and_after(x):
    y = x.clone()
    before = y.sum()
    y[2:].mul_(3)
    return [before, y.sum()]


def _repeated_row_that_is_written(x):
    y = x.clone()
    picked = y.view(4, 1).expand(4, 6)[torch.arange(4).unsqueeze(1), torch.zeros(4, 1).long()]
    y.add_(1)
    return [picked, y]


@pytest.mark.parametrize(
    "function",
    [
        _written_constant,
        _written_part,
        _written_chunk,
        _written_element,
        _written_output,
        _neutral_copy,
        _neutral_copy_of_a_part,
        _written_copy_of_a_neutral,
        _written_one_of_two,
        _read_before_and_after,
        _repeated_row_that_is_written,
    ],
)
def test_what_is_written_in_place_is_left_alone(function):
    simplified(function, torch.ones(4))


def test_inputs_that_are_written():
    simplified(lambda x: [x * 1, x.add_(1), x * 1], torch.ones(3))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_captured_tensors_are_no_constants(shape):
    """They may change; a tensor made afresh in each call may not."""
    captured = torch.ones(shape)

    def function(x):
        return [x * captured.exp() + captured.expand(3).sum() * torch.ones(3)]

    graph = make_fx(function)(torch.ones(3))
    simplify(graph)
    captured.fill_(5.0)
    x = torch.randn(3)
    torch.testing.assert_close(graph(x), function(x))


def test_a_repeated_row_is_the_row():
    """Each record picks its index from equal rows."""

    def function(x, indices):
        return [torch.vmap(lambda row, i: row.expand(6, 3)[i.reshape(1)].exp())(x, indices)]

    graph, _, _ = simplified(function, torch.ones(5, 3), torch.tensor([0, 3, 5, 1, 1]))
    assert not any("index" in target for target in operations(graph))


@pytest.mark.parametrize(
    "first",
    [
        lambda: torch.arange(5).flip(0).unsqueeze(1),
        lambda: torch.arange(1, 6).remainder(5).unsqueeze(1),
        lambda: torch.zeros(5, 1, dtype=torch.long),
        lambda: torch.arange(5).unsqueeze(0).expand(5, 5)[:, :1],
    ],
)
def test_other_rows_are_picked(first):
    def function(x, indices):
        return [x.unsqueeze(1).expand(5, 6, 3)[first(), indices]]

    graph, _, _ = simplified(function, torch.ones(5, 3), torch.tensor([[0], [3], [5], [1], [1]]))
    assert any("index" in target for target in operations(graph))


def test_rows_that_differ_are_picked():
    def function(x, indices):
        return [x[torch.arange(5).unsqueeze(1), indices]]

    simplified(function, torch.ones(5, 6, 3), torch.tensor([[0], [3], [5], [1], [1]]))


@pytest.mark.parametrize(
    ("places", "stacked"), [((2, 0, 1), True), ((0, 1), False), ((0, 1, 1), False), ((1,), False)]
)
def test_parts_of_an_axis_are_stacked(places, stacked):
    """This needs each part exactly once."""

    def function(x):
        zeros = [torch.ops.aten.select_backward(x * (i + 1), [2, 3, 4], 1, i) for i in places]
        return [sum(zeros[1:], zeros[0])]

    graph, _, _ = simplified(function, torch.ones(2, 4))
    assert ("aten.stack.default" in operations(graph)) == stacked


@pytest.mark.parametrize("masked", ["", "outside", "in place", "through a view"])
def test_attention_with_a_mask_looks_for_rows_without_weights(masked):
    def function(x, y):
        product, mask = torch.bmm(x, y), torch.full((4, 4), -torch.inf)
        if masked == "outside":
            product = product + mask
        elif masked == "in place":
            product.add_(mask)
        elif masked:
            product.view(2, 16)[0].add_(mask.flatten())
        return [torch.ops.aten._safe_softmax(product.view(2, 4, 4), -1)]

    graph, _, _ = simplified(function, torch.ones(2, 4, 3), torch.ones(2, 3, 4))
    assert ("aten._safe_softmax.default" in operations(graph)) == bool(masked)


def test_constant_masks_become_places():
    """A compiler does not know how many entries a mask selects."""

    def function(x, y):
        mask, column = torch.ones(3, 3).triu() > 0, torch.arange(3) > 0
        total = torch.zeros(3, 3).index_put((mask,), y, accumulate=True)
        written = x.clone()
        written[:, column] = 0.0
        return [x[mask], x[:, column], total, written, x[mask.logical_not()].sum()]

    graph, _, _ = simplified(function, torch.randn(3, 3), torch.randn(6))
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default):
            places = [getattr(graph, each.target) for each in node.args[1] if each is not None]
            assert all(place.dtype == torch.int64 for place in places)


def test_masks_that_depend_on_the_input_stay():
    simplified(lambda x: [torch.zeros(4).index_put((x > 0,), torch.tensor(1.0))], torch.randn(4))


def test_draws_are_no_constants_and_not_shared():
    """Draws stay in a graph that is traced to draw."""

    def drawn(x):
        fixed = torch.full((3,), 0.5)
        return [torch.bernoulli(fixed), *(torch._standard_gamma(x) for _ in range(2))]

    graph = trace(drawn, [torch.ones(3)], draws=True)
    found = [graph(torch.ones(3)) for _ in range(20)]
    assert len({tuple(fixed.tolist()) for fixed, _, _ in found}) > 1
    assert not any(torch.equal(one, other) for _, one, other in found)
    torch.manual_seed(0)
    one = graph(torch.ones(3))
    torch.manual_seed(0)
    assert all(map(torch.equal, one, drawn(torch.ones(3))))
