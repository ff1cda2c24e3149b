"""How a model reads its arguments is found, and makes no difference to what is computed."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    handwritten_guide,
    logistic,
    logistic_subsampled,
    logistic_whole,
    regression_data,
)

from pyro_dp import DPSEP, DPSVI, ModelError, Noise, PrivacyAccountant
from pyro_dp.records.first_look import find_reading
from pyro_dp.records.plate import find_plate
from pyro_dp.records.records import Reading

SIZE = 30


def weights(x):
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))


def taken_by_pyro(x, y):
    w = weights(x)
    with pyro.plate("data", len(x), subsample_size=7):
        x, y = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def sequential(x, y):
    w = weights(x)
    for i in pyro.plate("data", len(x)):
        pyro.sample(f"y{i}", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def with_size(x, y, n=SIZE):
    w = weights(x)
    with pyro.plate("data", n):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def expanded(x, y, n=SIZE):
    w = weights(x)
    with pyro.plate("data", n):
        pyro.sample("y", dist.Bernoulli(logits=x @ w).expand([n]), obs=y)


def with_latents(x, y, n=SIZE):
    w = weights(x)
    with pyro.plate("data", n):
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([n]))
        u = pyro.sample("u", dist.Normal(z, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=x @ w + u), obs=y)


def divided(x, y, n=SIZE):
    """One N for shapes, and in a number."""
    w = weights(x)
    with pyro.plate("data", n):
        pyro.sample("y", dist.Bernoulli(logits=x @ w / n).expand([n]), obs=y)


def features_whole(x, y):
    w = weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y[idx])


FOUND = [
    (logistic, (), Reading.BY_INDEX),
    (logistic_subsampled, (), Reading.BY_INDEX),
    (taken_by_pyro, (), Reading.BY_INDEX),
    (sequential, (), Reading.BY_INDEX),
    (logistic_whole, (), Reading.WHOLE),
    (with_size, (SIZE,), Reading.WHOLE),
    (expanded, (SIZE,), Reading.COUNTED),
    (with_latents, (SIZE,), Reading.COUNTED),
]


@pytest.mark.parametrize(("model", "more", "expected"), FOUND)
def test_found(model, more, expected):
    arguments = (*regression_data(), *more), {}
    before, plate = torch.get_rng_state(), find_plate(model, *arguments, None)
    assert find_reading(model, plate, arguments, "auto") is expected
    assert torch.equal(before, torch.get_rng_state())
    assert not list(pyro.get_param_store().keys())


def test_nothing_is_found_in_the_data():
    """The model's values for real rows would lead it elsewhere."""

    def peeking(x, y):
        return (logistic if (x == 1).all() else logistic_whole)(x, y)

    arguments = regression_data(), {}
    plate = find_plate(peeking, *arguments, None)
    assert find_reading(peeking, plate, arguments, "auto") is Reading.BY_INDEX


def fitted(kind, model, data, **settings):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = pyro.infer.autoguide.AutoMultivariateNormal(model)
    accountant = PrivacyAccountant(4.0, 1e-5)
    inference = kind(model, guide, accountant=accountant, noise=Noise(source=0), **settings)
    inference.run(*data, progress=False)
    return inference.posterior(noise_aware=False).mean


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic_whole, with_size, expanded])
def test_equal_numbers(model):
    """As by index, for both inferences."""
    data, more = regression_data(), () if model is logistic_whole else (SIZE,)
    for kind, settings in ((DPSVI, {"num_steps": 60, "sampling": 0.5}), (DPSEP, {})):
        expected = fitted(kind, logistic, data, **settings)
        found = fitted(kind, model, (*data, *more), **settings)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("model", "more"), [(divided, (SIZE,)), (features_whole, ())])
def test_where_neither_fits(model, more):
    """A number of records that means more than a length is not replaced by another one."""
    pyro.clear_param_store()
    guide = handwritten_guide if not more else lambda x, y, n: handwritten_guide(x, y)
    svi = DPSVI(model, guide, accountant=PrivacyAccountant(1.0, 1e-5))
    with pytest.raises(ModelError, match="'y'.*plate"):
        svi.step(*regression_data(), *more)
    assert svi.accountant.get_epsilon() == 0
