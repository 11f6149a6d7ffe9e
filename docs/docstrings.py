"""Docstrings in plain words, as reStructuredText: a Sphinx extension.

Ours are written to be read in the source: an indented passage is shown as it stands, a
line such as `Source: ...` names something, a lone `*` or `|` means itself.
"""

import itertools
import re

SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")  # for napoleon
SEVERAL = re.compile(r" +\w+(, \w+)+(?=:)")  # a, b: what both are
NAMED = re.compile(r"(Needs|Source): ")
MARKUP = re.compile(r"(``.+?``|`[^`]+`|(?<![\w*])\*\w[\w ]*\*(?![\w*]))")


def plain(lines: list[str]) -> list[str]:
    """The lines of a docstring, marked up so that they are shown as they read."""
    done, state = [], "text"
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if not line.strip():
            state = "text" if state == "item" else state
        elif line[0] != " ":
            before, state = state, _begins(line, following)
            if before != state and (before != "text" or state in ("section", "item")):
                done.append("")
            if state == "item":
                line = NAMED.sub(r":\1: ", line)
        elif state == "text":
            done += ["", "::", ""]
            state = "literal"
        elif state == "section":
            line = SEVERAL.sub(lambda names: names[0].replace(", ", ","), line)
        done.append(line if state == "literal" else _escaped(line))
    return done


def _begins(line: str, following: str) -> str:
    """What a line that is not indented begins: text, an item, whose further lines hang,
    a literal passage, or a section that napoleon reads."""
    if SECTION.match(line):
        return "section"
    if line.endswith("::"):
        return "literal"
    hangs = not following or following[0] == " " or NAMED.match(following)
    if line.startswith("- ") or (NAMED.match(line) and hangs):
        return "item"
    return "text"


def _escaped(line: str) -> str:
    text, *rest = MARKUP.split(line)
    done = re.sub(r"([*|])", r"\\\1", text)
    for markup, text in zip(rest[::2], rest[1::2], strict=True):
        done += markup + ("\\ " if text[:1].isalnum() else "")
        done += re.sub(r"([*|])", r"\\\1", text)
    return done


def show(app, what, name, obj, options, lines):
    lines[:] = plain(lines)


def setup(app):
    app.connect("autodoc-process-docstring", show, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
