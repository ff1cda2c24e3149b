"""Few records with large gradients, which no histogram shows, but a curvature does."""

from dataclasses import dataclass

import numpy as np

from pyro_dp.mechanism.norm_histogram import Norms

_RARE = 0.1  # of the records, at most
_SEEN = 100.0  # standard deviations of a bin: so many records would be seen, wherever they are
_KNOWN = 24.0  # standard deviations of a bin: of fewer records nothing is seen


@dataclass(frozen=True)
class HiddenRecords:
    """
    :param count: how many there are, about.
    :param norm: of their gradients, about.
    """

    count: float
    norm: float

    def among(self, norms: Norms) -> Norms:
        """All N records: these, and the others as they were seen."""
        place = np.searchsorted(norms.norms, self.norm)
        seen = norms.counts * (1 - self.count / norms.counts.sum())
        return Norms(np.insert(norms.norms, place, self.norm), np.insert(seen, place, self.count))


def hidden(norms: Norms, information: float, sd: float) -> HiddenRecords | None:
    """Who must be there besides the records that are seen, if there is somebody.

    If the model holds, the squared norms of the records' gradients add up to the trace of their log
    likelihood's curvature (Bartlett's second identity), and near the posterior the gradients
    themselves to about zero. Where an outcome is rare, records without it have small gradients, and
    are all that a histogram shows; those with it lack in both sums. So there are k more, of norm r:
    k r^2 is what the curvature has beyond the squares that are seen, and k r as much as the norms
    that are seen add up to (less, where these do not point to one side: then r is larger still).

    They are believed in where they are rare, and too few to stand out of the noise. Else they would
    be seen, and it is the model that does not hold. Nor are they where noise hides everybody. Less
    than one record is a loss that is scaled down, such as a mean over the records.

    :param norms: of all records, as far as they are seen.
    :param information: the trace of the curvature; 0 where it is not known.
    :param sd: of the noise in a bin.
    """
    seen, size = float(norms.counts @ norms.norms), float(norms.counts.sum())
    lacking = information - float(norms.counts @ norms.norms**2)
    if lacking <= 0.0 or size < _KNOWN * sd:
        return None
    count = seen**2 / lacking
    if not 1.0 <= count <= min(_SEEN * sd, _RARE * size):
        return None
    return HiddenRecords(count, lacking / seen)
