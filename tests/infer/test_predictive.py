"""Draws for new records of any number, whatever the model did with those of the fit."""

import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    logistic,
    logistic_subsampled,
    logistic_whole,
    mixture,
    mixture_guide,
    regression_data,
)
from pyro.infer import Predictive
from pyro.infer.autoguide import (
    AutoDelta,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_value,
)
from pyro.poutine.runtime import _PYRO_STACK
from seeded import seeded
from torch import nn
from torch.utils.data import TensorDataset

from pyro_dp import (
    DPSEP,
    DPSVI,
    ConfigurationError,
    ConvergenceWarning,
    Execution,
    ModelError,
    NotPrivateWarning,
    PrivacyAccountant,
    PrivacyError,
)
from pyro_dp.records.new_records import NewRecords

SIZE = 30


def defaulted(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=None if y is None else y[idx])


def fixed_size(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", SIZE) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def fixed_size_whole(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", SIZE):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def size_as_argument(x, y, size):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    ones = torch.ones(size)
    with pyro.plate("data", size) as idx:
        pyro.sample("y", dist.Bernoulli(logits=ones[idx] * (x[idx] @ w)), obs=y[idx])


def by_name(*, x, y):
    logistic(x, y)


def in_a_dictionary(data):
    logistic(data["x"], data["y"])


class Module(pyro.nn.PyroModule):
    def forward(self, x, y):
        logistic(x, y)


def starting_at(values, model):
    """A guide that is certain."""
    return AutoDelta(model, init_loc_fn=init_to_value(values=values))


def fitted(model, *data, guide=None, cls=DPSVI, **settings):
    """One step without noise or motion: of the guide's initial values."""
    options = {"accountant": PrivacyAccountant(), "noise": 0.0}
    if cls is DPSVI:
        options |= {"optim": pyro.optim.SGD({"lr": 0.0}), "clip": 1.0}
    guide = AutoNormal(model) if guide is None else guide
    inference = cls(model, guide, **options | settings)
    kwargs = data[-1] if isinstance(data[-1], dict) and model is by_name else {}
    inference.step(*(() if kwargs else data), **kwargs)
    return inference


W = torch.tensor([1e3, 0.0, 0.0])  # then a label is whether the first feature is positive
NEW = torch.tensor([[1.0, 0.3, 0.1], [-1.0, 0.2, 0.5], [1.0, -0.7, 0.9], [-1.0, 0.1, 0.2]])
LABELS = torch.tensor([1.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (logistic, {}),
        (logistic_whole, {"execution": Execution(slice_data=True)}),
        (logistic_subsampled, {}),
        (defaulted, {}),
        (fixed_size, {}),
        (fixed_size_whole, {"execution": Execution(slice_data=True)}),
        (Module(), {}),
    ],
)
def test_new_records(model, settings):
    """Each gets its own label, with and without labels in the arguments."""
    x, y = regression_data(SIZE)
    svi = fitted(model, x, y, guide=starting_at({"w": W}, model), **settings)
    predictive = svi.predictive(5)
    assert isinstance(predictive, Predictive)
    for repeats in (1, 25):  # fewer and more than there were
        new, labels = NEW.repeat(repeats, 1), LABELS.repeat(repeats)
        for given in ((new,), (new, None), (new, 1 - labels), (new.numpy(),), (new.tolist(),)):
            drawn = predictive(*given)
            assert drawn.keys() == {"w", "y"}
            assert torch.equal(drawn["w"], W.expand(5, 3))
            assert torch.equal(drawn["y"], labels.expand(5, -1))
        assert torch.equal(predictive(TensorDataset(new, labels))["y"], labels.expand(5, -1))
    assert predictive(NEW[:1].tolist())["y"].tolist() == [[1.0]] * 5
    assert predictive(x=NEW)["y"].shape == (5, 4)


def test_sizes_that_are_arguments():
    x, y = regression_data(SIZE)
    svi = fitted(size_as_argument, x, y, SIZE, guide=starting_at({"w": W}, size_as_argument))
    assert torch.equal(svi.predictive(3)(NEW)["y"], LABELS.expand(3, 4))
    assert torch.equal(svi.predictive(3)(NEW, None, 4)["y"], LABELS.expand(3, 4))


def test_arguments_by_name_and_in_containers():
    x, y = regression_data(SIZE)
    svi = fitted(by_name, {"x": x, "y": y}, guide=starting_at({"w": W}, by_name))
    assert torch.equal(svi.predictive(3)(x=NEW)["y"], LABELS.expand(3, 4))
    pyro.clear_param_store()
    guide = starting_at({"w": W}, in_a_dictionary)
    svi = fitted(in_a_dictionary, {"x": x, "y": y}, guide=guide)
    drawn = svi.predictive(3)({"x": NEW, "y": LABELS})
    assert torch.equal(drawn["y"], LABELS.expand(3, 4))
    drawn = svi.predictive(3)({"y": LABELS, "x": NEW})
    assert torch.equal(drawn["y"], LABELS.expand(3, 4))
    with pytest.raises(ModelError, match="'data' must have the parts .*outcome .*any values"):
        svi.predictive(3)({"x": NEW})


def test_a_deterministic_site_of_the_records():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            chance = pyro.deterministic("chance", torch.sigmoid(x[idx] @ w))
            pyro.sample("y", dist.Bernoulli(chance), obs=y[idx])
            pyro.deterministic("error", y[idx] - chance)

    predictive = fitted(
        model, *regression_data(SIZE), guide=starting_at({"w": W}, model)
    ).predictive(3)
    drawn = predictive(NEW, LABELS)
    assert torch.equal(drawn["y"], LABELS.expand(3, 4))
    torch.testing.assert_close(
        drawn["chance"], torch.sigmoid(NEW @ W).expand(3, 4), check_dtype=False
    )
    with pytest.raises(ModelError, match="'y' is missing, and predictions depend on it"):
        predictive(NEW)


def test_what_the_model_returns():
    scale = 0.0

    def model(x, y):
        logistic(x, y)
        return x[:, 0] + scale * y

    predictive = fitted(model, *regression_data(SIZE)).predictive(3, ["_RETURN"])
    assert torch.equal(predictive(NEW)["_RETURN"].float(), NEW[:, 0].expand(3, 4))
    scale = 1.0
    with pytest.raises(ModelError, match="'y' is missing, and predictions depend on it"):
        predictive(NEW)


@pytest.mark.slow
def test_draws_are_those_of_the_posterior():
    """Joint ones, in the model's own space, and their outcomes; within six standard errors."""
    sep = seeded(DPSEP, logistic, AutoMultivariateNormal, *regression_data(400), epsilon=1.0)
    posterior = sep.posterior()
    drawn = sep.predictive(1000)(NEW)
    w = drawn["w"]
    root = torch.linalg.cholesky(posterior.covariance_matrix)
    white = torch.linalg.solve_triangular(root, (w.to(root) - posterior.mean).T, upper=False)
    assert white.mean(1).abs().max() < 0.19
    torch.testing.assert_close(white.cov(), torch.eye(3), rtol=0.0, atol=0.27)
    chances = torch.sigmoid(w @ NEW.T.to(w)).mean(0)
    assert (drawn["y"].mean(0) - chances).abs().max() < 0.095
    predictive = sep.predictive(20)
    assert torch.equal(predictive(NEW)["w"], predictive(NEW[:2])["w"])  # the same for all records


def test_nothing_is_released():
    x, y = regression_data(SIZE)
    svi = fitted(logistic, x, y)
    ledger, store = svi.accountant.ledger, pyro.get_param_store().get_state()["params"]
    svi.predictive(3)(NEW)
    assert svi.accountant.ledger == ledger
    assert pyro.get_param_store().get_state()["params"].keys() == store.keys()


# Latents of the records


def effects(x, y):
    spread = pyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        own = pyro.sample("own", dist.Normal(0.0, spread))
        pyro.sample("y", dist.Normal(own + x[idx].sum(-1), 0.1), obs=y[idx])


def with_rows(x, y):
    """A row per record, far from the prior."""
    spread = pyro.param("log_spread", torch.tensor(0.0))
    pyro.sample("spread", dist.LogNormal(spread, 0.01))
    loc = pyro.param("loc", lambda: torch.full((SIZE,), 100.0))
    with pyro.plate("data", SIZE) as idx:
        pyro.sample("own", dist.Normal(loc[idx], 0.01))


def amortised(x, y):
    spread = pyro.param("log_spread", torch.tensor(0.0))
    pyro.sample("spread", dist.LogNormal(spread, 0.01))
    slope = pyro.param("slope", torch.tensor(1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("own", dist.Normal(100.0 + slope * (y[idx] - x[idx].sum(-1)), 0.01))


@pytest.mark.every_commit
@pytest.mark.long
@pytest.mark.parametrize("guide", [with_rows, AutoNormal(effects)])
def test_rows_of_the_fit_are_not_used(guide):
    """A new record's latents are drawn from the model, whatever the number of new ones."""
    x, _ = regression_data(SIZE)
    svi = fitted(effects, x, torch.zeros(SIZE), guide=guide, optim=pyro.optim.Adam({"lr": 1e-9}))
    for new in (NEW, NEW.repeat(25, 1)):
        for given in ((new,), (new, torch.ones(len(new)))):
            own = svi.predictive(30)(*given)["own"]
            assert own.shape == (30, len(new)) and own.abs().mean() < 5


def test_global_draws_see_no_rows_of_the_fit():
    """This holds if the guide was changed after the fit, too."""
    x, _ = regression_data(SIZE)
    adam = pyro.optim.Adam({"lr": 1e-9})
    svi = fitted(effects, x, torch.zeros(SIZE), guide=with_rows, optim=adam)

    def changed(x, y):
        pyro.sample("spread", dist.Normal(pyro.param("loc").mean(), 0.01))

    records = svi._kept.prepared.records
    drawn = NewRecords(effects, changed, records).global_draws(3)["spread"]
    assert drawn.abs().max() < 50


@pytest.mark.long
def test_an_amortised_guide_is_used_where_it_sees_what_it_needs():
    x, _ = regression_data(SIZE)
    svi = fitted(effects, x, torch.zeros(SIZE), guide=amortised)
    assert svi.predictive(30)(NEW)["own"].abs().mean() < 5
    labels = torch.tensor([0.0, 1.0, 2.0, 3.0])
    own = svi.predictive(30)(NEW, labels)["own"]
    assert (own.mean(0) - 100 - labels + NEW.sum(1)).abs().max() < 0.1


@pytest.mark.long
def test_autoencoders():
    """New data are encoded, and decoded."""
    decoder = nn.Linear(1, 3)

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.1).to_event(1), obs=x[idx])

    def guide(x):
        slope = pyro.param("slope", torch.tensor(10.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(slope * x[idx][:, :1], 0.01).to_event(1))

    svi = fitted(model, regression_data(SIZE)[0], guide=guide)
    drawn = svi.predictive(50)(NEW)
    assert (drawn["z"].mean(0) - 10 * NEW[:, :1]).abs().max() < 0.05
    assert (drawn["x"].mean(0) - decoder(drawn["z"].mean(0))).abs().max() < 0.1


@pytest.mark.long
def test_discrete_latents_are_drawn():
    guide = mixture_guide(mixture)
    svi = fitted(mixture, torch.randn(SIZE, 2), guide=guide)
    drawn = svi.predictive(40)(torch.zeros(7, 2))
    assert drawn["z"].shape == (40, 7) and set(drawn["z"].unique().tolist()) <= {0, 1, 2}
    assert drawn["x"].shape == (40, 7, 2) and drawn["locs"].shape == (40, 3, 2)


def test_parameters_per_record_of_the_model():
    def model(x, y):
        shift = pyro.param("shift", lambda: torch.zeros(SIZE))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + shift[idx]), obs=y[idx])

    svi = fitted(model, *regression_data(SIZE), optim=pyro.optim.Adam({"lr": 0.1}))
    for count in (1, 100):
        with pytest.raises(ModelError, match="'shift' has a row for each record of the fit"):
            svi.predictive(3)(NEW.repeat(count, 1))


# What cannot be predicted


def two_features(x, z, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + z[idx]), obs=y[idx])


def test_a_feature_is_no_outcome():
    """An error asks for a missing argument if predictions depend on it."""
    x, y = regression_data(SIZE)
    predictive = fitted(two_features, x, torch.zeros(SIZE), y).predictive(3)
    assert predictive(NEW, torch.ones(4))["y"].shape == (3, 4)
    with pytest.raises(ModelError, match="'z' is missing, and predictions depend on it"):
        predictive(NEW)
    with pytest.raises(ModelError, match="'x' is missing"):
        predictive(z=torch.ones(4), y=LABELS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "no records to predict for.*'x'"),
        ((None, None), "no records to predict for"),
        ((3.0,), "'x' must have a row"),
        ((NEW[:, :2],), "Predicting raised.*size"),
        ((["a", "b"],), "'x' holds text"),
    ],
)
def test_arguments_that_do_not_fit(given, message):
    svi = fitted(logistic, *regression_data(SIZE))
    with pytest.raises(ModelError, match=message):
        svi.predictive(3)(*given)
    assert not _PYRO_STACK


def test_settings():
    svi = fitted(logistic, *regression_data(SIZE))
    assert svi.predictive(3, return_sites=["y"])(NEW).keys() == {"y"}
    with pytest.raises(ConfigurationError, match="num_samples"):
        svi.predictive(0)
    with pytest.raises(ConfigurationError, match=r"return_sites.*\['y'\]"):
        svi.predictive(3, "y")
    with pytest.raises(ModelError, match="no site 'z'; it has 'w', 'y'"):
        svi.predictive(3, ["z"])(NEW)
    with pytest.raises(ConfigurationError, match="get_vectorized_trace"):
        svi.predictive(3).get_vectorized_trace(NEW)


def test_factors():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.factor("own", dist.Bernoulli(logits=x[idx] @ w).log_prob(y[idx]))

    svi = fitted(model, *regression_data(SIZE))
    with pytest.raises(ModelError, match="pyro.factor 'own'"):
        svi.predictive(3)(NEW, LABELS)


def test_other_plates_that_subsample():
    def model(x, y):
        with pyro.plate("groups", 5, subsample_size=2) as g:
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            shift = effect.sum() + 0 * g.sum()
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + shift), obs=y[idx])

    svi = fitted(model, *regression_data(SIZE))
    with pytest.raises(ModelError, match="'groups' takes a part"):
        svi.predictive(3)


# Records of the fit


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: (x, y),
        lambda x, y: (x.clone(),),
        lambda x, y: (x[5:9],),
        lambda x, y: (x.numpy(),),
        lambda x, y: (torch.cat([NEW, x[-2:]]),),
        lambda x, y: (torch.ones(SIZE, 3), y),
    ],
)
def test_records_of_the_fit_are_noted(given):
    x, y = regression_data(SIZE)
    predictive = fitted(logistic, x, y).predictive(3)
    with pytest.warns(NotPrivateWarning, match="holds records of the fit") as caught:
        predictive(*given(x, y))
    assert caught[0].filename == __file__
    with pytest.raises(PrivacyError, match="to_arviz.*records of the fit"):
        needs_arviz()
        predictive.to_arviz(*given(x, y))


def test_new_records_that_lie_beside_those_of_the_fit():
    """Two parts of one tensor."""
    everything, y = regression_data(SIZE + 10)
    predictive = fitted(logistic, everything[:SIZE], y[:SIZE]).predictive(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictive(everything[SIZE:], y[SIZE:])


def test_new_records_of_whole_numbers_may_equal_those_of_the_fit():
    """Most new people share their scaled ages and years with some person of the fit."""
    pyro.set_rng_seed(0)
    x = torch.randint(31, (3000, 3)) / 30
    x[:, 2] = x[:, 0]
    y = torch.bernoulli(torch.full((3000,), 0.5))
    predictive = fitted(logistic, x[:2000], y[:2000]).predictive(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predictive(x[2000:])
    x[:2000, 2] = torch.rand(2000)
    predictive = fitted(logistic, x[:2000], y[:2000]).predictive(3)
    with pytest.warns(NotPrivateWarning, match="holds records of the fit"):
        predictive(x[:50].clone())


def test_errors_withhold_records_of_the_fit():
    x, y = regression_data(SIZE)
    x[:, 0] = 61.803 + torch.rand(SIZE)
    fails = []

    def model(x, y):
        if fails:
            raise ValueError(f"{x}")
        logistic(x, y)

    svi = fitted(model, x, y)
    predictive = svi.predictive(3)
    fails.append(True)
    with pytest.warns(NotPrivateWarning), pytest.raises(ModelError, match="withheld") as caught:
        predictive(x)
    assert "62." not in str(caught.value) and "61." not in str(caught.value)
    with pytest.raises(ModelError, match="ValueError.*0.3"):
        predictive(NEW)


def test_a_laplace_approximation_is_noted():
    """A guide that was not fitted privately has Pyro's own approximation."""
    data = regression_data(SIZE)
    guide = AutoLaplaceApproximation(logistic)
    svi = DPSVI(logistic, guide, accountant=PrivacyAccountant(epsilon=1.0), num_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        svi.run(*data, progress=False)
    with pytest.warns(NotPrivateWarning, match="no ledger.*AutoMultivariateNormal") as caught:
        found = guide.laplace_approximation(*data)
    assert caught[0].filename == __file__ and torch.equal(found.loc, guide.loc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = AutoLaplaceApproximation(logistic)
        other(*data)
        other.laplace_approximation(*data)


def test_it_is_not_saved():
    """It holds the records of the fit, to recognise them."""
    predictive = fitted(logistic, *regression_data(SIZE)).predictive(3)
    with pytest.raises(PrivacyError, match="posterior_samples"):
        pickle.dumps(predictive)


# ArviZ


def needs_arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("arviz")


def test_to_arviz():
    needs_arviz()
    x, y = regression_data(SIZE)
    svi = fitted(logistic, x, y, guide=starting_at({"w": W}, logistic))
    predictive = svi.predictive(6)
    alone = predictive.to_arviz()
    assert alone.groups() == ["posterior"] and alone.posterior["w"].shape == (1, 6, 3)
    found = predictive.to_arviz(NEW, LABELS)
    assert found.groups() == ["posterior", "posterior_predictive", "constant_data"]
    assert set(found.posterior) == {"w"} and set(found.posterior_predictive) == {"y"}
    drawn = found.posterior_predictive["y"]
    assert drawn.dims[:3] == ("chain", "draw", "records") and drawn.shape == (1, 6, 4)
    assert (drawn.values == LABELS.numpy()).all()
    assert found.constant_data["x"].dims[0] == "records"
    assert (found.constant_data["x"].values == NEW.numpy()).all()
    assert (found.constant_data["y"].values == LABELS.numpy()).all()


def test_without_arviz(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "arviz", None)
    with pytest.raises(ConfigurationError, match=r"pip install pyro-dp\[arviz\]"):
        fitted(logistic, *regression_data(SIZE)).predictive(3).to_arviz()
