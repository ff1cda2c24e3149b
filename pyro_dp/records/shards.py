"""Records that lie in several processes: what is here, and what model and guide see of them all.

No user code is ever shown more than one record, so that none needs the others' rows: the tensors
that a model sees are as long as all records together, on every rank, also on one that has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.mechanism.messages import Shape, Shapes
from pyro_dp.records.arguments import Arguments
from pyro_dp.records.column import has_rows, like
from pyro_dp.records.stand_ins import placeholder_row
from pyro_dp.utils.errors import ModelError

Exchange = Callable[[Shapes], list[Shapes]]  # by rank
_OTHER_ARGUMENTS = (
    "The arguments differ between the processes of the cluster in number or kind: all must pass "
    "the same ones, each with its own rows. One that has none passes tensors of shape (0, ...)."
)
_OTHER_ROWS = (
    "The rows of {name} differ in shape or dtype between the processes of the cluster: convert the "
    "data to tensors of one dtype, with rows of one shape."
)
NO_SHARD = (
    "The size of the private plate is the number of rows of no argument, over all processes of the "
    "cluster: let it be len(x), which is that of them all, or the sum of the shards."
)
_NESTED = (
    "Argument {name!r} is a {kind} that holds numbers or texts. Each of several processes or "
    "owners must pass its records as tensors with a row per record, also where it has one or none, "
    "as in torch.tensor([[1.0, 2.0]]); nothing else is taken for data. Settings of a model are "
    "bound to it, as in functools.partial(model, sizes=(8, 2))."
)
_NO_RECORDS = "No process of the cluster has a record: pass each its rows, as in run(x, y)."


@dataclass(frozen=True)
class Shard:
    """The records of one process.

    :param count: how many are here, also 0.
    :param size: N, of all processes.
    :param places: of the data among the arguments' leaves.
    """

    count: int
    size: int
    places: frozenset[int]


def find_shards(names: Sequence[str], arguments: Arguments, exchange: Exchange) -> list[Shard]:
    """What may be the records, by the shapes that each process tells the others; most rows first.

    Tensors that have equally many rows on each process belong together. A constant has the same
    ones everywhere, which only the model can tell from data. Of numbers no value is told: a record
    may be one, where it was passed as a list.

    :param names: of the arguments, one for each leaf.
    :param arguments: of this process, tensors.
    :raises ModelError: they differ between processes, or there are no rows; on all of them alike.
    """
    _refuse_nested(names, arguments)
    leaves = pytree.tree_leaves(arguments)
    by_rank = exchange(Shapes(list(names), [_shape(leaf) for leaf in leaves]))
    if any(each.names != by_rank[0].names for each in by_rank):
        raise ModelError(_OTHER_ARGUMENTS)
    by_leaf = list(zip(*(each.shapes for each in by_rank), strict=True))
    for name, found in zip(names, by_leaf, strict=True):
        if len({each[1:] for each in found}) > 1:
            raise ModelError(_OTHER_ROWS.format(name=repr(name)))
    groups: dict[tuple[int, ...], set[int]] = {}
    for i, found in enumerate(by_leaf):
        groups.setdefault(tuple(each[0] for each in found), set()).add(i)
    shards = [
        Shard(len(leaves[min(places)]), sum(counts), frozenset(places))
        for counts, places in groups.items()
        if sum(counts)
    ]
    if not shards:
        raise ModelError(_NO_RECORDS)
    return sorted(shards, key=lambda shard: -shard.size)


def as_of_all(arguments: Arguments, shard: Shard) -> Arguments:
    """The arguments with public rows in place of data, as many as all processes have."""
    leaves, spec = pytree.tree_flatten(arguments)
    for i in shard.places:
        row = placeholder_row(like(leaves[i]))
        leaves[i] = row.expand(shard.size, *row.shape)
    return pytree.tree_unflatten(leaves, spec)


def with_a_row(leaves: Sequence[Any], shard: Shard) -> list[Any]:
    """An empty shard has one public row, to look at what the model does; no step takes it."""
    if shard.count:
        return list(leaves)
    rows = {i: placeholder_row(like(leaves[i]))[None] for i in shard.places}
    return [rows.get(i, leaf) for i, leaf in enumerate(leaves)]


def _refuse_nested(names: Sequence[str], arguments: Arguments) -> None:
    args, kwargs = arguments
    remaining = iter(names)  # as many of each argument as it has leaves
    for value in (*args, *kwargs.values()):
        leaves, spec = pytree.tree_flatten(value)
        own = [next(remaining) for _ in leaves]
        if not spec.is_leaf() and any(isinstance(x, (int, float, str)) for x in leaves):
            raise ModelError(_NESTED.format(name=own[0], kind=type(value).__name__))


def _shape(leaf: Any) -> Shape:
    """Rows, the shape of one, and its type; all of it is public."""
    if has_rows(leaf):
        return len(leaf), tuple(leaf.shape[1:]), str(leaf.dtype)
    return 0, (), str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
