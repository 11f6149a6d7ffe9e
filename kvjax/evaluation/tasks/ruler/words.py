"""English words to hide and to count, from the package `wonderwords` as in RULER."""

import functools
import importlib.resources

import numpy as np

from kvjax.types import require_extra


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """The package's nouns ("noun"), adjectives ("adjective") or verbs ("verb").

    Raises:
      UserError: the package is not installed.
    """
    require_extra("eval", "wonderwords")
    folder = importlib.resources.files("wonderwords") / "assets"
    text = (folder / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


@functools.cache
def every_word() -> tuple[str, ...]:
    """All of them, each once, in alphabetical order."""
    return tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))


def pair(rng: np.random.Generator) -> str:
    """An adjective and a noun: "dynamic-aardvark"."""
    chosen = (words(kind) for kind in ("adjective", "noun"))
    return "-".join(some[rng.integers(len(some))] for some in chosen)
