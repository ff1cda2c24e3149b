"""``python -m pyro_dp synthesize``: what it writes, how it fails, and that it shows no value."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pyro_dp import PrivacyAccountant
from pyro_dp import __main__ as front
from pyro_dp.tabular import Binary, Category, Count, Date, Number, Schema, command_line
from pyro_dp.tabular.command_line import read_csv
from pyro_dp.utils.errors import SchemaError

SECRET = "Zweifelhoff-4711"
COLUMNS = {
    "age": Number(0, 100, bins=5, missing=True),
    "sex": Category(("m", "f", ""), other=True),
    "visits": Count(0, 3),
    "born": Date("1950-01-01", "2010-01-01", bins=4),
    "smokes": Binary(),
    "region": Category((1, 2), other=True),
}
LINES = [
    "visits,age,sex,born,smokes,region",
    "1,42.5,m,1960-06-24,True,1",
    "0,,f,1999-12-31,false,2.0",
    f"3,{SECRET},,2000-02-29,0,{SECRET}",
    "9,250,x,1901-01-01,1,NA",
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A schema, a small file of data, and what an office would type."""
    monkeypatch.chdir(tmp_path)
    Schema(COLUMNS).save("schema.json")
    (tmp_path / "data.csv").write_text("\n".join([LINES[0]] + LINES[1:] * 20))
    return "synthesize schema.json data.csv --epsilon 1 --output twin.csv".split()


@pytest.mark.long
def test_from_a_file_to_a_twin_and_a_report(files, capsys):
    """Names, dtypes and order of the schema; the ledger and the report have the one release."""
    more = "--rows 50 --report report.html --journal ledger --keep sex --controller Office".split()
    assert front.main([*files, *more]) == 0
    twin = read_csv("twin.csv", Schema(COLUMNS))
    assert list(twin) == list(COLUMNS) and len(twin) == 50
    Schema(COLUMNS).encode(twin)
    accountant = PrivacyAccountant(1.0)
    accountant.journal("ledger").close()
    assert accountant.num_releases == 1 and 0.99 < accountant.get_epsilon() <= 1.0
    assert accountant.description.dataset == "data.csv"
    with open("report.html", encoding="utf-8") as file:
        page = file.read()
    assert "<dd>Office</dd>" in page and "<title>Privacy report: Synthetic rows of data" in page
    printed = capsys.readouterr()
    assert "50 synthetic rows, epsilon = " in printed.out
    assert SECRET not in printed.out + printed.err + page
    # The ledger goes on: nothing is left, and the twin stays.
    before = os.stat("twin.csv").st_mtime_ns
    assert front.main([*files, "--journal", "ledger"]) == command_line.NO_BUDGET
    assert "remains of the budget" in capsys.readouterr().err
    assert os.stat("twin.csv").st_mtime_ns == before


@pytest.mark.long
def test_released_counts_in_a_file(files):
    """They are counts of columns and pairs, as released, with intervals that hold the truth."""
    assert front.main([*files, "--margins", "margins.csv", "--epsilon", "1000"]) == 0
    found = pd.read_csv("margins.csv", keep_default_na=False)
    assert (found["lower"] <= found["upper"]).all()
    schema = Schema(COLUMNS)
    codes = schema.codes(read_csv("data.csv", schema))
    ones = found[found["column_2"] == ""]
    assert list(ones["column_1"].unique()) == schema.names
    assert len(found[["column_1", "column_2"]].drop_duplicates()) == 6 + 15
    for place, name in enumerate(schema.names):
        own = ones[ones["column_1"] == name]
        assert list(own["value_1"]) == schema.columns[name].code_labels
        exact = np.bincount(codes[:, place], minlength=schema.sizes[place])
        np.testing.assert_allclose(own["count"].astype(float), exact, atol=3.0)  # noise of 0.2
    both = found[(found["column_1"] == "sex") & (found["column_2"] == "visits")]
    exact = np.zeros((4, 4))
    np.add.at(exact, (codes[:, 1], codes[:, 2]), 1)
    np.testing.assert_allclose(both["count"].astype(float), exact.flatten(), atol=3.0)


def written(unit):
    """With a unit: its column, of two rows each, in schema and data."""
    if unit is not None:
        Schema(COLUMNS, unit=unit, max_rows=2).save("schema.json")
        head, *lines = Path("data.csv").read_text().splitlines()
        rows = [f"{number // 2},{line}" for number, line in enumerate(lines)]
        Path("data.csv").write_text("\n".join([f"{unit},{head}", *rows]))


def described():
    """The description in the journal."""
    again = PrivacyAccountant(1.0)
    again.journal("ledger").close()
    return again.description


@pytest.mark.long
@pytest.mark.parametrize("unit", [None, "person"])
def test_a_report_has_all_that_an_officer_asks_for(files, unit):
    written(unit)
    protected = "a row" if unit is None else "all rows with the same person, and only the first 2"
    more = ["--title", "T", "--dataset", "D", "--purpose", "P", "--controller", "C"]
    more += ["--unit", "an adult", "--report", "report.md", "--journal", "ledger"]
    assert front.main([*files, *more]) == command_line.DONE
    said = described()
    assert (said.title, said.dataset, said.purpose, said.controller) == ("T", "D", "P", "C")
    assert said.units == (80 if unit is None else 40)
    assert said.unit.startswith(f"an adult ({protected}")
    assert "not stated" not in Path("report.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("unit", [None, "person"])
def test_what_a_journal_says_already_stands(files, unit):
    """Only the unit is left out, if the schema has none."""
    written(unit)
    accountant = PrivacyAccountant(epsilon=1.0)
    journal = accountant.journal("ledger")
    accountant.describe(dataset="the register", unit="a person", purpose="teaching")
    journal.close()
    more = ["--journal", "ledger", "--report", "report.html", "--purpose", "a test"]
    assert front.main([*files, *more]) == command_line.DONE
    said = described()
    assert (said.dataset, said.purpose) == ("the register", "a test")
    assert said.unit == ("a row" if unit is None else "a person")


@pytest.mark.slow
def test_a_seed_repeats_a_run(files, tmp_path):
    def twin(*more):
        assert front.main([*files, "--rows", "20", *more]) == 0
        return (tmp_path / "twin.csv").read_text()

    assert twin("--seed", "3") == twin("--seed", "3") != twin("--seed", "4")


def test_cells_are_what_columns_declare(files):
    frame = read_csv("data.csv", Schema(COLUMNS)).head(4)
    assert frame["age"].isna().tolist() == [False, True, True, False]
    assert frame["sex"].tolist() == ["m", "f", "", "x"]
    assert frame["smokes"].tolist() == [True, False, False, True]
    assert frame["region"].tolist() == [1, 2, SECRET, "NA"]
    codes = Schema(COLUMNS).codes(frame)
    assert codes[:, list(COLUMNS).index("sex")].tolist() == [0, 1, 2, 3]
    assert codes[:, list(COLUMNS).index("region")].tolist() == [0, 1, 2, 2]
    assert codes[:, list(COLUMNS).index("age")].tolist() == [2, 5, 5, 4]


@pytest.mark.parametrize(
    ("time", "day"),
    [
        ("1960-01-02", "1960-01-02"),
        ("1960/1/2", "1960-01-02"),
        ("19600102T0930", "1960-01-02"),
        ("1960-01-02T00:00:00.123456789", "1960-01-02"),
        ("1960-01-02 23:30:00,5+09:00", "1960-01-02"),
        ("1960-01-02T00:30Z", "1960-01-02"),
        ("1960-01", "1960-01-01"),
        *((text, None) for text in ("1960-02-30", "1960-01-02T25:00", "1960-01-02x", "now")),
    ],
)
def test_a_date_does_not_depend_on_how_another_is_written(tmp_path, time, day):
    """A time with nanoseconds must not turn other people's far dates into missing ones."""
    schema = Schema({"born": Date("1900-01-01", "2000-12-31", missing=True)})
    (tmp_path / "dates.csv").write_text(f'born\n9999-12-31\n"{time}"\n0001-01-01\n')
    found = read_csv(tmp_path / "dates.csv", schema)["born"].dt.strftime("%Y-%m-%d")
    assert found.fillna("").tolist() == ["9999-12-31", day or "", "0001-01-01"]
    assert schema.codes(read_csv(tmp_path / "dates.csv", schema))[[0, 2], 0].tolist() == [19, 0]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([LINES[0], f"{SECRET},1,m,1960-01-01,True,1"], "'visits' holds text"),
        ([LINES[0], f"1,1,m,{SECRET},True,1"], "'born' holds text"),
        ([LINES[0], f"1,1,m,1960-01-01,{SECRET},1"], "'smokes'"),
        ([LINES[0], ",1,m,1960-01-01,True,1"], "'visits' has missing values"),
        ([LINES[0] + f",{SECRET}", "1,1,m,1960-01-01,True,1,2"], "the schema lacks"),
        ([LINES[0].replace("age", SECRET), LINES[1]], "lacks column 'age'"),
        ([LINES[0]], "no rows"),
        ([], "cannot be read as CSV"),
        ([LINES[0], LINES[1] + f',"{SECRET}'], "cannot be read as CSV"),
        ([b"\xff\xfe" + SECRET.encode()], "cannot be read as CSV"),
    ],
)
def test_bad_data(files, tmp_path, capsys, lines, named):
    """It ends with exit code 2, before anything is spent or written, and prints no value."""
    text = b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines)
    (tmp_path / "data.csv").write_bytes(text)
    assert front.main([*files, "--journal", "ledger"]) == command_line.WRONG
    printed = capsys.readouterr()
    assert named in printed.err and SECRET not in printed.err + printed.out
    assert not os.path.exists("twin.csv") and not os.path.exists("ledger")


def test_a_person_without_a_number(files, tmp_path):
    schema = Schema({"visits": Count(0, 3)}, unit="id", max_rows=2)
    (tmp_path / "data.csv").write_text("id,visits\na,1\n,2\n")
    with pytest.raises(SchemaError, match="id"):
        schema.encode(read_csv(tmp_path / "data.csv", schema))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--epsilon much", "--epsilon"),
        ("--rows 0", "--rows"),
        ("--rows x", "--rows"),
        ("--seed -1", "--seed"),
        ("--output .", "is a folder"),
        ("--output nowhere/twin.csv", "there is no folder"),
        ("--report report.docx", ".html or .md"),
        ("--output data.csv", "must be others"),
        ("--report twin.html --journal twin.html", "must be others"),
        ("--output schema.json", "must be others"),
    ],
)
def test_bad_arguments(files, capsys, arguments, named):
    with pytest.raises(SystemExit) as stopped:
        front.main([*files, *arguments.split()])
    assert stopped.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--epsilon -1", "epsilon"),
        ("--delta 2", "delta"),
        ("--keep height", "it has"),
        ("", "not a schema"),
    ],
)
def test_settings_that_are_refused(files, capsys, arguments, named):
    if not arguments:
        Path("schema.json").write_text("[]")
    assert front.main([*files, *arguments.split()]) == command_line.WRONG
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "error", "named"),
    [
        ("read_csv", RuntimeError(f"a value: {SECRET}"), "RuntimeError"),
        ("write_text", OSError(errno.ENOSPC, "No space left", "twin.csv"), "twin.csv: No space"),
    ],
)
def test_whatever_fails_shows_no_text(files, capsys, monkeypatch, step, error, named):
    def fail(*args):
        raise error

    monkeypatch.setattr(command_line, step, fail)
    assert front.main(files) == command_line.FAILED
    printed = capsys.readouterr().err
    assert named in printed and SECRET not in printed


@pytest.mark.slow
def test_a_process_of_its_own(files):
    """Its exit code is the command's; without a terminal there is no bar."""
    command = [sys.executable, "-m", "pyro_dp", *files, "--rows", "-1"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "--rows" in found.stderr


def test_without_pandas(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("pyro_dp.tabular")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert front.main(["synthesize"]) == 1
    assert "pyro-dp[tabular]" in capsys.readouterr().err


def test_frames_of_pandas_come_back(files):
    """A frame that was written by pandas is read as what it was."""
    rng, schema = np.random.default_rng(0), Schema(COLUMNS)
    codes = np.stack([rng.integers(size, size=30) for size in schema.sizes], axis=1)
    frame = schema.from_codes(codes, rng)
    frame.to_csv("frame.csv", index=False)
    assert (schema.codes(read_csv("frame.csv", schema)) == schema.codes(frame)).all()
    assert isinstance(frame, pd.DataFrame)
