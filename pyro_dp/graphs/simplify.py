"""Simplify traced graphs that are not compiled.

Each operation costs a few microseconds. Vectorising and differentiating leave useless operations
behind: views that keep the shape, multiplications by 1, repeated constants and operations.
"""

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

_OPS = torch.ops.aten
_VIEWS = {
    *(_OPS.alias.default, _OPS.detach.default, _OPS.expand.default, _OPS.permute.default),
    *(_OPS.transpose.int, _OPS.view.default, _OPS._unsafe_view.default),
}
_FACTORIES = {
    *(_OPS.arange.default, _OPS.full.default, _OPS.ones.default, _OPS.zeros.default),
    *(_OPS.scalar_tensor.default, _OPS.lift_fresh_copy.default),  # the last of a literal
}
_INDEXED = {_OPS.index.Tensor, _OPS.index_put.default, _OPS.index_put_.default}
_EMPTY = {_OPS.empty.memory_format, _OPS.empty_like.default, _OPS.empty_strided.default}
_LIKE = {_OPS.full_like.default, _OPS.ones_like.default, _OPS.zeros_like.default}
_NEUTRAL = {
    (_OPS.mul.Tensor, 1),
    (_OPS.div.Tensor, 1),
    (_OPS.add.Tensor, 0),
    (_OPS.sub.Tensor, 0),
    (_OPS.pow.Tensor_Scalar, 1),
}


def simplify(graph: GraphModule) -> None:
    """Remove nodes without effect from this graph. Overwritten tensors are left alone."""
    for change in _CHANGES:
        memory = _Memory(graph)
        for node in _operations(graph):
            change(node, memory)
    _skip_copies(graph, _handed_out(graph))
    _spell_out_masks(graph, _fold_constants(graph))
    _share(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def only_reads(graph: GraphModule) -> bool:
    """Whether the graph overwrites no input. It first removes copies that nothing overwrites."""
    _skip_copies(graph, kept=set())
    graph.recompile()
    memory = _Memory(graph)
    return not memory.is_written(*(n for n in graph.graph.nodes if n.op == "placeholder"))


def are_written(graph: GraphModule, nodes: Iterable[Node]) -> bool:
    """Whether a later operation overwrites the memory of one of these nodes."""
    return _Memory(graph).is_written(*nodes)


def arguments(node: Node) -> tuple[Any, ...]:
    """A node's positional arguments, untyped."""
    return node.args


def shape(node: Node) -> tuple[int, ...]:
    """The shape of the tensor that a node returns."""
    return tuple(node.meta["val"].shape)


def is_draw(node: Node) -> bool:
    """Whether a node draws random numbers. Fused attention does so only with dropout."""
    operation: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, each in enumerate(operation._schema.arguments):
        if each.name == "dropout_p":
            values = [*node.args[position : position + 1], node.kwargs.get(each.name, 0.0)]
            return bool(values[0] != 0.0)
    return True


def _copy_at_once(node: Node, memory: "_Memory") -> None:
    """Replace a copy into new memory by a clone."""
    if node.target is _OPS.copy_.default:
        made, source = arguments(node)[:2]
        fresh = made.target in _EMPTY and set(made.users) == {node}
        if fresh and isinstance(source, Node) and _layout(made) == _layout(source):
            node.target, node.args = _OPS.clone.default, (source,)


def _skip_copies(graph: GraphModule, kept: set[Node]) -> None:
    """Remove copies if neither copy nor original is overwritten. Copies in ``kept`` stay."""
    memory = _Memory(graph)
    for node in _operations(graph):
        if node.target is not _OPS.clone.default or node.kwargs or node in kept:
            continue
        before = arguments(node)[0]
        if _layout(before) == _layout(node) and not memory.is_written(node, before):
            _replace(node, before)


def _handed_out(graph: GraphModule) -> set[Node]:
    """Nodes with the memory of outputs: copies among them are there on purpose."""
    memory = _Memory(graph)
    (output,) = graph.graph.find_nodes(op="output")
    return {root for node in output.all_input_nodes for root in memory.roots(node)}


def _skip_identity(node: Node, memory: "_Memory") -> None:
    """Remove an operation that returns its input, such as a multiplication by 1."""
    if not (node.args and isinstance(node.args[0], Node)):
        return
    before, number = node.args[0], node.args[-1]
    copies = len(node.args) == 2 and not node.kwargs and isinstance(number, (int, float))
    copies = copies and (node.target, number) in _NEUTRAL
    if copies and memory.is_written(before, node):
        return
    if (copies or node.target in _VIEWS) and _layout(before) == _layout(node):
        _replace(node, before)


def _trust_attention(node: Node, memory: "_Memory") -> None:
    """Use a plain softmax in attention without a mask: a product has no row of -inf."""
    if node.target is _OPS._safe_softmax.default and not node.kwargs:
        before, axis = arguments(node)[:2]
        product: Node = before
        while product.target in _VIEWS:
            product = arguments(product)[0]
        if product.target is _OPS.bmm.default and not memory.is_written(before):
            node.target, node.args = _OPS._softmax.default, (before, axis, False)


def _stack_selections(node: Node, memory: "_Memory") -> None:
    """Replace a sum of gradients, each in its own zeros, by a stack of all parts of an axis."""
    parts = sorted(_summed_selections(node), key=lambda each: arguments(each)[3])
    values = [arguments(each)[0] for each in parts]
    if len(parts) < 2 or memory.is_written(node, *parts, *values):
        return
    sizes, axis = arguments(parts[0])[1:3]
    if [arguments(each)[1:] for each in parts] == [(sizes, axis, i) for i in range(sizes[axis])]:
        node.target, node.args = _OPS.stack.default, (values, axis)


def _summed_selections(node: Node) -> list[Node]:
    """The gradients of selections whose sum is this node; empty if it is no such sum."""
    if node.target is _OPS.select_backward.default:
        return [node]
    if node.target is not _OPS.add.Tensor or node.kwargs:
        return []
    parts = [_summed_selections(each) for each in node.args if isinstance(each, Node)]
    return sum(parts, []) if len(parts) == 2 and all(parts) else []


def _unrepeat_row(node: Node, memory: "_Memory") -> None:
    """Replace an index into repeated rows of a record by the row."""
    if node.target is not _OPS.index.Tensor or len(arguments(node)[1]) != 2:
        return
    repeated, (first, _) = arguments(node)
    # Indexing makes a copy, which may be overwritten.
    if repeated.target is not _OPS.expand.default or memory.is_written(node, repeated):
        return
    row = arguments(repeated)[0]
    if shape(row) == shape(node) and shape(row)[1] == 1 and _counts_up(first, row):
        _replace(node, row)


def _counts_up(index: Any, row: Node) -> bool:
    """Whether an index is 0, 1, ... over the records."""
    if not (isinstance(index, Node) and index.target is _OPS.unsqueeze.default):
        return False
    count, axis = arguments(index)
    (length,) = shape(row)[:1]
    return axis in (1, -1) and count.target is _OPS.arange.default and count.args == (length,)


_CHANGES = _copy_at_once, _unrepeat_row, _skip_identity, _trust_attention, _stack_selections


def _fold_constants(graph: GraphModule) -> dict[Node, torch.Tensor]:
    """Replace nodes that depend on no input by constants, and return those with their values."""
    memory = _Memory(graph)
    constants: dict[Node, torch.Tensor] = {}
    for node in _operations(graph):
        inputs = node.all_input_nodes
        fresh = node.target in _FACTORIES or node.target in _LIKE
        fresh = fresh or (node.target is _OPS._to_copy.default and not inputs)  # copies a number
        derived = bool(inputs) and all(each in constants for each in inputs)
        if not (fresh or derived) or is_draw(node) or memory.is_written(node):
            continue
        if node.target is _OPS.lift_fresh_copy.default:
            values = {inputs[0]: getattr(graph, str(inputs[0].target))}
        else:
            values = {x: constants[x] if x in constants else blank(x) for x in inputs}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        operation: Any = node.target
        result = operation(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            constants[node] = result
    folded = {}
    for i, (node, value) in enumerate(constants.items()):
        name = f"_constant{i}"
        graph.register_buffer(name, value, persistent=False)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = dict(node.meta)
        _replace(node, constant)
        folded[constant] = value
    return folded


def _spell_out_masks(graph: GraphModule, constants: dict[Node, torch.Tensor]) -> None:
    """Replace constant masks in indices by integers, whose number a compiler can see."""
    integers: dict[Node, list[Node]] = {}
    for mask, value in constants.items():
        if value.dtype != torch.bool:
            continue
        integers[mask] = []
        for i, positions in enumerate(value.nonzero(as_tuple=True)):
            name = f"{mask.target}_positions{i}"
            graph.register_buffer(name, positions, persistent=False)
            with graph.graph.inserting_after(mask):
                integers[mask].append(graph.graph.get_attr(name))
            integers[mask][-1].meta["val"] = positions
    for node in _operations(graph):
        if node.target in _INDEXED:
            node.update_arg(1, [x for i in arguments(node)[1] for x in integers.get(i, [i])])


def blank(node: Node) -> torch.Tensor:
    """A tensor of this node's shape, strides and dtype, with arbitrary numbers."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _share(graph: GraphModule) -> None:
    """Merge nodes that compute the same value."""
    memory = _Memory(graph)
    seen: dict[Hashable, Node] = {}
    for node in _operations(graph):
        if is_draw(node) or memory.is_written(node, *node.all_input_nodes):
            continue
        key = node.target, _frozen(node.args), _frozen(node.kwargs)
        if key in seen:
            _replace(node, seen[key])
        else:
            seen[key] = node


def _operations(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


class _Memory:
    """Which nodes may share memory, and which memory is overwritten."""

    def __init__(self, graph: GraphModule):
        self._roots: dict[Node, set[Node]] = {}
        self._written: set[Node] = set()
        for node in graph.graph.nodes:
            self._roots[node] = self._roots_of(node)

    def roots(self, node: Node) -> set[Node]:
        """Nodes whose memory this node may share, including itself."""
        return self._roots[node]

    def is_written(self, *nodes: Node) -> bool:
        return any(self._roots[node] & self._written for node in nodes)

    def _roots_of(self, node: Node) -> set[Node]:
        if node.op != "call_function" or _has_memory_of_its_own(node.target):
            return {node}
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # getitem and the like
            return {node}.union(*(self._roots[each] for each in node.all_input_nodes))
        shared, written = {node}, set()
        for position, argument in enumerate(schema.arguments):
            values = node.args[position : position + 1] or [node.kwargs.get(argument.name)]
            nodes = [each for each in pytree.tree_leaves(values) if isinstance(each, Node)]
            roots = set().union(*(self._roots[each] for each in nodes))
            if argument.alias_info is not None or node.target in _VIEWS:
                shared |= roots
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= roots
        if schema.is_mutable and not written:  # for lists, the schema does not say which tensor
            written = set().union(*(self._roots[each] for each in node.all_input_nodes))
        self._written |= written
        return shared


@functools.cache
def _has_memory_of_its_own(operation: Any) -> bool:
    """Whether the schema says that results share no memory with inputs, and inputs stay."""
    schema = getattr(operation, "_schema", None)
    if schema is None or schema.is_mutable or operation in _VIEWS:
        return False
    return all(argument.alias_info is None for argument in schema.arguments)


def _layout(node: Node) -> tuple:
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _frozen(arguments: Any) -> Hashable:
    """Arguments of a node as a key of a dictionary; 1, 1.0 and True are different keys."""
    if isinstance(arguments, (tuple, list)):
        return tuple(map(_frozen, arguments))
    if isinstance(arguments, dict):
        return tuple((key, _frozen(value)) for key, value in sorted(arguments.items()))
    return type(arguments), repr(arguments) if isinstance(arguments, float) else arguments
