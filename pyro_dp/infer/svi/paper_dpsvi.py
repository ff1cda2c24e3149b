"""DPVI as its paper has it: a bound and an optimizer of one's own, and the last iterate."""

from collections.abc import Callable
from typing import Any

from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.posterior.summary import CHECK, CLIPPING, NOTHING_TO_CHECK, Status
from pyro_dp.infer.svi.eager_step import PreparedGradient
from pyro_dp.infer.svi.row_adam import RowAdam
from pyro_dp.infer.svi.saved_run import SavedRun
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI
from pyro_dp.mechanism.clipped_fraction import SHARE, AdaptiveClip, ClippedFraction
from pyro_dp.mechanism.contributions import Block, with_bit
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.records.losses import Loss
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_flag

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

    :param optim: a ``pyro.optim`` optimizer.
    :param num_steps: number of steps of :meth:`run`; with ``noise_multiplier=None`` also the most
        steps there can be, and then required.
    :param max_grad_norm: C, or an :class:`AdaptiveClip`.
    :param local_optim: as for :class:`DPSVI`; ``None``: the settings of ``optim``, which must be a
        plain Adam.
    :param report_clipping: release how many records were clipped, :attr:`clipped_fraction`, with a
        bit that takes 1% of the privacy cost. An :class:`AdaptiveClip` has such a bit anyway.
    :param settings: ``accountant`` and all others of :class:`DPSVI`. Here ``sample_rate=None``
        takes subsample_size / size from the plate.
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
    _report_name = "report_clipping"
    _plans = False
    _usual_steps = None
    _report = staticmethod(with_bit)

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim,
        loss: Loss | None = None,
        *,
        num_steps: int | None = None,
        max_grad_norm: float | AdaptiveClip = 1.0,
        local_optim: RowAdam | None = None,
        report_clipping: bool = True,
        **settings: Any,
    ):
        if optim is None:
            raise ConfigurationError(
                "PaperDPSVI needs an optim, such as pyro.optim.Adam({'lr': 0.01}). DPSVI does not."
            )
        if max_grad_norm is None:
            raise ConfigurationError(
                "PaperDPSVI needs a max_grad_norm: a number, or an AdaptiveClip. DPSVI chooses it."
            )
        require_flag("report_clipping", report_clipping)
        adaptive = max_grad_norm if isinstance(max_grad_norm, AdaptiveClip) else None
        bound = max_grad_norm.initial if isinstance(max_grad_norm, AdaptiveClip) else max_grad_norm
        reports = report_clipping and bound != float("inf")
        self._adaptive = adaptive
        self._report_bit = Block(1, 0.5, adaptive.share if adaptive else SHARE)
        self._reports = reports or adaptive is not None
        super().__init__(
            model,
            guide,
            optim,
            loss,
            num_steps=num_steps,
            max_grad_norm=bound,
            local_optim=local_optim,
            **settings,
        )
        self.max_grad_norm = max_grad_norm  # type: ignore[assignment]
        self.report_clipping = report_clipping
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
        return [] if self._adaptive else PrivateInference._warnings(self)

    def _read_report(
        self, others: list[Tensor], block: Block, size: int, prepared: PreparedGradient
    ) -> None:
        if self._reports:
            bit = others.pop()
            self._add_bit(self._report_bit, bit, prepared)
            if self._adaptive is not None:
                within = bit.item() / prepared.records.plate.size + 0.5
                self._bound = self._adaptive.updated(self._bound, within)
