"""Data that need not fit into memory: columns, their sources, and runs on them."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import logistic, logistic_whole, new_paper_dpsvi
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import pyro_dp
from pyro_dp import DPSEP, VIPS, Execution, ModelError, Noise, PrivacyAccountant
from pyro_dp.records import column, stand_ins
from pyro_dp.records.arguments import as_tensors
from pyro_dp.records.column import ArrayColumn, Column, TensorColumn
from pyro_dp.records.data_numbers import DataNumbers
from pyro_dp.records.tables import as_tensor
from pyro_dp.vips import GaussianMixture, LogisticRegression

N = 500
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).double()
INDICES = [torch.tensor(i) for i in ([], [0], [N - 1], [3, 4, 5], [0, 7, 8, 123, 130, 499])]
INDICES = [each.long() for each in INDICES] + [torch.arange(N), torch.arange(0, N, 3)]


class Items(Dataset):
    def __init__(self, make, size=N):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.make(i)


def sources(path):
    """The same x and y, from everything that there is; of numbers by a list of names."""
    np.save(path / "x.npy", X.numpy())
    np.save(path / "y.npy", Y.numpy())
    mapped = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}
    yield mapped, "x"
    X.float().numpy().tofile(path / "x.bin")
    floats = torch.from_file(str(path / "x.bin"), size=3 * N, dtype=torch.float32).reshape(N, 3)
    yield {"x": floats, "y": Y.bool()}, "x"
    yield {"x": X.tolist(), "y": pd.Series(Y.numpy())}, "x"
    fields = [("y", "<f8"), ("x", "<f4", 3)]
    structured = np.zeros(N, fields)
    structured["x"], structured["y"] = X.numpy(), Y.numpy()
    np.save(path / "both.npy", structured)
    yield path / "both.npy", "x"
    yield {"y": Y} | {f"x{j}": X[:, j].numpy() for j in range(3)}, ["x0", "x1", "x2"]
    yield TensorDataset(X, Y), "x"
    yield Items(lambda i: {"y": Y[i].item(), "more": 1, "x": X[i].numpy()}), "x"


def require_rows(source, name):
    """Columns x, under this name, and y have the rows of X and Y, for every kind of read."""
    x, y = pyro_dp.columns(source, name, "y")
    assert (x.row_shape, y.row_shape, len(x), len(y)) == ((3,), (), N, N)
    assert x.dtype == x.take(torch.arange(2)).dtype == torch.float64
    single = torch.equal(x.take(torch.tensor([0])), X[:1].float().double())
    wanted = X.float().double() if single else X
    for indices in (*INDICES, *INDICES[::-1]):
        assert torch.equal(x.take(indices), wanted[indices])
        assert torch.equal(y.take(indices).double(), Y[indices])
    blocks = list(x.blocks())
    assert torch.equal(torch.cat(blocks), wanted) and len(blocks) == 16
    x.take(torch.arange(5)).zero_()  # what is read is a copy
    assert torch.equal(x.take(torch.arange(5)), wanted[:5])


@pytest.mark.long
def test_every_source_has_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(column, "_BLOCK", 100)
    for source, name in sources(tmp_path):
        require_rows(source, name)


def test_one_array_is_one_column(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    for source in (X, X.numpy(), np.load(tmp_path / "x.npy", mmap_mode="r"), tmp_path / "x.npy"):
        x = pyro_dp.columns(source)
        assert isinstance(x, Column) and torch.equal(x.take(torch.arange(N)), X)
    assert repr(x) == f"ArrayColumn(shape=({N}, 3), dtype=torch.float64)"
    assert isinstance(pyro_dp.columns({"x": X}, "x"), Column)


class ScaledRows:
    """Indexing divides rows by the largest number among them."""

    def __getitem__(self, key):
        rows = super().__getitem__(key)
        return rows / abs(rows).max() if np.ndim(rows) == 2 else rows


class ScaledArray(ScaledRows, np.ndarray):
    pass


class ScaledMap(ScaledRows, np.memmap):
    pass


def test_an_array_of_ones_own_class_is_read_whole(tmp_path):
    """Otherwise one record of a batch would scale all others."""
    X.numpy().tofile(tmp_path / "x")
    mapped = ScaledMap(tmp_path / "x", dtype="f8", mode="r+", shape=(N, 3))
    assert torch.equal(as_tensor("x", mapped), X)
    for array in (mapped, X.numpy().view(ScaledArray)):
        x = pyro_dp.columns({"x": array}, "x")
        assert torch.equal(x.take(torch.tensor([1, 4])), X[[1, 4]])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (np.arange(4, dtype=np.uint8), torch.int64),
        (np.arange(4, dtype=">i4"), torch.int64),
        (np.arange(4, dtype=">f4"), torch.float64),
        (np.ones(4, bool), torch.bool),
        (np.ones(4, np.float16), torch.float64),
        (torch.ones(4, dtype=torch.float32), torch.float64),
        (torch.ones(4, dtype=torch.uint8), torch.uint8),
    ],
)
def test_dtypes(given, found):
    x = pyro_dp.columns(given)
    rows = x.take(torch.tensor([1, 3]))
    assert x.dtype == rows.dtype == x.like.dtype == found
    assert rows.tolist() == torch.as_tensor(given.tolist())[[1, 3]].tolist()


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([1, 0], "ascending"),
        ([1, 1], "ascending"),
        ([-1], "beyond"),
        ([N], "beyond"),
        ([0.5], "ascending"),
    ],
)
def test_take_refuses(indices, says):
    with pytest.raises(ModelError, match=says):
        pyro_dp.columns(X).take(torch.tensor(indices))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


_EMPTY = type("Empty", (Dataset,), {"__len__": lambda _: 0, "__getitem__": lambda *_: 1})()


@pytest.mark.parametrize(
    ("source", "names", "says"),
    [
        (DataLoader(TensorDataset(X, Y)), ["x"], r"batches.*source\.dataset"),
        (
            DataLoader(TensorDataset(X), sampler=DistributedSampler(TensorDataset(X), 2, 0)),
            ["x"],
            "has a DistributedSampler, which repeats records",
        ),
        (DistributedSampler(TensorDataset(X), 2, 0), ["x"], "is a DistributedSampler, which"),
        (SequentialSampler(X), ["x"], "drawn privately"),
        (X, ["x"], "no named columns"),
        ({"x": X}, [], "say which columns.*'x'"),
        ({"x": X}, [3], "a name is a text"),
        ({"x": X}, [[]], "a name is a text"),
        ({"x": X, "y": Y[:3]}, ["x", "y"], "'x' has 500 rows, 'y' has 3"),
        ({"x": X, "y": Y}, [["x", "y"]], r"'x' of them has rows.*\(3,\)"),
        ({"x": torch.ones(())}, ["x"], "single number"),
        ({"x": np.array(["61.803"])}, ["x"], "'x' holds text"),
        ({"x": np.ma.masked_greater(X.numpy(), 1.0)}, ["x"], "masked"),
        (3, ["x"], "source is a int"),
        ("no/such/file", ["x"], "no file"),
        (TensorDataset(X, Y), ["x"], "has 2 parts, but the call names 1"),
        (Items(lambda i: {"x": 1}), ["y"], "no column 'y'"),
        (Items(lambda i: torch.ones(i % 2)), ["x"], "one shape"),
        (_EMPTY, ["x"], "without records"),
    ],
)
def test_sources_that_are_refused(source, names, says):
    with pytest.raises(ModelError, match=says) as caught:
        found = pyro_dp.columns(source, *names)
        list(found.blocks())
    assert "61.8" not in str(caught.value)


@pytest.mark.parametrize("first", [True, 3, torch.tensor(3, dtype=torch.uint8), X[0]])
def test_the_first_item_does_not_round_the_others(first):
    """Neither may a record's int cut the others' fractions, nor its shape change theirs."""
    x = pyro_dp.columns(Items(lambda i: X[i, 0] if i else first), "x")
    with pytest.raises(ModelError, match="for the curator only"):
        x.take(torch.arange(1, 9))


def test_items_are_functions_of_their_index():
    """Transforms draw the same in each step and with any other rows; nothing public moves."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    x = pyro_dp.columns(Items(lambda i: X[i] + torch.randn(3) + np.random.randn()), "x")
    alone = torch.cat([x.take(torch.tensor([i])) for i in (3, 9, 11)])
    assert torch.equal(x.take(torch.tensor([3, 9, 11])), alone)
    assert torch.equal(x.take(torch.arange(20))[[3, 9, 11]], alone)
    assert not torch.equal(alone[0] - X[3], alone[1] - X[9])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def augmented(labels):
    """Draws for some records alone, as for those of a rare class."""
    generator, rng = torch.Generator(), np.random.default_rng(0)
    old, own = np.random.RandomState(0), random.Random(0)

    def item(i):
        if not labels[i]:
            return X[i], 0.0
        numbers = [rng.normal(), old.rand(), own.random(), np.random.rand(), random.random()]
        return X[i] + torch.randn(3) + torch.randn(3, generator=generator) + sum(numbers), 1.0

    return Items(item, len(labels))


def read_columns(data, count, *names):
    found = pyro_dp.columns(data, *names)
    return (found[0] if len(names) > 1 else found).take(torch.arange(count))


def read_whole(data, count, *names):
    ((x, *_), _) = as_tensors(lambda *data: None, (data,), {})
    return x


@pytest.mark.parametrize("read", [read_columns, read_whole])
def test_no_record_moves_what_transforms_draw_for_others(read):
    found = []
    for third in (False, True):
        pyro.set_rng_seed(0)
        found.append(read(augmented([True, False, third, True, True]), 5, "x", "y"))
    assert torch.equal(found[0][[0, 1, 3, 4]], found[1][[0, 1, 3, 4]])
    assert not torch.equal(found[0][3] - X[3], found[0][4] - X[4])


@pytest.mark.parametrize("read", [read_columns, read_whole])
def test_a_dataset_that_mixes_records_is_refused(read):
    seen = []

    def centred(i):
        """By the mean of all that was read so far."""
        seen.append(X[i])
        return X[i] - torch.stack(seen).mean(0)

    with pytest.raises(ModelError, match="first item of argument .* running mean"):
        read(Items(centred, 5), 5, "x")


# Runs.

SETTINGS = {"noise": Noise(1.0, source=0), "execution": Execution(64)}


def dpsvi(model, *data):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(model)
    svi = new_paper_dpsvi(model, guide, num_steps=3, sampling=0.3, **SETTINGS)
    svi.run(*data, progress=False)
    return torch.cat([x.detach().flatten() for x in guide.parameters()])


def dpsep(model, *data):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    accountant, guide = PrivacyAccountant(), AutoNormal(model)
    sep = DPSEP(model, guide, accountant=accountant, noise=Noise(1.0, source=0))
    for _ in range(2):
        sep.step(*data)
    return torch.cat([x.detach().flatten() for x in guide.parameters()])


def vips(_, *data):
    pyro.set_rng_seed(0)
    accountant = PrivacyAccountant()
    run = VIPS(LogisticRegression(3), accountant=accountant, num_steps=2, **SETTINGS)
    run.run(*data, progress=False)
    return run.posterior()["weights"].mean


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic, logistic_whole])
@pytest.mark.parametrize("fit", [dpsvi, dpsep, vips])
def test_runs_are_those_of_tensors(fit, model, tmp_path):
    """To the last bit, whatever the data lie in."""
    expected = fit(model, X, Y)
    np.save(tmp_path / "x.npy", X.numpy())
    np.save(tmp_path / "y.npy", Y.bool().numpy())
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r+") for name in ("x", "y")]
    labels = pyro_dp.columns(Y.numpy())
    for data in ((mapped[0], labels), (pyro_dp.columns(TensorDataset(X, Y), "x", "y")[0], Y)):
        assert torch.equal(fit(model, *data), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic, logistic_whole])
@pytest.mark.parametrize("fit", [dpsvi, dpsep])
def test_checks_on_few_placeholders(fit, model, monkeypatch):
    """If all N would take much memory, a few stand for them, and nothing else changes."""
    expected = fit(model, X, Y)
    monkeypatch.setattr(stand_ins, "_MOST_PLACEHOLDERS", 50)
    assert torch.equal(fit(model, X, Y), expected)
    assert stand_ins.rows_shown(N, 4) == 11


@pytest.mark.slow
def test_what_has_a_row_per_record_is_shown_all(monkeypatch):
    """Latents, parameters and declared batches have many records; other values have few."""

    def model(x, y):
        loc = pyro.param("loc", lambda: torch.zeros(len(x)))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x), subsample_size=len(x) // 5) as i:
            pyro.sample("y", dist.Normal(w + loc[i], 1.0), obs=x[i, 0])

    def guide(x, y):
        start = pyro.param("start", lambda: torch.tensor(1.0 / len(x)))
        pyro.sample("w", dist.Normal(start, 1.0))

    found = []
    for most in (2**20, 50):
        monkeypatch.setattr(stand_ins, "_MOST_PLACEHOLDERS", most)
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = new_paper_dpsvi(model, guide, noise=Noise(1.0, source=0), num_steps=1)
        svi.run(X, Y, progress=False)
        store = pyro.get_param_store()
        found.append({name: store[name].detach().clone() for name in ("loc", "start")})
        assert svi._kept.prepared.sampler.sample_rate == 0.2
        assert svi._kept.prepared.records.plate.size == N
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("loc", "start"))
    assert len(found[0]["loc"]) == N


@pytest.mark.long
@pytest.mark.parametrize("fit", [dpsvi, dpsep, vips])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, y: x[300].fill_(torch.nan), "'x' holds NaN"),
        (lambda x, y: y[301].fill_(2.0), "curator"),
    ],
)
def test_every_record_is_checked(fit, change, says, monkeypatch):
    """A bad record is found in any block, before anything is spent."""
    monkeypatch.setattr(column, "_BLOCK", 400)
    x, y = X.clone(), Y.clone()
    change(x, y)
    with pytest.raises(ModelError, match=says):
        fit(logistic, pyro_dp.columns(x.numpy()), y)


def test_a_user_check_sees_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(column, "_BLOCK", 400)
    path = str(tmp_path / "seen")

    class Watched(LogisticRegression):
        def check(self, *data):
            with open(path, "a") as file:
                file.write(f"{len(data[0])} ")
            super().check(*data)

    run = VIPS(Watched(3), accountant=PrivacyAccountant(), num_steps=1, noise=1.0)
    run.run(pyro_dp.columns(X.numpy()), Y, progress=False)
    assert Path(path).read_text() == "100 " * 5


def test_captured_columns_are_refused():
    """A column that the model holds, and numbers of one that is read in parts."""
    x = pyro_dp.columns(X.numpy())
    array, mean = ArrayColumn(X.numpy()), X.mean(0)

    def holds(x, y):
        array  # noqa: B018
        logistic(x, y)

    def starts(x, y):
        pyro.sample("v", dist.Normal(mean, 1.0).to_event(1))
        logistic(x, y)

    for model, says in ((holds, "'array'.*500 rows"), (starts, "'mean'.*means")):
        with pytest.raises(ModelError, match=says):
            new_paper_dpsvi(model, AutoNormal(model)).step(x, Y)


@pytest.mark.slow
def test_other_data_later(tmp_path):
    """Columns that are made anew are the same data; others are refused."""
    pyro.clear_param_store()
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic))
    svi.step(pyro_dp.columns(X.numpy()), Y)
    svi.step(pyro_dp.columns(X.numpy()), Y)
    with pytest.raises(ModelError, match="'x' has other values"):
        svi.step(pyro_dp.columns(X.numpy() + 1.0), Y)


@pytest.mark.long
def test_predictions_on_columns(tmp_path):
    pyro.clear_param_store()
    svi = new_paper_dpsvi(logistic, AutoNormal(logistic))
    svi.step(pyro_dp.columns(X.numpy()), Y)
    predictive = svi.predictive(num_samples=3)
    assert predictive(pyro_dp.columns(X[:7].numpy() + 1.0))["y"].shape == (3, 7)
    with pytest.warns(pyro_dp.NotPrivateWarning):
        predictive(X[:7])


def test_mixtures_of_a_column():
    """A model with one argument."""
    model = GaussianMixture(2, 3, radius=5.0)
    run = VIPS(model, accountant=PrivacyAccountant(), num_steps=1, noise=1.0)
    run.run(pyro_dp.columns(X.numpy()), progress=False)


_LIMITED = """
    import resource, sys, threading
    import numpy as np, pyro, pyro.distributions as dist, torch
    from pyro.infer.autoguide import AutoNormal
    from pyro_dp import DPSEP, DPSVI, VIPS, Execution, PaperDPSEP, PrivacyAccountant
    from pyro_dp.vips import LogisticRegression
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(x)) as i:
            pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    def whole(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def run(make, x, y, steps):
        own = {"accountant": PrivacyAccountant(delta=1e-9), "noise": 1.0}
        if steps is None:  # DPSEP: the opening, and a look
            run = make(own)
            run.step(x, y)
            run.step(x, y)
        else:
            make(own | {"num_steps": steps}).run(x, y, progress=False)

    def used():
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024

    METHODS = {
        "dpsep": (
            lambda own: DPSEP(
                model, AutoNormal(model), execution=Execution(microbatch_size=2000), **own
            ),
            None,
        ),
        "vips": (lambda own: VIPS(LogisticRegression(20), **own), 1),
        "dpsvi": (lambda own: DPSVI(model, AutoNormal(model), sampling=1e-3, **own), 5),
    }
    def many():
        # The same row of zeros very often: a list of all indices would take 64 MB.
        few = torch.zeros(2, 1)
        x, y = few[:1].expand(8_000_000, 1), few[0].expand(8_000_000)
        rare = {"sampling": 1e-4}
        for make in (
            lambda own: DPSVI(model, AutoNormal(model), **rare, **own),
            lambda own: DPSVI(whole, AutoNormal(whole), **rare, **own),
            lambda own: PaperDPSEP(
                whole, AutoNormal(whole), clip=1.0, **rare, **own
            ),
            lambda own: VIPS(LogisticRegression(1), **rare, **own),
        ):
            pyro.clear_param_store()
            yield make, few, few[:, 0], x, y, 1

    def mapped(method, path):
        make, steps = METHODS[method]
        x, y = (np.load(f"{path}/{name}.npy", mmap_mode="r") for name in "xy")
        yield make, x[:2000].copy(), y[:2000].copy(), x, y, steps

    method, path = sys.argv[1:]
    for make, *few, x, y, steps in many() if method == "many" else mapped(method, path):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        run(make, *few, steps)  # whatever is made once
        pyro.clear_param_store()
        resource.setrlimit(resource.RLIMIT_DATA, (used() + 2**20 * 56, limit))
        run(make, x, y, steps)
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpsep", "many", "vips", "dpsvi"])
def test_memory(tmp_path, method):
    """72 MB of features and labels, mapped, with 56 MB to run in, checks included."""
    size = 450_000
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (size, 20))
    for start in range(0, size, 50_000):
        x[start : start + 50_000] = np.random.default_rng(start).normal(size=(50_000, 20))
    x.flush()
    np.save(tmp_path / "y.npy", x[:, 0] > 0)
    root = Path(pyro_dp.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_LIMITED), method, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=1200,
    )
    assert found.stdout == "done\n", found.stderr


def test_wide_rows_beside_many_weights():
    """One number may match by chance. Hundreds do not."""
    rows = torch.rand(50, 784)
    numbers = DataNumbers([TensorColumn(rows.float(), torch.float32)])
    torch.manual_seed(1)
    assert numbers.found_in(torch.rand(500_000, dtype=torch.float32)) is None
    assert numbers.found_in(torch.rand(400, 784, dtype=torch.float32)) is None
    assert numbers.found_in(rows[3:5].float()) == "rows"
