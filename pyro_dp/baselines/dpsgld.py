"""DPSGLD: private stochastic gradient Langevin dynamics.

Wang, Fienberg & Smola 2015 (Privacy for Free, arXiv 1502.07645), after Welling & Teh 2011, for any
Pyro model with a plate of individuals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.baselines.langevin_target import global_latents, point_guide, suitable_loss
from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.svi.eager_step import EagerStep, GradientStep
from pyro_dp.infer.svi.records_traced_step import step_from_graphs
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.latents import Latent
from pyro_dp.records.messengers import no_sites
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Prepared, Records
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.validation import require_count, require_scale, require_tensors, value_at

_STATE = ("position", "samples", "bound")
_OTHER_LATENTS = "The saved state is of a model with other latents."


@dataclass(frozen=True, eq=False)
class PreparedChain(Prepared):
    """
    :param latents: the global ones, as parts of the chain's position.
    :param leaf: the position, unconstrained, (d,).
    :param seen: of which coordinates records' terms are a function, (d,).
    :param step: computes releases and gradients.
    """

    latents: tuple[Latent, ...]
    leaf: Tensor
    seen: Tensor
    step: GradientStep


class DPSGLD(PrivateInference[PreparedChain]):
    """Differentially private stochastic gradient Langevin dynamics: samples of the posterior.

    Each step releases what :class:`DPSVI` releases with ``privatize="latents"``: the clipped and
    noisy sum over sampled records of the gradient of their log likelihoods with respect to the
    global latents u in unconstrained coordinates. Divided by the public sample rate q, with the
    exact gradient of the log prior (the transforms' Jacobians included), it moves the chain by

        u <- u + (h/2) (prior gradient + sum / q) + N(0, max(0, h - v)),

    h the step size and v = (h sigma C / (2 q))^2. The privacy noise in the step has variance v for
    each coordinate that records see; it is part of the variance h that Langevin dynamics asks for,
    and only the rest is drawn.

    **Temperature.** Where v > h nothing more is drawn, but the noise is too large by itself: the
    chain then samples at temperature v / h > 1, which spreads a Gaussian posterior's variances by
    that factor. :meth:`step` returns max(1, v / h). It is 1 for h <= (2 q / (sigma C))^2: smaller
    steps make the samples true to the posterior, and need more steps to get there.

    **Guarantee.** The whole chain, warm-up included, is (epsilon, delta)-differentially private for
    one element of the private plate, with epsilon = ``accountant.get_epsilon()`` under the
    accountant's neighbouring relation, for finite data. Noise that is drawn in addition counts for
    nothing in it.

    **Not protected.** As for :class:`DPSVI`.

    **Exactness.** As for any Langevin dynamics without rejection: a bias of the order of the step
    size, more of it with minibatches, whose variance is not subtracted from the noise; and the bias
    of clipping.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Its global latents are continuous; discrete latents of a record are summed out
        where they are marked with ``infer={"enumerate": "parallel"}``; it can have no other latents
        inside the plate, and no parameters.
    :param accountant: as for :class:`DPSVI`, as are plate, sample_rate, sampling, microbatch_size,
        slice_data, jit, generator and secure.
    :param num_steps: number of steps of :meth:`run`.
    :param step_size: h > 0, in squared units of u; or a function of the step number (from 0) that
        gives it, as Welling & Teh's ``lambda t: a * (b + t) ** -gamma``. All samples count equally
        in :meth:`get_samples`, whatever their step size.
    :param warmup_steps: so many steps at the beginning are no samples. ``None``: half of all.
    :param noise_multiplier: standard deviation sigma of the noise in units of C. ``None``: the
        smallest that fits what remains of the budget at the first step. 0: plain, not private.
    :param max_grad_norm: C, to which the norm of a record's gradient is clipped. ``math.inf`` needs
        ``noise_multiplier=0``.
    :param init_loc_fn: where the chain starts, by site, as for an autoguide: see
        ``pyro.infer.autoguide.initialization``.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro_dp import PrivacyAccountant
    >>> from pyro_dp.baselines import DPSGLD
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> chain = DPSGLD(model, accountant=PrivacyAccountant(epsilon=4.0), num_steps=50,
    ...                step_size=1e-4, sample_rate=0.1, max_grad_norm=2.0, generator=0)
    >>> result = chain.run(torch.linspace(-0.5, 1.5, 1000), progress=False)
    >>> chain.get_samples()["mean"].shape
    torch.Size([25])
    """

    def __init__(
        self,
        model: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        step_size: float | Callable[[int], float],
        warmup_steps: int | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        init_loc_fn: Callable = init_to_median,
        plate: str | None = None,
        sample_rate: float | None = None,
        sampling: str = "poisson",
        microbatch_size: int | None = None,
        slice_data: bool | str = "auto",
        jit: str = "trace",
        generator: torch.Generator | int | None = None,
        secure: bool = False,
    ):
        require_scale("max_grad_norm", max_grad_norm, infinite=True)
        require_count("num_steps", num_steps)
        if not callable(step_size):
            require_scale("step_size", step_size)
        if warmup_steps is None:
            warmup_steps = num_steps // 2
        if require_count("warmup_steps", warmup_steps, least=0) >= num_steps:
            raise ConfigurationError("warmup_steps must be fewer than num_steps.")
        if not callable(init_loc_fn):
            raise ConfigurationError("init_loc_fn must be a function of a Pyro site.")
        self.step_size = step_size
        self.warmup_steps = warmup_steps
        self.init_loc_fn = init_loc_fn
        settings = ReleaseSettings.among(locals(), bound=max_grad_norm)
        super().__init__(model, no_sites, settings, plate=plate, slice_data=slice_data, jit=jit)
        self._position: Tensor | None = None
        self._samples: dict[str, list[Tensor]] = {}

    _measure = "temperature"

    @whole_step
    @torch.enable_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One private step of the chain, given the full data.

        :returns: the temperature: 1 if the privacy noise was not more than Langevin dynamics needs.
        :raises ModelError: model or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: the step size was too large, and the chain left the numbers.
        """
        # A chain has a position of its own, which is no parameter of the user's.
        with pyro.get_param_store().scope():
            prepared = self._prepare(args, kwargs)
            step_size = self._current_step_size()
            position = self.accountant.position
            draws = prepared.step.draw()
            blocks = [Block(prepared.step.size(draws), self._bound)]
            clipped = self._sum_type(blocks, prepared.records.device)
            stream = partial(self._randomness.stream, "local", position)
            prepared.step.add(clipped, draws, self._draw_records(prepared, position), stream)
            (released,) = self._release(clipped, prepared.sampler)
            gradients = prepared.step.gradients(draws, released)
        (gradient,) = gradients.parameters.values()
        assert gradient is not None  # of the point that is the chain's position
        return self._move(prepared, gradient, step_size)

    def get_samples(self) -> dict[str, Tensor]:
        """The samples after the warm-up, for ``Predictive(model, posterior_samples=...)``.

        :returns: (number of samples, ...) for each global latent site, in its own space.
        :raises ConfigurationError: there are none yet.
        """
        if not self._samples:
            raise ConfigurationError("There are no samples before the warm-up's end.")
        return {name: torch.stack(values) for name, values in self._samples.items()}

    def state_dict(self) -> dict[str, Any]:
        """Position, samples, step count and accountant; loads with ``weights_only=True``.

        All of it was released or is public. Random streams are not part of it.

        :raises ConfigurationError: no step was taken yet.
        """
        if self._position is None:
            raise ConfigurationError("There is no state before the first step.")
        return self._state() | {
            "position": self._position.clone(),
            "samples": {name: torch.stack(values) for name, values in self._samples.items()},
            "bound": self._bound,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as :meth:`DPSVI.load_state_dict`, and raises the same."""
        self._require_state(state, _STATE)
        if require_scale("bound", state["bound"], infinite=True) != self._bound:
            raise ConfigurationError("max_grad_norm differs from that of the saved run.")
        require_tensors("load_state_dict: position", {"position": state["position"]})
        require_tensors("load_state_dict: samples", state["samples"])
        known = self._prepared
        if known and state["position"].shape != known.leaf.shape:
            raise ConfigurationError(_OTHER_LATENTS)
        self._load_state(state)
        self._position = state["position"].clone()
        if known:
            known.leaf.data = self._position.clone()
        self._samples = {name: list(values) for name, values in state["samples"].items()}

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedChain:
        loss = suitable_loss(self.model, records)
        guide = self.guide
        if guide is no_sites:  # before the private plate was known
            guide = point_guide(self.model, records, self.init_loc_fn)
        term, parameters = build_record_term(
            loss, self.model, guide, records, microbatch_size=self.microbatch_size
        )
        latents = global_latents(self.model, guide, records)
        (leaf,) = parameters.values()
        if self._position is not None and self._position.shape != leaf.shape:
            raise ModelError(_OTHER_LATENTS)
        self.guide = guide
        if self._position is not None:
            leaf.data = self._position.to(leaf, copy=True)
        seen = torch.zeros_like(leaf, dtype=torch.bool)
        for latent in latents:
            seen[latent.start : latent.stop] = latent.name in term.latents
        eager = EagerStep(
            loss,
            self.model,
            guide,
            term,
            parameters,
            privatize="latents",
            microbatch_size=self.microbatch_size,
        )
        step = self._traced(
            partial(step_from_graphs, eager, self._sum_type, sampler.usual_size), term
        )
        return PreparedChain(records, sampler, latents, leaf, seen, step or eager)

    @property
    def _others(self) -> tuple[Any, ...]:
        return self.init_loc_fn, self.step_size

    def _current_step_size(self) -> float:
        if not callable(self.step_size):
            return self.step_size
        size = value_at("step_size", self.step_size, self._steps)
        return require_scale("step_size(step)", size)

    @torch.no_grad()
    def _move(self, prepared: PreparedChain, gradient: Tensor, step_size: float) -> float:
        """The Langevin step, from the gradient of the negative log density; the temperature."""
        leaf, private = prepared.leaf, 0.0
        if self.noise_multiplier > 0:
            noise = self.noise_multiplier * self._bound / prepared.sampler.sample_rate
            private = (step_size * noise / 2) ** 2
        # What records do not see, such as the hyperparameters of a hierarchy, was released exactly.
        missing = step_size - min(private, step_size) * prepared.seen.double()
        drawn = missing.sqrt().to(leaf) * torch.randn_like(leaf)
        position = leaf - step_size / 2 * gradient + drawn
        sites = {x.name: x.transform(x.part(position)) for x in prepared.latents}
        if not all(value.isfinite().all() for value in (position, *sites.values())):
            raise ConfigurationError(
                "step_size is too large: the chain left the finite numbers, and stays where it "
                "was. The release was spent."
            )
        leaf.data = position
        self._position = position.clone()
        if self._steps > self.warmup_steps:
            for name, value in sites.items():
                self._samples.setdefault(name, []).append(value)
        return max(1.0, private / step_size)
