"""The kinds of events in a ledger. Each has a dominating pair, from which its cost follows."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyro_dp.accounting.bounded_pairs import MOST_LOSS, LaplacePair, RenyiPair, Response
from pyro_dp.accounting.gaussian_pairs import LARGEST_SAMPLED, DominatingPair
from pyro_dp.accounting.pld import ORDERS
from pyro_dp.utils.display import up
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import LARGEST, require_choice, require_number, require_scale

LONGEST_TEXT = 200


class Event(abc.ABC):
    """One release, or one look at the data without noise. Each kind is a frozen dataclass.

    :cvar kind: its name in saved ledgers, which also hold its fields.
    :ivar delta: the probability of an infinite loss.
    :ivar sample_rate: the probability that a record takes part.
    :cvar dots: a method (gap, relation) that returns its privacy loss distribution by
        ``dp_accounting``, on a grid of losses. None: the second opinion does not support it.
    """

    kind: ClassVar[str]
    delta: float
    dots: Any = None
    sample_rate: float = 1.0

    @abc.abstractmethod
    def pair(self, neighboring: str) -> Any:
        """A dominating pair of one release, conditional on a finite loss; None: no guarantee.

        Under ``add_or_remove_one`` it is the pair for a removal.

        :raises ConfigurationError: the event does not fit the relation.
        """

    @property
    @abc.abstractmethod
    def brief(self) -> str:
        """A description in one line."""


def require_short_text(
    name: str, value: Any, longest: int = LONGEST_TEXT, *, least: int = 1
) -> None:
    """:raises ConfigurationError: the value is not one line with a length in this range."""
    if not (isinstance(value, str) and value.isprintable() and least <= len(value) <= longest):
        raise ConfigurationError(
            f"{name} must be one line of text of {least} to {longest} characters."
        )


SAMPLING = ("poisson", "fixed", "full")
_LEAST_NOISE = 1e-9  # less noise counts as none, because its cost would overflow


@dataclass(frozen=True)
class SubsampledGaussian(Event):
    """One sum of clipped per-record quantities, with Gaussian noise.

    :param noise_multiplier: noise standard deviation in units of the per-record bound C. The sum's
        sensitivity is C under ``add_or_remove_one`` (zero-out), and 2C under ``replace_one``. Zero
        is a non-private reference.
    :param sample_rate: the public probability, in (0, 1], that a record takes part.
    :param sampling: ``"poisson"`` (each record independently), ``"fixed"`` (a fresh uniform subset
        without replacement, for ``replace_one``) or ``"full"`` (every record, rate 1).
    :raises ConfigurationError: if a setting is out of range.

    >>> accountant.record(SubsampledGaussian(2.0, sample_rate=0.01), count=100)
    >>> print(f"{accountant.get_epsilon():.2f}")
    0.19
    """

    kind = "subsampled_gaussian"
    delta = 0.0

    noise_multiplier: float
    sample_rate: float = 1.0
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        sigma = require_number("noise_multiplier", self.noise_multiplier, above=0.0, or_equal=True)
        rate = require_number("sample_rate", self.sample_rate, above=0.0, below=1.0, closed=True)
        require_choice("sampling", self.sampling, SAMPLING)
        if self.sampling == "full" and rate != 1.0:
            raise ConfigurationError(
                f"sample_rate={rate!r} contradicts sampling='full': use 1.0, or sampling='poisson'."
            )
        vars(self).update(noise_multiplier=sigma, sample_rate=rate)

    @property
    def brief(self) -> str:
        return (
            f"(noise_multiplier={self.noise_multiplier:.6g}, sample_rate={self.sample_rate:.6g}, "
            f"sampling={self.sampling!r})"
        )

    def pair(self, neighboring: str) -> DominatingPair | None:
        sigma, rate = self.noise_multiplier, self.sample_rate
        # Rates next to 0 or 1 are rounded up, and noise beyond a limit is rounded down. Both can
        # only raise the cost. So log(1 - q) and a step's losses are accurate, and the square of the
        # noise is finite.
        rate = 1.0 if rate > 1.0 - 1e-9 else max(rate, 1e-12)
        sigma = min(sigma, LARGEST if rate == 1.0 else LARGEST_SAMPLED)
        if neighboring == "add_or_remove_one":
            if self.sampling == "fixed":
                raise ConfigurationError(
                    "sampling='fixed' has a fixed batch size, which add_or_remove_one cannot have: "
                    "use neighboring='replace_one', or sampling='poisson'."
                )
            pair = DominatingPair("remove", sigma, rate)
        elif self.sampling == "fixed" or rate == 1.0:
            pair = DominatingPair("fixed", sigma / 2.0, rate)  # one record's effect is at most 2C
        else:
            pair = DominatingPair("replace", sigma, rate)
        return None if pair.noise < _LEAST_NOISE else pair

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=gap,
            sampling_prob=self.sample_rate,
            neighboring_relation=relation,
        )


def is_whole(event: Event) -> bool:
    """Whether it is a sum over all records, with noise."""
    if not isinstance(event, SubsampledGaussian):
        return False
    return event.sample_rate == 1.0 and event.noise_multiplier > 0


def together(counts: Mapping[Any, int]) -> SubsampledGaussian:
    """The single sum over all records to which these sums compose. It has the same cost.

    :param counts: counts of events, for which :func:`is_whole` holds.
    """
    precision = math.fsum(n / event.noise_multiplier**2 for event, n in counts.items())
    return SubsampledGaussian(1 / math.sqrt(precision), 1.0, "full")


@dataclass(frozen=True)
class ApproximateDP(Event):
    """A release that is (epsilon, delta)-DP by itself, such as a private selection.

    This must hold under the accountant's relation, for every outcome of earlier releases. Fix
    epsilon and delta without looking at these.

    Several such releases cost less than the sum of their epsilons. The engine ``"pld"`` composes
    them tightly, with each other and with runs: see :mod:`pyro_dp.accounting.bounded_pairs`.

    :param epsilon: in nats, >= 0.
    :param delta: in [0, 1).
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.

    >>> accountant.record(ApproximateDP(0.3, 0.0, "a histogram by another library"))
    >>> round(accountant.get_epsilon(), 3)
    0.3
    """

    kind = "approximate_dp"

    epsilon: float
    delta: float
    name: str

    def __post_init__(self) -> None:
        epsilon = require_number("epsilon", self.epsilon, above=0.0, or_equal=True)
        delta = require_number("delta", self.delta, above=0.0, below=1.0, or_equal=True)
        require_short_text("name", self.name)
        vars(self).update(epsilon=epsilon, delta=delta)

    @property
    def brief(self) -> str:
        return f"{self.name} (epsilon = {up(self.epsilon)}, delta = {self.delta:.4g})"

    def pair(self, neighboring: str) -> Response:
        return Response(self.epsilon)

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import common, privacy_loss_distribution

        stated = common.DifferentialPrivacyParameters(self.epsilon, self.delta)
        return privacy_loss_distribution.from_privacy_parameters(stated, gap)


@dataclass(frozen=True)
class NonPrivateLook(Event):
    """A look at a number of the data without noise, after which no guarantee is left.

    :param what: the number, in a short text, which is public.
    :param time: the time of the look (UTC, ISO 8601), or an empty text.
    :raises ConfigurationError: if a text is not a short line.

    >>> accountant.record(NonPrivateLook("a mean that was on a slide", "2026-01-31T12:00:00"))
    >>> accountant.get_epsilon()
    inf
    """

    kind = "nonprivate_look"
    delta = 0.0

    what: str
    time: str = ""

    def __post_init__(self) -> None:
        require_short_text("what", self.what)
        require_short_text("time", self.time, least=0)

    @property
    def brief(self) -> str:
        return f"non-private look: {self.what}" + (f" ({self.time})" if self.time else "")

    def pair(self, neighboring: str) -> None:
        return None


@dataclass(frozen=True)
class Laplace(Event):
    """Numbers that were released with Laplace noise.

    :param scale: the noise's, in units of the L1 sensitivity under the accountant's relation.
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.
    """

    kind = "laplace"
    delta = 0.0

    scale: float
    name: str

    def __post_init__(self) -> None:
        vars(self).update(scale=require_scale("scale", self.scale))
        require_short_text("name", self.name)

    @property
    def brief(self) -> str:
        return f"{self.name} (Laplace noise, scale = {self.scale:.6g} sensitivities)"

    def pair(self, neighboring: str) -> LaplacePair:
        return LaplacePair(1.0 / self.scale)

    def dots(self, gap: float, relation: Any) -> Any:
        from dp_accounting.pld import privacy_loss_distribution

        return privacy_loss_distribution.from_laplace_mechanism(
            self.scale, value_discretization_interval=gap
        )


@dataclass(frozen=True)
class RenyiDP(Event):
    """A release with bounds of its Rényi divergences, in both directions of the relation.

    :param divergences: (87,) in nats, at ``ORDERS`` of :mod:`pyro_dp.accounting.pld`.
        They are finite and do not fall.
    :param epsilon: the release is also (epsilon, 0)-DP; None: no such epsilon is stated.
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.
    """

    kind = "renyi_dp"
    delta = 0.0

    divergences: tuple[float, ...]
    epsilon: float | None
    name: str

    def __post_init__(self) -> None:
        values = self.divergences
        if not isinstance(values, tuple | list) or len(values) != len(ORDERS):
            raise ConfigurationError(f"divergences must be {len(ORDERS)} numbers.")
        found = [require_number("divergences", each, above=0.0, or_equal=True) for each in values]
        if np.any(np.diff(found) < -1e-6 * np.array(found[:-1])):  # beyond rounding
            raise ConfigurationError(
                "divergences must not fall with the order. True Rényi divergences never do, so "
                "these bounds are loose or wrong. State an epsilon and a delta: ApproximateDP."
            )
        vars(self).update(divergences=tuple(found))
        if self.epsilon is not None:
            most = require_number("epsilon", self.epsilon, above=0.0, or_equal=True)
            vars(self).update(epsilon=most)
        require_short_text("name", self.name)

    @property
    def brief(self) -> str:
        return f"{self.name} (Rényi divergence {self.divergences[0]:.4g} at order 2)"

    def pair(self, neighboring: str) -> RenyiPair:
        most = math.inf if self.epsilon is None else self.epsilon
        moments = tuple((ORDERS - 1.0) * self.divergences)
        return RenyiPair(most if most <= MOST_LOSS else math.inf, moments)


KINDS: dict[str, type[Event]] = {  # by their names in saved ledgers
    each.kind: each
    for each in (SubsampledGaussian, ApproximateDP, NonPrivateLook, Laplace, RenyiDP)
}
