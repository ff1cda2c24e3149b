"""What a callback of a run sees: numbers that were released, or are public."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.utils.errors import ConfigurationError

Callback = Callable[["ReleasedStep"], bool | None]
_NO_CALLBACKS = (
    "callbacks must be a list of functions of a ReleasedStep, for example "
    "callbacks=[lambda step: print(step)]."
)
_NO_ANSWER = (
    "callbacks: {name} returned {kind}. Return True to stop the run, and None or False to go on. "
    "The step is done and counted: run() goes on after it."
)


@dataclass(frozen=True, eq=False)
class ReleasedStep:
    """A step of ``run(..., callbacks=[...])``, after all that follows from its release.

    What else was released so far is in the inference itself: a callback may ask for its
    ``posterior()``, or save its ``state_dict()``.

    :param step: its number, from 1.
    :param num_steps: how many are planned.
    :param value: what the step returned: of :class:`DPSVI` the private loss in nats, NaN without
        ``loss_clip``.
    :param bound: C, to which a record's part is clipped in the next step; where a release has
        several blocks with bounds of their own, the largest.
    :param noise_multiplier: sigma.
    :param noise: standard deviation of the noise in a coordinate of the sum over the step's
        records, before it is divided by the sample rate; of several blocks, the first.

    >>> import torch
    >>> from pyro_dp import VIPS, PrivacyAccountant
    >>> from pyro_dp.vips import GaussianMixture
    >>> def half_way(step):
    ...     print(f"step {step.step} of {step.num_steps}")
    ...     return step.step == 2  # enough
    >>> model = GaussianMixture(components=1, dim=2, radius=1.0)
    >>> vips = VIPS(model, accountant=PrivacyAccountant(epsilon=1.0), num_steps=4)
    >>> result = vips.run(torch.zeros(1000, 2), progress=False, callbacks=[half_way])
    step 1 of 4
    step 2 of 4
    """

    step: int
    num_steps: int
    value: float
    bound: float
    noise_multiplier: float
    noise: float
    _accountant: PrivacyAccountant = field(repr=False)
    _clipped: Callable[[], ClippedFraction | None] = field(repr=False)

    @property
    def epsilon(self) -> float:
        """Of the accountant's whole ledger when it is asked for, with all steps that are planned.

        It takes up to a second.
        """
        return self._accountant.get_epsilon()

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """Of the inference, when it is asked for; None where it is not known."""
        return self._clipped()


def require_callbacks(callbacks: Any) -> None:
    """:raises ConfigurationError: these are no callbacks."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise ConfigurationError(_NO_CALLBACKS)
    if not all(map(callable, callbacks)):
        raise ConfigurationError(_NO_CALLBACKS)


def wants_to_stop(callback: Callback, step: ReleasedStep) -> bool:
    """:raises ConfigurationError: its answer is neither yes nor no."""
    answer = callback(step)
    if not isinstance(answer, bool | np.bool_ | None):
        name, kind = getattr(callback, "__name__", repr(callback)), type(answer).__name__
        raise ConfigurationError(_NO_ANSWER.format(name=name, kind=kind))
    return bool(answer)
