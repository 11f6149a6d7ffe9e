"""Decodes completions, and finds stop texts in them."""

import bisect
import functools
from collections.abc import Sequence
from typing import Any

_CONTEXT = 16  # prompt tokens that new ones are decoded with, or more if needed
_BROKEN = "\ufffd"  # decoders write it for an incomplete character


def text_after(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], **options: Any
) -> str:
    """Returns the text that tokens add to the prompt that they follow.

    Tokens are decoded together with the end of their prompt. Decoded alone, they would
    lose their first space: SentencePiece's decoders (Llama 2, Mistral, Phi-3) drop a
    space at the start of a text, and others put spaces only between tokens.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: token ids, of any number.
      tokens: the ids that follow.
      **options: of the tokenizer's `decode`.
    """
    decode = functools.partial(tokenizer.decode, **options)
    size = _CONTEXT
    before = decode(end := list(prompt[-size:]))
    # An end without text cannot keep the space, and one that starts inside a character
    # could break the next ones.
    while size < len(prompt) and (not before or before.startswith(_BROKEN)):
        size *= 2
        before = decode(end := list(prompt[-size:]))
    whole = decode(end + list(tokens))
    for begun in range(4):  # the new tokens may complete a character of the prompt
        before = decode(end[: len(end) - begun])
        if whole.startswith(before):
            return whole[len(before) :]
    return decode(list(tokens))


def ended(text: str, stop: tuple[str, ...]) -> str:
    """Returns the text before the first stop text."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found, default=len(text))]


def stops(
    tokenizer: Any, until: Sequence[str], prompt: Sequence[int], tokens: list[int]
) -> bool:
    """Returns whether the new tokens' text contains a stop text.

    Special tokens count as their texts.
    """
    text = text_after(tokenizer, prompt, tokens)
    return any(stop in text for stop in until)


def completed(
    tokenizer: Any, until: Sequence[str], prompt: Sequence[int], tokens: list[int]
) -> tuple[str, list[int]]:
    """Returns the text before the first stop, and the tokens up to the stop's last.

    The text is without special tokens.
    """
    if until:
        over = lambda count: stops(tokenizer, until, prompt, tokens[:count])
        tokens = tokens[: bisect.bisect_left(range(len(tokens)), True, key=over)]
    text = text_after(tokenizer, prompt, tokens, skip_special_tokens=True)
    return ended(text, tuple(until)), tokens
