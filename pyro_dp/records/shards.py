"""Records that lie in several processes: what is here, and what model and guide see of them all.

No user code is ever shown more than one record, so that none needs the others' rows: the tensors
that a model sees are as long as all records together, on every rank, also on one that has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.arguments import Arguments
from pyro_dp.records.column import has_rows, like
from pyro_dp.records.stand_ins import placeholder_row
from pyro_dp.utils.errors import ModelError

Exchange = Callable[[Any], list[Any]]  # something public of each process, by rank
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
    ones everywhere, which only the model can tell from data.

    :param names: of the arguments, one for each leaf.
    :param arguments: of this process, tensors.
    :raises ModelError: they differ between processes, or there are no rows; on all of them alike.
    """
    leaves = pytree.tree_leaves(arguments)
    by_rank = exchange((names, [_shape(leaf) for leaf in leaves]))
    if any(each[0] != by_rank[0][0] for each in by_rank):
        raise ModelError(_OTHER_ARGUMENTS)
    by_leaf = list(zip(*(each[1] for each in by_rank), strict=True))
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


def _shape(leaf: Any) -> tuple[int, Any, str]:
    """Rows, the shape of one, and its type; all of it is public."""
    if has_rows(leaf):
        return len(leaf), tuple(leaf.shape[1:]), str(leaf.dtype)
    number = repr(leaf) if isinstance(leaf, (bool, int, float, str)) else ""
    return 0, number, str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
