"""Canaries: made-up records that replace the first records of the data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pyro_dp.utils.errors import ConfigurationError

Column = torch.Tensor | np.ndarray


def canary_rows(data: Any, canaries: Any, *, single: bool) -> list[Column]:
    """
    :param data: a tuple or list of tensors or arrays with one row per record.
    :param canaries: as many entries, each a row (``single``) or several.
    :returns: (m, ...) for each column of the data, in its type; m is 1 for a single canary.
    :raises ConfigurationError: they do not fit each other.
    """
    name = "canary" if single else "canaries"
    for argument, value in (("data", data), (name, canaries)):
        if not isinstance(value, tuple | list) or not value:
            raise ConfigurationError(
                f"{argument} must be a tuple with an entry for each argument of make_run: (x, y)."
            )
    if len(data) != len(canaries):
        raise ConfigurationError(f"{name} must have an entry for each of the {len(data)} of data.")
    columns = []
    for i, (column, rows) in enumerate(zip(data, canaries, strict=True)):
        if not isinstance(column, torch.Tensor | np.ndarray) or column.ndim < 1 or not len(column):
            raise ConfigurationError(
                f"data[{i}] must be a tensor or an array with one row per record."
            )
        try:
            if isinstance(column, torch.Tensor):
                rows = torch.as_tensor(rows, dtype=column.dtype, device=column.device)
            else:
                rows = np.asarray(rows, dtype=column.dtype)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(f"{name}[{i}] is no row of data[{i}].") from None
        rows = rows[None] if single else rows
        if rows.ndim < 1 or rows.shape[1:] != column.shape[1:] or not 1 <= len(rows) <= len(column):
            shape = tuple(column.shape[1:])
            raise ConfigurationError(
                f"{name}[{i}] must have shape {shape}, as a row of data[{i}]."
                if single
                else f"{name}[{i}] must have shape (m, ...) with rows of shape {shape}, as "
                f"data[{i}] has, and 1 <= m <= {len(column)}."
            )
        columns.append(rows)
    if len({len(rows) for rows in columns}) > 1:
        raise ConfigurationError(f"{name} must have equally many rows in each entry.")
    return columns


def with_canaries(
    data: Sequence[Column], canaries: Sequence[Column], included: np.ndarray
) -> tuple[Column, ...]:
    """A copy of the data, in which the included canaries replace records of the same number.

    :param canaries: from :func:`canary_rows`.
    :param included: (m,), bool.
    """
    places = np.flatnonzero(included)
    records = []
    for column, rows in zip(data, canaries, strict=True):
        kept: Any = column.clone() if isinstance(column, torch.Tensor) else column.copy()
        kept[places] = rows[places]
        records.append(kept)
    return tuple(records)
