"""An encoded frame: tensors by name, as a model reads them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Encoded(dict[str, Tensor]):
    """What :meth:`~pyro_dp.tabular.Schema.encode` makes of a frame: ``data["age"]`` in a model.

    It is one argument of ``run``; a model sees an ordinary dictionary of the rows of its records.
    Names, dtypes and shapes follow from the schema and the number of units alone. **The numbers
    are data**, as secret as the frame.

    :param schema: that it follows, a :class:`~pyro_dp.tabular.Schema`.
    :param tensors: by name, each with a row per unit.
    """

    def __init__(self, schema: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.schema = schema

    @property
    def units(self) -> int:
        """How many there are: public, as N is everywhere."""
        return len(next(iter(self.values())))

    def __repr__(self) -> str:
        """Shapes, without a number."""
        return f"Encoded({', '.join(f'{k}: {tuple(v.shape)}' for k, v in self.items())})"

    def __reduce__(self) -> Any:
        return type(self), (self.schema, dict(self))


def _flatten(encoded: Encoded) -> tuple[list[Tensor], tuple[str, ...]]:
    return list(encoded.values()), tuple(encoded)


def _unflatten(tensors: Iterable[Any], names: Any) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


pytree.register_pytree_node(
    Encoded, _flatten, _unflatten, serialized_type_name="pyro_dp.tabular.Encoded"
)
