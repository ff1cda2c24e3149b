"""The rooms of the package: who may use whom. It reads all imports, also those within functions."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_dp

# Each room, and the rooms that it may use: arrows go down. ARCHITECTURE.md describes each.
MAY_USE = {
    "utils": "",
    "accounting": "utils",
    "mechanism": "accounting utils",
    "graphs": "utils",
    "records": "mechanism graphs utils",
    "infer": "records graphs mechanism accounting utils",
    "vips": "infer records graphs mechanism accounting utils",
    "pipeline": "graphs mechanism accounting utils",
    "auditing": "accounting utils",
    # It alone needs pandas. Rooms below it have no columns of frames.
    "tabular": "infer records graphs mechanism accounting utils",
}
FRONT_DOORS = {"", "__main__", "federated", "teaching"}
APART = [
    ("infer.svi", "infer.ep"),
    ("infer.ep", "infer.svi"),
    ("infer.posterior", "infer.ep"),
    ("infer.posterior", "infer.svi"),
    ("vips", "infer.ep"),
    ("vips", "infer.svi"),
]


def sources():
    """By module, without the name of the package; of a folder its __init__."""
    root = Path(pyro_dp.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@functools.cache
def imported(module, source):
    """Names that a module imports from the package, each as its parts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            base = (node.module or "").split(".")
            found += [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
    return [parts for package, *parts in found if package == "pyro_dp"]


def imports(modules):
    """Which modules of the package each of its modules imports."""

    def of(parts):
        names = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        return next(name for name in names if name in modules)

    return {
        module: {of(parts) for parts in imported(module, source)}
        for module, source in modules.items()
    }


def wrong(modules):
    """Arrows that are not allowed, and circles."""
    said = []
    arrows = imports(modules)
    for module, used in arrows.items():
        room = module.split(".")[0]
        if module in FRONT_DOORS:
            continue
        if room not in MAY_USE:
            said.append(f"{module} lies in no room")
            continue
        for other in used:
            if other.split(".")[0] not in [room, *MAY_USE[room].split()]:
                said.append(f"{module} may not use {other or 'the package'}")
            for one, two in APART:
                if module.startswith(one) and other.startswith(two):
                    said.append(f"{module} may not use {other}")
    return said + [f"a circle: {' -> '.join(each)}" for each in circles(arrows)]


def circles(arrows):
    """One for each module that an arrow leads back to."""
    found, done = [], set()

    def visit(module, path):
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(arrows[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(arrows):
        visit(module, [])
    return found


def floors():
    """How many rooms stand on each other."""
    height = {}
    for room, used in MAY_USE.items():  # in an order in which those below come first
        height[room] = 1 + max((height[other] for other in used.split()), default=0)
    return max(height.values())


@pytest.mark.slow
def test_arrows_go_down():
    assert wrong(sources()) == []


def test_few_rooms_on_few_floors():
    assert len(MAY_USE) <= 11
    assert floors() <= 8
    rooms = {module.split(".")[0] for module in sources()} - FRONT_DOORS
    assert rooms == set(MAY_USE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("utils.files", "from pyro_dp.accounting import ledger", "may not use accounting.ledger"),
        ("accounting.pld", "import pyro_dp.mechanism.release", "may not use mechanism.release"),
        ("records.plate", "def f():\n    from pyro_dp.infer import base", "may not use infer.base"),
        ("auditing.audit", "from pyro_dp import DPSVI", "may not use the package"),
        ("infer.ep.dpsep", "from pyro_dp.infer.svi import moves", "may not use infer.svi"),
        ("accounting.events", "from pyro_dp.accounting.ledger import VERSION", "a circle"),
        ("odds", "", "lies in no room"),
    ],
)
def test_a_wrong_arrow_is_found(module, source, said):
    modules = sources()
    modules[module] = modules.get(module, "") + "\n" + source
    assert any(said in each for each in wrong(modules))


@pytest.mark.slow
def test_import_is_light():
    """Libraries with a slow import are imported when they are first used."""
    heavy = "scipy.special scipy.stats scipy.optimize scipy.signal pandas matplotlib autodp"
    heavy += " pyro_dp.teaching"
    code = f"import sys, pyro_dp; print([m for m in {heavy.split()} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
