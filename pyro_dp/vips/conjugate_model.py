"""The interface of a VIPS model: statistics of a record, their bounds, and the M-step."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyro
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.mechanism.contributions import Contributions
from pyro_dp.mechanism.streams import drawn
from pyro_dp.utils.errors import CURATOR, ModelError
from pyro_dp.utils.validation import require_count, require_number


@dataclass(frozen=True)
class Statistic:
    """One block of sufficient statistics: a sum over records.

    :param shape: shape of the sum.
    :param bound: one record's part is clipped to this Euclidean norm. ``math.inf`` is for runs
        without noise.
    :param static: whether a record's part is independent of the posterior. If all records take part
        in every step, such a statistic is released once and reused.

    >>> Statistic((2, 3), bound=2**0.5).size
    6
    """

    shape: tuple[int, ...]
    bound: float
    static: bool = False

    def __post_init__(self) -> None:
        for length in self.shape:
            require_count("Statistic.shape", length)
        require_number("Statistic.bound", self.bound, above=0.0, below=math.inf, closed=True)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Request = tuple[str, int, int]  # kind, number and size of a draw


class Draws:
    """Private random numbers for the local latents of a batch of records.

    :param make: draws the numbers (B, size) of a request: a kind, the draw's number and a size.

    >>> draws = Draws.by(np.random.default_rng(0), torch.arange(5))  # as VIPS makes them
    >>> draws.normal(0, 3).shape, draws.uniform(1, 2).shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    """

    def __init__(self, make: Callable[[Request], Tensor]):
        self._make = make
        self.cache: dict[Request, Tensor] = {}

    @staticmethod
    def by(stream: np.random.Generator, indices: Tensor) -> "Draws":
        """
        :param stream: this step's private generator.
        :param indices: the records, (B,).
        """

        def make(request: Request) -> Tensor:
            kind, _, size = request
            return drawn(stream, kind, (len(indices), size), indices.device)

        return Draws(make)

    def uniform(self, draw: int, size: int) -> Tensor:
        """Uniform on (0, 1], (B, size), in float64.

        :param draw: number of this draw. Another number gives other values.
        """
        return self("uniform", draw, size)

    def normal(self, draw: int, size: int) -> Tensor:
        """Standard normal, (B, size), otherwise as :meth:`uniform`."""
        return self("normal", draw, size)

    def of(self, b: int) -> "Draws":
        """The random numbers of record b alone."""
        return Draws(lambda request: self(*request)[b : b + 1])

    def __call__(self, *request: Any) -> Tensor:
        """The numbers of a request. Repeating the request returns the same numbers."""
        if request not in self.cache:
            self.cache[request] = self._make(request)
        return self.cache[request]


M = TypeVar("M", bound="ConjugateModel")
_REVIEWED: set[type] = set()
WRONG_SHAPE = "Statistic {name!r} does not have the shape that its model declares."
Parts = Mapping[str, Tensor | Contributions]
Sums = Mapping[str, Tensor]  # over all records, float64, of the declared shapes; by statistic
Sds = Mapping[str, float]  # the noise in each coordinate of them, by statistic; public


class ConjugateModel(abc.ABC):
    """A conjugate-exponential model of independent records, as VIPS sees it.

    Variational Bayes for such a model needs the data only through sums over records of expected
    sufficient statistics (Park, Foulds, Chaudhuri & Welling 2020, section 3). A model declares a
    bound for each of them, and computes one record's part (the E-step). From the sums it computes a
    posterior of the global latents (the M-step).

    **The E-step reads private records.** Row b of :meth:`expected_statistics` may depend on
    row b of the data and draws and on the public posterior, and on no other record. So a loop over
    local latents must run a fixed number of times. Your own model sees one record at a time
    (vectorised by ``torch.vmap`` if possible), and its state is restored after each. Parts above
    the bound are clipped. A record with a NaN or infinite part, or on which the E-step fails,
    counts as zero.

    **The M-step sees released numbers only**, and may use them freely. Sums are noisy: counts may
    be negative, second moments not positive definite. The size of the noise is public; the size of
    the data is not.

    A model also has its Pyro model, so DPSVI, DPSEP and VIPS can run on the same model. Its site
    names are those of the posterior, and its only plate with data is named "data".

    >>> class Mean(ConjugateModel):  # of numbers in [-1, 1], with variance 1
    ...     statistics = {"sum": Statistic((1,), bound=1.0, static=True)}
    ...     def check(self, *data): ...
    ...     def static_statistics(self, x): return {"sum": x.clamp(-1.0, 1.0).unsqueeze(1)}
    ...     def posterior(self, statistics, noise, size):
    ...         return dist.Normal(statistics["sum"] / (size + 1), (size + 1) ** -0.5).to_event(1)
    ...     def marginals(self, posterior): return {"mean": posterior}
    ...     def model(self, x):
    ...         mean = pyro.sample("mean", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    ...         with pyro.plate("data", len(x)):
    ...             pyro.sample("x", dist.Normal(mean, 1.0), obs=x.clamp(-1.0, 1.0))
    >>> vips = VIPS(Mean(), accountant=accountant, num_steps=1, noise=Noise(source=0))
    >>> result = vips.run(torch.linspace(-0.5, 1.0, 5000), progress=False)
    >>> print(f"{vips.posterior()['mean'].mean.item():.2f}")
    0.25
    """

    microbatch_size = 4096  # records whose statistics are held at a time, by default
    step_size = (0.0, 0.7)  # (tau0, kappa) of VIPS, by default

    @property
    @abc.abstractmethod
    def statistics(self) -> Mapping[str, Statistic]:
        """The statistics by name, in the order of the release."""

    @abc.abstractmethod
    def check(self, *data: Tensor) -> None:
        """Refuse data that do not fit. The errors are for the curator only.

        :param data: finite tensors with a row per record, all of one length. Large data come in
            parts, one after the other.
        :raises ModelError: their number, shapes or values do not fit.
        """

    def static_statistics(self, *rows: Any, **named: Any) -> Parts:
        """Parts of B records of the static statistics, ``(B, *shape)`` each, from their rows."""
        return {}

    def expected_statistics(self, posterior: Any, draws: Draws, *rows: Any, **named: Any) -> Parts:
        """Parts of B records of all other statistics, ``(B, *shape)`` each: the E-step, if any.

        :param posterior: the global latents', from :meth:`posterior`.
        :param draws: random numbers for local latents, of these records.
        """
        return {}

    def initial_statistics(self, size: int) -> Mapping[str, Tensor]:
        """Statistics before the first step, which are public. The first E-step uses their
        posterior, which is the prior unless a model overrides this.
        """
        return {
            name: torch.zeros(statistic.shape, dtype=torch.float64)
            for name, statistic in self.statistics.items()
        }

    @abc.abstractmethod
    def posterior(self, statistics: Sums, noise: Sds, size: int) -> Any:
        """The posterior of the global latents, a function of released sums: the M-step.

        :param statistics: sums over all records, float64, of the declared shapes.
        :param noise: standard deviation of the noise in each coordinate of them; public.
        :param size: number of records N; public.
        """

    @abc.abstractmethod
    def marginals(self, posterior: Any) -> dict[str, Distribution]:
        """The posterior distribution of each global site."""

    def feedback(
        self, posterior: Any, statistics: Sums, noise: Sds, size: int
    ) -> Mapping[tuple[str, str], Tensor] | None:
        """The derivatives of the E-step's sums with respect to the posterior's means. Like the
        M-step, it sees released numbers only.

        :param posterior: the result of :meth:`posterior` for the others.
        :returns: by (statistic, site), the matrix of derivatives between flattened tensors, (size
            of the statistic, size of the site). Zero matrices are left out. ``None`` if a model
            cannot compute them: then intervals leave out the E-step's response, and the status says
            so. This method is not called if all statistics are static.
        """
        return None

    def hidden(self, posterior: Any, statistics: Sums, noise: Sds) -> Mapping[str, Tensor]:
        """Elements for which the M-step detects less information from the records than noise.

        :returns: by site, booleans of its shape. The posterior's status counts them.
        """
        return {}

    def guide(self, posterior: Any) -> None:
        """Sample the global sites from the posterior with ``pyro.sample``.

        They are independent, unless a model overrides this.
        """
        for name, marginal in self.marginals(posterior).items():
            pyro.sample(name, marginal)

    @abc.abstractmethod
    def model(self, *data: Any, **named: Any) -> Any:
        """The Pyro model of the same prior and likelihood."""


def parts_of(
    model: Any,
    statistics: Mapping[str, Statistic],
    posterior: Any,
    draws: Draws,
    rows: Sequence[Tensor],
) -> dict[str, Any]:
    """These statistics of each record. Static ones ignore the posterior.

    :param model: a :class:`ConjugateModel` or an ``IsolatedModel``.
    """
    static = [each.static for each in statistics.values()]
    expected = {} if all(static) else model.expected_statistics(posterior, draws, *rows)
    return {**expected, **(model.static_statistics(*rows) if any(static) else {})}


def require_data(model: ConjugateModel, data: Sequence[Any], **columns: int | None) -> None:
    """Check the number, the shapes and the types of the data.

    :param columns: by argument, the number of columns, or None for a vector.
    :raises ModelError: the data do not fit.
    """
    if len(data) != len(columns):
        several = "s" if len(columns) > 1 else ""
        raise ModelError(
            f"{type(model).__name__} takes the argument{several} {' and '.join(columns)}."
        )
    for (name, count), value in zip(columns.items(), data, strict=True):
        row = () if count is None else (count,)
        form = "(N,), one number per record"
        if count is not None:
            model_of = f"for a model that was made for {count} columns"
            form = f"(N, {count}), one row per record, {model_of}"
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if not shape or shape[1:] != row:
            found = f"of shape {shape}" if shape else f"a {type(value).__name__}"
            raise ModelError(f"{name} must be a tensor of shape {form}; it is {found}.")
        if value.is_complex():
            raise ModelError(f"{name} must hold real numbers.")


def require_binary(name: str, value: Tensor, advice: str) -> None:
    """:raises ModelError: some numbers are neither zero nor one."""
    if not ((value == 0) | (value == 1)).all():
        raise ModelError(f"{name} must hold zeros and ones: {advice}. {CURATOR}")


def reviewed(kind: type[M]) -> type[M]:
    """Mark a model of this package whose tests show that no record changes another one's
    statistics.

    VIPS runs its E-step on whole batches. Other models get one record at a time.
    """
    _REVIEWED.add(kind)
    return kind


def is_reviewed(model: ConjugateModel) -> bool:
    """Whether a model's class is reviewed and no method was replaced on the object."""
    kind = type(model)
    replaced = any(callable(getattr(kind, name, None)) for name in vars(model))
    return kind in _REVIEWED and not replaced
