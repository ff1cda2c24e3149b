"""How far the noise and the clipping of DP-SEP move a Gaussian posterior, in nats.

The bounds are like those of appendix A of Vinaroz & Park 2022 (arXiv 2111.13219). No inference uses
them.

Gaussians have natural parameters: precision L, eta = L mean. Noise is added to a symmetric matrix
in coordinates in which its Euclidean norm is its Frobenius norm (off-diagonals times sqrt 2). So
N(0, s^2) per coordinate is a matrix E with variance s^2 on the diagonal, s^2/2 off it.
"""

import math
from typing import Any

import torch
from scipy.special import chdtri, ndtri
from torch import Tensor

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import LARGEST, require_number, require_scale


def sep_kl_bound(
    precision: Tensor,
    mean: Tensor,
    *,
    eta_noise: float,
    precision_noise: float,
    beta: float,
    centre: Tensor | None = None,
    reverse: bool = False,
) -> float:
    """A bound on the KL between SEP's posterior and DP-SEP's, with probability 1 - beta.

    Let q = N(mean, L^-1). The noisy q' has precision L + E and eta' = L mean + e + E centre. Here
    e ~ N(0, eta_noise^2 I), and E is an independent symmetric matrix of Gaussian noise. Then::

        KL(q || q') <= (phi(r) F + W / (1 - r)) / 2,       phi(r) = (-log(1-r) - r) / r^2
        KL(q' || q) <= (psi(r) F + W / (1 - r)^2) / 2,     psi(r) = (log(1-r) + r/(1-r)) / r^2

    Let A = L^-1/2 E L^-1/2 and g = e - E (mean - centre). Then -r bounds the smallest eigenvalue of
    A from below, and F bounds its squared Frobenius norm. W bounds ``g' L^-1 g``. Each of the three
    fails with probability at most beta / 3.

    *Derivation.* Let a_i be the eigenvalues of A. Then ``2 KL(q || q') = sum_i (a_i - log(1+a_i)) +
    g' (L+E)^-1 g``. The function (a - log(1+a)) / a^2 decreases in a. The reverse is likewise.
    Consider y = L^-1/2 v over the unit vectors v, and let h be standard normal. The increments of
    y' E y have no more variance than those of ``sqrt(2) s norm(y) h'y``. By Sudakov and Fernique,
    E[-min a_i] <= ``s sqrt(2 |L^-1| tr L^-1)``. For L = l I this is s sqrt(2d) / l. The function
    -min a_i is convex and Lipschitz in standard normals, with constant ``s |L^-1|``. So its median
    is at most its mean (Kwapień 1994). It exceeds its median by ``s |L^-1| z`` with probability at
    most 1 - Phi(z). F and W bound quadratic forms of Gaussians.

    *Condition*: r < 1, that is, the noise leaves the precision positive definite with the stated
    probability. If it fails there is no bound, and this returns ``math.inf``.

    *Tightness*, in simulations (d = 1 to 20, condition numbers 1 to 10^4, beta = 0.05). If
    ``s sqrt(2 |L^-1| tr L^-1)`` is 0.02, the bound is 1.2 to 2.7 times the 0.95-quantile of the KL.
    At 0.25 it is up to 5 times and, reversed, up to 9. It grows without limit as r approaches 1.

    *Not covered*:

    * clipping (:func:`clipped_kl`).
    * the effect of one step's noise on the sites of later steps. (The last step's noise has none.
      Nor has any if sites do not depend on the cavity, as in linear-Gaussian models.)
    * an eigenvalue floor that is active.
    * noise with one standard deviation for all entries on and above the diagonal, as in the
      authors' code.

    *The paper* (Vinaroz & Park 2022) has such a bound as Theorem 4.1. We did not have its text, so
    the derivation above is our own. No argument can bound the expectation over the noise. L + E is
    indefinite with positive probability. Even if it is not, its smallest eigenvalue has positive
    density at 0. So g' (L+E)^-1 g has no mean unless g = 0. Nor may log det L replace
    E[log det(L+E)] in KL(q || q'). It enters negated, so Jensen's inequality bounds from below. The
    product of the factors' largest eigenvalues bounds those of a product of positive definite
    matrices, but E is not one.

    The bound depends on the precision and the mean, hence on data: it is for analysis, and private
    only where both are. A :class:`NotPrivateWarning` says so.

    :param precision: (d, d), symmetric and positive definite: the posterior without noise.
    :param mean: (d,).
    :param eta_noise: standard deviation of each entry of e, in the posterior's eta: N times that of
        the average factor.
    :param precision_noise: standard deviation s of a *diagonal* entry of E, in the posterior's
        precision, with a public weight divided out. Off the diagonal it is s / sqrt 2.
    :param beta: probability, over the noise, with which the KL may exceed the bound; in (0, 1).
    :param centre: (d,), the public point m of a centred release (eta_n - L_n m). Zeros make an
        uncentred release, the paper's. None is ``mean`` itself: then only e moves the mean.
    :param reverse: bound KL(q' || q) instead of KL(q || q').
    :return: nats.
    :raises ConfigurationError: a shape or a value is not as stated.

    >>> import warnings
    >>> import torch
    >>> from pyro_dp import NotPrivateWarning, sep_kl_bound
    >>> precision, noise = 100.0 * torch.eye(2), dict(eta_noise=1.0, precision_noise=1.0)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", NotPrivateWarning)  # this posterior is made up
    ...     kl = sep_kl_bound(precision, torch.zeros(2), **noise, beta=0.05)
    >>> print(f"{kl:.2f} nats")
    0.04 nats
    """
    t = require_number("eta_noise", eta_noise, above=0.0, below=LARGEST, or_equal=True)
    s = require_number("precision_noise", precision_noise, above=0.0, below=LARGEST, or_equal=True)
    beta = require_number("beta", beta, above=0.0, below=1.0)
    root = _cholesky("precision", _square("precision", precision))
    d = len(root)
    mean = _tensor("mean", mean, (d,))
    shift = torch.zeros_like(mean) if centre is None else mean - _tensor("centre", centre, (d,))

    half = torch.linalg.solve_triangular(root, torch.eye(d, dtype=root.dtype), upper=False)
    variances = torch.linalg.eigvalsh(half @ half.mT).clamp_min(0.0)  # those of q, ascending
    pairs = s * s * torch.outer(variances, variances)[tuple(torch.triu_indices(d, d))]
    frobenius = _quadratic_quantile(pairs, beta / 3)

    largest, total = float(variances[-1]), float(variances.sum())
    spectral = s * (math.sqrt(2.0 * largest * total) - largest * float(ndtri(beta / 3)))
    r = min(spectral, math.sqrt(frobenius))
    if not r < 1.0:
        return math.inf

    # `Cov g = (t^2 + s^2 |shift|^2 / 2) I + s^2 / 2 shift shift'`, multiplied by L^-1/2.
    scaled = half @ shift
    isotropic = t * t + s * s * float(shift @ shift) / 2.0
    covariance = isotropic * half @ half.mT + s * s / 2.0 * torch.outer(scaled, scaled)
    offset = _quadratic_quantile(torch.linalg.eigvalsh(covariance).clamp_min(0.0), beta / 3)
    power = 2 if reverse else 1
    return 0.5 * (_curvature(r, power) * frobenius + offset / (1.0 - r) ** power)


def clipped_kl(
    prior_eta: Tensor,
    prior_precision: Tensor,
    site_eta: Tensor,
    site_precision: Tensor,
    *,
    max_factor_norm: float,
    centre: Tensor | None = None,
    weight: float = 1.0,
    reverse: bool = False,
) -> float:
    """The exact KL between SEP's posterior and clipped SEP's, the subject of DP-SEP's Appendix A.

    Let the prior be (eta_0, L_0) and the sites (eta_n, L_n). SEP's posterior q has eta = eta_0 +
    sum_n eta_n and L = L_0 + sum_n L_n. The clipped one, q~, has c_n eta_n and c_n L_n in the sums.
    Here c_n = ``min(1, C / |(eta_n - L_n centre, weight L_n)|)``, Euclidean and Frobenius. Then ::

        2 KL(q || q~) = tr(L~ L^-1) - d - log det(L~ L^-1) + g' L~^-1 g,   g = eta~ - L~ L^-1 eta

    Both have the same sites, those of one pass. At convergence clipped SEP has other cavities. So
    it has other sites, unless sites do not depend on cavities (linear-Gaussian models).
    (The authors' code, ``mvinaroz/stochastic-EP``, clips each of the two blocks to C on its own.)
    The value depends on data and is not private, as a :class:`NotPrivateWarning` says.

    :param prior_eta: (d,).
    :param prior_precision: (d, d), symmetric.
    :param site_eta: (N, d).
    :param site_precision: (N, d, d), symmetric; a site may be indefinite.
    :param max_factor_norm: C > 0; ``math.inf`` clips nothing.
    :param centre: (d,), the public point of a centred release; None is zeros, the paper's.
    :param weight: the precision block's weight, public, > 0.
    :param reverse: KL(q~ || q) instead of KL(q || q~).
    :return: nats; ``math.inf`` where L~ is not positive definite, which takes an indefinite site.
    :raises ConfigurationError: a shape or a value is not as stated, or L is not positive definite.

    >>> import math, warnings
    >>> import torch
    >>> from pyro_dp import NotPrivateWarning, clipped_kl
    >>> prior = torch.zeros(1), torch.eye(1)
    >>> sites = torch.ones(50, 1), torch.ones(50, 1, 1)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", NotPrivateWarning)  # these sites are made up
    ...     for bound in (math.inf, 1.0):
    ...         print(f"C = {bound}: {clipped_kl(*prior, *sites, max_factor_norm=bound):.2f} nats")
    C = inf: 0.00 nats
    C = 1.0: 0.03 nats
    """
    bound = require_scale("max_factor_norm", max_factor_norm, infinite=True)
    weight = require_scale("weight", weight)
    prior_precision = _square("prior_precision", prior_precision)
    d = len(prior_precision)
    prior_eta = _tensor("prior_eta", prior_eta, (d,))
    site_eta = _tensor("site_eta", site_eta, (None, d))
    site_precision = _tensor("site_precision", site_precision, (len(site_eta), d, d))
    _require_symmetric("site_precision", site_precision)

    gradients = site_eta
    if centre is not None:
        gradients = site_eta - site_precision @ _tensor("centre", centre, (d,))
    norms = torch.hypot(gradients.norm(dim=1), weight * site_precision.flatten(1).norm(dim=1))
    lost = 1.0 - (bound / norms).clamp_max(1.0)  # a zero site: C / 0 = inf, nothing lost

    eta, precision = prior_eta + site_eta.sum(0), prior_precision + site_precision.sum(0)
    root = _cholesky("prior_precision + site_precision.sum(0)", precision)
    change_eta = -(lost @ site_eta)
    change = -torch.einsum("n,nij->ij", lost, site_precision)

    relative = torch.linalg.solve_triangular(root, change, upper=False)
    relative = torch.linalg.solve_triangular(root, relative.mT, upper=False)  # L^-1/2 (L~-L) L^-1/2
    a, axes = torch.linalg.eigh((relative + relative.mT) / 2.0)
    if not float(a[0]) > -1.0:
        return math.inf
    mean = torch.cholesky_solve(eta[:, None], root)[:, 0]
    g = torch.linalg.solve_triangular(root, (change_eta - change @ mean)[:, None], upper=False)
    offset = (axes.mT @ g[:, 0]) ** 2
    if reverse:
        shape, offset = torch.log1p(a) - a / (1.0 + a), offset / (1.0 + a) ** 2
    else:
        shape, offset = a - torch.log1p(a), offset / (1.0 + a)
    return 0.5 * float(shape.clamp_min(0.0).sum() + offset.sum())


def _quadratic_quantile(weights: Tensor, beta: float) -> float:
    """At or above the (1 - beta)-quantile of sum_i w_i z_i^2, w_i >= 0, z_i standard normal.

    It is the least of three bounds. The first is Lemma 1 of Laurent & Massart 2000. The second
    raises all weights to the largest. The third is Székely & Bakirov 2003: beyond 1.5364 times the
    mean, all weight on one z_i is the worst case.
    """
    x = -math.log(beta)
    largest, total = float(weights.max()), float(weights.sum())
    bounds = [
        total + 2.0 * float(weights.norm()) * math.sqrt(x) + 2.0 * largest * x,
        largest * float(chdtri(weights.numel(), beta)),
    ]
    single = float(chdtri(1, beta))
    if single > 1.5365:
        bounds.append(total * single)
    return min(bounds)


def _curvature(r: float, power: int) -> float:
    """The integral of t / (1 - r t)^power over [0, 1]: phi (power 1) and psi (power 2)."""
    if r < 1e-3:  # the closed forms cancel; this is above them, by 0.07% at most
        return 0.5 / (1.0 - r) ** power
    if power == 1:
        return (-math.log1p(-r) - r) / r**2
    return (math.log1p(-r) + r / (1.0 - r)) / r**2


def _tensor(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """The value in float64 on the CPU. None in a shape stands for any size but 0."""
    words = ", ".join("N" if size is None else str(size) for size in shape)
    if not isinstance(value, Tensor):
        raise ConfigurationError(f"{name} must be a tensor, not {type(value).__name__}.")
    fits = value.dim() == len(shape) and all(
        have == want or (want is None and have > 0)
        for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ConfigurationError(f"{name} must have shape ({words}), not {tuple(value.shape)}.")
    value = value.detach().to("cpu", torch.float64)
    if not bool((value.abs() <= LARGEST).all()):
        raise ConfigurationError(f"{name} must be finite, with no number beyond {LARGEST:g}.")
    return value


def _square(name: str, value: Any) -> Tensor:
    d = len(value) if isinstance(value, Tensor) and value.dim() == 2 and len(value) else 1
    value = _tensor(name, value, (d, d))
    _require_symmetric(name, value)
    return value


def _require_symmetric(name: str, value: Tensor) -> None:
    """Up to single precision, in which a posterior may have been stored."""
    if bool(((value - value.mT).abs() > 1e-5 * value.abs().max()).any()):
        raise ConfigurationError(f"{name} must be symmetric.")


def _cholesky(name: str, value: Tensor) -> Tensor:
    """Acts on a matrix's symmetric part. :raises ConfigurationError: it is not positive
    definite."""
    root, failed = torch.linalg.cholesky_ex((value + value.mT) / 2.0)
    if bool(failed):
        raise ConfigurationError(f"{name} must be positive definite.")
    return root
