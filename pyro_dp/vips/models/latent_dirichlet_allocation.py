"""Topics of documents: latent Dirichlet allocation (Blei, Ng & Jordan 2003).

Algorithm 3 of Park et al. 2020 (VIPS, arXiv 1611.00340), with an additional release of word
counts and another M-step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import Dirichlet, Distribution
from torch import Tensor

from pyro_dp.utils.errors import CURATOR, ConfigurationError, ModelError, warn_not_private
from pyro_dp.utils.validation import require_count, require_number, require_scale
from pyro_dp.vips.conjugate_model import (
    ConjugateModel,
    Draws,
    Sds,
    Statistic,
    Sums,
    require_data,
    reviewed,
)

_TINY = 1e-290  # replaces a probability that is zero in floating point
_FAR = 50.0  # standard deviations below zero


@dataclass(frozen=True)
class Documents:
    """The words of B documents in sparse form.

    The T pairs of document and word are sorted by document. So the order of a document's sums, and
    their rounding, do not depend on other documents.
    """

    document: Tensor  # each pair's index, (T,)
    word: Tensor  # (T,)
    count: Tensor  # > 0, (T,) in float64
    shape: tuple[int, int]  # (B, V)

    @staticmethod
    def of(counts: Tensor) -> "Documents":
        """Convert dense counts (B, V), >= 0."""
        document, word = counts.nonzero(as_tuple=True)
        shape = counts.shape[0], counts.shape[1]
        return Documents(document, word, counts[document, word].double(), shape)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens, (B,)."""
        return self.per_document(self.count.unsqueeze(1)).squeeze(1)

    def of_length(self, length: float) -> "Documents":
        """The same frequencies in documents of another length. Empty ones stay empty."""
        count = self.count * (length / self.lengths)[self.document]
        return replace(self, count=count)

    def per_document(self, values: Tensor) -> Tensor:
        """Sums over each document's words, (T, K) to (B, K)."""
        total = values.new_zeros(self.shape[0], values.shape[1])
        return total.index_add_(0, self.document, values)

    def per_word(self, values: Tensor) -> Tensor:
        """Sums over the documents that have the word, (T, K) to (V, K)."""
        total = values.new_zeros(self.shape[1], values.shape[1])
        return total.index_add_(0, self.word, values)


@dataclass(frozen=True)
class WordCounts:
    """Counts (K, V) of each document by topic and word, in sparse form.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`: a document takes only the
    memory of its words.
    """

    documents: Documents
    values: Tensor  # >= 0, (T, K)

    def norms(self) -> Tensor:
        squares = self.documents.per_document(self.values.square())
        return squares.sum(dim=1, keepdim=True).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weight = weights[self.documents.document]  # (T, 1)
        weighted = torch.where(weight > 0, self.values * weight, 0.0)
        return self.documents.per_word(weighted).T.flatten()

    def dense(self) -> Tensor:
        documents, words = self.documents.shape
        dense = self.values.new_zeros(documents, words, self.values.shape[1])
        dense[self.documents.document, self.documents.word] = self.values
        return dense.transpose(1, 2).flatten(1)


def local_posterior(
    log_topics: Tensor, documents: Documents, concentration: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """The E-step of latent Dirichlet allocation (Blei, Ng & Jordan 2003, section 5.2).

    Every document starts from equal topic weights, and takes a fixed number of iterations.

    :param log_topics: expectation of the log of the word probabilities, (V, K).
    :param concentration: alpha of the prior of the topic weights.
    :returns: parameters of the Dirichlet of each document's topic weights, (B, K); and expected
        tokens of each word by topic, (T, K).
    """
    # A factor common to all topics does not change the shares.
    shifted = log_topics - log_topics.amax(dim=1, keepdim=True)
    topics = shifted.exp()[documents.word]  # (T, K)
    equal = documents.lengths.unsqueeze(1) / topics.shape[1]
    weights = (concentration + equal).expand(-1, topics.shape[1])
    for _ in range(iterations):
        factors = _expected_factors(weights)
        per_token = (topics * factors[documents.document]).sum(dim=1).clamp(min=_TINY)
        share = topics * (documents.count / per_token).unsqueeze(1)
        weights = concentration + factors * documents.per_document(share)
    joint = topics * _expected_factors(weights)[documents.document]
    shares = joint / joint.sum(dim=1, keepdim=True).clamp(min=_TINY)
    return weights, documents.count.unsqueeze(1) * shares


def _expected_factors(weights: Tensor) -> Tensor:
    """exp E[log p] for p ~ Dirichlet(weights), up to a factor, (B, K)."""
    logs = torch.digamma(weights)
    return (logs - logs.amax(dim=1, keepdim=True)).exp()


def halves(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Split the tokens of every document at random. An odd token goes to the first half.

    :param documents: with whole counts.
    """
    counts = documents.count.long()
    pair = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)  # (tokens,)
    generator = torch.Generator(counts.device).manual_seed(seed)
    shuffled = pair[torch.randperm(len(pair), generator=generator, device=pair.device)]
    pair = shuffled[documents.document[shuffled].argsort(stable=True)]
    document = documents.document[pair]
    lengths = documents.lengths.long()
    index = torch.arange(len(pair), device=pair.device) - (lengths.cumsum(0) - lengths)[document]
    in_first = 2 * index < lengths[document]
    first = torch.zeros_like(counts).index_add_(0, pair, in_first.long())
    found = []
    for own in (first, counts - first):
        kept = own > 0
        half = documents.document[kept], documents.word[kept], own[kept].double()
        found.append(Documents(*half, documents.shape))
    return found[0], found[1]


def expected_counts(noisy: Tensor, sd: float, prior_mean: Tensor) -> Tensor:
    """E[x | noisy] for x ~ Exponential with this mean and noisy ~ N(x, sd^2).

    This is the mean of N(noisy - sd^2 / prior_mean, sd^2), truncated to positive numbers. It is
    near the released count if that exceeds the noise, and near the prior's mean if not.

    :param noisy: any shape.
    :param sd: standard deviation of the noise; 0 for none.
    :param prior_mean: > 0, of a shape that broadcasts.
    :returns: >= 0.
    """
    if sd == 0:
        return noisy.clamp(min=0.0)
    below = sd / prior_mean - noisy / sd  # the mean before truncation, in sds below zero
    hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(below / math.sqrt(2))
    inverse = 1 / below.clamp(min=_FAR)
    far = inverse * (1 - 2 * inverse.square())  # hazard - below, without cancellation
    return sd * torch.where(below > _FAR, far, (hazard - below).clamp(min=0.0))


_INITIAL_SHAPE = 100.0  # shape of the initial counts' Gamma, as in Hoffman et al. 2010
_COMPLETION_ITERATIONS = 100
_OTHERS = "some that need no protection"


@reviewed
class LatentDirichletAllocation(ConjugateModel):
    """Documents that mix topics, which are distributions over the words of a vocabulary::

        topics_k        ~ Dirichlet(eta, ..., eta)             k = 1..topics, over the words
        topic_weights_n ~ Dirichlet(alpha, ..., alpha)         n = 1..N, over the topics
        words_n         ~ Multinomial(topic_weights_n . topics)

    A document is a record. **Its word counts are rescaled to a fixed length**, so long and short
    documents weigh the same. (The paper instead draws that many words from the document. The
    rescaled counts are the mean of these draws, which only add variance.)

    A record's statistics are its expected counts by topic and word, and its counts by word, which
    are static. Both have norm at most ``length``, that of a document of one repeated word. They are
    clipped to ``clip * length``, because a document of m equally frequent words has norm length /
    sqrt(m).

    **M-step.** The paper sets negative counts to zero. With more cells than tokens that leaves the
    mean of the noise's positive part in every cell. Here a noisy count is replaced by its posterior
    expectation under an exponential prior. The prior's mean is length N / words for words, and 1 /
    topics for a word's share in a topic. So counts below the noise fall back to the word's overall
    frequency. (On two splits of the KOS benchmark at epsilon 4, perplexity is 2382. With zeros it
    is 2922.)

    Data: ``counts`` of shape (N, words), whole numbers >= 0. A document without words adds nothing.

    :param topics: K, the number of topics.
    :param words: V, size of the vocabulary, which is public.
    :param length: length of a document after rescaling, > 0. ``None``: documents keep their
        length, without a bound, for runs without noise.
    :param clip: norm of a document's statistics in units of ``length``, in (0, 1]. With m frequent
        words in a document, 1 / sqrt(m) clips little. Noise is proportional to ``clip``.
    :param alpha: concentration of the topic weights, > 0; ``None`` for 1 / topics.
    :param eta: concentration of the topics, > 0; ``None`` for 1 / topics.
    :param iterations: number of iterations of the E-step for each document.

    >>> counts = 4.0 * torch.eye(2).repeat_interleave(3, 1).repeat(2000, 1)  # in 4,000 documents
    >>> topics = LatentDirichletAllocation(topics=2, words=6, length=12.0)
    >>> vips = VIPS(topics, accountant=accountant, num_steps=10, noise=Noise(source=0))
    >>> result = vips.run(counts, progress=False)
    >>> vips.posterior()["topics"].mean.shape
    torch.Size([2, 6])
    """

    microbatch_size = 256  # a batch fits the processor's cache

    def __init__(
        self,
        topics: int,
        words: int,
        *,
        length: float | None = None,
        clip: float = 1.0,
        alpha: float | None = None,
        eta: float | None = None,
        iterations: int = 20,
    ):
        self.topics = require_count("topics", topics)
        self.words = require_count("words", words)
        self.iterations = require_count("iterations", iterations)
        self.clip = require_number("clip", clip, above=0.0, below=1.0, closed=True)
        if length is not None:
            require_scale("length", length)
        elif self.clip < 1.0:
            raise ConfigurationError("clip is in units of length: pass a length.")
        self.length = length
        self.alpha = require_scale("alpha", 1 / topics if alpha is None else alpha)
        self.eta = require_scale("eta", 1 / topics if eta is None else eta)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        bound = math.inf if self.length is None else self.clip * self.length
        return {
            "words": Statistic((self.words,), bound, static=True),
            "topics": Statistic((self.topics, self.words), bound),
        }

    def check(self, *data: Tensor) -> None:
        require_data(self, data, counts=self.words)
        (counts,) = data
        broken = counts.is_floating_point() and not (counts == counts.round()).all()
        if broken or not (counts >= 0).all():
            raise ModelError(f"counts must hold whole numbers >= 0. {CURATOR}")

    def initial_statistics(self, size: int) -> dict[str, Tensor]:
        """Nearly even counts, with the expected number of tokens. Small random differences let the
        topics separate."""
        cells = self.topics * self.words
        mean = 1.0 if self.length is None else size * self.length / cells
        shape = torch.full((self.topics, self.words), _INITIAL_SHAPE, dtype=torch.float64)
        return {
            "words": torch.full((self.words,), self.topics * mean, dtype=torch.float64),
            "topics": mean * torch.distributions.Gamma(shape, _INITIAL_SHAPE).sample(),
        }

    def static_statistics(self, counts: Tensor) -> dict[str, WordCounts]:
        documents = self._documents(counts)
        return {"words": WordCounts(documents, documents.count.unsqueeze(1))}

    def expected_statistics(
        self, posterior: Dirichlet, draws: Draws, counts: Tensor
    ) -> dict[str, WordCounts]:
        documents = self._documents(counts)
        log_topics = _log_topics(posterior)
        _, expected = local_posterior(log_topics, documents, self.alpha, self.iterations)
        return {"topics": WordCounts(documents, expected)}

    def posterior(self, statistics: Sums, noise: Sds, size: int) -> Dirichlet:
        counts = statistics["topics"].clamp(min=0.0)
        if noise["topics"] > 0 and self.length is not None:
            mean = torch.full_like(statistics["words"], size * self.length / self.words)
            words = expected_counts(statistics["words"], noise["words"], mean)
            share = words / self.topics
            counts = expected_counts(statistics["topics"], noise["topics"], share)
        return dist.Dirichlet(self.eta + counts)

    def marginals(self, posterior: Dirichlet) -> dict[str, Distribution]:
        return {"topics": posterior.to_event(1)}

    def model(self, counts: Tensor) -> Tensor:
        """The Pyro model, which returns probabilities of the words, (N, V). If ``words`` is not
        observed, documents have the fixed length.
        """
        ones = torch.ones(self.topics, self.words, dtype=torch.float64, device=counts.device)
        topics = pyro.sample("topics", dist.Dirichlet(self.eta * ones).to_event(1))
        with pyro.plate("data", len(counts)) as idx:
            prior = dist.Dirichlet(self.alpha * ones[:, 0])
            probabilities = pyro.sample("topic_weights", prior) @ topics
            # Validation would refuse documents of several lengths.
            documents = dist.Multinomial(
                round(self.length or 1), probabilities, validate_args=False
            )
            pyro.sample("words", documents, obs=counts[idx].to(probabilities.dtype))
        return probabilities

    def perplexity(
        self, posterior: Mapping[str, Distribution], documents: Tensor, *, seed: int = 0
    ) -> float:
        """Held-out perplexity by document completion: lower is better.

        A random half of a document's tokens determines its topic weights. The posterior means of
        these and of the topics predict the others. Documents keep their lengths.
        **The result is not private: use documents that need no protection.** A
        :class:`NotPrivateWarning` says so.

        :param posterior: ``vips.posterior(noise_aware=False)``.
        :param documents: counts of shape (M, words) of documents outside the fit.
        :param seed: seed for the halves.
        :raises ModelError: no document has two words, or the documents do not fit.
        """
        self.check(documents)
        bag = Documents.of(documents)
        if not (bag.lengths > 1).any():
            raise ModelError("perplexity() needs a document of two or more words.")
        warn_not_private("perplexity", "documents", _OTHERS)
        topics = posterior["topics"].base_dist
        first, scored = halves(bag, seed)
        weights, _ = local_posterior(_log_topics(topics), first, self.alpha, _COMPLETION_ITERATIONS)
        weights = weights / weights.sum(dim=1, keepdim=True)
        probability = (weights[scored.document] * topics.mean.T[scored.word]).sum(dim=1)
        return math.exp(-(scored.count @ probability.log()).item() / scored.count.sum().item())

    def topic_weights(
        self, posterior: Mapping[str, Distribution], documents: Tensor
    ) -> dist.Dirichlet:
        """The variational posterior of each document's topic weights: batch shape (M,), event shape
        (topics,).

        **The result is not private**: it reveals the documents' contents. It is for the curator, or
        for documents that need no protection. A :class:`NotPrivateWarning` says so. Arguments are
        those of :meth:`perplexity`.

        :raises ModelError: the documents do not fit.
        """
        self.check(documents)
        warn_not_private("topic_weights", "documents", _OTHERS)
        log_topics = _log_topics(posterior["topics"].base_dist)
        bag = Documents.of(documents)
        return dist.Dirichlet(
            local_posterior(log_topics, bag, self.alpha, _COMPLETION_ITERATIONS)[0]
        )

    def _documents(self, counts: Tensor) -> Documents:
        documents = Documents.of(counts)
        return documents if self.length is None else documents.of_length(self.length)


def _log_topics(posterior: Dirichlet) -> Tensor:
    """Expectation of the log of the word probabilities, (V, K)."""
    concentration = posterior.concentration
    total = concentration.sum(dim=1, keepdim=True)
    return (torch.digamma(concentration) - torch.digamma(total)).T.contiguous()
