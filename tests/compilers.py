"""Tests that compile."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler"
)
