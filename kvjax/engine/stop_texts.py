"""Texts that end a completion, looked for in tokens."""

import bisect
from collections.abc import Sequence
from typing import Any


def ended(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first of the stops."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found, default=len(text))]


def stops(tokenizer: Any, until: Sequence[str], tokens: list[int]) -> bool:
    """Whether the tokens' text holds one of the texts that end a completion.

    Special tokens count as their texts.
    """
    text = tokenizer.decode(tokens)
    return any(stop in text for stop in until)


def text_before(tokenizer: Any, until: Sequence[str], tokens: list[int]) -> str:
    """The tokens' text up to the first stop, without special tokens."""
    over = lambda count: stops(tokenizer, until, tokens[:count])
    enough = bisect.bisect_left(range(len(tokens)), True, key=over)
    text = tokenizer.decode(tokens[:enough], skip_special_tokens=True)
    return ended(text, until)
