"""Choosing among settings at a bounded cost."""

import math
import random
import sys
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from ledgers import ledger
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from test_num_trials import at_most

import pyro_dp.mechanism.iterative
from pyro_dp import (
    ApproximateDP,
    Clip,
    ConfigurationError,
    DPStandardScaler,
    Execution,
    Noise,
    PaperDPSVI,
    PoissonTrials,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
    TruncatedNegativeBinomial,
    private_selection,
    selection_epsilon,
)

_ALARM = 1e-8  # false-alarm rate of each statistical test
EVENT = SubsampledGaussian(8.0, 1.0, "full")
ONCE = {EVENT: 1}


def select(run, candidates=(1, 2, 3), accountant=None, **settings):
    accountant = accountant or PrivacyAccountant()
    settings = dict(releases=ONCE, accountant=accountant) | settings
    return private_selection(run, candidates, **settings)


def of_setting(setting, accountant):
    accountant.record(EVENT)
    return f"result {setting}", setting


@pytest.mark.slow
@pytest.mark.parametrize(
    "trials, seed",
    [
        (TruncatedNegativeBinomial(3.0), 1),
        (TruncatedNegativeBinomial(3.0, 1.0), None),
        (PoissonTrials(3.0), None),
    ],
    ids=repr,
)
def test_the_winner_is_the_best_of_a_random_number_of_independent_runs(trials, seed):
    """The exact law, f(Q(<= y)) - f(Q(< y)): settings are uniform, draws of trials independent."""
    candidates, repeats = (0, 1, 2), 2000  # 600 do not tell the wrong law in 3% of runs

    def run(setting, accountant):
        coin = torch.rand(()).item() < 0.5  # from the global generator, as a guide would draw
        return (setting, coin), setting + 10 * coin

    rank = {(s, coin): s + 3 * coin for s in candidates for coin in (False, True)}
    counts = np.zeros(7)
    generator = seed and torch.Generator().manual_seed(seed)
    for _ in range(repeats):
        try:
            found = select(run, candidates, trials=trials, generator=generator)
            counts[1 + rank[found.result]] += 1
        except PrivacyError:
            counts[0] += 1
    below = at_most(trials, np.arange(7) / 6)
    expected = np.append(below[0], np.diff(below))
    some = expected > 0
    assert counts[~some].sum() == 0

    def p_value(law):
        return stats.chisquare(counts[some], repeats * law[some] / law.sum()).pvalue

    assert p_value(expected) > _ALARM
    fixed = np.diff(np.append(0.0, np.arange(7) / 6) ** 3.0)  # had K been 3 each time
    assert stats.chisquare(counts[1:], counts[1:].sum() * fixed[1:]).pvalue < _ALARM


def test_one_event_is_recorded_before_anything_runs():
    accountant = PrivacyAccountant(epsilon=2.0)
    ledgers = []

    def run(setting, own):
        ledgers.append(accountant.ledger)
        return of_setting(setting, own)

    found = select(run, accountant=accountant)
    assert found.result == f"result {found.setting}"
    assert found.score == found.setting
    ((event, count),) = accountant.ledger
    assert count == 1
    assert set(ledgers) == {accountant.ledger}
    epsilon = selection_epsilon(ONCE, delta=5e-6)
    assert isinstance(event, ApproximateDP)
    assert (event.epsilon, event.delta) == (epsilon, 5e-6)
    assert event.name.startswith("private_selection among 3 settings")
    assert accountant.get_epsilon() <= epsilon  # a little of delta is left
    assert accountant.get_epsilon() == pytest.approx(epsilon, rel=1e-4)
    assert accountant.get_epsilon() > ledger((EVENT, 1)).get_epsilon()


def test_the_cost_is_the_same_whatever_happens():
    def fails(setting, accountant):
        raise ValueError

    accountants = [PrivacyAccountant() for _ in range(3)]
    select(of_setting, accountant=accountants[0], generator=0)
    select(lambda setting, own: (None, 0.0), accountant=accountants[1], generator=1)
    with pytest.raises(PrivacyError):
        select(fails, accountant=accountants[2], generator=2)
    assert len({accountant.ledger for accountant in accountants}) == 1


def test_what_does_not_fit_the_budget_does_not_run():
    def run(setting, accountant):
        raise AssertionError

    accountant = PrivacyAccountant(epsilon=0.5)
    with pytest.raises(PrivacyBudgetExceeded):
        select(run, accountant=accountant)
    assert accountant.num_releases == 0


def test_the_most_expensive_setting_is_charged():
    def releases(sigma):
        return {SubsampledGaussian(sigma, 0.1): 10}

    def run(sigma, own):
        own.record(SubsampledGaussian(sigma, 0.1), 10)
        return None, 0.0

    accountant = PrivacyAccountant(neighboring="replace_one")
    select(run, [9.0, 3.0, 5.0], accountant, releases=releases, delta=1e-6)
    ((event, _),) = accountant.ledger
    worst = selection_epsilon(releases(3.0), delta=1e-6, neighboring="replace_one")
    assert event.epsilon == worst
    assert worst > selection_epsilon(releases(5.0), delta=1e-6, neighboring="replace_one")
    several = [releases(sigma) for sigma in (9.0, 3.0, 5.0)]
    assert selection_epsilon(several, delta=1e-6, neighboring="replace_one") == worst


ATTEMPTS = {
    "a costlier event": lambda own: own.record(SubsampledGaussian(7.0)),
    "two cheaper ones": lambda own: own.record(SubsampledGaussian(9.0), 2),
    "another rate": lambda own: own.record(SubsampledGaussian(99.0, 0.5)),
    "twice as many": lambda own: own.record(EVENT, 2),
    "one after the other": lambda own: [own.record(EVENT) for _ in range(2)],
    "a look": lambda own: own.record_nonprivate("loss"),
    "a statement": lambda own: own.record(ApproximateDP(0.1, 0.0, "x")),
    "a selection": lambda own: select(of_setting, accountant=own),
    "another ledger": lambda own: own.load_state_dict(PrivacyAccountant().state_dict()),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_trial_releases_what_was_declared_and_no_more(attempt):
    def run(setting, own):
        attempt(own)
        return "leak", 1.0

    with pytest.raises(PrivacyError, match="trial failed"):
        select(run)


def test_a_trial_that_is_over_releases_nothing():
    found = select(lambda setting, own: (own, 0.0), releases={EVENT: 5})
    with pytest.raises(PrivacyBudgetExceeded, match="while it runs"):
        found.result.record(EVENT)
    assert "lacks the selection's cost" in found.result.notes[0]


def test_trials_leave_no_trace(capfd):
    """Trials change no generator or parameter, print nothing and warn of nothing."""

    def run(setting, accountant):
        torch.randn(setting)
        np.random.standard_normal(setting)
        random.random()
        pyro.param("of a trial", torch.zeros(setting))
        assert "mine" not in pyro.get_param_store()
        print("to be hidden")
        print("to be hidden", file=sys.stderr)
        warnings.warn("to be hidden", stacklevel=1)
        return None, 0.0

    pyro.param("mine", torch.ones(2))
    before = pyro.util.get_rng_state()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        select(run)
    after = pyro.util.get_rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["random"] == after["random"]
    assert str(before["numpy"]) == str(after["numpy"])
    assert set(pyro.get_param_store().keys()) == {"mine"}
    assert not seen
    assert capfd.readouterr() == ("", "")


def _fitted(guide, optim, x, accountant, of=None, **settings):
    how = dict(accountant=accountant, num_steps=2, noise=2.0, clip=Clip(loss=10.0)) | settings
    execution = Execution(jit="none")
    return PaperDPSVI(of or model, guide, optim, Trace_ELBO(), execution=execution, **how).run(x)


_FITTED = {SubsampledGaussian(2.0, 0.25): 2}


@pytest.mark.slow
def test_no_progress_bar_counts_the_trials(monkeypatch):
    """A notebook's bars bypass standard output, so trials show none."""
    bars, x = [], torch.randn(200)

    class Bar(pyro_dp.mechanism.iterative.tqdm):
        def __init__(self, *args, **settings):
            bars.append(settings["disable"])
            super().__init__(*args, **settings)

    def run(setting, accountant):
        _fitted(AutoNormal(model), pyro.optim.Adam({"lr": setting}), x, accountant)
        return None, 0.0

    monkeypatch.setattr(pyro_dp.mechanism.iterative, "tqdm", Bar)
    select(run, [0.1], releases=_FITTED, generator=0)
    assert bars and all(bars)


def with_layer(layer):
    """A copy of this model has the same layer."""

    def own(x):
        pyro.module("layer", layer)
        model(x + layer(torch.ones(1)))

    return own


@pytest.mark.long
@pytest.mark.parametrize("shared", ["guide", "optimizer", "module", "module of a candidate"])
def test_trials_do_not_go_on_from_each_other(shared):
    """Objects that outlive a trial would chain trials, while only one is charged."""
    x, guide, optim = torch.randn(200), AutoNormal(model), pyro.optim.Adam({"lr": 0.1})
    layer = torch.nn.Linear(1, 1)

    of_module = with_layer(layer)

    def run(setting, accountant):
        own_model = of_module if shared == "module" else model
        if shared == "module of a candidate":
            own_model, setting = setting["model"], 0.1
        own = guide if shared == "guide" else AutoNormal(own_model)
        # Whose steps give parameters no new version.
        new_optim = pyro.optim.ClippedAdam({"lr": setting})
        own_optim = optim if shared == "optimizer" else new_optim
        _fitted(own, own_optim, x, accountant, of=own_model)
        return own, 0.0

    accountant, trials = PrivacyAccountant(), TruncatedNegativeBinomial(20.0, 20.0)
    candidate = {"model": with_layer(torch.nn.Linear(1, 1))} if "candidate" in shared else 0.1
    with pytest.raises(PrivacyError, match="inside run"):
        select(run, [candidate], accountant, releases=_FITTED, trials=trials, generator=0)
    assert accountant.num_releases == 1  # paid


def test_candidates_are_copied_for_each_trial():
    seen = []

    def run(setting, accountant):
        seen.append(dict(setting))
        setting["used"] = True
        return None, 0.0

    candidates = [{"lr": 0.1}]
    found = select(run, candidates, trials=TruncatedNegativeBinomial(20.0, 20.0), generator=0)
    assert len(seen) > 2
    assert all(each == {"lr": 0.1} for each in seen)
    assert found.setting is candidates[0] and candidates == [{"lr": 0.1}]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AutoNormal(model),
        lambda: {"optim": [pyro.optim.Adam({"lr": 0.1})]},
        lambda: (n for n in range(3)),
    ],
)
def test_candidates_that_keep_a_state_are_refused(make):
    accountant = PrivacyAccountant()
    with pytest.raises(ConfigurationError, match="candidates"):
        select(of_setting, [make()], accountant)
    assert accountant.ledger == ()


def test_no_position_tells_the_number_of_a_trial():
    positions = []

    def run(setting, accountant):
        positions.append(accountant.position)
        return None, 0.0

    select(run, trials=TruncatedNegativeBinomial(50.0, 10.0))
    assert min(positions) >= 2**128
    spread = [position - 2**128 for position in positions]
    assert len({each >> 100 for each in spread}) == len({each % 2**40 for each in spread})
    assert len({each >> 100 for each in spread}) == len(positions)


def test_trials_have_draws_of_their_own():
    draws = []

    def run(setting, accountant):
        draws.append((torch.rand(()).item(), np.random.uniform(), random.random()))
        return None, 0.0

    select(run, trials=TruncatedNegativeBinomial(50.0, 10.0))
    assert len(draws) > 5
    for column in zip(*draws, strict=True):
        assert len(set(column)) == len(draws)


def test_a_failing_trial_loses_and_its_text_is_hidden():
    def run(setting, accountant):
        if setting == 1:
            raise ValueError("secret")
        if setting == 2:
            return "nan", math.nan
        return "fine", -1e9

    many = TruncatedNegativeBinomial(100.0, 10.0)
    assert select(run, trials=many).result == "fine"
    for candidates, word in (((1,), "ValueError"), ((2,), "NaN")):
        with pytest.raises(PrivacyError, match=word) as error:
            select(run, candidates)
        assert "secret" not in str(error.value)
        assert error.value.__cause__ is error.value.__context__ is None
    for wrong in (None, ("result",), ("result", "secret"), ("result", [1.0, 2.0])):
        with pytest.raises(PrivacyError, match="failed"):
            select(lambda setting, own, wrong=wrong: wrong)


@pytest.mark.long
def test_no_trial_is_no_result():
    generator = torch.Generator().manual_seed(0)
    outcomes = set()
    for _ in range(40):
        try:
            select(of_setting, trials=PoissonTrials(1.0), generator=generator)
        except PrivacyError as error:
            outcomes.add("no trial was drawn" in str(error))
    assert outcomes == {True}


def test_scores_may_be_tensors_and_the_first_of_equals_wins():
    results = []

    def run(setting, accountant):
        results.append(len(results))
        return results[-1], torch.tensor(-math.inf if len(results) < 2 else 3.0)

    found = select(run, trials=TruncatedNegativeBinomial(50.0, 10.0))
    assert found.result == 1
    assert found.score == 3.0
    assert isinstance(found.score, float)


def test_a_seed_repeats_and_is_noted():
    one, two, other = (PrivacyAccountant() for _ in range(3))
    numbers = []

    def run(setting, accountant):
        return (setting, torch.rand(()).item()), torch.rand(())

    for accountant in (one, two):
        numbers.append(select(run, range(100), accountant, generator=5))
    assert numbers[0] == numbers[1]
    assert "seed" in one.notes[0]
    # another position in the ledger, other streams
    assert select(run, range(100), one, generator=5) != numbers[0]
    assert select(run, range(100), other).result != select(run, range(100), other).result
    assert not other.notes


def test_a_seed_within_the_run_does_not_repeat_the_noise():
    means = []

    def run(setting, accountant):
        noise = Noise(8.0, source=7)
        scaler = DPStandardScaler((-1.0, 1.0), accountant=accountant, noise=noise)
        means.append(scaler.fit(torch.zeros(1000, 1)).mean_[0])
        return None, 0.0

    select(run, trials=TruncatedNegativeBinomial(20.0, 20.0))
    assert len(means) > 3
    assert len(set(means)) == len(means)


def model(x):
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("people", len(x), subsample_size=50) as idx:
        pyro.sample("x", dist.Normal(loc, 1.0), obs=x[idx])


@pytest.mark.slow
def test_learning_rates_of_dpsvi():
    """End to end: private losses as scores, guides as results."""
    x = 3.0 + torch.randn(200)

    def run(rate, accountant):
        guide, noise = AutoNormal(model), Noise(2.0, source=7)
        how = dict(num_steps=15, noise=noise, clip=Clip(3.0, loss=10.0, loss_share=0.2))
        losses = _fitted(guide, pyro.optim.Adam({"lr": rate}), x, accountant, **how)
        return guide, -sum(losses[-5:])

    accountant, trials = PrivacyAccountant(), TruncatedNegativeBinomial(5.0, 20.0)
    releases = {SubsampledGaussian(2.0, 0.25): 15}
    settings = dict(releases=releases, trials=trials, generator=0)
    found = select(run, [0.5, 1e-6], accountant, **settings)
    assert found.setting == 0.5
    assert abs(found.result.median()["loc"].item() - 3.0) < 1.5
    assert any("seed" in note for note in accountant.notes)
    assert not any("lacks" in note for note in accountant.notes)
    assert accountant.num_releases == 1


SUBSETS = SubsampledGaussian(1.0, 0.1, "fixed")
STATED = ApproximateDP(1.0, 0.0, "x")
UNDECLARED = {}, EVENT, {EVENT: 0}, {EVENT: 1.5}, {STATED: 1}, {SubsampledGaussian(0.0): 1}


@pytest.mark.parametrize(
    "name, values",
    [
        ("run", [None]),
        ("candidates", [(), "abc", {1, 2}]),
        ("releases", [*UNDECLARED, {SUBSETS: 1}, lambda setting: None]),
        ("accountant", [None]),
        ("trials", [10]),
        ("delta", [0.0, math.nan]),
        ("generator", ["seed"]),
    ],
)
def test_settings_out_of_range(name, values):
    accountant = PrivacyAccountant()
    settings = dict(run=of_setting, candidates=[1], releases=ONCE, accountant=accountant)
    for value in values:
        with pytest.raises(ConfigurationError):
            private_selection(**settings | {name: value})
    assert accountant.num_releases == 0
