"""Five fits of one model: by Pyro's SVI, and by its private replacements.

An example is a module with these names:

* `start`: a new model, Pyro's, and a new guide;
* `svi`, `dpsvi`: the swap, with `dpsep` if guides are Gaussian and no latent lies in the plate;
* `data`: arguments of the model;
* `look`: the numbers of a fit that are drawn;
* `picture`: a drawing of the looks of all fits.

`DPSVI` runs without noise, at epsilon 4 and at 1, and `DPSEP` at 1 if guides are Gaussian, with
delta = 1e-5 and nothing set. `SVI` and `DPSVI` have the same optimizer, Adam with a step size of
.02. `SVI` takes all records in each of 2,000 steps. An ELBO is the mean of 50 evaluations on all
records, with the same seed for all fits.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pyro
import torch
from matplotlib.figure import Figure

from pyro_dp import Noise, PrivacyAccountant

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "examples.csv"
FIGURES = ROOT / "docs" / "figures" / "examples"
PRIVATE = {
    "DPSVI, noise 0": None,
    "DPSVI, epsilon 4": 4.0,
    "DPSVI, epsilon 1": 1.0,
    "DPSEP, epsilon 1": 1.0,
}
STEPS, STEP_SIZE, EVALUATIONS, SEED, DPI = 2000, 0.02, 50, 0, 80


def compare(example: ModuleType, **options) -> None:
    """All fits of an example; prints their ELBOs, and keeps them and the picture.

    :param options: options of `fitted`.
    """
    torch.set_num_threads(1)
    data = drawn_data(example)
    fits = {label: fitted(example, label, data, **options) for label in labels(example)}
    elbos = {label: elbo for label, (elbo, _) in fits.items()}
    for label, elbo in elbos.items():
        print(f"{name(example)}, {label}: ELBO {elbo:,.1f}")
    keep(example, elbos, size(data))
    figure = drawn(example, {label: look for label, (_, look) in fits.items()}, data)
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name(example)}.png", dpi=DPI)


def name(example: ModuleType) -> str:
    return Path(example.__file__).stem  # run as a script, its name is another


def labels(example: ModuleType) -> list[str]:
    """Its fits, in the order of table and picture."""
    return ["SVI", *(each for each in PRIVATE if "DPSEP" not in each or hasattr(example, "dpsep"))]


def drawn_data(example: ModuleType) -> tuple:
    pyro.set_rng_seed(SEED)
    return example.data()


def fitted(example: ModuleType, label: str, data: tuple, evaluations: int = EVALUATIONS, **run):
    """ELBO and look of one fit.

    :param run: more arguments of the inference, such as `num_steps` to take fewer. `DPSEP` has
        none of steps.
    """
    model, guide = _start(example)
    optim, accountant = _adam(), PrivacyAccountant(PRIVATE.get(label))
    if label == "SVI":
        svi = example.svi(model, guide, optim)
        for _ in range(run.get("num_steps", STEPS)):
            svi.step(*data)
    elif "DPSEP" in label:
        run.pop("num_steps", None)  # it chooses its looks itself
        example.dpsep(model, guide, accountant, noise=Noise(source=SEED), **run).run(
            *data, progress=False
        )
    else:
        noise = Noise(0 if accountant.epsilon is None else None, source=SEED)
        svi = example.dpsvi(model, guide, optim, accountant, noise=noise, **run)
        svi.run(*data, progress=False)
    return _seen(example, model, guide, data, evaluations)


def _adam() -> pyro.optim.PyroOptim:
    return pyro.optim.Adam({"lr": STEP_SIZE})


def _start(example: ModuleType) -> tuple[Callable, Callable]:
    pyro.clear_param_store()
    pyro.set_rng_seed(SEED)
    return example.start()


def _seen(example, model, guide, data, evaluations) -> tuple[float, Any]:
    """The ELBO, without dropout, and the look. An ELBO that is not finite counts as -inf."""
    for part in (model, guide):
        module = getattr(part, "__self__", part)
        if isinstance(module, torch.nn.Module):
            module.eval()
    pyro.set_rng_seed(SEED + 1)
    svi = example.svi(model, guide, _adam())
    elbo = -statistics.mean(svi.evaluate_loss(*data) for _ in range(evaluations))
    with torch.no_grad():
        look = example.look(model, guide, *data)
    return elbo if math.isfinite(elbo) else -math.inf, look


def drawn(example: ModuleType, looks: dict[str, Any], data: tuple) -> Figure:
    figure = Figure(figsize=(8, 3), layout="constrained")
    example.picture(figure, looks, *data)
    return figure


def size(data: tuple) -> int:
    """How many records: rows of the first argument."""
    return len(data[0])


def keep(example: ModuleType, elbos: dict[str, float], records: int) -> None:
    """Replace this example's rows in the file of all examples."""
    new = {"example": name(example), "N": records, "fit": [*elbos], "elbo": [*elbos.values()]}
    rows = pd.DataFrame(new)
    if RESULTS.exists():
        known = pd.read_csv(RESULTS)
        rows = pd.concat([known[known.example != name(example)], rows])
    rows.sort_values("example", kind="stable").to_csv(RESULTS, index=False, float_format="%.2f")
