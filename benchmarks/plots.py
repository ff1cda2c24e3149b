"""Draw docs/figures/plots: the package's own plots.

Most are of the examples in docs/dpsvi.md and the pages after it.

python benchmarks/plots.py
"""

import os
import re
import tempfile
from typing import Any

import numpy as np
import pyro
import torch
from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure
from summary import COLOURS, ROOT, STYLE, svg

from pyro_dp import Clip, Noise, PrivacyAccountant, audit
from pyro_dp.accounting.events import SubsampledGaussian
from pyro_dp.auditing.result import AuditResult

FOLDER = ROOT / "docs" / "figures" / "plots"
PLOTS = {
    "run": """DPSVI(
        model, guide, accountant=PrivacyAccountant(epsilon=1.0), num_steps=100,
        clip=Clip(loss=2.0), noise=Noise(source=0),
    ).run(x, y, progress=False).plot()""",
    "posterior": "posterior.plot()",
    "explanation": "sep.explain().plot()",
    "forecast": "forecast.plot()",
    "evidence": "sep.evidence.plot()",
    "accountant": "accountant.plot()",
    "audit": "audited().plot().figure",
}
WIDTH = 6.0  # inches


def examples() -> dict[str, Any]:
    """The names that the first examples of these pages define, with seeds for data and noise."""
    scope: dict[str, Any] = {"audited": audited, "Clip": Clip, "Noise": Noise}
    for page, count in (("dpsvi", 2), ("dpsep", 1), ("explain", 1)):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[:count]:
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            exec(
                re.sub(r"accountant=accountant(?=[,)])", r"\g<0>, noise=Noise(source=0)", code),
                scope,
            )
    return scope


def audited() -> AuditResult:
    """A noisy sum, beside the claim of its ledger."""
    noise, claim = np.random.default_rng(1), PrivacyAccountant()
    claim.record(SubsampledGaussian(1.0, 1.0, "full"))
    return audit(
        lambda x: x.sum() + noise.standard_normal(),
        [np.zeros(10)],
        [1.0],
        num_trials=10_000,
        score=float,
        claim=claim,
        seed=0,
        progress=False,
    )


def drawn(scope: dict[str, Any], call: str) -> str:
    """As SVG, in the colours of the page."""
    figure: Figure = eval(call, scope)
    width, height = figure.get_size_inches()
    wide = WIDTH if width < 8 else 1.3 * WIDTH  # two panels
    figure.set_size_inches(wide, height * wide / width)
    return svg(figure)


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the examples save pictures
        scope = examples()
        os.chdir(ROOT)
    look = {"axes.prop_cycle": cycler(color=list(COLOURS)[1:]), "legend.frameon": False}
    with rc_context(STYLE | look):
        for name, call in PLOTS.items():
            (FOLDER / f"{name}.svg").write_text(drawn(scope, call))


if __name__ == "__main__":
    main()
