"""Documents as bags of words, and what topic models count in them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-290  # replaces a probability that is zero in floating point


@dataclass(frozen=True)
class Documents:
    """The words that occur in B documents; no room is taken by those that do not.

    The T pairs of document and word are sorted by document. So sums over a document run over its
    own words in their order, and do not depend on other documents.

    :param document: index of each pair's document, (T,).
    :param word: (T,).
    :param count: > 0, (T,) in float64.
    :param shape: (B, V).
    """

    document: Tensor
    word: Tensor
    count: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of(counts: Tensor) -> "Documents":
        """
        :param counts: (B, V), >= 0.
        """
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
        return Documents(self.document, self.word, count, self.shape)

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
    """For each document the counts (K, V) of its words, the same word perhaps in several topics.

    One of :class:`~pyro_dp.mechanism.contributions.Contributions`: a document is as large as its
    words.

    :param documents: B documents with T words in all.
    :param values: >= 0, (T, K).
    """

    documents: Documents
    values: Tensor

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


@dataclass(frozen=True)
class LocalPosterior:
    """The variational posterior of documents for these topics.

    :param weights: parameters of the Dirichlet of each document's topic weights, (B, K).
    :param counts: expected tokens of each word by topic, (T, K).
    """

    weights: Tensor
    counts: Tensor


def local_posterior(
    log_topics: Tensor, documents: Documents, concentration: float, iterations: int
) -> LocalPosterior:
    """The E-step of latent Dirichlet allocation (Blei, Ng & Jordan 2003, section 5.2).

    Every document starts from equal topic weights, and takes a fixed number of iterations.

    :param log_topics: expectation of the log of the word probabilities, (V, K).
    :param concentration: alpha of the prior of the topic weights.
    """
    # A factor that the topics share says nothing about which of them a token is from.
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
    return LocalPosterior(weights, documents.count.unsqueeze(1) * shares)


def _expected_factors(weights: Tensor) -> Tensor:
    """exp E[log p] for p ~ Dirichlet(weights), up to a factor, (B, K)."""
    logs = torch.digamma(weights)
    return (logs - logs.amax(dim=1, keepdim=True)).exp()


def halves(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Every document's tokens in two halves, drawn at random; an odd one is in the first.

    :param documents: with whole counts.
    """
    counts = documents.count.long()
    pair = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)  # (tokens,)
    generator = torch.Generator(counts.device).manual_seed(seed)
    shuffled = pair[torch.randperm(len(pair), generator=generator, device=pair.device)]
    pair = shuffled[documents.document[shuffled].argsort(stable=True)]
    document = documents.document[pair]
    lengths = documents.lengths.long()
    place = torch.arange(len(pair), device=pair.device) - (lengths.cumsum(0) - lengths)[document]
    in_first = 2 * place < lengths[document]
    first = torch.zeros_like(counts).index_add_(0, pair, in_first.long())
    return _with_counts(documents, first), _with_counts(documents, counts - first)


def _with_counts(documents: Documents, counts: Tensor) -> Documents:
    kept = counts > 0
    return Documents(
        documents.document[kept], documents.word[kept], counts[kept].double(), documents.shape
    )


def completion_perplexity(
    topics: Tensor,
    log_topics: Tensor,
    documents: Documents,
    concentration: float,
    *,
    iterations: int,
    seed: int,
) -> float:
    """exp(- mean log probability of a token of the second half, conditional on the first).

    :param topics: word probabilities, (V, K).
    :param log_topics: expectation of their log, (V, K).
    """
    given, scored = halves(documents, seed)
    local = local_posterior(log_topics, given, concentration, iterations)
    weights = local.weights / local.weights.sum(dim=1, keepdim=True)
    probability = (weights[scored.document] * topics[scored.word]).sum(dim=1)
    return math.exp(-(scored.count @ probability.log()).item() / scored.count.sum().item())
