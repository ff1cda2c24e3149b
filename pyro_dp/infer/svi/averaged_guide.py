"""The guide after gradient steps: means of its parameters over the last half, and a posterior."""

from collections.abc import Callable, Mapping, Sequence
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

_PARTS = 4  # of the last half
_DAMAGED = "load_state_dict: averages are damaged."
_NO_STEP = (
    "There is no posterior before the first step. (After a load_state_dict a step must find the "
    "latents first; what the run has found is in the guide's parameters.)"
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


class IterateAverages:
    """Sums of the unconstrained parameters over the last four eighths of a run: public.

    A parameter that has arrived spreads around one place: means a, b, c, d of the eighths are equal
    up to chance, and those of the quarters, (a + b) / 2 and (c + d) / 2, have a squared distance of
    about a quarter of |a - b|^2 + |c - d|^2. It is as large as this sum for a random walk, and
    twice as large on a straight way: there the last iterate is nearer than any mean.

    :param num_steps: T.
    :param counts: iterates in each eighth so far.
    :param sums: of each parameter over them, (4, *shape).
    """

    def __init__(
        self,
        num_steps: int,
        counts: Sequence[int] = (0,) * _PARTS,
        sums: Mapping[str, Tensor] | None = None,
    ):
        self._num_steps = num_steps
        self._counts = list(counts)
        self._sums = {name: each.clone() for name, each in (sums or {}).items()}

    @torch.no_grad()
    def add(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """The iterate after this step, from 1."""
        part = 2 * _PARTS * (step - 1) // self._num_steps - _PARTS
        if not 0 <= part < _PARTS:
            return
        self._counts[part] += 1
        for name, leaf in parameters.items():
            if name not in self._sums:
                self._sums[name] = leaf.new_zeros(_PARTS, *leaf.shape)
            self._sums[name][part] += leaf

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Over the last half so far, of all parameters; empty before it begins."""
        count = sum(self._counts)
        return {name: sums.sum(dim=0) / count for name, sums in self._sums.items()}

    @torch.no_grad()
    def agreed(self) -> dict[str, Tensor]:
        """Means over the last half, of the parameters that have arrived."""
        if min(self._counts) == 0:
            return {}
        found = set()
        for name, sums in self._sums.items():
            means = sums / torch.tensor(self._counts).to(sums).view(-1, *[1] * (sums.dim() - 1))
            a, b, c, d = means
            apart = ((a + b - c - d) / 2).square().sum()
            within = (a - b).square().sum() + (c - d).square().sum()
            if 2 * apart <= within:
                found.add(name)
        return {name: mean for name, mean in self.means().items() if name in found}

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        sums = {name: each.clone() for name, each in self._sums.items()}
        return {"num_steps": self._num_steps, "counts": list(self._counts), "sums": sums}

    @staticmethod
    def resumed(state: Any) -> "IterateAverages":
        """What :meth:`state` was taken of.

        :raises ConfigurationError: it is no such state.
        """
        names = {"num_steps", "counts", "sums"}
        if not isinstance(state, Mapping) or state.keys() != names:
            raise ConfigurationError(_DAMAGED)
        sums, counts = require_tensors("averages", state["sums"]), state["counts"]
        if not isinstance(counts, list) or len(counts) != _PARTS:
            raise ConfigurationError(_DAMAGED)
        if not all(each.dim() and len(each) == _PARTS for each in sums.values()):
            raise ConfigurationError(_DAMAGED)
        counts = [require_count("averages", count, least=0) for count in counts]
        return IterateAverages(require_count("averages", state["num_steps"]), counts, sums)


class AveragedGuide:
    """A guide whose parameters end at their means over the last half of a run.

    :param model: the user's, as is guide.
    """

    def __init__(self, model: Callable, guide: Callable):
        self._model, self._guide = model, guide
        self._records: Records | None = None  # from the first look on
        self._averages: IterateAverages | None = None

    def start(self, records: Records, num_steps: int | None) -> None:
        """What there is already stays.

        :param num_steps: of the run; None: unknown, and nothing is averaged.
        """
        self._records = records
        if self._averages is None and num_steps is not None:
            self._averages = IterateAverages(num_steps)

    def add(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Unconstrained parameters after this step, from 1."""
        if self._averages is not None:
            self._averages.add(step, parameters)

    @torch.no_grad()
    def conclude(self, parameters: Mapping[str, Tensor]) -> str:
        """Set parameters that have arrived to their means.

        :param parameters: unconstrained.
        :returns: what the guide holds now.
        """
        agreed = {} if self._averages is None else self._averages.agreed()
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

    def posterior(self, status: Status) -> Posterior:
        """
        :raises ConfigurationError: no step was taken yet, or the guide is no Gaussian.
        """
        if self._records is None:
            raise ConfigurationError(_NO_STEP)
        try:
            with forked_rng():
                guide = GaussianGuide(self._model, self._guide, self._records)
        except ModelError:
            raise ConfigurationError(self._no_gaussian()) from None
        mean, covariance = guide.read()
        try:
            return Posterior(guide.latents, mean, covariance, status=status)
        except ArithmeticError:
            raise ConfigurationError(_NOT_FINITE) from None

    def state(self) -> dict[str, Any] | None:
        """Tensors and numbers; None: nothing is averaged."""
        return None if self._averages is None else self._averages.state()

    def load(self, state: Any) -> None:
        """Go on from what :meth:`state` gave.

        :raises ConfigurationError: it is damaged; nothing was changed.
        """
        self._averages = None if state is None else IterateAverages.resumed(state)

    def _no_gaussian(self) -> str:
        kind = type(self._guide)
        return _NO_GAUSSIAN.format(kind=kind.__name__, result=_RESULTS.get(kind, _DRAWS))
