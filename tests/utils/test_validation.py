"""Settings that are no numbers, no choices and no flags, or beyond what can be computed with."""

import math

import numpy as np
import pytest
import torch

from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import (
    require_choice,
    require_count,
    require_flag,
    require_number,
    require_scale,
    require_tensors,
)

# Comparing these gives an array, or no truth value at all.
AMBIGUOUS = [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([]), [], {}, None, b"a"]
WITH_NAN = {"a": torch.tensor([0.0, math.nan])}
NO_SCALES = [0.0, 1e-51, 1e51, 10**400, math.inf, math.nan, -1.0, True]
CASES = {
    "choice": (lambda name, value: require_choice(name, value, ("a", "b")), ["a"], ["c"]),
    "number": (lambda name, value: require_number(name, value, above=0.0), [0.5], [0.0, math.inf]),
    "scale": (require_scale, [1e-50, 1, np.float32(0.5), 1e50], NO_SCALES),
    "count": (require_count, [2**53], [0, 2**53 + 1, 10**400, 1.0, True]),
    "flag": (require_flag, [np.True_], [0, 1, "True"]),
}


@pytest.mark.parametrize("kind", CASES)
def test_values_are_refused_by_name(kind):
    require, good, bad = CASES[kind]
    for value in good:
        assert require("noun", value) == value
    for value in bad + AMBIGUOUS:
        with pytest.raises(ConfigurationError, match="noun"):
            require("noun", value)


def test_infinite_scales_and_tensors():
    assert require_scale("noun", math.inf, infinite=True) == math.inf
    assert require_tensors("noun", {"a": torch.zeros(2)}).keys() == {"a"}
    for value in ([], {"a": 1.0}, {1: torch.zeros(1)}, WITH_NAN):
        with pytest.raises(ConfigurationError, match="noun"):
            require_tensors("noun", value)
