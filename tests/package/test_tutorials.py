"""Every tutorial runs in a fresh kernel of this interpreter, with its committed outputs.

The deadline counts the kernel's processor time: a busy machine makes no notebook fail. Sleep costs
none, so there is a generous limit of wall time, too.
"""

import ast
import base64
import io
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
pytest.importorskip("resource")  # not on Windows

FOLDER = Path(__file__).parents[2] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 300  # processor time, the start of the kernel included
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
CLOSE, ROUNDED, PIXELS = 0.02, 0.003, 0.02  # numbers: relative, absolute; of white, in the mean
HIDDEN = {("source_hidden", True), ("outputs_hidden", True)}
BEYOND = r"<details>|## |\*\*(?:Exercise )?\d\."  # an explanation that is folded, or what is next
PATIENCE = 4  # wall time of a cell, in units of the deadline
LIMIT = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS + 5}))"


@pytest.fixture(params=TUTORIALS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def failure(notebook, folder):
    """The error, or None."""
    # Without directories of installed kernels "python3" is this interpreter.
    specs = jupyter_client.kernelspec.KernelSpecManager(kernel_dirs=[])
    client = nbclient.NotebookClient(
        notebook,
        km=jupyter_client.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        resources={"metadata": {"path": folder}},
        startup_timeout=600,
        timeout=PATIENCE * SECONDS,
        # The system ends a kernel that has used its time up.
        extra_arguments=[f"--IPKernelApp.exec_lines={LIMIT}"],
    )
    try:
        client.execute(cleanup_kc=True)
    except nbclient.exceptions.DeadKernelError:
        return f"The kernel died, or used up its {SECONDS} s of processor time."
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _as_a_reader_has_it(monkeypatch):
    """A kernel has the package and one thread. Idle threads would use processor time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.one_in(16)
@pytest.mark.slow
def test_gives_the_outputs_that_it_shows(notebook, tmp_path):
    shown = [shown_in(cell) for cell in code_cells(notebook)]
    if (message := failure(notebook, tmp_path)) is not None:
        pytest.fail(message, pytrace=False)
    for cell, old in zip(code_cells(notebook), shown, strict=True):
        if (difference := different(old, shown_in(cell))) is not None:
            pytest.fail(f"{difference}\n\nof the cell\n\n{cell.source}", pytrace=False)


def shown_in(cell):
    """The outputs under a cell: texts and pictures, in order.

    A busy machine sends a text that takes long to print in parts: they are one.
    """
    found, printed = [], ""
    for output in cell.outputs:
        before, printed = printed, output.get("name", "")
        if printed and printed == before:
            found[-1] += output.text
        elif printed:
            found.append(output.text)
        elif "image/png" in output.data:
            found.append(picture(output.data["image/png"]))
        else:
            found.append(output.data["text/plain"])
    return found


def picture(png):
    import matplotlib.image

    return matplotlib.image.imread(io.BytesIO(base64.b64decode(png)))[..., :3]


def different(old, new):
    """None, or how the outputs of a cell differ by more than arithmetic does between machines."""
    if [type(each) for each in old] != [type(each) for each in new]:
        return f"{len(old)} outputs were shown, and a run gives {len(new)}, or others"
    for one, other in zip(old, new, strict=True):
        if isinstance(one, str):
            words = [" ".join(NUMBER.sub("#", text).split()) for text in (one, other)]
            numbers = [np.array(NUMBER.findall(text), float) for text in (one, other)]
            if words[0] != words[1] or not np.allclose(*numbers, rtol=CLOSE, atol=ROUNDED):
                return f"shown was\n\n{one}\n\nand a run gives\n\n{other}"
        elif np.abs(np.subtract(one.shape, other.shape)).max() > 3:
            return f"a picture of {one.shape} was shown, and a run gives one of {other.shape}"
        else:
            height, width = np.minimum(one.shape, other.shape)[:2]
            if abs(one[:height, :width] - other[:height, :width]).mean() > PIXELS:
                return "a run gives another picture"
    return None


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (["error 0.100, 3 of 20"], ["error  0.101, 3 of 20"], True),
        (["error 0.100, 3 of 20"], ["error 0.150, 3 of 20"], False),
        (["error 0.1"], ["errors 0.1"], False),
        (["error 0.1"], ["error 0.1", "a warning"], False),
        ([np.ones((9, 9, 3))], [np.ones((9, 8, 3))], True),
        ([np.ones((9, 9, 3))], [np.zeros((9, 9, 3))], False),
        ([np.ones((9, 9, 3))], ["text"], False),
    ],
)
def test_outputs_that_differ(old, new, same):
    assert (different(old, new) is None) == same


@pytest.mark.slow
def test_imports(notebook):
    """The package has all names that it imports: the quick part of ``test_runs``."""
    code = "\n".join(cell.source for cell in code_cells(notebook))
    code = "\n".join(line for line in code.splitlines() if not line.startswith("%"))
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert any("pyro_dp" in ast.unparse(node) for node in imports)
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})


def test_is_kept_with_outputs(notebook):
    for cell in code_cells(notebook):
        assert cell.execution_count is not None
        for output in cell.outputs:
            assert output.get("name") != "stderr", output.text
            assert output.output_type != "error"


def test_is_a_lesson(notebook):
    """Level, goals, questions to predict, exercises with folded solutions, no long cell.

    Jupyter, too, shows neither a solution nor its outputs or the text after it.
    """
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    first = notebook.cells[0].source
    assert re.search(r"\*\*Level:.* \*\*Time:\*\* \d+ minutes\. \*\*Prerequisites:", first)
    assert "**Learning goals" in text
    assert "What to remember" in text
    assert text.lower().count("predict before you run") >= 2
    solutions = [c for c in code_cells(notebook) if "hide-cell" in c.metadata.get("tags", [])]
    assert 2 <= len(solutions)
    assert all({*cell.metadata.jupyter.items()} >= HIDDEN for cell in solutions)
    for cell, following in pairwise(notebook.cells):
        assert cell not in solutions or re.match(BEYOND, following.source), following.source
    longest = max(code_cells(notebook), key=lambda cell: cell.source.count("\n"))
    assert len(longest.source.splitlines()) < 25, longest.source
