"""Pass-key retrieval: a key is hidden in a long text and asked for at its end.

The key has five digits and is hidden at a chosen depth of the text.
Sources: Mohtashami & Jaggi, "Landmark Attention" (2023), for the pass key; Kamradt,
"Needle in a Haystack" (2023), for the sweep over depths in real text.
"""

import bisect
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.types import UserError

_NEEDLE = (
    "The secret passkey number is {key}. Remember this number: {key} is the secret "
    "passkey."
)
_TASK = (
    "There is an important piece of information hidden inside a lot of irrelevant "
    "text. Find it and memorize it."
)
_QUESTION = "What is the secret passkey number mentioned in the text?"
PRIMER = "The secret passkey number is"  # opens the answer: the key comes next
_SENTENCE_END = re.compile(r"[.!?:][\"'”\u2019)]*\s+$")


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and its key.

    Attributes:
      message: the user's message, without chat template and primer.
      prompt: the message with chat template and primer.
      tokens: token ids of the prompt, with special tokens.
      answer: the five digits.
      depth: requested depth of the needle, from 0 (start of the text) to 1 (end).
    """

    message: str
    prompt: str
    tokens: tuple[int, ...]
    answer: str
    depth: float


@dataclasses.dataclass(frozen=True)
class _Text:
    """Words with the white space after them, and whether each starts a sentence."""

    words: tuple[str, ...]
    opens: tuple[bool, ...]


def examples(
    tokenizer: Any,
    count: int,
    length: int,
    depths: Sequence[float],
    seed: int,
    haystack: str,
) -> list[Example]:
    """Returns `count` prompts of nearly `length` tokens, with different keys and texts.

    The prompts are as long as whole words allow within `length`, with the tokenizer's
    chat template if it has one. Their texts start at sentences spread evenly over the
    haystack (see `kvjax.evaluation.tasks.text.haystack`), which is repeated if it is
    too short; the needle stands between two sentences. Depths are cycled.

    Raises:
      UserError: `length` cannot hold needle and question, `count` is below 1, a depth
        is outside 0..1, or the text is too short for `count` different windows.
    """
    check(count, depths)
    text = _split(haystack)
    if sum(text.opens) < count:
        raise UserError(
            f"haystack has {sum(text.opens)} sentences, too few for {count} examples "
            "with different windows; give a longer text or a smaller count"
        )
    rng = np.random.default_rng(seed)
    keys = _keys(rng, count, haystack)
    starts = _window_starts(rng, count, text)
    _check_length(tokenizer, length, keys)
    return [
        _example(tokenizer, text, start, key, depths[i % len(depths)], length)
        for i, (key, start) in enumerate(zip(keys, starts, strict=True))
    ]


def grade(example: Example, text: str) -> float:
    """Returns 1.0 if the generated text contains the example's key, else 0.0."""
    return found(example.answer, text)


def found(key: str, text: str) -> float:
    """Returns 1.0 if the text contains the key as a whole number, else 0.0."""
    return float(re.search(rf"(?<!\d){key}(?!\d)", text) is not None)


def check(count: int, depths: Sequence[float]) -> None:
    """Raises UserError for a count below 1, no depth, or one outside 0..1."""
    if count < 1:
        raise UserError(f"count must be at least 1, got {count}")
    if not len(depths) or not all(0 <= depth <= 1 for depth in depths):
        raise UserError(f"depths must be one or more numbers in 0..1, got {depths}")


def _check_length(tokenizer: Any, length: int, keys: Sequence[str]) -> None:
    bare = (_prompt(tokenizer, _message("", key, "")) for key in keys)
    least = max(len(_encode(tokenizer, prompt)) for prompt in bare)
    if length < least:
        raise UserError(
            f"length {length} cannot hold needle and question, which take {least} "
            f"tokens; the least possible length is {least}"
        )


def _split(haystack: str) -> _Text:
    words = tuple(re.findall(r"\S+\s+", haystack + "\n\n"))
    ends = (bool(_SENTENCE_END.search(word)) or "\n\n" in word for word in words)
    return _Text(words, (True, *ends)[: len(words)])


def _keys(rng: np.random.Generator, count: int, haystack: str) -> list[str]:
    """Draws different five-digit keys that do not occur in the haystack."""
    taken = {int(number) for number in re.findall(r"(?=(\d{5}))", haystack)}
    free = [key for key in range(10_000, 100_000) if key not in taken]
    return [str(key) for key in rng.choice(free, count, replace=False)]


def _window_starts(rng: np.random.Generator, count: int, text: _Text) -> list[int]:
    """Returns the first words of `count` evenly spread sentences, in random order."""
    starts = np.flatnonzero(text.opens)
    offsets = rng.integers(len(starts)) + np.arange(count) * len(starts) // count
    return rng.permutation(starts[offsets % len(starts)]).tolist()


def _example(
    tokenizer: Any, text: _Text, start: int, key: str, depth: float, length: int
) -> Example:
    """Returns the longest prompt within `length` tokens.

    The search is bounded by `length` words, since a word takes at least one token.
    """

    def message(words: int) -> str:
        before, after = _window(text, start, words, depth)
        return _message(before, key, after)

    def fits(words: int) -> bool:
        return len(_encode(tokenizer, _prompt(tokenizer, message(words)))) <= length

    words = bisect.bisect_left(range(1, length + 1), True, key=lambda n: not fits(n))
    longest = message(words)
    prompt = _prompt(tokenizer, longest)
    return Example(longest, prompt, _encode(tokenizer, prompt), key, float(depth))


def _window(text: _Text, start: int, count: int, depth: float) -> tuple[str, str]:
    """Returns `count` words from `start`, split at the sentence end nearest `depth`."""
    places = [i % len(text.words) for i in range(start, start + count)]
    words = [text.words[i] for i in places]
    cuts = [cut for cut, i in enumerate(places) if text.opens[i]] + [count]
    cut = min(cuts, key=lambda cut: abs(cut - depth * count))
    return "".join(words[:cut]).strip(), "".join(words[cut:]).strip()


def _message(before: str, key: str, after: str) -> str:
    parts = (_TASK, before, _NEEDLE.format(key=key), after, _QUESTION)
    return "\n\n".join(part for part in parts if part)


def _prompt(tokenizer: Any, message: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return f"{message} {PRIMER}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return chat + PRIMER


def _encode(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """Returns token ids; a chat template has already added the special tokens."""
    bare = not getattr(tokenizer, "chat_template", None)
    return tuple(tokenizer(prompt, add_special_tokens=bare, verbose=False)["input_ids"])
