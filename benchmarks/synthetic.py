"""Synthetic data beside MST and PrivBayes: margins, and predictions that learn from synthetic rows.

Adult (first 32,561 rows; "?" is a level), Abalone and Protein are what is reported. All settings of
the Synthesizer are its defaults, which were chosen on RAND HIE and on Fair's survey (statsmodels),
at epsilon 1 alone. Bins are round numbers, public. Figures are means (standard deviations) over
seeds of the noise. Scores of marginals of one and two columns are the total variation to the
training rows, mean of columns and pairs. LR is scikit-learn's logistic regression on indicators of
all codes, boosting its HistGradientBoostingClassifier on codes, both with their defaults. They
learn from as many synthetic rows as there are training rows. They are tested on real rows, by
accuracy and area under the ROC curve.

MST and PrivBayes are those of dpmm (PyPI), whose pins conflict with ours; they get the same codes::

    python benchmarks/synthetic.py --codes DIR         makes our rows, and keeps the codes
    PYTHON_OF_DPMM benchmarks/synthetic_dpmm.py DIR    makes theirs
    python benchmarks/synthetic.py --codes DIR         scores all of them, and writes the table
"""

import argparse
import itertools
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from common import ROOT, write_section
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from pyro_dp import Noise, PrivacyAccountant
from pyro_dp.tabular import (
    Binary,
    Category,
    Column,
    Count,
    Number,
    Schema,
    Synthesizer,
    synthesizer,
)

DATA = ROOT.parent / "shared" / "data"
DELTA = 1e-5
EPSILONS = (0.3, 1.0, 3.0)
METHODS = ("Synthesizer", "MST", "PrivBayes")
SCORES = ["one-way", "two-way", "LR", "LR AUC", "boosting", "boosting AUC", "seconds"]


def adult() -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    frame = pd.read_csv(DATA / "adult.csv.gz", skipinitialspace=True)
    hours = (0, 10, 20, 30, 35, 40, 41, 45, 50, 55, 60, 70, 100)
    numbers: dict[str, Column] = {
        "age": Count(15, 90, bins=15),
        "fnlwgt": Count(0, 500_000, bins=10),
        "education_num": Count(1, 16),
        "capital_gain": Count(0, 100_000, bins=(0, 1, 3000, 5000, 7000, 10_000, 20_000, 100_000)),
        "capital_loss": Count(0, 5000, bins=(0, 1, 1500, 1800, 2000, 2500, 5000)),
        "hours_per_week": Count(0, 100, bins=hours),
        "income_gt_50K": Binary((0, 1)),
    }
    levels = {
        name: Category(tuple(sorted(frame[name].unique())))  # the codebook's
        for name in frame
        if name not in numbers
    }
    schema = Schema({name: (numbers | levels)[name] for name in frame})
    return frame[:32_561], frame[32_561:], schema


def abalone() -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    frame = pd.read_csv(DATA / "abalone.csv.gz")
    frame["old"] = (frame.pop("rings") >= 10).astype(int)
    most = dict(length=1.0, diameter=0.8, height=0.4, whole_weight=3.0)
    most |= dict(shucked_weight=1.5, viscera_weight=0.8, shell_weight=1.0)
    numbers = {name: Number(0.0, upper, bins=12) for name, upper in most.items()}
    sex = Category(("M", "F", "I"))
    return _split(frame, Schema({"sex": sex, **numbers, "old": Binary((0, 1))}))


def protein() -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    frame = pd.read_csv(DATA / "protein.csv.gz")
    target = frame.columns[-1]
    frame["far"] = (frame.pop(target) > 5).astype(int)
    most = (30_000.0, 12_000.0, 0.6, 250.0, 4e6, 450.0, 10_000.0, 250.0, 60.0)
    numbers = {name: Number(0.0, upper, bins=15) for name, upper in zip(frame, most, strict=False)}
    return _split(
        frame.astype(dict.fromkeys(numbers, float)), Schema(numbers | {"far": Binary((0, 1))})
    )


def rand() -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    from statsmodels.datasets import randhie

    frame = randhie.load_pandas().data.astype(float)
    frame["visit"] = (frame.pop("mdvis") > 0).astype(float)
    numbers = {
        "lncoins": Number(0, 5, bins=6),
        "lpi": Number(0, 7.2, bins=10),
        "fmde": Number(0, 8.5, bins=10),
        "disea": Number(0, 60, bins=12),
    }
    return _split(*_with_flags(frame, numbers))


def fair() -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    from statsmodels.datasets import fair as survey

    frame = survey.load_pandas().data.astype(float)
    frame["affair"] = (frame.pop("affairs") > 0).astype(float)
    edges = {
        "rate_marriage": (1, 1.5, 2.5, 3.5, 4.5, 5),
        "age": (17, 20, 25, 30, 35, 40, 43),
        "yrs_married": (0, 1, 4, 8, 12, 15, 20, 24),
        "children": (0, 0.5, 1.5, 2.5, 3.5, 4.5, 6),
        "religious": (1, 1.5, 2.5, 3.5, 4),
        "educ": (9, 10, 13, 15, 16.5, 18, 20),
        "occupation": (1, 1.5, 2.5, 3.5, 4.5, 5.5, 6),
        "occupation_husb": (1, 1.5, 2.5, 3.5, 4.5, 5.5, 6),
    }
    numbers = {name: Number(bins[0], bins[-1], bins=bins) for name, bins in edges.items()}
    return _split(*_with_flags(frame, numbers))


CHOSEN_ON = {"RAND HIE": rand, "Fair": fair}
REPORTED = {"Adult": adult, "Abalone": abalone, "Protein": protein}


def _with_flags(frame: pd.DataFrame, numbers: dict[str, Number]) -> tuple[pd.DataFrame, Schema]:
    flags = [name for name in frame if name not in numbers]
    frame = frame.astype(dict.fromkeys(flags, int))
    columns = {name: numbers.get(name) or Binary((0, 1)) for name in frame}
    return frame, Schema(columns)


def _split(frame: pd.DataFrame, schema: Schema) -> tuple[pd.DataFrame, pd.DataFrame, Schema]:
    """Seven tenths to learn from."""
    frame = frame.iloc[np.random.default_rng(0).permutation(len(frame))]
    learnt = int(0.7 * len(frame))
    return frame[:learnt], frame[learnt:], schema


def distance(one: np.ndarray, other: np.ndarray, columns: tuple[int, ...], sizes: list) -> float:
    shape = [sizes[j] for j in columns]
    shares = [
        np.bincount(np.ravel_multi_index(x[:, columns].T, shape), minlength=np.prod(shape)) / len(x)
        for x in (one, other)
    ]
    return float(abs(shares[0] - shares[1]).sum() / 2)


def scored(rows: np.ndarray, learnt: np.ndarray, tested: np.ndarray, sizes: list) -> dict:
    """The last column is the outcome."""
    found: dict[str, float] = {}
    for of, name in enumerate(("one-way", "two-way"), start=1):
        each = itertools.combinations(range(len(sizes)), of)
        found[name] = float(np.mean([distance(rows, learnt, pair, sizes) for pair in each]))
    x, y, truth = rows[:, :-1], rows[:, -1], tested[:, -1]
    codes = OneHotEncoder(categories=[np.arange(size) for size in sizes[:-1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        linear = LogisticRegression(max_iter=200).fit(codes.fit_transform(x), y)
    boosted = HistGradientBoostingClassifier(random_state=0).fit(x, y)
    for name, fit, shown in (
        ("LR", linear, codes.transform(tested[:, :-1])),
        ("boosting", boosted, tested[:, :-1]),
    ):
        odds = fit.predict_proba(shown)[:, 1]
        found[name] = float(((odds > 0.5) == truth).mean())
        found[f"{name} AUC"] = float(roc_auc_score(truth, odds))
    return found


def synthesized(
    learnt: pd.DataFrame, schema: Schema, epsilon: float, seed: int, kept: bool = True
) -> tuple[np.ndarray, float]:
    """Rows of codes, and seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    accountant = PrivacyAccountant(epsilon, DELTA)
    outcome = [(schema.names[-1], "*")] if kept else []
    fit = Synthesizer(schema, accountant=accountant, keep=outcome, noise=Noise(source=seed)).fit(
        learnt
    )
    rows = fit.sample(len(learnt))
    return schema.codes(rows), time.perf_counter() - start


def results(sets: dict, epsilons: tuple, seeds: int, codes: Path) -> pd.DataFrame:
    """Earlier rows are scored again, not made again."""
    found = []
    codes.mkdir(parents=True, exist_ok=True)
    for name, make in sets.items():
        learnt_frame, tested_frame, schema = make()
        learnt, tested, sizes = schema.codes(learnt_frame), schema.codes(tested_frame), schema.sizes
        real = scored(learnt, learnt, tested, sizes)
        found.append({"data": name, "epsilon": np.inf, "method": "real rows", "seed": 0} | real)
        for epsilon, seed in itertools.product(epsilons, range(seeds)):
            task = f"{name}-{epsilon:g}-{seed}"
            settings = dict(codes=learnt, sizes=sizes, epsilon=epsilon, delta=DELTA, seed=seed)
            np.savez_compressed(codes / f"{task}.task.npz", **settings)
            for method in METHODS:
                path = codes / f"{task}.{method}.npz"
                if method == "Synthesizer" and not path.exists():
                    rows, seconds = synthesized(learnt_frame, schema, epsilon, seed)
                    np.savez_compressed(path, codes=rows, seconds=seconds)
                if path.exists():
                    with np.load(path) as file:
                        rows, seconds = file["codes"], float(file["seconds"])
                    row = {"data": name, "epsilon": epsilon, "method": method, "seed": seed}
                    found.append(row | scored(rows, learnt, tested, sizes) | {"seconds": seconds})
                    print(found[-1], flush=True)
    return pd.DataFrame(found)


def variants(seeds: int) -> pd.DataFrame:
    """Data that the settings were chosen on."""
    found = []
    for name, make in CHOSEN_ON.items():
        learnt_frame, tested_frame, schema = make()
        learnt, tested, sizes = schema.codes(learnt_frame), schema.codes(tested_frame), schema.sizes
        real = scored(learnt, learnt, tested, sizes)
        found.append({"data": name, "epsilon": np.inf, "method": "real rows", "seed": 0} | real)
        for kept, members, seed in itertools.product((True, False), (5, 1), range(seeds)):
            synthesizer._MEMBERS = members
            rows, seconds = synthesized(learnt_frame, schema, 1.0, seed, kept)
            method = f"outcome {'kept' if kept else 'not kept'}, {members} fit{'s'[: members - 1]}"
            row = {"data": name, "epsilon": 1.0, "method": method, "seed": seed}
            found.append(row | scored(rows, learnt, tested, sizes) | {"seconds": seconds})
    return pd.DataFrame(found)


def table(found: pd.DataFrame) -> str:
    lines = [f"| data | epsilon | method | runs | {' | '.join(SCORES)} |", "| --- " * 11 + "|"]
    for (data, epsilon, method), rows in found.groupby(
        ["data", "epsilon", "method"], sort=False, dropna=False
    ):
        cells = []
        for score in SCORES:
            values = rows[score].dropna()
            digits = 0 if score == "seconds" else 4
            spread = f" ({values.std():.{digits}f})" if len(values) > 1 and digits else ""
            cells.append(f"{values.mean():.{digits}f}{spread}" if len(values) else "")
        shown = "" if np.isinf(epsilon) else f"{epsilon:g}"
        lines.append(f"| {data} | {shown} | {method} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--chosen-on", action="store_true", help="the sets settings are from")
    parser.add_argument("--codes", type=Path, default=ROOT / "build" / "synthetic")
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    if given.chosen_on:
        shown = table(variants(given.seeds))
        print(shown)
        write_section("Synthetic data: settings", shown)
        return
    sets = {name: make for name, make in REPORTED.items() if not given.only or name in given.only}
    found = results(sets, EPSILONS, given.seeds, given.codes)
    print(table(found))
    if not given.only:
        found.to_csv(ROOT / "benchmarks" / "results" / "synthetic.csv", index=False)
        write_section("Synthetic data beside MST and PrivBayes", table(found))


if __name__ == "__main__":
    main()
