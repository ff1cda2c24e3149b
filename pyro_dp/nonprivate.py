"""Numbers of an inference's data without noise, for somebody who insists.

Whoever asks leaves a line in the ledger first, and epsilon is infinite from then on. What else is
exported and gives such numbers says so in one of these ways:

* :class:`pyro_dp.baselines.EP`, a posterior without noise, leaves the same line.
* ``noise_multiplier=0`` is an event of the ledger whose epsilon is infinite.
* ``perplexity``, ``topic_weights`` and ``pixel_accuracy`` of models, :func:`clipped_kl`,
  :func:`sep_kl_bound`, :func:`audit` and :func:`audit_one_run` know no ledger. They are for other
  data, which need no protection, and give a :class:`NotPrivateWarning` at the call.
* What holds rows of the records is the curator's: parameters per record, which are never released
  (:mod:`pyro_dp.records.local_parameters`), and data that :class:`DPStandardScaler` has
  transformed.

tests/package/test_one_door.py states who may touch the exact sums, the ledger and the noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dp.accounting.looks import mark_look
from pyro_dp.infer.ep.dpsep import DPSEP
from pyro_dp.infer.svi.dpsvi import DPSVI
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.contributions import Contributions, Measured, Rows
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.streams import LocalStream
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.rng import forked_rng, private_rng
from pyro_dp.vips import VIPS
from pyro_dp.vips.conjugate_model import Draws

_AT_A_TIME = 4096  # records


class NonPrivate:
    """What :func:`nonprivate` returns."""

    def __init__(self, inference: IterativeMechanism):
        if not isinstance(inference, IterativeMechanism):
            raise ConfigurationError("nonprivate() takes an inference: a DPSVI, DPSEP or VIPS.")
        self._inference = inference

    def loss(self, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO of all records at the present parameters, in nats, without noise.

        With the draw of the global latents that the next step would make.

        :param args: the data, as for ``step``; so are kwargs.
        :raises ConfigurationError: the inference is no :class:`DPSVI`; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        if not isinstance(self._inference, DPSVI):
            raise self._refused("loss", "a DPSVI")
        with self._looking("loss", args, kwargs) as stream:
            _, records, outside = self._gradients(stream)
        return records + outside

    def gradient_norms(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Norms of what each record would add to the next release, before it is clipped.

        Of a :class:`DPSVI` these are norms of gradients, with the draws of latents that the next
        step would make; of a :class:`DPSEP` norms of sites; of a :class:`VIPS` norms of statistics.

        :param args: the data, as for ``step``; so are kwargs.
        :returns: (N,), in float64; of a :class:`VIPS` one for each statistic, by name.
        :raises ConfigurationError: the inference is none of these; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        norms = {DPSVI: self._of_gradients, DPSEP: self._of_sites, VIPS: self._of_statistics}
        of_kind = norms.get(type(self._inference))
        if of_kind is None:
            raise self._refused("gradient_norms", "a DPSVI, DPSEP or VIPS")
        with self._looking("per-record norms before clipping", args, kwargs) as stream:
            return of_kind(stream)

    def _refused(self, what: str, kinds: str) -> ConfigurationError:
        name = type(self._inference).__name__
        return ConfigurationError(f"nonprivate(...).{what} reads from {kinds}, not from a {name}.")

    @contextmanager
    def _looking(self, what: str, args: tuple, kwargs: dict) -> Iterator[np.random.Generator]:
        """The ledger first. Public generators are left as they were."""
        inference = self._inference
        name = f"{what} of {type(inference).__name__} after {inference._steps} steps"
        with forked_rng():
            if isinstance(inference, VIPS):
                inference._look_at(args, **kwargs)
            else:
                inference._look_at(args, kwargs)
            with inference.accountant.next_position() as position:
                mark_look(inference.accountant, name, stacklevel=4)
            yield inference._randomness.stream("local", position)

    def _batches(self) -> Iterator[Tensor]:
        records = self._inference._records
        indices = torch.arange(records.plate.size, device=records.device)
        yield from indices.split(self._inference.microbatch_size or _AT_A_TIME)

    def _of_gradients(self, stream: np.random.Generator) -> Tensor:
        norms, _, _ = self._gradients(stream)
        return norms

    @torch.enable_grad()
    def _gradients(self, stream: np.random.Generator) -> tuple[Tensor, float, float]:
        """Norms of a DPSVI's records, the sum of their losses, and the loss outside the plate."""
        step = self._inference._step
        eager = replace(getattr(step, "eager", step), releases_loss=True, has_bit=False)
        particles = eager.draw()
        local = [LocalStream(stream) for _ in particles]
        kept = _Kept([Block(eager.size(particles), 1.0)])
        with private_rng(stream):
            for chosen in self._batches():
                eager.add_microbatch(kept, particles, chosen, local)
        outside = torch.stack([particle.loss.detach() for particle in particles]).mean()
        return torch.cat(kept.norms), sum(kept.losses), outside.item()

    @torch.no_grad()
    def _of_sites(self, stream: np.random.Generator) -> Tensor:
        sep = self._inference
        cavity = sep._posterior / sep._factor ** (1 / sep._records.plate.size)
        with private_rng(stream):
            found = [sep._sites.norms(cavity, chosen) for chosen in self._batches()]
        return torch.cat(found)

    @torch.no_grad()
    def _of_statistics(self, stream: np.random.Generator) -> dict[str, Tensor]:
        vips, local = self._inference, LocalStream(stream)
        model, norms = vips._e_step, {name: [] for name in vips.model.statistics}
        for chosen in self._batches():
            rows = vips._records.rows(chosen)
            with guarded("The E-step"):
                parts = dict(model.static_statistics(*rows))
                draws = Draws(local, chosen)
                parts |= model.expected_statistics(vips._posterior, draws, *rows)
            for name, found in norms.items():
                found.append(_norms(parts[name]))
        return {name: torch.cat(found) for name, found in norms.items()}


def nonprivate(inference: IterativeMechanism) -> NonPrivate:
    """Numbers of the data without noise: ``nonprivate(svi).loss(x, y)``.

    **No guarantee.** Each read enters a :class:`NonPrivateLook` into the accountant's ledger before
    it happens: ``get_epsilon()`` is infinite for good, with a budget every further release is
    refused, and ``accountant.report()`` says what was read and when. Nothing undoes that, as
    nobody can forget what was seen. The run itself goes on as it would have without the look, but
    for the noise of seeded runs, which depends on the position in the ledger.

    For a loss that is covered, see ``loss_clip`` of :class:`DPSVI`; on data that need no protection
    use ``pyro.infer.Trace_ELBO``.

    :param inference: a :class:`DPSVI`, :class:`DPSEP` or :class:`VIPS`.
    :raises ConfigurationError: it is no inference.
    """
    return NonPrivate(inference)


class _Kept:
    """In place of a clipped sum: the norms of records, and the sum of their losses."""

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.norms: list[Tensor] = []
        self.losses: list[float] = []

    def add(self, gradients: Measured, losses: Contributions) -> None:
        norms = _norms(gradients)
        self.norms.append(norms)
        self.losses.append(losses.weighted_sum(torch.ones_like(norms).unsqueeze(1)).item())


def _norms(part: Tensor | Measured) -> Tensor:
    """(B,)"""
    rows = Rows(part.flatten(1)) if isinstance(part, Tensor) else part
    return rows.norms().squeeze(1)
