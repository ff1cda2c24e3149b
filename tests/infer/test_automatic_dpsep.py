"""DPSEP: sensitivity, noise, states; exact without noise, the prior under it."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract, ReleaseContract
from problems import (
    glm,
    linear,
    logistic,
    mixture,
    mixture_guide,
    points,
    regression_data,
    repeated_mixture,
    with_needs,
)
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_value,
)
from releases import Releases
from run_contract import STEPS
from seeded import look_sums, seeded
from zoo import ZOO

from pyro_dp import (
    DPSEP,
    DPSVI,
    ConfigurationError,
    Execution,
    FullBatch,
    ModelError,
    Noise,
    NotPrivateWarning,
    PaperDPSEP,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    nonprivate,
)
from pyro_dp.infer.ep import dpsep, ep_state
from pyro_dp.infer.ep.dpsep import status
from pyro_dp.infer.ep.look_plan import Frame, LookPlan
from pyro_dp.infer.ep.norm_counts import MeanHistogram
from pyro_dp.infer.ep.observation_family import Residuals
from pyro_dp.mechanism.norm_histogram import MIDDLES, SIZE, Norms
from pyro_dp.utils.linalg import Gaussian

poisson = glm(lambda mean: dist.Poisson(mean.clamp(max=20.0).exp()))


def products(x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    w = pyro.deterministic("w", scale * z)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


_KINDS = {
    "logistic": (logistic, AutoMultivariateNormal, regression_data, {}),
    "poisson": (poisson, AutoDiagonalNormal, regression_data, {}),
    "linear": (linear, AutoNormal, regression_data, {}),
    "mixture": (mixture, mixture_guide, points, {}),
    "nested": (repeated_mixture, mixture_guide, points, {"plate": "data"}),
    "products": (products, AutoNormal, regression_data, {}),
}
_OF_PAPER = ("num_steps", "clip", "factors", "damping")


@pytest.mark.filterwarnings("ignore:.*one record at a time")
class TestContract(InferenceContract):
    """The budget is shared out among as many looks as the contract's runs have steps."""

    variants = tuple(_KINDS)
    kinds = ("logistic", "linear", "nested", "products")
    slow = ("linear", "mixture", "nested", "products")
    outliers = (0.0, 1e6, 1e200)
    younger = (*InferenceContract.younger, "extremes")
    sampled = whole = {}
    at_once = True
    at_an_end, done = PrivacyBudgetExceeded, "The run is finished"
    opening = 1  # the opening reads norms alone
    noisy_steps = 61
    bad_settings = (
        *(({name: 1}, f"DPSEP takes no {name}") for name in _OF_PAPER),
        ({"sampling": 0.5}, "DPSEP looks at all records"),
    )
    _bad_settings = tuple(
        (setting, word)
        for setting, word in InferenceContract._bad_settings
        if not setting.keys() & {"num_steps", "sampling"}
    )
    # These tests need samples, or releases that cost the same:
    test_an_empty_batch_pays_and_is_noisy = test_noise_is_calibrated_to_the_budget = None
    test_a_run_with_noise_of_its_own_reserves_its_steps = None  # a loop reserves them, too
    test_inferences_share_an_accountant = test_the_budget_is_checked_before_the_release = None

    @pytest.fixture(autouse=True)
    def _few_looks(self, monkeypatch):
        _looks(monkeypatch, STEPS)

    def new(self, variant=None, seed=0, **options):
        return ReleaseContract.new(self, variant, seed, **options)

    def make(self, variant, **options):
        model, guide, _, needs = _KINDS[variant]
        options = with_needs(needs, {"sampling": FullBatch()} | options)
        return DPSEP(model, guide(model), **options)

    def data(self, variant):
        return _KINDS[variant][2]()

    def result(self, sep):
        posterior = sep.posterior()
        held = {name: value.detach().clone() for name, value in sep.guide.median().items()}
        return held | {"mean": posterior.mean, "covariance": posterior.covariance_matrix}

    def damage(self, state):
        yield {"settings": {"max_factor_norm": 7}}, "max_factor_norm"

    @classmethod
    @functools.cache
    def noisy(cls):
        """The noise of a run with many looks, and its ledger."""
        self = cls()
        with pytest.MonkeyPatch.context() as patch:
            _looks(patch, self.noisy_steps)
            seen = Releases(patch)
            inference, _ = self.stepped(self.noisy_steps, noise=Noise(1.5, source=0))
        noise = [torch.stack(each).numpy() for each in zip(*seen.noise[1:], strict=True)]
        return SimpleNamespace(seen=seen, noise=noise, ledger=inference.accountant.ledger)

    def require_ledger(self, ledger):
        """As many Gaussian sums over all records, cheaper ones than the whole."""
        assert sum(count for _, count in ledger) == self.noisy_steps
        assert all(event.sampling == "full" and event.noise_multiplier > 1.5 for event, _ in ledger)


def _looks(patch, steps):
    """Give runs this many steps, the opening included, with looks of equal cost."""

    def equal_shares(state, frame, precision, gain):
        return (1.0 - state.spent) / max(steps - 1 - len(state.seen.looks), 1)

    patch.setattr(dpsep, "MOST_LOOKS", steps - 1)
    for module in (dpsep, ep_state):
        patch.setattr(module, "MOST_WITHOUT_NOISE", steps - 1)
    patch.setattr(ep_state, "_ARRIVED", -1.0)
    patch.setattr(ep_state.EPState, "_next_share", equal_shares)


def fitted(model, data, epsilon=1.0, seed=0, guide=AutoMultivariateNormal, **options):
    return seeded(DPSEP, model, guide, *data, epsilon=epsilon, seed=seed, **options)


def exact_linear(x, y):
    precision = x.T @ x / 0.25 + torch.eye(x.shape[1])
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    return torch.distributions.MultivariateNormal(mean, precision_matrix=precision)


def gaussian_data(size=4000, dim=4, seed=3):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=rng)
    return x, x @ torch.linspace(-1.0, 1.0, dim) + 0.5 * torch.randn(size, generator=rng)


@pytest.mark.slow
def test_without_noise_it_is_exact():
    x, y = gaussian_data(200)
    found = fitted(linear, (x, y), epsilon=None, noise=0.0).posterior()
    exact = exact_linear(x, y)
    torch.testing.assert_close(found.mean, exact.mean, rtol=0.0, atol=1e-7)
    torch.testing.assert_close(
        found.covariance_matrix, exact.covariance_matrix, rtol=0.0, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_nobody_sets_anything_whatever_the_units(scale):
    """The mean is near the posterior's, in units a hundred times too small or too large."""
    x, y = gaussian_data()
    unit = torch.tensor([scale, 1.0, 1.0, 1.0])

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1 / unit).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx] @ w, 0.5), obs=y[idx])

    exact = exact_linear(x, y)
    found = fitted(model, (x * unit, y), epsilon=2.0)
    mean = found.posterior(noise_aware=False).mean * unit
    nats = 0.5 * (mean - exact.mean) @ exact.precision_matrix @ (mean - exact.mean)
    assert nats < 2.0


@pytest.mark.slow
def test_records_of_a_rare_value_are_not_lost():
    """Only 1.5% of the records inform one coefficient, so their leverage is large."""
    rng = torch.Generator().manual_seed(0)
    size = 20_000
    rare = (torch.rand(size, generator=rng) < 0.015).double()
    x = torch.stack([torch.ones(size), 2 * torch.rand(size, generator=rng) - 1, rare], dim=1)
    weights = torch.tensor([0.5, 1.0, -1.0])
    y = torch.bernoulli(torch.sigmoid(x @ weights), generator=rng)
    found = fitted(logistic, (x, y), epsilon=6.0).posterior()
    p = torch.sigmoid(x @ weights)
    exact = torch.linalg.inv((x * (p * (1 - p)).unsqueeze(1)).T @ x + torch.eye(3))
    ratio = found.stddev / exact.diagonal().sqrt()
    assert ratio.max() < 1.5


def long_tails(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scale = pyro.sample("scale", dist.HalfCauchy(2.0))
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.StudentT(freedom, x[idx] @ w, scale), obs=y[idx])


@pytest.mark.slow
def test_a_likelihood_that_is_not_concave():
    """Intervals of four standard deviations hold the truth. At a saddle they would not."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 2, generator=rng)
    normal, square = (torch.randn(n, 4000, generator=rng) for n in (1, 4))
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 * normal[0] / square.square().mean(0).sqrt()
    sep = fitted(long_tails, (x, y), epsilon=4.0)
    found, truth = sep.posterior(), torch.tensor([1.0, -2.0, math.log(0.5), math.log(4.0)])
    assert found.status.is_ok and (found.stddev < 0.2).all()
    assert ((found.mean - truth).abs() < 4 * found.stddev).all()
    known = sep._fit.approximation
    looks = known.seen.looks
    last = replace(looks[-1], curvature=-looks[-1].curvature)
    judged = status(replace(known, seen=replace(known.seen, looks=(*looks[:-1], last))))
    assert judged.level == "check" and "is not concave in 4 of 4 directions" in judged.reason


@pytest.mark.long
def test_features_of_very_different_sizes_are_not_ok():
    """Incomes in dollars hide the curvature in the other directions, where intervals are wrong."""
    model = glm(lambda logits: dist.Bernoulli(logits=logits), scale=10.0)
    torch.manual_seed(1)
    age, income = 20 + 60 * torch.rand(2000), 2e4 * (0.7 * torch.randn(2000)).exp()
    x = torch.stack([torch.ones(2000), age, income], dim=1)
    y = torch.bernoulli(torch.sigmoid(-3 + 0.05 * age + 2e-5 * income))
    found = fitted(model, (x, y)).posterior()
    assert found.status.level == "check" and "whose units were not found" in found.status.reason
    alike = fitted(model, (x / torch.tensor([1.0, 50.0, 2e4]), y)).posterior()
    truth = torch.tensor([-3.0, 2.5, 0.4])
    assert alike.status.is_ok and ((alike.mean - truth).abs() < 4 * alike.stddev).all()


@pytest.mark.long
def test_an_exponential_that_overflows_at_the_guides_start():
    """At the prior's mean, where the first look is, it does not."""
    x = torch.stack([torch.ones(200), torch.linspace(200.0, 800.0, 200)], dim=1)
    model = glm(lambda logarithm: dist.Poisson(logarithm.exp()), scale=10.0)
    for seed in (0, 1):  # the guide starts at a positive slope
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guide, accountant = AutoMultivariateNormal(model), PrivacyAccountant(epsilon=4.0)
        DPSEP(model, guide, accountant=accountant).step(x, torch.full((200,), 2.0))


def two_clusters(x):
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(2)))
    centres = pyro.sample("centres", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    sd = pyro.sample("sd", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        parts = dist.Normal(centres, sd.expand(2))
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(shares), parts), obs=x[idx])


@pytest.mark.slow
def test_a_mixture_whose_components_coincide_is_not_ok():
    """There are two clusters, and the second search begins and ends with one wide cluster."""
    rng = torch.Generator().manual_seed(1)
    first = torch.rand(2000, generator=rng) < 0.35
    x = torch.where(first, -1.5, 1.5) + 0.8 * torch.randn(2000, generator=rng)
    assert fitted(two_clusters, (x,), epsilon=4.0).posterior().status.is_ok
    centres = {"centres": torch.tensor([0.4, 0.6]), "sd": torch.tensor(1.6)}
    values = init_to_value(values=centres | {"shares": torch.full((2,), 0.5)})
    guide = functools.partial(AutoMultivariateNormal, init_loc_fn=values)
    found = fitted(two_clusters, (x,), epsilon=4.0, seed=2, guide=guide).posterior()
    assert found.status.level == "check" and "components may coincide" in found.status.reason


@pytest.mark.slow
@pytest.mark.parametrize(("dispersion", "level"), [(1.0, "ok"), (4.0, "check")])
def test_counts_that_vary_more_than_the_model_says(dispersion, level):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.ones((4000, 1)), rng.normal(size=(4000, 2))], axis=1)
    mean = np.exp(x @ [0.5, 0.3, -0.3])
    if dispersion > 1:
        mean = rng.gamma(mean / (dispersion - 1), dispersion - 1)
    data = [torch.tensor(each).float() for each in (x, rng.poisson(mean))]
    sep = fitted(poisson, data, epsilon=4.0)
    status = sep.posterior().status
    assert status.level == level and status.cause == ("" if level == "ok" else "model")
    if level == "check":
        assert "times too narrow" in status.reason
        assert "outcomes vary more" in str(sep.explain())


@pytest.mark.slow
def test_a_mixture_of_the_right_model_has_no_dispersion():
    """The records' curvatures cancel in the sum, so their norms are large compared with it."""
    entry = ZOO["discrete mixture"]
    pyro.set_rng_seed(0)
    data = entry.data(2000)
    pyro.set_rng_seed(1)
    model, guide = entry.make()
    sep = seeded(DPSVI, model, lambda _: guide, *data, epsilon=4.0, seed=1)
    assert sep.posterior().status.is_ok


def test_noise_makes_no_dispersion():
    """All records have the same norm. Noise in far bins does not raise the estimate."""
    place = SIZE // 2
    norm, rng = math.exp(MIDDLES[place]), np.random.default_rng(0)
    for sd in (0.0, 5.0, 50.0):
        for _ in range(50):
            counts = rng.normal(0.0, sd, SIZE) if sd else np.zeros(SIZE)
            counts[place] += 4000
            found = MeanHistogram(torch.tensor(counts), sd, 4000).least_mean_square(10 * norm)
            assert found <= 1.3 * norm**2 and (sd > 5 or found > 0.9 * norm**2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_start_among_outliers(seed):
    """At this start every record's curvature has the wrong sign, and noise hides it."""

    def location(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 20.0))
        with pyro.plate("people", len(y)):
            pyro.sample("y", dist.StudentT(3.0, mean, 1.0), obs=y)

    torch.manual_seed(seed)
    y = 20.0 + dist.StudentT(3.0, 0.0, 1.0).sample((1000,))
    found = fitted(location, (y,), seed=seed).posterior()
    assert found.status.is_ok and (found.mean - 20.0).abs() < 4 * found.stddev < 0.4


@pytest.mark.slow
def test_a_wide_guide_does_not_enter_residuals():
    """The scale of residuals is first estimated at the guide's mean."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 10.0).to_event(1))
        log_scale = pyro.sample("log_scale", dist.Normal(0.0, 2.0))
        with pyro.plate("people", len(x)):
            pyro.sample("y", dist.Normal(x @ w, log_scale.exp()), obs=y)

    def guide(x, y):
        one = {"constraint": dist.constraints.positive}
        loc, sd = pyro.param("loc", torch.zeros(4)), pyro.param("sd", torch.full((4,), 10.0), **one)
        pyro.sample("w", dist.Normal(loc, sd).to_event(1))
        own = pyro.param("own_loc", torch.tensor(0.0)), pyro.param("own_sd", torch.ones(()), **one)
        pyro.sample("log_scale", dist.Normal(*own))

    x, y = gaussian_data()
    sep = fitted(model, (x, y), guide=lambda _: guide)
    assert sep.evidence.looks[6].point[-1] < -0.2  # it is log(.5) in the data
    assert sep.posterior().status.level == "ok"


def test_the_first_q_keeps_its_correlations():
    root = torch.tensor([[2.0, 0.0], [1.0, 0.05]], dtype=torch.float64)
    narrow = ep_state._narrowed(root @ root.mT)
    assert (narrow.diagonal().sqrt() <= 0.1 + 1e-12).all()
    one = root @ root.mT
    assert narrow[0, 1] / narrow.diagonal().prod().sqrt() == pytest.approx(
        (one[0, 1] / one.diagonal().prod().sqrt()).item()
    )
    small = torch.eye(2, dtype=torch.float64) * 1e-4
    assert torch.equal(ep_state._narrowed(small), small)


@pytest.mark.slow
def test_where_noise_hides_all_the_prior_is_left():
    x, y = gaussian_data(60)
    prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
    for seed in range(3):
        sep = fitted(linear, (x, y), 0.01, seed)
        found = sep.posterior()
        assert torch.distributions.kl_divergence(found, prior) < 1.0


def groups(group, y):
    """A scale of its own, whose density is flat where it is small or large."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 8):
        a = pyro.sample("a", dist.Normal(mean, spread))
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Normal(a[group], 1.0), obs=y)


@pytest.mark.slow
def test_where_records_say_nothing_no_step_leads_far_away():
    """Without a limit, a flat prior would let a step go hundreds of thousands of units."""
    torch.manual_seed(0)
    group = torch.randint(8, (1000,))
    data = group, torch.randn(1000) + group / 4
    sep = fitted(groups, data, epsilon=0.1, guide=AutoNormal)
    posterior = sep.posterior()
    assert posterior.mean.abs().max() < 3 * sep.num_steps


@pytest.mark.long
@pytest.mark.parametrize("residuals", ["normal", "scaled", "other", "labels", "integrated"])
def test_parts_cut_off_agree_less_in_more_dimensions(residuals):
    """Unless the model is wrong or a mixture."""
    for kind, ratio in ((residuals, 8 / 30), (Residuals.BOUNDED, 1.0), (Residuals.SUMMED, 1.0)):
        few, many = (LookPlan(dim, 5000, 1.0, kind).squared_bias(1.0) * dim for dim in (2, 30))
        assert many / few == pytest.approx(ratio)


def test_centred_parts_point_to_one_side_if_the_model_is_wrong():
    """A dispersion of 2 or more means a tail that the model does not explain."""
    plan = LookPlan(3, 5000, 1.0, Residuals.CENTRED)
    found = [3 * plan.squared_bias(1.0, dispersion=each) for each in (0.0, 1.0, 1.5, 2.0, 9.0)]
    assert found == pytest.approx([1 / 4, 1 / 4, 9 / 16, 1.0, 1.0])
    assert 3 * plan.squared_bias(0.0, 1.0) == pytest.approx(1.0)


def test_parts_that_agree_less_are_clipped_more():
    norms = Norms.of(np.geomspace(1.0, 40.0, 50), np.geomspace(1000.0, 1.0, 50))
    kinds = Residuals.OTHER, Residuals.SUMMED
    less, more = (LookPlan(30, 5000, 1.0, kind).bound(norms, 4.0) for kind in kinds)
    assert less < more


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_weight_does_not_look_at_the_outcome():
    """A weight considers both outcomes, so curvatures are the same number for either."""
    x, _ = regression_data(size=6)
    parts = {}
    for outcome in (0.0, 1.0):
        for bound in (1e6, 0.02):
            sites = whitened_sites(x, torch.full((6,), outcome), bound)
            parts[outcome, bound] = torch.stack(sites)[:, 3:-1]  # kappa H
    for bound in (1e6, 0.02):
        torch.testing.assert_close(parts[0.0, bound], parts[1.0, bound])
    assert parts[0.0, 0.02].norm() < 0.1 * parts[0.0, 1e6].norm()


@pytest.mark.slow
def test_the_share_of_yes_has_no_bias():
    """The count is part of the vector whose length is clipped, for either outcome."""

    def share(y):
        p = pyro.sample("p", dist.Beta(10.0, 10.0))
        with pyro.plate("people", len(y)):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    y = (torch.arange(50_000) % 25 < 16).double()
    sep = fitted(share, (y,))
    (estimate,) = sep.posterior().mean.sigmoid()
    assert (estimate - 0.64).abs() < 0.5 * math.sqrt(0.64 * 0.36 / len(y))


def persons(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x), dim=-2), pyro.plate("years", 5):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@pytest.mark.slow
@pytest.mark.every_commit
def test_the_weight_of_several_rows_does_not_look_at_the_outcomes():
    """The residuals of a person's rows may all point to one side."""
    x = regression_data(size=4)[0].unsqueeze(1).expand(4, 5, 3)
    parts = []
    for outcome in (0.0, 1.0):
        y = torch.full((4, 5), outcome)
        sites = whitened_sites(x, y, 0.02, model=persons, plate="people")
        parts.append(torch.stack(sites)[:, 3:-1])
    torch.testing.assert_close(*parts)


def whitened_sites(x, y, bound, model=logistic, root=None, plate=None):
    """Each record's part of the first block of a look with this bound, in a narrow cavity."""
    start = init_to_value(values={"w": torch.ones(3)})
    sep = DPSEP(
        model,
        AutoMultivariateNormal(model, init_loc_fn=start, init_scale=1e-4),
        accountant=PrivacyAccountant(),
        noise=5.0,
        sampling=FullBatch(plate=plate),
    )
    sep._look_at((x, y), {})
    frame = Frame(torch.eye(3) if root is None else root, 0.7, bound, 0.1 * min(bound, 1.0))
    return [look_sums(sep, frame, [record])[0] for record in range(len(x))]


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("kind", ["logistic", "poisson", "linear"])
def test_a_part_keeps_the_bound_in_any_frame(kind):
    """A frame may stretch a direction thirty times, and outcomes may be extreme."""
    x, _ = regression_data(size=8)
    y = torch.full((8,), 1.0 if kind == "logistic" else 300.0)
    root = torch.diag(torch.tensor([30.0, 0.1, 0.1]))
    for part in whitened_sites(x, y, 0.02, model=_KINDS[kind][0], root=root):
        assert 0 < part.norm() <= 0.02 * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.every_commit
def test_the_opening_counts_each_record_once():
    x, y = regression_data(size=8)
    guide = AutoMultivariateNormal(logistic)
    sep = DPSEP(logistic, guide, accountant=PrivacyAccountant(), noise=5.0)
    sep._look_at((x, y), {})
    assert look_sums(sep, None, range(8))[0].sum().item() == pytest.approx(8, rel=1e-9)


@pytest.mark.slow
def test_a_state_of_the_other_kind_is_refused():
    x, y = gaussian_data(50)
    one = DPSEP(linear, AutoNormal(linear), accountant=PrivacyAccountant(), noise=5.0)
    one.step(x, y)
    two = PaperDPSEP(
        linear, AutoNormal(linear), accountant=PrivacyAccountant(), num_steps=4, clip=1.0, noise=5.0
    )
    with pytest.raises(ConfigurationError, match="max_factor_norm differs"):
        two.load_state_dict(one.state_dict())
    two.step(x, y)
    with pytest.raises(ConfigurationError, match="has a max_factor_norm. PaperDPSEP takes it"):
        one.load_state_dict(two.state_dict())


@pytest.mark.slow
def test_a_finished_run_is_taken_up_at_no_cost():
    data = gaussian_data(1000)
    sep = fitted(linear, data)
    state, found = sep.state_dict(), sep.posterior()
    pyro.clear_param_store()
    accountant = PrivacyAccountant(epsilon=1.0, delta=1e-5)
    again = DPSEP(linear, AutoMultivariateNormal(linear), accountant=accountant)
    again.load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"Call run\(\*data\) to resume"):
        again.posterior()
    again.run(*data, progress=False)
    assert torch.equal(again.posterior().mean, found.mean)
    assert accountant.get_epsilon() == sep.accountant.get_epsilon()
    for name, value in sep.guide.median(*data).items():
        assert torch.equal(again.guide.median(*data)[name], value)

    # A new DPSEP with a larger budget makes no other step, either.
    accountant = PrivacyAccountant(epsilon=10.0, delta=1e-5)
    again = DPSEP(linear, AutoMultivariateNormal(linear), accountant=accountant)
    state["accountant"] = state["accountant"] | {"epsilon": 10.0}
    again.load_state_dict(state)
    with pytest.raises(PrivacyBudgetExceeded, match="The run is finished"):
        again.step(*data)
    assert accountant.get_epsilon() == sep.accountant.get_epsilon()


@pytest.mark.every_commit
@pytest.mark.long
def test_too_many_latents_are_refused_before_anything_is_spent():
    def wide(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1201]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx] * w.sum(), 1.0), obs=y[idx])

    accountant = PrivacyAccountant(epsilon=1.0)
    sep = DPSEP(wide, AutoNormal(wide), accountant=accountant)
    with pytest.raises(ModelError, match="1201 latents.*PaperDPSEP"):
        sep.step(torch.ones(5), torch.ones(5))
    assert accountant.num_releases == 0


@pytest.mark.long
def test_what_was_clipped_is_known_without_a_bit():
    x, y = gaussian_data()
    sep = fitted(linear, (x, y), epsilon=3.0)
    assert sep._fit.fractions.blocks == []
    clipped, bound = sep.clipped_fraction, sep._fit.current.frame.bound
    assert "clipped" in repr(sep)
    with pytest.warns(NotPrivateWarning):
        norms = nonprivate(sep).gradient_norms(x, y)
    exact = (norms > bound).double().mean().item()
    # Bins are a quarter of an octave wide; near the bound that is a few per cent of the records.
    assert clipped.fraction == pytest.approx(exact, abs=0.03 + 4 * clipped.standard_error)


@pytest.mark.slow
def test_graphs_change_nothing():
    x, y = gaussian_data(500)
    ways = (Execution(jit=jit) for jit in ("none", "trace"))
    one, two = (fitted(linear, (x, y), execution=way).posterior() for way in ways)
    torch.testing.assert_close(one.mean, two.mean, rtol=0.0, atol=1e-9)
    torch.testing.assert_close(one.covariance_matrix, two.covariance_matrix)


@pytest.mark.slow
def test_intervals_cover_the_exact_mean():
    """Noise-aware 95% intervals of the posterior mean, which plain ones do not cover.

    80 intervals: fewer than 63 would have a probability below 1e-6 at a coverage of .95.
    """
    aware = plain = 0
    for seed in range(5):
        x, y = gaussian_data(1000, dim=16, seed=100 + seed)
        sep, exact = fitted(linear, (x, y), 0.3, seed), exact_linear(x, y)
        for noise_aware in (True, False):
            found = sep.posterior(noise_aware)
            count = ((found.mean - exact.mean).abs() < 1.96 * found.stddev).sum().item()
            aware, plain = (aware + count, plain) if noise_aware else (aware, plain + count)
    assert aware >= 63
    assert plain < 60


def effects_of_clinics(clinic, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    centre = pyro.sample("centre", dist.Normal(0.0, 1.5))
    a = pyro.sample("a", dist.Normal(centre, scale).expand([6]).to_event(1))
    with pyro.plate("people", len(y)) as i:
        pyro.sample("y", dist.Poisson(a[clinic[i]].exp()), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_the_scale_of_effects_does_not_collapse(seed):
    """Noise draws the effects together, and the scale followed them to 1e-8."""
    generator = torch.Generator().manual_seed(seed)
    a = -0.5 + 0.5 * torch.randn(6, generator=generator)
    clinic = torch.multinomial(torch.ones(6), 1200, replacement=True, generator=generator)
    y = torch.poisson(a[clinic].exp(), generator=generator)
    sep = fitted(effects_of_clinics, (clinic, y), epsilon=0.5, seed=seed)
    lower, upper = sep.posterior().intervals()["scale"]
    assert 0.01 < lower < upper < 3.0  # a's standard deviations are 0.68 and 0.37


@pytest.mark.every_commit
@pytest.mark.slow
def test_the_posterior_follows_from_the_evidence_alone():
    """An early look may lose the scale, so later posteriors start from the evidence."""
    clinic, y = torch.arange(1200) % 6, torch.poisson(torch.linspace(0.5, 2.0, 1200))
    state = fitted(effects_of_clinics, (clinic, y), epsilon=2.0)._fit.current
    found = state.posterior.mean
    lost = Gaussian.from_moments(found - 20.0, torch.eye(len(found)).double() * 1e-9)
    pooled = state.seen.required_pooled
    expected = state._target(pooled)[1]
    other = replace(state, posterior=lost, prior=lost)._target(pooled)[1]
    assert torch.equal(other.mean, expected.mean)
    assert (expected.mean - found).abs().max() < 0.01


# Looks begin at the prior's mean, also beside latents whose prior is not normal.


def wide_regression(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def made_up():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=draw)
    return x, x @ torch.tensor([1.5, -1.0, 0.0]) + 0.5 * torch.randn(4000, generator=draw)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_wide_prior_and_an_unknown_scale(epsilon):
    x, y = made_up()
    found = fitted(wide_regression, (x, y), epsilon).posterior()
    exact = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    sds = found.variance[:3].sqrt()
    assert str(found.status) == "ok"
    assert (sds < 0.05).all()
    assert ((found.mean[:3] - exact).abs() < 4 * sds).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, 0.1])
def test_a_prior_of_a_scale_that_is_far_too_small(scale):
    """The opening detects it, and the first look is made at a scale that fits."""

    def model(x, y):
        sigma = pyro.sample("sigma", dist.HalfNormal(0.1))
        beta = pyro.sample("beta", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    x, y = made_up()
    y = y * (scale / 0.5)
    found = fitted(model, (x, y), epsilon=4.0).posterior()
    exact = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    sds = found.variance[1:].sqrt()
    assert str(found.status) == "ok"
    assert (sds < 2 * scale / len(x) ** 0.5).all()
    assert ((found.mean[1:] - exact).abs() < 4 * sds).all()
