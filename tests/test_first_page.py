"""What newcomers read: the first page's code runs, and the files it speaks of exist."""

import dataclasses
import pathlib
import re

import pytest

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "index.md"
CODE = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def first_layers(model, count):
    spec = dataclasses.replace(model.spec, num_layers=count)
    layers = model.params["layers"][:count]
    return model._replace(spec=spec, params=model.params | {"layers": layers})


@pytest.mark.e2e
@pytest.mark.model
def test_code_of_the_first_page(smollm2, monkeypatch):
    monkeypatch.setattr(kvjax, "load", lambda name: first_layers(smollm2, 4))
    names = {}
    for code in CODE:
        exec(compile(code, PAGE.name, "exec"), names)
        for completion in names.pop("done"):
            assert len(completion.tokens) == 32
            assert len(completion.kept_positions) == 4
    assert len(CODE) == 3


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md"])
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|kvjax|experiments|configs|docs)/[\w/.]+)`", text)
    linked = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text)
    assert named or linked
    assert [name for name in named + linked if not (ROOT / name).exists()] == []
