"""Every figure of docs/decisions and docs/results names its record, command or test."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [p for d in ("decisions", "results") for p in (ROOT / "docs" / d).glob("*.md")]
SECTIONS = {
    f"{page.parent.name}/{page.stem}: {title}": text
    for page in sorted(PAGES)
    for title, text in (
        part.partition("\n")[::2] for part in page.read_text("utf-8").split("\n## ")[1:]
    )
}
PATH = re.compile(r"\b(?:docs/data|experiments|configs|tests)/[\w./*\\]*\w")
LINKED = re.compile(r"\]\((?:\.\./)?((?:results/)?\w+\.md)")  # pages made of records
# Scripts of decided races, in the git history only; pages that name them say so.
REMOVED = re.compile(
    r"experiments/bench_(layout|eviction|heads|loading|codecs|transformers)\.py"
)
UNITS = r"(?:ms|s|MB|GB|MiB|GB/s|tok/s|tokens/s|tokens per second|kcycles)\b"
FIGURE = re.compile(rf"^\|.*\d|\b\d[\d,.]*\s{UNITS}", re.MULTILINE)


def paths_in(section: str) -> set[str]:
    """Files and folders that a section names, from the repository's root."""
    return {found.replace("\\", "") for found in PATH.findall(section)}


def test_sections_are_found():
    assert len(SECTIONS) > 50


@pytest.mark.parametrize("title", SECTIONS)
def test_figures_name_their_source(title):
    section = SECTIONS[title]
    if FIGURE.search(section):
        assert paths_in(section) or LINKED.search(section) or "by shapes" in section


@pytest.mark.parametrize("title", SECTIONS)
def test_sources_exist(title):
    """Of names with braces, what stands before these."""
    paths = paths_in(SECTIONS[title])
    missing = [path for path in paths if not any(ROOT.glob(f"{path}*"))]
    assert not [path for path in missing if not REMOVED.fullmatch(path)]


def test_every_result_names_a_record_or_a_command():
    for page in (ROOT / "docs" / "results").glob("*.md"):
        assert page.stem == "index" or paths_in(page.read_text("utf-8")), page.name
