"""Prefill and greedy decoding with transformers, with or without a press.

As kvpress' own pipeline does it: the press works while the prompt is read; from there
on every pair left is seen, and new tokens stand at their true positions. Unlike the
pipeline it takes rows by the batch.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

Press = Callable[[Any], contextlib.AbstractContextManager]  # of the model


class Read(NamedTuple):
    """What a prompt leaves behind.

    Attributes:
      cache: its keys and values.
      token: [B, 1], the first new token.
      positions: [1, 1], where that token stands.
    """

    cache: transformers.DynamicCache
    token: torch.Tensor
    positions: torch.Tensor


def prefill(
    model: Any,
    ids: torch.Tensor,
    press: Press | None = None,
    chunk: int | None = None,
) -> Read:
    """Reads prompts.

    Args:
      model: a causal language model of transformers.
      ids: [B, T] tokens.
      press: None keeps all pairs.
      chunk: tokens read at a time, None for all; not for a press, which works on the
        first of them.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    # The cache of kvpress' pipeline, and the one that transformers makes by itself.
    cache = transformers.DynamicCache(**({} if press else {"config": model.config}))
    step = chunk or ids.shape[1]
    with press(model) if press else contextlib.nullcontext():
        for start in range(0, ids.shape[1], step):
            part = slice(start, start + step)
            out = model(
                ids[:, part],
                position_ids=positions[:, part],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
    token = out.logits[:, -1:].argmax(dim=-1)
    return Read(cache, token, positions[:, -1:] + 1)


def skip(read: Read, count: int) -> Read:
    """As if `count` more tokens had been decoded; their keys and values are zeros.

    The cache that is given grows.
    """
    for layer in read.cache.layers:
        batch, heads, _, depth = layer.keys.shape
        zeros = layer.keys.new_zeros((batch, heads, count, depth))
        layer.update(zeros, zeros)
    return read._replace(positions=read.positions + count)


def decode(model: Any, read: Read, new: int) -> list[list[int]]:
    """The first `new` tokens of each row; the cache grows."""
    cache, token, positions = read
    tokens = [token]
    for _ in range(new - 1):
        out = model(
            token, position_ids=positions, past_key_values=cache, use_cache=True
        )
        token, positions = out.logits[:, -1:].argmax(dim=-1), positions + 1
        tokens.append(token)
    return torch.cat(tokens, dim=1).tolist()
