"""The step control: refused steps, and the beginning of averaging."""

import pytest
import torch

from pyro_dp.infer.ep.approximation import StepControl

QUIET = torch.zeros(2, dtype=torch.float64)
PRECISION = torch.tensor([50.0, 20.0], dtype=torch.float64)


def control(num_steps=20, curved=False, floor=0.0):
    return StepControl(num_steps, curved, floor)


def test_a_gaussian_posterior_is_never_overshot():
    """Newton's steps reach the optimum at once, and without noise nothing is averaged."""
    steps, mean, optimum = control(), torch.tensor([3.0, -1.0]), torch.tensor([0.5, 0.5])
    for _ in range(15):
        assert steps.accepts(mean, PRECISION * (optimum - mean), PRECISION, QUIET)
        mean = optimum
        assert steps.damping == 1.0 and steps.floor == 0.0


def test_an_overshooting_step_is_taken_back_and_shortened():
    """From 0 to beyond the optimum, where the log posterior is lower than at the start."""
    steps = control()
    assert steps.accepts(torch.zeros(2), torch.tensor([10.0, 0.0]), PRECISION, QUIET)
    assert not steps.accepts(torch.tensor([2.0, 0.0]), torch.tensor([-30.0, 0.0]), PRECISION, QUIET)
    assert steps.floor == pytest.approx(35.0)
    assert not steps.accepts(torch.tensor([1.0, 0.0]), torch.tensor([-20.0, 0.0]), PRECISION, QUIET)
    assert steps.floor == pytest.approx(140.0)
    assert steps.accepts(torch.tensor([0.5, 0.0]), torch.tensor([2.0, 0.0]), PRECISION, QUIET)
    assert steps.floor == pytest.approx(70.0)


def test_noise_alone_refuses_nothing():
    steps = control()
    noise = torch.full((2,), 900.0)
    assert steps.accepts(torch.zeros(2), torch.tensor([100.0, 0.0]), PRECISION, noise)
    assert steps.accepts(torch.tensor([2.0, 0.0]), torch.tensor([-150.0, 0.0]), PRECISION, noise)


@pytest.mark.parametrize("full", [True, False])
def test_averaging_begins_where_the_gradient_is_lost_in_noise(full):
    steps, noise = control(), torch.full((2,), 100.0)
    precision = torch.diag(PRECISION) if full else PRECISION
    noise = torch.diag(noise) if full else noise
    dampings = []
    for size in (400.0, 200.0, 10.0, -10.0, 10.0):
        assert steps.accepts(torch.zeros(2), torch.tensor([size, 0.0]), precision, noise)
        dampings.append(steps.damping)
    assert dampings == [1.0, 1.0, 1.0, 1 / 2, 1 / 3]


@pytest.mark.parametrize(("curved", "way"), [(False, 10), (True, 16)])
def test_the_way_ends(curved, way):
    """At half of the steps at the latest; with curved predictors at four fifths, no sooner."""
    steps, noise = control(20, curved), torch.full((2,), 1e-6 if not curved else 1e6)
    gradient = torch.tensor([400.0, 100.0])
    dampings = []
    for _ in range(20):
        assert steps.accepts(torch.zeros(2), gradient, PRECISION, noise)
        dampings.append(steps.damping)
    assert dampings[:way] == [1.0] * way and dampings[way] == 1 / 2


def test_settled_where_gradients_are_noise():
    """G' P^-1 G of pure noise, 3 sds beyond its mean in 1% of the steps; half of them count."""
    torch.manual_seed(0)
    for precision in (PRECISION, torch.diag(PRECISION)):
        steps, noise = control(), torch.full((2,), 100.0)
        noise = noise if precision.dim() == 1 else torch.diag(noise)
        for _ in range(20):
            steps.accepts(torch.zeros(2), 10.0 * torch.randn(2), precision, noise)
        assert steps.judged == 10 and steps.unsettled <= 1 and steps.settled


@pytest.mark.parametrize("quiet", [True, False])
def test_not_settled_where_gradients_stand_out(quiet):
    """They do so in most of the steps of the last half; earlier steps do not matter."""
    noise = QUIET if quiet else torch.full((2,), 100.0)
    for late, settled in ((5, True), (6, False)):
        steps = control()
        for step in range(20):
            size = 400.0 if step < 10 + late else 1.0
            steps.accepts(torch.zeros(2), torch.tensor([size, 0.0]), PRECISION, noise)
        assert steps.unsettled == late and steps.settled == settled


def test_not_settled_where_estimates_are_left_aside():
    steps = control(4)
    for size in (2.0, -3.0, -3.0, -3.0):
        mean = torch.tensor([0.0 if size > 0 else 0.1, 0.0])
        steps.accepts(mean, torch.tensor([size, 0.0]), PRECISION, QUIET)
    assert steps.unsettled == 2 and not steps.settled


def test_states_of_older_versions_have_no_judgement():
    steps, old = control(), control().state()
    for name in ("taken", "judged", "unsettled"):
        del old[name]
    steps.load(old)
    assert steps.settled
