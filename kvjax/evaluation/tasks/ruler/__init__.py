"""RULER: thirteen tasks that are as long as one likes.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language
Models?" (2024, arXiv 2404.06654), and github.com/NVIDIA/RULER at c3f5e3b: the texts are
theirs word for word (scripts/data/synthetic/constants.py), and so are the
configurations (scripts/synthetic.yaml), tokens to generate and metrics. `length` is
their `max_seq_length`: the whole prompt, and the tokens to generate.

Ours differ from what their scripts write in this:

- Each example is fitted to `length` alone, as closely as whole lines or words allow.
  Their scripts fit one size to all, and shrink an example that is too long by 5 to 500
  units (in fwe, an example grows by 1/32 of `length` at a time).
- Special tokens count.
- Nothing is asked for that has two answers: keys and variables are never the same.
- The solved example that opens a prompt (vt, cwe) stands in the same message as the
  question; in cwe, theirs is a turn of its own for a model with a chat template.
- cwe needs more words than `wonderwords` has from about 128k tokens on. It then counts
  pairs of words, where theirs takes another list.
- Essays are cut into sentences by a rule, not by NLTK's trained model, and are those
  of the folder `haystack`: for scores that compare with others', Paul Graham's. Without
  a folder they are the prose that Python carries.

`ruler/NAME` writes examples, `ruler_file/NAME` reads them from RULER's own files.
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
_OPENING = 10  # characters of a primer by which RULER's scripts find it


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
    """A file's first rows, whatever the seed: RULER's seed is in the file."""
    return files.examples(name, primer[:_OPENING], count, data_dir)


def _match_all(generated: str, example: Example) -> dict[str, float]:
    """The share of the answers that stand in the text, in any case of letters."""
    share = metrics.string_match_all(generated, example.answers)
    return {"string_match_all": share}


def _match_part(generated: str, example: Example) -> dict[str, float]:
    """Whether any answer stands in the text, in any case of letters."""
    return {"string_match_part": metrics.string_match_part(generated, example.answers)}


def _tasks(
    name: str, write: Callable[..., list[Example]], primer: str, max_new_tokens: int
) -> dict[str, Task]:
    """The task that writes examples, and the one that reads them."""
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
