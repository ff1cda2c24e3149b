"""Every tutorial runs from its first cell to its last, in a fresh kernel of this interpreter.

The deadline counts the kernel's processor time: a busy machine makes no notebook fail. Sleep costs
none, so there is a generous limit of wall time, too.
"""

import ast
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
pytest.importorskip("resource")  # not on Windows

TUTORIALS = sorted((Path(__file__).parents[2] / "tutorials").glob("*.ipynb"))
SECONDS = 120  # of processor time, the start of the kernel included
PATIENCE = 20  # wall time of a cell, in units of the deadline
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds} + 5))"


@pytest.fixture(params=TUTORIALS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def failure(notebook, folder, seconds=SECONDS, patience=PATIENCE):
    """What went wrong, or None."""
    # Without directories of installed kernels "python3" is this interpreter.
    specs = jupyter_client.kernelspec.KernelSpecManager(kernel_dirs=[])
    client = nbclient.NotebookClient(
        notebook,
        km=jupyter_client.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        resources={"metadata": {"path": folder}},
        startup_timeout=600,
        timeout=patience * seconds,
        # The system ends a kernel that has used its time up.
        extra_arguments=[f"--IPKernelApp.exec_lines={LIMIT.format(seconds=seconds)}"],
    )
    try:
        client.execute(cleanup_kc=True)
    except nbclient.exceptions.DeadKernelError:
        return f"The kernel died, or used up its {seconds} s of processor time."
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Idle threads that spin would count as processor time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_runs(notebook, tmp_path):
    if (message := failure(notebook, tmp_path)) is not None:
        pytest.fail(message, pytrace=False)


def test_imports(notebook):
    """What it needs of the package is there: the quick part of what ``test_runs`` shows."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    code = "\n".join(line for line in code.splitlines() if not line.startswith("%"))
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert any("pyro_dp" in ast.unparse(node) for node in imports)
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})


@pytest.mark.parametrize(
    ("code", "seconds", "patience", "message"),
    [
        ("while True: pass", 4, 20, "processor time"),
        ("import time; time.sleep(3600)", 4, 1, "timed out"),
        # Longer by the clock than the deadline, but not at work.
        ("import time; time.sleep(6)", 4, 20, None),
        ("raise KeyError(7)", 4, 20, "KeyError"),
    ],
    ids=["works", "sleeps", "waits", "fails"],
)
def test_deadline(tmp_path, code, seconds, patience, message):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    found = failure(notebook, tmp_path, seconds, patience)
    assert found is None if message is None else message in found


def test_is_kept_without_outputs(notebook):
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
