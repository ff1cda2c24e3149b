"""Limits of a posterior, and the epsilon or N that would help: from released numbers alone."""

import math
from dataclasses import replace

import pyro
import pytest
import torch
from problems import logistic, regression_data
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, init_to_value
from seeded import seeded

import pyro_dp.mechanism.releases
from pyro_dp import (
    DPSEP,
    DPSVI,
    ClippedFraction,
    ConfigurationError,
    Explanation,
    Noise,
    PaperDPSEP,
    PrivacyAccountant,
    SubsampledGaussian,
)
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.mechanism.release import release

NAMES = ("w[0]", "w[1]")
CHECK = Status("check", "why", "steps")


def explanation(data=0.5, sampling=0.1, clipping=0.0, **options):
    noise = 1 - data - sampling - clipping
    shares = {"data": data, "privacy noise": noise, "sampling": sampling, "clipping": clipping}
    return Explanation(
        NAMES,
        {name: torch.tensor([share, share]) for name, share in shares.items()},
        options.get("status", Status()),
        options.get("clipped"),
        1.0,
        options.get("half", 2.1),
    )


def fitted(kind, guide=AutoMultivariateNormal, data=None, **options):
    return seeded(kind, logistic, guide, *(data or regression_data(200)), **options)


_BY_HAND = {"num_steps": 8, "noise": 8.0, "sampling": 0.5, "clip": 3.0}
RUNS = {
    "DPSEP": (DPSEP, {"noise": 8.0}),
    "DPSEP by hand": (PaperDPSEP, _BY_HAND),
    "DPSEP of variances": (PaperDPSEP, _BY_HAND | {"noise": 4.0, "factors": "diagonal"}),
}
ON_SAMPLES = [name for name in RUNS if name != "DPSEP"]


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_shares_are_those_of_the_posterior(run):
    kind, options = RUNS[run]
    inference = fitted(kind, **options)
    posterior, found = inference.posterior(), inference.explain()
    assert found.names == posterior.names
    total = sum(found.shares.values())
    torch.testing.assert_close(total, torch.ones_like(total))
    torch.testing.assert_close(found.shares["data"], 1 - posterior.noise_share)
    assert found.shares["privacy noise"].min() > 0.01
    assert kind is DPSEP or found.shares["sampling"].min() > 0  # whose looks are at all records
    assert found.clipped == inference.clipped_fraction
    assert found.epsilon == inference.accountant.get_epsilon()
    assert found.status == posterior.status


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("run", ON_SAMPLES)
def test_without_privacy_noise_the_rest_is_sampling(run):
    kind, options = RUNS[run]
    found = fitted(kind, **options | {"noise": 0.0}).explain()
    assert found.epsilon == math.inf and found.epsilon_at_half_noise is None
    assert not found.shares["privacy noise"].any() and found.shares["sampling"].min() > 0.01


@pytest.mark.long
@pytest.mark.parametrize("run", ON_SAMPLES)
def test_with_all_records_nothing_is_sampling(run):
    kind, options = RUNS[run]
    found = fitted(kind, **options | {"sampling": 1.0}).explain()
    assert not found.shares["sampling"].any() and found.shares["privacy noise"].min() > 0.01


@pytest.mark.long
def test_a_known_split_of_dpsep():
    """Noise in the score and clipping move the mean through the covariance; by hand, sampling is
    u S."""
    sep = fitted(DPSEP, **RUNS["DPSEP"][1])
    plain, known = sep.posterior(noise_aware=False).covariance_matrix, sep._fit.approximation
    noise = (plain @ known.seen.pooled.noise(sep.posterior().mean) @ plain).diagonal()
    clipped = known.squared_bias * (plain @ known.seen.pooled.geometry @ plain).diagonal()
    shares = sep.explain().shares
    ratio = noise / (noise + clipped)
    found = shares["privacy noise"] / (shares["privacy noise"] + shares["clipping"])
    torch.testing.assert_close(found, ratio)

    sep = fitted(PaperDPSEP, **RUNS["DPSEP by hand"][1] | {"noise": 0.5})
    plain, aware = sep.posterior(noise_aware=False).stddev ** 2, sep.posterior().stddev ** 2
    excess = sep._fit.approximation.average.sampling_variance
    torch.testing.assert_close(sep.explain().shares["sampling"], excess * plain / aware)


class Replayed:
    """Releases of a first run, repeated for any data."""

    def __init__(self, monkeypatch):
        self.released, self.place = [], None
        monkeypatch.setattr(pyro_dp.mechanism.releases, "release", self)

    def __call__(self, clipped, **options):
        found = release(clipped, **options)
        if self.place is None:
            self.released.append([each.clone() for each in found])
            return found
        self.place += 1
        return [each.clone() for each in self.released[self.place - 1]]


@pytest.mark.every_commit
@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_only_what_was_released_speaks(run, monkeypatch):
    """The second run gets the same releases on entirely different data."""
    replayed, (kind, options) = Replayed(monkeypatch), RUNS[run]
    x, y = regression_data()
    found = fitted(kind, data=(x, y), **options).explain()
    replayed.place = 0
    again = fitted(kind, data=(3 * x + 1, 1 - y), **options).explain()
    assert repr(again) == repr(found)
    for name, share in found.shares.items():
        assert torch.equal(again.shares[name], share)


@pytest.mark.long
def test_half_the_noise_is_that_of_the_whole_ledger():
    sep = fitted(DPSEP, epsilon=1.0)
    other = PrivacyAccountant()
    for event, count in sep.accountant.ledger:
        other.record(SubsampledGaussian(event.noise_multiplier / 2), count)
    assert sep.explain().epsilon_at_half_noise == pytest.approx(other.get_epsilon())
    sep = fitted(DPSEP, noise=4.0)
    sep.accountant.record(SubsampledGaussian(3.0, 0.1))
    other = PrivacyAccountant()
    other.record(SubsampledGaussian(2.0))
    other.record(SubsampledGaussian(1.5, 0.1))
    assert sep.explain().epsilon_at_half_noise == pytest.approx(other.get_epsilon())
    sep.accountant.record_nonprivate("a look")
    assert sep.explain().epsilon_at_half_noise is None
    assert "Halving the noise" not in repr(sep.explain())


def test_what_would_help():
    found = explanation(data=0.5, sampling=0.1, clipping=0.1)
    noise, factor = 0.4, found.records_for_half_width
    assert (1 - noise) / factor + noise / factor**2 == pytest.approx(0.25)
    assert found.width_at_half_noise == pytest.approx((1 - noise + noise / 4) ** 0.5)
    assert explanation(data=1.0, sampling=0.0).records_for_half_width == pytest.approx(4.0)
    assert explanation(data=0.0, sampling=0.0).records_for_half_width == pytest.approx(2.0)
    assert explanation(data=0.0, sampling=0.0).width_at_half_noise == pytest.approx(0.5)


def test_what_limits_first():
    assert explanation().limit == "data"
    assert explanation(data=0.2).limit == "privacy noise"
    assert explanation(data=0.2, sampling=0.7).limit == "sampling"
    assert explanation(data=0.2, clipping=0.6).limit == "clipping"
    clipped = explanation(status=Status("check", "many were", "clipping"))
    assert clipped.limit == "clipping" and repr(clipped).startswith("Clipping may have")
    assert "half as wide" in repr(clipped)
    hidden = explanation(data=0.9, status=Status("do not publish", "it is loud", "privacy noise"))
    assert hidden.limit == "privacy noise" and repr(hidden).startswith("Privacy noise limits")
    assert "half as wide" not in repr(hidden)
    on_its_way = replace(hidden, status=Status("check", "they were few", "steps"))
    assert on_its_way.limit == "steps" and "half as wide" not in repr(on_its_way)
    assert repr(on_its_way).startswith("The search had not settled.")
    assert repr(on_its_way).splitlines()[-2:] == on_its_way.status.lines
    assert explanation(status=Status("check", "the prior says more")).limit == "data"


def test_it_reads():
    text = repr(explanation(data=0.3, clipped=ClippedFraction(0.03, 0.01)))
    assert text.splitlines() == [
        "Privacy noise makes up 60% of the interval variance on average, data and prior 30%, "
        "sampling 10%, clipping 0%. More records or a larger epsilon would help most.",
        "            data and prior  privacy  = privacy noise  + sampling  + clipping",
        "w[0]                   30%      70%              60%         10%          0%",
        "w[1]                   30%      70%              60%         10%          0%",
        "on average             30%      70%              60%         10%          0%",
        "Halving the noise's standard deviation in every release of the ledger needs epsilon 2.1 "
        "instead of 1.",
        "Intervals would be 0.74 times as wide with half the noise. Intervals half as wide need "
        "2.5 times as many records.",
        "Clipped records: 3% +- 1.0%.",
        "status: ok",
    ]
    many = Explanation(
        [f"w[{place}]" for place in range(40)], {"data": torch.ones(40)}, Status(), None, 1.0, None
    )
    many = replace(many, shares=many.shares | {"privacy noise": torch.zeros(40)})
    assert "... and 10 more: explanation.shares" in repr(many)


def test_a_picture():
    pytest.importorskip("matplotlib")
    (axes,) = explanation(status=CHECK).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(NAMES)
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([1.0, 1.0])
    assert axes.containers[1][0].get_x() == pytest.approx(0.5)
    assert axes.get_xlabel().endswith("\nstatus: check: why")


@pytest.mark.slow
def test_dpsep_that_has_not_arrived():
    far = init_to_value(values={"w": torch.full((3,), 3.0)})

    def started_far(model):
        return AutoMultivariateNormal(model, init_loc_fn=far, init_scale=0.1)

    data = regression_data(2000, 3)
    pyro.clear_param_store()
    noise = Noise(0.1, source=0)
    short = DPSEP(logistic, started_far(logistic), accountant=PrivacyAccountant(), noise=noise)
    for _ in range(4):  # the first is of norms alone
        short.step(*data)
    assert short.explain().limit == short.posterior().status.cause == "steps"
    assert "the mean still moved by" in short.explain().status.reason
    long = fitted(DPSEP, guide=started_far, data=data, noise=0.1)
    assert long.explain().status.is_ok and long.explain().limit == "data"
    hidden = fitted(DPSEP, noise=1e4)
    assert hidden.explain().limit == "privacy noise"
    assert hidden.explain().status.level == "do not publish"


@pytest.mark.long
def test_dpsep_by_hand_that_was_left_aside(monkeypatch):
    sep = fitted(PaperDPSEP, num_steps=6, noise=0.1, clip=3.0)
    assert sep.explain().status.is_ok
    control = sep._fit.approximation.control
    control.judged = control.unsettled = 3
    found = sep.explain()
    assert found.limit == "steps" and found.status.level == "do not publish"
    assert found.status.reason.startswith("3 of the last 3 estimates were left aside")


def test_dpsep_after_its_first_release():
    guide = AutoMultivariateNormal(logistic)
    sep = DPSEP(logistic, guide, accountant=PrivacyAccountant(), noise=2.0)
    with pytest.raises(ConfigurationError, match="before the first step"):
        sep.explain()
    sep.step(*regression_data())
    assert sep.explain().limit == "steps"
    assert sep.posterior().status.level == "do not publish"
    assert sum(sep.explain().shares.values()).allclose(torch.ones(3))


@pytest.mark.slow
def test_gradient_steps():
    """After few steps the noise is unknown. After many, the width is split by causes."""
    svi = fitted(DPSVI, num_steps=10, noise=1.0)
    found = svi.explain()
    assert found.limit == "steps" and found.status.level == "check"
    assert "do not include the privacy noise" in found.status.reason
    assert not found.shares["privacy noise"].any() and "half as wide" not in repr(found)
    found = fitted(DPSVI, num_steps=100, noise=5.0, sampling=0.5).explain()
    assert found.shares.keys() == {"data", "privacy noise", "sampling"}
    assert (found.shares["privacy noise"] > found.shares["sampling"]).all()
    assert found.shares["sampling"].min() > 0
    with pytest.raises(ConfigurationError, match="not one Gaussian"):
        fitted(DPSVI, guide=AutoDelta, num_steps=4, noise=1.0).explain()
