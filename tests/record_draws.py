"""A record's own draws as a function of its index, for tests that pair or compare records.

The bound on a record's effect holds for any fixed draws of all records. Their order of use would
give other draws to the records after one that is left out.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_dp.records import local_draws, record_term_builder
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.vips.conjugate_model import Draws

_MOST = 1000  # records


def numbers(kind: str, position: int, count: int, size: int = _MOST) -> Tensor:
    """(N, count), of each record's draw number ``position``."""
    rng = np.random.default_rng(position)
    drawn = (rng.standard_normal if kind == "normal" else rng.random)((size, count))
    return torch.from_numpy(drawn).float()


def by_index(patch, size: int = _MOST) -> None:
    """Until the patch is undone; draws outside of records stay as they are.

    :param patch: pytest's MonkeyPatch.
    """
    shown, standard, now = RecordTerm.shown, local_draws._standard, {}
    check = record_term_builder.check_isolation

    @contextlib.contextmanager
    def noted(term, particle, latents, index, *args, **options):
        with shown(term, particle, latents, index, *args, **options) as found:
            now.update(index=index, position=0)
            try:
                yield found
            finally:
                now.clear()

    def drawn(kind, shape, dtype=None, device=None):
        if not now:
            return standard(kind, shape, dtype=dtype, device=device)
        table = numbers(kind, now["position"], math.prod(shape), size)
        now["position"] += 1
        own = table.to(now["index"].device).index_select(0, now["index"].reshape(1))
        return own.reshape(tuple(shape)).to(dtype or torch.get_default_dtype())

    def with_equal_draws(*args):
        """It compares records of different indices, on the same draws."""
        with pytest.MonkeyPatch.context() as other:
            other.setattr(local_draws, "_standard", standard)
            check(*args)

    def of_vips(stream, indices):
        def make(request):
            kind, position, count = request
            return numbers(kind, position, count, size)[indices].double()

        return Draws(make)

    patch.setattr(record_term_builder, "check_isolation", with_equal_draws)
    patch.setattr(RecordTerm, "shown", noted)
    patch.setattr(local_draws, "_standard", drawn)
    patch.setattr(Draws, "by", staticmethod(of_vips))
