"""Prompts that show a few solved rows before they ask about another."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.evaluation.tasks import data
from kvjax.evaluation.tasks.base import Example
from kvjax.types import UserError


class Form(NamedTuple):
    """How rows become a prompt: head, shots, the question, and what opens its answer.

    Attributes:
      question: a row's question, up to the primer.
      primer: stands before every answer, shown or asked for.
      answers: a row's references; shots show the first of them.
      shown: what follows the primer in a shot; None is the first reference.
      head: opens the prompt.
      between: follows every shot.
      gap: stands between primer and answer in a shot; a model writes it itself.
      turns: whether each shot is a turn of a conversation, not a part of the prompt.
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
        """A solved row."""
        asked, answer = self.turn(row)
        return asked + self.primer + self.gap + answer + self.between

    def turn(self, row: data.Row) -> tuple[str, str]:
        """What is asked about a row, and a shot's answer."""
        answer = self.shown(row) if self.shown else self.answers(row)[0]
        return self.question(row), answer


def examples_of(
    source: data.Source, form: Form, split: str = "test", shots: int = 0
) -> Callable[..., list[Example]]:
    """The `examples` of a task that asks about `split` and shows rows of "train".

    Its options are `data_dir`, and `shots` with the default given here. All examples of
    a seed show the same shots, fewer shots being the beginning of more.
    """
    default = shots

    def examples(
        tokenizer: Any,
        count: int | None,
        seed: int,
        data_dir: str | None = None,
        shots: int = default,
    ) -> list[Example]:
        asked = data.draw(data.rows(source, split, data_dir), count, seed, source.name)
        shown = _shots(source, shots, seed, data_dir)
        turns = tuple(map(form.turn, shown)) if form.turns else ()
        prompt = form.head + "".join(map(form.shot, () if turns else shown))
        made = (
            example(f"{source.name}/{split}/{i}", prompt, row, form) for i, row in asked
        )
        return [dataclasses.replace(each, turns=turns) for each in made]

    return examples


def example(name: str, shots: str, row: data.Row, form: Form) -> Example:
    """The example that asks about a row. Raises UserError if it has no references."""
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
