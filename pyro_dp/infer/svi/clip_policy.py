"""Policies of clipping: the bound of a record's gradient, its choice and its report.

A policy is a value: :meth:`ClipPolicy.learned` is the next one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pyro_dp.infer.posterior.posterior import CHECK, CLIPPING, NOTHING_TO_CHECK, Status
from pyro_dp.infer.svi.eager_step import GradientStep, Report
from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.infer.svi.optimizers import StepPlan
from pyro_dp.mechanism import norm_histogram
from pyro_dp.mechanism.clipped_fraction import SHARE, ClippedFraction, ClippedFractions
from pyro_dp.mechanism.contributions import Block, with_bit
from pyro_dp.mechanism.norm_histogram import SIZE, with_bins
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Clip, Noise
from pyro_dp.utils.errors import ClippingWarning, ConfigurationError
from pyro_dp.utils.validation import require_scale, same

_TIGHTER, _MUCH_LOOSER = 1.5, 4.0  # times, than the bound that costs least
_CLIPPED = (
    "about {fraction:.0%} of the records were clipped at {bound:.3g}, the bound that costs least "
    "at this budget"
)
_CUT = (
    "clip={bound:.3g} clips about {fraction:.0%} of the records, which moves the "
    "posterior by more than the noise (clip=None would clip at about {better:.2g})"
)
_LOOSE = (
    "clip={bound:.3g} is far above the records' gradients, and makes the noise about "
    "{times:,.0f} times too large (clip=None would clip at about {better:.2g})"
)
_LEAVE_OUT = "Leave clip out, and DPSVI chooses the bound."


class Reading(NamedTuple):
    """A release, and public numbers by which it is read.

    :param released: estimates for all records, one for each of the blocks.
    :param noise_multiplier: sigma in the sums.
    """

    released: Sequence[Tensor]
    blocks: Sequence[Block]
    noise_multiplier: float
    sampler: RecordSampler
    plan: StepPlan


@dataclass(frozen=True, eq=False)
class ClipPolicy:
    """A bound C that stays, without a report.

    :param side: the block that reports clipping, if there is one.
    :param report: makes a record's part of that block.
    :param fractions: estimates, for each step, of the fraction of the records beyond C.
    """

    clip: Clip
    bound: float
    side: Sequence[Block] = ()
    report: Report | None = None
    fractions: ClippedFractions = field(default_factory=ClippedFractions)

    _named = ""  # the block beside the gradient
    names: ClassVar[tuple[str, ...]] = ()  # a state must have these parts

    def __post_init__(self) -> None:
        if self.share <= 0:
            of_report = sum(block.share for block in self.side)
            raise ConfigurationError(
                f"Clip.loss_share={self._of_loss:g} and {of_report:g} for {self._named} "
                "must sum to less than 1: the gradient needs a part of the privacy cost."
            )

    @property
    def _of_loss(self) -> float:
        return self.clip.loss_share if self.clip.loss else 0.0

    @property
    def share(self) -> float:
        """The gradient's share of the cost of a release."""
        return 1.0 - self._of_loss - sum(block.share for block in self.side)

    def blocks(self, size: int) -> list[Block]:
        """The blocks of the next release: gradient, loss, and the report of clipping.

        :param size: coordinates of the gradient.
        """
        blocks = [Block(size, self.bound, self.share)]
        if self.clip.loss is not None:
            blocks.append(Block(1, self.clip.loss, self.clip.loss_share))
        return [*blocks, *self.side]

    def of(self, step: GradientStep) -> GradientStep:
        return step

    @property
    def opens(self) -> bool:
        """Whether the next release has the norms alone, and moves nothing."""
        return False

    def learned(self, read: Reading) -> "ClipPolicy":
        return self

    def resumed(self, state: Mapping[str, Any]) -> "ClipPolicy":
        """:raises ConfigurationError: the policy's part of the state is damaged."""
        return replace(self, bound=require_scale("bound", state["bound"], infinite=True))

    @property
    def histogram_state(self) -> dict[str, Any] | None:
        return None

    @property
    def clipped(self) -> ClippedFraction | None:
        """The fraction of all N records that are clipped."""
        return self.fractions.mean()

    @property
    def status(self) -> Status:
        return NOTHING_TO_CHECK

    def judged(self, found: Status) -> Status:
        return found if self.status.is_ok else _joined(self.status, found)

    def warnings(self, status: Status) -> list[Warning]:
        """:param status: as of :meth:`judged`."""
        return []


def _joined(first: Status, other: Status) -> Status:
    return Status(
        CHECK, "; ".join(filter(None, (first.reason, other.reason))), first.cause or other.cause
    )


@dataclass(frozen=True, eq=False)
class Counted(ClipPolicy):
    """Each release has the number of records within the bound."""

    _named = "the bit of being clipped"

    def learned(self, read: Reading) -> ClipPolicy:
        self.fractions.add(read.released[-1:], read.sampler, read.noise_multiplier)
        return self

    @property
    def _many(self) -> ClippedFraction | None:
        return self.clipped if self.clipped and self.clipped.is_large else None

    @property
    def status(self) -> Status:
        many = self._many
        return Status(CHECK, f"clipped: {many}", CLIPPING) if many else NOTHING_TO_CHECK

    def warnings(self, status: Status) -> list[Warning]:
        if not (many := self._many):
            return []
        return [
            ClippingWarning(
                f"About {many.fraction:.0%} of the records were clipped at "
                f"clip={self.bound:g}, which biases the posterior. Raise clip until few are "
                "clipped; the noise grows with it."
            )
        ]


@dataclass(frozen=True, eq=False)
class Adaptive(Counted):
    """A bound that follows this number."""

    def learned(self, read: Reading) -> ClipPolicy:
        super().learned(read)
        assert self.clip.adaptive is not None
        within = read.released[-1].item() / read.sampler.size + 0.5
        return replace(self, bound=self.clip.adaptive.updated(self.bound, within))

    def warnings(self, status: Status) -> list[Warning]:
        return []


@dataclass(frozen=True, eq=False)
class Measured(ClipPolicy):
    """Each release has a histogram of the records' norms. If no bound is set, C follows it.

    :param histogram: the mean of all so far; None before the first.
    """

    histogram: HistogramBound | None = field(default=None, kw_only=True)

    _named = "the histogram of the norms"
    names = ("histogram",)

    @property
    def _chooses(self) -> bool:
        return self.clip.first_bound is None

    @property
    def opens(self) -> bool:
        return self._chooses and self.histogram is None

    def blocks(self, size: int) -> list[Block]:
        return [Block(SIZE, 1.0)] if self.opens else super().blocks(size)

    def of(self, step: GradientStep) -> GradientStep:
        return step.eager.of_norms_alone() if self.opens else step

    def learned(self, read: Reading) -> ClipPolicy:
        size, rate, dim = read.sampler.size, read.sampler.sample_rate, max(read.plan.dim, 1)
        of_many = replace(read.plan, dim=dim).is_of_many
        known = self.histogram or HistogramBound(size, dim, read.plan.noise, of_many)
        sd = read.blocks[-1].noise(read.noise_multiplier) / rate
        found = known.updated(read.released[-1], sd, rate)
        return replace(self, bound=found.bound if self._chooses else self.bound, histogram=found)

    def resumed(self, state: Mapping[str, Any]) -> ClipPolicy:
        saved = state["histogram"]
        histogram = None if saved is None else HistogramBound.resumed(saved)
        return replace(self, bound=super().resumed(state).bound, histogram=histogram)

    @property
    def histogram_state(self) -> dict[str, Any] | None:
        return None if self.histogram is None else self.histogram.state()

    @property
    def clipped(self) -> ClippedFraction | None:
        return None if self.histogram is None else self.histogram.clipped(self.bound)

    @property
    def status(self) -> Status:
        """Whether C is far from the best bound, or cuts off many records."""
        histogram, clipped = self.histogram, self.clipped
        if histogram is None or clipped is None:
            return NOTHING_TO_CHECK
        better, times = histogram.bound, self.bound / histogram.bound
        noise = self.bound * histogram.noise  # a coordinate's, all gradients together
        if self.bound < better / _TIGHTER and histogram.lost(self.bound) > noise:
            text = _CUT
        elif times > _MUCH_LOOSER:
            text = _LOOSE
        elif clipped.is_large and not histogram.of_many:
            text = _CLIPPED
        else:
            return NOTHING_TO_CHECK
        numbers = {"bound": self.bound, "better": better, "times": times}
        return Status(CHECK, text.format(fraction=clipped.fraction, **numbers), CLIPPING)

    def judged(self, found: Status) -> Status:
        if self._chooses and not self.status.is_ok:
            return _joined(found, self.status)
        return super().judged(found)

    def warnings(self, status: Status) -> list[Warning]:
        if status.cause != CLIPPING:
            return []
        return [ClippingWarning(f"{status}. {_LEAVE_OUT}")]


def by_histogram(clip: Clip, noise: Noise) -> ClipPolicy:
    if same(noise.multiplier, 0):
        return ClipPolicy(clip, math.inf if clip.first_bound is None else clip.first_bound)
    side = [Block(SIZE, 1.0, norm_histogram.SHARE)]
    return Measured(clip, 1.0 if clip.first_bound is None else clip.first_bound, side, with_bins)


def by_bit(clip: Clip, noise: Noise) -> ClipPolicy:
    bound = clip.first_bound
    assert bound is not None
    bits = ClippedFractions(clip.adaptive.share if clip.adaptive else SHARE)
    if clip.adaptive:
        return Adaptive(clip, bound, bits.blocks, with_bit, bits)
    if clip.report and bound != math.inf:
        return Counted(clip, bound, bits.blocks, with_bit, bits)
    return ClipPolicy(clip, bound)
