"""The limits of a private posterior, and possible remedies, from released numbers alone."""

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.infer.posterior.posterior import CLIPPING, MODEL, NOISE, STEPS, Status
from pyro_dp.mechanism.clipped_fraction import ClippedFraction
from pyro_dp.utils.display import MOST_LINES, MOST_ROWS, Displayed, Table, left_out, up, with_rows

DATA, SAMPLING = "data", "sampling"
_MORE_RECORDS = "More records or a larger epsilon would help most."
_HELPS = {
    DATA: "More records would help most.",
    NOISE: _MORE_RECORDS,
    SAMPLING: "A larger sample rate or more steps would lower it, at a higher privacy cost.",
    CLIPPING: _MORE_RECORDS,
}
_COLUMNS = {DATA: "data and prior"}  # headings of shares whose names say too little
_SHARES = "{first} up {share:.0%} of the interval variance on average{others}. {helps}"
_FIRST = {
    STEPS: "The search had not settled. The shares below leave that out.",
    CLIPPING: "Clipping may have shifted the mean. The shares below say what makes intervals wide.",
    MODEL: "The model limits this posterior first: outcomes vary more than it says.",
    NOISE: "Privacy noise limits this posterior first. If it is far larger than the data, the "
    "prior makes the width, which counts in the first column.",
}
_HALF = (
    "Halving the noise's standard deviation in every release of the ledger needs epsilon {half} "
    "instead of {spent}."
)
_WIDTHS = (
    "Intervals would be {width:.2f} times as wide with half the noise. Intervals half as wide need "
    "{records:.1f} times as many records."
)


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Displayed):
    """The causes of the width of a posterior's intervals, and how to make them narrower.

    It is made from the posterior, the ledger and the settings. So it is post-processing of released
    numbers, and as public as the posterior. It prints as a sentence that names the first limit, a
    table, and a sentence on what would help.

    **Half the noise, or more records.** Let P be the share of the privacy noise in an interval's
    squared width, with that of clipping where the width includes it. Half the noise makes the
    squared width 1 - P + P / 4. With x times as many records, P falls to P / x^2 and 1 - P to
    (1 - P) / x, if the prior says little. So four times as many records bring the noise to the
    share that half the noise would. Intervals are half as wide at (1 - P) / x + P / x^2 = 1 / 4.
    This is to first order in the noise. It does not hold where the noise hides the records.

    :param names: names of the d coordinates: those of the posterior.
    :param shares: shares in each interval's squared width, (d,), by cause. They sum to 1. "data" is
        the uncertainty that the N records and the prior leave. The others are "privacy noise",
        "sampling" if steps see a part of the records, and "clipping" if the width includes it. The
        division among these others is an estimate. Their sum is the column "privacy" of the
        posterior's table.
    :param status: the posterior's.
    :param clipped: fraction of the records that were clipped; ``None``: it is unknown.
    :param epsilon: spent, of the accountant's whole ledger.
    :param epsilon_at_half_noise: epsilon if all the ledger's noise multipliers were half as large;
        ``None`` if the ledger has releases of another kind, or without noise.

    >>> sep = DPSEP(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> sep.explain().limit
    'data'
    """

    names: Sequence[str]
    shares: Mapping[str, Tensor]
    status: Status
    clipped: ClippedFraction | None
    epsilon: float
    epsilon_at_half_noise: float | None

    @property
    def mean_shares(self) -> dict[str, float]:
        """The shares on average over the coordinates."""
        return {name: share.mean().item() for name, share in self.shares.items()}

    @property
    def limit(self) -> str:
        """The first limit: the cause of the status if that is not ok, else the largest share."""
        shares = self.mean_shares
        return self.status.cause or max(shares, key=lambda name: shares[name])

    @property
    def width_at_half_noise(self) -> float:
        """Width of an average interval with half the noise, over its present width."""
        return math.sqrt(1 - 0.75 * self._noise)

    @property
    def records_for_half_width(self) -> float:
        """How many times as many records make intervals half as wide, at the same epsilon."""
        noise = self._noise
        return 2 * (1 - noise + math.sqrt((1 - noise) ** 2 + noise))

    @property
    def _noise(self) -> float:
        """P."""
        shares = self.mean_shares
        return shares[NOISE] + shares.get(CLIPPING, 0.0)

    def plot(self) -> Any:
        """Stacked bars: the shares of each coordinate's interval.

        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("limits.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed.
        """
        shown = self.names[:MOST_ROWS]
        figure, axes = with_rows("explanation.plot()", shown, len(self.names))
        start, rows = torch.zeros(len(shown)), range(len(shown))
        for place, (name, share) in enumerate(self.shares.items()):
            look = dict(color=f"C{place}", label=_COLUMNS.get(name, name))
            axes.barh(rows, share[:MOST_ROWS], left=start, **look)
            start = start + share[:MOST_ROWS]
        axes.set_xlim(0.0, 1.0)
        notes = f"share of the interval's squared width\n{self.status.line}"
        axes.set_xlabel(notes, fontsize="small", wrap=True)
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")
        return figure

    def _blocks(self) -> list[Table | str]:
        return [self._headline(), *self._table(), *self._advice(), *self.status.lines]

    def _headline(self) -> str:
        if self.status.cause:
            return _FIRST[self.status.cause]
        limit, shares = self.limit, self.mean_shares
        first = "Data and prior make" if limit == DATA else f"{limit.capitalize()} makes"
        others = "".join(
            f", {_COLUMNS.get(name, name)} {share:.0%}"
            for name, share in shares.items()
            if name != limit
        )
        return _SHARES.format(first=first, share=shares[limit], others=others, helps=_HELPS[limit])

    def _table(self) -> list[Table | str]:
        shown = self.names[:MOST_LINES]
        data, *parts = self.shares.values()
        columns = [data, 1 - data, *parts]
        signed = [f"{sign} {name}" for sign, name in zip("=++", [*self.shares][1:], strict=False)]
        rows, head = [], ("", _COLUMNS[DATA], "privacy", *signed)
        for place, name in enumerate(shown):
            rows.append((name, *(f"{column[place]:.0%}" for column in columns)))
        rows.append(("on average", *(f"{column.mean():.0%}" for column in columns)))
        below = left_out(len(self.names), "explanation.shares")
        return [Table(head, rows, "Shares of the interval variance"), *below]

    def _advice(self) -> list[str]:
        text = []
        if self.epsilon_at_half_noise is not None:
            half, spent = up(self.epsilon_at_half_noise), up(self.epsilon)
            text.append(_HALF.format(half=half, spent=spent))
        if self.status.cause in ("", CLIPPING):
            width, records = self.width_at_half_noise, self.records_for_half_width
            text.append(_WIDTHS.format(width=width, records=records))
        if self.clipped is not None:
            text.append(f"Clipped records: {self.clipped}.")
        return text


class Explained(abc.ABC):
    """An inference that can say what limits its posterior. It stands last among the bases."""

    @abc.abstractmethod
    def posterior(self, noise_aware: bool = True) -> Any:
        """The posterior found so far."""

    def _noise_parts(self) -> Mapping[str, Tensor]:
        """The causes of the part of the variances that is not of the data.

        :returns: variances (d,), in a common unit, by the names of an explanation's shares.
        """
        return {NOISE: torch.ones(())}

    def explain(self) -> Explanation:
        """Explain what limits the posterior so far, and which epsilon or N would help.

        **Guarantee.** It reads the posterior, numbers that were released, the ledger and the
        settings. That is post-processing, and costs nothing. Two runs that released the same
        numbers have the same explanation, whatever their data.

        :raises ConfigurationError: as :meth:`posterior`.
        """
        posterior = self.posterior()
        accountant: PrivacyAccountant = self.accountant  # type: ignore[attr-defined]
        return Explanation(
            tuple(posterior.names),
            shares_of(posterior.noise_share, self._noise_parts()),
            posterior.status,
            getattr(self, "clipped_fraction", None),
            accountant.get_epsilon(),
            _epsilon_at_half_noise(accountant),
        )


def shares_of(noise: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shares of an :class:`Explanation`.

    :param noise: the share of all that is not of the data, (d,).
    :param parts: its parts, (d,), in any unit; if all are zero, it is privacy noise.
    """
    total = sum(parts.values(), torch.zeros_like(noise))
    shares = {DATA: 1 - noise}
    for name, part in parts.items():
        alone = torch.full_like(noise, float(name == NOISE))
        shares[name] = noise * torch.where(total > 0, part / total, alone)
    return shares


def _epsilon_at_half_noise(accountant: PrivacyAccountant) -> float | None:
    """Epsilon at half the noise. None: some events are not Gaussian, or have no noise."""
    halved = {}
    for event, count in accountant.counted:
        if not isinstance(event, SubsampledGaussian) or not event.noise_multiplier:
            return None
        halved[replace(event, noise_multiplier=event.noise_multiplier / 2)] = count
    settings = accountant.delta, accountant.neighboring, accountant.engine
    return composition.epsilon(halved, *settings)
