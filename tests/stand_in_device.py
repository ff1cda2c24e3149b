"""A device that stands in for an accelerator: see ``stand_in_device.cpp``.

After :func:`build`, torch has the device in this process.
"""

import ctypes
import shutil
import subprocess
import types
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "standin"
_LIBRARIES = ("c10", "torch_cpu", "torch")
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def build(folder):
    """Compile it there, which takes half a minute, and register it with torch.

    :returns: a function of ``f``, which is called with the name of whatever waits; None: no longer.
    """
    source, target = Path(__file__).with_suffix(".cpp"), Path(folder) / "stand_in_device.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    places = cpp_extension.library_paths()
    libraries = [f"-L{p}" for p in places] + [f"-Wl,-rpath,{p}" for p in places]
    libraries += [f"-l{name}" for name in _LIBRARIES]
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", "-DAT_PER_OPERATOR_HEADERS"]
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [compiler, *options, *includes, str(source), "-o", str(target), *libraries]
    subprocess.run(command, check=True)
    torch.utils.rename_privateuse1_backend(NAME)
    library, kept = ctypes.CDLL(str(target)), []
    torch._register_device_module(NAME, _what_torch_asks())

    def on_wait(call):
        kept[:] = [_LISTENER(lambda name: call(name.decode())) if call else _LISTENER()]
        library.on_wait(*kept)

    return on_wait


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
