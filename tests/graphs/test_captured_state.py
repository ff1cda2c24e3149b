"""State that user code keeps of a record is put back. State that depends on the data is refused."""

import functools
import itertools
import types

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from pyro_dp import ModelError
from pyro_dp.graphs import references
from pyro_dp.graphs.captured_state import (
    CapturedState,
    alike,
    require_no_changes,
    require_same_changes,
)
from pyro_dp.graphs.references import LONGEST, References

TOTALS = {"sum": 0.0}
COUNT = 0


def by_closure():
    cache = {}

    def model(x):
        cache["sum"] = x.sum().item()

    return model, lambda: dict(cache)


def by_rebound_variable():
    last = None

    def model(x):
        nonlocal last
        last = x.sum().item()

    return model, lambda: last


def by_list():
    seen = []

    def model(x):
        seen.append(x.sum().item())

    return model, lambda: list(seen)


def by_global_container():
    def model(x):
        TOTALS["sum"] += x.sum().item()

    return model, lambda: dict(TOTALS)


def by_global_name():
    def model(x):
        global COUNT
        COUNT = x.sum().item()

    return model, lambda: COUNT


def by_helper():
    """Two functions further on."""
    cache = {}

    def keep(x):
        cache["x"] = x.sum().item()

    def helper(x):
        [keep(row) for row in x]

    return lambda x: helper(x), lambda: dict(cache)


def by_default():
    def model(x, cache={}):  # noqa: B006
        cache["sum"] = x.sum().item()

    return model, lambda: dict(model.__defaults__[0])


def by_function_attribute():
    def model(x):
        model.sum = x.sum().item()

    return model, lambda: dict(vars(model))


def by_partial():
    def model(cache, x):
        cache["sum"] = x.sum().item()

    cache = {}
    return functools.partial(model, cache), lambda: dict(cache)


class Callable:
    shared = {}

    def __init__(self):
        self.sum = None

    def __call__(self, x):
        self.sum = x.sum().item()
        self.new = 1.0
        Callable.shared["sum"] = self.sum

    def method(self, x):
        self(x)


class CallableClassAttribute:
    sum = 0.0

    def __call__(self, x):
        CallableClassAttribute.sum = x.sum().item()


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.kept = {"deep": [[]]}

    def forward(self, x):
        self.sum = x.sum().item()
        self.kept["deep"][0].append(self.sum)


def by_callable_object():
    model = Callable()
    return model, lambda: (dict(vars(model)), dict(Callable.shared))


def by_bound_method():
    model = Callable()
    return model.method, lambda: (dict(vars(model)), dict(Callable.shared))


def by_class_attribute():
    return CallableClassAttribute(), lambda: CallableClassAttribute.sum


def by_module():
    model = Module()
    return model, lambda: ([*vars(model)], list(model.kept["deep"][0]))


def by_namespace():
    settings = types.SimpleNamespace(sum=0.0)

    def model(x):
        settings.sum = x.sum().item()

    return model, lambda: settings.sum


def by_parameter_store():
    def model(x):
        pyro.get_param_store()["sum"] = x.sum()

    return model, lambda: sorted(pyro.get_param_store().keys())


def by_private_attribute():
    """A module of torch, a distribution and a partial function keep it."""
    net, prior = nn.Sequential(), dist.Normal(0.0, 1.0)

    def model(x):
        net._sum = prior._sum = partial._sum = x.sum().item()

    partial = functools.partial(model)
    return partial, lambda: [getattr(each, "_sum", None) for each in (net, prior, partial)]


def by_objects_of_libraries():
    """An estimator that learns from each record, and a transform of torch."""
    scaler, shift = StandardScaler(), torch.distributions.AffineTransform(0.0, 1.0)

    def model(x):
        scaler.partial_fit(x.numpy())
        shift.loc = x.sum().item()

    return model, lambda: (getattr(scaler, "n_samples_seen_", None), shift.loc)


def by_submodule():
    """A network of torch's own classes gets a module."""
    net = nn.Sequential()

    def model(x):
        net.add_module("kept", nn.Identity())
        net.kept.sum = x.sum().item()

    return model, lambda: [each.sum for each in net]


def by_trace():
    """That of an earlier run."""
    trace = pyro.poutine.trace(lambda: pyro.sample("z", dist.Normal(0.0, 1.0))).get_trace()

    def model(x):
        trace.sum = trace.nodes["z"]["sum"] = x.sum().item()

    return model, lambda: (getattr(trace, "sum", None), trace.nodes["z"].get("sum"))


def by_many_objects():
    """More than a graph may have as constants."""
    words = [types.SimpleNamespace(sum=0.0) for _ in range(LONGEST + 1)]

    def model(x):
        words[-1].sum = x.sum().item()

    return model, lambda: words[-1].sum


def by_handler():
    """Behind Pyro's own handlers."""
    model, kept = by_closure()
    return pyro.poutine.scale(pyro.poutine.block(model), scale=2.0), kept


WAYS = [
    *(by_closure, by_rebound_variable, by_list, by_global_container, by_global_name, by_helper),
    *(by_default, by_function_attribute, by_partial, by_callable_object, by_bound_method),
    *(by_class_attribute, by_module, by_namespace, by_parameter_store, by_handler),
    *(by_private_attribute, by_objects_of_libraries, by_submodule, by_trace),
    by_many_objects,
]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request):
    return request.param()


def changes_of(model, *inputs):
    """Changes that a run on each of these leaves."""
    state, changes = CapturedState(model), []
    for x in inputs:
        with state.pristine() as changed:
            model(x)
        changes.append(changed)
    return changes


@pytest.mark.parametrize("context", ["preserved", "pristine"])
def test_put_back(way, context):
    model, kept = way
    before = kept()
    state = CapturedState(model)
    with getattr(state, context)():
        model(torch.ones(2, 2))
        assert kept() != before
    assert kept() == before


def test_put_back_after_an_error(way):
    model, kept = way
    before = kept()
    with pytest.raises(ZeroDivisionError), CapturedState(model).preserved():
        model(torch.ones(2, 2))
        raise ZeroDivisionError
    assert kept() == before


def test_differences_between_records(way):
    """The same record makes the same changes, and another record others."""
    model, _ = way
    changes = changes_of(model, torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2))
    require_same_changes(*changes[:2])
    with pytest.raises(ModelError, match="changes with the data"):
        require_same_changes(changes[0], changes[2])


def test_a_cache_is_emptied():
    calls = itertools.count()  # which is not looked into

    @functools.lru_cache
    def size(rows):
        next(calls)
        return rows

    def model(x):
        return size(len(x))

    state = CapturedState(model)
    for _ in range(2):
        with state.preserved():
            model(torch.ones(3))
    assert next(calls) == 2


def tensors():
    module, shift = nn.BatchNorm1d(2), torch.zeros(2)
    frozen = nn.Parameter(torch.zeros(2))

    def model(way, x):
        if way == "buffer":
            module.running_mean.add_(x.mean(0))
        elif way == "captured":
            shift.copy_(x.mean(0))
        elif way == "storage":
            frozen.data = x.mean(0)
        elif way == "stored":
            pyro.param("stored", torch.zeros(2)).data.add_(x.mean(0))
        elif way == "behind the version":
            shift.data.copy_(x.mean(0))

    return model


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("buffer", "Buffer 'running_mean' of BatchNorm1d"),
        ("captured", "Variable 'shift'"),
        ("storage", "Variable 'frozen'"),
        ("behind the version", "Variable 'shift'"),
        ("stored", "Parameter 'stored'"),
    ],
)
def test_tensors_that_are_changed_in_place(way, named):
    """Such tensors are refused by name, and put back."""
    model = functools.partial(tensors(), way)
    pyro.param("stored", torch.zeros(2))
    state = CapturedState(model)
    before = [t.detach().clone() for _, t in state._tensors()]
    with pytest.raises(ModelError, match=named), state.preserved():
        model(torch.ones(3, 2))
    # A step goes on after the error, without the record.
    torch.testing.assert_close([t.detach() for _, t in state._tensors()], before)
    changes = changes_of(model, torch.ones(3, 2), 2 * torch.ones(3, 2))
    torch.testing.assert_close([t.detach() for _, t in state._tensors()], before)
    with pytest.raises(ModelError, match=named):
        require_same_changes(*changes)


@pytest.mark.parametrize("has_one", [False, True])
def test_gradients_are_put_back_and_refused(has_one):
    """A model may call backward() on a network that it captures."""
    weights = nn.Parameter(torch.ones(2))
    weights.grad = kept = torch.zeros(2) if has_one else None

    def model(x):
        (weights @ x).backward()

    state = CapturedState(model)
    with state.pristine() as changes:
        model(torch.ones(2))
    assert weights.grad is kept and (kept is None or not kept.any())
    with pytest.raises(ModelError, match="Variable 'weights'"):
        require_no_changes(changes)


def test_a_counter_is_no_difference():
    calls = []

    def model(x):
        calls.append(len(calls))

    require_same_changes(*changes_of(model, torch.ones(2), torch.zeros(2)))


def test_arrays_that_are_changed_in_place():
    mean = np.zeros(2)

    def model(x):
        mean[:] = x.mean(0).numpy()

    changes = changes_of(model, torch.ones(3, 2), torch.zeros(3, 2))
    assert (mean == 0).all()
    with pytest.raises(ModelError, match="'mean'"):
        require_same_changes(*changes)
    with pytest.raises(ModelError, match="'mean'"), CapturedState(model).preserved():
        model(torch.ones(3, 2))
    assert (mean == 0).all()


@pytest.mark.parametrize("make", [pd.Series, lambda x: pd.DataFrame({"a": x})])
def test_tables_of_pandas_that_are_changed(make):
    table = make([0.0, 1.0])
    before = table.copy()

    def model(x):
        table.iloc[0] = x.sum().item()
        table.loc[len(table)] = 2.0

    changes = changes_of(model, torch.ones(3), torch.zeros(3))
    assert table.equals(before)
    with pytest.raises(ModelError, match="'table'"), CapturedState(model).preserved():
        model(torch.ones(3))
    assert table.equals(before) and all(changes)


def test_a_handler_around_the_run():
    class Largest(pyro.poutine.messenger.Messenger):
        largest = 0.0

        def _pyro_sample(self, msg):
            self.largest = max(self.largest, float(msg["value"].max()))

    def model(x):
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=x)

    with Largest() as handler:
        state = CapturedState(model)
        with state.preserved():
            model(torch.ones(2))
            assert handler.largest == 1.0
        assert handler.largest == 0.0


def test_too_many_objects(monkeypatch):
    """Objects beyond the limit are not inspected, so the model is refused."""
    monkeypatch.setattr(references, "_MOST_THINGS", 100)
    words = [[i] for i in range(100)]
    with pytest.raises(ModelError, match="Variable 'words', .* too many objects"):
        References(lambda x: words[0]).require_all()
    edges = [(i, 0.5) for i in range(1000)]
    References(lambda x: edges[0]).require_all()


@pytest.mark.parametrize(
    "change", [lambda d: d.update(beta=2.0), lambda d: d["scale"].mul_(2), lambda d: d.clear()]
)
def test_changed_values_are_noticed(change):
    settings = {"beta": 1.0, "scale": torch.ones(2)}

    def model(x):
        return settings["beta"] * settings["scale"] * x

    state = CapturedState(model)
    assert not state.changed
    change(settings)
    assert state.changed


def test_parameters_and_growing_lists_are_no_change():
    weight, history = nn.Parameter(torch.ones(2)), [1.0]

    def model(x):
        return weight * x * history[0]

    state = CapturedState(model)
    history.append(2.0)
    with torch.no_grad():
        weight.add_(1.0)
    assert not state.changed


def test_names_of_what_is_found():
    array, table = np.ones(3), torch.ones(3)

    def model(x, start=table):
        return array, TOTALS

    labels = [label for label, _ in References(model).held]
    assert "variable 'array', which model() captures," in labels
    assert "the default of argument 'start' of model()" in labels
    assert "global variable 'TOTALS' that model() reads" in labels


def test_attributes_are_no_globals():
    """``x.TOTALS`` reads an attribute, not a global of that name."""

    def model(x):
        return x.TOTALS

    assert References(model).held == []


def test_a_missing_number_is_like_another_one_and_like_no_number():
    """In both directions: an item of a dataset may lose a NaN when others are read."""
    for make in (np.array, torch.tensor):
        missing, present = make([float("nan"), 1.0]), make([2.0, 1.0])
        assert alike(missing, make([float("nan"), 1.0]))
        assert not alike(missing, present) and not alike(present, missing)
