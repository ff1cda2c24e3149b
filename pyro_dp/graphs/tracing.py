"""Trace tensor functions to flat graphs, which then run without the Python code behind them.

A traced graph calls overloads of operations, and each call matches its arguments with a schema. The
functions that Python code calls (``torch.add``) parse arguments in about half the time.
"""

import contextlib
import ctypes
import functools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node, Proxy
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)

from pyro_dp.graphs.factorisation import LINEAR
from pyro_dp.graphs.simplify import is_draw, simplify
from pyro_dp.utils.errors import PrivacyError

# Functions that take the arguments of all overloads of that name.
_NAMES = (
    *("abs", "add", "addmm", "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bmm", "cat"),
    *("ceil", "clamp", "clamp_max", "clamp_min", "clone", "cos", "cumprod", "cumsum", "diagonal"),
    *("digamma", "div", "empty", "eq", "erf", "erfinv", "exp", "expm1", "flip", "floor", "ge"),
    *("index_select", "isfinite", "le", "lgamma", "log", "log1p", "log2", "logical_and"),
    *("logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mm", "mul", "mv"),
    *("nan_to_num", "ne", "neg", "permute", "pow", "prod", "reciprocal", "relu", "rsqrt", "rsub"),
    *("select", "sigmoid", "sign", "sin", "sqrt", "squeeze", "stack", "sub", "sum", "t", "tanh"),
    *("gt", "transpose", "tril", "triu", "unsqueeze", "where", "xlogy"),
)
_METHODS = (
    *("expand", "new_ones", "new_zeros", "view"),
    *("add_", "copy_", "div_", "exp_", "fill_", "mul_", "neg_", "normal_", "sub_"),
)
_FUNCTIONS: dict[Any, Callable] = {
    overload: function
    for name, function in (
        *((name, getattr(torch, name)) for name in _NAMES),
        *((name, getattr(Tensor, name)) for name in _METHODS),
        ("_unsafe_view", Tensor.view),
        ("softplus", torch.nn.functional.softplus),
    )
    for each in getattr(torch.ops.aten, name).overloads()
    if each != "out" and not each.endswith("_out")
    for overload in (getattr(getattr(torch.ops.aten, name), each),)
}


def _new_empty(like: Tensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """``Tensor.new_empty``, but large tensors get NumPy's memory, which has pages of megabytes.

    The first write to a page is slow, and small pages take four times as long in total.
    """
    empty = like.new_empty(0, **kwargs)
    plain = empty.dtype == torch.float64 and empty.device.type == "cpu"
    if not plain or math.prod(size) < _LARGE:
        return empty.new_empty(size)
    return torch.from_numpy(np.empty(size))


_FUNCTIONS[torch.ops.aten.new_empty.default] = _new_empty


def called_by_torch(graph: GraphModule) -> Callable[..., Sequence[Tensor]]:
    """The graph as a function of its inputs."""
    faster = graph.graph.__deepcopy__({})
    for node in faster.nodes:
        if node.op == "call_function":
            _call_by_torch(node)
    forward = GraphModule(graph, faster).forward

    def call(*inputs: Tensor) -> Sequence[Tensor]:
        # Functions, unlike overloads, ask the caller's modes.
        with torch._C.DisableTorchFunction():
            found: Sequence[Tensor] = forward(*inputs)
        return found

    return call


def _call_by_torch(node: Node) -> None:
    """Replace an overload by the function of Python code, if there is one."""
    if not node.args or isinstance(node.args[0], (int, float)):  # only overloads accept these
        return
    if node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        node.target, node.kwargs = Tensor.to, {**node.kwargs, "copy": True}
    else:
        node.target = _FUNCTIONS.get(node.target, node.target)


_LARGE = 2**20  # numbers
_TOTAL = LINEAR | {  # operations that have results for all floating-point numbers
    *("_adaptive_avg_pool2d", "_log_softmax", "_softmax", "addmm", "amax", "avg_pool2d", "baddbmm"),
    *("bmm", "convolution", "dot", "logsumexp", "max_pool2d_with_indices", "mkldnn_rnn_layer"),
    *("mm", "mv", "native_group_norm", "native_layer_norm", "var"),
    "_scaled_dot_product_flash_attention_for_cpu",
}
_MOST_OPERATIONS = 5000  # a compiler takes up to two minutes for these


class NotTraceable(PrivacyError):
    """The function is no fixed sequence of tensor operations; the text says why."""


def trace(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, draws: bool = False
) -> GraphModule:
    """The tensor operations of ``function(*inputs)``, for inputs of these shapes.

    Everything else that the function reads becomes a constant. Randomness must be an input: as a
    constant, a draw would be the same in every step. As an operation, it would come from another
    stream in compiled code.

    :param draws: whether the graph may draw, from torch's global generators, in each call. Then it
        must not be compiled.
    :raises NotTraceable: the function reads a number out of a tensor, or draws random numbers.
    """
    try:
        graph = _without_numbers(function, inputs)
    except Exception as error:
        if isinstance(error, PrivacyError):
            reason = str(error).split(". ")[0]
        else:
            reason = f"tracing raised {type(error).__name__}"
        raise NotTraceable(reason) from None
    give_back_memory()
    graph.graph.eliminate_dead_code()
    if not draws:
        _require_no_draws(graph)
    graph = _LazyGraphModule(graph, graph.graph)  # it has only the constants that are used
    for name in {node.target for node in graph.graph.nodes if node.op == "get_attr"}:
        value = getattr(graph, name)
        delattr(graph, name)
        graph.register_buffer(name, value.detach(), persistent=False)  # the same memory
    simplify(graph)
    return graph


def give_back_memory() -> None:
    """Return the memory of freed tensors of a trace or a check to the system.

    Small objects lie between them, so the C library would keep up to hundreds of megabytes.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only GNU's library has it
        if trim is not None:
            trim(0)


def needed(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    """A graph of ``function(*inputs)`` with operations that results need, or that may fail.

    An index may be too large, or a matrix may have no Cholesky factor. All draws also stay.
    """
    graph = _made(function, inputs)
    graph.graph.eliminate_dead_code(lambda node: not _always_succeeds(node))
    return graph


def _always_succeeds(node: Node) -> bool:
    """Whether an operation has a result for all numbers, and no other effect."""
    if node.target is operator.getitem or node.op == "get_attr":
        return True
    operation: Any = node.target
    schema = getattr(operation, "_schema", None)
    if schema is None or schema.is_mutable or is_draw(node):
        return False
    kinds = {x.meta["val"].dtype.is_floating_point for x in node.all_input_nodes}
    total = torch.Tag.pointwise in operation.tags or operation.overloadpacket.__name__ in _TOTAL
    return total and kinds == {True}


def without_draws(graph: GraphModule, count: int) -> tuple[GraphModule, GraphModule]:
    """A graph of the draws, and one of everything else, which has the draws as its last inputs.

    :param count: how many of the graph's last outputs are draws.
    :raises NotTraceable: the graph also draws other random numbers.
    """
    drawing, rest = (_LazyGraphModule(graph, graph.graph.__deepcopy__({})) for _ in range(2))
    (drawn,), (output,) = (each.graph.find_nodes(op="output") for each in (drawing, rest))
    drawn.args = (drawn.args[0][-count:],)
    drawing.graph.eliminate_dead_code()
    last = rest.graph.find_nodes(op="placeholder")[-1]
    for node in output.args[0][-count:]:
        with rest.graph.inserting_after(last):
            last = rest.graph.placeholder(f"drawn_{node.name}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
    output.args = (output.args[0][:-count],)
    rest.graph.eliminate_dead_code()  # this keeps draws without users
    for node in reversed(rest.graph.nodes):
        if is_draw(node) and not node.users:
            rest.graph.erase_node(node)
    rest.graph.eliminate_dead_code()
    _require_no_draws(rest)
    return drawing, rest


def _require_no_draws(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if is_draw(node):
            raise NotTraceable(f"it draws random numbers by {node.target}")


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def _without_numbers(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Any:
    """The graph of a function, traced without the numbers of large products.

    A graph often returns the factors of such a product instead, so this saves its memory. Some
    operations fail without the numbers, such as Cholesky factors. Then all numbers are computed.
    """
    left: list[Node] = []
    table = {each: _uncomputed(each, layout, left) for each, layout in _LAYOUTS.items()}
    try:
        return _made(function, inputs, table)
    except Exception:
        if not left:
            raise
    return _made(function, inputs)


def _made(function: Callable, inputs: Sequence[Tensor], table: Any = None) -> GraphModule:
    """The graph from ``make_fx``, whose code is made at the first call. Nodes have fake values.

    Torch makes fake values by a dispatch for each node, and a mode for each constant. Together they
    would take a third of the time.
    """
    mode = _mode()

    def fake(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(fake, value))
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        layout = value.shape, value.stride()
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(*layout, dtype=value.dtype, device="meta")
        return FakeTensor(mode, empty, value.device)

    def set_meta(proxy: Proxy, value: Any) -> Proxy:
        proxy.node.meta["val"] = fake(value)
        return proxy

    faster: Any = {"set_meta": set_meta, "extract_val": fake}
    with mock.patch.multiple(proxy_tensor, **faster), _use_lazy_graph_module(True):
        return make_fx(function, decomposition_table=table)(*inputs)


@functools.cache
def _mode() -> FakeTensorMode:
    """One mode for all graphs, because each keeps the stack that made it. It keeps no tensor."""
    return FakeTensorMode()


def _uncomputed(
    operation: Any, layout: Callable[..., Layout | None], left: list[Node]
) -> Callable[..., Any]:
    """An operation that is traced without computing its numbers, if they are many.

    :param layout: computes the layout of the result from the operation's arguments. ``None``: the
        numbers must be computed.
    :param left: collects the nodes without numbers.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        found, mode = layout(*args), get_proxy_mode()
        if kwargs or mode is None or found is None or math.prod(found[0]) < _LARGE:
            return NotImplemented
        slots = [get_proxy_slot(x, mode.tracer, None) if isinstance(x, Tensor) else x for x in args]
        proxies = tuple(getattr(slot, "proxy", slot) for slot in slots)
        nodes = [each.node for each in proxies if isinstance(each, torch.fx.Proxy)]
        if None in slots or not any(map(_depends_on_inputs, nodes)):  # its numbers may be read
            return NotImplemented
        with disable_proxy_modes_tracing():
            result = args[0].new_empty_strided(*found)
        proxy = mode.tracer.create_proxy("call_function", operation, proxies, {})
        left.append(proxy.node)
        return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

    return traced


def _product_layout(left: Tensor, right: Tensor) -> Layout:
    count, rows, columns = *left.shape[:2], right.shape[2]
    return (count, rows, columns), (rows * columns, columns, 1)


def _sum_layout(one: Tensor, other: Any) -> Layout | None:
    """The layout of a sum of two tensors, if both have the same layout without gaps."""
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return None
    shape, strides = tuple(one.shape), one.stride()
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    is_dense = last + 1 == one.numel() and 0 not in strides
    return (shape, strides) if is_dense and other.stride() == strides else None


def _table_layout(gradients: Tensor, indices: Tensor, size: int, *_: Any) -> Layout:
    return (size, gradients.shape[-1]), (gradients.shape[-1], 1)


_LAYOUTS: dict[Any, Callable[..., Layout | None]] = {
    torch.ops.aten.add.Tensor: _sum_layout,
    torch.ops.aten.bmm.default: _product_layout,
    torch.ops.aten.embedding_dense_backward.default: _table_layout,
}


class Compiler:
    """Makes graphs callable: compiled if enabled, else as they are.

    Without a compiler, or for a graph that is too large, it warns once and disables itself.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled

    def __call__(
        self, graph: GraphModule, inputs: Sequence[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        operations = sum(node.op == "call_function" for node in graph.graph.nodes)
        if self.enabled and operations > _MOST_OPERATIONS:
            self.enabled = False
            warnings.warn(
                f"jit='compile' does not apply, and steps run as with jit='trace': a graph of "
                f"{operations} operations would take many minutes to compile.",
                stacklevel=2,
            )
        if not self.enabled:
            return self._called(graph, inputs)
        try:
            from torch._inductor import standalone_compile  # this import takes a second

            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # torch's compiler warns about itself
                # Inputs always have these shapes, which torch.compile would check in every call.
                fast = standalone_compile(graph, list(inputs), dynamic_shapes="from_example_inputs")
                fast(*inputs)
        except Exception as error:
            self.enabled = False
            warnings.warn(
                f"jit='compile' failed with {type(error).__name__} (is there a C++ compiler?): "
                "steps run as with jit='trace'.",
                stacklevel=2,
            )
            return self._called(graph, inputs)
        return fast

    @staticmethod
    def _called(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        function = called_by_torch(graph)
        with torch.no_grad():
            function(*inputs)  # find errors now: later ones count as errors of a record
        return function


def tracing() -> bool:
    """Whether a graph is being traced."""
    return get_proxy_mode() is not None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, tracing and modes are off, so results are constants of a graph."""
    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
        yield


def constant_number(read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Read a number out of a tensor, also during tracing if it is the same in every call.

    That is so if the tensor depends on no input and no draw. For other tensors, torch raises its
    error.
    """
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if mode is None or slot is None:
        return read(tensor)
    reached = _ancestors(slot.proxy.node)
    # Values that are written into a view are no ancestors of the whole tensor.
    for node in reversed(mode.tracer.graph.nodes):
        if _writes(node) and not reached.isdisjoint(_ancestors(node.args[0])):
            reached |= _ancestors(node)
    if any(node.op == "placeholder" or is_draw(node) for node in reached):
        return read(tensor)
    with untraced():
        return read(tensor)


def _depends_on_inputs(node: Node) -> bool:
    return any(each.op == "placeholder" for each in _ancestors(node))


def _ancestors(node: Node) -> set[Node]:
    """The node, and all nodes from which it is computed."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _writes(node: Node) -> bool:
    """Whether a node overwrites its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and isinstance(node.args[0], Node)
