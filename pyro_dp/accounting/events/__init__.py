"""The kinds of events of a ledger, one in each file, and their registry."""

from pyro_dp.accounting.events.approximate_dp import ApproximateDP as ApproximateDP
from pyro_dp.accounting.events.event import Event as Event
from pyro_dp.accounting.events.laplace import Laplace as Laplace
from pyro_dp.accounting.events.nonprivate_look import NonPrivateLook as NonPrivateLook
from pyro_dp.accounting.events.renyi_dp import RenyiDP as RenyiDP
from pyro_dp.accounting.events.subsampled_gaussian import SubsampledGaussian as SubsampledGaussian

KINDS: dict[str, type[Event]] = {  # by their names in saved ledgers
    each.kind: each
    for each in (SubsampledGaussian, ApproximateDP, NonPrivateLook, Laplace, RenyiDP)
}
