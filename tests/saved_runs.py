"""Small runs whose ledgers, journals and states are kept in tests/saved, as an older version wrote
them.

    python tests/saved_runs.py FOLDER

writes them anew, with the package that is installed: a version that saves something new adds files
of its own, and the old ones stay.
"""

import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyro_dp import (
    VIPS,
    AdaptiveClip,
    Clip,
    Execution,
    Noise,
    PaperDPSEP,
    PaperDPSVI,
    PrivacyAccountant,
)
from pyro_dp.vips import LogisticRegression

STEPS = 4
PLAN = {"num_steps": STEPS, "noise": Noise(source=0)}
WHOLE = Execution(slice_data=True)


def data():
    """Two features within the unit ball and a binary label of 60 people."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(60, 2, generator=generator), dim=1)
    return x, (x[:, 0] > 0).to(x.dtype)


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def dpsvi(accountant):
    optim = pyro.optim.Adam({"lr": 0.05})
    own = dict(clip=Clip(AdaptiveClip(), loss=2.0), sampling=0.5, execution=WHOLE) | PLAN
    return PaperDPSVI(model, AutoNormal(model), optim, Trace_ELBO(), accountant=accountant, **own)


def dpsep(accountant):
    own = dict(clip=1.0, execution=WHOLE) | PLAN
    return PaperDPSEP(model, AutoMultivariateNormal(model), accountant=accountant, **own)


def vips(accountant):
    return VIPS(LogisticRegression(2), accountant=accountant, **PLAN)


MADE = {each.__name__: each for each in (dpsvi, dpsep, vips)}


def write(folder):
    """A journal, a ledger and a state of each inference, from the middle of its run."""
    for name, make in MADE.items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
        accountant.journal(folder / f"{name}.journal")
        inference = make(accountant)
        for _ in range(STEPS // 2):
            inference.step(*data())
        accountant.save(folder / f"{name}.ledger.json")
        torch.save(inference.state_dict(), folder / f"{name}.state.pt")
    write_described(folder)


def write_described(folder):
    """Ledger and journal of two runs, in secure mode and not, with a description."""
    accountant = PrivacyAccountant(epsilon=2.0, delta=1e-5)
    accountant.describe(title="A study", unit="a person", units=60)
    accountant.journal(folder / "described.journal")
    for source in ("system", None):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoMultivariateNormal(model)
        settings = dict(num_steps=2, noise=Noise(20.0, source=source), clip=1.0)
        settings |= dict(accountant=accountant, execution=WHOLE)
        inference = PaperDPSEP(model, guide, **settings)
        inference.run(*data(), progress=False)
    accountant.save(folder / "described.ledger.json")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    write(Path(sys.argv[1]))
