"""``python -m pyro_dp synthesize``: make a synthetic file and a report from a CSV file.

Exit codes: 0 done; 1 failed, or could not write; 2 wrong arguments, schema or data; 3 over budget.
Codes 2 and 3 spend nothing.

No printed text shows a value of the data. But errors, failures and running time depend on the data.
Messages are for the curator.

The schema alone decides how a CSV file is read. An empty cell is missing, unless the empty text is
a declared level. Text in a column of numbers or dates is missing if the column allows missing
values, and is refused otherwise.
"""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.settings import Noise
from pyro_dp.tabular.column import Column
from pyro_dp.tabular.levels import LevelColumn, objects
from pyro_dp.tabular.ranges import Date
from pyro_dp.tabular.schema import Schema
from pyro_dp.tabular.synthesizer import Synthesizer, all_margins
from pyro_dp.utils.display import spent
from pyro_dp.utils.errors import (
    CURATOR,
    ConfigurationError,
    PrivacyBudgetExceeded,
    PrivacyError,
    SchemaError,
)
from pyro_dp.utils.files import writable, write_text

DONE, FAILED, WRONG, NO_BUDGET = range(4)
_STAGES = ("reading", "fitting", "drawing", "writing")
_DESCRIBED = ("title", "dataset", "purpose", "controller")
_FORMATS = {".html": "html", ".htm": "html", ".md": "markdown"}


def main(arguments: list[str]) -> int:
    """Run ``synthesize``, and return its exit code."""
    options = _parsed(arguments)
    try:
        return _run(options)
    except PrivacyBudgetExceeded as error:
        return _failed(error, NO_BUDGET)
    except PrivacyError as error:
        return _failed(error, WRONG)
    except OSError as error:
        return _failed(
            f"{error.filename or 'a file'}: {error.strerror or type(error).__name__}.", FAILED
        )
    except Exception as error:
        kind = type(error).__name__
        return _failed(f"It failed with {kind}, whose text stays hidden: it may hold data.", FAILED)


def _run(options: argparse.Namespace) -> int:
    progress = tqdm(total=len(_STAGES), unit="stage", disable=None)
    with progress as bar, ExitStack() as open_files:

        def begin(stage: str) -> None:
            bar.set_description(stage)
            bar.update(min(_STAGES.index(stage), 1))

        begin("reading")
        schema = Schema.load(options.schema)
        frame = read_csv(options.data, schema)
        codes = schema.codes(frame)  # faults are reported before a journal is made
        if options.keep not in (None, *schema.names):
            raise ConfigurationError(
                f"--keep {options.keep} is no column of the schema: it has "
                f"{', '.join(schema.names)}."
            )
        begin("fitting")
        accountant = PrivacyAccountant(options.epsilon, options.delta)
        if options.seed is None:
            torch.seed()  # for the rows, which are public; noise has another generator
        else:
            torch.manual_seed(options.seed)
        synthesizer = Synthesizer(
            schema,
            accountant=accountant,
            keep=[] if options.keep is None else [(options.keep, "*")],
            noise=Noise(source="system" if options.secure else options.seed),
        )
        if options.journal is not None:
            open_files.enter_context(accountant.journal(options.journal))
        stated = dict(accountant.description.stated())
        accountant.describe(**_description(options, schema, len(codes), stated))
        synthesizer.fit(frame)
        begin("drawing")
        rows = synthesizer.sample(options.rows)
        begin("writing")
        write_text(options.output, rows.to_csv(index=False, lineterminator="\n"))
        if options.report is not None:
            write_text(options.report, accountant.report(_FORMATS[options.report.suffix.lower()]))
        if options.margins is not None:
            released = all_margins(synthesizer)
            write_text(options.margins, released.to_csv(index=False, lineterminator="\n"))
        bar.update()
    epsilon = spent(accountant.get_epsilon(), options.epsilon)
    print(f"{options.output}: {len(rows):,} synthetic rows, epsilon = {epsilon}.")
    return DONE


def _description(
    options: argparse.Namespace, schema: Schema, units: int, stated: dict[str, Any]
) -> dict[str, Any]:
    """Entries of the report. The file's name and the number of units are public. Entries of an
    existing journal stay, unless the call replaces them."""
    unit, file = schema.protected, options.data.name
    default = {"title": f"Synthetic rows of {file}", "dataset": file, "unit": unit, "units": units}
    named = {name: getattr(options, name) for name in _DESCRIBED}
    found = default | stated | {name: text for name, text in named.items() if text is not None}
    if options.unit is not None:
        found["unit"] = f"{options.unit} ({unit})"
    elif schema.unit is None:  # rows are protected, even if a journal mentions persons
        found["unit"] = unit
    return found


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyro_dp synthesize",
        description="Synthetic rows with the margins of private ones, under differential privacy.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong arguments or data, 3 over the budget.",
    )
    add = parser.add_argument
    add("schema", type=_existing, help="JSON file of schema.save()")
    add("data", type=_existing, help="CSV file in UTF-8 with the names of its columns")
    add("--epsilon", type=float, required=True, help="privacy budget, in nats")
    add("--delta", type=float, default=1e-5, help="slack of probabilities (default: 1e-5)")
    add(
        "--rows",
        type=partial(_integer, least=1),
        help="how many to draw; with a unit column, units (default: as fitted)",
    )
    add("--output", type=writable, required=True, help="CSV file to write")
    add("--report", type=_report, help="report to write: .html or .md")
    add(
        "--margins",
        type=writable,
        help="CSV file for the released counts of columns and pairs, with 95%% intervals",
    )
    add("--keep", metavar="COLUMN", help="whose relations to all others matter most")
    add("--journal", type=writable, help="ledger of all that is released of these data")
    source = parser.add_mutually_exclusive_group().add_argument
    source("--secure", action="store_true", help="noise in integers, from the system's generator")
    source(
        "--seed",
        type=partial(_integer, least=0),
        help="repeat a run; no privacy if someone guesses the seed",
    )
    for name in _DESCRIBED:
        add(f"--{name}", metavar="TEXT", help=f"{name}, for the report")
    add("--unit", metavar="TEXT", help="the unit, for the report: such as a person")
    options = parser.parse_args(arguments)
    written = (options.output, options.report, options.margins, options.journal)
    files = [path.resolve() for path in (options.data, *written) if path]
    if options.schema.resolve() in files or len(set(files)) < len(files):
        parser.error("files to be written must be others than those that are read, and different.")
    return options


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}.")
    return path


def _report(text: str) -> Path:
    if Path(text).suffix.lower() not in _FORMATS:
        raise argparse.ArgumentTypeError("a report ends in .html or .md.")
    return writable(text)


def _integer(text: str, least: int) -> int:
    if not (text.isdecimal() and least <= int(text) < 2**53):
        raise argparse.ArgumentTypeError(f"this is no integer from {least}.")
    return int(text)


def _failed(what: object, code: int) -> int:
    print(f"synthesize: {what}", file=sys.stderr)
    return code


_TIME = r"(?:[01]\d|2[0-3])(?::?[0-5]\d(?::?[0-5]\d(?:[.,]\d+)?)?)?"
_ZONE = r"(?:Z|[+-]\d\d(?::?\d\d)?)"
_DATE = rf"^\s*(\d{{4}}(?:[-/]\d\d?(?:[-/]\d\d?)?|\d{{4}})?)(?:[T ]{_TIME}\s*{_ZONE}?)?\s*$"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read_csv(path: Path, schema: Schema) -> pd.DataFrame:
    """Read a CSV file as the schema declares it.

    :param path: a file in UTF-8, with commas, whose first line names the columns.
    :returns: the frame for ``schema``. Undeclared columns stay, and encoding refuses them.
    :raises SchemaError: the file cannot be read, or a column of numbers or dates holds other text.
    :raises OSError: there is no such file, or no permission.
    """
    try:
        frame = pd.read_csv(
            path, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False
        )
    except OSError:
        raise
    except Exception as error:  # its text may show a line
        raise SchemaError(
            f"The data cannot be read as CSV: pandas raised {type(error).__name__}. Save them in "
            f"UTF-8, with commas, and names of the columns in the first line. {CURATOR}"
        ) from None
    for name, column in schema.columns.items():
        if list(frame.columns).count(name) == 1:
            frame[name] = _typed(frame[name].astype(object), column, name)
    if schema.unit is not None and schema.unit in frame:
        frame[schema.unit] = frame[schema.unit].astype(object).replace("", None)
    return frame


def _typed(texts: pd.Series, column: Column, name: str) -> pd.Series:
    if isinstance(column, LevelColumn):
        return _levels(texts, column)
    filled = texts.str.strip() != ""
    if isinstance(column, Date):
        # Pandas uses the finest resolution for all times, and far dates would become missing.
        dates = texts.str.extract(_DATE, expand=False)
        read = pd.to_datetime(dates, format="ISO8601", errors="coerce")
    else:
        read = pd.to_numeric(texts.where(filled, "nan"), errors="coerce").astype("float64")
    if not column.missing and bool((filled & read.isna()).any()):
        wanted = "dates as 2026-12-31" if isinstance(column, Date) else "numbers"
        raise SchemaError(
            f"Column {name!r} holds text where {wanted} are declared: mend the file, or declare it "
            f"with missing=True, which counts such text as missing. {CURATOR}"
        )
    return read


def _levels(texts: pd.Series, column: LevelColumn) -> pd.Series:
    kind, found = type(column.levels[0]), list(texts)
    if kind is bool:
        found = [_BOOLEANS.get(text.strip().lower(), text) for text in texts]
    elif kind is int:
        found = [_whole(text) for text in texts]
    if "" not in column.levels:
        found = [None if text == "" else text for text in found]
    return pd.Series(objects(found), index=texts.index, dtype=object)


def _whole(text: str) -> int | str:
    """The whole number, or else the text, which is no declared level."""
    try:
        number = float(text)
        return int(number) if number.is_integer() else text
    except ValueError:
        return text
