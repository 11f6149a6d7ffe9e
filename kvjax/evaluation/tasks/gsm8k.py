"""GSM8K: grade-school mathematics with a chain of thought (Cobbe et al. 2021)."""

import re

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, examples_of


def grade(text: str, example: Example) -> dict[str, float]:
    """Grades the final number of the answer."""
    return {"exact_match": metrics.number_match(text, example.answers)}


_SOURCE = data.Source("gsm8k", ("openai/gsm8k", "main"), "gsm8k")
_FORM = Form(
    question=lambda row: f"Question: {row['question']}\n",
    primer="Answer:",
    answers=lambda row: (row["answer"].rpartition("####")[2].strip(),),
    shown=lambda row: row["answer"],
)
_CALCULATOR = re.compile("<<.*?>>")  # annotations for the authors' calculator
_TURNS = Form(
    question=lambda row: row["question"],
    primer="",
    answers=_FORM.answers,
    shown=lambda row: _CALCULATOR.sub("", row["answer"]),
    turns=True,
)

TASKS = {
    "gsm8k": Task(
        "gsm8k",
        examples_of(_SOURCE, _FORM, shots=8),
        grade,
        "exact_match",
        256,
        "prompt and stop of lm-evaluation-harness's gsm8k; eight shots and 256 tokens "
        "as in GEAR (Kang et al. 2024); `shots=16` as in Batch-Max",
        stop=("Question:",),
        chat=False,
    ),
    "gsm8k/chat": Task(
        "gsm8k/chat",
        examples_of(_SOURCE, _TURNS, shots=4),
        grade,
        "exact_match",
        400,
        "the same rows as turns of a conversation, for models tuned for chat: each "
        "question with its answer, without the calculator's annotations",
    ),
}
