"""How close a method's predictions stay to the full cache's, under teacher forcing.

Both are fed the same prompt and the same true continuation; what is compared is the
distribution over the next token at every place of the continuation.
"""

import dataclasses
from typing import Any

import numpy as np

from kvjax.types import UserError


@dataclasses.dataclass(frozen=True)
class Window:
    """A stretch of text as token ids: what is read, and what follows it."""

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
    """Returns `count` windows of the text, in the order in which they stand in it.

    They are disjoint, with gaps drawn by the seed, when the text is long enough, and
    otherwise evenly spaced over it. A tokenizer that begins every text with a token of
    its own (BOS) gives each prompt that token, as one of its `prompt_tokens`.

    Args:
      tokenizer: a fast transformers tokenizer.
      count: number of windows.
      prompt_tokens: tokens in each prompt.
      continuation_tokens: tokens in each continuation.
      seed: places disjoint windows.
      haystack: prose, see `kvjax.evaluation.tasks.text.haystack`.

    Raises:
      UserError: a number below 1, or a text too short for `count` different windows.
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
      targets: i[N], the tokens that truly come next.

    Returns:
      Means over the N places: `loss` and `reference_loss` (cross-entropy of the target)
      and `kl` (KL(reference || method)) in nats per token, and `top1_agreement`, the
      share of places where both find the same token likeliest.

    Raises:
      UserError: the shapes do not belong together, or there is no target.
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
    """What the tokenizer puts before every text: its BOS token, or nothing."""
    opening = tokenizer("", verbose=False)["input_ids"][:1]
    return opening if opening == [tokenizer.bos_token_id] else []


def _starts(total: int, count: int, size: int, seed: int) -> list[int]:
    """Where windows of `size` start in a text of `total` tokens; all are different."""
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
    """Reference loss, loss, KL and agreement at one place: logits f[V] twice."""
    reference, row = _log_softmax(reference), _log_softmax(row)
    p = np.exp(reference)
    used = p > 0  # a token the reference rules out adds nothing
    kl = np.sum(p[used] * (reference[used] - row[used]))
    agree = np.argmax(reference) == np.argmax(row)
    return -reference[target], -row[target], max(kl, 0.0), float(agree)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))
