"""Every policy, and some with settings of their own."""

from kvjax import policies

VARIANTS = {
    "tova per head": policies.tova(shared=False),
    "snapkv averaged": policies.snapkv(8, 5, "average", "mean_first"),
    "lag_kv short": policies.lag_kv(sinks=2, lag=8, ranked=False),
    "fastgen small": policies.fastgen(
        0.7, special=(3,), punctuation=(5, 6), heavy=6, local=6
    ),
    "simlayerkv lazy": policies.simlayerkv(0.2, recent=9, queries=3),
    "sliding_window 20": policies.sliding_window(20),
    "scissorhands_released few": policies.scissorhands_released(3, 20, 4),
    "criticalkv of sums": policies.criticalkv(policies.average_attention()),
    "protect": policies.protect(policies.average_attention(), 3, 5),
    "mix": policies.mix(policies.key_diff(), policies.snapkv(8), 0.3),
    "smooth": policies.smooth(policies.h2o(), 5),
    "chunked": policies.chunked(policies.key_norm(), 4),
    "per_head": policies.per_head(policies.average_attention(), 0.6, 0.3),
}
POLICIES = {name: policies.make(name) for name in policies.names()} | VARIANTS
