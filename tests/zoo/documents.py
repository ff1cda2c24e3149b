"""Documents: topics of words, and counts as sums of hidden layers."""

from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions import Gamma, Poisson, constraints
from pyro.infer import TraceEnum_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.nn.functional import softplus

from .entry import Entry

WORDS, TOPICS, LENGTH = 20, 3, 12
PIXELS = 16


# Latent Dirichlet allocation: an array of word ids, (documents, length).


class LDA:
    def __init__(self):
        self.predictor = nn.Sequential(
            nn.Linear(WORDS, 16), nn.Sigmoid(), nn.Linear(16, TOPICS), nn.Softmax(dim=-1)
        )

    def model(self, data, args, batch_size=None):
        with pyro.plate("topics", args.num_topics):
            topic_weights = pyro.sample("topic_weights", dist.Gamma(1.0 / args.num_topics, 1.0))
            topic_words = pyro.sample(
                "topic_words", dist.Dirichlet(torch.ones(args.num_words) / args.num_words)
            )
        with pyro.plate("documents", args.num_docs, batch_size) as ind:
            data = data[ind].T
            doc_topics = pyro.sample("doc_topics", dist.Dirichlet(topic_weights))
            with pyro.plate("words", args.num_words_per_doc):
                word_topics = pyro.sample(
                    "word_topics", dist.Categorical(doc_topics), infer={"enumerate": "parallel"}
                )
                pyro.sample("doc_words", dist.Categorical(topic_words[word_topics]), obs=data)

    def guide(self, data, args, batch_size=None):
        topic_weights_posterior = pyro.param(
            "topic_weights_posterior",
            lambda: torch.ones(args.num_topics),
            constraint=constraints.positive,
        )
        topic_words_posterior = pyro.param(
            "topic_words_posterior",
            lambda: torch.ones(args.num_topics, args.num_words) + torch.rand(WORDS),
            constraint=constraints.greater_than(0.5),
        )
        with pyro.plate("topics", args.num_topics):
            pyro.sample("topic_weights", dist.Gamma(topic_weights_posterior, 1.0))
            pyro.sample("topic_words", dist.Dirichlet(topic_words_posterior))
        pyro.module("predictor", self.predictor)
        with pyro.plate("documents", args.num_docs, batch_size) as ind:
            data = data[ind].T
            ones = torch.ones(data.shape)
            counts = torch.zeros(args.num_words, ind.size(0)).scatter_add(0, data, ones)
            doc_topics = self.predictor(counts.transpose(0, 1))
            pyro.sample("doc_topics", dist.Delta(doc_topics, event_dim=1))


def lda():
    made = LDA()
    return made.model, made.guide


def words(size):
    """(N, length) word ids: of the documents' topics, each with words of its own."""
    topics = dist.Dirichlet(0.3 * torch.ones(TOPICS)).sample((size,))
    probs = torch.full((TOPICS, WORDS), 0.2).scatter(
        1, torch.arange(TOPICS * 5).reshape(TOPICS, 5), 3.0
    )
    return (
        dist.Categorical(topics @ (probs / probs.sum(1, keepdim=True)))
        .sample((LENGTH,))
        .T.contiguous()
    )


def lda_data(size):
    args = SimpleNamespace(
        num_docs=size, num_words=WORDS, num_topics=TOPICS, num_words_per_doc=LENGTH
    )
    return words(size), args


# ProdLDA: products of experts.


class Encoder(nn.Module):
    def __init__(self, vocab_size, num_topics, hidden, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(vocab_size, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fcmu = nn.Linear(hidden, num_topics)
        self.fclv = nn.Linear(hidden, num_topics)

    def forward(self, inputs):
        h = F.softplus(self.fc1(inputs))
        h = F.softplus(self.fc2(h))
        h = self.drop(h)
        return self.fcmu(h), (0.5 * self.fclv(h)).exp()


class Decoder(nn.Module):
    def __init__(self, vocab_size, num_topics, dropout):
        super().__init__()
        self.beta = nn.Linear(num_topics, vocab_size, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs):
        return F.softmax(self.beta(self.drop(inputs)), dim=1)


class ProdLDA(nn.Module):
    def __init__(self, vocab_size, num_topics, hidden, dropout):
        super().__init__()
        self.num_topics = num_topics
        self.encoder = Encoder(vocab_size, num_topics, hidden, dropout)
        self.decoder = Decoder(vocab_size, num_topics, dropout)

    def model(self, docs):
        pyro.module("decoder", self.decoder)
        with pyro.plate("documents", docs.shape[0]):
            logtheta_loc = docs.new_zeros((docs.shape[0], self.num_topics))
            logtheta_scale = docs.new_ones((docs.shape[0], self.num_topics))
            logtheta = pyro.sample(
                "logtheta", dist.Normal(logtheta_loc, logtheta_scale).to_event(1)
            )
            theta = F.softmax(logtheta, -1)
            count_param = self.decoder(theta)
            pyro.sample("obs", dist.Multinomial(LENGTH, count_param), obs=docs)

    def guide(self, docs):
        pyro.module("encoder", self.encoder)
        with pyro.plate("documents", docs.shape[0]):
            logtheta_loc, logtheta_scale = self.encoder(docs)
            pyro.sample("logtheta", dist.Normal(logtheta_loc, logtheta_scale).to_event(1))


def prodlda():
    made = ProdLDA(WORDS, TOPICS, hidden=12, dropout=0.2)
    return made.model, made.guide


def histograms(size):
    return (F.one_hot(words(size), WORDS).sum(1).to(torch.get_default_dtype()),)


# Deep exponential family.


def rand_tensor(shape, mean, sigma):
    return mean * torch.ones(shape) + sigma * torch.randn(shape)


class SparseGammaDEF:
    def __init__(self):
        self.top_width = 5
        self.mid_width = 4
        self.bottom_width = 3
        self.image_size = PIXELS
        self.alpha_z = torch.tensor(0.1)
        self.beta_z = torch.tensor(0.1)
        self.alpha_w = torch.tensor(0.1)
        self.beta_w = torch.tensor(0.3)
        self.alpha_init = 0.5
        self.mean_init = 0.0
        self.sigma_init = 0.1

    def model(self, x):
        x_size = x.size(0)
        with pyro.plate("w_top_plate", self.top_width * self.mid_width):
            w_top = pyro.sample("w_top", Gamma(self.alpha_w, self.beta_w))
        with pyro.plate("w_mid_plate", self.mid_width * self.bottom_width):
            w_mid = pyro.sample("w_mid", Gamma(self.alpha_w, self.beta_w))
        with pyro.plate("w_bottom_plate", self.bottom_width * self.image_size):
            w_bottom = pyro.sample("w_bottom", Gamma(self.alpha_w, self.beta_w))
        with pyro.plate("data", x_size):
            z_top = pyro.sample(
                "z_top", Gamma(self.alpha_z, self.beta_z).expand([self.top_width]).to_event(1)
            )
            w_top = w_top.reshape(self.top_width, self.mid_width)
            mean_mid = torch.matmul(z_top, w_top)
            z_mid = pyro.sample("z_mid", Gamma(self.alpha_z, self.beta_z / mean_mid).to_event(1))
            w_mid = w_mid.reshape(self.mid_width, self.bottom_width)
            mean_bottom = torch.matmul(z_mid, w_mid)
            z_bottom = pyro.sample(
                "z_bottom", Gamma(self.alpha_z, self.beta_z / mean_bottom).to_event(1)
            )
            w_bottom = w_bottom.reshape(self.bottom_width, self.image_size)
            mean_obs = torch.matmul(z_bottom, w_bottom)
            pyro.sample("obs", Poisson(mean_obs).to_event(1), obs=x)

    def guide(self, x):
        x_size = x.size(0)

        def sample_zs(name, width):
            alpha_z_q = pyro.param(
                f"alpha_z_q_{name}",
                lambda: rand_tensor((x_size, width), self.alpha_init, self.sigma_init),
            )
            mean_z_q = pyro.param(
                f"mean_z_q_{name}",
                lambda: rand_tensor((x_size, width), self.mean_init, self.sigma_init),
            )
            alpha_z_q, mean_z_q = softplus(alpha_z_q), softplus(mean_z_q)
            pyro.sample(f"z_{name}", Gamma(alpha_z_q, alpha_z_q / mean_z_q).to_event(1))

        def sample_ws(name, width):
            alpha_w_q = pyro.param(
                f"alpha_w_q_{name}",
                lambda: rand_tensor((width), self.alpha_init, self.sigma_init),
            )
            mean_w_q = pyro.param(
                f"mean_w_q_{name}",
                lambda: rand_tensor((width), self.mean_init, self.sigma_init),
            )
            alpha_w_q, mean_w_q = softplus(alpha_w_q), softplus(mean_w_q)
            pyro.sample(f"w_{name}", Gamma(alpha_w_q, alpha_w_q / mean_w_q))

        with pyro.plate("w_top_plate", self.top_width * self.mid_width):
            sample_ws("top", self.top_width * self.mid_width)
        with pyro.plate("w_mid_plate", self.mid_width * self.bottom_width):
            sample_ws("mid", self.mid_width * self.bottom_width)
        with pyro.plate("w_bottom_plate", self.bottom_width * self.image_size):
            sample_ws("bottom", self.bottom_width * self.image_size)
        with pyro.plate("data", x_size):
            sample_zs("top", self.top_width)
            sample_zs("mid", self.mid_width)
            sample_zs("bottom", self.bottom_width)


def sparse_gamma():
    made = SparseGammaDEF()
    return made.model, made.guide


def faces(size):
    parts = 8 * torch.bernoulli(torch.full((3, PIXELS), 0.3))
    return (torch.poisson(0.2 + torch.bernoulli(torch.full((size, 3), 0.4)) @ parts),)


ENTRIES = (
    Entry(
        "LDA",
        "Pyro example lda, with its amortised guide",
        lda,
        lda_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=2),
        edit="documents are the rows, data[ind].T",
    ),
    Entry(
        "ProdLDA",
        "Pyro tutorial prodlda, without batch normalisation",
        prodlda,
        histograms,
        TraceMeanField_ELBO,
        edit="a public total_count instead of int(docs.sum(-1).max())",
    ),
    Entry(
        "sparse gamma DEF",
        "Pyro example sparse_gamma_def, with its custom guide",
        sparse_gamma,
        faces,
        TraceMeanField_ELBO,
    ),
)
