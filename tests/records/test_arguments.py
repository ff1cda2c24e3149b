"""Data as people have them: one rule for tensors, arrays, frames, lists and datasets."""

import array
import collections

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import linear, logistic, logistic_whole, new_paper_dpsvi, regression_data
from pyro.infer.autoguide import AutoNormal
from test_columns import Items
from torch.utils.data import (
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    Execution,
    ModelError,
    Noise,
    PrivacyAccountant,
    columns,
)
from pyro_dp.records.arguments import as_tensors, flattened
from pyro_dp.records.column import ArrayColumn
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.records import Reading, Records
from pyro_dp.vips import LogisticRegression

X = torch.tensor([[0.5, 1.0], [1.5, 2.0], [-2.5, 3.0], [3.5, 4.0]])
Y = torch.tensor([0, 1, 1, 0])


def model(x, y=None, options=None):
    pass


def converted(*args, **kwargs):
    return as_tensors(model, args, kwargs)[0]


def frame():
    return pd.DataFrame(X.numpy(), columns=["a", "b"], index=[7, 3, 5, 1])


def items(make):
    return Items(make, size=4)


# Each of them is X, whatever torch's default dtype is.
TABLES = {
    "float32": lambda: X.float(),
    "float64": lambda: X.double(),
    "half": lambda: X.half(),
    "array": lambda: X.numpy().astype("f4"),
    "double array": lambda: X.numpy().astype("f8"),
    "other byte order": lambda: X.numpy().astype(">f8"),
    "strides": lambda: X.numpy()[::-1].copy()[::-1],
    "Fortran order": lambda: np.asfortranarray(X.numpy()),
    "longdouble": lambda: X.numpy().astype(np.longdouble),
    "objects": lambda: X.numpy().astype(object),
    "frame": frame,
    "nullable": lambda: frame().astype("Float64"),
    "categories": lambda: frame().astype("category"),
    "list": lambda: X.tolist(),
    "tuples": lambda: tuple(map(tuple, X.tolist())),
    "rows": lambda: list(X.unbind()),
    "rows of arrays": lambda: list(X.numpy()),
}


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", TABLES)
def test_floats_get_the_default_dtype(kind, default):
    torch.set_default_dtype(default)
    x = converted(TABLES[kind](), Y)[0]
    assert x.dtype == default and torch.equal(x, X.to(default))


INTEGERS = {
    "array": lambda: Y.numpy(),
    "small": lambda: Y.numpy().astype("u1"),
    "objects": lambda: np.array(Y.tolist(), dtype=object),
    "series": lambda: pd.Series(Y.numpy(), index=list("wxyz")),
    "nullable": lambda: pd.Series(Y.tolist(), dtype="Int8"),
    "categories": lambda: pd.Series(Y.tolist()).astype("category"),
    "index": lambda: pd.Index(Y.tolist()),
    "list": lambda: Y.tolist(),
    "NumPy numbers": lambda: list(Y.numpy()),
    "array.array": lambda: np.asarray(array.array("l", Y.tolist())),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers(kind):
    y = converted(X, INTEGERS[kind]())[1]
    assert y.dtype == torch.int64 and torch.equal(y, Y)


@pytest.mark.parametrize(
    "given",
    [[False, True, True, False], pd.Series([0, 1, 1, 0], dtype="boolean"), Y.bool().numpy()],
)
def test_truth_values(given):
    y = converted(X, given)[1]
    assert y.dtype == torch.bool and torch.equal(y, Y.bool())


ODD = {
    "integers": [0, 1, 2.5, 1],
    "floats": [0.5, 1.5, True, 1.5],
    "large": [0, 1, 2**64, 1],
    "rows": [[0, 1.5], [1, 2.5], [1.5, 2.5], [1, 2.5]],
    "tensors": list(map(torch.tensor, [0, 1, 2.5, 1])),
    "objects": np.array([0, 1, 2.5, 1], dtype=object),
    "series": pd.Series([0, 1, 2.5, 1], dtype=object),
    "dataset": Items([0, 1, 2.5, 1].__getitem__, 4),
    "tuples": Items([(0, 1), (0, 1), (0, 1.5), (0, 1)].__getitem__, 4),
    "dictionaries": Items([{"x": 1}, {"x": 1.5}, {"x": 1}, {"x": 1}].__getitem__, 4),
}


@pytest.mark.parametrize("kind", ODD)
def test_one_record_decides_no_dtype(kind):
    """One record must not change the kind of all numbers, which decides how a model is fitted."""
    with pytest.raises(ModelError, match="for some records"):
        converted(ODD[kind], *([] if isinstance(ODD[kind], Items) else [Y]))


def test_one_item_decides_no_dtype():
    """Neither the first item nor another one decides it."""
    for items in ([2.5, 1, 1, 1], [1, 1, 1, 2.5]):
        with pytest.raises(ModelError, match="kind of their numbers"):
            list(columns(Items(items.__getitem__, 4), "x").blocks())


def test_columns_of_a_list_may_differ():
    x = converted([[0, 1.5], [1, 2.5], [0, 3.5], [1, 4.5]])[0]
    assert x.dtype == torch.get_default_dtype() and x[3].tolist() == [1, 4.5]


class Scaled(torch.Tensor):
    """Its rows depend on other rows."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs)
        return found / found.max() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize(
    "given",
    [
        lambda x: converted(x),
        lambda x: converted(list(map(as_scaled, X.unbind()))),
        lambda x: columns(x),
        lambda x: columns({"x": x}, "x"),
    ],
    ids=["tensor", "list", "column", "column by name"],
)
def test_tensors_of_a_class_of_the_users_own(given):
    with pytest.raises(ModelError, match="is a Scaled"):
        given(as_scaled(X))


def as_scaled(x):
    return x.as_subclass(Scaled)


def test_ranges_and_tensors_of_integers():
    x, y, small = converted(X, range(4), Y.int())
    assert y.tolist() == [0, 1, 2, 3] and small.dtype == torch.int32


def test_a_frame_of_several_kinds():
    """A column each; floats where one of them has any."""
    mixed = frame().assign(c=pd.array([1, 0, 1, 1], dtype="Int64"), d=[True, False, True, True])
    x = converted(mixed)[0]
    assert x.shape == (4, 4) and x.dtype == torch.float64
    assert torch.equal(x[:, :2], X) and x[:, 2:].tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert converted(mixed[["c", "d"]])[0].dtype == torch.int64
    assert converted(frame()[[]])[0].shape == (4, 0)
    doubled = pd.concat([frame(), frame()], axis=1)  # with names that are there twice
    assert torch.equal(converted(doubled)[0], torch.cat([X, X], dim=1))


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "float64", object])
def test_what_is_missing_becomes_nan(dtype):
    given = pd.Series([1, None, 3, 4], dtype=dtype)
    assert converted(given)[0].isnan().tolist() == [False, True, False, False]
    with pytest.raises(ModelError, match="'y' holds NaN.*curator"):
        attempt(linear, regression_data(4)[0], given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (frame().assign(c=list("uvwx")), r"text.*x\[x.columns\[2\]\].map"),
        (frame().assign(c=pd.Categorical(list("uvwx"))), r"x\[x.columns\[2\]\]"),
        (pd.Series(["61.803"] * 4), r"x\.map"),
        (["61.803"] * 4, "'x' holds text"),
        (np.array([1j] * 4), "complex"),
        (pd.Series(pd.to_datetime(["2020-01-01"] * 4)), "dates"),
        (pd.Series(pd.to_timedelta([1] * 4)), "time spans"),
        ([[1.0], [61.803, 2.0]] * 2, "different lengths.*pad_sequence"),
        ([torch.ones(2), torch.ones(3)] * 2, "different lengths"),
        (dict(enumerate([None] + [61.803] * 3)), r"list\(x.values\(\)\)"),
        (dict(enumerate([(61.803, 1.0)] * 4)), "'x' has one element per record"),
        ([{"age": 61.803}] * 4, "'x' has one element per record"),
        ([None] + [61.803] * 3, "'x' has one element per record"),
        ({"people": [{"age": 61.803}] * 4}, "'x' has one element per record"),
        (collections.deque([61.803] * 4), "deque"),
        ({1.0, 2.0, 3.0, 61.803}, "set"),
    ],
)
def test_refused_by_name(given, named):
    """The error says what to write instead, and shows no value."""
    with pytest.raises(ModelError, match=named) as caught:
        converted(given, Y)
    assert "'x'" in str(caught.value) and "61.8" not in str(caught.value)


def test_constants_stay_what_they_are():
    """They have another number of elements than there are records."""
    more = {"shape": (2, 2, 2), "steps": range(3)}
    options = {"sizes": [3, 5], "names": ["a", "b"], "more": more}
    given, known = as_tensors(model, (X, Y, options), {})
    assert known == {} and given[2] == options
    assert converted([1.0])[0] == [1.0] and converted((), None) == ((), None)


def test_lists_within_containers():
    x, y = converted([X.tolist(), Y.tolist()], X)[0]
    assert torch.equal(x, X) and torch.equal(y, Y)


def test_frames_of_other_indices():
    """Pandas would match rows by name; here they are matched by position."""
    x = frame()
    assert torch.equal(converted(x, pd.Series([0, 1, 1, 0], index=x.index))[1], Y)
    for index in ([1, 3, 5, 7], None):
        with pytest.raises(ModelError, match=r"'x' and 'y'.*y\.loc\[x\.index\]"):
            converted(x, pd.Series([0, 1, 1, 0], index=index))


def test_a_mapped_array_is_used_where_it_lies(tmp_path):
    """As a tensor, if it is of the right dtype, and cannot be written to; else as a column."""
    np.save(tmp_path / "x.npy", X.double().numpy())
    everyone = torch.arange(len(X))
    for mode, there in (("r", True), ("r+", False), ("c", False)):
        mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
        x = converted(mapped)[0]
        assert isinstance(x, torch.Tensor if there else ArrayColumn)
        if there:
            assert x.data_ptr() == mapped.ctypes.data and torch.equal(x, X)
        else:
            assert x.array is mapped and torch.equal(x.take(everyone), X)
    rows = np.load(tmp_path / "x.npy", mmap_mode="r")[1:3]
    assert converted(rows)[0].data_ptr() == rows.ctypes.data
    torch.set_default_dtype(torch.float32)
    x = converted(rows)[0]
    assert x.array is rows and torch.equal(x.take(torch.tensor([1])), X[2:3].float())
    constant = converted(X, rows)[1]  # it has fewer rows than there are records, and is read
    assert torch.equal(constant, X[1:3].float())


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(4)),
        StackDataset(X, Y),
        items(lambda i: (X[i].numpy(), int(Y[i]))),
        items(lambda i: [X[i].requires_grad_(False), np.int64(Y[i])]),
        items(lambda i: {"y": Y[i], "x": X[i]}),
    ],
)
def test_datasets_are_the_arguments_of_their_items(dataset):
    args, kwargs = as_tensors(model, (dataset, "more"), {})
    found = dict(zip(("x", "y"), args, strict=False)) | kwargs
    assert torch.equal(found["x"] if kwargs else args[0], X)
    assert torch.equal(found["y"], Y) and args[-1] == "more"


def test_a_dataset_of_one_column():
    assert torch.equal(converted(items(lambda i: float(Y[i])))[0], Y.double())


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (items(lambda i: torch.ones(i)), r"'x' \(a Items\).*one shape"),
        (items(lambda i: (_ for _ in ()).throw(ValueError("61.803"))), r"'x'.*list\(x\)"),
        (items(lambda i: object()), "'x'.*one shape"),
        (items(lambda i: {"x": 1.0} | ({"y": 1.0} if i else {})), "'x'.*the same keys"),
        (items(lambda i: "text"), "'x' holds text"),
        (
            type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})(),
            "'x' is a Stream.*default_collate",
        ),
        (type("Endless", (Dataset,), {})(), "'x' is a Endless"),
    ],
)
def test_datasets_that_are_refused(dataset, named):
    with pytest.raises(ModelError, match=named) as caught:
        converted(dataset)
    assert "61.8" not in str(caught.value)


def test_a_dataset_by_name():
    with pytest.raises(ModelError, match="'options' is a TensorDataset.*by position"):
        converted(X, options=TensorDataset(X))


# Which arguments are the same as in the step before


def records_of(*given):
    args, kwargs = as_tensors(model, given, {})
    return Records(
        model, PrivatePlate("data", 4, 4), args, kwargs, Reading.BY_INDEX, given=(given, {})
    )


@pytest.mark.parametrize("kind", TABLES)
def test_the_same_object_is_the_same(kind):
    given = TABLES[kind]()
    records = records_of(given, Y)
    assert records.same_as((given, Y), {})
    assert not records.same_as((given, Y.clone()), {})
    assert not records.same_as((given,), {}) and not records.same_as((), {"x": given, "y": Y})
    records.require_same_data(records_of(TABLES[kind](), Y))
    other = X.clone()
    other[2, 0] = 61.803
    with pytest.raises(ModelError, match="'x' has other values") as caught:
        records.require_same_data(records_of(other, Y))
    assert "61.8" not in str(caught.value)


def test_a_tensor_dataset_is_its_tensors():
    x = X.double()
    records = records_of(TensorDataset(x, Y))
    assert records.same_as((TensorDataset(x, Y),), {}) and records.same_as((x, Y), {})
    x += 1
    assert not records.same_as((TensorDataset(x, Y),), {})
    with pytest.raises(ModelError, match="'x' was overwritten"):
        records.require_same_data(records_of(x, Y))


def test_tensors_of_another_dtype_that_change():
    """The run has a copy, and sees that the tensor is another one now."""
    x = X.float()
    records = records_of(x, Y)
    x += 1
    assert not records.same_as((x, Y), {})
    with pytest.raises(ModelError, match="'x' has other values"):
        records.require_same_data(records_of(x, Y))


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "change"),
    [
        (X.numpy().copy(), lambda x: x.fill(9.0)),
        (frame(), lambda x: x.iloc.__setitem__((slice(None), 0), 9.0)),
        (X.tolist(), lambda x: x.__setitem__(0, [9.0, 9.0])),
        (items(lambda i: X[i]), lambda x: setattr(x, "make", None)),
    ],
)
def test_what_is_copied_may_change(given, change):
    """The run continues with its first arguments."""
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic))
    svi.step(given, Y)
    before = [torch.cat(list(column.blocks())) for column in svi._kept._first.columns]
    change(given)
    svi.step(given, Y)
    after = [torch.cat(list(column.blocks())) for column in svi._kept.prepared.records.columns]
    assert all(map(torch.equal, before, after))
    assert svi._kept._first is svi._kept.prepared.records


def test_leaves_of_the_given():
    """A list of rows is one leaf, also where it is long."""
    leaves, _ = flattened((X.tolist(), {"y": Y.tolist()}, [1, 2]), {"c": 3})
    assert len(leaves) == 5 and leaves[-3:] == [1, 2, 3]


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.float])
def test_captured_data_that_were_converted(convert):
    """The captured data may lie in other memory than the converted ones."""
    x, labels = regression_data(4)[0], convert(Y.double())
    hidden = labels[None]

    def peeks(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)) as idx:
            shift = float(hidden[0][0])
            pyro.sample("y", dist.Normal(x[idx] @ w + shift, 1.0), obs=y[idx])

    with pytest.raises(ModelError, match="'hidden'.*part of.*the data"):
        attempt(peeks, x, labels)


# Every inference


def attempt(model, *data, cls=DPSVI, **settings):
    settings = {"accountant": PrivacyAccountant(), "noise": 1.0} | settings
    inference = cls(model, AutoNormal(model), **settings)
    inference.step(*data)
    return inference


def people(size=40):
    torch.manual_seed(1)
    x = torch.randn(size, 3)
    return x, (x.sum(1) > 0).long()


FORMS = {
    "arrays": lambda x, y: (x.numpy(), y.numpy().astype("i4")),
    "frames": lambda x, y: (pd.DataFrame(x.numpy()), pd.Series(y.numpy(), dtype="Int64")),
    "lists": lambda x, y: (x.tolist(), y.bool().tolist()),
    "dataset": lambda x, y: (TensorDataset(x, y),),
    "items": lambda x, y: (Subset(TensorDataset(x, y), range(len(x))),),
}


def vips(model, guide, **settings):
    return VIPS(LogisticRegression(dim=3), num_steps=1, **settings)


class Sums(LogisticRegression):
    """A user's own."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make", [DPSVI, DPSEP, vips, lambda model, guide, **kw: VIPS(Sums(dim=3), num_steps=1, **kw)]
)
def test_every_inference_takes_every_form(make, form):
    """The released numbers are those for tensors of the default dtype."""
    x, y = people()
    losses = []
    for data in ((x, y.double()), FORMS[form](x, y)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        settings = dict(accountant=PrivacyAccountant(), noise=Noise(1.0, source=0))
        inference = make(logistic, AutoNormal(logistic), **settings)
        inference.step(*data)
        state = inference.state_dict()
        losses.append([x for x in pytree_tensors(state) if x.numel()])
    assert len(losses[0]) == len(losses[1]) > 0
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other)


def pytree_tensors(state):
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# Numbers of different dtypes


def counts(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Poisson((0.1 * x[idx] @ w).exp()), obs=y[idx])


def classes(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        score = x[idx] @ w
        logits = torch.stack([score, -score], dim=-1)
        pyro.sample("y", dist.Categorical(logits=logits), obs=y[idx])


@pytest.mark.slow
@pytest.mark.one_in(20)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("labels", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("features", [torch.int64, torch.float64])
@pytest.mark.parametrize("model", [logistic, logistic_whole, counts, classes, linear])
def test_dtypes_of_features_and_labels(model, features, labels, default):
    torch.set_default_dtype(default)
    x = torch.arange(60).remainder(5).reshape(20, 3)
    y = torch.arange(20).remainder(2)
    execution, steps = Execution(slice_data=model is logistic_whole), []
    for data in ((x.to(default), y.to(default)), (x.to(features), y.to(labels))):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = attempt(model, *data, noise=Noise(1.0, source=0), execution=execution)
        steps.append(svi.state_dict()["parameters"])
    for name, one in steps[0].items():
        assert steps[1][name].dtype == default
        torch.testing.assert_close(one, steps[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("jit", ["trace", "none"])
@pytest.mark.parametrize("labels", [torch.int64, torch.bool])
def test_integer_labels_in_graphs_and_sites(labels, jit):
    x, y = people()
    attempt(logistic, x, y.to(labels), execution=Execution(jit=jit))
    pyro.clear_param_store()
    attempt(logistic, x, y.to(labels), execution=Execution(jit=jit), cls=DPSEP)
