"""What clipping does to the gradients of a run of DPSVI, by the histogram of their norms."""

from dataclasses import dataclass

from pyro_dp.infer.posterior.status import CHECK, CLIPPING, NOTHING_TO_CHECK, Status
from pyro_dp.infer.svi.histogram_bound import HistogramBound
from pyro_dp.mechanism.clipped_fraction import ClippedFraction

_TIGHTER, _MUCH_LOOSER = 1.5, 4.0  # times, than the bound that costs least
_CLIPPED = (
    "about {fraction:.0%} of the records were clipped at {bound:.3g}, the bound that costs least "
    "at this budget"
)
_CUT = (
    "max_grad_norm={bound:.3g} clips about {fraction:.0%} of the records, which moves the "
    "posterior by more than the noise (max_grad_norm=None would clip at about {better:.2g})"
)
_LOOSE = (
    "max_grad_norm={bound:.3g} is far above the records' gradients, and makes the noise about "
    "{times:,.0f} times too large (max_grad_norm=None would clip at about {better:.2g})"
)


@dataclass(frozen=True, eq=False)
class Clipping:
    """What clipping at a bound does to the released gradients.

    :param histogram: of the norms.
    :param bound: C, the histogram's own or a user's.
    """

    histogram: HistogramBound
    bound: float

    @property
    def best(self) -> float:
        """The bound that costs least."""
        return self.histogram.bound

    @property
    def noise(self) -> float:
        """Of all released gradients together, in a coordinate."""
        return self.bound * self.histogram.noise

    def fraction(self) -> ClippedFraction:
        """Of all N records, that are clipped."""
        return self.histogram.clipped(self.bound)

    @property
    def is_tight(self) -> bool:
        """Whether C is well below the best bound, and cuts off more than the noise hides."""
        return self.bound < self.best / _TIGHTER and self._lost > self.noise

    def status(self) -> Status:
        """Whether C is far from the best bound, or cuts off many records."""
        clipped, times = self.fraction(), self.bound / self.best
        if self.is_tight:
            text = _CUT
        elif times > _MUCH_LOOSER:
            text = _LOOSE
        elif clipped.is_large and not self.histogram.of_many:
            text = _CLIPPED
        else:
            return NOTHING_TO_CHECK
        numbers = {"bound": self.bound, "better": self.best, "times": times}
        return Status(CHECK, text.format(fraction=clipped.fraction, **numbers), CLIPPING)

    @property
    def _lost(self) -> float:
        return self.histogram.lost(self.bound)
