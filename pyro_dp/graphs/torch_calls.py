"""Graphs that call torch's own functions: the same kernels, whose arguments are read in less time.

A traced graph calls overloads of operations, and each call matches its arguments with a schema. The
functions that Python code calls (``torch.add``) parse them in about half of that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

# Functions that take the arguments of all overloads of that name.
_NAMES = (
    *("abs", "add", "addmm", "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bmm", "cat"),
    *("ceil", "clamp", "clamp_max", "clamp_min", "clone", "cos", "cumprod", "cumsum", "diagonal"),
    *("digamma", "div", "empty", "eq", "erf", "erfinv", "exp", "expm1", "flip", "floor"),
    *("ge", "gt"),
    *("index_select", "isfinite", "le", "lgamma", "log", "log1p", "log2", "logical_and"),
    *("logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mm", "mul", "mv"),
    *("nan_to_num", "ne", "neg", "permute", "pow", "prod", "reciprocal", "relu", "rsqrt", "rsub"),
    *("select", "sigmoid", "sign", "sin", "sqrt", "squeeze", "stack", "sub", "sum", "t", "tanh"),
    *("transpose", "tril", "triu", "unsqueeze", "where", "xlogy"),
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


def called_by_torch(graph: GraphModule) -> Callable[..., Sequence[Tensor]]:
    """The graph as a function of its inputs."""
    faster = GraphModule(graph, graph.graph.__deepcopy__({}))
    for node in faster.graph.nodes:
        if node.op == "call_function":
            _call_by_torch(node)
    faster.recompile()
    forward = faster.forward

    def call(*inputs: Tensor) -> Sequence[Tensor]:
        # Functions, unlike overloads, ask the modes of whoever calls.
        with torch._C.DisableTorchFunction():
            found: Sequence[Tensor] = forward(*inputs)
        return found

    return call


def _call_by_torch(node: Node) -> None:
    if not node.args or isinstance(node.args[0], (int, float)):  # which only overloads take
        return
    if node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        node.target, node.kwargs = Tensor.to, {**node.kwargs, "copy": True}
    else:
        node.target = _FUNCTIONS.get(node.target, node.target)
