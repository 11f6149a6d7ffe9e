"""What every task is made of: examples, their encoding, and their grades."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.engine.stop_texts import text_after
from kvjax.types import UserError, real_number, whole_number

_GIVEN = ("tokenizer", "count", "seed")  # to every task, by whoever runs it


@dataclasses.dataclass(frozen=True)
class Example:
    """One question put to the model, and the answers that count as right.

    Attributes:
      name: unlike that of any other example of the task; the same at every call.
      prompt: what the model is asked, shots included; without a chat template.
      answers: the references. How several count is the metric's business.
      primer: opens the model's answer; what is generated follows it.
      turns: earlier turns of the conversation, each what was asked and answered; of a
        task that asks in a chat template.
      details: numbers to group by in tables and pictures (`depth`, `length`).
    """

    name: str
    prompt: str
    answers: tuple[str, ...]
    primer: str = ""
    details: tuple[tuple[str, float], ...] = ()
    turns: tuple[tuple[str, str], ...] = ()


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


def options_of(task: Task) -> dict[str, Any]:
    """The names of a task's options, and how each is annotated."""
    found = inspect.signature(task.examples).parameters
    return {k: v.annotation for k, v in found.items() if k not in _GIVEN}


def check_options(task: Task, options: Mapping[str, Any]) -> None:
    """Raises UserError for what a task does not take, or does not take such a value of.

    Of one's own tasks, options without annotation may be anything.
    """
    known = options_of(task)
    for option, value in options.items():
        if option not in known:
            told = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise UserError(f"task {task.name} has no option {option!r}: {told}")
        if check := _CHECKS.get(known[option]):
            check(f"task {task.name}: {option}", value)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str | None):
        raise UserError(f"{name} is {value!r:.80}: give a text")


def _numbers(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UserError(f"{name} is {value!r:.80}: give a list of numbers")
    for each in value:
        real_number(name, each)


_CHECKS: dict[Any, Callable[[str, Any], Any]] = {  # by what options are annotated with
    int: whole_number,
    float: real_number,
    str | None: _text,
    Sequence[float]: _numbers,
}


class Encoded(NamedTuple):
    """A prompt as token ids, and how many were cut out of its middle."""

    tokens: tuple[int, ...]
    cut: int


def encode(tokenizer: Any, task: Task, example: Example, room: int) -> Encoded:
    """The example's prompt as at most `room` tokens, special tokens included.

    A prompt that is too long loses tokens in its middle, so that instructions at its
    beginning and the question at its end stay (LongBench, Bai et al. 2023, section
    4.1). The chat template, earlier turns and the primer are never cut.

    Raises:
      UserError: `room` does not even hold what is never cut; earlier turns, and a
        tokenizer without a chat template to put them into.
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
        rest = len(ids) - kept // 2  # where the tail begins
        head = tokenizer.decode(ids[: (kept + 1) // 2])
        shorter = head + text_after(tokenizer, ids[:rest], ids[rest:])
        tokens = _encoded(tokenizer, task, example, shorter)
        if len(tokens) <= room:
            return Encoded(tokens, len(whole) - len(tokens))
        kept -= len(tokens) - room  # decoding and encoding again may add a few
    raise UserError(
        f"{room} tokens cannot hold a prompt of {task.name}: its chat template, "
        f"earlier turns and primer alone take {frame}; use a model with a longer "
        "context"
    )


def _encoded(
    tokenizer: Any, task: Task, example: Example, prompt: str
) -> tuple[int, ...]:
    chat = task.chat and getattr(tokenizer, "chat_template", None)
    if example.turns and not chat:
        raise UserError(
            f"task {task.name} asks in turns of a conversation, and the model's "
            "tokenizer has no chat template to put them into: use another task, or a "
            "model tuned to converse"
        )
    if chat:  # the template writes the special tokens itself
        said = [
            {"role": role, "content": text}
            for turn in example.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        prompt = tokenizer.apply_chat_template(
            [*said, {"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
    text = prompt + example.primer
    return tuple(
        tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    )
