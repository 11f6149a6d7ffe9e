"""LongBench's English tasks (Bai et al. 2023), by their names: `longbench/qasper`.

Prompts, lengths, metrics and whether a chat template is used are those of the authors'
`config/dataset2prompt.json`, `config/dataset2maxlen.json`, `eval.py` and `pred.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.evaluation import metrics
from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example, Task
from kvjax.evaluation.tasks.fewshot import Form, example

Metric = Callable[[str, Sequence[str]], float]

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do "
    "not output any other words.\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do "
    "not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a "
        "question. Answer the question asconcisely as you can, using a single phrase "
        "if possible. Do not provide any explanation.\n\nStory: {context}\n\nNow, "
        "answer the question based on the story asconcisely as you can, using a "
        "single phrase if possible. Do not provide any explanation.\n\nQuestion: "
        "{input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as "
        "concisely as you can, using a single phrase or sentence if possible. If the "
        "question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", '
        'or "unanswerable". Do not provide any explanation.\n\nArticle: '
        "{context}\n\n Answer the question based on the above article as concisely "
        "as you can, using a single phrase or sentence if possible. If the question "
        "cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", '
        'or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\n'
        "Answer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the "
        "following question based on the above text, only give me the answer and do "
        "not output any other words.\n\nQuestion: {input}\nAnswer:"
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of "
        "the report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the "
        "report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or "
        "instruction. Answer the query in one or more sentences.\n\nTranscript:\n"
        "{context}\n\nNow, answer the query based on the above meeting transcript in "
        "one or more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all "
        "news. \n\nNews:\n{context}\n\nNow, write a one-page summary of all the "
        "news.\n\nSummary:"
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of "
        "questions.\n\n{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and "
        "do not output any other words. The following are some examples.\n\n"
        "{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some "
        "examples.\n\n{context}\n\n{input}"
    ),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be "
        "duplicates. Please carefully read these paragraphs and determine how many "
        "unique paragraphs there are after removing duplicates. In other words, how "
        "many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease "
        "enter the final count of unique paragraphs after removing duplicates. The "
        "output format should only contain the number, such as 1, 2, 3, and so "
        "on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please "
        "determine which paragraph the abstract is from.\n\n{context}\n\nThe "
        "following is an abstract.\n\n{input}\n\nPlease enter the number of the "
        "paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
    ),
    "lcc": ("Please complete the code given below. \n{context}Next line of code:\n"),
    "repobench-p": (
        "Please complete the code given below. \n{context}{input}Next line of code:\n"
    ),
}
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
