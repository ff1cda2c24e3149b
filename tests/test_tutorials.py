"""Every tutorial runs from its first cell to its last, in a fresh kernel of this interpreter."""

import time
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
SECONDS = 120


@pytest.fixture(params=TUTORIALS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_runs(notebook, tmp_path):
    # Without directories of installed kernels "python3" is this interpreter.
    specs = jupyter_client.kernelspec.KernelSpecManager(kernel_dirs=[])
    kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    deadline = time.monotonic() + SECONDS
    client = nbclient.NotebookClient(
        notebook,
        km=kernel,
        resources={"metadata": {"path": tmp_path}},
        timeout_func=lambda cell: max(1.0, deadline - time.monotonic()),
    )
    failure = None
    try:
        client.execute(cleanup_kc=True)
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)


def test_is_kept_without_outputs(notebook):
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
