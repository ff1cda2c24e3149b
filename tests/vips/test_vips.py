"""VIPS: noise, sampling, sensitivity, ledger, budget, mixing, state, bad settings and data."""

import math

import pytest
import torch
from contract import InferenceContract, through_a_file
from record_draws import by_index
from releases import batches, take
from scipy import stats
from vips_problems import (
    ALL,
    PIXELS,
    PROBLEMS,
    WORDS,
    Fixture,
    Totals,
    fitted,
    linear_data,
    logistic_data,
    scaled_distance,
)

from pyro_dp import (
    VIPS,
    ConfigurationError,
    FixedSizeSampling,
    ModelError,
    Noise,
    PoissonSampling,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyWarning,
    SubsampledGaussian,
)
from pyro_dp.vips import LinearRegression, LogisticRegression, Statistic

_ALARM = 1e-8


class TestContract(InferenceContract):
    variants = kinds = tuple(ALL)
    whole = {}  # on all records, where what is static is released once, before the first step
    first = 2
    bad_settings = (
        ({"model": lambda x: x}, "model"),
        ({"model": Totals(bounds=(math.inf, 1.0))}, "infinite bound"),
        ({"num_steps": None}, "num_steps"),
        ({"sampling": None}, "needs a rate"),
        ({"step_size": 0.7}, "step_size"),
        ({"step_size": (1.0, 2.0, 3.0)}, "step_size"),
        ({"step_size": (-1.0, 0.7)}, "tau0"),
        ({"step_size": (1.0, 1.1)}, "kappa"),
        ({"step_size": (1.0, math.nan)}, "kappa"),
    )

    def make(self, variant, model=None, **options):
        return VIPS(ALL[variant][0]() if model is None else model, **options)

    def data(self, variant):
        return tuple(x.clone() for x in ALL[variant][1]())

    def result(self, vips):
        return vips.state_dict()["statistics"]["values"]

    def neighbours(self, variant, data):
        one, none = torch.eye(WORDS), torch.zeros(WORDS)
        huge = 1e300 * one[2] + 1e299
        records = {  # documents of a repeated word reach the bound
            "documents": [one[2], 50 * one[7], huge, none + 1e308, none + 1, none],
            "images": [one[4, :PIXELS], none[:PIXELS], none[:PIXELS] + 1],
        }
        for record in records.get(variant, ()):
            changed = data[0].clone()
            changed[4] = record
            yield (changed,)
        if variant in records:
            return
        for changed in super().neighbours(variant, data):
            if variant != "mixture" and not torch.equal(changed[0][4], changed[0][5]):
                changed[1][4] = 1.0 if variant == "logistic" else 1e6
            yield changed

    def damage(self, state):
        values, noise = (state["statistics"][part] for part in ("values", "noise"))
        name, value = next(iter(values.items()))
        yield {"size": 0}, "size"
        yield {"size": "5"}, "size"
        yield {"static": 5}, "statistics"
        yield {"static": {"values": values | {"other": value}, "noise": noise}}, "statistics"
        for statistics in (
            None,
            {"values": {}, "noise": {}},
            {"values": values, "noise": {}},
            {"values": values | {name: value[..., None]}, "noise": noise},
            {"values": {name: value}, "noise": noise},
        ):
            yield {"statistics": statistics}, "statistics"
            yield {"start": statistics or 5}, "statistics"

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_rows_beyond_the_bound_count_as_if_they_were_on_it(self, name):
        data, model = self.data(name), PROBLEMS[name][0]()
        bound = {"logistic": 1.0, "linear": 2.0, "mixture": 6.0}[name]
        row = torch.nn.functional.normalize(torch.arange(1.0, data[0].shape[1] + 1), dim=0)

        def sums(length):
            changed = data[0].clone()
            changed[4] = length * row
            return self.sums(name, (changed, *data[1:]), [4])[1]

        far, edge = sums(1e6), sums(bound)
        for one, other in zip(far, edge, strict=True):
            torch.testing.assert_close(one, other)
        # The bounds are tight: such a record comes close to all that it may do.
        if name != "linear":
            assert scaled_distance(model, far, [torch.zeros_like(x) for x in far]) > 0.55


def test_local_draws_belong_to_their_records(monkeypatch):
    """Each record has its own in the sum, whichever others take part."""
    by_index(monkeypatch)

    def sums(batch):
        fixture = Fixture(monkeypatch, Totals(), sampling=0.5, noise=Noise(0, source=0))
        take(monkeypatch, batch)
        fixture.vips.step(torch.ones(20, 1))
        return fixture.sums[0][1]

    alone, others, all_of_them = sums([4]), sums([1, 8]), sums([1, 4, 8])
    assert alone.norm() > 0.1
    torch.testing.assert_close(all_of_them, alone + others)


def test_static_noise_has_the_right_scale(monkeypatch):
    """The single release gets as much of the budget as all steps together."""
    fixture = Fixture(monkeypatch, Totals(width=3000), noise=Noise(1.5, source=0), num_steps=9)
    fixture.vips.run(torch.ones(5, 1), progress=False)
    assert fixture.events == [SubsampledGaussian(0.5)] + 9 * [SubsampledGaussian(1.5)]
    noise = (fixture.released[0][0] - fixture.sums[0][0]).numpy() / (0.5 * 2.0)
    assert stats.kstest(noise, "norm").pvalue > _ALARM
    assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
    assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM


@pytest.mark.long
@pytest.mark.parametrize("sampling", [PoissonSampling(0.055), FixedSizeSampling(0.055)])
def test_divides_by_the_public_rate(monkeypatch, sampling):
    """Estimates are sums / rate for every batch size, an empty batch included."""
    fixture = Fixture(
        monkeypatch,
        LogisticRegression(3),
        accountant=PrivacyAccountant(neighboring="replace_one"),
        sampling=sampling,
        step_size=(0.0, 0.0),
        num_steps=60,
        noise=Noise(0, source=0),
    )
    drawn = batches(monkeypatch)
    rate = 0.055 if sampling.kind == "poisson" else 3 / 60
    data = logistic_data()
    for _ in range(60):
        fixture.vips.step(*data)
        values = fixture.vips.state_dict()["statistics"]["values"]
        for value, total in zip(values.values(), fixture.sums[-1], strict=True):
            torch.testing.assert_close(value, total / rate)
    sizes = {len(batch) for batch in drawn}
    assert sizes == {3} if sampling.kind == "fixed" else 0 in sizes and len(sizes) > 3
    assert set(fixture.events) == {SubsampledGaussian(0.0, rate, sampling.kind)}
    assert fixture.vips.accountant.num_releases == 60


def test_statistics_are_mixed_with_the_step_sizes(monkeypatch):
    """s <- (1 - rho_t) s + rho_t s_hat, and the noise's standard deviation with it."""
    fixture = Fixture(
        monkeypatch, Totals(), noise=Noise(1.5, source=0), num_steps=4, step_size=(2.0, 0.7)
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
    values, noise, size = fixture.vips._found.posterior
    torch.testing.assert_close(values["once"], once)
    torch.testing.assert_close(values["each"], each)
    assert math.isclose(noise["once"], (1 - kept) * 1.5 / 2 * 2.0)
    assert math.isclose(noise["each"], math.sqrt(variance))
    assert size == 5


def test_the_model_is_told_how_noisy_a_joint_release_is(monkeypatch):
    """Each of two blocks has sqrt(2) sigma times its bound, divided by the rate."""
    fixture = Fixture(monkeypatch, Totals(), noise=1.5, sampling=0.25, step_size=(0.0, 0.0))
    fixture.vips.run(torch.ones(5, 1), progress=False)
    _, noise, _ = fixture.vips._found.posterior
    sd = 1.5 * math.sqrt(2) / 0.25
    assert math.isclose(noise["once"], 2.0 * sd) and math.isclose(noise["each"], 0.5 * sd)
    assert [block.bound for block in fixture.blocks[0]] == [2.0, 0.5]


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


@pytest.mark.parametrize(("engine", "steps"), [("rdp", 4), ("pld", 1)])
def test_calibrates_both_releases(engine, steps):
    """A state from before the first step changes nothing."""
    accountant = PrivacyAccountant(epsilon=1.0, engine=engine)
    vips = VIPS(Totals(), accountant=accountant, num_steps=steps)
    vips.load_state_dict(through_a_file(vips.state_dict()))
    vips.run(torch.ones(5, 1), progress=False)
    assert accountant.num_releases == steps + 1
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


def test_budget_is_checked_before_the_release():
    """The first step's two releases are refused together, later steps one by one.

    One release of sigma 3.73 costs epsilon 1: the static one, of sigma 4, would fit.
    """
    accountant = PrivacyAccountant(epsilon=1.0)
    vips = VIPS(Totals(), accountant=accountant, num_steps=4, noise=8.0)
    with pytest.raises(PrivacyBudgetExceeded):
        vips.step(torch.ones(5, 1))
    assert accountant.num_releases == 0
    assert accountant.get_epsilon() == 0.0


def test_an_infinite_bound_needs_no_noise():
    vips = fitted(Totals(bounds=(math.inf, math.inf)), (torch.full((5, 1), 1e3),), 2)
    assert torch.equal(vips._found.posterior[0]["once"], torch.full((4,), 5e3))


@pytest.mark.parametrize("bad", [dict(shape=(0,), bound=1.0), dict(shape=(2,), bound=0.0)])
def test_bad_statistics(bad):
    with pytest.raises(ConfigurationError, match="Statistic"):
        Statistic(**bad)


X, Y = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
SHAPE, NUMBERS = "must be a tensor of shape", "must hold real numbers"
BINARY, COUNTS = "must hold zeros and ones", "must hold whole numbers >= 0"
BAD_DATA = [
    ("logistic", (), "takes tensors"),
    ("logistic", (X,), "takes the arguments x and y"),
    ("logistic", (X, Y, Y), "argument"),
    ("logistic", (X[:, :2], Y), SHAPE),
    ("logistic", (X[:, 0], Y), SHAPE),
    ("logistic", (X, Y[:5]), "the same N"),
    ("logistic", (X, Y.unsqueeze(1)), SHAPE),
    ("logistic", (X, Y + 0.5), BINARY),
    ("logistic", (X, Y - 1.0), BINARY),
    ("logistic", (X, Y + math.nan), "NaN"),
    ("logistic", (X.to(torch.complex128), Y), NUMBERS),
    ("logistic", (X.numpy().astype(str), Y.numpy()), "takes tensors|numbers"),
    ("logistic", (iter(X.tolist()), Y), "read only once"),
    ("logistic", (X[:0], Y[:0]), "takes tensors"),
    ("linear", (X, Y + math.inf), "infinite"),
    ("linear", (X, Y.to(torch.complex128)), NUMBERS),
    ("mixture", (X[:, :2], Y), "takes|argument"),
    ("mixture", (X[:, 0],), SHAPE),
    ("mixture", (torch.tensor(1.0),), "takes tensors"),
    ("documents", (-torch.eye(WORDS),), COUNTS),
    ("documents", (torch.eye(WORDS) / 2,), COUNTS),
    ("documents", (torch.ones(5, WORDS + 1),), "12 columns"),
    ("documents", (torch.ones(5, WORDS), torch.ones(5)), "argument counts"),
    ("images", (torch.full((5, PIXELS), 255.0),), BINARY),
    ("images", (torch.ones(5, 3, 3),), "9 columns"),
    ("images", (torch.ones(5, PIXELS), torch.ones(5)), "argument images"),
]


@pytest.mark.parametrize(("name", "data", "said"), BAD_DATA)
def test_bad_data(name, data, said):
    """The error comes before anything is spent, and shows no value."""
    accountant = PrivacyAccountant(1.0)
    vips = VIPS(ALL[name][0](), accountant=accountant, num_steps=1)
    with pytest.raises(ModelError, match=said) as error:
        vips.step(*data)
    assert accountant.num_releases == 0
    assert not any(text in str(error.value) for text in ("0.5", "-1.0", "255"))
    for use in (vips.posterior, vips.guide):
        with pytest.raises(ConfigurationError, match="first step"):
            use()


def test_data_with_moments_of_their_own():
    x = torch.rand(300, 2)
    x, y = (x - x.mean(0)) / x.std(0), torch.zeros(300)
    accountant = PrivacyAccountant()
    vips = VIPS(LogisticRegression(2), accountant=accountant, num_steps=2, noise=5.0)
    with pytest.warns(PrivacyWarning, match="Argument 'x' has numbers of mean 0"):
        vips.run(x, y, progress=False)
    assert not accountant.notes and "mean 0" not in accountant.report()


def test_data_of_later_steps():
    """The same numbers in other memory are the same data; a batch, or others, are not."""
    x, y = logistic_data()
    vips = VIPS(LogisticRegression(3), accountant=PrivacyAccountant(), num_steps=5, noise=1)
    vips.step(x, y)
    vips.step(x.clone(), y.numpy())
    for other, said in (((x[:9], y[:9]), "number of records"), ((x / 2, y), "those of the first")):
        with pytest.raises(ModelError, match=said):
            vips.step(*other)
    y[3] = 7.0
    with pytest.raises(ModelError, match="'y' was overwritten"):
        vips.step(x, y)
    assert vips.accountant.num_releases == 3  # one is that of the static statistics


def test_an_error_in_the_e_step_tells_no_value(monkeypatch):
    """The package's own models get many records at a time, without isolation."""

    def fail(self, posterior, draws, x, y):
        raise ValueError(f"the data are {y}")

    x, y = logistic_data()
    accountant = PrivacyAccountant()
    own = dict(accountant=accountant, num_steps=5, noise=1.0, sampling=0.9)
    vips = VIPS(LogisticRegression(x.shape[1]), **own)
    vips.step(x, y)
    releases = accountant.num_releases
    monkeypatch.setattr(LogisticRegression, "expected_statistics", fail)
    with pytest.raises(ModelError, match="E-step") as error:
        vips.step(x, y)
    assert "tensor" not in str(error.value) and accountant.num_releases == releases


def test_a_posterior_fails_by_name(monkeypatch):
    make, data = PROBLEMS["logistic"]
    vips = VIPS(make(), accountant=PrivacyAccountant(), num_steps=2, noise=1.0)
    exact = VIPS(make(), accountant=PrivacyAccountant(), num_steps=2, noise=0)
    for each in (vips, exact):
        each.step(*data())

    def fail(*args):
        raise torch.linalg.LinAlgError

    uses = {
        "posterior": lambda: vips.step(*data()),
        "marginals": vips.posterior,
        "guide": exact.guide,  # with noise it is made of the marginals
    }
    for name, use in uses.items():
        with monkeypatch.context() as patch:
            patch.setattr(type(vips.model), name, fail)
            with pytest.raises(ConfigurationError, match="posterior left the finite numbers"):
                use()
