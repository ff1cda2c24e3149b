"""The steps of one inference at all holders of a federation.

A step, when all goes well: each holder computes its sums and sees that its budget allows the
release; all agree that they are at the same step with the same settings, parameters and public
draws; each enters the release in its own ledger and journal, and uploads its sums with its share of
the noise; the total goes to all. Two rounds.

Others learn that a holder failed, and not why: what an error says is for the owner of the data.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import Event
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.federation import Federation
from pyro_dp.mechanism.messages import CalibratedNoise, Ledger, Settings
from pyro_dp.mechanism.peers import Peers
from pyro_dp.utils.errors import ClusterError, ClusterWarning
from pyro_dp.utils.torch_state import set_torch_states

_FAILED = (
    "Holder {holders} failed, so all holders abandoned what they were doing. Its own error says "
    "why."
)
_LEFT = (
    "Only {left} of the {holders} holders stayed to the end. The others' records count as "
    "absent since they left, so the posterior moves away from them."
)


class Holders(Peers):
    """One inference in a federation, seen from one of its holders.

    :param federation: of the holders.
    :param accountant: of this holder.
    """

    _speaker = "holder"
    own_ledgers = True

    def __init__(self, federation: Federation, accountant: PrivacyAccountant):
        super().__init__(federation)
        self._federation = federation
        self._accountant = accountant
        self.noise_factor = federation.noise_factor

    @property
    def note(self) -> str:
        return self._federation.note

    def common(self, settings: Settings, ledger: Ledger) -> Ledger:
        """Public draws are those of a generator that all have agreed on, and none has chosen.

        :returns: this holder's.
        """
        self._require_equal(settings, self.exchange(settings))
        self._draws = self._federation.agreed_states()
        set_torch_states(self._draws)
        return ledger

    def agreed_noise(self, noise_multiplier: float) -> float:
        """The largest: budgets may differ, and what is left of them."""
        return max(each.sigma for each in self.exchange(CalibratedNoise(noise_multiplier)))

    def add_up(
        self, clipped: ClippedSum, event: Event, step: int, public: Sequence[Tensor]
    ) -> None:
        """:raises PrivacyBudgetExceeded: this holder's budget has no room for the release."""
        self._accountant.require_room(event)
        # How long it computed is for nobody to know: it tells of the number of sampled records.
        self._agree_on(clipped, event, step, public, 0.0)
        clipped.in_shares(self._federation.honest, self._federation.add)

    def released(
        self, make: Callable[[], list[Tensor]], clipped: ClippedSum, event: Event
    ) -> list[Tensor]:
        """Each holder records the event for itself."""
        return make()

    def warnings(self) -> list[Warning]:
        """Of a run that some holders left."""
        left = len(self._federation.present)
        if left == self._federation.size:
            return []
        return [ClusterWarning(_LEFT.format(holders=self._federation.size, left=left))]

    def _say_failed(self, ranks: list[int], error: BaseException | None) -> None:
        if error is None:
            holders = " and ".join(str(self._federation.present[rank]) for rank in ranks)
            raise ClusterError(_FAILED.format(holders=holders))
