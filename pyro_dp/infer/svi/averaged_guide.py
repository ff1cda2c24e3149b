"""The guide after gradient steps: averages of its parameters, and its posterior."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.infer.posterior.explanation import SAMPLING
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide, NoGaussian
from pyro_dp.infer.posterior.posterior import CHECK, NOISE, STEPS, Posterior, Status
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.linalg import dense
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_tensors

_PARTS = 4  # parts of the last half of a run
_FEWEST = 10  # iterates in a part
_DAMAGED = "load_state_dict: averages are damaged."
NO_STEP = (
    "There is no posterior before the first step. (After a load_state_dict a step must find the "
    "latents first; the run's result is in the guide's parameters.)"
)
_NO_GAUSSIAN = (
    "The guide ({kind}) is not one Gaussian of the global latents, so it has no posterior(). Its "
    "result is {result}. For a posterior() fit AutoMultivariateNormal(model) instead."
)
_RESULTS = {AutoDelta: "guide.median()", AutoLaplaceApproximation: "guide()"}
_DRAWS = "svi.predictive().posterior_samples"
_MOST_MOVED, _MOST_LEFT = 0.7, 1.0  # standard deviations
_MOST_GROWTH = 0.3  # change in a scale's logarithm
_MOVED = "the means moved by {:.1f} sd between the last two quarters of the steps"
_LEFT = "the mean gradient of the last half of the steps still led {:.1f} sd further"
_GROWING = "the gradients may still change the widths by {:.0%}"
WITHOUT_NOISE = Status(
    CHECK, "gradient steps found the intervals, which do not include the privacy noise", STEPS
)
_NOT_FINITE = (
    "The guide's numbers are infinite, or too large or too small for a covariance: use an "
    "optimizer with smaller steps, or none."
)


@dataclass(eq=False)
class IterateAverages:
    """Sums of the unconstrained parameters over the last four eighths of a run. They are public.

    Let a, b, c, d be a parameter's means over the eighths. Compare the squared distance of the
    quarters' means, (a + b) / 2 and (c + d) / 2, with |a - b|^2 + |c - d|^2. If the parameter has
    converged, the distance is about a quarter of this sum. For a random walk it equals the sum. On
    a straight line it is twice the sum, and the last iterate is better than any mean.

    :param num_steps: T.
    :param counts: iterates in each eighth so far.
    :param sums: each parameter's sums over the eighths, (4, *shape).
    :param gradients: each parameter's sum of gradients in the last half of the run.
    :param variance: the sum of these gradients' noise variances; NaN if it is unknown.
    """

    num_steps: int
    counts: list[int] = field(default_factory=lambda: [0] * _PARTS)
    sums: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    variance: float = 0.0

    @torch.no_grad()
    def add(
        self,
        step: int,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        noise: float,
    ) -> None:
        """Add the iterate after a step, which is counted from 1.

        :param gradients: gradients of the negative ELBO in this step.
        :param noise: variance of the noise in a location's gradient.
        """
        part = 2 * _PARTS * (step - 1) // self.num_steps - _PARTS
        if not 0 <= part < _PARTS:
            return
        self.counts[part] += 1
        self.variance += noise
        for name, leaf in parameters.items():
            if name not in self.sums:
                self.sums[name] = leaf.new_zeros(_PARTS, *leaf.shape)
                self.gradients[name] = torch.zeros_like(leaf)
            self.sums[name][part] += leaf
            if (gradient := gradients[name]) is not None:
                self.gradients[name] += gradient

    @property
    def complete(self) -> bool:
        """Whether each eighth has enough iterates, and the variance of the noise is available."""
        return min(self.counts) >= _FEWEST and not math.isnan(self.variance)

    def variances(self, covariance: Tensor, sample_rate: float) -> dict[str, Tensor]:
        """Covariances (d, d) of the mean over the last half, by privacy noise and by sampling.

        Let S be the posterior covariance. Near the mean m, the gradient at x is S^-1 (m - x) plus
        noise of variance s^2. Then the mean of n iterates has covariance S s^2 S / n for any step
        sizes (Polyak & Juditsky 1992). Sampling at rate q adds variance (1 - q) / q S^-1 to the
        gradient (information identity).

        :param covariance: the guide's covariance, (d, d).
        """
        count = sum(self.counts)
        excess = (1 - sample_rate) / sample_rate
        return {
            NOISE: self.gradient_sd**2 * covariance @ covariance,
            SAMPLING: excess / count * covariance,
        }

    @property
    def gradient_sd(self) -> float:
        """Standard deviation of the noise in the mean gradient of a location."""
        return math.sqrt(self.variance) / sum(self.counts)

    def gradient(self, names: Sequence[str]) -> Tensor:
        """Mean gradient of these parameters over the last half, (d,)."""
        found = [self.gradients[name].flatten().double() for name in names]
        return torch.cat(found) / sum(self.counts)

    def moved(self, names: Sequence[str]) -> Tensor:
        """Change of these parameters' means from the third to the fourth quarter, (d,)."""
        found = []
        for name in names:
            a, b, c, d = self._eighths(name).reshape(_PARTS, -1).double()
            found.append((c + d - a - b) / 2)
        return torch.cat(found)

    def _eighths(self, name: str) -> Tensor:
        """Means over the eighths, (4, *shape)."""
        sums = self.sums[name]
        return sums / torch.tensor(self.counts).to(sums).view(-1, *[1] * (sums.dim() - 1))

    @torch.no_grad()
    def agreed(self) -> dict[str, Tensor]:
        """Means over the last half of the parameters that have converged."""
        if min(self.counts) == 0:
            return {}
        found = {}
        for name, sums in self.sums.items():
            a, b, c, d = self._eighths(name)
            apart = ((a + b - c - d) / 2).square().sum()
            within = (a - b).square().sum() + (c - d).square().sum()
            if 2 * apart <= within:
                found[name] = sums.sum(dim=0) / sum(self.counts)
        return found

    @torch.no_grad()
    def conclude(self, parameters: Mapping[str, Tensor]) -> str:
        """Set converged parameters to their means. Returns a text on what the guide holds."""
        agreed = self.agreed()
        for name, value in agreed.items():
            parameters[name].copy_(value)
        if not agreed:
            return "the last iterate"
        if len(agreed) == len(parameters):
            return "the mean of the last half of the iterates"
        return (
            f"the mean of the last half of the iterates for {len(agreed)} of {len(parameters)} "
            "parameters, and the last iterate of the others, which had not converged"
        )

    def state(self) -> dict[str, Any]:
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, vars(self))

    @staticmethod
    def resumed(state: Any) -> "IterateAverages | None":
        """From :meth:`state`, or None. A state of version 0.2 has no gradients.

        :raises ConfigurationError: the state is damaged.
        """
        if state is None:
            return None
        names = IterateAverages.__dataclass_fields__.keys()
        if not isinstance(state, Mapping) or state.keys() | {"gradients", "variance"} != names:
            raise ConfigurationError(_DAMAGED)
        sums, counts = require_tensors("averages", state["sums"]), state["counts"]
        parts = [counts if isinstance(counts, list) else (), *sums.values()]
        if any(getattr(each, "ndim", 1) == 0 or len(each) != _PARTS for each in parts):
            raise ConfigurationError(_DAMAGED)
        zeros = {name: torch.zeros_like(each[0]) for name, each in sums.items()}
        gradients = require_tensors("averages", state.get("gradients", zeros))
        variance = state.get("variance", math.nan)
        shapes = [{name: each.shape for name, each in x.items()} for x in (gradients, zeros)]
        if shapes[0] != shapes[1] or not isinstance(variance, float):
            raise ConfigurationError(_DAMAGED)
        return IterateAverages(
            require_count("averages", state["num_steps"]),
            [require_count("averages", count, least=0) for count in counts],
            {name: each.clone() for name, each in sums.items()},
            {name: each.clone() for name, each in gradients.items()},
            variance,
        )


def gaussian_of(model: Callable, guide: Callable, records: Records) -> GaussianGuide:
    """The guide's global latents as one Gaussian.

    :raises ConfigurationError: the guide is not Gaussian.
    """
    try:
        with forked_rng():
            return GaussianGuide(model, guide, records, globally=True)
    except NoGaussian as reason:
        raise ConfigurationError(f"There is no posterior(). {reason}") from None
    except ModelError:
        kind, result = type(guide).__name__, _RESULTS.get(type(guide), _DRAWS)
        raise ConfigurationError(_NO_GAUSSIAN.format(kind=kind, result=result)) from None


def posterior_of(
    gaussian: GaussianGuide,
    averages: IterateAverages | None,
    sample_rate: float,
    judged: Callable[[Status], Status],
) -> Posterior:
    """The guide's Gaussian, which includes the noise of its mean if there are averages.

    :param judged: adds clipping to a status.
    :raises ConfigurationError: the covariance is not finite.
    """
    mean, covariance = gaussian.read()
    plain, status = dense(covariance), WITHOUT_NOISE
    aware = plain
    if averages is not None and averages.complete:
        aware = sum(averages.variances(plain, sample_rate).values(), plain)
        status = _settled(averages, gaussian, plain, aware.diagonal().sqrt())
    try:
        return Posterior(gaussian.latents, mean, aware, plain=plain, status=judged(status))
    except ArithmeticError:
        raise ConfigurationError(_NOT_FINITE) from None


def _settled(
    averages: IterateAverages, gaussian: GaussianGuide, covariance: Tensor, sds: Tensor
) -> Status:
    """Whether the steps have converged, by three tests.

    * The means of the last two quarters are close.
    * The Newton step from the mean gradient is short.
    * The mean gradient, plus one standard deviation of its noise, hardly changes the logarithm of
      all scales. (The loss has second derivative 2 per coordinate by this logarithm.)

    :param sds: standard deviations of the intervals, (d,).
    """
    names, growth = gaussian.locations, gaussian.growth()
    newton = covariance @ averages.gradient(names).to(covariance)
    directions = torch.cat([each.flatten() for each in growth.values()])
    slope = (averages.gradient(list(growth)).to(directions) @ directions).abs()
    slope = slope + averages.gradient_sd * covariance.trace().sqrt()
    for distance, most, text in (
        (_root_mean_square(averages.moved(names).to(sds) / sds), _MOST_MOVED, _MOVED),
        (_root_mean_square(newton / sds), _MOST_LEFT, _LEFT),
        (slope.item() / (2 * len(sds)), _MOST_GROWTH, _GROWING),
    ):
        if not distance <= most:
            return Status(CHECK, text.format(distance), STEPS)
    return Status()


def _root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
