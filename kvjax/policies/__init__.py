"""Which key-value pairs stay: eviction rules as pure functions over arrays.

A rule needs no model and no cache of ours::

    from kvjax import policies
    from kvjax.types import Observation, View

    policy = policies.average_attention()
    stats = policy.init(spec, B, C)             # spec: num_kv_heads, group, head_dim
    view = View(pos, now, keep, keys=lambda: k, values=lambda: v)
    stats = policy.observe(stats, view, Observation(n, mass=weights_summed))
    gone = policies.select_evictions(policy.score(stats, view), pos, drop)   # bool [B, K, C]

`docs/policies_alone.md` has a whole attention layer; `docs/policies.md` shows what each
rule keeps.
"""

from kvjax.policies.attention_sums import average_attention, h2o, h2o_sinks, roco
from kvjax.policies.base import (
    Policy,
    recent_mask,
    scatter_new,
    select_evictions,
    stateless,
    validate,
    zeros_per_slot,
)
from kvjax.policies.combinators import (
    chunked,
    mix,
    per_head,
    protect,
    shared_heads,
    smooth,
)
from kvjax.policies.expected import expected_attention
from kvjax.policies.head_profiles import fastgen, simlayerkv
from kvjax.policies.keys import key_diff, key_norm, lag_kv
from kvjax.policies.observation_window import chunk_kv, snapkv, tova
from kvjax.policies.persistence import scissorhands, scissorhands_released
from kvjax.policies.positional import random, recency, sliding_window, streaming
from kvjax.policies.redundancy import r_kv
from kvjax.policies.value_norms import criticalkv
from kvjax.types import UserError

_REGISTRY = {
    factory.__name__: factory
    for factory in (
        average_attention,
        chunk_kv,
        criticalkv,
        expected_attention,
        fastgen,
        h2o,
        h2o_sinks,
        key_diff,
        key_norm,
        lag_kv,
        r_kv,
        random,
        recency,
        roco,
        scissorhands,
        scissorhands_released,
        simlayerkv,
        sliding_window,
        snapkv,
        streaming,
        tova,
    )
}


def names() -> tuple[str, ...]:
    """The registered policies, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def make(name: str, **options) -> Policy:
    """The policy of that name, e.g. `make('streaming', sinks=8)`.

    Raises:
      UserError: an unknown name, or an option that the policy does not have.
    """
    if name not in _REGISTRY:
        raise UserError(f"policy {name!r} is unknown: use one of {', '.join(names())}")
    try:
        return _REGISTRY[name](**options)
    except TypeError as error:  # an option that it does not have, or of no use to it
        raise UserError(f"policy {name!r}: {error}") from None


__all__ = [
    "Policy",
    "average_attention",
    "chunk_kv",
    "chunked",
    "criticalkv",
    "expected_attention",
    "fastgen",
    "h2o",
    "h2o_sinks",
    "key_diff",
    "key_norm",
    "lag_kv",
    "make",
    "mix",
    "names",
    "per_head",
    "protect",
    "r_kv",
    "random",
    "recency",
    "recent_mask",
    "roco",
    "scatter_new",
    "scissorhands",
    "scissorhands_released",
    "select_evictions",
    "shared_heads",
    "simlayerkv",
    "sliding_window",
    "smooth",
    "snapkv",
    "stateless",
    "streaming",
    "tova",
    "validate",
    "zeros_per_slot",
]
