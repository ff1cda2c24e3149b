"""One record's likelihood, as a function of the latents, for a batch of records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.graphs.tracing import tracing
from pyro_dp.records.global_draw import Particle, unflat
from pyro_dp.records.losses import record_loss
from pyro_dp.records.quadrature import integrated, num_nodes
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.vectorised import all_at_once

_derived = partial(guarded, "Differentiating a record's likelihood")


@dataclass(frozen=True)
class Likelihood:
    """One record's likelihood as a function of the latents, flat and unconstrained.

    :param particle: values of everything else outside the plate, and the latents' shapes.
    """

    term: RecordTerm
    particle: Particle
    _likes: dict[str, Any] = field(default_factory=dict)  # results on placeholders

    def log_prob(self, z: Tensor, index: Tensor, row: list[Tensor]) -> Tensor:
        """The log likelihood, with latents of the record summed or integrated out."""

        def at(z: Tensor) -> Tensor:
            latents = unflat(z, self.particle.latents)
            with self.term.shown(self.particle, latents, index, row) as shown:
                return -record_loss(self.term.loss, *shown)

        return integrated(at, z) if self.continuous else at(z)

    def observations(self, z: Tensor, index: Tensor, row: list[Tensor]) -> dict[str, dict]:
        """Observed sites of one record, by their names on a placeholder, where it runs first."""
        latents = unflat(z, self.particle.latents)
        found = self.term.observations(self.particle, latents, index, row)
        # In a loop over the plate, each record's site has another name.
        names = self._likes.setdefault("names", [site["name"] for site in found])
        return dict(zip(names, found, strict=True))

    @property
    def placeholder(self) -> tuple[Tensor, list[Tensor]]:
        """Index and row of a public record."""
        records = self.term.records
        return torch.zeros((), dtype=torch.long, device=records.device), records.placeholder()

    @property
    def sums(self) -> bool:
        """Whether latents of a record are summed or integrated out."""
        return self.term.enumerates or bool(self.continuous)

    @property
    def num_nodes(self) -> int:
        """Number of quadrature nodes of the integral."""
        return num_nodes(self.term.records.plate)

    @property
    def continuous(self) -> Mapping[str, int]:
        """Continuous latents of a record, and the size of each."""
        return self.term.records.plate.continuous

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return torch.cat([u.flatten() for u in self.particle.latents.values()]).dtype

    def for_each(
        self, key: str, function: Callable, z: Tensor, indices: Tensor, rows: list[Tensor]
    ) -> Any:
        """function(z, index, row) of each record, stacked: at once, or else one by one.

        If the function fails on a record, that record runs alone, and its numbers may be NaN. Other
        records and errors do not reveal this. The first call for a key must be on placeholders,
        which fix the shapes.

        :param key: names the function.
        :param z: (d,), or (B, d) with a z for each record.
        """
        one_each, kept = z.dim() == 2, self.term.state.preserved  # derivatives may change state
        if self.term.vectorizes:
            in_dims = 0 if one_each else None, 0, 0
            batched = torch.vmap(function, in_dims=in_dims, randomness="different")
            try:
                with kept(batched=True), _derived(), all_at_once():
                    return self._remembered(key, batched(z, indices, rows))
            except Exception:
                if tracing() or (self.continuous and key not in self._likes):
                    raise
                if len(indices) > 1:  # the loop's derivatives may differ, so others avoid it
                    chunks = zip(*(x.chunk(2) for x in (indices, *rows)), strict=True)
                    points = z.chunk(2) if one_each else (z, z)
                    own = zip(points, chunks, strict=True)
                    found = [self.for_each(key, function, at, i, r) for at, (i, *r) in own]
                    return pytree.tree_map(lambda *x: torch.cat(x), *found)
        results = []
        for b, index in enumerate(indices):
            like = self._likes.get(key)
            try:
                with kept(), _derived(public=like is None):
                    result = function(z[b] if one_each else z, index, [row[b] for row in rows])
            except Exception:
                if like is None:
                    raise
                result = ()  # unlike any other
            if like is not None and not _alike(result, like):
                result = pytree.tree_map(
                    lambda x: torch.full_like(x, torch.nan if x.is_floating_point() else 0), like
                )
            results.append(result)
        return self._remembered(key, pytree.tree_map(lambda *each: torch.stack(each), *results))

    def _remembered(self, key: str, stacked: Any) -> Any:
        if key not in self._likes:
            self._likes[key] = pytree.tree_map(lambda x: x[0], stacked)
        return stacked


def _alike(one: Any, other: Any) -> bool:
    (ours, our_tree), (theirs, their_tree) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return our_tree == their_tree and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)
    )
