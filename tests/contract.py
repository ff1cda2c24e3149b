"""The promises of every private inference; those of its ``run`` are in run_contract.py.

The tests of an inference inherit these. A ``class TestContract(InferenceContract)`` makes the
inference and its data, and names its public result. An inference that promises more has tests of
its own. ``ReleaseContract`` is for an inference that releases once, and has no states.
"""

import copy
import functools
import io
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from dpem import DPEM
from ledgers import in_threads
from record_draws import by_index
from releases import Releases, planned, take
from run_contract import STEPS, RunContract, same
from scipy import stats

from pyro_dp import (
    VIPS,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    FullBatch,
    ModelError,
    Noise,
    PoissonSampling,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.mechanism import iterative
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import Sampling
from pyro_dp.vips import LogisticRegression

ALARM = 1e-8  # the false-alarm rate of each test of noise
RECORD = 4  # the one in which neighbouring data differ
WITH, WITHOUT = [1, RECORD, 8, 20], [1, 8, 20]
SECRET = 777.125  # a value of the data that no error may tell


class ReleaseContract:
    """Sensitivity, noise, budget before release, seeds, secure mode, errors.

    A subclass has :meth:`make`, :meth:`data` and :meth:`result`, and may set what follows.

    :cvar variants: names of the models on which one record's influence is tested; all else is
        tested on the first.
    :cvar slow: those of them that a quick run leaves out.
    :cvar kinds: those of them on which it is also tested in later steps and with broken records.
    :cvar outliers: values of record 4, whose like no data have.
    :cvar sampled: settings with which each step is one release, of a part of the records if it can.
    :cvar noisy_steps: steps whose noise is tested: each block has 250 numbers in all, or more.
    :cvar noisy_options: settings that make those quick; their noise is drawn as in any step.
    :cvar opening: first steps that release something else.
    :cvar bad_settings: (settings, a word of the error), beside those that all have.
    """

    variants = kinds = ("model",)
    slow = ()
    outliers = (0.0, 1e6, -1e6, 1e200)
    sampled = {"sampling": 0.5}
    noisy_steps = 250
    noisy_options = {}
    opening = 0
    bad_settings = ()
    _bad_settings = (
        ({"accountant": None}, "accountant"),
        *(({"noise": value}, "Noise.multiplier") for value in (-1.0, math.nan, math.inf)),
        ({"noise": "1"}, "noise must be"),
        ({"noise": None}, "Noise.multiplier"),  # nothing to calibrate it from
    )

    def make(self, variant="model", **options):
        """A new inference, in a cleared parameter store.

        :param options: its constructor's; ``accountant`` and ``noise`` always.
        """
        raise NotImplementedError

    def data(self, variant="model"):
        """All data: tensors of at least 21 records in float64, with memory of their own."""
        raise NotImplementedError

    def result(self, inference):
        """The public tensors after a step, by name."""
        raise NotImplementedError

    def step(self, inference, data):
        inference.step(*data)

    def step_on(self, patch, inference, data, batch):
        """A step in which these records take part."""
        take(patch, batch)
        self.step(inference, data)

    def neighbours(self, variant, data):
        """The data with another record 4: one like the others, and outliers."""
        ordinary = tuple(x.clone() for x in data)
        for x in ordinary:
            x[RECORD] = x[RECORD + 1]
        yield ordinary
        for value in self.outliers:
            changed = tuple(x.clone() for x in data)
            changed[0][RECORD] = torch.as_tensor(value)
            yield changed

    # Subclasses do not override these.

    def pytest_generate_tests(self, metafunc):
        for name, values in (("variant", self.variants), ("kind", self.kinds)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(
                    name,
                    [
                        pytest.param(each, marks=pytest.mark.slow if each in self.slow else ())
                        for each in values
                    ],
                )

    def new(self, variant=None, seed=0, **options):
        """A new one with an accountant and a seed of its own, and noise, from one public start."""
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        options = {"accountant": PrivacyAccountant(), "noise": Noise(1.0, source=0)} | options
        return self.make(self.variants[0] if variant is None else variant, **options)

    def stepped(self, steps=1, variant=None, **options):
        """One that has taken some steps, and its data."""
        inference = self.new(variant, **options)
        data = self.data(self.variants[0] if variant is None else variant)
        for _ in range(steps):
            self.step(inference, data)
        return inference, data

    def steps(self, variant, data, *batches, late=False, **options):
        """Blocks of the first step, and its exact sums for each of these batches of records.

        :param late: the same of a step after one with noise, in which others took part, follows.
        """
        with pytest.MonkeyPatch.context() as patch:
            by_index(patch)
            inference = self.new(variant, **self.sampled | options)

            def tried(batch):
                pyro.set_rng_seed(1)
                return planned(lambda own: self.step_on(own, inference, data, batch))

            found = [list(map(tried, batches))]
            if late:
                self.step_on(patch, inference, data, [2, 3, 9])
                found.append(list(map(tried, batches)))
        return [(each[0][0], *(sums for _, sums in each)) for each in found]

    def sums(self, *args, **options):
        """Those of the last of these steps."""
        return self.steps(*args, **options)[-1]

    def event(self, noise_multiplier):
        sampling = Sampling.read(self.sampled["sampling"])
        return SubsampledGaussian(noise_multiplier, sampling.rate, sampling.kind)

    def settings_out_of_range(self):
        return [*self._bad_settings, *self.bad_settings]

    # One record.

    def test_sensitivity(self, variant):
        """Any record moves each block by its bound at most, and by twice it if it replaces another.
        All blocks together move by at most what the ledger's event allows. Records that take no
        part leave every sum as it is, to the last bit."""
        for blocks, with_it, without in self.require_sensitivity(variant):
            assert sum(block.share for block in blocks) == pytest.approx(1.0)
            assert all((one - none).norm() > 0 for one, none in zip(with_it, without, strict=True))

    def test_sensitivity_of_integers(self):
        """The same, with the system's noise, which no seed repeats in a later step."""
        self.require_sensitivity(self.variants[0], noise=Noise(1.0, source="system"), late=False)

    def require_sensitivity(self, variant, **options):
        """It returns blocks of steps, and their sums with record 4 and without it."""
        data, options = self.data(variant), {"late": variant in self.kinds} | options
        ours = self.steps(variant, data, WITH, WITHOUT, **options)
        for blocks, with_it, without in ours:
            require_close_by(blocks, with_it, without, 1)
        for neighbour in self.neighbours(variant, data):
            theirs = self.steps(variant, neighbour, WITH, WITHOUT, **options)
            for (blocks, with_it, without), (_, other, same_ones) in zip(ours, theirs, strict=True):
                assert all(map(torch.equal, same_ones, without))
                require_close_by(blocks, other, without, 1)
                require_close_by(blocks, other, with_it, 2)
        return ours

    def test_a_broken_record_adds_nothing(self, kind):
        """A row that is not finite adds nothing to any block, even if the checks miss it."""
        data = self.data(kind)
        with pytest.MonkeyPatch.context() as patch:
            by_index(patch)
            inference = self.new(kind, **self.sampled)
            self.step_on(patch, inference, data, [2, 3, 9])

            def tried(batch):
                pyro.set_rng_seed(1)
                return planned(lambda own: self.step_on(own, inference, data, batch))[1]

            without = tried([1, 8])
            for value in (math.nan, math.inf, -math.inf):
                data[0].numpy()[RECORD] = value  # torch does not notice
                found = tried([1, RECORD, 8])
                torch.testing.assert_close(found, without, rtol=1e-9, atol=1e-12)

    # Noise.

    @classmethod
    @functools.cache
    def noisy(cls):
        """Releases of many steps with sigma=1.5, and the ledger: made once, to be read only."""
        self = cls()
        with pytest.MonkeyPatch.context() as patch:
            seen = Releases(patch)
            options = dict(noise=Noise(1.5, source=0), num_steps=self.noisy_steps)
            options |= self.sampled | self.noisy_options
            inference, _ = self.stepped(self.noisy_steps, **options)
        regular = seen.noise[self.opening :]
        noise = [torch.stack(each).numpy() for each in zip(*regular, strict=True)]
        return SimpleNamespace(seen=seen, noise=noise, ledger=inference.accountant.ledger)

    @pytest.mark.slow
    @pytest.mark.every_commit
    def test_noise_is_added_at_the_right_scale(self):
        """Normal, and of the scale that the ledger's event says, each block by itself: two thirds
        and three halves of it are rejected. False alarms: 1e-8 for each block, and for all."""
        self.require_ledger(self.noisy().ledger)
        for each in self.noisy().noise:
            assert each.size >= 250
            assert p_of_scale(each) > ALARM
            assert p_of_scale(each * 2 / 3) < ALARM
            assert p_of_scale(each * 3 / 2) < ALARM
        together = np.concatenate([each.ravel() for each in self.noisy().noise])
        assert stats.kstest(together, "norm").pvalue > ALARM

    def require_ledger(self, ledger):
        """That of :meth:`noisy`."""
        assert ledger == ((self.event(1.5), self.noisy_steps),)

    def test_noise_is_independent(self):
        """Coordinates and steps have independent noise. False alarms: 1e-10 a pair."""
        steps = np.concatenate(self.noisy().noise, axis=1)[:, :40]
        both = np.concatenate([steps[1:], steps[:-1]], axis=1)
        correlations = np.corrcoef(both.T) - np.eye(both.shape[1])
        assert np.abs(correlations).max() < 6.5 / math.sqrt(len(both))

    def test_the_event_is_counted_before_the_noise_is_drawn(self):
        """When the i-th release asks for noise, the ledger counts i releases."""
        counted = self.noisy().seen.counted
        assert list(dict.fromkeys(counted)) == list(range(1, self.noisy_steps + 1))
        assert counted == sorted(counted)

    # Seeds.

    @pytest.mark.slow
    @pytest.mark.every_commit
    def test_equal_seeds_repeat_and_nothing_else_does(self, monkeypatch):
        """Noise differs in steps, in runs without a seed, and in runs that share a generator or an
        accountant. A seed is noted: anyone who can guess it can compute the noise."""
        generator, shared = torch.Generator().manual_seed(0), PrivacyAccountant()
        sources = 3, 3, None, None, generator, generator, 5, 5
        seen, results, notes = Releases(monkeypatch), [], []
        for source in sources:
            own = {"accountant": shared} if source == 5 else {}
            noise = Noise(1.0, source=source)
            inference, _ = self.stepped(2, noise=noise, **self.sampled, **own)
            results.append(self.result(inference))
            notes.append(inference.accountant.notes)
        one, again, none, nothing, *_, other = results
        for name, value in one.items():
            assert torch.equal(value, again[name])
        for first, second in ((one, other), (none, nothing), (one, none)):
            assert any(not torch.equal(first[name], second[name]) for name in first)
        drawn = [tuple(noise[0].round(decimals=9).tolist()) for noise in seen.noise]
        assert drawn[:2] == drawn[2:4] and len(set(drawn)) == len(drawn) - 2 == 14
        assert sum("seed" in note for note in notes[0]) == 1 and notes[2] == ()

    # The budget.

    def test_the_budget_is_checked_before_the_release(self, monkeypatch):
        """A release that does not fit is refused: no noise is drawn, and nothing has changed."""
        seen, accountant = Releases(monkeypatch), PrivacyAccountant(epsilon=1.0)
        options = dict(noise=Noise(5.0, source=0), num_steps=100) | self.sampled
        inference = self.new(accountant=accountant, **options)
        data = self.data(self.variants[0])
        with pytest.raises(PrivacyBudgetExceeded):
            for _ in range(100):
                self.step(inference, data)
                before, drawn = self.everything(inference), len(seen.counted)
        assert 0 < accountant.num_releases == len(seen.released) < 100
        assert accountant.get_epsilon() <= 1.0
        assert len(seen.counted) == drawn
        assert same(self.everything(inference), before)

    def test_a_budget_refuses_what_has_no_noise(self):
        inference = self.new(accountant=PrivacyAccountant(epsilon=1.0), noise=0)
        with pytest.raises(PrivacyBudgetExceeded):
            self.step(inference, self.data(self.variants[0]))
        assert inference.accountant.num_releases == 0

    def everything(self, inference):
        """Result and ledger; of an inference with states, its state."""
        return self.result(inference), inference.accountant.state_dict()

    # The system's noise.

    @pytest.mark.parametrize("full", [False, True])
    def test_secure_releases_integers_on_a_grid(self, monkeypatch, full):
        """Sums and what is released are multiples of 2^-30 of a bound, and the ledger notes it."""
        seen = Releases(monkeypatch)
        options = {"sampling": FullBatch()} if full and self.sampled else self.sampled
        inference, _ = self.stepped(2, noise=Noise(2.0, source="system"), **options)
        assert len(seen.released) == inference.accountant.num_releases >= 2
        assert sum("secure mode" in note for note in inference.accountant.notes) == 1
        for blocks, *values in zip(seen.blocks, seen.sums, seen.released, strict=True):
            for value in values:
                for each, block in zip(value, blocks, strict=True):
                    units = each / (block.bound / 2**30)
                    assert ((units - units.round()).abs() < 1e-4).all()

    # Errors.

    def test_settings_out_of_range(self):
        """Each is refused by name, before anything is spent or noted."""
        for options, word in self.settings_out_of_range():
            accountant = PrivacyAccountant()
            try:
                self.stepped(**{"accountant": accountant, "noise": 1.0} | options)
            except ConfigurationError as error:
                assert word in str(error), options
            else:
                pytest.fail(f"{options} are not refused")
            assert not accountant.ledger and not accountant.notes, options

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_data_must_be_finite(self, value):
        """The error tells no value, and comes before anything is spent."""
        inference, data = self.new(), self.data(self.variants[0])
        data[0][RECORD], data[0][RECORD + 1] = value, SECRET
        with pytest.raises(ModelError, match="NaN or infinite") as error:
            self.step(inference, data)
        assert "777" not in str(error.value)
        assert inference.accountant.num_releases == 0


class InferenceContract(ReleaseContract, RunContract):
    """It adds the promises of runs: calibration, :meth:`run`, states, journals, pickling.

    :cvar whole: settings of the runs that are saved and go on.
    :cvar first: how many releases the first step of such a run has; later ones have one.
    :cvar bound: the setting to which a record is clipped, as errors name it.
    :cvar younger: parts of a state that those of older versions lack.
    :cvar beyond: error of a calibrated inference that is asked for a step too many.
    :cvar at_an_end: error of one with noise of its own, and
    :cvar done: words of the error where all steps are done.
    """

    whole = {"sampling": 0.5}
    first = 1
    bound = ""
    younger = ("clipped_fractions", "start", "reservation")
    beyond = PrivacyBudgetExceeded
    at_an_end = ConfigurationError
    done = "are done: start anew"
    _bad_settings = (
        *ReleaseContract._bad_settings,
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1.5}, "num_steps"),
        *(({"sampling": value}, "PoissonSampling.rate") for value in (0.0, 1.5)),
        ({"sampling": "shuffle"}, "sampling must be"),
        ({"sampling": FixedSizeSampling(0.5)}, "replace_one"),
    )

    def new(self, variant=None, seed=0, **options):
        return super().new(variant, seed, **({"num_steps": STEPS} | options))

    def everything(self, inference):
        return self.result(inference), inference.state_dict()

    def damage(self, state):
        """(changes of a state, words of the error), beside those that all have."""
        return ()

    def settings_out_of_range(self):
        settings = super().settings_out_of_range()
        if self.bound:
            name = self.bound.partition(".")[0].lower()
            settings += [({name: value}, self.bound) for value in (0.0, -1.0, math.nan)]
            settings.append(({name: math.inf}, "infinite bound"))  # with noise
        return settings

    @pytest.mark.parametrize("size", [1, 3])
    def test_microbatches_change_nothing(self, kind, size):
        """This holds only if a record's contribution depends on no other record of the batch."""
        data, batch = self.data(kind), list(range(0, 20, 2))
        _, whole = self.sums(kind, data, batch, late=True)
        _, parts = self.sums(kind, data, batch, late=True, execution=Execution(size))
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)

    def test_an_empty_batch_pays_and_is_noisy(self, monkeypatch):
        seen = Releases(monkeypatch)
        inference, _ = self.stepped(sampling=1e-4)
        assert all(torch.equal(total, torch.zeros_like(total)) for total in seen.sums[0])
        assert all(block.abs().min() > 0 for block in seen.released[0])
        assert inference.accountant.ledger == ((SubsampledGaussian(1.0, 1e-4), 1),)

    def test_a_step_waits_its_turn(self, monkeypatch):
        """Pyro's handlers are the process's, and threads with equal seeds share no position."""
        free, draw = [], RecordSampler.draw

        def try_lock():
            free.append(iterative._TURN.acquire(blocking=False))
            if free[-1]:
                iterative._TURN.release()

        def spy(sampler, stream):
            in_threads(try_lock)
            return draw(sampler, stream)

        monkeypatch.setattr(RecordSampler, "draw", spy)
        self.stepped(**self.sampled)
        assert free and not any(free)
        assert iterative._TURN.acquire(blocking=False) is True
        iterative._TURN.release()

    # The budget.

    def calibrated(self, accountant=None, **options):
        options = {"noise": Noise(source=0)} | self.whole | options
        return self.new(accountant=accountant or PrivacyAccountant(epsilon=1.0), **options)

    @pytest.mark.parametrize("sampling", [PoissonSampling(0.5), FixedSizeSampling(0.5)])
    def test_noise_is_calibrated_to_the_budget(self, sampling):
        """All steps fit, almost nothing remains, and no further step fits."""
        accountant = PrivacyAccountant(epsilon=1.0, neighboring="replace_one")
        inference = self.calibrated(accountant, **self.sampled | {"sampling": sampling})
        data = self.data(self.variants[0])
        inference.run(*data, progress=False)
        ledger, epsilon = inference.accountant.ledger, inference.accountant.get_epsilon()
        event = SubsampledGaussian(inference.noise_multiplier, 0.5, sampling.kind)
        assert ledger == ((event, STEPS),)
        assert 0.995 < epsilon <= 1.0
        for more in (inference.step, inference.run):
            with pytest.raises(self.beyond, match="num_steps"):
                more(*data)
        assert inference.accountant.ledger == ledger

    def test_a_plan_that_is_cut_short_returns_nothing(self):
        """The number of steps can be set again, and may then depend on releases."""
        accountant = PrivacyAccountant(epsilon=1.0)
        inference, data = self.calibrated(accountant), self.data(self.variants[0])
        self.step(inference, data)
        epsilon = accountant.get_epsilon()
        inference.num_steps = 2
        self.step(inference, data)
        assert accountant.get_epsilon() == pytest.approx(epsilon, rel=1e-3)

    def test_inferences_share_an_accountant(self):
        """Releases of both inferences count."""
        accountant = PrivacyAccountant()
        for _ in range(2):
            self.stepped(3, accountant=accountant, **self.sampled)
        assert accountant.ledger == ((self.event(1.0), 6),)

    def test_run_takes_what_is_left_of_its_steps(self, capsys):
        """If no step is left, run is refused. A hidden progress bar writes nothing."""
        inference, data = self.stepped(**self.sampled)
        assert inference.run(*data, progress=False).earlier == 1
        assert inference.accountant.num_releases == STEPS
        with pytest.raises(self.at_an_end, match=self.done):
            inference.run(*data, progress=False)
        assert inference.accountant.num_releases == STEPS
        assert capsys.readouterr() == ("", "")

    # States.

    def test_a_saved_run_goes_on_as_if_it_had_not_stopped(self):
        """Without noise, on all records, the second half from a file is the uninterrupted one."""
        plain = dict(noise=Noise(0, source=0)) | ({} if self.at_once else {"sampling": FullBatch()})
        data = self.data(self.variants[0])

        def steps(inference, which):
            for number in which:
                pyro.set_rng_seed(number)
                inference.step(*data)
            return inference

        whole = steps(self.new(**plain), range(STEPS))
        expected, ledger = self.result(whole), whole.accountant.ledger
        state = through_a_file(steps(self.new(**plain), range(3)).state_dict())
        resumed = self.new(**plain)
        resumed.load_state_dict(state)
        assert same(resumed.accountant.state_dict()["ledger"], state["accountant"]["ledger"])
        steps(resumed, range(3, STEPS))
        torch.testing.assert_close(self.result(resumed), expected, rtol=1e-9, atol=1e-12)
        assert resumed.accountant.ledger == ledger
        with pytest.raises(ConfigurationError, match="are done"):
            resumed.run(*data, progress=False)

    def test_a_calibrated_run_goes_on(self):
        """It keeps its noise and ends with its budget. No state lowers the ledger afterwards."""
        first, data = self.calibrated(), self.data(self.variants[0])
        for _ in range(2):
            first.step(*data)
        state, sigma = through_a_file(first.state_dict()), first.noise_multiplier
        second = self.calibrated()
        second.load_state_dict(state)
        assert second.noise_multiplier == sigma
        second.run(*data, progress=False)
        assert second.accountant.num_releases == STEPS + self.first - 1
        assert second.accountant.get_epsilon() == first.accountant.get_epsilon()
        assert 0.995 < second.accountant.get_epsilon() <= 1.0
        before = self.everything(second)
        with pytest.raises(PrivacyError, match="a release cannot be undone"):
            second.load_state_dict(state)
        assert same(self.everything(second), before)

    def test_a_bad_state_changes_nothing(self):
        """No state, that of another inference, and one with a part that is damaged or missing."""
        inference, _ = self.stepped(2, **self.whole)
        state, before = inference.state_dict(), self.everything(inference)
        strangers = [None, {}, 5, {"version": 1}, {"version": 99}, *foreign_states(inference)]
        needed = [name for name in state if name not in self.younger]
        strangers += [{n: v for n, v in state.items() if n != name} for name in needed]
        cases = [(each, "state_dict") for each in strangers]
        common = (
            ({"version": 2}, "state_dict"),
            ({"steps": -1}, "steps"),
            ({"reservation": 3}, "reservation"),
            ({"noise_multiplier": 3.0}, "noise_multiplier"),
            ({"accountant": {}}, None),
        )
        cases += [(state | change, words) for change, words in (*common, *self.damage(state))]
        for bad, words in cases:
            with pytest.raises(ConfigurationError, match=words):
                inference.load_state_dict(bad)
            assert same(self.everything(inference), before)

    @pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_a_copy_would_carry_the_data(self, copied):
        inference, _ = self.stepped()
        name = inference._reservation.inference
        text = rf"A {name} holds the data: save its state_dict\(\) instead"
        with pytest.raises(PrivacyError, match=text):
            copied(inference)

    # Journals.

    def test_a_state_older_than_the_journal(self, tmp_path):
        """Saved at step 2, killed at step 4: the ledger stays, and the rest is shared out anew."""
        accountant, data = PrivacyAccountant(epsilon=1.0), self.data(self.variants[0])
        journal = accountant.journal(tmp_path / "journal")
        first = self.calibrated(accountant)
        for _ in range(2):
            first.step(*data)
        state = through_a_file(first.state_dict())
        for _ in range(2):
            first.step(*data)
        journal.close()
        ledger, sigma = accountant.ledger, first.noise_multiplier

        accountant = PrivacyAccountant(epsilon=1.0)
        accountant.journal(tmp_path / "journal")
        second = self.calibrated(accountant)
        second.load_state_dict(state)
        assert accountant.ledger == ledger
        second.run(*data, progress=False)
        assert (second.noise_multiplier > sigma) != self.at_once
        assert accountant.num_releases == sum(n for _, n in ledger) + STEPS - 2
        assert 0.995 < accountant.get_epsilon() <= 1.0

    def test_a_journal_that_has_spent_everything(self, tmp_path):
        """An older state loads, and the error says where the budget went."""
        accountant, data = PrivacyAccountant(epsilon=1.0), self.data(self.variants[0])
        accountant.journal(tmp_path / "journal")
        inference = self.calibrated(accountant)
        inference.step(*data)
        state = through_a_file(inference.state_dict())
        inference.run(*data, progress=False)
        ledger = accountant.ledger
        inference.load_state_dict(state)
        with pytest.raises(PrivacyBudgetExceeded, match=f"{STEPS - 1} releases in the journal"):
            inference.run(*data, progress=False)
        assert accountant.ledger == ledger

    def test_a_state_newer_than_the_journal_is_refused(self, tmp_path):
        """Such a journal is an older copy."""
        other, data = self.stepped(**self.whole)
        state = through_a_file(other.state_dict())
        accountant = PrivacyAccountant()
        accountant.journal(tmp_path / "journal")
        inference = self.new(accountant=accountant, **self.whole)
        with pytest.raises(PrivacyError, match="older copy"):
            inference.load_state_dict(state)
        assert not accountant.ledger
        inference.step(*data)  # the first
        assert accountant.num_releases == self.first

    @pytest.mark.parametrize("journal", [False, True])
    def test_no_stream_is_used_twice(self, journal, tmp_path, monkeypatch):
        """This holds with a seed, too: a state may be older than the releases of its run."""
        seen, data = Releases(monkeypatch), self.data(self.variants[0])

        def new():
            accountant = PrivacyAccountant()
            opened = accountant.journal(tmp_path / "journal") if journal else None
            return self.new(accountant=accountant, **self.whole), opened

        first, opened = new()
        first.step(*data)
        state = through_a_file(first.state_dict())
        first.step(*data)
        for _ in range(2):
            if journal:
                opened.close()
            second, opened = new()
            second.load_state_dict(state)
            second.step(*data)
        self.new(**self.whole).step(*data)
        drawn = [
            tuple(each.bit_generator.seed_seq.generate_state(4).tolist()) for each in seen.streams
        ]
        assert drawn[-self.first :] == drawn[: self.first]  # a run that starts anew repeats
        assert len(set(drawn)) == len(drawn) - self.first == self.first + 3


def named(parameters):
    """Variants, by the values of some parameters, and those of them that are slow."""
    names = {", ".join(each.values): bool(each.marks) for each in parameters}
    return tuple(names), tuple(name for name, slow in names.items() if slow)


def require_close_by(blocks, one, other, records):
    """Require that adding or leaving out so many records moves these sums no further."""
    room = records * (1 + 1e-12)
    moved = [
        (x - y).norm().item() / block.bound for x, y, block in zip(one, other, blocks, strict=True)
    ]
    assert all(each <= room for each in moved)
    shares = [block.share for block in blocks]
    assert math.hypot(*(d * s**0.5 for d, s in zip(moved, shares, strict=True))) <= room


def p_of_scale(noise):
    """The two-sided p-value of a standard deviation of 1."""
    squares, count = np.square(noise).sum(), noise.size
    return 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def foreign_states(inference):
    """States of other inferences, before their first step."""
    settings = dict(accountant=PrivacyAccountant(), num_steps=STEPS, noise=1.0)
    scales = {"radius": 1.0, "start_variance": 1.0, "least_variance": 1e-4}
    others = (
        DPEM(torch.zeros(2, 3), **scales, **settings),
        VIPS(LogisticRegression(3), **settings),
    )
    return [each.state_dict() for each in others if type(each) is not type(inference)]
