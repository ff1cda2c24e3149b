"""Stochastic variational inference with a private gradient.

Algorithm 1 of Jälkö, Dikmen & Honkela 2017 (DPVI, arXiv 1610.08749), for any Pyro model with a
plate of individuals.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.summary import (
    CHECK,
    CLIPPING,
    NOTHING_TO_CHECK,
    REMEDIES,
    STEPS,
    Status,
)
from pyro_dp.infer.svi.averaged_guide import IterateAverages, guide_posterior
from pyro_dp.infer.svi.eager_step import (
    EagerStep,
    PreparedGradient,
    exact_loss,
    exact_norms,
)
from pyro_dp.infer.svi.histogram_bound import Clipping, HistogramBound
from pyro_dp.infer.svi.public_optimizer import STARTED, PublicOptimizer, require_finite
from pyro_dp.infer.svi.records_traced_step import step_from_graphs
from pyro_dp.infer.svi.row_adam import RowAdam, RowOptimizer
from pyro_dp.infer.svi.saved_run import (
    NAMES,
    SavedParameters,
    SavedRun,
    without_history,
)
from pyro_dp.infer.svi.step_plan import BETAS, USUAL_STEPS, StepPlan, usual_rate
from pyro_dp.mechanism import norm_histogram
from pyro_dp.mechanism.clipped_fraction import AdaptiveClip, ClippedFraction
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.norm_histogram import SIZE, with_bins
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Clip, Noise
from pyro_dp.records.local_parameters import FIXED, NOTE
from pyro_dp.records.losses import Loss, as_elbo
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import (
    ClippingWarning,
    ConfigurationError,
    ConvergenceWarning,
    ModelError,
    PrivacyError,
    PrivacyWarning,
    warn_user,
)
from pyro_dp.utils.validation import same

_DONE = (
    "All num_steps={steps} steps of the plan are done, and the guide holds the result. For a "
    "longer run pass, say, num_steps=5000 to a new DPSVI. To end a loop early call svi.finish()."
)
_OF_PAPER = (
    "load_state_dict: this state has no plan. PaperDPSVI takes the states that DPSVI with an optim "
    "saved in version 0.1."
)
NAN = (
    "step() returns nan: the loss on the data is not private. Pass clip=Clip(loss=...) to "
    "DPSVI to release a private one with each step."
)
_LEAVE_OUT = "Leave clip out, and DPSVI chooses the bound."
_WITHOUT_NOISE = Status(
    CHECK, "gradient steps found the intervals, which do not include the privacy noise", STEPS
)
_IN_ITS_PLACE = (
    "The guide holds {what}. Looks at all records give intervals that include the noise: leave out "
    "settings of gradient steps, or use DPSEP."
)
_PER_RECORD = (
    "peers: model or guide have latents or parameters of each record, or draw for each, as "
    "dropout does. Such records must stay in one process: leave peers=None, or sum latents out "
    '(infer={"enumerate": "parallel"}).'
)


def optimizers(optim: Any) -> tuple[PyroOptim | None, RowAdam | None]:
    """The optimizer of the parameters, and that of rows of parameters per record."""
    found = optim if isinstance(optim, tuple) else () if optim is None else (optim,)
    own = [each for each in found if isinstance(each, PyroOptim)]
    rows = [each for each in found if isinstance(each, RowAdam)]
    if len(own) > 1 or len(rows) > 1 or len(own) + len(rows) < len(found):
        raise ConfigurationError(
            "optim must be a pyro.optim optimizer, for example pyro.optim.Adam({'lr': 0.01}), a "
            "RowAdam for rows of parameters per record, or a tuple of both."
        )
    return next(iter(own), None), next(iter(rows), None)


class StochasticGradientVI(PrivateInference[PreparedGradient], Forecasted):
    """Noisy gradients of the ELBO: :class:`~pyro_dp.DPSVI` where a model has no evidence.

    Arguments, guarantee and limits are those of DPSVI.

    Gradient, loss and the histogram of the norms are blocks of one release. A record moves each by
    its bound at most: C, L or 1 (its norm lies in one bin). Their noise has standard deviation
    sigma bound / sqrt(share), and the shares sum to 1. So the blocks together move by 1 / sigma at
    most in units of their noise: one Gaussian event of noise multiplier sigma. The next C, the step
    sizes and posteriors are made from releases, which is post-processing.
    """

    _known_as = "DPSVI"

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | RowAdam | tuple[PyroOptim, RowAdam] | None = None,
        loss: Loss | None = None,
        *,
        clip: Clip | AdaptiveClip | float | None = None,
        noise: Noise | float | None = None,
        **settings: Any,
    ):
        optim, self._local_optim = optimizers(optim)
        if loss is not None:
            as_elbo(loss)
        self.loss = loss
        self.clip, noise = Clip.read(clip), Noise.read(noise)
        bound = self.clip.first_bound
        if bound is None:  # that of the histogram, if there is noise
            bound = math.inf if noise.multiplier == 0 else 1.0
        super().__init__(model, guide, bound=bound, noise=noise, plans=self._plans, **settings)
        of_loss = self.clip.loss_share if self.clip.loss else 0.0
        of_report = self._report_block.share if self._report_block else 0.0
        self._gradient_share = 1.0 - of_loss - of_report
        if self._gradient_share <= 0:
            raise ConfigurationError(
                f"Clip.loss_share={of_loss:g} and {of_report:g} for {self._report_name} "
                "must sum to less than 1: the gradient needs a part of the privacy cost."
            )
        self._histogram: HistogramBound | None = None  # before the first
        self._averages: IterateAverages | None = None  # from the first look on
        self._concluded: str | None = None  # what the guide holds
        self._plans_adam = optim is None
        self._optimizer = PublicOptimizer(optim or pyro.optim.Adam({"fused": True}))
        self._loaded = SavedParameters()
        self._rows = RowOptimizer(self._row_adam)
        self._loops = True  # over step(), as long as run() is not called

    _measure = "private loss (nats)"
    _report_name = "the histogram of the norms"
    _report = staticmethod(with_bins)  # makes the block of the norms
    _plans = True  # the noise is for a planned number of steps
    _usual_steps: int | None = USUAL_STEPS

    @property
    def _measures(self) -> bool:
        """Whether a histogram of the norms joins the releases."""
        return not same(self._noise_multiplier, 0)

    @whole_step
    @torch.enable_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one private gradient step of the plan from the full data.

        If C is chosen, the first one releases the norms alone, and moves nothing.

        :returns: the private loss in nats if ``Clip.loss`` is set, else nan; nan for the norms.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: the plan is done; or the optimizer fails, or makes a parameter
            NaN or infinite.
        """
        prepared = self._prepare(args, kwargs)
        if self._loops and self._steps == 0 and self.clip.loss is None:
            warn_user(PrivacyWarning(NAN))
        opens = self._opens
        step = prepared.step.eager.of_norms_alone() if opens else prepared.step
        position = self.accountant.position
        draws = step.draw()
        size = step.size(draws)
        blocks = [Block(SIZE, 1.0)] if opens else self._blocks(size)
        clipped = self._sum_type(blocks, prepared.records.device)
        stream = partial(self._randomness.stream, "local", position)
        batch = self._draw_records(prepared, position)
        moves = step.add(clipped, draws, batch, stream)
        gradient, *others = self._release(clipped, prepared.sampler)
        if opens:
            self._read_bins(gradient, blocks[0], size, prepared.sampler)
            return math.nan
        gradients = step.gradients(draws, gradient)
        self._move(prepared, gradients.parameters, size)
        if self._averages is not None:
            self._averages.add(self._steps, prepared.parameters)
        for indices, own in moves:  # behind the privacy wall
            self._rows.step(indices, own)
        self._read_report(others, blocks[-1], size, prepared)
        if self._steps == self.num_steps:
            self.finish() if self._loops else self._conclude(prepared)
        return math.nan if self.clip.loss is None else others[0].item() + gradients.outside.item()

    def _planned(self, args: tuple, kwargs: dict) -> int:
        if self._optimizer.needs_metric and self.clip.loss is None:
            raise ConfigurationError(
                "optim: ReduceLROnPlateau goes by a loss, and that of the data is private. Set "
                "Clip.loss, use another scheduler, or call step() and optim.step(...) yourself."
            )
        self._loops = False
        if self.num_steps is None:
            self._prepare(args, kwargs)  # which chooses it
        return super()._planned(args, kwargs)

    def _step_of_run(self, args: tuple, kwargs: dict) -> float:
        moves = not self._opens
        loss = super()._step_of_run(args, kwargs)
        if moves:
            self._optimizer.step_scheduler(loss)
        return loss

    @property
    def _opens(self) -> bool:
        """Whether the next release is that of the norms alone, which gives the first C."""
        return self._measures and self.clip.bound is None and self._histogram is None

    def finish(self) -> None:
        """End a loop over :meth:`step` early: write the result into the guide.

        The last step of the plan does so by itself. Nothing of the plan's cost is returned.

        :raises ConfigurationError: no step was taken yet.
        """
        if self._prepared is None or not self._steps:
            raise ConfigurationError("finish() ends a loop over step(), and no step was taken yet.")
        self._conclude(self._prepared)
        self._note_result()
        for warning in self._warnings():
            warn_user(warning)

    def _stop_early(self, num_steps: int) -> None:
        super()._stop_early(num_steps)
        if self._prepared is not None:
            self._conclude(self._prepared)

    def _conclude(self, prepared: PreparedGradient) -> None:
        """Write the run's result into the guide."""
        averages = self._averages or IterateAverages(1)
        self._concluded = _IN_ITS_PLACE.format(what=averages.conclude(prepared.parameters))

    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The guide as it is. No interval of gradient steps includes the noise."""
        records = None if self._prepared is None else self._prepared.records
        return guide_posterior(self.model, self.guide, records, self._status)

    @property
    def _clipping(self) -> Clipping | None:
        """The effect of the bound on the gradients, once there is a histogram."""
        return None if self._histogram is None else Clipping(self._histogram, self._bound)

    @property
    def _status(self) -> Status:
        """Whether the posterior can be published."""
        if same(self._noise_multiplier, 0):
            return NOTHING_TO_CHECK
        found, clipped = _WITHOUT_NOISE, self._clipping_status
        if clipped.is_ok:
            return found
        first, other = (found, clipped) if self.clip.bound is None else (clipped, found)
        return Status(CHECK, f"{first.reason}; {other.reason}", first.cause)

    def _status_line(self) -> str | None:
        return str(self._status)

    @property
    def _clipping_status(self) -> Status:
        """As :attr:`_status`, for what is cut off."""
        return NOTHING_TO_CHECK if self._clipping is None else self._clipping.status()

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of all N records whose part was clipped, with its standard error.

        It is read off the mean histogram of all steps so far, for the present bound. None before
        the first step, and without noise.
        """
        return None if self._clipping is None else self._clipping.fraction()

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """:raises PrivacyError: always: the loss on the data is not private."""
        raise PrivacyError(
            "evaluate_loss would release a number of the data without noise. Set Clip.loss for "
            "a private loss, or evaluate pyro.infer.Trace_ELBO on data that need no protection. "
            "Calling pyro_dp.nonprivate(svi).loss(...) gives it, at the price of the whole "
            "guarantee."
        )

    def state_dict(self, *, include_private_local_state: bool = False) -> dict[str, Any]:
        """As :meth:`~pyro_dp.DPSVI.state_dict`."""
        known = self._prepared
        parameters = (known.parameters if known else {}) | self._loaded.waiting
        local = known.term.local.leaves if known else {}
        state = self._state() | {
            "parameters": {name: leaf.detach().clone() for name, leaf in parameters.items()},
            "optimizer": {n: s for n, s in self.optim.get_state().items() if n not in local},
            "bound": self._bound,
            "averages": None if self._averages is None else self._averages.state(),
            "num_steps": self.num_steps,
            "histogram": None if self._histogram is None else self._histogram.state(),
        }
        if include_private_local_state:
            state["private_local_state"] = self._rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`~pyro_dp.DPSVI.load_state_dict`.

        Parameters that do not exist yet are set in the first step.
        """
        if self._saved_plan and isinstance(state, dict) and "num_steps" not in state:
            raise ConfigurationError(_OF_PAPER)
        if isinstance(state, dict):
            state = without_history(state)
        self._require_state(state, (*NAMES, *self._saved_plan))
        saved = SavedRun.read(state)
        self._require_plan(saved)
        self._load_state(state)
        self._rows.load_state_dict(saved.local)
        self._loaded = saved.parameters
        self._loaded.take_up()
        self._optimizer.load(saved.optimizer)
        self._bound = saved.bound
        self._averages = saved.averages
        self.num_steps = self.num_steps if saved.num_steps is None else saved.num_steps
        self._histogram = saved.histogram

    @property
    def _saved_plan(self) -> tuple[str, ...]:
        """Names of the parts that a state must have for a run to go on as planned."""
        return ("averages", "num_steps") + ("histogram",) * self._measures

    def _require_plan(self, saved: SavedRun) -> None:
        if self.num_steps is not None and not same(self.num_steps, saved.num_steps):
            raise ConfigurationError("num_steps differs from that of the saved run.")

    @property
    def optim(self) -> PyroOptim:
        """The optimizer. You may set another one between two steps."""
        return self._optimizer.optim

    @optim.setter
    def optim(self, optim: PyroOptim) -> None:
        if self._plans_adam:
            raise ConfigurationError("optim: this DPSVI chooses its own. Pass one when it is made.")
        self._optimizer.optim = optim

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedGradient:
        started, before = self._values_before()
        before = before | self._loaded.waiting.keys()
        if self.loss is None:
            self.loss = TraceEnum_ELBO() if records.plate.enumerates else Trace_ELBO()
        users = (as_elbo(self.loss), self.model, self.guide)
        term, parameters = build_record_term(
            *users, records, privatize=self.clip.of, microbatch_size=self.execution.microbatch_size
        )
        if not (parameters or term.local):
            raise ModelError(
                "Neither model nor guide has a parameter: there is nothing to learn. Use an "
                "autoguide, such as AutoNormal(model), or pyro.param in the guide."
            )
        if term.local and self.sampling.kind == "fixed":
            raise ConfigurationError(FIXED.format(names=term.local.listed))
        if not self._ranks.alone and (term.local or term.draws or term.samples):
            raise ConfigurationError(_PER_RECORD)
        self._rows.use(term.local)
        if term.local:
            self.accountant.note(NOTE.format(names=term.local.listed))
        if started or self.optim.optim_objs or before & (parameters | term.local.leaves).keys():
            self._note_earlier_values()
        self._loaded.take_up()
        self._loaded.require_none()
        require_finite(parameters, STARTED)
        self._optimizer.require(parameters)
        eager = EagerStep(
            *users,
            term,
            parameters,
            privatize=self.clip.of,
            microbatch_size=self.execution.microbatch_size,
            releases_loss=self.clip.loss is not None,
            report=self._report if self._report_block else None,
        )
        step = self._traced(
            partial(step_from_graphs, eager, self._sum_type, sampler.usual_size), term
        )
        kind = None if step is None else type(step)
        if not self._ranks.all_have(kind):
            step = None
        if self.num_steps is None:
            self.num_steps = self._usual_steps
        if self._averages is None and self.num_steps is not None:
            self._averages = IterateAverages(self.num_steps)
        return PreparedGradient(records, sampler, term, parameters, step or eager)

    def _rate(self, plate: PrivatePlate) -> float:
        rate = super()._rate(plate)
        chosen = self.sampling.rate is None
        return usual_rate(plate.size) if chosen and rate == 1.0 else rate

    def _row_adam(self, name: str) -> RowAdam:
        """Moves the rows of this parameter. If nobody set it, each step chooses its step size."""
        return self._local_optim or RowAdam()

    def _move(
        self, prepared: PreparedGradient, gradients: dict[str, Tensor | None], size: int
    ) -> None:
        """The optimizer's step, along gradients of the parameters."""
        plan = self._plan(size, prepared.sampler)
        if self._plans_adam:
            self._optimizer.set(lr=plan.step_size(self._steps - 1), betas=BETAS)
        self._optimizer.step(prepared.parameters, gradients, rarely=self._rarely)
        if self._plans_adam:
            self._optimizer.set(lr=plan.step_size(self._steps))  # which a state must know
        if self._local_optim is None:
            self._rows.set_step_size(plan.row_step_size(self._steps - 1))

    @property
    def _rarely(self) -> bool:
        """Whether a device may be waited for in this step."""
        return self._steps <= 3 or self._steps % 10 == 0 or self._steps == self.num_steps

    def _plan(self, dim: int, sampler: RecordSampler) -> StepPlan:
        """
        :param dim: coordinates of a gradient.
        """
        steps = self.num_steps or USUAL_STEPS
        noise = self._noise(Block(dim, 1.0, self._gradient_share), sampler) / math.sqrt(steps)
        return StepPlan(
            steps,
            dim,
            sampler.size,
            noise,
            sees_parameters=bool(self._prepared and self._prepared.term.parameters),
        )

    @property
    def _others(self) -> tuple[Any, ...]:
        if self._plans_adam:
            return (self.loss,)
        return self.loss, self.optim.pt_optim_args, self.optim.pt_clip_args

    def _refuse_steps_beyond_calibration(self) -> None:
        if self._finished:
            raise ConfigurationError(_DONE.format(steps=self.num_steps))

    def _public(self) -> Sequence[Tensor]:
        known = self._prepared
        return [*super()._public(), *(known.parameters.values() if known else ())]

    def _is_current(self, prepared: PreparedGradient) -> bool:
        if self._optimizer.failed:
            return False
        return super()._is_current(prepared) and prepared.is_current()

    def _blocks(self, size: int) -> list[Block]:
        """The blocks of the joint release: gradient, loss, and the report of clipping."""
        blocks = [Block(size, self._bound, self._gradient_share)]
        if self.clip.loss is not None:
            blocks.append(Block(1, self.clip.loss, self.clip.loss_share))
        return [*blocks, self._report_block] if self._report_block else blocks

    @property
    def _report_block(self) -> Block | None:
        """The block that reports clipping."""
        return Block(SIZE, 1.0, norm_histogram.SHARE) if self._measures else None

    def _noise(self, block: Block, sampler: RecordSampler) -> float:
        """Standard deviation of the noise in a coordinate of a block, as an estimate for all N."""
        return block.noise(self._noise_in_sums) / sampler.sample_rate

    def _warnings(self) -> list[Warning]:
        status = self._status
        if status.is_ok:
            return []
        if status.cause != CLIPPING:
            remedy = self._concluded or REMEDIES[status.cause]
            return [ConvergenceWarning(f"{status}. {remedy}")]
        remedy = REMEDIES[CLIPPING] if self.clip.bound is None else _LEAVE_OUT
        return [ClippingWarning(f"{status}. {remedy}")]

    def _read_report(
        self, others: list[Tensor], block: Block, size: int, prepared: PreparedGradient
    ) -> None:
        """Keep the last block, if it has norms, and move the bound that follows them."""
        if self._measures:
            self._read_bins(others.pop(), block, size, prepared.sampler)

    def _read_bins(self, counts: Tensor, block: Block, size: int, sampler: RecordSampler) -> None:
        if self._histogram is None:
            size = max(size, 1)  # records may share nothing
            plan = self._plan(size, sampler)
            self._histogram = HistogramBound(
                sampler.size, size, plan.noise, of_many=plan.is_of_many
            )
        sd, rate = self._noise(block, sampler), sampler.sample_rate
        self._histogram = self._histogram.updated(counts, sd, rate)
        if self.clip.bound is None:
            self._bound = self._histogram.bound

    def _exact(self) -> dict[str, Callable]:
        return {"loss": exact_loss, "gradient_norms": exact_norms}
