"""Use the installed pyro_dp: its version, its types, its public names, and README.md's examples."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pyro_dp

ROOT = Path(__file__).parents[1]
found = Path(pyro_dp.__file__)
assert found.is_relative_to(sys.prefix), f"{found} is not the installed package"
assert (found.parent / "py.typed").exists()
for name in pyro_dp.__all__:
    getattr(pyro_dp, name)

project = (ROOT / "pyproject.toml").read_text()
version = importlib.metadata.version("pyro-dp")
assert f'\nversion = "{version}"\n' in project, f"pyproject.toml has another version than {version}"

examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
assert examples, "README.md has no Python example"
scope: dict = {}
for example in examples:
    exec(example, scope)
print(f"pyro_dp {version} on Python {sys.version.split()[0]}: {len(examples)} example(s) ran")
