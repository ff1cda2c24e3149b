"""The guide after gradient steps: means of its parameters over the last half, and a posterior."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation
from torch import Tensor

from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.summary import Status
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.torch_state import forked_rng
from pyro_dp.utils.validation import require_count, require_tensors

_PARTS = 4  # parts of the last half
_DAMAGED = "load_state_dict: averages are damaged."
_NO_STEP = (
    "There is no posterior before the first step. (After a load_state_dict a step must find the "
    "latents first; the run's result is in the guide's parameters.)"
)
_NO_GAUSSIAN = (
    "The guide ({kind}) is not one Gaussian of all latents, so it has no posterior(). Its result "
    "is {result}. For a posterior() fit AutoMultivariateNormal(model) instead."
)
_RESULTS = {AutoDelta: "guide.median()", AutoLaplaceApproximation: "guide()"}
_DRAWS = "svi.predictive().posterior_samples"
_NOT_FINITE = (
    "The guide's numbers are infinite, or too large or too small for a covariance: use an "
    "optimizer with smaller steps, or none."
)


@dataclass(eq=False)
class IterateAverages:
    """Sums of the unconstrained parameters over the last four eighths of a run: public.

    Let a, b, c, d be a parameter's means over the eighths. If it has arrived, they are equal up to
    chance. The quarters' means are (a + b) / 2 and (c + d) / 2. Their squared distance is then
    about a quarter of |a - b|^2 + |c - d|^2. For a random walk it is as large as this sum. On a
    straight line it is twice as large, and the last iterate is nearer than any mean.

    :param num_steps: T.
    :param counts: iterates in each eighth so far.
    :param sums: each parameter's sums over them, (4, *shape).
    """

    num_steps: int
    counts: list[int] = field(default_factory=lambda: [0] * _PARTS)
    sums: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """The iterate after this step, from 1."""
        part = 2 * _PARTS * (step - 1) // self.num_steps - _PARTS
        if not 0 <= part < _PARTS:
            return
        self.counts[part] += 1
        for name, leaf in parameters.items():
            if name not in self.sums:
                self.sums[name] = leaf.new_zeros(_PARTS, *leaf.shape)
            self.sums[name][part] += leaf

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Over the last half so far, of all parameters; empty before it begins."""
        count = sum(self.counts)
        return {name: sums.sum(dim=0) / count for name, sums in self.sums.items()}

    @torch.no_grad()
    def agreed(self) -> dict[str, Tensor]:
        """Means over the last half, of the parameters that have arrived."""
        if min(self.counts) == 0:
            return {}
        found = self.means()
        for name, sums in self.sums.items():
            means = sums / torch.tensor(self.counts).to(sums).view(-1, *[1] * (sums.dim() - 1))
            a, b, c, d = means
            apart = ((a + b - c - d) / 2).square().sum()
            within = (a - b).square().sum() + (c - d).square().sum()
            if not 2 * apart <= within:
                del found[name]
        return found

    @torch.no_grad()
    def conclude(self, parameters: Mapping[str, Tensor]) -> str:
        """Set parameters that have arrived to their means.

        :param parameters: unconstrained.
        :returns: the guide's new content, in words.
        """
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
        sums = {name: each.clone() for name, each in self.sums.items()}
        return {"num_steps": self.num_steps, "counts": list(self.counts), "sums": sums}

    @staticmethod
    def resumed(state: Any) -> "IterateAverages":
        """From a result of :meth:`state`.

        :raises ConfigurationError: it is no such state.
        """
        if not isinstance(state, Mapping) or state.keys() != {"num_steps", "counts", "sums"}:
            raise ConfigurationError(_DAMAGED)
        sums, counts = require_tensors("averages", state["sums"]), state["counts"]
        parts = [counts if isinstance(counts, list) else (), *sums.values()]
        if any(getattr(each, "ndim", 1) == 0 or len(each) != _PARTS for each in parts):
            raise ConfigurationError(_DAMAGED)
        counts = [require_count("averages", count, least=0) for count in counts]
        sums = {name: each.clone() for name, each in sums.items()}
        return IterateAverages(require_count("averages", state["num_steps"]), counts, sums)


def guide_posterior(
    model: Callable, guide: Callable, records: Records | None, status: Status
) -> Posterior:
    """The guide as it is.

    :raises ConfigurationError: no step was taken yet, or the guide is no Gaussian.
    """
    if records is None:
        raise ConfigurationError(_NO_STEP)
    try:
        with forked_rng():
            gaussian = GaussianGuide(model, guide, records)
    except ModelError:
        kind = type(guide)
        text = _NO_GAUSSIAN.format(kind=kind.__name__, result=_RESULTS.get(kind, _DRAWS))
        raise ConfigurationError(text) from None
    mean, covariance = gaussian.read()
    try:
        return Posterior(gaussian.latents, mean, covariance, status=status)
    except ArithmeticError:
        raise ConfigurationError(_NOT_FINITE) from None
