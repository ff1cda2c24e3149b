"""Latent Dirichlet allocation: E-step, sensitivity, M-step, held-out perplexity, bad documents."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import integrate
from vips_problems import TOPICS, WORDS, corpus, fitted
from vips_problems import topic_model as model_of

from pyro_dp import VIPS, ModelError, Noise, PrivacyAccountant
from pyro_dp.vips import LatentDirichletAllocation
from pyro_dp.vips.models.latent_dirichlet_allocation import (
    Documents,
    WordCounts,
    expected_counts,
    halves,
    local_posterior,
)

# Made-up data.
pytestmark = pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")

NOT_STEP = (0.0, 0.0)


def log_topics(seed=0):
    torch.manual_seed(seed)
    return torch.randn(WORDS, TOPICS)


# E-step


def naive_local(log_topics, counts, alpha, iterations):
    """The same for one document, (V,), token by token."""
    weights = torch.full((log_topics.shape[1],), alpha) + counts.sum() / log_topics.shape[1]
    for turn in range(iterations + 1):
        logs = torch.digamma(weights) - torch.digamma(weights.sum())
        shares = torch.softmax(log_topics + logs, dim=1)  # (V, K)
        if turn < iterations:
            weights = alpha + (counts.unsqueeze(1) * shares).sum(0)
    return weights, counts.unsqueeze(1) * shares


def test_the_e_step_is_blei_s():
    counts = corpus(6)
    documents = Documents.of(counts)
    local, tokens = local_posterior(log_topics(), documents, 0.3, 7)
    dense = torch.zeros(6, WORDS, TOPICS)
    dense[documents.document, documents.word] = tokens
    for n, row in enumerate(counts):
        weights, expected = naive_local(log_topics(), row, 0.3, 7)
        torch.testing.assert_close(local[n], weights)
        torch.testing.assert_close(dense[n], expected)


def test_extreme_topics_leave_no_nan():
    """Words of probability zero in floating point, in some topics or in all."""
    counts = corpus(5)
    extreme = log_topics()
    extreme[0, 1:] = -1e4
    extreme[1] = -1e8
    extreme[2] = torch.tensor([-1e4, 0.0, -1e8])
    weights, tokens = local_posterior(extreme, Documents.of(counts), 1e-3, 20)
    assert torch.isfinite(weights).all() and torch.isfinite(tokens).all()
    assert (tokens.sum(1) <= Documents.of(counts).count * (1 + 1e-12)).all()


# Statistics and their bounds


def parts(model, counts, posterior=None):
    """Each document's part, unclipped: (N, V) and (N, K, V)."""
    posterior = dist.Dirichlet(log_topics().T.exp()) if posterior is None else posterior
    found = model.static_statistics(counts) | model.expected_statistics(posterior, None, counts)
    rows = {}
    for name, part in found.items():
        sums = [part.weighted_sum(unit.unsqueeze(1)) for unit in torch.eye(len(counts))]
        rows[name] = torch.stack(sums).reshape(len(counts), *model.statistics[name].shape)
    return rows


def test_word_counts_are_their_dense_form():
    counts = corpus(7)
    found = model_of().expected_statistics(dist.Dirichlet(log_topics().T.exp()), None, counts)[
        "topics"
    ]
    dense = parts(model_of(), counts)["topics"].flatten(1)
    torch.testing.assert_close(found.norms().squeeze(1), dense.norm(dim=1))
    weights = torch.rand(7, 1)
    torch.testing.assert_close(found.weighted_sum(weights), (weights * dense).sum(0))


def test_a_document_of_weight_zero_does_not_matter():
    documents = Documents.of(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    counts = WordCounts(documents, torch.tensor([[1.0], [2.0], [math.nan]]))
    total = counts.weighted_sum(torch.tensor([[0.5], [0.0]]))
    torch.testing.assert_close(total, torch.tensor([0.5, 1.0]))
    assert counts.norms().isfinite().squeeze(1).tolist() == [True, False]


def test_documents_have_the_fixed_length():
    counts = corpus(8)
    found = parts(model_of(), counts)
    torch.testing.assert_close(found["words"], 20.0 * counts / counts.sum(1, keepdim=True))
    torch.testing.assert_close(found["topics"].sum(1), found["words"])
    longer = parts(model_of(), 7 * counts)
    torch.testing.assert_close(longer["topics"], found["topics"])


def test_one_repeated_word_has_the_largest_norm():
    """It reaches the bound of clip=1 exactly; m equally frequent words are sqrt(m) below it."""
    model = model_of(clip=1.0, alpha=1e-3)
    bounds = {name: each.bound for name, each in model.statistics.items()}
    assert bounds == {"words": 20.0, "topics": 20.0}
    counts = torch.zeros(4, WORDS)
    counts[0, 3], counts[1, 3], counts[2, :9] = 1.0, 1e12, 4.0
    posterior = dist.Dirichlet(torch.eye(TOPICS).repeat(1, 4) * 1e4 + 1e-3)
    found = parts(model, counts, posterior)
    for name in bounds:
        norms = found[name].flatten(1).norm(dim=1)
        torch.testing.assert_close(norms[:2], torch.full((2,), 20.0))
        torch.testing.assert_close(norms[2:], torch.tensor([20.0 / 3, 0.0]), rtol=1e-4, atol=0.0)


def test_no_document_exceeds_the_worst_one():
    model = model_of(clip=1.0)
    torch.manual_seed(1)
    for scale in (0.1, 1.0, 30.0):
        counts = torch.poisson(scale * torch.rand(200, WORDS) ** 4)
        posterior = dist.Dirichlet(torch.rand(TOPICS, WORDS) ** 6 + 1e-3)
        for name, part in parts(model, counts, posterior).items():
            largest = part.flatten(1).norm(dim=1).max()
            assert largest <= model.statistics[name].bound * (1 + 1e-9)


def test_documents_without_words():
    """They add nothing, and a run on nothing else is one on noise."""
    counts = corpus(6)
    counts[2] = 0.0
    found = parts(model_of(), counts)
    assert all((part[2] == 0).all() for part in found.values())
    others = parts(model_of(), counts[torch.arange(6) != 2])
    for name, part in found.items():
        torch.testing.assert_close(part.sum(0), others[name].sum(0))
    vips = VIPS(model_of(), accountant=PrivacyAccountant(1.0), num_steps=3, noise=Noise(source=0))
    vips.run(torch.zeros(4, WORDS), progress=False)
    assert torch.isfinite(vips.posterior()["topics"].mean).all()
    assert (vips.posterior()["topics"].base_dist.concentration > 0).all()


# M-step


def test_the_m_step_without_noise_is_conjugate():
    counts = corpus(40)
    model = model_of(length=None, clip=1.0)
    torch.manual_seed(0)
    statistics = model.initial_statistics(40)
    noise = {"words": 0.0, "topics": 0.0}
    topics = model.posterior(statistics, noise, 40)
    torch.testing.assert_close(topics.concentration, 0.1 + statistics["topics"])
    expected = torch.zeros(TOPICS, WORDS)
    logs = torch.digamma(topics.concentration)
    logs = logs - torch.digamma(topics.concentration.sum(1, keepdim=True))
    for row in counts:
        expected += naive_local(logs.T, row, 0.3, 20)[1].T
    torch.manual_seed(0)
    found = fitted(model, (counts,), 1).posterior()["topics"]
    torch.testing.assert_close(found.base_dist.concentration, 0.1 + expected)
    assert found.base_dist.concentration.dtype == torch.float64


def quadrature(noisy, sd, mean):
    """The posterior mean of x ~ Exponential(mean) at noisy ~ N(x, sd^2); weights are scaled."""
    centre = max(noisy - sd**2 / mean, 0.0)

    def weight(x):
        return math.exp(
            -(((x - noisy) ** 2 - (centre - noisy) ** 2) / (2 * sd**2)) - (x - centre) / mean
        )

    upper = centre + 12 * sd
    ends = dict(points=[centre + sd * i / 4 for i in range(1, 20)], limit=200)
    total = integrate.quad(weight, 0.0, upper, **ends)[0]
    return integrate.quad(lambda x: x * weight(x), 0.0, upper, **ends)[0] / total


def test_noisy_counts_become_their_expectation():
    for sd in (0.5, 3.0):
        for mean in (0.4, 2.0, 50.0):
            for noisy in (-4.0, 0.0, 1.0, 30.0):
                found = expected_counts(torch.tensor([noisy]), sd, torch.tensor([mean])).item()
                assert found == pytest.approx(quadrature(noisy, sd, mean), rel=1e-6)


def test_noisy_counts_at_the_ends():
    """Without noise they are what was released; where noise is all, the prior's mean."""
    noisy = torch.tensor([-3.0, 0.0, 5.0, 1e6])
    torch.testing.assert_close(expected_counts(noisy, 0.0, noisy), noisy.clamp(min=0.0))
    torch.testing.assert_close(expected_counts(noisy, 1e-9, torch.ones(4))[2:], noisy[2:])
    drowned = expected_counts(noisy, 1e9, torch.full((4,), 2.0))
    torch.testing.assert_close(drowned, torch.full((4,), 2.0), rtol=1e-3, atol=0.0)
    for sd in (1e-6, 1.0, 1e6):
        values = torch.cat([-torch.logspace(-6, 12, 60), torch.logspace(-6, 12, 60)])
        for mean in (1e-12, 1.0, 1e12):
            found = expected_counts(values, sd, torch.tensor(mean))
            assert torch.isfinite(found).all() and (found >= 0).all()
            assert (found.diff()[60:] >= -1e-9 * found[61:]).all()


def test_the_m_step_shrinks_towards_the_words_frequencies():
    """Large counts stay; where noise is large, topics become the frequencies of the words."""
    model = model_of()
    statistics = {"words": torch.linspace(0.0, 2000.0, WORDS), "topics": torch.zeros(TOPICS, WORDS)}
    statistics["topics"][1] = statistics["words"]
    clear = model.posterior(statistics, {"words": 1.0, "topics": 1.0}, 500)
    error = clear.concentration - 0.1 - statistics["topics"]
    assert error.abs().max() < 3.0
    drowned = model.posterior(statistics, {"words": 1.0, "topics": 1e6}, 500)
    words = statistics["words"][1:] / TOPICS
    for topic in drowned.concentration:
        torch.testing.assert_close(topic[1:] - 0.1, words, rtol=0.02, atol=0.0)


# Held-out perplexity


def test_halves():
    counts = corpus(50)
    documents = Documents.of(counts)
    first, second = halves(documents, seed=3)
    dense = [
        torch.zeros(50, WORDS).index_put((d.document, d.word), d.count) for d in (first, second)
    ]
    assert torch.equal(dense[0] + dense[1], counts)
    assert torch.equal(dense[0].sum(1), (counts.sum(1) / 2).ceil())
    again, _ = halves(documents, seed=3)
    assert torch.equal(again.count, first.count)
    other, _ = halves(documents, seed=4)
    assert len(other.count) != len(first.count) or not torch.equal(other.count, first.count)


def test_halves_are_random():
    """Each token is in the first half with probability 1/2: 6 choices of 2 of 4 words."""
    counts = torch.tensor([[1.0, 1.0, 1.0, 1.0]]).expand(6000, 4)
    first, _ = halves(Documents.of(counts), seed=0)
    pairs = torch.zeros(6000, 4).index_put((first.document, first.word), first.count)
    _, sizes = torch.unique(pairs, dim=0, return_counts=True)
    assert len(sizes) == 6 and ((sizes - 1000).abs() < 6 * math.sqrt(1000 * 5 / 6)).all()


def test_perplexity_of_topics_that_say_nothing_is_the_number_of_words():
    counts = corpus(30)
    even = {"topics": dist.Dirichlet(torch.full((TOPICS, WORDS), 3.0)).to_event(1)}
    assert model_of().perplexity(even, counts) == pytest.approx(WORDS)


def test_perplexity_of_topics_that_say_everything():
    """Topics without common words: half of a document tells its topic."""
    counts = torch.zeros(30, WORDS)
    for n in range(30):
        counts[n, n % TOPICS :: TOPICS] = 25.0
    known = torch.zeros(TOPICS, WORDS)
    for k in range(TOPICS):
        known[k, k::TOPICS] = 1e6
    posterior = {"topics": dist.Dirichlet(known + 1e-3).to_event(1)}
    found = model_of(alpha=1e-3).perplexity(posterior, counts)
    assert found == pytest.approx(WORDS / TOPICS, rel=1e-3)


def test_topic_weights_say_what_documents_are_about():
    """Two topics without a common word: a document's weights are its counts of their words."""
    topics = torch.full((2, WORDS), 1e-8)
    topics[0, :2] = topics[1, 2:] = 1e6
    posterior = {"topics": dist.Dirichlet(topics).to_event(1)}
    counts = torch.zeros(3, WORDS)
    counts[0, 0], counts[1, 2], counts[1, 1] = 30, 20, 10
    model = LatentDirichletAllocation(2, WORDS, alpha=0.5)
    found = model.topic_weights(posterior, counts)
    expected = torch.tensor([[30.5, 0.5], [10.5, 20.5], [0.5, 0.5]])
    torch.testing.assert_close(found.concentration, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ModelError, match="counts"):
        model.topic_weights(posterior, -counts)


def test_perplexity_refuses_documents_of_one_word():
    posterior = {"topics": dist.Dirichlet(torch.ones(TOPICS, WORDS)).to_event(1)}
    with pytest.raises(ModelError, match="two or more words"):
        model_of().perplexity(posterior, torch.eye(WORDS))
    with pytest.raises(ModelError, match="whole numbers"):
        model_of().perplexity(posterior, -torch.eye(WORDS))


def frequencies(train, test):
    """Perplexity of the words' frequencies."""
    words = train.sum(0) + 0.01
    _, second = halves(Documents.of(test), seed=0)
    logs = (words / words.sum()).log()[second.word]
    return math.exp(-(second.count @ logs) / second.count.sum())


@pytest.mark.slow
def test_private_topics_beat_the_words_frequencies():
    counts = corpus(4000, topics=4, words=60, length=60, seed=2)
    train, test = counts[:3600], counts[3600:]
    model = LatentDirichletAllocation(4, 60, length=60, clip=0.4, alpha=0.2, eta=0.1)
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant(2.0)
    vips = fitted(model, (train,), 15, accountant=accountant, noise=Noise(source=0))
    assert accountant.get_epsilon() <= 2.0
    assert model.perplexity(vips.posterior(), test) < 0.9 * frequencies(train, test)


# The Pyro model


def test_the_pyro_model():
    counts = corpus(10)
    model = model_of()
    topics = dist.Dirichlet(torch.full((WORDS,), 0.5)).sample((TOPICS,))
    weights = dist.Dirichlet(torch.ones(TOPICS)).sample((10,))
    values = {"topics": topics, "topic_weights": weights}
    expected = dist.Dirichlet(torch.full((WORDS,), 0.1)).log_prob(topics).sum()
    expected = expected + dist.Dirichlet(torch.full((TOPICS,), 0.3)).log_prob(weights).sum()
    orders = torch.lgamma(counts.sum(1) + 1) - torch.lgamma(counts + 1).sum(1)
    expected = expected + (orders + (counts * (weights @ topics).log()).sum(1)).sum()
    trace = poutine.trace(poutine.condition(model.model, values)).get_trace(counts)
    torch.testing.assert_close(trace.log_prob_sum(), expected)
