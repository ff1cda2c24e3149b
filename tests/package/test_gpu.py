"""Fits on an accelerator: as on the CPU, and without waiting for it.

``pytest -m gpu`` runs these on CUDA. Elsewhere (slow) they run on a stand-in device, in a process
of its own. That device needs a compiler. Without one they run on the CPU, and test themselves.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import stand_in_device
import torch
from device_runs import POSTERIORS, PROBLEMS, apart, dpsvi, fitted, steps_that_wait

from pyro_dp import Clip, Execution, Noise
from pyro_dp.infer.svi.optimizers import RowAdam, RowOptimizer
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.streams import counted_normals
from pyro_dp.records.local_parameters import LocalParameters
from pyro_dp.utils.torch_state import rows_on

_STANDS_IN = "PYRO_DP_STAND_IN"
_HAS_CUDA = torch.cuda.is_available()
_COMPILER = shutil.which("c++") or shutil.which("g++")
CPU = pytest.param(
    "cpu",
    marks=[pytest.mark.slow, pytest.mark.skipif(bool(_COMPILER), reason="a stand-in shows more")],
)
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device")]
)
DEVICES = [stand_in_device.NAME] if _STANDS_IN in os.environ else [CPU, CUDA]
_built = []


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == stand_in_device.NAME and not _built:
        with tempfile.TemporaryDirectory() as folder:
            _built.append(stand_in_device.build(folder))
    return request.param


def stand_in():
    return _built[0] if _built else None


# They loop instead of having parameters, so that few tests are skipped without CUDA.
def test_dpsvi_is_that_of_the_cpu(device):
    for problem, jit in ("logistic", "none"), *((each, "trace") for each in PROBLEMS):
        way = Execution(jit=jit)
        found, expected = (fitted(problem, each, execution=way) for each in (device, "cpu"))
        assert apart(found, expected) < 1e-6, problem
    other = fitted(problem, "cpu", execution=way, noise=Noise(1.0, source=1))
    assert apart(other, expected) > 1e-3  # so that the first is no accident


def test_posteriors_are_those_of_the_cpu(device):
    for method in POSTERIORS:
        found, expected = (fitted(method, each) for each in (device, "cpu"))
        assert apart(found, expected) < 1e-6, method
    assert apart(fitted(method, "cpu", noise=Noise(source=1)), expected) > 1e-3


def test_one_step_in_ten_waits_for_the_device(device):
    waits = device != "cpu"
    traced = Execution(jit="trace")
    for problem, source in ("logistic", "system"), *((each, 0) for each in PROBLEMS):
        noise = Noise(1.0, source=source)
        inference, data = dpsvi(problem, device, num_steps=40, noise=noise, execution=traced)
        waited = steps_that_wait(inference, data, device, stand_in())
        assert waited == (4 * waits, 37), (problem, source)
    # A loss is a number of the host's, in each step: that it is seen shows that others would be.
    inference, data = dpsvi(
        "logistic", device, num_steps=8, execution=traced, clip=Clip(loss=5.0, report=False)
    )
    assert steps_that_wait(inference, data, device, stand_in()) == (5 * waits, 5)


def test_noise_from_counters_is_the_same_on_every_device(device):
    found, expected = (
        counted_normals(np.random.default_rng(0), 1001, torch.device(each))
        for each in (device, "cpu")
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=1e-13)


def test_many_numbers_get_noise_of_the_right_size(device):
    clipped = ClippedSum([Block(100_000, 2.0)], device)
    clipped.add(torch.zeros(3, 100_000, device=device))
    (released,) = clipped._noisy([1.5], np.random.default_rng(0))
    assert released.device.type == torch.device(device).type
    for factor, right in ((1.0, True), (2 / 3, False), (1.5, False)):
        ratio = released.square().mean().item() / (3.0 * factor) ** 2
        assert (abs(ratio - 1) < 0.05) is right


def test_rows_of_records_with_broken_gradients_stay(device):
    """All rows get new values, and broken ones are taken back. No device waits for a look."""

    def moved(where):
        leaf = torch.zeros(6, 2, device=where, requires_grad=True)
        optimizer = RowOptimizer(lambda name: RowAdam(lr=0.1))
        optimizer.use(LocalParameters(size=6, leaves={"own": leaf}, dims={"own": 0}))
        for broken in (2, 0):
            gradient = torch.linspace(1.0, 2.0, 6).reshape(3, 2)
            gradient[broken, 1] = float("nan")
            indices = torch.tensor([1, 3, 4], device=where)
            optimizer.step(indices, {"own": gradient.to(where)})
        return {name: value.cpu() for name, value in optimizer.state_dict()["own"].items()}

    found, expected = moved(device), moved("cpu")
    assert found["steps"].tolist() == expected["steps"].tolist() == [0, 1, 0, 2, 1, 0]
    assert apart(found, expected) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device")
def test_compiled_on_cuda_is_traced_on_cuda():
    ways = (Execution(jit=jit) for jit in ("compile", "trace"))
    found, expected = (fitted("logistic", "cuda", execution=way) for way in ways)
    assert apart(found, expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device")
def test_passes_fit_the_memory_of_cuda():
    few, many = (rows_on(torch.device("cuda"), numbers) for numbers in (10**7, 10**5))
    assert 1 <= few < many <= 2**20


@pytest.mark.slow
@pytest.mark.skipif(_STANDS_IN in os.environ, reason="runs there")
@pytest.mark.skipif(not _COMPILER, reason="needs a compiler")
def test_on_a_device_that_stands_in():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {_STANDS_IN: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
