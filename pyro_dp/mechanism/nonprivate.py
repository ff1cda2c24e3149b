"""Exact numbers of an inference's data, for users who give up the guarantee.

Each request first enters a :class:`NonPrivateLook` into the ledger, so epsilon is infinite from
then on. Other public code also returns exact numbers, and is marked as such:

* ``noise=0`` is an event in the ledger whose epsilon is infinite.
* ``perplexity``, ``topic_weights`` and ``pixel_accuracy`` of models, :func:`audit` and
  :func:`audit_one_run` have no ledger. They are for data that need no protection, and raise a
  :class:`NotPrivateWarning`.
* Some objects hold rows of the records, so they must stay with the curator. These are parameters
  per record, which are never released (:mod:`pyro_dp.records.local_parameters`), and data that
  :class:`DPStandardScaler` has transformed.

tests/package/test_one_door.py lists all code that may use exact sums, the ledger and the noise.
"""

import abc
import warnings
from typing import Any

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.contributions import Measured, Rows
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.sampling import AllRecords
from pyro_dp.utils.errors import ConfigurationError, NotPrivateWarning
from pyro_dp.utils.torch_state import forked_rng

_MICROBATCH = 4096  # records


class Readable(abc.ABC):
    """An inference for users that consists of several inferences."""

    @abc.abstractmethod
    def _read_from(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> IterativeMechanism:
        """The inference whose numbers ``nonprivate(...).name(*args, **kwargs)`` returns."""


class NonPrivate:
    """The result of :func:`nonprivate`."""

    def __init__(self, inference: Any):
        self._inference = inference
        if not isinstance(inference, IterativeMechanism | Readable):
            raise ConfigurationError("nonprivate() takes an inference: a DPSVI, DPSEP or VIPS.")
        if not self._inference._releases.peers.alone:
            raise ConfigurationError(
                "nonprivate() reads from one process: use an inference without peers."
            )

    def loss(self, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO of all records at the present parameters, in nats, without noise.

        It uses the draw of the global latents that the next step would make.

        :param args: the data, as for ``step``; likewise kwargs.
        :raises ConfigurationError: the inference is not a :class:`DPSVI`; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        loss: float = self._read("loss", "a DPSVI", "loss", args, kwargs)
        return loss

    def gradient_norms(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Norms of each record's contribution to the next release, before clipping.

        These are norms of gradients for :class:`DPSVI`, with the latents that the next step would
        draw. For :class:`DPSEP` they are norms of sites, and for :class:`VIPS` of statistics.

        :param args: the data, as for ``step``; likewise kwargs.
        :returns: (N,) in float64; for :class:`VIPS` one tensor for each statistic, by name.
        :raises ConfigurationError: the inference is none of these; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        kinds, what = "a DPSVI, DPSEP or VIPS", "per-record norms before clipping"
        norms: Tensor | dict[str, Tensor] = self._read("gradient_norms", kinds, what, args, kwargs)
        return norms

    def _read(
        self, name: str, kinds: str, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the look, then read. The public generators stay as they were."""
        inference = self._inference
        if isinstance(inference, Readable):
            inference = inference._read_from(name, args, kwargs)
        kind, read = inference._reservation.inference, inference._exact.get(name)
        if read is None:
            raise ConfigurationError(
                f"nonprivate(...).{name} reads from {kinds}, not from a {kind}."
            )
        with forked_rng():
            prepared = inference._look_at(args, kwargs)
            looked_at = f"{what} of {kind} after {self._inference._steps} steps"
            with inference.accountant.next_position() as position:
                mark_look(inference.accountant, looked_at, stacklevel=3)
            stream = inference._releases.randomness.stream("local", position)
            everyone = AllRecords(prepared.records.plate.size, prepared.records.device)
            batches = everyone.split(inference.execution.microbatch_size or _MICROBATCH)
            return read(inference, prepared, batches, stream)


def nonprivate(inference: IterativeMechanism | Readable) -> NonPrivate:
    """Read exact numbers of the data, as in ``nonprivate(svi).loss(x, y)``.

    **No guarantee.** Each read enters a :class:`NonPrivateLook` into the accountant's ledger before
    it happens. ``get_epsilon()`` is infinite for good, and a budget refuses every further release.
    ``accountant.report()`` lists these reads and their times. The read does not change the run,
    except for the noise of a seeded run, which depends on the position in the ledger.

    For a private loss, see ``loss`` of :class:`Clip`. For data that need no protection, use
    ``pyro.infer.Trace_ELBO``.

    :param inference: a :class:`DPSVI`, :class:`DPSEP` or :class:`VIPS`.
    :raises ConfigurationError: it is not an inference.

    >>> sep = DPSEP(model, guide, accountant=accountant)
    >>> norms = nonprivate(sep).gradient_norms(heights)
    >>> accountant.get_epsilon()
    inf
    """
    return NonPrivate(inference)


def row_norms(part: Tensor | Measured) -> Tensor:
    """Euclidean norms of a batch's rows, (B,)."""
    rows = Rows(part.flatten(1)) if isinstance(part, Tensor) else part
    return rows.norms().squeeze(1)


def mark_look(accountant: PrivacyAccountant, what: str, *, stacklevel: int) -> None:
    """Record a look without noise, and warn: epsilon is infinite from here on.

    :param what: the numbers that will be read, in a line of public text.
    :param stacklevel: the value that the caller would pass to ``warnings.warn``.
    """
    accountant.record_nonprivate(what)
    warnings.warn(
        "The privacy guarantee ends: epsilon is infinite from now on. Read without noise, as "
        f"the ledger says: {what}.",
        NotPrivateWarning,
        stacklevel=stacklevel + 1,
    )
