"""Columns of Arrow tables and Parquet files."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_columns import N, X, Y, require_rows

import pyro_dp
from pyro_dp import ModelError
from pyro_dp.infer.padded_sum import padded_batch
from pyro_dp.records import column
from pyro_dp.records.records import Records

NUMBERS = ["x0", "x1", "x2"]


def arrow_table():
    lists = pa.FixedSizeListArray.from_arrays(pa.array(X.flatten().numpy()), 3)
    columns = {"x": lists, "y": pa.array(Y.numpy())}
    return pa.table(columns | {f"x{j}": pa.array(X[:, j].numpy()) for j in range(3)})


def sources(path):
    table = arrow_table()
    yield table, "x"
    yield pa.concat_tables([table.slice(0, 100), table.slice(100, 1), table.slice(101)]), "x"
    yield table, NUMBERS
    with pa.ipc.new_file(path / "x.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=60)
    yield pa.ipc.open_file(pa.memory_map(str(path / "x.arrow"))).read_all(), "x"
    pq.write_table(table, path / "data.parquet", row_group_size=77)
    yield str(path / "data.parquet"), "x"
    yield path / "data.parquet", NUMBERS
    (path / "parts").mkdir()
    for i, rows in enumerate((table.slice(0, 130), table.slice(130, 0), table.slice(130))):
        pq.write_table(rows, path / "parts" / f"{i}.parquet", row_group_size=50)
    yield path / "parts", "x"


@pytest.mark.long
def test_every_source_has_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(column, "_BLOCK", 100)
    for source, name in sources(tmp_path):
        require_rows(source, name)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (pa.array([1, 2], pa.int8()), torch.int64),
        (pa.array([True, False]), torch.bool),
        (pa.array([1.0, 2.0], pa.float16()), torch.float64),
    ],
)
def test_dtypes(given, found):
    x = pyro_dp.columns(pa.table({"x": given, "z": [1.0, 2.0]}), "x")
    assert x.dtype == x.take(torch.arange(2)).dtype == found
    both = pyro_dp.columns(pa.table({"x": given, "z": [1.0, 2.0]}), ["x", "z"])
    assert both.take(torch.arange(2)).dtype == torch.float64


@pytest.mark.parametrize(
    ("source", "names", "says"),
    [
        (pa.table({"x": pa.array(["61.803"] * 4)}), ["x"], "'x' holds text"),
        (pa.table({"x": pa.array([[1.0], [1.0, 2.0]])}), ["x"], "'x' holds lists.*pad"),
        (pa.table({"x": pa.array([1, None, 3])}), ["x"], "'x' of integers.*missing"),
        (pa.table({"x": pa.array([1.0, 2.0])}), ["y"], "no column 'y'"),
        (
            pa.table({"x": pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1))}),
            [["x"]],
            "one number",
        ),
        (pa.table({"x": pa.array([[1.0], None], pa.list_(pa.float64(), 1))}), ["x"], "missing"),
    ],
)
def test_sources_that_are_refused(source, names, says):
    with pytest.raises(ModelError, match=says) as caught:
        list(pyro_dp.columns(source, *names).blocks())
    assert "61.8" not in str(caught.value)


def test_files_that_are_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("61.803")
    with pytest.raises(ModelError, match=r"'x\.parquet' is no Parquet") as caught:
        pyro_dp.columns(tmp_path / "x.parquet", "x")
    assert "61.8" not in str(caught.value)
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(ModelError, match="no files"):
        pyro_dp.columns(tmp_path, "x")
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "2.parquet")
    with pytest.raises(ModelError, match=r"'2\.parquet' differs"):
        pyro_dp.columns(tmp_path, "x")


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModelError, match=r"pip install 'pyro-dp\[data\]'"):
        pyro_dp.columns(tmp_path, "x")


def test_missing_floats_are_nan_and_refused():
    x = pyro_dp.columns(pa.table({"x": pa.array([1.0, None])}), "x")
    assert x.take(torch.arange(2)).isnan().tolist() == [False, True]


def test_parquet_in_order_is_decoded_once(tmp_path, monkeypatch):
    """Ascending reads go on where the last one ended; a step back begins its row group anew."""
    pq.write_table(arrow_table(), tmp_path / "x.parquet", row_group_size=100)
    x = pyro_dp.columns(tmp_path / "x.parquet", "x")
    decoded, batches = [], x._files.batches

    def counted(group, names, size):
        decoded.append(group)
        return batches(group, names, size)

    monkeypatch.setattr(x._files, "batches", counted)
    for start in range(0, N, 30):
        x.take(torch.arange(start, min(start + 30, N)))
    assert decoded == [0, 1, 2, 3, 4]
    x.take(torch.tensor([5, 350]))
    assert decoded[5:] == [0, 3]


def test_an_interrupted_read_begins_anew(tmp_path, monkeypatch):
    """No batch is taken for another one."""
    monkeypatch.setattr(column, "_BLOCK", 30)
    pq.write_table(arrow_table(), tmp_path / "x.parquet", row_group_size=100)
    x = pyro_dp.columns(tmp_path / "x.parquet", "x")
    assert torch.equal(x.take(torch.arange(15)), X[:15])
    decode = x._rows_of

    def interrupted(batch):
        monkeypatch.setattr(x, "_rows_of", decode)
        raise KeyboardInterrupt

    monkeypatch.setattr(x, "_rows_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        x.take(torch.arange(15, 25))
    assert torch.equal(x.take(torch.arange(12, 31)), X[12:31])


def test_a_padded_batch_has_its_own_rows():
    """Its indices end with the first one, so they do not ascend."""
    table = arrow_table()
    parts = pa.concat_tables([table.slice(0, 100), table.slice(100)])
    records = SimpleNamespace(columns=[pyro_dp.columns(parts, "x")])
    records.rows = lambda *given, **options: Records.rows(records, *given, **options)
    term = SimpleNamespace(records=records, local=SimpleNamespace(rows=lambda _: {}))
    indices, rows = padded_batch(term, torch.tensor([1, 120]), 7)
    assert indices.tolist() == [1, 120, 1, 1, 1, 1, 1]
    assert torch.equal(rows, X[indices])
