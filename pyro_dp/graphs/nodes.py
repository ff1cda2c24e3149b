"""What a node of a traced graph was given, and what it gives."""

from typing import Any

from torch.fx import Node


def arguments(node: Node) -> tuple[Any, ...]:
    """Those by position. The operation says of which types they are."""
    return node.args


def shape(node: Node) -> tuple[int, ...]:
    """Of the tensor that it gives."""
    return tuple(node.meta["val"].shape)
