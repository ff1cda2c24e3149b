"""Runs that end with a warning or a status that is not ok, and what to do then.

``benchmarks/errors.py`` makes docs/errors.md of them; test_first_attempts.py holds them to it.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    ClippingWarning,
    ConvergenceWarning,
    Noise,
    NotPrivateWarning,
    PrivacyAccountant,
    PrivacyWarning,
    nonprivate,
)
from pyro_dp.infer.posterior.posterior import Status
from pyro_dp.tabular import Binary, Category, Count, Number, PrivateGLM, Schema
from pyro_dp.tabular.regression import Regression
from pyro_dp.vips import GaussianMixture, LogisticRegression


def people(rows, unlike=0.0, at_the_bound=0):
    """A frame of made-up people; unlike: variance of a factor of each row's own."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.uniform(20, 80, rows), "ill": rng.random(rows) < 0.3})
    frame["region"] = rng.choice(["north", "south"], rows)
    rate = np.exp(1 + 0.01 * (frame.age - 50) + 0.5 * frame.ill)
    factor = rng.gamma(1 / unlike, unlike, rows) if unlike else 1.0
    frame["visits"] = np.minimum(rng.poisson(rate * factor), 80)
    frame.loc[: at_the_bound - 1, "visits"] = 80
    return frame


def regression(frame, epsilon, formula="visits ~ age + ill", **settings):
    """A Poisson regression of such a frame."""
    regions = Category(("north", "south", "islands"))
    columns = {"age": Number(20, 80), "ill": Binary(), "region": regions, "visits": Count(0, 80)}
    accountant = PrivacyAccountant(epsilon=epsilon)
    settings = {"family": "poisson", "accountant": accountant, "noise": Noise(source=0)} | settings
    glm = PrivateGLM(Schema(columns), formula, **settings)
    return glm.fit(frame, progress=False)


def records():
    """Three features and a binary label of 2,000 people."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 3, generator=generator) * 2 - 1
    return x, (torch.rand(2000, generator=generator) < torch.sigmoid(x.sum(dim=1))).float()


def logistic(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def fitted(make, guide=None, epsilon=1.0, source=0, data=None, **settings):
    """An inference of :func:`logistic`, or of a conjugate model, after its run."""
    settings |= {"accountant": PrivacyAccountant(epsilon), "noise": Noise(source=source)}
    inference = make(*(() if guide is None else (logistic, guide(logistic))), **settings)
    inference.run(*(records() if data is None else data), progress=False)
    return inference


@dataclass(frozen=True)
class Run:
    """One that ends with a warning, or with a status that is not ok.

    :param kinds: kinds of the warnings, in their order.
    :param level: the status has it; None: any, or there is none.
    :param do: the advice.
    """

    function: Callable
    kinds: tuple[type[Warning], ...]
    level: str | None
    do: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def outcome(self) -> tuple[list[Warning], Status | None, str]:
        """In a fresh session: the warnings; the status; what it prints."""
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                found = self.function()
        finally:
            torch.set_default_dtype(dtype)
            pyro.clear_param_store()
        kept = [each.message for each in given if issubclass(each.category, _KINDS)]
        if isinstance(found, Regression):
            table = found.summary()[["mean", "lower", "upper"]]
            return kept, found.status, table.to_string(float_format="{:.2g}".format)
        return kept, found, ""


LITTLE = (
    "Do not publish it. Take more people, a larger epsilon, or fewer coefficients or groups. "
    "`accountant.forecast` says how much each would help."
)
_KINDS = (ClippingWarning, ConvergenceWarning, NotPrivateWarning, PrivacyWarning)
RUNS: list[Run] = []


def run(*kinds: type[Warning], do: str, level: str | None = None) -> Callable:
    def register(function: Callable) -> Callable:
        RUNS.append(Run(function, kinds, level, do))
        return function

    return register


@run(ConvergenceWarning, level="do not publish", do=LITTLE)
def too_little_budget():
    """Few people, a small epsilon, five coefficients."""
    return regression(people(300), epsilon=0.05, formula="visits ~ age + ill + region")


@run(
    ConvergenceWarning,
    level="check",
    do="If a few people may be far above all others, lower the outcome's bound, or take "
    '`family="negative_binomial"`. A new fit needs new budget.',
)
def outcomes_that_differ_too_much():
    """Counts that are far more spread than a Poisson model has."""
    return regression(people(3000, unlike=6.0), epsilon=1.0)


@run(
    ClippingWarning,
    level="check",
    do="Recode by the codebook, and declare bounds that a person can reach. In this example, 2% of "
    'the people have 80, which may mean "unknown". Without privacy the intercept would be 1.04.',
)
def a_few_at_the_bound():
    """Sixty of 3,000 people at the outcome's bound: their part is cut off, and counted."""
    return regression(people(3000, at_the_bound=60), epsilon=1.0)


@run(
    do="Declare the column as it is. In this example, ages were standardised, and the schema "
    "says 20 to 80, so all of them became 20."
)
def a_column_in_other_units():
    """A column that was standardised, and is declared in years."""
    frame = people(3000)
    frame["age"] = (frame.age - 50) / 17
    return regression(frame, epsilon=1.0)


@run(ConvergenceWarning, level="do not publish", do=LITTLE)
def dpsvi_with_too_little():
    """DPSVI where the noise hides what the records say."""
    return fitted(DPSVI, AutoNormal, epsilon=0.02, source=2).posterior().status


@run(ClippingWarning, do="Leave `clip` out. Then `DPSVI` chooses the bound.")
def a_small_bound():
    """A bound C that cuts nearly all records."""
    fitted(DPSVI, AutoNormal, optim=pyro.optim.Adam({"lr": 0.02}), num_steps=50, clip=0.1)


@run(PrivacyWarning, do="Do nothing if the loop does not use the loss.")
def a_loop():
    """The loss of a training loop."""
    guide, optim = AutoNormal(logistic), pyro.optim.Adam({"lr": 0.02})
    svi = DPSVI(logistic, guide, optim, accountant=PrivacyAccountant(epsilon=1.0))
    data = records()
    for _ in range(20):
        svi.step(*data)


@run(
    ConvergenceWarning,
    do="Use the location, but not the width. For intervals take `AutoMultivariateNormal`.",
)
def a_guide_that_is_not_gaussian():
    """DPSVI with a flow, whose intervals leave the noise out."""
    fitted(DPSVI, AutoIAFNormal, num_steps=50)


@run(ConvergenceWarning, level="do not publish", do=LITTLE)
def a_hierarchy():
    """DPSEP with thirty effects of an unknown scale."""

    def model(x, y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(0.0, scale).expand([30]).to_event(1))
        with pyro.plate("people", len(x)):
            group = (15 * x[:, 0] + 15).long().clamp(0, 29)
            pyro.sample("y", dist.Bernoulli(logits=w[group]), obs=y)

    accountant = PrivacyAccountant(epsilon=0.3)
    sep = DPSEP(model, AutoMultivariateNormal(model), accountant=accountant, noise=Noise(source=0))
    sep.run(*records(), progress=False)
    return sep.posterior().status


@run(level="check", do="Take a larger epsilon or more records.")
def vips_with_too_little():
    """VIPS at a small epsilon: a status without a warning."""
    x, y = records()
    logit = functools.partial(VIPS, LogisticRegression(dim=3), num_steps=10)
    return fitted(logit, epsilon=0.1, data=(x / 2, y)).posterior().status


@run(level="check", do="Use the means, but no widths of mixtures, topics and belief networks.")
def a_mixture():
    """VIPS with a mixture: its width lacks a part."""
    mixture = GaussianMixture(dim=3, components=2, radius=2.0)
    vips = functools.partial(VIPS, mixture, num_steps=10)
    return fitted(vips, data=records()[:1]).posterior().status


@run(PrivacyWarning, do="Make the accountant again with a smaller delta, which costs little noise.")
def a_large_delta():
    """A delta that would let somebody publish five of 2,000 people."""
    accountant = PrivacyAccountant(epsilon=1.0, delta=0.0025)
    sep = DPSEP(logistic, AutoNormal(logistic), accountant=accountant, noise=Noise(source=0))
    sep.run(*records(), progress=False)


@run(
    PrivacyWarning,
    do="Divide by public numbers instead. Or use DPStandardScaler, which pays for the mean and sd.",
)
def features_of_mean_zero():
    """Features in units of their own standard deviation, which depends on each record."""
    x, y = records()
    data = (x - x.mean(dim=0)) / x.std(dim=0), y
    fitted(DPSEP, AutoNormal, epsilon=5.0, data=data)


@run(
    NotPrivateWarning,
    do="Keep the number to yourself. The releases of this ledger have no guarantee any more.",
)
def a_look():
    """The loss of the data, after all."""
    optim = pyro.optim.Adam({"lr": 0.02})
    svi = fitted(DPSVI, AutoNormal, epsilon=5.0, optim=optim, num_steps=100)
    nonprivate(svi).loss(*records())


@run(
    NotPrivateWarning,
    do="Predict for new or public people, because a prediction shows the person's features.",
)
def predictions_for_records_of_the_fit():
    """Predictions for the people of the fit."""
    fitted(DPSEP, AutoNormal).predictive(10)(records()[0][:5])


@run(
    NotPrivateWarning, do="Pass last year's published table, or write the schema from the codebook."
)
def a_schema_from_data():
    """A schema that is drafted from a frame."""
    Schema.suggest(people(50))
