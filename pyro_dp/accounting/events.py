"""The entries of a ledger: records of releases, without behaviour."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyro_dp.accounting.amounts import up
from pyro_dp.accounting.bounded_pairs import Response
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice, require_number

SAMPLING = ("poisson", "fixed", "full")
LONGEST_TEXT = 200
# Remarks about the guarantee that a report reads again.
SEEDED = (
    "A run used a seed, so it can be repeated. It is not private against anyone who can guess "
    "the seed. Leave the seed out of runs whose results you publish."
)
SECURE = (
    "A run used secure=True: its noise and sampling come from the operating system's "
    "cryptographic generator, and its sums and noise are integers. Other runs in a shared "
    "ledger may not."
)
_FORMER = {  # as version 0.1 wrote these remarks
    "A seeded generator was used: the run can be repeated, and is not private against anyone who "
    "can guess the seed.": SEEDED,
    "secure=True was used: noise and sampling from the operating system's cryptographic generator, "
    "sums and noise in integers. A ledger that is shared may have other runs, too.": SECURE,
}


def current_note(text: str) -> str:
    """The same remark in the words of this version."""
    return _FORMER.get(text, text)


@dataclass(frozen=True)
class SubsampledGaussian:
    """One noisy sum of clipped per-record quantities. Inert: the engines say what it costs.

    :param noise_multiplier: noise standard deviation in units of the per-record bound C. Under
        ``add_or_remove_one`` (zero-out) the sum's sensitivity is C, under ``replace_one`` 2C. Zero
        is a non-private reference.
    :param sample_rate: the public probability, in (0, 1], that a record takes part.
    :param sampling: ``"poisson"`` (each record on its own), ``"fixed"`` (a fresh uniform subset
        without replacement, for ``replace_one``) or ``"full"`` (every record, rate 1).
    :raises ConfigurationError: if a setting is out of range.

    >>> from pyro_dp import PrivacyAccountant, SubsampledGaussian
    >>> for rate in (0.01, 0.1):
    ...     accountant = PrivacyAccountant(delta=1e-5)
    ...     accountant.record(SubsampledGaussian(2.0, sample_rate=rate), count=100)
    ...     print(f"rate {rate}: epsilon = {accountant.get_epsilon():.2f}")
    rate 0.01: epsilon = 0.19
    rate 0.1: epsilon = 2.34
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        sigma = require_number(
            "noise_multiplier", self.noise_multiplier, above=0.0, below=math.inf, or_equal=True
        )
        rate = require_number("sample_rate", self.sample_rate, above=0.0, below=1.0, closed=True)
        require_choice("sampling", self.sampling, SAMPLING)
        if self.sampling == "full" and rate != 1.0:
            raise ConfigurationError(
                f"sample_rate={rate!r} contradicts sampling='full': use 1.0, or sampling='poisson'."
            )
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "sample_rate", rate)


class Stated(abc.ABC):
    """A release that is private by itself. Each kind says in its own file what it costs."""

    name: str
    delta: float  # the probability of an infinite loss

    @property
    @abc.abstractmethod
    def pair(self) -> Any:
        """A pair that dominates it, apart from ``delta``: see :mod:`.bounded_pairs`."""

    @property
    @abc.abstractmethod
    def cost(self) -> str:
        """In words."""


@dataclass(frozen=True)
class ApproximateDP(Stated):
    """A release that is (epsilon, delta)-DP by itself, such as a private selection.

    The statement must hold under the accountant's own relation, for every outcome of earlier
    releases, and must have been fixed without looking at them.

    Several of them cost less than the sum of their epsilons. The engine ``"pld"`` composes them
    tightly, with each other and with runs: see :mod:`pyro_dp.accounting.bounded_pairs`.

    :param epsilon: in nats, >= 0.
    :param delta: in [0, 1).
    :param name: a short text that describes the release. It is public.
    :raises ConfigurationError: if a setting is out of range.

    >>> from pyro_dp import ApproximateDP, PrivacyAccountant
    >>> accountant = PrivacyAccountant(epsilon=1.0, delta=1e-5)
    >>> accountant.record(ApproximateDP(0.3, 0.0, "a histogram by another library"))
    >>> round(accountant.get_epsilon(), 3)
    0.3
    """

    epsilon: float
    delta: float
    name: str

    def __post_init__(self) -> None:
        eps = require_number("epsilon", self.epsilon, above=0.0, below=math.inf, or_equal=True)
        delta = require_number("delta", self.delta, above=0.0, below=1.0, or_equal=True)
        require_short_text("name", self.name)
        object.__setattr__(self, "epsilon", eps)
        object.__setattr__(self, "delta", delta)

    @property
    def pair(self) -> Response:
        return Response(self.epsilon)

    @property
    def cost(self) -> str:
        return f"epsilon = {up(self.epsilon)}, delta = {self.delta:.4g}"


@dataclass(frozen=True)
class NonPrivateLook:
    """A number of the data was looked at without noise: no guarantee is left.

    :param what: was looked at: a short text, which is public.
    :param time: when (UTC, ISO 8601), or an empty text.
    :raises ConfigurationError: if a text is not a short line.

    >>> from pyro_dp import NonPrivateLook, PrivacyAccountant
    >>> accountant = PrivacyAccountant(epsilon=1.0)
    >>> accountant.record(NonPrivateLook("a mean that was on a slide", "2026-01-31T12:00:00"))
    >>> accountant.get_epsilon()
    inf
    """

    what: str
    time: str = ""

    def __post_init__(self) -> None:
        require_short_text("what", self.what)
        if self.time != "":
            require_short_text("time", self.time)


Event = SubsampledGaussian | Stated | NonPrivateLook


def is_whole(event: Event) -> bool:
    """Whether it is a sum over all records with normal noise."""
    if not isinstance(event, SubsampledGaussian):
        return False
    return event.sample_rate == 1.0 and event.noise_multiplier > 0


def together(counts: Mapping[Any, int]) -> SubsampledGaussian:
    """The one sum over all records that costs as much as these: Gaussians compose to a Gaussian.

    :param counts: counts of events. Each event is :func:`is_whole`.
    """
    precision = math.fsum(n / event.noise_multiplier**2 for event, n in counts.items())
    return SubsampledGaussian(1 / math.sqrt(precision), 1.0, "full")


def require_short_text(name: str, value: Any, longest: int = LONGEST_TEXT) -> None:
    if not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= longest):
        raise ConfigurationError(f"{name} must be one line of text of 1 to {longest} characters.")


def brief(event: Event) -> str:
    """An event in a line of text."""
    if isinstance(event, Stated):
        return f"{event.name} ({event.cost})"
    if isinstance(event, NonPrivateLook):
        return f"non-private look: {event.what}" + (f" ({event.time})" if event.time else "")
    return (
        f"(noise_multiplier={event.noise_multiplier:.6g}, sample_rate={event.sample_rate:.6g}, "
        f"sampling={event.sampling!r})"
    )
