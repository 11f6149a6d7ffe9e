"""Cuts completions at their stop texts."""

from collections.abc import Sequence
from typing import Any

from kvjax.engine.text_stream import TextStream


def stops(
    tokenizer: Any, until: Sequence[str], prompt: Sequence[int], tokens: list[int]
) -> bool:
    """Returns whether the new tokens' text contains a stop text.

    Special tokens count as their texts, and as no text.
    """
    stream = TextStream(tokenizer, prompt, until)
    stream.push(tokens)
    return stream.ended


def completed(
    tokenizer: Any, until: Sequence[str], prompt: Sequence[int], tokens: list[int]
) -> tuple[str, list[int]]:
    """Returns the text before the first stop, and the tokens up to the stop's last.

    The text is without special tokens.
    """
    stream = TextStream(tokenizer, prompt, until)
    text = stream.push(tokens) + stream.finish()
    return text, tokens[: stream.tokens_used]
