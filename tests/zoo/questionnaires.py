"""Answers of many to the same questions."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.ops.indexing import Vindex

from .entry import Entry, plain

ITEMS = 6
ANNOTATORS = 4
CLASSES = 3
FACTORS = 2


# Ability of students, difficulty and discrimination of items.


def two_parameter_logistic(answers):
    """Birnbaum 1968: two-parameter logistic."""
    students = pyro.plate("students", answers.shape[0], dim=-2)
    items = pyro.plate("items", answers.shape[1], dim=-1)
    with items:
        discrimination = pyro.sample("discrimination", dist.LogNormal(0.0, 0.5))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with students:
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with items:
            logits = discrimination * (ability - difficulty)
            pyro.sample("answers", dist.Bernoulli(logits=logits), obs=answers)


def two_parameter_logistic_data(size):
    logits = torch.linspace(0.7, 1.5, ITEMS) * (
        torch.randn(size, 1) - torch.linspace(-1.5, 1.5, ITEMS)
    )
    return (torch.bernoulli(torch.sigmoid(logits)),)


# Labels by annotators with error rates of their own.


@config_enumerate
def dawid_skene(labels):
    num_items, num_annotators = labels.shape
    prevalence = pyro.sample("prevalence", dist.Dirichlet(torch.ones(CLASSES)))
    annotators = pyro.plate("annotators", num_annotators, dim=-1)
    with annotators:
        prior = torch.ones(CLASSES, CLASSES) + 4 * torch.eye(CLASSES)
        confusion = pyro.sample("confusion", dist.Dirichlet(prior).to_event(1))
    with pyro.plate("items", num_items, dim=-2):
        truth = pyro.sample("truth", dist.Categorical(prevalence))
        with annotators as who:
            pyro.sample("label", dist.Categorical(Vindex(confusion)[who, truth]), obs=labels)


def dawid_skene_data(size):
    truth = torch.randint(CLASSES, (size, 1))
    right = torch.rand(size, ANNOTATORS) < torch.linspace(0.6, 0.9, ANNOTATORS)
    return (torch.where(right, truth, torch.randint(CLASSES, (size, ANNOTATORS))),)


# Few factors behind many answers, integrated out.


def factor_analysis(x):
    """Bishop, Pattern Recognition and Machine Learning, 12.2.4."""
    dim = x.shape[1]
    mean = pyro.sample("mean", dist.Normal(torch.zeros(dim), 2.0).to_event(1))
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(dim, FACTORS), 1.0).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(dim), 1.0).to_event(1))
    with pyro.plate("respondents", len(x)):
        pyro.sample("x", dist.LowRankMultivariateNormal(mean, loadings, noise), obs=x)


def factor_analysis_data(size):
    loadings = torch.randn(ITEMS, FACTORS)
    return (torch.randn(size, FACTORS) @ loadings.T + 0.7 * torch.randn(size, ITEMS),)


ENTRIES = (
    plain("item response", two_parameter_logistic, AutoNormal, two_parameter_logistic_data),
    Entry(
        "Dawid-Skene",
        "Dawid & Skene 1979; NumPyro example annotation",
        lambda: (dawid_skene, AutoNormal(poutine.block(dawid_skene, hide=["truth"]))),
        dawid_skene_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=2),
        dpsep=True,
    ),
    plain("factor analysis", factor_analysis, AutoNormal, factor_analysis_data),
)
