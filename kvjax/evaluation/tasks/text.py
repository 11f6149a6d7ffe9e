"""Provides long English prose to fill a context with."""

import pathlib
import re
from collections.abc import Iterator

from kvjax.types import UserError

_MIN_WORDS = 8
_MIN_LETTERS = 0.88  # share of letters and spaces; code and tables have fewer
_VERSION_NOTE = re.compile(r"(New|Added|Changed|Deprecated|Removed) (in|since) version")


def haystack(folder: str | None = None) -> str:
    """Returns a long text, the same at every call; empty lines separate paragraphs.

    Args:
      folder: its *.txt and *.md files are joined, in the order of their paths. None is
        the prose of the Python reference manual in the interpreter
        (`pydoc_data.topics`; about 200,000 characters, which differ between Python
        versions), without headings, grammar, code, tables and repeated paragraphs.

    Raises:
      UserError: the folder is missing or holds no text, or a file is not UTF-8.
    """
    return _manual() if folder is None else _read(existing(folder))


def existing(name: str) -> pathlib.Path:
    """Returns a haystack's folder; raises UserError if it does not exist."""
    path = pathlib.Path(name)
    if not path.is_dir():
        raise UserError(
            f"haystack folder {str(path)!r} does not exist; name a folder of *.txt "
            "or *.md files, or None for the built-in text"
        )
    return path


def _manual() -> str:
    from pydoc_data.topics import topics

    paragraphs = (p for name in sorted(topics) for p in _prose(topics[name]))
    return "\n\n".join(dict.fromkeys(paragraphs))  # topics overlap: keep the first


def _prose(topic: str) -> Iterator[str]:
    """Yields the English paragraphs of a reST topic, one line each, without markup."""
    for paragraph in re.split(r"\n\s*\n", topic):
        joined = re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", paragraph)  # line-[break]hyphens
        line = " ".join(joined.split()).removeprefix("* ")
        line = re.sub(r"\*+([^\s*](?:[^*]*[^\s*])?)\*+", r"\1", line)  # *emphasis*
        if _is_prose(line):
            yield line


def _is_prose(line: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in line)
    return (
        line[:1].isupper()
        and line.endswith((".", ":"))
        and len(line.split()) >= _MIN_WORDS
        and letters >= _MIN_LETTERS * len(line)
        and not _VERSION_NOTE.match(line)
    )


def _read(folder: pathlib.Path) -> str:
    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md"))
    texts = [text for path in paths if (text := _read_file(path).strip())]
    if not texts:
        raise UserError(
            f"haystack folder {str(folder)!r} holds no text in *.txt or *.md files"
        )
    return "\n\n".join(texts)


def _read_file(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"haystack file {str(path)!r} is not UTF-8: {error}") from error
