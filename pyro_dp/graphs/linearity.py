"""Whether a traced graph is affine in one of its inputs, as far as its operations tell."""

import torch
from torch.fx import GraphModule, Node

_OPS = torch.ops.aten
# In their first argument, or in a list of tensors.
LINEAR = {
    *("_to_copy", "_unsafe_view", "alias", "cat", "clone", "contiguous", "cumsum", "detach"),
    *("diagonal", "expand", "flip", "index", "index_select", "mean", "neg", "permute", "repeat"),
    *(
        "constant_pad_nd",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "sum",
        "t",
    ),
    *("transpose", "unbind", "unsqueeze", "view"),
}
_SUMS = {"add", "rsub", "sub"}
_PRODUCTS = {"bmm", "dot", "mm", "mul", "mv"}  # of which one factor may depend on it


def is_affine(graph: GraphModule, place: int) -> bool:
    """Whether every floating-point output is an affine function of this input.

    :param place: of the input.
    """
    moving, affine = affine_nodes(graph, place)
    return moving == affine


def affine_nodes(graph: GraphModule, place: int) -> tuple[set[Node], set[Node]]:
    """Which nodes depend on this input, and which of them are affine in it."""
    moving: set[Node] = set()
    affine: set[Node] = set()
    for i, node in enumerate(graph.graph.nodes):
        given = [each for each in node.all_input_nodes if each in moving]
        if node.op == "placeholder":
            if i == place:
                moving.add(node)
                affine.add(node)
        elif node.op != "output" and given:
            moving.add(node)
            if affine.issuperset(given) and _keeps(node, moving):
                affine.add(node)
    return moving, affine


def _keeps(node: Node, moving: set[Node]) -> bool:
    """Whether a node is affine in its arguments that move."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return False
    args = node.args
    first = args[0] in moving or isinstance(args[0], list | tuple)
    others = [each for each in args[1:] if isinstance(each, Node) and each in moving]
    if name in LINEAR:
        return first and not others
    if name in _SUMS:
        return True
    if name in _PRODUCTS:
        return not (first and others)
    if name == "div":
        return first and not others
    return name == "addmm" and not (args[1] in moving and args[2] in moving)
