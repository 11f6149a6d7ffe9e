"""The types `Task` and `Example`, and the encoding of prompts."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.engine.text_stream import text_after
from kvjax.types import UserError, real_number, whole_number

_COMMON_ARGUMENTS = ("tokenizer", "count", "seed")  # of every `Task.examples`


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and its reference answers.

    Attributes:
      name: unique within the task, and the same at every call.
      prompt: the prompt with its shots, without the chat template.
      answers: the references; the metric defines how several are used.
      primer: the beginning of the model's answer; generation continues it.
      turns: earlier turns (question, answer) of the conversation, for tasks that use a
        chat template.
      details: numbers to group by in tables and figures (`depth`, `length`).
    """

    name: str
    prompt: str
    answers: tuple[str, ...]
    primer: str = ""
    details: tuple[tuple[str, float], ...] = ()
    turns: tuple[tuple[str, str], ...] = ()


class Task(NamedTuple):
    """A task, as defined by the paper that uses it.

    Attributes:
      name: its name in configs and tables.
      examples: `(tokenizer, count, seed, **options) -> list[Example]`. The options are
        specific to the task and have defaults: `data_dir`, `shots`, `length`. The same
        arguments give the same examples for every method, and a smaller count gives the
        beginning of a larger one's.
      grade: `(generated text, example) -> {metric: value}`, each from 0 (wrong) to 1.
      metric: the main metric, which tables show.
      max_new_tokens: maximal tokens of an answer, as in the paper.
      source: sources of the prompt, shots, length and metric.
      stop: texts that end an answer; text after the first of them is not graded.
      chat: whether to apply the tokenizer's chat template, if it has one.
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
        """Returns itself, so that a task can stand for a function that returns one."""
        return self


def options_of(task: Task) -> dict[str, Any]:
    """Returns the names of a task's options with their annotations."""
    parameters = inspect.signature(task.examples).parameters
    return {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if name not in _COMMON_ARGUMENTS
    }


def check_options(task: Task, options: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown option, or a value of the wrong type.

    Options without annotation, in tasks of the user, accept any value.
    """
    known = options_of(task)
    for option, value in options.items():
        if option not in known:
            names = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise UserError(f"task {task.name} has no option {option!r}: {names}")
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


_CHECKS: dict[Any, Callable[[str, Any], Any]] = {  # by an option's annotation
    int: whole_number,
    float: real_number,
    str | None: _text,
    Sequence[float]: _numbers,
}


class Encoded(NamedTuple):
    """A prompt as token ids, and the number of tokens cut out of its middle."""

    tokens: tuple[int, ...]
    cut: int


def encode(tokenizer: Any, task: Task, example: Example, room: int) -> Encoded:
    """Encodes an example's prompt as at most `room` tokens, with special tokens.

    A prompt that is too long loses tokens in its middle, which keeps the instructions
    at its beginning and the question at its end (LongBench, Bai et al. 2023, section
    4.1). The chat template, earlier turns and the primer are never cut.

    Raises:
      UserError: the parts that are never cut exceed `room`; or the example has earlier
        turns and the tokenizer has no chat template.
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
            f"task {task.name} has earlier turns of a conversation, and the model's "
            "tokenizer has no chat template for them: use another task, or a model "
            "tuned for chat"
        )
    if chat:  # the template adds the special tokens itself
        turns = [
            {"role": role, "content": text}
            for turn in example.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        prompt = tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
    text = prompt + example.primer
    return tuple(
        tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    )
