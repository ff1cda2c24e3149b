"""Global latents, seen as parts of one flat vector of unconstrained numbers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.constraints import Constraint

from pyro_dp.records.plate import Sites
from pyro_dp.utils.errors import ModelError


@dataclass(frozen=True)
class Latent:
    """One latent site of the model outside the private plate.

    :param shape: of the unconstrained value.
    :param transform: from unconstrained space to the site's own.
    :param start: the flat vector holds it in ``flat[start:stop]``.
    """

    name: str
    shape: torch.Size
    transform: Transform
    start: int
    stop: int

    @property
    def is_real(self) -> bool:
        """Whether its unconstrained value is its value."""
        middle = torch.full(self.shape, 0.5)
        return torch.equal(self.transform(middle), middle)

    def part(self, flat: Tensor) -> Tensor:
        """Its unconstrained value."""
        return flat[self.start : self.stop].reshape(self.shape)


def latents_of(values: Sites, prior: Sites, *, automatic: bool) -> Iterator[Latent]:
    """
    :param values: sites of a guide, in the order of the flat vector.
    :param prior: the model's sites of the same names, replayed with the guide's values.
    :param automatic: the guide is an autoguide, which works in unconstrained space.
    :raises ModelError: sites do not fit; names the first.
    """
    start = 0
    for name, site in values.items():
        support = prior[name]["fn"].support
        if not (automatic or _is_real(support)):
            raise ModelError(
                f"Latent site {name!r} of the model is constrained, and the guide's Gaussian is "
                "not: use an autoguide, which is Gaussian in unconstrained space."
            )
        if site["fn"].shape() != prior[name]["fn"].shape():
            raise ModelError(f"Site {name!r} has another shape in the guide than in the model.")
        transform = biject_to(support)
        value = transform.inv(site["value"]).detach()
        if transform(value).requires_grad:
            raise ModelError(
                f"The support of site {name!r} depends on another latent: give it a fixed support, "
                "and shift or scale its value."
            )
        yield Latent(name, value.shape, transform, start, start + value.numel())
        start += value.numel()


def _is_real(support: Constraint) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return isinstance(support, type(constraints.real))
