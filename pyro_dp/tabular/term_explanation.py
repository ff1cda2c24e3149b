"""The limits of a regression's intervals, by its terms."""

from dataclasses import replace

import torch

from pyro_dp.infer.posterior.explanation import DATA, Explanation
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.tabular.glm_model import COEFFICIENTS
from pyro_dp.tabular.user_scale import UserScale


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
    aware = scale.covariance(posterior).diagonal()
    plain = scale.covariance(posterior.plain).diagonal()
    noise = (1 - plain / aware).nan_to_num(0.0).clamp(0.0, 1.0)
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
