"""Observation distributions as functions of few numbers: the density read off is the site's own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.utils._pytree import tree_leaves

from pyro_dp.infer.ep.observation_family import Family, NotLinear, negative_binomial
from pyro_dp.utils.gauss_hermite import by_autodiff

COUNT = 4  # elements of the observed site


def w():
    """The latents, of shape (2, COUNT) so that each element has numbers of its own."""
    return pyro.sample("w", dist.Normal(torch.zeros(2, COUNT), 1.0).to_event(2))


def observe(fn, value):
    with pyro.plate("data", COUNT):
        pyro.sample("y", fn, obs=value)


COUNTS = torch.tensor([0.0, 1.0, 3.0, 7.0], dtype=torch.float64)
BITS = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
POSITIVE = torch.tensor([0.1, 0.5, 1.0, 4.0], dtype=torch.float64)
FRACTIONS = torch.tensor([0.1, 0.5, 0.7, 0.99], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 1, 0])
THREE = torch.tensor([0, 1, 2, 2])


def logits(w, classes):
    """Neither normalised nor with a zero."""
    return torch.stack([w[0], w[1], w.sum(0)][:classes], dim=-1)


# The distribution for w (2, COUNT), observed values, and how many numbers an element has.
FAMILIES = {
    "Bernoulli, logits": (lambda w: dist.Bernoulli(logits=w[0]), BITS, 1),
    "Bernoulli, probs": (lambda w: dist.Bernoulli(torch.sigmoid(w[0])), BITS, 1),
    "Poisson": (lambda w: dist.Poisson(w[0].exp()), COUNTS, 1),
    "Normal, loc": (lambda w: dist.Normal(w[0], POSITIVE), FRACTIONS, 1),
    "Normal, loc and scale": (lambda w: dist.Normal(w[0], w[1].exp()), FRACTIONS, 2),
    "Normal, scale": (lambda w: dist.Normal(0.0, w[1].exp()), FRACTIONS, 1),
    "LogNormal": (lambda w: dist.LogNormal(w[0], w[1].exp()), POSITIVE, 2),
    "Gamma": (lambda w: dist.Gamma(w[0].exp(), w[1].exp()), POSITIVE, 2),
    "Gamma, rate": (lambda w: dist.Gamma(2.0, w[1].exp()), POSITIVE, 1),
    "Exponential": (lambda w: dist.Exponential(w[1].exp()), POSITIVE, 1),
    "Beta": (lambda w: dist.Beta(w[0].exp(), w[1].exp()), FRACTIONS, 2),
    "StudentT": (lambda w: dist.StudentT(3.0, w[0], w[1].exp()), FRACTIONS, 2),
    "Categorical, 2 logits": (lambda w: dist.Categorical(logits=logits(w, 2)), CLASSES, 1),
    "Categorical, 3 logits": (lambda w: dist.Categorical(logits=logits(w, 3)), THREE, 2),
    "Categorical, 2 probs": (lambda w: dist.Categorical(logits(w, 2).exp()), CLASSES, 1),
    "Categorical, 3 probs": (lambda w: dist.Categorical(logits(w, 3).exp()), THREE, 2),
    "Binomial": (lambda w: dist.Binomial(COUNTS + 2, logits=w[0]), COUNTS, 1),
    "Binomial, probs": (lambda w: dist.Binomial(9, torch.sigmoid(w[0])), COUNTS, 1),
    "NegativeBinomial": (lambda w: dist.NegativeBinomial(3.0, logits=w[0]), COUNTS, 1),
    "NegativeBinomial, both": (
        lambda w: dist.NegativeBinomial(w[1].exp(), logits=w[0]),
        COUNTS,
        2,
    ),
    "NegativeBinomial, probs": (
        lambda w: dist.NegativeBinomial(w[1].exp(), torch.sigmoid(w[0])),
        COUNTS,
        2,
    ),
}


def traced(model, value):
    """Trace of a model at latents w, with their gradient on."""
    value = value.clone().requires_grad_()
    trace = poutine.trace(poutine.condition(model, {"w": value})).get_trace()
    return trace, value


def read(model):
    """Family of site y, found at other latents than those at which it is used."""
    trace, _ = traced(model, torch.ones(2, COUNT))
    return Family(trace.nodes["y"])


def check(model, rank=None):
    """Log density and its gradient are those of the site."""
    family = read(model)
    assert rank is None or family.rank == rank
    trace, latents = traced(model, torch.randn(2, COUNT))
    trace.compute_log_prob(lambda name, site: name == "y")
    expected = trace.nodes["y"]["log_prob_sum"]
    numbers, rest = family.read(trace.nodes["y"])
    assert numbers.shape[-1] == family.rank
    found = family.log_prob(numbers, rest)
    assert found.shape == numbers.shape[:-1]
    torch.testing.assert_close(found.sum(), expected)
    gradients = [
        torch.autograd.grad(x, latents, retain_graph=True)[0] for x in (found.sum(), expected)
    ]
    torch.testing.assert_close(*gradients)
    return family, numbers.detach(), rest


@pytest.mark.parametrize("name", FAMILIES)
def test_the_density_is_the_sites_own(name):
    make, value, rank = FAMILIES[name]
    check(lambda: observe(make(w()), value), rank)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_density_at_many_numbers_at_once(name):
    """As the quadrature asks for it: (K, E, r) -> (K, E)."""
    make, value, _ = FAMILIES[name]
    family, numbers, rest = check(lambda: observe(make(w()), value))
    nodes = numbers + torch.randn(5, *numbers.shape)
    together = family.log_prob(nodes, rest)
    alone = torch.stack([family.log_prob(node, rest) for node in nodes])
    torch.testing.assert_close(together, alone)


DRAWN = (
    "Poisson",
    "Gamma",
    "StudentT",
    "NegativeBinomial, both",
    "Binomial",
    "Normal, loc and scale",
)


@pytest.mark.parametrize("name", DRAWN)
def test_gradients_at_outcomes_of_the_model_have_mean_zero(name):
    """Within six standard errors, and the observed value does not matter."""
    make, value, _ = FAMILIES[name]
    family, numbers, rest = check(lambda: observe(make(w()), value))
    *constant, observed, weight = rest
    found = []
    for other in (observed, torch.full_like(observed, torch.nan)):
        torch.manual_seed(1)
        found.append(family.simulated_gradients(numbers, [*constant, other, weight], 20_000))
    assert torch.equal(*found)
    assert (found[0].mean(0).abs() < 6 * found[0].std(0) / 20_000**0.5).all()


@pytest.mark.parametrize(
    ("make", "value", "symmetric"),
    [
        (lambda w: dist.StudentT(3.0, w[0], 1.0), FRACTIONS, True),
        (lambda w: dist.Laplace(w[0], 2.0), FRACTIONS, True),
        (lambda w: dist.StudentT(3.0, w[0], w[1].exp()), FRACTIONS, False),
        (lambda w: dist.Gumbel(w[0], 1.0), FRACTIONS, False),
        (lambda w: dist.Poisson(w[0].exp()), COUNTS, False),
    ],
)
def test_symmetric_residuals(make, value, symmetric):
    """Symmetric residuals need no simulated outcomes."""
    assert read(lambda: observe(make(w()), value)).is_symmetric == symmetric


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_broken_record_does_not_fail_the_others_outcomes(bad):
    make, value, _ = FAMILIES["Poisson"]
    family, numbers, rest = check(lambda: observe(make(w()), value))
    numbers[1] = bad
    assert family.simulated_gradients(numbers, rest, 3).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_constant_ends_no_others_outcomes(bad):
    """A draw from a binomial whose count is NaN never ends."""
    make, value, _ = FAMILIES["Binomial"]
    family, numbers, rest = check(lambda: observe(make(w()), value))
    counts = rest[0].clone()
    counts[1] = bad
    assert family.simulated_gradients(numbers, [counts, *rest[1:]], 3).isfinite().all()


@pytest.mark.parametrize("other", [2.5, -1.0, torch.nan, torch.inf, 1e9])
def test_a_value_that_is_no_count_has_its_own_density(other):
    counts = torch.tensor([0.0, 3.0, 7.0, other], dtype=torch.float64).unsqueeze(1)
    numbers = [torch.full_like(counts, 0.3), torch.linspace(-1.0, 1.0, 4).reshape(4, 1).to(counts)]
    expected = dist.NegativeBinomial(numbers[0].exp(), logits=numbers[1], validate_args=False)
    found = negative_binomial(numbers, counts).value
    torch.testing.assert_close(
        found, expected.log_prob(counts), rtol=1e-9, atol=0.0, equal_nan=True
    )


@pytest.mark.parametrize(
    "name",
    [
        *("Bernoulli, logits", "Categorical, 2 logits", "Categorical, 3 logits", "Poisson"),
        *("Normal, loc and scale", "NegativeBinomial, both"),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_derivatives_in_closed_form(name, alike):
    """As by automatic differentiation, at many numbers at once, of any weight.

    The first number may be that of all records.
    """
    make, value, rank = FAMILIES[name]
    family, numbers, (value, _) = check(lambda: observe(make(w()), value))
    assert family._closed is not None
    rest = [value.unsqueeze(1), torch.tensor([[1.0], [0.0], [0.5], [2.0]])]
    nodes = list((numbers + torch.randn(5, *numbers.shape)).unsqueeze(2).unbind(-1))
    if alike:
        nodes[0] = nodes[0][:, :1].expand(5, COUNT, 1)
    found = family.derivatives(nodes, rest)
    expected = by_autodiff(lambda a: family.log_prob(a, rest), nodes)
    assert len(found.hessian) == rank * (rank + 1) // 2
    for one, other in zip(*(tree_leaves(each) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one.expand(5, COUNT, 1), other)


def normal():
    return dist.Normal(w()[0], 0.5)


def in_event():
    with pyro.plate("data", 1):
        pyro.sample("y", normal().to_event(1), obs=FRACTIONS)


def expanded():
    with pyro.plate("visits", 3, dim=-2), pyro.plate("data", COUNT, dim=-1):
        pyro.sample("y", dist.Normal(w()[0], 0.5).expand([3, COUNT]), obs=torch.ones(3, COUNT))


def broadcast_by_a_plate():
    """One number for all elements of the site."""
    observe(dist.Normal(w().sum(), 0.5), FRACTIONS)


def masked_within_an_event():
    with pyro.plate("data", 1):
        pyro.sample("y", normal().mask(BITS > 0).to_event(1), obs=FRACTIONS)


def event_masked():
    with pyro.plate("data", 2):
        fn = dist.Normal(w(), 0.5).to_event(1).mask(torch.tensor([True, False]))
        pyro.sample("y", fn, obs=torch.ones(2, COUNT))


def handler_of_an_event():
    """Scale and mask of the batch, for each element of the event."""
    scale, mask = torch.tensor([0.5, 2.0]), torch.tensor([True, False])
    with poutine.scale(scale=scale), poutine.mask(mask=mask), pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(w(), 0.5).to_event(1), obs=torch.ones(2, COUNT))


def scaled_by_element():
    with pyro.plate("data", COUNT), poutine.scale(scale=POSITIVE):
        pyro.sample("y", normal(), obs=FRACTIONS)


def subsampled():
    with pyro.plate("data", 5 * COUNT, subsample=torch.arange(COUNT)):
        pyro.sample("y", normal(), obs=FRACTIONS)


def masked_twice_and_scaled():
    with pyro.plate("data", COUNT), poutine.mask(mask=BITS > 0), poutine.scale(scale=2.0):
        pyro.sample("y", normal().mask(COUNTS > 1), obs=FRACTIONS)


def masked_by_a_bool():
    observe(normal().mask(True), FRACTIONS)


@pytest.mark.parametrize(
    "model",
    [
        in_event,
        expanded,
        broadcast_by_a_plate,
        masked_within_an_event,
        event_masked,
        handler_of_an_event,
        scaled_by_element,
        subsampled,
        masked_twice_and_scaled,
        masked_by_a_bool,
    ],
    ids=lambda model: model.__name__,
)
def test_wrappers_and_handlers(model):
    check(model)


def test_a_masked_element_does_not_matter():
    """A masked value may even lie outside the support."""
    value = torch.where(BITS > 0, FRACTIONS, torch.nan)

    def model():
        with pyro.plate("data", COUNT), poutine.mask(mask=BITS > 0):
            pyro.sample("y", dist.Normal(w()[0], 0.5), obs=value)

    with pyro.validation_enabled(False):
        trace, _ = traced(model, torch.ones(2, COUNT))
    numbers, rest = Family(trace.nodes["y"]).read(trace.nodes["y"])
    assert torch.equal(Family(trace.nodes["y"]).log_prob(numbers, rest) == 0, BITS == 0)


@pytest.mark.parametrize(
    ("make", "value", "reason"),
    [
        (lambda w: dist.Categorical(logits=w.T.repeat(1, 3)[:, :5]), THREE, "many numbers"),
        (
            lambda w: dist.MultivariateNormal(w.T, torch.eye(2)),
            torch.ones(COUNT, 2),
            "no scalar coordinate",
        ),
        (lambda w: dist.Dirichlet(w.T.exp()), torch.full((COUNT, 2), 0.5), "no scalar coordinate"),
        (lambda w: dist.Multinomial(3, logits=w.T), torch.ones(COUNT, 2), "no scalar coordinate"),
        (lambda w: dist.OneHotCategorical(logits=w.T), torch.eye(2).repeat(2, 1), "."),
        (lambda w: dist.StudentT(w.sum(0).exp(), w[0], w[1].exp()), FRACTIONS, "many numbers"),
        (
            lambda w: dist.MixtureSameFamily(
                dist.Categorical(logits=w.T), dist.Normal(w.T, torch.ones(2))
            ),
            FRACTIONS,
            "not made of tensors",
        ),
        (lambda w: dist.Unit(w[0]), torch.zeros(COUNT, 0), "."),
        (lambda w: type("Normal", (dist.Normal,), {})(w[0], 1.0), FRACTIONS, "the user's own"),
    ],
    ids=[
        "Categorical of 5",
        "MultivariateNormal",
        "Dirichlet",
        "Multinomial",
        "OneHotCategorical",
        "StudentT of 3",
        "mixture",
        "factor",
        "a class of the user's own",
    ],
)
def test_not_a_function_of_few_numbers(make, value, reason):
    with pytest.raises(NotLinear, match=reason):
        read(lambda: observe(make(w()), value))
