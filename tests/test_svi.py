"""DPSVI: equality with SVI, sensitivity, noise, sampling, state, and errors."""

import pytest
import torch
from problems import PROBLEMS, fit_dpsvi, fit_svi

# Local draws come from the private stream by design; a declared subsample makes SVI use a part.
_SAME_DRAWS = [
    n for n in PROBLEMS if n not in ("VAE", "VAE, mean field", "hierarchical", "subsample_size")
]


@pytest.mark.parametrize("privatize", ["latents", "parameters"])
@pytest.mark.parametrize("name", _SAME_DRAWS)
def test_equals_svi(name, privatize):
    """sigma=0, C=inf, all records: Pyro's own optimisation path under the same seed."""
    ours = fit_dpsvi(PROBLEMS[name], steps=50, privatize=privatize)
    theirs = fit_svi(PROBLEMS[name], steps=50)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-7, atol=1e-9)
