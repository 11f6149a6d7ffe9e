"""Compares a method's predictions with the full cache's, under teacher forcing.

Both read the same prompt and the same true continuation; the next-token distributions
are compared at every position of the continuation.
"""

import dataclasses
from typing import Any

import numpy as np
from scipy import special

from kvjax.types import UserError


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of text as token ids: a prompt and its true continuation."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def windows(
    tokenizer: Any,
    count: int,
    prompt_tokens: int,
    continuation_tokens: int,
    seed: int,
    haystack: str,
) -> list[Window]:
    """Returns `count` windows of the text, in the order of their positions.

    If the text is long enough, they are disjoint, with random gaps that `seed` draws;
    otherwise they overlap and are evenly spaced. If the tokenizer adds BOS, each prompt
    begins with it, as one of its `prompt_tokens`. `haystack` is prose, see
    `kvjax.evaluation.tasks.text.haystack`.

    Raises:
      UserError: a number is below 1, or the text is too short for different windows.
    """
    sizes = {"count": count, "prompt_tokens": prompt_tokens}
    sizes["continuation_tokens"] = continuation_tokens
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    bos = _bos(tokenizer)
    text = tokenizer(haystack, add_special_tokens=False, verbose=False)["input_ids"]
    split = prompt_tokens - len(bos)
    size = split + continuation_tokens
    return [
        Window(
            (*bos, *text[start : start + split]),
            tuple(text[start + split : start + size]),
        )
        for start in _starts(len(text), count, size, seed)
    ]


def compare(
    reference_logits: np.ndarray, logits: np.ndarray, targets: np.ndarray
) -> dict[str, float]:
    """Compares next-token predictions; sums are taken in float64.

    Args:
      reference_logits: f[N, V] of the full cache.
      logits: f[N, V] of the method.
      targets: i[N], the true next tokens.

    Returns:
      Means over the N positions: `loss` and `reference_loss` (cross-entropy of the
      target) and `kl` (KL(reference || method)) in nats per token, and
      `top1_agreement`, the share of positions where both have the same argmax.

    Raises:
      UserError: the shapes do not match, or there is no target.
    """
    shape, reference_shape = np.shape(logits), np.shape(reference_logits)
    if len(shape) != 2 or shape != reference_shape or np.shape(targets) != shape[:1]:
        raise UserError(
            "expected logits [N, V] twice and targets [N], got reference_logits "
            f"{reference_shape}, logits {shape}, targets {np.shape(targets)}"
        )
    if not len(targets):
        raise UserError("there are no targets to compare predictions at")
    rows = zip(reference_logits, logits, targets, strict=True)
    reference_loss, loss, kl, agree = np.mean([_place(*row) for row in rows], axis=0)
    return {
        "loss": float(loss),
        "reference_loss": float(reference_loss),
        "kl": float(kl),
        "top1_agreement": float(agree),
    }


def _bos(tokenizer: Any) -> list[int]:
    """Returns [BOS] if the tokenizer adds it to every text, else []."""
    opening = tokenizer("", verbose=False)["input_ids"][:1]
    return opening if opening == [tokenizer.bos_token_id] else []


def _starts(total: int, count: int, size: int, seed: int) -> list[int]:
    """Returns different starts of windows of `size` in a text of `total` tokens."""
    room = total - size + 1
    if room < count:
        raise UserError(
            f"haystack has {total} tokens, too few for {count} different windows of "
            f"{size}; at least {size + count - 1} are needed"
        )
    slack = total - count * size
    if slack < 0:
        return [i * room // count for i in range(count)]
    gaps = np.sort(np.random.default_rng(seed).integers(0, slack + 1, count))
    return [int(gap) + i * size for i, gap in enumerate(gaps)]


def _place(reference: np.ndarray, row: np.ndarray, target: int) -> tuple[float, ...]:
    """Returns reference loss, loss, KL and agreement for logits f[V] and f[V]."""
    reference, row = (
        special.log_softmax(logits.astype(np.float64)) for logits in (reference, row)
    )
    p = np.exp(reference)
    used = p > 0  # avoids 0 * inf; a token of probability 0 adds nothing
    kl = np.sum(p[used] * (reference[used] - row[used]))
    agree = np.argmax(reference) == np.argmax(row)
    return -reference[target], -row[target], max(kl, 0.0), float(agree)
