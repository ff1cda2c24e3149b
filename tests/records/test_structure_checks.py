"""Bad input: a typed error that names what is wrong, before any budget is spent."""

import math
import sys
import threading
import warnings
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import (
    PROBLEMS,
    handwritten_guide,
    logistic,
    logistic_whole,
    mixture,
    new_paper_dpsvi,
    regression_data,
    with_needs,
)
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_value,
)
from torch import nn

import pyro_dp.records.record_term
from pyro_dp import (
    DPSVI,
    AdaptiveClip,
    Clip,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    FullBatch,
    ModelError,
    PaperDPSVI,
    PrivacyAccountant,
)
from pyro_dp.records import initial_values
from pyro_dp.records.plate import find_plate
from pyro_dp.records.records import Reading, Records
from pyro_dp.records.sandbox import guarded

SECRET = 123456.789  # a data value; it must not appear in any error


def weights():
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


def observe(x, y, w):
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def logits_of(rows):
    """A model of outcomes by these rows, a function of the features and the plate's indices."""

    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=rows(x, idx) @ w), obs=y[idx])

    return model


def attempt(model=logistic, guide=None, data=None, loss=None, optim=None, **options):
    """One step, whose accountant must be unspent if it fails."""
    accountant = options.setdefault("accountant", PrivacyAccountant())
    before = accountant.num_releases if isinstance(accountant, PrivacyAccountant) else None
    options.setdefault("noise", 1.0)
    rng = torch.get_rng_state()
    try:
        svi = PaperDPSVI(
            model,
            AutoNormal(model) if guide is None else guide,
            optim or pyro.optim.Adam({"lr": 0.01}),
            loss or Trace_ELBO(),
            **options,
        )
        return svi.step(*(regression_data() if data is None else data))
    except Exception as error:
        assert str(SECRET)[:5] not in str(error)
        if before is not None:
            assert accountant.num_releases == before
        if isinstance(error, ModelError) and data is not None:
            assert torch.equal(torch.get_rng_state(), rng)
        raise


def secret_data():
    x, y = regression_data()
    x[3] = SECRET
    return x, y


# Settings


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("num_steps", {"num_steps": True}),
        ("share", {"clip": Clip(AdaptiveClip(share=0.5), loss=1.0, loss_share=0.6)}),
        ("model", {"model": "model", "guide": handwritten_guide}),
        ("guide", {"guide": "guide"}),
    ],
)
def test_settings(named, options):
    with pytest.raises(ConfigurationError, match=named):
        attempt(**options)


def test_fixed_batch_of_nothing():
    accountant = PrivacyAccountant(neighboring="replace_one")
    with pytest.raises(ConfigurationError, match="rate"):
        attempt(accountant=accountant, sampling=FixedSizeSampling(0.001))


# Plates and arguments


def ridge_outside(x, y):
    w = weights()
    pyro.factor("ridge", -w.square().sum())
    observe(x, y, w)


def ridge_inside(x, y):
    w = weights()
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])
        pyro.factor("ridge", -w.square().sum() / len(x))


@pytest.mark.long
def test_a_factor_of_the_latents_may_stand_outside_the_plate():
    """It equals a factor inside the plate, divided by the plate's size."""
    attempt(ridge_outside)
    attempt(ridge_inside)
    x, y = regression_data()
    at = {"w": torch.tensor([0.3, -1.0, 0.5])}
    models = [poutine.condition(each, at) for each in (ridge_outside, ridge_inside)]
    sums = [poutine.trace(each).get_trace(x, y).log_prob_sum() for each in models]
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("reads", ["x", "visits", "counts", "edges"])
def test_a_factor_that_reads_arguments_may_not(reads):
    """It may read neither the records nor other numbers that may be people's."""
    given = {
        "visits": torch.rand(7),
        "counts": torch.randint(5, (7,)),
        "edges": torch.tensor([[0, 1], [1, 2]]),
    }

    def model(x, y, **others):
        w = weights()
        if reads == "edges":  # which are no numbers to be summed
            term = w[others["edges"]].diff().square().sum()
        else:
            term = (x if reads == "x" else others[reads]).sum() * w.sum()
        pyro.factor("term", -term)
        observe(x, y, w)

    def guide(x, y, **others):
        handwritten_guide(x, y)

    x, y = regression_data()
    svi = DPSVI(model, guide, accountant=PrivacyAccountant(1.0, 1e-5))
    if reads == "edges":
        svi.step(x, y, **given)
        return
    with pytest.raises(ModelError, match="pyro.factor 'term'.*reads arguments"):
        svi.step(x, y, **given)
    assert svi.accountant.get_epsilon() == 0


def nested(x, y, size=None, columns=3, crossed=False):
    """Answers (N, 3), in a plate of their own."""
    w = weights()
    people = pyro.plate("people", size, dim=-2)
    answers = pyro.plate("answers", columns, dim=-1)
    one, other = (answers, people) if crossed else (people, answers)
    with one, other:
        pyro.sample("y", dist.Normal(x * w, 1.0), obs=y)


def test_plates_within_another_one():
    """The outer one's elements are the records, if data have its rows and no other's."""
    x, y = torch.randn(30, 3), torch.randn(30, 3)

    def found(x, y, **settings):
        return find_plate(partial(nested, **settings), (x, y), {}, None).name

    assert found(x, y, size=30) == "people"
    with pytest.raises(ModelError, match="several plates.*'answers', 'people'"):
        found(x, y, size=30, crossed=True)
    with pytest.raises(ModelError, match="several plates"):  # both have rows
        found(x[:3], y[:3], size=3)


@pytest.mark.parametrize("times, people", ((5, 30), (5000, 6000)))
def test_an_inner_plate_that_is_longer_than_the_data_may_be_the_people(times, people):
    """Data have shape (times, people). With 5,000 rows the model gets a few."""

    def model(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("times", times, dim=-2), pyro.plate("people", people, dim=-1):
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    x = torch.zeros(times, 1).expand(times, people)
    with pytest.raises(ModelError, match="several plates.*'people', 'times'"):
        find_plate(model, (x,), {}, None)
    assert find_plate(model, (x,), {}, "times").size == times


def test_a_plate_without_a_size_takes_that_of_the_data():
    x, y = torch.randn(30, 3), torch.randn(30, 3)
    assert find_plate(nested, (x, y), {}, "people").size == 30

    def model(x, y):
        w = weights()
        with pyro.plate("data"):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    attempt(model)
    assert find_plate(model, regression_data(), {}, None).size == 30


def grey(validate_args, wrap=lambda fn: fn):
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            logits = (x @ w).unsqueeze(-1).expand(-1, 2)
            fn = dist.Bernoulli(logits=logits, validate_args=validate_args)
            pyro.sample("y", wrap(fn).to_event(1), obs=y)

    return model


@pytest.mark.long
def test_values_outside_the_support_that_are_meant():
    """Grey pixels: Pyro does not ask where validate_args=False, or validation is off."""
    x, _ = regression_data()
    y = torch.rand(len(x), 2)
    attempt(grey(False), data=(x, y))
    attempt(grey(False, lambda fn: fn.expand(fn.batch_shape)), data=(x, y))
    for validate_args in (None, True):
        with pytest.raises(ModelError, match="'y'.*outside the support.*validate_args=False"):
            attempt(grey(validate_args), data=(x, y))
    with pyro.validation_enabled(False):
        attempt(grey(None), data=(x, y))


def test_deterministic_sites_are_no_observations():
    def model(x, y):
        w = weights()
        pyro.deterministic("norm", w.norm())
        with pyro.plate("data", len(x)) as idx:
            logits = pyro.deterministic("logits", x[idx] @ w)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])

    attempt(model, handwritten_guide)


def test_an_empty_subsample():
    def model(x, y):
        w = weights()
        with pyro.plate("people", len(x), subsample=(x[:, 0] > 1).nonzero()[:, 0]) as idx:
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    with pytest.raises(ModelError, match="Plate 'people' has a subsample with no element.*mask"):
        attempt(model)


def test_transposed_data():
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Bernoulli(logits=w @ x[0][:, idx]), obs=y[idx])

    x, y = regression_data()
    with pytest.raises(ModelError, match="first dimension"):
        attempt(model, lambda x, y: handwritten_guide(x[0].T, y), data=(x.T[None], y))


@pytest.mark.long
def test_a_support_that_the_record_sets():
    """All records are looked at, also one beyond the examples, whose support its own row sets."""
    x = torch.rand(600) + 1.0  # enough for a graph
    y = x / 2

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(w * x[idx], 1.0), obs=y[idx])
            pyro.sample("y", dist.Uniform(torch.zeros(()), x[idx]), obs=y[idx])

    attempt(model, data=(x, y))
    y[333] = x[333] + 1e-3
    with pytest.raises(ModelError, match="'y'.*outside the support"):
        attempt(model, data=(x, y))


@pytest.mark.parametrize("broken", [9, -1.0], ids=["index", "Cholesky factor"])
def test_a_record_on_which_the_model_fails(broken):
    """The record is found before anything is spent, though no support depends on it."""
    codes, y = torch.ones(600, dtype=torch.long), torch.ones(600)
    if isinstance(broken, int):
        codes[577] = broken
    else:
        y[577] = broken

    def model(codes, y):
        w = weights()
        with pyro.plate("data", len(y)) as idx:
            root = torch.linalg.cholesky(y[idx, None, None])
            mean = torch.tanh(w[codes[idx]]) * root.reshape(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[idx])

    with pytest.raises(ModelError, match="Running the model on one record"):
        attempt(model, data=(codes, y))


def test_masked_observations_may_be_anything():
    def model(x, y, present):
        w = weights()
        with pyro.plate("data", len(x)) as idx, poutine.mask(mask=present[idx]):
            pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    x, y = regression_data()
    y[2] = -1.0
    attempt(model, lambda x, y, present: handwritten_guide(x, y), data=(x, y, y >= 0))


# Isolation of records


def test_reading_other_rows():
    with pytest.raises(ModelError, match="other rows"):
        attempt(logits_of(lambda x, idx: x[idx - 1]), handwritten_guide, data=secret_data())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.std(0),
        lambda x: x / x.abs().max(),  # in units of the largest
        lambda x: x.argsort(0).argsort(0).to(x),  # ranks
        lambda x: torch.cat([x[:, :2], x[:, :1].mean(0).expand(len(x), 1)], dim=1),
    ],
)
@pytest.mark.parametrize("slice_data", [False, True])
@pytest.mark.parametrize("within", ["batch", "all"])
def test_rows_that_read_each_other(change, slice_data, within):
    """A model that gets one record would not fail, but learn something else."""

    def whole(x, y):
        logistic_whole(change(x), y)

    def rows(x, idx):
        return change(x)[idx] if within == "all" else change(x[idx])

    model = whole if slice_data else logits_of(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the standard deviation of one row
        with pytest.raises(ModelError, match="'y' of the model.*other records change"):
            attempt(model, handwritten_guide, execution=Execution(slice_data=slice_data))


def test_batch_normalisation():
    norm = nn.BatchNorm1d(3)
    model = logits_of(lambda x, idx: pyro.module("norm", norm)(x[idx]))
    with pytest.raises(ModelError, match="eval"):
        attempt(model, handwritten_guide)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    norm.eval()
    attempt(model, handwritten_guide)


def peeking_prior(x, y):
    w = pyro.sample("w", dist.Normal(x.mean(0), 1.0).to_event(1))
    observe(x, y, w)


def peeking_support(x, y):
    w = pyro.sample("w", dist.Uniform(-1.0, x.max()).expand([3]).to_event(1))
    observe(x, y, w)


def peeking_guide(x, y):
    scale = pyro.param("scale", torch.ones(3), constraint=dist.constraints.positive)
    pyro.sample("w", dist.Normal(x.mean(0), scale).to_event(1))


def peeking_start(x, y):
    loc = pyro.param("loc", lambda: x.mean(0))
    pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


@pytest.mark.parametrize(
    ("model", "guide", "named"),
    [
        (logistic, peeking_guide, "'w' of the guide"),
        (logistic_whole, peeking_guide, "'w' of the guide"),
        (peeking_prior, handwritten_guide, "'w' of the model"),
        (logistic, peeking_start, r"value.*'loc' depends on the data[^.]*start[^.]*random\.$"),
        (logistic_whole, peeking_start, "initial value of parameter 'loc'"),
        # The autoguide's start gives it away; the fault is in the prior, and the text names it.
        (
            peeking_prior,
            AutoDiagonalNormal(peeking_prior),
            r"'AutoDiagonalNormal.loc'.*Neither may read the data",
        ),
        (peeking_support, AutoNormal(peeking_support), "prior of site 'w' has other bounds"),
    ],
)
def test_reading_data_outside_the_plate(model, guide, named):
    with pytest.raises(ModelError, match=named):
        execution = Execution(slice_data=model is logistic_whole)
        attempt(model, guide, data=secret_data(), execution=execution)
    assert "loc" not in pyro.get_param_store() or guide is handwritten_guide


def test_a_number_of_groups_that_is_counted_in_the_data():
    def model(group, y):
        with pyro.plate("groups", int(group.max()) + 1):
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)) as idx:
            pyro.sample("y", dist.Normal(effect[group[idx]], 1.0), obs=y[idx])

    with pytest.raises(ModelError, match=r"shape of parameter .*'AutoNormal\..*effect'.*constant"):
        attempt(model, AutoNormal(model), data=(torch.arange(40) % 5, torch.randn(40)))


def test_a_list_of_tensors_alone_is_to_be_stacked():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.stack(y))

    with pytest.raises(ModelError, match=r"No argument has a row .*torch\.stack"):
        attempt(model, AutoNormal(model), data=([torch.tensor(1.0)] * 40,))


def test_autoguide_initialised_on_data():
    x, y = secret_data()

    def peek(site):
        return site["fn"].sample() + PEEKED[0]

    PEEKED = [0.0]

    def model(x, y):
        PEEKED[0] = x.sum()
        logistic(x, y)

    with pytest.raises(ModelError, match="initial value.*locs.w"):
        attempt(model, AutoNormal(model, init_loc_fn=peek), data=(x, y))


def test_the_users_starting_values_are_not_moved():
    start = torch.full((3,), 0.5)
    for make in (AutoNormal, AutoDelta):
        pyro.clear_param_store()
        guide = make(logistic, init_loc_fn=init_to_value(values={"w": start}))
        svi = new_paper_dpsvi(logistic, guide)
        svi.step(*regression_data())
        assert (start == 0.5).all()
        assert not torch.allclose(guide.median()["w"], start)


# Latents


def local_latent(x, y):
    w = weights()
    with pyro.plate("data", len(x)) as idx:
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + effect), obs=y[idx])


def test_guides_without_a_latent_of_each_record():
    """A joint guide of all records' latents does not decompose."""
    for guide in (handwritten_guide, AutoDiagonalNormal(local_latent)):
        with pytest.raises(ModelError, match="effect"):
            attempt(local_latent, guide)


def test_parameters_of_groups_of_records():
    """Neither global nor one row per record: which group a record belongs to is data."""

    def guide(x, y):
        handwritten_guide(x, y)
        loc = pyro.param("group_loc", torch.zeros(len(x) // 10))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("effect", dist.Normal(loc[idx // 10], 1.0))

    with pytest.raises(ModelError, match="'group_loc'.*index"):
        attempt(local_latent, guide)


def test_size_of_a_weight_that_happens_to_be_n():
    """A parameter with N rows is fine if the rows are not the records'."""

    class Model:
        def __init__(self):
            self.net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))

        def __call__(self, x, y):
            pyro.module("net", self.net)
            with pyro.plate("data", len(x)) as idx:
                pyro.sample("y", dist.Bernoulli(logits=self.net(x[idx]).squeeze(-1)), obs=y[idx])

    attempt(Model(), lambda x, y: None)


def discrete_global(x, y):
    k = pyro.sample("k", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
    w = weights()
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Bernoulli(logits=x[idx] @ w + k), obs=y[idx])


@pytest.mark.long
def test_too_small_a_max_plate_nesting():
    """It matters only if latents are enumerated in parallel."""
    loss = TraceEnum_ELBO(max_plate_nesting=0)
    guide = AutoNormal(poutine.block(mixture, hide=["z"]))
    with pytest.raises(ModelError, match=r"loss: max_plate_nesting=0.*max_plate_nesting=1\)"):
        attempt(mixture, guide, data=(torch.randn(30, 2),), loss=loss)
    with pytest.raises(ModelError, match="'z'.*TraceEnum_ELBO"):
        attempt(mixture, guide, data=(torch.randn(30, 2),))
    attempt(loss=loss)


def test_global_site_without_reparameterisation():
    def guide(x, y):
        handwritten_guide(x, y)
        pyro.sample("k", dist.Categorical(logits=pyro.param("logits", torch.zeros(2))))

    with pytest.raises(ModelError, match="'k'.*of='parameters'"):
        attempt(discrete_global, guide)
    with pytest.raises(ModelError, match="'k'.*Trace_ELBO"):
        attempt(discrete_global, guide, loss=TraceMeanField_ELBO(), clip=Clip(of="parameters"))
    attempt(discrete_global, guide, clip=Clip(of="parameters"))


# Errors of user code


@pytest.mark.parametrize(("scale", "seed"), [(20.0, 16), (50.0, 13), (100.0, 17)])
def test_outcomes_that_are_all_but_certain(scale, seed):
    """In float32 their gradients are little more than rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    x = 20 * torch.rand(400, 3, generator=generator, dtype=torch.float32) - 10
    x = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    y = torch.bernoulli(torch.sigmoid(5 * x[:, 1]), generator=generator)

    def model(x, y):
        prior = dist.Normal(torch.zeros(4, dtype=torch.float32), scale)
        w = pyro.sample("w", prior.to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    pyro.set_rng_seed(seed)
    attempt(model, AutoMultivariateNormal(model), (x, y))


def test_checks_are_repeated_for_new_arguments():
    """A flag that switches the model to something bad is noticed at once."""

    def model(x, y, centre):
        logistic(x - x.mean(0) if centre else x, y)

    svi = new_paper_dpsvi(model, lambda x, y, centre: handwritten_guide(x, y))
    x, y = regression_data()
    svi.step(x, y, False)
    with pytest.raises(ModelError, match="other rows"):
        svi.step(x, y, True)
    x[0, 0] = math.nan
    with pytest.raises(ModelError, match="'x'"):
        svi.step(x, y, False)
    assert svi.accountant.num_releases == 1


@pytest.mark.parametrize("name", ["AutoNormal", "VAE", "mixture", "slice_data"])
def test_one_record_is_enough(name):
    """N = 1 and N = 2: nothing special."""
    for size in (1, 2):
        pyro.clear_param_store()
        problem = PROBLEMS[name]()
        data = tuple(x[:size] for x in problem.data)
        attempt(problem.model, problem.guide, data, problem.loss, **with_needs(problem.needs, {}))


# State and control flow


def test_what_is_kept_but_not_used_is_no_harm():
    """A model may keep a layer's last output for plots. Nothing of a record stays in it."""
    kept = {"last": None}

    def model(x, y):
        logistic(x, y)
        kept["last"] = x.mean(0)

    attempt(model, handwritten_guide)
    public = torch.ones(3)
    assert kept["last"] is None or torch.equal(kept["last"], public)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
@pytest.mark.parametrize("first", [True, False])
def test_a_handler_around_a_step_keeps_nothing_of_a_record(first):
    """This holds even if the first step had no handler."""

    class Seen(pyro.poutine.messenger.Messenger):
        def __init__(self):
            self.outcomes = set()

        def _pyro_sample(self, msg):
            if msg["name"] == "y":
                self.outcomes.add(float(msg["value"].reshape(-1)[0]))

    svi, data, handler = new_paper_dpsvi(logistic, handwritten_guide), regression_data(), Seen()
    if not first:
        svi.step(*data)
    with handler:
        svi.step(*data)
    assert handler.outcomes <= {1.0}  # a placeholder's


def test_a_guide_that_cannot_be_copied_does_not_see_the_data_whole():
    """Its initial values come from placeholders, and only the check of sites shows it rows."""
    x, y = regression_data()
    total = x.sum().item()

    class Guide:
        def __init__(self):
            self.lock = threading.Lock()  # has no copy

        def __call__(self, x, y):
            assert x.sum().item() != total
            handwritten_guide(x, y)

    guide = Guide()
    assert initial_values.copied(logistic, guide) is None
    svi = new_paper_dpsvi(logistic, guide)
    plate = find_plate(logistic, (x, y), {}, None)
    records = Records(logistic, plate, (x, y), {}, Reading.BY_INDEX)
    initial_values.initialise(logistic, guide, records)
    svi.step(x, y)


def test_running_averages():
    """A buffer that a record changes is refused."""
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    model = logits_of(lambda x, idx: norm(x[idx].reshape(-1, 3, 1).expand(-1, 3, 2)).mean(-1))
    with pytest.raises(ModelError, match="Buffer"):
        attempt(model, handwritten_guide)


@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
def test_parameters_of_some_records_only():
    """Their existence would tell about a record."""

    def model(x, group):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", len(x)):
            bias = pyro.param(f"bias_{int(group[i])}", torch.tensor(0.0))
            pyro.sample(f"x_{i}", dist.Normal(w + bias, 1.0), obs=x[i])

    def guide(x, group):
        pyro.sample("w", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))

    x, group = torch.randn(40), torch.zeros(40, dtype=torch.long)
    group[7] = 5
    with pytest.raises(ModelError, match="'bias_5' appears for some records only"):
        attempt(model, guide, data=(x, group))
    assert "bias_5" not in pyro.get_param_store()


def test_a_record_does_not_end_the_program():
    def check(age):
        sys.exit(f"bad age: {age}")

    with pytest.raises(ModelError, match="model raised SystemExit.*in check") as error:
        with guarded("The model"):
            check(1234.5)
    assert "1234.5" not in str(error.value)


def test_global_site_that_reads_local_latents():
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            z = pyro.sample("z", dist.Normal(w, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[idx])
        pyro.sample("s", dist.Normal(z.mean(), 1.0))

    def guide(x):
        pyro.sample("w", dist.Normal(pyro.param("w_loc", torch.tensor(0.0)), 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("z", dist.Normal(pyro.param("a", torch.tensor(1.0)) * x[idx], 1.0))
        pyro.sample("s", dist.Normal(pyro.param("s_loc", torch.tensor(0.0)), 1.0))

    with pytest.raises(ModelError, match="'s' of the model.*latents inside"):
        attempt(model, guide, data=(torch.randn(10),))


@pytest.mark.long
def test_length_of_sliced_data():
    """A model that gets one row cannot compute N by len(x)."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1 / len(x)).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    with pytest.raises(ModelError, match="'w' of the model.*length"):
        attempt(model, handwritten_guide, execution=Execution(slice_data=True))


@pytest.mark.filterwarnings("ignore:Gradients are taken one record at a time")
def test_support_is_checked_in_the_loop_too():
    def model(x, y):
        w = weights()
        for i in pyro.plate("data", len(x)):
            pyro.sample(f"y_{i}", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    x, y = regression_data()
    with pytest.raises(ModelError, match="support"):
        attempt(model, handwritten_guide, data=(x, 2 * y - 1))


def test_support_without_a_bijection():
    def model(x):
        w = pyro.sample("w", dist.ProjectedNormal(torch.ones(3)))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x[idx])

    def guide(x):
        pyro.sample("w", dist.ProjectedNormal(pyro.param("c", torch.ones(3))))

    with pytest.raises(ModelError, match="'w'.*parameters"):
        attempt(model, guide, data=(torch.randn(10, 3),))


def test_records_that_touch_nothing():
    def model(x):
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("x", dist.Normal(0.0, 1.0), obs=x[idx])

    with pytest.raises(ModelError, match="neither a latent nor a parameter"):
        attempt(model, data=(torch.randn(10),))


def test_autoguide_that_was_run_before_is_noted():
    """Its values survive a cleared parameter store."""
    accountant, guide = PrivacyAccountant(), AutoNormal(logistic)
    guide(*regression_data())
    pyro.clear_param_store()
    attempt(guide=guide, accountant=accountant)
    assert "before" in " ".join(accountant.notes)


def test_vectorised_numbers_are_compared_on_the_data(monkeypatch):
    """Agreement on placeholders alone is an error, not another path."""
    at_once = pyro_dp.records.record_term.RecordTerm.at_once

    def wrong(self, particle, batch, decisions=None):
        gradients = at_once(self, particle, batch, decisions)
        gradients.latents["w"] = gradients.latents["w"] + (batch.rows[0][:, :1] - 1)
        return gradients

    monkeypatch.setattr(pyro_dp.records.record_term.RecordTerm, "at_once", wrong)
    with pytest.raises(ModelError, match="on the data"):
        attempt(guide=handwritten_guide)


def test_reading_everything_outside_the_plate_is_noticed_by_the_whole_data_only():
    """Each single record looks like the placeholder; the data as a whole do not."""

    def guide(x, y):
        w = pyro.param("w_loc", torch.zeros(3))
        pyro.sample("w", dist.Normal(w + (x.std(0) if len(x) > 1 else 0.0), 1.0).to_event(1))

    x, y = regression_data()
    with pytest.raises(ModelError, match="'w' of the guide"):
        attempt(guide=guide, data=(x, y))


@pytest.mark.parametrize("value", [math.inf, 1.0])
def test_an_observation_that_is_a_number(value):
    """Not a tensor: it is the same for all records, and where it is infinite they count as zero."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y)

    svi = new_paper_dpsvi(model, AutoNormal(model), sampling=FullBatch())
    svi.step(torch.randn(5, 2), value)
    assert all(torch.isfinite(x).all() for x in pyro.get_param_store().values())


def test_numbers_of_numpy_are_taken():
    settings = dict(execution=Execution(np.int64(7)), num_steps=np.int64(2))
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic), **settings)
    svi.run(*regression_data(), progress=False)
    assert svi.accountant.num_releases == 2


def test_dropout_couples_no_records():
    """Random numbers beside the latents are the same in both of the compared runs."""
    encoder, decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def model(x, y):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            loc = decoder(nn.functional.dropout(z, 0.5, training=True))
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=x)

    def guide(x, y):
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(encoder(x), 1.0).to_event(1))

    attempt(model, guide)
