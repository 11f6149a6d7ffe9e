"""What is kept of the KV cache, and its one transition.

`config` says what is kept, `state` holds it, `update` takes it from one block of tokens
to the next. `layouts` say where pairs lie, `codecs` how they are stored.
"""

from kvjax.cache.config import CacheConfig, make_config
from kvjax.cache.schedule import Schedule
from kvjax.cache.state import (
    OVERFLOW,
    KVState,
    advance,
    init,
    kept_positions,
    next_positions,
    pair_bytes,
    raise_errors,
)
from kvjax.cache.update import compact, step_layer

__all__ = [
    "OVERFLOW",
    "CacheConfig",
    "KVState",
    "Schedule",
    "advance",
    "compact",
    "init",
    "kept_positions",
    "make_config",
    "next_positions",
    "pair_bytes",
    "raise_errors",
    "step_layer",
]
