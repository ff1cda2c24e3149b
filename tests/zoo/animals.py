"""Animals that are caught, marked and caught again."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal

from .entry import Entry

OCCASIONS = 5


def cormack_jolly_seber(capture_history, sex=None):
    n, occasions = capture_history.shape
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("animals", n, dim=-1):
        z = torch.ones(n)
        first_capture_mask = torch.zeros(n).bool()
        for t in pyro.markov(range(occasions)):
            with poutine.mask(mask=first_capture_mask):
                mu_z_t = first_capture_mask.float() * phi * z + (1 - first_capture_mask.float())
                z = pyro.sample(f"z_{t}", dist.Bernoulli(mu_z_t), infer={"enumerate": "parallel"})
                mu_y_t = rho * z
                pyro.sample(f"y_{t}", dist.Bernoulli(mu_y_t), obs=capture_history[:, t])
            first_capture_mask |= capture_history[:, t].bool()


def guide():
    def expose(msg):
        return msg["name"][0:3] in ["phi", "rho"]

    return AutoDiagonalNormal(poutine.block(cormack_jolly_seber, expose_fn=expose))


def histories(size):
    first = torch.randint(OCCASIONS - 1, (size,))
    alive, columns = torch.ones(size), []
    for t in range(OCCASIONS):
        alive = torch.where(t > first, alive * torch.bernoulli(torch.full((size,), 0.7)), alive)
        again = alive * torch.bernoulli(torch.full((size,), 0.6))
        columns.append(torch.where(t < first, 0.0, torch.where(t == first, 1.0, again)))
    return (torch.stack(columns, dim=1).to(torch.get_default_dtype()),)


ENTRIES = (
    Entry(
        "capture and recapture",
        "Pyro example capture_recapture/cjs, model_1",
        lambda: (cormack_jolly_seber, guide()),
        histories,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
        dpsep=True,
    ),
)
