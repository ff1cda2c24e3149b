"""ProdLDA: topics of documents, by products of experts.

Pyro's tutorial [Topic Modeling](https://pyro.ai/examples/prodlda.html). A record is a document
(simulated: 12 words out of 20, 3 topics). `total_count` is a constant. There is
no batch normalisation, because it mixes records.
"""

import sys

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from comparison import compare
from pictures import tables
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import nn

from pyro_dp import DPSVI

WORDS, TOPICS, LENGTH = 20, 3, 12
TRUTH = torch.full((TOPICS, WORDS), 0.2)  # the first five words belong to the first topic...
TRUTH.scatter_(1, torch.arange(TOPICS * 5).reshape(TOPICS, 5), 3.0).div_(TRUTH.sum(1)[:, None])


class ProdLDA(nn.Module):
    def __init__(self, hidden=12, dropout=0.2):
        super().__init__()
        first, second = nn.Linear(WORDS, hidden), nn.Linear(hidden, hidden)
        drop, last = nn.Dropout(dropout), nn.Linear(hidden, 2 * TOPICS)
        self.encoder = nn.Sequential(first, nn.Softplus(), second, nn.Softplus(), drop, last)
        self.decoder = nn.Sequential(nn.Dropout(dropout), nn.Linear(TOPICS, WORDS, bias=False))

    def model(self, docs):
        pyro.module("decoder", self.decoder)
        with pyro.plate("documents", docs.shape[0]):
            logtheta_loc = docs.new_zeros((docs.shape[0], TOPICS))
            logtheta_scale = docs.new_ones((docs.shape[0], TOPICS))
            prior = dist.Normal(logtheta_loc, logtheta_scale).to_event(1)
            logtheta = pyro.sample("logtheta", prior)
            count_param = F.softmax(self.decoder(F.softmax(logtheta, -1)), -1)
            pyro.sample("obs", dist.Multinomial(LENGTH, count_param), obs=docs)

    def guide(self, docs):
        pyro.module("encoder", self.encoder)
        with pyro.plate("documents", docs.shape[0]):
            logtheta_loc, logtheta_logvar = self.encoder(docs).chunk(2, dim=-1)
            logtheta_scale = (0.5 * logtheta_logvar).exp()
            pyro.sample("logtheta", dist.Normal(logtheta_loc, logtheta_scale).to_event(1))


def start():
    prodlda = ProdLDA()
    return prodlda.model, prodlda.guide


def svi(model, guide, optim):
    return SVI(model, guide, optim, TraceMeanField_ELBO())


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(model, guide, optim, TraceMeanField_ELBO(), accountant=accountant, **run)


def data(size=5000):
    topics = dist.Dirichlet(0.3 * torch.ones(TOPICS)).sample((size,))
    return (dist.Multinomial(LENGTH, topics @ TRUTH).sample(),)


def look(model, guide, *data):
    return F.softmax(model.__self__.decoder[1].weight.T, -1)


def picture(figure, looks, docs):
    tables(figure, {"truth": TRUTH} | looks, "word", "topic")


if __name__ == "__main__":
    compare(sys.modules[__name__])
