"""RULER's question answering: SQuAD (qa_1) and HotpotQA (qa_2) among more documents."""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.evaluation.tasks.fit import Draft, Writer, stream
from kvjax.types import UserError

# The texts are those of scripts/data/synthetic/{constants,qa}.py of NVIDIA/RULER.
TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do "
    "not output any other words.\n\n"
    "The following are given documents.\n\n"
    "{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do "
    "not output any other words.\n\n"
    "Question: {query}"
)
PRIMER = " Answer:"
_DOCUMENT = "Document {place}:\n{text}"


class _Question(NamedTuple):
    """A question; `needed` and `close` are indices in the list of all documents."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    close: tuple[int, ...]


class _Data(NamedTuple):
    documents: tuple[str, ...]
    questions: tuple[_Question, ...]


def _squad(data: Any) -> _Data:
    """Reads SQuAD 2.0 (or 1.1): the answerable questions, each with its paragraph."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({p["context"] for article in articles for p in article})
    place = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in articles:
        around = dict.fromkeys(place[paragraph["context"]] for paragraph in article)
        for paragraph in article:
            own = place[paragraph["context"]]
            close = tuple(other for other in around if other != own)
            for row in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in row["answers"])
                if not row.get("is_impossible", False):
                    question = _Question(row["question"], answers, (own,), close)
                    questions.append(question)
    return _Data(tuple(documents), tuple(questions))


def _hotpotqa(data: Any) -> _Data:
    """Reads HotpotQA, distractor setting: questions with their documents."""
    texts = [[f"{t}\n{''.join(lines)}" for t, lines in row["context"]] for row in data]
    documents = sorted(set(itertools.chain(*texts)))
    place = {document: i for i, document in enumerate(documents)}
    questions = (
        _Question(row["question"], (row["answer"],), tuple(place[t] for t in own), ())
        for row, own in zip(data, texts, strict=True)
    )
    return _Data(tuple(documents), tuple(questions))


class Source(NamedTuple):
    """The source of a task's rows.

    Attributes:
      names: possible names of the file: as published, and as in RULER's scripts.
      url: of the published file.
      read: converts the file's JSON to documents and questions.
    """

    names: tuple[str, ...]
    url: str
    read: Callable[[Any], _Data]


SOURCES = {
    "qa_1": Source(
        ("dev-v2.0.json", "squad.json"),
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        _squad,
    ),
    "qa_2": Source(
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        _hotpotqa,
    ),
}


def writer(name: str, data_dir: str | None, count: int) -> Writer:
    """Returns a task's writer; its size is the number of added documents.

    Example i has the i-th question of the file in `data_dir`, see `SOURCES`. Added
    documents are first those of the same article (SQuAD), then any others; if they run
    out, all are repeated.

    Raises:
      UserError: the folder or file does not exist, the file is not in this format, or
        it has fewer than `count` questions.
    """
    data = _load(SOURCES[name], name, data_dir)
    if len(data.questions) < count:
        raise UserError(
            f"{name} has {len(data.questions)} questions in {data_dir!r}, too few for "
            f"{count} examples; ask for fewer"
        )
    return Writer(functools.partial(_write, data), 0)


def _load(source: Source, name: str, data_dir: str | None) -> _Data:
    folder = None if data_dir is None else pathlib.Path(data_dir)
    paths = [folder / file for file in source.names] if folder else []
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(
            f"{name} finds no {' or '.join(source.names)} in data_dir {data_dir!r}; "
            f"download it from {source.url} and name its folder"
        )
    try:
        return source.read(json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{str(path)!r} is not in the format of {source.url}: {error!r}"
        ) from error


def _write(data: _Data, seed: tuple[int, ...], size: int) -> Draft:
    question = data.questions[seed[-1]]
    rng = stream(seed, 0)
    held = {*question.needed, *question.close}
    others = [place for place in range(len(data.documents)) if place not in held]
    more = [*rng.permutation(question.close), *rng.permutation(others)]
    again = itertools.cycle(range(len(data.documents)))
    added = itertools.islice(itertools.chain(more, again), size)
    order = stream(seed, 1).permutation([*question.needed, *added]).tolist()
    context = "\n\n".join(
        _DOCUMENT.format(place=place, text=data.documents[document])
        for place, document in enumerate(order, 1)
    )
    prompt = TEMPLATE.format(context=context, query=question.text)
    return Draft(prompt, question.answers, PRIMER)
