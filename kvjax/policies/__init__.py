"""Which key-value pairs stay: eviction rules as pure functions over arrays.

A rule needs no model and no cache of ours::

    from kvjax import policies
    from kvjax.types import Observation, View

    policy = policies.average_attention()
    stats = policy.init(spec, B, C)  # num_kv_heads, queries_per_kv_head, head_dim
    view = View(positions, query_position, num_keep, keys=lambda: k, values=lambda: v)
    observation = Observation(num_tokens, query_positions, attn_sum=attn_sum)
    stats = policy.observe(stats, view, observation)
    scores = policy.score(stats, view)
    evict_mask = policies.select_evictions(scores, positions, num_evict)  # [B, K, C]

`docs/policies_alone.md` has a whole attention layer and the helpers that rules are made
of, here and in `kvjax.policies.ordering`; `docs/policies.md` shows what each rule
keeps. `make` takes a rule's name, one of `names()`, one of your own that you
`register`, or `my_rules:my_function`.
"""

from kvjax.policies.attention_sums import average_attention, h2o, h2o_sinks, roco
from kvjax.policies.base import (
    LayerParams,
    Policy,
    head_numbers,
    memoized,
    own_heads,
    real_mask,
    recent_mask,
    scatter_new,
    select_evictions,
    stateless,
    validate,
    with_params,
    zeros_per_slot,
)
from kvjax.policies.combinators import (
    by_size,
    chunked,
    mix,
    per_head,
    protect,
    shared_heads,
    smooth,
)
from kvjax.policies.expected import expected_attention
from kvjax.policies.head_profiles import fastgen, retrieval_heads, simlayerkv
from kvjax.policies.keys import key_diff, key_norm, lag_kv
from kvjax.policies.observation_window import chunk_kv, snapkv, tova
from kvjax.policies.persistence import scissorhands, scissorhands_released
from kvjax.policies.positional import random, recency, sliding_window, streaming
from kvjax.policies.redundancy import r_kv
from kvjax.policies.value_norms import criticalkv
from kvjax.registry import Registry

_registry = Registry("policy", Policy)
register, names, make = _registry.register, _registry.names, _registry.make

for _factory in (
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
):
    register(_factory.__name__, _factory)


__all__ = [
    "LayerParams",
    "Policy",
    "average_attention",
    "by_size",
    "chunk_kv",
    "chunked",
    "criticalkv",
    "expected_attention",
    "fastgen",
    "h2o",
    "h2o_sinks",
    "head_numbers",
    "key_diff",
    "key_norm",
    "lag_kv",
    "make",
    "memoized",
    "mix",
    "names",
    "own_heads",
    "per_head",
    "protect",
    "r_kv",
    "random",
    "real_mask",
    "recency",
    "recent_mask",
    "register",
    "retrieval_heads",
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
    "with_params",
    "zeros_per_slot",
]
