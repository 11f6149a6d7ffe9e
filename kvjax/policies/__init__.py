"""Eviction policies: pure functions over arrays that rank the cached KV pairs.

A policy needs no model and no cache of kvjax::

    from kvjax import policies
    from kvjax.types import Observation, View

    policy = policies.average_attention()
    stats = policy.init(spec, B, C)  # num_kv_heads, queries_per_kv_head, head_dim
    view = View(positions, query_position, num_keep, keys=lambda: k, values=lambda: v)
    observation = Observation(num_tokens, query_positions, attn_sum=attn_sum)
    stats = policy.observe(stats, view, observation)
    scores = policy.score(stats, view)
    evict_mask = policies.select_evictions(scores, positions, num_evict)  # [B, K, C]

Where to find what::

    papers/            one module per paper: h2o.py, snapkv.py, fastgen.py, ...
    baselines.py       recency, sliding_window, random
    combinators.py     protect, mix, smooth, chunked, shared_heads, per_head, by_size
    base.py            Policy, and helpers that policies are written with
    ordering.py        helpers that look at pairs in the order of their positions
    attention_sums.py  policies over attention weights that are summed per pair
    recent_queries.py  policies that remember the last queries of every row
    checks.py          checks of a policy before anything is compiled

`make` takes the name of a policy, one of `names()`, one of your own that you
`register`, or `my_policies:my_function`. `docs/policies_alone.md` runs policies in an
attention layer of your own; `docs/policies.md` shows what each policy keeps.
"""

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
from kvjax.policies.baselines import random, recency, sliding_window
from kvjax.policies.combinators import (
    by_size,
    chunked,
    mix,
    per_head,
    protect,
    shared_heads,
    smooth,
)
from kvjax.policies.papers.batch_max import average_attention
from kvjax.policies.papers.chunk_kv import chunk_kv
from kvjax.policies.papers.criticalkv import criticalkv
from kvjax.policies.papers.duo_attention import retrieval_heads
from kvjax.policies.papers.expected_attention import expected_attention
from kvjax.policies.papers.fastgen import fastgen
from kvjax.policies.papers.h2o import h2o, h2o_sinks
from kvjax.policies.papers.key_diff import key_diff
from kvjax.policies.papers.key_norm import key_norm
from kvjax.policies.papers.lag_kv import lag_kv
from kvjax.policies.papers.r_kv import r_kv
from kvjax.policies.papers.roco import roco
from kvjax.policies.papers.scissorhands import scissorhands, scissorhands_released
from kvjax.policies.papers.simlayerkv import simlayerkv
from kvjax.policies.papers.snapkv import snapkv
from kvjax.policies.papers.streaming_llm import streaming
from kvjax.policies.papers.tova import tova
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
    retrieval_heads,
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
