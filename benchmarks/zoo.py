"""Forty models as their authors wrote them, with DPSVI instead of SVI.

The table has the ELBO that a guide reaches on 5,000 simulated records, for each entry of tests/zoo:

* by SVI: all records, 2,000 steps of Adam whose step size falls twentyfold. It is the better of two
  runs, from .05 and from .005;
* by DPSVI without noise and at epsilon = 1 and 4 (delta=1e-5, all else by default);
* by DPSEP at epsilon = 4 if the guide is Gaussian.

It also says whether steps run in graphs, and compares the cost of a private step with one of SVI on
as many records. Memory is the peak of a process that takes 12 steps on all records. ELBOs are means
of 50 evaluations on all records.

    python benchmarks/zoo.py                   # all that is not yet in results/zoo.csv
    python benchmarks/zoo.py --only "radon"    # one model, anew
    python benchmarks/zoo.py --memory
    python benchmarks/zoo.py --report          # writes docs/zoo.md

A fit that would take longer than --patience seconds is noted as such, and not run.
"""

import argparse
import contextlib
import csv
import math
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyro
import torch
from pyro.infer import SVI
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from zoo import ZOO, Entry  # noqa: E402

from pyro_dp import DPSEP, DPSVI, Noise, PrivacyAccountant  # noqa: E402
from pyro_dp.infer.svi.traced_step import TracedStep  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "zoo.csv"
MEMORY = RESULTS.with_name("zoo_memory.csv")
PAGE = ROOT / "docs" / "zoo.md"
FITS = ("SVI", "noise 0", "epsilon 1", "epsilon 4", "DPSEP", "time")
EPSILON = {"epsilon 1": 1.0, "epsilon 4": 4.0, "DPSEP": 4.0}
FIELDS = ("entry", "fit", "elbo", "graph", "ms", "svi_ms", "note")
STEPS, STEP_SIZES, EVALUATIONS, SEED = 2000, (0.05, 0.005), 50, 0
BATCH = 1000  # records of a step of DPSVI, where N is 5,000
REMARKS = {
    "LDA": "Its guide has points for the documents' topics. There the density of a Dirichlet with "
    "concentrations below 1 has no bound, so there is no greatest ELBO",
    "Dirichlet process mixture": "Each record's category is drawn. Its probabilities move in about "
    "200 of the 1,000 steps, and SVI moves them 2,000 times",
    "Bayesian neural network": "The ELBO depends on where weights begin. From eight seeds, "
    "SVI's is between -1,454 and -122,556, and DPSVI's at epsilon 4 between -1,421 and -5,137",
    "sparse gamma DEF": "Nearly all parameters are rows of the records, which move as seldom",
    "deep Markov": "1,000 steps on a fifth of the records stay behind SVI's 2,000 on all, even "
    "without noise",
    "Gaussian process": "Records see products of latents that no deterministic site names, and "
    "DPSEP's evidence is quadratic in the latents",
    "multinomial logit": "A shift of all classes changes nothing, so its exact interval is the "
    "prior's. AutoNormal holds that width, and independent draws cost it ELBO",
}
MEASURED = 12  # steps
BLOCKS, BLOCK, TIMED = 5, 10, 20.0  # timed steps, and seconds after which no further block begins


@dataclass
class Fit:
    """One cell, as it stands in the file."""

    entry: str
    fit: str
    elbo: float | None = None
    graph: bool | None = None
    ms: float | None = None
    svi_ms: float | None = None
    note: str = ""

    def row(self) -> dict:
        return {name: "" if value is None else value for name, value in vars(self).items()}


class TooLong(Exception):
    """A fit that nobody would wait for."""


@contextlib.contextmanager
def noted(fit: Fit) -> Iterator[None]:
    """Errors, and warnings that a graph does not apply, become the cell's note."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except TooLong as error:
            fit.note = str(error)
        except Exception as error:
            fit.note = f"{type(error).__name__}: {error}".splitlines()[0]
    words = ("does not apply", "one record at a time")
    graphless = [str(each.message) for each in caught if any(w in str(each.message) for w in words)]
    fit.note = fit.note or "; ".join(dict.fromkeys(graphless))


def new(entry: Entry, size: int | None = None) -> tuple:
    """Model, guide and data from one public start."""
    pyro.clear_param_store()
    pyro.set_rng_seed(SEED)
    return (*entry.make(), entry.data(size or entry.size))


def elbo(entry: Entry, model, guide, data: tuple) -> float:
    """The ELBO of the guide on all records; nothing is dropped out."""
    for part in (model, guide):
        module = getattr(part, "__self__", part)
        if isinstance(module, torch.nn.Module):
            module.eval()
    pyro.set_rng_seed(SEED + 1)
    loss = entry.loss()
    with torch.no_grad():
        return -statistics.mean(loss.loss(model, guide, *data) for _ in range(EVALUATIONS))


def fitted(entry: Entry, name: str, patience: float) -> Fit:
    """One fit and the ELBO that it reached."""
    fit = Fit(entry.name, name)
    if name == "SVI":
        with noted(fit):
            fit.elbo = max(_svi(entry, step_size) for step_size in STEP_SIZES)
        return fit
    with noted(fit):
        model, guide, data = new(entry)
        inference = _inference(entry, name, model, guide)
        _require_patience(inference, data, patience)
        inference.run(*data, progress=False)
        if name != "DPSEP":
            fit.graph = _is_traced(inference)
        fit.elbo = elbo(entry, model, guide, data)
    return fit


def _is_traced(inference: DPSVI) -> bool:
    """Whether gradient steps run in a graph; looks have none."""
    prepared = inference._gradients._kept.prepared
    return prepared is not None and isinstance(prepared.step, TracedStep)


def _svi(entry: Entry, step_size: float) -> float:
    model, guide, data = new(entry)
    svi = _inference(entry, "SVI", model, guide, step_size)
    for _ in range(STEPS):
        svi.step(*data)
        svi.optim.step()
    reached = elbo(entry, model, guide, data)
    return reached if math.isfinite(reached) else -math.inf


def _require_patience(inference: DPSVI | DPSEP, data: tuple, patience: float) -> None:
    """Time the last of a few steps, because the first ones build graphs.

    :raises TooLong: all steps would take longer than ``patience`` seconds.
    """
    for _ in range(6):
        began = time.perf_counter()
        inference.step(*data)
        took = time.perf_counter() - began
        if took > patience / 4:
            break
    if took * inference.num_steps > patience:
        raise TooLong(f"{took:.1f} s a step")


def _inference(entry: Entry, name: str, model, guide, step_size: float = STEP_SIZES[0]):
    if name == "SVI":
        falling = {"gamma": 0.05 ** (1 / STEPS), "optimizer": torch.optim.Adam}
        optim = pyro.optim.ExponentialLR(falling | {"optim_args": {"lr": step_size}})
        return SVI(model, guide, optim, entry.loss())
    accountant = PrivacyAccountant(epsilon=EPSILON.get(name))
    if name == "DPSEP":
        return DPSEP(model, guide, accountant=accountant, noise=Noise(source=SEED))
    noise = Noise(0 if name == "noise 0" else None, source=SEED)
    loss = entry.loss()
    return DPSVI(model, guide, loss=loss, accountant=accountant, noise=noise)


def timed(entry: Entry) -> Fit:
    """A step of DPSVI beside one of SVI on as many records, in turns: medians."""
    fit = Fit(entry.name, "time")
    store, runs = pyro.get_param_store(), {}
    with noted(fit):
        for name, size in (("SVI", BATCH), ("epsilon 4", entry.size)):
            model, guide, data = new(entry, size)
            inference = _inference(entry, name, model, guide)
            for _ in range(4):  # graphs are built and compared
                inference.step(*data)
            runs[name] = [inference, data, store.get_state(), []]
        began = time.perf_counter()
        for _ in range(BLOCKS):
            for run in runs.values():
                run[2] = _block(*run)
            if time.perf_counter() - began > TIMED:
                break
        if runs["epsilon 4"][0]._gradients._kept.prepared is None:
            return fit  # after the looks, steps cost nothing
        fit.graph = _is_traced(runs["epsilon 4"][0])
        fit.svi_ms, fit.ms = (1e3 * statistics.median(run[3]) for run in runs.values())
    return fit


def _block(inference, data: tuple, state: dict, times: list[float]) -> dict:
    """Some steps with a parameter store of their own; returns it."""
    with pyro.get_param_store().scope(state) as scoped:
        for _ in range(BLOCK):
            began = time.perf_counter()
            inference.step(*data)
            times.append(time.perf_counter() - began)
            if times[-1] * BLOCK > TIMED:
                break
    return scoped


def peak(entry: Entry, name: str) -> float:
    """The most memory of this process, with some steps on all records, in MB."""
    model, guide, data = new(entry)
    inference = _inference(entry, name, model, guide)
    for _ in range(MEASURED):
        inference.step(*data)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def peaks(names: list[str]) -> None:
    rows = []
    for name in tqdm(names):
        row = [name]
        for fit in ("SVI", "epsilon 4"):
            command = [sys.executable, __file__, "--only", name, "--peak", fit]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            row.append(float(run.stdout.split()[-1]))
        rows.append(row)
    found = pd.DataFrame(rows, columns=["entry", "svi_mb", "mb"])
    found.round(0).to_csv(MEMORY, index=False)


def known() -> pd.DataFrame:
    return pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=FIELDS)


def write(fits: pd.DataFrame) -> None:
    fits.to_csv(RESULTS, index=False, quoting=csv.QUOTE_MINIMAL)


def measure(names: list[str], fits: tuple[str, ...], patience: float) -> None:
    """Measure entries that are not yet in the file, and write it after each fit."""
    done = set(zip(known()["entry"], known()["fit"], strict=True))
    todo = [
        (name, fit)
        for name in names
        for fit in fits
        if (name, fit) not in done and (fit != "DPSEP" or ZOO[name].dpsep)
    ]
    for name, fit in tqdm(todo):
        entry = ZOO[name]
        result = timed(entry) if fit == "time" else fitted(entry, fit, patience)
        rows = pd.DataFrame([result.row()], columns=FIELDS)
        rows.to_csv(RESULTS, mode="a", index=False, header=not RESULTS.exists())


def table(fits: pd.DataFrame) -> str:
    """One row an entry: what SVI reached, and by how much of that the others stay below it."""
    lines = [["model", "ELBO of SVI", *FITS[1:-1], "time"], ["---"] * 7]
    for name, entry in ZOO.items():
        cells = {row.fit: row for row in fits[fits.entry == name].itertuples()}
        svi, clock = cells.get("SVI"), cells.get("time")
        reached = None if svi is None or pd.isna(svi.elbo) else svi.elbo
        line = [f"{name} ({entry.source})", "-" if reached is None else f"{reached:,.0f}"]
        for fit in FITS[1:-1]:
            cell = cells.get(fit)
            lost = reached is None or cell is None or pd.isna(cell.elbo)
            line.append("-" if lost else _percent((cell.elbo - reached) / abs(reached)))
        untimed = clock is None or pd.isna(clock.ms)
        lines.append([*line, "-" if untimed else f"{clock.ms / clock.svi_ms:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(difference: float) -> str:
    """Beyond ten times the ELBO of SVI the digits say no more."""
    return "< -1000%" if difference < -10.0 else f"{100 * difference:+.1f}%"


def notes(fits: pd.DataFrame) -> str:
    """Remarks and edits, and why a fit is missing or has no graph."""
    said = {name: [f"{remark}."] for name, remark in REMARKS.items()}
    for name, entry in ZOO.items():
        if entry.edit:
            said.setdefault(name, []).append(f"Edit: {entry.edit}.")
    noted = fits[fits.note.notna() & (fits.note != "") & ~fits.entry.isin(REMARKS)]
    for row in noted.drop_duplicates(["entry", "note"]).itertuples():
        said.setdefault(row.entry, []).append(f"{row.fit}: {row.note}.")
    return "".join(f"* **{name}**. {' '.join(texts)}\n" for name, texts in said.items())


def within(fits: pd.DataFrame, share: float) -> int:
    """How many lose at most so much of SVI's ELBO at epsilon = 4."""
    by = fits.pivot_table(index="entry", columns="fit", values="elbo", dropna=False)
    return int((by["epsilon 4"] >= by["SVI"] - share * by["SVI"].abs()).sum())


def peak_line() -> str:
    found = pd.read_csv(MEMORY)
    ratio = found.mb / found.svi_mb
    return (
        f"Peak memory of a process is at most {ratio.max():.2f} times `SVI`'s "
        f"({found.entry[ratio.argmax()]}), and {ratio.median():.2f} times in the median."
    )


def report(fits: pd.DataFrame) -> None:
    text = (
        "# The zoo\n\n"
        "`DPSVI` replaces `SVI` in forty models as their authors wrote them. At epsilon = 4, "
        f"{within(fits, 0.02)} of {len(ZOO)} are within 2% of `SVI`'s ELBO or above. If a lower "
        "row has no remark, the noise explains it. "
        "[Examples](examples.md) shows twelve of Pyro's models with pictures.\n\n"
        "There are N = 5,000 simulated records, with delta = 1e-5 and one run each. Nothing is set "
        "except for the edits in the remarks. The columns have the ELBO of `SVI`, the better of "
        "two runs, and relative differences to it. `DPSEP` ran at epsilon = 4 if its guide is "
        "Gaussian. The last column is the time of a gradient step, in units of `SVI` on as many "
        f"records. {peak_line()} "
        "The models are in `tests/zoo`. `python benchmarks/zoo.py` fits them, and "
        "`python benchmarks/zoo.py --report` writes this page.\n\n"
    )
    PAGE.write_text(f"{text}{table(fits)}\n\n## Remarks\n\n{notes(fits)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(ZOO))
    parser.add_argument("--fits", nargs="+", choices=FITS, default=list(FITS))
    parser.add_argument("--patience", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", choices=("SVI", *EPSILON), help="print that of one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        report(known())
        return
    if options.peak:
        print(peak(ZOO[options.only[0]], options.peak))
        return
    if options.memory:
        peaks(options.only or list(ZOO))
        return
    if options.only:  # anew
        fits = known()
        again = fits.entry.isin(options.only) & fits.fit.isin(options.fits)
        if again.any():
            write(fits[~again])
    measure(options.only or list(ZOO), tuple(options.fits), options.patience)


if __name__ == "__main__":
    main()
