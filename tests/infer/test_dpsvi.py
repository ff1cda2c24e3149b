"""DPSVI: equality with SVI, sensitivity, noise, sampling, budget, private loss, state."""

import io
import math
import pickle
import threading

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    PROBLEMS,
    Fixture,
    Problem,
    fit_dpsvi,
    fit_svi,
    handwritten_guide,
    in_turns,
    logistic,
    logistic_subsampled,
    new_dpsvi,
    one_sum,
    regression_data,
    with_outlier,
)
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats

import pyro_dp.records.record_term
from pyro_dp import (
    DPSVI,
    AdaptiveClip,
    ConfigurationError,
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.mechanism.blocks import Block
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.streams import Randomness

_ALARM = 1e-8
# Local draws come from the private stream by design; a declared subsample makes SVI use a part.
_OTHER_DRAWS = ("VAE", "VAE, mean field", "hierarchical", "subsample_size")


@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in _OTHER_DRAWS])
def test_equals_svi(name, privatize):
    """sigma=0, C=inf, all records: Pyro's own optimisation path under the same seed."""
    ours = fit_dpsvi(PROBLEMS[name], steps=20, privatize=privatize)
    theirs = fit_svi(PROBLEMS[name], steps=20)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "name, size", in_turns(["AutoMultivariateNormal", "VAE", "mixture"], [1, 7, 30])
)
def test_microbatches_change_nothing(name, size):
    whole = fit_dpsvi(PROBLEMS[name], steps=3, generator=0)
    parts = fit_dpsvi(PROBLEMS[name], steps=3, generator=0, microbatch_size=size)
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value)


@pytest.mark.parametrize("name, privatize", in_turns(PROBLEMS, ["latents", "parameters"]))
def test_sensitivity(monkeypatch, name, privatize):
    """Neighbouring data sets under the same randomness: C for one record more, 2C for one replaced.

    One record is an outlier of 1e6. With local latents too: other records keep their draws.
    """
    data, outlier = with_outlier(name)
    options = dict(privatize=privatize, loss_clip=2.0)

    def blocks(data, batch):
        return one_sum(monkeypatch, name, data, batch, **options)

    with_it = blocks(data, [1, 4, 8, 20])
    without = blocks(data, [1, 8, 20])
    replaced = blocks(outlier, [1, 4, 8, 20])
    for bound, one, none, other in zip((0.5, 2.0, 0.5), with_it, without, replaced, strict=True):
        assert 0 < torch.linalg.vector_norm(one - none) <= bound * (1 + 1e-12)
        assert torch.linalg.vector_norm(other - none) <= bound * (1 + 1e-12)
        assert torch.linalg.vector_norm(other - one) <= 2 * bound * (1 + 1e-12)


def test_outside_the_batch_nothing_matters(monkeypatch):
    """Global draws, latents, and everything else but the sampled records' rows are the same."""
    x, y = regression_data()
    changed = x.clone()
    changed[5] = 1e6
    one = one_sum(monkeypatch, "AutoNormal", (x, y), [1, 4])
    other = one_sum(monkeypatch, "AutoNormal", (changed, y), [1, 4])
    assert torch.equal(one[0], other[0])


def dropout():
    """A local draw that comes from torch's own generator."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            features = torch.nn.functional.dropout(x[idx], 0.5)
            pyro.sample("y", dist.Bernoulli(logits=features @ w), obs=y[idx])

    return Problem(model, handwritten_guide, regression_data(), Trace_ELBO(), {})


@pytest.mark.parametrize("name", ["AutoNormal", "VAE", "dropout"])
def test_public_generators_do_not_see_the_batch(monkeypatch, name):
    """The next global draw is the same whatever was sampled, local draws included."""
    monkeypatch.setitem(PROBLEMS, "dropout", dropout)
    states = []
    for batch in ([], [1], [1, 4, 8, 20]):
        one_sum(monkeypatch, name, PROBLEMS[name]().data, batch)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_streams_of_one_step_are_distinct(monkeypatch):
    """Noise, sampling and local draws never come from one stream."""
    asked = []
    stream = Randomness.stream

    def spy(self, purpose, position):
        asked.append((purpose, position))
        return stream(self, purpose, position)

    monkeypatch.setattr(Randomness, "stream", spy)
    fixture = Fixture(monkeypatch, noise_multiplier=1.0, sample_rate=0.3, generator=0)
    data = regression_data()
    for _ in range(3):
        fixture.svi.step(*data)
    for position in range(3):
        for purpose in ("noise", "sampling"):
            assert asked.count((purpose, position)) == 1
    local = fixture.svi._randomness.stream("local", 2).integers(2**62)
    assert local != fixture.svi._randomness.stream("noise", 2).integers(2**62)


def test_particles_draw_locally_on_their_own(monkeypatch):
    """K particles are K estimates, also of the records' own latents."""
    used = []
    gradients = pyro_dp.records.record_term.RecordTerm.gradients

    def spy(self, particle, batch):
        used.append(batch.local.normal([3], 0, 4).tolist())
        return gradients(self, particle, batch)

    monkeypatch.setattr(pyro_dp.records.record_term.RecordTerm, "gradients", spy)
    vae = PROBLEMS["VAE"]()
    loss = Trace_ELBO(num_particles=2)
    Fixture(monkeypatch, vae.model, vae.guide, loss, sampling="full").svi.step(*vae.data)
    assert len(used) == 2 and used[0] != used[1]


def test_noise_is_added_at_the_right_scale(monkeypatch):
    """Kolmogorov-Smirnov on the released noise; it rejects two thirds and three halves of it."""
    fixture = Fixture(
        monkeypatch, max_grad_norm=0.7, noise_multiplier=1.5, sample_rate=0.3, generator=0
    )
    data = regression_data(dim=12)
    for _ in range(300):
        fixture.svi.step(*data)
    noise = [r[0] - s[0] for r, s in zip(fixture.released, fixture.sums, strict=True)]
    noise = torch.cat(noise).numpy() / (1.5 * 0.7 / math.sqrt(0.99))
    assert stats.kstest(noise, "norm").pvalue > _ALARM
    assert stats.kstest(noise * 2 / 3, "norm").pvalue < _ALARM
    assert stats.kstest(noise * 3 / 2, "norm").pvalue < _ALARM
    steps = noise.reshape(300, -1)
    assert np.abs(np.corrcoef(steps[1:, 0], steps[:-1, 0])[0, 1]) < 6 / math.sqrt(300)


def test_noise_differs_between_runs(monkeypatch):
    """Inferences that share a generator or an accountant, or have no seed, share no noise."""
    data = regression_data()
    generator, shared = torch.Generator().manual_seed(0), PrivacyAccountant()
    runs = [{}, {}] + [{"generator": generator}] * 2 + [{"generator": 5, "accountant": shared}] * 2
    draws = []
    for options in runs:
        pyro.clear_param_store()
        fixture = Fixture(monkeypatch, noise_multiplier=1.0, sampling="full", **options)
        fixture.svi.step(*data)
        fixture.svi.step(*data)
        draws += [r[0] - s[0] for r, s in zip(fixture.released, fixture.sums, strict=True)]
    rounded = {tuple(draw.round(decimals=9).tolist()) for draw in draws}
    assert len(rounded) == len(draws) == 12


def test_seeded_runs_repeat():
    def run():
        return fit_dpsvi(PROBLEMS["VAE"], steps=4, generator=3)

    one, other = run(), run()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_divides_by_the_public_rate(monkeypatch, sampling):
    """The estimate is sum / rate for every batch size, an empty batch included."""
    accountant = PrivacyAccountant(neighboring="replace_one")
    fixture = Fixture(
        monkeypatch,
        accountant=accountant,
        sampling=sampling,
        sample_rate=0.11,
        max_grad_norm=1e6,
        generator=0,
    )
    estimates, batches = [], []
    data = regression_data()
    fixture.svi._prepare(data, {})
    step = fixture.svi._prepared.step
    step._unchecked = 0  # to check a traced step, more gradients would be taken
    gradients = step.gradients
    monkeypatch.setattr(
        step, "gradients", lambda draws, g: (estimates.append(g.clone()), gradients(draws, g))[1]
    )
    draw = pyro_dp.mechanism.sampling.RecordSampler.draw
    monkeypatch.setattr(
        pyro_dp.mechanism.sampling.RecordSampler,
        "draw",
        lambda self, stream: batches.append(draw(self, stream)) or batches[-1],
    )
    for _ in range(60):
        fixture.svi.step(*data)
    rate = 0.11 if sampling == "poisson" else 3 / 30
    for estimate, (total, _) in zip(estimates, fixture.sums, strict=True):
        torch.testing.assert_close(estimate, total / rate)
    sizes = {len(batch) for batch in batches}
    assert sizes == {3} if sampling == "fixed" else 0 in sizes and len(sizes) > 3
    assert {event.sample_rate for event in fixture.events} == {rate}


def test_gradient_estimate_is_unbiased(monkeypatch):
    """Over Poisson samples, the mean of sum / rate is the sum over all records."""
    data = regression_data()
    runs = []
    for steps, options in ((1, {"sampling": "full"}), (400, {"sample_rate": 0.3})):
        fixture = Fixture(monkeypatch, guide=handwritten_guide, generator=0, **options)
        fixture.svi.optim = pyro.optim.SGD({"lr": 0.0})
        for _ in range(steps):
            pyro.set_rng_seed(0)  # the same global draw in every step
            fixture.svi.step(*data)
        runs.append(torch.stack([total[0] for total in fixture.sums]))
    full, estimates = runs[0][0], runs[1] / 0.3
    error = (estimates.mean(0) - full) / (estimates.std(0) / math.sqrt(400))
    assert error.abs().max() < 6


def test_an_empty_batch_pays_and_is_noisy(monkeypatch):
    fixture = Fixture(monkeypatch, noise_multiplier=1.0, sample_rate=1e-9)
    fixture.svi.step(*regression_data())
    assert torch.equal(fixture.sums[0][0], torch.zeros(3))
    assert fixture.released[0][0].abs().min() > 0
    assert fixture.svi.accountant.ledger == ((SubsampledGaussian(1.0, 1e-9), 1),)


def test_broken_record_contributes_nothing(monkeypatch):
    """A record whose gradient is infinite; the run goes on, in every block."""

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(w / x[idx], 1.0), obs=x[idx])

    x = torch.randn(10)
    broken = x.clone()
    broken[3] = 0.0
    sums = []
    for data, batch in ((broken, [1, 3, 7]), (x, [1, 7])):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        fixture = Fixture(monkeypatch, model, loss_clip=3.0, max_grad_norm=AdaptiveClip())
        monkeypatch.setattr(
            pyro_dp.mechanism.sampling.RecordSampler,
            "draw",
            lambda self, s, b=batch: torch.tensor(b),
        )
        fixture.svi.step(data)
        sums.append(fixture.sums[0])
    assert len(sums[0]) == 3
    for one, other in zip(*sums, strict=True):
        assert torch.equal(one, other)


def test_own_subsampling_of_the_plate_is_overridden(monkeypatch):
    """Sample rate from the declared size; Poisson sizes; scale of the full data."""
    fixture = Fixture(monkeypatch, logistic_subsampled, max_grad_norm=math.inf, generator=0)
    sizes = []
    draw = pyro_dp.mechanism.sampling.RecordSampler.draw

    def spy(self, stream):
        indices = draw(self, stream)
        sizes.append(len(indices))
        return indices

    monkeypatch.setattr(pyro_dp.mechanism.sampling.RecordSampler, "draw", spy)
    data = regression_data()
    for _ in range(40):
        fixture.svi.step(*data)
    assert fixture.events[0] == SubsampledGaussian(0.0, 5 / 30)
    assert len(set(sizes)) > 3


def test_calibrates_to_the_budget():
    accountant = PrivacyAccountant(epsilon=1.0)
    svi = DPSVI(
        logistic,
        AutoNormal(logistic),
        pyro.optim.Adam({}),
        Trace_ELBO(),
        accountant=accountant,
        num_steps=20,
        sample_rate=0.1,
    )
    data = regression_data()
    assert svi.run(*data, progress=False) == []
    assert accountant.ledger == ((SubsampledGaussian(svi.noise_multiplier, 0.1), 20),)
    assert 0.995 < accountant.get_epsilon() <= 1.0
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        svi.step(*data)
    with pytest.raises(PrivacyBudgetExceeded, match="num_steps"):
        svi.run(*data, progress=False)


def test_budget_is_checked_before_the_release(monkeypatch):
    """A step too many changes neither ledger nor parameters."""
    accountant = PrivacyAccountant(epsilon=1.0)
    fixture = Fixture(monkeypatch, accountant=accountant, noise_multiplier=5.0, sampling="full")
    data, values = regression_data(), []
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(100):
            fixture.svi.step(*data)
            values = [v.detach().clone() for v in pyro.get_param_store().values()]
    assert accountant.get_epsilon() <= 1.0
    assert accountant.num_releases == len(fixture.released)
    assert all(map(torch.equal, values, pyro.get_param_store().values()))


def test_two_inferences_share_one_accountant():
    accountant = PrivacyAccountant(epsilon=2.0)
    for _ in range(2):
        pyro.clear_param_store()
        svi = DPSVI(
            logistic,
            AutoNormal(logistic),
            pyro.optim.Adam({}),
            Trace_ELBO(),
            accountant=accountant,
            num_steps=5,
            noise_multiplier=10.0,
            sampling="full",
        )
        svi.run(*regression_data(), progress=False)
    assert accountant.ledger == ((SubsampledGaussian(10.0, 1.0, "full"), 10),)


@pytest.mark.parametrize("particles", [1, 3])
def test_private_loss(monkeypatch, particles):
    """Without noise and clipping it is Pyro's loss."""
    data, loss = regression_data(), Trace_ELBO(num_particles=particles)
    pyro.set_rng_seed(0)
    guide = AutoNormal(logistic)
    guide(*data)
    fixture = Fixture(
        monkeypatch, guide=guide, loss=loss, loss_clip=1e3, max_grad_norm=math.inf, sampling="full"
    )
    pyro.set_rng_seed(1)
    expected = loss.differentiable_loss(logistic, guide, *data).item()
    pyro.set_rng_seed(1)
    assert fixture.svi.step(*data) == pytest.approx(expected)


def test_private_loss_is_one_event_and_clipped(monkeypatch):
    fixture = Fixture(
        monkeypatch,
        noise_multiplier=2.0,
        loss_clip=0.3,
        loss_share=0.2,
        sampling="full",
        generator=0,
    )
    data = regression_data()
    for _ in range(200):
        fixture.svi.step(*data)
    assert fixture.svi.accountant.ledger == ((SubsampledGaussian(2.0, 1.0, "full"), 200),)
    assert all(total[1].abs() <= 0.3 * 30 for total in fixture.sums)
    blocks = ((0, 0.5, 0.79), (1, 0.3, 0.2), (2, 0.5, 0.01))  # the bit is the last
    for block, bound, share in blocks:
        std = 2.0 * bound / math.sqrt(share)
        noise = [r[block] - s[block] for r, s in zip(fixture.released, fixture.sums, strict=True)]
        noise = torch.cat(noise).numpy() / std
        assert stats.kstest(noise, "norm").pvalue > _ALARM
    assert math.isfinite(fixture.svi.step(*data))


def test_adaptive_clip(monkeypatch):
    """The bound follows the quantile of the norms."""
    fixture = Fixture(
        monkeypatch,
        noise_multiplier=1e-3,
        max_grad_norm=AdaptiveClip(initial=20.0, quantile=0.5, share=0.5),
        sampling="full",
        generator=0,
    )
    data = regression_data()
    for _ in range(60):
        fixture.svi.step(*data)
    fraction = fixture.sums[-1][1].item() / 30 + 0.5
    assert fraction == pytest.approx(0.5, abs=0.15)
    assert fixture.svi._bound < 5
    assert fixture.bounds[0] == 20.0 and fixture.bounds[-1] < 5
    assert all(s[0].norm() <= 30 * b for s, b in zip(fixture.sums, fixture.bounds, strict=True))
    assert fixture.svi.accountant.ledger[0].count == 60


def test_evaluate_loss_is_refused(monkeypatch):
    with pytest.raises(PrivacyError, match="loss_clip"):
        Fixture(monkeypatch).svi.evaluate_loss(*regression_data())


def test_prints_where_it_stands():
    svi = new_dpsvi(logistic, AutoNormal(logistic), num_steps=5, noise_multiplier=1.5)
    svi.step(*regression_data())
    assert repr(svi).startswith("DPSVI(num_steps=5, noise_multiplier=1.5, steps_done=1, clipped=")


def test_threads_with_equal_seeds_draw_different_noise():
    """They find the same position before, and not at the release."""
    accountant, gate, released = PrivacyAccountant(), threading.Barrier(2), []

    def work():
        svi = new_dpsvi(logistic, AutoNormal(logistic), accountant=accountant, generator=7)
        sampler = RecordSampler("full", 10, 1.0)
        clipped = ClippedSum([Block(3, 1.0)])
        gate.wait()
        released.extend(svi._release(clipped, sampler))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(released) == 2 and accountant.num_releases == 2
    assert not (released[0] == released[1]).any()


def test_seeded_run_says_so_in_the_ledger():
    accountant = PrivacyAccountant()
    DPSVI(
        logistic,
        handwritten_guide,
        pyro.optim.Adam({}),
        Trace_ELBO(),
        accountant=accountant,
        noise_multiplier=1.0,
        generator=0,
    )
    assert "seed" in " ".join(accountant.notes)


def test_earlier_values_are_noted(monkeypatch):
    """Values from before the first step are not covered, and the ledger says so."""
    data = regression_data()
    fresh = Fixture(monkeypatch, guide=handwritten_guide)
    fresh.svi.step(*data)
    assert fresh.svi.accountant.notes == ()
    again = Fixture(monkeypatch, guide=handwritten_guide)
    again.svi.step(*data)
    assert "before" in " ".join(again.svi.accountant.notes)


def test_state_round_trip(monkeypatch):
    """A resumed run takes up parameters, optimizer, steps, bound, sigma and ledger."""
    data = regression_data()

    def make():
        accountant = PrivacyAccountant(epsilon=1.0)
        return Fixture(
            monkeypatch,
            guide=handwritten_guide,
            accountant=accountant,
            noise_multiplier=None,
            num_steps=10,
            sampling="full",
            max_grad_norm=AdaptiveClip(),
        ).svi

    first = make()
    for _ in range(6):
        first.step(*data)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    saved = {k: v.detach().clone() for k, v in pyro.get_param_store().items()}
    pyro.clear_param_store()
    second = make()
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.accountant.ledger == first.accountant.ledger
    assert second.noise_multiplier == first.noise_multiplier
    assert second._bound == first._bound
    second._prepare(data, {})
    for name, value in saved.items():
        torch.testing.assert_close(pyro.param(name).detach(), value)
    second.run(*data, progress=False)
    assert second._steps == 10
    state = second.optim.get_state()
    assert all(float(s["state"][0]["step"]) == 10 for s in state.values())
    assert second.accountant.get_epsilon() <= 1.0


def test_pickling_would_carry_the_data(monkeypatch):
    svi = Fixture(monkeypatch).svi
    svi.step(*regression_data())
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(svi)


def test_resumed_run_does_not_repeat_noise(monkeypatch):
    data = regression_data()
    fixture = Fixture(monkeypatch, noise_multiplier=1.0, generator=0, sampling="full")
    fixture.svi.step(*data)
    state = fixture.svi.state_dict()
    pyro.clear_param_store()
    resumed = Fixture(monkeypatch, noise_multiplier=1.0, generator=0, sampling="full")
    resumed.svi.load_state_dict(state)
    resumed.svi.step(*data)
    one, other = (f.released[0][0] - f.sums[0][0] for f in (fixture, resumed))
    assert not torch.allclose(one, other)


def test_loading_never_lowers_the_ledger(monkeypatch):
    data = regression_data()
    svi = Fixture(monkeypatch, noise_multiplier=1.0, sampling="full").svi
    svi.step(*data)
    state = svi.state_dict()
    svi.step(*data)
    before = [v.detach().clone() for v in pyro.get_param_store().values()]
    with pytest.raises(PrivacyError):
        svi.load_state_dict(state)
    assert all(map(torch.equal, before, pyro.get_param_store().values()))
    assert svi.accountant.num_releases == 2


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, {"version": 99}])
def test_bad_state(monkeypatch, state):
    with pytest.raises(ConfigurationError, match="state"):
        Fixture(monkeypatch).svi.load_state_dict(state)


@pytest.mark.parametrize(("key", "value"), [("steps", -1), ("bound", math.nan)])
def test_damaged_state(monkeypatch, key, value):
    svi = Fixture(monkeypatch).svi
    with pytest.raises(ConfigurationError, match=key):
        svi.load_state_dict(svi.state_dict() | {key: value})


def test_state_of_another_model(monkeypatch):
    svi = Fixture(monkeypatch, guide=handwritten_guide).svi
    svi.step(*regression_data())
    state = svi.state_dict()
    state["parameters"]["loc"] = torch.zeros(7)
    with pytest.raises(ConfigurationError, match="loc"):
        svi.load_state_dict(state)


def test_cleared_parameter_store_is_noticed(monkeypatch):
    """Stale parameters would silently get zero gradients."""
    data = regression_data()
    svi = Fixture(monkeypatch, guide=handwritten_guide).svi
    svi.step(*data)
    pyro.clear_param_store()
    svi.step(*data)
    assert pyro.param("loc").abs().max() > 0


@pytest.mark.parametrize(
    "optim",
    [
        lambda: pyro.optim.Adagrad({"lr": 0.1}),
        lambda: pyro.optim.ClippedAdam({"lr": 0.1, "clip_norm": 1.0}),
        lambda: pyro.optim.SGD({"lr": 0.1, "momentum": 0.9}),
        lambda: pyro.optim.AdagradRMSProp({"eta": 0.1}),
        lambda: pyro.optim.RMSprop({"lr": 0.1}, {"clip_norm": 3.0}),
        lambda: pyro.optim.ExponentialLR(
            {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.9}
        ),
        lambda: pyro.optim.Adam(lambda name: {"lr": 0.1 if "loc" in name else 0.01}),
    ],
)
def test_any_pyro_optimizer(optim):
    """Also with parameters that get no gradient; and its state loads with weights only."""

    def guide(x, y):
        pyro.param("unused", torch.ones(2))
        handwritten_guide(x, y)

    svi = DPSVI(
        logistic,
        guide,
        optim(),
        Trace_ELBO(),
        accountant=PrivacyAccountant(),
        noise_multiplier=1.0,
        sampling="full",
    )
    data = regression_data()
    for _ in range(3):
        svi.step(*data)
    assert pyro.param("loc").abs().min() > 0
    assert torch.equal(pyro.param("unused"), torch.ones(2))
    buffer = io.BytesIO()
    torch.save(svi.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def test_run_returns_the_private_losses(monkeypatch):
    fixture = Fixture(monkeypatch, loss_clip=1.0, num_steps=4, sampling="full")
    assert len(fixture.svi.run(*regression_data(), progress=False)) == 4
    with pytest.raises(ConfigurationError, match="done"):
        fixture.svi.run(*regression_data(), progress=False)


@pytest.mark.parametrize("jit", ["none", "trace"])
def test_gradients_from_elsewhere_are_not_applied(jit):
    """A gradient that a leaf already has may come from the data."""

    def guide(x, y):
        pyro.param("unused", torch.zeros(2))
        handwritten_guide(x, y)

    svi = new_dpsvi(logistic, guide, sampling="full", jit=jit)
    data = regression_data()
    svi.step(*data)
    leaf = pyro.param("unused").unconstrained()
    leaf.grad = torch.ones(2)
    svi.step(*data)
    assert torch.equal(leaf.detach(), torch.zeros(2))


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        (pyro.optim.Adam({"lr": -1.0}), "Invalid learning rate"),
        (pyro.optim.Adam({"nonsense": 1}), "nonsense"),
        (pyro.optim.Adam(lambda name: None), "dictionary"),
        (pyro.optim.PyroOptim(torch.optim.LBFGS, {"lr": 0.1}), "LBFGS.step needs a closure"),
    ],
)
def test_an_optimizer_that_cannot_be_made_spends_nothing(optim, words):
    accountant = PrivacyAccountant()
    svi = DPSVI(
        logistic,
        handwritten_guide,
        optim,
        Trace_ELBO(),
        accountant=accountant,
        noise_multiplier=1.0,
    )
    with pytest.raises(ConfigurationError, match=words):
        svi.step(*regression_data())
    assert accountant.num_releases == 0


def scheduled(name, **options):
    settings = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}}
    return getattr(pyro.optim, name)(settings | options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ExponentialLR", {"gamma": 0.9}),
        ("MultiStepLR", {"milestones": [2, 5]}),
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 10}),
        ("LambdaLR", {"lr_lambda": lambda t: 1 / (1 + t)}),
    ],
)
def test_run_steps_a_scheduler(name, options):
    """Once for each step, also of a resumed run; who loops over step() does so himself."""

    def make():
        pyro.clear_param_store()
        optim = scheduled(name, **options)
        return new_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=8, sampling="full")

    def rates(svi):
        return [each.get_last_lr()[0] for each in svi.optim.optim_objs.values()]

    leaf = torch.zeros(1, requires_grad=True)
    expected = scheduled(name, **options)._get_optim(leaf)
    for _ in range(8):
        expected.optimizer.step()
        expected.step()
    data, whole, first = regression_data(), make(), make()
    for _ in range(3):
        first.step(*data)
        first.optim.step()
    state = first.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    resumed.run(*data, progress=False)
    assert rates(resumed) == pytest.approx(expected.get_last_lr() * 2)
    pyro.clear_param_store()
    whole.run(*data, progress=False)
    assert rates(whole) == pytest.approx(expected.get_last_lr() * 2)
    alone = make()
    alone.step(*data)
    alone.step(*data)
    assert all(each.last_epoch == 0 for each in alone.optim.optim_objs.values())


def test_a_scheduler_that_goes_by_a_loss():
    """It gets the private one, or nothing is spent."""

    def make(**options):
        pyro.clear_param_store()
        optim = scheduled("ReduceLROnPlateau", patience=0, threshold=1e9, threshold_mode="abs")
        return new_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=4, **options)

    svi = make()
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau.*loss_clip"):
        svi.run(*regression_data(), progress=False)
    assert svi.accountant.num_releases == 0
    svi = make(loss_clip=1.0)
    losses = svi.run(*regression_data(), progress=False)
    for each in svi.optim.optim_objs.values():
        assert each.best == losses[0]
        assert each.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)


def test_a_scheduler_that_fails_is_a_typed_error():
    optim = scheduled("LambdaLR", lr_lambda=lambda t: 1 / (2 - t))
    svi = new_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=4)
    with pytest.raises(ConfigurationError, match="optim failed.*ZeroDivisionError"):
        svi.run(*regression_data(), progress=False)
    assert svi.accountant.num_releases == 2


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        (pyro.optim.Adam({"lr": 0.1}, {"nonsense": 1}), "optim failed"),
        (pyro.optim.SGD({"lr": math.inf}), "'loc' became NaN or infinite|'scale' became"),
        (pyro.optim.SGD({"lr": 1e5}), "'scale' became"),  # finite where it is unconstrained
    ],
)
@pytest.mark.parametrize("jit", ["none", "trace"])
def test_a_step_never_leaves_parameters_that_are_not_finite(optim, words, jit):
    accountant = PrivacyAccountant()
    svi = DPSVI(
        logistic,
        handwritten_guide,
        optim,
        Trace_ELBO(),
        accountant=accountant,
        noise_multiplier=1.0,
        generator=0,
        jit=jit,
    )
    with pytest.raises(ConfigurationError, match=words):
        for _ in range(20):
            svi.step(*regression_data())
    spent = accountant.num_releases
    assert spent == svi._steps
    assert all(leaf.grad is None for leaf in svi._prepared.parameters.values())
    if "became" in words:  # nothing more is spent on them
        with pytest.raises(PrivacyError):
            svi.step(*regression_data())
        assert accountant.num_releases == spent


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_parameters_that_start_as_nan_spend_nothing():
    def guide(x, y):
        loc = pyro.param("start", torch.full((3,), math.nan))
        pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))

    svi = new_dpsvi(logistic, guide)
    with pytest.raises(ConfigurationError, match="'start' is NaN or infinite before"):
        svi.step(*regression_data())
    assert svi.accountant.num_releases == 0


@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 1e300},
        {"noise_multiplier": 1e40, "max_grad_norm": 1e40},
        {"sample_rate": 1e-300},
    ],
)
def test_noise_beyond_the_numbers_spends_nothing(options):
    svi = new_dpsvi(logistic, handwritten_guide, **options)
    with pytest.raises(ConfigurationError, match="noise would have"):
        svi.step(*regression_data())
    assert svi.accountant.num_releases == 0


@pytest.mark.parametrize("particles", [0, -1, 1.5])
def test_bad_number_of_particles(particles):
    with pytest.raises(ConfigurationError, match="num_particles"):
        DPSVI(
            logistic,
            handwritten_guide,
            pyro.optim.Adam({}),
            Trace_ELBO(num_particles=particles),
            accountant=PrivacyAccountant(),
            noise_multiplier=1.0,
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parameters", 1.0),
        ("parameters", {"loc": 1.0}),
        ("parameters", {"loc": torch.full((3,), math.nan)}),
        ("optimizer", 0.5),
        ("bound", "1"),
    ],
)
def test_damaged_parts_of_a_state(key, value):
    svi = new_dpsvi(logistic, handwritten_guide)
    svi.step(*regression_data())
    state, before = svi.state_dict(), svi.accountant.state_dict()
    with pytest.raises(ConfigurationError, match=key):
        svi.load_state_dict(state | {key: value})
    assert svi.accountant.state_dict() == before
