"""Clipping policies choose and report the bound of a record's gradient.

A policy is immutable: :meth:`ClipPolicy.learned` returns the next one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pyro_dp.infer.posterior.posterior import CHECK, CLIPPING, NOTHING_TO_CHECK, Status
from pyro_dp.infer.svi.eager_step import Report
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

_TIGHTER, _MUCH_LOOSER = 1.5, 4.0  # ratios to the bound of least error
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


class Reading(NamedTuple):
    """A release, and the public numbers that interpret it.

    :param released: estimates for all records, one for each block.
    :param noise_multiplier: sigma in the sums.
    """

    released: Sequence[Tensor]
    blocks: Sequence[Block]
    noise_multiplier: float
    sampler: RecordSampler
    plan: StepPlan


@dataclass(frozen=True, eq=False)
class ClipPolicy:
    """A constant bound C, without a report.

    :param side: the block that reports clipping, if there is one.
    :param report: makes a record's part of that block.
    :param fractions: estimates by step of the fraction of the records beyond C.
    """

    clip: Clip
    bound: float
    side: Sequence[Block] = ()
    report: Report | None = None
    fractions: ClippedFractions = field(default_factory=ClippedFractions)

    _report_name = ""
    state_keys: ClassVar[tuple[str, ...]] = ()  # that a saved state must have

    def __post_init__(self) -> None:
        if self.share <= 0:
            of_report = sum(block.share for block in self.side)
            raise ConfigurationError(
                f"Clip.loss_share={self._loss_share:g} and {of_report:g} for {self._report_name} "
                "must sum to less than 1: the gradient needs a part of the privacy cost."
            )

    @property
    def _loss_share(self) -> float:
        return self.clip.loss_share if self.clip.loss else 0.0

    @property
    def share(self) -> float:
        """The gradient's share of the cost of a release."""
        return 1.0 - self._loss_share - sum(block.share for block in self.side)

    def blocks(self, size: int) -> list[Block]:
        """The blocks of the next release: gradient, loss, and the report of clipping.

        :param size: coordinates of the gradient.
        """
        blocks = [Block(size, self.bound, self.share)]
        if self.clip.loss is not None:
            blocks.append(Block(1, self.clip.loss, self.clip.loss_share))
        return [*blocks, *self.side]

    @property
    def measures_norms_only(self) -> bool:
        """Whether the next release is the histogram alone, and no parameter moves."""
        return False

    def learned(self, read: Reading) -> "ClipPolicy":
        """The policy after a release."""
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
        """The status of clipping alone."""
        return NOTHING_TO_CHECK

    def judged(self, found: Status) -> Status:
        """A posterior's status, with the status of clipping."""
        return found if self.status.is_ok else _joined(self.status, found)

    def warnings(self, status: Status) -> list[Warning]:
        """Warnings of clipping, for a status from :meth:`judged`."""
        return []


def _joined(first: Status, other: Status) -> Status:
    return Status(
        CHECK, "; ".join(filter(None, (first.reason, other.reason))), first.cause or other.cause
    )


@dataclass(frozen=True, eq=False)
class Counted(ClipPolicy):
    """A constant bound. Each release counts the records within it."""

    _report_name = "the bit of being clipped"

    def learned(self, read: Reading) -> ClipPolicy:
        self.fractions.add(read.released[-1:], read.sampler, read.noise_multiplier)
        return self

    @property
    def status(self) -> Status:
        if (clipped := self.clipped) and clipped.is_large:
            return Status(CHECK, f"clipped: {clipped}", CLIPPING)
        return NOTHING_TO_CHECK

    def warnings(self, status: Status) -> list[Warning]:
        if not (clipped := self.clipped) or not clipped.is_large:
            return []
        return [
            ClippingWarning(
                f"About {clipped.fraction:.0%} of the records were clipped at "
                f"clip={self.bound:g}, which biases the posterior. Raise clip until few are "
                "clipped; the noise grows with it."
            )
        ]


@dataclass(frozen=True, eq=False)
class Adaptive(Counted):
    """A bound that adapts to the number of records within it."""

    def learned(self, read: Reading) -> ClipPolicy:
        super().learned(read)
        assert self.clip.adaptive is not None
        within = read.released[-1].item() / read.sampler.size + 0.5
        return replace(self, bound=self.clip.adaptive.updated(self.bound, within))

    def warnings(self, status: Status) -> list[Warning]:
        return []


@dataclass(frozen=True, eq=False)
class Measured(ClipPolicy):
    """Each release has a histogram of the records' norms. It chooses C unless the user sets it.

    :param histogram: the mean of all histograms so far; None before the first release.
    """

    histogram: HistogramBound | None = field(default=None, kw_only=True)

    _report_name = "the histogram of the norms"
    state_keys = ("histogram",)

    @property
    def _chooses(self) -> bool:
        return self.clip.first_bound is None

    @property
    def measures_norms_only(self) -> bool:
        return self._chooses and self.histogram is None

    def blocks(self, size: int) -> list[Block]:
        return [Block(SIZE, 1.0)] if self.measures_norms_only else super().blocks(size)

    def learned(self, read: Reading) -> ClipPolicy:
        size, rate, dim = read.sampler.size, read.sampler.sample_rate, max(read.plan.dim, 1)
        of_many = replace(read.plan, dim=dim).is_of_many
        before = self.histogram or HistogramBound(size, dim, read.plan.noise, of_many)
        sd = read.blocks[-1].noise(read.noise_multiplier) / rate
        found = before.updated(read.released[-1], sd, rate)
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
        """Whether C is far from the best bound, or clips many records."""
        histogram, clipped = self.histogram, self.clipped
        if histogram is None or clipped is None:
            return NOTHING_TO_CHECK
        better, times = histogram.bound, self.bound / histogram.bound
        noise = self.bound * histogram.noise  # in a coordinate of the mean gradient
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
        return [ClippingWarning(f"{status}. Leave clip out, and DPSVI chooses the bound.")]


def by_histogram(clip: Clip, noise: Noise) -> ClipPolicy:
    """The policy of DPSVI: releases have a histogram of the norms, unless there is no noise."""
    if same(noise.multiplier, 0):
        return ClipPolicy(clip, math.inf if clip.first_bound is None else clip.first_bound)
    side = [Block(SIZE, 1.0, norm_histogram.SHARE)]
    return Measured(clip, 1.0 if clip.first_bound is None else clip.first_bound, side, with_bins)


def by_bit(clip: Clip, noise: Noise) -> ClipPolicy:
    """The policy of PaperDPSVI: releases count the records within the bound, if asked."""
    bound = clip.first_bound
    assert bound is not None
    bits = ClippedFractions(clip.adaptive.share if clip.adaptive else SHARE)
    if clip.adaptive:
        return Adaptive(clip, bound, bits.blocks, with_bit, bits)
    if clip.report and bound != math.inf:
        return Counted(clip, bound, bits.blocks, with_bit, bits)
    return ClipPolicy(clip, bound)
