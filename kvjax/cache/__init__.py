"""The compressed KV cache: its configuration, its state and its one transition.

`config` holds what a user says of the cache, and `spec` what programs are compiled for.
`state` holds the pairs of a batch, and `update` appends a block of tokens to it.
`schedule` decides when pairs are evicted, `budgets` how many each layer or head keeps,
`layouts` where pairs lie, and `codecs` how they are stored.
"""

from kvjax.cache import budgets, codecs, layouts
from kvjax.cache.config import CacheConfig
from kvjax.cache.eviction import compact
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, checked, make_spec
from kvjax.cache.state import (
    NAN_SCORE,
    OVERFLOW,
    KVState,
    advance,
    capacities,
    init,
    insert,
    kept_positions,
    next_positions,
    raise_errors,
    release,
    select,
    stored_bytes,
)
from kvjax.cache.update import measure, step_layer
from kvjax.messages import warn


def __getattr__(name: str):
    """Returns what an earlier name stands for."""
    if name == "make_config":
        warn("kvjax.cache.make_config is called make_spec now", DeprecationWarning)
        return make_spec
    if name == "squeeze":
        warn(
            "kvjax.cache.squeeze is called kvjax.cache.budgets.squeeze_attention now",
            DeprecationWarning,
        )
        return budgets.squeeze_attention
    raise AttributeError(f"module 'kvjax.cache' has no attribute {name!r}")


__all__ = [
    "NAN_SCORE",
    "OVERFLOW",
    "CacheConfig",
    "CacheSpec",
    "KVState",
    "Schedule",
    "advance",
    "budgets",
    "capacities",
    "checked",
    "codecs",
    "compact",
    "init",
    "insert",
    "kept_positions",
    "layouts",
    "make_spec",
    "measure",
    "next_positions",
    "raise_errors",
    "release",
    "select",
    "step_layer",
    "stored_bytes",
]
