"""The tasks `passkey` (a pass key in noise) and `needle` (a pass key in prose).

`passkey` is from Mohtashami & Jaggi, "Landmark Attention" (2023), with the prompt of
llama/run_test.py in github.com/epfml/landmark-attention, verbatim. `needle` uses
`kvjax.evaluation.tasks.needle`.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.tasks import fit, needle, text
from kvjax.evaluation.tasks.base import Example, Task

_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and "
    "memorize them. I will quiz you about the important information there."
)
_GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
    "back again."
)
_KEY = "The pass key is {key}. Remember it. {key} is the pass key."
_QUESTION = "What is the pass key?"
_PRIMER = " The pass key is"
_KEYS = 50_000  # keys are 1 to this
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _passkeys(
    tokenizer: Any,
    count: int,
    seed: int,
    length: int = 4096,
    depths: Sequence[float] = _DEPTHS,
) -> list[Example]:
    """Returns prompts of at most `length` tokens; the key's depth cycles over `depths`.

    As in the authors' script, the noise is cut between any two characters and begins
    again after the key. The authors draw the depth at random; pass many depths for
    that.
    """
    needle.check(count, depths)
    writer = fit.Writer(functools.partial(_write, tuple(depths)), 0)
    task = TASKS["passkey"]
    return fit.examples(task, writer, tokenizer, count, seed, length, reserved=0)


def _needles(
    tokenizer: Any,
    count: int,
    seed: int,
    length: int = 1000,
    depths: Sequence[float] = _DEPTHS,
    haystack: str | None = None,
) -> list[Example]:
    """Returns prompts of `needle.examples`, with `haystack` a folder or None.

    Each is drawn by a call of its own, seeded by `seed` and its index, so that a larger
    `count` does not change the first ones.
    """
    needle.check(count, depths)
    prose = text.haystack(haystack)
    chat = getattr(tokenizer, "chat_template", None)
    primer = needle.PRIMER if chat else f" {needle.PRIMER}"
    examples = []
    for index, depth in zip(range(count), itertools.cycle(depths), strict=False):
        (own,) = np.random.SeedSequence((seed, index)).generate_state(1).tolist()
        (drawn,) = needle.examples(tokenizer, 1, length, [depth], own, prose)
        details = (("depth", drawn.depth), ("length", float(length)))
        name = f"{length}-{seed}-{index}"
        examples.append(Example(name, drawn.message, (drawn.answer,), primer, details))
    return examples


def _write(depths: tuple[float, ...], seed: tuple[int, ...], size: int) -> fit.Draft:
    """Writes a prompt with `size` characters of noise around the key."""
    depth = float(depths[seed[-1] % len(depths)])
    key = str(fit.stream(seed, 0).integers(1, _KEYS, endpoint=True))
    before = round(depth * size)
    endless = f"{_GARBAGE} " * (size // len(_GARBAGE) + 1)
    parts = (
        _TASK,
        endless[:before],
        _KEY.format(key=key),
        endless[: size - before],
        _QUESTION,
    )
    return fit.Draft("\n".join(parts), (key,), _PRIMER, depth)


def _grade_passkey(generated: str, example: Example) -> dict[str, float]:
    """Grades the first number in the text, as the authors' `test_model` does."""
    number = re.search(r"\d+", generated)
    right = number is not None and int(number.group()) == int(example.answers[0])
    return {"accuracy": float(right)}


def _grade_needle(generated: str, example: Example) -> dict[str, float]:
    return {"accuracy": needle.found(example.answers[0], generated)}


TASKS = {
    "passkey": Task(
        "passkey",
        _passkeys,
        _grade_passkey,
        "accuracy",
        max_new_tokens=10,
        source="Mohtashami & Jaggi 2023 (arXiv 2305.16300); prompt, tokens to generate "
        "and metric of github.com/epfml/landmark-attention, llama/run_test.py",
    ),
    "needle": Task(
        "needle",
        _needles,
        _grade_needle,
        "accuracy",
        max_new_tokens=64,
        source="Kamradt 2023 (needle in a haystack), with the pass key of Mohtashami & "
        "Jaggi 2023",
    ),
}
