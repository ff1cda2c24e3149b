"""DPVI as its paper has it: a bound and an optimizer of one's own, and the last iterate."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.posterior.summary import CHECK, CLIPPING, NOTHING_TO_CHECK, Status
from pyro_dp.infer.svi.eager_step import PreparedGradient
from pyro_dp.infer.svi.row_adam import RowAdam
from pyro_dp.infer.svi.saved_run import SavedRun
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI, optimizers
from pyro_dp.mechanism.clipped_fraction import SHARE, AdaptiveClip, ClippedFraction
from pyro_dp.mechanism.contributions import Block, with_bit
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.settings import Clip, Execution, Noise, Sampling, old_names_explained
from pyro_dp.records.losses import Loss
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.utils.errors import ConfigurationError

_OF_PLAN = ("averages", "num_steps", "histogram")  # in a state


class PaperDPSVI(StochasticGradientVI):
    """Algorithm 1 of DPVI (Jälkö, Dikmen & Honkela 2017, arXiv 1610.08749).

    It is for comparisons with papers. The optimizer's steps are taken as they are. The guide holds
    the last iterate, and its intervals ignore the privacy noise. The result depends on the learning
    rate and on the bound, whose bias no number of steps removes. :class:`DPSVI` has neither
    weakness where it makes looks. :meth:`posterior` is the guide as it is.

    **Guarantee.** As :class:`DPSVI`. Instead of the histogram, the release has a block with bound
    1/2: each record's bit, whether it lies within the bound.

    **Not protected.** As :class:`DPSVI`.

    :param optim: a ``pyro.optim`` optimizer, or a tuple of it and a :class:`RowAdam`. Without the
        latter, rows have the settings of ``optim``, which must be a plain Adam then.
    :param accountant: as for :class:`DPSVI`, as are model, guide, loss, noise and execution.
    :param num_steps: number of steps of :meth:`run`; if the noise is calibrated also the most steps
        there can be, and then required.
    :param clip: C, an :class:`AdaptiveClip`, or a :class:`Clip` of either, whose bound is 1 if it
        has none. Unless it says ``report=False``, :attr:`clipped_fraction` is released.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`. A rate of
        ``None`` is subsample_size / size of the plate.
    :raises ConfigurationError: as :class:`DPSVI`; or there is no ``optim``.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_dp import PaperDPSVI, PrivacyAccountant
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> accountant, adam = PrivacyAccountant(epsilon=1.0), pyro.optim.Adam({"lr": 0.1})
    >>> svi = PaperDPSVI(model, AutoNormal(model), adam, accountant=accountant, num_steps=10)
    >>> svi.run(torch.linspace(-2.0, 2.0, 500), progress=False).steps
    10
    """

    _known_as = ""
    _report_name = "the bit of being clipped"
    _plans = False
    _usual_steps = None
    _report = staticmethod(with_bit)

    @old_names_explained()
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | tuple[PyroOptim, RowAdam],
        loss: Loss | None = None,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        clip: Clip | AdaptiveClip | float = 1.0,
        noise: Noise | float | None = None,
        sampling: Sampling | float | None = None,
        execution: Execution | None = None,
    ):
        if optimizers(optim)[0] is None:
            raise ConfigurationError(
                "PaperDPSVI needs an optim, such as pyro.optim.Adam({'lr': 0.01}). DPSVI does not."
            )
        clips = Clip.read(clip)
        clips = replace(clips, bound=1.0) if clips.bound is None else clips
        self._report_bit = Block(1, 0.5, clips.adaptive.share if clips.adaptive else SHARE)
        self._reports = clips.adaptive is not None or (clips.report and clips.bound != math.inf)
        super().__init__(
            model,
            guide,
            optim,
            loss,
            accountant=accountant,
            num_steps=num_steps,
            clip=clips,
            noise=noise,
            sampling=sampling,
            execution=execution,
        )
        self._loops = False  # there is no plan to explain

    @property
    def _measures(self) -> bool:
        return False

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        return self._fractions.mean()

    def _status_line(self) -> None:
        """The last iterate is the result, and no status judges it."""

    @property
    def _clipping_status(self) -> Status:
        clipped = self.clipped_fraction
        if clipped is None or not clipped.is_large:
            return NOTHING_TO_CHECK
        return Status(CHECK, f"clipped: {clipped}", CLIPPING)

    @property
    def _report_block(self) -> Block | None:
        return self._report_bit if self._reports else None

    def state_dict(self, *, include_private_local_state: bool = False) -> dict[str, Any]:
        """As :meth:`DPSVI.state_dict`, without a plan: ``num_steps`` is the new object's."""
        state = super().state_dict(include_private_local_state=include_private_local_state)
        return {name: value for name, value in state.items() if name not in _OF_PLAN}

    @property
    def _saved_plan(self) -> tuple[str, ...]:
        return ()

    def _require_plan(self, saved: SavedRun) -> None:
        if saved.num_steps is not None:
            raise ConfigurationError("load_state_dict: this state has a plan. DPSVI takes it.")

    def _rate(self, plate: PrivatePlate) -> float:
        return PrivateInference._rate(self, plate)

    def _row_adam(self, name: str) -> RowAdam:
        return self._local_optim or RowAdam.like(self.optim, name)

    def _refuse_steps_beyond_calibration(self) -> None:
        IterativeMechanism._refuse_steps_beyond_calibration(self)

    def _move(
        self, prepared: PreparedGradient, gradients: dict[str, Tensor | None], size: int
    ) -> None:
        self._optimizer.step(prepared.parameters, gradients, rarely=self._rarely)

    def _conclude(self, prepared: PreparedGradient) -> None:
        """The guide holds the last iterate."""

    def _warnings(self) -> list[Warning]:
        return [] if self.clip.adaptive else PrivateInference._warnings(self)

    def _read_report(
        self, others: list[Tensor], block: Block, size: int, prepared: PreparedGradient
    ) -> None:
        if self._reports:
            bit = others.pop()
            self._add_bit(self._report_bit, bit, prepared)
            if self.clip.adaptive is not None:
                within = bit.item() / prepared.records.plate.size + 0.5
                self._bound = self.clip.adaptive.updated(self._bound, within)
