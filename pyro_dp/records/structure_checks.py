"""Structural checks of a record's term: it reads only its own row, and it can be vectorised.

:mod:`pyro_dp.records.site_checks` checks the sites first. All checks inform the curator, before any
budget is spent (:mod:`pyro_dp.records.record_term_builder`).
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from pyro_dp.graphs.captured_state import require_same_changes
from pyro_dp.graphs.tracing import called_by_torch, needed, tracing
from pyro_dp.records.global_draw import Particle
from pyro_dp.records.local_draws import LocalDraws
from pyro_dp.records.losses import NotVectorizable
from pyro_dp.records.plate import PrivatePlate, Traces, bare, random_sites
from pyro_dp.records.record_term import Batch, RecordGradients, RecordTerm
from pyro_dp.records.sandbox import guarded, looking_at_records
from pyro_dp.records.site_checks import Runs
from pyro_dp.records.stand_ins import on_varied
from pyro_dp.records.torch_modes import Decisions
from pyro_dp.utils.errors import CURATOR, ModelError, PrivacyError, no_warnings
from pyro_dp.utils.linalg import agree, close, largest
from pyro_dp.utils.torch_state import seed_torch

_COUNT = 3  # records at once
_POSITIONS = 12  # indices at which a row is tried
_MOST_NUMBERS = 2**22  # numbers in the gradients of records at once
_FEW = 500  # records: tracing a graph takes longer than checking their observations
_COUPLED = (
    "Site {name!r} of the {part}: the term of a record in plate {plate!r} moves when other "
    "records change. It reads other rows: a mean or maximum over the data, a shifted index, batch "
    "statistics. {view} A record may read its own row only: standardise before, with public "
    "constants or a DPStandardScaler."
)
_VIEWS = {
    False: "The model sees one record at a time.",
    True: "The model sees one row of the data, which is its own mean and maximum.",
}
_SQUARE = (
    "Site {name!r} of the {part} has a term for every pair of records. Shapes (N, 1) and (N,) "
    "broadcast to N x N. Make both (N,), one number per record, as in y.squeeze(-1)."
)
_REMEMBERS = (
    "The term of a record changes after another record's run: the model keeps some of its data. "
    "Compute it from the record each time, in a local variable."
)

_APART = (
    "The model branches on values of a record. Records that branch unlike a placeholder of ones "
    "and zeros run one at a time, which is slow. Use torch.where, which computes both branches "
    "for all. " + CURATOR
)


def check_coupling(inside: Runs) -> None:
    """Require that the first record's terms stay the same when other rows change.

    A model that reads other records does not fail on a single one. It computes something else, such
    as x - x.mean(0) = 0.

    :param inside: runs that show the plate's sites.
    :raises ModelError: a term of the first record changes; names its site.
    """
    records = inside.records
    count = min(_COUNT, records.plate.size)
    if count == 1:
        return
    length = count if records.slice_data else records.shown
    indices = records.apart(count, length)

    def pair(integers: bool) -> tuple[Traces, Traces]:
        """Run on two sets of rows, with the same latents."""
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
                view, plate = _VIEWS[records.slice_data], records.plate.name
                raise ModelError(_COUPLED.format(name=name, part=part, plate=plate, view=view))


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


def check_isolation(term: RecordTerm, particle: Particle) -> None:
    """Require that the term depends on its row, and on nothing else at its index."""
    records = term.records

    def at(index: int, row: list[Tensor], **options) -> tuple[dict[str, Tensor], Tensor]:
        seed_torch(0)  # the same draws wherever the index points
        record = Batch(torch.tensor(index, device=records.device), row)
        return term.single(particle, record, LocalDraws(), **options)

    with no_warnings():
        at(0, records.placeholder(), public=True)  # here the message quotes an error of the loss
    _require_isolated(term, particle, at)


@looking_at_records()
def _require_isolated(term: RecordTerm, particle: Particle, at: Callable) -> None:
    """
    :param at: computes gradients and loss of a row at an index.
    """
    records = term.records
    first = records.row(0)
    gradients, loss = at(0, first)
    alike = _alike_at_once(term, particle, first, gradients, loss)
    for i in () if alike else records.examples(_POSITIONS):
        moved, moved_loss = at(i, first)
        for name in term.parameters.keys() & gradients.keys() & moved.keys():
            if not agree(gradients[name], moved[name]):
                raise ModelError(
                    f"Parameter {name!r} has values that depend on the record's index in plate "
                    f"{records.plate.name!r}, but not one row per record, at its index. Read it "
                    "at the index (loc[idx]), or compute the values from the record (amortisation)."
                )
        if not agree(loss, moved_loss):
            raise ModelError(
                f"The term of a record changes with its index in plate {records.plate.name!r} "
                "although its row does not. The model reads data that are no argument of step(), "
                "or not indexed along their first dimension. Pass them as a tensor with one row "
                "per record."
            )
    with term.state.pristine() as once:
        at(0, first)
    with term.state.pristine() as changes:
        for i in records.examples()[1:]:
            at(i, records.row(i))
        once_more, again = at(0, first)
    same = all(agree(each, once_more[name]) for name, each in gradients.items())
    if not (same and agree(loss, again)):
        require_same_changes(once, changes)
        raise ModelError(_REMEMBERS)


def _alike_at_once(
    term: RecordTerm, particle: Particle, row: list[Tensor], gradients: dict, loss: Tensor
) -> bool:
    """Whether a row has the same term at many indices, vectorised. If not, a loop finds out why."""
    indices = torch.tensor(term.records.examples(_POSITIONS), device=term.records.device)
    if len(indices) * sum(x.numel() for x in term.parameters.values()) > _MOST_NUMBERS:
        return False
    try:
        found = term.at_once(particle, _repeated(term, row, indices), Decisions())
    except Exception:
        return False
    pairs = [(gradients[name], x) for name, x in found.parameters.items() if name in gradients]
    alike = all(agree(x.expand_as(y), y) for x, y in [(loss, found.losses), *pairs])
    return alike and not found.sampled and not found.apart.any()


def _repeated(term: RecordTerm, row: list[Tensor], indices: Tensor) -> Batch:
    """A batch with the same row, and public local rows, at each index."""
    both = row, term.local.constants()
    rows, local = pytree.tree_map(lambda x: x.expand(len(indices), *x.shape), both)
    return Batch(indices, rows, local_rows=local)


def on_fastest_path(term: RecordTerm, particle: Particle) -> RecordTerm:
    """The vectorised term, if it gives the loop's numbers; else the loop, with a warning.

    The choice, and the parts of a record's gradient, come from placeholders, so they are public.

    :raises ModelError: terms that agree on placeholders differ on the data.
    """
    records = term.records
    indices = torch.tensor(records.examples(), device=records.device)
    draws = LocalDraws()
    used, _ = term.single(particle, Batch(indices[0], records.placeholder()), draws)
    term = replace(term, samples=len(draws.sampled))
    decisions = Decisions()
    placeholders = _repeated(term, records.placeholder(), indices)
    reason = _why_not_vectorized(term, particle, placeholders, decisions)
    if reason is not None:
        # By control flow, other records may use more inputs than a placeholder. So all are kept.
        text = f"Gradients are taken one record at a time, which is slow: {reason}."
        warnings.warn(text, stacklevel=2)
        return term
    term = replace(term, answers=tuple(decisions.answers))
    with looking_at_records():
        examples = replace(placeholders, rows=records.rows(indices))
        reason = _why_not_vectorized(term, particle, examples)
        if reason is not None:
            raise ModelError(f"The model was vectorised on placeholders, but on the data {reason}.")
    if term.answers:  # other records may use more inputs than a placeholder, so all are kept
        if term.at_once(particle, examples).apart.any():
            warnings.warn(_APART, stacklevel=2)
        return term
    parameters = {name: leaf for name, leaf in term.parameters.items() if name in used}
    return replace(term, latents=term.latents.intersection(used), parameters=parameters)


def _why_not_vectorized(
    term: RecordTerm, particle: Particle, batch: Batch, decisions: Decisions | None = None
) -> str | None:
    try:
        vectorized = term.at_once(particle, batch, decisions)
    except PrivacyError as error:
        return str(error).split(". ")[0].rstrip(".")
    except Exception as error:
        return f"torch.func raised {type(error).__name__}"
    before, together = torch.get_rng_state(), (~vectorized.apart).nonzero().squeeze(1)
    if not len(together):
        return None
    sampled = vectorized.sampled
    if len(together) < len(batch.indices):
        vectorized = vectorized.at(together)
    tolerance, same = _tolerance(vectorized, batch.rows), True
    try:
        for k, i in enumerate(together.split(1)):  # one record at a time: gradients may be large
            looped = term.looped(particle, batch.at(i, sampled))
            same &= _same_gradients(looped, vectorized.at(i.new_tensor([k])), tolerance)
    except NotVectorizable as error:
        return str(error)
    other_draws = not torch.equal(before, torch.get_rng_state())
    return None if other_draws or same else "the vectorised gradient differs from the loop's"


def _tolerance(found: RecordGradients, rows: Sequence[Tensor]) -> float:
    """The rounding error to allow, relative to the largest gradient and to the rows.

    Terms that cancel in a gradient, as for a nearly certain outcome, leave errors of their size.
    """
    public = (*found.latents.values(), *found.parameters.values())
    exact = all(x.dtype == torch.float64 for x in public)
    relative, rounding = (1e-8, 1e-14) if exact else (1e-4, 1e-6)
    gradients = (*public, *found.local.values())
    scale = max([1.0, *(largest(row) for row in rows if row.is_floating_point())])
    return relative * max(map(largest, gradients), default=0.0) + rounding * scale


def _same_gradients(one: RecordGradients, other: RecordGradients, tolerance: float) -> bool:
    return all(
        close(ours, getattr(other, kind)[name], tolerance)
        for kind in ("latents", "parameters", "local")
        for name, ours in getattr(one, kind).items()
    )


@looking_at_records()
def check_values(term: RecordTerm, particle: Particle, size: int) -> None:
    """Require finite data, and observations in the support of their distributions.

    The support matters only where Pyro's validation would check it. One pass over the data does
    both, a part at a time.

    :param size: number of records at a time.
    """
    records, support = term.records, _Support.of(term, particle)
    for chosen, rows in records.checked(size):
        if support and support.vectorizes:
            support.check(chosen, rows)
    if support and not support.vectorizes:  # one at a time is slow, so only examples are checked
        for i in records.examples(100)[: records.count]:
            index = torch.tensor([i], device=records.device)
            support.check(index, records.rows(index))


@dataclass(frozen=True, eq=False)
class _Support:
    """Checks whether observations lie in the support of their distributions.

    :param trusted: observed sites that were made with ``validate_args=False``, so none is checked.
    """

    term: RecordTerm
    particle: Particle
    trusted: set[str]

    @staticmethod
    def of(term: RecordTerm, particle: Particle) -> "_Support | None":
        """The check; ``None`` if nothing is validated."""
        if not Distribution._validate_args:
            return None
        index = torch.zeros((), dtype=torch.long, device=term.records.device)
        own = (particle.detached(), index, term.records.placeholder())
        try:
            sites = term.observations(particle, *own, validates=True)
        except ModelError:  # a placeholder may lie outside the model's domain
            return _Support(term, particle, set())
        trusted = {s["name"] for s in sites if not bare(s["fn"])._validate_args}
        return _Support(term, particle, trusted) if len(trusted) < len(sites) else None

    @property
    def vectorizes(self) -> bool:
        """Whether all records take the same branch."""
        return self.term.vectorizes and not self.term.answers

    def check(self, indices: Tensor, rows: list[Tensor]) -> None:
        """:raises ModelError: an observation of these records lies outside its support."""
        with torch.no_grad():
            found = self._found(indices, rows)
        for name, supported in found.items():
            if name not in self.trusted and not supported.all():
                raise ModelError(
                    f"Site {name!r} observes values outside the support of its distribution. "
                    "Recode or scale them (a Bernoulli takes 0 and 1), or allow them by "
                    f"validate_args=False. {CURATOR}"
                )

    def _found(self, indices: Tensor, rows: list[Tensor]) -> dict[str, Tensor]:
        """Whether observations lie in the support of their distributions: (B, ...) per site."""
        if not self.vectorizes:
            return self._of_record(indices[0], [row[0] for row in rows])
        if self._graph:
            with contextlib.suppress(ModelError), guarded("Looking at observations"):
                return torch.vmap(self._graph, randomness="different")(indices, rows)
        # If the graph failed on a record, this run finds the line of the user's code.
        return torch.vmap(self._of_record, randomness="different")(indices, rows)

    def _of_record(self, index: Tensor, row: list[Tensor]) -> dict[str, Tensor]:
        observed = self.term.observations(self.particle, self.particle.detached(), index, row)
        return {site["name"]: _in_support(site) for site in observed}

    @cached_property
    def _graph(self) -> Callable[[Tensor, list[Tensor]], dict[str, Tensor]] | None:
        """A graph of :meth:`_of_record` without operations on which no support depends.

        ``None`` if there are few records, or the model cannot be traced.
        """
        records, names = self.term.records, list[str]()
        if records.count <= _FEW:
            return None

        def inside(index: Tensor, *row: Tensor) -> list[Tensor]:
            found = self._of_record(index, list(row))
            names[:] = found
            return list(found.values())

        index = torch.zeros((), dtype=torch.long, device=records.device)
        try:
            graph = called_by_torch(needed(inside, [index, *records.placeholder()]))
        except Exception:
            return None
        return lambda index, row: dict(zip(names, graph(index, *row), strict=True))


def _in_support(site: dict) -> Tensor:
    try:
        inside = torch.as_tensor(site["fn"].support.check(site["value"]))
    except (NotImplementedError, RuntimeError):  # no support, or a check that vmap cannot run
        if tracing():
            raise
        return torch.ones((), dtype=torch.bool)
    return inside if site["mask"] is None else inside | ~torch.as_tensor(site["mask"])
