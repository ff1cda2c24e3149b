"""The bit that tells how many records were clipped: its value, cost, report and state."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import through_a_file
from problems import Fixture, regression_data
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, init_to_value
from sums import exact_sums

from pyro_dp import (
    AdaptiveClip,
    Clip,
    ClippedFraction,
    ClippingWarning,
    ConfigurationError,
    Execution,
    FullBatch,
    Noise,
    NotPrivateWarning,
    PaperDPSEP,
    PaperDPSVI,
    PoissonSampling,
    PrivacyAccountant,
    SubsampledGaussian,
    nonprivate,
)
from pyro_dp.mechanism.clipped_fraction import ClippedFractions
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block, Rows, with_bit
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.sampling import RecordSampler


def location(y):
    m = pyro.sample("m", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)) as idx:
        pyro.sample("y", dist.Normal(m, 1.0), obs=y[idx])


def delta(model):
    return AutoDelta(model, init_loc_fn=init_to_value(values={"m": torch.zeros(())}))


def new_svi(model=location, guide=None, **options):
    """Its records' gradients are m - y, at the present m."""
    pyro.clear_param_store()
    settings = dict(accountant=PrivacyAccountant(), num_steps=6, noise=0, clip=0.7)
    settings |= dict(optim=pyro.optim.Adam({"lr": 0.05}), sampling=FullBatch())
    return PaperDPSVI(model, guide or delta(model), **settings | options)


def new_sep(model=location, **options):
    pyro.clear_param_store()
    settings = dict(accountant=PrivacyAccountant(), num_steps=6, noise=0, clip=1.5)
    return PaperDPSEP(model, AutoMultivariateNormal(model), **settings | options)


STILL = {new_svi: {"optim": pyro.optim.SGD({"lr": 0.0})}, new_sep: {"damping": 1e-9}}


def found_and_true(make, y, **options):
    """The fraction, its standard error, and the truth of a run in which nothing moves."""
    inference = make(**STILL[make] | options)
    inference.run(y, progress=False)
    with pytest.warns(NotPrivateWarning):
        norms = nonprivate(inference).gradient_norms(y)
    truth = (norms > inference._reservation.plan.bound).double().mean().item()
    assert 0.1 < truth < 0.9
    return *inference.clipped_fraction, truth


@pytest.mark.parametrize("jit", ["none", "trace", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make, bound", [(new_svi, 0.7), (new_sep, 5.0)])
def test_without_noise_it_is_exact(make, bound, jit):
    options = dict(clip=bound, execution=Execution(jit=jit))
    fraction, error, truth = found_and_true(make, 0.5 + torch.randn(200), **options)
    assert fraction == pytest.approx(truth, abs=1e-12) and error == 0.0


@pytest.mark.long
@pytest.mark.parametrize("source", [None, "system"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (new_svi, dict(num_steps=20)),
        (new_svi, dict(num_steps=200, sampling=0.05)),
        (new_sep, dict(num_steps=10)),
    ],
)
def test_close_to_the_truth(make, options, source):
    """Within 0.02 at epsilon 1 and N = 20,000, where the standard error is at most 0.003."""
    options = options | ({"num_steps": 6} if source else {})
    options |= dict(accountant=PrivacyAccountant(epsilon=1.0), noise=Noise(source=source))
    fraction, error, truth = found_and_true(make, 0.5 + torch.randn(20_000), **options)
    assert abs(fraction - truth) < min(0.02, 5.5 * error)  # false alarms: 4e-8
    assert error < (0.02 if source else 0.003)


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_standard_error(rate):
    """Over 4,000 runs, errors in standard errors have sd 1 to 6%, which is 5.4 of its own sds."""
    generator, errors = np.random.default_rng(0), []
    bits = np.where(np.arange(1000) < 300, -0.5, 0.5)
    for _ in range(4000):
        fractions = ClippedFractions(0.01)
        for _ in range(3):  # two are the last half
            taken = generator.random(1000) < rate
            total = bits[taken].sum() + 0.2 / math.sqrt(0.01) * 0.5 * generator.standard_normal()
            released = torch.tensor([total / rate])
            fractions.add([released], RecordSampler("poisson", 1000, rate), 0.2)
        (estimates, variances) = fractions.state()[1:].T
        errors.append((estimates.mean() - 0.3).item() / (variances.sum().sqrt() / 2).item())
    assert fractions.mean().standard_error == pytest.approx((variances.sum().sqrt() / 2).item())
    assert abs(np.mean(errors)) < 5.5 / math.sqrt(4000)
    assert np.std(errors) == pytest.approx(1.0, abs=0.06)


def test_fraction_is_a_fraction():
    """Noise may move the estimate beyond 0 or 1. If noise hides it, there is no number."""
    for total, fraction in ((700.0, 0.0), (-700.0, 1.0)):
        fractions = ClippedFractions(0.01)
        assert fractions.mean() is None
        fractions.add([torch.tensor([total])], RecordSampler("full", 1000, 1.0), 2.0)
        assert fractions.mean().fraction == fraction
    assert str(ClippedFraction(0.125, 0.01)) == "12% +- 1.0%"
    assert str(ClippedFraction(0.0, 4.6)) == "hidden by the noise"
    # A quarter is exceeded by three standard errors.
    assert ClippedFraction(0.53, 0.09).is_large and not ClippedFraction(0.51, 0.09).is_large


@pytest.mark.long
@pytest.mark.parametrize("sampling", [PoissonSampling(), FullBatch()])
def test_a_share_of_one_per_cent(monkeypatch, sampling):
    """There is one event for any blocks; no block if nothing is clipped or nobody asks."""
    fixture = Fixture(monkeypatch, noise=Noise(2.0, source=0), sampling=sampling)
    blocks = fixture.svi._moves.policy.blocks(3)
    assert [block.share for block in blocks] == [0.99, 0.01]
    assert blocks[1].bound == 0.5 and blocks[1].size == 1
    fixture.svi.step(*regression_data())
    assert fixture.svi.accountant.ledger == ((SubsampledGaussian(2.0, 1.0, sampling.kind), 1),)
    for clip in (Clip(0.5, report=False), math.inf):
        fixture = Fixture(monkeypatch, clip=clip)
        fixture.svi.step(*regression_data())
        assert len(fixture.sums[0]) == 1
        assert fixture.svi.clipped_fraction is None and "clipped" not in repr(fixture.svi)
        assert fixture.svi._moves.policy.blocks(3)[0].share == 1.0


def test_an_adaptive_bound_has_one_bit(monkeypatch):
    """An adaptive bound uses its own bit, and does not warn."""
    fixture = Fixture(
        monkeypatch, clip=AdaptiveClip(1e-3, learning_rate=1e-3, share=0.2), num_steps=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixture.svi.run(*regression_data(), progress=False)
    assert [block.share for block in fixture.svi._moves.policy.blocks(3)] == [0.8, 0.2]
    assert len(fixture.sums[0]) == 2
    assert fixture.svi.clipped_fraction.fraction == 1.0


@pytest.mark.slow
@pytest.mark.every_commit
def test_noise_of_sep_counts_the_share(monkeypatch):
    """The noise-aware posterior adds the noise of the sites' block."""
    y = torch.randn(50)
    variances = []
    for report in (True, False):
        sep = new_sep(noise=Noise(3.0, source=0), damping=1.0, clip=Clip(1.5, report=report))
        sep.run(y, progress=False)
        variances.append(sep._fit.approximation.average.noise_variance)
    assert variances[0] / variances[1] == pytest.approx(1 / 0.99)
    assert variances[1] == pytest.approx((3.0 * 1.5) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("jit", ["none", pytest.param("trace", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [new_svi, new_sep])
def test_many_clipped_records_are_warned_of(make, jit):
    y = 0.5 + torch.randn(300)
    execution = Execution(jit=jit)
    with pytest.warns(ClippingWarning, match="100%.*Raise clip until"):
        make(execution=execution, clip=0.01).run(y, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inference = make(execution=execution, clip=8.0)
        inference.run(y, progress=False)
        make(execution=execution, clip=Clip(0.01, report=False)).run(y, progress=False)
    assert "clipped='0% +- 0.0%'" in repr(inference)


@pytest.mark.parametrize("sum_type", [ClippedSum, FixedPointSum])
def test_a_broken_record_is_no_bit(sum_type):
    """The contract tests whole inferences, and test_traced_step tests graphs."""
    blocks, sums = [Block(1, 0.7, 0.99), *ClippedFractions(0.01).blocks], []
    for rows in ([[0.1], [5.0], [math.nan]], [[0.1], [5.0]]):
        clipped = sum_type(blocks)
        clipped.add(*with_bit(Rows(torch.tensor(rows)), 0.7))
        sums.append(exact_sums(clipped))
    torch.testing.assert_close(*sums)


@pytest.mark.slow
@pytest.mark.parametrize("make", [new_svi, new_sep])
def test_state(make):
    """The mean goes on where it stood; a state of an older version has none."""
    y = torch.randn(100)
    first = make(num_steps=7, noise=1.0)
    for _ in range(4):
        first.step(y)
    state = through_a_file(first.state_dict())
    second = make(num_steps=7, noise=1.0)
    second.load_state_dict(state)
    assert second.clipped_fraction == first.clipped_fraction
    second.run(y, progress=False)
    kept = second.state_dict()["clipped_fractions"]
    assert kept.shape == (7, 2) and torch.equal(kept[:4], state["clipped_fractions"])
    for damaged in (0.5, torch.zeros(3), torch.full((3, 2), math.nan)):
        with pytest.raises(ConfigurationError, match="clipped_fractions"):
            make(noise=1.0).load_state_dict(state | {"clipped_fractions": damaged})
    del state["clipped_fractions"]
    third = make(num_steps=7, noise=1.0)
    third.load_state_dict(state)
    assert third.clipped_fraction is None
    third.run(y, progress=False)
    assert third.state_dict()["clipped_fractions"].shape == (3, 2)


def test_settings():
    with pytest.raises(ConfigurationError, match="the bit of being clipped"):
        new_svi(clip=Clip(loss=1.0, loss_share=0.995))
    new_svi(clip=Clip(loss=1.0, loss_share=0.995, report=False))
