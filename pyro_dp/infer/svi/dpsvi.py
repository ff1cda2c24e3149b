"""DPSVI: stochastic variational inference with a private gradient.

Algorithm 1 of Jälkö, Dikmen & Honkela 2017 (DPVI, arXiv 1610.08749), for any Pyro model with a
plate of individuals.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.svi.eager_step import COORDINATES, EagerStep, PreparedGradient
from pyro_dp.infer.svi.exact_numbers import exact_loss, exact_norms
from pyro_dp.infer.svi.public_optimizer import STARTED, PublicOptimizer, require_finite
from pyro_dp.infer.svi.row_adam import RowAdam, RowOptimizer
from pyro_dp.infer.svi.traced_step import TracedStep
from pyro_dp.mechanism.adaptive_clip import AdaptiveClip
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.clipped_fraction import SHARE
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.initial_values import initialised
from pyro_dp.records.local_parameters import FIXED, NOTE
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ConfigurationError, ModelError, PrivacyError
from pyro_dp.utils.validation import (
    require_choice,
    require_count,
    require_number,
    require_scale,
    require_tensors,
)

_LOSSES = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO)
_STATE = ("parameters", "optimizer", "bound")
_OTHER_SHAPE = (
    "Parameter {name!r} has another shape than when it was saved: the state is of another model."
)


class DPSVI(PrivateInference[PreparedGradient]):
    """Differentially private ``pyro.infer.SVI``: same model, guide, optimizer, loss; one
    accountant.

    Each step samples records, clips what each of them adds to the gradient to norm C, adds noise
    N(0, (sigma C)^2 I) to the sum, divides by the public sample rate, and hands the gradient to the
    optimizer. Prior, entropy and all else outside the private plate carry no data and enter
    exactly.

    **Guarantee.** The sequence of parameters and private losses is (epsilon, delta)-differentially
    private for one element of the private plate, with epsilon = ``accountant.get_epsilon()`` under
    the accountant's neighbouring relation, for finite data. Parameters with a row per record are no
    part of it.

    **Not protected.** The number N of records, the sample rate and all other settings; arguments
    without a row per record; numbers that were made from the data beforehand, where no check can
    recognise them; values that parameters or optimizer had before; the choice of model and
    settings, where it was made by looking at the data; what a model keeps where Python cannot look
    (files, other processes); running times; errors of the structural checks, which are for the
    curator.

    **Private, and not protected if published.** Parameters with a row per record, of guides with
    latents per record: row i is learnt from record i without noise, behind a privacy wall
    (:mod:`pyro_dp.records.local_parameters`). They are in Pyro's parameter store, for the curator.
    What guide, ``Predictive``, ``median()`` or ``quantiles()`` say of the training records' own
    latents is as sensitive as the data, and the ledger notes it; what they say of global latents is
    covered. Record i must be the same individual in every step.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations.
    :param guide: Pyro guide: any reparameterised autoguide, or hand-written. Latents inside the
        plate have parameters that are computed from the record (amortisation), or a row of
        parameters per record: a dimension of length N that is read at the plate's index,
        ``loc[idx]``, or subsampled by Pyro (``event_dim``, ``AutoNormal``, ``AutoDelta``).
    :param optim: a ``pyro.optim`` optimizer, which must step without a closure. What it clips
        itself (``clip_norm``) is the finished gradient: that protects nobody, and costs nothing.
        Of a scheduler, such as ``pyro.optim.ExponentialLR``, :meth:`run` calls ``step()`` once
        after each private step (of a ``ReduceLROnPlateau`` with the private loss, which needs
        ``loss_clip``); who loops over :meth:`step` calls it, as with Pyro's ``SVI``. States include
        the scheduler's.
    :param loss: ``Trace_ELBO``, ``TraceMeanField_ELBO`` or ``TraceEnum_ELBO``, one or several
        particles.
    :param accountant: keeps the ledger and the budget; may be shared with other inferences, one
        after the other.
    :param num_steps: number of steps of :meth:`run`; with ``noise_multiplier=None`` also the most
        steps there can be.
    :param noise_multiplier: standard deviation sigma of the noise in units of C, but for what
        ``report_clipping`` and ``loss_clip`` take of the cost. ``None``: the
        smallest that fits what remains of the budget at the first step. 0: a non-private reference.
    :param max_grad_norm: C, the norm to which one record's part of the release is clipped, or an
        :class:`AdaptiveClip`. ``math.inf`` needs ``noise_multiplier=0``.
    :param plate: name of the private plate; found if exactly one plate holds observations.
    :param sample_rate: expected fraction of the records in a step, in (0, 1]. ``None`` takes
        subsample_size / size from the plate.
    :param sampling: "poisson"; "fixed" (uniform subsets of floor(rate N) records; replace-one
        only); "full".
    :param privatize: "latents" releases the gradient with respect to the global latents in
        unconstrained coordinates (and the parameters used inside the plate) and pulls it back
        through the guide: the noise has the dimension of the latents, whatever the guide. It
        contains the aligned gradients of DPVIm (Jälkö et al. 2022, arXiv 2210.15961).
        "parameters" releases the gradient with respect to all parameters, as Algorithm 1.
    :param microbatch_size: at most so many per-record gradients are held at a time; the result is
        the same.
    :param slice_data: the model is written for whole tensors (``with pyro.plate("data", len(x))``)
        and is shown rows of them; otherwise it indexes its arguments with the plate's indices.
    :param jit: "trace": model and guide are traced once, and steps run no Pyro code; "compile": the
        same, as machine code (needs a C++ compiler); "none": Pyro code in every step. Graphs are
        checked against the model in the first steps; a model that cannot be traced falls back to
        "none" with a warning.
    :param loss_clip: L > 0 releases the loss too: each record's is clipped to [-L, L] nats and
        joins the release as a further block.
    :param loss_share: part of the privacy cost (of sigma^-2) that the loss takes from the gradient,
        in (0, 1): the loss's noise has standard deviation sigma L / sqrt(loss_share), the
        gradient's grows by 1 / sqrt(1 - loss_share).
    :param local_optim: settings of the Adam that moves rows of parameters per record, each on its
        own and without noise, by the gradient of its record's term (unscaled, in the steps in which
        the record was sampled). ``None``: those of ``optim``, if it is a plain Adam; a scheduler
        does not change them.
    :param generator: a ``torch.Generator`` or a seed, for a run that can be repeated. No guarantee
        against anyone who can guess the seed, and runs with equal seeds and separate accountants
        share their noise; the ledger says so.
    :param secure: noise and sampling from the operating system's cryptographic generator, sums and
        noise in integers: against attacks on floating-point numbers and on generators, listed in
        :mod:`pyro_dp.mechanism.fixed_point`. Refused with ``generator``.
    :param report_clipping: release how many records were clipped: :attr:`clipped_fraction`, and a
        :class:`ClippingWarning` at the end of :meth:`run` where it was clearly more than a quarter.
        A bit of each record joins the release as a further block with 1% of the privacy cost: the
        gradient's noise grows by half a per cent. :class:`AdaptiveClip` has such a bit anyway, of
        which no warning is made.
    :raises ConfigurationError: a setting is out of range or does not fit the others; at the first
        step, parameters per record with ``sampling="fixed"``, or without ``local_optim`` if
        ``optim`` is no plain Adam.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim,
        loss: ELBO,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | AdaptiveClip = 1.0,
        plate: str | None = None,
        sample_rate: float | None = None,
        sampling: str = "poisson",
        privatize: str = "latents",
        microbatch_size: int | None = None,
        slice_data: bool = False,
        jit: str = "trace",
        loss_clip: float | None = None,
        loss_share: float = 0.05,
        local_optim: RowAdam | None = None,
        generator: torch.Generator | int | None = None,
        secure: bool = False,
        report_clipping: bool = True,
    ):
        if not isinstance(optim, PyroOptim):
            raise ConfigurationError(
                "optim must be a pyro.optim optimizer, for example pyro.optim.Adam({'lr': 0.01})."
            )
        if type(loss) not in _LOSSES:
            names, given = ", ".join(kind.__name__ for kind in _LOSSES), type(loss).__name__
            if isinstance(loss, type):
                given = f"the class itself: write {loss.__name__}()"
            raise ConfigurationError(f"loss must be one of {names}, not {given}.")
        require_count("loss.num_particles", loss.num_particles)
        require_choice("privatize", privatize, tuple(COORDINATES))
        adaptive = max_grad_norm if isinstance(max_grad_norm, AdaptiveClip) else None
        if adaptive:
            bound = adaptive.initial
        else:
            bound = require_scale("max_grad_norm", max_grad_norm, infinite=True)
        if loss_clip is not None:
            require_scale("loss_clip", loss_clip)
            require_number("loss_share", loss_share, above=0.0, below=1.0)
        if not isinstance(local_optim, RowAdam | None):
            raise ConfigurationError("local_optim must be a RowAdam, or None.")
        self.loss = loss
        self.max_grad_norm = max_grad_norm
        self.privatize = privatize
        self.loss_clip = loss_clip
        self.loss_share = loss_share
        self._adaptive = adaptive
        settings = ReleaseSettings.among(locals(), bound=bound)
        super().__init__(
            model,
            guide,
            settings,
            plate=plate,
            slice_data=slice_data,
            jit=jit,
            report_clipping=report_clipping,
        )
        if adaptive:
            self._bit = Block(1, 0.5, adaptive.share)
        of_bit, of_loss = self._bit.share if self._bit else 0.0, loss_share if loss_clip else 0.0
        self._gradient_share = 1.0 - of_bit - of_loss
        if self._gradient_share <= 0:
            raise ConfigurationError(
                "loss_share must leave a part of the privacy cost to the gradient: it and "
                f"AdaptiveClip.share, or {SHARE:g} for report_clipping, must sum to less than 1."
            )
        self._optimizer = PublicOptimizer(optim)
        self._loaded: dict[str, Tensor] = {}  # parameters that do not exist yet
        self._rows = RowOptimizer(lambda name: local_optim or RowAdam.like(optim, name))

    _bound_name = "max_grad_norm"

    @torch.enable_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One private gradient step, given the full data.

        :returns: the private loss in nats if ``loss_clip`` is set, else nan.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: the optimizer fails, or makes a parameter NaN or infinite.
        """
        prepared = self._prepare(args, kwargs)
        position = self.accountant.position
        draws = prepared.step.draw()
        blocks = self._blocks(prepared.step.size(draws))
        clipped = self._sum_type(blocks, prepared.records.device)
        stream = partial(self._randomness.stream, "local", position)
        batch = self._draw_records(prepared, position)
        moves = prepared.step.add(clipped, draws, batch, stream)
        gradient, *others = self._release(clipped, prepared.sampler)
        gradients, outside = prepared.step.gradients(draws, gradient)
        self._optimizer.step(prepared.parameters, gradients, rarely=self._rarely)
        for indices, own in moves:  # behind the privacy wall
            self._rows.step(indices, own)
        self._read_bit(others, prepared)
        return math.nan if self.loss_clip is None else others[0].item() + outside.item()

    def run(self, *args: Any, progress: bool = True, **kwargs: Any) -> list[float]:
        """What is left of ``num_steps`` steps, with a progress bar.

        :returns: what the steps returned, where that is a number.
        :raises ConfigurationError: ``num_steps`` was not given, or all of them are done; a
            scheduler needs a metric, and there is no private loss.
        :raises PrivacyBudgetExceeded: so many steps do not fit the budget.
        """
        if self._optimizer.needs_metric and self.loss_clip is None:
            raise ConfigurationError(
                "optim: ReduceLROnPlateau goes by a loss, and that of the data is private. Set "
                "loss_clip, use another scheduler, or call step() and optim.step(...) yourself."
            )
        return super().run(*args, progress=progress, **kwargs)

    def _step_of_run(self, args: tuple, kwargs: dict) -> float:
        loss = super()._step_of_run(args, kwargs)
        self._optimizer.step_scheduler(loss)
        return loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """:raises PrivacyError: always: the loss on the data is not private."""
        raise PrivacyError(
            "evaluate_loss would release a number of the data without noise: set loss_clip for a "
            "private loss, or evaluate pyro.infer.Trace_ELBO on data that need no protection. "
            "pyro_dp.nonprivate(svi).loss(...) gives it, at the price of the whole guarantee."
        )

    def state_dict(self, *, include_private_local_state: bool = False) -> dict[str, Any]:
        """Unconstrained parameters, optimizer, step count and accountant.

        It loads with ``torch.load(weights_only=True)``. All of it was released or is public. Random
        streams are not part of it: a resumed run draws fresh ones, also with a seed, for the state
        may be older than what was released with it.

        :param include_private_local_state: add the rows of parameters per record, with their
            moments. They are as sensitive as the data, and no guarantee covers them: such a state
            is for the curator only. Without them, a resumed run starts these parameters afresh.
        """
        known = self._prepared
        parameters = (known.parameters if known else {}) | self._loaded
        local = known.term.local.leaves if known else {}
        state = self._state() | {
            "parameters": {name: leaf.detach().clone() for name, leaf in parameters.items()},
            "optimizer": {n: s for n, s in self.optim.get_state().items() if n not in local},
            "bound": self._bound,
        }
        if include_private_local_state:
            state["private_local_state"] = self._rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Parameters that do not exist yet are set in the first step.

        After a crash: open the accountant's journal, then load the last state. The ledger stays
        that of the journal; what was released after the state is paid for and lost, and a
        calibrated run calibrates its noise again, for the steps and the budget that are left.
        Without a journal, load into a new accountant a state that was saved after the last release.

        Rows of parameters per record are taken up if the state has them, and else left as they are.

        :raises ConfigurationError: it is not a state of this inference; nothing was changed.
        :raises PrivacyError: its ledger counts less than the accountant's, or more than that of its
            journal; nothing was changed.
        """
        self._require_state(state, _STATE)
        require_scale("bound", state["bound"], infinite=True)
        store = pyro.get_param_store()
        for name, value in require_tensors("parameters", state["parameters"]).items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(_OTHER_SHAPE.format(name=name))
        if not isinstance(state["optimizer"], dict):
            raise ConfigurationError("load_state_dict: optimizer must be a dictionary.")
        local = state.get("private_local_state", {})
        RowOptimizer.check(local)
        self._load_state(state)
        self._rows.load_state_dict(local)
        self._loaded = dict(state["parameters"])
        self._set_loaded()
        self._optimizer.load(state["optimizer"])
        self._bound = state["bound"]

    def _set_loaded(self) -> None:
        store = pyro.get_param_store()
        with torch.no_grad():
            for name in [name for name in self._loaded if name in store]:
                leaf = store[name].unconstrained()
                if leaf.shape != self._loaded[name].shape:
                    raise ConfigurationError(_OTHER_SHAPE.format(name=name))
                leaf.copy_(self._loaded.pop(name))

    @property
    def optim(self) -> PyroOptim:
        """The optimizer; another one may take its place between two steps."""
        return self._optimizer.optim

    @optim.setter
    def optim(self, optim: PyroOptim) -> None:
        self._optimizer.optim = optim

    @property
    def _rarely(self) -> bool:
        """Whether this is one of the steps in which a device may be waited for."""
        return self._steps <= 3 or self._steps % 10 == 0 or self._steps == self.num_steps

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedGradient:
        store = pyro.get_param_store()
        before = set(store.keys()) | self._loaded.keys()
        started = initialised(self.guide)
        users = (self.loss, self.model, self.guide)
        term, parameters = build_record_term(
            *users, records, privatize=self.privatize, microbatch_size=self.microbatch_size
        )
        if not (parameters or term.local):
            raise ModelError(
                "Neither model nor guide has a parameter: there is nothing to learn. Use an "
                "autoguide, such as AutoNormal(model), or pyro.param in the guide."
            )
        if term.local and self.sampling == "fixed":
            raise ConfigurationError(FIXED.format(names=term.local.listed))
        self._rows.use(term.local)
        if term.local:
            self.accountant.note(NOTE.format(names=term.local.listed))
        if started or self.optim.optim_objs or before & (parameters | term.local.leaves).keys():
            self._note_earlier_values()
        self._set_loaded()
        if self._loaded:
            names = ", ".join(map(repr, self._loaded))
            raise ConfigurationError(
                f"load_state_dict: the state has parameters {names}, which model and guide have "
                "not: it is of another model."
            )
        require_finite(parameters, STARTED)
        self._optimizer.require(parameters)
        eager = EagerStep(
            *users,
            term,
            parameters,
            privatize=self.privatize,
            microbatch_size=self.microbatch_size,
            releases_loss=self.loss_clip is not None,
            has_bit=self._bit is not None,
        )
        step = self._traced(partial(TracedStep, eager, self._sum_type, sampler.usual_size), term)
        return PreparedGradient(records, sampler, term, parameters, step or eager)

    @property
    def _others(self) -> tuple[Any, ...]:
        return self.loss, self.optim.pt_optim_args, self.optim.pt_clip_args

    def _is_current(self, prepared: PreparedGradient) -> bool:
        if self._optimizer.failed:
            return False
        return super()._is_current(prepared) and prepared.is_current()

    def _blocks(self, size: int) -> list[Block]:
        """The blocks of the joint release: gradient, loss, bit."""
        blocks = [Block(size, self._bound, self._gradient_share)]
        if self.loss_clip is not None:
            blocks.append(Block(1, self.loss_clip, self.loss_share))
        if self._bit:
            blocks.append(self._bit)
        return blocks

    def _warnings(self) -> list[Warning]:
        return [] if self._adaptive else super()._warnings()

    def _read_bit(self, others: list[Tensor], prepared: PreparedGradient) -> None:
        """The last block, if there is a bit: it is kept, and moves an adaptive bound."""
        if self._bit:
            bit = others.pop()
            self._add_bit(self._bit, bit, prepared)
            if self._adaptive is not None:
                within = bit.item() / prepared.records.plate.size + 0.5
                self._bound = self._adaptive.updated(self._bound, within)

    def _exact(self) -> dict[str, Callable]:
        return {"loss": exact_loss, "gradient_norms": exact_norms}
