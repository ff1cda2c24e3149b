"""DPSGLD: private stochastic gradient Langevin dynamics.

Wang, Fienberg & Smola 2015 (arXiv 1502.07645), after Welling & Teh 2011. It takes any Pyro model
with a plate of individuals and global, continuous latents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation, init_to_median
from torch import Tensor

from pyro_dp import ConfigurationError, ModelError, PrivacyAccountant
from pyro_dp.infer.base import PrivateInference
from pyro_dp.infer.svi.eager_step import EagerStep, GradientStep
from pyro_dp.infer.svi.traced_step import step_from_graphs
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import whole_step
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Clip, Execution, Noise, Sampling
from pyro_dp.records.global_draw import Latent, latents_of
from pyro_dp.records.plate import OneRecord, no_sites, random_sites
from pyro_dp.records.record_term_builder import build_record_term
from pyro_dp.records.records import Prepared, Records
from pyro_dp.records.sandbox import guarded
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_scale


@dataclass(frozen=True, eq=False)
class PreparedChain(Prepared):
    """
    :param latents: the global ones, as parts of the chain's position.
    :param leaf: the position, unconstrained, (d,).
    :param seen: coordinates on which the records' terms depend, (d,).
    :param step: computes releases and gradients.
    """

    latents: tuple[Latent, ...]
    leaf: Tensor
    seen: Tensor
    step: GradientStep


class DPSGLD(PrivateInference[PreparedChain]):
    """Differentially private stochastic gradient Langevin dynamics: samples of the posterior.

    Each step releases the clipped and noisy sum of the sampled records' gradients. They are the
    gradients of their log likelihoods with respect to the global latents u, unconstrained, as in
    ``DPSVI``. The step divides the sum by the public sample rate q, and adds
    the exact gradient of the log prior (the transforms' Jacobians included). It moves the chain by

        u <- u + (h/2) (prior gradient + sum / q) + N(0, max(0, h - v)),

    h the step size and v = (h sigma C / (2 q))^2. The privacy noise in the step has variance v for
    each coordinate that records see. Langevin dynamics asks for variance h: only the rest is drawn.

    **Temperature.** The noise alone is too large if v > h. The chain then samples at temperature
    v / h, which multiplies a Gaussian posterior's variances. :meth:`step` returns max(1, v / h). It
    is 1 for h <= (2 q / (sigma C))^2. Smaller steps are true to the posterior, and slower.

    **Guarantee.** The whole chain, warm-up included, is (epsilon, delta)-differentially private for
    one element of the private plate. Epsilon is ``accountant.get_epsilon()`` under the accountant's
    neighbouring relation. Noise that is drawn in addition counts for nothing in it.

    **Bias.** Langevin dynamics without rejection has a bias of the order of the step size. Samples
    of records add to it, as their variance is not subtracted from the noise, and so does clipping.

    :param model: Pyro model; the records are the elements of a ``pyro.plate`` that holds all
        observations. Its latents are continuous and outside of that plate; it has no parameters.
    :param accountant: as for ``DPSVI``, as are num_steps, noise, sampling and execution.
    :param clip: C, the norm to which one record's gradient is clipped.
    :param step_size: h > 0, in squared units of u.
    :param warmup_steps: so many steps at the beginning are no samples. ``None``: half of all.
    :param init_loc_fn: the chain's first point, by site, as for an autoguide.
    :raises ConfigurationError: a setting is out of range or does not fit the others.
    """

    def __init__(
        self,
        model: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int,
        step_size: float,
        warmup_steps: int | None = None,
        init_loc_fn: Callable = init_to_median,
        clip: Clip | float = 1.0,
        noise: Noise | float | None = None,
        sampling: Sampling | float | None = None,
        execution: Execution | None = None,
    ):
        self.step_size = require_scale("step_size", step_size)
        bound = Clip.read(clip).only("DPSGLD", "bound").bound
        self.clip = require_scale("Clip.bound", bound, infinite=True)
        if warmup_steps is None:
            warmup_steps = require_count("num_steps", num_steps) // 2
        self.warmup_steps = require_count("warmup_steps", warmup_steps, least=0)
        self.init_loc_fn = init_loc_fn
        super().__init__(
            model,
            no_sites,
            accountant=accountant,
            num_steps=num_steps,
            bound=self.clip,
            noise=noise,
            sampling=sampling,
            execution=Execution.read(execution).only(
                "DPSGLD", "microbatch_size", "jit", "slice_data"
            ),
        )
        self._samples: dict[str, list[Tensor]] = {}

    _measure = "temperature"

    @whole_step
    @torch.enable_grad()
    def step(self, *args: Any, **kwargs: Any) -> float:
        """Make one private step of the chain, on the full data.

        :returns: the temperature: 1 if the privacy noise was not more than Langevin dynamics needs.
        :raises ModelError: model or data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        :raises ConfigurationError: the step size was too large, and the chain left the numbers.
        """
        # A chain has a position of its own, which is no parameter of the user's.
        with pyro.get_param_store().scope():
            self._reservation.require_step()
            prepared = self._look_at(args, kwargs)
            position = self.accountant.position
            draws = prepared.step.draw()
            blocks = [Block(prepared.step.size(draws), self.clip)]
            clipped = self._releases.sum_type(blocks, prepared.records.device)
            stream = partial(self._releases.randomness.stream, "local", position)
            batch = prepared.draw(self._releases, position)
            prepared.step.add(clipped, draws, batch, stream)
            (released,) = self._release(clipped, prepared.sampler)
            gradients = prepared.step.gradients(draws, released)
        (gradient,) = gradients.parameters.values()
        return self._move(prepared, gradient)

    def get_samples(self) -> dict[str, Tensor]:
        """The samples after the warm-up, for ``Predictive(model, posterior_samples=...)``.

        :returns: (number of samples, ...) for each latent site, in its own space.
        """
        return {name: torch.stack(values) for name, values in self._samples.items()}

    def _build(self, records: Records, sampler: RecordSampler) -> PreparedChain:
        _require_suitable(self.model, records)
        if self.guide is no_sites:  # the first time
            # The guide is a point of unconstrained space, and its density is the Jacobian's there.
            # So the negative ELBO is the negative log posterior density, up to a constant.
            outside = poutine.block(self.model, hide_fn=records.plate.holds)
            self.guide = AutoLaplaceApproximation(outside, init_loc_fn=self.init_loc_fn)
        loss, size = Trace_ELBO(), self.execution.microbatch_size
        term, parameters = build_record_term(
            loss, self.model, self.guide, records, microbatch_size=size
        )
        latents = _latents(self.model, self.guide, records)
        (leaf,) = parameters.values()
        seen = torch.zeros_like(leaf, dtype=torch.bool)
        for latent in latents:
            seen[latent.start : latent.stop] = latent.name in term.latents
        own = (loss, self.model, self.guide, term, parameters)
        eager = EagerStep(*own, privatize="latents", microbatch_size=size)
        graphs = partial(step_from_graphs, eager, self._releases.sum_type, sampler.usual_size)
        step = self._kept.traced(graphs, term, self.model, self.guide) or eager
        return PreparedChain(records, sampler, latents, leaf, seen, step)

    @property
    def _others(self) -> tuple[Any, ...]:
        return (self.init_loc_fn,)

    @torch.no_grad()
    def _move(self, prepared: PreparedChain, gradient: Tensor) -> float:
        """The Langevin step, from the gradient of the negative log density; the temperature."""
        leaf, private = prepared.leaf, 0.0
        if self.noise_multiplier > 0:
            noise = self.noise_multiplier * self.clip / prepared.sampler.sample_rate
            private = (self.step_size * noise / 2) ** 2
        # Records do not see the hyperparameters of a hierarchy: these moved without noise.
        missing = self.step_size - min(private, self.step_size) * prepared.seen.double()
        drawn = missing.sqrt().to(leaf) * torch.randn_like(leaf)
        position = leaf - self.step_size / 2 * gradient + drawn
        sites = {x.name: x.transform(x.part(position)) for x in prepared.latents}
        if not all(value.isfinite().all() for value in (position, *sites.values())):
            raise ConfigurationError(
                "step_size is too large: the chain left the finite numbers, and stays where it "
                "was. The release was spent."
            )
        leaf.data = position
        if self._steps > self.warmup_steps:
            for name, value in sites.items():
                self._samples.setdefault(name, []).append(value)
        return max(1.0, private / self.step_size)


def _require_suitable(model: Callable, records: Records) -> None:
    """
    :raises ModelError: there is no gradient of the posterior density; names the site or parameter.
    """
    trace = _run(model, records)
    for name in trace.param_nodes:
        raise ModelError(f"DPSGLD learns no parameter {name!r}: make it a latent (pyro.sample).")
    for name, site in random_sites(trace).items():
        if site["is_observed"]:
            continue
        if records.plate.holds(site) or site["fn"].support.is_discrete:
            raise ModelError(
                f"Latent site {name!r} is discrete, or has a value for each record: DPSGLD samples "
                "continuous latents outside the private plate. DPSVI takes others, too."
            )


def _latents(
    model: Callable, guide: AutoLaplaceApproximation, records: Records
) -> tuple[Latent, ...]:
    """The latents in the order of the guide's flat vector."""
    drawn = _run(guide, records)
    outside = poutine.block(model, hide_fn=records.plate.holds)
    prior = _run(poutine.replay(outside, trace=drawn), records)
    values = {n: s for n, s in random_sites(drawn).items() if not s["infer"].get("is_auxiliary")}
    return tuple(latents_of(values, random_sites(prior), automatic=True))


@torch.enable_grad()
def _run(function: Callable, records: Records) -> poutine.Trace:
    """On placeholders, which are public."""
    args, kwargs = records.arguments(records.placeholder())
    index = torch.zeros(1, dtype=torch.long, device=records.device)
    with (
        forked_rng(),
        OneRecord(records.plate, index),
        guarded("Running the model on placeholder data", public=True),
    ):
        return poutine.trace(function).get_trace(*args, **kwargs)
