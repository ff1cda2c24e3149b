"""DPSVI: looks where records see linear predictors, gradient steps elsewhere, one front."""

import copy
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import through_a_file
from problems import (
    PROBLEMS,
    gamma_poisson,
    handwritten_guide,
    linear,
    logistic,
    regression_data,
    with_needs,
)
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyro_dp import (
    DPSEP,
    DPSVI,
    Clip,
    ConfigurationError,
    ConvergenceWarning,
    Execution,
    FullBatch,
    ModelError,
    Noise,
    NotPrivateWarning,
    PrivacyAccountant,
    PrivacyError,
    RowAdam,
    nonprivate,
)
from pyro_dp.infer.dpsvi import Looks
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI


def hierarchy(x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    centre = pyro.sample("centre", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(centre, scale).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def with_a_shift(x, y):
    logistic(x + pyro.param("shift", torch.zeros(3)), y)


def product(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=scale * (x[idx] @ w)), obs=y[idx])


def branching(x, y):
    """A record's value decides what it sees."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        logits = x[idx] @ w
        pyro.sample("y", dist.Bernoulli(logits=logits if (y[idx] >= 0).all() else -w), obs=y[idx])


def gamma(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Gamma(2.0, (x[idx] @ w).exp()), obs=y[idx] + 1.0)


def scaled(x, y):
    with poutine.scale(scale=1 / len(x)):
        logistic(x, y)


def swap(model=logistic, guide=None, optim=None, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(model) if guide is None else guide(model)
    settings = {"accountant": PrivacyAccountant(epsilon=1.0), "noise": Noise(source=0)} | options
    return DPSVI(model, guide, optim, **settings)


def outcomes(model, data):
    x, y = data
    if model is linear:
        return x, x.sum(1)
    return ((y + 1).round(),) if model is gamma_poisson else data


# Which method.


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "guide"),
    [
        (logistic, AutoMultivariateNormal),
        (linear, AutoNormal),
        (gamma, AutoMultivariateNormal),
        (gamma_poisson, AutoNormal),
        (hierarchy, AutoMultivariateNormal),
        (scaled, AutoNormal),
    ],
)
def test_linear_predictors_have_evidence(model, guide):
    svi, data = swap(model, guide), outcomes(model, regression_data(60))
    result = svi.run(*data, progress=False)
    assert type(svi._inference) is Looks and len(svi.evidence.parts[0].looks) > 3
    assert result.steps == svi.accountant.num_releases < 20
    assert not svi.accountant.notes[1:]  # beside that of the seed


@pytest.mark.long
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("model", [logistic, product])
@pytest.mark.filterwarnings("ignore")
def test_the_report_has_the_status(model, loop):
    svi, data = swap(model, num_steps=4), regression_data(60)
    if loop:
        for _ in range(3):
            svi.step(*data)
        svi.finish()
    else:
        svi.run(*data, progress=False)
    assert f"| DPSVI | {svi._inference._reservation.origin.time} | {svi.posterior().status} |" in (
        svi.accountant.report()
    )


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (product, "Records see products of latents that no deterministic site"),
        (branching, "The model branches on values"),
    ],
)
@pytest.mark.filterwarnings("ignore:The model branches")
def test_other_models_take_gradients(model, reason):
    svi = swap(model, num_steps=3)
    svi.run(*regression_data(60), progress=False)
    assert type(svi._inference) is StochasticGradientVI
    assert svi.accountant.num_releases == 3
    assert not svi.accountant.notes[1:]  # the attempt has left no earlier values
    with pytest.raises(ConfigurationError, match=f"leave no evidence. The reason: {reason}"):
        svi.evidence  # noqa: B018


@pytest.mark.long
@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (30, math.nan), (30, 0.5)])
def test_a_record_does_not_choose_the_method(place, value):
    """Otherwise the ledger would reveal that a record had failed a check."""
    svi, (x, y) = swap(), regression_data(60)
    refused = y.clone()
    refused[place] = value
    with pytest.raises(ModelError, match="for the curator only") as caught:
        svi.step(x, refused)
    assert caught.type is ModelError  # a run's result names the type
    svi.step(x, y)
    assert type(svi._inference) is Looks


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["VAE", "PyroModule", "AutoIAFNormal"])
def test_other_problems_take_gradients(name):
    problem = PROBLEMS[name]()
    options = dict(accountant=PrivacyAccountant(epsilon=1.0), loss=problem.loss, num_steps=2)
    svi = DPSVI(problem.model, problem.guide, **with_needs(problem.needs, options))
    svi.run(*problem.data, progress=False)
    assert type(svi._inference) is StochasticGradientVI


SETTINGS = {
    "A noise multiplier": {"noise": Noise(1.0, source=0)},
    "A bound": {"clip": 1.0},
    "Clip.loss": {"clip": Clip(loss=1.0)},
    r"Clip\(of=\"parameters\"\)": {"clip": Clip(of="parameters")},
    "A RowAdam": {"optim": RowAdam()},
    "A loss of your own": {"loss": lambda *own: Trace_ELBO().differentiable_loss(*own)},
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_gradients_choose_them(name):
    svi = swap(num_steps=2, **SETTINGS[name])
    assert type(svi._inference) is StochasticGradientVI
    with pytest.raises(ConfigurationError, match=f"{name} is a setting of gradient steps"):
        svi.evidence  # noqa: B018


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("value", [0.0, 1e30])
@pytest.mark.parametrize("model", [logistic, product])
def test_records_do_not_choose(model, value):
    """An attacker sends records whose predictors are zero or cannot be computed."""
    x, y = regression_data(60)
    for rows in (slice(0, 1), slice(None)):
        svi, attacked = swap(model, num_steps=2), x.clone()
        attacked[rows] = value
        svi.step(attacked, y)
        assert (type(svi._inference) is Looks) == (model is logistic)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
def test_records_unlike_the_placeholders_are_an_error():
    """Records must not choose gradient steps: the method would reveal something about them."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            scale = torch.ones(()) if (x[idx, 0] == 1.0).all().item() else w[1].exp()
            pyro.sample("y", dist.Normal(x[idx] @ w, scale), obs=y[idx])

    svi = swap(model)
    with pytest.raises(ModelError, match="in another form than on placeholders"):
        svi.step(*regression_data(60))
    assert type(svi._inference) is Looks and svi.accountant.num_releases == 0


@pytest.mark.slow
def test_a_loop_over_the_plate_names_each_site_after_its_record():
    def model(y):
        chance = pyro.sample("chance", dist.Beta(10.0, 10.0))
        for i in pyro.plate("data", len(y)):
            pyro.sample(f"y_{i}", dist.Bernoulli(chance), obs=y[i])

    svi, y = swap(model, accountant=PrivacyAccountant(epsilon=100.0)), torch.ones(20)
    with pytest.warns(UserWarning, match="one record at a time"):
        svi.run(y, progress=False)
    assert type(svi._inference) is Looks
    assert svi.guide.median()["chance"].item() == pytest.approx(30 / 40, abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "guide", "words"),
    [
        (
            poutine.scale(logistic, scale=1e-3),
            lambda model: poutine.scale(handwritten_guide, scale=1e-3),
            "'w' of the guide has a scale",
        ),
        (with_a_shift, AutoNormal, "model learns parameter 'shift', which has no posterior"),
    ],
)
def test_without_a_posterior_the_reason_is_told(model, guide, words):
    """SVI with both scaled has the posterior's width. The scaled model alone has another."""
    svi = swap(model, guide, num_steps=3)
    svi.run(*regression_data(60), progress=False)
    assert type(svi._inference) is StochasticGradientVI
    with pytest.raises(ConfigurationError, match=f"There is no posterior.*{words}"):
        svi.posterior()
    with pytest.raises(ConfigurationError, match=words):
        svi.evidence  # noqa: B018


@pytest.mark.every_commit
@pytest.mark.long
def test_after_a_release_the_method_stays():
    """If the model stops being linear, that is an error and not a change of method."""
    curved = False

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            logits = x[idx] @ (w.pow(3) if curved else w)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])

    svi, data = swap(model), regression_data(60)
    svi.step(*data)
    curved = True
    with pytest.raises(ModelError):
        svi.step(*data[:1], data[1].clone())
    assert type(svi._inference) is Looks and svi.accountant.num_releases == 1


# Nothing else decides.


@pytest.mark.slow
def test_the_posterior_is_that_of_dpsep():
    data, guide = regression_data(300), AutoMultivariateNormal(logistic)
    accountant = PrivacyAccountant(epsilon=1.0)
    sep = DPSEP(logistic, guide, accountant=accountant, noise=Noise(source=0))
    pyro.set_rng_seed(0)
    sep.run(*data, progress=False)
    plain = {"sampling": FullBatch(), "execution": Execution(jit="none")}
    for change in (
        {"optim": pyro.optim.Adam({"lr": 10.0}), "num_steps": 3, "sampling": 0.01},
        {"optim": pyro.optim.SGD({"lr": 1e-9}), "loss": Trace_ELBO(num_particles=7)} | plain,
    ):
        svi = swap(**change)
        svi.run(*data, progress=False)
        ours, theirs = svi.posterior(), sep.posterior()
        torch.testing.assert_close(ours.mean, theirs.mean)
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix)
        assert svi.accountant.get_epsilon() == accountant.get_epsilon() <= 1.0


# Loops, states, and requests to both methods.


@pytest.mark.slow
def test_a_loop_may_be_longer_than_the_looks():
    """Later steps do nothing, and still refuse other data."""
    svi, (x, y) = swap(), regression_data(300)
    assert all(math.isnan(svi.step(x, y)) for _ in range(30))
    found, count = svi.posterior(), svi.accountant.num_releases
    assert count < 20 and svi.accountant.get_epsilon() <= 1.0
    torch.testing.assert_close(svi.guide.median()["w"], found.mean)
    with pytest.raises(PrivacyError):
        svi.step(x[:100], y[:100])
    assert svi.accountant.num_releases == count
    pyro.clear_param_store()
    run = swap()
    run.run(x, y, progress=False)
    torch.testing.assert_close(run.posterior().mean, found.mean)


@pytest.mark.long
def test_a_loop_that_ends_warns_as_a_run_does(as_users_run_it):
    accountant = PrivacyAccountant(epsilon=0.01)
    svi, data = swap(accountant=accountant), regression_data(100)
    with pytest.warns(ConvergenceWarning, match="^(do not publish|check)") as caught:
        for _ in range(20):
            svi.step(*data)
    assert [each.filename for each in caught if each.category is ConvergenceWarning] == [__file__]
    with pytest.warns(ConvergenceWarning):
        svi.finish()
    with pytest.raises(ConfigurationError, match="no step was taken"):
        swap().finish()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("model", [logistic, product])
def test_a_state_decides(model):
    data = regression_data(200)
    first = swap(model, num_steps=10)
    for _ in range(3):
        first.step(*data)
    state = through_a_file(first.state_dict())
    second = swap(model, num_steps=10)
    second.load_state_dict(state)
    assert type(second._inference) is type(first._inference)
    second.run(*data, progress=False)
    assert second.accountant.num_releases > 3 and second.accountant.get_epsilon() <= 1.0
    third = swap(model, num_steps=10)
    with pytest.raises(ConfigurationError):
        third.load_state_dict({"looks": 1})
    with pytest.raises(ConfigurationError):
        third.load_state_dict({})
    third.run(*data, progress=False)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("model", [logistic, product])
def test_one_front_for_both(model):
    optim = pyro.optim.Adam({"lr": 0.01})
    svi, data = swap(model, optim=optim, num_steps=20), regression_data(200)
    assert svi.optim is optim and svi.num_steps is not None and svi.last_run is None
    svi.run(*data, progress=False)
    assert repr(svi).startswith("DPSVI(") and "<table" in svi._repr_html_()
    assert repr(svi.last_run).startswith("DPSVI: ") and svi.clip.bound is None
    assert "DPSVI" in str(svi.accountant.report()) or svi.accountant.num_releases
    assert svi.explain().status == svi.posterior().status
    assert svi.predictive(5)(*regression_data(200))["y"].shape == (5, 200)
    with pytest.raises(PrivacyError, match="evaluate_loss"):
        svi.evaluate_loss(*data)
    with pytest.raises(AttributeError):
        svi.no_such_setting  # noqa: B018
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(PrivacyError, match="A DPSVI holds the data"):
            copied(svi)
    svi.execution = Execution(microbatch_size=50)
    assert svi._inference.execution is svi._gradients.execution is svi.execution


@pytest.mark.long
def test_rows_of_records_start_anew_after_the_attempt():
    """A guide with a row per record makes its parameters in the method that takes it."""

    def model(y):
        centre = pyro.sample("centre", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            effect = pyro.sample("effect", dist.StudentT(1.0, centre, 1.0))  # without a mean
            pyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    def guide(y):
        rows = pyro.param("rows", lambda: torch.zeros(len(y)))
        pyro.sample("centre", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("effect", dist.Normal(rows, 1.0))

    svi = swap(model, lambda model: guide, num_steps=3)
    svi.run(regression_data(60)[1], progress=False)
    assert type(svi._inference) is StochasticGradientVI
    assert not any("had values before" in note for note in svi.accountant.notes)


@pytest.mark.long
def test_values_of_before_are_noted_by_both_methods():
    for model in (logistic, product):
        svi = swap(model, num_steps=2)
        svi.guide(*regression_data(60))
        svi.step(*regression_data(60))
        (note,) = [each for each in svi.accountant.notes if "had values before" in each]
        assert "DPSVI" in note


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("model", [logistic, product])
def test_numbers_without_noise(model):
    svi, data = swap(model, num_steps=2), regression_data(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)
        before = nonprivate(svi).gradient_norms(*data)
        assert before.shape == (60,) and (type(svi._inference) is Looks) == (model is logistic)
    assert svi.accountant.get_epsilon() == math.inf
    unlimited = swap(model, num_steps=2, accountant=PrivacyAccountant(), noise=Noise(0, source=0))
    unlimited.step(*data)
    with pytest.warns(NotPrivateWarning, match="loss of DPSVI after 1 steps"):
        assert math.isfinite(nonprivate(unlimited).loss(*data))
    assert not any("had values before" in note for note in unlimited.accountant.notes)
