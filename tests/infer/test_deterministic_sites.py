"""Looks at deterministic sites, if these are all that records see of some latents."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.optim import Adam
from seeded import seeded

from pyro_dp import DPSEP, DPSVI, PrivacyAccountant

GROUPS = 4


def scales():
    return pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("scale", dist.HalfNormal(1.0))


def sites():
    return *scales(), pyro.sample("z", dist.Normal(torch.zeros(GROUPS), 1.0).to_event(1))


def latents():
    mu, scale, z = sites()
    return pyro.deterministic("effect", mu + scale * z)


def observe(logits, y):
    with pyro.plate("people", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def not_centred(group, y):
    effect = latents()
    observe(effect[group], y)


def centred(group, y):
    mu, scale = scales()
    effect = pyro.sample("effect", dist.Normal(mu, scale).expand([GROUPS]).to_event(1))
    observe(effect[group], y)


def unnamed(group, y):
    mu, scale, z = sites()
    logits = pyro.deterministic("logits", mu + scale * z[group])  # a row for each record
    observe(logits, y)


def by_plate(group, y):
    mu, scale = scales()
    with pyro.plate("groups", GROUPS):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        effect = pyro.deterministic("effect", mu + scale * z, event_dim=0)
    observe(effect[group], y)


def partly(group, y):
    """Records see the mean itself, too."""
    mu, scale, z = sites()
    own = pyro.deterministic("own", scale * z)
    observe(mu + own[group], y)


def made_up(size=2000):
    draw = torch.Generator().manual_seed(0)
    group = torch.randint(GROUPS, (size,), generator=draw)
    effect = torch.randn(GROUPS, generator=draw) - 0.5
    y = torch.rand(size, generator=draw) < torch.sigmoid(effect[group])
    return group, y.double()


@functools.cache
def found(model, method=DPSEP, guide=AutoNormal, noise=1e-3, **options):
    return seeded(method, model, guide, *made_up(), noise=noise, **options)


@functools.cache
def fitted(model, noise=1e-3):
    return found(model, noise=noise)


@functools.cache
def posterior(model, noise=1e-3):
    return fitted(model, noise).posterior()


pytestmark = pytest.mark.filterwarnings("ignore::pyro_dp.PrivacyWarning")


@pytest.mark.slow
@pytest.mark.parametrize("model", [not_centred, by_plate])
def test_the_likelihood_is_that_of_the_centred_model(model):
    evidence, expected = fitted(model).evidence, fitted(centred).evidence
    assert [each.name for each in evidence.latents] == ["effect"]
    ours, theirs = evidence.parts[0].pooled, expected.parts[0].pooled
    torch.testing.assert_close(ours.estimate, theirs.estimate, atol=0.02, rtol=0)
    torch.testing.assert_close(ours.curvature, theirs.curvature, atol=3, rtol=0.1)


@pytest.mark.slow
def test_the_posterior_is_that_of_the_centred_model():
    ours, theirs = posterior(not_centred), posterior(centred)
    assert str(ours.status) == "ok"
    draws, others = ours.draws(4000), theirs.draws(4000)
    effect = draws["mu"].unsqueeze(1) + draws["scale"].unsqueeze(1) * draws["z"]
    sds = others["effect"].std(dim=0)
    assert ((effect.mean(0) - others["effect"].mean(0)).abs() < 0.4 * sds).all()
    assert ((effect.std(0) / sds - 1).abs() < 0.2).all()
    assert abs(draws["scale"].log().mean() - others["scale"].log().mean()) < 0.2


@pytest.mark.slow
def test_noise_widens_the_intervals_and_the_plain_ones_stay():
    quiet, loud = posterior(not_centred), posterior(not_centred, 0.3)
    assert (loud.noise_share > 0).all()
    assert (loud.variance > 0.99 * loud.plain.variance).all()
    torch.testing.assert_close(loud.plain.stddev, quiet.stddev, rtol=0.5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta])
def test_the_literal_swap_makes_looks_and_fits_its_guide(guide):
    svi = found(not_centred, DPSVI, guide, None, optim=Adam({"lr": 0.01}), epsilon=4.0)
    assert [each.name for each in svi.evidence.latents] == ["effect"]
    median = svi.guide.median()
    effect = median["mu"] + median["scale"] * median["z"]
    expected = svi.evidence.parts[0].pooled.estimate
    assert (effect - expected).abs().max() < 0.3


@pytest.mark.slow
def test_the_guide_of_independent_gaussians_is_the_closest_in_the_divergence_of_svi():
    """The marginals of the factors would be far wider."""
    sep = fitted(not_centred, 0.3)
    held = [sep.guide.scales.z, sep.guide.scales.mu.unsqueeze(0)]
    marginal = posterior(not_centred, 0.3).stddev
    assert torch.cat(held).mean() < 0.8 * marginal[[2, 3, 4, 5, 0]].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (poutine.reparam(centred, config={"effect": LocScaleReparam(0.0)}), {"effect"}),
        (partly, {"mu", "own"}),
    ],
    ids=["a site that was reparameterised", "latents that records see themselves"],
)
def test_what_looks_are_at(model, names):
    sep = DPSEP(model, AutoNormal(model), accountant=PrivacyAccountant(), noise=0.3)
    for _ in range(2):
        sep.step(*made_up())
    assert {each.name for each in sep.evidence.latents} == names


@pytest.mark.slow
def test_a_site_with_a_row_for_each_record_is_no_coordinate():
    sep = found(unnamed, noise=0.3)
    assert {each.name for each in sep.evidence.latents} == {"mu", "scale", "z"}
    assert str(sep.posterior().status) != "ok"


@pytest.mark.slow
def test_looks_at_other_coordinates_are_explained():
    shares = fitted(not_centred).explain().shares
    assert all(len(share) == len(posterior(not_centred).mean) for share in shares.values())
    torch.testing.assert_close(sum(shares.values()), torch.ones_like(shares["data"]))


@pytest.mark.slow
def test_public_factors_of_the_prior_count():
    def pulled(group, y):
        effect = latents()
        pyro.factor("pull", dist.Normal(effect.sum(), 0.01).log_prob(torch.tensor(0.0)))
        observe(effect[group], y)

    median = found(pulled, noise=0.3).guide.median()
    assert (median["mu"] + median["scale"] * median["z"]).sum().abs() < 0.2
