"""What newcomers read first: its code runs, and the files it speaks of exist."""

import dataclasses
import pathlib
import re

import pytest

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {"docs/index.md": 3, "README.md": 1}  # blocks to run, the first ones


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


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md"])
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|kvjax|experiments|configs|docs)/[\w/.]+)`", text)
    linked = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text)
    assert named or linked
    assert [name for name in named + linked if not (ROOT / name).exists()] == []
