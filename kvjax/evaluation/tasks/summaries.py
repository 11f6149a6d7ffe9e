"""Summarization: CNN/DailyMail, XSum, Multi-News, SAMSum."""

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, examples_of

_ARTICLE = data.field("article", "document")
_SUMMARY = data.field("summary", "highlights")
_HELM = (
    "prompt and length of HELM's summarization (Liang et al. 2022), which H2O (Zhang "
    "et al. 2023) and SqueezeAttention (Wang et al. 2024) use"
)


def grade(text: str, example: Example) -> dict[str, float]:
    """Returns ROUGE-1, ROUGE-2 and ROUGE-L."""
    return metrics.rouge(text, example.answers)


def grade_line(text: str, example: Example) -> dict[str, float]:
    """Grades the first line."""
    return grade(metrics.first_line(text), example)


def _reference(row: data.Row) -> tuple[str, ...]:
    return (_SUMMARY(row).strip(),)


def _helm(sentences: str) -> Form:
    """Returns HELM's format: ### begins every article, and ends a summary."""
    return Form(
        question=lambda row: f"###\nArticle: {_line(_ARTICLE(row))}\n\n",
        primer=f"Summarize the above article in {sentences}.\n",
        answers=lambda row: (_line(_SUMMARY(row)),),
        gap="",
    )


def _line(text: str) -> str:
    """Returns the text with spaces for line breaks, as in H2O's files."""
    return text.strip().replace("\n", " ")


def _news(row: data.Row) -> str:
    """Returns the articles in LongBench's layout; "|||||" separates them elsewhere."""
    text = data.field("context", "document")(row)
    if "|||||" not in text:
        return text
    articles = [part.strip() for part in text.split("|||||") if part.strip()]
    return "\n".join(f"Passage {i}:\n{part}" for i, part in enumerate(articles, 1))


def _references(row: data.Row) -> tuple[str, ...]:
    return tuple(row["answers"]) if "answers" in row else _reference(row)


_MULTI_NEWS = Form(
    question=lambda row: (
        "You are given several news passages. Write a one-page summary of all news. "
        f"\n\nNews:\n{_news(row)}\n\nNow, write a one-page summary of all the news."
        "\n\nSummary:"
    ),
    primer="",
    answers=_references,
)
_SAMSUM = Form(
    head="Summarize the dialogue into a few short sentences. The following are some "
    "examples.\n\n",
    question=lambda row: f"Dialogue: {row['dialogue']}\n",
    primer="Summary:",
    answers=_reference,
    between="\n",
)

TASKS = {
    task.name: task
    for task in (
        Task(
            "cnn_dailymail",
            examples_of(
                data.Source(
                    "cnn_dailymail", ("abisee/cnn_dailymail", "3.0.0"), "cnn_dailymail"
                ),
                _helm("3 sentences"),
                shots=1,
            ),
            grade,
            "rouge2",
            128,
            f"{_HELM}; one shot and ROUGE-2 as in Batch-Max (Metel et al. 2024)",
            stop=("###",),
            chat=False,
        ),
        Task(
            "xsum",
            examples_of(
                data.Source("xsum", ("EdinburghNLP/xsum",), "xsum"),
                _helm("1 sentence"),
            ),
            grade,
            "rougeL",
            64,
            f"{_HELM}; no shots, as in H2O's file xsum_0shot",
            stop=("###",),
            chat=False,
        ),
        Task(
            "multi_news",
            examples_of(
                data.Source("multi_news", ("alexfabbri/multi_news",), "multi_news"),
                _MULTI_NEWS,
            ),
            grade,
            "rougeL",
            512,
            "prompt and length of LongBench (Bai et al. 2023); ROUGE of rouge-score",
        ),
        Task(
            "samsum",
            examples_of(
                data.Source("samsum", ("knkarthick/samsum",), "samsum"),
                _SAMSUM,
                shots=5,
            ),
            grade_line,
            "rougeL",
            128,
            "prompt and length of LongBench (Bai et al. 2023), as in SqueezeAttention "
            "(Wang et al. 2024); five shots are our choice",
            stop=("\nDialogue:",),
            chat=False,
        ),
    )
}
