"""Masked attention that also adds up importance: one meaning, several backends."""

from kvjax.attention.ops import (
    attend,
    attend_segments,
    finish,
    fuses_write,
    merge,
    weigh,
    write_attend,
)

__all__ = [
    "attend",
    "attend_segments",
    "finish",
    "fuses_write",
    "merge",
    "weigh",
    "write_attend",
]
