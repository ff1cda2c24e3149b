"""DPSVI: variational inference with a private likelihood.

It makes the looks of :class:`~pyro_dp.DPSEP` for models that they suit, and otherwise the gradient
steps of DPVI (Jälkö, Dikmen & Honkela 2017, arXiv 1610.08749).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.ep.dpsep import EPByLooks, FitByLooks
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.problem import EPProblem, record_term
from pyro_dp.infer.ep.site_factors import LARGEST_FULL
from pyro_dp.infer.ep.stochastic_ep import StochasticEP
from pyro_dp.infer.ep.tilted_sites import LinearMoments
from pyro_dp.infer.fitted_rows import FittedRows
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.fitted_guide import FittedGuide, read_guide
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.svi.optimizers import RowAdam
from pyro_dp.infer.svi.stochastic_gradient_vi import NAN, InPlaceOfSVI, StochasticGradientVI
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.nonprivate import Readable
from pyro_dp.mechanism.run_result import Callback, RunResult
from pyro_dp.mechanism.settings import (
    Clip,
    Execution,
    FullBatch,
    Noise,
    Sampling,
    old_names_explained,
)
from pyro_dp.records.local_parameters import NOTE
from pyro_dp.records.losses import Loss, OwnLoss, as_elbo
from pyro_dp.records.plate import Outside
from pyro_dp.records.quadrature import without_latents
from pyro_dp.records.records import Records
from pyro_dp.records.sandbox import RaisedOnRecords
from pyro_dp.utils.errors import (
    ConfigurationError,
    ConvergenceWarning,
    ModelError,
    PrivacyError,
    PrivacyWarning,
    warn_user,
)

_MOST_CURVATURES = 20  # latents, if each record's Hessian is computed
_BRANCHES = "The model branches on values of a record"
_TURNS = "Records see products of latents that no deterministic site outside the plate names"
_PER_RECORD = "The guide has parameters per record, which peers cannot share"
_QUIET = "Records have continuous latents, so looks without noise may not converge"
_MANY = "There are too many latents for a matrix of curvatures"
_NO_EVIDENCE = (
    "This run takes gradient steps, which leave no evidence. The reason: {reason}. DPSEP has "
    "evidence for every smooth likelihood with a Gaussian guide."
)
_SAVED = "the saved run took gradient steps"
_CHOSEN = "{name} is a setting of gradient steps"
_NEAR = 1.0  # standard deviations
_NOT_FITTED = (
    "The guide {guide} could not be fitted: its mean lies {away:.1f} standard deviations from that "
    "of posterior(), which is right. Use posterior(), or another start of the guide."
)


class NoEvidence(ModelError):
    """Looks do not suit model or guide. The decision does not depend on the records."""


class ServedLooks(FitByLooks):
    """Looks for models that they suit.

    :ivar rows: the final fit of parameters per record; None: there are none.
    """

    rows: FittedRows | None = None

    def problem(self, run: StochasticEP[EPState], records: Records) -> EPProblem:
        """:raises NoEvidence: gradient steps suit model and guide better, by public criteria."""
        inputs, plate = (run.model, run.guide, records), records.plate
        microbatch = run.execution.microbatch_size
        guide, read, self.rows = run.guide, read_guide, None
        try:
            model = without_latents(run.model, plate)
            if plate.continuous:
                if run._reservation.noise_multiplier == 0:
                    raise NoEvidence(_QUIET)
                self.rows = FittedRows.find(*inputs, microbatch)
            if self.rows:  # an integral replaces the guide's sites inside the plate
                guide, read = Outside(plate)(guide), lambda *_: read_guide(*inputs, globally=True)
            term = record_term(model, guide, records, microbatch)
            if term.answers:
                raise NoEvidence(_BRANCHES)
            problem = EPProblem.of(term, model, guide, "auto", microbatch, read)
        except RaisedOnRecords:
            raise
        except ModelError as reason:
            raise NoEvidence(str(reason)) from None
        moments, size = problem.moments, len(problem.places)
        if moments.turns:
            raise NoEvidence(_TURNS)
        if size > (LARGEST_FULL if isinstance(moments, LinearMoments) else _MOST_CURVATURES):
            raise NoEvidence(_MANY)
        problem.check()
        if self.rows:
            if not run._releases.peers.alone:
                raise NoEvidence(_PER_RECORD)
            run.accountant.note(NOTE.format(names=self.rows.term.local.listed))
        return problem


class Looks(EPByLooks):
    """The looks of :class:`~pyro_dp.DPSEP`, in loops that may be longer than the looks."""

    _fit: ServedLooks
    _known_as = "DPSVI"

    @whole_step
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make the next look, if one is left. Steps after the last look cost nothing.

        :returns: nan.
        """
        plan = self._reservation.plan
        if self._fit.loaded is None and not (self._steps and plan.finished):
            self._reservation.require_step()
        self._look_at(args, kwargs)  # resumes a state, and refuses other data
        if self._steps and plan.finished:
            return math.nan
        in_loop = self.last_run is None  # over step()
        if in_loop and self._steps == 0:
            warn_user(PrivacyWarning(NAN))
        super().step(*args, **kwargs)
        if in_loop and plan.finished:
            for warning in self._conclude():
                warn_user(warning)
        return math.nan

    def state_dict(self, *, include_private_local_state: bool = False) -> dict[str, Any]:
        """As :meth:`DPSVI.state_dict`, without parameters per record, which the run's end fits."""
        return super().state_dict()

    def _conclude(self, status: str | None = None) -> Sequence[Warning]:
        found = super()._conclude(status)
        current = self._fit.current
        guide = current.problem.guide if current else None
        if isinstance(guide, FittedGuide) and (away := guide.fit()) > _NEAR:
            name = getattr(self.guide, "__name__", type(self.guide).__name__)
            warn_user(ConvergenceWarning(_NOT_FITTED.format(guide=name, away=away)))
        if current and self._fit.rows:
            self._fit.rows.fit()
        return found


class DPSVI(Readable, InPlaceOfSVI):
    """Differentially private ``pyro.infer.SVI``: same model and guide; one accountant.

    Change ``SVI`` to ``DPSVI``, add an ``accountant``, and keep ``optim`` and ``loss``. After the
    last step the guide holds the result of :meth:`posterior`. docs/dpsvi.md has examples. The first
    step runs the model on placeholders to choose one of two methods:

    * *Looks.* A run makes some ten looks at all records, as :class:`DPSEP` does. This is for
      generalised linear models, also with hierarchical priors, and other smooth likelihoods of up
      to 20 latents. One or two continuous latents of each record are integrated out
      (:mod:`pyro_dp.records.quadrature`). The guide is Gaussian, an ``AutoDelta``, or written by
      hand. Unless it is Gaussian, it is fitted to the posterior after the last look
      (:class:`~pyro_dp.infer.posterior.fitted_guide.FittedGuide`), and so are its rows of
      parameters per record. The result does not depend on ``optim``, ``loss``, ``num_steps``, the
      sample rate or ``jit``.
    * *Gradients* (Algorithm 1 of DPVI). Each step samples records, clips their gradients to norm C
      and sums them, with noise N(0, (sigma C)^2 I). The public sample rate divides the sum. Sites
      outside the private plate carry no data and enter exactly. The guide ends at the mean of the
      last half of the iterates, and parameters that have not converged keep the last one. Intervals
      of Gaussian global latents include the noise in that mean. If the steps have not settled, the
      status is ``check``, and the run ends with a :class:`ConvergenceWarning`.

    All other models take gradients: three or more latents per record, amortised guides, networks,
    flows, and likelihoods of products of latents. (Name a product by ``pyro.deterministic`` outside
    the plate, and looks are made at it.) Some settings make any model take gradients. These are a
    noise multiplier above 0, a ``clip``, a :class:`RowAdam` and a loss of your own.

    **Guarantee.** All parameters, bounds, posteriors and private losses together are (epsilon,
    delta)-differentially private for one element of the private plate, for finite data. Epsilon is
    ``accountant.get_epsilon()``, under the accountant's neighbouring relation. Looks have the proof
    of :class:`DPSEP` (docs/proofs/evidence.md). A gradient step is one Gaussian event of noise
    multiplier sigma (:class:`~pyro_dp.infer.svi.stochastic_gradient_vi.StochasticGradientVI`). The
    choice of the method does not depend on the records.

    **Not protected.**

    * The number N of records, the sample rate, all other settings, and running times.
    * Arguments without a row per record, and numbers computed from the data beforehand that no
      check can recognise.
    * Values that parameters or optimizer had before.
    * The choice of model and settings, if it depends on the data.
    * State that a model keeps outside Python (files, other processes).
    * Errors of the structural checks, which are for the curator.
    * Parameters with a row per record, in guides with latents per record. Row i is learnt from
      record i without noise (:mod:`pyro_dp.records.local_parameters`). The rows, and results about
      latents of the training records, are for the curator. Results about global latents are
      covered.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations.
    :param guide: Pyro guide: any reparameterised autoguide, or hand-written. Parameters of latents
        inside the plate are computed from the record (amortisation), or have a row per record. A
        row is read at the plate's index, ``loc[idx]``, or subsampled by Pyro (``event_dim``,
        ``AutoNormal``, ``AutoDelta``). Record i must be the same individual in every step.
    :param optim: a ``pyro.optim`` optimizer that steps without a closure; ``None``: Adam. Its
        ``clip_norm`` clips the finished gradient, which protects nobody and costs nothing.
        :meth:`run` calls the ``step()`` of a scheduler after each private step. A
        ``ReduceLROnPlateau`` gets the private loss and needs ``Clip.loss``. In a loop over
        :meth:`step` you call it yourself, as with ``SVI``. A :class:`RowAdam`, or a tuple of both,
        sets the Adam for rows of parameters per record, which moves each row separately without
        noise. By default its step size is 0.1, and falls to 0.01 in the second half.
    :param loss: ``Trace_ELBO``, ``TraceMeanField_ELBO`` or ``TraceEnum_ELBO``, with one or several
        particles. Forms with ``Jit`` count as those without, and ``TraceGraph_ELBO`` as
        ``Trace_ELBO``. ``None``: ``TraceEnum_ELBO`` if the model enumerates latents, else
        ``Trace_ELBO``. Global draws without a reparameterisation need
        ``Clip(of="parameters")``. A loss of your own is a function
        ``loss(model, guide, *args, **kwargs)``, or a subclass of ``ELBO`` with
        ``differentiable_loss``. It must be a sum over sites, which is checked on made-up rows.
    :param accountant: keeps the ledger and the budget; may be shared with other inferences, one
        after the other.
    :param num_steps: gradient steps of the plan; ``None``: 1000.
    :param clip: the bound C of one record's gradient, or a :class:`Clip`. ``None``: C is chosen.
    :param noise: sigma of a gradient step, in units of C before the other blocks take their share
        of the cost, or a :class:`Noise`.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`. Looks are at all
        records.
    :param execution: an :class:`Execution`.
    :raises ConfigurationError: a setting is out of range or does not fit the others. At the first
        step: parameters per record with :class:`FixedSizeSampling`, or latents or parameters per
        record with peers.
    :raises ClusterError: another process of the cluster failed, or is lost.

    >>> svi = DPSVI(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = svi.run(heights, progress=False)
    >>> print(f"{svi.posterior().quantiles([0.5])['height'].item():.2f}")
    1.70
    """

    @old_names_explained()
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | RowAdam | tuple[PyroOptim, RowAdam] | None = None,
        loss: Loss | None = None,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        clip: Clip | float | None = None,
        noise: Noise | float | None = None,
        sampling: Sampling | float | None = None,
        execution: Execution | None = None,
    ):
        clips = Clip.read(clip).only("DPSVI", "bound", "of", "loss", "loss_share")
        noises, sampled = Noise.read(noise), Sampling.read(sampling)
        if clips.adaptive:
            raise ConfigurationError("An AdaptiveClip is for PaperDPSVI. DPSVI chooses the bound.")
        self._gradients = StochasticGradientVI(
            model,
            guide,
            optim,
            loss,
            accountant=accountant,
            num_steps=num_steps,
            clip=clips,
            noise=noises,
            sampling=sampled,
            execution=execution,
        )
        asked = {
            "A noise multiplier": bool(noises.multiplier),
            "A bound": clips.bound is not None,
            "Clip.loss": clips.loss is not None,
            "A RowAdam": self._gradients._moves.local is not None,
            'Clip(of="parameters")': clips.of == "parameters",
            "A loss of your own": loss is not None and isinstance(as_elbo(loss), OwnLoss),
        }
        chosen = (_CHOSEN.format(name=name) for name, is_set in asked.items() if is_set)
        self._reason = next(chosen, "")  # why it takes gradient steps
        self._inference: StochasticGradientVI | Looks = self._gradients
        if not self._reason:
            self._inference = Looks(
                model,
                guide,
                fit=ServedLooks("auto"),
                accountant=accountant,
                noise=noises,
                sampling=FullBatch(plate=sampled.plate),
                execution=replace(self._gradients.execution, jit="auto"),
            )

    def run(
        self, *args: Any, progress: bool = True, callbacks: Sequence[Callback] = (), **kwargs: Any
    ) -> RunResult:
        """Make the looks, or the remaining steps of ``num_steps``, with a progress bar.

        Interrupts, callbacks, early stops and the result are those of
        :meth:`~pyro_dp.mechanism.iterative.IterativeMechanism.run`.

        :param args: the model's arguments, which hold the data; so are kwargs.
        :raises ConfigurationError: all steps are done. A callback returns neither None nor a bool.
            A scheduler needs a metric, and there is no private loss.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the run does not fit the budget; nothing was spent.
        """
        return self._on_data(
            lambda each: each.run(*args, progress=progress, callbacks=callbacks, **kwargs)
        )

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one look or one private gradient step from the full data.

        :returns: the private loss in nats if ``Clip.loss`` is set, else nan.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: all steps of the plan are done; or the optimizer fails, or makes
            a parameter NaN or infinite.
        """
        return self._on_data(lambda each: each.step(*args, **kwargs))

    def posterior(self, noise_aware: bool = True) -> Posterior:
        """The posterior of the guide's unconstrained latents, from all releases so far.

        Looks and the exact prior determine it. In a run of gradients it is the guide's distribution
        of the global latents, with the noise in their mean. Its ``status`` says whether the
        intervals can be published.

        :param noise_aware: include the uncertainty that the noise adds.
        :raises ConfigurationError: no step was taken yet, or the guide is no Gaussian.
        """
        return self._inference.posterior(noise_aware)

    @property
    def evidence(self) -> Evidence:
        """The likelihood of the latents, from the looks so far, apart from the prior.

        :raises ConfigurationError: there was no look yet, or the run takes gradient steps.
        """
        if isinstance(self._inference, Looks):
            return self._inference.evidence
        raise ConfigurationError(_NO_EVIDENCE.format(reason=self._reason))

    def state_dict(self, **options: bool) -> dict[str, Any]:
        """Everything that a new object needs to continue this run.

        It loads with ``torch.load(weights_only=True)``. All of it was released or is public. It has
        no random streams. A resumed run draws fresh ones, also with a seed, because releases may
        have followed the state.

        :param options: ``include_private_local_state=True`` adds the rows of parameters per record,
            with their moments, to a state of gradients. They are as sensitive as the data, and no
            guarantee covers them. Such a state is for the curator only. Without them, a resumed run
            starts these parameters afresh.
        """
        return self._inference.state_dict(**options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. A state decides between looks and gradients.

        After a crash: open the accountant's journal, then load the last state. The journal's ledger
        stays. Releases after the state are paid for and lost, and the remaining steps share the
        remaining budget. Without a journal, load a state that was saved after the last release into
        a new accountant.

        Rows of parameters per record are loaded if the state has them, and stay otherwise.

        :raises ConfigurationError: it is not a state of this inference; nothing was changed.
        :raises PrivacyError: its ledger counts less than the accountant's, or more than that of its
            journal; nothing was changed.
        """
        has_looks = isinstance(state, dict) and "looks" in state
        inference = self._inference if has_looks else self._gradients
        inference.load_state_dict(state)
        self._inference = inference
        self._reason = self._reason or _SAVED

    @property
    def last_run(self) -> RunResult | None:
        """The result of the last :meth:`run`; None before the first."""
        return self._inference.last_run

    def _on_data(self, call: Callable[[Any], Any]) -> Any:
        """The call's result from the method that suits the model."""
        try:
            return call(self._inference)
        except NoEvidence as error:
            if self._inference is self._gradients or self._steps:
                raise
            self._reason = str(error).split(". ")[0].removesuffix(".")
        self._gradients._kept.take_over(self._inference._kept)
        self._inference = self._gradients
        return call(self._inference)

    def _read_from(self, name: str, args: tuple, kwargs: dict) -> Any:
        self._on_data(lambda each: each._look_at(args, kwargs))
        if name != "loss" or self._inference is self._gradients:
            return self._inference
        self._gradients._kept.take_over(self._inference._kept)
        return self._gradients

    def _noise_parts(self) -> Mapping[str, Tensor]:
        return self._inference._noise_parts()

    def __getattr__(self, name: str) -> Any:
        """Settings and results of the method that runs, and settings of gradients."""
        if name.startswith("__") or "_inference" not in vars(self):
            raise AttributeError(name)
        active = self._inference
        return getattr(active if name in dir(active) else self._gradients, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        for inference in {self._gradients, self._inference}:
            setattr(inference, name, value)

    def __repr__(self) -> str:
        return repr(self._inference)

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("A DPSVI holds the data: save its state_dict() instead.")
