"""GSM8K: grade-school mathematics with a chain of thought (Cobbe et al. 2021)."""

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, examples_of


def grade(text: str, example: Example) -> dict[str, float]:
    """Whether the final number is the right one."""
    return {"exact_match": metrics.number_match(text, example.answers)}


_FORM = Form(
    question=lambda row: f"Question: {row['question']}\n",
    primer="Answer:",
    answers=lambda row: (row["answer"].rpartition("####")[2].strip(),),
    shown=lambda row: row["answer"],
)

TASKS = {
    "gsm8k": Task(
        "gsm8k",
        examples_of(
            data.Source("gsm8k", ("openai/gsm8k", "main"), "gsm8k"), _FORM, shots=8
        ),
        grade,
        "exact_match",
        256,
        "prompt and stop of lm-evaluation-harness's gsm8k; eight shots and 256 tokens "
        "as in GEAR (Kang et al. 2024); `shots=16` as in Batch-Max",
        stop=("Question:",),
        chat=False,
    )
}
