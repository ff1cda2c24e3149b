"""Break the privacy code on purpose and see the tests fail.

Each mutation changes one place of the package in a scratch copy and runs the tests that should
notice. A mutation that survives is a hole in the tests. Places are named by what is defined there,
not by their file: a definition may move, and is guarded still.

    python benchmarks/mutations.py
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Mutation:
    """What is broken, where, how, and which tests must notice.

    :param where: the name of a function, class or constant, a method's as ``Class.method``.
    :param old: text that is found once in what has this name, in the whole package.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "no noise",
        "ClippedSum._noisy",
        "released.append(torch.from_numpy(draw)",
        "released.append(torch.from_numpy(0 * draw)",
        "test_clipping.py",
    ),
    Mutation(
        "half the noise",
        "ClippedSum._noisy",
        "draw *= sigma * block.bound",
        "draw *= 0.5 * sigma * block.bound",
        "test_clipping.py",
    ),
    Mutation(
        "no clipping",
        "clipped_sums",
        "scale = torch.where(norm > target, target / norm, 1.0)",
        "scale = torch.ones_like(norm)",
        "test_clipping.py",
    ),
    Mutation(
        "clipping after the sum",
        "clipped_sums",
        "sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))",
        "total = each.weighted_sum(torch.where(counted, 1.0, 0.0 * scale)); "
        "sums.append(total * min(1.0, float(bound / total.norm())))",
        "test_clipping.py",
    ),
    Mutation(
        "a mean instead of a sum",
        "Rows.weighted_sum",
        "0.0).sum(dim=0)",
        "0.0).mean(dim=0)",
        "test_clipping.py",
    ),
    Mutation(
        "norm, scale and sum in the dtype of the gradients",
        "Rows.__init__",
        "self._values = values.to(torch.float64)",
        "self._values = values",
        "test_clipping.py",
    ),
    Mutation(
        "a broken record counts in the other blocks",
        "clipped_sums",
        "counted = sum(norm for norm in norms if norm is not None) < math.inf",
        "counted = norms[-1 if norms[-1] is not None else 0] < math.inf",
        "test_clipping.py",
    ),
    Mutation(
        "a bit with half its noise",
        "PrivateInference.__init__",
        "self._bit = Block(1, 0.5, SHARE)",
        "self._bit = Block(1, 0.25, SHARE)",
        "test_clipped_fraction.py test_dpsvi.py",
    ),
    Mutation(
        "a bit without its share of the cost",
        "DPSVI.__init__",
        "self._gradient_share = 1.0 - of_bit - of_loss",
        "self._gradient_share = 1.0 - of_loss",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "DPSEP: a bit without its share of the cost",
        "DPSEP.__init__",
        "self._share = 1.0 - (self._bit.share if self._bit else 0.0)",
        "self._share = 1.0",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "DPSEP: noise of sites that forgets the share",
        "DPSEP._update",
        "sigma = self.noise_multiplier / math.sqrt(self._share)",
        "sigma = self.noise_multiplier",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "the bit of a broken record counts",
        "clipped_sums",
        "sums.append(each.weighted_sum(counted))",
        "sums.append(each.weighted_sum(torch.ones_like(counted)))",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "bits of whole units, not halves",
        "with_bit",
        "torch.where(norms <= bound, 0.5, -0.5)",
        "torch.where(norms <= bound, 1.0, -1.0)",
        "test_dpsvi.py",
    ),
    Mutation(
        "a clipped fraction that is the fraction within",
        "ClippedFractions._look",
        "(0.5 - total / size, variance)",
        "(0.5 + total / size, variance)",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "a standard error without the sampling",
        "ClippedFractions._look",
        "variance = noise**2 + (1 - rate) / (4 * rate * size)",
        "variance = noise**2",
        "test_clipped_fraction.py",
    ),
    Mutation(
        "a scheduler that is never stepped",
        "DPSVI._step_of_run",
        "if isinstance(self.optim, PyroLRScheduler):",
        "if False:",
        "test_dpsvi.py",
    ),
    Mutation(
        "an optimizer that needs a closure",
        "DPSVI._require_optimizer",
        "if _needs_closure(optimizer):",
        "if False:",
        "test_dpsvi.py",
    ),
    Mutation(
        "DPSEP: gradients that stand out are nothing to warn of",
        "StepControl.accepts",
        "self.unsettled += not accepted or",
        "self.unsettled += not accepted and",
        "test_step_control.py",
    ),
    Mutation(
        "DPSEP: what the noise hides is not counted",
        "AverageFactor.hidden",
        "return int((values < self._radius).sum())",
        "return 0",
        "test_dpsep.py",
    ),
    Mutation(
        "released before it is recorded",
        "release",
        "    accountant.record(event)\n",
        "    noise.standard_normal(1)\n    accountant.record(event)\n",
        "test_clipping.py",
    ),
    Mutation(
        "one event per block",
        "release",
        "accountant.record(event)",
        "accountant.record(event, len(clipped.blocks))",
        "test_clipping.py",
    ),
    Mutation(
        "every block with the noise of the whole event",
        "release",
        "event.noise_multiplier / math.sqrt(block.share)",
        "event.noise_multiplier",
        "test_clipping.py",
    ),
    Mutation(
        "dividing by the realised batch",
        "DPSVI.step",
        "self._step.add(clipped, draws, self._sample(position), stream)\n"
        "        gradient, *others = self._release(clipped)",
        "indices = self._sample(position); self._step.add(clipped, draws, indices, stream)\n"
        "        rate, size = self._sampler.sample_rate, self._records.plate.size\n"
        "        gradient, *others = "
        "[b * rate * size / max(len(indices), 1) for b in self._release(clipped)]",
        "test_dpsvi.py",
    ),
    Mutation(
        "randperm sampling under the name of Poisson",
        "RecordSampler.draw",
        "stream.binomial(self.size, self.rate)",
        "round(self.size * self.rate)",
        "test_sampling.py test_dpsvi.py",
    ),
    Mutation(
        "the plate's own indices",
        "OneRecord._process_message",
        'msg["value"] = self.index',
        'msg["value"] = msg["fn"]()[:1]',
        "test_record_term.py",
    ),
    Mutation(
        "event recorded with the wrong rate",
        "IterativeMechanism._account_and_release",
        "event=SubsampledGaussian(noise_multiplier, rate, self._sampler.sampling)",
        "event=SubsampledGaussian(noise_multiplier, rate / 2, 'poisson')",
        "test_dpsvi.py",
    ),
    Mutation(
        "fixed batches: the requested rate, not B / N",
        "RecordSampler.sample_rate",
        'return self.batch_size / self.size if self.sampling == "fixed" else self.rate',
        "return self.rate",
        "test_sampling.py test_dpsvi.py",
    ),
    Mutation(
        "the same noise stream in two runs",
        "Randomness.stream",
        "seed = _SystemEntropy()",
        "seed = np.random.SeedSequence(0)",
        "test_streams.py test_dpsvi.py",
    ),
    Mutation(
        "the same noise in every step",
        "Randomness.stream",
        "place = (_PURPOSES.index(purpose), position)",
        "place = (_PURPOSES.index(purpose), 0)",
        "test_streams.py test_dpsvi.py",
    ),
    Mutation(
        "sampling and noise from one stream",
        "Randomness.stream",
        "place = (_PURPOSES.index(purpose), position)",
        "place = (0, position)",
        "test_streams.py",
    ),
    Mutation(
        "local draws from the public stream",
        "RecordMode.__torch_function__",
        "        answer = DRAWING.get(func)\n",
        "        answer = None\n",
        "test_record_term.py test_dpsvi.py",
    ),
    Mutation(
        "local draws by position in the batch",
        "Draw.sample",
        "numbers = getattr(stream, self.kind)(indices.cpu().numpy(), position,",
        "numbers = getattr(stream, self.kind)(range(len(indices)), position,",
        "test_record_term.py test_dpsvi.py",
    ),
    Mutation(
        "private torch draws move the public generator",
        "private_rng",
        "    with forked_rng():\n        # The whole",
        "    with contextlib.nullcontext():\n        # The whole",
        "test_streams.py",
    ),
    Mutation(
        "a guide that reads x.mean() goes unnoticed",
        "build_record_term",
        "        check_outside(outside, records)\n",
        "",
        "test_structure_checks.py",
    ),
    Mutation(
        "what lies outside the plate sees the data",
        "draw_particle",
        "records.arguments(records.placeholder())",
        "records._with_tables(records.tables)",
        "test_record_term.py test_dpsvi.py test_global_draw.py",
    ),
    Mutation(
        "initial values from the data",
        "initialise",
        "    args, kwargs = public\n",
        "    args, kwargs = records._with_tables(records.tables)\n",
        "test_structure_checks.py test_global_draw.py",
    ),
    Mutation(
        "a record sees all rows",
        "Records.arguments",
        "return self._with_tables([value.expand(length, *value.shape) for value in own])",
        "return self._with_tables(self.tables if length > 1 else [x[None] for x in row])",
        "test_records.py",
    ),
    Mutation(
        "errors with data in them",
        "guarded",
        'raise ModelError(f"{message}. {_WITHHELD} {advice}".rstrip()) from None',
        'raise ModelError(f"{message}. {text}") from None',
        "test_structure_checks.py test_leaks.py",
    ),
    Mutation(
        "the plate's scale stays in a record's term",
        "OneRecord._process_message",
        'msg["scale"] * frame.size / frame.full_size',
        'msg["scale"] * 1.0',
        "test_dpsvi.py",
    ),
    Mutation(
        "torch's own draws for a record are not forked",
        "EagerStep.add",
        "with private_rng(stream):",
        "if True:",
        "test_dpsvi.py",
    ),
    Mutation(
        "local draws and noise from one stream",
        "DPSVI.step",
        'partial(self._randomness.stream, "local", position)',
        'partial(self._randomness.stream, "noise", position)',
        "test_dpsvi.py",
    ),
    Mutation(
        "all particles share their local draws",
        "EagerStep.add",
        "local = [LocalStream(stream) for _ in particles]",
        "local = [LocalStream(stream)] * len(particles)",
        "test_dpsvi.py",
    ),
    Mutation(
        "an adaptive bound that is not used",
        "DPSVI._blocks",
        "blocks = [Block(size, self._bound, self._gradient_share)]",
        "blocks = [Block(size, 20.0, self._gradient_share)]",
        "test_dpsvi.py",
    ),
    Mutation(
        "a parameter that only some records have",
        "OneRecord._process_message",
        'if msg["name"] not in self.parameters:',
        "if False:",
        "test_structure_checks.py",
    ),
    Mutation(
        "an error in a later step tells of a record",
        "RecordTerm.looped",
        "                if not breaks:\n                    raise\n",
        "                raise\n",
        "test_structure_checks.py",
    ),
    Mutation(
        "the plate is looked for on the data",
        "find_plate",
        "*pytree.tree_unflatten(map(stand_in, leaves), spec)",
        "args, kwargs",
        "test_leaks.py test_first_attempts.py",
    ),
    Mutation(
        "data in closures by their memory",
        "first_look",
        "    refuse_captured_data(references, records)\n",
        "",
        "test_leaks.py",
    ),
    Mutation(
        "data in closures by their length",
        "first_look",
        "    refuse_rows(state.references, found.size)\n",
        "",
        "test_first_attempts.py",
    ),
    Mutation(
        "an optimizer's settings may capture data",
        "first_look",
        "References(model, guide, *others, *records.constants)",
        "References(model, guide, *records.constants)",
        "test_leaks.py",
    ),
    Mutation(
        "what is kept of a record stays",
        "CapturedState._put_back",
        "place.put_back(values)",
        "pass",
        "test_captured_state.py",
    ),
    Mutation(
        "tensors may be changed in place",
        "CapturedState._put_back",
        "if kept.changed:",
        "if False:",
        "test_captured_state.py test_structure_checks.py",
    ),
    Mutation(
        "what a model keeps of a record is not compared",
        "require_same_changes",
        "if not _alike(one.get(key, MISSING), other.get(key, MISSING)):",
        "if False:",
        "test_captured_state.py",
    ),
    Mutation(
        "initial values may be numbers of the data",
        "initialise",
        "    refuse_numbers(first.values, records)\n",
        "",
        "test_leaks.py",
    ),
    Mutation(
        "records may read each other",
        "build_record_term",
        "        check_coupling(runs, records)\n",
        "",
        "test_structure_checks.py",
    ),
    Mutation(
        "a later step may have other data",
        "PrivateInference._look_anew",
        "            self._data.require_same_data(records)\n",
        "            pass\n",
        "test_first_attempts.py",
    ),
    Mutation(
        "VIPS: a model of one's own sees batches",
        "VIPS.__init__",
        "IsolatedModel(model, self._own)",
        "model",
        "test_isolated_model.py",
    ),
    Mutation(
        "warnings of single records are shown",
        "guarded",
        "contextlib.nullcontext() if public else _no_warnings()",
        "contextlib.nullcontext()",
        "test_leaks.py",
    ),
    Mutation(
        "lists with an element per record",
        "refuse_untyped",
        "    if _is_untyped_data(value, size):\n",
        "    if False:\n",
        "test_first_attempts.py",
    ),
    Mutation(
        "a record reads all rows of local parameters",
        "_OwnRows.__init__",
        "{id(own.leaf): self.keep(own.unconstrained) for own in rows.values()}",
        "{}",
        "test_local_parameters.py",
    ),
    Mutation(
        "public draws see private rows",
        "draw_particle",
        "        local.shown(local.constants()),\n",
        "",
        "test_local_parameters.py",
    ),
    Mutation(
        "a global site that reads private rows goes unnoticed",
        "check_outside",
        "    if outside.local:\n",
        "    if False:\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows of other records go unnoticed",
        "find_local_parameters",
        "        if dim is None:\n            raise",
        "        if dim is None:\n            dim = 0\n        if False:\n            raise",
        "test_local_parameters.py",
    ),
    Mutation(
        "initial values from private rows",
        "build_record_term",
        "        with marked.shown(marked.constants()):\n",
        "        with forked_rng():\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows share a step count",
        "RowOptimizer._move",
        "steps = moments.steps[indices] + 1",
        "steps = moments.steps[indices] * 0 + moments.steps.max() + 1",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows share their second moments",
        "RowOptimizer._move",
        "square = adam.betas[1] * moments.square[indices] +",
        "square = adam.betas[1] * moments.square.mean(0) +",
        "test_local_parameters.py",
    ),
    Mutation(
        "a broken row moves",
        "RowOptimizer.step",
        "        moved = indices[finite]\n",
        "        finite |= True\n        moved = indices\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows in every saved state",
        "DPSVI.state_dict",
        "        if include_private_local_state:\n",
        "        if True:\n",
        "test_local_parameters.py",
    ),
    Mutation(
        "fixed batches with private rows",
        "DPSVI._build",
        'if term.local and self.sampling == "fixed":',
        "if False:",
        "test_local_parameters.py",
    ),
    Mutation(
        "a ledger that is silent about private rows",
        "DPSVI._build",
        "            self.accountant.note(NOTE",
        "            str(NOTE",
        "test_local_parameters.py",
    ),
    Mutation(
        "sampled indices stay on a parameter",
        "_OwnParams._pyro_param",
        "        value._pyro_unconstrained_param = torch.empty(0)\n",
        "",
        "test_local_parameters.py",
    ),
    Mutation(
        "rows of another record",
        "EagerStep.add_microbatch",
        "local_rows = self.records.rows(chosen), self.term.local.rows(chosen)",
        "local_rows = self.records.rows(chosen), self.term.local.rows(chosen.flip(0))",
        "test_local_parameters.py",
    ),
    Mutation(
        "all particles of a graph share their local draws",
        "TracedStep._local_streams",
        "return [LocalStream(stream) for _ in self._draws]",
        "return [LocalStream(stream)] * len(self._draws)",
        "test_traced_step.py",
    ),
    Mutation(
        "public draws that are the same in every step",
        "TracedStep.draw",
        "return [[draw.public(device) for draw in draws] for draws in self._draws]",
        "self._kept = getattr(self, '_kept', None) or "
        "[[draw.public(device) for draw in draws] for draws in self._draws]; return self._kept",
        "test_traced_step.py",
    ),
    Mutation(
        "random numbers within a graph",
        "trace",
        "if torch.Tag.nondeterministic_seeded in",
        "if False and torch.Tag.nondeterministic_seeded in",
        "test_tracing.py",
    ),
    Mutation(
        "a graph with the parameters' first values",
        "TracedStep._at",
        "values = [value.detach().requires_grad_() for value in values]",
        "values = [torch.tensor(x.tolist(), requires_grad=True) for x in self._leaves]",
        "test_traced_step.py",
    ),
    Mutation(
        "a graph that is never compared with the model",
        "CHECKED_STEPS",
        "CHECKED_STEPS = 3",
        "CHECKED_STEPS = 0",
        "test_traced_step.py",
    ),
    Mutation(
        "padding that counts as records",
        "PaddedSum.__init__",
        "torch.cat([ones, 0 * ones])",
        "torch.cat([ones, ones])",
        "test_traced_step.py",
    ),
    Mutation(
        "padding that adds its bit",
        "clipped_sums",
        "sums.append(each.weighted_sum(counted))",
        "sums.append(each.weighted_sum(norms[0] < math.inf))",
        "test_traced_step.py",
    ),
    Mutation(
        "a batch of more than one pass is cut off",
        "TracedStep.add",
        "for chosen in indices.split(self._passes.size):",
        "for chosen in indices[: self._passes.size].split(self._passes.size):",
        "test_traced_step.py",
    ),
    Mutation(
        "passes of any size",
        "TracedStep.__init__",
        "size = pass_size(usual_size, limit)",
        "size = usual_size",
        "test_traced_step.py",
    ),
    Mutation(
        "a pass that fails is left out",
        "TracedStep.add",
        "                with private_rng(new_stream()):\n"
        "                    self._eager.add_microbatch("
        "clipped, self._particles(public), chosen, local)\n",
        "",
        "test_traced_step.py",
    ),
    Mutation(
        "the norm of one factor of an outer product",
        "OuterProducts.squared_norms",
        "squares = _squares(self.left.flatten(1)) * _squares(self.right.flatten(1))",
        "squares = _squares(self.left.flatten(1))",
        "test_outer_products.py",
    ),
    Mutation(
        "the norm of a product lost to rounding",
        "OuterProducts.squared_norms",
        "squares = squares + ",
        "squares = squares + 0.0 * ",
        "test_outer_products.py",
    ),
    Mutation(
        "a broken record in a sum of products",
        "finite",
        "return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)",
        "return values",
        "test_outer_products.py",
    ),
    Mutation(
        "a reshape between two transpositions",
        "_product",
        "if transposed or _shape(before)[:1] != _shape(node)[:1]:",
        "if _shape(before)[:1] != _shape(node)[:1]:",
        "test_outer_products.py",
    ),
    Mutation(
        "simplified although it is written to in place",
        "_share",
        "if memory.is_written(node, *node.all_input_nodes):",
        "if False:",
        "test_simplify.py",
    ),
    Mutation(
        "padded batches take the first rows of all",
        "PaddedSum.add",
        "distinct=not padding",
        "distinct=True",
        "test_traced_step.py",
    ),
    Mutation(
        "constants that are written to in place",
        "_fold_constants",
        "if not (fresh or derived) or memory.is_written(node):",
        "if not (fresh or derived):",
        "test_simplify.py",
    ),
    Mutation(
        "half the sensitivity under replace-one",
        "interpret",
        'return DominatingPair("fixed", sigma / 2.0, rate)',
        'return DominatingPair("fixed", sigma, rate)',
        "test_engines.py test_accounting.py",
    ),
    Mutation(
        "a budget that is never checked",
        "Budget._extend",
        "cost = self.cost(needed)\n        if cost > self._budget:",
        "cost = self.cost(needed)\n        if False:",
        "test_accounting.py test_dpsvi.py",
    ),
    Mutation(
        "a step too few of each kind",
        "compose",
        "fft.rfft(wrapped) ** count",
        "fft.rfft(wrapped) ** max(1, count - 1)",
        "test_composition.py",
    ),
    Mutation(
        "sampled subsets that cost more than all records",
        "step_divergences",
        "return np.minimum(found, ORDERS / (2.0 * min(step.noise, LARGEST) ** 2))",
        "return found",
        "test_composition.py",
    ),
    Mutation(
        "deltas of events that are not added",
        "epsilon",
        "return added + _EPSILON[engine](steps, delta - lost)",
        "return added + _EPSILON[engine](steps, delta)",
        "test_engines.py",
    ),
    Mutation(
        "a look without noise that leaves a guarantee",
        "_parts",
        "if count and type(event) is NonPrivateLook:",
        "if False:",
        "test_engines.py test_accounting.py",
    ),
    Mutation(
        "a budget that goes on after a look without noise",
        "PrivacyAccountant.record",
        "            if type(event) is NonPrivateLook:\n                self._plan.forget",
        "            if False:\n                self._plan.forget",
        "test_accounting.py",
    ),
    Mutation(
        "threads that race for the ledger",
        "PrivacyAccountant.record",
        "        with self._lock:\n            known =",
        "        if True:\n            known =",
        "test_accounting.py",
    ),
    Mutation(
        "an older state that lowers the ledger",
        "PrivacyAccountant.load_state_dict",
        "small, large, why = self._counts, counts, _STAYS",
        "small, large, why = {}, counts, _STAYS",
        "test_accounting.py test_dpem.py",
    ),
    Mutation(
        "a journal that is an older copy",
        "PrivacyAccountant.load_state_dict",
        "small, large, why = counts, self._counts, _OLDER_JOURNAL",
        "small, large, why = {}, self._counts, _OLDER_JOURNAL",
        "test_journal.py test_dpem.py",
    ),
    Mutation(
        "streams that repeat after a state was loaded",
        "PrivacyAccountant._adopt",
        "self._start = secrets.randbits(128)",
        "self._start = 0",
        "test_journal.py test_dpem.py",
    ),
    Mutation(
        "a journal that is written after the ledger was found to be in order",
        "PrivacyAccountant.record",
        "self._counts[event] = known + count\n            if type",
        "pass\n            if type",
        "test_journal.py",
    ),
    Mutation(
        "a budget that pays no more for what a journal counts",
        "IterativeMechanism._load_state",
        "again = self._calibrates and self._lost",
        "again = False",
        "test_dpem.py",
    ),
    Mutation(
        "a line that is not on the disk yet",
        "_write",
        "        line = line[os.write(file, line) :]\n    os.fsync(file)",
        "        line = line[os.write(file, line) :]",
        "test_journal.py",
    ),
    Mutation(
        "damage that is taken for a torn line",
        "Journal._read",
        "raise self._damaged(number, str(error)) from None",
        "break",
        "test_journal.py",
    ),
    Mutation(
        "lines that do not know those above them",
        "_digest",
        'hashlib.blake2b(before.encode() + b" " + text',
        'hashlib.blake2b(b" " + text',
        "test_journal.py",
    ),
    Mutation(
        "a journal behind a torn line",
        "Journal._mend",
        "os.ftruncate(self._file, self._size)",
        "pass",
        "test_journal.py",
    ),
    Mutation(
        "a second line behind one that was only begun",
        "Journal._append",
        'self._problem = "could not be written"',
        "pass",
        "test_journal.py",
    ),
    Mutation(
        "a journal that two processes write",
        "_locked",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "test_journal.py",
    ),
    Mutation(
        "a forked process that goes on with the journal",
        "_leave_to_parent",
        'journal._problem = "belongs to the process that forked this one"\n        journal.close()',
        "pass",
        "test_journal.py",
    ),
    Mutation(
        "a new journal over one that is there",
        "_create",
        "os.link(name, path)",
        "os.replace(name, path); open(name, 'w').close()",
        "test_journal.py",
    ),
    Mutation(
        "a journal that was cut while it was open",
        "Journal.require_usable",
        "same = (status.st_ino, status.st_size) == (self._identity, self._size)",
        "same = status.st_ino == self._identity",
        "test_journal.py",
    ),
    Mutation(
        "a resumed DPSEP that has forgotten its noise",
        "_CHANGING",
        '_CHANGING = (\n    "noise_variance",\n',
        "_CHANGING = (\n",
        "test_dpsep.py",
    ),
    Mutation(
        "off-diagonals counted once",
        "stacked",
        "math.sqrt(2) * matrix[rows, columns]",
        "matrix[rows, columns]",
        "test_gaussian.py test_site_factors.py test_dpsep.py",
    ),
    Mutation(
        "eta clipped without its precision",
        "_FullRows.norms",
        "squared = self._eta.square().sum(dim=1) + self._weight**2 * self._factors.squared_norm()",
        "squared = self._eta.square().sum(dim=1)",
        "test_site_factors.py test_dpsep.py",
    ),
    Mutation(
        "the norm of a site without the weight of its precision",
        "_FullRows.norms",
        "self._weight**2 * self._factors.squared_norm()",
        "self._factors.squared_norm()",
        "test_site_factors.py",
    ),
    Mutation(
        "the norm of a site lost to rounding",
        "LowRank.squared_norm",
        "squared.clamp(min=0.0) + 1e-12 * size",
        "squared.clamp(min=0.0)",
        "test_site_factors.py",
    ),
    Mutation(
        "a broken record's site in the sum",
        "LowRank.weighted_precision",
        "finite(self._jacobian), finite(self._precision) * weights.unsqueeze(2)",
        "self._jacobian, self._precision * weights.unsqueeze(2)",
        "test_site_factors.py test_dpsep.py",
    ),
    Mutation(
        "a broken record stops the batch",
        "Likelihood.for_each",
        "                if like is None:\n                    raise\n",
        "                raise\n",
        "test_tilted_sites.py",
    ),
    Mutation(
        "sites divided by the realised batch",
        "DPSEP.step",
        "released, *bit = self._release(clipped)",
        "released, *bit = self._release(clipped); "
        "released = released * (1 + torch.rand(()).item())",
        "test_dpsep.py",
    ),
    Mutation(
        "noise that is not averaged",
        "AverageFactor.update",
        "self.noise_variance = _averaged(self.noise_variance, noise**2, damping)",
        "self.noise_variance = damping**2 * noise**2",
        "test_dpsep.py",
    ),
    Mutation(
        "noise that the aware posterior counts half",
        "mean_noise",
        "return variance * gain @ noise @ gain.T",
        "return 0.5 * variance * gain @ noise @ gain.T",
        "test_dpsep.py",
    ),
    Mutation(
        "a floor that is reported as information",
        "AverageFactor.known",
        "precision = floored(self._average.precision, 0.0)",
        "precision = floored(self._average.precision, self._radius)",
        "test_average_factor.py",
    ),
    Mutation(
        "no floor under the noise",
        "AverageFactor.projected",
        "radius = torch.as_tensor(self._radius, dtype=torch.float64).clamp(min=least)",
        "radius = max(least, 1e-4)",
        "test_average_factor.py",
    ),
    Mutation(
        "the prior from the data",
        "Prior._log_prob",
        "args, kwargs = self._records.arguments(self._records.placeholder())",
        "args, kwargs = self._records._with_tables(self._records.tables)",
        "test_prior_factor.py",
    ),
    Mutation(
        "linear moments where they are not known to apply",
        "LinearMoments.__init__",
        'raise NotLinear("its parameters are not all that the likelihood depends on")',
        "pass",
        "test_tilted_sites.py test_dpsep.py",
    ),
    Mutation(
        "the cavity counts a record twice",
        "DPSEP.step",
        "self._posterior / self._factor ** (1 / self._records.plate.size)",
        "self._posterior",
        "test_dpsep.py",
    ),
    Mutation(
        "Langevin noise that forgets the privacy noise",
        "DPSGLD._move",
        "missing = step_size - min(private, step_size) * self._seen.double()",
        "missing = step_size - 0.0 * self._seen.double()",
        "test_dpsgld.py",
    ),
    Mutation(
        "privacy noise assumed where records see nothing",
        "DPSGLD._move",
        "* self._seen.double()",
        "* (self._seen | True).double()",
        "test_dpsgld.py",
    ),
    Mutation(
        "privacy noise of another rate in the Langevin step",
        "DPSGLD._move",
        " / self._sampler.sample_rate",
        "",
        "test_dpsgld.py",
    ),
    Mutation(
        "rows of DPEM beyond the radius",
        "DPEM._moments",
        "_shortened(x.double(), self.radius)",
        "x.double()",
        "test_dpem.py",
    ),
    Mutation(
        "second moments with the bound of the rows",
        "DPEM._blocks",
        "(1.0, self.radius, self.radius**2)",
        "(1.0, self.radius, self.radius)",
        "test_dpem.py",
    ),
    Mutation(
        "a component made of noise moves",
        "DPEM._maximise",
        "found = counts > 2 * noise_of_counts",
        "found = counts > -math.inf",
        "test_dpem.py",
    ),
    Mutation(
        "covariances that noise alone could explain",
        "DPEM._maximise",
        "noise_of_squares * math.sqrt(2 * dim)",
        "0.0 * noise_of_squares",
        "test_dpem.py",
    ),
    Mutation(
        "VIPS: blocks of unequal noise",
        "StatisticsSum._sum",
        "blocks = [Block(each.size, each.bound, share) for",
        "blocks = [Block(each.size, 1.0, share) for",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: estimates divided by another rate",
        "IterativeMechanism._account_and_release",
        "return [block / rate for block in released]",
        "return [block / max(rate, 0.5) for block in released]",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: the static release of a step's noise, in the ledger half of it",
        "VIPS._release_static",
        "released = self._account_and_release(clipped, self._noise_once)",
        "released = self._account_and_release(clipped, self._noise_once / 2)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: static statistics released in every step",
        "VIPS.step",
        "if self._once and self._static is None:\n            self._release_static()",
        "if self._once:\n            self._release_static()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: one of two releases within the budget",
        "VIPS._prepare",
        "            self._require_room()\n",
        "            pass\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: calibrated without the static release",
        "VIPS._to_release",
        "events[SubsampledGaussian(once, rate, self.sampling)] += 1",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: draws by place in the batch",
        "Draws.normal",
        "return self._tensor(self._stream.normal(self._indices.cpu().numpy(), draw, size))",
        "return self._tensor(self._stream.normal(np.arange(len(self._indices)), draw, size))",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: noise level of one block",
        "StatisticsSum.estimates",
        "sigma * math.sqrt(len(self.statistics)) * each.bound / rate",
        "sigma * each.bound / rate",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: static noise that is averaged away",
        "MixedStatistics.mixed",
        "old + added if name in static else math.hypot(old, added)",
        "math.hypot(old, added)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (logistic)",
        "LogisticRegression.expected_statistics",
        "        x = clipped_rows(x.double(), 1.0)\n",
        "        x = x.double()\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (linear)",
        "LinearRegression.static_statistics",
        "x = clipped_rows(x.double(), self.x_bound) / self.x_bound",
        "x = x.double() / self.x_bound",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: rows of x that are not clipped (mixture)",
        "GaussianMixture.expected_statistics",
        "        x = clipped_rows(x.double(), self.radius)\n",
        "        x = x.double()\n",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: an E-step that looks at the batch (logistic)",
        "LogisticRegression.expected_statistics",
        "squared = ((x @ second_moment) * x).sum(dim=1)",
        "squared = ((x @ second_moment) * x).sum(dim=1); squared = 0 * squared + squared.mean()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: an E-step that looks at the batch (mixture)",
        "GaussianMixture.expected_statistics",
        "squared = (x.unsqueeze(1) - posterior.mean).square()  # (B, K, D)",
        "squared = (x.unsqueeze(1) - posterior.mean - x.mean(0)).square()",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: NaN in the data",
        "VIPS._checked",
        "        records.require_finite()\n",
        "",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: data are looked at once",
        "VIPS._look_at",
        "if self._records is None or not self._records.same_as(data, {}):",
        "if self._records is None:",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: errors of the E-step quote values",
        "StatisticsSum._sum",
        'with guarded("The E-step"):',
        "if True:",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: no floor under the noise",
        "NoisySecondMoment.stepping",
        "return self.values.clamp(min=self.radius)",
        "return self.values.clamp(min=1e-9)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a floor that is reported as information",
        "NoisySecondMoment.known",
        "return self.values.clamp(min=0.0)",
        "return self.values.clamp(min=self.radius)",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: counts below zero",
        "GaussianMixture.posterior",
        'statistics["counts"].clamp(min=0.0)',
        'statistics["counts"]',
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: no floor under the scatter",
        "GaussianMixture.posterior",
        "scatter = torch.maximum(scatter, variance.sqrt())",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: means out of the ball",
        "GaussianMixture.posterior",
        "mean = clipped_rows(sums / divisor, self.radius)",
        "mean = sums / divisor",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a second moment that is not one",
        "LinearRegression.posterior",
        'joint = floored(unstacked(statistics["second_moment"], self.dim + 1), 0.0)',
        'joint = unstacked(statistics["second_moment"], self.dim + 1)',
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "VIPS: a residual below its noise",
        "LinearRegression.posterior",
        "residual = residual.clamp(min=sd * (1 + mean @ mean))",
        "pass",
        "test_vips.py test_vips_models.py",
    ),
    Mutation(
        "LDA: a norm without the topics' other words",
        "WordCounts.norms",
        "return squares.sum(dim=1, keepdim=True).sqrt()",
        "return squares.amax(dim=1, keepdim=True).sqrt()",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: a padded document that is not a number",
        "WordCounts.weighted_sum",
        "weighted = torch.where(weight > 0, self.values * weight, 0.0)",
        "weighted = self.values * weight",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: documents of all lengths",
        "Documents.of_length",
        "count = self.count * (length / self.lengths)[self.document]",
        "count = self.count",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: documents' lengths by the longest",
        "Documents.of_length",
        "count = self.count * (length / self.lengths)[self.document]",
        "count = self.count * (length / self.lengths.max())",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: an E-step that starts from the batch",
        "local_posterior",
        "equal = documents.lengths.unsqueeze(1) / topics.shape[1]",
        "equal = documents.lengths.mean() / topics.shape[1]",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: an E-step without the prior",
        "local_posterior",
        "weights = concentration + factors * documents.per_document(share)",
        "weights = 1e-9 + factors * documents.per_document(share)",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: both halves are the document",
        "halves",
        "return _with_counts(documents, first), _with_counts(documents, counts - first)",
        "return documents, documents",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: noise adds to counts",
        "expected_counts",
        "below = sd / prior_mean - noisy / sd",
        "below = -sd / prior_mean - noisy / sd",
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: negative counts stay",
        "LatentDirichletAllocation.posterior",
        'counts = expected_counts(statistics["topics"], noise["topics"], share)',
        'counts = statistics["topics"]',
        "test_vips_lda.py",
    ),
    Mutation(
        "LDA: fractions of words",
        "LatentDirichletAllocation.check",
        "broken = counts.is_floating_point() and not (counts == counts.round()).all()",
        "broken = False",
        "test_vips_lda.py",
    ),
    Mutation(
        "SBN: hidden units are coupled to themselves",
        "hidden_units",
        "between = coupling - torch.diag(coupling.diagonal())",
        "between = coupling",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: an E-step that starts from the batch",
        "hidden_units",
        "means = torch.zeros_like(field)",
        "means = torch.tanh(field.mean(0, keepdim=True)).expand_as(field) / 4 + 0 * field",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: pixels of 0 and 1",
        "SigmoidBeliefNetwork.static_statistics",
        'return {"images": images.double() - 0.5}',
        'return {"images": images.double()}',
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: a bound of half the size",
        "SigmoidBeliefNetwork.statistics",
        "math.sqrt(pixels * units) / 4",
        "math.sqrt(pixels * units) / 8",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: noise is taken for data",
        "SigmoidBeliefNetwork.posterior",
        "sums, sds.square(), precision",
        "sums, 0 * sds, precision",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: second moments that are none",
        "SigmoidBeliefNetwork._second_moments",
        "return floored(moments, 0.0)",
        "return moments",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: impossible sums",
        "_possible",
        "sums.clamp(-largest[name], largest[name])",
        "sums",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: pixels of any brightness",
        "SigmoidBeliefNetwork.check",
        "if not ((data[0] == 0) | (data[0] == 1)).all():",
        "if False:",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: hidden pixels are seen",
        "SigmoidBeliefNetwork.pixel_accuracy",
        "seen[group] = False",
        "pass",
        "test_vips_sbn.py",
    ),
    Mutation(
        "SBN: variances of the shrinkage prior",
        "ShrinkagePrior.posterior",
        "precisions = Gamma((self.b + 0.5) * one, rates.mean + squares / 2)",
        "precisions = Gamma((self.b + 0.5) * one, rates.mean + squares)",
        "test_vips_sbn.py",
    ),
    Mutation(
        "secure: half the noise",
        "FixedPointSum._noisy",
        "scale = math.ceil(sigma * _UNITS) + 1",
        "scale = math.ceil(sigma * _UNITS / 2) + 1",
        "test_fixed_point.py",
    ),
    Mutation(
        "secure: rounded up",
        "rounded_sums",
        "sums.append(units.to(torch.int64)",
        "sums.append((units + 0.5 * units.sign()).to(torch.int64)",
        "test_fixed_point.py",
    ),
    Mutation(
        "secure: no room for the rounding of norms",
        "rounded_sums",
        "room = 1 - (row.shape[1] + 16) * 2.0**-52",
        "room = 1.0 + 1e-12",
        "test_fixed_point.py",
    ),
    Mutation(
        "secure: sums of floating-point numbers",
        "IterativeMechanism.__init__",
        "self._sum_type = FixedPointSum if secure else ClippedSum",
        "self._sum_type = ClippedSum",
        "test_secure.py",
    ),
    Mutation(
        "secure: a generator that the system seeds",
        "Randomness.stream",
        'if self._secure and purpose != "local":',
        "if False:",
        "test_secure.py",
    ),
    Mutation(
        "secure: a generator that is given",
        "Randomness.__init__",
        "if secure and generator is not None:",
        "if False:",
        "test_dpem.py::TestContract",
    ),
    Mutation(
        "secure: padding counts",
        "rounded_sums",
        "counted = counted & (weights > 0)",
        "pass",
        "test_fixed_point.py",
    ),
    Mutation(
        "secure: a broken record counts in other blocks",
        "rounded_sums",
        "counted = torch.stack(norms).isfinite().all(dim=0)",
        "counted = torch.ones_like(norms[0], dtype=torch.bool)",
        "test_fixed_point.py",
    ),
    Mutation(
        "secure: noise of any size",
        "release",
        "clipped.require_noise(sigmas)",
        "pass",
        "test_fixed_point.py",
    ),
    Mutation(
        "discrete Gaussian: zero has two signs",
        "_accepted",
        "kept &= ~(negative & (k == 0) & (j == 0))",
        "pass",
        "test_discrete_gaussian.py",
    ),
    Mutation(
        "discrete Gaussian: floating point decides",
        "_accepts",
        "for i in np.flatnonzero(np.abs(distance) < _DOUBT):",
        "for i in []:",
        "test_discrete_gaussian.py",
    ),
    Mutation(
        "discrete Gaussian: wrong acceptance",
        "_accepts",
        "np.exp(-0.5 * x * (2 * k + x))",
        "np.exp(-0.5 * x * (k + x))",
        "test_discrete_gaussian.py",
    ),
    Mutation(
        "system stream: a modulus that is no power of two",
        "SystemGenerator.below",
        "found = np.concatenate([found, words[words < limit]])",
        "found = np.concatenate([found, words % dtype(min(limit, 2**63))])",
        "test_system_random.py",
    ),
    Mutation(
        "system stream: only the first bits of a probability",
        "SystemGenerator.binomial",
        "np.count_nonzero(words < first) + np.count_nonzero(ties < rest)",
        "np.count_nonzero(words < first)",
        "test_system_random.py",
    ),
    Mutation(
        "scaler: squares with half of their bound",
        "_MomentRelease.step",
        "Block(dim, math.sqrt(dim) / 2, 0.5)]",
        "Block(dim, math.sqrt(dim) / 4, 0.5)]",
        "test_standard_scaler.py",
    ),
    Mutation(
        "scaler: shares that give the means less noise",
        "_MomentRelease.step",
        "Block(dim, math.sqrt(dim), 0.5), Block(dim, math.sqrt(dim) / 2, 0.5)",
        "Block(dim, math.sqrt(dim), 0.9), Block(dim, math.sqrt(dim) / 2, 0.1)",
        "test_standard_scaler.py",
    ),
    Mutation(
        "scaler: features are not clipped to their bounds",
        "DPStandardScaler.fit",
        ".to(rows.device)).clamp(-1.0, 1.0)",
        ".to(rows.device))",
        "test_standard_scaler.py",
    ),
    Mutation(
        "scaler: variances without a floor",
        "_MomentRelease.step",
        "min=min(1.0, max(noise, _LEAST_VARIANCE))",
        "min=-1.0",
        "test_standard_scaler.py",
    ),
    Mutation(
        "scaler: a clone has an accountant of its own",
        "DPStandardScaler.__sklearn_clone__",
        "return type(self)(**self.get_params())",
        "return type(self)(**self.get_params() | {'accountant': PrivacyAccountant()})",
        "test_standard_scaler.py",
    ),
    Mutation(
        "scaler: means of the data, not of the release",
        "_MomentRelease.step",
        "self.mean = (sums / size)",
        "self.mean = (clipped._exact_sums[0] / size)",
        "test_standard_scaler.py",
    ),
    Mutation(
        "selection: always as many trials as the mean",
        "private_selection",
        "range(trials.draw(_uniform(draws)))",
        "range(round(trials.mean))",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: a trial releases what it likes",
        "TrialAccountant.record",
        "if count > left:",
        "if False:",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: a trial goes on when the winner is known",
        "_tried",
        "        accountant.close()\n",
        "        pass\n",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: the cheapest setting is charged",
        "selection_epsilon",
        "base = np.max([moments for",
        "base = np.min([moments for",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: the text of an error is shown",
        "_tried",
        "reason = type(error).__name__",
        "reason = str(error)",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: trials share the global generator",
        "_unseen",
        "        private_rng(private),\n",
        "",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: parameters of the last trial stay",
        "_unseen",
        "        pyro.get_param_store().scope(),\n",
        "",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: trials share the streams of a seed",
        "TrialAccountant.__init__",
        "self._start = start + (1 << 128)",
        "self._start = 1 << 128",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: the ledger knows nothing of it",
        "private_selection",
        "accountant.record(ApproximateDP(epsilon, delta, name))",
        "pass",
        "test_private_selection.py",
    ),
    Mutation(
        "trials: the cost of one",
        "TruncatedNegativeBinomial.moments",
        "return base + RATES * (1.0 + self.eta) * np.min(auxiliary) + math.log(self.mean)",
        "return base",
        "test_num_trials.py",
    ),
    Mutation(
        "trials: Theorem 2 without 1 + eta",
        "TruncatedNegativeBinomial.moments",
        "RATES * (1.0 + self.eta) * np.min(auxiliary)",
        "RATES * np.min(auxiliary)",
        "test_num_trials.py",
    ),
    Mutation(
        "trials: Theorem 6 without delta",
        "PoissonTrials.moments",
        " + RATES * self.mean * np.array(excess)",
        "",
        "test_num_trials.py",
    ),
    Mutation(
        "trials: another tail",
        "TruncatedNegativeBinomial.ratio",
        "(1.0 - self.gamma) * (k + self.eta) / (k + 1)",
        "(1.0 - self.gamma) * (k + self.eta) / (k + self.eta + 1)",
        "test_num_trials.py",
    ),
    Mutation(
        "moments of a ledger: one direction",
        "moments",
        "return np.max([each for each, _ in sides], axis=0)",
        "return np.min([each for each, _ in sides], axis=0)",
        "test_num_trials.py",
    ),
    Mutation(
        "markup: tags in a text are tags",
        "_html",
        "return html.escape(_one_line(text))",
        "return _one_line(text)",
        "test_markup.py",
    ),
    Mutation(
        "markup: a text may end a cell",
        "_SPECIAL",
        '"\\\\`*_[]|#~$"',
        '"\\\\`*_[]#~$"',
        "test_markup.py",
    ),
    Mutation(
        "markup: a text may have lines",
        "_one_line",
        '" ".join(text.split())',
        "text",
        "test_markup.py",
    ),
    Mutation(
        "report: the power is that of guessing",
        "best_power",
        "power = 1.0 - float(trade_off(accountant, FALSE_POSITIVES))",
        "power = FALSE_POSITIVES",
        "test_report.py",
    ),
    Mutation(
        "report: costs are rounded down",
        "_up",
        "decimal.ROUND_CEILING",
        "decimal.ROUND_FLOOR",
        "test_report.py",
    ),
    Mutation(
        "report: looks are not mentioned",
        "_looks",
        "    if not rows:\n        return []\n",
        "    if True:\n        return []\n",
        "test_report.py",
    ),
    Mutation(
        "report: seeds are not mentioned",
        "_random_numbers",
        "if SEEDED in notes:",
        "if False:",
        "test_report.py",
    ),
    Mutation(
        "trade-off: a release with a delta of its own leaves nothing",
        "trade_off",
        "deltas = (_LEAST_DELTA, accountant.delta, 1e-3, 0.1)",
        "deltas = (_LEAST_DELTA,)",
        "test_report.py",
    ),
    Mutation(
        "plot: epsilon at the end everywhere",
        "_epsilon_of_first",
        "= min(count, number)",
        "= count",
        "test_plotting.py",
    ),
    Mutation(
        "nonprivate: a look that is not in the ledger",
        "NonPrivate._looking",
        "                mark_look(inference.accountant, name, stacklevel=4)\n",
        "                pass\n",
        "test_nonprivate.py",
    ),
    Mutation(
        "look: the warning before the mark",
        "mark_look",
        "    accountant.record_nonprivate(what)\n    warnings.warn(",
        "    warnings.warn('read without noise', NotPrivateWarning, stacklevel=2)\n"
        "    accountant.record_nonprivate(what)\n    warnings.warn(",
        "test_nonprivate.py",
    ),
    Mutation(
        "look: marked without a warning",
        "mark_look",
        "    accountant.record_nonprivate(what)\n",
        "    return accountant.record_nonprivate(what)\n",
        "test_ep.py",
    ),
    Mutation(
        "door: EP that no ledger knows of",
        "EP.run",
        "        mark_look(self.accountant,",
        "        mark_look(PrivacyAccountant(),",
        "test_ep.py",
    ),
    Mutation(
        "door: EP marks the ledger after it has read",
        "EP.run",
        "        mark_look(self.accountant,",
        "        one = torch.zeros(1), torch.zeros(1, 1)\n"
        "        _cavities(Gaussian(torch.zeros(1), torch.eye(1)), "
        "Gaussian(one[1], one[1][None]), torch.tensor([0]))\n"
        "        mark_look(self.accountant,",
        "test_ep.py",
    ),
    Mutation(
        "door: EP without an accountant",
        "EP.__init__",
        "if not isinstance(accountant, PrivacyAccountant):",
        "if False:",
        "test_ep.py",
    ),
    Mutation(
        "door: a step that shows the exact sums",
        "DPSVI.step",
        "        gradient, *others = self._release(clipped)\n",
        "        self.last = clipped._exact_sums\n"
        "        gradient, *others = self._release(clipped)\n",
        "test_one_door.py",
    ),
    Mutation(
        "door: the mean of two noisy sums",
        "release",
        "    return clipped._noisy(sigmas, noise)",
        "    pairs = zip(clipped._noisy(sigmas, noise), clipped._noisy(sigmas, noise))\n"
        "    return [(one + other) / 2 for one, other in pairs]",
        "test_one_door.py",
    ),
    Mutation(
        "door: noisy sums by another name",
        "IterativeMechanism._account_and_release",
        "        self._require_bounded(noise_multiplier, clipped)\n",
        "        self._require_bounded(noise_multiplier, clipped)\n"
        "        self.peek = getattr(clipped, '_no' 'isy')\n",
        "test_one_door.py",
    ),
    Mutation(
        "door: a release of its own",
        "VIPS._release_static",
        "        position = self.accountant.position\n        clipped = self._once",
        "        from pyro_dp.mechanism.release import release as show\n"
        "        position = self.accountant.position\n        clipped = self._once",
        "test_one_door.py",
    ),
    Mutation(
        "door: a noise stream for something else",
        "VIPS._release_expected",
        'LocalStream(self._randomness.stream("local", position))',
        'LocalStream(self._randomness.stream("noise", position))',
        "test_one_door.py",
    ),
    Mutation(
        "door: a record that the release does not make",
        "_MomentRelease.step",
        "        sums, squares = self._release(clipped)\n",
        "        self.entered = self.accountant.record\n"
        "        sums, squares = self._release(clipped)\n",
        "test_one_door.py",
    ),
    Mutation(
        "door: graph and model are not compared",
        "ClippedSum.require_same_as",
        "            other._exact_sums[0],\n",
        "            self._exact_sums[0],\n",
        "test_traced_step.py",
    ),
    Mutation(
        "door: a graph's sums count twice in the checked steps",
        "SiteSum._check",
        "        self._passes.add(found, public, chosen)\n",
        "        self._passes.add(found, public, chosen)\n"
        "        self._passes.add(clipped, public, chosen)\n",
        "test_secure.py::test_graphs_of_sites_give_the_same_sums",
    ),
    Mutation(
        "not private: perplexity without a word",
        "LatentDirichletAllocation.perplexity",
        '        warn_not_private("perplexity", "documents", _OTHERS)\n',
        "",
        "test_looks.py",
    ),
    Mutation(
        "not private: said at each run of an audit",
        "audit",
        "                values.append(read(make_run(*worlds[int(each)])))\n",
        "                values.append(read(make_run(*worlds[int(each)])))\n"
        '                warn_not_private("audit", "data", _MADE_UP)\n',
        "test_looks.py",
    ),
    Mutation(
        "not private: said after the runs of an audit",
        "audit",
        '    warn_not_private("audit", "data", _MADE_UP)\n    worlds = ',
        '    make_run(*data)\n    warn_not_private("audit", "data", _MADE_UP)\n    worlds = ',
        "test_looks.py",
    ),
    Mutation(
        "not private: said of the package's own line",
        "warn_not_private",
        "        stacklevel=3,\n",
        "        stacklevel=2,\n",
        "test_looks.py",
    ),
    Mutation(
        "nonprivate: a look that moves the public generators",
        "NonPrivate._looking",
        "        with forked_rng():\n",
        "        if True:\n",
        "test_nonprivate.py",
    ),
    Mutation(
        "nonprivate: the loss without what is outside the plate",
        "NonPrivate.loss",
        "return records + outside",
        "return records",
        "test_nonprivate.py",
    ),
    Mutation(
        "scaler: a pickle holds the seed",
        "DPStandardScaler.__getstate__",
        'return vars(self) | {"accountant": None, "generator": None}',
        'return vars(self) | {"accountant": None}',
        "test_standard_scaler.py",
    ),
    Mutation(
        "audit: thresholds from the runs that are counted",
        "audit",
        "low, high = chosen_thresholds(held_out, chosen, delta, confidence)",
        "low, high = chosen_thresholds(tested, coins, delta, confidence)",
        "test_audit.py",
    ),
    Mutation(
        "audit: coins that are not fair",
        "audit",
        "coins = _generator(seed).integers(2, size=num_trials - part - learning) == 1",
        "coins = np.arange(num_trials - part - learning) % 3 == 1",
        "test_audit.py",
    ),
    Mutation(
        "audit: delta forgotten, repeated runs",
        "odds_limit",
        "(accuracy - delta / np.maximum(rate, 1e-100))",
        "accuracy",
        "test_bounds.py",
    ),
    Mutation(
        "audit: delta by the estimated rate of guesses",
        "odds_limit",
        "rate = rate_interval(guesses, trials, _RATE_SHARE * error)[0]",
        "rate = 2.0 * guesses / trials",
        "test_bounds.py",
    ),
    Mutation(
        "audit: accuracy without its limit",
        "odds_limit",
        "accuracy = rate_interval(correct, np.maximum(guesses, 1), (1.0 - _RATE_SHARE) * error)[0]",
        "accuracy = np.minimum(0.999, correct / np.maximum(guesses, 1))",
        "test_bounds.py",
    ),
    Mutation(
        "audit: delta forgotten, one run",
        "canaries_error",
        "guesses, q)) + excess",
        "guesses, q)) + 0.0 * excess",
        "test_bounds.py",
    ),
    Mutation(
        "audit: half of the delta term, one run",
        "canaries_error",
        "excess = canaries * delta",
        "excess = 0.5 * canaries * delta",
        "test_bounds.py",
    ),
    Mutation(
        "audit: one correct guess too many",
        "canaries_error",
        "binom.sf(correct - 1, guesses, q)",
        "binom.sf(correct, guesses, q)",
        "test_bounds.py",
    ),
    Mutation(
        "audit: limits of single points",
        "error_rates",
        "each = error / (4 * len(thresholds))",
        "each = 1e4 * error",
        "test_audit.py",
    ),
    Mutation(
        "audit: the canary stays in the data",
        "with_canaries",
        "column.clone() if isinstance(column, torch.Tensor) else column.copy()",
        "column",
        "test_audit.py",
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
    Mutation(
        "a step leaves parameters at infinity",
        "DPSVI._optimise",
        "            _require_finite(leaves, _LEFT, constrained=rarely)\n",
        "            pass\n",
        "test_dpsvi.py::test_a_step_never_leaves_parameters_that_are_not_finite",
    ),
    Mutation(
        "an optimizer that cannot be made is noticed after the release",
        "DPSVI._build",
        "        self._require_optimizer()\n",
        "",
        "test_dpsvi.py::test_an_optimizer_that_cannot_be_made_spends_nothing",
    ),
    Mutation(
        "noise beyond the numbers is released",
        "IterativeMechanism._account_and_release",
        "        self._require_bounded(noise_multiplier, clipped)\n",
        "",
        "test_dpsvi.py::test_noise_beyond_the_numbers_spends_nothing",
    ),
    Mutation(
        "the texts of user exceptions stay in __context__",
        "guarded",
        "error.args, error.__cause__, error.__context__ = (), None, None",
        "pass",
        "test_fuzz.py::test_guarded_leaves_no_text_behind",
    ),
    Mutation(
        "a posterior with a negative variance is reported",
        "DPSEP.step",
        " and variances.min() > 0",
        "",
        "test_dpsep.py::test_a_posterior_beyond_the_numbers_stays_where_it_was",
    ),
    Mutation(
        "selection: a progress bar counts the trials",
        "TrialAccountant.silent",
        "    silent = True",
        "    silent = False",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: trials go on from each other",
        "TrialAccountant.note_earlier_values",
        "        self.continued = True\n        raise PrivacyError(text)",
        "        self.note(text)",
        "test_private_selection.py",
    ),
    Mutation(
        "selection: trials share their setting",
        "private_selection",
        "copy.deepcopy(settings[index])",
        "candidates[index]",
        "test_private_selection.py",
    ),
    Mutation(
        "a forked process has a ledger of its own",
        "PrivacyAccountant.record",
        "if os.getpid() != self._process:",
        "if False:",
        "test_accounting.py",
    ),
    Mutation(
        "a ledger can be copied",
        "PrivacyAccountant.__reduce__",
        "    def __reduce__(self):",
        "    def _reduce(self):",
        "test_accounting.py",
    ),
]


def plant(mutation: Mutation, package: Path) -> None:
    """Change the one place that is meant."""
    found = []
    for path in package.rglob("*.py"):
        source = path.read_text()
        for start, end in places(source, mutation.where):
            count = source.count(mutation.old, start, end)
            found += [(path, source, source.find(mutation.old, start, end))] * count
    if len(found) != 1:
        raise SystemExit(f"{mutation.name}: {len(found)} places in {mutation.where}")
    ((path, source, start),) = found
    path.write_text(source[:start] + mutation.new + source[start + len(mutation.old) :])


def places(source: str, name: str) -> list[tuple[int, int]]:
    """From where to where something of this name is defined, in characters."""
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    return [
        (line_starts[first - 1], line_starts[last])
        for found, first, last in definitions(ast.parse(source).body)
        if found == name
    ]


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Qualified names, first and last lines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield prefix + node.name, first, node.end_lineno
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield prefix + ast.unparse(target), node.lineno, node.end_lineno


def survives(mutation: Mutation) -> bool:
    """Whether the tests pass with the mutation."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("pyro_dp", "tests", "benchmarks", "docs"):  # tests read the others, too
            shutil.copytree(ROOT / name, Path(scratch) / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, scratch)
        plant(mutation, Path(scratch) / "pyro_dp")
        tests = []
        for name in mutation.tests.split():
            file, *case = name.split("::")
            (path,) = (Path(scratch) / "tests").rglob(file)
            tests.append("::".join([str(path), *case]))
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
