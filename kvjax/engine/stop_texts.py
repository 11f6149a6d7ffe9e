"""The text of a completion, and the texts that end one, looked for in its tokens."""

import bisect
import functools
from collections.abc import Sequence
from typing import Any

_CONTEXT = 16  # tokens of the prompt that new ones are decoded with, to begin with
_BROKEN = "\ufffd"  # what decoders write for a part of a character


def text_after(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], **options: Any
) -> str:
    """Returns what tokens add to the text of the prompt that they follow.

    Tokens are decoded together with the end of their prompt: alone, they would lose
    their first space to decoders that drop the one in front of a text (SentencePiece's,
    as of Llama 2, Mistral and Phi-3), and one in front of their first word with
    decoders that put spaces between tokens.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: token ids, of any number.
      tokens: the ids that follow.
      **options: of the tokenizer's `decode`.
    """
    decode = functools.partial(tokenizer.decode, **options)
    size = _CONTEXT
    before = decode(end := list(prompt[-size:]))
    # Without text, the end cannot keep the space; from within a character, it could
    # break the next ones.
    while size < len(prompt) and (not before or before.startswith(_BROKEN)):
        size *= 2
        before = decode(end := list(prompt[-size:]))
    whole = decode(end + list(tokens))
    for begun in range(4):  # tokens of a character that the new ones complete
        before = decode(end[: len(end) - begun])
        if whole.startswith(before):
            return whole[len(before) :]
    return decode(list(tokens))


def ended(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first of the stops."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found, default=len(text))]


def stops(
    tokenizer: Any, until: Sequence[str], prompt: Sequence[int], tokens: list[int]
) -> bool:
    """Returns whether the text of new tokens holds one that ends a completion.

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
