"""What every step-wise private inference has in common: settings, calibration, run, records."""

import abc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp.accounting import PrivacyAccountant, SubsampledGaussian
from pyro_dp.errors import ConfigurationError, PrivacyBudgetExceeded
from pyro_dp.graphs import Compiler, NotTraceable
from pyro_dp.initial_values import copied
from pyro_dp.mechanisms import ClippedSum, release
from pyro_dp.plates import find_plate
from pyro_dp.python_state import PythonState
from pyro_dp.randomness import Randomness
from pyro_dp.records import Records
from pyro_dp.sampling import RecordSampler
from pyro_dp.settings import require_choice, require_count, require_number

_SEEDED = (
    "A seeded generator was used: the run can be repeated, and is not private against anyone who "
    "can guess the seed."
)

_MOST_TRACES = 4  # where more are needed, tracing takes longer than it saves
_CHANGING = (
    "arguments, parameters or Python values that the model refers to keep changing, and a graph "
    "would be traced anew each time"
)


class PrivateInference(abc.ABC):
    """Base of the inferences: one release per step, from a model with a private plate.

    Subclasses implement ``step`` and ``_build``. The arguments are those of :class:`DPSVI`.

    :param bound: the largest norm of one record's part of the first release.
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None,
        noise_multiplier: float | None,
        bound: float,
        plate: str | None,
        sample_rate: float | None,
        sampling: str,
        microbatch_size: int | None,
        slice_data: bool,
        jit: str,
        generator: torch.Generator | int | None,
        secure: bool,
    ):
        self.model = model
        self.guide = guide
        self.accountant = accountant
        self.num_steps = num_steps
        self.plate = plate
        self.sample_rate = sample_rate
        self.sampling = sampling
        self.microbatch_size = microbatch_size
        self.slice_data = slice_data
        self.jit = jit
        self._noise_multiplier = noise_multiplier
        self._calibrates = noise_multiplier is None
        self._bound = bound
        self._check_settings(secure)
        self._randomness = Randomness(generator)
        if self._randomness.seeded:
            accountant.note(_SEEDED)
        self._steps = 0
        self._traces_left = 0 if jit == "none" else _MOST_TRACES
        self._python: PythonState | None = None
        self._records: Records | None = None
        self._sampler: RecordSampler | None = None

    @abc.abstractmethod
    def step(self, *args: Any, **kwargs: Any) -> float:
        """One step, with one release, given the full data."""

    def run(self, *args: Any, progress: bool = True, **kwargs: Any) -> list[float]:
        """What is left of ``num_steps`` steps, with a progress bar.

        :returns: what the steps returned, where that is a number.
        :raises ConfigurationError: ``num_steps`` was not given, or all of them are done.
        :raises PrivacyBudgetExceeded: so many steps do not fit the budget.
        """
        if self.num_steps is None:
            raise ConfigurationError("run() needs num_steps: pass it, or call step() yourself.")
        self._refuse_steps_beyond_calibration()
        if self._steps >= self.num_steps:
            raise ConfigurationError(f"num_steps={self.num_steps} are done: start anew to go on.")
        results = []
        name = type(self).__name__
        with tqdm(
            total=self.num_steps, initial=self._steps, desc=name, disable=not progress
        ) as bar:
            while self._steps < self.num_steps:
                result = self.step(*args, **kwargs)
                if not math.isnan(result):
                    results.append(result)
                    bar.set_postfix_str(f"{result:.4g}", refresh=False)
                bar.update()
        return results

    @property
    def noise_multiplier(self) -> float:
        """sigma: standard deviation of the noise in units of the bound of one record.

        :raises ConfigurationError: it is to be calibrated, and the sample rate is known only when
            the first step has seen the plate.
        :raises PrivacyBudgetExceeded: nothing is left of the budget.
        """
        if self._noise_multiplier is None:
            if self._sampler is not None:
                rate = self._sampler.sample_rate
            elif self.sampling == "full":
                rate = 1.0
            elif self.sampling == "poisson" and self.sample_rate is not None:
                rate = self.sample_rate
            else:
                raise ConfigurationError("noise_multiplier is calibrated by the first step.")
            self._noise_multiplier = self.accountant.noise_multiplier(
                num_steps=self.num_steps - self._steps, sample_rate=rate, sampling=self.sampling
            )
        return self._noise_multiplier

    def _prepare(self, args: tuple, kwargs: dict) -> None:
        """Before a step: refuse one too many, and check what is new. Spends nothing."""
        self._refuse_steps_beyond_calibration()
        if self._records is not None and self._records.same_as(args, kwargs) and self._is_current():
            return
        # The original's first run is on placeholders, so that it can keep nothing of the data;
        # unless it cannot be copied (see "Not protected" on models with a state of their own).
        first_look, _ = copied(self.model, self.guide) or (self.model, self.guide)
        plate = find_plate(first_look, args, kwargs, self.plate)
        records = Records(self.model, plate, args, kwargs, self.slice_data)
        rate = self.sample_rate
        if rate is None:
            rate = 1.0 if self.sampling == "full" else plate.subsample_size / plate.size
        sampler = RecordSampler(self.sampling, plate.size, rate)
        self._build(records, sampler)
        self._records, self._sampler = records, sampler

    def _refuse_steps_beyond_calibration(self) -> None:
        if self._calibrates and self._steps >= self.num_steps:
            raise PrivacyBudgetExceeded(
                f"The noise was calibrated for num_steps={self.num_steps}, which are done: start "
                "anew with what remains of the budget."
            )

    @abc.abstractmethod
    def _build(self, records: Records, sampler: RecordSampler) -> None:
        """Check model and guide against new records, and prepare what a step needs."""

    def _is_current(self) -> bool:
        """Whether what was built still holds."""
        return not (self._traces_left and self._python and self._python.changed)

    def _traced(self, trace: Callable[[Compiler], Any]) -> Any:
        """The result of tracing, or None: with a warning, if no graph can be had."""
        if not self._traces_left:
            return None
        self._python = PythonState(self.model, self.guide)
        self._traces_left -= 1
        try:
            if not self._traces_left:
                raise NotTraceable(_CHANGING)
            return trace(Compiler(self.jit == "compile"))
        except NotTraceable as reason:
            self._traces_left = 0
            warnings.warn(
                f"jit={self.jit!r} does not apply, and every step runs Pyro code: {reason}.",
                stacklevel=2,
            )
            return None

    def _note_earlier_values(self) -> None:
        if self._steps == 0:
            self.accountant.note(
                "Parameters or optimizer had values from before the first step of "
                f"{type(self).__name__}: if those were made from the data, this ledger does not "
                "cover it. pyro.clear_param_store() and a new guide start afresh."
            )

    def _sample(self, position: int) -> Tensor:
        """The records of this step: indices, ascending."""
        indices = self._sampler.draw(self._randomness.stream("sampling", position))
        return indices.to(self._records.device)

    def _release(self, clipped: ClippedSum, position: int) -> list[Tensor]:
        """Account and release; sums over the batch become estimates of sums over all records."""
        rate = self._sampler.sample_rate
        released = release(
            clipped,
            accountant=self.accountant,
            event=SubsampledGaussian(self.noise_multiplier, rate, self.sampling),
            noise=self._randomness.stream("noise", position),
        )
        self._steps += 1
        return [block.div_(rate) for block in released]

    def _check_settings(self, secure: bool) -> None:
        for name in ("model", "guide"):
            if not callable(getattr(self, name)):
                raise ConfigurationError(f"{name} must be a Pyro {name}, which is a callable.")
        if not isinstance(self.accountant, PrivacyAccountant):
            raise ConfigurationError("accountant must be a PrivacyAccountant.")
        require_choice("jit", self.jit, ("trace", "compile", "none"))
        if self.num_steps is not None:
            require_count("num_steps", self.num_steps)
        if self.microbatch_size is not None:
            require_count("microbatch_size", self.microbatch_size)
        if self.plate is not None and not isinstance(self.plate, str):
            raise ConfigurationError("plate must be the name of a pyro.plate.")
        if pyro.settings.get("module_local_params"):
            raise ConfigurationError("pyro.settings: module_local_params=True is not supported.")
        if secure:
            raise ConfigurationError("secure=True is not available yet.")
        self._check_sampling()
        self._check_noise()

    def _check_sampling(self) -> None:
        require_choice("sampling", self.sampling, ("poisson", "fixed", "full"))
        if self.sampling == "fixed" and self.accountant.neighboring != "replace_one":
            raise ConfigurationError(
                "sampling='fixed' hides no change of the number of records: use "
                "PrivacyAccountant(neighboring='replace_one'), or sampling='poisson'."
            )
        if self.sample_rate is not None:
            require_number("sample_rate", self.sample_rate, above=0.0, below=1.0, closed=True)
            if self.sampling == "full" and self.sample_rate != 1.0:
                raise ConfigurationError("sample_rate must be 1 or None with sampling='full'.")

    def _check_noise(self) -> None:
        sigma = self._noise_multiplier
        if sigma is None:
            if self.accountant.epsilon is None:
                raise ConfigurationError(
                    "noise_multiplier=None is calibrated from a budget: give the accountant an "
                    "epsilon, or pass a noise_multiplier."
                )
            if self.num_steps is None:
                raise ConfigurationError(
                    "noise_multiplier=None is calibrated for a number of steps: pass num_steps."
                )
        elif isinstance(sigma, bool) or sigma != 0:
            require_number("noise_multiplier", sigma, above=0.0, below=math.inf)
        if self._bound == math.inf and sigma != 0:
            raise ConfigurationError(
                "An infinite bound needs noise_multiplier=0: no noise hides an unbounded record."
            )


def initialised(guide: Callable) -> bool:
    """Whether an autoguide has been run before; its values survive a cleared parameter store."""
    modules = guide.modules() if isinstance(guide, torch.nn.Module) else ()
    return any(isinstance(m, AutoGuide) and m.prototype_trace is not None for m in modules)
