"""BIG-Bench Hard with its three-shot chains of thought (Suzgun et al. 2022)."""

import functools
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, example
from kvjax.types import UserError

SUBTASKS = (
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
)
_FORM = Form(
    question=lambda row: f"Q: {row['input']}\n",
    primer="A: Let's think step by step.",
    answers=lambda row: (row["target"],),
)


def examples(
    tokenizer: Any,
    count: int | None,
    seed: int,
    data_dir: str | None = None,
    subtask: str | None = None,
) -> list[Example]:
    """Returns questions of one subtask, or of all interleaved; without a `count`, all.

    Prompts are read from `DATA_DIR/bbh/cot_prompts/NAME.txt`, or from `cot-prompts` as
    in a clone of the authors' repository. Rows are read from `bbh/tasks/NAME.json`, or
    from `bbh/NAME.json` as in the clone, or from the hub.

    Raises:
      UserError: the subtask or its prompt does not exist, or there are too few rows.
    """
    if subtask not in (None, *SUBTASKS):
        raise UserError(f"BBH has no subtask {subtask!r}; it has {', '.join(SUBTASKS)}")
    names = SUBTASKS if subtask is None else (subtask,)
    ranked = zip_longest(*(_drawn(name, seed, data_dir) for name in names))
    rows = [row for rank in ranked for row in rank if row]
    if count is not None and not 0 <= count <= len(rows):
        raise UserError(f"bbh has {len(rows)} rows, so {count} cannot be drawn")
    prompts = {name: _prompt(name, data_dir) for name in names}
    return [
        example(f"bbh/{name}/{i}", prompts[name], row, _FORM)
        for name, i, row in rows[:count]
    ]


def grade(text: str, example: Example) -> dict[str, float]:
    """Grades whether the stated answer is the target."""
    return {"exact_match": metrics.answer_match(text, example.answers)}


def source(subtask: str) -> data.Source:
    """Returns the source of a subtask's rows."""
    files = f"bbh/tasks/{subtask}", f"bbh/{subtask}"
    return data.Source(f"bbh/{subtask}", ("lukaemon/bbh", subtask), files=files)


def _drawn(
    subtask: str, seed: int, data_dir: str | None
) -> list[tuple[str, int, data.Row]]:
    """Returns all (subtask, index, row) of a subtask in random order."""
    rows = data.rows(source(subtask), "test", data_dir)
    return [(subtask, i, row) for i, row in data.draw(rows, None, seed, "bbh")]


def _prompt(subtask: str, data_dir: str | None) -> str:
    """Returns task description and three solved questions, without the canary line."""
    root = data.folder(data_dir or ".")
    places = ("bbh/cot_prompts", "bbh/cot-prompts", "cot-prompts")
    paths = [root / place / f"{subtask}.txt" for place in places]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(
            f"cannot find the chain-of-thought prompt of bbh/{subtask}: no file "
            f"{' or '.join(map(str, paths))}; clone github.com/suzgunmirac/"
            "BIG-Bench-Hard and pass data_dir=CLONE"
        )
    return path.read_text(encoding="utf-8").rpartition("-----\n")[2].strip() + "\n\n"


def _task(name: str, choose: Callable[..., list[Example]]) -> Task:
    return Task(
        name,
        choose,
        grade,
        "exact_match",
        256,
        "the authors' prompts (Suzgun et al. 2022); question, answer and 256 tokens as "
        "in GEAR (Kang et al. 2024)",
        stop=("\n\nQ:",),
        chat=False,
    )


TASKS = {"bbh": _task("bbh", examples)} | {
    f"bbh/{name}": _task(f"bbh/{name}", functools.partial(examples, subtask=name))
    for name in SUBTASKS
}
