"""The uncertainty that the privacy noise adds to a posterior's mean, to first order."""

import torch
from torch import Tensor


def mean_noise(
    covariance: Tensor, places: Tensor, variance: float, extrapolated: tuple[Tensor, float] | None
) -> Tensor:
    """Covariance of the noise in the mean, (d, d).

    With Sigma the posterior's covariance and v the variance of the noise in a coordinate of eta::

        centred release      v Sigma^2
        uncentred            v Sigma (I + (|mu|^2 I + mu mu') / (2 kappa^2)) Sigma

    The mean is Sigma eta. Noise e in eta moves it by Sigma e; noise E in the precision by -Sigma E
    mu, unless the release is centred, so that E enters eta as E mu, too. E has variance v / kappa^2
    on the diagonal and half of it off the diagonal.

    :param covariance: Sigma, (d, d).
    :param places: the coordinates that records see, and that have noise.
    :param variance: v.
    :param extrapolated: mean (d,) and kappa of an uncentred release.
    """
    noise = torch.eye(len(places)).to(covariance)
    if extrapolated is not None:
        mean, weight = extrapolated
        mu = mean[places]
        noise = noise + (mu @ mu * noise + torch.outer(mu, mu)) / (2 * weight**2)
    gain = covariance[:, places]
    return variance * gain @ noise @ gain.T
