"""Mutations that the tests of mechanism must notice: see tests/mutate.py."""

# By tests, definition and name: the old text and the new one.
MUTATIONS = {
    "test_clipping.py": {
        "ClippedSum._noisy": {
            "no noise": ("released.append(draw.add_(total))", "released.append(total.clone())"),
            "half the noise": (
                "normals(noise, block.size, sigma * block.bound,",
                "normals(noise, block.size, 0.5 * sigma * block.bound,",
            ),
        },
        "clipped_sums": {
            "no clipping": (
                "scale = torch.where(norm > target, target / norm, 1.0)",
                "scale = torch.ones_like(norm)",
            ),
            "clipping after the sum": (
                "sums.append(each.weighted_sum(torch.where(counted, scale, 0.0)))",
                (
                    "total = each.weighted_sum(torch.where(counted, 1.0, 0.0 * scale)); "
                    "sums.append(total * min(1.0, float(bound / total.norm())))"
                ),
            ),
            "a broken record counts in the other blocks": (
                "counted = sum(measured[1:], measured[0]) < math.inf",
                "counted = norms[-1 if norms[-1] is not None else 0] < math.inf",
            ),
        },
        "Rows.weighted_sum": {
            "a mean instead of a sum": ("0.0).sum(dim=0)", "0.0).mean(dim=0)"),
        },
        "Rows.__init__": {
            "norm, scale and sum in the dtype of the gradients": (
                "values.to(torch.float64)",
                "values",
            ),
        },
        "release": {
            "released before it is recorded": (
                "    accountant.record(event)\n",
                "    noise.standard_normal(1)\n    accountant.record(event)\n",
            ),
            "one event per block": (
                "accountant.record(event)",
                "accountant.record(event, len(clipped.blocks))",
            ),
            "every block with the noise of the whole event": (
                "event.noise_multiplier / math.sqrt(block.share)",
                "event.noise_multiplier",
            ),
        },
        "rounded_sums": {
            "secure: a broken record counts in other blocks": (
                "counted = torch.stack(norms).isfinite().all(dim=0)",
                "counted = torch.ones_like(norms[0], dtype=torch.bool)",
            ),
        },
    },
    "test_clipped_fraction.py": {
        "clipped_sums": {
            "the bit of a broken record counts": (
                "sums.append(each.weighted_sum(counted))",
                "sums.append(each.weighted_sum(torch.ones_like(counted)))",
            ),
        },
        "ClippedFractions._look": {
            "a clipped fraction that is the fraction within": (
                "(0.5 - total / size, variance)",
                "(0.5 + total / size, variance)",
            ),
        },
        "ClippedFractions.add": {
            "a standard error without the sampling": (
                "variance = noise**2 + (1 - rate) / (4 * rate * size)",
                "variance = noise**2",
            ),
        },
    },
    "test_paper_dpsvi.py": {
        "with_bit": {
            "bits of whole units, not halves": (
                "torch.where(norms <= bound, 0.5, -0.5)",
                "torch.where(norms <= bound, 1.0, -1.0)",
            ),
        },
        "Releases.begin": {
            "event recorded with the wrong rate": (
                "event = gaussian(noise_multiplier, rate, sampler.sampling)",
                "event = gaussian(noise_multiplier, rate / 2, 'poisson')",
            ),
        },
        "RunResult.add": {
            "a result that holds the data": (
                "self.returned.append(step.value)",
                "self.last = step; self.returned.append(step.value)",
            ),
        },
    },
    "test_sampling.py test_paper_dpsvi.py": {
        "RecordSampler.draw": {
            "randperm sampling under the name of Poisson": (
                "stream.binomial(size, self.rate)",
                "round(size * self.rate)",
            ),
        },
        "RecordSampler.sample_rate": {
            "fixed batches: the requested rate, not B / N": (
                'return self.batch_size / self.size if self.sampling == "fixed" else self.rate',
                "return self.rate",
            ),
        },
    },
    "test_sampling.py": {
        "RecordSampler.draw": {
            "the records of each block are those of the first": (
                "            start + _subset(",
                "            _subset(",
            ),
        },
    },
    "test_drawn_ahead.py test_held_rows.py": {
        "DrawnAhead.sample": {
            "one sample for several steps": (
                "cast(Tensor, draw(each))",
                "cast(Tensor, draw(position))",
            ),
        },
    },
    "test_drawn_ahead.py": {
        "DrawnAhead.sample": {
            "a sample that was used is used again": (
                "self._samples.pop(position)",
                "self._samples[position]",
            ),
        },
    },
    "test_held_rows.py": {
        "Releases.sample": {
            "secure mode draws ahead": ("if self.randomness.secure:", "if False:"),
        },
        "IterativeMechanism.run": {
            "rows that are held for good": ("            self._releases.forget()\n", ""),
        },
    },
    "test_streams.py test_paper_dpsvi.py": {
        "Randomness.stream": {
            "the same noise stream in two runs": (
                "seed = _SystemEntropy()",
                "seed = np.random.SeedSequence(0)",
            ),
            "the same noise in every step": (
                "place = (_PURPOSES.index(purpose), position, *self._rank)",
                "place = (_PURPOSES.index(purpose), 0, *self._rank)",
            ),
        },
    },
    "test_streams.py": {
        "Randomness.stream": {
            "sampling and noise from one stream": (
                "place = (_PURPOSES.index(purpose), position, *self._rank)",
                "place = (0, position, *self._rank)",
            ),
        },
    },
    "test_traced_step.py": {
        "clipped_sums": {
            "padding that adds its bit": (
                "sums.append(each.weighted_sum(counted))",
                "sums.append(each.weighted_sum(norms[0] < math.inf))",
            ),
        },
        "ClippedSum.require_same_as": {
            "door: graph and model are not compared": (
                "            other._exact_sums[0],\n",
                "            self._exact_sums[0],\n",
            ),
        },
    },
    "test_outer_products.py": {
        "OuterProducts.squared_norms": {
            "the norm of one factor of an outer product": (
                "return (ours + tiny) * (theirs + tiny)",
                "return ours + tiny",
            ),
            "the norm of a product lost to rounding": (
                "(squares + terms",
                "(squares + 0.0 * terms",
            ),
        },
        "LookedUpRows.squared_norms": {
            "the norm of a row that is read twice": (
                "squares = torch.where(same, gram, 0.0).sum(dim=(1, 2)).clamp(min=0.0)",
                "squares = gram.diagonal(dim1=1, dim2=2).sum(dim=1)",
            ),
            "the norm of rows that are read is lost to rounding": (
                "(squares + terms",
                "(squares + 0.0 * terms",
            ),
        },
        "LookedUpRows.weighted_sum": {
            "a broken record reads rows": (
                "torch.where(weights > 0, self.gradients * weights, 0.0)",
                "(self.gradients * weights)",
            ),
        },
        "_of_weight": {
            "a broken record in a sum of products": (
                "return torch.where(weights.unsqueeze(2) > 0, values, 0.0)",
                "return values",
            ),
        },
    },
    "test_fixed_point.py": {
        "OuterProducts.whole_sum": {
            "secure: a broken record in a sum of products": (
                "right = torch.where(kept, right, 0.0)",
                "right = right + 0.0",
            ),
        },
        "OuterProducts.squared_norms": {
            "secure: factors of which squares are lost": (
                "return (ours + tiny) * (theirs + tiny)",
                "return ours * theirs",
            ),
        },
        "FixedPointSum._noisy": {
            "secure: half the noise": (
                "scale = math.ceil(sigma / math.sqrt(self._shares) * _UNITS) + 1",
                "scale = math.ceil(sigma / math.sqrt(self._shares) * _UNITS / 2) + 1",
            ),
        },
        "whole_total": {
            "secure: rounded up": ("part.to(torch.int32)", "part.round().to(torch.int32)"),
        },
        "rounded_sums": {
            "secure: no room for the rounding of norms": (
                "room = 1 - (block.size + 16) * 2.0**-52",
                "room = 1.0 + 1e-12",
            ),
            "secure: padding counts": ("counted = counted & (weights > 0)", "pass"),
        },
        "release": {
            "secure: noise of any size": ("clipped.require_noise(sigmas)", "pass"),
        },
    },
    "test_dpem.py": {
        "Reservation.load": {
            "a budget that pays no more for what a journal counts": (
                "again = self.calibrates and self.lost",
                "again = False",
            ),
            "a run that goes on and reserves its steps again": (
                '        self._take_over(state.get("reservation", self.name))\n',
                "",
            ),
        },
        "IterativeMechanism._release": {
            "a release that fails, of which a calibrated run knows nothing": (
                "                    self._lose_release()\n",
                "                    pass\n",
            ),
        },
        "Releases.begin": {
            "Ctrl-C that does not wait for what follows from a release": (
                "        self.interrupts.hold()\n",
                "",
            ),
        },
        "Reservation.__init__": {
            "a calibrated run that does not reserve its steps": (
                "self.whole = self.calibrates",
                "self.whole = False",
            ),
        },
        "Reservation.plan": {
            "a run with noise of its own that does not reserve its steps": (
                "self.whole = self.whole or not self.calibrates",
                "pass",
            ),
        },
        "wants_to_stop": {
            "a callback's answer that is taken for a yes": (
                "if not isinstance(answer, bool | np.bool_ | None):",
                "if False:",
            ),
        },
        "IterativeMechanism.run": {
            "callbacks of which the first that stops hides the step from the others": (
                "stops = [wants_to_stop(callback, step) for callback in callbacks]",
                "stops = (wants_to_stop(callback, step) for callback in callbacks)",
            ),
        },
    },
    "test_vips.py test_vips_models.py": {
        "IterativeMechanism._release": {
            "VIPS: estimates divided by another rate": (
                "return [block.div_(rate) for block in released]",
                "return [block.div_(max(rate, 0.5)) for block in released]",
            ),
        },
    },
    "test_secure.py": {
        "Releases.__init__": {
            "secure: sums of floating-point numbers": (
                "self.sum_type = FixedPointSum if noise.is_secure else ClippedSum",
                "self.sum_type = ClippedSum",
            ),
        },
        "Randomness.stream": {
            "secure: a generator that the system seeds": (
                'if self.secure and purpose != "local":',
                "if False:",
            ),
        },
    },
    "test_system_random.py": {
        "_accepted": {
            "discrete Gaussian: zero has two signs": (
                "kept &= ~(negative & (k == 0) & (j == 0))",
                "pass",
            ),
        },
        "_accepts": {
            "discrete Gaussian: floating point decides": (
                "for i in np.flatnonzero(np.abs(distance) < _DOUBT):",
                "for i in []:",
            ),
            "discrete Gaussian: wrong acceptance": (
                "np.exp(-0.5 * x * (2 * k + x))",
                "np.exp(-0.5 * x * (k + x))",
            ),
        },
        "SystemGenerator.below": {
            "system stream: a modulus that is no power of two": (
                "found = np.concatenate([found, words[words < limit]])",
                "found = np.concatenate([found, words % dtype(min(limit, 2**63))])",
            ),
        },
        "SystemGenerator.binomial": {
            "system stream: only the first bits of a probability": (
                "np.count_nonzero(words < first) + np.count_nonzero(ties < rest)",
                "np.count_nonzero(words < first)",
            ),
        },
    },
    "test_nonprivate.py": {
        "NonPrivate._read": {
            "nonprivate: a look that is not in the ledger": (
                "                mark_look(inference.accountant, looked_at, stacklevel=3)\n",
                "                pass\n",
            ),
            "nonprivate: a look that moves the public generators": (
                "        with forked_rng():\n",
                "        if True:\n",
            ),
        },
        "mark_look": {
            "look: the warning before the mark": (
                "    accountant.record_nonprivate(what)\n    warnings.warn(",
                (
                    "    warnings.warn('read without noise', NotPrivateWarning, stacklevel=2)\n"
                    "    accountant.record_nonprivate(what)\n"
                    "    warnings.warn("
                ),
            ),
            "look: marked without a warning": (
                "    accountant.record_nonprivate(what)\n",
                "    return accountant.record_nonprivate(what)\n",
            ),
        },
    },
    "test_one_door.py": {
        "release": {
            "door: the mean of two noisy sums": (
                "    return clipped._noisy(sigmas, noise)",
                (
                    "    pairs = zip(clipped._noisy(sigmas, noise), clipped._noisy(sigmas, "
                    "noise))\n"
                    "    return [(one + other) / 2 for one, other in pairs]"
                ),
            ),
        },
        "IterativeMechanism._release": {
            "door: noisy sums by another name": (
                "        rate, sigma = sampler.sample_rate, noise_multiplier\n",
                (
                    "        rate, sigma = sampler.sample_rate, noise_multiplier\n"
                    "        self.peek = getattr(clipped, '_no' 'isy')\n"
                ),
            ),
        },
    },
    "test_paper_dpsvi.py::test_noise_beyond_the_numbers_spends_nothing": {
        "Releases.begin": {
            "noise beyond the numbers is released": (
                "if noise_multiplier and noise_multiplier * bound / rate > LARGEST:",
                "if False:",
            ),
        },
    },
    "test_automatic_dpsep.py": {
        "Kept._of_rows": {
            "a broken record's factor in the sum": (
                "torch.where(weights > 0, self._scaled(weights), 0.0)",
                "self._scaled(weights)",
            ),
        },
    },
    "test_norm_histogram.py": {
        "Bins.weighted_sum": {
            "a record twice in the histogram": (
                "torch.where(weights > 0, weights, 0.0)",
                "torch.where(weights > 0, 2 * weights, 0.0)",
            ),
        },
        "within_noise": {
            "a group of large norms that is taken for noise": (
                "end = max(end, _group(counts, sd, end))",
                "pass",
            ),
        },
    },
    "test_clipped_fraction.py test_stochastic_gradient_vi.py": {
        "Block.noise": {
            "noise of a block that forgets its share": (
                "multiplier * self.bound / math.sqrt(self.share)",
                "multiplier * self.bound",
            ),
        },
    },
    "test_dpem.py test_run.py": {
        "IterativeMechanism.run": {
            "a loss that Ctrl-C leaves out of the run's result": (
                "with interrupts.within():\n                            start =",
                "if True:\n                            start =",
            ),
        },
    },
    "test_cluster.py": {
        "Randomness.__init__": {
            "a cluster whose ranks sample with one seed": ("(rank,) if rank else ()", "()"),
        },
        "Ranks.released": {
            "a cluster that releases exact sums": (
                "shared[1:] = torch.cat(blocks)",
                "shared[1:] = torch.cat(clipped._exact_sums)",
            ),
            "a cluster that shares a release before its ledger": (
                "                blocks = make()\n",
                "                self._cluster.broadcast(shared); blocks = make()\n",
            ),
            "a mirror that does not count": (
                "            self._accountant.mirror(event)\n",
                "            pass\n",
            ),
            "a refusal that is taken for a release": ("2 if spent else 1, error", "0, error"),
        },
        "Ranks.add_up": {
            "a cluster in which each rank adds noise": (
                "        clipped.over_ranks(self._cluster.reduce)\n",
                (
                    "        clipped._added = tuple(clipped._noisy([1.0] * len(clipped.blocks), "
                    "np.random.default_rng()))\n"
                    "        clipped.over_ranks(self._cluster.reduce)\n"
                ),
            ),
        },
        "Cluster.reduce": {
            "sums of all that every rank sees": ("total if self.rank == 0 else None", "total"),
        },
        "Peers.together": {
            "a rank that fails and says nothing": ("self._agree(Says.FAILED, error=error)", "pass"),
        },
        "Peers._agree_on": {
            "parameters of ranks that nobody compares": ("_digest(public)", "0"),
            "a rank that looks anew while the others add up": ("raise _LooksAnew", "pass"),
        },
        "Peers.common": {
            "public draws of each rank's own": ("        set_torch_states(first.states)\n", ""),
        },
        "Peers._public_draws": {
            "global draws that are the cluster's": (
                "            set_torch_states(own)\n",
                "            pass\n",
            ),
        },
        "RecordSampler._count": {
            "a rank that samples from all N indices": (
                "self.size if self.here is None else self.here",
                "self.size",
            ),
        },
        "require_fit": {
            "a cluster with batches of a fixed size": ("peers is not None and is_fixed", "False"),
        },
        "NonPrivate.__init__": {
            "a look without noise in a cluster": (
                "not self._inference._releases.peers.alone",
                "False",
            ),
        },
        "Cluster.__init__": {
            "a cluster that waits without an end": (
                "limit = timedelta(seconds=self.timeout)",
                "limit = timedelta(days=1)",
            ),
        },
        "Reservation.state": {
            "a state with the ledger of a mirror": ("not self._peers.counts", "False"),
        },
    },
    "test_federation.py": {
        "FixedPointSum._noisy": {
            "holders that all add the whole noise, or less than their share": (
                "math.sqrt(self._shares)",
                "self._shares",
            ),
        },
        "Federation.__init__": {
            "colluding holders whose noise counts": (
                "holders - dropouts - colluders",
                "holders - dropouts",
            ),
            "one's own share of the noise counts": (
                'require_count("colluders", colluders)',
                'require_count("colluders", colluders, least=0)',
            ),
        },
        "Releases.in_sums": {
            "a posterior that does not know how much noise holders add": (
                "noise_multiplier * self.peers.noise_factor",
                "noise_multiplier",
            ),
        },
        "TrustedAggregator.answer": {
            "an aggregator that opens what too few have sent": (
                "len(stay) < self.holders - self.dropouts",
                "len(stay) < 1",
            ),
            "a holder that comes back after it was left out": (
                "        self._left &= there.keys()\n",
                "",
            ),
        },
        "Federation._left": {
            "a holder that does not see that too few are present": (
                "len(set(present)) < self.size - self.dropouts or",
                "not present or",
            ),
        },
        "_read": {
            "holders that run what others send": (
                "torch.load(io.BytesIO(content), weights_only=True)",
                "__import__('pickle').loads(content)",
            ),
        },
        "Holders.add_up": {
            "a holder that tells how long it computed": ("public, 0.0)", "public, 1.0)"),
            "a holder whose budget is asked too late": (
                "        self._accountant.require_room(event)\n",
                "",
            ),
        },
        "Holders._say_failed": {
            "a holder that tells others its errors": (
                "        if error is None:\n",
                (
                    "        told = self._federation.exchange(str(error))\n"
                    "        if error is None:\n"
                    "            raise ClusterError(str(told))\n"
                ),
            ),
        },
        "Holders.agreed_noise": {
            "holders that each have noise of their own budget": (
                (
                    "return max(each.sigma for each in "
                    "self.exchange(CalibratedNoise(noise_multiplier)))"
                ),
                "return noise_multiplier",
            ),
        },
        "release": {
            "a holder that uploads before its ledger counts": (
                "    accountant.record(event)\n    return clipped._noisy(sigmas, noise)\n",
                (
                    "    found = clipped._noisy(sigmas, noise)\n"
                    "    accountant.record(event)\n"
                    "    return found\n"
                ),
            ),
        },
        "_peers": {
            "a federation within a private selection": ("accountant.silent", "False"),
        },
        "Federation.agreed_states": {
            "public draws of one holder's own generator": (
                "        said = Seed(",
                "        return self.exchange(torch_states())[0]\n        said = Seed(",
            ),
        },
        "Federation._in_step": {
            "a holder that speaks after an interrupt": (
                "        except BaseException:\n            self._over = True\n",
                "        except BaseException:\n",
            ),
        },
        "_party": {
            "shares of which two tell an upload": (
                "party.threshold = len(addresses) - 1",
                "party.threshold = 1",
            ),
        },
        "_in_64_bits": {
            "sums that wrap at a prime": (
                "element if element <= _PRIME // 2 else element - _PRIME",
                "element",
            ),
        },
    },
    "test_messages.py": {
        "Message._like": {
            "a message that is not checked": (
                "return type(self)(*packed)",
                "return type(self).__new__(type(self))",
            ),
        },
        "CalibratedNoise.__post_init__": {
            "a noise multiplier that is no number": (
                'require_number("sigma", self.sigma, above=0.0, below=math.inf, or_equal=True)',
                "pass",
            ),
        },
    },
    "test_settings.py": {
        "require_fit": {
            "settings: an infinite bound with noise": ("bound == math.inf and sigma != 0", "False"),
        },
        "Setting._check": {
            "settings: None for a field that needs a value": (
                "type(self).__dataclass_fields__[name].default is not None",
                "False",
            ),
        },
        "Setting.only": {
            "settings: a field that nobody reads": (
                "getattr(self, each.name) != each.default",
                "False",
            ),
        },
    },
    "test_device_noise.py": {
        "counted_normals": {
            "counters without a private key": (
                "for word in stream.integers(_WORD, size=2, dtype=np.uint64))",
                "for word in (1, 2))",
            ),
            "counters that begin again in each block": (
                "counters = torch.arange(start, start + part.shape[1], device=device)",
                "counters = torch.arange(part.shape[1], device=device)",
            ),
        },
        "threefry": {
            "a cipher of fewer rounds": (
                "for i in range(_ROUNDS):",
                "for i in range(_ROUNDS - 4):",
            ),
            "a shift that brings copies of the sign": ("second &= 2**bits - 1", "pass"),
        },
        "_box_muller": {
            "one word for radius and angle": ("angle = second.double()", "angle = first.double()"),
        },
    },
    "test_flower.py": {
        "_require_private_folder": {
            "a line that others may enter": ("folder.stat().st_mode & stat.S_IRWXO", "False"),
        },
        "FlowerLine._ask": {
            "a line that takes another run's first word for an answer": (
                "if kind == BEGIN:",
                "if False:",
            ),
        },
        "FlowerLine._next_relay": {
            "a line that takes any word for an answer": (
                "found[:1] not in (BEGIN, ANSWER, LAST, FAILED)",
                "False",
            ),
        },
        "_by_index": {
            "two holders with one index": ("len(node_of) < len(index_of)", "False"),
        },
        "lead": {
            "holders that wait for an aggregator that failed": (
                "dict.fromkeys(found, f",
                "dict.fromkeys((), f",
            ),
        },
    },
    "test_clipped_fraction.py test_dpsep.py test_paper_dpsvi.py": {
        "ClippedFractions.__init__": {
            "a bit with half its noise": ("Block(1, 0.5, share)", "Block(1, 0.25, share)"),
        },
    },
}
