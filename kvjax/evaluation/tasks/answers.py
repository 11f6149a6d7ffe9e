"""Questions about a passage: NarrativeQA, TriviaQA."""

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, examples_of

_EVIDENCE = ("passage", "entity_pages.wiki_context", "search_results.search_context")


def grade_story(text: str, example: Example) -> dict[str, float]:
    """Returns word F1 and ROUGE; ROUGE-2 of a single word is 0."""
    return {
        "f1": metrics.token_f1(text, example.answers),
        **metrics.rouge(text, example.answers),
    }


def grade_trivia(text: str, example: Example) -> dict[str, float]:
    """Returns word F1, exact match and ROUGE-L of the first line."""
    line = metrics.first_line(text)
    normal = metrics.normal_trivia
    return {
        "f1": metrics.token_f1(line, example.answers, normal),
        "exact_match": metrics.exact_match(line, example.answers, normal),
        "rougeL": metrics.rouge(line, example.answers)["rougeL"],
    }


def _story(row: data.Row) -> str:
    """Returns the summary of a book or film script with a question about it."""
    summary = data.field("document.summary.text", "summary")(row)
    question = data.field("question.text", "question")(row).strip()
    mark = "" if question.endswith("?") else "?"
    return f"Passage: {summary.strip()}\nQuestion: {question}{mark}\n"


def _story_answers(row: data.Row) -> tuple[str, ...]:
    answers = row["answers"]
    return tuple(a["text"] if isinstance(a, dict) else a for a in answers)


def _trivia(row: data.Row) -> str:
    return f"Passage:\n{_passage(row)}\nQuestion:\n{row['question']}\n"


def _passage(row: data.Row) -> str:
    """Returns the first page of evidence that has text, or an empty text."""
    for name in _EVIDENCE:
        found = data.field(name)(row, [])
        pages = [found] if isinstance(found, str) else found
        if text := next(filter(None, map(str.strip, pages)), ""):
            return text
    return ""


def _trivia_answers(row: data.Row) -> tuple[str, ...]:
    """Returns the answer that shots show, then its aliases."""
    first = data.field("answer.value", "answers")(row)
    aliases = data.field("answer.aliases", "answers")(row)
    shown = [first] if isinstance(first, str) else list(first)
    return tuple(dict.fromkeys(answer for answer in [*shown, *aliases] if answer))


TASKS = {
    "narrativeqa": Task(
        "narrativeqa",
        examples_of(
            data.Source("narrativeqa", ("deepmind/narrativeqa",)),
            Form(_story, "Answer:", _story_answers, between="\n"),
            shots=2,
        ),
        grade_story,
        "rouge2",
        100,
        "prompt, stop and length of HELM's NarrativeQA on summaries (Liang et al. "
        "2022); two shots and ROUGE-2 as in Batch-Max (Metel et al. 2024)",
        stop=("\n",),
        chat=False,
    ),
    "triviaqa": Task(
        "triviaqa",
        examples_of(
            data.Source("triviaqa", ("mandarjoshi/trivia_qa", "rc"), "trivia_qa/rc"),
            Form(
                _trivia,
                "Answer:\n",
                _trivia_answers,
                head="Answer the question based on the given passage. Only give me the "
                "answer and do not output any other words. The following are some "
                "examples.\n\n",
                gap="",
            ),
            split="validation",
            shots=2,
        ),
        grade_trivia,
        "f1",
        32,
        "prompt and length of LongBench (Bai et al. 2023), as in SqueezeAttention "
        "(Wang et al. 2024), normalised as by Joshi et al. 2017; the first page "
        "of evidence and two shots are our choice",
        stop=("\nPassage:",),
        chat=False,
    ),
}
