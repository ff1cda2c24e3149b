"""Private topics of documents: VIPS for latent Dirichlet allocation on KOS blogs and Reuters.

Held-out perplexity by document completion (lower is better) on a tenth of the documents, against
epsilon; delta=1e-5, add or remove one document. A seed sets the split, the start and the noise. As
in Figures 2 and 3 of Park et al. 2020 (VIPS, arXiv 1611.00340), which have Wikipedia:

- "non-private": no noise, documents as long as they are;
- "PLD": a tight accountant, statistics clipped;
- "strong composition": the same with the advanced composition theorem, release by release;
- "no clipping": a tight accountant, and the bound is that of a document of one repeated word;
- "frequencies": words by their frequencies in the training documents, not private;
- "private frequencies": a single topic.

Steps are on full batches, and the word counts are released once (the paper: minibatches, and topics
only). Number of topics, length of a document, clipping norm, steps and step size are the same for
every epsilon: those in CHOSEN. Option --tune EPSILON varies one after the other around them. Half
of the training documents of the first split are its data (at twice that epsilon), and the other
half is held out. Epsilon does not cover this choice.

    python benchmarks/vips_lda.py
"""

import argparse
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from common import ROOT, summarise, write_section
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dp import FullBatch, Noise, NotPrivateWarning, PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.budget import least_noise
from pyro_dp.vips import VIPS, LatentDirichletAllocation

DELTA = 1e-5
EPSILONS = {"kos": (1.0, 2.0, 4.0, 8.0, 16.0), "reuters": (4.0, 8.0, 16.0, 32.0, 64.0)}
TITLES = {"kos": "KOS blog entries", "reuters": "Reuters"}
LENGTH = 100.0  # tokens; without effect but on how certain a document is of its topics
REFERENCE_STEPS = 40
ETA = 0.01
VARIANTS = {
    "PLD": "#0072B2",
    "strong composition": "#D55E00",
    "no clipping": "#009E73",
    "private frequencies": "#CC79A7",
}


@dataclass(frozen=True)
class Settings:
    """The public settings of a private run."""

    topics: int
    clip: float
    num_steps: int
    step_size: tuple[float, float]
    length: float = LENGTH


CHOSEN = {
    "kos": Settings(topics=20, clip=0.07, num_steps=10, step_size=(0.0, 0.7)),
    "reuters": Settings(topics=10, clip=0.07, num_steps=10, step_size=(0.0, 0.7)),
}


def load(name: str, folder: Path) -> Tensor:
    """Word counts, (N, V)."""
    table = torch.from_numpy(pd.read_csv(folder / f"{name}_bow.csv.gz").to_numpy())
    document, word, count = table.T
    counts = torch.zeros(document.max() + 1, word.max() + 1, dtype=torch.int16)
    counts[document, word] = count.to(counts.dtype)
    return counts


def split(counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Training and test documents: nine tenths and one."""
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed))
    test = round(0.1 * len(counts))
    return counts[order[test:]], counts[order[:test]]


def strong_composition(epsilon: float, num_steps: int) -> float:
    """The noise multiplier of a run if releases are added up by the advanced theorem.

    Kairouz, Oh & Viswanath 2015, Theorem 3.5. Half of delta is the theorem's slack. The other half
    is shared out among the releases.
    """
    slack, share = DELTA / 2, DELTA / 2 / (num_steps + 1)

    def alone(sigma: float) -> float:
        accountant = PrivacyAccountant(delta=share)
        accountant.record(SubsampledGaussian(sigma))
        return accountant.get_epsilon()

    def together(sigma: float) -> float:
        eps = torch.tensor([alone(sigma / math.sqrt(num_steps)), *[alone(sigma)] * num_steps])
        square, drift = eps.square().sum(), (eps * (eps / 2).tanh()).sum()
        log = min(math.log(1 / slack), math.log(math.e + square.sqrt() / slack))
        return min(eps.sum().item(), (drift + (2 * square * log).sqrt()).item())

    noise = least_noise(together, epsilon)
    assert noise is not None
    return noise


def private(
    train: Tensor,
    test: Tensor,
    settings: Settings,
    epsilon: float,
    seed: int,
    noise_multiplier: float | None = None,
) -> tuple[float, Tensor]:
    """Perplexity, and the posterior mean of the topics (K, V).

    :param noise_multiplier: ``None`` for what epsilon needs.
    """
    model = LatentDirichletAllocation(
        settings.topics,
        train.shape[1],
        length=settings.length,
        clip=settings.clip,
        eta=ETA,
    )
    pyro.set_rng_seed(seed)
    vips = VIPS(
        model,
        accountant=PrivacyAccountant(epsilon, DELTA),
        num_steps=settings.num_steps,
        noise=Noise(noise_multiplier, source=seed),
        sampling=FullBatch(),
        step_size=settings.step_size,
    )
    vips.run(train, progress=False)
    found = vips.posterior(noise_aware=False)
    return model.perplexity(found, test), found["topics"].mean


def reference(
    train: Tensor, test: Tensor, topics: int, seed: int, num_steps: int = REFERENCE_STEPS
) -> tuple[float, Tensor]:
    """The same without noise, bound and fixed length."""
    model = LatentDirichletAllocation(topics, train.shape[1], eta=ETA)
    pyro.set_rng_seed(seed)
    vips = VIPS(
        model,
        accountant=PrivacyAccountant(),
        num_steps=num_steps,
        noise=0,
        sampling=FullBatch(),
        step_size=(0.0, 0.0),
    )
    vips.run(train, progress=False)
    found = vips.posterior(noise_aware=False)
    return model.perplexity(found, test), found["topics"].mean


def frequencies(train: Tensor, test: Tensor) -> float:
    """One topic, learned without noise."""
    return reference(train, test, 1, seed=0, num_steps=1)[0]


def tune(name: str, counts: Tensor, epsilon: float) -> None:
    """Print held-out perplexities of settings around the chosen ones; the test set is not seen."""
    documents, _ = split(counts, 0)
    train, held = documents[::2], documents[1::2]
    centre = CHOSEN[name]
    candidates = {
        "topics": (3, 5, 10, 20, 40),
        "clip": (0.05, 0.07, 0.1, 0.14, 0.2),
        "num_steps": (3, 5, 10, 20),
        "step_size": ((0.0, 0.3), (0.0, 0.5), (0.0, 0.7), (0.0, 1.0)),
        "length": (30.0, 100.0, 300.0),
    }
    for field, values in candidates.items():
        for value in values:
            settings = replace(centre, **{field: value})
            found = [private(train, held, settings, 2 * epsilon, seed)[0] for seed in (100, 101)]
            print(f"{field} {value}: {sum(found) / len(found):.0f}", flush=True)


def repeat(name: str, counts: Tensor, seeds: int) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """All runs, one row each, and the topics of the first seed."""
    settings = CHOSEN[name]
    runs = {
        "PLD": settings,
        "strong composition": settings,
        "no clipping": replace(settings, clip=1.0),
        "private frequencies": replace(settings, topics=1, num_steps=1),
    }
    weak = {epsilon: strong_composition(epsilon, settings.num_steps) for epsilon in EPSILONS[name]}
    rows, topics = [], {}
    cases = [(variant, epsilon) for variant in runs for epsilon in EPSILONS[name]]
    for seed in range(seeds):
        train, test = split(counts, seed)
        rows.append(["frequencies", math.inf, seed, frequencies(train, test)])
        perplexity, found = reference(train, test, settings.topics, seed)
        rows.append(["non-private", math.inf, seed, perplexity])
        topics.setdefault("non-private", found)
        for variant, epsilon in tqdm(cases, desc=f"{name}, split {seed}"):
            sigma = weak[epsilon] if variant == "strong composition" else None
            perplexity, found = private(train, test, runs[variant], epsilon, seed, sigma)
            rows.append([variant, epsilon, seed, perplexity])
            if variant == "PLD":
                topics.setdefault(f"epsilon = {epsilon:g}", found)
    return pd.DataFrame(rows, columns=["variant", "epsilon", "seed", "perplexity"]), topics


def table_of(runs: pd.DataFrame) -> str:
    """A Markdown table of mean (standard error)."""
    table = summarise(runs, ["epsilon", "variant"], "perplexity").set_index(["epsilon", "variant"])
    lines = [["epsilon", *VARIANTS], ["---"] * (len(VARIANTS) + 1)]
    for epsilon in sorted(runs.epsilon[runs.epsilon < math.inf].unique()):
        cells = (table.loc[epsilon, variant] for variant in VARIANTS)
        lines.append([f"{epsilon:g}", *(f"{c['mean']:.0f} ({c['sem']:.0f})" for c in cells)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    ends = (table.loc[math.inf, variant] for variant in ("non-private", "frequencies"))
    whole = " and ".join(f"{c['mean']:.0f} ({c['sem']:.0f})" for c in ends)
    return f"{text}\n\nNon-private and by word frequencies: {whole}."


def top_words(topics: dict[str, Tensor], folder: Path, count: int = 8) -> str:
    """The most probable words of each topic, as Markdown lists."""
    words = pd.read_csv(folder / "reuters_vocab.csv.gz", keep_default_na=False).iloc[:, -1]
    parts = []
    for label, topic in topics.items():
        lines = (" ".join(words[i] for i in row.topk(count).indices.tolist()) for row in topic)
        parts.append(f"{label}:\n\n" + "\n".join(f"- `{line}`" for line in lines))
    return "\n\n".join(parts)


def draw(tables: dict[str, pd.DataFrame], path: Path) -> None:
    figure, panels = plt.subplots(1, len(tables), figsize=(5 * len(tables), 3.8), squeeze=False)
    figure.set_layout_engine("constrained")
    for axes, (name, runs) in zip(panels[0], tables.items(), strict=True):
        table = summarise(runs, ["variant", "epsilon"], "perplexity")
        for variant, color in VARIANTS.items():
            line = table[table.variant == variant]
            axes.errorbar(
                line.epsilon,
                line["mean"],
                line["sem"],
                marker="o",
                markersize=4,
                capsize=3,
                color=color,
                label=variant,
            )
        for variant, style in (("non-private", "--"), ("frequencies", ":")):
            mean = table[table.variant == variant]["mean"].item()
            axes.axhline(mean, color="#444444", linestyle=style, label=variant)
        axes.set(xscale="log", title=TITLES[name], ylabel="held-out perplexity")
        axes.set_xticks(EPSILONS[name], [f"{epsilon:g}" for epsilon in EPSILONS[name]])
        axes.minorticks_off()
        axes.set_xlabel(r"$\epsilon$  (add or remove one document, $\delta = 10^{-5}$)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def main() -> None:
    warnings.simplefilter("ignore", NotPrivateWarning)  # documents are public
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="repeats of every run (default 5)")
    parser.add_argument("--only", choices=tuple(CHOSEN), help="one of the data sets")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder with kos_bow.csv.gz, reuters_bow.csv.gz and reuters_vocab.csv.gz "
        "(default ../shared/data)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="folder for results/ and figures/ (default benchmarks); RESULTS.md is written only "
        "with the default, and for all data sets",
    )
    parser.add_argument(
        "--tune", type=float, metavar="EPSILON", help="print the settings' scores instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    names = [options.only] if options.only else list(CHOSEN)
    if options.tune:
        for name in names:
            tune(name, load(name, options.data), options.tune)
        return
    for folder in ("results", "figures"):
        (options.output / folder).mkdir(parents=True, exist_ok=True)
    tables, text = {}, []
    for name in names:
        tables[name], topics = repeat(name, load(name, options.data), options.seeds)
        path = options.output / "results" / f"vips_lda_{name}.csv"
        tables[name].to_csv(path, index=False, float_format="%.6g")
        text.append(f"{TITLES[name]}:\n\n{table_of(tables[name])}")
        if name == "reuters":
            text.append(f"Top words, {TITLES[name]}, first split:\n\n")
            text[-1] += top_words(topics, options.data)
    draw(tables, options.output / "figures" / "vips_lda.png")
    section = "\n\n".join(text)
    print(section)
    if options.output == parser.get_default("output") and not options.only:
        write_section("vips_lda", section)


if __name__ == "__main__":
    main()
