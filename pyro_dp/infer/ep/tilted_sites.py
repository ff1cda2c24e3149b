"""Moments of the tilted distribution: one Gaussian site per record, in a public cavity.

Let Z be the integral of the cavity N(m, V) times p(x_n | z). With g = d log Z / dm and
B = -d^2 log Z / dm^2, the site is

    Lambda_n = B (I - V B)^-1,    eta_n - Lambda_n m = (I - B V)^-1 g.

If tilted moments were sampled, Monte Carlo error would hide a record's effect, which is O(1/N) of
the cavity. There are two classes:

* :class:`LinearMoments`: p(x_n | z) depends on z through one or two numbers a(z) per element. They
  are linearised at m, a(z) = a(m) + J (z - m), and integrated by quadrature. This is exact for
  generalised linear models, and Gauss-Newton for networks. Each element of a record has a site in
  the same cavity, and the record's site is their product.
* :class:`SteinMoments`: g = E_w[grad l], B = -E_w[hess l] - Cov_w[grad l], averaged over draws of
  the cavity with weights proportional to p(x_n | z). The likelihood may be any twice differentiable
  function, with enumerated latents. Each record needs a d x d matrix.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical
from torch.utils import _pytree as pytree

from pyro_dp.infer.ep.element_sites import ElementSites, element_sites
from pyro_dp.infer.ep.few_predictors import MIXTURES, OTHER, FewPredictors
from pyro_dp.infer.ep.likelihood import Likelihood
from pyro_dp.infer.ep.linear_design import LinearDesign
from pyro_dp.infer.ep.observation_family import Family, NotLinear, Residuals, residuals_of
from pyro_dp.infer.ep.site_factors import LowRank
from pyro_dp.infer.ep.stein_sites import LARGEST_REDUCTION, SteinSites
from pyro_dp.records.plate import innermost
from pyro_dp.records.stand_ins import on_varied, varied
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.linalg import agree, cholesky, product, spectra
from pyro_dp.utils.torch_state import forked_rng, rows_in_cache, rows_on

_NUM_DRAWS = 16
_FEWER_DRAWS = 8  # if latents are integrated out; interval widths differ by 1 in 500
_MICROBATCH = 1536  # records; bounds the memory
_LARGEST_BLOCK = 3 * 2**20  # numbers: the Hessians of all draws and records in a microbatch
_NUM_VARIED = 3  # rows on which sites are compared
_NARROW = 0.1  # standard deviation of the cavity there
_ALIKE = 1e-4  # relative singular values of rounding


class LinearMoments:
    """Moments of a likelihood that depends on the latents through few numbers.

    :param z: a public point, (d,), for tests on placeholders.
    :ivar dtype: dtype of the model's computations.
    :ivar families: the families of the observed distributions.
    :ivar design: computes a batch's sites by one product; None: there is none.
    :ivar curved: the numbers are not linear in the latents.
    :ivar turns: they are not functions of linear predictors, either. A probit is curved, and a
        product of latents turns.
    :ivar monotone: the numbers turn, but are sums of monotone curves, which have no saddles.
    :ivar concave: the log likelihood is about concave in the latents.
    :ivar residuals: kind of the residuals
        (:class:`~pyro_dp.infer.ep.observation_family.Residuals`).
    :ivar log_scale: gradient of the logarithm of the residuals' unknown scale, (d,); None: there is
        no such scale, or a record has several residuals.
    :ivar careful: the first steps should be short.
    :ivar clusters: it is a mixture without a regression, whose components may coincide.
    :raises NotLinear: the likelihood depends on the latents in another form.
    """

    name = "linear"
    clusters = False

    def __init__(self, likelihood: Likelihood, z: Tensor):
        self._likelihood, self.dtype = likelihood, likelihood.dtype
        if likelihood.sums:
            raise NotLinear("latents of a record are summed out")
        records, (index, row) = likelihood.term.records, likelihood.placeholder
        with torch.enable_grad():
            sites = likelihood.observations(z.detach().requires_grad_(), index, row)
            families = [Family(site) for site in sites.values()]
        self.families = [family for family in families if family.rank]
        if not self.families:
            raise NotLinear("no parameter of an observed distribution depends on the latents")
        one = index.reshape(1), [value.unsqueeze(0) for value in row]
        here = self._predictors(z, *one)
        if not self._agrees(z, *one, here):
            raise NotLinear("its parameters are not all that the likelihood depends on")
        angles = torch.arange(1.0, len(z) + 1).to(z)
        points = z + torch.cos(angles), z - torch.sin(2 * angles)  # in irregular directions
        there, elsewhere = (self._predictors(at, *one) for at in points)
        self.curved = not all(agree(a[2], b[2]) for a, b in zip(here, there, strict=True))
        pairs = zip(there, elsewhere, strict=True)  # at z itself a product may have no gradient
        self.turns = not all(_span_alike(a[2], b[2]) for a, b in pairs)
        self.monotone = self.turns and self._is_monotone(angles, *one)
        self.concave = not self.curved and all(family.is_concave for family in self.families)
        self.careful = self.curved
        self.residuals = residuals_of(self.families)
        if self.curved and self.residuals != Residuals.BOUNDED:
            # The logarithm of a scale may be curved, for example if its prior has an upper limit.
            ends = [1 if family.is_scaled else None for family in self.families]
            triples = zip(here, there, ends, strict=True)
            straight = not self.turns and all(
                agree(a[2][:, :, :end], b[2][:, :, :end]) for a, b, end in triples
            )
            if not straight or self.residuals != Residuals.SCALED:
                self.residuals = Residuals.OTHER
        self.log_scale = None
        family, values, jacobian, _ = here[0]
        if len(here) == 1 and family.is_scaled and not self.curved and values.shape[1] == 1:
            self.log_scale = jacobian[0, 0, 1].double()
        numbers = len(z) + records.row_size
        self.microbatch_size = rows_on(records.device, numbers) or rows_in_cache(len(z))
        self.design = None
        if not self.curved:
            # Turning the sum of a pass takes two products of (d, d).
            most = max(self.microbatch_size, 4 * len(z))
            size = min(most, records.plate.size)
            self.design = LinearDesign.find(likelihood, self.families, self._predictors, z, size)
            self.microbatch_size = most if self.design else self.microbatch_size
        if self.residuals == Residuals.OTHER and self.design and self._simulates(here):
            self.residuals = Residuals.CENTRED

    def _simulates(self, here: list[tuple]) -> bool:
        """Whether outcomes can be drawn for a placeholder."""
        try:
            with forked_rng():
                for family, numbers, _, rest in here:
                    family.simulated_gradients(numbers, rest, 1)
        except Exception:  # the row is public
            return False
        return True

    def check(self, points: Sequence[Tensor], indices: Tensor, rows: list[Tensor]) -> None:
        """:raises ModelError: at each of these points, records do not behave like placeholders."""
        if not any(
            self._agrees(z, indices, rows, self._predictors(z, indices, rows)) for z in points
        ):
            raise ModelError(
                "On these records, the observed distributions depend on the latents in another "
                "form than on placeholders. Use DPSEP(..., moments='stein')."
            )

    def _is_monotone(self, angles: Tensor, indices: Tensor, rows: list[Tensor]) -> bool:
        """Whether each number is monotone in each latent, unlike a product."""
        slopes = [
            torch.cat([j.flatten() for _, _, j, _ in self._predictors(at, indices, rows)])
            for at in (sign * (k * angles).cos() for k in range(1, 5) for sign in (1.0, -1.0))
        ]
        signs = torch.stack(slopes).sign()
        return bool(((signs >= 0).all(0) | (signs <= 0).all(0)).all())

    def spread(self, covariance: Tensor) -> Tensor:
        """The spread argument of :meth:`factors`: V, (d, d), or (d,) if diagonal."""
        return covariance

    def factors(self, mean: Tensor, spread: Tensor, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """Sites of B records in the cavity of this mean, (d,), and :meth:`spread`."""
        jacobians, sites = [], []
        for family, numbers, jacobian, rest in self._predictors(mean, indices, rows):
            jacobians.append(jacobian.flatten(1, 2).double())
            sites.append(element_sites(family, numbers, _quadratic(jacobian, spread), rest))
        return LowRank(torch.cat(jacobians, dim=1), *joined(sites))

    def _predictors(self, z: Tensor, indices: Tensor, rows: list[Tensor]) -> list[tuple]:
        """Per family: a (B, E, r), J (B, E, r, d), and further arguments of the density.

        J is in the precision of the model, all else in float64.
        """

        def read(z, index, row):
            sites = self._likelihood.observations(z, index, row)
            found = [family.read(sites[family.name]) for family in self.families]
            numbers = [a for a, _ in found]
            return numbers, (numbers, [rest for _, rest in found])

        function, z = torch.func.jacrev(read, has_aux=True), z.to(self._likelihood.dtype)
        jacobians, found = self._likelihood.for_each("predictors", function, z, indices, rows)
        numbers, rest = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, found)
        return list(zip(self.families, numbers, jacobians, rest, strict=True))

    def _agrees(
        self, z: Tensor, indices: Tensor, rows: list[Tensor], predictors: list[tuple]
    ) -> bool:
        """Whether the likelihood depends on z through a(z) alone, by its gradient."""
        likelihood = self._likelihood
        gradient = torch.func.grad(likelihood.log_prob)
        expected = likelihood.for_each("gradient", gradient, z, indices, rows)
        found = torch.zeros_like(expected, dtype=torch.float64)
        for family, numbers, jacobian, rest in predictors:
            slope = family.slope(numbers, rest)
            found = found + torch.einsum("ber,berd->bd", slope, jacobian.double())
        tolerance = 1e-6 if likelihood.dtype == torch.float64 else 1e-3
        scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item() + 1e-30
        return torch.allclose(
            found, expected.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True
        )


class SteinMoments:
    """Moments of any twice differentiable likelihood.

    The public draws are pairs z and -z, made once from torch's global generator. Every step uses
    the same draws, so there is a fixed point without noise.
    """

    name = "stein"
    log_scale = None
    curved = turns = False  # the curvature is that of the likelihood itself
    careful = True  # draws are inaccurate for a site that is far away

    def __init__(self, likelihood: Likelihood, z: Tensor):
        self._likelihood, self.dtype = likelihood, likelihood.dtype
        records = likelihood.term.records
        count = _NUM_DRAWS if likelihood.num_nodes == 1 else _FEWER_DRAWS
        numbers = count * likelihood.num_nodes * (len(z) ** 2 + records.row_size)  # for each record
        few = min(_MICROBATCH, 1 + _LARGEST_BLOCK // numbers)
        self.microbatch_size = rows_on(records.device, numbers) or few
        half = torch.randn(count // 2, len(z), dtype=torch.float64)
        self._draws = torch.cat([half, -half]).to(records.device)
        index, row = likelihood.placeholder
        one = index.reshape(1), [x.unsqueeze(0) for x in row]
        likelihood.for_each("derivatives", self._derivatives, z, *one)
        self.design = FewPredictors.find(likelihood, z)
        if self.design is not None and not on_varied(lambda integers: self._agrees(z, integers)):
            self.design = None
        families = [] if self.design is None else self.design.families
        # Other kinds need a closed form.
        scaled = residuals_of(families) == Residuals.SCALED
        self.residuals = Residuals.SCALED if scaled else _residuals(likelihood, z)
        regresses = self.design is not None and self.design.varying
        self.clusters = self.residuals == Residuals.SUMMED and not regresses
        self.concave = bool(families) and all(family.is_concave for family in families)

    def _agrees(self, z: Tensor, integers: bool) -> bool:
        """Whether closed forms reproduce the sites of public rows."""
        records = self._likelihood.term.records
        more = [varied(table, _NUM_VARIED, 1, integers=integers) for table in records.likes]
        pairs = zip(records.placeholder(), more, strict=True)
        rows = [torch.cat([x.unsqueeze(0), y]) for x, y in pairs]
        indices = torch.arange(len(rows[0]), device=records.device) % records.plate.size
        tolerance = 1e-8 if self.dtype == torch.float64 else 1e-3
        root = _NARROW * torch.eye(len(z)).to(z)
        try:
            sites = SteinSites(self, z, root, None)
            kinds = sites.found_kinds(indices, rows)
            if (kinds == OTHER).all():
                return False
            for kind in kinds.unique().tolist():
                chosen = [x[kinds == kind] for x in (indices, *rows)]
                found = sites.factors(kind, chosen[0], chosen[1:])
                expected = self.factors(z, root, chosen[0], chosen[1:])
                ours, theirs = ((x.residual, x.matrices()) for x in (found, expected))
                pairs = zip(ours, theirs, strict=True)
                if not all(agree(x, y, tolerance=tolerance) for x, y in pairs):
                    return False
        except Exception:  # the rows are public
            return False
        return True

    def check(self, points: Sequence[Tensor], indices: Tensor, rows: list[Tensor]) -> None:
        """Nothing: these moments assume no property of the likelihood."""

    def spread(self, covariance: Tensor) -> Tensor:
        """L, with V = L L'."""
        return torch.diag(covariance.sqrt()) if covariance.dim() == 1 else cholesky(covariance)

    def factors(self, mean: Tensor, spread: Tensor, indices: Tensor, rows: list[Tensor]) -> LowRank:
        """As :meth:`LinearMoments.factors`."""
        z = mean + torch.einsum("ij,kj->ki", spread, self._draws)  # (K, d)
        count, batch = len(z), len(indices)
        # Each draw of a record enters as another record: one level of vmap is faster than two.
        found = self._likelihood.for_each(
            "derivatives",
            self._derivatives,
            z.repeat_interleave(batch, dim=0),
            indices.repeat(count),
            [row.repeat(count, *(1,) * (row.dim() - 1)) for row in rows],
        )
        hessian, (gradient, value) = pytree.tree_map(
            lambda x: x.unflatten(0, (count, batch)).double(), found
        )  # (K, B, d, d), (K, B, d), (K, B)
        weights = torch.softmax(value, dim=0)
        average = torch.einsum("kb,kbi->bi", weights, gradient)
        centred = gradient - average
        curvature = -torch.einsum("kb,kbij->bij", weights, hessian)
        curvature = curvature - torch.einsum("kb,kbi,kbj->bij", weights, centred, centred)
        return _site(average, curvature, spread)

    def _derivatives(self, z: Tensor, index: Tensor, row: list[Tensor]) -> Any:
        """Hessian (d, d), gradient (d,) and value of one record's log likelihood."""

        def with_value(z):
            value = self._likelihood.log_prob(z, index, row)
            return value, value

        def with_gradient(z):
            gradient, value = torch.func.grad(with_value, has_aux=True)(z)
            return gradient, (gradient, value)

        return torch.func.jacrev(with_gradient, has_aux=True)(z)


def _residuals(likelihood: Likelihood, z: Tensor) -> str:
    """The kind of residuals of draws' moments, by latents of records and by outcomes."""
    if likelihood.sums and likelihood.num_nodes == 1:
        return Residuals.SUMMED
    sites, latents = likelihood.observations(z, *likelihood.placeholder), likelihood.continuous
    outcomes = [innermost(site["fn"]) for name, site in sites.items() if name not in latents]
    if not likelihood.sums:
        mixed = any(isinstance(each, MIXTURES) for each in outcomes)
        return Residuals.SUMMED if mixed else Residuals.OTHER
    labels = all(isinstance(each, Bernoulli | Categorical) for each in outcomes)
    return Residuals.LABELS if labels else Residuals.INTEGRATED


def _span_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients of each element's r predictors, (..., r, d), span the same space."""
    rank = one.shape[-2]
    both = torch.cat([one, other], dim=-2).double()
    both = both / both.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    if both.shape[-1] <= rank:
        return True
    values = torch.linalg.svdvals(both)
    return bool((values[..., rank] <= _ALIKE * values[..., 0]).all())


def _site(gradient: Tensor, curvature: Tensor, root: Tensor) -> LowRank:
    """The site of g (B, d) and B (B, d, d) at a cavity of covariance L L'."""
    inner = root.mT @ curvature @ root
    inner = (inner + inner.mT) / 2  # which may overflow
    broken = ~(gradient.isfinite().all(1) & inner.isfinite().all(2).all(1))  # (B,)
    inner = torch.where(broken[:, None, None], 0.0, inner)  # eigh would raise for all
    values, vectors = spectra(inner)
    values = values.clamp(max=LARGEST_REDUCTION)
    back = torch.linalg.solve_triangular(root.mT, vectors, upper=True)  # L^-T Q
    precision = (back * (values / (1 - values)).unsqueeze(1)) @ back.mT
    rotated = (root @ vectors).mT @ gradient.unsqueeze(2) / (1 - values).unsqueeze(2)
    residual = (back @ rotated).squeeze(2)
    nan = torch.where(broken, torch.nan, 0.0)
    precision = (precision + precision.mT) / 2 + nan[:, None, None]
    identity = torch.eye(len(root)).to(precision).expand_as(precision)
    return LowRank(identity, precision, residual + nan[:, None])


def _quadratic(jacobian: Tensor, covariance: Tensor) -> Tensor:
    """J V J', (B, E, r, r), in float64."""
    covariance = covariance.to(jacobian)
    if covariance.dim() == 1:
        spread = jacobian * covariance
    else:
        spread = (jacobian.flatten(0, 2) @ covariance).reshape(jacobian.shape)
    return product(spread, jacobian.mT).double()


def joined(sites: list[ElementSites]) -> tuple[Tensor, Tensor, Tensor]:
    """A (B, R, R) of all R numbers of a record, residuals and largest residuals, (B, R) each.

    An element's largest residuals are divided by the root of r, because they do not coincide.
    """
    largest = [each.largest / math.sqrt(each.largest.shape[2]) for each in sites]
    return (
        _block_diagonal([block for each in sites for block in each.precision.unbind(1)]),
        torch.cat([each.residual.flatten(1, 2) for each in sites], dim=1),
        torch.cat([each.flatten(1, 2) for each in largest], dim=1),
    )


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """(B, R, R), from blocks (B, r, r)."""
    if len(blocks) == 1:
        return blocks[0]
    total, start = sum(block.shape[1] for block in blocks), 0
    whole = blocks[0].new_zeros(len(blocks[0]), total, total)
    for block in blocks:
        stop = start + block.shape[1]
        whole[:, start:stop, start:stop] = block
        start = stop
    return whole
