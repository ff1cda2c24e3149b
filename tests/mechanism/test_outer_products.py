"""Matrix products that are never multiplied out: against the products."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from pyro_dp.graphs import tracing
from pyro_dp.graphs.factorisation import Lookup, Product, factorised
from pyro_dp.graphs.tracing import trace
from pyro_dp.infer.svi.traced_step import joined as joined_parts
from pyro_dp.mechanism.clipping import clipped_sums
from pyro_dp.mechanism.contributions import Joined, LookedUpRows, OuterProducts, Rows

SHAPES = [(4, 1, 3), (3, 1, 7), (8, 2, 9), (9, 2, 8), (20, 5, 30), (6, 20, 7)]  # p, k, q


def factors(shape, dtype=torch.float64, batch=6):
    rows, inner, columns = shape
    left, right = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    return left.to(dtype), right.to(dtype)


def flat(products):
    """(B, p q) in float64."""
    values = products.left.double() @ products.right.double()
    return (values.mT if products.transposed else values).flatten(1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_product(shape, dtype, transposed):
    """Sums in float64; norms that are at most a little too large."""
    products = OuterProducts(*factors(shape, dtype), transposed)
    weights = torch.rand(6, 1)
    expected, norms = flat(products), flat(products).square().sum(1, keepdim=True)
    torch.testing.assert_close(
        products.weighted_sum(weights), (expected * weights).sum(0), rtol=1e-12, atol=1e-12
    )
    assert (products.squared_norms() >= norms * (1 - 1e-14)).all()
    rounding = 1e-8 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(products.squared_norms(), norms, rtol=rounding, atol=0.0)


@pytest.mark.parametrize("scale", [1e-38, 1e-21, 1.0, 1e15])
@pytest.mark.parametrize("length", [1, 5, 300, 4096, 4097, 20_000])
def test_norms_of_single_precision_are_never_too_small(length, scale):
    """Rows whose squares are all rounded in one direction, underflow, or differ in size."""
    rows = torch.rand(50, length) * torch.logspace(-3, 0, 50).unsqueeze(1)
    rows[:20] = torch.rand(20, 1)  # the same numbers throughout
    rows = (scale * rows).float()
    exact = rows.double().square().sum(1, keepdim=True)
    for part in (Rows(rows), OuterProducts(rows.unsqueeze(2), torch.ones(50, 1, 1).float())):
        found = part.squared_norms()
        assert (found >= exact * (1 - 1e-14)).all()
        assert (found <= exact * 1.001 + 1e-30).all()


def exact(left, right):
    """Squared norms of products of integers, as integers without a limit."""
    products = left.numpy().astype(object) @ right.numpy().astype(object)
    return [int((product * product).sum()) for product in products]


@pytest.mark.parametrize("scale", [1, 10**3, 10**6])
@pytest.mark.parametrize("shape", [(4, 1, 3), (8, 2, 9), (9, 3, 8), (20, 6, 30)])
def test_norms_are_never_too_small(shape, scale):
    """Also where entries of 1e12 cancel up to a remainder that is lost in their squares."""
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    for remainder in (1, scale):
        left = scale * random.integers(-9, 10, (200, rows, inner))
        right = np.repeat(scale * random.integers(-9, 10, (200, 1, columns)), inner, axis=1)
        if inner > 1:  # the last product cancels the others
            left[:, :, -1] = -left[:, :, :-1].sum(-1)
        left[:, 0, 0] += remainder
        left, right = torch.tensor(left), torch.tensor(right)
        squares = OuterProducts(left.double(), right.double()).squared_norms().squeeze(1)
        for found, true in zip(squares.tolist(), exact(left, right), strict=True):
            assert found >= true * (1 - 1e-14)


def test_no_record_exceeds_the_bound():
    """However its product is made: by far the largest coordinate may have cancelled."""
    big = torch.tensor([[[1e12, 1e12 + 1e-3], [1.0, -1.0]]])  # (1, 2, 2)
    right = torch.tensor([[[1e6] * 9, [-1e6] * 9]])
    for left in (big, -big, big.flip(1), torch.randn(1, 2, 2) * 1e12):
        for factor in (right, right + torch.randn(1, 2, 9)):
            products = OuterProducts(left, factor)
            (total,) = clipped_sums([Joined([products])], [1.5])
            assert torch.linalg.vector_norm(total) <= 1.5
            assert total.isfinite().all()


@pytest.mark.parametrize("inner", [1, 2, 1000])
def test_squares_that_underflow_beside_huge_numbers(inner):
    """The squares of one factor are zero, and its product is still longer than the bound."""
    small = torch.full((1, 100, inner), 1.4e-162, dtype=torch.float64)
    huge = torch.full((1, inner, 1), 1e152, dtype=torch.float64)
    for left, right in ((small, huge), (huge.mT, small.mT)):
        products = OuterProducts(left, right)
        assert products.squared_norms() >= flat(products).square().sum()
        (total,) = clipped_sums([Joined([products])], [1e-6])
        assert torch.linalg.vector_norm(total) <= 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["left", "right", "value"])
@pytest.mark.parametrize("shape", [(4, 1, 3), (3, 1, 7), (8, 2, 9)])
def test_a_broken_record_is_zero_in_every_block(shape, side, bad):
    products, values = OuterProducts(*factors(shape)), torch.randn(6, 3)
    {"left": products.left, "right": products.right, "value": values}[side].view(6, -1)[2, 1] = bad
    blocks = [Joined([products, Rows(values)]), Rows(torch.randn(6, 1))]
    there = torch.tensor([0, 1, 3, 4, 5])
    expected = [torch.cat([flat(products), values], dim=1)[there], blocks[1].values[there]]
    found = clipped_sums(blocks, [0.7, 0.3])
    torch.testing.assert_close(found, clipped_sums(list(map(Rows, expected)), [0.7, 0.3]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_rows_of_weight_zero_do_not_matter(bad):
    products, values = OuterProducts(*factors((8, 2, 9))), torch.randn(6, 3)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]).unsqueeze(1)
    joined = Joined([products, Rows(values)])
    (expected,) = clipped_sums([joined], [0.7], weights)
    for x in (products.left, products.right, values):
        x[[1, 4]] = bad
        assert joined.weighted_sum(weights).isfinite().all()
        torch.testing.assert_close(clipped_sums([joined], [0.7], weights), [expected])


def test_joined_blocks_are_clipped_jointly():
    """As one vector that holds them all, in their order."""
    parts = [
        Rows(torch.randn(6, 2, 3)),
        OuterProducts(*factors((3, 1, 7)), transposed=True),
        Rows(torch.randn(6, 1)),
        OuterProducts(*factors((8, 2, 9))),
    ]
    rows = [x.values if isinstance(x, Rows) else flat(x) for x in parts]
    whole, weights = Rows(torch.cat(rows, dim=1)), torch.rand(6, 1)
    joined = Joined(parts)
    torch.testing.assert_close(joined.norms(), whole.norms(), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(joined.weighted_sum(weights), whole.weighted_sum(weights))
    for bound in (0.1, 1e3):
        torch.testing.assert_close(
            clipped_sums([joined], [bound]), clipped_sums([whole], [bound]), rtol=1e-9, atol=1e-9
        )


@pytest.fixture(params=["computed", "uncomputed"], autouse=True)
def numbers(request, monkeypatch):
    """Graphs are the same if products have no numbers while they are traced."""
    if request.param == "uncomputed":
        monkeypatch.setattr(tracing, "_LARGE", 1)


def found_in(function, *inputs, fused=True):
    """The form of a function's outputs; whatever it is, the block is that of the function."""
    graph = trace(function, inputs)
    factored, forms = factorised(graph, fused=fused)
    left = [str(node.target) for node in factored.graph.nodes]
    assert None in forms or not any("embedding_dense_backward" in name for name in left)
    for _ in range(2):
        inputs = [torch.randn_like(x) if x.is_floating_point() else x.flip(0) for x in inputs]
        *outputs, last = factored(*inputs)
        *expected, expected_last = function(*inputs)
        assert torch.equal(last, expected_last)
        whole = Rows(torch.cat([x.reshape(len(x), -1) for x in expected], dim=1))
        joined, weights = joined_parts(outputs, forms), torch.rand(len(last), 1)
        torch.testing.assert_close(joined.weighted_sum(weights), whole.weighted_sum(weights))
        torch.testing.assert_close(joined.norms(), whole.norms(), rtol=1e-9, atol=0.0)
    return forms


def layer(x, weight, bias):
    """Per-record gradients of a linear layer, also transposed, and losses."""

    def loss(weight, bias, x):
        value = functional.linear(x, weight, bias).sin().sum()
        return value, value

    gradient = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    (of_weight, of_bias), losses = torch.vmap(gradient, (None, None, 0))(weight, bias, x)
    return [of_weight, of_bias, of_weight.mT, losses]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [(), (2,)])
def test_layers_are_found(rows, fused):
    """The gradient of a weight, for one row of inputs and for several."""
    inputs = torch.randn(5, *rows, 8), torch.randn(9, 8), torch.randn(9)
    one, _, other = found_in(layer, *inputs, fused=fused)
    assert one is not None and other is not None and one != other


def with_losses(function):
    return lambda left, right, losses: [function(left @ right), losses]


@pytest.mark.parametrize(
    ("between", "transposed"),
    [
        (lambda x: x, False),
        (lambda x: x.mT, True),
        (lambda x: x.mT.permute(0, 2, 1), False),
        (lambda x: x.flatten(1), False),
        (lambda x: x.mT.flatten(1), True),
        (lambda x: x.mT.reshape(5, 3, 3, 8), True),
        (lambda x: x.clone().view(5, 2, 4, 9), False),
        (lambda x: x.transpose(1, 2).unsqueeze(1).squeeze(1), True),
    ],
)
def test_views_of_a_product(between, transposed):
    products = found_in(with_losses(between), *factors((8, 2, 9), batch=5), torch.randn(5))
    assert products == [Product(transposed)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 * x,
        lambda x: x.mT.reshape(5, 8, 9).mT,
        lambda x: x.view(5, 9, 8).mT,
        lambda x: x.mT.flatten(1).view(5, 8, 9).mT.flatten(1),
        lambda x: x.permute(0, 2, 1).unflatten(1, (3, 3)).transpose(1, 2),
        lambda x: x.flip(0),
        lambda x: x[:, 1:],
        lambda x: x.sum(1),
        lambda x: x + x.mean(),
    ],
)
def test_what_is_no_product(function):
    """A reshape between two transpositions shuffles the entries."""
    products = found_in(with_losses(function), *factors((8, 2, 9), batch=5), torch.randn(5))
    assert products == [None]


def test_products_over_something_else_than_records():
    """The batch of a product may be heads, and may happen to have the records' number."""

    function = with_losses(lambda x: x.permute(1, 0, 2))  # (heads, B, q) to (B, heads, q)
    left, right = torch.randn(5, 5, 2), torch.randn(5, 2, 9)
    assert found_in(function, left, right, torch.randn(5)) == [None]


@pytest.mark.parametrize(
    ("inner", "fused", "found"), [(6, False, 0), (6, True, 0), (1, True, 0), (1, False, 1)]
)
def test_small_products_are_multiplied_out(inner, fused, found):
    """So it is if the factors are more work than their product; compiled, that is never stored."""
    inputs = [*factors((2, inner, 2), batch=5), torch.randn(5)]
    (product,) = found_in(with_losses(torch.clone), *inputs, fused=fused)
    assert (product is not None) == found


def per_record(loss, *inputs, parameters=1):
    """Gradients of each record's loss, and the losses; the first inputs are parameters."""

    def with_value(*own):
        value = loss(*own)
        return value, value

    gradient = torch.func.grad(with_value, argnums=tuple(range(parameters)), has_aux=True)
    axes = (None,) * parameters + (0,) * (len(inputs) - parameters)

    def function(*own):
        gradients, losses = torch.vmap(gradient, axes)(*own)
        return [*gradients, losses]

    return found_in(function, *inputs)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_weight_that_is_used_again_has_all_its_factors(steps):
    """A recurrence whose first state is one constant for all records."""

    def loss(weight, x):
        state = torch.ones(8)
        for _ in range(steps):
            state = torch.sin(state @ weight + x)
        return state.sum()

    (form,) = per_record(loss, torch.randn(8, 8), torch.randn(5, 8))
    assert isinstance(form, Product)


@pytest.mark.parametrize("whole", [False, True])
def test_a_product_and_a_transposed_one_are_one_product(whole):
    """A weight of an encoder may be transposed in the decoder."""

    def function(left, right, other_left, other_right, losses):
        total = left @ right + (other_left @ other_right).mT
        return [total.mT if whole else total, losses]

    inputs = [*factors((8, 1, 9), batch=5), *factors((9, 2, 8), batch=5), torch.randn(5)]
    (form,) = found_in(function, *inputs)
    assert isinstance(form, Product)


def test_a_sum_with_something_else_is_no_product():
    def loss(weight, x):
        return (x @ weight).sin().sum() + weight.square().sum() * x.sum()

    assert per_record(loss, torch.randn(8, 9), torch.randn(5, 8)) == [None]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("size", "read", "padding", "form"),
    [
        (30, 30, None, Lookup(30)),
        (30, 1, None, Lookup(30)),
        (30, 3, 1, Lookup(30, 1)),
        (3, 3, None, None),
    ],
)
def test_an_embedding_is_the_rows_that_are_read(size, read, padding, form):
    """Also if it reads a row several times. Padding has no gradient; small tables are whole."""

    def loss(table, x):
        return functional.embedding(x, table, padding_idx=padding).sin().sum(0).prod()

    assert per_record(loss, torch.randn(size, 6), torch.randint(0, read, (5, 4))) == [form]


def test_an_embedding_whose_gradient_is_written_to_is_handed_out():
    def function(gradients, x, losses):
        table = torch.ops.aten.embedding_dense_backward(gradients, x, 150, -1, False)
        table = table.view(5, 30, 6)
        table.select(1, 2).fill_(3.0)
        return [table, losses]

    x = torch.arange(20).reshape(5, 4) + 26 * torch.arange(5).unsqueeze(1)
    graph = trace(function, [torch.randn(5, 4, 6), x, torch.randn(5)])
    assert factorised(graph, fused=True)[1] == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_read(dtype):
    """Sums in float64; norms that are at most a little too large, if rows cancel as well."""
    gradients, indices = torch.randn(6, 4, 3, dtype=dtype), torch.randint(0, 5, (6, 4))
    indices[0] = torch.tensor([2, 2, 4, 4])
    gradients[0, 1] = -gradients[0, 0]
    block = LookedUpRows(gradients, indices, 5)
    whole, weights = torch.zeros(6, 5, 3, dtype=torch.float64), torch.rand(6, 1).double()
    for record in range(6):
        for index, gradient in zip(indices[record], gradients[record], strict=True):
            whole[record, index] += gradient
    rows = Rows(whole)
    torch.testing.assert_close(block.dense(), rows.dense())
    torch.testing.assert_close(block.weighted_sum(weights), rows.weighted_sum(weights))
    excess = block.squared_norms() - rows.squared_norms()
    assert (excess >= 0).all() and (excess < 1e-9).all()
    assert block.size == rows.size
    large = LookedUpRows(gradients * 2.0**20, indices, 5)
    expected = Rows(whole * 2.0**20).whole_sum(weights, fused=False)
    assert torch.equal(large.whole_sum(weights, fused=False), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_record_reads_nothing(bad):
    gradients, indices = torch.randn(6, 4, 3), torch.randint(0, 5, (6, 4))
    there = torch.tensor([0, 1, 3, 4, 5])
    expected = clipped_sums([Joined([LookedUpRows(gradients[there], indices[there], 5)])], [0.7])
    gradients[2, 1, 1] = bad
    found = clipped_sums([Joined([LookedUpRows(gradients, indices, 5)])], [0.7])
    torch.testing.assert_close(found, expected)


def test_a_sum_of_transposed_products_keeps_its_layout(monkeypatch):
    """A view of it would fail if the graph took it for another one, and be traced with numbers."""
    traced, made = [], tracing._made
    monkeypatch.setattr(tracing, "_made", lambda *args: traced.append(args) or made(*args))

    def function(left, right, losses):
        total = (left @ right).mT + (2 * left @ right).mT
        return [total.mT.view(5, -1), losses]

    found_in(function, *factors((8, 2, 9), batch=5), torch.randn(5))
    assert len(traced) == 1
