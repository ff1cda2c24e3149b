"""Data that model or guide hold beside their arguments are refused by name."""

import array
import collections
import functools
import types
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import scipy
import torch
from problems import logistic, regression_data
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import nn

from pyro_dp import ModelError, PaperDPSVI, PrivacyAccountant
from pyro_dp.graphs import references
from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.graphs.references import References
from pyro_dp.records.first_look import refuse_captured_data, refuse_numbers, refuse_rows
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.records import Reading, Records

torch.manual_seed(0)  # one of many numbers looks round, and a round one is nobody's
X, Y = regression_data()
SIZE = len(X)


def records(x=X, y=Y):
    plate = PrivatePlate("data", len(x), len(x))
    return Records(logistic, plate, (x, y), {}, Reading.BY_INDEX)


def check(*roots):
    references = References(*roots)
    refuse_rows(references, SIZE)
    refuse_captured_data(references, records())


def capturing(thing):
    def model(x, y):
        return thing

    return model


class Holding:
    def __init__(self, thing):
        self.thing = thing

    def __call__(self, x, y):
        logistic(x, y)


class HoldingModule(nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.register_buffer("thing", thing)

    def forward(self, x, y):
        logistic(x, y)


def of_no_module():
    """Code that was run by exec, as of a model that another program writes."""
    names = {"TABLE": X.clone()}
    code = "def model(x, y): return TABLE\nclass Model:\n    def __call__(self, x, y): return TABLE"
    exec(code, names)
    return names["model"], names["Model"]()


def of_another_function():
    """It has the name and the module of one of Pyro's."""

    @functools.wraps(pyro.sample)
    def model(x, y):
        return COPY

    return (model,)


COPY = X.clone()


@pytest.mark.parametrize("make", [of_no_module, of_another_function])
def test_code_is_the_users_whatever_its_module_is_called(make):
    for model in make():
        with pytest.raises(ModelError, match="Global variable '.*rows"):
            check(model)


def test_the_default_of_a_dictionary():
    with pytest.raises(ModelError, match="'COPY'.*rows"):
        check(capturing(collections.defaultdict(lambda: COPY)))


def test_nothing_is_held():
    public = torch.randn(3)
    check(logistic, AutoNormal(logistic, init_loc_fn=init_to_value(values={"w": public})))
    check(capturing([32, 16]), HoldingModule(public))


@pytest.mark.parametrize(
    "thing",
    [X, X[2], X[3:5], X.T, X.numpy(), X.numpy()[1:4], {"deep": [X[:2]]}, nn.Parameter(X)],
    ids=["all", "row", "rows", "turned", "array", "rows of an array", "deep", "parameter"],
)
@pytest.mark.parametrize(
    "hold",
    [
        capturing,
        Holding,
        lambda thing: functools.partial(logistic, thing),
        lambda thing: poutine.condition(logistic, data={"w": thing}),
        lambda thing: AutoNormal(logistic, init_loc_fn=init_to_value(values={"w": thing})),
        lambda thing: AutoNormal(logistic, init_loc_fn=lambda site: thing),
    ],
    ids=["closure", "attribute", "partial", "condition", "values", "init_loc_fn"],
)
def test_the_same_memory(thing, hold):
    with pytest.raises(ModelError, match="cannot be protected"):
        check(hold(thing))


@pytest.mark.parametrize(
    "thing",
    [
        torch.rand(SIZE, 2),
        np.random.rand(SIZE),
        [1.0] * SIZE,
        [[1.0]] * SIZE,
        tuple(range(SIZE)),
        [{"age": 1.0}] * SIZE,
        [None] + [1.0] * (SIZE - 1),
        dict.fromkeys(range(SIZE), 1.0),
        set(range(SIZE)),
    ],
    ids=["tensor", "array", "list", "lists", "tuple", "dicts", "a missing", "dict", "set"],
)
def test_as_many_rows_as_records(thing):
    """Captured rows are refused even if they are no arguments: they may be their source."""
    with pytest.raises(ModelError, match="'thing', which model.*30 rows"):
        check(capturing(thing))
    check(capturing(thing[None] if hasattr(thing, "shape") else [[*thing][1:]]))


@dataclass
class Person:
    age: int


class Reader:
    """Rows that lie elsewhere."""

    def __len__(self):
        return SIZE


def bare(thing):
    found = nn.Module()
    found.register_buffer("thing", thing)
    return nn.Sequential(found)


def with_an_attribute(thing):
    found = nn.Module()
    found.thing = thing
    return found


@pytest.mark.parametrize(
    "thing",
    [
        [Person(1)] * SIZE,
        tuple([Person(1)] * SIZE),
        dict.fromkeys(range(SIZE), Person(1)),
        ["1"] * SIZE,
        dict.fromkeys(range(SIZE), 1).values(),
        array.array("d", range(SIZE)),
        scipy.sparse.csr_matrix(np.eye(SIZE, 3)),
        scipy.sparse.coo_array(np.eye(SIZE, 3)),
        torch.nested.nested_tensor([torch.zeros(2)] * SIZE, layout=torch.jagged),
        Reader(),
        nn.Embedding.from_pretrained(torch.zeros(SIZE, 2)),
        bare(torch.zeros(SIZE, dtype=torch.long)),
        with_an_attribute(torch.zeros(SIZE, dtype=torch.long)),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_an_element_per_record_of_any_kind(thing):
    with pytest.raises(ModelError, match="30 rows"):
        check(capturing(thing))


def test_collections_of_public_length():
    check(capturing([range(SIZE), ["1"] * 3, "x" * SIZE, bare(torch.zeros(SIZE + 1))]))
    check(capturing([[len] * SIZE, [nn.ReLU()] * SIZE, {"a": [dist.Normal(0.0, 1.0)] * SIZE}]))


@pytest.mark.parametrize(
    "hide",
    [
        lambda number: types.MappingProxyType({"mean": number}),
        lambda number: weakref.ref(Named(number)),
        lambda number: weakref.WeakValueDictionary({"mean": Named(number)}),
        lambda number: {Named(number): "mean"},
        lambda number: dict.fromkeys(number.tolist()),
        lambda number: np.array([*number.tolist(), "text"], dtype=object),
        lambda number: np.array(number.tolist(), dtype=[("mean", float)]),
        lambda number: array.array("d", number.tolist()),
        lambda number: memoryview(number.numpy()),
        lambda number: torch.complex(number, 0 * number),
        lambda number: scripted(number),
        lambda number: scripted(torch.zeros(2), number.tolist()),
    ],
    ids=[
        *("a read-only mapping", "a weak reference", "a weak dictionary", "a key", "keys"),
        *("objects", "a structure", "an array of Python's", "a view", "complex", "TorchScript"),
        "an attribute of TorchScript that was set later",
    ],
)
def test_numbers_behind_other_objects(hide, monkeypatch):
    monkeypatch.setattr(Named, "alive", [])
    check(capturing(hide(X.mean(0) + 0.01)))
    with pytest.raises(ModelError, match="numbers of the data .means"):
        check(capturing(hide(X.mean(0))))


class Named:
    """It stays alive, as an object of the user's does."""

    alive = []

    def __init__(self, number):
        self.number = number
        self.alive.append(self)


class Scripted(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.peak, self.peaks = number, 0.0, [0.0]

    def forward(self, x):
        self.peak = float(x.max())
        self.peaks = [self.peak]
        return x + self.number.sum()


def scripted(number, peaks=(0.0,)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(Scripted(number))
    module.peaks = [*peaks]
    return module


@pytest.mark.long
def test_attributes_of_torch_script_are_put_back():
    model = scripted(torch.zeros(2))
    state = CapturedState(model)
    for x, peak in ((torch.zeros(2), 0.0), (torch.ones(2), 1.0)):
        with state.pristine() as changes:
            assert model(x).sum() == 2 * peak
        assert {name for _, name in changes} == ({"peak", "peaks"} if peak else set())
        assert model.peak == 0.0 and model.peaks == [0.0]


def test_attributes_of_python_beside_those_of_torch_script_are_put_back():
    net = scripted(torch.zeros(2))
    net.kept = {}

    def model(x):
        net.kept["x"] = net.latest = x

    with CapturedState(model).pristine():
        model(torch.ones(2))
        assert net.kept and hasattr(net, "latest")
    assert not net.kept and not hasattr(net, "latest")


@pytest.mark.parametrize(
    "write",
    [
        lambda rows: rows.to_csv(),
        lambda rows: rows.to_csv(index=False, header=False),
        lambda rows: rows.to_json(orient="values"),
        lambda rows: rows.to_json(orient="records").encode(),
        lambda rows: rows.to_numpy(np.float32).tobytes(),
        lambda rows: {"csv": rows.to_csv()},
    ],
    ids=["csv", "without a head", "lists", "encoded", "bytes", "an element"],
)
def test_a_table_as_text(write):
    rows = pd.DataFrame(np.tile(X.numpy(), 4))
    with pytest.raises(ModelError, match="'thing', which model.*30 rows|'csv'.*30 rows"):
        check(capturing(write(rows)))
    check(capturing([write(rows[:-3]), "word " * 1000]))


def test_an_array_of_an_arrow_table():
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(ModelError, match="30 rows"):
        check(capturing(arrow.array(range(SIZE))))


def test_a_column_per_record():
    """As of a copy that was transposed."""
    thing = torch.randint(9, (3, SIZE))
    with pytest.raises(ModelError, match="'thing', which model.*30 columns"):
        check(capturing(thing))
    check(capturing([thing[:1], thing[None], nn.Linear(SIZE, 3)]))


@pytest.mark.long
def test_an_argument_with_a_column_per_record():
    def model(x, y):
        loc = pyro.sample("loc", dist.Normal(x.float().mean(), 1.0))
        with pyro.plate("data", len(y)) as i:
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y[i])

    x, accountant = torch.randint(9, (3, SIZE)), PrivacyAccountant()
    optim = pyro.optim.Adam({"lr": 0.01})
    svi = PaperDPSVI(model, AutoNormal(model), optim, accountant=accountant, noise=1.0)
    with pytest.raises(ModelError, match="Argument 'x' has 30 columns"):
        svi.step(x, Y)
    assert accountant.num_releases == 0
    svi.step(x[None], Y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("what", "statistic"),
    [
        ("means", lambda x: x.mean(0)),
        ("standard deviations", lambda x: x.std(0)),
        ("variances", lambda x: x.var(0)),
        ("means", lambda x: -x.mean(0)),
        ("standard deviations", lambda x: 1 / x.std(0)),
        ("medians", lambda x: x.quantile(0.5, 0)),
        ("the mean", lambda x: x.mean()),
        ("rows", lambda x: x[:2].clone()),
        ("rows", lambda x: torch.cat([x[5:6], torch.zeros(2, 3).to(x)])),
    ],
)
def test_numbers_of_the_data(what, statistic, dtype):
    """Copies share no memory."""
    x = X.to(dtype)
    held = records(x, Y)
    value = statistic(x)
    with pytest.raises(ModelError, match=f"'loc'.*numbers of the data .{what}.*curator") as error:
        refuse_numbers({"loc": value}, held)
    assert f"{value.flatten()[0].item():.4f}" not in str(error.value)
    with pytest.raises(ModelError, match=what):
        refuse_captured_data(References(capturing(value)), held)


@pytest.mark.parametrize(
    "describe", [pd.DataFrame.describe, pd.DataFrame.mean, lambda x: x.std().astype("Float64")]
)
def test_numbers_in_tables_of_pandas(describe):
    table = describe(pd.DataFrame(X.numpy()))
    check(capturing(table + 0.01))
    texts = pd.DataFrame({"text": list("abc"), "one": 1.0, "number": X.mean(0).numpy()})
    for each in (table, texts):
        with pytest.raises(ModelError, match="numbers of the data"):
            check(capturing(each))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("statistic", [torch.mean, torch.std])
def test_numbers_of_integers(statistic, dtype):
    """Such as the mean of counts, and the share of those that have an outcome."""
    counts = torch.poisson(torch.full((SIZE, 1), 0.5), torch.Generator().manual_seed(1)).to(dtype)
    held, number = records(counts, Y), statistic(counts.double())
    refuse_captured_data(References(capturing(number + 0.01)), held)
    for thing in (number, number.float(), {"prior": number.item()}):
        with pytest.raises(ModelError, match="numbers of the data"):
            refuse_captured_data(References(capturing(thing)), held)


@pytest.mark.parametrize("kind", [float, np.float32])
@pytest.mark.parametrize(
    "hold",
    [
        *(lambda x: ("argument 'mean'", x), lambda x: functools.partial(logistic, x), capturing),
        *(lambda x: capturing((x, 1.0)), lambda x: capturing([x]), lambda x: capturing({x})),
        *(lambda x: lambda rows, mean=x: None, lambda x: lambda rows, *, mean=x: None),
    ],
    ids=["argument", "partial", "closure", "tuple", "list", "set", "default", "keyword"],
)
def test_a_number_of_python(hold, kind):
    number = X.mean().item()
    check(hold(kind(number + 0.01)))
    with pytest.raises(ModelError, match="numbers of the data .the mean"):
        check(hold(kind(number)))


DATA = X.double()
FEW = DATA[:7]  # shorter than the data


def fit(model=logistic, guide=None, optim=None):
    """One step, which must be refused, or not, before anything is spent."""
    pyro.clear_param_store()
    accountant = PrivacyAccountant()
    guide = AutoNormal(model) if guide is None else guide
    optim = optim or pyro.optim.Adam({"lr": 0.01})
    svi = PaperDPSVI(
        model, guide, optim, Trace_ELBO(), accountant=accountant, num_steps=1, noise=1.0
    )
    try:
        svi.step(DATA, Y.double())
    except ModelError:
        assert accountant.num_releases == 0
        raise


@pytest.mark.long
def test_a_first_look_asks_model_and_guide():
    def model(x, y):
        logistic(x + 0.0 * FEW.mean(), y)

    fit()
    with pytest.raises(ModelError, match="'FEW'.*part of. the data"):
        fit(model)
    with pytest.raises(ModelError, match="part of. the data"):
        fit(guide=AutoNormal(logistic, init_loc_fn=init_to_value(values={"w": FEW[0]})))


def test_a_first_look_asks_handlers_around_it():
    class Reading(poutine.messenger.Messenger):
        def __init__(self, rows):
            self.rows = rows

    with pytest.raises(ModelError, match="'rows' of Reading.*part of. the data"), Reading(FEW):
        fit()


@pytest.mark.slow
def test_a_first_look_sees_all_objects(monkeypatch):
    words = [[number] for number in range(2000)]

    def model(x, y):
        logistic(x + 0.0 * len(words), y)

    fit(model)
    monkeypatch.setattr(references, "_MOST_THINGS", 1000)
    with pytest.raises(ModelError, match="too many objects"):
        fit(model)


@pytest.mark.long
def test_a_first_look_asks_the_optimizer():
    """And its schedule."""
    own = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.01}}
    own["lr_lambda"] = lambda step: float(FEW.abs().mean())
    fit(optim=pyro.optim.Adam(lambda name: {"lr": 0.01}))
    for optim in (
        pyro.optim.Adam(lambda name: {"lr": 0.01 * float(FEW.abs().mean())}),
        pyro.optim.PyroLRScheduler(torch.optim.lr_scheduler.LambdaLR, own),
    ):
        with pytest.raises(ModelError, match="'FEW'.*part of. the data"):
            fit(optim=optim)


def test_a_first_look_asks_initial_values():
    """Neither of the two numbers that are captured is the data's."""
    shifted = DATA.mean(0) + 1.0

    def guide(x, y):
        loc = pyro.param("loc", shifted - 1.0)
        pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    with pytest.raises(ModelError, match="initial value of parameter 'loc'.*means"):
        fit(guide=guide)


def test_no_false_alarms():
    """Round numbers and random ones, in the many that networks have, are nobody's."""
    held = records(torch.randint(0, 2, (SIZE, 3)).double(), Y)
    for value in (torch.zeros(3), torch.full((3,), 0.5), torch.ones(2, 3), torch.eye(3)):
        refuse_numbers({"value": value}, held)
    for dtype in (torch.float32, torch.float64):
        held = records(torch.randn(10_000, 3, dtype=dtype), torch.ones(10_000))
        for size in [(3,), (200, 3), (100_000,), (3, 30_000)]:
            refuse_numbers({"value": torch.randn(size, dtype=dtype)}, held)
    near = torch.tensor([[-1.0 + 5e-6], [0.3]], dtype=torch.float32)  # to a round number
    refuse_numbers({"value": torch.tensor([-1.0, 0.12345])}, records(near, Y[:2]))
