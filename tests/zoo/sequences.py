"""Sequences: tones, captures of animals and weeks of persons."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from torch import nn

from .entry import Entry, plain

STEPS = 5
TONES = 6
HIDDEN = 4


def model_1(sequences, lengths, hidden_dim, jit=False, batch_size=None):
    num_sequences, max_length, data_dim = map(int, sequences.shape)
    assert lengths.shape == (num_sequences,)
    assert lengths.max() <= max_length
    probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(hidden_dim) + 0.1).to_event(1))
    probs_y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([hidden_dim, data_dim]).to_event(2))
    tones_plate = pyro.plate("tones", data_dim, dim=-1)
    with pyro.plate("sequences", num_sequences, batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        x = 0
        for t in pyro.markov(range(max_length if jit else lengths.max())):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(
                    f"x_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"}
                )
                with tones_plate:
                    pyro.sample(
                        f"y_{t}",
                        dist.Bernoulli(probs_y[x.squeeze(-1)]),
                        obs=sequences[batch, t],
                    )


def model_2(sequences, lengths, hidden_dim, jit=False, batch_size=None):
    """A tone depends on whether it sounded before, too."""
    num_sequences, max_length, data_dim = map(int, sequences.shape)
    assert lengths.shape == (num_sequences,)
    assert lengths.max() <= max_length
    probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(hidden_dim) + 0.1).to_event(1))
    probs_y = pyro.sample(
        "probs_y", dist.Beta(0.1, 0.9).expand([hidden_dim, 2, data_dim]).to_event(3)
    )
    tones_plate = pyro.plate("tones", data_dim, dim=-1)
    with pyro.plate("sequences", num_sequences, batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        x, y = 0, 0
        for t in pyro.markov(range(max_length if jit else lengths.max())):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(
                    f"x_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"}
                )
                with tones_plate as tones:
                    y = pyro.sample(
                        f"y_{t}",
                        dist.Bernoulli(probs_y[x, y, tones]),
                        obs=sequences[batch, t],
                    ).long()


def model_3(sequences, lengths, hidden_dim, jit=False, batch_size=None):
    """Two hidden states, side by side."""
    num_sequences, max_length, data_dim = map(int, sequences.shape)
    assert lengths.shape == (num_sequences,)
    assert lengths.max() <= max_length
    hidden_dim = int(hidden_dim**0.5)
    probs_w = pyro.sample("probs_w", dist.Dirichlet(0.9 * torch.eye(hidden_dim) + 0.1).to_event(1))
    probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(hidden_dim) + 0.1).to_event(1))
    probs_y = pyro.sample(
        "probs_y", dist.Beta(0.1, 0.9).expand([hidden_dim, hidden_dim, data_dim]).to_event(3)
    )
    tones_plate = pyro.plate("tones", data_dim, dim=-1)
    with pyro.plate("sequences", num_sequences, batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        w, x = 0, 0
        for t in pyro.markov(range(max_length if jit else lengths.max())):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                w = pyro.sample(
                    f"w_{t}", dist.Categorical(probs_w[w]), infer={"enumerate": "parallel"}
                )
                x = pyro.sample(
                    f"x_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"}
                )
                with tones_plate as tones:
                    pyro.sample(
                        f"y_{t}",
                        dist.Bernoulli(probs_y[w, x, tones]),
                        obs=sequences[batch, t],
                    )


def probs_only(model):
    """Point estimates of all that is not enumerated."""
    return AutoDelta(poutine.block(model, expose_fn=lambda msg: msg["name"].startswith("probs_")))


def sequences(size):
    """Tones (N, steps, tones) and lengths (N,), zero after the end."""
    lengths = torch.randint(2, STEPS + 1, (size,))
    states = torch.randint(HIDDEN, (size,))
    probs = 0.1 + 0.8 * torch.eye(HIDDEN, TONES)
    tones = torch.zeros(size, STEPS, TONES)
    for t in range(STEPS):
        tones[:, t] = torch.bernoulli(probs[states]) * (t < lengths).unsqueeze(-1)
        states = torch.where(torch.rand(size) < 0.8, states, (states + 1) % HIDDEN)
    return tones, lengths


class GatedTransition(nn.Module):
    def __init__(self, z_dim, transition_dim):
        super().__init__()
        self.lin_gate_z_to_hidden = nn.Linear(z_dim, transition_dim)
        self.lin_gate_hidden_to_z = nn.Linear(transition_dim, z_dim)
        self.lin_proposed_mean_z_to_hidden = nn.Linear(z_dim, transition_dim)
        self.lin_proposed_mean_hidden_to_z = nn.Linear(transition_dim, z_dim)
        self.lin_sig = nn.Linear(z_dim, z_dim)
        self.lin_z_to_loc = nn.Linear(z_dim, z_dim)
        self.lin_z_to_loc.weight.data = torch.eye(z_dim)
        self.lin_z_to_loc.bias.data = torch.zeros(z_dim)
        self.relu = nn.ReLU()
        self.softplus = nn.Softplus()

    def forward(self, z_t_1):
        gate = torch.sigmoid(self.lin_gate_hidden_to_z(self.relu(self.lin_gate_z_to_hidden(z_t_1))))
        hidden = self.relu(self.lin_proposed_mean_z_to_hidden(z_t_1))
        proposed_mean = self.lin_proposed_mean_hidden_to_z(hidden)
        loc = (1 - gate) * self.lin_z_to_loc(z_t_1) + gate * proposed_mean
        return loc, self.softplus(self.lin_sig(self.relu(proposed_mean)))


class Combiner(nn.Module):
    def __init__(self, z_dim, rnn_dim):
        super().__init__()
        self.lin_z_to_hidden = nn.Linear(z_dim, rnn_dim)
        self.lin_hidden_to_loc = nn.Linear(rnn_dim, z_dim)
        self.lin_hidden_to_scale = nn.Linear(rnn_dim, z_dim)

    def forward(self, z_t_1, h_rnn):
        h_combined = 0.5 * (torch.tanh(self.lin_z_to_hidden(z_t_1)) + h_rnn)
        scale = nn.functional.softplus(self.lin_hidden_to_scale(h_combined))
        return self.lin_hidden_to_loc(h_combined), scale


class DMM(nn.Module):
    """The tones and their mask come padded; the RNN reads them backwards."""

    def __init__(self, z_dim=3, emission_dim=8, transition_dim=8, rnn_dim=8):
        super().__init__()
        self.emitter = nn.Sequential(
            nn.Linear(z_dim, emission_dim),
            nn.ReLU(),
            nn.Linear(emission_dim, TONES),
            nn.Sigmoid(),
        )
        self.trans = GatedTransition(z_dim, transition_dim)
        self.combiner = Combiner(z_dim, rnn_dim)
        self.rnn = nn.RNN(TONES, rnn_dim, nonlinearity="relu", batch_first=True)
        self.z_0 = nn.Parameter(torch.zeros(z_dim))
        self.z_q_0 = nn.Parameter(torch.zeros(z_dim))
        self.h_0 = nn.Parameter(torch.zeros(1, 1, rnn_dim))

    def model(self, mini_batch, mini_batch_mask, annealing_factor=1.0):
        t_max = mini_batch.size(1)
        pyro.module("dmm", self)
        z_prev = self.z_0.expand(mini_batch.size(0), self.z_0.size(0))
        with pyro.plate("z_minibatch", len(mini_batch)):
            for t in pyro.markov(range(1, t_max + 1)):
                z_loc, z_scale = self.trans(z_prev)
                with poutine.scale(scale=annealing_factor):
                    z_t = pyro.sample(
                        f"z_{t}",
                        dist.Normal(z_loc, z_scale).mask(mini_batch_mask[:, t - 1 : t]).to_event(1),
                    )
                emission_probs_t = self.emitter(z_t)
                pyro.sample(
                    f"obs_x_{t}",
                    dist.Bernoulli(emission_probs_t)
                    .mask(mini_batch_mask[:, t - 1 : t])
                    .to_event(1),
                    obs=mini_batch[:, t - 1, :],
                )
                z_prev = z_t

    def guide(self, mini_batch, mini_batch_mask, annealing_factor=1.0):
        t_max = mini_batch.size(1)
        pyro.module("dmm", self)
        h_0_contig = self.h_0.expand(1, mini_batch.size(0), self.rnn.hidden_size).contiguous()
        rnn_output, _ = self.rnn(mini_batch.flip(1), h_0_contig)
        rnn_output = rnn_output.flip(1)
        z_prev = self.z_q_0.expand(mini_batch.size(0), self.z_q_0.size(0))
        with pyro.plate("z_minibatch", len(mini_batch)):
            for t in pyro.markov(range(1, t_max + 1)):
                z_loc, z_scale = self.combiner(z_prev, rnn_output[:, t - 1, :])
                z_dist = dist.Normal(z_loc, z_scale)
                with poutine.scale(scale=annealing_factor):
                    z_t = pyro.sample(
                        f"z_{t}", z_dist.mask(mini_batch_mask[:, t - 1 : t]).to_event(1)
                    )
                z_prev = z_t


def dmm():
    made = DMM()
    return made.model, made.guide


def masked_sequences(size):
    tones, lengths = sequences(size)
    return tones, (torch.arange(STEPS) < lengths.unsqueeze(-1)).to(tones.dtype)


def hmm(name, model):
    return Entry(
        f"hidden Markov, {name}",
        f"Pyro example hmm, {model.__name__} --jit",
        lambda: (model, probs_only(model)),
        lambda size: (*sequences(size), HIDDEN, True),
        lambda: TraceEnum_ELBO(max_plate_nesting=2),
    )


# Animals that are caught, marked and caught again.


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


def cjs_guide():
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


# Persons over time.


WEEKS = 6


def autoregression(y):
    """Hamilton, Time Series Analysis, chapter 5: AR(1)."""
    num_persons, num_weeks = y.shape
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("persons", num_persons):
        pyro.sample("y_0", dist.Normal(mu, 2.0), obs=y[:, 0])
        for t in range(1, num_weeks):
            mean = mu + rho * (y[:, t - 1] - mu)
            pyro.sample(f"y_{t}", dist.Normal(mean, sigma), obs=y[:, t])


def autoregression_data(size):
    columns = [1 + torch.randn(size)]
    for _ in range(1, WEEKS):
        columns.append(1 + 0.6 * (columns[-1] - 1) + 0.5 * torch.randn(size))
    return (torch.stack(columns, dim=1),)


@config_enumerate
def change_point(counts):
    num_persons, num_weeks = counts.shape
    early = pyro.sample("early", dist.Gamma(2.0, 0.5))
    late = pyro.sample("late", dist.Gamma(2.0, 0.5))
    weeks = torch.arange(num_weeks)
    with pyro.plate("persons", num_persons):
        tau = pyro.sample("tau", dist.Categorical(torch.ones(num_weeks) / num_weeks))
        rate = torch.where(weeks < tau.unsqueeze(-1), early, late)
        pyro.sample("counts", dist.Poisson(rate).to_event(1), obs=counts)


def change_point_data(size):
    tau = torch.randint(WEEKS, (size, 1))
    return (
        torch.poisson(torch.where(torch.arange(WEEKS) < tau, 5.0, 2.0)).to(torch.ones(()).dtype),
    )


ENTRIES = (
    hmm("plain", model_1),
    hmm("autoregressive", model_2),
    hmm("factorial", model_3),
    Entry(
        "deep Markov",
        "Pyro example dmm",
        dmm,
        masked_sequences,
        edit="the RNN reads the padded sequences backwards (flip(1)), not packed ones",
    ),
    Entry(
        "capture and recapture",
        "Pyro example capture_recapture/cjs, model_1",
        lambda: (cormack_jolly_seber, cjs_guide()),
        histories,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
        dpsep=True,
    ),
    plain(
        "autoregression of persons",
        autoregression,
        AutoMultivariateNormal,
        autoregression_data,
        dpsep=True,
    ),
    Entry(
        "change point of persons",
        "Carlin, Gelfand & Smith 1992: coal mining disasters, one change a person",
        lambda: (change_point, AutoNormal(poutine.block(change_point, hide=["tau"]))),
        change_point_data,
        lambda: TraceEnum_ELBO(max_plate_nesting=1),
        dpsep=True,
    ),
)
