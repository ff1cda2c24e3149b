"""A share of the budget for an analysis, and the rest for the next one."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from ledgers import in_threads
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP, DPSVI, Noise, PaperDPSEP, PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting import composition
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded


def cost(accountant):
    """By the engine, of the ledger alone."""
    how = accountant.delta, accountant.neighboring, accountant.engine
    return composition.epsilon(dict(accountant.ledger), *how)


def calibrated(accountant, **settings):
    sigma = accountant.noise_multiplier(**settings)
    event = SubsampledGaussian(sigma, settings.get("sample_rate", 1.0))
    for _ in range(settings["num_steps"]):
        accountant.record(event)
    return sigma


@pytest.mark.long
@pytest.mark.parametrize("engine", ["pld", "rdp"])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_each_part_ends_at_its_share_by_composition(engine, relation):
    accountant = PrivacyAccountant(2.0, neighboring=relation, engine=engine)
    for share, settings in [
        (0.3, dict(num_steps=20)),
        (0.8, dict(num_steps=100, sample_rate=0.05)),
        (1.0, dict(num_steps=1)),
    ]:
        with accountant.up_to(share):
            calibrated(accountant, **settings)
        assert 0.998 * share * 2.0 <= cost(accountant) <= share * 2.0
        assert accountant.get_epsilon() <= share * 2.0


def test_the_second_analysis_has_more_than_the_difference():
    accountant = PrivacyAccountant(1.0)
    with accountant.up_to(0.8):
        calibrated(accountant, num_steps=10)
    rest = accountant.noise_multiplier(num_steps=1)
    assert rest < 0.5 * PrivacyAccountant(1.0 - 0.8).noise_multiplier(num_steps=1)


def test_what_would_exceed_the_share_is_refused_within_and_fits_after():
    accountant = PrivacyAccountant(1.0)
    event = SubsampledGaussian(PrivacyAccountant(0.9).noise_multiplier(num_steps=1))
    accountant.require_room(event)  # there is a plan for the whole budget now
    with accountant.up_to(0.5):
        with pytest.raises(PrivacyBudgetExceeded, match=r"the 0.5 that up_to\(\) allows"):
            accountant.record(event)
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.require_room(event)
        assert accountant.num_releases == 0
        calibrated(accountant, num_steps=3)
        with pytest.raises(PrivacyBudgetExceeded, match=r"remains of the 0.5 that up_to\(\)"):
            accountant.noise_multiplier(num_steps=1)
    calibrated(accountant, num_steps=3)
    with pytest.raises(PrivacyBudgetExceeded, match="above the budget of 1 "):
        accountant.record(event)
    assert 0.998 <= cost(accountant) <= 1.0


def test_single_releases_stop_at_the_share_and_then_at_the_budget():
    event = SubsampledGaussian(3.0, 0.1)
    accountant, found = PrivacyAccountant(1.0), []

    def until_refused():
        for _ in range(2000):
            accountant.record(event)

    for share in (0.4, 0.7, 1.0):
        with accountant.up_to(share), pytest.raises(PrivacyBudgetExceeded):
            until_refused()
        most, n = share * 1.0, accountant.num_releases
        how = accountant.delta, accountant.neighboring, accountant.engine
        assert composition.epsilon({event: n}, *how) <= most
        assert composition.epsilon({event: n + 1}, *how) > most
        found.append(n)
    assert found[0] < found[1] < found[2]


def test_blocks_in_each_other_and_errors_within():
    accountant = PrivacyAccountant(1.0)
    with accountant.up_to(0.5):
        with accountant.up_to(0.9):
            inner = accountant.noise_multiplier(num_steps=1)
        assert accountant.noise_multiplier(num_steps=1) == inner
    with pytest.raises(ZeroDivisionError), accountant.up_to(0.1):
        1 / 0  # noqa: B018
    assert accountant.noise_multiplier(num_steps=1) < inner


def test_a_share_is_of_one_thread():
    accountant, found = PrivacyAccountant(1.0), []

    def other():
        found.append(accountant.noise_multiplier(num_steps=1))

    with accountant.up_to(0.1):
        in_threads(other)
        assert accountant.noise_multiplier(num_steps=1) > 5 * found[0]
    assert accountant.noise_multiplier(num_steps=1) == pytest.approx(found[0], rel=1e-3)


def test_shares_that_make_no_sense():
    accountant = PrivacyAccountant(1.0)
    for bad in (0.0, -0.1, 1.1, 80, math.nan, "0.8", None, True):
        with pytest.raises(ConfigurationError, match="share"), accountant.up_to(bad):
            pass
    with pytest.raises(ConfigurationError, match="give the accountant an epsilon"):
        with PrivacyAccountant().up_to(0.5):
            pass
    with accountant.up_to(0.6):
        calibrated(accountant, num_steps=1)
    for spent in (0.5, 0.6):
        with pytest.raises(PrivacyBudgetExceeded, match="ascend"), accountant.up_to(spent):
            pass
    accountant.record_nonprivate("a mean")
    with pytest.raises(PrivacyBudgetExceeded), accountant.up_to(0.9):
        pass
    with pytest.raises(ConfigurationError, match=r"no epsilon \(of 1.5 here\).*it is 1.15"):
        with PrivacyAccountant(1.5).up_to(1.15):
            pass


def model(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Normal(mean.sum(), 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("inference, steps", [(DPSEP, None), (PaperDPSEP, 4), (DPSVI, 10)])
def test_inferences_calibrate_to_the_share(inference, steps):
    accountant, y = PrivacyAccountant(1.0), torch.linspace(-1.0, 1.0, 200)
    guide = AutoMultivariateNormal(model)
    settings = dict(accountant=accountant) | ({} if steps is None else {"num_steps": steps})
    settings |= {"clip": 1.0} if inference is PaperDPSEP else {}
    first = inference(model, guide, noise=Noise(source=0), **settings)
    with accountant.up_to(0.7):
        first.run(y, progress=False)
    assert 0.698 <= cost(accountant) <= 0.7
    inference(model, guide, noise=Noise(source=1), **settings).run(y, progress=False)
    assert 0.998 <= cost(accountant) <= 1.0
