"""Posteriors: marginals, intervals in the model's own space, noise, status, pictures."""

import copy
import html
import pickle

import pytest
import torch
from problems import logistic, regression_data
from pyro.infer.autoguide import AutoMultivariateNormal
from seeded import seeded
from torch.distributions import MultivariateNormal, biject_to, constraints, kl_divergence

import pyro_dp
from pyro_dp import DPSEP, ConfigurationError, PaperDPSEP, Posterior
from pyro_dp.infer.posterior.posterior import REMEDIES, Status, element_names
from pyro_dp.records.global_draw import Latent

SUPPORTS = {
    "w": (constraints.independent(constraints.real, 1), (3,)),
    "scale": (constraints.positive, ()),
    "below": (constraints.less_than(1.0), (2,)),
    "shares": (constraints.simplex, (2,)),
    "rates": (constraints.unit_interval, (2, 2)),
}
DIM = 12
CHECK = Status("check", "the last step was long, by 3.2 widths", "steps")


def latents():
    start, found = 0, []
    for name, (support, shape) in SUPPORTS.items():
        size = torch.Size(shape)
        stop = start + size.numel()
        found.append(Latent(name, size, biject_to(support), start, stop))
        start = stop
    return found


def real(name, *shape):
    """The only latent of a posterior."""
    size = torch.Size(shape)
    return Latent(name, size, biject_to(constraints.real), 0, size.numel())


def moments():
    root = torch.randn(DIM, DIM)
    plain = root @ root.T / DIM + 0.1 * torch.eye(DIM)
    return torch.randn(DIM), plain + torch.diag(torch.rand(DIM)), plain


def posterior(**options):
    mean, aware, plain = moments()
    return Posterior(latents(), mean, aware, plain=plain, **options)


def test_it_is_the_gaussian():
    mean, aware, _ = moments()
    ours, theirs = Posterior(latents(), mean, aware), MultivariateNormal(mean, aware)
    z = torch.randn(5, DIM)
    torch.testing.assert_close(ours.log_prob(z), theirs.log_prob(z))
    torch.testing.assert_close(ours.covariance_matrix, aware)
    torch.testing.assert_close(ours.stddev, aware.diagonal().sqrt())
    assert kl_divergence(ours, theirs) < 1e-10
    assert ours.sample((7,)).shape == (7, DIM)
    assert ours.expand((4,)).batch_shape == (4,)
    assert not ours.noise_share.any() and ours.status.is_ok
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other.mean, ours.mean) and repr(other) == repr(ours)


def test_names():
    first = "w[0] w[1] w[2] scale below[0] below[1] shares[0]"
    assert posterior().names[:7] == tuple(first.split())
    assert posterior().names[-1] == "rates[1, 1]"
    assert element_names("w", ()) == ["w"] and element_names("w", (0,)) == []


def test_a_site_is_the_marginal():
    whole = posterior()
    site = whole["below"]
    torch.testing.assert_close(site.mean, whole.mean[4:6])
    torch.testing.assert_close(site.covariance_matrix, whole.covariance_matrix[4:6, 4:6])
    torch.testing.assert_close(site.noise_share, whole.noise_share[4:6])
    assert site.names == ("below[0]", "below[1]")
    for end, other in zip(site.intervals()["below"], whole.intervals()["below"], strict=True):
        torch.testing.assert_close(end, other)
    with pytest.raises(KeyError, match="the sites are w, scale, below, shares, rates"):
        whole["weights"]


def test_draws_are_of_the_model_s_own_space_and_joint():
    torch.manual_seed(0)
    found = posterior()
    draws = found.draws(50_000)
    for name, (support, _) in SUPPORTS.items():
        assert support.check(draws[name]).all()
    assert draws["shares"].shape == (50_000, 3)
    joint = torch.cat([draws["w"], draws["scale"].log().unsqueeze(1)], dim=1)
    torch.testing.assert_close(
        torch.cov(joint.T), found.covariance_matrix[:4, :4], rtol=0.1, atol=0.03
    )


@pytest.mark.long
@pytest.mark.parametrize("name", SUPPORTS)
def test_quantiles_are_those_of_draws(name):
    torch.manual_seed(0)
    found, at = posterior(), [0.1, 0.5, 0.9]
    draws = found.draws(200_000)[name].sort(dim=0).values
    places = [found.quantiles([p])[name][0] for p in at]
    for p, ends in zip(at, places, strict=True):
        share = (draws < ends).double().mean(dim=0)
        torch.testing.assert_close(share, torch.full_like(share, p), rtol=0.0, atol=0.015)
    assert torch.equal(found.quantiles(at)[name], torch.stack(places))  # no other draws


def test_quantiles_leave_the_global_generator():
    before = torch.get_rng_state()
    found = Posterior(latents(), torch.zeros(DIM), torch.ones(DIM))
    found.intervals()
    repr(found)
    assert torch.equal(torch.get_rng_state(), before)


def test_intervals():
    found = posterior()
    for name, (lower, upper) in found.intervals(0.8).items():
        wider = found.intervals(0.9)[name]
        assert (wider.lower < lower).all() and (lower < upper).all() and (upper < wider.upper).all()
        assert lower.shape == upper.shape == found.draws(1)[name][0].shape
    lower, upper = found.intervals(0.95)["w"]
    torch.testing.assert_close((upper - lower) / 2, 1.959964 * found.stddev[:3])
    for level in (0.0, 1.0, 95):
        with pytest.raises(ConfigurationError, match="level must lie in"):
            found.intervals(level)


def test_noise_share_is_of_the_variance():
    mean, aware, plain = moments()
    found = Posterior(latents(), mean, aware, plain=plain)
    torch.testing.assert_close(found.noise_share, 1 - plain.diagonal() / aware.diagonal())
    torch.testing.assert_close(found.plain.covariance_matrix, plain)
    assert not found.plain.noise_share.any()
    for without, ends in zip(
        found.plain.intervals().values(), found.intervals().values(), strict=True
    ):
        assert (ends.lower <= without.lower).all() and (without.upper <= ends.upper).all()


def test_the_status_stays():
    assert posterior().status == Status() and posterior().status.is_ok
    found = posterior(status=CHECK)
    assert found.status == found.plain.status == found["shares"].status == CHECK
    assert not CHECK.is_ok and str(CHECK) == "check: the last step was long, by 3.2 widths"
    with pytest.raises(AttributeError):
        found.status = Status()


def test_it_reads_as_a_table():
    text = repr(posterior(status=CHECK)).splitlines()
    assert text[0].split() == ["median", "95%", "interval", "privacy"]
    assert text[1].startswith("w[0]  ") and len(text) == 3 + 13
    assert text[-2:] == CHECK.lines and text[-2] == f"status: {CHECK}"
    assert len({len(line) for line in text[:-2]}) == 1
    wide = repr(Posterior([real("many", 100)], torch.zeros(100), torch.ones(100)))
    assert wide.endswith("\n... and 70 more: posterior.intervals()\nstatus: ok")


@pytest.mark.parametrize("cause", REMEDIES)
def test_the_next_step(cause):
    """Level and cause decide the advice: publish a part, or spend more budget."""
    assert Status().lines == ["status: ok"]
    assert Status("ok", "few have it", cause).lines == ["status: ok: few have it"]
    for level, published in (("check", "together with its"), ("do not publish", "not the interv")):
        line, advice = Status(level, "why", cause).lines
        assert line == f"status: {level}: why" and published in advice
        assert advice.endswith(REMEDIES[cause]) and "new budget" in advice


def test_an_interval_without_the_noise_has_no_share():
    """Gradient steps give such intervals. Without noise the share is zero."""
    own = [real("w")], torch.zeros(1), torch.ones(1)
    shares = {
        status: repr(Posterior(*own, status=status)).splitlines()[1].split()[-1]
        for status in (Status("ok", "nothing was checked"), Status("check", "steps", "steps"))
    }
    assert list(shares.values()) == ["0%", "-"]


def test_notebooks_show_the_same_table():
    found = posterior(status=Status("check", "1 < 2", "steps"))
    shown = found._repr_html_()
    for line in repr(found).splitlines():
        for cell in line.split("  "):
            assert html.escape(cell.strip()) in shown
    assert shown.count("<tr>") == len(repr(found).splitlines()) - 2
    assert "<p>status: check: 1 &lt; 2</p>" in shown
    assert "<b>" not in Posterior([real("<b>w</b>")], torch.zeros(1), torch.ones(1))._repr_html_()


def test_an_infinite_interval_has_no_share():
    latent = Latent("s", torch.Size([]), biject_to(constraints.positive), 0, 1)
    assert repr(Posterior([latent], torch.zeros(1), torch.tensor([1e8]))).endswith("0%\nstatus: ok")


def test_a_variance_that_underflowed_has_no_share():
    assert not Posterior([real("w", 2)], torch.zeros(2), torch.tensor([0.0, 1.0])).noise_share.any()


def test_a_picture():
    pytest.importorskip("matplotlib")
    found = posterior(status=CHECK)
    (axes,) = found.plot(0.9).axes
    aware, plain = axes.collections
    ends = torch.stack([torch.tensor(s[:, 0]) for s in aware.get_segments()])
    inner = torch.stack([torch.tensor(s[:, 0]) for s in plain.get_segments()])
    lower, upper = found.intervals(0.9)["w"]
    torch.testing.assert_close(ends[:3], torch.stack([lower, upper], dim=1))
    assert (ends[:, 0] <= inner[:, 0]).all() and (inner[:, 1] <= ends[:, 1]).all()
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["w[0]", "w[1]"]
    (medians,) = axes.lines
    assert list(medians.get_ydata()) == list(range(13))
    assert medians.get_markerfacecolor() == "white" and axes.get_xlabel() == f"status: {CHECK}"
    (medians,) = posterior().plot().axes[0].lines
    assert medians.get_markerfacecolor() == "C3"
    assert "95% interval" not in axes.get_legend_handles_labels()[1][0]
    figure = Posterior([real("many", 100)], torch.zeros(100), torch.ones(100)).plot()
    assert figure.axes[0].get_title() == "The first 60 of 100"
    with pytest.raises(ConfigurationError, match="level"):
        found.plot(2.0)


# DPSEP


def fitted(bound, sigma):
    """Six steps, or all the looks that DPSEP makes."""
    kind, own = (PaperDPSEP, {"clip": bound, "num_steps": 6}) if bound else (DPSEP, {})
    return seeded(kind, logistic, AutoMultivariateNormal, *regression_data(), noise=sigma, **own)


BOUNDS = {"automatic": None, "by hand": 3.0}


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_dpsep_tells_what_the_noise_makes(bound):
    sep = fitted(bound, 2.0)
    aware, plain = sep.posterior(), sep.posterior(noise_aware=False)
    assert isinstance(aware, pyro_dp.Posterior) and isinstance(plain, pyro_dp.Posterior)
    torch.testing.assert_close(aware.mean, plain.mean)
    share = 1 - plain.covariance_matrix.diagonal() / aware.covariance_matrix.diagonal()
    torch.testing.assert_close(aware.noise_share, share.clamp(min=0.0))
    assert aware.noise_share.max() > 0.01 and not plain.noise_share.any()
    assert aware.names == tuple(f"w[{place}]" for place in range(len(aware.mean)))


@pytest.mark.slow
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_dpsep_says_what_the_noise_hides(bound):
    loud = fitted(bound, 1e4).posterior()
    assert (loud.status.level, loud.status.cause) == ("do not publish", "privacy noise")
    quiet = fitted(bound, 1e-3).posterior()
    assert quiet.status.cause != "privacy noise"


@pytest.mark.long
def test_dpsep_says_that_many_were_clipped():
    clipped = fitted(0.05, 0.01)
    assert clipped.clipped_fraction.is_large
    assert (clipped.posterior().status.level, clipped.posterior().status.cause) == (
        "check",
        "clipping",
    )
    free = fitted(1e3, 1e-6)
    assert free.posterior().status.is_ok
