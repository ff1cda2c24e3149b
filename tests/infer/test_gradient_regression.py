"""DPSVI's regression of released gradients, and the bound of gradients, on simulated releases."""

import math

import numpy as np
import pytest
import torch

from pyro_dp.infer.posterior.gaussian import Gaussian
from pyro_dp.infer.svi.gradient_bound import bias, bound, read
from pyro_dp.infer.svi.gradient_regression import TooFew, fitted, regressed
from pyro_dp.infer.svi.released_gradients import ReleasedGradients
from pyro_dp.mechanism.norm_histogram import MIDDLES, SIZE, Norms
from pyro_dp.utils.errors import ConfigurationError

DIM, STEPS = 4, 600


def standard(mean, covariance):
    """A standard normal prior: its own factor."""
    return Gaussian(torch.zeros(len(mean)), torch.eye(len(mean)))


def quadratic(seed=0, size=1000.0, dim=DIM):
    """H and m of a likelihood that is Gaussian in the latents."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(dim, dim, generator=generator) / dim**0.5
    return size * (root @ root.mT + torch.eye(dim)), torch.randn(dim, generator=generator)


def released(gradient, centre, noise, *, steps=STEPS, scatter=0.1, rate=1.0, seed=1):
    """A history of draws around ``centre``, which do not depend on what was released."""
    generator = torch.Generator().manual_seed(seed)
    history = ReleasedGradients(rate, 1000)
    for _ in range(steps):
        draw = centre + scatter * torch.randn(len(centre), generator=generator)
        error = torch.randn(len(centre), generator=generator)
        history.add(draw, gradient(draw) + noise * error, noise)
    return history


def optimised(gradient, start, noise, *, steps=STEPS, rate=0.05, seed=1, scatter=0.05):
    """Draws that follow what was released, as an optimizer's."""
    generator = torch.Generator().manual_seed(seed)
    history, mean = ReleasedGradients(1.0, 1000), start
    for t in range(steps):
        draw = mean + scatter * torch.randn(len(start), generator=generator)
        value = gradient(draw) + noise * torch.randn(len(start), generator=generator)
        history.add(draw, value, noise)
        mean = mean + rate * 0.02 ** (t / steps) * value / value.abs().clamp(min=1e-12)
    return history


def kl(mean, covariance, target, precision):
    shift = mean - target
    ratio = precision @ covariance
    return 0.5 * (shift @ precision @ shift + ratio.trace() - len(mean) - ratio.logdet()).item()


def test_it_is_exact_where_there_is_no_noise():
    curvature, top = quadratic()
    found = regressed(released(lambda z: curvature @ (top - z), top + 0.3, 0.0), standard)
    precision = curvature + torch.eye(DIM)
    torch.testing.assert_close(found.mean, torch.linalg.solve(precision, curvature @ top))
    torch.testing.assert_close(found.covariance, torch.linalg.inv(precision))
    torch.testing.assert_close(found.aware, found.covariance)
    torch.testing.assert_close(found.information, torch.ones(DIM))
    assert found.reason is None


@pytest.mark.in_turns
@pytest.mark.parametrize("scatter", [0.05, 0.2])
def test_mean_and_covariances_are_right_under_noise(scatter):
    """Over 60 histories: errors of the mean have the covariance that the noise adds.

    Something more is told of the slopes' error, which narrow draws leave large.
    """
    curvature, top = quadratic()
    precision = curvature + torch.eye(DIM)
    target = torch.linalg.solve(precision, curvature @ top)
    errors, added, sizes, ratios = [], [], [], []
    for seed in range(60):
        history = released(lambda z: curvature @ (top - z), top, 600.0, scatter=scatter, seed=seed)
        found = regressed(history, standard)
        errors.append(found.mean - target)
        added.append(found.aware - found.covariance)
        sizes.append(errors[-1] @ torch.linalg.solve(added[-1], errors[-1]) / DIM)
        ratios.append(torch.logdet(found.covariance @ precision) / DIM)
    errors, added = torch.stack(errors), torch.stack(added).mean(dim=0)
    assert 0.4 < torch.stack(sizes).mean() < 1.2
    assert (errors.mean(dim=0).abs() < 4 * (added.diagonal() / 60).sqrt()).all()
    assert abs(torch.stack(ratios).mean()) < 0.06


def test_sampled_records_are_noise_too():
    """With rate 1/2 a release has the covariance of the records' gradients, which is about H."""
    curvature, top = quadratic()
    root = torch.linalg.cholesky(curvature)
    generator = torch.Generator().manual_seed(3)

    def gradient(z):
        return curvature @ (top - z) + root @ torch.randn(DIM, generator=generator)

    history = released(gradient, top, 1.0, rate=0.5)
    noise = fitted(history, torch.ones(STEPS)).noise
    torch.testing.assert_close(noise, curvature + torch.eye(DIM), rtol=0.1, atol=30.0)


def test_far_draws_count_less_where_the_likelihood_is_not_quadratic():
    """Starts far out, where the gradient is flat, and goes on around the top."""
    curvature, top = quadratic(dim=2)
    history = ReleasedGradients(1.0, 1000)
    near = released(lambda z: curvature @ (top - z), top, 30.0, steps=300)
    far = released(lambda z: 200 * (top - z).sign(), top + 4.0, 30.0, steps=300)
    for part in (far, near):
        for row in zip(part.draws, part.gradients, part.noise.tolist(), strict=True):
            history.add(*row)
    found = regressed(history, standard)
    alone = regressed(near, standard)
    assert found.reason is None
    assert kl(found.mean, found.covariance, alone.mean, torch.linalg.inv(alone.covariance)) < 0.1


def groups(size=400.0, count=8):
    """H of an intercept and the effects of so many equal groups: they make up for each other."""
    design = torch.cat([torch.ones(count, 1), torch.eye(count)], dim=1)
    return size * design.mT @ design


@pytest.mark.parametrize("informative", [True, False])
def test_where_latents_make_up_for_each_other_the_prior_decides_or_a_doubt_is_told(informative):
    """Draws never went along the flat direction, and are far from the prior's mean there.

    With the curvature that noise makes of zero, the posterior would be there, and sure of it.
    """
    curvature = groups()
    dim = len(curvature)
    flat = torch.tensor([1.0] + [-1.0] * (dim - 1))
    precision = 8.0 if informative else 1e-3

    def prior(mean, covariance):
        return Gaussian(torch.zeros(dim), precision * torch.eye(dim))

    sizes = []
    for seed in range(12):
        history = released(lambda z: -curvature @ z, 0.4 * flat, 100.0, scatter=0.06, seed=seed)
        found = regressed(history, prior)
        assert found.reason is None
        if informative:
            away = found.mean  # the exact one is zero
            sizes.append(away @ torch.linalg.solve(found.aware, away) / dim)
        else:
            assert found.unseen.all()
    assert sum(sizes) <= 0.6 * len(sizes)  # 0.3; with the curvature that was found, 26


def test_draws_that_follow_the_noise_do_not_make_it_sure_of_itself():
    """There is nothing but noise: slopes would be seen where there are none.

    They are largest where draws were narrow, which says least.
    """
    own, told = [], []
    for seed in range(10):
        history = optimised(lambda z: 0.0 * z, torch.zeros(3), 100.0, seed=seed)
        line = fitted(history, torch.ones(STEPS))
        away = history.draws - history.draws.mean(dim=0)
        slopes = -torch.linalg.lstsq(away, history.gradients).solution
        own.append(slopes.diagonal().mean().item())
        told.append(line.curvature.diagonal().mean().item())
    assert sum(told) < 0.8 * sum(own)


def test_it_goes_to_the_prior_where_noise_hides_all():
    curvature, top = quadratic()
    found = regressed(
        released(lambda z: curvature @ (top - z), torch.zeros(DIM), 1e7, scatter=3.0), standard
    )
    assert found.mean.abs().max() < 0.5
    torch.testing.assert_close(found.aware, torch.eye(DIM), rtol=0.3, atol=0.3)
    assert (found.information < 0.05).all()


def test_a_curvature_that_is_not_known_widens_intervals():
    """By more than the noise in the gradients does."""
    curvature, top = quadratic()
    history = released(lambda z: curvature @ (top - z), top, 600.0, scatter=0.04)
    found = regressed(history, standard)
    of_noise = found.covariance.diagonal() / found.information
    assert (found.aware.diagonal() > 1.03 * of_noise).all()


def test_unknown_curvature_is_worth_as_much_noise():
    """To second order: the mean over curvatures that are as likely as told."""
    curvature, top = quadratic()
    history = released(lambda z: curvature @ (top - z), top, 200.0, scatter=0.3)
    line = fitted(history, torch.ones(STEPS))
    known, noise = line.slopes, line.noise / line.steps
    generator = torch.Generator().manual_seed(0)
    total, count = torch.zeros(DIM, DIM), 500
    for _ in range(count):
        error = torch.randn(DIM, DIM, generator=generator).triu()
        error = (error + error.triu(1).mT) * known.variance.sqrt()
        for sign in (-1, 1):  # of which a pair cancels to first order
            exact = torch.linalg.inv(known.mean + sign * known.basis @ error @ known.basis.mT)
            total += (exact + exact @ noise @ exact) / 2
    exact = torch.linalg.inv(known.mean)
    told = exact @ line.curvature_noise(noise) @ exact
    found = total / count - exact - exact @ noise @ exact
    assert found.trace().item() == pytest.approx(told.trace().item(), rel=0.3)


def test_information_tells_determined_latents():
    curvature = torch.diag(torch.tensor([1e5, 1e5, 1.0, 1.0]))
    history = released(lambda z: -curvature @ z, torch.zeros(DIM), 1000.0, scatter=0.02)
    found = regressed(history, standard)
    assert (found.information[:2] > 0.9).all() and (found.information[2:] < 0.5).all()


def test_less_noise_counts_more():
    curvature, top = quadratic()
    history = ReleasedGradients(1.0, 1000)
    for seed, noise in ((1, 1e5), (2, 100.0)):
        part = released(lambda z: curvature @ (top - z), top, noise, seed=seed)
        for row in zip(part.draws, part.gradients, part.noise.tolist(), strict=True):
            history.add(*row)
    both, quiet = regressed(history, standard), regressed(part, standard)
    precision = torch.linalg.inv(quiet.aware)
    assert kl(both.mean, both.aware, quiet.mean, precision) < 0.05


def test_an_order_of_latents_changes_nothing():
    curvature, top = quadratic()
    order = torch.tensor([2, 0, 3, 1])
    history = released(lambda z: curvature @ (top - z), top, 500.0)
    turned = ReleasedGradients(1.0, 1000)
    for draw, gradient in zip(history.draws, history.gradients, strict=True):
        turned.add(draw[order], gradient[order], 500.0)
    one, other = regressed(history, standard), regressed(turned, standard)
    torch.testing.assert_close(one.mean[order], other.mean)
    torch.testing.assert_close(one.aware[order][:, order], other.aware)


def test_other_coordinates_change_little():
    """Shrinkage knows coordinates, but not where the data decide."""
    curvature, top = quadratic()
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(5)))[0]
    history = released(lambda z: curvature @ (top - z), top, 100.0)
    turned = ReleasedGradients(1.0, 1000)
    for draw, gradient in zip(history.draws, history.gradients, strict=True):
        turned.add(turn @ draw, turn @ gradient, 100.0)
    one, other = regressed(history, standard), regressed(turned, standard)
    precision = torch.linalg.inv(one.covariance)
    assert kl(turn.mT @ other.mean, turn.mT @ other.covariance @ turn, one.mean, precision) < 0.01


def test_a_prior_that_is_not_gaussian_is_asked_again():
    """Its factor at the posterior itself is what counts in the end."""
    curvature, top = quadratic()
    asked = []

    def prior(mean, covariance):
        asked.append(mean)
        return Gaussian(-mean.pow(3), torch.eye(DIM))

    found = regressed(released(lambda z: curvature @ (top - z), top, 10.0), prior)
    torch.testing.assert_close(asked[-1], found.mean, rtol=0, atol=1e-6)


def test_bias_of_clipping_widens_intervals():
    curvature, top = quadratic()
    history = released(lambda z: curvature @ (top - z), top, 100.0)
    plain, biased = regressed(history, standard), regressed(history, standard, bias=50.0)
    variance = torch.linalg.inv(curvature)
    assert torch.linalg.eigvalsh(biased.aware - plain.aware)[0] > 0
    expected = 50.0**2 * (variance @ variance).trace()
    assert (biased.aware - plain.aware).trace().item() == pytest.approx(expected.item(), rel=0.1)


class TestReasons:
    def test_too_few_releases(self):
        curvature, top = quadratic()
        history = released(lambda z: curvature @ (top - z), top, 1.0, steps=4 * DIM - 1)
        with pytest.raises(TooFew, match="15 releases are too few for a regression on 4 latents"):
            regressed(history, standard)
        enough = released(lambda z: curvature @ (top - z), top, 1.0, steps=4 * DIM)
        assert regressed(enough, standard).aware.isfinite().all()

    def test_a_run_that_moves_over_a_curve(self):
        """Past the top, where the gradient is no line."""
        generator = torch.Generator().manual_seed(0)
        history = ReleasedGradients(1.0, 1000)
        for t in range(STEPS):
            draw = 4 * t / STEPS - 2 + 0.1 * torch.randn(2, generator=generator)
            noise = 100 * torch.randn(2, generator=generator)
            history.add(draw, 100 * (1 - draw.exp()) + noise, 100.0)
        assert "do not fit a line" in regressed(history, standard).reason

    def test_a_posterior_far_from_all_draws(self):
        """The draws are all to one side, close to each other, and the slope leads far away."""
        history = released(lambda z: 1e5 - 100.0 * z, torch.zeros(2), 1.0, scatter=0.1)
        assert "far away from all draws" in regressed(history, standard).reason

    @pytest.mark.parametrize("noise", [10.0, 300.0, 1e4])
    def test_none_where_the_likelihood_is_quadratic(self, noise):
        curvature, top = quadratic()
        for seed in range(5):
            history = optimised(lambda z: curvature @ (top - z), torch.zeros(DIM), noise, seed=seed)
            assert regressed(history, standard).reason is None


class TestHistory:
    def history(self):
        curvature, top = quadratic()
        return released(lambda z: curvature @ (top - z), top, 100.0, rate=0.5, steps=50)

    def test_it_can_be_saved(self, tmp_path):
        history = self.history()
        torch.save(history.state(), tmp_path / "history.pt")
        state = torch.load(tmp_path / "history.pt", weights_only=True)
        resumed = ReleasedGradients.resumed(state)
        one, other = regressed(history, standard), regressed(resumed, standard)
        assert torch.equal(one.mean, other.mean) and torch.equal(one.aware, other.aware)
        resumed.add(torch.zeros(DIM), torch.zeros(DIM), 1.0)
        assert len(resumed) == len(history) + 1

    def test_an_empty_one_can_be_saved(self):
        assert len(ReleasedGradients.resumed(ReleasedGradients(0.5, 10).state())) == 0

    @pytest.mark.parametrize(
        "damage",
        [
            {"draws": torch.zeros(3, DIM)},
            {"gradients": torch.full((50, DIM), math.nan)},
            {"noise": -torch.ones(50)},
            {"noise": [1.0] * 50},
            {"rate": 0.0},
            {"size": "many"},
            {"more": 1},
        ],
    )
    def test_damage_is_found(self, damage):
        with pytest.raises(ConfigurationError, match="history is damaged"):
            ReleasedGradients.resumed(self.history().state() | damage)


def log_normal(place, left, right, size):
    """Counts of norms whose logarithms have these spreads to either side."""
    spread = np.where(math.log(place) > MIDDLES, left, right)
    shape = np.exp(-(((MIDDLES - math.log(place)) / spread) ** 2) / 2)
    return size * shape / shape.sum()


def norms_of(counts):
    return Norms(np.exp(MIDDLES[counts > 0]), counts[counts > 0])


class TestBound:
    @pytest.mark.parametrize("right", [0.2, 0.5])
    @pytest.mark.parametrize("place", [0.05, 4.0])
    def test_it_is_that_of_the_true_norms(self, place, right):
        """To a few tenths, over noise that hides most bins of the tail."""
        counts = log_normal(place, 0.9, right, 20_000)
        best = bound(norms_of(counts), 10, 1.0 * 11)
        generator = np.random.default_rng(0)
        for _ in range(5):
            noisy = counts + 80 * generator.normal(size=SIZE)
            found = bound(read(noisy, 80.0, 20_000, place * 2, 1.0), 10, 1.0 * 11)
            assert 0.7 < found / best < 1.5

    def test_noise_alone_leaves_the_guess(self):
        """No tail is made up of places that are merely possible."""
        generator = np.random.default_rng(0)
        for _ in range(5):
            norms = read(5000 * generator.normal(size=SIZE), 5000.0, 500, 3.0, 2.0)
            assert 0.3 < norms.median < 30
            assert norms.share_above(10 * norms.median) < 0.1

    def test_counts_that_are_no_bell(self):
        """Two groups of records: the larger norms are seen."""
        counts = log_normal(1.0, 0.3, 0.2, 15_000) + log_normal(20.0, 0.3, 0.2, 5_000)
        noisy = counts + 5 * np.random.default_rng(0).normal(size=SIZE)
        assert read(noisy, 5.0, 20_000, 1.0, 1.0).share_above(8.0) > 0.15

    def test_no_group_is_made_up(self):
        """A run reads some fifteen histograms of 160 places: one false alarm loses it."""
        counts = np.where(np.arange(SIZE) < SIZE // 2, log_normal(0.6, 0.8, 0.15, 20_000), 0.0)
        generator = np.random.default_rng(0)
        for _ in range(1000):
            noisy = counts + 30 * generator.normal(size=SIZE)
            assert read(noisy, 30.0, 20_000, 0.6, 1.0).norms[-1] < 10.0

    def test_a_group_far_away_is_seen(self):
        """Nine standard deviations of four bins, where noise of that size is not to be had."""
        counts = np.where(np.arange(SIZE) < SIZE // 2, log_normal(0.6, 0.8, 0.15, 20_000), 0.0)
        counts[120:124] = 9 * 30 / 2
        generator = np.random.default_rng(0)
        for _ in range(20):
            noisy = counts + 30 * generator.normal(size=SIZE)
            assert read(noisy, 30.0, 20_000, 0.6, 1.0).norms[-1] > 500.0

    def test_more_noise_means_a_smaller_bound(self):
        norms = norms_of(log_normal(1.0, 0.5, 0.5, 10_000))
        found = [bound(norms, 10, noise) for noise in (0.1, 1.0, 10.0, 100.0)]
        assert found == sorted(found, reverse=True) and found[0] > 2 * found[-1]

    def test_it_scales_with_the_norms(self):
        counts = log_normal(1.0, 0.5, 0.5, 10_000)
        one, other = norms_of(counts), norms_of(np.roll(counts, 8))  # two octaves
        assert bound(other, 10, 5.0) == pytest.approx(4 * bound(one, 10, 5.0), rel=0.06)

    def test_no_counts_at_all(self):
        norms = read(np.zeros(SIZE), 1.0, 4000, 2.0, 2.0)
        assert math.isfinite(bound(norms, 3, 0.1)) and norms.counts.sum() == pytest.approx(4000)

    def test_bias_is_what_is_cut_off(self):
        norms = Norms(np.array([1.0, 3.0]), np.array([90.0, 10.0]))
        found = bias(norms, np.array([3.0, 2.0]), 2)
        assert found == pytest.approx([0.0, 10 * math.sqrt(1 / 16)])


def test_gradients_of_which_much_was_cut_off_hardly_count():
    """Half of the releases are biased. Weighted alike, the estimate is 55 sd off."""
    cut = 100.0 * (torch.arange(1000) % 2 == 0).double()
    biases = iter(cut)

    def gradient(draw):
        return 400.0 * (1.0 - draw) + next(biases)

    history = released(gradient, torch.ones(2), 20.0, steps=1000, scatter=0.2)
    history.cut = cut
    exact = 400.0 / 401.0
    assert (regressed(history, standard).mean - exact).abs().max() < 5.5 * 0.0022
    history.cut = None
    assert (regressed(history, standard).mean - exact).abs().min() > 0.1
