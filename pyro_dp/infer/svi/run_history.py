"""What a run has released, kept to find its posterior: post-processing, all of it public."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation
from torch import Tensor

from pyro_dp.infer.posterior.explanation import SAMPLING
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.posterior.status import (
    CHECK,
    CLIPPING,
    DO_NOT_PUBLISH,
    NOISE,
    NOTHING_TO_CHECK,
    STEPS,
    Status,
)
from pyro_dp.infer.svi.clipping import Clipping
from pyro_dp.infer.svi.gradient_regression import FEWEST, Regressed
from pyro_dp.infer.svi.iterate_averages import IterateAverages
from pyro_dp.infer.svi.regression_problem import NotRegressed, RegressionProblem, gaussian_guide
from pyro_dp.infer.svi.released_gradients import ReleasedGradients
from pyro_dp.records.losses import user_code
from pyro_dp.records.record_term import RecordTerm
from pyro_dp.utils.errors import ConfigurationError

_LONGEST = 2000  # steps that are allowed for where their number is not known
_OF_PARAMETERS = "the releases are gradients of parameters, not of latents alone"
_RANDOM = "the records' terms are random"
_OWN_LOSS = "the loss is your own, so its prior is unknown"
_MANY = "{count} latents take more than {steps} steps"
_NONE_YET = "there are none yet"
_UNSEEN = (
    "no curvature stands out of the noise in {some} of {dim} coordinates, so intervals may be far "
    "too narrow (as where coefficients offset each other)"
)
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
_OTHER = "load_state_dict: the released gradients are of other latents, of another model."
_LEFT_OUT = (
    "intervals do not include the privacy noise, because no posterior follows from the released "
    "gradients: {why}"
)
_IN_ITS_PLACE = "The guide holds {what}."
_OF_ITERATES = (
    "The mean of the posterior is that of the last half of the iterates. DPSEP copes better with "
    "latents that offset each other. A larger epsilon helps, too."
)
_LITTLE = 0.25  # of the records' information is left: with more, intervals hold as well as others
_HIDES = "the privacy noise may hide most of the data in {hidden} of {dim} coordinates"
_FROM_THE_MIDDLE = (
    "Start the guide at the middle of the prior: AutoMultivariateNormal(model, "
    "init_loc_fn=init_to_mean). For a regression take DPSEP. More records, fewer latents or a "
    "larger epsilon help, too."
)


class RunHistory:
    """Released gradients of the likelihood at their public draws, and means of the iterates.

    :param model: the user's, as is guide.
    """

    def __init__(self, model: Callable, guide: Callable):
        self._model, self._guide = model, guide
        self._term: RecordTerm | None = None  # from the first look on
        self._num_steps: int | None = None
        self._rate, self._particles = 1.0, 1
        self._count = 0  # of the latents that records see
        self._noise_of_one = math.inf  # in a coordinate, were C 1
        self._why: str | None = None  # there are no gradients
        self._gradients: ReleasedGradients | None = None
        self._pending: list[tuple[Tensor, list[Tensor], float]] = []  # as add_gradient got them
        self._averages: IterateAverages | None = None
        self._gaussian: GaussianGuide | None = None
        self._problem: RegressionProblem | None = None
        self._solution: tuple[int, Regressed] | None = None  # of so many gradients

    def start(
        self,
        term: RecordTerm,
        *,
        particles: int,
        num_steps: int | None,
        rate: float,
    ) -> None:
        """What there is already stays.

        :param particles: K.
        :param num_steps: of the run, if that is known.
        :param rate: of sampling.
        """
        self._term, self._num_steps, self._rate = term, num_steps, rate
        self._particles = particles
        if self._averages is None and num_steps is not None:
            self._averages = IterateAverages(num_steps)

    def require_size(self, size: int) -> None:
        """
        :param size: coordinates of the next release.
        :raises ConfigurationError: there are gradients already, and they have others.
        """
        if self._gradients is not None and size != self._count * self._particles:
            raise ConfigurationError(_OTHER)

    def add_gradient(
        self, released: Tensor, points: list[Tensor], noise: float, bound: float
    ) -> None:
        """What a step has released. It is looked at later.

        :param released: estimate of the gradient of all records' losses, (K s,): of each of K
            particles its part, divided by K.
        :param points: their latents, one particle after the other.
        :param noise: standard deviation of the noise in a coordinate.
        :param bound: C.
        """
        self._noise_of_one = noise / bound
        if self._gradients is None and self._why is None:
            self._begin(points)
        if self._gradients is not None:
            self._pending.append((released, points, noise))

    @property
    def regresses(self) -> bool:
        """Whether there may be a posterior from a regression, for all that is known so far."""
        return self._why is None

    def add_iterate(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Unconstrained parameters after this step, from 1."""
        if self._averages is not None:
            self._averages.add(step, parameters)

    def status(self, clipping: Clipping | None) -> Status:
        """Whether the posterior can be published, for all but what clipping takes away.

        :param clipping: as for :meth:`posterior`.
        """
        try:
            _, found = self._regressed(clipping)
        except NotRegressed as why:
            return Status(CHECK, _LEFT_OUT.format(why=why), STEPS)
        hidden, dim = int((found.information < _LITTLE).sum()), len(found.mean)
        if 2 * hidden > dim:
            return Status(DO_NOT_PUBLISH, _HIDES.format(hidden=hidden, dim=dim), NOISE)
        if found.is_doubtful:
            unseen = _UNSEEN.format(some=int(found.unseen.sum()), dim=dim)
            return Status(CHECK, found.reason or unseen, STEPS)
        return NOTHING_TO_CHECK

    def posterior(self, noise_aware: bool, clipping: Clipping | None, status: Status) -> Posterior:
        """As :meth:`DPSVI.posterior`.

        :param clipping: by the bound; None: it is unknown.
        """
        if self._term is None:
            raise ConfigurationError(_NO_STEP)
        try:
            guide, found = self._regressed(clipping)
        except NotRegressed:
            return self._as_it_is(status)
        covariance = found.aware if noise_aware else found.covariance
        return Posterior(
            guide.latents, found.mean, covariance, plain=found.covariance, status=status
        )

    @torch.no_grad()
    def noise_parts(self, clipping: Clipping | None) -> dict[str, Tensor]:
        """Variances by privacy noise, sampling and clipping, (d,) each, in proportion.

        :param clipping: as for :meth:`posterior`.
        """
        try:
            _, found = self._regressed(clipping)
        except NotRegressed:
            return {NOISE: torch.ones(())}
        assert self._problem is not None and self._gradients is not None
        gradients, bias = self._gradients, self._bias(clipping)
        noise = 1 / gradients.noise.pow(-2).sum().item()  # of releases that count as they should
        sampling = (1 - gradients.rate) / gradients.rate / len(gradients)
        of_unit, of_curvature = self._problem.moved(found.covariance)
        return {
            NOISE: noise * of_unit,
            SAMPLING: sampling * of_curvature,
            CLIPPING: bias**2 * of_unit,
        }

    @torch.no_grad()
    def conclude(self, parameters: Mapping[str, Tensor], clipping: Clipping | None) -> str | None:
        """Let the guide hold what the run has found.

        :param parameters: unconstrained.
        :param clipping: as for :meth:`posterior`.
        :returns: a text on its content, or a remedy; None: the status needs none.
        """
        try:
            guide, found = self._regressed(clipping)
        except NotRegressed:
            return _IN_ITS_PLACE.format(what=self._average(parameters))
        guide.write(found.mean, found.aware)
        return {NOISE: _FROM_THE_MIDDLE, STEPS: _OF_ITERATES}.get(self.status(clipping).cause)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        gradients = self._kept()
        return {
            "gradients": None if gradients is None else gradients.state(),
            "averages": None if self._averages is None else self._averages.state(),
        }

    def load(self, state: Any) -> None:
        """Go on from what :meth:`state` gave.

        :raises ConfigurationError: it is damaged; nothing was changed.
        """
        gradients, averages = self.read(state)
        self._gradients, self._averages, self._solution = gradients, averages, None
        self._pending, self._why = [], None
        self._count = 0 if gradients is None else gradients.draws.shape[1]

    @staticmethod
    def read(state: Any) -> tuple[ReleasedGradients | None, IterateAverages | None]:
        """:raises ConfigurationError: this is no state."""
        if not isinstance(state, Mapping) or state.keys() != {"gradients", "averages"}:
            raise ConfigurationError("load_state_dict: history is damaged.")
        gradients, averages = state["gradients"], state["averages"]
        return (
            None if gradients is None else ReleasedGradients.resumed(gradients),
            None if averages is None else IterateAverages.resumed(averages),
        )

    def _begin(self, points: list[Tensor]) -> None:
        """See whether gradients are worth to be kept."""
        assert self._term is not None
        self._count = count = sum(u.numel() for u in points) // self._particles
        if not points:
            self._why = _OF_PARAMETERS
        elif self._term.draws:
            self._why = _RANDOM
        elif user_code(self._term.loss):
            self._why = _OWN_LOSS
        elif FEWEST * count >= (self._num_steps or _LONGEST):
            self._why = _MANY.format(count=count, steps=FEWEST * count)
        else:
            try:
                self._current_guide()
            except NotRegressed as why:
                self._why = str(why)
                return
            self._gradients = ReleasedGradients(self._rate, self._term.records.plate.size)

    def _kept(self) -> ReleasedGradients | None:
        """All gradients, one of each particle."""
        for released, points, noise in self._pending:
            assert self._gradients is not None
            count = self._particles
            flat = torch.cat([u.flatten() for u in points]).double().reshape(count, -1)
            for point, gradient in zip(flat, released.reshape(count, -1), strict=True):
                self._gradients.add(point, -count * gradient, count * noise)
        self._pending = []
        return self._gradients

    def _bias(self, clipping: Clipping | None) -> float:
        """Of a coordinate of a particle's gradient, by clipping, about."""
        return 0.0 if clipping is None else self._particles * clipping.bias()

    def _cut(self, gradients: ReleasedGradients, clipping: Clipping | None) -> None:
        if clipping is not None:
            bounds = gradients.noise / (self._particles * self._noise_of_one)
            gradients.cut = self._particles * clipping.histogram.cut(bounds)

    def _regressed(self, clipping: Clipping | None) -> tuple[GaussianGuide, Regressed]:
        """:raises NotRegressed: there is no posterior to be had."""
        gradients = self._kept()
        if gradients is None:
            raise NotRegressed(self._why or _NONE_YET)
        assert self._term is not None
        guide = self._current_guide()
        if self._problem is None or self._problem.guide is not guide:
            self._problem = RegressionProblem.build(self._model, self._guide, guide, self._term)
        count = len(gradients)
        if self._solution is None or self._solution[0] != count:
            self._cut(gradients, clipping)
            found = self._problem.solved(gradients, self._bias(clipping))
            if found.is_doubtful:
                found = replace(found, mean=self._mean_of_iterates(guide, found.mean))
            self._solution = count, found
        return guide, self._solution[1]

    def _current_guide(self) -> GaussianGuide:
        """:raises NotRegressed: it is no Gaussian."""
        assert self._term is not None
        if self._gaussian is None or not self._gaussian.is_current():
            self._gaussian = gaussian_guide(self._model, self._guide, self._term.records)
        return self._gaussian

    def _as_it_is(self, status: Status) -> Posterior:
        try:
            guide = self._current_guide()
        except NotRegressed:
            raise ConfigurationError(self._no_gaussian()) from None
        mean, covariance = guide.read()
        try:
            return Posterior(guide.latents, mean, covariance, status=status)
        except ArithmeticError:
            raise ConfigurationError(_NOT_FINITE) from None

    def _no_gaussian(self) -> str:
        kind = type(self._guide)
        return _NO_GAUSSIAN.format(kind=kind.__name__, result=_RESULTS.get(kind, _DRAWS))

    def _mean_of_iterates(self, guide: GaussianGuide, otherwise: Tensor) -> Tensor:
        """Over the last half of the run, once it has begun; (d,)."""
        means = {} if self._averages is None else self._averages.means()
        return guide.mean_at(means).to(otherwise) if means else otherwise

    def _average(self, parameters: Mapping[str, Tensor]) -> str:
        """Set parameters that have arrived to their means, and say so."""
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
