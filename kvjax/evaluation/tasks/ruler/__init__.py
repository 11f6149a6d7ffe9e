"""RULER: thirteen synthetic tasks of any length.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language
Models?" (2024, arXiv 2404.06654), and github.com/NVIDIA/RULER at c3f5e3b. Texts
(scripts/data/synthetic/constants.py), configurations (scripts/synthetic.yaml), tokens
to generate and metrics are copied verbatim. `length` is RULER's `max_seq_length`: the
whole prompt plus the tokens to generate.

Differences from RULER's scripts:

- Each example is fitted to `length` separately, as closely as whole lines or words
  allow. RULER fits one size to all examples, and shrinks an example that is too long by
  5 to 500 units (in fwe, an example grows by 1/32 of `length` at a time).
- Special tokens count.
- Keys and variables are always different, so no question has two answers.
- The solved example at the beginning of a prompt (vt, cwe) is in the same message as
  the question; in RULER's cwe it is a separate turn for models with a chat template.
- From about 128k tokens on, cwe needs more words than `wonderwords` has. It then counts
  pairs of words, where RULER uses another list.
- Essays are split into sentences by a regular expression instead of NLTK's trained
  model. They come from the folder `haystack`; to compare scores with published ones,
  use Paul Graham's essays. Without a folder they are the prose of Python's manual.

`ruler/NAME` generates examples, `ruler_file/NAME` reads them from RULER's own files.
"""

import functools
from collections.abc import Callable
from typing import Any

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import fit, text
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.ruler import counting, files, niah, qa, tracking

_LENGTH = 4096
_SOURCE = (
    "Hsieh et al. 2024 (arXiv 2404.06654), sections 3 and 4; prompts and metric of "
    "github.com/NVIDIA/RULER"
)
_OPENING = 10  # RULER's scripts find a primer by its first characters


def _needles(
    name: str, tokenizer: Any, count: int, seed: int, length: int = _LENGTH
) -> list[Example]:
    return _fitted(name, niah.writer(niah.TASKS[name]), tokenizer, count, seed, length)


def _needles_in_essays(
    name: str,
    tokenizer: Any,
    count: int,
    seed: int,
    length: int = _LENGTH,
    haystack: str | None = None,
) -> list[Example]:
    writer = niah.writer(niah.TASKS[name], text.haystack(haystack))
    return _fitted(name, writer, tokenizer, count, seed, length)


def _variables(
    tokenizer: Any, count: int, seed: int, length: int = _LENGTH
) -> list[Example]:
    writer = tracking.writer(tokenizer, seed)
    return _fitted("vt", writer, tokenizer, count, seed, length)


def _common_words(
    tokenizer: Any, count: int, seed: int, length: int = _LENGTH
) -> list[Example]:
    writer = counting.common_words(length)
    return _fitted("cwe", writer, tokenizer, count, seed, length)


def _frequent_words(
    tokenizer: Any, count: int, seed: int, length: int = _LENGTH
) -> list[Example]:
    writer = counting.frequent_words(length, TASKS["ruler/fwe"].max_new_tokens)
    return _fitted("fwe", writer, tokenizer, count, seed, length)


def _questions(
    name: str,
    tokenizer: Any,
    count: int,
    seed: int,
    length: int = _LENGTH,
    data_dir: str | None = None,
) -> list[Example]:
    writer = qa.writer(name, data_dir, count)
    return _fitted(name, writer, tokenizer, count, seed, length)


def _fitted(
    name: str, writer: fit.Writer, tokenizer: Any, count: int, seed: int, length: int
) -> list[Example]:
    task = TASKS[f"ruler/{name}"]
    reserved = task.max_new_tokens
    return fit.examples(task, writer, tokenizer, count, seed, length, reserved)


def _ready(
    name: str,
    primer: str,
    tokenizer: Any,
    count: int,
    seed: int,
    data_dir: str | None = None,
) -> list[Example]:
    """Returns a file's first rows. The seed is not used: RULER drew the rows."""
    return files.examples(name, primer[:_OPENING], count, data_dir)


def _match_all(generated: str, example: Example) -> dict[str, float]:
    """Returns the share of answers that the text contains, ignoring case."""
    share = metrics.string_match_all(generated, example.answers)
    return {"string_match_all": share}


def _match_part(generated: str, example: Example) -> dict[str, float]:
    """Returns 1 if the text contains any answer, ignoring case, else 0."""
    return {"string_match_part": metrics.string_match_part(generated, example.answers)}


def _tasks(
    name: str, write: Callable[..., list[Example]], primer: str, max_new_tokens: int
) -> dict[str, Task]:
    """Returns the task that generates examples, and the one that reads files."""
    part = name.startswith("qa")
    grade = _match_part if part else _match_all
    metric = "string_match_part" if part else "string_match_all"
    sources = {
        "ruler": write,
        "ruler_file": functools.partial(_ready, name, primer),
    }
    return {
        f"{kind}/{name}": Task(
            f"{kind}/{name}", examples, grade, metric, max_new_tokens, _SOURCE
        )
        for kind, examples in sources.items()
    }


def _all_tasks() -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for name, config in niah.TASKS.items():
        essay = config.haystack == "essay"
        write = functools.partial(_needles_in_essays if essay else _needles, name)
        tasks |= _tasks(name, write, niah.PRIMER, 128)
    tasks |= _tasks("vt", _variables, tracking.PRIMER, 30)
    tasks |= _tasks("cwe", _common_words, counting.COMMON_PRIMER, 120)
    tasks |= _tasks("fwe", _frequent_words, counting.FREQUENT_PRIMER, 50)
    for name in qa.SOURCES:
        write = functools.partial(_questions, name)
        tasks |= _tasks(name, write, qa.PRIMER, 32)
    return tasks


TASKS = _all_tasks()
