"""A regression's latents on the scale of the user's columns, with an explanation."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dp.infer.posterior.explanation import DATA, Explanation
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.tabular.glm_model import COEFFICIENTS, GROUP_DF, GROUP_SCALE
from pyro_dp.utils.torch_state import forked_rng

_SEED = 0


@dataclass(frozen=True, eq=False)
class UserScale:
    """
    :param names: names of the user's K coefficients.
    :param of_levels: those of them that only records of a level inform.
    :param matrix: (K, k): of the model's coefficients they are ``matrix @ b``.
    :param prior: standard deviations of these before the data, (k,).
    :param centre: the outcome's, which the intercept takes up.
    :param half: half width of the outcome, which scales all.
    :param ordinal: levels of the outcome, between which thresholds lie; None: there are none.
    :param positive: names of the family's other latents.
    :param group: name of the groups' latent.
    :param group_levels: its levels.
    """

    names: Sequence[str]
    of_levels: Set[str]
    matrix: Tensor
    prior: Tensor
    centre: float
    half: float
    ordinal: Sequence[object] | None
    positive: Sequence[str]
    group: str | None
    group_levels: Sequence[object]

    @property
    def coefficients(self) -> list[str]:
        """Names in the table: thresholds replace the intercept of ordered levels."""
        return [name for name in self.names if self.ordinal is None or name != "Intercept"]

    @property
    def others(self) -> list[str]:
        """Names of the elements of all else, in the order of :meth:`elements`."""
        found = [] if self.ordinal is None else self.thresholds
        found = [*found, *self.positive]
        if self.group is not None:
            found += [f"{self.group}[{level}]" for level in self.group_levels]
            found += [f"sd of {self.group}"]
        return found

    @property
    def thresholds(self) -> list[str]:
        assert self.ordinal is not None
        pairs = zip(self.ordinal, self.ordinal[1:], strict=False)
        return [f"{low}|{high}" for low, high in pairs]

    @property
    def sites(self) -> list[str]:
        """The model's latents with rows of their own beside the coefficients."""
        ordinal = [] if self.ordinal is None else ["cutpoints"]
        return [*ordinal, *self.positive, *([] if self.group is None else [self.group])]

    def called(self, name: str) -> str:
        """An unconstrained coordinate of these sites, by its level where it has one."""
        site, _, place = name.partition("[")
        return f"{site}[{self.group_levels[int(place[:-1])]}]" if site == self.group else name

    def mean(self, posterior: Posterior) -> Tensor:
        """Means of the coefficients."""
        found = self.matrix @ posterior[COEFFICIENTS].mean.double()
        found = found + self.centre * self._is_intercept
        return found[self._kept]

    def covariance(self, posterior: Posterior) -> Tensor:
        """Covariance of the coefficients, which are Gaussian."""
        covariance = posterior[COEFFICIENTS].covariance_matrix.double()
        return (self.matrix @ covariance @ self.matrix.mT)[self._kept][:, self._kept]

    def noise_share(self, posterior: Posterior) -> Tensor:
        """The noise's share of each coefficient's variance."""
        aware = self.covariance(posterior).diagonal()
        plain = self.covariance(posterior.plain).diagonal()
        return (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)

    def unknown(self, posterior: Posterior) -> list[str]:
        """Coefficients that the prior knows better than the records."""
        before = (self.matrix * self.prior).square().sum(dim=1)[self._kept]
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
            gamma = torch.distributions.Gamma(0.5 * (GROUP_DF + len(self.group_levels)), 1.0)
            precision = gamma.sample((num,)).double()
        user = drawn[COEFFICIENTS] @ self.matrix.mT + self.centre * self._is_intercept
        found = {COEFFICIENTS: user[:, self._kept]}
        if self.ordinal is not None:
            found["thresholds"] = drawn["cutpoints"] - user[:, self._is_intercept.bool()]
        for name in self.positive:
            found[name] = drawn[name] * (self.half if name == "sigma" else 1.0)
        if self.group is not None:
            own = drawn[self.group]
            rate = (GROUP_DF * GROUP_SCALE**2 + own.square().sum(dim=1)) / 2
            found[self.group] = own * self.half
            found[f"sd of {self.group}"] = (rate / precision).sqrt() * self.half
        return found

    def elements(self, draws: dict[str, Tensor]) -> Tensor:
        """(num, others), of :attr:`others`."""
        parts = [each.reshape(len(each), -1) for n, each in draws.items() if n != COEFFICIENTS]
        return torch.cat(parts, dim=1) if parts else draws[COEFFICIENTS][:, :0]

    @property
    def _is_intercept(self) -> Tensor:
        return torch.tensor([float(name == "Intercept") for name in self.names]).double()

    @property
    def _kept(self) -> list[int]:
        return [j for j, name in enumerate(self.names) if name in self.coefficients]


def by_terms(found: Explanation, posterior: Posterior, scale: UserScale) -> Explanation:
    """The same explanation, of the rows of a regression's table.

    A coefficient of the user's is a sum of the model's: the intercept takes up where numbers were
    centred. Its share of noise is that of the table. How sampling, clipping and noise divide it
    follows from theirs, weighted by the squares in that sum, as if they were uncorrelated. Latents
    without a row in the table (coefficients of missing values) are left out.

    :param found: the explanation of the model's latents.
    :param posterior: that of the same latents.
    """
    own = [place for place, name in enumerate(found.names) if _site(name) == COEFFICIENTS]
    others = [j for j, name in enumerate(found.names) if _site(name) in scale.sites]
    noise = scale.noise_share(posterior)
    squares = scale.matrix[[scale.names.index(name) for name in scale.coefficients]].square()
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
