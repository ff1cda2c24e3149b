"""The opening of DPSEP: histograms of norms alone, which set the scale of the looks to come."""

import math
from collections.abc import Sequence

from torch import Tensor

from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.infer.ep.norm_counts import MeanHistogram
from pyro_dp.infer.ep.problem import EPProblem
from pyro_dp.infer.posterior.gaussian import Gaussian

_MEDIAN = 0.455  # a squared standard normal number has this median
_FAR_TOO_SMALL = 3.0  # median of the squared residuals, in units of the scale


def opened(
    released: Sequence[Tensor],
    noises: Sequence[float],
    problem: EPProblem,
    posterior: Gaussian,
    root: Tensor,
    size: int,
) -> tuple[Gaussian, float, Frame]:
    """The first q, the curvature of a record there, and the frame of the first look.

    :param released: a histogram of the parts' norms for each group of coordinates.
    :param noises: standard deviations of their noise.
    :param root: the opening's W, (d, d).
    :param size: N.
    """
    groups = problem.groups
    medians = [
        MeanHistogram(counts, sd, size).opening_norms(len(group)).median
        for counts, sd, group in zip(released, noises, groups, strict=True)
    ]
    posterior, medians = _rescaled(problem, posterior, root, medians)
    median = medians[0]
    if len(groups) > 1:  # each has parts of norm 1 then
        root = root.clone()
        for group, own in zip(groups, medians, strict=True):
            root[group] /= own
        median = math.sqrt(len(groups))
    return posterior, median**2, Frame.of(root, median**2, 2 * median)


def _rescaled(
    problem: EPProblem, posterior: Gaussian, root: Tensor, medians: list[float]
) -> tuple[Gaussian, list[float]]:
    """q with a residuals' scale that fits the opening, and the norms there.

    If the first scale is far too small, all scores are large, and looks would be clipped until they
    have climbed. The score of the scale's logarithm is Z^2 - 1 with Z the residual in units of the
    scale, and Fisher's information is 2. So the norm's median says Z^2's.

    :param medians: medians of the norms, one for each group of coordinates.
    """
    slope, groups = problem.moments.log_scale, problem.groups
    if slope is None or len(groups) == 1:
        return posterior, medians
    if slope.nonzero().squeeze(1).tolist() != groups[1].tolist():
        return posterior, medians
    along = root @ slope
    length = along.norm().item()
    squared = 1 + math.sqrt(max((medians[1] / length) ** 2 - 2, 0.0))
    if squared < _FAR_TOO_SMALL:
        return posterior, medians
    factor = squared / _MEDIAN  # by which the variance rises
    mean = posterior.mean.clone()
    mean[problem.places] += root @ along * (0.5 * math.log(factor) / length**2)
    smaller = math.sqrt((_MEDIAN + 1) / (factor * (squared + 1)))
    usual = length * math.sqrt(2 + (1 - _MEDIAN) ** 2)
    moved = Gaussian(posterior.precision @ mean, posterior.precision)
    return moved, [smaller * medians[0], usual]
