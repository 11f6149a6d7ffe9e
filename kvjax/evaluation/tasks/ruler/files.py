"""Reads RULER's sample files: lines of JSON with `input` and `outputs`."""

import json
import pathlib

from kvjax.evaluation.tasks.base import Example
from kvjax.types import UserError


def examples(
    name: str, opening: str, count: int, data_dir: str | None
) -> list[Example]:
    """Returns the first `count` rows of `NAME.jsonl` or `NAME/validation.jsonl`.

    The primer is the row's `answer_prefix`. Rows of older RULER versions have none; the
    end of their `input`, from `opening` on (the primer's first characters), is the
    primer then. `name` is RULER's, such as "niah_multikey_3".

    Raises:
      UserError: the folder or file does not exist, the file is not in this format, or
        it has too few rows.
    """
    path = _find(name, data_dir)
    with path.open(encoding="utf-8") as lines:
        rows = [line for line in lines if line.strip()]
    if not 1 <= count <= len(rows):
        raise UserError(
            f"count must be in 1..{len(rows)}, the rows of {str(path)!r}, got {count}"
        )
    return [_example(path, i, opening, row) for i, row in enumerate(rows[:count])]


def _find(name: str, data_dir: str | None) -> pathlib.Path:
    names = (f"{name}.jsonl", f"{name}/validation.jsonl")
    folders = sorted(pathlib.Path(data_dir).glob("ruler*")) if data_dir else []
    folders = [pathlib.Path(data_dir), *folders] if data_dir else []
    paths = [folder / file for folder in folders for file in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(
            f"ruler_file/{name} finds no {' or '.join(names)} in data_dir "
            f"{data_dir!r} or a folder ruler* in it; name the folder of RULER's "
            f"samples, or use ruler/{name}, which writes its own"
        )
    return path


def _example(path: pathlib.Path, index: int, opening: str, line: str) -> Example:
    try:
        row = json.loads(line)
        answers, text = tuple(row["outputs"]), row["input"]
        primer = row.get("answer_prefix", "")
        if not primer and opening in text:
            text, _, rest = text.rpartition(opening)
            primer = opening + rest
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"row {index} of {str(path)!r} is not a RULER sample: {error!r}"
        ) from error
    return Example(str(index), text, answers, primer, _depth(text, answers))


def _depth(text: str, answers: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Returns the depth, rounded to 0.1, of a single answer that occurs once."""
    if len(answers) != 1 or text.count(answers[0]) != 1:
        return ()
    return (("depth", round(text.index(answers[0]) / len(text), 1)),)
