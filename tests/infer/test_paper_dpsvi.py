"""PaperDPSVI: equality with SVI, sensitivity, noise, sampling, budget, private loss, state."""

import math
import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract import InferenceContract, named, through_a_file
from ledgers import in_threads
from problems import (
    PROBLEMS,
    Fixture,
    Problem,
    dropout,
    fit_paper_dpsvi,
    fit_svi,
    handwritten_guide,
    in_turns,
    logistic,
    logistic_subsampled,
    new_paper_dpsvi,
    one_sum,
    outlier_of,
    regression_data,
    values,
)
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from releases import batches

import pyro_dp.records.record_term
from pyro_dp import (
    AdaptiveClip,
    Clip,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    FullBatch,
    Noise,
    PoissonSampling,
    PrivacyAccountant,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.streams import Randomness


class TestContract(InferenceContract):
    variants, slow = named(in_turns({"hand-written": None} | PROBLEMS, ["latents", "parameters"]))
    # Other records keep their draws where they have latents of their own.
    kinds = (
        "hand-written, latents",
        "AutoMultivariateNormal, latents",
        "mixture, parameters",
        "VAE, latents",
    )
    bound = "Clip.bound"
    younger = (*InferenceContract.younger, "history")
    bad_settings = (
        ({"optim": torch.optim.Adam}, "optim"),
        ({"loss": Trace_ELBO}, "loss"),
        *(({"loss": Trace_ELBO(num_particles=n)}, "num_particles") for n in (0, -1, 1.5)),
        ({"optim": (pyro.optim.Adam({}), 0.1)}, "optim"),
    )
    noisy_options = {"execution": Execution(jit="trace")}
    test_ctrl_c_anywhere = None  # its step is that of test_stochastic_gradient_vi.py

    def make(self, variant, **options):
        name, _, of = variant.rpartition(", ")
        settings = dict(clip=Clip(0.5, of=of, loss=2.0), optim=pyro.optim.Adam({"lr": 0.01}))
        return PROBLEMS[name]().paper_dpsvi(**{"sampling": None} | settings | options)

    def data(self, variant):
        return PROBLEMS[variant.rpartition(", ")[0]]().data

    def result(self, svi):
        return values()

    def neighbours(self, variant, data):
        if variant in self.kinds:
            ordinary, *_ = super().neighbours(variant, data)
            yield ordinary
        yield outlier_of(variant.rpartition(", ")[0], data)

    def damage(self, state):
        yield {"bound": math.nan}, "bound"
        yield {"bound": "1"}, "bound"
        yield {"parameters": 1.0}, "parameters"
        yield {"parameters": {"loc": 1.0}}, "parameters"
        yield {"parameters": {"loc": torch.full((3,), math.nan)}}, "parameters"
        yield {"parameters": {"loc": torch.zeros(7)}}, "loc"
        yield {"optimizer": 0.5}, "optimizer"
        yield {"num_steps": 6}, "DPSVI takes it"


# Local draws come from the private stream by design; a declared subsample makes SVI use a part.
_OTHER_DRAWS = ("VAE", "VAE, mean field", "hierarchical", "subsample_size")


@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in _OTHER_DRAWS])
def test_equals_svi(name, privatize):
    """sigma=0, C=inf, all records: Pyro's own optimisation path under the same seed."""
    ours = fit_paper_dpsvi(PROBLEMS[name], steps=5, clip=Clip(math.inf, of=privatize))
    theirs = fit_svi(PROBLEMS[name], steps=5)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("name", ["AutoNormal", "VAE", "dropout"])
def test_public_generators_do_not_see_the_batch(monkeypatch, name):
    """The next global draw is the same whatever was sampled, local draws included."""
    dropped = Problem(dropout, handwritten_guide, regression_data())
    monkeypatch.setitem(PROBLEMS, "dropout", lambda: dropped)
    states = []
    for batch in ([], [1], [1, 4, 8, 20]):
        one_sum(monkeypatch, name, PROBLEMS[name]().data, batch)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_streams_of_one_step_are_distinct(monkeypatch):
    """Noise, sampling and local draws come from different streams."""
    asked = []
    stream = Randomness.stream

    def spy(self, purpose, position):
        asked.append((purpose, position))
        return stream(self, purpose, position)

    monkeypatch.setattr(Randomness, "stream", spy)
    fixture = Fixture(monkeypatch, noise=Noise(1.0, source=0), sampling=0.3)
    data = regression_data()
    for _ in range(3):
        fixture.svi.step(*data)
    for position in range(3):
        for purpose in ("noise", "sampling"):
            assert asked.count((purpose, position)) == 1
    local = fixture.svi._releases.randomness.stream("local", 2).integers(2**62)
    assert local != fixture.svi._releases.randomness.stream("noise", 2).integers(2**62)


@pytest.mark.long
def test_particles_draw_locally_on_their_own(monkeypatch):
    """K particles are K estimates, also of the records' own latents."""
    used = []
    gradients = pyro_dp.records.record_term.RecordTerm.gradients

    def spy(self, particle, batch):
        found = gradients(self, particle, batch)
        used.append([each.tolist() for each in found.sampled])
        return found

    monkeypatch.setattr(pyro_dp.records.record_term.RecordTerm, "gradients", spy)
    vae = PROBLEMS["VAE"]()
    loss = Trace_ELBO(num_particles=2)
    Fixture(monkeypatch, vae.model, vae.guide, loss, sampling=FullBatch()).svi.step(*vae.data)
    assert len(used) == 2 and used[0] != used[1]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PoissonSampling(0.11), FixedSizeSampling(0.11)])
def test_divides_by_the_public_rate(monkeypatch, sampling):
    """The estimate is sum / rate for every batch size, an empty batch included."""
    accountant = PrivacyAccountant(neighboring="replace_one")
    fixture = Fixture(
        monkeypatch, accountant=accountant, sampling=sampling, clip=1e6, noise=Noise(0, source=0)
    )
    estimates, drawn, data = [], batches(monkeypatch), regression_data()
    fixture.svi._look_at(data, {})
    step = fixture.svi._kept.prepared.step
    step._unchecked = 0  # to check a traced step, more gradients would be taken
    gradients = step.gradients
    monkeypatch.setattr(
        step, "gradients", lambda draws, g: (estimates.append(g.clone()), gradients(draws, g))[1]
    )
    for _ in range(60):
        fixture.svi.step(*data)
    rate = 0.11 if sampling.kind == "poisson" else 3 / 30
    for estimate, (total, _) in zip(estimates, fixture.sums, strict=True):
        torch.testing.assert_close(estimate, total / rate)
    sizes = {len(batch) for batch in drawn}
    assert sizes == {3} if sampling.kind == "fixed" else 0 in sizes and len(sizes) > 3
    assert {event.sample_rate for event in fixture.events} == {rate}


@pytest.mark.long
def test_own_subsampling_of_the_plate_is_overridden(monkeypatch):
    """Sample rate from the declared size; Poisson sizes; scale of the full data."""
    fixture = Fixture(monkeypatch, logistic_subsampled, clip=math.inf, noise=Noise(0, source=0))
    drawn, data = batches(monkeypatch), regression_data()
    for _ in range(40):
        fixture.svi.step(*data)
    assert fixture.events[0] == SubsampledGaussian(0.0, 5 / 30)
    assert len({len(batch) for batch in drawn}) > 3


@pytest.mark.parametrize("particles", [1, 3])
def test_private_loss(monkeypatch, particles):
    """Without noise and clipping it is Pyro's loss."""
    data, loss = regression_data(), Trace_ELBO(num_particles=particles)
    pyro.set_rng_seed(0)
    guide = AutoNormal(logistic)
    guide(*data)
    fixture = Fixture(
        monkeypatch, guide=guide, loss=loss, clip=Clip(math.inf, loss=1e3), sampling=FullBatch()
    )
    pyro.set_rng_seed(1)
    expected = loss.differentiable_loss(logistic, guide, *data).item()
    pyro.set_rng_seed(1)
    assert fixture.svi.step(*data) == pytest.approx(expected)


@pytest.mark.slow
def test_adaptive_clip(monkeypatch):
    """The bound follows the quantile of the norms."""
    fixture = Fixture(
        monkeypatch,
        noise=Noise(1e-3, source=0),
        clip=AdaptiveClip(initial=20.0, quantile=0.5, share=0.5),
        sampling=FullBatch(),
    )
    data = regression_data()
    for _ in range(60):
        fixture.svi.step(*data)
    fraction = fixture.sums[-1][1].item() / 30 + 0.5
    assert fraction == pytest.approx(0.5, abs=0.15)
    assert fixture.svi._moves.policy.bound < 5
    assert fixture.bounds[0] == 20.0 and fixture.bounds[-1] < 5
    assert all(s[0].norm() <= 30 * b for s, b in zip(fixture.sums, fixture.bounds, strict=True))
    assert fixture.svi.accountant.ledger[0].count == 60


def test_prints_where_it_stands():
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic), num_steps=5, noise=1.5)
    svi.step(*regression_data())
    assert repr(svi).startswith(
        "PaperDPSVI(num_steps=5, noise_multiplier=1.5, steps_done=1, clipped="
    )


def test_threads_with_equal_seeds_draw_different_noise():
    """Both threads read the same position first, but release at different ones."""
    accountant, gate, released = PrivacyAccountant(), threading.Barrier(2), []

    def work():
        svi = new_paper_dpsvi(
            logistic, AutoNormal(logistic), accountant=accountant, noise=Noise(1.0, source=7)
        )
        sampler = RecordSampler("full", 10, 1.0)
        clipped = ClippedSum([Block(3, 1.0)])
        gate.wait()
        released.extend(svi._release(clipped, sampler))

    in_threads(work, work)
    assert len(released) == 2 and accountant.num_releases == 2
    assert not (released[0] == released[1]).any()


@pytest.mark.long
def test_earlier_values_are_noted(monkeypatch):
    """Values from before the first step are not covered, and the ledger says so."""
    data = regression_data()
    fresh = Fixture(monkeypatch, guide=handwritten_guide)
    fresh.svi.step(*data)
    assert fresh.svi.accountant.notes == ()
    again = Fixture(monkeypatch, guide=handwritten_guide)
    again.svi.step(*data)
    assert "before" in " ".join(again.svi.accountant.notes)


@pytest.mark.long
@pytest.mark.every_commit
def test_a_state_has_bound_and_optimizer():
    """An adapted bound, and what the optimizer remembers, go on from the file."""
    data, options = regression_data(), dict(clip=AdaptiveClip(), num_steps=10)
    first = new_paper_dpsvi(logistic, handwritten_guide, **options)
    for _ in range(6):
        first.step(*data)
    state = through_a_file(first.state_dict())
    pyro.clear_param_store()
    second = new_paper_dpsvi(logistic, handwritten_guide, **options)
    second.load_state_dict(state)
    assert second.state_dict()["bound"] == first.state_dict()["bound"] != AdaptiveClip().initial
    second.run(*data, progress=False)
    optimizer = second.state_dict()["optimizer"]
    assert all(float(each["state"][0]["step"]) == 10 for each in optimizer.values())


@pytest.mark.long
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
    """Some parameters get no gradient. The optimizer's state loads with weights_only."""

    def guide(x, y):
        pyro.param("unused", torch.ones(2))
        handwritten_guide(x, y)

    svi = new_paper_dpsvi(logistic, guide, optim=optim(), sampling=FullBatch())
    data = regression_data()
    for _ in range(3):
        svi.step(*data)
    assert pyro.param("loc").abs().min() > 0
    assert torch.equal(pyro.param("unused"), torch.ones(2))
    through_a_file(svi.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("jit", ["none", "trace"])
def test_gradients_from_elsewhere_are_not_applied(jit):
    """A gradient that a leaf already has may come from the data."""

    def guide(x, y):
        pyro.param("unused", torch.zeros(2))
        handwritten_guide(x, y)

    svi = new_paper_dpsvi(logistic, guide, sampling=FullBatch(), execution=Execution(jit=jit))
    data = regression_data()
    svi.step(*data)
    leaf = pyro.param("unused").unconstrained()
    leaf.grad = torch.ones(2)
    svi.step(*data)
    assert torch.equal(leaf.detach(), torch.zeros(2))


def starting_at_nan(x, y):
    loc = pyro.param("start", torch.full((3,), math.nan))
    pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optim": pyro.optim.Adam({"lr": -1.0})}, "Invalid learning rate"),
        ({"optim": pyro.optim.Adam(lambda name: None)}, "dictionary"),
        ({"guide": starting_at_nan}, "'start' is NaN or infinite before"),
        ({"noise": 1e300}, "noise would have"),
        ({"noise": 1e40, "clip": 1e40}, "noise would have"),
        ({"sampling": 1e-300}, "noise would have"),
    ],
)
def test_settings_that_cannot_work_spend_nothing(options, words):
    svi = new_paper_dpsvi(logistic, **{"guide": handwritten_guide} | options)
    with pytest.raises(ConfigurationError, match=words):
        svi.step(*regression_data())
    assert svi.accountant.num_releases == 0


def scheduled(name, **options):
    settings = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}}
    return getattr(pyro.optim, name)(settings | options)


@pytest.mark.long
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
    """A run steps the scheduler, resumed or not. A loop over step() must do so itself."""

    def make():
        pyro.clear_param_store()
        optim = scheduled(name, **options)
        return new_paper_dpsvi(
            logistic, handwritten_guide, optim=optim, num_steps=8, sampling=FullBatch()
        )

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
    """The scheduler gets the private loss. Without one, nothing is spent."""

    def make(**options):
        pyro.clear_param_store()
        optim = scheduled("ReduceLROnPlateau", patience=0, threshold=1e9, threshold_mode="abs")
        return new_paper_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=4, **options)

    svi = make()
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau.*Clip"):
        svi.run(*regression_data(), progress=False)
    assert svi.accountant.num_releases == 0
    svi = make(clip=Clip(loss=1.0))
    losses = svi.run(*regression_data(), progress=False)
    for each in svi.optim.optim_objs.values():
        assert each.best == losses[0]
        assert each.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)


def test_a_scheduler_that_fails_is_a_typed_error():
    optim = scheduled("LambdaLR", lr_lambda=lambda t: 1 / (2 - t))
    svi = new_paper_dpsvi(logistic, handwritten_guide, optim=optim, num_steps=4)
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
    own = dict(accountant=accountant, noise=Noise(1.0, source=0), execution=Execution(jit=jit))
    svi = new_paper_dpsvi(logistic, handwritten_guide, optim=optim, **own)
    with pytest.raises(ConfigurationError, match=words):
        for _ in range(20):
            svi.step(*regression_data())
    spent = accountant.num_releases
    assert spent == svi._steps
    assert all(leaf.grad is None for leaf in svi._kept.prepared.parameters.values())
    if "became" in words:  # nothing more is spent on them
        with pytest.raises(PrivacyError):
            svi.step(*regression_data())
        assert accountant.num_releases == spent
