"""New users' first mistakes: each attempt, and the text that its error must have.

``benchmarks/errors.py`` makes docs/errors.md of them; test_first_attempts.py holds them to it.
"""

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import scipy.sparse
import torch
from pyro.infer import RenyiELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import pyro_dp
from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    Clip,
    FixedSizeSampling,
    PaperDPSVI,
    PoissonSampling,
    PrivacyAccountant,
)
from pyro_dp.tabular import Binary, Category, Count, Number, PrivateGLM, Schema
from pyro_dp.vips import LogisticRegression

_TYPES = (
    "ConfigurationError: ",
    "ModelError: ",
    "PrivacyError: ",
    "PrivacyBudgetExceeded: ",
    "SchemaError: ",
    "TypeError: DPSVI.__init__() missing",  # Python's own
    "TypeError: DPSEP.__init__() missing",
)


def data():
    """Three features and a binary label of 100 people, in torch's default dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator, dtype=torch.float32)
    x[7, 0] = 61.803  # no error may quote it
    y = (x.sum(dim=1) > 0).float()
    return x, y


def logistic(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def whole(x, y, size=None, **plate):
    """The same, for whole tensors."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", size or len(x), **plate):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def mixture(x, y):
    locs = pyro.sample("locs", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}).long()
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=x[idx, 1])


def dpsvi(model, guide=None, optim=None, loss=None, **settings):
    """DPSVI with settings that work, except those passed here."""
    guide = AutoNormal(model) if guide is None else guide
    optim = pyro.optim.Adam({"lr": 0.01}) if optim is None else optim
    loss = Trace_ELBO() if loss is None else loss
    settings = {"accountant": PrivacyAccountant(epsilon=1.0), "num_steps": 3} | settings
    return DPSVI(model, guide, optim, loss, **settings)


def dpsep(model, guide=None, **settings):
    """The same of DPSEP."""
    guide = AutoNormal(model) if guide is None else guide
    settings = {"accountant": PrivacyAccountant(epsilon=1.0)} | settings
    return DPSEP(model, guide, **settings)


def people():
    """The same people as a frame."""
    x, y = data()
    frame = pd.DataFrame({"age": 40 + x[:, 0].numpy(), "region": ["north", "south"] * 50})
    return frame.assign(ill=y.numpy() > 0, visits=range(100))


def glm(formula="ill ~ age + region", family="logistic", **settings):
    """A regression of them, with settings that work, except those passed here."""
    columns = {
        "age": Number(0, 100),
        "region": Category(("north", "south")),
        "ill": Binary(),
        "visits": Count(0, 30),
    }
    settings = {"accountant": PrivacyAccountant(epsilon=1.0)} | settings
    return PrivateGLM(Schema(columns), formula, family=family, **settings)


def vips(model, **settings):
    """The same of VIPS."""
    return VIPS(model, accountant=PrivacyAccountant(epsilon=1.0), num_steps=3, **settings)


@dataclass(frozen=True)
class Attempt:
    """A wrong first attempt.

    :param function: makes it; of ``x`` and ``y``, if it takes arguments.
    :param group: heading of the page.
    :param names: literal parts of the message: argument, site or line of the user's code.
    :param says: a pattern of the next thing to try.
    :param spends: how many releases come before the error.
    """

    function: Callable
    group: str
    names: tuple[str, ...]
    says: str
    spends: int

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def outcome(self) -> tuple[str | None, int]:
        """In a fresh session: type and text of the error, if any; releases that it comes after.

        Names of files are without folders.
        """
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        record, text, releases = PrivacyAccountant.record, None, []

        def count(*args, **kwargs):
            record(*args, **kwargs)
            releases.append(args)

        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, dtype)
            stack.callback(pyro.clear_param_store)
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(mock.patch.object(PrivacyAccountant, "record", count))
            try:
                self.function(*(data() if inspect.signature(self.function).parameters else ()))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
        if text is not None:
            text = re.sub(r"[^\s'\"(]*/(?=[^\s/]+\.py\b)", "", text)
        return text, len(releases)

    def faults(self) -> list[str]:
        """The parts that the error must have and lacks, and its other faults."""
        text, releases = self.outcome
        if text is None:
            return ["no error"]
        faults = [f"does not name {name}" for name in self.names if name not in text]
        if not re.search(self.says, text, flags=re.IGNORECASE):
            faults.append(f"does not say {self.says}")
        if not text.startswith(_TYPES):
            faults.append("is no error of this package")
        if releases != self.spends:
            faults.append(f"comes after {releases} releases")
        if "61.8" in text:
            faults.append("quotes data")
        return faults


ATTEMPTS: list[Attempt] = []


def wrong_model(group: str, *names: str, says: str) -> Callable:
    """An attempt to fit a model."""

    def register(model: Callable) -> Callable:
        @attempt(group, *names, says=says)
        @functools.wraps(model)
        def fit(x, y):
            dpsvi(model).step(x, y)

        return model

    return register


def attempt(group: str, *names: str, says: str, spends: int = 0) -> Callable:
    def register(function: Callable) -> Callable:
        ATTEMPTS.append(Attempt(function, group, names, says, spends))
        return function

    return register


@wrong_model("The model", "plate", says="inside one, with one element per individual")
def model_without_plate(x, y):
    """A model without a plate."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=x @ w).to_event(1), obs=y)


@wrong_model("The model", "'total'", "'people'", says="move it inside")
def observed_outside_the_plate(x, y):
    """Something observed outside the plate."""
    logistic(x, y)
    pyro.sample("total", dist.Normal(0.0, 100.0), obs=y.sum())


@wrong_model("The model", "'ridge'", "'people'", says="inside, one for each record")
def factor_outside_the_plate(x, y):
    """A term of the data by pyro.factor, outside the plate."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    pyro.factor("ridge", -(x @ w).square().sum())
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


@attempt("The model", "'w'", says=r"dist\.Normal\(0\.0, 100\.0\)")
def improper_prior(x, y):
    """A flat prior."""

    def model(x, y):
        w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (3,)))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    dpsvi(model).step(x, y)


@attempt("The model", "'lengths'", says=r"range\(max_length\) or range\(x\.shape\[1\]\)")
def steps_of_the_longest():
    """Sequences, as many steps as the longest one has."""
    lengths, x = torch.randint(1, 6, (100,)), torch.randn(100, 5)

    def model(x, lengths):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("people", len(x)):
            for t in range(lengths.max()):
                with pyro.poutine.mask(mask=t < lengths):
                    pyro.sample(f"x_{t}", dist.Normal(loc, 1.0), obs=x[:, t])

    dpsvi(model).step(x, lengths)


@attempt("The model", "'packed'", says=r"pad_packed_sequence\(packed, batch_first=True\)")
def packed_sequence():
    """Sequences, packed."""
    lengths, x = torch.randint(1, 6, (100,)), torch.randn(100, 5)

    def model(packed):
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("people", len(x)):
            for t in range(x.shape[1]):
                with pyro.poutine.mask(mask=t < lengths):
                    pyro.sample(f"x_{t}", dist.Normal(loc, 1.0), obs=x[:, t])

    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    dpsvi(model).step(packed)


@attempt("The model", "'lengths'", says=r"run the network on the padded tensor, as in rnn\(x\)")
def packing_in_the_model():
    """A model that packs its sequences."""
    lengths, x = torch.randint(1, 6, (100,)), torch.randn(100, 5, 2)
    rnn = torch.nn.GRU(2, 3, batch_first=True)

    def model(x, lengths):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, last = rnn(packed)
        with pyro.plate("people", len(x)):
            pyro.sample("x", dist.Normal(last[0] @ w, 1.0), obs=x[:, 0, 0])

    dpsvi(model).step(x, lengths)


@attempt("The model", "'people'", "'x'", says=r"svi\.run\(x\.transpose\(0, 1\)\)")
def time_first():
    """Time in the first dimension, and people in the second."""
    x = torch.randn(5, 100)

    def model(x):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("people", x.shape[1]):
            for t in range(len(x)):
                pyro.sample(f"x_{t}", dist.Normal(loc, 1.0), obs=x[t])

    dpsvi(model).step(x)


@wrong_model("The model", "'men'", "'women'", says=r"PoissonSampling\(plate=")
def two_plates(x, y):
    """Two plates with observations."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("men", 60) as idx:
        pyro.sample("y_men", dist.Bernoulli(logits=x[:60][idx] @ w), obs=y[:60][idx])
    with pyro.plate("women", 40) as idx:
        pyro.sample("y_women", dist.Bernoulli(logits=x[60:][idx] @ w), obs=y[60:][idx])


@attempt("The model", "plate='patients'", says="'people'")
def another_plate_name(x, y):
    """A plate's name that the model does not have."""
    dpsvi(logistic, sampling=PoissonSampling(plate="patients")).step(x, y)


@wrong_model("The model", "no observed site", says="obs=")
def nothing_observed(x, y):
    """A model that observes nothing."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w))


@wrong_model("The model", "'y'", says="read all data and rows of parameters")
def partly_whole(x, y):
    """A model that reads its features whole, and its outcomes at the plate's indices."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y[idx])


@wrong_model("The model", "other rows", says=r"its own x\[idx\]|before|DPStandardScaler")
def centred(x, y):
    """Features that are centred by the data's own mean."""
    logistic(x - x.mean(0), y)


@wrong_model("The model", "its own mean", says="standardise before")
def centred_whole_tensors(x, y):
    """The same, of a model for whole tensors."""
    whole(x - x.mean(0), y)


@attempt("The model", "Batch normalisation", says=r"\.eval\(\)")
def batch_norm(x, y):
    """A network with batch normalisation."""
    norm = torch.nn.BatchNorm1d(3)

    def model(x, y):
        pyro.module("norm", norm)
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=norm(x[idx]) @ w), obs=y[idx])

    dpsvi(model).step(x, y)


@wrong_model("The model", "logits = x[idx] @ w", ".py:", says="size|shape")
def wrong_dimension(x, y):
    """Two weights for three features."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        logits = x[idx] @ w
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])


@wrong_model("The model", "logits = x[idx] @ weight", ".py:", says="mend this line")
def misspelt_name(x, y):
    """A name that is misspelt."""
    weights = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("people", len(x)) as idx:
        logits = x[idx] @ weight  # noqa: F821
        pyro.sample("y", dist.Bernoulli(logits=logits + weights.sum()), obs=y[idx])


@attempt("The data", "'x'", says="argument")
def data_by_closure(x, y):
    """Data that the model takes from around it."""

    def model(y):
        logistic(x, y)

    dpsvi(model).step(y)


@attempt("The data", "'features'", says="argument")
def data_by_default(x, y):
    """Data as the default of an argument."""

    def model(y, features=x):
        logistic(features, y)

    dpsvi(model).step(y)


X, Y = data()


@attempt("The data", "'X'", says="argument")
def data_by_global():
    """Data in a global variable."""

    def model(y):
        logistic(X, y)

    dpsvi(model).step(Y)


@attempt("The data", "'y'", says=r"def conditioned\(x, y\)")
def data_by_condition(x, y):
    """Outcomes that a handler holds."""

    def model(x):
        whole(x, None)

    conditioned = pyro.condition(model, data={"y": y})
    dpsvi(conditioned).step(x)


@attempt("The data", "rgument", says="pass the data as arguments|pass")
def no_arguments():
    """A model without arguments."""

    def model():
        logistic(X, Y)

    dpsvi(model).run(progress=False)


@attempt("The data", "logits=x[idx] @ w", ".py:", says="size|shape|order")
def swapped_arguments(x, y):
    """The arguments in the wrong order."""
    dpsvi(logistic).step(y, x)


@attempt("The data", "'y'", says="shapes do not fit")
def different_lengths(x, y):
    """One label is missing."""
    dpsvi(logistic).step(x, y[:-1])


@attempt("The data", "'y'", says=r"squeeze|\(N,\)|one number per record")
def column_of_labels(x, y):
    """Labels of shape (N, 1) for logits of shape (N,): Pyro's SVI makes N x N of them."""
    dpsvi(logistic).step(x, y[:, None])


@attempt("The data", "'x'", says="number|tensor")
def frame_with_text(x, y):
    """A pandas frame with a column of text."""
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    frame["c"] = np.where(frame["c"] > 0, "yes", "no")
    dpsvi(logistic).step(frame, y)


@attempt("The data", "'x'", says="pad_sequence")
def ragged_rows(x, y):
    """A list of rows of different lengths."""
    rows = x.tolist()
    dpsvi(logistic).step([rows[0][:2], *rows[1:]], y)


@attempt("The data", "'y'", says=r"list\(y\)|tensor")
def dictionary_of_labels(x, y):
    """Labels by the number of the person."""
    dpsvi(logistic).step(x, dict(enumerate(y.tolist())))


@attempt("The data", "'x'", "'y'", says=r"y\.loc\[x\.index\]")
def frames_in_another_order(x, y):
    """Frames whose rows are in different orders."""
    labels = pd.Series(y.numpy()).sample(frac=1.0, random_state=0)
    dpsvi(logistic).step(pd.DataFrame(x.numpy()), labels)


@attempt("The data", "'y'", says=r"y\.map\(")
def text_labels(x, y):
    """Labels as text."""
    dpsvi(logistic).step(x, pd.Series(np.where(y > 0, "yes", "no")).astype("category"))


class Logged(torch.Tensor):
    """A tensor that sees all operations."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [x.held if isinstance(x, Logged) else x for x in args]
        return func(*args, **(kwargs or {}))


@attempt("The data", "'scale'", "Logged", says="plain tensor of its numbers")
def constant_that_dispatches(x, y):
    """A constant of a class with __torch_dispatch__."""
    scale = Logged(torch.tensor(2.0))
    dpsvi(lambda x, y: logistic(x * scale, y)).step(x, y)


@attempt("The data", "'x'", says=r"svi\.run\(x\.dataset\)")
def data_loader(x, y):
    """A DataLoader."""
    dpsvi(logistic).step(DataLoader(TensorDataset(x, y), batch_size=10))


@attempt("The data", "'x'", "10 rows", "'people'", says=r"pass all records.*svi\.run\(x, y\)")
def batch(x, y):
    """A batch, and a plate of all people."""

    def model(x, y):
        whole(x, y, 100, subsample_size=len(x))

    dpsvi(model).step(x[:10], y[:10])


@attempt("The data", "'people'", says=r"pyro\.plate\(\.\.\., len\(x\)\), and pass all records")
def batch_in_a_plate_of_all(x, y):
    """A batch, and a plate that is longer."""

    def model(x, y):
        whole(x, y, 100)

    dpsvi(model).step(x[:10], y[:10])


@wrong_model("The data", "'x'", "'people'", says=r"Write pyro\.plate.*all arguments like x\[:50\]")
def part_of_the_data(x, y):
    """A model that reads the first rows only."""
    whole(x[:50], y[:50])


@attempt("The data", "'hidden'", "'x'", says="each as an argument of its own")
def widths_of_layers(x, y):
    """Two widths of layers, and two people."""

    def model(x, y, hidden):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, *hidden]).to_event(3))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w.sum((1, 2))), obs=y[idx])

    dpsvi(model, AutoDelta(model)).step(x[:2], y[:2], [20, 20])


@attempt("The data", "'x'", "DistributedSampler", says="Pass the dataset itself")
def distributed_sampler(x, y):
    """A DataLoader that shares records out among processes."""
    people = TensorDataset(x, y)
    sampler = DistributedSampler(people, num_replicas=3, rank=0)
    dpsvi(logistic).step(DataLoader(people, batch_size=10, sampler=sampler))


@attempt("The data", "'source'", says="__len__ and __getitem__")
def columns_of_a_stream(x, y):
    """Columns of an IterableDataset."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(x, y, strict=True)

    dpsvi(logistic).run(*pyro_dp.columns(Stream(), "x", "y"))


@attempt("The data", "'label'", "'y'", says="columns")
def column_that_is_not_there(x, y):
    """A column by a name that the data do not have."""
    dpsvi(logistic).run(*pyro_dp.columns({"x": x, "y": y}, "x", "label"))


@attempt("The data", "'x'", says=r"svi\.run\(list\(x\)\)")
def generator(x, y):
    """A generator of records."""
    dpsvi(logistic).step((row for row in x), y)


@attempt("The data", "'x'", says=r"x\.toarray\(\)")
def sparse_features(x, y):
    """A sparse matrix of SciPy."""
    dpsvi(logistic).step(scipy.sparse.csr_array(x.numpy()), y)


@attempt("The data", "'x'", says=r"x\.filled\(0\)")
def masked_array(x, y):
    """A masked array of NumPy."""
    dpsvi(logistic).step(np.ma.masked_greater(x.numpy(), 3.0), y)


@attempt("The data", "'dataset'", says="the arguments of model and guide")
def dataset_in_the_model(x, y):
    """A model that takes the Dataset itself."""

    def model(dataset):
        logistic(*dataset.tensors)

    dpsvi(model).step(TensorDataset(x, y))


@attempt("The data", "'x'", says="default_collate")
def iterable_dataset(x, y):
    """An IterableDataset."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(x, y, strict=True)

    dpsvi(logistic).step(Stream())


@attempt("The data", "'x'", says="mend this line")
def path_of_a_file(x, y):
    """The path of a file."""
    dpsvi(logistic).step("people.csv", y)


@attempt("The data", "'x'", says="impute")
def missing_values(x, y):
    """A missing value in a feature."""
    x[5, 1] = torch.nan
    dpsvi(logistic).step(x, y)


@attempt("The data", "'y'", says="recode|Bernoulli|0 and 1|0 or 1")
def labels_one_and_two(x, y):
    """Labels 1 and 2 in a Bernoulli."""
    dpsvi(logistic).step(x, y + 1)


@attempt("The data", "logits = effect[group[idx]]", ".py:", "IndexError", says="call the model")
def index_out_of_range(x, y):
    """One person's category is one that the model does not have."""
    group = torch.arange(100) % 5
    group[7] = 5

    def model(group, y):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        with pyro.plate("people", len(group)) as idx:
            logits = effect[group[idx]]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])

    dpsvi(model).step(group, y)


@attempt("Privacy settings", "accountant", says=r"PrivacyAccountant\(epsilon|missing")
def no_accountant():
    """The accountant is forgotten."""
    DPSVI(logistic, AutoNormal(logistic), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())


@attempt("Privacy settings", "Noise.multiplier", says="give the accountant an epsilon")
def no_epsilon():
    """An accountant without a budget, and no noise."""
    dpsvi(logistic, accountant=PrivacyAccountant())


@attempt("Privacy settings", "num_steps", says="pass num_steps")
def no_num_steps():
    """The number of steps of the paper's algorithm is missing."""
    guide, optim = AutoNormal(logistic), pyro.optim.Adam({"lr": 0.01})
    PaperDPSVI(logistic, guide, optim, accountant=PrivacyAccountant(epsilon=1.0))


@attempt("Privacy settings", "epsilon", says="must be a number, not str")
def epsilon_as_text():
    """Epsilon as text."""
    PrivacyAccountant(epsilon="1.0")


@attempt("Privacy settings", "delta", says=r"\(0, 1\)")
def delta_one():
    """A delta of 1."""
    PrivacyAccountant(epsilon=1.0, delta=1.0)


@attempt("Privacy settings", "Noise.multiplier", says=r"\[0, inf\)")
def negative_noise():
    """A negative noise multiplier."""
    dpsvi(logistic, noise=-1.0)


@attempt("Privacy settings", "bound", says="choose a finite one")
def infinite_bound():
    """An infinite bound."""
    dpsvi(logistic, clip=float("inf"))


@attempt("Privacy settings", "Clip.bound", says=r"\(0, inf")
def zero_bound():
    """A bound of zero."""
    dpsvi(logistic, clip=0.0)


@attempt("Privacy settings", "noise_multiplier", says=r"noise=1\.0")
def names_of_opacus():
    """The names of Opacus, and of version 0.2."""
    dpsvi(logistic, noise_multiplier=1.0, max_grad_norm=1.0)


@attempt("Privacy settings", "sampling", says="PoissonSampling")
def shuffling():
    """Shuffled batches."""
    dpsvi(logistic, sampling="shuffle")


@attempt("Privacy settings", "FixedSizeSampling", says="neighboring='replace_one'")
def fixed_batches():
    """Batches of a fixed size, where people are added or removed."""
    dpsvi(logistic, sampling=FixedSizeSampling(0.1))


@attempt("Privacy settings", "PoissonSampling.rate", says="batch size|fraction")
def batch_size_as_rate():
    """A batch size as sample rate."""
    dpsvi(logistic, sampling=32)


@attempt("Guides", "model", "guide", says="order|callable|swap")
def model_and_guide_swapped(x, y):
    """Model and guide in the wrong order."""
    dpsvi(AutoNormal(logistic), logistic).step(x, y)


@attempt("Guides", "parameter", says=r"pyro\.param|autoguide|AutoNormal")
def no_parameters(x, y):
    """A guide without parameters."""

    def guide(x, y):
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    dpsvi(logistic, guide).step(x, y)


@attempt("Guides", "latent", says=r"pyro\.sample|pyro\.param")
def nothing_to_guide(x, y):
    """An autoguide for a model without latents."""

    def model(x, y):
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx].sum(-1)), obs=y[idx])

    dpsvi(model, AutoDelta(model)).step(x, y)


@attempt(
    "Guides", "AutoDelta", says=r"guide\.median\(\).*AutoMultivariateNormal\(model\)", spends=3
)
def posterior_of_a_point(x, y):
    """The posterior of an AutoDelta, where records see products of latents."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=tau * (x[idx] @ w)), obs=y[idx])

    svi = dpsvi(model, AutoDelta(model))
    svi.run(x, y, progress=False)
    svi.posterior()


@attempt("Guides", "module_local_params", says=r"settings\.set\(module_local_params=False\)")
def module_local_parameters():
    """Parameters that stay out of Pyro's store."""
    with pyro.settings.context(module_local_params=True):
        dpsvi(logistic)


@attempt("Guides", "'intercept'", says="add|sample it in the guide")
def site_missing_in_guide(x, y):
    """A guide without one of the model's latents."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + intercept), obs=y[idx])

    def guide(x, y):
        loc = pyro.param("loc", torch.zeros(3))
        pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    dpsvi(model, guide).step(x, y)


@attempt("Guides", "guide", "'weights'", says="add|sample it in the guide")
def guide_of_another_model(x, y):
    """The guide of another model."""

    def model(x, y):
        w = pyro.sample("weights", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    dpsvi(model, AutoNormal(logistic)).step(x, y)


@attempt("Optimizers", "optim", says=r"pyro\.optim\.Adam\(\{'lr': 0\.01\}\)")
def torch_optimizer_class():
    """An optimizer class of torch."""
    dpsvi(logistic, optim=torch.optim.Adam)


@attempt("Optimizers", "LBFGS", says="pyro.optim.Adam|another optimizer|DPSEP")
def lbfgs(x, y):
    """LBFGS, which evaluates the loss several times in a step."""
    optim = pyro.optim.PyroOptim(torch.optim.LBFGS, {"lr": 0.1})
    dpsvi(logistic, optim=optim, clip=1.0).step(x, y)


@attempt("Optimizers", "optim", "learning_rate", says=r"'lr'|\blr\b")
def misspelt_learning_rate(x, y):
    """A learning rate by another name."""
    optim = pyro.optim.Adam({"learning_rate": 0.01})
    dpsvi(logistic, optim=optim, clip=1.0).step(x, y)


@attempt("Optimizers", "ReduceLROnPlateau", says="ExponentialLR|StepLR|another schedule")
def reduce_on_plateau(x, y):
    """A schedule that wants to know the loss."""
    arguments = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}}
    optim = pyro.optim.ReduceLROnPlateau(arguments)
    dpsvi(logistic, optim=optim, clip=1.0).run(x, y, progress=False)


@attempt("Losses", "loss", "RenyiELBO", says="Trace_ELBO")
def another_loss():
    """A loss that is no sum over records."""
    dpsvi(logistic, loss=RenyiELBO())


@attempt("Losses", "loss", "'people'", says="Only a sum over sites")
def mean_loss(x, y):
    """A loss of one's own that is a mean over the records."""

    def loss(model, guide, x, y):
        return Trace_ELBO().differentiable_loss(model, guide, x, y) / len(x)

    dpsvi(whole, loss=loss).step(x, y)


@attempt("Losses", "loss", "'people'", says="Write a penalty beside the sites")
def penalised_loss(x, y):
    """A loss of one's own with a penalty on a parameter."""

    def loss(model, guide, x, y):
        penalty = pyro.param("AutoNormal.locs.w").square().sum()
        return Trace_ELBO().differentiable_loss(model, guide, x, y) + penalty

    dpsvi(logistic, loss=loss).step(x, y)


@attempt("Losses", "loss", "4 times", says="one draw")
def several_draws(x, y):
    """A loss of one's own that takes several draws."""

    def loss(model, guide, x, y):
        return Trace_ELBO(num_particles=4).differentiable_loss(model, guide, x, y)

    dpsvi(logistic, loss=loss).step(x, y)


@attempt("Losses", "loss", "Private", says="differentiable_loss")
def gradients_only():
    """A subclass of ELBO that takes its gradient itself."""

    class Private(Trace_ELBO):
        def loss_and_grads(self, model, guide, *args, **kwargs):
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
            torch.nn.utils.clip_grad_norm_(pyro.get_param_store().values(), 1.0)
            return loss.item()

    dpsvi(logistic, loss=Private())


@attempt("Losses", "'y_unobserved'", says=r"config_enumerate\(model\)")
def enumerated_with_a_mask(x, y):
    """Enumeration of masked, discrete outcomes."""

    def model(x, y, seen):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("people", len(x)):
            outcome = dist.Bernoulli(logits=x @ w)
            pyro.sample("y", outcome, obs=y, obs_mask=seen, infer={"enumerate": "parallel"})

    guide = AutoNormal(pyro.poutine.block(model, expose=["w"]))
    dpsvi(model, guide, loss=TraceEnum_ELBO(max_plate_nesting=1)).step(x, y, x[:, 0] < 1)


@attempt("Losses", "max_plate_nesting=0", says=r"TraceEnum_ELBO\(max_plate_nesting=1\)")
def too_few_plates(x, y):
    """TraceEnum_ELBO with too small a max_plate_nesting."""
    guide = AutoNormal(pyro.poutine.block(mixture, hide=["z"]))
    loss = TraceEnum_ELBO(max_plate_nesting=0)
    dpsvi(mixture, guide, loss=loss, clip=Clip(of="parameters")).step(x, y)


@attempt("Losses", "only supports scalar poutine.scale", says="Change model, guide or loss")
def weights_of_records(x, y):
    """Enumeration, and a weight for each record."""

    def model(x, y):
        locs = pyro.sample("locs", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("people", len(x)) as idx, pyro.poutine.scale(scale=x[idx, 0].exp()):
            z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}).long()
            pyro.sample("x", dist.Normal(locs[z], 1.0), obs=x[idx, 1])

    guide = AutoNormal(pyro.poutine.block(model, hide=["z"]))
    dpsvi(model, guide, loss=TraceEnum_ELBO(), clip=Clip(of="parameters")).step(x, y)


@attempt("Losses", "loss", says=r"Trace_ELBO\(\)")
def loss_without_parentheses():
    """The parentheses of the loss are forgotten."""
    dpsvi(logistic, loss=Trace_ELBO)


@attempt("Losses", "'z'", says=r"poutine\.block\(model, hide=\['z'\]\)")
def discrete_latent_in_autoguide(x, y):
    """An autoguide that includes the discrete latents."""
    dpsvi(mixture, AutoNormal(mixture), loss=TraceEnum_ELBO()).step(x, y)


@attempt("Losses", "'kind'", says="inside the private plate|in the guide")
def enumerated_global(x, y):
    """A discrete latent of all people together."""

    def model(x, y):
        locs = pyro.sample("locs", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        kind = pyro.sample("kind", dist.Bernoulli(0.5), infer={"enumerate": "parallel"}).long()
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Normal(locs[kind], 1.0), obs=x[idx, 1])

    guide = AutoNormal(pyro.poutine.block(model, hide=["kind"]))
    dpsvi(model, guide, loss=TraceEnum_ELBO()).step(x, y)


@attempt("Steps", "evaluate_loss", says="Clip.loss")
def watching_the_loss(x, y):
    """A look at the loss."""
    dpsvi(logistic).evaluate_loss(x, y)


@attempt("Steps", "num_steps=3", says="to a new DPSVI", spends=3)
def running_twice(x, y):
    """run() twice."""
    svi = dpsvi(logistic, clip=1.0)
    svi.run(x, y, progress=False)
    svi.run(x, y, progress=False)


@attempt("Steps", "epsilon", says="plan fewer steps", spends=3)
def step_beyond_the_budget(x, y):
    """A step that the budget does not cover."""
    accountant = PrivacyAccountant(epsilon=1.0)
    dpsvi(logistic, accountant=accountant, clip=1.0).run(x, y, progress=False)
    dpsvi(logistic, accountant=accountant, noise=1.0).step(x, y)


@attempt("Steps", "10 of 100 records", says=r"svi\.run\(loader\.dataset\)")
def loop_over_batches(x, y):
    """A loop over a DataLoader."""
    svi = dpsvi(logistic)
    for x_batch, y_batch in DataLoader(TensorDataset(x, y), batch_size=10):
        svi.step(x_batch, y_batch)


@attempt("Steps", "step", says="same data|new|another", spends=1)
def other_data(x, y):
    """Other data of the same length in the second step."""
    svi = dpsvi(logistic)
    svi.step(x, y)
    svi.step(x + 1, 1 - y)


@attempt("Steps", "DPSVI", says="state_dict")
def deep_copy():
    """A copy, or a pickle, of an inference."""
    copy.deepcopy(dpsvi(logistic))


@attempt("Steps", "'w' (2)", says="model and guide of the saved run", spends=1)
def state_of_another_model(x, y):
    """The state of another model."""
    svi = dpsvi(logistic)
    svi.step(x, y)
    state = svi.state_dict()
    pyro.clear_param_store()

    def two_features(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx, :2] @ w), obs=y[idx])

    svi = dpsvi(two_features)
    svi.load_state_dict(state)
    svi.step(x, y)


@attempt("Steps", "epsilon=1", says="the budget of these data is used up", spends=1)
def fit_after_the_budget():
    """A fit with an accountant that has spent its budget."""
    accountant = PrivacyAccountant(epsilon=1.0)
    accountant.record(pyro_dp.SubsampledGaussian(accountant.noise_multiplier(num_steps=1)))
    glm(accountant=accountant).fit(people(), progress=False)


@attempt("DPSEP and VIPS", "AutoIAFNormal", says="Use AutoNormal")
def flow_in_dpsep(x, y):
    """DPSEP with a flow as guide."""
    dpsep(logistic, AutoIAFNormal(logistic)).step(x, y)


@attempt("DPSEP and VIPS", "'y'", says="DPSVI|StudentT")
def laplace_in_dpsep(x, y):
    """DPSEP with a likelihood that has a kink."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("people", len(x)) as idx:
            pyro.sample("y", dist.Laplace(x[idx] @ w, 1.0), obs=y[idx])

    dpsep(model).step(x, y)


@attempt("DPSEP and VIPS", "clip", says="Leave it out, or use PaperDPSEP")
def bound_for_dpsep():
    """DPSEP with a bound, which PaperDPSEP takes."""
    dpsep(logistic, clip=1.0)


@attempt("DPSEP and VIPS", "model", "ConjugateModel", says=r"DPSVI")
def pyro_model_in_vips():
    """VIPS with a Pyro model."""
    vips(logistic)


@attempt("DPSEP and VIPS", "x must", "4 columns", says="one row per record")
def wrong_width_in_vips(x, y):
    """VIPS with another number of features than declared."""
    vips(LogisticRegression(dim=4)).step(x, y)


@attempt("DPSEP and VIPS", "y must", says="recode")
def signs_as_labels_in_vips(x, y):
    """VIPS with labels of -1 and 1."""
    vips(LogisticRegression(dim=3)).step(x, 2 * y - 1)


@attempt("Data frames", "'age'", "missing values", says="missing=True")
def missing_values_in_a_frame():
    """A frame with a missing value that the schema does not declare."""
    glm().fit(people().assign(age=[None, *range(20, 119)]))


@attempt("Data frames", "'region'", says=r"other=True|declare")
def undeclared_level():
    """A frame with a level that the schema does not declare."""
    glm().fit(people().assign(region=["north", "west"] * 50))


@attempt("Data frames", "position 4", says=r"Declare them, or pass df\[schema\.names\]")
def undeclared_column():
    """A frame with a column that the schema does not declare."""
    glm().fit(people().assign(name="Ada"))


@attempt("Data frames", "'age'", "text", says=r"pd\.to_numeric")
def numbers_as_text():
    """A frame with numbers as text."""
    glm().fit(people().assign(age="40"))


@attempt("Data frames", "'income'", says="schema")
def formula_with_another_column():
    """A formula with a column that the schema does not declare."""
    glm("ill ~ age + income")


@attempt("Data frames", "center", says=r"I\(|scale|bounds|single")
def formula_with_all_rows():
    """A formula with a function of all rows."""
    glm("ill ~ center(age)")


@attempt("Data frames", "'binomial'", says="logistic")
def family_of_another_program():
    """A family by the name that other programs use."""
    glm(family="binomial")


@attempt("Data frames", "'ill'", says="poisson|Count")
def family_of_another_outcome():
    """A family for another kind of outcome."""
    glm(family="poisson")


@attempt("Data frames", "up_to(0.1)", says="shares of several analyses ascend", spends=1)
def share_below_the_first():
    """A second share that is smaller than the first."""
    accountant = PrivacyAccountant(epsilon=1.0)
    with accountant.up_to(0.5):
        accountant.record(pyro_dp.SubsampledGaussian(accountant.noise_multiplier(num_steps=1)))
    with accountant.up_to(0.1):
        glm(accountant=accountant).fit(people(), progress=False)


@attempt("Prediction", "first step", says=r"pyro\.infer\.Predictive\(model, guide=guide")
def predicting_before_the_fit():
    """A prediction before the first step."""
    dpsvi(logistic).predictive()


@attempt("Prediction", "'features'", says="pass it", spends=1)
def predicting_without_features(x, y):
    """A prediction without features that it depends on."""

    def model(features, y):
        logistic(features, y)

    svi = dpsvi(model, num_steps=1)
    svi.step(x, y)
    svi.predictive(10)(y=y[:5])


@attempt("Prediction", "'x'", says=r"x\[None\]", spends=1)
def predicting_one_record(x, y):
    """A prediction for a record without its dimension."""
    svi = dpsvi(logistic, num_steps=1)
    svi.step(x, y)
    svi.predictive(10)(torch.ones(3))


@attempt("Prediction", "'x'", "'y'", says="a row for each new record", spends=1)
def predicting_with_other_lengths(x, y):
    """A prediction with one label too few."""
    svi = dpsvi(logistic, num_steps=1)
    svi.step(x, y)
    svi.predictive(10)(torch.ones(5, 3), torch.ones(4))
