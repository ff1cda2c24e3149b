"""Shared by benchmarks: one run of DPSVI, tables of repeats, sections of RESULTS.md, figures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_dp import Clip, Noise, PaperDPSVI, PrivacyAccountant

ROOT = Path(__file__).resolve().parents[1]
DELTA = 1e-3
COLORS = {
    "latents": "#0072B2",
    "parameters": "#D55E00",
    "DP-SGLD": "#009E73",
    "non-private": "#444444",
}
LABELS = {
    "latents": 'privatize="latents"',
    "parameters": 'privatize="parameters" (paper)',
    "DP-SGLD": "DP-SGLD",
}


@dataclass(frozen=True)
class Settings:
    """The public settings of one inference.

    :param release: "latents", "parameters", "DP-SGLD" or "non-private".
    :param step_size: step size of AdaGrad, or of the Langevin chain.
    :param bound: C, the clipping norm; without effect where nothing is released.
    """

    release: str
    step_size: float
    bound: float
    num_steps: int
    sample_rate: float


def fit(
    model: Callable,
    guide: Callable,
    loss: ELBO,
    data: tuple[Tensor, ...],
    settings: Settings,
    epsilon: float,
    seed: int,
) -> PrivacyAccountant:
    """Fit the guide under (epsilon, DELTA), replace one record, and return the ledger.

    The parameter store is cleared first. Seeds make the tables reproducible. Do not use seeds with
    data that need protection.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    private = settings.release != "non-private"
    accountant = PrivacyAccountant(
        epsilon=epsilon if private else None, delta=DELTA, neighboring="replace_one"
    )
    inference = PaperDPSVI(
        model,
        guide,
        pyro.optim.Adagrad({"lr": settings.step_size}),
        loss,
        accountant=accountant,
        num_steps=settings.num_steps,
        noise=Noise(None if private else 0.0, source=seed),
        clip=Clip(
            settings.bound if private else torch.inf, of=settings.release if private else "latents"
        ),
        sampling=settings.sample_rate,
    )
    inference.run(*data, progress=False)
    return accountant


def summarise(runs: pd.DataFrame, keys: list[str], value: str) -> pd.DataFrame:
    """Mean, standard error and number of the repeats, one row for each combination of the keys."""
    table = runs.groupby(keys, sort=False)[value].agg(["mean", "sem", "count"])
    return table.reset_index()


def markdown(table: pd.DataFrame, rows: str, columns: list[str], digits: int) -> str:
    """A Markdown table of "mean (standard error)" from the result of :func:`summarise`."""
    table = table.assign(
        cell=[
            f"{m:.{digits}f} ({s:.{digits}f})"
            for m, s in zip(table["mean"], table["sem"], strict=True)
        ]
    )
    wide = table.pivot(index=rows, columns="release", values="cell")[columns]
    lines = [[f"{index:g}", *cells] for index, *cells in wide.itertuples()]
    header = [rows, *columns]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]
    )


def draw_curves(axes: plt.Axes, table: pd.DataFrame, value: str) -> None:
    """Mean and standard error against epsilon; the non-private result as a band."""
    for release, marker in (("latents", "o"), ("parameters", "s"), ("DP-SGLD", "^")):
        line = table[table.release == release]
        if line.empty:
            continue
        axes.errorbar(
            line.epsilon,
            line["mean"],
            line["sem"],
            marker=marker,
            markersize=5,
            capsize=3,
            color=COLORS[release],
            label=LABELS[release],
        )
    reference = table[table.release == "non-private"].iloc[0]
    low, high = reference["mean"] - reference["sem"], reference["mean"] + reference["sem"]
    axes.axhline(
        reference["mean"], color=COLORS["non-private"], linestyle="--", label="non-private"
    )
    axes.axhspan(low, high, color=COLORS["non-private"], alpha=0.15, linewidth=0)
    ticks = sorted(table.epsilon[table.release != "non-private"].unique())
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(r"$\epsilon$  (replace one record, $\delta = 10^{-3}$)")
    axes.set_ylabel(value)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def write_section(name: str, text: str) -> None:
    """Between the markers of this name in RESULTS.md."""
    path = ROOT / "benchmarks" / "RESULTS.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
