"""Posteriors of Pyro models, Gaussian or as draws, with their summaries and status."""

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    ComposeTransform,
    IndependentTransform,
    MultivariateNormal,
    Transform,
)

from pyro_dp.records.global_draw import Latent
from pyro_dp.utils.display import (
    MOST_LINES,
    MOST_ROWS,
    Displayed,
    Table,
    left_out,
    numbers,
    with_rows,
)
from pyro_dp.utils.linalg import cholesky, covariance, dense, power
from pyro_dp.utils.validation import require_number

OK, CHECK, DO_NOT_PUBLISH = "ok", "check", "do not publish"
LEVELS = (OK, CHECK, DO_NOT_PUBLISH)
STEPS, NOISE, CLIPPING, MODEL = "steps", "privacy noise", "clipping", "model"  # causes

REMEDIES = {
    STEPS: "A new run needs new budget: more records, a larger epsilon, a simpler model, or "
    "features scaled alike (PrivateGLM scales them).",
    NOISE: "A new run needs new budget: fewer latents, more records or a larger epsilon.",
    CLIPPING: "A new run needs new budget: lower bounds where a few records are far above all "
    "others, more records or a larger epsilon.",
    MODEL: "A new run needs new budget and a model with more variance: a negative binomial for "
    "counts, or an unknown scale for numbers.",
    "": "Another prior costs nothing (Evidence.posterior). Another model needs new budget.",
}
_PUBLISH = {
    CHECK: "You may publish it together with its status.",
    DO_NOT_PUBLISH: "You may publish this status, but not the intervals.",
}
_LEVEL = 0.95


@dataclass(frozen=True)
class Status:
    """Whether a posterior can be trusted, by released numbers alone.

    :param level: ``"ok"``, ``"check"`` or ``"do not publish"``.
    :param reason: a clause with a number, or empty.
    :param cause: ``"steps"``, ``"privacy noise"``, ``"clipping"``, ``"model"``, or empty.

    >>> from pyro_dp.infer.posterior.posterior import Status
    >>> print(Status("check", "the last step was 3.2 interval widths long", "steps"))
    check: the last step was 3.2 interval widths long
    """

    level: str = OK
    reason: str = ""
    cause: str = ""

    @staticmethod
    def worst(of: Iterable["Status"]) -> "Status":
        """The first status of the worst level."""
        return max(of, key=lambda status: LEVELS.index(status.level))

    @property
    def is_ok(self) -> bool:
        """Whether there is nothing to check."""
        return self.level == OK

    def __str__(self) -> str:
        return f"{self.level}: {self.reason}" if self.reason else self.level

    @property
    def line(self) -> str:
        """The status, as printed below a posterior."""
        return f"status: {self}"

    @property
    def lines(self) -> list[str]:
        """The status, and the recommended next step unless it is ok."""
        next_step = [] if self.is_ok else [f"next: {_PUBLISH[self.level]} {REMEDIES[self.cause]}"]
        return [self.line, *next_step]


NOTHING_TO_CHECK = Status()


class Interval(NamedTuple):
    """The intervals of a site's elements, in the site's support.

    :param lower: lower ends, of the site's shape.
    :param upper: upper ends, of the site's shape.
    """

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Line:
    """A row of the summary: one element of a site, such as ``"w[3]"``.

    :param plain: the ends of its interval without the noise.
    :param aware: the ends of its interval.
    """

    name: str
    median: float
    plain: tuple[float, float]
    aware: tuple[float, float]

    @property
    def privacy(self) -> float:
        """The part of the interval's squared width that the noise adds, in [0, 1]."""
        without, width = (end - start for start, end in (self.plain, self.aware))
        if not 0.0 < width < math.inf:
            return 0.0
        return max(1.0 - (without / width) ** 2, 0.0)


def element_names(site: str, shape: Sequence[int]) -> list[str]:
    """The names of a site's elements: ``"w[1, 2]"``, or ``"w"`` if the site is a scalar."""
    if not len(shape):
        return [site]
    indices = product(*map(range, shape))
    return [f"{site}[{', '.join(map(str, each))}]" for each in indices]


class Summary(Displayed):
    """A mixin: intervals, tables and plots from quantiles with and without the noise."""

    @property
    @abc.abstractmethod
    def plain(self) -> "Summary":
        """The same posterior without the uncertainty that the privacy noise adds."""

    _status: Status

    @property
    def status(self) -> Status:
        """Whether the intervals can be published, by released numbers alone."""
        return self._status

    @abc.abstractmethod
    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Quantiles of each element at P probabilities, by site, ``(P, *site shape)``."""

    def intervals(self, level: float = _LEVEL) -> dict[str, Interval]:
        """Central intervals of the elements, by site, in the site's support.

        :param level: probability of an interval, in (0, 1).
        :raises ConfigurationError: level is out of range.
        """
        found = self.quantiles(_ends(level))
        return {site: Interval(ends[0], ends[1]) for site, ends in found.items()}

    def plot(self, level: float = _LEVEL) -> Any:
        """A forest plot of the intervals.

        The dark part of a bar is the interval without the noise. The light part is the widening by
        the noise. The status stands below, and markers are hollow if it is not ok.

        :param level: the intervals' level, in (0, 1).
        :returns: a ``matplotlib.figure.Figure``; ``figure.savefig("posterior.png")`` keeps it.
        :raises ConfigurationError: matplotlib is not installed, or level is out of range.
        """
        lines, status = self._lines(level), self.status
        first = lines[:MOST_ROWS]
        names, rows = [line.name for line in first], range(len(first))
        figure, axes = with_rows("posterior.plot()", names, len(lines))
        for ends, width, color, label in (
            ([line.aware for line in first], 1.5, "C1", f"{level:.0%} interval, with the noise"),
            ([line.plain for line in first], 4.0, "C0", "without the noise"),
        ):
            lower, upper = zip(*ends, strict=True)
            axes.hlines(rows, lower, upper, linewidth=width, color=color, label=label)
        medians, fill = [line.median for line in first], "C3" if status.is_ok else "white"
        axes.plot(medians, rows, "o", color="C3", markerfacecolor=fill, label="median")
        axes.set_xlabel(status.line, fontsize="small", wrap=True)
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")
        return figure

    def _blocks(self) -> list[Table | str]:
        """A table with a row for each element, and the status."""
        lines = self._lines(_LEVEL)
        first = lines[:MOST_LINES]
        rows, head = [], ("", "median", f"{_LEVEL:.0%} interval", "privacy")
        is_aware = self.status.is_ok or any(line.plain != line.aware for line in lines)
        medians = numbers([line.median for line in first])
        ends = numbers([end for line in first for end in line.aware])
        for line, median, low, high in zip(first, medians, ends[::2], ends[1::2], strict=True):
            privacy = f"{line.privacy:.0%}" if is_aware else "-"
            rows.append((line.name, median, f"{low} to {high}", privacy))
        below = left_out(len(lines), "posterior.intervals()")
        return [Table(head, rows, "Posterior"), *below, *self.status.lines]

    def _lines(self, level: float) -> list[Line]:
        """A line for each element of each site."""
        lower, upper = _ends(level)
        at, lines = (lower, 0.5, upper), list[Line]()
        aware, plain = self.quantiles(at), self.plain.quantiles(at)
        for site, values in aware.items():
            names = element_names(site, values.shape[1:])
            ends, without = (each.reshape(3, -1).T.tolist() for each in (values, plain[site]))
            for name, (low, mid, high), (start, _, end) in zip(names, ends, without, strict=True):
                lines.append(Line(name, mid, (start, end), (low, high)))
        return lines


def _ends(level: float) -> tuple[float, float]:
    require_number("level", level, above=0.0, below=1.0)
    return (1 - level) / 2, (1 + level) / 2


_NO_GAUSSIAN = "A posterior's mean and covariance must be finite, and the covariance positive."
_NUM_DRAWS = 10_000  # for quantiles without a closed form


class Posterior(Summary, MultivariateNormal):
    """A public Gaussian of the unconstrained latents, in the guide's order.

    It is a ``torch.distributions.MultivariateNormal``: ``mean``, ``stddev``,
    ``covariance_matrix``, ``sample()`` and ``log_prob()`` are those of the flat vector (d,) of
    unconstrained latents. Its coordinates have :attr:`names`. In contrast, :meth:`draws`,
    :meth:`quantiles` and :meth:`intervals` return values in each site's support.

    The covariance may include the uncertainty that the privacy noise adds. :attr:`noise_share` is
    the noise's share of each variance.

    :param latents: the sites, in the order of the flat vector.
    :param mean: (d,).
    :param covariance: (d, d), or variances (d,).
    :param plain: the covariance without the noise, in either shape; ``None``: ``covariance``
        includes no noise.
    :param status: whether the intervals can be published.
    :raises ArithmeticError: mean or covariance are not finite, or the covariance is not positive.

    >>> sep = DPSEP(model, guide, accountant=accountant, noise=Noise(source=0))
    >>> result = sep.run(heights, progress=False)
    >>> lower, upper = sep.posterior().quantiles([0.025, 0.975])["height"]
    >>> print(f"{lower:.2f} to {upper:.2f}")
    1.69 to 1.71
    """

    def __init__(
        self,
        latents: Sequence[Latent],
        mean: Tensor,
        covariance: Tensor,
        *,
        plain: Tensor | None = None,
        status: Status = NOTHING_TO_CHECK,
    ):
        try:
            root = cholesky(dense(covariance))
        except torch.linalg.LinAlgError as error:
            raise ArithmeticError(_NO_GAUSSIAN) from error
        if not (mean.isfinite().all() and root.isfinite().all() and root.diagonal().min() > 0):
            raise ArithmeticError(_NO_GAUSSIAN)
        super().__init__(mean, scale_tril=root)
        self._latents = tuple(latents)
        self._status = status
        self._aware = dense(covariance)
        self._plain = self._aware if plain is None else dense(plain)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the d coordinates: ``"w[3]"`` is the fourth unconstrained number of w."""
        return tuple(n for each in self._latents for n in element_names(each.name, each.shape))

    @property
    def noise_share(self) -> Tensor:
        """The noise's share of each variance, 1 - plain / noise-aware, in [0, 1], (d,)."""
        share = 1 - self._plain.diagonal() / self._aware.diagonal()
        return share.nan_to_num(0.0).clamp(0.0, 1.0)  # NaN if both variances underflow

    @property
    def plain(self) -> "Posterior":
        """The same posterior without the uncertainty that the privacy noise adds."""
        return Posterior(self._latents, self.mean, self._plain, status=self.status)

    def __getitem__(self, site: str) -> "Posterior":
        """The marginal posterior of one site.

        :raises KeyError: the posterior has no site of this name.
        """
        for each in self._latents:
            if each.name == site:
                part = slice(each.start, each.stop)
                return Posterior(
                    [replace(each, start=0, stop=each.stop - each.start)],
                    self.mean[part],
                    self._aware[part, part],
                    plain=self._plain[part, part],
                    status=self.status,
                )
        raise KeyError(f"{site!r}: the sites are {', '.join(each.name for each in self._latents)}")

    def draws(self, num: int) -> dict[str, Tensor]:
        """Joint draws of all sites, by site, ``(num, *site shape)``.

        They use torch's global generator.
        """
        flat = self._flat(num)
        return {each.name: own_space(each, flat) for each in self._latents}

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Quantiles of each element of each site.

        They are exact if the element is a monotone function of one coordinate. Otherwise, as for a
        simplex, they use 10,000 draws with a fixed seed.

        :param probabilities: P numbers in (0, 1).
        :returns: by site, ``(P, *site shape)``.
        """
        at = torch.tensor(probabilities).to(self.mean)
        return {each.name: self._quantiles(each, at) for each in self._latents}

    def expand(self, batch_shape: Any, _instance: Any = None) -> MultivariateNormal:
        """As ``MultivariateNormal.expand``."""
        gaussian = MultivariateNormal(self.loc, scale_tril=self.scale_tril)
        return gaussian.expand(batch_shape, _instance)

    def _flat(self, num: int) -> Tensor:
        """Draws of the flat vector, (num, d)."""
        return self.sample((num,))

    def _quantiles(self, latent: Latent, at: Tensor) -> Tensor:
        if not _is_elementwise(latent.transform):
            return quantiles_of(own_space(latent, self._fixed_draws(latent)), at)
        offset = torch.special.ndtri(at).unsqueeze(1) * self.stddev
        first, last, below, above = (
            own_space(latent, self.mean + each)
            for each in (-self.stddev, self.stddev, -offset, offset)
        )
        return torch.where(last < first, below, above)

    def _fixed_draws(self, latent: Latent) -> Tensor:
        """Flat draws of one site with a fixed seed, the other sites at zero."""
        part = slice(latent.start, latent.stop)
        normal = torch.randn(
            _NUM_DRAWS,
            latent.stop - latent.start,
            generator=torch.Generator().manual_seed(0),
            dtype=self.mean.dtype,
        ).to(self.mean)
        draws = self.mean.new_zeros(_NUM_DRAWS, len(self.mean))
        draws[:, part] = self.mean[part] + normal @ cholesky(self._aware[part, part]).mT
        return draws


def own_space(latent: Latent, flat: Tensor) -> Tensor:
    """Values of a site in its support, from flat unconstrained vectors (..., d)."""
    part = flat[..., latent.start : latent.stop]
    return latent.transform(part.reshape(flat.shape[:-1] + latent.shape))


def _is_elementwise(transform: Transform) -> bool:
    """Whether each output element is a monotone function of one input element."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    if isinstance(transform, ComposeTransform):
        return all(_is_elementwise(part) for part in transform.parts)
    events = transform.domain.event_dim, transform.codomain.event_dim
    return events == (0, 0) and transform.bijective


def quantiles_of(draws: Tensor, at: Tensor) -> Tensor:
    """Quantiles (P, ...) of draws (K, ...) at P probabilities."""
    ranks = (at * (len(draws) - 1)).round().long()
    return draws.sort(dim=0).values[ranks]


class SampledPosterior(Posterior):
    """A public posterior of draws of the unconstrained latents.

    :meth:`draws`, :meth:`quantiles` and :meth:`intervals` are those of the draws. As a
    ``MultivariateNormal`` it is the Gaussian with their mean and covariance.

    :param latents: the sites, in the order of the flat vector.
    :param sample: K draws, (K, d).
    :param plain: the covariance without the uncertainty of the noise, (d, d).
    :param status: whether the intervals can be published.
    :raises ArithmeticError: draws are not finite, or fewer than d.
    """

    def __init__(self, latents: Sequence[Latent], sample: Tensor, plain: Tensor, *, status: Status):
        super().__init__(latents, sample.mean(0), covariance(sample), plain=plain, status=status)
        self._sample = sample

    @property
    def plain(self) -> "SampledPosterior":
        """The same posterior without the noise's uncertainty: draws move towards their mean."""
        # The optimal transport map between Gaussians moves draws least.
        root, back = power(self._aware, 0.5), power(self._aware, -0.5)
        transport = back @ power(root @ self._plain @ root, 0.5) @ back
        sample = self.mean + (self._sample - self.mean) @ transport
        return SampledPosterior(self._latents, sample, self._plain, status=self.status)

    def __getitem__(self, site: str) -> "SampledPosterior":
        found = super().__getitem__(site)
        latent = next(each for each in self._latents if each.name == site)
        sample = self._sample[:, latent.start : latent.stop]
        return SampledPosterior(found._latents, sample, found._plain, status=self.status)

    def _flat(self, num: int) -> Tensor:
        return self._sample[torch.randint(len(self._sample), (num,))]

    def _quantiles(self, latent: Latent, at: Tensor) -> Tensor:
        return quantiles_of(own_space(latent, self._sample), at)
