"""Hidden Markov model: melodies, and the chords behind them.

Pyro's example [hmm](https://pyro.ai/examples/hmm.html), its `model_1` with `--jit`. A record is a
melody (simulated: 6 tones, 2 to 5 steps).
"""

import sys

import pyro
import pyro.distributions as dist
import torch
from comparison import compare
from pictures import tables
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta

from pyro_dp import DPSVI

CHORDS, TONES, STEPS = 4, 6, 5
SOUND = 0.1 + 0.8 * torch.eye(CHORDS, TONES)


def model(sequences, lengths):
    num_sequences, max_length, data_dim = map(int, sequences.shape)
    prior = dist.Dirichlet(0.9 * torch.eye(CHORDS) + 0.1).to_event(1)
    probs_x = pyro.sample("probs_x", prior)
    probs_y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([CHORDS, data_dim]).to_event(2))
    tones_plate = pyro.plate("tones", data_dim, dim=-1)
    with pyro.plate("sequences", num_sequences, dim=-2) as batch:
        lengths = lengths[batch]
        x = 0
        for t in pyro.markov(range(max_length)):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(
                    f"x_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"}
                )
                with tones_plate:
                    probs = probs_y[x.squeeze(-1)]
                    pyro.sample(f"y_{t}", dist.Bernoulli(probs), obs=sequences[batch, t])


def start():
    expose = poutine.block(model, expose_fn=lambda msg: msg["name"].startswith("probs_"))
    return model, AutoDelta(expose)


def svi(model, guide, optim):
    return SVI(model, guide, optim, TraceEnum_ELBO(max_plate_nesting=2))


def dpsvi(model, guide, optim, accountant, **run):
    return DPSVI(
        model, guide, optim, TraceEnum_ELBO(max_plate_nesting=2), accountant=accountant, **run
    )


def data(size=5000):
    lengths, chords = torch.randint(2, STEPS + 1, (size,)), torch.randint(CHORDS, (size,))
    tones = torch.zeros(size, STEPS, TONES)
    for t in range(STEPS):
        tones[:, t] = torch.bernoulli(SOUND[chords]) * (t < lengths).unsqueeze(-1)
        chords = torch.where(torch.rand(size) < 0.8, chords, (chords + 1) % CHORDS)
    return tones, lengths


def look(model, guide, *data):
    return guide.median()["probs_y"].detach()


def picture(figure, looks, *data):
    tables(figure, {"truth": SOUND} | looks, "tone", "chord")


if __name__ == "__main__":
    compare(sys.modules[__name__])
