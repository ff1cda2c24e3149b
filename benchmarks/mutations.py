"""Break the privacy code on purpose and see the tests fail.

Each mutation changes one place of the package in a scratch copy and runs the tests that should
notice. A mutation that survives is a hole in the tests.

    python benchmarks/mutations.py
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Mutation:
    """What is broken, where, how, and which tests must notice."""

    name: str
    module: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "no noise",
        "mechanisms",
        "released.append(torch.from_numpy(draw)",
        "released.append(torch.from_numpy(0 * draw)",
        "test_mechanisms.py",
    ),
    Mutation(
        "half the noise",
        "mechanisms",
        "draw *= event.noise_multiplier /",
        "draw *= 0.5 * event.noise_multiplier /",
        "test_mechanisms.py",
    ),
    Mutation(
        "no clipping",
        "mechanisms",
        "scale = torch.where(norm > target, target / norm, 1.0)",
        "scale = torch.ones_like(norm)",
        "test_mechanisms.py",
    ),
    Mutation(
        "clipping after the sum",
        "mechanisms",
        "sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))",
        "total = each.weighted_sum(torch.where(counted, 1.0, 0.0 * scale)); "
        "sums.append(total * min(1.0, float(bound / total.norm())))",
        "test_mechanisms.py",
    ),
    Mutation(
        "a mean instead of a sum",
        "mechanisms",
        "0.0).sum(dim=0)",
        "0.0).mean(dim=0)",
        "test_mechanisms.py",
    ),
    Mutation(
        "norm, scale and sum in the dtype of the gradients",
        "mechanisms",
        "self._values = values.to(torch.float64)",
        "self._values = values",
        "test_mechanisms.py",
    ),
    Mutation(
        "a broken record counts in the other blocks",
        "mechanisms",
        ".isfinite().all(dim=0)",
        ".isfinite().any(dim=0)",
        "test_mechanisms.py",
    ),
    Mutation(
        "released before it is recorded",
        "mechanisms",
        "    accountant.record(event)\n    released = []",
        "    noise.standard_normal(1)\n    accountant.record(event)\n    released = []",
        "test_mechanisms.py",
    ),
    Mutation(
        "one event per block",
        "mechanisms",
        "accountant.record(event)",
        "accountant.record(event, len(clipped.blocks))",
        "test_mechanisms.py",
    ),
    Mutation(
        "every block with the noise of the whole event",
        "mechanisms",
        "event.noise_multiplier / math.sqrt(block.share)",
        "event.noise_multiplier",
        "test_mechanisms.py",
    ),
    Mutation(
        "dividing by the realised batch",
        "svi",
        "self._step.add(clipped, draws, self._sample(position), stream)\n"
        "        gradient, *others = self._release(clipped)",
        "indices = self._sample(position); self._step.add(clipped, draws, indices, stream)\n"
        "        rate, size = self._sampler.sample_rate, self._records.plate.size\n"
        "        gradient, *others = "
        "[b * rate * size / max(len(indices), 1) for b in self._release(clipped)]",
        "test_svi.py",
    ),
    Mutation(
        "randperm sampling under the name of Poisson",
        "sampling",
        "stream.binomial(self.size, self.rate)",
        "round(self.size * self.rate)",
        "test_sampling.py test_svi.py",
    ),
    Mutation(
        "the plate's own indices",
        "plates",
        'msg["value"] = self.index',
        'msg["value"] = msg["fn"]()[:1]',
        "test_gradients.py",
    ),
    Mutation(
        "event recorded with the wrong rate",
        "private_steps",
        "event=SubsampledGaussian(noise_multiplier, rate, self._sampler.sampling)",
        "event=SubsampledGaussian(noise_multiplier, rate / 2, 'poisson')",
        "test_svi.py",
    ),
    Mutation(
        "fixed batches: the requested rate, not B / N",
        "sampling",
        'return self.batch_size / self.size if self.sampling == "fixed" else self.rate',
        "return self.rate",
        "test_sampling.py test_svi.py",
    ),
    Mutation(
        "the same noise stream in two runs",
        "randomness",
        "seed = _SystemEntropy()",
        "seed = np.random.SeedSequence(0)",
        "test_randomness.py test_svi.py",
    ),
    Mutation(
        "the same noise in every step",
        "randomness",
        "place = (_PURPOSES.index(purpose), position)",
        "place = (_PURPOSES.index(purpose), 0)",
        "test_randomness.py test_svi.py",
    ),
    Mutation(
        "sampling and noise from one stream",
        "randomness",
        "place = (_PURPOSES.index(purpose), position)",
        "place = (0, position)",
        "test_randomness.py",
    ),
    Mutation(
        "local draws from the public stream",
        "record_mode",
        "        answer = _DRAWS.get(func)\n",
        "        answer = None\n",
        "test_gradients.py test_svi.py",
    ),
    Mutation(
        "local draws by position in the batch",
        "record_mode",
        "numbers = getattr(stream, self.kind)(indices.cpu().numpy(), position,",
        "numbers = getattr(stream, self.kind)(range(len(indices)), position,",
        "test_gradients.py test_svi.py",
    ),
    Mutation(
        "private torch draws move the public generator",
        "randomness",
        "    with forked_rng():\n        # The whole",
        "    with contextlib.nullcontext():\n        # The whole",
        "test_randomness.py",
    ),
    Mutation(
        "a guide that reads x.mean() goes unnoticed",
        "checks",
        "        check_outside(outside, records)\n",
        "",
        "test_checks.py",
    ),
    Mutation(
        "what lies outside the plate sees the data",
        "outside",
        "records.arguments(records.placeholder())",
        "records.unprotected_arguments()",
        "test_gradients.py test_svi.py test_outside.py",
    ),
    Mutation(
        "initial values from the data",
        "initial_values",
        "    args, kwargs = public\n",
        "    args, kwargs = records.unprotected_arguments()\n",
        "test_checks.py test_outside.py",
    ),
    Mutation(
        "a record sees all rows",
        "records",
        "            leaves[i] = value.expand(length, *value.shape)\n",
        "            leaves[i] = leaves[i] if length > 1 else value.expand(length, *value.shape)\n",
        "test_records.py",
    ),
    Mutation(
        "errors with data in them",
        "guard",
        '+ (f" {hint}" if hint else "")',
        '+ f" {error}"',
        "test_checks.py",
    ),
    Mutation(
        "the plate's scale stays in a record's term",
        "plates",
        'msg["scale"] * frame.size / frame.full_size',
        'msg["scale"] * 1.0',
        "test_svi.py",
    ),
    Mutation(
        "torch's own draws for a record are not forked",
        "steps",
        "with private_rng(stream):",
        "if True:",
        "test_svi.py",
    ),
    Mutation(
        "local draws and noise from one stream",
        "svi",
        'partial(self._randomness.stream, "local", position)',
        'partial(self._randomness.stream, "noise", position)',
        "test_svi.py",
    ),
    Mutation(
        "all particles share their local draws",
        "steps",
        "local = [LocalStream(stream) for _ in particles]",
        "local = [LocalStream(stream)] * len(particles)",
        "test_svi.py",
    ),
    Mutation(
        "an adaptive bound that is not used",
        "svi",
        "blocks = [Block(size, self._bound, self._gradient_share)]",
        "blocks = [Block(size, 20.0, self._gradient_share)]",
        "test_svi.py",
    ),
    Mutation(
        "a parameter that only some records have",
        "plates",
        'if msg["name"] not in self.parameters:',
        "if False:",
        "test_checks.py",
    ),
    Mutation(
        "an error in a later step tells of a record",
        "gradients",
        "                if not breaks:\n                    raise\n",
        "                raise\n",
        "test_checks.py",
    ),
    Mutation(
        "the first look is at the original model",
        "inference",
        "first_look, _ = copied(self.model, self.guide) or (self.model, self.guide)",
        "first_look = self.model",
        "test_checks.py",
    ),
    Mutation(
        "a record reads all rows of local parameters",
        "own_rows",
        "{id(own.leaf): self.keep(own.unconstrained) for own in rows.values()}",
        "{}",
        "test_local_parameters.py",
    ),
    Mutation(
        "public draws see private rows",
        "outside",
        "        local.shown(local.constants()),\n",
        "",
        "test_local_parameters.py",
    ),
    Mutation(
        "a global site that reads private rows goes unnoticed",
        "sites",
        "    if outside.local:\n",
        "    if False:\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows of other records go unnoticed",
        "local_parameters",
        "        if dim is None:\n            raise",
        "        if dim is None:\n            dim = 0\n        if False:\n            raise",
        "test_local_parameters.py",
    ),
    Mutation(
        "initial values from private rows",
        "checks",
        "        with marked.shown(marked.constants()):\n",
        "        with forked_rng():\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows share a step count",
        "row_adam",
        "steps = moments.steps[indices] + 1",
        "steps = moments.steps[indices] * 0 + moments.steps.max() + 1",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows share their second moments",
        "row_adam",
        "square = adam.betas[1] * moments.square[indices] +",
        "square = adam.betas[1] * moments.square.mean(0) +",
        "test_local_parameters.py",
    ),
    Mutation(
        "a broken row moves",
        "row_adam",
        "        moved = indices[finite]\n",
        "        finite |= True\n        moved = indices\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows in every saved state",
        "svi",
        "        if include_private_local_state:\n",
        "        if True:\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "fixed batches with private rows",
        "svi",
        'if term.local and self.sampling == "fixed":',
        "if False:",
        "test_local_parameters.py",
    ),
    Mutation(
        "a ledger that is silent about private rows",
        "svi",
        "            self.accountant.note(NOTE",
        "            str(NOTE",
        "test_local_parameters.py",
    ),
    Mutation(
        "sampled indices stay on a parameter",
        "own_rows",
        "        value._pyro_unconstrained_param = torch.empty(0)\n",
        "",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows of another record",
        "steps",
        "local_rows = self.records.rows(chosen), self.term.local.rows(chosen)",
        "local_rows = self.records.rows(chosen), self.term.local.rows(chosen.flip(0))",
        "test_local_parameters.py",
    ),
    Mutation(
        "all particles of a graph share their local draws",
        "traced_step",
        "return [LocalStream(stream) for _ in self._draws]",
        "return [LocalStream(stream)] * len(self._draws)",
        "test_traced_step.py",
    ),
    Mutation(
        "public draws that are the same in every step",
        "traced_step",
        "return [[draw.public(device) for draw in draws] for draws in self._draws]",
        "self._kept = getattr(self, '_kept', None) or "
        "[[draw.public(device) for draw in draws] for draws in self._draws]; return self._kept",
        "test_traced_step.py",
    ),
    Mutation(
        "random numbers within a graph",
        "graphs",
        "if torch.Tag.nondeterministic_seeded in",
        "if False and torch.Tag.nondeterministic_seeded in",
        "test_graphs.py",
    ),
    Mutation(
        "a graph with the parameters' first values",
        "traced_step",
        "values = [value.detach().requires_grad_() for value in values]",
        "values = [torch.tensor(x.tolist(), requires_grad=True) for x in self._leaves]",
        "test_traced_step.py",
    ),
    Mutation(
        "a graph that is never compared with the model",
        "passes",
        "CHECKED_STEPS = 3",
        "CHECKED_STEPS = 0",
        "test_traced_step.py",
    ),
    Mutation(
        "padding that counts as records",
        "passes",
        "torch.cat([ones, 0 * ones])",
        "torch.cat([ones, ones])",
        "test_traced_step.py",
    ),
    Mutation(
        "padding that adds its quantile bit",
        "mechanisms",
        "sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))",
        "sums.append(each.weighted_sum(torch.where("
        "counted if len(sums) < 2 else norm.isfinite(), scale, 0.0)))",
        "test_traced_step.py",
    ),
    Mutation(
        "a batch of more than one pass is cut off",
        "traced_step",
        "for chosen in indices.split(self._passes.size):",
        "for chosen in indices[: self._passes.size].split(self._passes.size):",
        "test_traced_step.py",
    ),
    Mutation(
        "passes of any size",
        "traced_step",
        "size = pass_size(usual_size, eager.microbatch_size)",
        "size = usual_size",
        "test_traced_step.py",
    ),
    Mutation(
        "a pass that fails is left out",
        "traced_step",
        "                with private_rng(new_stream()):\n"
        "                    self._eager.add_microbatch("
        "clipped, self._particles(public), chosen, local)\n",
        "",
        "test_traced_step.py",
    ),
    Mutation(
        "the norm of one factor of an outer product",
        "outer_products",
        "squares = _squares(self.left.flatten(1)) * _squares(self.right.flatten(1))",
        "squares = _squares(self.left.flatten(1))",
        "test_outer_products.py",
    ),
    Mutation(
        "the norm of a product lost to rounding",
        "outer_products",
        "squares = squares + ",
        "squares = squares + 0.0 * ",
        "test_outer_products.py",
    ),
    Mutation(
        "a broken record in a sum of products",
        "outer_products",
        "return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)",
        "return values",
        "test_outer_products.py",
    ),
    Mutation(
        "a reshape between two transpositions",
        "outer_products",
        "if transposed or _shape(before)[:1] != _shape(node)[:1]:",
        "if _shape(before)[:1] != _shape(node)[:1]:",
        "test_outer_products.py",
    ),
    Mutation(
        "simplified although it is written to in place",
        "simplification",
        "if memory.is_written(node, *node.all_input_nodes):",
        "if False:",
        "test_simplification.py",
    ),
    Mutation(
        "padded batches take the first rows of all",
        "passes",
        "distinct=not padding",
        "distinct=True",
        "test_traced_step.py",
    ),
    Mutation(
        "constants that are written to in place",
        "simplification",
        "if not (fresh or derived) or memory.is_written(node):",
        "if not (fresh or derived):",
        "test_simplification.py",
    ),
    Mutation(
        "half the sensitivity under replace-one",
        "engines",
        'return Step("fixed", sigma / 2.0, rate)',
        'return Step("fixed", sigma, rate)',
        "test_engines.py test_accounting.py",
    ),
    Mutation(
        "a budget that is never checked",
        "accounting",
        "cost = self._cost(needed)\n        if cost > self._epsilon:",
        "cost = self._cost(needed)\n        if False:",
        "test_accounting.py test_svi.py",
    ),
    Mutation(
        "off-diagonals counted once",
        "gaussian",
        "math.sqrt(2) * matrix[rows, columns]",
        "matrix[rows, columns]",
        "test_gaussian.py test_factors.py test_sep.py",
    ),
    Mutation(
        "eta clipped without its precision",
        "factors",
        "squared = self._eta.square().sum(dim=1) + self._weight**2 * self._factors.squared_norm()",
        "squared = self._eta.square().sum(dim=1)",
        "test_factors.py test_sep.py",
    ),
    Mutation(
        "the norm of a site without the weight of its precision",
        "factors",
        "self._weight**2 * self._factors.squared_norm()",
        "self._factors.squared_norm()",
        "test_factors.py",
    ),
    Mutation(
        "the norm of a site lost to rounding",
        "factors",
        "squared.clamp(min=0.0) + 1e-12 * size",
        "squared.clamp(min=0.0)",
        "test_factors.py",
    ),
    Mutation(
        "a broken record's site in the sum",
        "factors",
        "finite(self._jacobian), finite(self._precision) * weights.unsqueeze(2)",
        "self._jacobian, self._precision * weights.unsqueeze(2)",
        "test_factors.py test_sep.py",
    ),
    Mutation(
        "a broken record stops the batch",
        "moments",
        "                if like is None:\n                    raise\n",
        "                raise\n",
        "test_moments.py",
    ),
    Mutation(
        "sites divided by the realised batch",
        "sep",
        "(released,) = self._release(clipped)",
        "(released,) = self._release(clipped); released = released * (1 + torch.rand(()).item())",
        "test_sep.py",
    ),
    Mutation(
        "noise that is not averaged",
        "average_factor",
        "self.noise_variance = _averaged(self.noise_variance, noise**2, damping)",
        "self.noise_variance = damping**2 * noise**2",
        "test_sep.py",
    ),
    Mutation(
        "noise that the aware posterior counts half",
        "noise_aware",
        "return variance * gain @ noise @ gain.T",
        "return 0.5 * variance * gain @ noise @ gain.T",
        "test_sep.py",
    ),
    Mutation(
        "a floor that is reported as information",
        "average_factor",
        "precision = floored(self._average.precision, 0.0)",
        "precision = floored(self._average.precision, self._radius)",
        "test_average_factor.py",
    ),
    Mutation(
        "no floor under the noise",
        "average_factor",
        "radius = torch.as_tensor(self._radius, dtype=torch.float64).clamp(min=least)",
        "radius = max(least, 1e-4)",
        "test_average_factor.py",
    ),
    Mutation(
        "the prior from the data",
        "prior",
        "args, kwargs = self._records.arguments(self._records.placeholder())",
        "args, kwargs = self._records.unprotected_arguments()",
        "test_prior.py",
    ),
    Mutation(
        "linear moments where they are not known to apply",
        "moments",
        'raise NotLinear("its parameters are not all that the likelihood depends on")',
        "pass",
        "test_moments.py test_sep.py",
    ),
    Mutation(
        "the cavity counts a record twice",
        "sep",
        "self._posterior / self._factor ** (1 / self._records.plate.size)",
        "self._posterior",
        "test_sep.py",
    ),
    Mutation(
        "Langevin noise that forgets the privacy noise",
        "baselines/sgld",
        "max(0.0, step_size - private), step_size)",
        "step_size, step_size)",
        "test_sgld.py",
    ),
    Mutation(
        "privacy noise assumed where records see nothing",
        "baselines/sgld",
        "torch.where(self._seen, ",
        "torch.where(self._seen | True, ",
        "test_sgld.py",
    ),
    Mutation(
        "privacy noise of another rate in the Langevin step",
        "baselines/sgld",
        " / self._sampler.sample_rate",
        "",
        "test_sgld.py",
    ),
    Mutation(
        "rows of DPEM beyond the radius",
        "baselines/em",
        "_shortened(x.double(), self.radius)",
        "x.double()",
        "test_em.py",
    ),
    Mutation(
        "second moments with the bound of the rows",
        "baselines/em",
        "(1.0, self.radius, self.radius**2)",
        "(1.0, self.radius, self.radius)",
        "test_em.py",
    ),
    Mutation(
        "a component made of noise moves",
        "baselines/em",
        "found = counts > 2 * noise_of_counts",
        "found = counts > -math.inf",
        "test_em.py",
    ),
    Mutation(
        "covariances that noise alone could explain",
        "baselines/em",
        "noise_of_squares * math.sqrt(2 * dim)",
        "0.0 * noise_of_squares",
        "test_em.py",
    ),
    Mutation(
        "VIPS: blocks of unequal noise",
        "vips/e_step",
        "blocks = [Block(each.size, each.bound, share) for",
        "blocks = [Block(each.size, 1.0, share) for",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: estimates divided by another rate",
        "private_steps",
        "return [block / rate for block in released]",
        "return [block / max(rate, 0.5) for block in released]",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: the static release of a step's noise, in the ledger half of it",
        "vips/inference",
        "released = self._account_and_release(clipped, self._noise_once)",
        "released = self._account_and_release(clipped, self._noise_once / 2)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: static statistics released in every step",
        "vips/inference",
        "if self._once and self._static is None:\n            self._release_static()",
        "if self._once:\n            self._release_static()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: one of two releases within the budget",
        "vips/inference",
        "            self._require_room()\n",
        "            pass\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: calibrated without the static release",
        "vips/inference",
        "events[SubsampledGaussian(once, rate, self.sampling)] += 1",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: draws by place in the batch",
        "vips/conjugate_model",
        "return self._tensor(self._stream.normal(self._indices.cpu().numpy(), draw, size))",
        "return self._tensor(self._stream.normal(np.arange(len(self._indices)), draw, size))",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: noise level of one block",
        "vips/e_step",
        "sigma * math.sqrt(len(self.statistics)) * each.bound / rate",
        "sigma * each.bound / rate",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: static noise that is averaged away",
        "vips/mixed_statistics",
        "old + added if name in static else math.hypot(old, added)",
        "math.hypot(old, added)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (logistic)",
        "vips/logistic_regression",
        "        x = clipped_rows(x.double(), 1.0)\n",
        "        x = x.double()\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (linear)",
        "vips/linear_regression",
        "x = clipped_rows(x.double(), self.x_bound) / self.x_bound",
        "x = x.double() / self.x_bound",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (mixture)",
        "vips/gaussian_mixture",
        "        x = clipped_rows(x.double(), self.radius)\n",
        "        x = x.double()\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: an E-step that looks at the batch (logistic)",
        "vips/logistic_regression",
        "squared = ((x @ second_moment) * x).sum(dim=1)",
        "squared = ((x @ second_moment) * x).sum(dim=1); squared = 0 * squared + squared.mean()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: an E-step that looks at the batch (mixture)",
        "vips/gaussian_mixture",
        "squared = (x.unsqueeze(1) - posterior.mean).square()  # (B, K, D)",
        "squared = (x.unsqueeze(1) - posterior.mean - x.mean(0)).square()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: NaN in the data",
        "vips/inference",
        "        records.require_finite()\n",
        "",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: data are looked at once",
        "vips/inference",
        "if self._records is None or not self._records.same_as(data, {}):",
        "if self._records is None:",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: errors of the E-step quote values",
        "vips/e_step",
        'with guarded("The E-step"):',
        "if True:",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: no floor under the noise",
        "vips/second_moments",
        "return self.values.clamp(min=self.radius)",
        "return self.values.clamp(min=1e-9)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a floor that is reported as information",
        "vips/second_moments",
        "return self.values.clamp(min=0.0)",
        "return self.values.clamp(min=self.radius)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: counts below zero",
        "vips/gaussian_mixture",
        'statistics["counts"].clamp(min=0.0)',
        'statistics["counts"]',
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: no floor under the scatter",
        "vips/gaussian_mixture",
        "scatter = torch.maximum(scatter, variance.sqrt())",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: means out of the ball",
        "vips/gaussian_mixture",
        "mean = clipped_rows(sums / divisor, self.radius)",
        "mean = sums / divisor",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a second moment that is not one",
        "vips/linear_regression",
        'joint = floored(unstacked(statistics["second_moment"], self.dim + 1), 0.0)',
        'joint = unstacked(statistics["second_moment"], self.dim + 1)',
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a residual below its noise",
        "vips/linear_regression",
        "residual = residual.clamp(min=sd * (1 + mean @ mean))",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "LDA: a norm without the topics' other words",
        "vips/documents",
        "return squares.sum(dim=1, keepdim=True).sqrt()",
        "return squares.amax(dim=1, keepdim=True).sqrt()",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: a padded document that is not a number",
        "vips/documents",
        "weighted = torch.where(weight > 0, self.values * weight, 0.0)",
        "weighted = self.values * weight",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: documents of all lengths",
        "vips/documents",
        "count = self.count * (length / self.lengths)[self.document]",
        "count = self.count",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: documents' lengths by the longest",
        "vips/documents",
        "count = self.count * (length / self.lengths)[self.document]",
        "count = self.count * (length / self.lengths.max())",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: an E-step that starts from the batch",
        "vips/documents",
        "equal = documents.lengths.unsqueeze(1) / topics.shape[1]",
        "equal = documents.lengths.mean() / topics.shape[1]",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: an E-step without the prior",
        "vips/documents",
        "weights = concentration + factors * documents.per_document(share)",
        "weights = 1e-9 + factors * documents.per_document(share)",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: both halves are the document",
        "vips/documents",
        "return _with_counts(documents, first), _with_counts(documents, counts - first)",
        "return documents, documents",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: noise adds to counts",
        "vips/noisy_counts",
        "below = sd / prior_mean - noisy / sd",
        "below = -sd / prior_mean - noisy / sd",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: negative counts stay",
        "vips/latent_dirichlet_allocation",
        'counts = expected_counts(statistics["topics"], noise["topics"], share)',
        'counts = statistics["topics"]',
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: fractions of words",
        "vips/latent_dirichlet_allocation",
        "if not ((data[0] >= 0) & (data[0] == data[0].round())).all():",
        "if not (data[0] >= 0).all():",
        "test_vips_lda.py",
    ),
    Mutation(
        "SBN: hidden units are coupled to themselves",
        "vips/hidden_units",
        "between = coupling - torch.diag(coupling.diagonal())",
        "between = coupling",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: an E-step that starts from the batch",
        "vips/hidden_units",
        "means = torch.zeros_like(field)",
        "means = torch.tanh(field.mean(0, keepdim=True)).expand_as(field) / 4 + 0 * field",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: pixels of 0 and 1",
        "vips/sigmoid_belief_network",
        'return {"images": images.double() - 0.5}',
        'return {"images": images.double()}',
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: a bound of half the size",
        "vips/sigmoid_belief_network",
        "math.sqrt(pixels * units) / 4",
        "math.sqrt(pixels * units) / 8",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: noise is taken for data",
        "vips/sigmoid_belief_network",
        "sums, sds.square(), precision",
        "sums, 0 * sds, precision",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: second moments that are none",
        "vips/sigmoid_belief_network",
        "return floored(moments, 0.0)",
        "return moments",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: impossible sums",
        "vips/sigmoid_belief_network",
        "sums.clamp(-largest[name], largest[name])",
        "sums",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: pixels of any brightness",
        "vips/sigmoid_belief_network",
        "if not ((data[0] == 0) | (data[0] == 1)).all():",
        "if False:",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: hidden pixels are seen",
        "vips/sigmoid_belief_network",
        "seen[group] = False",
        "pass",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: variances of the shrinkage prior",
        "vips/shrinkage",
        "precisions = Gamma((self.b + 0.5) * one, rates.mean + squares / 2)",
        "precisions = Gamma((self.b + 0.5) * one, rates.mean + squares)",
        "test_vips_sbn.py",
    ),
    Mutation(
        "audit: thresholds from the runs that are counted",
        "auditing",
        "low, high = chosen_thresholds(held_out, chosen, delta, confidence)",
        "low, high = chosen_thresholds(tested, coins, delta, confidence)",
        "test_auditing.py",
    ),
    Mutation(
        "audit: coins that are not fair",
        "auditing",
        "coins = _generator(seed).integers(2, size=num_trials - part - learning) == 1",
        "coins = np.arange(num_trials - part - learning) % 3 == 1",
        "test_auditing.py",
    ),
    Mutation(
        "audit: delta forgotten, repeated runs",
        "audit_bounds",
        "(accuracy - delta / np.maximum(rate, 1e-100))",
        "accuracy",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: delta by the estimated rate of guesses",
        "audit_bounds",
        "rate = rate_interval(guesses, trials, _RATE_SHARE * error)[0]",
        "rate = 2.0 * guesses / trials",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: accuracy without its limit",
        "audit_bounds",
        "accuracy = rate_interval(correct, np.maximum(guesses, 1), (1.0 - _RATE_SHARE) * error)[0]",
        "accuracy = np.minimum(0.999, correct / np.maximum(guesses, 1))",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: delta forgotten, one run",
        "audit_bounds",
        "guesses, q)) + excess",
        "guesses, q)) + 0.0 * excess",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: half of the delta term, one run",
        "audit_bounds",
        "excess = canaries * delta",
        "excess = 0.5 * canaries * delta",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: one correct guess too many",
        "audit_bounds",
        "binom.sf(correct - 1, guesses, q)",
        "binom.sf(correct, guesses, q)",
        "test_audit_bounds.py",
    ),
    Mutation(
        "audit: limits of single points",
        "guesses",
        "each = error / (4 * len(thresholds))",
        "each = 1e4 * error",
        "test_auditing.py",
    ),
    Mutation(
        "audit: the canary stays in the data",
        "canaries",
        "column.clone() if isinstance(column, torch.Tensor) else column.copy()",
        "column",
        "test_auditing.py",
    ),
    Mutation(
        "trade-off: one direction only",
        "trade_off",
        "        curve = np.maximum(curve, np.exp(-epsilon) * (kept - alpha))\n",
        "",
        "test_trade_off.py",
    ),
    Mutation(
        "trade-off: delta forgotten",
        "trade_off",
        "kept = 1.0 - accountant.get_delta(epsilon)",
        "kept = 1.0",
        "test_trade_off.py",
    ),
]


def survives(mutation: Mutation) -> bool:
    """Whether the tests pass with the mutation."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("pyro_dp", "tests"):
            shutil.copytree(ROOT / name, Path(scratch) / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, scratch)
        path = Path(scratch) / "pyro_dp" / f"{mutation.module}.py"
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise SystemExit(
                f"{mutation.name}: {source.count(mutation.old)} places in {mutation.module}.py"
            )
        path.write_text(source.replace(mutation.old, mutation.new))
        tests = [f"tests/{name}" for name in mutation.tests.split()]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": scratch},
            capture_output=True,
        )
        return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="part of the name of the mutations to try")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.only or options.only in m.name]
    survivors = 0
    for mutation in chosen:
        alive = survives(mutation)
        survivors += alive
        print(f"{'SURVIVES' if alive else 'caught':<10}{mutation.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
