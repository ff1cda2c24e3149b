"""Flat graphs: traced code, refused code, and calls without a compiler."""

import warnings

import pyro
import pytest
import torch
from compilers import needs_compiler

from pyro_dp.graphs import tracing
from pyro_dp.graphs.simplify import is_draw
from pyro_dp.graphs.tracing import (
    Compiler,
    NotTraceable,
    constant_number,
    needed,
    trace,
    untraced,
    without_draws,
)
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ModelError


def objective(x, y):
    """A function with an inner gradient, as all that is traced."""
    gradient = torch.func.grad(lambda w: torch.sigmoid(x @ w).square().sum())(y)
    return [gradient, x.sum(0)]


def test_a_graph_has_the_numbers_of_the_function():
    """They agree on new inputs, too, and no Python code runs."""
    calls = []

    def counted(x, y):
        calls.append(1)
        return objective(x, y)

    graph = trace(counted, [torch.ones(4, 3), torch.zeros(3)])
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randn(3)
        torch.testing.assert_close(list(graph(x, y)), objective(x, y))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum() if x.sum() > 0 else -x.sum(),
        lambda x: x * x.sum().item(),
        lambda x: x * float(x[0]),
    ],
)
def test_numbers_that_are_read_are_refused(read):
    """A graph would use the placeholders' numbers in every call."""
    with pytest.raises(NotTraceable, match="tracing raised"):
        trace(lambda x: [read(x)], [torch.ones(3)])


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda x: torch.rand_like(x), "rand_like"),
        (lambda x: torch.empty(3).normal_() + x, "normal_"),
        (lambda x: torch._standard_gamma(x), "_standard_gamma"),
        (lambda x: torch.bernoulli(x / 2), "bernoulli"),
        (lambda x: torch.nn.functional.dropout(x), "dropout|bernoulli"),
        (lambda x: x[torch.randperm(3)], "randperm"),
    ],
)
def test_random_numbers_are_refused(draw, named):
    """In a graph they would be the same in each step."""
    with pytest.raises(NotTraceable, match=f"random numbers by .*({named})"):
        trace(lambda x: [draw(x)], [torch.ones(3)])


def test_attention_without_dropout_is_traced():
    """The fused kernel may draw, and draws nothing."""
    attend = torch.nn.functional.scaled_dot_product_attention
    queries = torch.randn(2, 4, 5, 8)
    graph = trace(lambda x: [attend(x, x, x, is_causal=True)], [queries])
    other = torch.randn(2, 4, 5, 8)
    torch.testing.assert_close(graph(other), [attend(other, other, other, is_causal=True)])
    with pytest.raises(NotTraceable, match="random numbers"):
        trace(lambda x: [attend(x, x, x, dropout_p=0.5)], [queries])


@pytest.mark.parametrize(
    ("given", "draws"), [((), False), ((0.0,), False), ((0.5,), True), ((0.1, True), True)]
)
def test_a_fused_kernel_draws_if_it_has_dropout(given, draws):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    assert is_draw(graph.call_function(kernel, (*inputs, *given))) == draws
    if given:
        by_name = graph.call_function(kernel, tuple(inputs), {"dropout_p": given[0]})
        assert is_draw(by_name) == draws


def test_an_operation_that_needs_numbers_gets_them(monkeypatch):
    """A Cholesky factor of a matrix without its numbers would raise."""
    monkeypatch.setattr(tracing, "_LARGE", 1)
    monkeypatch.setattr(
        torch.Tensor, "new_empty_strided", lambda x, *_: x.new_full((2, 3, 3), -1.0)
    )
    x = torch.randn(2, 3, 3)
    graph = trace(lambda x: [torch.linalg.cholesky(x @ x.mT)], [x])
    torch.testing.assert_close(graph(2 * x), [2 * torch.linalg.cholesky(x @ x.mT)])


def test_a_product_of_constants_has_its_numbers(monkeypatch):
    """A model may read them, and the graph keeps what they decide."""
    monkeypatch.setattr(tracing, "_LARGE", 1)

    def function(x):
        total = torch.ones(2, 3, 3) @ torch.ones(2, 3, 3)
        total = total + total
        return [x * constant_number(lambda each: float(each.sum()), total)]

    graph = trace(function, [torch.ones(3)])
    torch.testing.assert_close(graph(torch.ones(3)), [torch.full((3,), 108.0)])


def test_a_refusal_shows_no_data():
    """The type of an error, or the first sentence of one of our own."""

    text = "123456.789"

    def raising(x):
        raise ValueError(text)

    def model(x):
        with guarded("Running the model"):
            raising(x)

    with pytest.raises(NotTraceable) as caught:
        trace(raising, [torch.ones(3)])
    assert str(caught.value) == "tracing raised ValueError"
    assert caught.value.__suppress_context__
    where = r"\(test_tracing.py:\d+, in raising: raise ValueError\(text\)\)"
    with pytest.raises(NotTraceable, match=f"raised ValueError {where}$") as caught:
        trace(model, [torch.ones(3)])
    assert "123456" not in str(caught.value)
    assert not isinstance(caught.value, ModelError), "it is a reason, not an error of the user"


def test_untraced_results_are_constants():
    """Placeholders of local latents: drawn once, and no part of the graph."""
    before = torch.get_rng_state()

    def function(x):
        with pyro.util.ignore_jit_warnings(), untraced():
            drawn = torch.full((3,), 2.0).exp()
        return [x * drawn]

    graph = trace(function, [torch.ones(3)])
    targets = [str(node.target) for node in graph.graph.nodes]
    assert not any("exp" in target for target in targets)
    torch.testing.assert_close(graph(torch.ones(3)), [torch.full((3,), 2.0).exp()])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@needs_compiler
def test_compiled():
    """A compiled graph has the same numbers, and warns of nothing."""
    inputs = [torch.ones(4, 3), torch.zeros(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = Compiler(enabled=True)(trace(objective, inputs), inputs)
    x, y = torch.randn(4, 3), torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(list(fast(x, y)), objective(x, y))


@pytest.mark.parametrize("missing", ["compiler", "function"])
def test_without_a_compiler(monkeypatch, missing):
    """Without a compiler the graph itself runs, with one warning."""

    def broken(*args, **kwargs):
        raise RuntimeError("no g++ in /usr/bin")

    if missing == "compiler":
        monkeypatch.setattr("torch._inductor.standalone_compile", broken)
    else:  # as in an older torch
        monkeypatch.delattr("torch._inductor.standalone_compile")
    inputs = [torch.ones(4, 3), torch.zeros(3)]
    graph = trace(objective, inputs)
    with pytest.warns(UserWarning, match="compiler.*jit='trace'") as caught:
        slow = Compiler(enabled=True)(graph, inputs)
    assert len(caught) == 1 and "/usr/bin" not in str(caught[0].message)
    x, y = torch.randn(4, 3), torch.randn(3)
    torch.testing.assert_close(list(slow(x, y)), objective(x, y))


def test_too_much_to_compile(monkeypatch):
    monkeypatch.setattr("pyro_dp.graphs.tracing._MOST_OPERATIONS", 2)
    inputs = [torch.ones(4, 3), torch.zeros(3)]
    graph, compiler = trace(objective, inputs), Compiler(enabled=True)
    with pytest.warns(UserWarning, match="as with jit='trace'.*operations"):
        slow = compiler(graph, inputs)
    assert not compiler.enabled
    torch.testing.assert_close(list(slow(*inputs)), objective(*inputs))


def _of_its_own(w):
    return torch.ones(2).sum() > 0


def _of_the_input(w):
    return w.sum() > 0


def _through_a_view(w):
    both = torch.zeros(2)
    both[0] = w
    return both.sum() > 0


def _through_two_views(w):
    first, second = torch.zeros(2), torch.zeros(2)
    first[0] = w
    second[1] = first.sum()
    return second.sum() > 0


def _of_a_draw(w):
    return torch.randn(2).sum() > 0


@pytest.mark.parametrize(
    "condition", [_of_the_input, _through_a_view, _through_two_views, _of_a_draw]
)
def test_what_may_change_is_not_read_out_of_a_graph(condition):
    def function(w):
        return [w if constant_number(torch.Tensor.__bool__, condition(w)) else 2 * w]

    with pytest.raises(NotTraceable):
        trace(function, [torch.ones(())], draws=True)


def test_a_constant_is_read_out_of_a_graph():
    def function(w):
        return [w if constant_number(torch.Tensor.__bool__, _of_its_own(w)) else 2 * w]

    (value,) = trace(function, [torch.ones(())]).forward(torch.tensor(3.0))
    assert value == 3.0


def test_what_may_fail_is_needed():
    """Networks go if nothing depends on them; an index, a factor of a matrix and a draw stay."""

    def function(x, places):
        torch.tanh(x @ x.mT).relu().sum()
        x[places].exp()
        torch.linalg.cholesky(x @ x.mT)
        torch.randn(2).cos()
        return [x + 1]

    names = [node.name for node in needed(function, [torch.eye(3), torch.arange(3)]).graph.nodes]
    assert "tanh" not in names and "relu" not in names and "exp" not in names and "cos" not in names
    assert {"mm_1", "index", "linalg_cholesky_ex", "randn", "add"} <= set(names)


def _drawn(x):
    own = torch.empty(3).bernoulli_(0.5)
    return [own.clone() * x, own]


def _drawn_in_another_form(x):
    own = torch.multinomial(x, 3, True).double()
    return [own * x, own]


@pytest.mark.parametrize("function", [_drawn, _drawn_in_another_form])
def test_draws_become_inputs(function):
    draws, rest = without_draws(trace(function, [torch.ones(3)], draws=True), 1)
    (own,) = draws(torch.ones(3))
    assert not any(is_draw(node) for node in rest.graph.nodes)
    torch.testing.assert_close(rest(torch.full((3,), 2.0), own)[0], 2.0 * own)
    with pytest.raises(NotTraceable, match="draws random numbers"):
        graph = trace(lambda x: [*_drawn(torch.randn(3) * x)], [torch.ones(3)], draws=True)
        without_draws(graph, 1)
