"""RULER's eight needle-in-a-haystack tasks."""

import functools
import itertools
import re
import uuid
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.evaluation.tasks.fit import Draft, Writer, stream
from kvjax.evaluation.tasks.ruler.words import pair

# The texts are those of scripts/data/synthetic/{constants,niah}.py of NVIDIA/RULER.
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
    "back again."
)
TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make "
    "sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n"
    "{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the "
    "provided text?"
)
PRIMER = (
    " The special magic {type_needle_v} for {query} mentioned in the provided text are"
)
_NEEDLE = "One of the special magic {values} for {key} is: {value}."
_DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)  # percent of an essay
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)])) (?=[\"'“‘(\[]*[A-Z0-9])")  # noqa: RUF001


class Niah(NamedTuple):
    """The configuration of a task, as in `scripts/synthetic.yaml`.

    Attributes:
      haystack: "noise" (one text repeated), "essay" (prose) or "needle" (distractor
        needles).
      keys, values: "words", "numbers" or "uuids".
      num_keys: number of hidden keys.
      num_values: values per key.
      num_queries: number of keys in the question.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


TASKS = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", values="uuids"),
    "niah_multikey_1": Niah("essay", num_keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", num_values=4),
    "niah_multiquery": Niah("essay", num_keys=4, num_queries=4),
}


class _Needles(NamedTuple):
    """Needle sentences in random order, the keys in the question, and their values."""

    sentences: tuple[str, ...]
    queries: tuple[str, ...]
    answers: tuple[str, ...]


def writer(niah: Niah, essay: str | None = None) -> Writer:
    """Returns a task's writer; `essay` is prose, for the haystack "essay".

    Its size is the number of words of the essay, of lines of noise or of distractor
    needles.
    """
    hide = _in_lines
    if niah.haystack == "essay":
        hide = functools.partial(_in_essay, tuple(essay.split()))
    return Writer(
        functools.partial(_write, niah, hide), niah.num_keys * niah.num_values
    )


def prompt_and_primer(niah: Niah, context: str, queries: tuple[str, ...]) -> list[str]:
    """Returns prompt and primer, in the singular if the answer is one value."""
    query, texts, values = queries[0], [TEMPLATE, PRIMER], niah.values
    if len(queries) > 1:
        query = f"{', '.join(queries[:-1])}, and {queries[-1]}"
    if niah.num_queries * niah.num_values == 1:
        values = values.removesuffix("s")
        for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is")):
            texts = [text.replace(plural, single) for text in texts]
    filled = {"type_needle_v": values, "context": context, "query": query}
    return [text.format(**filled) for text in texts]


def sentences(text: str) -> list[str]:
    """Splits prose into sentences; white space must be single blanks."""
    return _SENTENCE_END.split(text)


def _write(
    niah: Niah,
    hide: Callable[..., tuple[str, tuple[float, ...]]],
    seed: tuple[int, ...],
    size: int,
) -> Draft:
    needles = _needles(niah, stream(seed, 0))
    context, depths = hide(niah, needles, seed, size)
    prompt, primer = prompt_and_primer(niah, context, needles.queries)
    depth = round(depths[0], 1) if len(depths) == 1 else None  # tables group by it
    return Draft(prompt, needles.answers, primer, depth)


def _needles(niah: Niah, rng: np.random.Generator) -> _Needles:
    keys: dict[str, list[str]] = {}
    while len(keys) < niah.num_keys:
        values = [_draw(niah.values, rng) for _ in range(niah.num_values)]
        keys[_draw(niah.keys, rng)] = values
    hidden = [_needle(niah, key, value) for key in keys for value in keys[key]]
    queries = rng.permutation(list(keys))[: niah.num_queries].tolist()
    return _Needles(
        tuple(rng.permutation(hidden).tolist()),
        tuple(queries),
        tuple(value for key in queries for value in keys[key]),
    )


def _in_essay(
    words: tuple[str, ...],
    niah: Niah,
    needles: _Needles,
    seed: tuple[int, ...],
    size: int,
) -> tuple[str, tuple[float, ...]]:
    """Hides needles in the first `size` words of the essay, repeated if too short."""
    text = sentences(" ".join(itertools.islice(itertools.cycle(words), size)))
    drawn = stream(seed, 1).choice(_DEPTHS, len(needles.sentences), replace=False)
    depths, total = np.sort(drawn / 100)[::-1].tolist(), len(text)
    for depth, needle in zip(depths, needles.sentences, strict=True):
        text.insert(int(total * depth), needle)
    return " ".join(text), tuple(depths)


def _in_lines(
    niah: Niah, needles: _Needles, seed: tuple[int, ...], size: int
) -> tuple[str, tuple[float, ...]]:
    lines = [NOISE] * size
    if niah.haystack == "needle":
        rng = stream(seed, 2)
        lines = [_other_needle(niah, needles.queries, rng) for _ in range(size)]
    drawn = stream(seed, 1).choice(size, len(needles.sentences), replace=False)
    places = np.sort(drawn)[::-1].tolist()
    for place, needle in zip(places, needles.sentences, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines), tuple(place / size for place in places)


def _other_needle(
    niah: Niah, queries: tuple[str, ...], rng: np.random.Generator
) -> str:
    key, value = (_draw(kind, rng) for kind in (niah.keys, niah.values))
    if key in queries:  # it would be a second answer
        return _other_needle(niah, queries, rng)
    return _needle(niah, key, value)


def _needle(niah: Niah, key: str, value: str) -> str:
    return _NEEDLE.format(values=niah.values, key=key, value=value)


def _draw(kind: str, rng: np.random.Generator) -> str:
    if kind == "words":
        return pair(rng)
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
