"""Every figure in docs/decisions.md can be repeated, or is in a committed record."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
SECTIONS = dict(part.partition("\n")[::2] for part in TEXT.split("\n## ")[1:])
PATH = re.compile(r"\b(?:docs/data|experiments|configs|tests)/[\w./*\\]*\w")
PAGE = re.compile(r"\]\((\w+\.md)")  # made of records
UNITS = r"(?:ms|s|MB|GB|MiB|GB/s|tok/s|tokens/s|tokens per second|kcycles)\b"
FIGURE = re.compile(rf"^\|.*\d|\b\d[\d,.]*\s{UNITS}", re.MULTILINE)


def named(section):
    """Files and folders that a section names."""
    paths = (found.replace("\\", "") for found in PATH.findall(section))
    return {*paths, *(f"docs/{page}" for page in PAGE.findall(section))}


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_with_figures_says_where_they_are_from(title):
    section = SECTIONS[title]
    if FIGURE.search(section):
        assert named(section) or "by shapes" in section


@pytest.mark.parametrize("title", SECTIONS)
def test_what_a_section_names_is_there(title):
    """Of names with braces, what stands before these."""
    paths = named(SECTIONS[title])
    assert not [path for path in paths if not any(ROOT.glob(f"{path}*"))]


def test_no_figure_is_a_probe_s():
    """Measured by hand, once, with nothing to repeat it by."""
    assert not re.findall(r"\ba probe\b|no script reproduces", TEXT)
