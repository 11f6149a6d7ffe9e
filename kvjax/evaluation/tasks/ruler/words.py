"""Provides English words from the package `wonderwords`, as RULER does."""

import functools
import importlib.resources

import numpy as np

from kvjax.types import require_extra


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Returns the package's nouns ("noun"), adjectives ("adjective") or verbs ("verb").

    Raises:
      UserError: the package is not installed.
    """
    require_extra("eval", "wonderwords")
    folder = importlib.resources.files("wonderwords") / "assets"
    text = (folder / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


@functools.cache
def every_word() -> tuple[str, ...]:
    """Returns all nouns, adjectives and verbs, each once, in alphabetical order."""
    return tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))


def pair(rng: np.random.Generator) -> str:
    """Draws an adjective and a noun: "dynamic-aardvark"."""
    chosen = (words(kind) for kind in ("adjective", "noun"))
    return "-".join(some[rng.integers(len(some))] for some in chosen)
