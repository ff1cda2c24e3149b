"""A regression's latents on the scale of the user's columns, with an explanation."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_dp.infer.posterior.explanation import DATA, Explanation
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.tabular.design import Design
from pyro_dp.tabular.glm_model import COEFFICIENTS, GROUP_DF, GROUP_SCALE, Source
from pyro_dp.utils.torch_state import forked_rng

_SEED = 0


@dataclass(frozen=True, eq=False)
class UserScale:
    """The design's coefficients are those of the source, and an intercept that thresholds replace.

    :param kept: the design's columns that the source has, and that the table shows.
    :param centre: the outcome's, which the intercept takes up.
    :param half: half width of the outcome, which scales all.
    """

    design: Design
    source: Source
    kept: Sequence[int]
    centre: float
    half: float

    @cached_property
    def matrix(self) -> Tensor:
        """(K, k): the user's K coefficients are ``matrix @ b`` of the model's."""
        return torch.tensor(self.design.to_user[:, self.kept] * self.half)

    @property
    def coefficients(self) -> Sequence[str]:
        """Names in the table."""
        return self.source.terms

    @property
    def others(self) -> list[str]:
        """Names of the elements of all else, in the order of :meth:`elements`."""
        found = [*self.thresholds, *self._positive]
        if self.source.group:
            name, levels = self.source.group
            found += [*(f"{name}[{level}]" for level in levels), f"sd of {name}"]
        return found

    @property
    def thresholds(self) -> list[str]:
        return [f"{low}|{high}" for low, high in itertools.pairwise(self.source.family.ordered)]

    @property
    def sites(self) -> list[str]:
        """The model's latents with rows of their own beside the coefficients."""
        group = self.source.group
        return [*self.source.family.latents, *([group[0]] if group else [])]

    def called(self, name: str) -> str:
        """An unconstrained coordinate of these sites, by its level where it has one."""
        site, _, place = name.partition("[")
        group = self.source.group
        return f"{site}[{group[1][int(place[:-1])]}]" if group and site == group[0] else name

    def mean(self, posterior: Posterior) -> Tensor:
        """Means of the coefficients."""
        found = self.matrix @ posterior[COEFFICIENTS].mean.double()
        found = found + self.centre * self._is_intercept
        return found[self.kept]

    def covariance(self, posterior: Posterior) -> Tensor:
        """Covariance of the coefficients, which are Gaussian."""
        covariance = posterior[COEFFICIENTS].covariance_matrix.double()
        return (self.matrix @ covariance @ self.matrix.mT)[self.kept][:, self.kept]

    def noise_share(self, posterior: Posterior) -> Tensor:
        """The noise's share of each coefficient's variance."""
        aware = self.covariance(posterior).diagonal()
        plain = self.covariance(posterior.plain).diagonal()
        return (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)

    def unknown(self, posterior: Posterior) -> list[str]:
        """Coefficients that the prior knows better than the records."""
        prior = torch.tensor(self.source.scales, dtype=torch.float64)
        before = (self.matrix * prior).square().sum(dim=1)[self.kept]
        mostly = self.covariance(posterior).diagonal() > before / 2
        return [name for name, each in zip(self.coefficients, mostly, strict=True) if each]

    def draws(self, posterior: Posterior, num: int) -> dict[str, Tensor]:
        """Draws by variable, (num, ...), always the same: coefficients, thresholds, and the others.

        Student's t mixes normals over an inverse gamma variance. So, conditional on these, the
        squared standard deviation of groups' intercepts is inverse gamma.
        """
        with forked_rng():
            torch.manual_seed(_SEED)
            drawn = {name: each.double() for name, each in posterior.draws(num).items()}
            group, levels = self.source.group or ("", [])
            gamma = torch.distributions.Gamma(0.5 * (GROUP_DF + len(levels)), 1.0)
            precision = gamma.sample((num,)).double()
        user = drawn[COEFFICIENTS] @ self.matrix.mT + self.centre * self._is_intercept
        found = {COEFFICIENTS: user[:, self.kept]}
        if self.source.family.ordered:
            found["thresholds"] = drawn["cutpoints"] - user[:, self._is_intercept.bool()]
        for name in self._positive:
            found[name] = drawn[name] * (self.half if name == "sigma" else 1.0)
        if group:
            own = drawn[group]
            rate = (GROUP_DF * GROUP_SCALE**2 + own.square().sum(dim=1)) / 2
            found[group] = own * self.half
            found[f"sd of {group}"] = (rate / precision).sqrt() * self.half
        return found

    def elements(self, draws: dict[str, Tensor]) -> Tensor:
        """(num, others), of :attr:`others`."""
        parts = [each.reshape(len(each), -1) for n, each in draws.items() if n != COEFFICIENTS]
        return torch.cat(parts, dim=1) if parts else draws[COEFFICIENTS][:, :0]

    @property
    def _is_intercept(self) -> Tensor:
        return torch.tensor([float(name == "Intercept") for name in self.design.names]).double()

    @property
    def _positive(self) -> list[str]:
        return [name for name in self.source.family.latents if name != "cutpoints"]


def by_terms(found: Explanation, posterior: Posterior, scale: UserScale) -> Explanation:
    """The same explanation of the model's latents, of the rows of a regression's table.

    A coefficient of the user's is a sum of the model's: the intercept takes up where numbers were
    centred. Its share of noise is that of the table. How sampling, clipping and noise divide it
    follows from theirs, weighted by the squares in that sum, as if they were uncorrelated. Latents
    without a row in the table (coefficients of missing values) are left out.
    """
    own = [place for place, name in enumerate(found.names) if _site(name) == COEFFICIENTS]
    others = [j for j, name in enumerate(found.names) if _site(name) in scale.sites]
    noise = scale.noise_share(posterior)
    squares = scale.matrix[scale.kept].square()
    variance = posterior[COEFFICIENTS].covariance_matrix.diagonal().double()
    parts = {
        name: squares @ (share[own].double() * variance)
        for name, share in found.shares.items()
        if name != DATA
    }
    total = sum(parts.values(), torch.zeros_like(noise))
    shares = {DATA: 1 - noise}
    for name, part in parts.items():
        shares[name] = noise * torch.where(total > 0, part / total, 1 / len(parts))
    names = {found.names[j]: scale.called(found.names[j]) for j in others}
    return replace(
        found,
        names=(*scale.coefficients, *names.values()),
        shares={
            name: torch.cat([share, found.shares[name][others].double()])
            for name, share in shares.items()
        },
    )


def _site(name: str) -> str:
    return name.split("[")[0]
