"""The notebooks start anywhere, run to the end, and hold the outputs of their code."""

import importlib.util
import pathlib
import runpy
import tomllib

import nbclient
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = pathlib.Path(__file__).parents[1]
COLAB = ROOT / "colab"
EXECUTE = runpy.run_path(str(COLAB / "execute.py"))
code_cells, sources_hash = EXECUTE["code_cells"], EXECUTE["sources_hash"]


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
def test_outputs_are_those_of_the_code(name):
    """Whoever changes a code cell runs `python colab/execute.py NAME`."""
    notebook = nbformat.read(COLAB / name, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["executed"]["sources"] == sources_hash(notebook)
    assert_shown(notebook)
    assert (COLAB / name).stat().st_size < 300_000


def test_changed_code_is_stale():
    notebook = nbformat.read(COLAB / "quickstart.ipynb", as_version=4)
    code_cells(notebook)[-1].source += "\n"
    assert notebook.metadata["executed"]["sources"] != sources_hash(notebook)


def assert_shown(notebook):
    """Two pictures or more, and no error."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


def first_cells():
    notebooks = [nbformat.read(COLAB / name, as_version=4) for name in SHORT]
    return {code_cells(notebook)[0].source for notebook in notebooks}


def test_notebooks_start_alike():
    assert len(first_cells()) == 1


@pytest.mark.parametrize(
    ("there", "extra"),
    [
        ((), "[eval]"),
        (("nvidia0",), "[eval,cuda]"),
        (("accel0",), "[eval,tpu]"),
        (("vfio/0",), "[eval,tpu]"),
    ],
)
@pytest.mark.parametrize("checkout", [False, True])
def test_first_cell_installs(there, extra, checkout, tmp_path, monkeypatch):
    """For the device at hand, from the repository or the checkout around it."""
    for name in there:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    (tmp_path / "colab").mkdir()
    if checkout:
        (tmp_path / "kvjax").mkdir()
    monkeypatch.chdir(tmp_path / "colab")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = started(dev=tmp_path / "dev")
    repository = f"kvjax{extra} @ git+https://github.com/"
    if checkout:
        assert asked == [f"{tmp_path}{extra}"]
    else:
        assert len(asked) == 1 and asked[0].startswith(repository)
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extra.strip("[]").split(",")) <= set(offered["optional-dependencies"])


def test_first_cell_installs_nothing_over_what_is_there():
    assert started() == []


def started(dev="/dev"):
    """What the first cell asks pip for."""
    (cell,) = first_cells()
    asked = []

    class Shell:
        def run_line_magic(self, magic, line):
            assert magic == "pip" and line.startswith('install -q "')
            asked.append(line.removeprefix('install -q "').removesuffix('"'))

    names = {"get_ipython": Shell}
    exec(TransformerManager().transform_cell(cell.replace("/dev", str(dev))), names)
    return [line.format(**names) for line in asked]  # as IPython does


def test_fetched_records_are_those_of_the_repository():
    notebook = nbformat.read(COLAB / "reproduce_batch_max.ipynb", as_version=4)
    (cell,) = (cell for cell in code_cells(notebook) if "NAMES = (" in cell.source)
    names = {}
    exec(cell.source[: cell.source.index("known = ")], names)
    there = {path.stem for path in (ROOT / names["KEPT"]).glob("*.jsonl")}
    assert set(names["NAMES"]) == there


@pytest.mark.e2e
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
    assert_shown(notebook)


def shortened(notebook, short):
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        for tag in cell.metadata.get("tags", ()):
            cells.append(nbformat.v4.new_code_cell(short[tag]))
    assert len(cells) == len(notebook.cells) + len(short)
    notebook.cells = cells
    return notebook
