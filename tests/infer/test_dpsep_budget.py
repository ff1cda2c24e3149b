"""DPSEP's budget is one number for all looks. A record moves a look by at most its bound."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import glm, logistic, mixture, mixture_guide, points, regression_data
from pyro.infer.autoguide import AutoMultivariateNormal
from seeded import look_sums

import pyro_dp.mechanism.releases
from pyro_dp import DPSEP, ConfigurationError, Noise, PrivacyAccountant, PrivacyBudgetExceeded
from pyro_dp.infer.ep.ep_state import EPState
from pyro_dp.infer.ep.look_plan import Frame
from pyro_dp.mechanism.release import release

# The budget and the noise multiplier of a run. One of them can be None.
BUDGETS = [(1.0, None), (8.0, 2.0), (None, 0.3), (None, 30.0)]


def made(epsilon=1.0, sigma=None, accountant=None, seed=0):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    accountant = accountant or PrivacyAccountant(epsilon)
    guide = AutoMultivariateNormal(logistic)
    return DPSEP(logistic, guide, accountant=accountant, noise=Noise(sigma, source=seed))


def squared_mu(accountant):
    """mu^2 of everything that the ledger counts, reserved or released."""
    entries = [(entry.event, entry.count) for entry in accountant.ledger]
    entries += [item for _, left in accountant.reserved for item in left.items()]
    assert all(event.sampling == "full" and event.sample_rate == 1.0 for event, _ in entries)
    return math.fsum(count / event.noise_multiplier**2 for event, count in entries)


def require_whole(sep, times=1.0):
    expected = times / sep.noise_multiplier**2
    assert squared_mu(sep.accountant) == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("epsilon, sigma", BUDGETS)
def test_all_looks_cost_what_the_first_reserved(epsilon, sigma, looped):
    """This holds after each look until nothing is left. One more look is refused."""
    sep, data = made(epsilon, sigma), regression_data(500)
    assert squared_mu(sep.accountant) == 0.0
    if looped:
        while not sep._reservation.plan.finished:
            sep.step(*data)
            require_whole(sep)
            assert 0.0 < sep._fit.current.spent <= 1.0
    else:
        sep.run(*data, progress=False, callbacks=[lambda step: require_whole(sep)])
    require_whole(sep)
    assert sep._fit.current.spent == 1.0 and sep.accountant.reserved == []
    for more in (sep.step, sep.run):
        with pytest.raises(PrivacyBudgetExceeded, match="is finished"):
            more(*data)
    require_whole(sep)
    if sigma is None:
        assert 0.995 * epsilon < sep.accountant.get_epsilon() <= epsilon


def test_noise_of_ones_own_that_does_not_fit():
    sep = made(0.5, 1.0)
    with pytest.raises(PrivacyBudgetExceeded):
        sep.step(*regression_data())
    assert sep.accountant.num_releases == 0 and sep.accountant.get_epsilon() == 0.0


@pytest.mark.long
@pytest.mark.parametrize("epsilon, sigma", BUDGETS[::2])
def test_an_early_stop_returns_nothing(epsilon, sigma):
    sep, data = made(epsilon, sigma), regression_data(500)
    sep.run(*data, progress=False, callbacks=[lambda step: step.step == 2])
    require_whole(sep)
    if epsilon is not None:
        with pytest.raises(PrivacyBudgetExceeded):
            sep.accountant.noise_multiplier(num_steps=1)
    sep.run(*data, progress=False)
    require_whole(sep)


def fails(*args, **kwargs):
    """A step that fails after its release."""
    release(*args, **kwargs)
    raise ZeroDivisionError


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("epsilon, sigma", BUDGETS[::2])
def test_a_look_that_fails_stays_spent(epsilon, sigma, place, monkeypatch):
    """A recorded look counts even if it fails. The looks after it share the rest."""
    sep, data = made(epsilon, sigma), regression_data(500)
    for _ in range(place):
        sep.step(*data)
    before = 0.0 if sep._fit.current is None else sep._fit.current.spent
    with monkeypatch.context() as patch:
        patch.setattr(pyro_dp.mechanism.releases, "release", fails)
        with pytest.raises(ZeroDivisionError):
            sep.step(*data)
    assert sep.accountant.num_releases == place + 1 and sep._fit.current.spent > before
    require_whole(sep)
    sep.run(*data, progress=False, callbacks=[lambda step: require_whole(sep)])
    require_whole(sep)
    assert sep.accountant.num_releases == sep._steps + 1 and sep.accountant.reserved == []


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("epsilon, sigma", BUDGETS[::2])
def test_a_look_from_which_no_posterior_follows_stays_spent(epsilon, sigma, monkeypatch):
    sep, data = made(epsilon, sigma), regression_data(500)
    for _ in range(2):
        sep.step(*data)
    before = sep._fit.current

    def overflows(*args, **kwargs):
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(EPState, "learned", overflows)
        with pytest.raises(ConfigurationError, match="left the finite numbers"):
            sep.step(*data)
    assert sep._fit.current.spent == before.spent + before.share
    sep.run(*data, progress=False, callbacks=[lambda step: require_whole(sep)])
    require_whole(sep)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("epsilon, sigma", BUDGETS[::2])
def test_looks_that_fail_again_and_again_never_cost_more_than_mu(epsilon, sigma, monkeypatch):
    """A large look that fails three times leaves the rest of the budget, and no more."""
    sep, data = made(epsilon, sigma), regression_data(500)
    for _ in range(3):
        sep.step(*data)
    sep._fit.current = replace(sep._fit.current, share=0.4 * (1 - sep._fit.current.spent))
    with monkeypatch.context() as patch:
        patch.setattr(pyro_dp.mechanism.releases, "release", fails)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                sep.step(*data)
            require_whole(sep)
    with pytest.raises(PrivacyBudgetExceeded):
        sep.step(*data)
    require_whole(sep)


@pytest.mark.long
@pytest.mark.parametrize("epsilon, sigma", BUDGETS[::2])
def test_a_resumed_run_has_the_same_budget(epsilon, sigma):
    """Steps and runs after a load keep the noise multiplier and mu of the saved run."""
    data, sep = regression_data(500), made(epsilon, sigma)
    for _ in range(3):
        sep.step(*data)
    state, other = sep.state_dict(), made(epsilon, sigma, seed=1)
    other.load_state_dict(state)
    other.step(*data)
    require_whole(other)
    other.run(*data, progress=False)
    require_whole(other)
    assert other.noise_multiplier == sep.noise_multiplier
    assert other.evidence.mu == pytest.approx(1 / sep.noise_multiplier)


@pytest.mark.every_commit
@pytest.mark.long
def test_a_state_older_than_the_journal_keeps_mu(tmp_path):
    """Lost looks count as spent. The looks to come share the rest of the same number."""
    accountant, data = PrivacyAccountant(1.0), regression_data(500)
    with accountant.journal(tmp_path / "journal"):
        sep = made(accountant=accountant)
        sep.step(*data)
        sep.step(*data)
        state = sep.state_dict()
        sep.step(*data)
        sep.step(*data)
        spent = sep._fit.current.spent
    accountant = PrivacyAccountant(1.0)
    accountant.journal(tmp_path / "journal")
    other = made(accountant=accountant)
    other.load_state_dict(state)
    other.step(*data)
    assert other._fit.current.spent > spent
    other.run(*data, progress=False)
    require_whole(other)
    assert other.evidence.mu == pytest.approx(1 / sep.noise_multiplier)


def test_states_of_the_older_engine_are_refused_in_words():
    sep, data = made(), regression_data()
    sep.step(*data)
    state = sep.state_dict()
    older = {n: state[n] for n in ("version", "steps", "noise_multiplier", "accountant")}
    older |= {"settings": {"max_factor_norm": None}, "gaussians": {}, "counts": {}, "looks": []}
    with pytest.raises(ConfigurationError, match=r"no state_dict\(\) of DPSEP"):
        made().load_state_dict(older)


def test_noise_without_a_budget():
    with pytest.raises(ConfigurationError, match="calibrated from a budget"):
        made(None, None).step(*regression_data())


# One record.

SIZE, DIM, BOUND = 24, 3, 0.7


# Likelihoods, their outcomes, and outcomes that no one expects.
FAMILIES = {
    "bernoulli": (
        lambda u: dist.Bernoulli(logits=u),
        lambda: (torch.rand(SIZE) < 0.5).double(),
        (),
    ),
    "poisson": (
        lambda u: dist.Poisson((0.3 * u).exp()),
        lambda: torch.poisson(torch.ones(SIZE)),
        (1e6, 1e15),
    ),
    "normal": (lambda u: dist.Normal(u, 0.7), lambda: torch.randn(SIZE), (1e6, -1e150)),
    "gamma": (
        lambda u: dist.Gamma(2.0, 2.0 * (-0.3 * u).exp()),
        lambda: torch.rand(SIZE) + 0.1,
        (1e-12, 1e12),
    ),
    "student": (lambda u: dist.StudentT(4.0, u, 0.7), lambda: torch.randn(SIZE), (1e6, -1e150)),
}


def scaled(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([DIM]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def look_of(model, guide, *data):
    """Prepared sums, blocks of a look in a frame of its own, and of the opening."""
    pyro.clear_param_store()
    sep = DPSEP(model, guide, accountant=PrivacyAccountant(), noise=1.0)
    prepared, dim = sep._look_at(data, {}), sep._fit.approximation.plan.dim
    root = torch.randn(dim, dim)
    frame = Frame(root @ root.T + 0.1 * torch.eye(dim), 0.6, BOUND, 0.2)
    return prepared, lambda indices, opens: look_sums(sep, None if opens else frame, indices)


def require_bounds(sums, places, broken=(), unread=()):
    """A record, alone or with others, adds at most its bounds. A broken one adds nothing.

    :param unread: broken records whose broken numbers the opening does not read.
    """
    left_out = set(places[1::3])
    everyone, longest = list(range(SIZE)), 0.0
    for opens in (False, True):
        whole = sums(everyone, opens)
        for place in places:
            alone = sums([place], opens)
            main, histograms = ([], alone) if opens else (alone[:1], alone[1:])
            if place in left_out:
                rest = sums([n for n in everyone if n != place], opens)
                for one, other, own in zip(whole, rest, alone, strict=True):
                    torch.testing.assert_close(one - other, own, rtol=0.0, atol=1e-9)
            if place in broken and not (opens and place in unread):
                assert not any(each.any() for each in alone)
                continue
            # None where its site is beyond the numbers; then it adds nothing at all.
            counts = {round(each.sum().item(), 9) for each in histograms}
            assert counts == {1} or not any(each.any() for each in alone)
            longest = max([longest, *(each.norm().item() for each in main)])
    assert 0 < longest <= BOUND * (1 + 1e-12)
    return longest


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_moves_each_block_by_its_bound_at_most(family, fixed_outcomes):
    """Outliers, adversarial outcomes, and numbers that are not finite; in looks and the opening."""
    likelihood, outcomes, odd = FAMILIES[family]
    model, x, y = glm(likelihood), torch.randn(SIZE, DIM), outcomes()
    x[1], x[2] = 1e3 * x[1].sign(), 1e-9
    y[3 : 3 + len(odd)] = torch.tensor(odd)
    prepared, sums = look_of(model, AutoMultivariateNormal(model), x, y)
    features, labels = (column.tensor for column in prepared.records.columns)
    features[6, 1], features[7, 0], labels[8] = math.nan, math.inf, math.nan
    unread = (8,) if family == "bernoulli" else ()  # its weight considers both outcomes
    longest = require_bounds(sums, range(10), broken=(6, 7, 8), unread=unread)
    assert longest > 0.5 * BOUND  # the bound is reached: the test has something to see


@pytest.mark.long
@pytest.mark.every_case
def test_a_record_beside_an_unknown_scale_does_so_too(fixed_outcomes):
    """The opening has a histogram of the coefficients' scores, and one of the scale's."""
    x, y = torch.randn(SIZE, DIM), torch.randn(SIZE)
    x[1], x[2], y[3], y[4] = 1e3 * x[1].sign(), 1e-9, 1e6, -1e80
    prepared, sums = look_of(scaled, AutoMultivariateNormal(scaled), x, y)
    assert len(sums([0], True)) == 2
    features, labels = (column.tensor for column in prepared.records.columns)
    features[6, 1], features[7, 0], labels[8] = math.nan, math.inf, math.nan
    require_bounds(sums, range(10), broken=(6, 7, 8))


@pytest.mark.long
@pytest.mark.every_commit
def test_the_openings_histograms_share_its_cost():
    pyro.clear_param_store()
    sep = DPSEP(scaled, AutoMultivariateNormal(scaled), accountant=PrivacyAccountant(), noise=3.0)
    sep._look_at((torch.randn(SIZE, DIM), torch.randn(SIZE)), {})
    blocks = sep._fit.approximation.blocks
    assert [each.bound for each in blocks] == [1.0, 1.0]
    assert sum(each.share for each in blocks) == pytest.approx(1.0)


@pytest.mark.every_commit
@pytest.mark.slow
def test_a_record_of_stein_moments_does_so_too():
    (x,) = points()
    x = x[:SIZE].clone()
    x[1] = 1e4
    prepared, sums = look_of(mixture, mixture_guide(mixture), x)
    prepared.records.columns[0].tensor[6, 1] = math.nan
    require_bounds(sums, (0, 1, 6), broken=(6,))


@pytest.mark.long
@pytest.mark.every_commit
def test_weights_make_parts_shorter_and_never_longer():
    """Weights also leave parts far below the bound as they are."""
    x, y = 1e-3 * torch.randn(SIZE, DIM), torch.ones(SIZE)
    _, sums = look_of(logistic, AutoMultivariateNormal(logistic), x, y)
    main, _ = sums(list(range(SIZE)), False)
    assert main[-1] == pytest.approx(0.2 * SIZE)  # tau times the sum of weights of one
