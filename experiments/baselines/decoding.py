"""Prefill and greedy decoding with transformers, with or without a press.

Follows kvpress' own pipeline: the press compresses during prefill, decoding attends to
all remaining KV pairs, and new tokens have their true positions. Unlike the pipeline,
it takes batches.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

Press = Callable[[Any], contextlib.AbstractContextManager]  # of the model


class Read(NamedTuple):
    """The state after a prefill.

    Attributes:
      cache: its keys and values.
      token: [B, 1], the first new token.
      positions: [1, 1], the position of that token.
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
    """Reads prompts [B, T]; without a press, keeps all pairs.

    `chunk` tokens are read at a time, None for all; not with a press, which works on
    the first of them.
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
    """Appends zeros for `count` tokens to the cache in place, as if decoded."""
    for layer in read.cache.layers:
        batch, heads, _, depth = layer.keys.shape
        zeros = layer.keys.new_zeros((batch, heads, count, depth))
        layer.update(zeros, zeros)
    return read._replace(positions=read.positions + count)


def decode(model: Any, read: Read, new: int) -> list[list[int]]:
    """Decodes `new` tokens of each row greedily; extends the cache in place."""
    cache, token, positions = read
    tokens = [token]
    for _ in range(new - 1):
        out = model(
            token, position_ids=positions, past_key_values=cache, use_cache=True
        )
        token, positions = out.logits[:, -1:].argmax(dim=-1), positions + 1
        tokens.append(token)
    return torch.cat(tokens, dim=1).tolist()
