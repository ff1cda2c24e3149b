"""Recurrent layers in plain operations: torch's own numbers, and records at once."""

import pytest
import torch
from torch import nn

from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.torch_modes import RecordMode, Substitution
from pyro_dp.records.vectorised import RECURRENT

LAYERS = {
    "tanh": lambda **named: nn.RNN(2, 3, **named),
    "relu": lambda **named: nn.RNN(2, 3, nonlinearity="relu", **named),
    "GRU": lambda **named: nn.GRU(2, 3, **named),
    "LSTM": lambda **named: nn.LSTM(2, 3, **named),
    "projected": lambda **named: nn.LSTM(2, 3, proj_size=2, **named),
}
FORMS = [
    {},
    dict(num_layers=2, bidirectional=True, batch_first=True),
    dict(num_layers=3, bias=False),
    dict(bidirectional=True, bias=False),
]


class _Unrolled(Substitution):
    """Torch's functions answered by ours."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = RECURRENT[func](*args) if func in RECURRENT else None
        return func(*args, **(kwargs or {})) if result is None else result


def flat(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_torch(name, form):
    """Outputs, last states, and the gradients of the weights."""
    layer, given = LAYERS[name](**form), torch.randn(4, 5, 2)
    found = []
    for context in (_Unrolled(), Substitution()):
        with context:
            results = [*flat(layer(given)), *flat(layer(given[0]))]
        total = sum((x**2).sum() for x in results)
        found.append(results + list(torch.autograd.grad(total, list(layer.parameters()))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_equal_torch(cell, bias):
    cell, given = cell(2, 3, bias=bias), torch.randn(4, 2)
    with _Unrolled():
        found = flat(cell(given))
    torch.testing.assert_close(found, flat(cell(given)))


def test_dropout_between_layers():
    layer = nn.GRU(2, 3, num_layers=2, dropout=1.0)
    with _Unrolled():
        one, other = (layer(torch.randn(4, 2))[0] for _ in range(2))
        assert torch.equal(one, other)
        layer.eval()
        one, other = (layer(torch.randn(4, 2))[0] for _ in range(2))
        assert not torch.equal(one, other)


def test_packed_sequences_are_left_to_torch():
    for make in LAYERS.values():
        layer = make()
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 2), [4, 3])
        with _Unrolled():
            found = flat(layer(packed)[1])
        torch.testing.assert_close(found, flat(layer(packed)[1]))


@pytest.mark.parametrize("name", LAYERS)
def test_all_records_at_once(name):
    """With weights that are substituted, in a list as torch keeps them."""
    layer, given = LAYERS[name](num_layers=2), torch.randn(3, 5, 2)
    weights = {id(x): x.detach() + 0.1 for x in layer.parameters()}

    def total(values, given):
        substitutes = dict(zip(weights, values, strict=True))
        with RecordMode(LocalDraws(), substitutes):
            return layer(given)[0].sum()

    gradient = torch.func.grad(total)
    values = list(weights.values())
    found = torch.vmap(gradient, in_dims=(None, 0))(values, given)
    with torch.no_grad():
        for own, value in zip(layer.parameters(), values, strict=True):
            own.copy_(value)
    for b, row in enumerate(given):
        expected = torch.autograd.grad(layer(row)[0].sum(), list(layer.parameters()))
        torch.testing.assert_close([x[b] for x in found], list(expected))
