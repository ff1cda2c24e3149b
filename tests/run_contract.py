"""The promises of every private inference about ``run``: a part of the contract in contract.py."""

import copy
import functools
import math
import pickle
import signal
import sys

import pyro
import pytest
import torch
from releases import Releases

import pyro_dp.mechanism.clipping
import pyro_dp.mechanism.releases
import pyro_dp.mechanism.sampling
from pyro_dp import ConfigurationError, PrivacyAccountant, PrivacyBudgetExceeded, RunResult

STEPS = 6


def ctrl_c(*args, **kwargs):
    """Send the terminal's signal."""
    signal.raise_signal(signal.SIGINT)


class RunContract:
    """Results, callbacks, interrupts. :class:`InferenceContract` inherits it.

    :cvar at_once: whether a run's budget is reserved as one release that steps share.
    """

    at_once = False

    def test_a_run_tells_what_it_did(self):
        inference, data = self.new(**self.whole), self.data(self.variants[0])
        assert inference.last_run is None
        result = inference.run(*data, progress=False)
        assert inference.last_run is result and isinstance(result, RunResult)
        assert result.steps == len(result.step_seconds) == STEPS and result.earlier == 0
        assert list(result) == result.values == [x for x in result.returned if not math.isnan(x)]
        assert len(result) == len(result[:]) and result.noise_multiplier == 1.0
        assert 0 < sum(result.step_seconds) < result.seconds
        assert result.stopped == "all steps are done"
        lines = repr(result).splitlines()
        name = inference._reservation.inference
        assert lines[0] == f"{name}: {STEPS} of {STEPS} steps, all steps are done"
        assert 3 <= len(lines) <= 5 and "nan" not in repr(result)
        shown = inference._repr_html_(), result._repr_html_()
        assert all(lines[0].split(": ")[1] in each and name in each for each in shown)
        copies = pickle.loads(pickle.dumps(result)), copy.deepcopy(result)
        assert all(repr(each) == repr(result) for each in copies)  # it does not hold the data

    def test_callbacks_see_each_step(self, monkeypatch):
        """Callbacks see released numbers, and change nothing."""
        seen, data = Releases(monkeypatch), self.data(self.variants[0])
        expected = self.new(**self.whole)
        pyro.set_rng_seed(1)
        values = expected.run(*data, progress=False).returned
        steps, looks = [], []

        def look(step):
            steps.append(step)
            assert inference.accountant.num_releases == step.step + self.first - 1
            looks.append((step.epsilon, step.clipped_fraction, repr(step)))

        inference = self.new(**self.whole)
        pyro.set_rng_seed(1)
        result = inference.run(*data, progress=False, callbacks=[look, lambda step: None])
        assert torch.equal(
            torch.tensor(result.returned).nan_to_num(), torch.tensor(values).nan_to_num()
        )
        for name, value in self.result(expected).items():
            assert torch.equal(value, self.result(inference)[name])
        assert [step.step for step in steps] == list(range(1, STEPS + 1))
        assert [step.bound for step in steps] == result.bounds
        assert {step.num_steps for step in steps} == {STEPS}
        epsilons = [epsilon for epsilon, *_ in looks]
        if self.at_once:  # shares add up to the same number, up to rounding
            assert epsilons == pytest.approx([inference.accountant.get_epsilon()] * STEPS)
        else:
            assert epsilons == sorted(epsilons)
            assert epsilons[-1] == inference.accountant.get_epsilon()
        clipped = getattr(inference, "clipped_fraction", None)
        assert looks[-1][1] == clipped == result.clipped_fraction
        # The noise of the last step, as it was drawn.
        block = seen.blocks[-1][0]
        assert steps[-1].noise == result.noise == block.noise(seen.events[-1].noise_multiplier)
        assert "tensor" not in looks[-1][2]

    def test_a_callback_stops_a_run(self):
        """It goes on later, and epsilon is that of the whole plan all the time. A stop at the end
        is none."""
        inference, data = self.calibrated(), self.data(self.variants[0])
        called = []
        callbacks = [lambda step: step.step == 3, lambda step: called.append(step.step)]
        result = inference.run(*data, progress=False, callbacks=callbacks)
        assert called == [1, 2, 3] and result.steps == 3
        assert result.stopped == "a callback stopped it"
        accountant = inference.accountant
        assert accountant.num_releases == 3 + self.first - 1
        whole = accountant.get_epsilon()
        assert 0.995 < whole <= 1.0
        rest = inference.run(*data, progress=False, callbacks=[lambda s: s.step == STEPS])
        assert (rest.earlier, rest.steps) == (3, 3) and rest.stopped == "all steps are done"
        assert repr(rest).startswith(
            f"{inference._reservation.inference}: {STEPS} of {STEPS} steps"
        )
        assert accountant.num_releases == STEPS + self.first - 1
        assert accountant.get_epsilon() == whole and accountant.reserved == []

    def test_a_run_with_noise_of_its_own_reserves_its_steps(self):
        """A loop over steps reserves none: their number is unknown."""
        loop, data = self.new(**self.whole), self.data(self.variants[0])
        loop.step(*data)
        assert loop.accountant.reserved == []
        whole, stopped = (self.new(**self.whole) for _ in "ab")
        whole.run(*data, progress=False)
        stopped.run(*data, progress=False, callbacks=[lambda step: True])
        assert stopped.accountant.num_releases == self.first
        assert stopped.accountant.get_epsilon() == whole.accountant.get_epsilon()

    def test_a_run_that_does_not_fit_releases_nothing(self):
        inference = self.new(accountant=PrivacyAccountant(epsilon=0.5), **self.whole)
        with pytest.raises(PrivacyBudgetExceeded, match="nothing was released"):
            inference.run(*self.data(self.variants[0]), progress=False)
        assert inference.accountant.num_releases == inference.accountant.get_epsilon() == 0

    def test_a_loop_that_ends_early_has_reserved_its_plan(self):
        """A release by hand leaves it alone, and the run goes on with it."""
        inference, data = self.calibrated(), self.data(self.variants[0])
        accountant = inference.accountant
        for _ in range(3):
            inference.step(*data)
        whole = accountant.get_epsilon()
        assert 0.995 < whole <= 1.0 and accountant.remaining < 0.005
        assert accountant.num_releases == 3 + self.first - 1
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.record(inference._releases.last)
        ((origin, left),) = accountant.reserved
        assert origin.reservation == inference._reservation.name
        assert sum(left.values()) == (1 if self.at_once else STEPS - 3)
        inference.run(*data, progress=False)
        assert accountant.get_epsilon() == whole and accountant.reserved == []

    def test_a_second_inference_cannot_spend_what_the_first_left_unused(self):
        first, data = self.calibrated(), self.data(self.variants[0])
        first.step(*data)
        second = self.calibrated(first.accountant)
        with pytest.raises(PrivacyBudgetExceeded, match="remains"):
            second.step(*data)
        assert first.accountant.num_releases == self.first

    def test_a_callback_that_fails(self):
        """Its error is raised as it is. The step is complete, and the run can go on."""
        inference, data = self.calibrated(), self.data(self.variants[0])

        def fail(step):
            if step.step == 2:
                raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            inference.run(*data, progress=False, callbacks=[fail])
        assert inference.last_run.steps == 2
        assert inference.last_run.stopped == "ZeroDivisionError stopped it"
        assert inference.accountant.num_releases == 2 + self.first - 1
        assert inference.run(*data, progress=False, callbacks=[fail]).steps == STEPS - 2
        assert inference.accountant.num_releases == STEPS + self.first - 1

    def test_what_is_no_callback(self):
        inference, data = self.new(**self.whole), self.data(self.variants[0])
        for callbacks in (print, "print", [print, 3], None):
            with pytest.raises(ConfigurationError, match="callbacks must be a list of functions"):
                inference.run(*data, progress=False, callbacks=callbacks)
        assert inference.accountant.num_releases == 0
        with pytest.raises(ConfigurationError, match="callbacks: <lambda> returned float"):
            inference.run(*data, progress=False, callbacks=[lambda step: 0.0])
        assert inference.run(*data, progress=False).steps == STEPS - 1

    # Ctrl-C.

    def interrupted(self, monkeypatch, where, interrupt):
        """A calibrated run, interrupted in its second step; its state before, and its releases."""
        seen, inference, data = (
            Releases(monkeypatch),
            self.calibrated(),
            self.data(self.variants[0]),
        )
        inference.run(*data, progress=False, callbacks=[lambda step: True])
        before = self.everything(inference)
        with monkeypatch.context() as patch:
            where(patch, interrupt)
            with pytest.raises(KeyboardInterrupt):
                inference.run(*data, progress=False)
        return inference, data, before, seen

    def goes_on(self, inference, data, releases):
        """To its planned number of steps, within its budget."""
        inference.run(*data, progress=False)
        assert inference._steps == STEPS and inference.accountant.num_releases == releases
        assert 0.99 < inference.accountant.get_epsilon() <= 1.0

    @pytest.mark.parametrize("stage", ["sampling", "record", "noise", "released"])
    def test_ctrl_c_leaves_a_step_undone_or_done(self, stage, monkeypatch):
        """Undone before the release; from then on all of it is done, and nothing that was paid for
        is lost."""
        inference, data, before, seen = self.interrupted(monkeypatch, STAGES[stage], ctrl_c)
        done = stage != "sampling"
        assert inference._steps == 1 + done == len(seen.released) - self.first + 1
        assert inference.accountant.num_releases == len(seen.released)
        assert inference.last_run.steps == done
        assert inference.last_run.stopped == "KeyboardInterrupt stopped it"
        if not done:
            assert same(self.everything(inference), before)
        self.goes_on(inference, data, STEPS + self.first - 1)

    @pytest.mark.parametrize("stage", ["sampling", "record", "noise", "released"])
    def test_an_exception_loses_one_release_at_most(self, stage, monkeypatch):
        """An exception, as for memory, comes at once. The ledger counts every release.

        The steps that are left share the rest of the budget.
        """

        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        inference, data, before, seen = self.interrupted(monkeypatch, STAGES[stage], fail)
        lost = stage != "sampling"
        sigma = before[1]["noise_multiplier"]
        assert inference._steps == 1
        assert inference.accountant.num_releases == self.first + lost >= len(seen.released)
        self.goes_on(inference, data, STEPS + self.first - 1 + lost)
        dearer = lost and not self.at_once
        assert inference.noise_multiplier > sigma if dearer else inference.noise_multiplier == sigma

    def started(self, opened):
        """An inference before its first step, or a later one, and its data."""
        data, inference = self.data(self.variants[0]), self.calibrated()
        if opened:
            inference.step(*data)
        return inference, data

    @classmethod
    @functools.cache
    def num_calls(cls, opened):
        """Calls in a step; the first count may include what is cached once a process."""
        return min(calls_of(*cls().started(opened)) for _ in range(2))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
    @pytest.mark.parametrize("opened", [False, True])
    def test_ctrl_c_anywhere(self, share, opened):
        """At the n-th call of a function within the first or a later step."""
        place = 1 + int(share * self.num_calls(opened))
        inference, data = self.started(opened)
        before = self.everything(inference) if opened else None
        with pytest.raises(KeyboardInterrupt):
            calls_of(inference, data, place)
        steps = inference._steps
        done = steps > opened
        assert inference.accountant.num_releases == steps + (self.first - 1) * (steps > 0)
        assert done or not opened or same(self.everything(inference), before)
        self.goes_on(inference, data, STEPS + self.first - 1)


def calls_of(inference, data, place=None):
    """Calls of Python functions in a step, with a Ctrl-C at one of them."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event == "call":
            count += 1
            if count == place:
                ctrl_c()

    sys.setprofile(profile)
    try:
        inference.step(*data)
    finally:
        sys.setprofile(None)
    return count


def _before(owner, name):
    """A patch that does something before a function."""

    def where(patch, interrupt):
        original = getattr(owner, name)

        def first(*args, **kwargs):
            interrupt()
            return original(*args, **kwargs)

        patch.setattr(owner, name, first)

    return where


def _after_release(patch, interrupt):
    original = pyro_dp.mechanism.releases.release

    def then(*args, **kwargs):
        released = original(*args, **kwargs)
        interrupt()
        return released

    patch.setattr(pyro_dp.mechanism.releases, "release", then)


def _after_record(patch, interrupt):
    original = PrivacyAccountant.record

    def then(*args, **kwargs):
        original(*args, **kwargs)
        interrupt()

    patch.setattr(PrivacyAccountant, "record", then)


STAGES = {
    "sampling": _before(pyro_dp.mechanism.sampling.RecordSampler, "draw"),
    "record": _after_record,
    "noise": _before(pyro_dp.mechanism.clipping.ClippedSum, "_noisy"),
    "released": _after_release,
}


def same(one, other):
    """Whether nested results or states are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
