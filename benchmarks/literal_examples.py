"""Pyro's examples with one line changed: the literal swap of SVI for DPSVI.

For each model of literal_models.py it finds the ELBO that the guide reaches, and the warnings. A
fit is one of three; model, guide, data, optimizer and loss are the same in all:

* SVI, 1,000 steps on all records;
* "literal", DPSVI with an accountant and nothing else: epsilon = 4, delta = 1e-5;
* "before", the settings a user had to write: max_grad_norm=None, num_steps, and a sample rate.

A seed is that of the start and of the noise. Data are the same for all seeds. An ELBO is the mean
of 50 evaluations on all records, of the same seed for all fits.

    python benchmarks/literal_examples.py           # SVI and literal, if not yet in the file
    python benchmarks/literal_examples.py --before  # SVI and before
    python benchmarks/literal_examples.py --report

An older pyro_dp runs the second if PYTHONPATH begins with its folder.
"""

import argparse
import itertools
import math
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyro
import torch
from common import write_section
from literal_models import EXAMPLES, SEED, STEPS, Example
from pyro.infer import SVI
from tqdm.auto import tqdm

import pyro_dp
from pyro_dp import DPSVI, Noise, PrivacyAccountant

RESULTS = Path(__file__).parent / "results" / "literal_examples.csv"
FITS = ("SVI", "before", "literal")
SEEDS, EVALUATIONS = 10, 50


@dataclass
class Row:
    """One fit, as it stands in the file."""

    example: str
    fit: str
    seed: int
    elbo: float = math.nan
    seconds: float = math.nan
    warned: str = ""


def fitted(name: str, fit: str, seed: int, **more) -> Row:
    """One fit; an error joins the warnings.

    :param more: arguments of DPSVI instead of those of the fit.
    """
    example, row = EXAMPLES[name], Row(name, fit, seed)
    data = example.data()
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, guide = example.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        try:
            learn(example, fit, seed, model, guide, data, **more)
            row.seconds = round(time.perf_counter() - began, 2)
            row.elbo = round(elbo(example, model, guide, data), 3)
        except Exception as error:
            row.warned = f"{type(error).__name__}: {error}".splitlines()[0]
    texts = [f"{each.category.__name__}: {each.message}".splitlines()[0] for each in caught]
    row.warned = "; ".join(filter(None, [row.warned, *dict.fromkeys(texts)]))
    return row


def learn(example: Example, fit: str, seed: int, model, guide, data: tuple, **more) -> None:
    optim, loss = example.optim(), example.loss()
    if fit == "SVI":
        svi = SVI(model, guide, optim, loss)
        for _ in range(STEPS):
            svi.step(*data)
            if isinstance(optim, pyro.optim.PyroLRScheduler):
                optim.step()
        return
    settings = {
        "accountant": PrivacyAccountant(epsilon=4.0, delta=1e-5),
        "noise": Noise(source=seed),
    }
    if fit == "before":
        rate = max(0.05, min(1.0, 1000 / size(data)))
        settings |= {"clip": None, "num_steps": STEPS, "sampling": rate}
    DPSVI(model, guide, optim, loss, **(settings | more)).run(*data, progress=False)


def elbo(example: Example, model, guide, data: tuple) -> float:
    """The guide's, on all records. Nothing is dropped out, and NaN counts as the least."""
    for part in (model, guide):
        module = getattr(part, "__self__", part)
        if isinstance(module, torch.nn.Module):
            module.eval()
    pyro.set_rng_seed(SEED + 1)
    loss = example.loss()
    with torch.no_grad():
        value = -statistics.mean(loss.loss(model, guide, *data) for _ in range(EVALUATIONS))
    return value if math.isfinite(value) else -math.inf


def size(data: tuple) -> int:
    """N, of the toy mixture its last argument."""
    return data[-1] if isinstance(data[-1], int) else len(data[0])


def known() -> pd.DataFrame:
    """The last row of each cell: fits that failed are tried again."""
    if not RESULTS.exists():
        return pd.DataFrame(columns=[*Row.__dataclass_fields__])
    return pd.read_csv(RESULTS).drop_duplicates(["example", "fit", "seed"], keep="last")


def measure(names: list[str], fits: tuple[str, ...], seeds: int) -> None:
    """The fits missing from the file; written after each fit."""
    cells = known().dropna(subset="elbo")[["example", "fit", "seed"]]
    done = set(cells.itertuples(index=False, name=None))
    cells = ((n, f, seed) for seed, n, f in itertools.product(range(seeds), names, fits))
    for cell in tqdm([cell for cell in cells if cell not in done]):
        row = pd.DataFrame([vars(fitted(*cell))])
        row.to_csv(RESULTS, mode="a", index=False, header=not RESULTS.exists())


def report(runs: pd.DataFrame) -> str:
    """One row an example; differences are taken seed by seed."""
    head = ["example", "N", *FITS, "literal - before", "2 se", "not below", "literal's warnings"]
    lines, kept = [head, ["---"] * len(head)], 0
    for name, example in EXAMPLES.items():
        mine = runs[runs.example == name]
        wide = mine.pivot(index="seed", columns="fit", values="elbo").reindex(columns=FITS)
        gain = wide.literal - wide.before
        mean, error = gain.mean(skipna=False), 2 * gain.sem(skipna=False)
        holds = bool(mean >= -error)
        kept += holds
        kinds = mine[mine.fit == "literal"].warned.dropna().str.findall(r"\w+(?:Warning|Error)\b")
        warned = kinds.explode().dropna().value_counts()
        cells = [name, f"{size(example.data()):,}"]
        cells += [f"{wide[fit].mean(skipna=False):,.1f}" for fit in FITS]
        cells += [f"{mean:+,.1f}", f"{error:,.1f}", "yes" if holds else "no"]
        lines.append([*cells, ", ".join(f"{kind} ({n})" for kind, n in warned.items())])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\nThe literal swap is not below in {kept} of {len(EXAMPLES)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", action="store_true", help="before in place of literal")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        text = report(known())
        print(text)
        write_section("literal examples", text)
        return
    print(f"pyro_dp of {Path(pyro_dp.__file__).parent}")
    fits = ("SVI", "before" if options.before else "literal")
    measure(options.only or list(EXAMPLES), fits, options.seeds)


if __name__ == "__main__":
    main()
