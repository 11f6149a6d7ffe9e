"""What newcomers read first: its code runs, and the files it speaks of exist."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from kvjax.evaluation import tasks

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {"docs/quickstart.md": 3, "README.md": 1}  # blocks to run, the first ones


def first_layers(model, count):
    spec = dataclasses.replace(model.spec, num_layers=count)
    layers = model.params["layers"][:count]
    return model._replace(spec=spec, params=model.params | {"layers": layers})


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_first_pages(page, smollm2, monkeypatch):
    monkeypatch.setattr(kvjax, "load", lambda name: first_layers(smollm2, 4))
    blocks, names = BLOCK.findall((ROOT / page).read_text()), {}
    assert len(blocks) >= PAGES[page]
    for code in blocks[: PAGES[page]]:
        exec(compile(code, page, "exec"), names)
        for completion in names.pop("done"):
            assert 32 <= len(completion.tokens) <= 64
            assert len(completion.kept_positions) == 4
            kept = completion.kept_positions[3][1]
            most = 512 + 32  # what is decoded comes on top after the prompt
            assert 400 < len(kept) <= most < 850 < kept[-1]


def test_code_of_a_policy_alone(capsys):
    """README's block evicts the lowest average weights, as NumPy has them."""
    blocks, names = BLOCK.findall((ROOT / "README.md").read_text()), {}
    code = next(block for block in blocks if "select_evictions" in block)
    exec(compile(code, "README.md", "exec"), names)
    assert "True" in capsys.readouterr().out
    weights = np.asarray(names["weights"], np.float64)
    means = weights.sum(-2) / np.arange(8, 0, -1)  # over the queries that saw a key
    evicted = np.asarray(names["evicted"])
    lowest = np.sort(np.argsort(means, axis=-1)[..., :2], axis=-1)
    for head in range(2):
        assert np.flatnonzero(evicted[0, head]).tolist() == lowest[0, head].tolist()


def test_code_of_a_task_of_ones_own(tmp_path, monkeypatch):
    blocks = BLOCK.findall((ROOT / "docs" / "architecture.md").read_text())
    code = next(block for block in blocks if "Task(" in block)
    (tmp_path / "my_own_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    task = tasks.get("my_own_tasks:sums")
    first, second = task.examples(None, 2, 5)
    assert (first.prompt, second.prompt) == ("5+1=", "6+4=")
    assert task.grade(" 10", second) == {"exact_match": 1.0}
    assert task.grade("11", second) == {"exact_match": 0.0}


def test_modules_that_the_pages_name_are_there():
    """In a fresh process, where nothing else has imported them; and not before."""
    code = (
        "import sys, kvjax; assert 'kvjax.evaluation' not in sys.modules; "
        "assert 'kvjax.training' not in sys.modules; "
        "kvjax.evaluation.tasks.names(), kvjax.training.fit_heads"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert not hasattr(kvjax, "nothing")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md"])
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|kvjax|experiments|configs|docs)/[\w/.]+)`", text)
    linked = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text)
    assert named or linked
    assert [name for name in named + linked if not (ROOT / name).exists()] == []
