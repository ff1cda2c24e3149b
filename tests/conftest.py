import collections
import gc
import os
import signal
import zlib

import numpy as np
import pyro
import pytest
import torch
import trials

from pyro_dp.accounting import origins
from pyro_dp.infer.ep.observation_family import Family
from pyro_dp.infer.ep.stochastic_ep import StochasticEP
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI
from pyro_dp.mechanism.system_random import SystemGenerator

pytest.register_assert_rewrite("contract")  # its failures show their values


def pytest_addoption(parser):
    # Tracing and compiling take longer than most models of these tests. Tests of graphs ask for
    # them. All the others may be run through them, too.
    parser.addoption("--jit", choices=("none", "trace", "compile"), default="none")
    parser.addoption(
        "--rung",
        choices=LEFT_OUT,
        help="ci: every fourth case of a test, or n-th if it is one_in(n), and one of fewer; test: "
        "no slow tests, and one case of long ones; quick: one case, without long ones",
    )
    parser.addoption("--turn", type=int, default=0, help="of CI: the number of commits")


# Tests with these marks, by rung of the ladder.
LEFT_OUT = {"quick": ("slow", "long"), "test": ("slow",), "ci": ()}

# Most cases of these files take a fit. `make test` takes one case of each test.
FITS = """
    test_automatic_dpsep test_cells test_dpsep test_engines test_events test_gaussian_guide test_glm
    test_isolated_model test_local_parameters test_models test_noise_aware test_observations
    test_paper_dpsvi test_predictive test_prior_factor test_record_term test_selections
    test_stochastic_gradient_vi test_structure_checks test_synthesizer test_system_random
    test_tilted_sites test_vips
""".split()

# CI runs a slow or long test with fewer cases than this once in as many commits.
COMMITS = 4

# The defaults that users get.
DEFAULTS = {each: each._usual_jit for each in (StochasticGradientVI, StochasticEP)}


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in DEFAULTS:
        each._usual_jit = config.getoption("jit")
    if config.getoption("jit") != "none":
        config.addinivalue_line("filterwarnings", "ignore:jit=.* does not apply:UserWarning")


@pytest.fixture
def stream(monkeypatch):
    """The operating system's generator, on seeded bytes."""
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    return SystemGenerator()


@pytest.hookimpl(trylast=True)  # after -m has selected
def pytest_collection_modifyitems(config, items):
    rung = config.getoption("rung")
    if rung is None:
        return
    cases = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, LEFT_OUT[rung])):
            # A test that classes inherit is one test in a quick run, and one for each class above.
            cases[item.function if rung == "quick" else item.nodeid.split("[")[0]].append(item)
    kept, turn = set(), config.getoption("turn")
    for each in cases.values():
        has, step, commits = each[0].get_closest_marker, len(each), 1
        name = each[0].nodeid.split("[")[0]
        if rung == "ci" and has("every_case"):
            step = 1
        elif rung == "test" and not has("long") and each[0].path.stem not in FITS:
            step = 1
        elif rung == "ci":
            sparse = has("one_in")
            step = min(step, sparse.args[0] if sparse else 4)
            takes_turns = (has("slow") or has("long")) and not has("every_commit")
            commits = COMMITS if takes_turns and len(each) < COMMITS else 1
        # The tests of a file have their turn at the same commit: they may share what is slow.
        if (zlib.crc32(name.split("::")[0].encode()) + turn) % commits == 0:
            # Each test begins at another case, so that no model is left out everywhere.
            first = zlib.crc32(name.encode()) + turn // commits
            kept.update(each[first % step :: step])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish():
    """Let the garbage collector skip what modules hold, and run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture
def fixed_outcomes(monkeypatch):
    """Outcomes that centre residuals are a function of the record, the same for neighbours."""

    def gradients(family, numbers, rest, count):
        levels = torch.linspace(-1.0, 3.0, count).reshape(-1, *(1,) * numbers.dim())
        return levels * numbers.nan_to_num(0.0).cos()

    monkeypatch.setattr(Family, "simulated_gradients", gradients)


@pytest.fixture
def as_users_run_it(monkeypatch):
    """Use graphs by default, as users do. Runs of hundreds of steps take a third of the time."""
    for each, jit in DEFAULTS.items():
        monkeypatch.setattr(each, "_usual_jit", jit)


@pytest.fixture(autouse=True, scope="session")
def _one_folder_of_trials(tmp_path_factory, request):
    """All workers of a test run share one folder."""
    own = tmp_path_factory.getbasetemp()
    trials.folder = own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    """Float64, a cleared parameter store, a fixed public seed, one thread; clocks stand still."""
    monkeypatch.setattr(origins, "_minute", lambda: "2026-01-02T03:04Z")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)
