"""Continuous latents of records: integrated out where that is possible, beside closed forms."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from seeded import look_sums, seeded
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp import DPSEP, DPSVI, ModelError, PrivacyAccountant
from pyro_dp.graphs.tracing import NotTraceable
from pyro_dp.infer import fitted_rows
from pyro_dp.infer.dpsvi import Looks
from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.infer.fitted_rows import FittedRows
from pyro_dp.infer.posterior.gaussian_guide import OnPlaceholders
from pyro_dp.records.first_look import first_look
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.quadrature import _at, _Values, integrated, num_nodes, without_latents

PLATE = PrivatePlate("data", 1, 1, continuous={"own": 1})
ONE = torch.ones(1, dtype=torch.float64)


def normal(z, y):
    with pyro.plate("data", 1):
        own = pyro.sample("own", dist.Normal(z[0] * ONE, z[1].exp()))
        pyro.sample("y", dist.Normal(own, 0.7), obs=y)


def count(z, y):
    with pyro.plate("data", 1):
        own = pyro.sample("own", dist.Gamma(z[1].exp() * ONE, z[0].exp()))
        pyro.sample("y", dist.Poisson(own), obs=y)


def player(z, y):
    m, k = z[0].sigmoid(), z[1].exp()
    with pyro.plate("data", 1):
        own = pyro.sample("own", dist.Beta(m * k * ONE, (1 - m) * k))
        pyro.sample("y", dist.Binomial(400, own), obs=y)


def players_marginal(z, y):
    m, k = z[0].sigmoid(), z[1].exp()
    return dist.BetaBinomial(m * k, (1 - m) * k, 400).log_prob(y)


CLOSED = {
    "normal": (normal, lambda z, y: dist.Normal(z[0], (z[1].exp() ** 2 + 0.49).sqrt()).log_prob(y)),
    "count": (count, lambda z, y: dist.GammaPoisson(z[1].exp(), z[0].exp()).log_prob(y)),
    "player": (player, players_marginal),
}


def marginal(model, plate=PLATE):
    """By the integral of the product's own code."""

    def log_prob(z, y):
        trace = poutine.trace(without_latents(model, plate)).get_trace(z, y)
        return trace.log_prob_sum()

    return lambda z, y: integrated(lambda z: log_prob(z, y), z)


@pytest.mark.parametrize(
    ("name", "y"),
    [
        ("normal", -3.0),
        ("normal", 40.0),
        ("count", 0.0),
        ("count", 7.0),
        ("count", 3000.0),  # it says much more of its latent than the prior does
        ("player", 0.0),
        ("player", 130.0),
    ],
)
def test_closed_forms(name, y):
    model, exact = CLOSED[name]
    z, y = torch.tensor([-0.4, 0.9], dtype=torch.float64), y * ONE
    with pyro.validation_enabled(False):
        found, expected = marginal(model), lambda z, y: exact(z, y).sum()
        for transform in (lambda f: f, torch.func.grad, lambda f: torch.func.jacrev(grad(f))):
            one, other = transform(found)(z, y), transform(expected)(z, y)
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


grad = torch.func.grad


def test_two_latents():
    plate = PrivatePlate("data", 1, 1, continuous={"level": 1, "slope": 1})

    def model(z, y):
        with pyro.plate("data", 1):
            level = pyro.sample("level", dist.Normal(z[0] * ONE, 1.0))
            slope = pyro.sample("slope", dist.Normal(level, z[1].exp()))
            pyro.sample("y", dist.Normal(level + 2 * slope, 0.5), obs=y)

    z, y = torch.tensor([0.3, -0.2], dtype=torch.float64), 4.0 * ONE
    variance = 9 + 4 * z[1].exp() ** 2 + 0.25
    expected = dist.Normal(3 * z[0], variance.sqrt()).log_prob(y).sum()
    with pyro.validation_enabled(False):
        torch.testing.assert_close(marginal(model, plate)(z, y), expected, rtol=1e-4, atol=1e-4)
    assert num_nodes(plate) == num_nodes(PLATE) ** 2


def test_records_are_integrated_one_by_one():
    """Under torch.vmap each record has a grid of its own."""
    z, y = torch.tensor([-0.4, 0.9], dtype=torch.float64), torch.tensor([[0.0], [7.0], [3000.0]])
    with pyro.validation_enabled(False):
        found = marginal(count)
        each = torch.stack([found(z, one) for one in y.double()])
        torch.testing.assert_close(torch.vmap(found, (None, 0))(z, y.double()), each)


def test_values_are_put_back():
    values = _Values({"own": ONE})
    with pytest.raises(ZeroDivisionError), _at(values):
        raise ZeroDivisionError
    seen = poutine.trace(without_latents(normal, PLATE)).get_trace(torch.zeros(2), 0.0 * ONE)
    assert seen.nodes["own"]["value"].item() == 0.0  # the prior's mean


# Runs.

SIZE = 600


def persons(y):
    """Shapes are written out, as enumeration would not allow."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Normal(mean, scale))
        each = dist.Normal(own[:, None], 0.5).expand([len(y), 3]).to_event(1)
        pyro.sample("y", each, obs=y)


def persons_data() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(SIZE, 4, generator=generator)
    return 0.8 + 1.3 * noise[:, :1] + 0.5 * noise[:, 1:]


def exact_posterior(y: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of mean and log scale, on a grid."""
    grid = torch.stack(
        torch.meshgrid(torch.linspace(0.4, 1.2, 161), torch.linspace(0.0, 0.6, 161), indexing="ij"),
        dim=-1,
    ).reshape(-1, 2)
    variance = (2 * grid[:, 1:]).exp() + 0.25 / 3
    terms = dist.Normal(grid[:, :1], variance.sqrt()).log_prob(y.mean(1)).sum(1)
    prior = dist.Normal(0.0, 1.0).log_prob(grid[:, 0]) + dist.Normal(0.0, 0.5).log_prob(grid[:, 1])
    weights = (terms + prior).double().softmax(0).unsqueeze(1)
    mean = (weights * grid).sum(0)
    return mean, (weights * (grid - mean) ** 2).sum(0).sqrt()


def budget():
    return PrivacyAccountant(epsilon=100.0, delta=1e-5)


def fitted(model, guide, *data, method=DPSVI):
    return seeded(method, model, lambda _: guide, *data, epsilon=100.0)


@pytest.mark.slow
def test_posterior_and_rows():
    """Rows of the guide end at each record's own posterior, which is Normal here.

    No state has them. A resumed run fits them anew.
    """
    y = persons_data()
    guide = AutoNormal(persons)
    svi = fitted(persons, guide, y)
    assert isinstance(svi._inference, Looks) and svi.posterior().status.is_ok
    mean, sd = exact_posterior(y)
    found = svi.posterior()
    torch.testing.assert_close(found.mean, mean.double(), atol=0.3 * sd.max().item(), rtol=0.0)
    torch.testing.assert_close(found.stddev, sd.double(), rtol=0.1, atol=0.0)
    at, scale = found.mean[0], found.mean[1].exp()
    precision = scale**-2 + 3 / 0.25
    expected = (at / scale**2 + y.sum(1) / 0.25) / precision
    rows = {n: pyro.param(f"AutoNormal.{n}.own").detach().double() for n in ("locs", "scales")}
    assert (rows["locs"] - expected).abs().mean() < 0.3 * precision**-0.5
    torch.testing.assert_close(rows["scales"].mean(), precision**-0.5, rtol=0.1, atol=0.0)
    assert any("AutoNormal.locs.own" in note for note in svi.accountant.notes)
    assert not guide.prototype_trace.nodes["own"]["value"].any()  # the guide remembers no row
    with OnPlaceholders(svi._inference._kept.prepared.records).public():  # nor do public runs
        assert pyro.param("AutoNormal.locs.own").unique().numel() == 1
    state = svi.state_dict(include_private_local_state=True)
    kept = (x for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
    assert not any(SIZE in x.shape for x in kept)
    pyro.clear_param_store()
    resumed = DPSVI(persons, AutoNormal(persons), accountant=budget())
    resumed.load_state_dict(state)
    resumed.run(y, progress=False)
    again = pyro.param("AutoNormal.locs.own").detach()
    assert (again - rows["locs"]).abs().mean() < 0.1


@pytest.mark.slow
def test_a_graph_gives_the_gradients_of_pyro_code(monkeypatch):
    """The gradients agree in full passes and in the last, padded one."""
    y, guide = persons_data(), AutoNormal(persons)
    records = first_look(persons, guide, (y,), {}, plate=None, slice_data="auto")
    rows = FittedRows.find(persons, guide, records, None)
    particle, gradients = rows._draw(), {}
    for traces in (True, False):
        if not traces:
            monkeypatch.setattr(fitted_rows, "trace", refused)
        function = rows._gradients(particle, SIZE)
        for chosen in (torch.arange(SIZE), torch.tensor([3, 5])):
            torch.manual_seed(1)
            gradients[traces, len(chosen)] = function(particle, chosen)
    for name, found in gradients[True, SIZE].items():
        torch.testing.assert_close(found, gradients[False, SIZE][name])
        assert gradients[True, 2][name].shape == gradients[False, 2][name].shape
    assert gradients[True, SIZE]["AutoNormal.locs.own"].std() > 0


def refused(*given, **options):
    raise NotTraceable("it is refused")


@pytest.mark.slow
@pytest.mark.parametrize("method", [DPSEP, DPSVI])
def test_guides_of_global_latents(method):
    """Guides of global latents alone need no rows."""
    guide = AutoNormal(poutine.block(persons, hide=["own"]))
    found = fitted(persons, guide, persons_data(), method=method).posterior()
    mean, sd = exact_posterior(persons_data())
    torch.testing.assert_close(found.mean, mean.double(), atol=0.3 * sd.max().item(), rtol=0.0)
    assert found.quantiles([0.5]).keys() == {"mean", "scale"}


@pytest.mark.slow
@pytest.mark.every_commit
def test_extreme_records_keep_the_bound():
    """A record's part is within the bound, or it counts as nothing if it is not finite."""
    extreme = [1e3, -1e8, 1e30, 3e38, float("1e-40"), 0.0]
    y = torch.tensor(extreme).unsqueeze(1).expand(-1, 3) * torch.tensor([1.0, -1.0, 1.0])
    guide = AutoNormal(poutine.block(persons, hide=["own"]))
    pyro.clear_param_store()
    ep = DPSEP(persons, guide, accountant=PrivacyAccountant(), noise=5.0)
    ep._look_at((y,), {})
    bound = 0.02
    frame = Frame(torch.diag(torch.tensor([30.0, 0.1])), 0.7, bound, 0.1 * bound)
    parts = [look_sums(ep, frame, [record])[0] for record in range(len(y))]
    assert all(part.isfinite().all() for part in parts)
    assert max(part.norm() for part in parts) <= bound * (1 + 1e-9)
    assert parts[-1].norm() > 0
    torch.testing.assert_close(look_sums(ep, frame, range(len(y)))[0], sum(parts))


def answers(y):
    difficulty = pyro.sample("difficulty", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        logits = own.unsqueeze(-1) - difficulty
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=(y > 0).float())


def mixed(y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("persons", len(y)):
        halves = dist.Categorical(torch.ones(2))
        both = dist.MixtureSameFamily(halves, dist.Normal(mean, torch.ones(2)))
        pyro.sample("y", both, obs=y[:, 0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "residuals"),
    [
        (persons, Residuals.INTEGRATED),
        (answers, Residuals.LABELS),
        (mixed, Residuals.SUMMED),
    ],
)
def test_kinds_of_residuals(model, residuals):
    pyro.clear_param_store()
    guide = AutoNormal(poutine.block(model, hide=["own"]))
    ep = DPSEP(model, guide, accountant=PrivacyAccountant(), noise=5.0)
    ep._look_at((persons_data(),), {})
    assert ep._fit.approximation.plan.residuals == residuals


def amortised(y):
    pyro.sample("mean", dist.Normal(pyro.param("m", torch.tensor(0.0)), 0.1))
    pyro.sample("scale", dist.LogNormal(pyro.param("s", torch.tensor(0.0)), 0.1))
    slope = pyro.param("slope", torch.tensor(0.5))
    with pyro.plate("persons", len(y)):
        pyro.sample("own", dist.Normal(slope * y.mean(1), 0.3))


def of_three(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Normal(mean, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(own, 0.5).to_event(1), obs=y)


def without_mean(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", len(y)):
        own = pyro.sample("own", dist.Cauchy(mean, 1.0))
        pyro.sample("y", dist.Normal(own, 0.5), obs=y[:, 0])


def weighted(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", len(y)), poutine.scale(scale=2.0):
        own = pyro.sample("own", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(own, 0.5), obs=y[:, 0])


def several(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", len(y), dim=-2), pyro.plate("times", 3, dim=-1):
        own = pyro.sample("own", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(own, 0.5), obs=y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "guide", "reason"),
    [
        (persons, amortised, "Records share parameters of the guide"),
        (of_three, None, "more than two continuous latents"),
        (several, None, "more than two continuous latents"),
        (without_mean, None, "no finite mean"),
        (weighted, None, "a scale or a mask"),
    ],
)
def test_gradient_steps_elsewhere(model, guide, reason):
    svi = DPSVI(model, guide or AutoNormal(model), accountant=budget(), num_steps=1)
    svi.step(persons_data())
    assert not isinstance(svi._inference, Looks) and reason in svi._reason


@pytest.mark.long
@pytest.mark.every_commit
def test_gradient_steps_without_noise():
    svi = DPSVI(persons, AutoNormal(persons), accountant=PrivacyAccountant(), noise=0.0)
    svi.step(persons_data())
    assert not isinstance(svi._inference, Looks) and "without noise" in svi._reason


@pytest.mark.long
def test_dpsep_says_why():
    guide = AutoNormal(poutine.block(without_mean, hide=["own"]))
    ep = DPSEP(without_mean, guide, accountant=budget())
    with pytest.raises(ModelError, match="no finite mean and variance"):
        ep.step(persons_data())
    with pytest.raises(ModelError, match="Hide them from the guide"):
        DPSEP(persons, AutoNormal(persons), accountant=budget()).step(persons_data())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"clip": 1.0}])
def test_a_second_run_takes_up_rows(settings):
    def guide(y):
        rows = pyro.param("rows", lambda: torch.zeros(len(y)))
        pyro.sample("mean", dist.Normal(pyro.param("m", torch.tensor(0.0)), 0.1))
        pyro.sample("scale", dist.LogNormal(pyro.param("s", torch.tensor(0.0)), 0.1))
        with pyro.plate("persons", len(y)):
            pyro.sample("own", dist.Normal(rows, 0.3))

    pyro.clear_param_store()
    for _ in range(2):
        svi = DPSVI(persons, guide, accountant=budget(), num_steps=2, **settings)
        svi.step(persons_data())
