"""DPSVI: stochastic variational inference with a private gradient.

Algorithm 1 of Jälkö, Dikmen & Honkela 2017 (DPVI, arXiv 1610.08749), for any Pyro model with a plate of individuals.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import ELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.optim import PyroOptim
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp.accounting import PrivacyAccountant, SubsampledGaussian
from pyro_dp.checks import build_record_term
from pyro_dp.coordinates import LatentCoordinates, ParameterCoordinates
from pyro_dp.errors import ConfigurationError, ModelError, PrivacyBudgetExceeded, PrivacyError
from pyro_dp.mechanisms import AdaptiveClip, Block, ClippedSum, release
from pyro_dp.outside import Particle, draw_particle
from pyro_dp.plates import find_plate
from pyro_dp.randomness import Randomness, private_rng
from pyro_dp.records import Records
from pyro_dp.sampling import RecordSampler
from pyro_dp.settings import require_choice, require_count, require_number, require_release

_LOSSES = (Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO)
_COORDINATES = {"latents": LatentCoordinates, "parameters": ParameterCoordinates}


class DPSVI:
    """Differentially private ``pyro.infer.SVI``: the same model, guide, optimizer and loss, one accountant.

    Each step samples records, clips what each of them adds to the gradient to norm C, adds noise N(0, (sigma C)^2 I) to
    the sum, divides by the public sample rate and hands the gradient to the optimizer. Prior, entropy and every other
    term outside the private plate carry no data and enter exactly.

    **Guarantee.** The sequence of parameters (and of private losses) is (epsilon, delta)-differentially private for one
    element of the private plate, with epsilon = ``accountant.get_epsilon()`` under the accountant's neighbouring
    relation, for finite data.

    **Not protected.** The number N of records, the sample rate and all other settings; arguments without a row per
    record; data that the model captures by closure; values that parameters or optimizer had before; the choice of
    model and settings, if it was made by looking at the data; running times; the texts of errors raised by the
    structural checks, which are for the curator.

    :param model: Pyro model; the records are the elements of one ``pyro.plate`` that holds all observations.
    :param guide: Pyro guide: any reparameterised autoguide or a hand-written one. It may have latents inside the
        plate if it computes their parameters from the record (amortisation).
    :param optim: a ``pyro.optim`` optimizer.
    :param loss: ``Trace_ELBO``, ``TraceMeanField_ELBO`` or ``TraceEnum_ELBO``, with one or several particles.
    :param accountant: keeps the ledger and the budget; may be shared with other inferences.
    :param num_steps: number of steps of :meth:`run`; with ``noise_multiplier=None`` also the most steps there can be.
    :param noise_multiplier: standard deviation sigma of the noise in units of C. ``None`` takes the smallest that fits
        what remains of the accountant's budget when the inference starts; 0 is a non-private reference run.
    :param max_grad_norm: C, the norm to which one record's part of the release is clipped, or an
        :class:`AdaptiveClip`. ``math.inf`` needs ``noise_multiplier=0``.
    :param plate: name of the private plate; found if exactly one plate holds observations.
    :param sample_rate: expected fraction of the records in a step, in (0, 1]. ``None`` takes subsample_size / size
        from the plate.
    :param sampling: "poisson", "fixed" (uniform subsets of floor(rate N), replace-one only) or "full".
    :param privatize: "latents" releases the gradient with respect to the global latents in unconstrained coordinates
        (and to the parameters used inside the plate), and pulls it back through the guide; the noise has the dimension
        of the latents, whatever the guide. It contains the aligned gradients of DPVIm (Jälkö et al. 2022, arXiv
        2210.15961). "parameters" releases the gradient with respect to all parameters (the paper's Algorithm 1).
    :param microbatch_size: at most so many per-record gradients are held at a time; the result is the same.
    :param slice_data: the model is written for whole tensors (``with pyro.plate("data", len(x))``) and is shown rows of
        them; otherwise it indexes its arguments with the plate's indices.
    :param jit: "none"; nothing else yet.
    :param loss_clip: L > 0 releases the loss as well: each record's is clipped to [-L, L] (nats) and joins the release
        as a further block.
    :param loss_share: part of the privacy cost (of sigma^-2) that the loss takes from the gradient: its noise has
        standard deviation sigma L / sqrt(loss_share), the gradient's grows by 1 / sqrt(1 - loss_share).
    :param generator: a ``torch.Generator`` or a seed, for a run that can be repeated. No guarantee against anyone who
        can guess the seed; the ledger says so.
    :param secure: ``False``; nothing else yet.
    :raises ConfigurationError: a setting is out of range or does not fit the others.
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
        jit: str = "none",
        loss_clip: float | None = None,
        loss_share: float = 0.05,
        generator: torch.Generator | int | None = None,
        secure: bool = False,
    ):
        self.model, self.guide, self.optim, self.loss = model, guide, optim, loss
        self.accountant = accountant
        self.num_steps = num_steps
        self.max_grad_norm = max_grad_norm
        self.plate = plate
        self.sample_rate = sample_rate
        self.sampling = sampling
        self.privatize = privatize
        self.microbatch_size = microbatch_size
        self.slice_data = slice_data
        self.loss_clip = loss_clip
        self.loss_share = loss_share
        self._noise_multiplier = noise_multiplier
        self._calibrated = noise_multiplier is None
        self._validate(jit, secure)
        self._randomness = Randomness(generator)
        if self._randomness.seeded:
            accountant.note("Seeded generator: a repeatable run, not private against anyone who can guess the seed.")
        self._bound = max_grad_norm.initial if isinstance(max_grad_norm, AdaptiveClip) else float(max_grad_norm)
        self._steps = 0
        self._records: Records | None = None
        self._loaded: dict[str, Tensor] = {}

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One private gradient step on the full data.

        :returns: the private loss in nats if ``loss_clip`` is set, else nan.
        :raises ModelError: model, guide or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        """
        if self._calibrated and self._steps >= self.num_steps:
            raise PrivacyBudgetExceeded(
                f"The noise was calibrated for num_steps={self.num_steps}, and they are done: start a new DPSVI with "
                "what remains of the budget."
            )
        self._prepare(args, kwargs)
        event = SubsampledGaussian(self.noise_multiplier, self._sampler.sample_rate, self.sampling)
        position = self.accountant.num_releases
        particles = [self._draw_particle() for _ in range(self.loss.num_particles)]
        coordinates = _COORDINATES[self.privatize](particles, self._term.parameters, self._parameters)
        indices = self._sampler.draw(self._randomness.stream("sampling", position))
        clipped = self._clipped_sum(particles, coordinates, indices, self._randomness.stream("local", position))
        noise = self._randomness.stream("noise", position)
        released = release(clipped, accountant=self.accountant, event=event, noise=noise)
        gradient, *others = (block / event.sample_rate for block in released)
        self._steps += 1
        coordinates.set_gradients(gradient)
        self.optim(set(self._parameters.values()))
        for leaf in self._parameters.values():
            leaf.grad = None
        return self._private_loss(particles, others)

    def run(self, *args: Any, progress: bool = True, **kwargs: Any) -> list[float]:
        """The steps that are left of ``num_steps``, with a progress bar.

        :returns: what each step returned.
        :raises ConfigurationError: ``num_steps`` was not given, or all of them are done.
        """
        if self.num_steps is None:
            raise ConfigurationError("num_steps: run() needs it; pass it to DPSVI or call step() yourself.")
        if self._steps >= self.num_steps:
            raise ConfigurationError(f"num_steps={self.num_steps} are done: start a new DPSVI to go on.")
        losses = []
        with tqdm(total=self.num_steps, initial=self._steps, desc="DPSVI", disable=not progress) as bar:
            while self._steps < self.num_steps:
                losses.append(self.step(*args, **kwargs))
                if self.loss_clip is not None:
                    bar.set_postfix(private_loss=f"{losses[-1]:.4g}", refresh=False)
                bar.update()
        return losses

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """:raises PrivacyError: always; the loss on the data is not private."""
        raise PrivacyError(
            "evaluate_loss would release a number of the data without noise: set loss_clip for a private loss, or use "
            "pyro.infer.Trace_ELBO on data that need no protection."
        )

    @property
    def noise_multiplier(self) -> float:
        """sigma: noise standard deviation in units of C.

        :raises ConfigurationError: it is to be calibrated, and the sample rate is not known before the first step.
        """
        if self._noise_multiplier is None:
            rate = self.sample_rate if self.sampling == "poisson" else None
            if self._records is not None:
                rate = self._sampler.sample_rate
            elif self.sampling == "full":
                rate = 1.0
            if rate is None:
                raise ConfigurationError("noise_multiplier is calibrated in the first step, where N is known.")
            self._noise_multiplier = self.accountant.noise_multiplier(
                num_steps=self.num_steps - self._steps, sample_rate=rate, sampling=self.sampling
            )
        return self._noise_multiplier

    def state_dict(self) -> dict[str, Any]:
        """Unconstrained parameters, optimizer, step count and accountant; loads with ``weights_only=True``.

        All of it was released or is public. Random streams are not part of it: a resumed run draws fresh ones.
        """
        parameters = self._parameters if self._records is not None else self._loaded
        return {
            "version": 1,
            "parameters": {name: leaf.detach().clone() for name, leaf in parameters.items()},
            "optimizer": self.optim.get_state(),
            "steps": self._steps,
            "noise_multiplier": self._noise_multiplier,
            "max_grad_norm": self._bound,
            "accountant": self.accountant.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Parameters that do not exist yet are set in the first step.

        :raises ConfigurationError: it is not a state of this inference; nothing was changed.
        :raises PrivacyError: its ledger counts less than the accountant's; nothing was changed.
        """
        keys = ("parameters", "optimizer", "steps", "noise_multiplier", "max_grad_norm", "accountant")
        if not isinstance(state, dict) or state.get("version") != 1 or any(key not in state for key in keys):
            raise ConfigurationError("load_state_dict: not a state_dict() of DPSVI.")
        if not self._calibrated and state["noise_multiplier"] != self._noise_multiplier:
            raise ConfigurationError("noise_multiplier differs from that of the saved run.")
        store = pyro.get_param_store()
        for name, value in state["parameters"].items():
            if name in store and store[name].unconstrained().shape != value.shape:
                raise ConfigurationError(f"load_state_dict: parameter {name!r} has another shape than the saved one.")
        self.accountant.load_state_dict(state["accountant"])
        self._loaded = dict(state["parameters"])
        self._set_loaded_parameters()
        self.optim.set_state(state["optimizer"])
        self.optim.optim_objs.clear()  # the loaded state is read when an optimizer is made
        self._steps = state["steps"]
        self._noise_multiplier = state["noise_multiplier"]
        self._bound = state["max_grad_norm"]

    def _set_loaded_parameters(self) -> None:
        store = pyro.get_param_store()
        for name in [name for name in self._loaded if name in store]:
            with torch.no_grad():
                store[name].unconstrained().copy_(self._loaded.pop(name))

    def _validate(self, jit: str, secure: bool) -> None:
        for name in ("model", "guide"):
            if not callable(getattr(self, name)):
                raise ConfigurationError(f"{name} must be a Pyro {name}, a callable.")
        if not isinstance(self.optim, PyroOptim):
            raise ConfigurationError("optim must be a pyro.optim optimizer, e.g. pyro.optim.Adam({'lr': 0.01}).")
        if type(self.loss) not in _LOSSES:
            names = ", ".join(loss.__name__ for loss in _LOSSES)
            raise ConfigurationError(f"loss must be one of {names}, not {type(self.loss).__name__}.")
        if isinstance(self.max_grad_norm, AdaptiveClip):
            bound = self.max_grad_norm.initial
        elif self.max_grad_norm == math.inf:
            bound = math.inf
        else:
            bound = require_number("max_grad_norm", self.max_grad_norm, above=0.0, below=math.inf)
        require_release(
            self.accountant,
            sampling=self.sampling,
            sample_rate=self.sample_rate,
            noise_multiplier=self._noise_multiplier,
            num_steps=self.num_steps,
            bound=bound,
        )
        if self.plate is not None and not isinstance(self.plate, str):
            raise ConfigurationError("plate must be the name of a pyro.plate.")
        require_choice("privatize", self.privatize, ("latents", "parameters"))
        require_choice("jit", jit, ("none",))
        if secure:
            raise ConfigurationError("secure=True is not available yet.")
        if self.microbatch_size is not None:
            require_count("microbatch_size", self.microbatch_size)
        if self.loss_clip is not None:
            require_number("loss_clip", self.loss_clip, above=0.0, below=math.inf)
            require_number("loss_share", self.loss_share, above=0.0, below=1.0)
        if self._gradient_share <= 0:
            raise ConfigurationError("loss_share and AdaptiveClip.share leave nothing for the gradient: lower them.")

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        """Check what is new: other arguments, or a cleared parameter store."""
        store = pyro.get_param_store()
        known = self._records is not None and all(
            name in store and store[name].unconstrained() is leaf for name, leaf in self._parameters.items()
        )
        if known and self._records.same_as(args, kwargs):
            return
        before = set(store.keys()) - self._loaded.keys()
        plate = find_plate(self.model, args, kwargs, self.plate)
        records = Records(self.model, plate, args, kwargs, self.slice_data)
        term, parameters = build_record_term(self.loss, self.model, self.guide, records, privatize=self.privatize)
        declared = plate.subsample_size / plate.size
        rate = self.sample_rate or (1.0 if self.sampling == "full" else declared)
        sampler = RecordSampler(self.sampling, plate.size, rate)
        if self._steps == 0:
            self._note_earlier_values(before & parameters.keys())
        self._records, self._term, self._parameters, self._sampler = records, term, parameters, sampler
        self._set_loaded_parameters()

    def _note_earlier_values(self, names: set[str]) -> None:
        if names or self.optim.optim_objs:
            self.accountant.note(
                f"Values from before the first private step are not covered: {len(names)} parameters, "
                f"{'with' if self.optim.optim_objs else 'no'} optimizer state."
            )

    @property
    def _gradient_share(self) -> float:
        """What the other blocks leave of the privacy cost."""
        adaptive = self.max_grad_norm.share if isinstance(self.max_grad_norm, AdaptiveClip) else 0.0
        return 1.0 - adaptive - (self.loss_share if self.loss_clip is not None else 0.0)

    def _blocks(self, size: int) -> list[Block]:
        """The blocks of the joint release: gradient, loss, quantile bit."""
        blocks = [Block(size, self._bound, self._gradient_share)]
        if self.loss_clip is not None:
            blocks.append(Block(1, self.loss_clip, self.loss_share))
        if isinstance(self.max_grad_norm, AdaptiveClip):
            blocks.append(Block(1, 0.5, self.max_grad_norm.share))
        return blocks

    def _draw_particle(self) -> Particle:
        particle = draw_particle(self.loss, self.model, self.guide, self._records)
        if particle.parameters.keys() != self._parameters.keys():
            raise ModelError("The parameters of model and guide changed between steps.")
        return particle.restricted(self._term.latents)

    def _clipped_sum(
        self,
        particles: list[Particle],
        coordinates: LatentCoordinates | ParameterCoordinates,
        indices: Tensor,
        stream: np.random.Generator,
    ) -> ClippedSum:
        """Per-record gradients, clipped and summed, one microbatch after the other.

        :param stream: private, for the draws of the records' own latents.
        """
        records, term = self._records, self._term
        clipped = ClippedSum(self._blocks(coordinates.size), records.device)
        with private_rng(stream):
            tables = [term.draw_tables(len(indices), stream, records.device) for _ in particles]
            positions = torch.arange(len(indices))
            for batch in positions.split(self.microbatch_size or max(len(indices), 1)) if len(indices) else ():
                chosen = indices[batch]
                rows = records.rows(chosen)
                gradients = [
                    term.gradients(records, particle, chosen, rows, [draws[batch] for draws in table], stream)
                    for particle, table in zip(particles, tables, strict=True)
                ]
                values = [coordinates.per_record(gradients)]
                if self.loss_clip is not None:
                    values.append(torch.stack([g.losses for g in gradients]).mean(dim=0).unsqueeze(1))
                if isinstance(self.max_grad_norm, AdaptiveClip):
                    norm = torch.linalg.vector_norm(values[0], dim=1, keepdim=True, dtype=torch.float64)
                    values.append(torch.where(norm <= self._bound, 0.5, -0.5))
                clipped.add(*values)
        return clipped

    def _private_loss(self, particles: list[Particle], estimates: list[Tensor]) -> float:
        """Read the other blocks of the release: move the bound, return the loss."""
        if isinstance(self.max_grad_norm, AdaptiveClip):
            within = estimates.pop().item() / self._records.plate.size + 0.5
            self._bound = self.max_grad_norm.updated(self._bound, within)
        if self.loss_clip is None:
            return math.nan
        return estimates[0].item() + sum(particle.loss.item() for particle in particles) / len(particles)
