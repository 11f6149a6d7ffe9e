"""Builds few-shot prompts: solved rows, then the question about another row."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example
from kvjax.types import UserError


class Form(NamedTuple):
    """The format of a few-shot prompt: head, shots, question, primer.

    Attributes:
      question: returns a row's question, up to the primer.
      primer: precedes every answer, in shots and in the question.
      answers: returns a row's references; shots show the first.
      shown: returns a shot's text after the primer; None is the first reference.
      head: begins the prompt.
      between: follows every shot.
      gap: separates primer and answer in a shot; the model generates it itself.
      turns: whether each shot is a turn of a conversation instead of part of the
        prompt.
    """

    question: Callable[[data.Row], str]
    primer: str
    answers: Callable[[data.Row], tuple[str, ...]]
    shown: Callable[[data.Row], str] | None = None
    head: str = ""
    between: str = "\n\n"
    gap: str = " "
    turns: bool = False

    def shot(self, row: data.Row) -> str:
        """Returns a solved row as text."""
        question, answer = self.turn(row)
        return question + self.primer + self.gap + answer + self.between

    def turn(self, row: data.Row) -> tuple[str, str]:
        """Returns a row's question and the answer that a shot shows."""
        answer = self.shown(row) if self.shown else self.answers(row)[0]
        return self.question(row), answer


def examples_of(
    source: data.Source, form: Form, split: str = "test", shots: int = 0
) -> Callable[..., list[Example]]:
    """Returns a function for `Task.examples`: questions of `split`, shots of "train".

    Its options are `data_dir`, and `shots` with this default. All examples of a seed
    have the same shots; fewer shots are the beginning of more.
    """
    default = shots

    def examples(
        tokenizer: Any,
        count: int | None,
        seed: int,
        data_dir: str | None = None,
        shots: int = default,
    ) -> list[Example]:
        drawn = data.draw(data.rows(source, split, data_dir), count, seed, source.name)
        shown = _shots(source, shots, seed, data_dir)
        turns = tuple(map(form.turn, shown)) if form.turns else ()
        prompt = form.head + "".join(map(form.shot, () if turns else shown))
        found = (
            example(f"{source.name}/{split}/{i}", prompt, row, form) for i, row in drawn
        )
        return [dataclasses.replace(each, turns=turns) for each in found]

    return examples


def example(name: str, shots: str, row: data.Row, form: Form) -> Example:
    """Returns the example for a row; raises UserError if it has no references."""
    answers = form.answers(row)
    if not answers:
        raise UserError(f"{name} has no reference answers; use another split")
    return Example(name, shots + form.question(row), answers, form.primer)


def _shots(
    source: data.Source, count: int, seed: int, data_dir: str | None
) -> list[data.Row]:
    if not count:
        return []
    train = data.rows(source, "train", data_dir)
    drawn = data.draw(train, count, (seed, 1), f"{source.name}'s train split")
    return [row for _, row in drawn]
