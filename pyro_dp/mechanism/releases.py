"""The private half of a step: which records take part, and the release of their sums."""

import functools
from collections.abc import Sequence

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.accounting.ledger import SECURE, SEEDED
from pyro_dp.accounting.origins import Origin
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.peers import Alone
from pyro_dp.mechanism.release import release
from pyro_dp.mechanism.reservation import Reservation, Steps, gaussian
from pyro_dp.mechanism.sampling import DrawnAhead, Indices, RecordSampler
from pyro_dp.mechanism.settings import Noise
from pyro_dp.mechanism.streams import Randomness
from pyro_dp.utils.errors import ConfigurationError, PrivacyWarning, warn_user
from pyro_dp.utils.interrupts import Interrupts
from pyro_dp.utils.validation import LARGEST

ONE_BY_ONE = DrawnAhead(1, [])  # draws each sample when it is needed


class Releases:
    """Draws the records of a run's steps, and releases their sums.

    :param inference: the inference's name for users.
    :param method: its name in reports.
    :ivar interrupts: delays Ctrl-C while a step releases.
    :ivar last: the event of the last release; None before the first.
    :ivar noise: standard deviation of the last release's noise in a coordinate of its first block.
    """

    def __init__(
        self,
        accountant: PrivacyAccountant,
        peers: Alone,
        noise: Noise,
        steps: Steps,
        inference: str,
        method: str,
    ):
        self.peers = peers
        self.randomness = Randomness(noise.source, peers.rank)
        self.sum_type = FixedPointSum if noise.is_secure else ClippedSum
        self.interrupts = Interrupts()
        self.last: SubsampledGaussian | None = None
        self.noise = 0.0
        self._ahead = ONE_BY_ONE  # the sampler of the last sample
        notes = {SEEDED: self.randomness.seeded, SECURE: noise.is_secure, peers.note: peers.note}
        for note in filter(notes.get, notes):
            accountant.note(note)
        seeded, secure = self.randomness.seeded, noise.is_secure
        now = functools.partial(Origin.now, method, seeded=seeded, secure=secure)
        self.reservation = Reservation(inference, accountant, peers, steps, noise.multiplier, now)

    def must_look(self, needed: bool, sample_rate: float | None) -> bool:
        """Whether this rank must prepare its data now, because data are new on some rank.

        If so, all ranks have agreed on their settings, and those of a cluster on rank 0's ledger.

        :param needed: whether data are new on this rank.
        :raises ClusterError: a setting differs between ranks.
        """
        ours, peers = self.reservation, self.peers
        if peers.alone or not peers.look_anew(needed):
            return peers.alone and needed
        ours.share(
            {
                "num_steps": ours.plan.num_steps,
                "sample_rate": sample_rate,
                "sampling": ours.plan.sampling,
                "The inference": ours.inference,
                "noise_multiplier": None if ours.calibrates else ours.noise_multiplier,
                "The bound": float(ours.plan.bound),
                "secure": self.sum_type.__name__,
                "The number of steps taken": ours.plan.done,
            }
        )
        ours.plan.agree(peers)
        return True

    def sample(
        self, sampler: RecordSampler, position: int, ahead: DrawnAhead = ONE_BY_ONE
    ) -> Indices:
        """The indices of a step's records, ascending.

        :param ahead: may also draw the records of later steps, except in secure mode.
        """
        self.interrupts.check()
        stream = functools.partial(self.randomness.stream, "sampling")
        if self.randomness.secure:
            return sampler.draw(stream(position))
        if ahead is not self._ahead:  # other data
            self.forget()
            self._ahead = ahead
        left = self.reservation.plan.left
        return ahead.sample(lambda place: sampler.draw(stream(place)), position, left)

    def forget(self) -> None:
        self._ahead.forget()

    def in_sums(self, noise_multiplier: float) -> float:
        """sigma of the noise in the sums. In a federation it is larger than in the event."""
        return noise_multiplier * self.peers.noise_factor

    def begin(
        self, clipped: ClippedSum, noise_multiplier: float, sampler: RecordSampler
    ) -> SubsampledGaussian:
        """The event of the next release. From here on, Ctrl-C waits for the end of the step.

        :raises ConfigurationError: the noise is too large for floating-point numbers.
        """
        rate = sampler.sample_rate
        bound = max(block.bound for block in clipped.blocks)
        # Otherwise powers of the estimates could overflow.
        if noise_multiplier and noise_multiplier * bound / rate > LARGEST:
            raise ConfigurationError(
                f"The noise would have a standard deviation above {LARGEST:g}: lower the noise or "
                "the bound of a record, or raise the sample rate."
            )
        event = gaussian(noise_multiplier, rate, sampler.sampling)
        if self.last is None and noise_multiplier:
            self._warn_of_delta(sampler.size)
        self.last = event
        self.noise = clipped.blocks[0].noise(self.in_sums(noise_multiplier))
        self.interrupts.hold()
        return event

    def _warn_of_delta(self, size: int) -> None:
        accountant = self.reservation.accountant
        times = accountant.delta * size
        if times >= 1.0:
            text = (
                f"delta={accountant.delta:g} is large: {times:.3g} / N for N = {size:,} protected "
                "records. Publishing one of them as it is, picked at random, has delta = 1 / N. "
                f"Stay below, best at a tenth: PrivacyAccountant(..., delta={0.1 / size:.0e})."
            )
            accountant.note(text)
            warn_user(PrivacyWarning(text))

    def make(
        self,
        clipped: ClippedSum,
        event: SubsampledGaussian,
        position: int,
        step: int,
        public: Sequence[Tensor],
    ) -> list[Tensor]:
        """The noisy sums over the step's records, of all peers."""
        self.peers.add_up(clipped, event, step, public)
        make = functools.partial(
            release,
            clipped,
            accountant=self.reservation.accountant,
            event=event,
            noise=self.randomness.stream("noise", position),
        )
        return self.peers.released(make, clipped, event)
