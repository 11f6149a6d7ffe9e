"""What every task is made of: examples, their encoding, and their grades."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.types import UserError


@dataclasses.dataclass(frozen=True)
class Example:
    """One question put to the model, and the answers that count as right.

    Attributes:
      name: unlike that of any other example of the task; the same at every call.
      prompt: what the model is asked, shots included; without a chat template.
      answers: the references. How several count is the metric's business.
      primer: opens the model's answer; what is generated follows it.
      details: numbers to group by in tables and pictures (`depth`, `length`).
    """

    name: str
    prompt: str
    answers: tuple[str, ...]
    primer: str = ""
    details: tuple[tuple[str, float], ...] = ()


class Task(NamedTuple):
    """A task as the paper that uses it has it.

    Attributes:
      name: as in configs and tables.
      examples: `(tokenizer, count, seed, **options) -> list[Example]`. The options are
        the task's own, each with its default: `data_dir`, `shots`, `length`. The same
        arguments give the same examples, whatever the method that is measured, and a
        smaller count their beginning.
      grade: `(generated text, example) -> {metric: value}`, each 0 (wrong) to 1.
      metric: the one that headlines tables.
      max_new_tokens: the paper's.
      source: where prompt, shots, length and metric come from.
      stop: texts that end an answer; what follows the first of them is not graded.
      chat: whether the prompt is put into the tokenizer's chat template, if it has one.
    """

    name: str
    examples: Callable[..., list[Example]]
    grade: Callable[[str, Example], dict[str, float]]
    metric: str
    max_new_tokens: int
    source: str
    stop: tuple[str, ...] = ()
    chat: bool = True

    def __call__(self) -> "Task":
        """Itself: a task stands wherever a function that makes one does."""
        return self


class Encoded(NamedTuple):
    """A prompt as token ids, and how many were cut out of its middle."""

    tokens: tuple[int, ...]
    cut: int


def encode(tokenizer: Any, task: Task, example: Example, room: int) -> Encoded:
    """The example's prompt as at most `room` tokens, special tokens included.

    A prompt that is too long loses tokens in its middle, so that instructions at its
    beginning and the question at its end stay (LongBench, Bai et al. 2023, section
    4.1). The chat template and the primer are never cut.

    Raises:
      UserError: `room` does not even hold the template and the primer.
    """
    whole = _encoded(tokenizer, task, example, example.prompt)
    if len(whole) <= room:
        return Encoded(whole, 0)
    ids = tokenizer(example.prompt, add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    frame = len(_encoded(tokenizer, task, example, ""))
    kept = min(room - frame, len(ids) - 1)
    while kept > 0:
        head, tail = ids[: (kept + 1) // 2], ids[len(ids) - kept // 2 :]
        shorter = tokenizer.decode(head) + tokenizer.decode(tail)
        tokens = _encoded(tokenizer, task, example, shorter)
        if len(tokens) <= room:
            return Encoded(tokens, len(whole) - len(tokens))
        kept -= len(tokens) - room  # decoding and encoding again may add a few
    raise UserError(
        f"{room} tokens cannot hold a prompt of {task.name}: its chat template and "
        f"primer alone take {frame}; use a model with a longer context"
    )


def _encoded(
    tokenizer: Any, task: Task, example: Example, prompt: str
) -> tuple[int, ...]:
    chat = task.chat and getattr(tokenizer, "chat_template", None)
    if chat:  # the template writes the special tokens itself
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
    text = prompt + example.primer
    return tuple(
        tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    )
