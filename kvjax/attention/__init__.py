"""Masked attention that also returns the statistics policies need; many backends."""

from kvjax.attention.backends import Backend, register
from kvjax.attention.inputs import AttentionSpec, Pairs, Queries, Unsupported
from kvjax.attention.ops import (
    attend,
    attend_segments,
    attention_stats,
    fuses_write,
    weights,
    write_attend,
)
from kvjax.attention.reference import merge, normalize

__all__ = [
    "AttentionSpec",
    "Backend",
    "Pairs",
    "Queries",
    "Unsupported",
    "attend",
    "attend_segments",
    "attention_stats",
    "fuses_write",
    "merge",
    "normalize",
    "register",
    "weights",
    "write_attend",
]
