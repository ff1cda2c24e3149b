"""The public values are computed without the data, even if models would read the data."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from problems import PROBLEMS, logistic, logistic_whole, regression_data
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from pyro_dp.records import initial_values
from pyro_dp.records.global_draw import draw_particle
from pyro_dp.records.losses import single_particle
from pyro_dp.records.plate import find_plate
from pyro_dp.records.records import Reading, Records


def peeking_guide(x, y):
    loc = pyro.param("loc", lambda: x.mean(0))
    pyro.sample("w", dist.Normal(loc + x.sum(), 1.0).to_event(1))


def of(data, model, reading=Reading.BY_INDEX):
    plate = find_plate(model, data, {}, None)
    return Records(model, plate, data, {}, reading)


@pytest.mark.parametrize(
    ("model", "reading"), [(logistic, Reading.BY_INDEX), (logistic_whole, Reading.WHOLE)]
)
def test_a_particle_does_not_depend_on_the_data(model, reading):
    """The guide may read the data: it gets placeholders."""
    particles = []
    for scale in (1.0, 1e6):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        x, y = regression_data()
        records = of((scale * x, y), model, reading)
        particles.append(draw_particle(Trace_ELBO(), model, peeking_guide, records))
    one, other = particles
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.latents["w"], other.latents["w"])


def test_initial_values_do_not_depend_on_the_data(monkeypatch):
    """They do not, even if the check that compares them fails."""
    monkeypatch.setattr(initial_values, "agree", lambda one, other: True)
    x, y = regression_data()
    initial_values.initialise(logistic, peeking_guide, of((1e6 * x, y), logistic))
    assert torch.equal(pyro.param("loc").detach(), torch.ones(3))


@pytest.mark.parametrize("name", ["mixture", "constrained"])
def test_draws_are_those_of_pyro(name):
    """The public generator is where it would be after the guide alone."""
    problem = PROBLEMS[name]()
    records = of(problem.data, problem.model)
    problem.guide(*problem.data)
    pyro.set_rng_seed(3)
    particle = draw_particle(problem.loss, problem.model, problem.guide, records)
    after = torch.get_rng_state()
    pyro.set_rng_seed(3)
    values = poutine.trace(problem.guide).get_trace(*problem.data).nodes
    assert torch.equal(torch.get_rng_state(), after)
    for key, u in particle.detached().items():
        torch.testing.assert_close(particle.transforms[key](u), values[key]["value"].detach())


def test_several_particles_are_taken_one_by_one():
    loss = TraceEnum_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=1)
    single = single_particle(loss)
    assert single.num_particles == 1 and not single.vectorize_particles
    assert loss.num_particles == 5
