"""Sites of single records through linear predictors, against brute force."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import glm, logistic, mixture, take_one_by_one
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from seeded import records_of
from torch._C._functorch import is_batchedtensor

from pyro_dp import ModelError
from pyro_dp.infer.ep.problem import EPProblem

SLOW = "one record at a time"


class Problem:
    """A model on its data, with what DPSEP asks of the moments."""

    def __init__(self, model, *data, moments="linear", plate=None):
        pyro.clear_param_store()
        self.records = records_of(model, *data, plate=plate)
        guide = AutoNormal(poutine.block(model, hide=["z"]))
        self.moments = EPProblem.build(model, guide, self.records, moments, None).moments

    def sites(self, mean=None, covariance=None, indices=None):
        """Precisions (B, d, d) and residuals (B, d); of all records in ``cavity()`` by default."""
        mean, covariance = cavity() if mean is None else (mean, covariance)
        indices = torch.arange(self.records.plate.size) if indices is None else indices
        spread = self.moments.spread(covariance)
        found = self.moments.factors(mean, spread, indices, self.records.rows(indices))
        return found.matrices(), found.residual


def on_grid(log_likelihood, mean, covariance, half=7.0, count=301):
    """Site of log_likelihood, (K, 2) -> (K,), by brute force over both latents."""
    root, axis = torch.linalg.cholesky(covariance), torch.linspace(-half, half, count)
    u = torch.cartesian_prod(axis, axis)
    z = mean + u @ root.T
    weights = torch.softmax(log_likelihood(z) - u.square().sum(1) / 2, dim=0).unsqueeze(1)
    average = (weights * z).sum(0)
    tilted = torch.linalg.inv((weights * (z - average)).T @ (z - average))
    return tilted - torch.linalg.inv(covariance), tilted @ (average - mean)


def cavity():
    root = torch.tensor([[0.5, 0.0], [-0.3, 0.4]])
    return torch.tensor([0.4, -0.7]), root @ root.T


def close(found, expected, tolerance=1e-8):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def latents(name="w", size=2):
    return pyro.sample(name, dist.Normal(torch.zeros(size), 1.0).to_event(1))


regression = glm(lambda mean: dist.Normal(mean, 0.5))
poisson = glm(lambda mean: dist.Poisson(mean.exp()))


def noisy(x, y):
    """Location and scale are linear in the latents."""
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx, 0] * w[0], (x[idx, 1] * w[1]).exp()), obs=y[idx])


def curved(x, y):
    """A predictor that is not linear."""
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        mean = torch.tanh(x[idx, 0] * w[0]) * w[1]
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y[idx])


def data(size=5):
    return torch.randn(size, 2), torch.bernoulli(torch.full((size,), 0.5))


DENSITIES = {
    logistic: lambda x, y, z: dist.Bernoulli(logits=z @ x).log_prob(y),
    poisson: lambda x, y, z: dist.Poisson((z @ x).exp()).log_prob(y),
    regression: lambda x, y, z: dist.Normal(z @ x, 0.5).log_prob(y),
}


@pytest.mark.parametrize("model", DENSITIES, ids=["logistic", "poisson", "regression"])
def test_sites_are_those_of_a_grid(model):
    x, y = data()
    problem, (mean, covariance) = Problem(model, 0.5 * x, y), cavity()
    for n, found in enumerate(zip(*problem.sites(), strict=True)):
        expected = on_grid(lambda z, n=n: DENSITIES[model](0.5 * x[n], y[n], z), mean, covariance)
        close(found, expected, 1e-3)


def limited(x, y):
    """A scale whose prior has an upper limit: its logarithm is a curve."""
    w, scale = pyro.sample("w", dist.Normal(0.0, 1.0)), pyro.sample("s", dist.Uniform(0.0, 9.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx, 0] * w, scale), obs=y[idx])


def bent(x, y):
    """The location is a curve as well."""
    w, scale = latents(), pyro.sample("s", dist.Uniform(0.0, 9.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal((x[idx] @ w).tanh(), scale), obs=y[idx])


def beside_labels(x, y):
    """The second logit of another outcome is a curve."""
    w, scale = latents(), pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx, 0] * w[0], scale), obs=y[idx])
        logits = torch.stack([x[idx, 0] * w[0], x[idx, 1] * w[1].exp(), 0 * x[idx, 0]], dim=-1)
        pyro.sample("label", dist.Categorical(logits=logits), obs=y[idx])


@pytest.mark.parametrize(
    ("model", "kind", "is_curved"),
    [
        (noisy, "scaled", False),
        (limited, "scaled", True),
        (bent, "other", True),
        (beside_labels, "other", True),
    ],
)
def test_residuals_are_scaled_if_the_location_is_linear(model, kind, is_curved):
    moments = Problem(model, *data()).moments
    assert (moments.residuals, moments.curved) == (kind, is_curved)


def test_an_unknown_scale_has_the_mean_score_and_fishers_information():
    """Means over the cavity, by brute force."""
    (x, y), (mean, covariance) = data(), cavity()
    problem, axis = Problem(noisy, x, y), torch.linspace(-7.0, 7.0, 301)
    u = torch.cartesian_prod(axis, axis)
    weights, z = (
        torch.softmax(-u.square().sum(1) / 2, dim=0),
        mean + u @ torch.linalg.cholesky(covariance).T,
    )
    for n, (precision, residual) in enumerate(zip(*problem.sites(mean, covariance), strict=True)):
        precise = (-2 * x[n, 1] * z[:, 1]).exp()
        away = y[n] - x[n, 0] * z[:, 0]
        scores = torch.stack([precise * away, precise * away.square() - 1], dim=1)
        information = torch.diag(torch.stack([weights @ precise, torch.tensor(2.0)]))
        close(
            (precision, residual),
            (x[n, :, None] * information * x[n], (weights @ scores) * x[n]),
            1e-6,
        )


@pytest.mark.long
def test_linear_regression_is_exact():
    x, y = data()
    mean, covariance = cavity()
    for scale in (1e-6, 1.0, 100.0):
        precision, residual = Problem(regression, x, y).sites(mean, scale * covariance)
        expected = x.unsqueeze(2) * x.unsqueeze(1) / 0.25
        close((precision, residual), (expected, (y - x @ mean).unsqueeze(1) * x / 0.25))


@pytest.mark.long
def test_a_curved_predictor_is_linearised_at_the_cavity_mean():
    """That is one step of Gauss and Newton."""
    x, y = data()
    mean, _ = cavity()
    precision, residual = Problem(curved, x, y).sites()
    for n in range(len(x)):
        place = mean.clone().requires_grad_()
        value = torch.tanh(x[n, 0] * place[0]) * place[1]
        (slope,) = torch.autograd.grad(value, place)
        expected = torch.outer(slope, slope) / 0.25, (y[n] - value.detach()) * slope / 0.25
        close((precision[n], residual[n]), expected)


def visits(x, y):
    w = latents()
    with pyro.plate("data", len(x), dim=-2) as idx, pyro.plate("visits", y.shape[1], dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def visits_in_an_event(x, y):
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w).to_event(1), obs=y[idx])


def visits_in_a_loop(x, y):
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        for t in range(y.shape[1]):
            pyro.sample(f"y{t}", dist.Bernoulli(logits=x[idx, t] @ w), obs=y[idx, t])


@pytest.mark.long
@pytest.mark.parametrize("model", [visits, visits_in_an_event, visits_in_a_loop])
def test_a_records_site_is_the_product_of_its_elements(model):
    x, y = torch.randn(4, 3, 2), torch.bernoulli(torch.full((4, 3), 0.5))
    found = Problem(model, x, y, plate="data").sites()
    single = Problem(logistic, x.flatten(0, 1), y.flatten()).sites()
    close(found, [each.unflatten(0, (4, 3)).sum(1) for each in single])


@pytest.mark.long
def test_sites_of_several_kinds_multiply():
    """A count and a measurement; of one and two numbers."""
    x, y = data()

    def both(x, y):
        w = latents()
        with pyro.plate("data", len(x)) as idx:
            scale = (x[idx, 1] * w[1]).exp()
            pyro.sample("y", dist.Normal(x[idx, 0] * w[0], scale), obs=y[idx])
            pyro.sample("k", dist.Poisson((x[idx] @ w).exp()), obs=y[idx])

    one, other = (Problem(model, x, y).sites() for model in (noisy, poisson))
    found = Problem(both, x, y).sites()
    close(found, [a + b for a, b in zip(one, other, strict=True)])


@pytest.mark.long
def test_masks_and_scales_are_powers():
    """They are powers of the likelihood: in a narrow cavity, of the site."""
    x, y = data()
    mean, covariance = cavity()
    weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0])

    def weighted(x, y, weights):
        w = latents()
        with pyro.plate("data", len(x)) as idx, poutine.mask(mask=weights[idx] > 0):
            with poutine.scale(scale=weights[idx]):
                pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    found = Problem(weighted, x, y, weights).sites(mean, 1e-10 * covariance)
    plain = Problem(logistic, x, y).sites(mean, 1e-10 * covariance)
    expected = plain[0] * weights[:, None, None], plain[1] * weights[:, None]
    close(found, expected, 1e-6)


@pytest.mark.parametrize("model", [logistic, noisy, visits])
def test_the_vectorised_path_is_the_loop(model):
    x, y = (torch.randn(5, 3, 2), torch.ones(5, 3)) if model is visits else data()
    problem = Problem(model, x, y, plate="data")
    fast = problem.sites()
    take_one_by_one(problem.moments)
    close(problem.sites(), fast, 1e-12)


def test_a_record_does_not_depend_on_its_batch():
    problem, chosen = Problem(noisy, *data()), torch.tensor([1, 3])
    together = problem.sites()
    close(problem.sites(indices=chosen), [each[chosen] for each in together], 1e-12)


@pytest.mark.long
def test_float32_models():
    """The model's numbers are rounded, the rest is not."""
    torch.set_default_dtype(torch.float32)
    x, y = data()
    mean, covariance = (each.double() for each in cavity())
    found = Problem(logistic, x, y).sites(mean, covariance)
    torch.set_default_dtype(torch.float64)
    assert found[0].dtype == found[1].dtype == torch.float64
    close(found, Problem(logistic, x.double(), y.double()).sites(mean, covariance), 1e-5)


def touchy(break_record):
    """A regression that breaks on a record with a predictor above 40."""

    def model(x, y):
        w = latents()
        with pyro.plate("data", len(x)) as idx:
            predictor = x[idx] @ w
            pyro.sample("y", dist.Normal(break_record(predictor), 0.5), obs=y[idx])

    return model


def raising(predictor):
    if predictor.max().item() > 40:
        raise ValueError
    return predictor


def undefined(predictor):
    return predictor + 0 * (40 - predictor).sqrt()


def check_broken(break_record, vectorizes, broken=(1,)):
    """The records that break are NaN, the others as ever."""
    x, y = torch.ones(4, 2), torch.ones(4)
    x[list(broken)] = 5.0
    if vectorizes:
        problem = Problem(touchy(break_record), x, y)
    else:
        with pytest.warns(UserWarning, match=SLOW):
            problem = Problem(touchy(break_record), x, y)
    mean, covariance = torch.full((2,), 5.0), 0.1 * torch.eye(2)
    found = problem.sites(mean, covariance)
    expected = Problem(regression, x, y).sites(mean, covariance)
    whole = [n for n in range(4) if n not in broken]
    for got, want in zip(found, expected, strict=True):
        assert got[list(broken)].isnan().flatten(1).any(1).all()
        torch.testing.assert_close(got[whole], want[whole])


@pytest.mark.long
@pytest.mark.parametrize("broken", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
@pytest.mark.parametrize(
    ("break_record", "vectorizes"), [(raising, False), (undefined, True)], ids=["raises", "NaN"]
)
def test_a_broken_record_is_nan_and_no_other(break_record, vectorizes, broken):
    check_broken(break_record, vectorizes, broken)


def test_only_a_broken_record_runs_alone():
    """Derivatives of one record at a time may differ from those of all at once."""

    def at_once(z, index, row):
        torch.linalg.cholesky(row[0].min().expand(1, 1))
        return z.new_tensor(float(is_batchedtensor(index)))

    x, y = torch.ones(5, 2), torch.ones(5)
    likelihood = Problem(regression, x, y).moments._likelihood
    z, indices = torch.zeros(2), torch.arange(5)
    likelihood.for_each("at once", at_once, z, indices[:1], [x[:1], y[:1]])
    x[3] = -1.0
    found = likelihood.for_each("at once", at_once, z, indices, [x, y])
    torch.testing.assert_close(found, torch.tensor([1.0, 1, 1, math.nan, 1]), equal_nan=True)


def factor(x, y):
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        pyro.factor("y", dist.Bernoulli(logits=x[idx] @ w).log_prob(y[idx]))


def softmax(x, y):
    w = latents(size=10)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Categorical(logits=x[idx] @ w.reshape(2, 5)), obs=y[idx])


def factor_beside(x, y):
    """An observation of few numbers, and more that depends on the latents."""
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 0.5), obs=y[idx])
        pyro.factor("more", -(x[idx] @ w).square())


NOT_LINEAR = [
    (mixture, lambda: (torch.randn(5, 2),), "summed out"),
    (factor, data, "'y' is a vector"),
    (factor_beside, data, "'more' is a vector"),
    (softmax, lambda: (torch.randn(6, 2), torch.arange(6) % 5), "'y' depends .* many numbers"),
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "make", "reason"), NOT_LINEAR)
def test_auto_takes_stein_elsewhere_and_linear_moments_say_why(model, make, reason):
    assert Problem(model, *make(), moments="auto").moments.name == "stein"
    with pytest.raises(ModelError, match=f"moments='linear' does not apply: .*{reason}"):
        Problem(model, *make())


def changing(x, y):
    """The scale depends on the latents for some records only: not for placeholders."""
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        scale = torch.ones(()) if (x[idx, 0] == 1.0).all().item() else w[1].exp()
        pyro.sample("y", dist.Normal(x[idx] @ w, scale), obs=y[idx])


@pytest.mark.parametrize("moments", ["linear", "auto"])
def test_data_that_behave_differently_from_placeholders_are_refused(moments):
    x, y = torch.ones(4, 2), torch.full((4,), 3.0)
    x[0] = 2.0
    with pytest.warns(UserWarning, match=SLOW), pytest.raises(ModelError, match="moments='stein'"):
        Problem(changing, x, y, moments=moments)


def test_the_check_looks_at_the_records_it_is_given():
    x, y = torch.ones(9, 2), torch.full((9,), 3.0)
    x[1] = 2.0  # no example
    with pytest.warns(UserWarning, match=SLOW):
        problem = Problem(changing, x, y)
    for n in (0, 2):
        problem.moments.check([torch.ones(2)], torch.tensor([n]), [x[[n]], y[[n]]])
    with pytest.raises(ModelError, match="in another form than on placeholders"):
        problem.moments.check([torch.ones(2)], torch.tensor([1]), [x[[1]], y[[1]]])


@pytest.mark.parametrize("model", [logistic, poisson, regression, noisy, curved, visits])
def test_auto_takes_linear_where_it_applies_and_says_what_is_curved(model):
    x, y = (torch.randn(5, 3, 2), torch.ones(5, 3)) if model is visits else data()
    moments = Problem(model, x, y, plate="data", moments="auto").moments
    assert moments.name == "linear" and moments.curved == (model is curved)


@pytest.mark.long
def test_predictors_that_turn():
    """A curve of a linear predictor is one of its kind. A product or a sum of curves is not."""
    kinds = {
        "probit": lambda w: torch.special.ndtr(w[0] - w[1]),
        "scale": lambda w: 10 * torch.sigmoid(w[1]),
        "product": lambda w: w[0] * w[1],
        "sum": lambda w: w[0].exp() + w[1].exp(),
    }
    for kind, predictor in kinds.items():

        def model(y, predictor=predictor):
            w = latents()
            with pyro.plate("data", len(y)) as idx:
                pyro.sample("y", dist.Normal(predictor(w), 1.0), obs=y[idx])

        moments = Problem(model, torch.randn(5)).moments
        assert moments.curved and moments.turns == (kind in ("product", "sum"))
        assert moments.monotone == (kind == "sum")


def test_parameters_of_two_predictors_do_not_turn():
    """A beta regression: both parameters depend on its mean and its precision."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)) as idx:
            share, precision = torch.sigmoid(x[idx] @ w[:2]), w[2].exp()
            pyro.sample("y", dist.Beta(share * precision, (1 - share) * precision), obs=y[idx])

    moments = Problem(model, torch.randn(5, 2), torch.rand(5)).moments
    assert moments.curved and not moments.turns


@pytest.mark.parametrize("kind", ["sum", "product"])
def test_sums_of_curves_have_curvatures_of_their_own(kind):
    """Two variances of one outcome add up; a product has saddles, also of three latents."""

    def model(y):
        w = latents(size=3)
        loc, sd = w[0], (w[1].exp() + w[2].exp()).sqrt()
        if kind == "product":
            loc, sd = w[0] * w[1].exp(), w[2].exp()
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Normal(loc, sd), obs=y[idx])

    moments = Problem(model, torch.randn(5), moments="auto").moments
    assert moments.turns == (kind == "product")
    assert moments.name == ("stein" if kind == "sum" else "linear")


def test_a_function_of_differences_is_curved():
    """It looks linear to a step that is the same for all latents."""

    def model(y):
        w = latents()
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Normal(torch.tanh(w[0] - w[1]), 1.0), obs=y[idx])

    assert Problem(model, torch.randn(5)).moments.curved


# A record that is unlike the examples raises, which tells that there is one.


def ragged(x, y):
    """The record says how many observations it has."""
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        count = int(x[idx, 0].max().item())
        mean = (x[idx] @ w).unsqueeze(-1).expand(-1, count)
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y[idx, None].expand(-1, count))


def other_site(x, y):
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        name = "y" if (x[idx, 0] == 1).all() else "other"
        pyro.sample(name, dist.Normal(x[idx] @ w, 0.5), obs=y[idx])


def other_distribution(x, y):
    w = latents()
    with pyro.plate("data", len(x)) as idx:
        mean = x[idx] @ w
        same = (x[idx, 0] == 1).all()
        fn = dist.StudentT(3.0, mean, 1.0) if same else dist.Normal(mean, 1.0)
        pyro.sample("y", fn, obs=y[idx])


@pytest.mark.long
@pytest.mark.parametrize("model", [ragged, other_site, other_distribution])
def test_a_record_unlike_the_examples_raises_nothing(model):
    x, y = torch.ones(9, 2), torch.ones(9)
    x[1] = 2.0
    with pytest.warns(UserWarning, match=SLOW):
        problem = Problem(model, x, y)
    others = torch.tensor([0, 2, 8])
    close([each[others] for each in problem.sites()], problem.sites(indices=others))


def factorised(predictor):
    """Not positive definite for a predictor above 40: raises for the whole batch."""
    root = torch.linalg.cholesky((40 - predictor)[..., None, None])
    return predictor + 0 * root[..., 0, 0]


@pytest.mark.every_commit
@pytest.mark.long
def test_a_record_that_raises_in_a_vectorised_model():
    """SVI's gradients go on with the loop."""
    check_broken(factorised, vectorizes=True)
