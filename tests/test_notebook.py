"""The notebook runs from top to bottom and draws its pictures."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "colab" / "quickstart.ipynb"

# What the test puts behind the cells with these tags: the same run, made short.
SHORT = {
    "settings": "PROMPT_TOKENS, BUDGET, NEW_TOKENS = 300, 160, 4",
    "model": (
        "import dataclasses\n"
        "layers = model.params['layers'][:4]\n"
        "model = model._replace(\n"
        "    spec=dataclasses.replace(model.spec, num_layers=len(layers)),\n"
        "    params=model.params | {'layers': layers},\n"
        ")\n"
    ),
}


def test_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in code_cells(notebook))


@pytest.mark.model
def test_notebook_runs(smollm2, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device, as the reader has
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = shortened(nbformat.read(NOTEBOOK, as_version=4))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


def shortened(notebook):
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        for tag in cell.metadata.get("tags", ()):
            cells.append(nbformat.v4.new_code_cell(SHORT[tag]))
    assert len(cells) == len(notebook.cells) + len(SHORT)
    notebook.cells = cells
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
