"""VIPS: noise, sampling, sensitivity, ledger, budget, mixing, state, bad settings and data."""

import io
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from vips_problems import (
    PROBLEMS,
    Fixture,
    Totals,
    fitted,
    linear_data,
    logistic_data,
    mixture_data,
    scaled_distance,
)

import pyro_dp.mechanism.sampling
from pyro_dp import (
    VIPS,
    ConfigurationError,
    ModelError,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.records.records import Records
from pyro_dp.vips import GaussianMixture, LinearRegression, LogisticRegression, Statistic

_ALARM = 1e-8
_STATICS = ("logistic", "linear")


def one_sum(monkeypatch, name, data, batch, state, **options):
    """The exact sums of the step after a state, on a given batch of records."""
    model = PROBLEMS[name][0]()
    fixture = Fixture(monkeypatch, model, sample_rate=0.5, generator=0, **options)
    draw = pyro_dp.mechanism.sampling.RecordSampler.draw
    with monkeypatch.context() as patch:
        patch.setattr(
            pyro_dp.mechanism.sampling.RecordSampler,
            "draw",
            lambda self, stream: torch.tensor(batch),
        )
        if state is not None:
            fixture.vips.load_state_dict(state)
        torch.manual_seed(0)
        fixture.vips.step(*data)
    assert pyro_dp.mechanism.sampling.RecordSampler.draw is draw
    return fixture.sums[0]


def noisy_state(name):
    """Of a run with noise: a posterior that is not the first one."""
    make, data = PROBLEMS[name]
    vips = VIPS(
        make(),
        accountant=PrivacyAccountant(),
        num_steps=3,
        noise_multiplier=0,
        sample_rate=0.5,
        generator=4,
    )
    vips.run(*data(), progress=False)
    return vips.state_dict()


def with_row(data, row, label=None):
    """The data, with another row for record 4."""
    changed = [x.clone() for x in data]
    changed[0][4] = row
    if label is not None and len(changed) > 1:
        changed[1][4] = label
    return tuple(changed)


OUTLIERS = {
    "1e6": 1e6,
    "-1e6": -1e6,
    "1e200": 1e200,
    "zero": 0.0,
}


@pytest.mark.parametrize("outlier", OUTLIERS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_sensitivity(monkeypatch, name, late, outlier):
    """Neighbouring data sets: a record moves each block by its bound at most, all of them by 1."""
    make, data = PROBLEMS[name][0], PROBLEMS[name][1]()
    state = noisy_state(name) if late else None
    label = 1.0 if name == "logistic" else 1e6
    changed = with_row(data, OUTLIERS[outlier], label)
    with_it = one_sum(monkeypatch, name, data, [1, 4, 8, 20], state)
    without = one_sum(monkeypatch, name, data, [1, 8, 20], state)
    replaced = one_sum(monkeypatch, name, changed, [1, 4, 8, 20], state)
    model = make()
    for each, one, none, other in zip(
        model.statistics.values(), with_it, without, replaced, strict=True
    ):
        limit = each.bound * (1 + 1e-12)
        assert 0 < torch.linalg.vector_norm(one - none) <= limit
        assert torch.linalg.vector_norm(other - none) <= limit
        assert torch.linalg.vector_norm(other - one) <= 2 * limit
    assert scaled_distance(model, with_it, without) <= 1 + 1e-12
    assert scaled_distance(model, replaced, without) <= 1 + 1e-12
    assert scaled_distance(model, replaced, with_it) <= 2 + 1e-12


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", PROBLEMS)
def test_broken_record_contributes_nothing(monkeypatch, name, value):
    """To no block, should a row that is not finite come past the checks."""
    data = PROBLEMS[name][1]()
    row = data[0][4].clone()
    row[0] = value
    monkeypatch.setattr(Records, "require_finite", lambda self: None)
    broken = one_sum(monkeypatch, name, with_row(data, row), [1, 4, 8], None)
    without = one_sum(monkeypatch, name, data, [1, 8], None)
    for one, other in zip(broken, without, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_beyond_the_bound_count_as_if_they_were_on_it(monkeypatch, name):
    model, data = PROBLEMS[name][0](), PROBLEMS[name][1]()
    bound = {"logistic": 1.0, "linear": 2.0, "mixture": 6.0}[name]
    row = torch.nn.functional.normalize(torch.arange(1.0, data[0].shape[1] + 1), dim=0)
    far = one_sum(monkeypatch, name, with_row(data, 1e6 * row), [4], None)
    edge = one_sum(monkeypatch, name, with_row(data, bound * row), [4], None)
    for one, other in zip(far, edge, strict=True):
        torch.testing.assert_close(one, other)
    # The bounds are tight: such a record comes close to all that it may do.
    if name != "linear":
        assert scaled_distance(model, far, [torch.zeros_like(x) for x in far]) > 0.55


@pytest.mark.parametrize("name", PROBLEMS)
def test_outside_the_batch_nothing_matters(monkeypatch, name):
    data = PROBLEMS[name][1]()
    label = 0.0 if name == "logistic" else 1e6
    one = one_sum(monkeypatch, name, data, [1, 8], None)
    other = one_sum(monkeypatch, name, with_row(data, 1e6, label), [1, 8], None)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", PROBLEMS)
def test_microbatches_change_nothing(monkeypatch, name, size):
    """Which holds only if a record's statistics depend on no other record of the batch."""
    data, state = PROBLEMS[name][1](), noisy_state(name)
    batch = list(range(0, 60, 2))
    whole = one_sum(monkeypatch, name, data, batch, state)
    parts = one_sum(monkeypatch, name, data, batch, state, microbatch_size=size)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_local_draws_belong_to_their_records(monkeypatch):
    """One record more leaves the draws of all others as they are."""

    def sums(batch):
        fixture = Fixture(monkeypatch, Totals(), sample_rate=0.5, generator=0)
        monkeypatch.setattr(
            pyro_dp.mechanism.sampling.RecordSampler,
            "draw",
            lambda self, stream: torch.tensor(batch),
        )
        fixture.vips.step(torch.ones(20, 1))
        return fixture.sums[0][1]

    alone, others, all_of_them = sums([4]), sums([1, 8]), sums([1, 4, 8])
    assert alone.norm() > 0.1
    torch.testing.assert_close(all_of_them, alone + others)


def test_joint_noise_has_the_right_scale(monkeypatch):
    """One event of sigma: each of K blocks has noise sqrt(K) sigma times its bound."""
    model = GaussianMixture(3, 12, radius=6.0)
    fixture = Fixture(
        monkeypatch, model, noise_multiplier=1.5, sample_rate=0.3, num_steps=60, generator=0
    )
    torch.manual_seed(0)
    fixture.vips.run(torch.randn(40, 12), progress=False)
    noises = []
    for k, each in enumerate(model.statistics.values()):
        blocks = [r[k] - s[k] for r, s in zip(fixture.released, fixture.sums, strict=True)]
        noises.append(torch.cat(blocks).numpy() / (1.5 * math.sqrt(3) * each.bound))
    for noise in (*noises[1:], np.concatenate(noises)):
        assert stats.kstest(noise, "norm").pvalue > _ALARM
        assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
        assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM


def test_static_noise_has_the_right_scale(monkeypatch):
    """What is released once gets as much of the budget as all steps together."""
    fixture = Fixture(
        monkeypatch, Totals(width=3000), noise_multiplier=1.5, num_steps=9, generator=0
    )
    fixture.vips.run(torch.ones(5, 1), progress=False)
    assert fixture.events == [SubsampledGaussian(0.5)] + 9 * [SubsampledGaussian(1.5)]
    noise = (fixture.released[0][0] - fixture.sums[0][0]).numpy() / (0.5 * 2.0)
    assert stats.kstest(noise, "norm").pvalue > _ALARM
    assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
    assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM


def test_noise_differs_between_releases_and_runs(monkeypatch):
    draws, shared = [], PrivacyAccountant()
    for options in [{}] * 2 + [{"generator": 5, "accountant": shared}] * 2:
        fixture = Fixture(monkeypatch, Totals(width=6), noise_multiplier=1.0, **options)
        fixture.vips.step(torch.ones(5, 1))
        fixture.vips.step(torch.ones(5, 1))
        draws += [r[0] - s[0] for r, s in zip(fixture.released, fixture.sums, strict=True)]
    rounded = {tuple(draw.round(decimals=9).tolist()) for draw in draws}
    assert len(rounded) == len(draws) == 12


def test_seeded_runs_repeat():
    def run():
        torch.manual_seed(0)
        vips = VIPS(
            GaussianMixture(3, 2, radius=6.0),
            accountant=PrivacyAccountant(),
            num_steps=3,
            noise_multiplier=1.0,
            sample_rate=0.5,
            generator=3,
        )
        vips.run(*mixture_data(), progress=False)
        return vips

    one, other = run(), run()
    for name, value in one.state_dict()["statistics"]["values"].items():
        assert torch.equal(value, other.state_dict()["statistics"]["values"][name])
    assert any("seeded" in note for note in one.accountant.notes)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_divides_by_the_public_rate(monkeypatch, sampling):
    """Estimates are sums / rate for every batch size, an empty batch included."""
    fixture = Fixture(
        monkeypatch,
        LogisticRegression(3),
        accountant=PrivacyAccountant(neighboring="replace_one"),
        sampling=sampling,
        sample_rate=0.055,
        step_size=(0.0, 0.0),
        num_steps=60,
        generator=0,
    )
    batches = []
    draw = pyro_dp.mechanism.sampling.RecordSampler.draw
    monkeypatch.setattr(
        pyro_dp.mechanism.sampling.RecordSampler,
        "draw",
        lambda self, stream: batches.append(draw(self, stream)) or batches[-1],
    )
    rate = 0.055 if sampling == "poisson" else 3 / 60
    data = logistic_data()
    for _ in range(60):
        fixture.vips.step(*data)
        values = fixture.vips.state_dict()["statistics"]["values"]
        for value, total in zip(values.values(), fixture.sums[-1], strict=True):
            torch.testing.assert_close(value, total / rate)
    sizes = {len(batch) for batch in batches}
    assert sizes == {3} if sampling == "fixed" else 0 in sizes and len(sizes) > 3
    assert set(fixture.events) == {SubsampledGaussian(0.0, rate, sampling)}
    assert fixture.vips.accountant.num_releases == 60


def test_an_empty_batch_pays_and_is_noisy(monkeypatch):
    fixture = Fixture(
        monkeypatch, LogisticRegression(3), noise_multiplier=1.0, sample_rate=1e-9, generator=0
    )
    fixture.vips.step(*logistic_data())
    assert all(torch.equal(block, torch.zeros_like(block)) for block in fixture.sums[0])
    assert all(block.abs().min() > 0 for block in fixture.released[0])
    assert fixture.vips.accountant.ledger == ((SubsampledGaussian(1.0, 1e-9), 1),)


def test_statistics_are_mixed_with_the_step_sizes(monkeypatch):
    """s <- (1 - rho_t) s + rho_t s_hat, and the noise's standard deviation with it."""
    fixture = Fixture(
        monkeypatch,
        Totals(),
        noise_multiplier=1.5,
        num_steps=4,
        step_size=(2.0, 0.7),
        generator=0,
    )
    fixture.vips.run(torch.ones(5, 1), progress=False)
    once, each = torch.zeros(4), torch.zeros(2, 3)
    kept, variance = 1.0, 0.0
    for t, (released,) in enumerate(fixture.released[1:], start=1):
        rho = (2.0 + t) ** -0.7
        once = (1 - rho) * once + rho * fixture.released[0][0]
        each = (1 - rho) * each + rho * released.reshape(2, 3)
        kept *= 1 - rho
        variance = (1 - rho) ** 2 * variance + rho**2 * (1.5 * 0.5) ** 2
    values, noise, size = fixture.vips._posterior
    torch.testing.assert_close(values["once"], once)
    torch.testing.assert_close(values["each"], each)
    assert math.isclose(noise["once"], (1 - kept) * 1.5 / 2 * 2.0)
    assert math.isclose(noise["each"], math.sqrt(variance))
    assert size == 5


def test_the_model_is_told_how_noisy_a_joint_release_is(monkeypatch):
    """Each of two blocks has sqrt(2) sigma times its bound, divided by the rate."""
    fixture = Fixture(
        monkeypatch, Totals(), noise_multiplier=1.5, sample_rate=0.25, step_size=(0.0, 0.0)
    )
    fixture.vips.run(torch.ones(5, 1), progress=False)
    _, noise, _ = fixture.vips._posterior
    sd = 1.5 * math.sqrt(2) / 0.25
    assert math.isclose(noise["once"], 2.0 * sd) and math.isclose(noise["each"], 0.5 * sd)


def test_calibrates_steps_and_static_release_to_the_budget():
    accountant = PrivacyAccountant(epsilon=1.0)
    vips = VIPS(LogisticRegression(3), accountant=accountant, num_steps=16)
    data = logistic_data()
    assert len(vips.run(*data, progress=False)) == 16
    sigma = vips.noise_multiplier
    assert accountant.ledger == (
        (SubsampledGaussian(sigma / 4), 1),
        (SubsampledGaussian(sigma), 16),
    )
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        vips.step(*data)
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        vips.run(*data, progress=False)


@pytest.mark.parametrize("engine", ["rdp", "basic"])
def test_calibrates_with_every_engine(engine):
    accountant = PrivacyAccountant(epsilon=1.0, engine=engine)
    VIPS(Totals(), accountant=accountant, num_steps=4).run(torch.ones(5, 1), progress=False)
    assert 0.995 < accountant.get_epsilon() <= 1.0


def test_one_step_with_a_static_release_is_two_events():
    accountant = PrivacyAccountant(epsilon=1.0)
    vips = VIPS(Totals(), accountant=accountant, num_steps=1)
    vips.step(torch.ones(5, 1))
    assert accountant.ledger == ((SubsampledGaussian(vips.noise_multiplier), 2),)
    assert 0.995 < accountant.get_epsilon() <= 1.0


def test_what_is_static_only_is_released_once():
    accountant = PrivacyAccountant(epsilon=1.0)
    model = LinearRegression(3, x_bound=2.0, y_bound=5.0)
    with pytest.raises(ConfigurationError, match="num_steps"):
        VIPS(model, accountant=accountant, num_steps=2)
    vips = VIPS(model, accountant=accountant, num_steps=1)
    vips.run(*linear_data(), progress=False)
    assert accountant.ledger == ((SubsampledGaussian(vips.noise_multiplier), 1),)
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded):
        vips.step(*linear_data())
    plain = fitted(model, linear_data(), 1)
    with pytest.raises(ConfigurationError, match="no second step"):
        plain.step(*linear_data())


@pytest.mark.parametrize("name", _STATICS)
def test_batches_release_static_statistics_with_each_step(name):
    make, data = PROBLEMS[name]
    accountant = PrivacyAccountant(epsilon=1.0)
    vips = VIPS(make(), accountant=accountant, num_steps=4, sample_rate=0.5)
    vips.run(*data(), progress=False)
    assert accountant.ledger == ((SubsampledGaussian(vips.noise_multiplier, 0.5), 4),)


def test_budget_is_checked_before_the_release():
    """The first step's two releases are refused together, later steps one by one.

    One release of sigma 3.73 costs epsilon 1: the static one, of sigma 4, would fit.
    """
    accountant = PrivacyAccountant(epsilon=1.0)
    vips = VIPS(Totals(), accountant=accountant, num_steps=4, noise_multiplier=8.0)
    with pytest.raises(PrivacyBudgetExceeded):
        vips.step(torch.ones(5, 1))
    assert accountant.num_releases == 0
    assert accountant.get_epsilon() == 0.0
    vips = VIPS(Totals(), accountant=accountant, num_steps=4, noise_multiplier=12.0)
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(1000):
            vips.step(torch.ones(5, 1))
    before = vips.state_dict()
    with pytest.raises(PrivacyBudgetExceeded):
        vips.step(torch.ones(5, 1))
    after = vips.state_dict()
    assert before["accountant"] == after["accountant"] and before["steps"] == after["steps"]
    for name, value in before["statistics"]["values"].items():
        assert torch.equal(value, after["statistics"]["values"][name])
    assert accountant.get_epsilon() <= 1.0


def test_a_budget_refuses_a_run_without_noise():
    vips = VIPS(Totals(), accountant=PrivacyAccountant(1.0), num_steps=1, noise_multiplier=0)
    with pytest.raises(PrivacyBudgetExceeded):
        vips.step(torch.ones(5, 1))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_round_trip():
    """Three steps, and three more after loading, are six; nothing static is released again."""
    data = logistic_data()

    def new():
        return VIPS(
            LogisticRegression(3), accountant=PrivacyAccountant(), num_steps=6, noise_multiplier=0
        )

    whole, first, second = new(), new(), new()
    for _ in range(6):
        whole.step(*data)
    for _ in range(3):
        first.step(*data)
    second.load_state_dict(through_a_file(first.state_dict()))
    torch.testing.assert_close(
        second.posterior()["weights"].mean, first.posterior()["weights"].mean
    )
    second.run(*data, progress=False)
    assert torch.equal(second.posterior()["weights"].mean, whole.posterior()["weights"].mean)
    assert second.accountant.ledger == whole.accountant.ledger
    assert second.accountant.num_releases == 7


def test_state_of_a_calibrated_run():
    data = logistic_data()
    first = VIPS(LogisticRegression(3), accountant=PrivacyAccountant(1.0), num_steps=4)
    fresh = first.state_dict()
    first.step(*data)
    second = VIPS(LogisticRegression(3), accountant=PrivacyAccountant(1.0), num_steps=4)
    second.load_state_dict(through_a_file(first.state_dict()))
    second.run(*data, progress=False)
    assert second.accountant.num_releases == 5
    assert 0.995 < second.accountant.get_epsilon() <= 1.0
    third = VIPS(LogisticRegression(3), accountant=PrivacyAccountant(1.0), num_steps=4)
    third.load_state_dict(through_a_file(fresh))
    third.step(*data)


def test_the_number_of_records_is_a_constant():
    data = logistic_data()
    vips = fitted(LogisticRegression(3), data, 1)
    with pytest.raises(ModelError, match="number of records"):
        vips.step(*(x[:-1] for x in data))


def test_resumed_run_does_not_repeat_noise(monkeypatch):
    fixture = Fixture(monkeypatch, Totals(), noise_multiplier=1.0, generator=0)
    fixture.vips.step(torch.ones(5, 1))
    state = fixture.vips.state_dict()
    other = Fixture(monkeypatch, Totals(), noise_multiplier=1.0, generator=0)
    other.vips.load_state_dict(state)
    other.vips.step(torch.ones(5, 1))
    noises = [
        (r[-1] - s[-1]).tolist()
        for one in (fixture, other)
        for r, s in zip(one.released, one.sums, strict=True)
    ]
    assert len({noise[0] for noise in noises}) == len(noises) == 3


def test_loading_never_lowers_the_ledger():
    vips = VIPS(Totals(), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1.0)
    state = vips.state_dict()
    vips.step(torch.ones(5, 1))
    with pytest.raises(PrivacyError):
        vips.load_state_dict(state)
    assert vips.accountant.num_releases == 2 and vips._steps == 1


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"steps": -1},
        {"size": 0},
        {"size": "5"},
        {"noise_multiplier": 2.0},
        {"statistics": None},
        {"statistics": {"values": {}, "noise": {}}},
        {"statistics": {"values": {"once": torch.ones(3)}, "noise": {"once": 1.0}}},
        {"static": {"values": {"each": torch.ones(2, 3)}, "noise": {"each": 1.0}}},
        {"static": 5},
        {"accountant": {}},
    ],
)
def test_damaged_state(change):
    def new():
        return VIPS(Totals(), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1.0)

    vips = new()
    vips.step(torch.ones(5, 1))
    loaded = new()
    with pytest.raises(ConfigurationError):
        loaded.load_state_dict(vips.state_dict() | change)
    assert loaded._steps == 0 and loaded._mixed is None
    assert loaded.accountant.num_releases == 0
    for state in (None, {}, {"version": 1}):
        with pytest.raises(ConfigurationError):
            loaded.load_state_dict(state)


def test_pickling_would_carry_the_data():
    vips = VIPS(Totals(), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(vips)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": lambda x: x}, "model"),
        ({"accountant": None}, "accountant"),
        ({"num_steps": None}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": None}, "noise_multiplier"),
        ({"sample_rate": None}, "sample_rate"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"sampling": "shuffle"}, "sampling"),
        ({"sampling": "fixed"}, "sampling"),
        ({"sampling": "full", "sample_rate": 0.5}, "sample_rate"),
        ({"step_size": 0.7}, "step_size"),
        ({"step_size": (1.0, 2.0, 3.0)}, "step_size"),
        ({"step_size": (-1.0, 0.7)}, "tau0"),
        ({"step_size": (1.0, 1.1)}, "kappa"),
        ({"step_size": (1.0, math.nan)}, "kappa"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"generator": "seed"}, "generator"),
        ({"secure": 1}, "secure"),
        ({"model": Totals(bounds=(math.inf, 1.0))}, "infinite bound"),
    ],
)
def test_bad_settings(options, text):
    settings = {"accountant": PrivacyAccountant(), "num_steps": 5, "noise_multiplier": 1.0}
    settings = {"model": Totals()} | settings | options
    with pytest.raises(ConfigurationError, match=text):
        VIPS(settings.pop("model"), **settings)


def test_an_infinite_bound_needs_no_noise():
    vips = fitted(Totals(bounds=(math.inf, math.inf)), (torch.full((5, 1), 1e3),), 2)
    assert torch.equal(vips._posterior[0]["once"], torch.full((4,), 5e3))


@pytest.mark.parametrize("bad", [dict(shape=(0,), bound=1.0), dict(shape=(2,), bound=0.0)])
def test_bad_statistics(bad):
    with pytest.raises(ConfigurationError, match="Statistic"):
        Statistic(**bad)


X, Y = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)


def changed(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[2] = value
    return tensor


BAD_DATA = [
    ("logistic", (X,)),
    ("logistic", (X, Y, Y)),
    ("logistic", (X[:, :2], Y)),
    ("logistic", (X[:, 0], Y)),
    ("logistic", (X, Y[:5])),
    ("logistic", (X, Y.unsqueeze(1))),
    ("logistic", (X, changed(Y, 0.5))),
    ("logistic", (X, changed(Y, -1.0))),
    ("logistic", (X, changed(Y, math.nan))),
    ("logistic", (changed(X, math.nan), Y)),
    ("logistic", (changed(X, math.inf), Y)),
    ("logistic", (X.to(torch.complex128), Y)),
    ("logistic", (X.numpy().astype(str), Y.numpy())),
    ("logistic", (X.tolist(), Y)),
    ("logistic", (X[:0], Y[:0])),
    ("logistic", ()),
    ("linear", (X,)),
    ("linear", (X[:, :2], Y)),
    ("linear", (X, Y[:5])),
    ("linear", (X, changed(Y, math.inf))),
    ("linear", (X, Y.to(torch.complex128))),
    ("mixture", (X,)),
    ("mixture", (X[:, :2], Y)),
    ("mixture", (X[:, 0],)),
    ("mixture", (changed(X[:, :2].clone(), math.nan),)),
    ("mixture", (torch.tensor(1.0),)),
]


@pytest.mark.parametrize(("name", "data"), BAD_DATA)
def test_bad_data(name, data):
    """Refused before anything is spent, in words that show no value."""
    accountant = PrivacyAccountant(1.0)
    vips = VIPS(PROBLEMS[name][0](), accountant=accountant, num_steps=1)
    with pytest.raises(ModelError) as error:
        vips.step(*data)
    assert accountant.num_releases == 0
    assert not any(text in str(error.value) for text in ("0.5", "-1.0"))
    with pytest.raises(ConfigurationError, match="first step"):
        vips.posterior()
    with pytest.raises(ConfigurationError, match="first step"):
        vips.guide()


def test_changed_data_are_checked_again():
    x, y = logistic_data()
    vips = VIPS(
        LogisticRegression(3), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1
    )
    vips.step(x, y)
    y[3] = 7.0
    with pytest.raises(ModelError, match="'y' was changed in place"):
        vips.step(x, y)
    assert vips.accountant.num_releases == 2


def test_data_of_later_steps():
    """The same numbers in other memory are the same data; a batch, or others, are not."""
    x, y = logistic_data()
    vips = VIPS(
        LogisticRegression(3), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1
    )
    vips.step(x, y)
    vips.step(x.clone(), y.numpy())
    for other in ((x[:9], y[:9]), (x / 2, y)):
        with pytest.raises(ModelError, match="not those of the first step|number of records"):
            vips.step(*other)
    assert vips.accountant.num_releases == 3  # of which one is that of the static statistics


def test_an_error_in_the_e_step_tells_no_value():
    class Broken(Totals):
        def expected_statistics(self, posterior, draws, x):
            raise ValueError(f"the data are {x}")

    accountant = PrivacyAccountant()
    vips = VIPS(Broken(), accountant=accountant, num_steps=5, noise_multiplier=1.0, sample_rate=0.9)
    with pytest.raises(ModelError, match="E-step") as error:
        vips.step(torch.full((50, 1), 77.0))
    assert "77" not in str(error.value) and accountant.num_releases == 0


def test_a_statistic_of_another_shape_is_refused():
    class Broken(Totals):
        def expected_statistics(self, posterior, draws, x):
            return {"each": x[:, :1]}

    vips = VIPS(Broken(), accountant=PrivacyAccountant(), num_steps=5, noise_multiplier=1.0)
    with pytest.raises(ModelError, match="each"):
        vips.step(torch.ones(5, 1))


def test_a_posterior_fails_by_name(monkeypatch):
    make, data = PROBLEMS["logistic"]
    vips = VIPS(make(), accountant=PrivacyAccountant(), num_steps=2, noise_multiplier=1.0)
    vips.step(*data())

    def fail(*args):
        raise torch.linalg.LinAlgError

    uses = {
        "posterior": lambda: vips.step(*data()),
        "marginals": vips.posterior,
        "guide": vips.guide,
    }
    for name, use in uses.items():
        with monkeypatch.context() as patch:
            patch.setattr(type(vips.model), name, fail)
            with pytest.raises(ConfigurationError, match="posterior left the finite numbers"):
                use()
