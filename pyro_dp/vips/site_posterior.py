"""What VIPS found: the marginal distribution of each site."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_dp.infer.posterior.intervals import element_names
from pyro_dp.infer.posterior.status import NOTHING_TO_CHECK, Status
from pyro_dp.infer.posterior.summary import Summary
from pyro_dp.vips import families


class SitePosterior(Summary, Mapping[str, Distribution]):
    """The marginal distribution of each site, by name, in the model's own space; all of it public.

    ``posterior["weights"]`` is a Pyro distribution. ``mean``, ``stddev``, ``covariance_matrix``,
    ``sample()`` and ``log_prob()`` are those of one flat vector (d,) of all sites' elements, called
    :attr:`names`, in which sites are independent of each other.

    :param marginals: by site, the noise's uncertainty included.
    :param plain: the same without it; ``None``: there is none in it.
    :param status: whether the intervals can be published.

    >>> import torch
    >>> import pyro.distributions as dist
    >>> from pyro_dp.vips import SitePosterior
    >>> weights = dist.Normal(torch.tensor([0.0, 2.0]), 1.0).to_event(1)
    >>> posterior = SitePosterior({"weights": weights})  # as VIPS.posterior() returns it
    >>> posterior.names, posterior["weights"].mean.tolist()
    (('weights[0]', 'weights[1]'), [0.0, 2.0])
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
        """Of the d elements: ``"weights[3]"``."""
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
        return torch.block_diag(*(families.covariance(each) for each in self.values()))

    @property
    def noise_share(self) -> Tensor:
        """How much of each variance is privacy: 1 - plain / noise-aware, in [0, 1], (d,)."""
        plain = _joined(each.variance for each in self._plain.values())
        aware = _joined(each.variance for each in self.values())
        # Two variances that are infinite have no share.
        return (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)

    @property
    def status(self) -> Status:
        """Whether the intervals can be published. It was told from released numbers alone."""
        return self._status

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
        """Of flat vectors (..., d)."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        total = value.new_zeros(value.shape[:-1])
        for (site, shape), part in zip(
            self._shapes.items(), value.split(sizes, dim=-1), strict=True
        ):
            total = total + self[site].log_prob(part.reshape(value.shape[:-1] + shape))
        return total

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, Tensor]:
        """Of each element of each site.

        :param probabilities: P numbers in (0, 1).
        :returns: by site, ``(P, *site shape)``.
        """
        at = torch.tensor(probabilities, dtype=torch.float64)
        return {site: families.quantiles(each, at) for site, each in self.items()}

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {site: each.batch_shape + each.event_shape for site, each in self.items()}


def _joined(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in values])
