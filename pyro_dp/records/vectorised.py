"""Replacements for torch functions that ``torch.vmap`` lacks, for runs on all records at once.

* Recurrent layers are written as single operations, because torch's overwrite tensors. Packed
  sequences, whose lengths are data, are left to torch.
* Code of users that would see more than one record under vmap is refused (:func:`all_at_once`).
* Integer labels may meet a Bernoulli's float logits, and integer features a float weight. Torch
  promotes dtypes only in sums and the like; :func:`promoted` does so for other functions.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor
from torch._functorch import autograd_function
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dp.graphs.references import is_library, is_users
from pyro_dp.records.losses import NotVectorizable
from pyro_dp.utils.errors import ModelError

# Their tensors are numbers, never indices.
OF_NUMBERS = {
    *(torch.addmm, torch.addmv, torch.baddbmm, torch.einsum, torch.tensordot),
    *(torch.bmm, torch.dot, torch.matmul, torch.mm, torch.mv),
    *(Tensor.bmm, Tensor.dot, Tensor.matmul, Tensor.mm, Tensor.mv),
    *(Tensor.__matmul__, Tensor.__rmatmul__),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
    *(functional.bilinear, functional.conv1d, functional.conv2d, functional.conv3d),
    functional.linear,
}
_MOST_PAIRS = 2**17  # over all heads
_LARGEST_INDEX = 2**30  # pixels
_TORCHS = ("aten.", "prim.", "prims.")  # namespaces of operators
_OF_USERS = "{name} would see several records at once"
_INNER = (
    "Call ctc_loss or grid_sample of torch.nn.functional. Torch's inner functions check no labels "
    "or grids, and would read the memory of other records."
)
State = tuple[Tensor, ...]  # hidden, and in an LSTM the cell's
Cell = Callable[[Tensor, State, Sequence[Any]], State]  # from the input's part, state and weights
_IN_PLACE = (
    *("addcdiv_", "addcmul_", "clamp_", "clip_", "cumprod_", "cumsum_", "fmod_", "lerp_"),
    *("remainder_", "tril_", "triu_", "xlogy_"),
)


def promoted(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a function of numbers, with all tensors in their common dtype."""
    dtypes = {x.dtype for x in _tensors((*args, *kwargs.values()))}
    if len(dtypes) < 2 or not any(dtype.is_floating_point for dtype in dtypes):
        return args, kwargs
    common = reduce(torch.promote_types, dtypes)
    return pytree.tree_map_only(Tensor, lambda x: x.to(common), (args, kwargs))


def _tensors(values: Sequence) -> Iterator[Tensor]:
    """The tensors, also those in lists, as for einsum. Every product of every step calls it."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(given: Tensor, state: State, weights: Sequence[Any]) -> State:
        return (activation(given + functional.linear(state[0], weights[1], weights[3])),)

    return cell


def _gru(given: Tensor, state: State, weights: Sequence[Any]) -> State:
    hidden = functional.linear(state[0], weights[1], weights[3])
    (r, z, n), (hr, hz, hn) = given.chunk(3, -1), hidden.chunk(3, -1)
    update = torch.sigmoid(z + hz)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (new + update * (state[0] - new),)


def _lstm(given: Tensor, state: State, weights: Sequence[Any]) -> State:
    hidden = functional.linear(state[0], weights[1], weights[3])
    i, f, g, o = (given + hidden).chunk(4, -1)
    memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    shown = torch.sigmoid(o) * torch.tanh(memory)
    if weights[4] is not None:
        shown = functional.linear(shown, weights[4])
    return shown, memory


def _layers(
    cell: Cell, given: Tensor, start: Tensor | Sequence[Tensor], flat: Any, bias: Any, *others: Any
) -> tuple[Tensor, ...] | None:
    """A recurrent network, by the arguments of torch's function; ``None`` for packed sequences."""
    if not isinstance(bias, bool):
        return None
    num_layers, dropout, training, both_ways, batch_first = others
    starts = (start,) if isinstance(start, Tensor) else start
    ways = 2 if both_ways else 1
    weights = _by_run(flat, bias, num_layers * ways)
    given = given.transpose(0, 1) if batch_first else given
    ends = []
    for layer in range(num_layers):
        if layer and dropout:
            given = functional.dropout(given, dropout, training)
        outputs = []
        for way in range(ways):
            run = layer * ways + way
            state = tuple(each[run] for each in starts)
            output, end = _run(cell, given, state, weights[run], backwards=way == 1)
            outputs.append(output)
            ends.append(end)
        given = torch.cat(outputs, -1)
    output = given.transpose(0, 1) if batch_first else given
    return output, *(torch.stack(each) for each in zip(*ends, strict=True))


def _by_run(flat: Sequence[Tensor], bias: bool, runs: int) -> list[list[Any]]:
    """For each layer and direction: two matrices, two biases and the projection, or ``None``."""
    size, found = len(flat) // runs, []
    for start in range(0, len(flat), size):
        own: list[Any] = list(flat[start : start + size])
        if not bias:
            own[2:2] = [None, None]
        found.append(own + [None] * (5 - len(own)))
    return found


def _run(
    cell: Cell, given: Tensor, state: State, weights: Sequence[Any], backwards: bool
) -> tuple[Tensor, State]:
    steps = functional.linear(given, weights[0], weights[2]).unbind(0)
    outputs = []
    for step in reversed(steps) if backwards else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _one_step(cell: Cell, given: Tensor, start: Tensor | Sequence[Tensor], *weights: Any) -> Any:
    state = (start,) if isinstance(start, Tensor) else tuple(start)
    weights = (*weights, *[None] * (5 - len(weights)))
    end = cell(functional.linear(given, weights[0], weights[2]), state, weights)
    return end if len(end) > 1 else end[0]


_CELLS: dict[str, Cell] = {
    "rnn_tanh": _simple(torch.tanh),
    "rnn_relu": _simple(torch.relu),
    "gru": _gru,
    "lstm": _lstm,
}
# By torch's function; each returns None for cases that it does not handle.
RECURRENT: dict[Any, Callable[..., Any]] = {
    getattr(torch, name + ending): partial(answer, cell)
    for name, cell in _CELLS.items()
    for ending, answer in (("", _layers), ("_cell", _one_step))
}


def _written(name: str) -> Callable[..., Tensor]:
    compute = getattr(Tensor, name[:-1])

    def write(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.copy_(compute(tensor, *args, **kwargs))

    return write


def _bernoulli_loss(logits: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """Binary cross entropy by the formula of torch's own kernel, not by a decomposition."""
    given = {key: value for key, value in options.items() if value is not None}
    if args or given != {"reduction": "none"} or logits.shape != target.shape:
        return None
    (logits, target), _ = promoted((logits, target), {})
    return (1 - target) * logits - functional.logsigmoid(logits)


def _by_products(attend: Callable[..., Any], *, heads: int | None = None) -> Callable[..., Any]:
    """Attention by matrix products, because vmap runs the CPU's fused kernel record by record.

    The kernel stays for records with many pairs of positions, because products would store them.

    :param heads: position of the argument with the number of heads; ``None``: a dimension of the
        queries.
    """

    def attended(*args: Any, **kwargs: Any) -> Any:
        if len(args) < max(2, (heads or 0) + 1) or args[0].device.type != "cpu":
            return None
        query, key = args[:2]
        if heads is None:  # (..., positions, features)
            pairs = query.shape[:-1].numel() * key.shape[-2]
        else:  # (positions, ..., features)
            pairs = query.shape[:-1].numel() * key.shape[0] * args[heads]
        if pairs > _MOST_PAIRS:
            return None
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*args, **kwargs)

    return attended


class _CumulativeProduct(torch.autograd.Function):
    """``torch.cumprod`` with a derivative that needs no loop over positions, even with zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return x.cumprod(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, output), dim = ctx.saved_tensors, ctx.dim

        def from_here(terms: Tensor) -> Tensor:
            return terms.flip(dim).cumsum(dim).flip(dim)

        is_zero = x == 0
        first = is_zero & (is_zero.cumsum(dim) == 1)  # the only zero with a derivative
        others = torch.where(first, 1.0, x).cumprod(dim)
        found = from_here(gradient * output) / torch.where(is_zero, 1.0, x)
        found = torch.where(is_zero, 0.0, found)
        return torch.where(first, from_here(gradient * others), found), None


def _cumulative_product(x: Any = None, dim: Any = None, **options: Any) -> Tensor | None:
    if x is None or options or not isinstance(dim, int) or not x.is_floating_point():
        return None
    levels = [each.key() for each in get_interpreter_stack() or ()]
    if levels.count(TransformType.Grad) > 1:  # second derivatives at several zeros need the loop
        return None
    result: Tensor = _CumulativeProduct.apply(x, dim)
    return result


def _embedding(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """``embedding`` with NaN for a row that the table lacks.

    Under vmap, that row or its gradient would be another record's. Torch itself checks bounds if
    all records share a table and nothing is differentiated.
    """
    differs = any(each.key() == TransformType.Grad for each in get_interpreter_stack() or ())
    if not (differs or is_batchedtensor(weight)):
        return None
    inside = (input >= 0) & (input < len(weight))
    found = functional.embedding(input.clamp(0, len(weight) - 1), weight, *args, **options)
    return found * torch.where(inside, 1.0, torch.nan).to(found).unsqueeze(-1)


def _filled(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor | None:
    """``index_fill`` by a mask, with a check of bounds.

    Torch's vmap rule checks none, so an index out of range would fill another record's row. A
    scatter raises an error, and then records run one at a time.
    """
    if not input.dim():
        return None
    shape = [1] * input.dim()
    shape[dim] = input.shape[dim]
    nowhere = torch.zeros(shape[dim], dtype=torch.bool, device=input.device)
    places = torch.where(index < 0, index + len(nowhere), index).reshape(-1)
    filling = value.to(input) if isinstance(value, Tensor) else input.new_full((), value)
    return torch.where(nowhere.scatter(0, places, True).reshape(shape), filling, input)


def _filled_in_place(tensor: Tensor, *args: Any, **options: Any) -> Tensor | None:
    found = _filled(tensor, *args, **options)
    return None if found is None else tensor.copy_(found)


def _by_labels(
    loss: Callable[..., Tensor],
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **options: Any,
) -> Tensor:
    """The CTC loss, or NaN if a label is no class: torch would read memory out of bounds."""
    classes = log_probs.shape[-1]
    valid = (targets >= 0) & (targets < classes)
    if targets.dim() > 1:  # padded
        lengths = torch.as_tensor(target_lengths, device=targets.device).reshape(-1, 1)
        valid = valid | (torch.arange(targets.shape[-1], device=targets.device) >= lengths)
    labels = targets.clamp(0, classes - 1)
    found = loss(log_probs, labels, input_lengths, target_lengths, *args, **options)
    return found * torch.where(valid.all(), 1.0, torch.nan).to(found)


def _least_squares(*args: Any, **options: Any) -> Any:
    """``lstsq`` by singular values. Without full rank, torch's usual driver on the CPU depends on
    the pivots of the record before, or on uninitialised memory.
    """
    tensors = _tensors((*args, *options.values()))
    if options.get("driver") in (None, "gelsy") and all(x.device.type == "cpu" for x in tensors):
        options["driver"] = "gelsd"
    return torch.linalg.lstsq(*args, **options)


def _sampled(
    sample: Callable[..., Tensor], input: Tensor, grid: Tensor, *args: Any, **options: Any
) -> Tensor:
    """A sample at the points of a grid, or NaN if one is no pixel's index: torch would crash."""
    near = grid.abs() * max(input.shape[2:], default=1) < _LARGEST_INDEX  # not NaN
    found = sample(input, torch.where(near, grid, 0.0), *args, **options)
    return found * torch.where(near.all(), 1.0, torch.nan).to(found)


def _refused(*_args: Any, **_options: Any) -> Tensor:
    raise ModelError(_INNER)


_INNER_NAMES = (
    *("_ctc_loss", "_cudnn_ctc_loss", "miopen_ctc_loss"),
    *("cudnn_grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback"),
)
_PACKETS = [getattr(torch.ops.aten, name) for name in ("ctc_loss", "grid_sampler", *_INNER_NAMES)]
# Replaces functions that read other memory than the record's, even for one record alone.
UNCHECKED: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((getattr(torch, name) for name in _INNER_NAMES), _refused),
    **dict.fromkeys(_PACKETS, _refused),
    **{getattr(packet, each): _refused for packet in _PACKETS for each in packet.overloads()},
    functional.ctc_loss: partial(_by_labels, functional.ctc_loss),
    torch.ctc_loss: partial(_by_labels, torch.ctc_loss),
    functional.grid_sample: partial(_sampled, functional.grid_sample),
    torch.grid_sampler: partial(_sampled, torch.grid_sampler),
    torch.linalg.lstsq: _least_squares,
}
# Replaces functions whose vmap rules check no bounds. A result of None: use the function itself.
_BOUNDED: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    torch.embedding: lambda weight, indices: _embedding(indices, weight),
    torch.index_fill: _filled,
    Tensor.index_fill: _filled,
    Tensor.index_fill_: _filled_in_place,
}
# Replacements by function. A result of None: use the function itself.
VECTORISED: dict[Any, Callable[..., Any]] = {
    **RECURRENT,
    functional.scaled_dot_product_attention: _by_products(functional.scaled_dot_product_attention),
    functional.multi_head_attention_forward: _by_products(
        functional.multi_head_attention_forward, heads=4
    ),
    **{getattr(Tensor, name): _written(name) for name in _IN_PLACE},
    **{getattr(torch, name): _written(name) for name in _IN_PLACE if hasattr(torch, name)},
    functional.binary_cross_entropy_with_logits: _bernoulli_loss,
    torch.cumprod: _cumulative_product,
    Tensor.cumprod: _cumulative_product,
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
}


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    """Inside, ``torch.vmap`` may run code that is written for one record on all records.

    :raises NotVectorizable: user code has a ``vmap`` rule, which would see all records. Or it calls
        an operator by ``torch.ops``. A user's operator may keep state between records. One of
        torch's escapes the replacements above, and may read beyond the record.
        Or it enters a user's ``TorchDispatchMode``.
    """
    rule = autograd_function.custom_function_call_vmap_helper

    def checked(interpreter: Any, function: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if is_users(owner):
            raise NotVectorizable(_OF_USERS.format(name=owner.__name__))
        return rule(interpreter, function, owner, *args, **kwargs)

    enter = TorchDispatchMode.__enter__

    def entered(mode: TorchDispatchMode) -> Any:
        if is_users(type(mode)):
            raise NotVectorizable(_OF_USERS.format(name=type(mode).__name__))
        return enter(mode)

    with (
        mock.patch.object(autograd_function, "custom_function_call_vmap_helper", checked),
        mock.patch.object(TorchDispatchMode, "__enter__", entered),
        _Alone(),
    ):
        yield


class _Alone(TorchFunctionMode):
    """Refuses calls by ``torch.ops``, and keeps an index from reaching another record's rows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, OpOverload | OpOverloadPacket):
            # Torch's own code, such as a tracer, calls its operators, too.
            if _called_by_users() or not str(func).startswith(_TORCHS):
                raise NotVectorizable(_OF_USERS.format(name=func))
        found, kwargs = None, kwargs or {}
        if func in _BOUNDED and get_interpreter_stack():
            found = _BOUNDED[func](*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _called_by_users() -> bool:
    """Whether an operator is called by a user's code, and not by torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch._ops", "pyro_dp.")):
            return not is_library(module)
        frame = frame.f_back
    return False
