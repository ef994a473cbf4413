import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"


@pytest.mark.filterwarnings("default")  # what Jupyter's own packages warn about is not ours
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "the notebook is to be stored with its outputs"
    for cell in cells:
        # Where training takes long only because it goes on for long, a test needs a few steps.
        cell.source = cell.source.replace("steps = 30", "steps = 3")
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    text = "".join(str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code")
    assert "compiled 1 time" in text and "image/png" in text
