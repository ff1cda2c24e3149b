"""Break the privacy code on purpose and see the tests fail.

Each mutation changes one text of package or examples in a scratch copy and runs the tests that
should notice. A mutation that survives is a hole in the tests. It shows nothing if none of its
tests could run ("NO TEST"), or if they did not end ("HANGS"). A mutation names a definition, not
its file, so the definition may move. The lists lie beside the tests, in
tests/<room>/mutations.txt. Calls::

    python tests/mutate.py mechanism accounting    # of these rooms
    python tests/mutate.py --changed main          # in files that differ from a commit
    python tests/mutate.py --only "half the noise" # by part of the name
    python tests/mutate.py --all --log found.txt   # hours; goes on where the log ends
"""

import argparse
import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SOURCES = ("pyro_dp", "examples")  # a room is a folder of one of them
LIMIT = 900  # seconds of tests for a mutation


@dataclass(frozen=True)
class Mutation:
    """A change that breaks a definition, and the tests that must notice.

    :param where: the name of a function, class or constant, a method's as ``Class.method``.
    :param old: text that is found once in what has this name, in package and examples.
    :param tests: names of test files, with ``::case`` or without, separated by spaces.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


def mutations(room: str) -> list[Mutation]:
    """Those of a folder of the tests: each a heading with where, name and tests, and a diff."""
    path, found = TESTS / room / "mutations.txt", []
    text = path.read_text() if path.exists() else ""
    for part in re.split(r"^@@ ", text, flags=re.MULTILINE)[1:]:
        heading, *lines = part.splitlines()
        where, name, tests = heading.split(" | ")
        old, new = ("\n".join(each[1:] for each in lines if each[0] == sign) for sign in "-+")
        found.append(Mutation(name, where, old, new, tests))
    return found


def rooms() -> list[str]:
    return sorted(path.parent.name for path in TESTS.glob("*/mutations.txt"))


def place(mutation: Mutation, root: Path) -> tuple[Path, int]:
    """The file, and where in it the text begins.

    :raises LookupError: there is not exactly one such text.
    """
    found = []
    for path, source in _sources(root):
        if mutation.old not in source:  # so that few are parsed
            continue
        for start, end in _spans(source, mutation.where):
            while (start := source.find(mutation.old, start, end)) >= 0:
                found.append((path, start))
                start += 1
    if len(found) != 1:
        raise LookupError(f"{mutation.name}: {len(found)} places in {mutation.where}")
    return found[0]


@functools.lru_cache(maxsize=1)
def _sources(root: Path) -> list[tuple[Path, str]]:
    paths = (each for name in SOURCES for each in (root / name).rglob("*.py"))
    return [(path, path.read_text()) for path in paths]


def _spans(source: str, name: str) -> list[tuple[int, int]]:
    """From where to where something of this name is defined, in characters."""
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    return [
        (line_starts[first - 1], line_starts[last])
        for found, first, last in _parsed(source)
        if found == name
    ]


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> list[tuple[str, int, int]]:
    return [*_definitions(ast.parse(source).body)]


def _definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Qualified names, first and last lines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield prefix + node.name, first, node.end_lineno
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield prefix + ast.unparse(target), node.lineno, node.end_lineno


def test_files(mutation: Mutation, tests: Path) -> list[str]:
    """Paths of its tests, for pytest.

    :raises LookupError: there is no such file or test.
    """
    found = []
    for name in mutation.tests.split():
        file, *case = name.split("::")
        paths = list(tests.rglob(file))
        if len(paths) != 1:
            raise LookupError(f"{mutation.name}: {len(paths)} files {file}")
        if case and not re.search(rf"\n(def|class) {case[0]}\b", paths[0].read_text()):
            raise LookupError(f"{mutation.name}: no test {name}")
        found.append("::".join([str(paths[0]), *case]))
    return found


def verdict(mutation: Mutation) -> str:
    """The tests' verdict: only one that ran and failed has caught the mutation."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in (*SOURCES, "tests", "benchmarks", "docs"):  # tests read the others, too
            shutil.copytree(ROOT / name, copy / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        path, start = place(mutation, copy)
        source = path.read_text()
        path.write_text(source[:start] + mutation.new + source[start + len(mutation.old) :])
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *test_files(mutation, copy / "tests")],
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": scratch, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # its children are ended with it
        )
        try:
            return {0: "SURVIVES", 1: "caught"}.get(run.wait(LIMIT), "NO TEST")
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return "HANGS"


def changed_since(commit: str) -> set[str]:
    """Files of package, examples and tests that differ from a commit, from the root."""
    command = ["git", "diff", "--name-only", commit, "--", *SOURCES, "tests"]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def touches(mutation: Mutation, files: set[str]) -> bool:
    path, _ = place(mutation, ROOT)
    tests = [each.split("::")[0] for each in test_files(mutation, TESTS)]
    return any(str(Path(each).relative_to(ROOT)) in files for each in [path, *tests])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(rooms())}")
    parser.add_argument("--all", action="store_true", help="of all rooms")
    parser.add_argument("--changed", metavar="COMMIT", help="what differs from it")
    parser.add_argument("--only", metavar="TEXT", help="part of the name")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("--log", type=Path, help="results are added; what is in it is not repeated")
    options = parser.parse_args()
    if not (options.rooms or options.all or options.changed or options.only):
        parser.error("name rooms, or give --all, --changed or --only")
    if unknown := set(options.rooms) - set(rooms()):
        parser.error(f"no mutations of {', '.join(sorted(unknown))}")
    chosen = [each for room in options.rooms or rooms() for each in mutations(room)]
    if options.only:
        chosen = [each for each in chosen if options.only in each.name]
    if options.changed:
        files = changed_since(options.changed)
        chosen = [each for each in chosen if touches(each, files)]
    known = options.log.read_text().splitlines() if options.log and options.log.exists() else []
    done = {line[10:] for line in known}
    survivors = sum(not line.startswith("caught") for line in known)
    todo = [each for each in chosen if each.name not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, said in zip(todo, pool.map(verdict, todo), strict=True):
            line = f"{said:<10}{mutation.name}"
            print(line, flush=True)
            if options.log:
                with options.log.open("a") as file:
                    file.write(line + "\n")
            survivors += said != "caught"
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
