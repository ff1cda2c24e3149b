"""A device that stands in for an accelerator: see ``stand_in_device.cpp``.

After :func:`build`, torch has the device in this process.
"""

import importlib.util
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "standin"
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def build(folder):
    """Compile it there, which takes a minute, and register it with torch.

    :returns: a module; ``on_wait(f)`` has it call ``f`` with the name of whatever waits.
    """
    source, target = Path(__file__).with_suffix(".cpp"), Path(folder) / "stand_in_device.so"
    python = sysconfig.get_paths()["include"]
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), python)]
    places = cpp_extension.library_paths()
    libraries = [f"-L{p}" for p in places] + [f"-Wl,-rpath,{p}" for p in places]
    libraries += [f"-l{name}" for name in _LIBRARIES]
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w"]
    options += ["-DTORCH_EXTENSION_NAME=stand_in_device", "-DAT_PER_OPERATOR_HEADERS"]
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [compiler, *options, *includes, str(source), "-o", str(target), *libraries]
    subprocess.run(command, check=True)
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location("stand_in_device", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, _what_torch_asks())
    return module


def _what_torch_asks():
    return types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [],
        _is_in_bad_fork=lambda: False,
    )
