"""How long PrivateGLM takes for each family and for missing covariates, beside logistic regression.

    python benchmarks/families.py                     # prints the table, writes results and section
    python benchmarks/families.py --size 8000 --only linear

Five coefficients; a fifth of the values of a covariate that may be missing is. Times are seconds
of the processor, on one thread and in one process. Each round fits every family once. The table
has the median over rounds of the times, and of their ratios to logistic regression's.
"""

import argparse
import time

import numpy as np
import pandas as pd
import pyro
import torch
from common import ROOT, write_section

from pyro_dp import Noise, PrivacyAccountant
from pyro_dp.tabular import Binary, Category, Count, Number, PrivateGLM, Schema

SIZE, EPSILON, MISSING = 30_000, 1.0, 0.2
RESULTS = ROOT / "benchmarks" / "results" / "families.csv"
LEVELS = ("low", "medium", "high")
OUTCOMES = {
    "logistic": Binary(),
    "poisson": Count(0, 40),
    "linear": Number(-10.0, 10.0),
    "negative_binomial": Count(0, 40),
    "ordinal": Category(LEVELS, ordered=True),
}
# Each row of the table has a family, covariates that may be missing, and a column of groups.
ROWS = {
    **{family: (family, (), None) for family in OUTCOMES},
    "logistic, groups": ("logistic", (), "group"),
    "logistic, missing Binary": ("logistic", ("treated",), None),
    "logistic, missing Number": ("logistic", ("age",), None),
    "logistic, both missing": ("logistic", ("treated", "age"), None),
}
# Times logistic regression's, at most.
ASKED = {"logistic": 1, "logistic, groups": 4, "logistic, missing Binary": 4}
ASKED |= {"logistic, missing Number": 8, "logistic, both missing": 15}
GROUPS = [f"g{k}" for k in range(20)]


def people(size: int, family: str, missing: tuple[str, ...]) -> pd.DataFrame:
    """A made-up frame."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.uniform(-1.0, 1.0, size) for name in ("age", "dose", "fat")})
    frame["treated"] = rng.random(size) < 0.4
    frame["group"] = rng.choice(GROUPS, size)
    eta = 0.3 + 0.8 * frame.age - 0.5 * frame.dose + 0.4 * frame.treated
    frame["y"] = {
        "logistic": lambda: rng.random(size) < 1 / (1 + np.exp(-eta)),
        "poisson": lambda: rng.poisson(np.exp(eta)).clip(0, 40),
        "linear": lambda: (eta + rng.normal(size=size)).clip(-10, 10),
        "negative_binomial": lambda: rng.poisson(np.exp(eta) * rng.gamma(2.0, 0.5, size)).clip(
            0, 40
        ),
        "ordinal": lambda: np.array(LEVELS)[np.digitize(rng.logistic(size=size) + eta, [0.0, 1.5])],
    }[family]()
    for name in missing:
        if name == "treated":
            frame[name] = frame[name].astype(object)
        frame[name] = frame[name].where(rng.random(size) > MISSING, None)
    return frame


def seconds(size: int, family: str, missing: tuple[str, ...], group: str | None) -> float:
    """Seconds of the processor for one fit: model, checks, and all looks."""
    columns = {name: Number(-1.0, 1.0, missing=name in missing) for name in ("age", "dose", "fat")}
    columns["treated"] = Binary(missing="treated" in missing)
    if group:
        columns[group] = Category(GROUPS)
    schema = Schema(columns | {"y": OUTCOMES[family]})
    frame = people(size, family, missing)[schema.names]
    pyro.clear_param_store()
    torch.manual_seed(0)
    start = time.process_time()
    PrivateGLM(
        schema,
        "y ~ age + dose + fat + treated",
        family=family,
        accountant=PrivacyAccountant(epsilon=EPSILON, delta=1e-5),
        group=group,
        noise=Noise(source=0),
    ).fit(frame, progress=False)
    return time.process_time() - start


def table(results: pd.DataFrame) -> str:
    lines = ["| | seconds | times logistic | asked |", "|---|---|---|---|"]
    lines += [
        f"| {each.model} | {each.seconds:.2f} | {each.ratio:.1f} | {ASKED.get(each.model, 3)} |"
        for each in results.itertuples()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds(1000, "logistic", (), None)  # what is imported when it is used
    rounds = []
    for k in range(options.repeats):
        rounds.append({name: seconds(options.size, *ROWS[name]) for name in options.only})
        print(k, {name: round(taken, 2) for name, taken in rounds[-1].items()}, flush=True)
    times = pd.DataFrame(rounds)
    if options.only != list(ROWS):
        return
    results = pd.DataFrame(
        {
            "rows": options.size,
            "fits": options.repeats,
            "seconds": times.median(),
            "ratio": times.div(times.logistic, axis=0).median(),
        }
    ).rename_axis("model")
    results = results.round(3).reset_index()
    results.to_csv(RESULTS, index=False)
    print(table(results))
    write_section("families", table(results))


if __name__ == "__main__":
    main()
