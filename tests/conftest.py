import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_state():
    """Float64, a cleared parameter store, a fixed public seed, one thread."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)
