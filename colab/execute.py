"""Runs notebooks and stores what they show, with a hash of the code that showed it.

    python colab/execute.py [quickstart.ipynb ...]

All of them without names; minutes each on two CPU cores. `tests/test_notebook.py`
compares the hash: whoever changes a code cell runs this.
"""

import base64
import hashlib
import io
import pathlib
import sys
import tempfile

import nbclient
import nbformat
from PIL import Image

HERE = pathlib.Path(__file__).parent


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def sources_hash(notebook) -> str:
    """sha256 of the code cells, in their order."""
    sources = [cell.source for cell in code_cells(notebook)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def shorten(notebook) -> None:
    """Leaves out what libraries say on stderr, and gives pictures few colours."""
    for cell in code_cells(notebook):
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = few_colours(output.data["image/png"])


def few_colours(png: str) -> str:
    """A picture, in base64, with a palette of 128 colours."""
    packed = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        flat = picture.convert("RGB").quantize(
            128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        flat.save(packed, "PNG", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def execute(path: pathlib.Path) -> None:
    """Runs a notebook in an empty folder, and writes it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=3600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    shorten(notebook)
    notebook.metadata["executed"] = {"sources": sources_hash(notebook)}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.name for path in HERE.glob("*.ipynb")):
        execute(HERE / name)
        print(name, f"{(HERE / name).stat().st_size / 1000:.0f} kB")
