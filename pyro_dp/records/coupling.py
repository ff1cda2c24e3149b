"""Records that read each other: found on public rows, several at a time."""

from collections.abc import Iterator

from pyro.poutine import Trace
from torch import Tensor

from pyro_dp.records.plate import PrivatePlate, Traces, random_sites
from pyro_dp.records.site_checks import Runs
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree

_COUNT = 3
_COUPLED = (
    "Site {name!r} of the {part}: the term of a record in plate {plate!r} moves when other records "
    "change, because other rows are read (a mean or maximum over the data, a shifted index, batch "
    "statistics). {shown} A record may read its own row only: standardise before, with public "
    "constants or a DPStandardScaler."
)
_SHOWN = {
    False: "The model is shown one record at a time.",
    True: "The model is shown one row of the data, which is its own mean and maximum.",
}
_SQUARE = (
    "Site {name!r} of the {part} has a term for every pair of records: something of shape (N, 1) "
    "meets something of shape (N,), and they broadcast to N x N. Make both (N,), one number per "
    "record, as in y.squeeze(-1)."
)


def check_coupling(inside: Runs) -> None:
    """Rows of which the first one stays: its terms must stay, too, whatever the others are.

    A model that is shown one record does not fail where it should not read others: it computes
    something else, such as x - x.mean(0) = 0.

    :param inside: runs that show the plate's sites.
    :raises ModelError: a site of the first record moves; names it.
    """
    records = inside.records
    count = min(_COUNT, records.plate.size)
    if count == 1:
        return
    length = count if records.slice_data else records.shown
    indices = records.apart(count, length)

    def pair(integers: bool) -> tuple[Traces, Traces]:
        """On two sets of rows, with the same latents."""
        rows = [records.varied(length, seed, integers=integers) for seed in (1, 2)]
        one = inside.on(rows[0], public=True, indices=indices)
        return one, inside.on(rows[1], public=True, indices=indices, replayed=one)

    one, other = on_varied(pair) or ({}, {})
    for part, trace in one.items():
        others = dict(_first_terms(other[part], records.plate))
        for name, term in _first_terms(trace, records.plate):
            if _is_square(trace.nodes[name]):
                raise ModelError(_SQUARE.format(name=name, part=part))
            if name not in others or not agree(term, others[name]):
                shown = _SHOWN[records.slice_data]
                raise ModelError(
                    _COUPLED.format(name=name, part=part, plate=records.plate.name, shown=shown)
                )


def _is_square(site: dict) -> bool:
    """Whether a site has dimensions beyond those of its plates."""
    dims = [-frame.dim for frame in site["cond_indep_stack"] if frame.dim is not None]
    return bool(dims) and site["log_prob"].dim() > max(dims)


def _first_terms(trace: Trace, plate: PrivatePlate) -> Iterator[tuple[str, Tensor]]:
    """Log densities of the first record's sites, by name."""
    for name, site in random_sites(trace).items():
        frame = plate.frame(site)
        if frame is not None and (frame.dim is not None or frame.counter <= 1):
            yield name, plate.of_record(site, 0)
