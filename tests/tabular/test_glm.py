"""A regression from a frame: its model, its records, its scale, and missing values."""

import json
import re

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import constraints, transform_to

from pyro_dp import ConfigurationError, Evidence, Noise, PrivacyAccountant, PrivacyError
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.records.global_draw import Latent
from pyro_dp.tabular import Binary, Category, Count, Number, PrivateGLM, Regression, Schema

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::pyro_dp.{name}Warning")
    for name in ("NotPrivate", "Convergence", "Clipping")
]
COLUMNS = {
    "age": Number(20, 80),
    "chronic": Binary(),
    "income": Category(("low", "high")),
    "clinic": Category(("a", "b", "c", "d")),
    "visits": Count(0, 40),
    "any": Binary(),
    "cost": Number(-100, 300),
    "severity": Category(("none", "some", "bad"), ordered=True),
}
TRUTH = {"Intercept": 0.3, "age": 0.02, "chronic[T.True]": 0.5, "income[T.high]": -0.4}


def frame(units=120, seed=0, each=3):
    """Up to three rows a person; outcomes of all families have the same linear predictor."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(units), rng.integers(1, each + 1, size=units))
    n = len(person)
    found = pd.DataFrame(
        {
            "person": person,
            "age": rng.uniform(20, 80, n),
            "chronic": rng.random(n) < 0.4,
            "income": rng.choice(["low", "high"], n),
            "clinic": rng.choice(["a", "b", "c"], n),
        }
    )
    eta = 0.3 + 0.02 * (found.age - 50) + 0.5 * found.chronic - 0.4 * (found.income == "high")
    found["visits"] = rng.poisson(np.exp(eta))
    found["any"] = rng.random(n) < 1 / (1 + np.exp(-eta))
    found["cost"] = 100 + 60 * eta + rng.normal(0, 40, n)
    cut = np.digitize(eta + rng.logistic(size=n), [-0.5, 1.0])
    found["severity"] = np.array(["none", "some", "bad"])[cut]
    return found


def schema(*names, unit=True, **other):
    columns = {name: (COLUMNS | other)[name] for name in names}
    return Schema(columns, **(dict(unit="person", max_rows=3) if unit else {}))


def without_noise(*args, **kwargs):
    accountant = PrivacyAccountant(epsilon=None, delta=1e-5)
    return PrivateGLM(*args, **dict(noise=0.0, accountant=accountant) | kwargs)


def private(*args, epsilon=20.0, noise=0, **kwargs):
    accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
    return PrivateGLM(*args, accountant=accountant, noise=Noise(source=noise), **kwargs)


def fitted(glm, data):
    found = glm.fit(data[["person", *glm.schema.names]], progress=False)
    assert glm.schema.note in glm.accountant.notes  # the protected unit, and the assumed bounds
    return found


def tensors(glm, data):
    """Arguments of its model."""
    return glm._regression.tensors(data[["person", *glm.schema.names]])


TABLE = ("mean", "sd", "lower", "upper", "privacy")
MAIN = ("age", "chronic", "income")
RIGHT = "age + chronic + income"


def log_joint(model, args, values):
    trace = poutine.trace(poutine.condition(model, values)).get_trace(*args)
    return trace.log_prob_sum()


def test_the_model_is_the_one_by_hand():
    """Poisson, groups, rows of persons: the same log density at the same latents."""
    glm = without_noise(
        schema(*MAIN, "clinic", "visits"), f"visits ~ {RIGHT}", family="poisson", group="clinic"
    )
    data = frame()
    args = tensors(glm, data)

    def by_hand(x, y, observed, group):
        b = pyro.sample("b", dist.Normal(0.0, torch.tensor([5.0, 2.5, 2.5, 2.5])).to_event(1))
        root = 0.5 * torch.eye(4)
        u = pyro.sample("u", dist.MultivariateStudentT(4.0, torch.zeros(4), root))
        rate = (x @ b + u[group]).exp()
        pyro.factor("y", torch.where(observed, dist.Poisson(rate).log_prob(y), 0.0).sum())

    b, u = torch.tensor([0.3, 0.2, -0.1, 0.4]), torch.tensor([0.1, -0.2, 0.3, 0.0])
    expected = log_joint(by_hand, args, {"b": b, "u": u})
    found = log_joint(glm.model, args, {"coefficients": b, "clinic": u})
    torch.testing.assert_close(found, expected)
    x, y, observed, _ = args
    assert observed.sum() == len(data) == (y[observed] >= 0).sum()
    wanted = torch.stack(
        [
            torch.ones(len(data)),
            torch.tensor((data["age"].to_numpy() - 50) / 30),
            torch.tensor(data["chronic"].to_numpy(float)),
            torch.tensor((data["income"] == "high").to_numpy(float)),
        ],
        dim=1,
    )
    torch.testing.assert_close(x[observed], wanted)


def test_print_shows_code_that_runs():
    glm = without_noise(schema(*MAIN, "any"), f"any ~ {RIGHT}", family="logistic")
    names = {"torch": torch, "pyro": pyro, "dist": dist}
    exec(str(glm), names)
    args = tensors(glm, frame())
    values = {"coefficients": torch.tensor([0.3, 0.2, -0.1, 0.4])}
    assert log_joint(names["model"], args, values) == log_joint(glm.model, args, values)


def by_newton(data, y, kind, terms=MAIN, offset=0.0):
    """Mode and standard deviations in the user's units, by an implementation of its own."""
    found = data.assign(one=1.0, age=(data.age - 50) / 30, income=data.income == "high")
    x = found[["one", *terms]].to_numpy(float)
    b, precision = np.zeros(x.shape[1]), np.diag(1 / np.array([5.0, *[2.5] * len(terms)]) ** 2)
    for _ in range(50):
        eta = x @ b + offset
        mean = np.exp(eta) if kind == "poisson" else 1 / (1 + np.exp(-eta))
        weight = mean if kind == "poisson" else mean * (1 - mean)
        hessian = x.T @ (x * weight[:, None]) + precision
        b = b + np.linalg.solve(hessian, x.T @ (y - mean) - precision @ b)
    back = np.eye(len(b))
    back[0, 1], back[1, 1] = -50 / 30, 1 / 30
    return back @ b, np.sqrt(np.diag(back @ np.linalg.inv(hessian) @ back.T))


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "family"), [("visits", "poisson"), ("any", "logistic")])
def test_without_noise_it_is_the_posterior(outcome, family):
    """In the user's own units: within a tenth of a standard deviation of mode and curvature."""
    glm = without_noise(schema(*MAIN, outcome), f"{outcome} ~ {RIGHT}", family=family)
    data = frame(400)
    table = fitted(glm, data).summary()
    mean, sd = by_newton(data, data[outcome].to_numpy(float), family)
    assert list(table.index) == list(TRUTH)
    assert ((table["mean"] - mean).abs() < 0.1 * sd).all()
    np.testing.assert_allclose(table["sd"], sd, rtol=0.03)
    assert (table["privacy"] < 1e-9).all()


@pytest.mark.slow
def test_counts_with_an_exposure():
    """A rate times hours, in the user's units; one with a hundred times the hours of another."""
    data = frame(400)
    data["hours"] = np.random.default_rng(1).uniform(20, 2000, len(data)).round()
    rate = np.exp(-6 + 0.02 * (data["age"] - 50) + 0.5 * data["chronic"])
    data["visits"] = np.random.default_rng(2).poisson(rate * data["hours"])
    glm = without_noise(
        schema("age", "chronic", "visits", "hours", hours=Number(20, 2000)),
        "visits ~ age + chronic",
        family="poisson",
        exposure="hours",
    )
    assert "eta = x @ b + log_exposure" in glm.source
    table = fitted(glm, data).summary()
    middle = 200.0  # the bounds' middle, on the scale of logarithms
    offset = np.log(data["hours"].to_numpy() / middle)
    visits = data["visits"].to_numpy(float)
    mean, sd = by_newton(data, visits, "poisson", ("age", "chronic"), offset)
    mean[0] -= np.log(middle)
    assert ((table["mean"] - mean).abs() < 0.1 * sd).all()
    np.testing.assert_allclose(table["sd"], sd, rtol=0.03)


@pytest.mark.parametrize("name", ["h\nraise SystemExit", "h\r    raise SystemExit", "h\0x"])
def test_names_and_formulae_of_several_lines_stay_comments(name):
    glm = without_noise(
        Schema({"age": Number(20, 80), name: Number(1, 9), "visits": Count(0, 30)}),
        "visits ~ age\n    + I(age ** 2)",
        family="poisson",
        exposure=name,
    )
    assert "# visits ~ age + I(age ** 2) (poisson)" in glm.source and "\0" not in glm.source
    assert not re.search(r"^\s*raise", glm.source, flags=re.MULTILINE)


@pytest.mark.slow
def test_levels_that_nobody_has():
    """A clinic, and a level of income, without a row: their columns are there, as in the prior."""
    data = frame()
    glm = without_noise(
        schema(*MAIN, "clinic", "visits", income=Category(("low", "high", "top"), other=True)),
        f"visits ~ {RIGHT}",
        family="poisson",
        group="clinic",
    )
    result = fitted(glm, data)
    table = result.summary()
    for name in ("income[T.top]", "income[T.other]"):
        assert table.loc[name, "sd"] == pytest.approx(2.5, rel=1e-3)
        assert table.loc[name, "mean"] == pytest.approx(0.0, abs=1e-3)
    told = "less than the prior about 2 of 6 coefficients. Few records have them, or noise"
    assert result.status.is_ok and told in result.status.reason
    assert repr(result).endswith(": income[T.top], income[T.other]")  # and no next step
    few = fitted(without_noise(glm.schema, "visits ~ income", family="poisson"), data)
    assert few.status.level == "check" and "about 2 of 4 coefficients" in few.status.reason
    assert table.loc["clinic[d]", "sd"] > 2 * table.loc["clinic[a]", "sd"] - 0.3
    assert list(table.index[-5:]) == [*(f"clinic[{x}]" for x in "abcd"), "sd of clinic"]


@pytest.mark.slow
def test_a_column_in_other_units():
    """Ages of 0.2 to 0.8 all become the lower bound, so only the prior informs the result."""
    data, columns = frame(), schema("age", "chronic", "visits")
    table = fitted(without_noise(columns, "visits ~ age + chronic", family="poisson"), data)
    assert table.status.is_ok and repr(table).endswith("\nstatus: ok")
    wrong = data.assign(age=data.age / 100)
    table = fitted(without_noise(columns, "visits ~ age + chronic", family="poisson"), wrong)
    assert table.status.level == "check" and table.posterior.status.is_ok
    assert "outside its declared units and bounds, or noise hides them: age" in repr(table)
    assert repr(table).splitlines()[-1].startswith("next: You may publish it together with its")
    assert table.explain().status == table.status and table.explain().limit == "data"


@pytest.mark.long
@pytest.mark.every_commit
def test_neighbouring_frames():
    """Another person, with the largest numbers there are: only that person's record differs."""
    missing = dict(chronic=Binary(missing=True), age=Number(20, 80, missing=True))
    glm = without_noise(
        schema(*MAIN, "clinic", "visits", **missing),
        f"visits ~ log(age) * chronic + {RIGHT}",
        family="poisson",
        group="clinic",
    )
    one = frame()
    one["chronic"] = one["chronic"].astype("boolean")
    one.loc[::7, "age"], one.loc[::5, "chronic"] = np.nan, pd.NA
    other = one.copy()
    person = other["person"] == 17
    for name, value in {"age": 1e9, "visits": 10**6, "clinic": "d", "chronic": True}.items():
        other.loc[person, name] = value
    ours, theirs = tensors(glm, one), tensors(glm, other)
    rest = torch.arange(len(ours[0])) != 17
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a[rest], b[rest])
    assert not torch.equal(ours[0][17], theirs[0][17])
    assert theirs[0].abs().max() < 1 + 1e-9


def test_what_may_be_missing_is_summed_out():
    """The same log density as the sum over both values, row by row, written by hand."""
    glm = without_noise(
        schema(*MAIN, "visits", chronic=Binary(missing=True)), f"visits ~ {RIGHT}", family="poisson"
    )
    data = frame(40)
    data["chronic"] = data["chronic"].astype("boolean").mask(data.index % 3 == 0)
    b, g = torch.tensor([0.3, 0.2, -0.1, 0.4]), torch.tensor([[0.2], [0.5], [-0.3]])
    values = {"coefficients": b, "chronic_coefficients": g}
    found = log_joint(glm.model, tensors(glm, data), values)
    age, high = (data["age"] - 50) / 30, (data["income"] == "high").astype(float)
    terms = []
    for value in (0.0, 1.0):
        eta = 0.3 + 0.2 * age - 0.1 * value + 0.4 * high
        odds = 0.2 + 0.5 * age - 0.3 * high
        of_value = -np.log1p(np.exp(-odds if value else odds))
        of_visits = dist.Poisson(torch.tensor(np.exp(eta).to_numpy())).log_prob(
            torch.tensor(data["visits"].to_numpy())
        )
        terms.append(of_value.to_numpy() + of_visits.numpy())
    seen = data["chronic"].notna().to_numpy()
    given = np.where(data["chronic"].fillna(False).to_numpy(bool), terms[1], terms[0])
    expected = np.where(seen, given, np.logaddexp(*terms)).sum()
    prior = dist.Normal(0.0, torch.tensor([5.0, 2.5, 2.5, 2.5])).log_prob(b).sum()
    prior = prior + dist.Normal(0.0, 2.5).log_prob(g).sum()
    assert found.item() == pytest.approx(expected + prior.item(), rel=1e-10)


def test_a_number_that_may_be_missing():
    """Nodes between the bounds: as the integral over a Gaussian between them."""
    glm = without_noise(
        schema("age", "chronic", "any", age=Number(20, 80, missing=True), unit=False),
        "any ~ age + chronic",
        family="logistic",
    )
    data = pd.DataFrame({"age": [np.nan], "chronic": [True], "any": [True]})
    b, g, sd = torch.tensor([0.3, 1.0, -0.1]), torch.tensor([0.2, 0.4]), torch.tensor(0.4)
    values = {"coefficients": b, "age_coefficients": g, "age_sd": sd}
    trace = poutine.trace(poutine.condition(glm.model, values))
    trace = trace.get_trace(*glm._regression.tensors(data))
    trace.compute_log_prob()
    z = np.linspace(-1, 1, 20_001)
    density = np.exp(-((z / 0.4 - 0.6) ** 2) / 2)  # the mean is in units of the deviation
    chance = 1 / (1 + np.exp(-(0.3 + z - 0.1)))
    expected = np.log((density * chance).sum() / density.sum())
    assert trace.nodes["any"]["log_prob"].item() == pytest.approx(expected, abs=1e-4)
    assert trace.nodes["age"]["log_prob"].item() == 0.0


@pytest.mark.slow
def test_a_private_fit_with_missing_values():
    """Covariate and outcome have some: no row is dropped, and the table has the formula alone."""
    columns = {
        "age": Number(20, 80),
        "chronic": Binary(missing=True),
        "visits": Count(0, 40, missing=True),
    }
    data = frame(60)[list(columns)]
    data["chronic"] = data["chronic"].astype("boolean").mask(data.index % 4 == 0)
    data["visits"] = data["visits"].astype("Int64").mask(data.index % 5 == 0)
    glm = private(Schema(columns), "visits ~ age + chronic", family="poisson")
    result = glm.fit(data, progress=False)
    assert list(result.summary().index) == ["Intercept", "age", "chronic[T.True]"]
    assert result.explain().names == ("Intercept", "age", "chronic[T.True]")
    assert result.inference._kept.prepared.records.plate.size == len(data)


def test_a_linear_model_in_the_units_of_its_outcome():
    """Least squares of what the model sees is least squares of the frame."""
    glm = without_noise(schema(*MAIN, "cost"), f"cost ~ {RIGHT}", family="linear")
    data = frame(200)
    x, y, observed = tensors(glm, data)
    x, y = x[observed], y[observed]
    assert y.abs().max() <= 1
    b = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    sigma = (y - x @ b).std()
    covariance = torch.zeros(5, 5)
    covariance[:4, :4] = sigma**2 * torch.linalg.inv(x.T @ x)
    covariance[4, 4] = 0.01
    latents = [
        Latent("coefficients", torch.Size([4]), transform_to(constraints.real), 0, 4),
        Latent("sigma", torch.Size([]), transform_to(constraints.positive), 4, 5),
    ]
    mean = torch.cat([b, sigma.log().reshape(1)])
    posterior = Posterior(latents, mean, covariance, plain=covariance / 4)
    table = Regression(glm._regression, posterior, None).summary()
    raw = np.column_stack(
        [np.ones(len(data)), data["age"], data["chronic"], data["income"] == "high"]
    ).astype(float)
    wanted, rest = np.linalg.lstsq(raw, data["cost"].to_numpy(), rcond=None)[:2]
    spread = np.sqrt(rest[0] / (len(data) - 1))
    np.testing.assert_allclose(table["mean"].iloc[:4], wanted, rtol=1e-6)
    sd = spread * np.sqrt(np.diag(np.linalg.inv(raw.T @ raw)))
    np.testing.assert_allclose(table["sd"].iloc[:4], sd, rtol=1e-6)
    np.testing.assert_allclose(table["privacy"], 0.75, atol=0.01)
    assert table.loc["sigma", "mean"] == pytest.approx(spread * np.exp(0.005), rel=0.01)
    assert table.loc["sigma", "lower"] == pytest.approx(spread * np.exp(-0.196), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["negative_binomial", "ordinal"])
def test_families_with_more_latents(family):
    outcome = {"negative_binomial": "visits", "ordinal": "severity"}[family]
    glm = without_noise(schema(*MAIN, outcome), f"{outcome} ~ {RIGHT}", family=family)
    result = fitted(glm, frame(250))
    table = result.summary()
    for name, value in TRUTH.items():
        if name in table.index and name != "Intercept":
            assert abs(table.loc[name, "mean"] - value) < 5 * table.loc[name, "sd"]
    if family == "ordinal":
        assert list(table.index[-2:]) == ["none|some", "some|bad"]
        centred = np.array([-0.5, 1.0]) - (0.3 - 0.02 * 50)
        names = ("age", "chronic[T.True]", "income[T.high]", "cutpoints[0]", "cutpoints[1]")
        assert result.explain().names == names
        near = np.abs(table["mean"].iloc[-2:] - centred) < 5 * table["sd"].iloc[-2:]
        assert near.all() and "Intercept" not in table.index


@pytest.mark.long
def test_a_private_fit():
    glm = private(schema(*MAIN, "any"), f"any ~ {RIGHT}", family="logistic", epsilon=0.5)
    result = fitted(glm, frame())
    assert 0.49 < glm.accountant.get_epsilon() <= 0.5
    table = result.summary()
    assert (table["privacy"] > 0.3).all() and list(table) == list(TABLE)
    assert (table["lower"] < table["mean"]).all() and (table["mean"] < table["upper"]).all()
    narrow = result.summary(0.5)
    assert (narrow["upper"] - narrow["lower"] < table["upper"] - table["lower"]).all()
    ratios = result.summary(ratios=True)
    assert ratios.index.name == "odds ratio" and "Intercept" not in ratios.index
    np.testing.assert_allclose(ratios["upper"], np.exp(table["upper"][1:]))
    assert "any ~ age" in repr(result) and not result.status.is_ok
    assert repr(result).splitlines()[-len(result.status.lines)] == f"status: {result.status}"
    told = result.explain()
    assert told.names == tuple(table.index)
    noise = told.shares["privacy noise"] + told.shares["clipping"]
    np.testing.assert_allclose(noise, table["privacy"], atol=1e-9)
    np.testing.assert_allclose(sum(told.shares.values()), 1.0)
    assert told.status == result.status
    assert "income[T.high]" in repr(told) and "coefficients[" not in repr(told)
    assert told.epsilon == result.inference.explain().epsilon
    assert r"DPSEP of any \~ age" in glm.accountant.report()
    rows = [line.split() for line in repr(result).splitlines()[2 : 2 + len(table)]]
    for column in list(zip(*rows, strict=True))[1:-1]:
        assert len({len(text.partition(".")[2]) for text in column}) == 1
    page = result._repr_html_()
    assert "<p>any ~ age" in page and f"<p>status: {result.status.level}" in page


@pytest.mark.slow
def test_a_report_names_it_whatever_the_column_is_called():
    """The name has a zero-width space and 300 letters."""
    name = "age\u200b" + 300 * "x"
    glm = without_noise(
        Schema({name: Number(20, 80), "visits": Count(0, 30)}),
        f"visits ~ `{name}`",
        family="poisson",
    )
    glm.fit(frame()[["age", "visits"]].rename(columns={"age": name}), progress=False)
    assert "DPSEP of visits" in glm.accountant.report()


@pytest.mark.slow
def test_no_name_tells_how_many_fits_there_were():
    """A private selection hides the number of its trials, and the winner keeps its names."""
    models = [private(schema("any"), "any ~ 1", family="logistic") for _ in range(2)]
    guides = [type(fitted(glm, frame(20)).inference.guide).__name__ for glm in models]
    assert all(re.fullmatch("PrivateGLM_[0-9a-f]{16}", name) for name in guides)
    one, other = ([f.__code__.co_filename for f in (x.model, x.prior)] for x in models)
    assert guides[0] != guides[1] and one == other and len(set(one)) == 2


@pytest.mark.slow
def test_two_fits_do_not_know_of_each_other():
    glm = without_noise(schema(*MAIN, "any"), f"any ~ {RIGHT}", family="logistic")
    first, second = fitted(glm, frame(seed=1)), fitted(glm, frame(seed=2))
    before = first.posterior.mean.clone()
    again = fitted(glm, frame(seed=1))
    assert torch.equal(first.posterior.mean, before)
    assert torch.equal(again.posterior.mean, before)
    assert not torch.equal(second.posterior.mean, before)


SAVED = {
    "logistic": dict(formula=f"any ~ {RIGHT}", family="logistic"),
    "negative binomial": dict(formula=f"visits ~ {RIGHT}", family="negative_binomial"),
    "linear, by groups": dict(formula="cost ~ age", family="linear", group="clinic"),
    "ordinal": dict(formula="severity ~ age + chronic", family="ordinal"),
    "incomplete": dict(formula="visits ~ age + chronic", family="poisson"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_result_is_read_again_without_the_data(name, tmp_path):
    """Another process gets the same table and status, from released numbers alone."""
    other = {"chronic": Binary(missing=name == "incomplete")}
    columns, path = schema(*COLUMNS, **other), tmp_path / "result.json"
    data = frame(600)
    data["chronic"] = data["chronic"].astype("boolean")
    glm = private(columns, epsilon=30.0, **SAVED[name])
    result = fitted(glm, data)
    result.save(path)
    again = Regression.load(path)
    found, wanted = again.summary(), result.summary()
    assert ((found["mean"] - wanted["mean"]) / wanted["sd"]).abs().max() < 0.1
    rel = 0.15 if name == "linear, by groups" else 0.01  # draws approximate a prior with tails
    np.testing.assert_allclose(found["sd"], wanted["sd"], rtol=rel)
    assert again.posterior.status == result.posterior.status
    assert again.run is None
    with pytest.raises(ConfigurationError, match="explain.* needs the run"):
        again.explain()
    state = json.loads(path.read_text())
    assert {*state} == {"format", "version", "sites", "disjoint", "parts", "model", "regression"}
    assert torch.equal(Regression.load(path).posterior.mean, again.posterior.mean)
    own = Evidence.load(path).posterior(glm.prior)
    assert ((own.mean - again.posterior.mean) / own.stddev).abs().max() < 0.1
    again.save(path)
    assert json.loads(path.read_text()) == state


@pytest.mark.long
def test_a_file_of_another_model_is_refused(tmp_path):
    glm = private(schema("age", "visits"), "visits ~ age", family="poisson", epsilon=30.0)
    path = tmp_path / "result.json"
    fitted(glm, frame(600)).save(path)
    state = json.loads(path.read_text())
    regression = state["regression"]
    for changed, why in [
        ({name: state[name] for name in state if name != "regression"}, "has no regression"),
        (state | {"regression": None}, "must have a schema, a formula and a family"),
        (state | {"regression": regression | {"group": ["age"]}}, "must have a schema, a formula"),
        (state | {"regression": regression | {"schema": None}}, "is not a schema"),
        (state | {"regression": regression | {"formula": "visits ~ 1"}}, "writes otherwise"),
    ]:
        path.write_text(json.dumps(changed))
        with pytest.raises(ConfigurationError, match=why):
            Regression.load(path)


@pytest.mark.slow
def test_arviz():
    glm = without_noise(
        schema(*MAIN, "clinic", "visits"), f"visits ~ {RIGHT}", family="poisson", group="clinic"
    )
    data = frame()
    result = fitted(glm, data)
    found = result.to_arviz(num_samples=400)
    assert list(found.posterior["coefficients_of"].values) == list(TRUTH)
    assert list(found.posterior["clinic_of"].values) == list("abcd")
    drawn = found.posterior["coefficients"].values[0]
    table = result.summary()
    np.testing.assert_allclose(drawn.mean(axis=0), table["mean"][:4], atol=table["sd"][:4].max())
    with pytest.raises(PrivacyError, match="records of the fit"):
        result.to_arviz(data[["person", *glm.schema.names]])


@pytest.mark.long
@pytest.mark.parametrize(("rare", "level"), [(3, "check"), (300, "ok")])
def test_a_rare_end_of_an_ordinal_outcome_is_not_ok(rare, level):
    """Noise hides a level of 3 records, and the posterior takes it for more common."""
    rng = np.random.default_rng(2)
    age = rng.uniform(20, 80, 3000)
    eta = (age - 50) / 30 + rng.logistic(size=3000)
    cuts = [np.sort(eta)[rare], *np.quantile(eta, [0.35, 0.7])]
    data = pd.DataFrame({"age": age, "pain": np.array(list("abcd"))[np.digitize(eta, cuts)]})
    columns = {"age": Number(20, 80), "pain": Category(tuple("abcd"), ordered=True)}
    glm = private(Schema(columns), "pain ~ age", family="ordinal", epsilon=1.0, noise=2)
    status = glm.fit(data, progress=False).status
    assert status.level == level
    assert level == "ok" or "2% of the records at level 'a'" in status.reason


@pytest.mark.long
def test_arviz_has_the_rows_with_an_outcome():
    columns = {"age": Number(20, 80), "visits": Count(0, 40, missing=True)}
    glm = private(Schema(columns, unit="person", max_rows=3), "visits ~ age", family="poisson")
    data = frame()[["person", "age", "visits"]].astype({"visits": "Int64"})
    result = fitted(glm, data)
    new = frame(units=40, seed=5)[["person", "age", "visits"]].astype({"visits": "Int64"})
    new.loc[new.index[::4], "visits"] = pd.NA
    found = result.to_arviz(new, num_samples=3)
    wanted = new["visits"].dropna().to_numpy(dtype=float)
    np.testing.assert_array_equal(found.observed_data["visits"], wanted)
    assert found.posterior_predictive["visits"].shape == (1, 3, len(wanted))
    new["visits"] = pd.array([pd.NA] * len(new), dtype="Int64")  # people to predict
    found = result.to_arviz(new, num_samples=3)
    assert found.posterior_predictive["visits"].shape == (1, 3, 40, 3)
    assert "observed_data" not in found.groups()


COUNTS = dict(formula="visits ~ age", family="poisson")
MORE = {
    "hours": Number(1, 2000),
    "zero": Number(0, 2000),
    "gap": Number(1.0, 9.0, missing=True),
    "coefficients": Count(0, 9),
    **{f"a{j}": Category(tuple("abcdefg"), missing=True) for j in range(3)},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(family="gamma"), "family"),
        (COUNTS | dict(family="logistic"), "'visits' is a Count"),
        (COUNTS | dict(family="ordinal"), "'visits' is a Count"),
        (dict(formula="income ~ age", family="ordinal"), "ordered=True"),
        (dict(formula="severity ~ 0 + age", family="ordinal"), "intercept"),
        (dict(group="wealth"), "group='wealth'"),
        (dict(group=["clinic"]), "group must be text, not list"),
        (dict(family=["logistic"]), "family must be text, not list"),
        (dict(group="age"), "declared as Category"),
        (dict(group="person"), "the schema's unit"),
        (dict(group="chronic"), "different ones"),
        (dict(method="dpsvi"), "'method' is no setting of PrivateGLM, and none of DPSEP"),
        (dict(schema={"age": 1}), "must be a Schema"),
        (dict(exposure="hours"), "is for counts"),
        (COUNTS | dict(exposure="nowhere"), "must be a column of the schema"),
        (COUNTS | dict(exposure="zero"), "lower above 0"),
        (COUNTS | dict(exposure="gap"), "without missing values"),
        (COUNTS | dict(exposure="age"), "names a column twice"),
        (COUNTS | dict(exposure="hours", formula="visits ~ 0 + any"), "with an intercept"),
        (COUNTS | dict(offset="hours"), "exposure='hours'"),
        (COUNTS | dict(formula="visits ~ age + offset(log(hours))"), "Pass exposure='column'"),
        (COUNTS | dict(formula="coefficients ~ age"), "rename the column"),
        (COUNTS | dict(formula="visits ~ a0 + a1 + a2"), "combinations"),
    ],
)
def test_refused(change, said):
    own = dict(schema=schema(*COLUMNS, *MORE, **MORE), formula=f"any ~ {RIGHT}", family="logistic")
    accountant = PrivacyAccountant(epsilon=1.0, delta=1e-5)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        PrivateGLM(accountant=accountant, **own | change)
    assert accountant.get_epsilon() == 0.0
