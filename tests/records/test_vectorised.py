"""Torch functions where all records run at once: the same as one record after the other."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.losses import NotVectorizable
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.torch_modes import RecordMode
from pyro_dp.records.vectorised import _by_labels, all_at_once
from pyro_dp.utils.errors import ModelError

ROWS = torch.linspace(-40.0, 40.0, 12, dtype=torch.float64).reshape(4, 3)


def _clamped(x):
    y = x * 1.0
    y.detach().clamp_(min=0.5)
    return y


def _lerped(x):
    return x.clone().lerp_(torch.ones(3), 0.3)


def _summed(x):
    return (2 * x).cumsum_(0)


def _cross_entropy(x):
    return functional.binary_cross_entropy_with_logits(x, x.sigmoid().detach(), reduction="none")


def _weighted(x):
    return functional.binary_cross_entropy_with_logits(x, x.sigmoid().detach(), torch.ones(3))


def _attended(x):
    x = 0.1 * x.reshape(1, 1, 3, 1)
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def _attended_by_heads(x):
    x = torch.stack([x, 2 * x, x.sin(), x.cos()], -1).reshape(3, 1, 4).mul(0.1)
    weights = torch.linspace(-1.0, 1.0, 48).reshape(12, 4), torch.linspace(-0.1, 0.1, 12)
    own = (4, 2, *weights, None, None, False, 0.0, torch.eye(4), torch.zeros(4))
    return functional.multi_head_attention_forward(x, x, x, *own)[0]


def _multiplied(x):
    """With zeros in some rows."""
    return torch.where(x.abs() > 10, x, x - x.detach()).cumprod(-1).sin()


def _filled(x):
    """At indices from both ends, some of them twice."""
    index = (x[:2] > 0).long()
    y = torch.index_fill(2 * x, 0, index, 5.0).outer(x).index_fill(-1, index, x[0])
    return y.index_fill_(0, index[0] - 2, 3.0)


FUNCTIONS = [_clamped, _multiplied, _lerped, _summed, _attended, _attended_by_heads, _filled]


@pytest.mark.parametrize("function", [*FUNCTIONS, _cross_entropy, _weighted])
def test_equals_one_record_after_the_other(function):
    def loss(row):
        with all_at_once(), RecordMode(LocalDraws()):
            return function(row).sum()

    together = torch.vmap(torch.func.grad_and_value(loss))(ROWS)
    alone = [torch.func.grad_and_value(lambda x: function(x).sum())(row) for row in ROWS]
    for found, expected in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.allclose(found, torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_nothing_is_taken_one_record_after_the_other():
    """Torch warns of functions that it takes one record at a time."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    try:
        for function in FUNCTIONS:
            with all_at_once(), RecordMode(LocalDraws()):
                torch.vmap(function)(ROWS)
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)


@pytest.mark.parametrize("index", [3, 5, -4])
@pytest.mark.parametrize("fill", [torch.index_fill, torch.Tensor.index_fill])
def test_an_index_out_of_range_fills_no_other_record(fill, index):
    """Under vmap the index would point into a neighbouring row."""

    def filled(indices):
        with all_at_once():
            return fill(torch.zeros(3), 0, indices, 1.0)

    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.vmap(filled)(torch.tensor([[0, 1], [index, 2], [2, 2], [1, 2]]))


@pytest.mark.parametrize("index", [3, 6, -1])
@pytest.mark.parametrize("look_up", [functional.embedding, lambda i, x: torch.embedding(x, i)])
def test_an_index_that_a_table_of_the_record_lacks_is_nan(look_up, index):
    """Under vmap the index would read another record's table."""

    def looked_up(table, indices):
        with all_at_once():
            return look_up(indices, table)

    indices = torch.tensor([[0, 1], [index, 2], [2, 2], [1, 2]])
    tables = torch.arange(24.0).reshape(4, 3, 2)
    found = torch.vmap(looked_up)(tables, indices)
    assert found.isnan().any(-1).nonzero().tolist() == [[1, 0]]
    for k in (0, 2, 3):
        assert torch.equal(found[k], tables[k, indices[k]])


@pytest.mark.parametrize("index", [3, 6, -1])
def test_an_index_that_a_table_lacks_breaks_its_own_record(index):
    """Under vmap its gradient would go to a row of another record."""

    def loss(table, indices):
        with all_at_once():
            return functional.embedding(indices, table).sum()

    indices = torch.tensor([[0, 1], [index, 2], [2, 2], [1, 2]])
    gradients = torch.vmap(torch.func.grad(loss), (None, 0))(torch.ones(3, 2), indices)
    assert gradients.isnan().flatten(1).any(1).tolist() == [False, True, False, False]
    for k in (0, 2, 3):
        expected = torch.func.grad(loss)(torch.ones(3, 2), indices[k])
        assert torch.equal(gradients[k], expected)


@pytest.mark.parametrize("together", [True, False])
def test_least_squares_do_not_depend_on_the_record_before(together):
    matrices = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 3.0]]]).repeat(3, 1, 1)

    def solution(matrix):
        return torch.linalg.lstsq(matrix, torch.ones(2, 1)).solution

    with guarded("Test"):
        found = torch.vmap(solution)(matrices) if together else map(solution, matrices)
        torch.testing.assert_close(torch.stack([*found]), torch.linalg.pinv(matrices).sum(2, True))


@pytest.mark.parametrize("mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("point", [math.nan, math.inf, -1e30])
def test_a_point_of_a_grid_that_is_no_pixel_breaks_its_own_record(point, mode):
    """Torch would crash, because the index lies outside of memory."""
    images = torch.linspace(0.0, 1.0, 4 * 9).reshape(4, 1, 1, 3, 3)
    grids = torch.linspace(-2.0, 2.0, 4 * 8).reshape(4, 1, 2, 2, 2)
    broken = grids.index_put((torch.tensor(1),), torch.tensor(point))

    def loss(image, grid):
        found = functional.grid_sample(image, grid, padding_mode=mode, align_corners=False)
        return found.square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1))
    with guarded("Test"), all_at_once():
        together = torch.vmap(gradient)(images, broken)
    with guarded("Test"):
        alone = [torch.stack(each) for each in zip(*map(gradient, images, broken), strict=True)]
    expected = [torch.stack(each) for each in zip(*map(gradient, images, grids), strict=True)]
    for found in (together, alone):
        assert found[0].isnan().flatten(1).any(1).tolist() == [False, True, False, False]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[[0, 2, 3]], theirs[[0, 2, 3]])


def _ctc(log_probs, targets, length=3):
    return functional.ctc_loss(log_probs, targets, (len(log_probs),), (length,))


SPEECH = torch.linspace(0.0, 9.0, 4 * 8 * 3, dtype=torch.float64).sin().reshape(4, 8, 3)
SPELLED = torch.tensor([[1, 2, 1], [2, 1, 2], [1, 1, 2], [2, 2, 1]])


@pytest.mark.parametrize("label", [-7, -1, 3, 9])
def test_a_label_that_is_no_class_breaks_its_own_record(label):
    """Torch would read the memory beside the record's: another record's, at once or alone."""
    spelled = SPELLED.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(label))

    def loss(log_probs, targets):
        with all_at_once():
            return _ctc(log_probs, targets)

    with guarded("Test"):
        together = torch.vmap(loss)(SPEECH, spelled)
        alone = torch.stack([_ctc(*row) for row in zip(SPEECH, spelled, strict=True)])
    for found in (together, alone):
        assert found.isnan().tolist() == [False, True, False, False]
    for k in (0, 2, 3):
        assert together[k] == alone[k] == _ctc(SPEECH[k], SPELLED[k])


def test_torch_gets_no_label_that_is_no_class():
    """It would read, and in a derivative write, beyond the record's memory."""
    labels = []

    def loss(log_probs, targets, *lengths):
        labels.append(targets.tolist())
        return log_probs.sum()

    found = _by_labels(loss, SPEECH[0], torch.tensor([1, 9, -7]), (8,), (3,))
    assert labels == [[1, 2, 0]] and found.isnan()


def test_a_label_beyond_the_length_counts_for_nothing():
    padded = SPELLED[:1].index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(-1))
    with guarded("Test"):
        found = _ctc(SPEECH[0].unsqueeze(1), padded, 2)
    assert found == _ctc(SPEECH[0].unsqueeze(1), padded, 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: torch.ops.aten.ctc_loss(x, y, [8], [3]),
        lambda x, y: torch.ops.aten.ctc_loss.IntList(x, y, [8], [3]),
        lambda x, y: torch._ctc_loss(x.unsqueeze(1), y, [8], [3])[0],
        lambda x, _: torch.grid_sampler_2d(x[None, None], x[None, None, :, :2], 0, 0, False),
    ],
)
def test_inner_functions_without_checks_are_refused(loss):
    with pytest.raises(ModelError, match="Call ctc_loss or grid_sample"), guarded("Test"):
        loss(SPEECH[0], SPELLED[0])


@pytest.mark.parametrize("operator", [torch.ops.aten.embedding, torch.ops.aten.embedding.default])
def test_an_operator_that_is_called_directly_takes_one_record_at_a_time(operator):
    """It escapes the replacement, and would read a row of another record's table."""

    def looked_up(table, indices):
        with all_at_once():
            return operator(table, indices)

    with pytest.raises(NotVectorizable, match="aten.embedding"):
        torch.vmap(looked_up)(torch.ones(4, 3, 2), torch.zeros(4, 2, dtype=torch.long))


def test_a_mode_of_torchs_operations_takes_one_record_at_a_time():
    """It would see the numbers of all records."""

    class Logging(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def doubled(row):
        with all_at_once(), Logging():
            return 2 * row

    with pytest.raises(NotVectorizable, match="Logging would see several records"):
        torch.vmap(doubled)(ROWS)
