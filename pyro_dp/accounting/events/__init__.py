"""The kinds of events of a ledger, one in each file, and their registry."""

from pyro_dp.accounting.events.approximate_dp import ApproximateDP
from pyro_dp.accounting.events.event import Event
from pyro_dp.accounting.events.laplace import Laplace
from pyro_dp.accounting.events.nonprivate_look import NonPrivateLook
from pyro_dp.accounting.events.renyi_dp import RenyiDP
from pyro_dp.accounting.events.subsampled_gaussian import SubsampledGaussian

KINDS: dict[str, type[Event]] = {  # by their names in saved ledgers
    each.kind: each
    for each in (SubsampledGaussian, ApproximateDP, NonPrivateLook, Laplace, RenyiDP)
}

__all__ = [
    "KINDS",
    "ApproximateDP",
    "Event",
    "Laplace",
    "NonPrivateLook",
    "RenyiDP",
    "SubsampledGaussian",
]
