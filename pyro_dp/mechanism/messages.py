"""The public messages between the processes of a cluster, or the owners of a federation.

Each message is a frozen dataclass that checks its fields, at the sender and at the receiver. So no
other code can mistake a text, None or 10^400 for a number. It is sent as a tuple of plain values
and tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from pyro_dp.accounting.events import require_short_text
from pyro_dp.utils.errors import ClusterError, ConfigurationError
from pyro_dp.utils.torch_state import torch_states
from pyro_dp.utils.validation import require_count, require_flag, require_number

M = TypeVar("M", bound="Message")
UNREADABLE = "The message of {speaker} cannot be read."


class Message:
    """Base of all messages.

    :raises ConfigurationError: (on construction) a field has the wrong type or value.
    """

    def packed(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]

    def of_all(self: M, exchange: Callable[[Any], list[Any]], speaker: str) -> list[M]:
        """Exchange messages of this kind. Returns everyone's, by rank.

        :param exchange: sends this process's packed message, and returns those of all processes.
        :param speaker: "rank" or "holder", for errors.
        :raises ClusterError: one of them is no message of this kind; names its speaker.
        """
        received = exchange(self.packed())
        return [self._like(each, f"{speaker} {rank}") for rank, each in enumerate(received)]

    def _like(self: M, packed: Any, speaker: str) -> M:
        try:
            if not isinstance(packed, tuple):
                raise TypeError
            return type(self)(*packed)
        except (ConfigurationError, TypeError, ValueError) as error:
            raise ClusterError(UNREADABLE.format(speaker=speaker)) from error


@dataclass(frozen=True)
class NoiseMultiplier(Message):
    """The noise multiplier sigma; None: it is not yet calibrated."""

    value: float | None

    def __post_init__(self) -> None:
        if self.value is not None:
            require_number("value", self.value, above=0.0, below=math.inf, or_equal=True)


@dataclass(frozen=True)
class CalibratedNoise(Message):
    """The noise multiplier sigma that one owner has calibrated to its own budget."""

    sigma: float

    def __post_init__(self) -> None:
        require_number("sigma", self.sigma, above=0.0, below=math.inf, or_equal=True)


@dataclass(frozen=True)
class Share(Message):
    """The share of the budget that is spent, in [0, 1]."""

    value: float

    def __post_init__(self) -> None:
        require_number("value", self.value, above=0.0, below=1.0, closed=True, or_equal=True)


@dataclass(frozen=True)
class Flag(Message):
    value: bool

    def __post_init__(self) -> None:
        require_flag("value", self.value)


@dataclass(frozen=True)
class Seed(Message):
    """64 random bits."""

    bits: int

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 0 <= self.bits < 2**64:
            raise ConfigurationError("bits must be an integer in [0, 2**64).")


@dataclass(frozen=True)
class Failure(Message):
    """The error of one process; an empty text if it has none."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ConfigurationError("text must be a string.")


@dataclass(frozen=True)
class Settings(Message):
    """Settings on which all processes must agree: plain values, by name."""

    by_name: dict[str, float | str | None]

    def __post_init__(self) -> None:
        if not isinstance(self.by_name, dict) or not all(
            isinstance(name, str) and isinstance(each, int | float | str | None)
            for name, each in self.by_name.items()
        ):
            raise ConfigurationError("by_name must hold plain values by name.")


@dataclass(frozen=True)
class Ledger(Message):
    """The ledger of rank 0 in a cluster, with the fields of its :class:`Reservation`.

    :param accountant: a state. The accountant that follows it checks it.
    :param noise_multiplier: sigma; None: it is not yet calibrated.
    :param lost: number of releases without a result.
    :param reservation: name of the run's reservation.
    """

    accountant: dict[str, Any]
    noise_multiplier: float | None
    lost: int
    reservation: str

    def __post_init__(self) -> None:
        if not isinstance(self.accountant, dict):
            raise ConfigurationError("accountant must be a state.")
        NoiseMultiplier(self.noise_multiplier)
        require_count("lost", self.lost, least=0)
        require_short_text("reservation", self.reservation)


@dataclass(frozen=True)
class Start(Message):
    """The first message in a cluster, or in a run there.

    :param settings: the fields of :class:`Settings`.
    :param states: states of torch's global generators; empty unless it comes from rank 0.
    :param ledger: rank 0's :class:`Ledger`, packed; None from other ranks.
    """

    settings: dict[str, float | str | None]
    states: list[Tensor]
    ledger: tuple[Any, ...] | None

    def __post_init__(self) -> None:
        Settings(self.settings)
        own = torch_states()[0]
        if not isinstance(self.states, list) or not all(
            isinstance(each, Tensor) and each.dtype == own.dtype and each.dim() == 1
            for each in self.states
        ):
            raise ConfigurationError("states must be a list of tensors of bytes.")
        if self.states and len(self.states[0]) != len(own):
            raise ConfigurationError("states must begin with that of the host's generator.")
        if self.ledger is not None:
            Ledger(*self.ledger)


Shape = tuple[int, tuple[int, ...], str]


@dataclass(frozen=True)
class Shapes(Message):
    """The arguments' names, and for each the number of rows, the shape of a row, and the type."""

    names: list[str]
    shapes: list[Shape]

    def __post_init__(self) -> None:
        for each in (self.names, self.shapes):
            if not isinstance(each, list) or len(each) != len(self.names):
                raise ConfigurationError("There must be a shape for each name.")
        for name, (rows, shape, kind) in zip(self.names, self.shapes, strict=True):
            require_count("rows", rows, least=0)
            if not isinstance(shape, tuple) or not all(isinstance(x, str) for x in (name, kind)):
                raise ConfigurationError("A shape must be a tuple, and names must be texts.")
            for size in shape:
                require_count("size", size, least=0)
