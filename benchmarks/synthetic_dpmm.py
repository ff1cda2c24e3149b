"""MST and PrivBayes of dpmm on the codes that synthetic.py writes; in an environment of dpmm's own.

PYTHON_OF_DPMM benchmarks/synthetic_dpmm.py DIR
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
from dpmm.models.mst import MSTGM
from dpmm.models.priv_bayes import PrivBayesGM

METHODS = {"MST": MSTGM, "PrivBayes": PrivBayesGM}


def synthesized(method: type, task: dict) -> tuple[np.ndarray, float]:
    """Rows of codes, and seconds. The domain is public, and nothing is binned."""
    names = [f"c{j}" for j in range(len(task["sizes"]))]
    frame = pd.DataFrame(task["codes"], columns=names)
    start = time.perf_counter()
    made = method(epsilon=float(task["epsilon"]), delta=float(task["delta"]), n_jobs=1)
    made.set_random_state(np.random.RandomState(int(task["seed"])))
    made.set_domain(dict(zip(names, task["sizes"].tolist(), strict=True)))
    made.fit(frame)
    rows = made.generate(n_records=len(frame))
    return rows[names].astype(int).to_numpy(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("codes", type=Path)
    parser.add_argument("--only", default="*")
    given = parser.parse_args()
    for path in sorted(given.codes.glob(f"{given.only}.task.npz")):
        with np.load(path) as file:
            task = dict(file)
        for name, method in METHODS.items():
            made = path.with_name(path.name.replace(".task", f".{name}"))
            if not made.exists():
                rows, seconds = synthesized(method, task)
                np.savez_compressed(made, codes=rows, seconds=seconds)
                print(made.name, f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
