"""Makes kvpress' presses by the names of our policies; imports kvpress when called.

Every press evicts once, after the prompt; decoded tokens are all kept. That is our
schedule `after_prefill`.
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
EAGER = ("average_attention",)  # need weights, which only eager attention returns


def ratio(budget: int, prompt_tokens: int) -> float:
    """Returns the compression ratio that keeps at most `budget` pairs of a prompt.

    A press keeps int(prompt_tokens * (1 - ratio)), so this asks for half a pair more.
    """
    return max(0.0, 1 - (budget + 0.5) / prompt_tokens)


def make(name: str, ratio: float, **options: Any) -> Any:
    """Makes the press of a name in `LABELS`, with its own options.

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
