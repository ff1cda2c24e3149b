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


@pytest.mark.parametrize("value", AMBIGUOUS)
def test_ambiguous_values_are_refused_by_name(value):
    refusals = [
        lambda: require_choice("noun", value, ("a", "b")),
        lambda: require_number("noun", value, above=0.0, below=1.0),
        lambda: require_scale("noun", value),
        lambda: require_count("noun", value),
        lambda: require_flag("noun", value),
    ]
    for refuse in refusals:
        with pytest.raises(ConfigurationError, match="noun"):
            refuse()


def test_scale():
    for value in (1e-50, 1, np.float32(0.5), 1e50):
        assert require_scale("noun", value) == value
    assert require_scale("noun", math.inf, infinite=True) == math.inf
    for value in (0.0, 1e-51, 1e51, 10**400, math.inf, math.nan, -1.0, True):
        with pytest.raises(ConfigurationError, match="noun"):
            require_scale("noun", value)


def test_count():
    assert require_count("noun", 2**53) == 2**53
    for value in (0, 2**53 + 1, 10**400, 1.0, True):
        with pytest.raises(ConfigurationError, match="noun"):
            require_count("noun", value)


def test_flag():
    assert require_flag("noun", np.True_) is True
    for value in (0, 1, "True"):
        with pytest.raises(ConfigurationError, match="noun"):
            require_flag("noun", value)


@pytest.mark.parametrize(
    "value", [[], {"a": 1.0}, {1: torch.zeros(1)}, {"a": torch.tensor([0.0, math.nan])}]
)
def test_tensors(value):
    assert require_tensors("noun", {"a": torch.zeros(2)}).keys() == {"a"}
    with pytest.raises(ConfigurationError, match="noun"):
        require_tensors("noun", value)
