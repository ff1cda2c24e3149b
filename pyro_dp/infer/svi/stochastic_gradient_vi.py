"""Stochastic variational inference with a private gradient.

Algorithm 1 of Jälkö, Dikmen & Honkela 2017 (DPVI, arXiv 1610.08749), for any Pyro model with a
plate of individuals. :class:`PaperDPSVI` is the algorithm as the paper has it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.base import PrivateInference, note_values
from pyro_dp.infer.posterior.forecast import Forecasted
from pyro_dp.infer.posterior.posterior import NOISE, NOTHING_TO_CHECK, Posterior
from pyro_dp.infer.svi.averaged_guide import (
    NO_STEP,
    WITHOUT_NOISE,
    IterateAverages,
    gaussian_of,
    posterior_of,
)
from pyro_dp.infer.svi.clip_policy import ClipPolicy, Reading, by_bit, by_histogram
from pyro_dp.infer.svi.eager_step import EagerStep, PreparedGradient, exact
from pyro_dp.infer.svi.moves import Moves, PlannedMoves, optimizers, without_history
from pyro_dp.infer.svi.optimizers import RowAdam, StepPlan
from pyro_dp.infer.svi.traced_step import step_from_graphs
from pyro_dp.mechanism.clipped_fraction import AdaptiveClip, ClippedFraction, require_fractions
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Clip, Execution, Noise, Sampling, old_names_explained
from pyro_dp.records.local_parameters import FIXED, NOTE
from pyro_dp.records.losses import Loss, OwnLoss, as_elbo
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import (
    ConfigurationError,
    ModelError,
    PrivacyError,
    PrivacyWarning,
    warn_user,
)
from pyro_dp.utils.validation import same

NAN = (
    "step() returns nan: the loss on the data is not private. Pass clip=Clip(loss=...) to "
    "DPSVI to release a private one with each step."
)
_NOT_STARTED = "finish() ends a loop over step(), and no step was taken yet."
_PER_RECORD = (
    "peers: model or guide have latents or parameters of each record, or draw for each, as "
    "dropout does. Such records must stay in one process: leave peers=None, or sum latents out "
    '(infer={"enumerate": "parallel"}).'
)


class InPlaceOfSVI(Forecasted):
    """Base of the inferences that are called as Pyro's ``SVI`` is."""

    def finish(self) -> None:
        """End a loop over ``step`` early: write the result into the guide.

        The last step of the plan does so itself. The cost of steps not taken is not refunded.

        :raises ConfigurationError: no step was taken yet.
        """
        own: Any = self
        if not own._steps:
            raise ConfigurationError(_NOT_STARTED)
        for warning in own._conclude():
            warn_user(warning)

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """:raises PrivacyError: always, because the loss on the data is not private."""
        raise PrivacyError(
            "evaluate_loss would release a number of the data without noise. Set Clip.loss for "
            "a private loss, or evaluate pyro.infer.Trace_ELBO on data that need no protection. "
            "Calling pyro_dp.nonprivate(svi).loss(...) gives it, at the price of the whole "
            "guarantee."
        )


class StochasticGradientVI(PrivateInference[PreparedGradient]):
    """Noisy gradients of the ELBO, which :class:`~pyro_dp.DPSVI` uses for models without evidence.

    Arguments, guarantee and limits are those of DPSVI.

    The gradient, the loss and the histogram of the norms are blocks of one release. A record
    changes each block by its bound at most: C, L or 1 (its norm lies in one bin). The noise of a
    block has standard deviation sigma bound / sqrt(share), and the shares sum to 1. So all blocks
    together change by at most 1 / sigma in units of their noise. That is one Gaussian event of
    noise multiplier sigma. The next C, step sizes and posteriors are post-processing of releases.
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
        first_policy: Callable[[Clip, Noise], ClipPolicy] = by_histogram,
        moves: type[Moves] = PlannedMoves,
        **settings: Any,
    ):
        optim, local = optimizers(optim)
        if loss is not None:
            as_elbo(loss)
        self.loss = loss
        self.clip, noise = Clip.read(clip), Noise.read(noise)
        self._moves = moves(first_policy(self.clip, noise), optim, local)
        super().__init__(
            model,
            guide,
            bound=self._moves.policy.bound,
            noise=noise,
            plan=partial(self._moves.steps, self._moves),
            **settings,
        )

    _measure = "private loss (nats)"
    _exact = MappingProxyType(
        {
            "loss": lambda _, *given: exact(*given)[0],
            "gradient_norms": lambda _, *given: exact(*given)[1],
        }
    )

    @whole_step
    @torch.enable_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """As :meth:`~pyro_dp.DPSVI.step`.

        If C is chosen, the first step releases the norms alone. It moves no parameter.
        """
        self._reservation.require_step()
        prepared = self._look_at(args, kwargs)
        loops = self._moves.steps.chooses and self.last_run is None  # over step()
        if loops and self._steps == 0 and self.clip.loss is None:
            warn_user(PrivacyWarning(NAN))
        policy = self._moves.policy
        step = prepared.step.eager.of_norms_alone() if policy.measures_norms_only else prepared.step
        position = self.accountant.position
        draws = step.draw()
        size = step.size(draws)
        blocks = policy.blocks(size)
        clipped = self._releases.sum_type(blocks, prepared.records.device)
        stream = partial(self._releases.randomness.stream, "local", position)
        batch = prepared.draw(self._releases, position)
        moves = step.add(clipped, draws, batch, stream)
        public = list(prepared.parameters.values())
        released = self._release(clipped, prepared.sampler, public)
        noise = self._releases.in_sums(self.noise_multiplier)
        per_bound = Block(size, 1.0, policy.share).noise(noise)
        sees = bool(prepared.term.parameters)
        plan = StepPlan.of(self.num_steps, size, prepared.sampler, per_bound, sees)
        read = Reading(released, blocks, noise, prepared.sampler, plan)
        if policy.measures_norms_only:
            self._moves.policy = policy.learned(read)
            return math.nan
        gradients = step.gradients(draws, released[0])
        sd = blocks[0].noise(noise) / prepared.sampler.sample_rate
        variance = step.eager.num_noises * sd**2
        self._moves.move(prepared.parameters, gradients.parameters, plan, self._steps, variance)
        for indices, of_rows in moves:  # behind the privacy wall
            self._moves.rows.step(indices, of_rows)
        self._moves.policy = policy.learned(read)
        if self._steps == self.num_steps:
            self._moves.conclude(prepared.parameters)
            for warning in self._conclude() if loops else ():
                warn_user(warning)
        loss = math.nan
        if self.clip.loss is not None:
            loss = released[1].item() + gradients.outside.item()
        if self.last_run is not None and self.last_run.goes_on:
            self._moves.optimizer.step_scheduler(loss)
        return loss

    def _planned(self, args: tuple, kwargs: dict) -> int:
        if self._moves.optimizer.needs_metric and self.clip.loss is None:
            raise ConfigurationError(
                "optim: ReduceLROnPlateau goes by a loss, and that of the data is private. Set "
                "Clip.loss, use another scheduler, or call step() and optim.step(...) yourself."
            )
        if self.num_steps is None:
            self._look_at(args, kwargs)  # which chooses it
        return super()._planned(args, kwargs)

    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The guide's global latents, with the noise in the mean of the iterates."""
        prepared = self._kept.prepared
        if prepared is None:
            raise ConfigurationError(NO_STEP)
        found = posterior_of(
            gaussian_of(self.model, self.guide, prepared.records),
            _averages(self, prepared),
            prepared.sampler.sample_rate,
            self._moves.policy.judged if self.noise_multiplier else lambda _: NOTHING_TO_CHECK,
        )
        return found if noise_aware else found.plain

    def _noise_parts(self) -> Mapping[str, Tensor]:
        prepared = self._kept.prepared
        averages = None if prepared is None else _averages(self, prepared)
        if prepared is None or averages is None or not averages.complete:
            return {NOISE: torch.ones(())}
        covariance = self.posterior(noise_aware=False).covariance_matrix
        parts = averages.variances(covariance, prepared.sampler.sample_rate)
        return {name: each.diagonal() for name, each in parts.items()}

    def _conclude(self, status: str | None = None) -> Sequence[Warning]:
        if self._kept.prepared is None:
            raise ConfigurationError(_NOT_STARTED)
        self._moves.conclude(self._kept.prepared.parameters)
        policy, found = self._moves.policy, NOTHING_TO_CHECK
        if not same(self._reservation.noise_multiplier, 0):
            try:
                found = self.posterior().status
            except ConfigurationError:  # the guide is not Gaussian
                found = policy.judged(WITHOUT_NOISE)
        super()._conclude(self._moves.status_line(found))
        return policy.warnings(found) + self._moves.warnings(found)

    @property
    def clipped_fraction(self) -> ClippedFraction | None:
        """The fraction of all N records whose gradient was clipped.

        DPSVI estimates it from the mean histogram of all steps, for the present bound.
        :class:`~pyro_dp.PaperDPSVI` counts over the last half of the steps. It is None before the
        first step, and without a report.
        """
        return self._moves.policy.clipped

    def state_dict(self, *, include_private_local_state: bool = False) -> dict[str, Any]:
        """As :meth:`~pyro_dp.DPSVI.state_dict`."""
        prepared = self._kept.prepared
        parameters = (prepared.parameters if prepared else {}) | self._moves.waiting
        local = prepared.term.local.leaves if prepared else {}
        state = self._reservation.state() | {
            "clipped_fractions": self._moves.policy.fractions.state(),
            "parameters": {name: leaf.detach().clone() for name, leaf in parameters.items()},
            "optimizer": {n: s for n, s in self.optim.get_state().items() if n not in local},
            "bound": self._moves.policy.bound,
        }
        state |= self._moves.state(self.num_steps, self._moves.policy.histogram_state)
        if include_private_local_state:
            state["private_local_state"] = self._moves.rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`~pyro_dp.DPSVI.load_state_dict`.

        Parameters that do not exist yet are set in the first step.
        """
        self._moves.require_own(state)
        if isinstance(state, dict):
            state = without_history(state)
        keys = (*self._moves.state_keys, *self._moves.policy.state_keys)
        self._reservation.require(state, ("parameters", "optimizer", "bound", *keys))
        require_fractions(state.get("clipped_fractions"))
        policy = self._moves.policy.resumed(state)
        self._moves.require_state(state, self.num_steps)
        self._reservation.load(state)
        self._moves.policy.fractions.load(state.get("clipped_fractions"))
        self._moves.load(state)
        self._moves.policy = policy
        plan = self._reservation.plan
        plan.num_steps = state.get("num_steps") or plan.num_steps

    @property
    def optim(self) -> PyroOptim:
        """The optimizer. You may set another one between two steps."""
        return self._moves.optimizer.optim

    @optim.setter
    def optim(self, optim: PyroOptim) -> None:
        if self._moves.chooses:
            raise ConfigurationError("optim: this DPSVI chooses its own. Pass one when it is made.")
        self._moves.optimizer.optim = optim

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedGradient:
        started, before = self._kept.values_before(self.guide)
        before = before | self._moves.waiting.keys()
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
        if not self._releases.peers.alone and (term.local or term.samples):
            raise ConfigurationError(_PER_RECORD)
        self._moves.rows.use(term.local)
        if term.local:
            self.accountant.note(NOTE.format(names=term.local.listed))
        used = started or self.optim.optim_objs or before & (parameters | term.local.leaves).keys()
        note_values(self._reservation, bool(used))
        self._moves.require(parameters)
        eager = EagerStep(
            *users,
            term,
            parameters,
            privatize=self.clip.of,
            microbatch_size=self.execution.microbatch_size,
            releases_loss=self.clip.loss is not None,
            report=self._moves.policy.report,
        )
        graphs = partial(step_from_graphs, eager, self._releases.sum_type, sampler.usual_size)
        step = self._kept.traced(graphs, term, self.model, self.guide)
        kind = None if step is None else type(step)
        if not self._releases.peers.all_have(kind):
            step = None
        self._reservation.plan.num_steps = self._moves.begin(self.num_steps)
        return PreparedGradient(
            records, sampler, term, parameters, step or eager, self._moves.optimizer
        )

    @property
    def _others(self) -> tuple[Any, ...]:
        if self._moves.chooses:
            return (self.loss,)
        schedule = getattr(self.optim, "kwargs", {})
        return self.loss, self.optim.pt_optim_args, self.optim.pt_clip_args, schedule


def _averages(svi: StochasticGradientVI, prepared: PreparedGradient) -> IterateAverages | None:
    """The averages of a run, or None if the guide's covariance does not predict their noise.

    With latents per record, a small gradient does not imply that global latents are near their
    optimum. A user's loss may have any optimum.
    """
    own_loss = svi.loss is not None and isinstance(as_elbo(svi.loss), OwnLoss)
    term = prepared.term
    return None if own_loss or term.local or term.samples else svi._moves.averages


class PaperDPSVI(StochasticGradientVI, InPlaceOfSVI):
    """Algorithm 1 of DPVI (Jälkö, Dikmen & Honkela 2017, arXiv 1610.08749).

    It is for comparisons with papers. The guide holds the last iterate, and its intervals ignore
    the privacy noise. The result depends on the learning rate and on the bound, whose bias no
    number of steps removes. :class:`DPSVI` with looks has neither weakness.

    **Guarantee.** As :class:`DPSVI`. A block with bound 1/2 replaces the histogram. It has a bit
    for each record: whether its gradient lies within the bound.

    **Not protected.** As :class:`DPSVI`.

    :param optim: a ``pyro.optim`` optimizer, or a tuple of it and a :class:`RowAdam`. Without a
        :class:`RowAdam`, rows have the settings of ``optim``, which must then be a plain Adam.
    :param accountant: as for :class:`DPSVI`, and so are model, guide, loss, noise and execution.
    :param num_steps: number of steps of :meth:`run`. If the noise is calibrated, it is required,
        and no more steps are possible.
    :param clip: C, an :class:`AdaptiveClip`, or a :class:`Clip` of either, with bound 1 by default.
        :attr:`clipped_fraction` is released unless ``report=False``.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`. ``None`` is
        subsample_size / size of the plate.
    :raises ConfigurationError: as :class:`DPSVI`; or ``optim`` is missing.

    >>> adam = pyro.optim.Adam({"lr": 0.1})
    >>> svi = PaperDPSVI(model, guide, adam, accountant=accountant, num_steps=10)
    >>> svi.run(heights, progress=False).steps
    10
    """

    _known_as = ""

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
        super().__init__(
            model,
            guide,
            optim,
            loss,
            accountant=accountant,
            num_steps=num_steps,
            clip=replace(clips, bound=1.0) if clips.bound is None else clips,
            noise=noise,
            first_policy=by_bit,
            moves=Moves,
            sampling=sampling,
            execution=execution,
        )
