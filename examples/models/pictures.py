"""How all pictures show a fit: one colour each, intervals in rows, truth as a line."""

import torch
from pyro.infer import Predictive

# Okabe and Ito's, which all eyes tell apart.
COLOURS = {
    "SVI": "#000000",
    "DPSVI, noise 0": "#999999",
    "DPSVI, epsilon 4": "#0072B2",
    "DPSVI, epsilon 1": "#D55E00",
    "DPSEP, epsilon 1": "#009E73",
}
TRUTH = dict(color="#CC79A7", linestyle="--", linewidth=1.5)


def draws(guide, data: tuple, *sites: str, count: int = 500) -> dict[str, torch.Tensor]:
    """Draws of latents outside the plate, by the guide: (count, *shape) each."""
    drawn = Predictive(guide, num_samples=count, return_sites=sites)(*data)
    return {site: drawn[site].reshape(count, -1).squeeze(-1) for site in sites}


def forest(axes, looks: dict[str, torch.Tensor], names: list[str], truth=None) -> None:
    """95% intervals and medians of a few numbers: one row each, one line a fit.

    :param looks: by fit, draws (count, numbers).
    :param truth: the simulator's values, (numbers,).
    """
    levels = torch.tensor([0.025, 0.5, 0.975])
    for k, (label, drawn) in enumerate(looks.items()):
        low, middle, high = drawn.quantile(levels.to(drawn), dim=0)
        rows = torch.arange(len(names)) + 0.15 * (k - (len(looks) - 1) / 2)
        reach = torch.stack([middle - low, high - middle])
        axes.errorbar(
            middle, rows, xerr=reach, fmt="o", markersize=3, color=COLOURS[label], label=label
        )
    if truth is not None:
        ends = torch.arange(len(names)) - 0.42, torch.arange(len(names)) + 0.42
        axes.vlines(truth, *ends, label="truth", **TRUTH)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def legend(figure, axes) -> None:
    """One for all axes, above them."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8)


def panels(figure, looks: dict):
    """Axes, name and look of one fit after the other, side by side, of equal ranges."""
    every = figure.subplots(1, len(looks), sharex=True, sharey=True)
    for axes, (label, look) in zip(every, looks.items(), strict=True):
        axes.set_title(label, fontsize=9)
        yield axes, label, look


def tables(figure, looks: dict[str, torch.Tensor], xlabel: str, ylabel: str) -> None:
    """One grey table a fit, (rows, columns), dark where numbers are large.

    Rows are in the order of their largest numbers: those of a mixture have none of their own.
    """
    highest = max(table.max() for table in looks.values())
    for axes, _, table in panels(figure, looks):
        ordered = table[table.argmax(1).argsort()]
        axes.imshow(ordered.numpy(), cmap="Greys", vmin=0, vmax=highest, aspect="auto")
        axes.set(xticks=[], yticks=[], xlabel=xlabel, ylabel=ylabel)
        axes.label_outer()


def images(figure, rows: dict[str, torch.Tensor]) -> None:
    """Grey images, one row a fit: (images, height, width) each, from 0 to 1."""
    every = figure.subplots(len(rows), max(len(row) for row in rows.values()))
    for line, (label, row) in zip(every, rows.items(), strict=True):
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        for axes, image in zip(line, row, strict=True):
            axes.imshow(image.numpy(), cmap="Greys", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
