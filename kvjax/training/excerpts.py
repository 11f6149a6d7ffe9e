"""Makes the excerpts on which `fit_heads` compares predictions.

An excerpt is the beginning of a text with some of its passages repeated.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.engine import tokenization
from kvjax.types import Model, UserError

PASSAGES, PASSAGE = 5, 48  # number of repeated passages, and tokens of each
PROMPTING = 12  # first tokens of a passage, whose predictions are not compared
INSTRUCTION = "\n\nRepeat parts of the previous context exactly.\n\n"
AT_ONCE = 84  # predictions compared at a time, which bounds the logits in memory


class Excerpt(NamedTuple):
    """A text to read, and the positions at which predictions are compared.

    Attributes:
      tokens: the text, an instruction, some of its passages, then padding.
      at: positions whose predictions are compared.
      weights: weight of each position in the KL of the text and in that of the
        passages.
    """

    tokens: Int[np.ndarray, "1 T"]
    at: Int[np.ndarray, "N"]
    weights: Float[np.ndarray, "N 2"]


def make(
    model: Model,
    texts: Sequence[tokenization.Prompt],
    length: int,
    seed: int,
    chunk: int,
) -> list[Excerpt]:
    """Returns the first `length` tokens of every text with some passages repeated.

    Each is padded to a multiple of `chunk` tokens.

    Raises:
      UserError: a model without tokenizer, a text that is too short, excerpts that
        exceed the model's context.
    """
    if model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer to ask for passages with")
    encode = functools.partial(model.tokenizer, add_special_tokens=False)
    asking, ending = (encode(words)["input_ids"] for words in (INSTRUCTION, "\n\n"))
    rng, found = np.random.default_rng(seed), []
    longest = length + len(asking) + PASSAGES * (PASSAGE + len(ending))
    if longest > model.spec.context_length:
        raise UserError(
            f"texts of {length} tokens and passages of them take {longest}, and the "
            f"context of {model.spec.name} has {model.spec.context_length}: calibrate "
            "on shorter texts"
        )
    for index, ids in enumerate(tokenization.tokenize(model, texts)):
        if len(ids) < length:
            raise UserError(
                f"text {index} has {len(ids)} tokens: give texts of {length} or more"
            )
        found.append(_excerpt(ids[:length], asking, ending, rng, chunk))
    return found


def _excerpt(ids, asking, ending, rng, chunk) -> Excerpt:
    """Returns one text's excerpt.

    Of the text's last two thirds, twice as many positions are compared as of the
    passages.
    """
    tokens, repeated = [*ids, *asking], []
    starts = rng.choice(len(ids) // PASSAGE - 1, PASSAGES, replace=False) * PASSAGE
    for start in starts + rng.integers(0, PASSAGE, PASSAGES):
        here = len(tokens)
        tokens += [*ids[start : start + PASSAGE], *ending]
        repeated += range(here + PROMPTING - 1, here + PASSAGE - 1)
    places = np.arange(len(ids) // 3, len(ids) - 1)
    read = rng.choice(places, min(2 * len(repeated), len(places)), replace=False)
    short = -(len(read) + len(repeated)) % AT_ONCE  # padding has weight 0
    at = np.concatenate([read, repeated, np.zeros(short)]).astype(np.int32)
    weights = np.zeros((len(at), 2), np.float32)
    weights[: len(read), 0] = 1 / len(read)
    weights[len(read) : len(read) + len(repeated), 1] = 1 / len(repeated)
    tokens += [0] * (-len(tokens) % chunk)  # at the end, where no real query sees it
    return Excerpt(np.asarray([tokens], np.int32), at, weights)
