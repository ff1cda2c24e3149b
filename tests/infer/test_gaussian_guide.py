"""A guide as one Gaussian: Pyro draws from the written one, and other guides are refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import handwritten_guide, hierarchical, logistic
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam
from seeded import records_of
from torch import nn

from pyro_dp import ModelError
from pyro_dp.infer.posterior.gaussian_guide import GaussianGuide
from pyro_dp.records.initial_values import initialise


def of_ample_rank(model):
    """Any covariance is of low rank plus a diagonal, if the rank is large enough."""
    return AutoLowRankMultivariateNormal(model, rank=20)


AUTOGUIDES = [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, of_ample_rank]
WITH_CORRELATIONS = (AutoMultivariateNormal, of_ample_rank)


def found(model, guide, *data):
    records = records_of(model, *data, plate="data")
    initialise(model, guide, records)
    return GaussianGuide(model, guide, records)


def data():
    return torch.randn(8, 3), torch.randn(8).sign().clamp(0.0)


def gaussian(size):
    """Mean and covariance that differ in every entry."""
    factor = 0.3 * torch.randn(size, size, dtype=torch.float64).tril(-1)
    factor += torch.linspace(0.1, 1.0, size, dtype=torch.float64).diag()
    return torch.linspace(-1.0, 1.0, size, dtype=torch.float64), factor @ factor.mT


def close(one, other, dtype=torch.float64):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def drawn(model, guide, view, arguments, count=1000):
    """Unconstrained draws of Predictive, (count, d)."""
    names = [latent.name for latent in view.latents]
    draws = Predictive(model, guide=guide, num_samples=count, return_sites=names)(*arguments)
    flat = [each.transform.inv(draws[each.name]).reshape(count, -1) for each in view.latents]
    return torch.cat(flat, dim=1)


def check_moments(draws, mean, covariance):
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws - mean).T, upper=False
    )
    assert white.mean(1).abs().max() < 0.15
    assert (white.cov() - torch.eye(len(mean))).abs().max() < 0.2


def constrained(x):
    """Latents in five spaces, two of them in a plate, around an enumerated one."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    bound = pyro.sample("bound", dist.Uniform(-1.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        mean = locs[z] * rate[z].unsqueeze(-1) + bound
        pyro.sample("x", dist.Normal(mean, scale).to_event(1), obs=x[idx])


def of_constrained(kind):
    return kind(poutine.block(constrained, hide=["z"]))


def regression(x, y):
    """Real latents: matrix, vector and scalar."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        mean = (x[idx] @ w.T + b).sum(-1) + c
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])


def regression_guide(form, constraint):
    """Every kind of site: blocks of 3, 3, 2 and 1."""

    def guide(x, y):
        w = pyro.param("w_loc", torch.zeros(2, 3))
        w_scale = pyro.param("w_scale", 0.5 * torch.eye(3).repeat(2, 1, 1), constraint=constraint)
        pyro.sample("w", dist.MultivariateNormal(w, **{form: w_scale}).to_event(1))
        b = pyro.param("b_loc", torch.zeros(2))
        b_scale = pyro.param("b_scale", torch.eye(2), constraint=constraints.lower_cholesky)
        pyro.sample("b", dist.MultivariateNormal(b, scale_tril=b_scale))
        c = pyro.param("c_loc", torch.tensor(0.5))
        c_scale = pyro.param("c_scale", torch.tensor(0.5), constraint=constraints.positive)
        pyro.sample("c", dist.Normal(c, c_scale).expand([]))

    return guide


def joint_guide(x, y):
    loc = pyro.param("loc", torch.zeros(3))
    scale = pyro.param("scale", torch.eye(3), constraint=constraints.lower_cholesky)
    pyro.sample("w", dist.MultivariateNormal(loc, scale_tril=scale))


class ModuleGuide(PyroModule):
    """Parameters as attributes, which are read twice."""

    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(3))
        self.scale = PyroParam(torch.full((3,), 0.3), constraint=constraints.softplus_positive)

    def forward(self, x, y):
        pyro.sample("w", dist.Normal(self.loc, self.scale).to_event(1))
        return self.loc, self.scale


GUIDES = {
    "AutoNormal": lambda: (regression, AutoNormal(regression)),
    "AutoDiagonalNormal": lambda: (regression, AutoDiagonalNormal(regression)),
    "AutoMultivariateNormal": lambda: (regression, AutoMultivariateNormal(regression)),
    "AutoLowRankMultivariateNormal": lambda: (regression, of_ample_rank(regression)),
    "Normal": lambda: (logistic, handwritten_guide),
    "MultivariateNormal": lambda: (logistic, joint_guide),
    "module": lambda: (logistic, ModuleGuide()),
}
FORMS = {
    "scale_tril": constraints.softplus_lower_cholesky,
    "covariance_matrix": constraints.positive_definite,
    "precision_matrix": constraints.positive_definite,
}
for form in FORMS:
    GUIDES[form] = lambda form=form: (regression, regression_guide(form, FORMS[form]))
DIAGONAL = ("AutoNormal", "AutoDiagonalNormal", "Normal", "module")
CORRELATED = ("AutoMultivariateNormal", "AutoLowRankMultivariateNormal", "MultivariateNormal")


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_what_is_written_is_read_and_drawn(name):
    model, guide = GUIDES[name]()
    arguments = data()
    view = found(model, guide, *arguments)
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance)
    read_mean, held = view.read()
    assert read_mean.dtype == held.dtype == torch.float64
    assert not read_mean.requires_grad and not held.requires_grad
    if name in DIAGONAL:
        expected = covariance.diagonal()
    elif name in CORRELATED:
        expected = covariance
    else:
        expected = covariance * torch.block_diag(*(torch.ones(k, k) for k in (3, 3, 2, 1)))
    close(read_mean, mean)
    close(held, expected)
    full = torch.diag(held) if name in DIAGONAL else held
    check_moments(drawn(model, guide, view, arguments), mean, full)
    view.write(read_mean, held)
    for one, other in zip(view.read(), (mean, expected), strict=True):
        close(one, other)


@pytest.mark.parametrize("name", GUIDES)
def test_variances_can_be_written_to_all(name):
    view = found(*GUIDES[name](), *data())
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance.diagonal())
    _, held = view.read()
    close(held, covariance.diagonal() if name in DIAGONAL else covariance.diagonal().diag())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", AUTOGUIDES)
def test_autoguides_show_what_is_written(kind, dtype):
    """Median, quantiles and posterior; latents in their own spaces."""
    torch.set_default_dtype(dtype)
    x = torch.randn(8, 2)
    guide = of_constrained(kind)
    view = found(constrained, guide, x)
    assert view.size == 1 + 2 + 6 + 3 + 1
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance)
    median, quantiles = guide.median(x), guide.quantiles([0.1, 0.5], x)
    low = mean - 1.2815515655446004 * covariance.diagonal().sqrt()
    for latent in view.latents:
        name = latent.name
        assert median[name].dtype == dtype
        close(median[name], latent.transform(latent.part(mean)), dtype)
        close(quantiles[name][0], latent.transform(latent.part(low)), dtype)
        close(quantiles[name][1], median[name], dtype)
    if kind is not AutoNormal:
        close(guide.get_posterior(x).mean, mean, dtype)
        close(guide.get_posterior(x).variance, covariance.diagonal(), dtype)
    if kind in WITH_CORRELATIONS:
        close(guide.get_posterior(x).covariance_matrix, covariance, dtype)


@pytest.mark.parametrize("rank", [1, 2, None])
def test_a_guide_of_low_rank_holds_the_closest(rank):
    """Pyro's posterior is what was read, and has all variances; the covariance differs."""
    guide = AutoLowRankMultivariateNormal(regression, rank=rank)
    view = found(regression, guide, *data())
    mean, covariance = gaussian(view.size)
    view.write(mean, covariance)
    posterior = guide.get_posterior()
    read_mean, held = view.read()
    close(posterior.mean, mean)
    close(posterior.covariance_matrix, held)
    close(read_mean, mean)
    close(held.diagonal(), covariance.diagonal())
    assert (held - covariance).abs().max() > 1e-3
    view.write(read_mean, held)
    torch.testing.assert_close(view.read()[1], held, rtol=1e-6, atol=1e-6)


def test_a_hand_written_guide_of_low_rank_is_refused():
    def guide(x, y):
        factor = pyro.param("factor", torch.ones(3, 1))
        pyro.sample("w", dist.LowRankMultivariateNormal(param("loc"), factor, positive("scale")))

    with pytest.raises(ModelError, match="'w' of the guide is a LowRankMultivariateNormal"):
        found(logistic, guide, *data())


def test_data_and_random_state_are_left_alone():
    def peeking(x, y):
        assert x.eq(1).all()
        handwritten_guide(x, y)

    arguments = data()
    records = records_of(logistic, *arguments)
    handwritten_guide(*arguments)
    before = torch.get_rng_state()
    GaussianGuide(logistic, peeking, records)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", GUIDES)
def test_is_current(name):
    view = found(*GUIDES[name](), *data())
    view.write(torch.zeros(view.size), torch.ones(view.size))
    assert view.is_current()
    store = pyro.get_param_store()
    for parameter in list(store.keys()):
        leaf = store.get_state()["params"][parameter]
        store[parameter] = store[parameter].detach()
        assert not view.is_current()
        store._params[parameter] = leaf
        assert view.is_current()
    pyro.clear_param_store()
    assert not view.is_current()


@pytest.mark.parametrize(
    "kind", [AutoDelta, lambda model: AutoIAFNormal(model, hidden_dim=[8]), AutoGuideList]
)
def test_other_autoguides_are_refused(kind):
    with pytest.raises(ModelError, match="The guide is an Auto.*AutoDiagonalNormal.*DPSVI"):
        found(logistic, kind(logistic), *data())


def param(name, value=0.0, **settings):
    return pyro.param(name, torch.full((3,), value), **settings)


def positive(name):
    return param(name, 0.5, constraint=constraints.positive)


def frozen(name):
    positive(name).unconstrained().requires_grad_(False)
    return pyro.param(name)


def scalar(name):
    return pyro.param(name, torch.tensor(1.0))


def bounded(constraint):
    return dist.Normal(param("loc"), param("scale", 0.5, constraint=constraint))


def of_matrix(factor):
    return dist.MultivariateNormal(param("loc"), scale_tril=factor)


def unit_diagonal():
    return pyro.param("scale", torch.eye(3), constraint=constraints.unit_lower_cholesky)


# Errors, and distributions of "w" in a guide about which they are.
NO_PARAMETER = "of site 'w'.*in the shape of the site.*pyro.param of its own.*DPSVI takes any guide"
REFUSED = {
    "'w' of the guide is a .*DPSVI takes any guide": {
        "another distribution": lambda: dist.Gamma(positive("a"), positive("b")),
        "a transformed Gaussian": lambda: dist.LogNormal(param("loc"), positive("scale")),
        "a point": lambda: dist.Delta(param("loc")),
    },
    f"location {NO_PARAMETER}": {
        "twice a parameter": lambda: dist.Normal(2 * param("loc"), positive("scale")),
        "the identity near 0": lambda: dist.Normal(param("loc").tanh(), positive("scale")),
        "a constant location": lambda: dist.Normal(torch.zeros(3), positive("scale")),
        "one location for all": lambda: dist.Normal(scalar("loc"), positive("scale")),
        "expanded": lambda: dist.Normal(scalar("loc"), scalar("scale")).expand([3]),
        "a part": lambda: dist.Normal(pyro.param("x", torch.zeros(6))[:3], positive("scale")),
    },
    f"scale {NO_PARAMETER}": {
        "a constant scale": lambda: dist.Normal(param("loc"), torch.ones(3)),
        "a function as scale": lambda: dist.Normal(param("loc"), param("log_scale").exp()),
        "a product as scale_tril": lambda: of_matrix(positive("scale").diag()),
        "one scale for all": lambda: dist.Normal(param("loc"), scalar("scale")),
        "a frozen parameter": lambda: dist.Normal(param("loc"), frozen("scale")),
    },
    "'w' of the guide shares a parameter": {
        "one parameter for both": lambda: dist.Normal(param("loc", 1.0), param("loc")),
    },
    "'w' of the guide are constrained too much": {
        "a positive location": lambda: dist.Normal(positive("loc"), positive("scale")),
        "a scale that is bounded above": lambda: bounded(constraints.interval(0.0, 2.0)),
        "a scale that is bounded below": lambda: bounded(constraints.greater_than(0.1)),
        "a unit diagonal": lambda: of_matrix(unit_diagonal()),
    },
}


@pytest.mark.parametrize(
    ("message", "case"), [(message, case) for message, cases in REFUSED.items() for case in cases]
)
def test_hand_written_sites_that_are_refused(message, case):
    def guide(x, y):
        fn = REFUSED[message][case]()
        pyro.sample("w", fn.to_event(1 - fn.event_dim))

    with pytest.raises(ModelError, match=message):
        found(logistic, guide, *data())


def below_another(x, y):
    top = pyro.sample("top", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    logistic(x + top, y)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (lambda top: top, "location of site 'w'"),
        (lambda top: pyro.param("top_loc"), "'w' of the guide shares a parameter"),
    ],
)
def test_sites_have_parameters_of_their_own(location, message):
    def guide(x, y):
        top = pyro.sample("top", dist.Normal(param("top_loc"), positive("top_scale")).to_event(1))
        pyro.sample("w", dist.Normal(location(top), positive("scale")).to_event(1))

    with pytest.raises(ModelError, match=message):
        found(below_another, guide, *data())


def test_a_parameter_that_a_plate_subsamples():
    def model(x, y):
        with pyro.plate("groups", 3, subsample_size=2):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx, 0] + b.sum(), 1.0), obs=y[idx])

    with pytest.raises(ModelError, match="'b' of the guide has a scale.*subsample_size"):
        found(model, AutoNormal(model), *data())


@pytest.mark.parametrize("kind", AUTOGUIDES)
def test_local_latents_are_refused(kind):
    with pytest.raises(ModelError, match="'effect' .*private plate 'data'.*enumerate.*DPSVI"):
        found(hierarchical, kind(hierarchical), *data())


def test_latents_of_model_and_guide_must_agree():
    def more(x, y):
        handwritten_guide(x, y)
        pyro.sample("other", dist.Normal(param("other_loc"), positive("other_scale")).to_event(1))

    with pytest.raises(ModelError, match="'other' of the guide is no latent of the model"):
        found(logistic, more, *data())
    with pytest.raises(ModelError, match="'top' of the model is not in the guide"):
        found(below_another, handwritten_guide, *data())

    def no_latent(x, y):
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx, 0], 1.0), obs=y[idx])

    with pytest.raises(ModelError, match="no latent outside the private plate 'data'"):
        found(no_latent, lambda x, y: None, *data())


def test_a_guide_with_a_scale_means_another_width():
    with pytest.raises(ModelError, match="Site 'w' of the guide has a scale"):
        found(logistic, poutine.scale(handwritten_guide, scale=0.1), *data())


def switched(x, y):
    pyro.sample("switch", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    logistic(x, y)


def of_one_shape(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w.expand(3), 1.0), obs=y[idx])


def of_spreads(x, y):
    spread = pyro.sample("w", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ spread, 1.0), obs=y[idx])


def with_a_shift(x, y):
    logistic(x + pyro.param("shift", torch.zeros(3)), y)


def of_one_parameter(x, y):
    logistic(x + pyro.param("loc", torch.zeros(3)), y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (switched, "'switch' of the model is not in the guide"),
        (of_one_shape, "'w' has different shapes"),
        (of_spreads, "'w' of the model is constrained.*autoguide"),
        (with_a_shift, "learns parameter 'shift'.*make it a latent"),
        (of_one_parameter, "The model learns parameter 'loc'"),
    ],
)
def test_models_that_no_guide_of_real_latents_fits(model, message):
    with pytest.raises(ModelError, match=message):
        found(model, handwritten_guide, *data())


def test_a_support_that_moves():
    def model(x, y):
        top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
        below = pyro.sample("below", dist.Uniform(0.0, top))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx, 0] + below, 1.0), obs=y[idx])

    with torch.no_grad(), pytest.raises(ModelError, match="support of site 'below' depends"):
        found(model, AutoNormal(model), *data())


def test_parameters_of_a_module_are_refused():
    network = nn.Linear(3, 1)

    def with_module(x, y):
        logistic(pyro.module("network", network)(x).expand(-1, 3), y)

    with pytest.raises(ModelError, match="learns parameter 'network.*weight'"):
        found(with_module, handwritten_guide, *data())
