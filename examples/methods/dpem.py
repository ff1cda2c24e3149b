"""DPEM: private expectation maximisation of a Gaussian mixture.

Park, Foulds, Chaudhuri & Welling 2017 (DP-EM, AISTATS, arXiv 1605.06995). They perturb weights,
means and covariances one by one; here the moments that the M-step needs are one joint release.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_dp import ConfigurationError, ModelError, PrivacyAccountant
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import IterativeMechanism, whole_step
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Execution, Noise, Sampling
from pyro_dp.utils.linalg import clipped_rows, noise_radius, stacked, unstacked
from pyro_dp.utils.torch_state import version
from pyro_dp.utils.validation import require_scale, require_tensors

_SHARES = (0.2, 0.3, 0.5)  # parts of sigma^-2 for counts, sums and second moments
_ESTIMATE = ("weights", "locs", "covariances")


class DPEM(IterativeMechanism):
    """Differentially private maximum likelihood of a mixture of K Gaussians in d dimensions.

    A record is a row x of the data, clipped to Euclidean norm R. The E-step finds its
    responsibilities r (K,) at the present estimate. The record adds r, r x' and r_k x x' to three
    blocks of one joint release. Their norms are at most 1, R and R^2.

    The M-step sees the noisy sums only. It repairs impossible estimates from public numbers:

    * Weights are positive and sum to one, and locations have norm at most R.
    * Eigenvalues of covariances are at most R^2. They are at least ``least_variance``, and at least
      the spectral radius of the noise. Without that floor a component would shrink to a needle.
    * A component stays where it was if its count is below two standard deviations of the noise.

    **Guarantee.** The sequence of estimates is (epsilon, delta)-differentially private for one row,
    with epsilon = ``accountant.get_epsilon()`` under the accountant's neighbouring relation.

    **Not protected.** The number N of rows, all settings and how they were chosen, running times,
    and errors, which are for the curator.

    :param start: first locations (K, d), which are public. Weights begin equal, and
        covariances at ``start_variance`` times the identity.
    :param radius: R > 0: rows are clipped to this norm. ``math.inf`` needs ``noise=0``.
        Data far from the origin should be centred first, by a public constant.
    :param accountant: as for ``DPSVI``, as are num_steps, noise, sampling and execution.
    :param start_variance: > 0.
    :param least_variance: > 0.
    :raises ConfigurationError: a setting is out of range or does not fit the others.

    :ivar weights: (K,), in float64, as are
    :ivar locs: (K, d) and
    :ivar covariances: (K, d, d): the present estimate.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        radius: float,
        start_variance: float,
        least_variance: float,
        accountant: PrivacyAccountant,
        num_steps: int,
        noise: Noise | float | None = None,
        sampling: Sampling | float = 1.0,
        execution: Execution | None = None,
    ):
        self.radius = require_scale("radius", radius, infinite=True)
        self.least_variance = require_scale("least_variance", least_variance)
        require_scale("start_variance", start_variance)
        super().__init__(
            accountant=accountant,
            num_steps=num_steps,
            bound=radius,
            noise=noise,
            sampling=Sampling.read(sampling).only("DPEM", "rate"),
            execution=Execution.read(execution).only("DPEM", "microbatch_size"),
        )
        components, dim = start.shape
        self.weights = start.new_full((components,), 1 / components, dtype=torch.float64)
        self.locs = start.detach().to(torch.float64, copy=True)
        identity = torch.eye(dim, dtype=torch.float64)
        self.covariances = start_variance * identity.repeat(components, 1, 1)
        self._checked: tuple[Tensor, int] | None = None  # the last data, and their version

    _measure = "change of the locations"

    @whole_step
    @torch.no_grad()
    def step(self, x: Tensor) -> float:
        """Make one private EM step on all rows.

        :param x: (N, d).
        :returns: root mean square of the locations' change.
        :raises ModelError: the data do not fit; nothing was spent.
        :raises PrivacyBudgetExceeded: the step does not fit the budget; nothing was spent.
        """
        self._reservation.require_step()
        self._require_rows(x)
        sampler = RecordSampler(self.sampling.kind, len(x), self.sampling.rate or 1.0)
        clipped = self._releases.sum_type(self._blocks(), x.device)
        indices = self._releases.sample(sampler, self.accountant.position)
        for chosen in indices.split(self.execution.microbatch_size or max(len(indices), 1)):
            clipped.add(*self._moments(x[chosen]))
        before = self.locs
        counts, sums, squares = self._release(clipped, sampler)
        self._maximise(counts, sums, squares, sampler.sample_rate)
        return (self.locs - before).square().mean().sqrt().item()

    def state_dict(self) -> dict[str, Any]:
        """Estimate, step count and accountant: public or released; loads with weights only."""
        estimate = {name: getattr(self, name).clone() for name in _ESTIMATE}
        return self._reservation.state() | estimate | {"radius": self.radius}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: as ``DPSVI.load_state_dict``, and raises the same."""
        self._reservation.require(state, (*_ESTIMATE, "radius"))
        if require_scale("radius", state["radius"], infinite=True) != self.radius:
            raise ConfigurationError("radius differs from that of the saved run.")
        estimate = {name: state[name] for name in _ESTIMATE}
        for name, value in require_tensors("load_state_dict: the estimate", estimate).items():
            if value.shape != getattr(self, name).shape:
                raise ConfigurationError("start has another shape than in the saved run.")
        self._reservation.load(state)
        for name, value in estimate.items():
            setattr(self, name, value.clone())

    def _require_rows(self, x: Tensor) -> None:
        if self._checked is not None and self._checked[0] is x and self._checked[1] == version(x):
            return
        dim = self.locs.shape[1]
        if x.dim() != 2 or x.shape[1] != dim or len(x) == 0:
            raise ModelError(f"The data must be rows of {dim} numbers, as start is.")
        if not x.isfinite().all():
            raise ModelError(
                "The data hold NaN or infinite values: impute them, or drop the rows. (This "
                "message depends on the data: it is for the curator only.)"
            )
        self._checked = x, version(x)

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
        # The noise hides eigenvalues below the spectral radius of its own matrix.
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
