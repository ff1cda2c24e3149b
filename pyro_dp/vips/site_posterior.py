"""The posterior of VIPS: marginals of sites, their quantiles, and their widening by noise."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import scipy
import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.infer.posterior.gaussian_guide import base
from pyro_dp.infer.posterior.posterior import (
    NOTHING_TO_CHECK,
    Status,
    Summary,
    element_names,
    quantiles_of,
)
from pyro_dp.utils.linalg import cholesky
from pyro_dp.utils.torch_state import forked_rng

_NUM_DRAWS = 10_000  # for quantiles of families without a formula


class Family(NamedTuple):
    """Operations on the distributions of a family, without ``Independent`` around them.

    :param widened: adds noise to the centre, from a root (*shape, R) of its covariance.
    :param quantiles: quantiles of each element, (P, *shape), at probabilities (P, 1, ...).
    """

    widened: Callable[[Any, Tensor], Distribution]
    quantiles: Callable[[Any, Tensor], Tensor]


def centre(marginal: Distribution) -> Tensor | None:
    """The location or else the mean, which noise moves. None if the family cannot be widened."""
    plain = base(marginal)
    found: Tensor = plain.loc if hasattr(plain, "loc") else plain.mean
    return found if _family(marginal) else None


def widened(marginal: Distribution, root: Tensor) -> Distribution:
    """Add the variance of noise in the centre, within the family. A Dirichlet has a single number
    for its width, which matches the sum of the variances.

    :param root: root of the covariance of the noise, (*shape, R).
    """
    family = _family(marginal)
    if family is None or not root.any():
        return marginal
    wider = family.widened(base(marginal), root)
    return wider.to_event(len(marginal.event_shape) - len(wider.event_shape))


def quantiles(marginal: Distribution, probabilities: Tensor) -> Tensor:
    """Quantiles of each element: (P, *shape). Other families use 10,000 draws of a fixed seed."""
    shape = marginal.batch_shape + marginal.event_shape
    family = _family(marginal)
    if family is not None:
        at = probabilities.reshape(-1, *[1] * len(shape))
        return family.quantiles(base(marginal), at)
    with forked_rng():
        torch.manual_seed(0)
        draws = marginal.sample(torch.Size([_NUM_DRAWS])).double()
    return quantiles_of(draws, probabilities)


def covariance(marginal: Distribution) -> Tensor:
    """The covariance (d, d) of the flattened value."""
    own = base(marginal)
    if not own.event_shape:
        return own.variance.flatten().diag()
    if isinstance(own, torch.distributions.Dirichlet):
        mean, total = own.mean, own.concentration.sum(dim=-1)[..., None, None]
        blocks = (torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)) / (total + 1)
    elif isinstance(own, dist.MultivariateStudentT):  # Pyro's covariance is the squared scale
        factor = (own.df / (own.df - 2).clamp(min=0.0))[..., None, None]
        blocks = factor * own.scale_tril @ own.scale_tril.mT
    else:
        blocks = own.covariance_matrix
    return torch.block_diag(*blocks.reshape(-1, *blocks.shape[-2:]))


def _family(marginal: Distribution) -> Family | None:
    kind = type(base(marginal))
    return next((each for own, each in _FAMILIES.items() if issubclass(kind, own)), None)


def _wider_normal(normal: Any, root: Tensor) -> Distribution:
    return dist.Normal(normal.loc, (normal.scale.square() + _variance(root)).sqrt())


def _wider_student(student: Any, root: Tensor) -> Distribution:
    scale = (student.scale.square() + _variance(root)).sqrt()
    return dist.StudentT(student.df, student.loc, scale)


def _wider_normals(normal: Any, root: Tensor) -> Distribution:
    covariance = normal.covariance_matrix + root @ root.mT
    return dist.MultivariateNormal(normal.loc, scale_tril=cholesky(covariance))


def _wider_students(student: Any, root: Tensor) -> Distribution:
    spread = student.scale_tril @ student.scale_tril.mT + root @ root.mT
    return dist.MultivariateStudentT(student.df, student.loc, cholesky(spread))


def _wider_gamma(gamma: Any, root: Tensor) -> Distribution:
    rate = gamma.mean / (gamma.variance + _variance(root))
    return dist.Gamma(gamma.mean * rate, rate)


def _wider_dirichlet(dirichlet: Any, root: Tensor) -> Distribution:
    """Var p_k = m_k (1 - m_k) / (total + 1)."""
    mean, total = dirichlet.mean, dirichlet.concentration.sum(dim=-1)
    most = (mean * (1 - mean)).sum(dim=-1)
    wider = most / (most / (total + 1) + _variance(root).sum(dim=-1)) - 1
    # Noise alone never lowers the total below one.
    wider = torch.maximum(wider, total.clamp(max=1.0))
    return dist.Dirichlet(mean * wider.unsqueeze(-1))


def _variance(root: Tensor) -> Tensor:
    return root.square().sum(dim=-1)


def _normal_quantiles(normal: Any, at: Tensor) -> Tensor:
    return normal.mean + torch.special.ndtri(at.to(normal.mean)) * normal.stddev


def _student_quantiles(student: Any, at: Tensor) -> Tensor:
    root = student.scale_tril if hasattr(student, "scale_tril") else student.scale.unsqueeze(-1)
    df = student.df.unsqueeze(-1) if hasattr(student, "scale_tril") else student.df
    scale = root.square().sum(dim=-1).sqrt()
    return student.loc + _from_scipy(scipy.special.stdtrit, df, at) * scale


def _gamma_quantiles(gamma: Any, at: Tensor) -> Tensor:
    return _from_scipy(scipy.special.gammaincinv, gamma.concentration, at) / gamma.rate


def _dirichlet_quantiles(dirichlet: Any, at: Tensor) -> Tensor:
    own = dirichlet.concentration
    return _from_scipy(scipy.special.betaincinv, own, own.sum(dim=-1, keepdim=True) - own, at)


def _from_scipy(function: Callable, *arguments: Tensor) -> Tensor:
    found = function(*(each.detach().cpu().double().numpy() for each in arguments))
    return torch.from_numpy(np.asarray(found)).to(arguments[0].device)


_FAMILIES: dict[type, Family] = {
    torch.distributions.Normal: Family(_wider_normal, _normal_quantiles),
    torch.distributions.MultivariateNormal: Family(_wider_normals, _normal_quantiles),
    torch.distributions.StudentT: Family(_wider_student, _student_quantiles),
    dist.MultivariateStudentT: Family(_wider_students, _student_quantiles),
    torch.distributions.Gamma: Family(_wider_gamma, _gamma_quantiles),
    torch.distributions.Dirichlet: Family(_wider_dirichlet, _dirichlet_quantiles),
}


class SitePosterior(Summary, Mapping[str, Distribution]):
    """The public marginal distribution of each site, by name, in the model's own space.

    ``posterior["weights"]`` is a Pyro distribution. ``mean``, ``stddev``, ``covariance_matrix``,
    ``sample()`` and ``log_prob()`` belong to one flat vector (d,) of all elements, with names in
    :attr:`names`. In this vector the sites are independent.

    :param marginals: by site, with the uncertainty that the privacy noise adds.
    :param plain: the same without this uncertainty; ``None`` if there is none.
    :param status: whether the intervals can be published.

    >>> weights = dist.Normal(torch.tensor([0.0, 2.0]), 1.0).to_event(1)
    >>> posterior = SitePosterior({"weights": weights})  # as VIPS.posterior() returns it
    >>> posterior.names
    ('weights[0]', 'weights[1]')
    """

    def __init__(
        self,
        marginals: Mapping[str, Distribution],
        *,
        plain: Mapping[str, Distribution] | None = None,
        status: Status = NOTHING_TO_CHECK,
    ):
        self._marginals = dict(marginals)
        self._plain = dict(marginals if plain is None else plain)
        self._status = status

    def __getitem__(self, site: str) -> Distribution:
        return self._marginals[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._marginals)

    def __len__(self) -> int:
        return len(self._marginals)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the d elements: ``"weights[3]"``."""
        return tuple(n for site, shape in self._shapes.items() for n in element_names(site, shape))

    @property
    def mean(self) -> Tensor:
        """(d,); NaN where a distribution has none."""
        return _joined(each.mean for each in self.values())

    @property
    def stddev(self) -> Tensor:
        """(d,)."""
        return _joined(each.variance for each in self.values()).sqrt()

    @property
    def covariance_matrix(self) -> Tensor:
        """(d, d), with zeros between sites."""
        return torch.block_diag(*(covariance(each) for each in self.values()))

    @property
    def noise_share(self) -> Tensor:
        """Privacy noise's share of each variance: 1 - plain / noise-aware, in [0, 1], (d,)."""
        plain = _joined(each.variance for each in self._plain.values())
        aware = _joined(each.variance for each in self.values())
        # Two infinite variances give NaN.
        return (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)

    @property
    def plain(self) -> "SitePosterior":
        """The same posterior without the uncertainty that the privacy noise adds."""
        return SitePosterior(self._plain, status=self.status)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Flat draws ``(*sample_shape, d)``, by torch's global generator."""
        shape = torch.Size(sample_shape)
        drawn = (each.sample(shape).reshape(*shape, -1) for each in self.values())
        return torch.cat(list(drawn), dim=-1)

    def draws(self, num: int) -> dict[str, Tensor]:
        """Draws of each site, by torch's global generator: ``(num, *site shape)``."""
        return {site: each.sample(torch.Size([num])) for site, each in self.items()}

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of flat vectors (..., d)."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        total = value.new_zeros(value.shape[:-1])
        for (site, shape), part in zip(
            self._shapes.items(), value.split(sizes, dim=-1), strict=True
        ):
            total = total + self[site].log_prob(part.reshape(value.shape[:-1] + shape))
        return total

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Quantiles of each element at P probabilities, by site: ``(P, *site shape)``."""
        at = torch.tensor(probabilities, dtype=torch.float64)
        return {site: quantiles(each, at) for site, each in self.items()}

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {site: each.batch_shape + each.event_shape for site, each in self.items()}


def _joined(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in values])
