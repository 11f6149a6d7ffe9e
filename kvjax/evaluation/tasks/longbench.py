"""LongBench's English tasks (Bai et al. 2023), by their names: `longbench/qasper`.

Prompts (in longbench.json), lengths, metrics and whether a chat template is used are
those of the authors' `config/dataset2prompt.json`, `config/dataset2maxlen.json`,
`eval.py` and `pred.py`.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, example

Metric = Callable[[str, Sequence[str]], float]

_PROMPTS = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text("utf-8"))
_CONTEXT = data.field("context")
_INPUT = data.field("input", "question")


def _class(text: str, answers: Sequence[str]) -> float:
    """Scores against the first answer, the right class; the others are all classes."""
    return metrics.classification_score(text, answers[:1], answers[1:])


_F1 = ("f1", metrics.token_f1)
_ROUGE = ("rougeL", metrics.longbench_rouge_l)
_CODE = ("code_similarity", metrics.code_similarity)
_GRADES: dict[str, tuple[tuple[str, Metric], int]] = {  # metric, most new tokens
    "narrativeqa": (_F1, 128),
    "qasper": (_F1, 128),
    "multifieldqa_en": (_F1, 64),
    "hotpotqa": (_F1, 32),
    "2wikimqa": (_F1, 32),
    "musique": (_F1, 32),
    "gov_report": (_ROUGE, 512),
    "qmsum": (_ROUGE, 512),
    "multi_news": (_ROUGE, 512),
    "trec": (("accuracy", _class), 64),
    "triviaqa": (_F1, 32),
    "samsum": (_ROUGE, 128),
    "passage_count": (("accuracy", metrics.count_score), 32),
    "passage_retrieval_en": (("accuracy", metrics.retrieval_score), 32),
    "lcc": (_CODE, 64),
    "repobench-p": (_CODE, 64),
}
_FEW_SHOT = ("trec", "triviaqa", "samsum")  # only the answer's first line is graded
_PLAIN = (*_FEW_SHOT, "lcc", "repobench-p")  # without a chat template


def _examples(
    name: str, tokenizer: Any, count: int, seed: int, data_dir: str | None = None
) -> list[Example]:
    """Reads `DATA_DIR/longbench/NAME.jsonl`, or `data/NAME.jsonl` as published."""
    source = data.Source(
        f"longbench/{name}",
        ("Xnhyacinth/LongBench", name),
        files=(f"longbench/{name}", f"data/{name}"),
    )
    form = Form(functools.partial(_prompt, name), "", _answers)
    drawn = data.draw(data.rows(source, "test", data_dir), count, seed, source.name)
    return [example(f"{source.name}/{i}", "", row, form) for i, row in drawn]


def _prompt(name: str, row: data.Row) -> str:
    return _PROMPTS[name].format(context=_CONTEXT(row), input=_INPUT(row))


def _answers(row: data.Row) -> tuple[str, ...]:
    """Returns the references; after a class, the list of all classes."""
    return (*row["answers"], *(row.get("all_classes") or ()))


def _grade(name: str, text: str, example: Example) -> dict[str, float]:
    (label, metric), _ = _GRADES[name]
    if name in _FEW_SHOT:
        text = metrics.first_line(text)
    return {label: metric(text, example.answers)}


TASKS = {
    f"longbench/{name}": Task(
        f"longbench/{name}",
        functools.partial(_examples, name),
        functools.partial(_grade, name),
        label,
        length,
        "LongBench (Bai et al. 2023), its prompts, lengths and metrics",
        chat=name not in _PLAIN,
    )
    for name, ((label, _), length) in _GRADES.items()
}
