"""kvpress' presses by the names of our policies; kvpress is imported when one is made.

All of them keep a number of pairs once, when the prompt has been read; what is decoded
stays. That is our schedule `after_prefill`.
"""

from collections.abc import Callable
from typing import Any

LABELS = {
    "snapkv": "SnapKV",
    "tova": "TOVA",
    "key_diff": "KeyDiff",
    "key_norm": "Knorm",
    "streaming": "StreamingLLM",
    "expected_attention": "Expected Attention",
    "average_attention": "Observed Attention",
}
EAGER = ("average_attention",)  # read the weights that only eager attention returns


def ratio(budget: int, prompt_tokens: int) -> float:
    """The compression ratio that keeps `budget` pairs of a prompt, or all it has.

    A press keeps int(prompt_tokens * (1 - ratio)), so half a pair more is asked for.
    """
    return max(0.0, 1 - (budget + 0.5) / prompt_tokens)


def make(name: str, ratio: float, **options: Any) -> Any:
    """A press.

    Args:
      name: one of `LABELS`.
      ratio: see `ratio`.
      options: the press' own settings by its own names, where not its defaults.

    Raises:
      ValueError: an unknown name.
      TypeError: an option that the press does not have.
    """
    if name not in LABELS:
        known = ", ".join(LABELS)
        raise ValueError(f"policy {name!r} has no press here: use one of {known}")
    return _factory(name)(ratio, **options)


def _factory(name: str) -> Callable[..., Any]:
    import kvpress

    return {
        "snapkv": kvpress.SnapKVPress,
        "tova": kvpress.TOVAPress,
        "key_diff": kvpress.KeyDiffPress,
        "key_norm": kvpress.KnormPress,
        "streaming": kvpress.StreamingLLMPress,
        "expected_attention": kvpress.ExpectedAttentionPress,
        "average_attention": kvpress.ObservedAttentionPress,
    }[name]
