"""Secure mode in every method: the released numbers, their generator, and the code paths."""

import os

import numpy as np
import pyro
import pytest
import torch
from dpem import DPEM
from problems import PROBLEMS, Fixture, in_turns, logistic, regression_data
from pyro.infer.autoguide import AutoMultivariateNormal
from releases import Releases

import pyro_dp.mechanism.sampling
from pyro_dp import Execution, Factors, FullBatch, Noise, PaperDPSEP, PrivacyAccountant
from pyro_dp.infer.ep.linear_design import LinearDesign
from pyro_dp.mechanism.streams import Randomness

_ALARM = 1e-8
_UNITS = 2**30


def dpsep(accountant, **options):
    guide = AutoMultivariateNormal(logistic)
    return PaperDPSEP(logistic, guide, accountant=accountant, clip=3.0, **options)


def dpem(accountant, **options):
    start = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    scales = {"radius": 5.0, "start_variance": 12.5, "least_variance": 2.5e-3}
    return DPEM(start, accountant=accountant, **scales, **options)


def one_sum(monkeypatch, name, data, jit):
    """The integers of the first step on all records, with fixed local draws."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    problem, seen, stream = PROBLEMS[name](), Releases(monkeypatch), Randomness.stream

    def given(self, purpose, position):  # not os.urandom: a compiler reads it, too
        return np.random.default_rng(0) if purpose == "local" else stream(self, purpose, position)

    monkeypatch.setattr(Randomness, "stream", given)
    svi = problem.paper_dpsvi(
        optim=pyro.optim.SGD({"lr": 0.0}),
        noise=Noise(1.0, source="system"),
        clip=0.5,
        execution=Execution(jit=jit),
    )
    svi.step(*data)
    return seen.sums[0][0] / (seen.blocks[0][0].bound / _UNITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "jit"),
    [(n, "trace") for n in ("AutoNormal", "mixture", "PyroModule", "VAE")]
    + [pytest.param("VAE", "compile", marks=pytest.mark.slow)],
)
def test_graphs_give_the_same_integers(monkeypatch, name, jit):
    """They differ by at most a unit, if a coordinate on the grid is rounded otherwise."""
    data = PROBLEMS[name]().data
    sums = [one_sum(monkeypatch, name, data, way) for way in ("none", jit)]
    count = len(data[0])
    assert sums[0].abs().max() > count
    assert (sums[0] - sums[1]).abs().max() <= count


@pytest.mark.long
@pytest.mark.every_commit
def test_forked_processes_share_no_noise(monkeypatch):
    """Two equal inferences share none either, because the process holds no stream."""
    data = regression_data()
    fixture = Fixture(monkeypatch, noise=Noise(1.0, source="system"), sampling=FullBatch())
    fixture.svi.step(*data)

    def noise():
        fixture.svi.step(*data)
        return (fixture.released[-1][0] - fixture.sums[-1][0]).numpy().tobytes()

    seen = []
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            own = PrivacyAccountant()  # the parent's is refused
            fixture.svi._reservation.accountant = own
            os.write(writing, noise())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        seen.append(os.read(reading, 1 << 16))
        os.close(reading)
    seen.append(noise())
    assert len(seen[0]) > 0
    assert len(set(seen)) == 3


def test_no_other_generator_draws(monkeypatch, stream):
    """With numpy's generators broken, records are sampled and noise is drawn all the same."""

    def broken(*args):
        raise AssertionError("numpy's generator was asked")

    monkeypatch.setattr(pyro_dp.mechanism.streams.np.random, "Generator", broken)
    seen, noise = Releases(monkeypatch), Noise(2.0, source="system")
    method = dpem(PrivacyAccountant(), num_steps=2, noise=noise, sampling=0.5)
    method.run(torch.randn(40, 3), progress=False)
    assert len(seen.released) == 2


@pytest.mark.slow
@pytest.mark.parametrize("moments, source", in_turns(["linear", "stein"], [None, "system"]))
def test_graphs_of_sites_give_the_same_sums(monkeypatch, moments, source):
    """DPSEP's, which needs no tracing and is not traced in other tests."""
    # By one product there is no need of a graph.
    monkeypatch.setattr(LinearDesign, "find", lambda *args: None)
    sums = []
    for jit in ("none", "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        seen = Releases(monkeypatch)
        settings = dict(num_steps=3, noise=Noise(1.0, source=source), sampling=FullBatch())
        settings |= dict(factors=Factors(moments=moments), execution=Execution(jit=jit))
        sep = dpsep(PrivacyAccountant(), **settings)
        torch.manual_seed(1)
        sep.run(*regression_data(), progress=False)
        sums.append(seen.sums[0][0])
    unit = 3.0 / _UNITS if source else 0.0
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-9, atol=30 * unit + 1e-9)
    assert len(seen.released) == 3
