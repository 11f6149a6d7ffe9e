"""The notebooks run from top to bottom and draw their pictures."""

import pathlib

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.e2e

COLAB = pathlib.Path(__file__).parents[1] / "colab"


def first_layers(count: int) -> str:
    return (
        "import dataclasses\n"
        f"layers = model.params['layers'][:{count}]\n"
        "model = model._replace(\n"
        "    spec=dataclasses.replace(model.spec, num_layers=len(layers)),\n"
        "    params=model.params | {'layers': layers},\n"
        ")\n"
    )


# A model of random weights, which needs no download; it reads random tokens.
TINY = """\
from kvjax.models import presets

shape = 1, 16, 32, 4, 2, 50, 64
presets.CONFIGS["small"] = presets._config("LlamaForCausalLM", *shape)
CONFIG |= {"model": "random:small", "memory_gb": 0.001, "num_examples": 4, "budget": 32}
CONFIG |= {"prompt_tokens": 48, "prefill_chunk": 16, "max_new_tokens": (2, 4)}
"""

# What the test puts behind the cells with these tags: the same run, made short.
SHORT = {
    "quickstart.ipynb": {
        "settings": "PROMPT_TOKENS, BUDGET, NEW_TOKENS = 300, 160, 4",
        "model": first_layers(4),
    },
    "write_a_policy.ipynb": {
        "settings": "PROMPTS, PROMPT_TOKENS, BUDGET, NEW_TOKENS = 2, 200, 130, 2",
        "model": first_layers(1),
        "known": "del known['streaming'], known['key_diff']",
    },
    "reproduce_batch_max.ipynb": {"settings": TINY},
}
NEED_MODEL = set(SHORT) - {"reproduce_batch_max.ipynb"}


def test_every_notebook_is_run():
    assert {path.name for path in COLAB.glob("*.ipynb")} == set(SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_notebook_is_stored_without_outputs(name):
    notebook = nbformat.read(COLAB / name, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in code_cells(notebook))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.model if n in NEED_MODEL else ())
        for n in SHORT
    ],
)
def test_notebook_runs(name, request, tmp_path, monkeypatch):
    if name in NEED_MODEL:
        request.getfixturevalue("smollm2")
    monkeypatch.delenv("XLA_FLAGS")  # one device, as the reader has
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = shortened(nbformat.read(COLAB / name, as_version=4), SHORT[name])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


def shortened(notebook, short):
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        for tag in cell.metadata.get("tags", ()):
            cells.append(nbformat.v4.new_code_cell(short[tag]))
    assert len(cells) == len(notebook.cells) + len(short)
    notebook.cells = cells
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
