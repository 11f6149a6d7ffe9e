"""What is kept of the KV cache, and its one transition.

`config` says what is kept, `state` holds it, `update` takes it from one block of tokens
to the next. `schedule` says when pairs go, `budgets` and `squeeze` how many each layer
keeps, `layouts` where pairs lie, `codecs` how they are stored.
"""

from kvjax.cache import budgets, codecs, layouts, squeeze
from kvjax.cache.eviction import compact
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, make_spec
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
    stored_bytes,
)
from kvjax.cache.update import measure, step_layer

__all__ = [
    "NAN_SCORE",
    "OVERFLOW",
    "CacheSpec",
    "KVState",
    "Schedule",
    "advance",
    "budgets",
    "capacities",
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
    "squeeze",
    "step_layer",
    "stored_bytes",
]
