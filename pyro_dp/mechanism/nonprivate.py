"""Numbers of an inference's data without noise, for somebody who insists.

Each request first adds a line to the ledger, and epsilon is infinite from then on. Other exported
code with such numbers is marked by one of these:

* ``noise=0`` is an event of the ledger whose epsilon is infinite.
* ``perplexity``, ``topic_weights`` and ``pixel_accuracy`` of models, :func:`audit` and
  :func:`audit_one_run` know no ledger. They are for other data, which need no protection, and give
  a :class:`NotPrivateWarning` at the call.
* Objects with rows of the records belong to the curator: parameters per record, which are never
  released (:mod:`pyro_dp.records.local_parameters`), and data that :class:`DPStandardScaler` has
  transformed.

tests/package/test_one_door.py states who may touch the exact sums, the ledger and the noise.
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

_AT_A_TIME = 4096  # records
_PEERS = "nonprivate() reads from one process: use an inference without peers there."


class Readable(abc.ABC):
    """Several inferences with one name to users."""

    @abc.abstractmethod
    def _read_from(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> IterativeMechanism:
        """The one whose numbers of this name are read."""


class NonPrivate:
    """The result of :func:`nonprivate`."""

    def __init__(self, inference: Any):
        self._inference = inference
        if not isinstance(inference, IterativeMechanism | Readable):
            raise ConfigurationError("nonprivate() takes an inference: a DPSVI, DPSEP or VIPS.")
        if not self._inference._releases.peers.alone:
            raise ConfigurationError(_PEERS)

    def loss(self, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO of all records at the present parameters, in nats, without noise.

        With the draw of the global latents that the next step would make.

        :param args: the data, as for ``step``; so are kwargs.
        :raises ConfigurationError: the inference is no :class:`DPSVI`; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        loss: float = self._read("loss", "a DPSVI", "loss", args, kwargs)
        return loss

    def gradient_norms(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Norms of each record's part of the next release, before clipping.

        They are norms of gradients for :class:`DPSVI`, with the latents that the next step would
        draw, of sites for :class:`DPSEP`, and of statistics for :class:`VIPS`.

        :param args: the data, as for ``step``; so are kwargs.
        :returns: (N,), in float64; of a :class:`VIPS` one for each statistic, by name.
        :raises ConfigurationError: the inference is none of these; nothing was read.
        :raises ModelError: the data do not fit; nothing was read.
        """
        kinds, what = "a DPSVI, DPSEP or VIPS", "per-record norms before clipping"
        norms: Tensor | dict[str, Tensor] = self._read("gradient_norms", kinds, what, args, kwargs)
        return norms

    def _read(
        self, name: str, kinds: str, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The ledger first. This leaves the public generators as they were."""
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
            batches = everyone.split(inference.execution.microbatch_size or _AT_A_TIME)
            return read(inference, prepared, batches, stream)


def nonprivate(inference: IterativeMechanism | Readable) -> NonPrivate:
    """Numbers of the data without noise: ``nonprivate(svi).loss(x, y)``.

    **No guarantee.** Each read enters a :class:`NonPrivateLook` into the accountant's ledger before
    it happens. ``get_epsilon()`` is infinite for good, and a budget refuses every further release.
    ``accountant.report()`` lists these reads and their times. The run itself goes on as without the
    look. Only the noise of seeded runs changes, as it depends on the position in the ledger.

    For a private loss, see ``loss`` of :class:`Clip`. On data that need no protection use
    ``pyro.infer.Trace_ELBO``.

    :param inference: a :class:`DPSVI`, :class:`DPSEP` or :class:`VIPS`.
    :raises ConfigurationError: it is no inference.

    >>> sep = DPSEP(model, guide, accountant=accountant)
    >>> norms = nonprivate(sep).gradient_norms(heights)
    >>> accountant.get_epsilon()
    inf
    """
    return NonPrivate(inference)


def row_norms(part: Tensor | Measured) -> Tensor:
    """(B,)"""
    rows = Rows(part.flatten(1)) if isinstance(part, Tensor) else part
    return rows.norms().squeeze(1)


def mark_look(accountant: PrivacyAccountant, what: str, *, stacklevel: int) -> None:
    """End the guarantee of the data of this ledger: epsilon is infinite from here on.

    :param what: will be looked at: a line of text, which is public.
    :param stacklevel: as for a warning of the caller's own.
    """
    accountant.record_nonprivate(what)
    warnings.warn(
        "The privacy guarantee ends: epsilon is infinite from now on. Read without noise, as "
        f"the ledger says: {what}.",
        NotPrivateWarning,
        stacklevel=stacklevel + 1,
    )
