"""Explanations of a posterior's width, and possible remedies, from released numbers alone."""

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
_COLUMNS = {DATA: "data and prior"}  # longer headings of shares
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

    It follows from the posterior, the ledger and the settings, so it is as public as the posterior.
    It prints the first limit, a table of shares, and what would help.

    **Half the noise, or more records.** Let P be the share of privacy noise (and clipping, if the
    width includes it) in an interval's squared width. Half the noise changes the squared width to
    1 - P + P / 4. With x times as many records, and a weak prior, it changes to
    (1 - P) / x + P / x^2. Both hold to first order in the noise, and not if the noise far exceeds
    the data.

    :param names: the names of the posterior's d coordinates.
    :param shares: shares of each interval's squared width, (d,), by cause. They sum to 1. "data" is
        the uncertainty due to finite data and the prior. The others are "privacy noise",
        "sampling" if steps sample records, and "clipping" if the width includes it. Their sum is
        the column "privacy" of the posterior's table, and the division among them is an estimate.
    :param status: the posterior's status.
    :param clipped: fraction of the records that were clipped; ``None``: it is unknown.
    :param epsilon: epsilon of the accountant's whole ledger.
    :param epsilon_at_half_noise: epsilon if every noise multiplier in the ledger were halved;
        ``None`` if a release in the ledger is not Gaussian, or has no noise.

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
        """The shares, averaged over the coordinates."""
        return {name: share.mean().item() for name, share in self.shares.items()}

    @property
    def limit(self) -> str:
        """The cause of the status if it is not ok, otherwise the largest share."""
        shares = self.mean_shares
        return self.status.cause or max(shares, key=lambda name: shares[name])

    @property
    def width_at_half_noise(self) -> float:
        """The width of an average interval with half the noise, over its present width."""
        return math.sqrt(1 - 0.75 * self._noise)

    @property
    def records_for_half_width(self) -> float:
        """The factor of N that makes intervals half as wide, at the same epsilon."""
        noise = self._noise
        return 2 * (1 - noise + math.sqrt((1 - noise) ** 2 + noise))

    @property
    def _noise(self) -> float:
        """P in the docstring of this class."""
        shares = self.mean_shares
        return shares[NOISE] + shares.get(CLIPPING, 0.0)

    def plot(self) -> Any:
        """Stacked bars of the shares.

        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("limits.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed.
        """
        names = self.names[:MOST_ROWS]
        figure, axes = with_rows("explanation.plot()", names, len(self.names))
        start, rows = torch.zeros(len(names)), range(len(names))
        for number, (name, share) in enumerate(self.shares.items()):
            label = _COLUMNS.get(name, name)
            axes.barh(rows, share[:MOST_ROWS], left=start, color=f"C{number}", label=label)
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
        data, *parts = self.shares.values()
        columns = [data, 1 - data, *parts]
        signed = [f"{sign} {name}" for sign, name in zip("=++", [*self.shares][1:], strict=False)]
        rows, head = [], ("", _COLUMNS[DATA], "privacy", *signed)
        for i, name in enumerate(self.names[:MOST_LINES]):
            rows.append((name, *(f"{column[i]:.0%}" for column in columns)))
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
    """A mixin, last among the bases: an inference that can explain its posterior's width."""

    @abc.abstractmethod
    def posterior(self, noise_aware: bool = True) -> Any:
        """The posterior so far."""

    def _noise_parts(self) -> Mapping[str, Tensor]:
        """The variances (d,) that are not due to the data, by cause, in a common unit."""
        return {NOISE: torch.ones(())}

    def explain(self) -> Explanation:
        """Explain what limits the posterior so far, and which epsilon or N would help.

        **Guarantee.** It is post-processing of released numbers, the ledger and the settings, and
        costs nothing.

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

    :param noise: the share of each variance that is not due to the data, (d,).
    :param parts: variances (d,) that divide it, in any unit. If they are 0, all is privacy noise.
    """
    total = sum(parts.values(), torch.zeros_like(noise))
    shares = {DATA: 1 - noise}
    for name, part in parts.items():
        alone = torch.full_like(noise, float(name == NOISE))
        shares[name] = noise * torch.where(total > 0, part / total, alone)
    return shares


def _epsilon_at_half_noise(accountant: PrivacyAccountant) -> float | None:
    """Epsilon at half the noise; None if an event is not Gaussian, or has no noise."""
    halved = {}
    for event, count in accountant.counted:
        if not isinstance(event, SubsampledGaussian) or not event.noise_multiplier:
            return None
        halved[replace(event, noise_multiplier=event.noise_multiplier / 2)] = count
    return composition.epsilon(halved, accountant.delta, accountant.neighboring, accountant.engine)
