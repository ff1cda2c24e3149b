"""What a run of gradient steps leaves in the guide, and how a posterior is read from it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation
from torch import Tensor

from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.status import Status
from pyro_dp.infer.svi.iterate_averages import IterateAverages
from pyro_dp.records.records import Records
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.torch_state import forked_rng

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
