"""DPEM: private expectation maximisation of a Gaussian mixture.

Park, Foulds, Chaudhuri & Welling 2017 (DP-EM, AISTATS, arXiv 1605.06995). They perturb weights,
means and covariances one by one; here the moments that the M-step needs are one joint release.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.iterative import IterativeMechanism, whole_step
from pyro_dp.mechanism.release_settings import ReleaseSettings
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.arguments import as_tensors, in_memory
from pyro_dp.utils.errors import ConfigurationError, ModelError
from pyro_dp.utils.linalg import clipped_rows, noise_radius, stacked, unstacked
from pyro_dp.utils.memory import version
from pyro_dp.utils.validation import require_count, require_number, require_scale, require_tensors

_SHARES = (0.2, 0.3, 0.5)  # of sigma^-2: counts, sums, second moments
_ESTIMATE = ("weights", "locs", "covariances")


class DPEM(IterativeMechanism):
    """Differentially private maximum likelihood of a mixture of K Gaussians in d dimensions.

    A record is a row x of the data, clipped to Euclidean norm R. With r (K,) its responsibilities
    at the present estimate (the E-step), it adds r, r x' and r_k x x' to three blocks of one joint
    release, of norms at most 1, R and R^2. The M-step sees the noisy sums only. What noise has
    made impossible is put right there, from public numbers: weights are positive and sum to one;
    locations have norm at most R; eigenvalues of covariances are at most R^2, and at least
    ``least_variance`` and the spectral radius that the noise alone would give (without that floor a
    component shrinks to a needle, and is lost); a component whose count does not exceed two
    standard deviations of its noise stays where it was.

    **Guarantee.** The sequence of estimates is (epsilon, delta)-differentially private for one row,
    with epsilon = ``accountant.get_epsilon()`` under the accountant's neighbouring relation.

    **Not protected.** The number N of rows, the sample rate, start and all other settings; the
    choice of them, where it was made by looking at the data; running times; errors, which are for
    the curator.

    :param start: public locations (K, d) where the components begin. Weights begin equal, and
        covariances at ``start_variance`` times the identity.
    :param radius: R > 0: rows are clipped to this norm. ``math.inf`` needs ``noise_multiplier=0``.
        Data far from the origin should be centred first, by a public constant.
    :param accountant: as for :class:`DPSVI`, as are sampling, generator and secure.
    :param num_steps: number of steps of :meth:`run`.
    :param start_variance: > 0; ``None``: R^2 / d.
    :param least_variance: > 0; ``None``: 1e-4 R^2.
    :param noise_multiplier: sigma: noise multiplier of the joint release. ``None``: the smallest
        that fits what remains of the budget at the first step. 0: plain EM, not private.
    :param sample_rate: expected fraction of the rows in a step, in (0, 1].
    :param microbatch_size: at most so many rows are worked on at a time; the result is the same.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    :ivar weights: (K,), in float64, as are
    :ivar locs: (K, d) and
    :ivar covariances: (K, d, d): the present estimate.

    >>> import torch
    >>> from pyro_dp import PrivacyAccountant
    >>> from pyro_dp.baselines import DPEM
    >>> made_up = torch.Generator().manual_seed(0)
    >>> x = 0.05 * torch.randn(5000, 1, generator=made_up) + 0.5
    >>> x[::2] -= 1.0  # half of them about -1/2, half about 1/2
    >>> em = DPEM(torch.tensor([[-0.9], [0.9]]), radius=1.0, num_steps=10, generator=0,
    ...           accountant=PrivacyAccountant(epsilon=4.0))
    >>> result = em.run(x, progress=False)
    >>> [f"{place:.1f}" for place in em.locs.flatten().tolist()]
    ['-0.5', '0.5']
    """

    sample_rate: float

    def __init__(
        self,
        start: Tensor,
        *,
        radius: float,
        accountant: PrivacyAccountant,
        num_steps: int,
        start_variance: float | None = None,
        least_variance: float | None = None,
        noise_multiplier: float | None = None,
        sample_rate: float = 1.0,
        sampling: str = "poisson",
        microbatch_size: int | None = None,
        generator: torch.Generator | int | None = None,
        secure: bool = False,
    ):
        if not isinstance(start, Tensor) or start.dim() != 2 or 0 in start.shape:
            raise ConfigurationError("start must be a tensor (K, d) of locations.")
        if not start.isfinite().all():
            raise ConfigurationError("start must be finite.")
        require_scale("radius", radius, infinite=True)
        components, dim = start.shape
        if radius == math.inf and (start_variance is None or least_variance is None):
            raise ConfigurationError(
                "radius=inf gives no scale: pass start_variance and least_variance."
            )
        if start_variance is None:
            start_variance = radius**2 / dim
        if least_variance is None:
            least_variance = 1e-4 * radius**2
        require_scale("start_variance", start_variance)
        require_number("least_variance", least_variance, above=0.0, below=radius**2)
        require_count("num_steps", num_steps)
        require_number("sample_rate", sample_rate, above=0.0, below=1.0, closed=True)
        super().__init__(ReleaseSettings.among(locals(), bound=radius))
        self.radius = radius
        self.least_variance = least_variance
        self.weights = start.new_full((components,), 1 / components, dtype=torch.float64)
        self.locs = start.detach().to(torch.float64, copy=True)
        identity = torch.eye(dim, dtype=torch.float64, device=start.device)
        self.covariances = start_variance * identity.repeat(components, 1, 1)
        self._checked: tuple[Any, int, Tensor, RecordSampler] | None = None  # the last data

    _measure = "change of the locations"

    @whole_step
    @torch.no_grad()
    def step(self, x: Tensor) -> float:
        """One private EM step, given all rows.

        :param x: (N, d), as a tensor or in any form that :class:`DPSVI` takes.
        :returns: root mean square of the locations' change.
        :raises ModelError: the data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        """
        self._refuse_steps_beyond_calibration()
        x, sampler = self._checked_rows(x)
        position = self.accountant.position
        clipped = self._sum_type(self._blocks(), x.device)
        indices = self._sample(sampler, position).to(x.device)
        for chosen in indices.split(self.microbatch_size or max(len(indices), 1)):
            clipped.add(*self._moments(x.index_select(0, chosen)))
        before = self.locs
        counts, sums, squares = self._release(clipped, sampler)
        self._maximise(counts, sums, squares, sampler.sample_rate)
        return (self.locs - before).square().mean().sqrt().item()

    @property
    def distribution(self) -> MixtureSameFamily:
        """The present estimate, in float64; its ``log_prob`` takes (..., d)."""
        return MixtureSameFamily(
            Categorical(self.weights), MultivariateNormal(self.locs, self.covariances)
        )

    def state_dict(self) -> dict[str, Any]:
        """Estimate, step count and accountant: public or released; loads with weights only."""
        estimate = {name: getattr(self, name).clone() for name in _ESTIMATE}
        return self._state() | estimate | {"radius": self.radius}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as :meth:`DPSVI.load_state_dict`, and raises the same."""
        self._require_state(state, (*_ESTIMATE, "radius"))
        if require_scale("radius", state["radius"], infinite=True) != self.radius:
            raise ConfigurationError("radius differs from that of the saved run.")
        estimate = {name: state[name] for name in _ESTIMATE}
        for name, value in require_tensors("load_state_dict: the estimate", estimate).items():
            if value.shape != getattr(self, name).shape:
                raise ConfigurationError("start has another shape than in the saved run.")
        self._load_state(state)
        for name, value in estimate.items():
            setattr(self, name, value.clone())

    def _checked_rows(self, given: Any) -> tuple[Tensor, RecordSampler]:
        """The rows, as a tensor, and their sampler: checked if they are new."""
        if self._checked is not None:
            known, changes, x, sampler = self._checked
            if known is given and changes == version(given):
                return x, sampler
        rows, others = in_memory(as_tensors(self.step, (given,), {}))
        if others or len(rows) != 1 or not isinstance(rows[0], Tensor) or rows[0].is_complex():
            raise ModelError("The data must be one tensor of real numbers.")
        x = rows[0]
        dim = self.locs.shape[1]
        if x.dim() != 2 or x.shape[1] != dim or len(x) == 0:
            raise ModelError(f"The data must have rows of {dim} numbers, as start has.")
        if not x.isfinite().all():
            raise ModelError(
                "The data hold NaN or infinite values: impute them, or drop the rows. (This "
                "message depends on the data: it is for the curator only.)"
            )
        for name in _ESTIMATE:
            setattr(self, name, getattr(self, name).to(x.device))
        sampler = RecordSampler(self.sampling, len(x), self.sample_rate)
        self._checked = given, version(given), x, sampler
        return x, sampler

    def _blocks(self) -> list[Block]:
        components, dim = self.locs.shape
        sizes = (components, components * dim, components * dim * (dim + 1) // 2)
        bounds = (1.0, self.radius, self.radius**2)
        return [Block(*each) for each in zip(sizes, bounds, _SHARES, strict=True)]

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E-step: what each row adds to the blocks, (B, K), (B, K d), (B, K d (d + 1) / 2)."""
        x = clipped_rows(x.double(), self.radius)
        components = MultivariateNormal(self.locs, self.covariances, validate_args=False)
        joint = components.log_prob(x.unsqueeze(1)) + self.weights.log()
        r = joint.softmax(dim=1).unsqueeze(2)  # (B, K, 1)
        squares = torch.vmap(stacked)(x.unsqueeze(2) * x.unsqueeze(1)).unsqueeze(1)
        return r.squeeze(2), (r * x.unsqueeze(1)).flatten(1), (r * squares).flatten(1)

    def _maximise(self, counts: Tensor, sums: Tensor, squares: Tensor, rate: float) -> None:
        """M-step, from estimates of the moments of all rows, released at this sample rate."""
        components, dim = self.locs.shape
        noise_of_counts, _, noise_of_squares = self._noise(rate)
        found = counts > 2 * noise_of_counts
        n = counts.clamp(min=max(noise_of_counts, torch.finfo(torch.float64).tiny))
        self.weights = n / n.sum()
        locs = clipped_rows(sums.reshape(components, dim) / n.unsqueeze(1), self.radius)
        matrices = [unstacked(each, dim) for each in squares.reshape(components, -1)]
        second = torch.stack(matrices) / n[:, None, None]
        values, vectors = torch.linalg.eigh(second - locs.unsqueeze(2) * locs.unsqueeze(1))
        # No eigenvalue is known better than to the spectral radius of the noise's matrix.
        least = (noise_radius(noise_of_squares, dim) / n).clamp(min=self.least_variance)
        values = values.clamp(min=least.unsqueeze(1)).clamp(max=self.radius**2)
        # Smaller ones are lost where the matrix is put together.
        values = values.clamp(min=1e-12 * values[:, -1:]).unsqueeze(1)
        covariances = (vectors * values) @ vectors.mT
        covariances = (covariances + covariances.mT) / 2
        self.locs = torch.where(found[:, None], locs, self.locs)
        self.covariances = torch.where(found[:, None, None], covariances, self.covariances)

    def _noise(self, rate: float) -> list[float]:
        """Standard deviations of the noise in the three estimates."""
        sigma = self.noise_multiplier
        if sigma == 0:
            return [0.0] * len(_SHARES)
        return [block.noise(sigma) / rate for block in self._blocks()]
