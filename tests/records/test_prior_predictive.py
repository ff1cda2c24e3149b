"""Outcomes drawn from a prior replace those in the arguments."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    factored,
    gamma_poisson,
    linear,
    logistic,
    logistic_subsampled,
    logistic_whole,
    mixture,
    mixture_parameters,
)

from pyro_dp import ModelError
from pyro_dp.records.new_records import PriorPredictive

SIZE = 400


def predictive(model, *args, plate=None, **kwargs):
    return PriorPredictive.of(model, args, kwargs, plate)


def features(dim=3):
    return torch.randn(SIZE, dim)


@pytest.mark.parametrize("model", [logistic, logistic_whole, logistic_subsampled])
def test_only_outcomes_are_new(model):
    x, y = features(), torch.zeros(SIZE)
    before, rng = y.clone(), torch.get_rng_state()
    (shown, drawn), kwargs = predictive(model, x, y).draw(0)
    assert shown is x and torch.equal(y, before) and not kwargs
    assert 0.05 < drawn.mean() < 0.95 and set(drawn.tolist()) == {0.0, 1.0}
    assert torch.equal(torch.get_rng_state(), rng)
    assert not pyro.get_param_store().keys()
    ((_, again), _), ((_, other), _) = (predictive(model, x, y).draw(seed) for seed in (0, 1))
    assert torch.equal(again, drawn) and not torch.equal(other, drawn)


def test_made_up_outcomes_do_not_matter():
    x = features()
    draws = [
        predictive(logistic, x, y).draw(3)[0][1] for y in (torch.zeros(SIZE), torch.ones(SIZE))
    ]
    assert torch.equal(*draws)
    # Nor do features of the same shape and values.
    (x, y), _ = predictive(one_feature, torch.zeros(SIZE), torch.zeros(SIZE)).draw(0)
    assert not x.any() and y.any()


def one_feature(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(w * x[idx], 1.0), obs=y[idx])


@pytest.mark.slow
def test_it_is_the_prior_predictive():
    x = torch.tensor([[1.0, 0.0, 0.0]]).expand(SIZE, 3)
    means = [predictive(linear, x, torch.zeros(SIZE)).draw(s)[0][1].mean() for s in range(200)]
    assert torch.stack(means).std().item() == pytest.approx(1.0, rel=0.2)  # the weight's sd
    _, y = predictive(linear, x, torch.zeros(SIZE)).draw(0)[0]
    assert y.std().item() == pytest.approx(0.5, rel=0.15)


def table(data, scale=1.0):
    """The outcome is a column, and the other site's an integer argument."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(data["rows"])) as idx:
        rows = data["rows"][idx]
        pyro.sample("y", dist.Normal(w * rows[:, 0], scale), obs=rows[:, 1])
        pyro.sample("n", dist.Poisson(w.exp()), obs=data["counts"][idx].float())


def test_columns_integers_and_keywords():
    given = {"rows": features(2), "counts": torch.zeros(SIZE, dtype=torch.long)}
    args, kwargs = predictive(table, data=given, scale=0.1).draw(0)
    drawn = kwargs["data"]
    assert not args and kwargs["scale"] == 0.1
    assert torch.equal(drawn["rows"][:, 0], given["rows"][:, 0])
    assert not torch.equal(drawn["rows"][:, 1], given["rows"][:, 1])
    assert drawn["counts"].dtype == torch.long and drawn["counts"].any()
    w = drawn["counts"].double().mean().log()
    assert (drawn["rows"][:, 1] - w * drawn["rows"][:, 0]).std() < 0.3


@pytest.mark.parametrize("model", [mixture, mixture_parameters])
def test_latents_of_records_and_parameters(model):
    ((x,), _) = predictive(model, torch.zeros(SIZE, 2)).draw(0)
    assert x.std() > 0.5
    assert not pyro.get_param_store().keys()
    torch.set_default_dtype(torch.float32)
    ((x,), _) = predictive(gamma_poisson, torch.zeros(SIZE)).draw(0)
    assert x.dtype == torch.float32 and x.any()


def standardised(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(w * x[idx, 0], 1.0), obs=2 * y[idx])


def wide(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1e6))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.LogNormal(w.abs() * x[idx, 0], 1.0), obs=y[idx])


@pytest.mark.parametrize(
    "model, said",
    [
        (standardised, "Site 'y' observes something else than an argument"),
        (wide, "prior predictive of site 'y' is not finite"),
        (factored, "pyro.factor 'y' has no outcomes"),
        (lambda x, y: None, "no observed site"),
    ],
)
def test_what_cannot_be_drawn(model, said):
    with pytest.raises(ModelError, match=said):
        predictive(model, features(), torch.ones(SIZE)).draw(0)


def grouped(x, g, y):
    """Outcomes would be no index."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(w[g[idx]], 1.0), obs=y[idx])


def test_an_argument_that_is_no_place_for_outcomes():
    g = torch.randint(2, (SIZE,))
    (_, groups, y), _ = predictive(grouped, features(), g, torch.zeros(SIZE)).draw(0)
    assert torch.equal(groups, g) and y.std() > 0.5
    with pytest.raises(ModelError, match="Running the model on the made-up arguments"):
        PriorPredictive(grouped, predictive(logistic, features(), g).plate, (features(),), {}).draw(
            0
        )
