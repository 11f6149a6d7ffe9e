"""Masked attention that also adds up importance: one meaning, several backends."""

from kvjax.attention.ops import (
    attend,
    attend_segments,
    attention_stats,
    fuses_write,
    merge,
    normalize,
    write_attend,
)

__all__ = [
    "attend",
    "attend_segments",
    "attention_stats",
    "fuses_write",
    "merge",
    "normalize",
    "write_attend",
]
