"""Expected Attention (Devoto et al. 2025), arXiv 2510.00636."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from kvjax.policies.base import Policy, check_counts, check_range, memoized, real_mask
from kvjax.types import Observation, Stats, View


@memoized
def expected_attention(
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
) -> Policy:
    """Keeps the pairs that future queries are expected to attend to.

        mu, cov = mean and covariance of the queries so far, before rotary positions,
                  rotated to the average of the next `future` positions
        logit   = mu . key / sqrt(D) + key . cov . key / (2 D)
        score   = (softmax(logit) averaged over G + epsilon) * |value|

    A head's queries are close to Gaussian, and the mean of exp(q . k) over Gaussian
    queries has this closed form. The statistics are updated block by block, exactly
    (Chan et al. 1979). They take G * D * (D + 1) numbers per KV head and row, and each
    eviction multiplies every key by a D x D matrix per query head. The policy ignores a
    layer's soft cap and sliding window, which have no closed form.

    Args:
      future: number of future positions to average over; the paper's 512.
      sinks: number of first tokens that are never evicted. Their queries are outliers,
        so they do not count in the statistics, nor their pairs in the softmax.
      covariance: False drops the second term.
      value_norm: False drops |value|.
      epsilon: added to every pair's weight before it is multiplied by |value|.

    Needs: pre_rope_queries, for their mean and covariance.
    Source: Expected Attention (Devoto et al. 2025), arXiv 2510.00636, with the
      statistics and defaults of its implementation in kvpress.
    Raises:
      UserError: `future` below 1, negative `sinks` or `epsilon`.
    """
    check_counts("expected_attention", 1, future=future)
    check_counts("expected_attention", 0, sinks=sinks)
    check_range("expected_attention", 0, float("inf"), epsilon=epsilon)

    def score(stats, view):
        keys = view.keys().astype(jnp.float32)
        rotation = _average_rotation(view, future, keys.shape[-1])
        logit = _logits(stats.per_row, rotation, keys, covariance)
        among = ((view.positions >= 0) & (view.positions >= sinks))[:, :, None]
        weight = jax.nn.softmax(jnp.where(among, logit, -1e30), axis=-1)
        weight = jnp.mean(weight, axis=2)
        if value_norm:
            values = view.values().astype(jnp.float32)
            weight = (weight + epsilon) * jnp.sqrt(jnp.sum(values * values, axis=-1))
        return jnp.where(view.positions < sinks, jnp.inf, weight)

    return Policy(
        init=lambda spec, batch, capacity: Stats(per_row=_no_moments(spec, batch)),
        observe=lambda stats, view, observation: Stats(
            per_row=_gather(stats.per_row, observation, sinks)
        ),
        score=score,
        required_stats=frozenset({"pre_rope_queries"}),
        name="expected_attention",
        num_pinned=sinks,
    )


class Moments(NamedTuple):
    """Moments of the queries that every row has read.

    Attributes:
      count: number of queries.
      mean: their mean.
      scatter: sum of the outer products of their deviations from the mean.
    """

    count: Float[Array, "B"]
    mean: Float[Array, "B K G D"]
    scatter: Float[Array, "B K G D D"]


def _no_moments(spec, batch: int) -> Moments:
    shape = (batch, spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim)
    return Moments(
        count=jnp.zeros((batch,), jnp.float32),
        mean=jnp.zeros(shape, jnp.float32),
        scatter=jnp.zeros((*shape, spec.head_dim), jnp.float32),
    )


def _gather(old: Moments, observation: Observation, sinks: int) -> Moments:
    """Adds a block's real queries to the moments."""
    real = real_mask(observation) & (observation.positions >= sinks)
    count = jnp.sum(real, axis=1).astype(jnp.float32)
    queries = rearrange(observation.pre_rope_queries, "b k g t d -> b t k g d")
    queries = queries.astype(jnp.float32)
    queries = jnp.where(real[..., None, None, None], queries, 0.0)
    mean = jnp.sum(queries, axis=1) / _heads(jnp.maximum(count, 1.0))
    centred = jnp.where(real[..., None, None, None], queries - mean[:, None], 0.0)
    scatter = jnp.einsum("btkgd,btkge->bkgde", centred, centred, precision="highest")
    total = old.count + count
    share = _heads(count / jnp.maximum(total, 1.0))
    shift = mean - old.mean
    outer = shift[..., :, None] * shift[..., None, :]
    return Moments(
        count=total,
        mean=old.mean + shift * share,
        scatter=old.scatter + scatter + outer * (_heads(old.count) * share)[..., None],
    )


def _heads(x: Float[Array, "B"]) -> Float[Array, "B 1 1 1"]:
    return x[:, None, None, None]


def _average_rotation(view: View, future: int, depth: int) -> Float[Array, "B D D"]:
    """Returns the mean rotation to the next `future` positions, applied as x @ matrix.

    The rotation to position n + f is the one by f followed by the one to n, so the mean
    over f is computed once for all rows.
    """
    unit = jnp.broadcast_to(jnp.eye(depth)[None, :, None], (1, depth, future, depth))
    ahead = jnp.arange(future, dtype=jnp.int32)[None]
    mean = jnp.mean(view.apply_rope(unit, ahead), axis=2)  # [1, D, D]
    rows = len(view.query_position)
    mean = jnp.broadcast_to(mean[:, :, None], (rows, depth, 1, depth))
    return view.apply_rope(mean, view.query_position[:, None] + 1)[:, :, 0]


def _logits(
    moments: Moments,
    rotation: Float[Array, "B D D"],
    keys: Float[Array, "B K C D"],
    covariance: bool,
) -> Float[Array, "B K G C"]:
    """Returns log E exp(q . k / sqrt(D)) for Gaussian queries q."""
    depth = keys.shape[-1]
    product = {"precision": "highest"}
    mean = jnp.einsum("bkgd,bde->bkge", moments.mean, rotation, **product)
    logit = jnp.einsum("bkge,bkce->bkgc", mean, keys, **product) * depth**-0.5
    if not covariance:
        return logit
    spread = moments.scatter / _heads(jnp.maximum(moments.count, 1.0))[..., None]
    spread = jnp.einsum("bde,bkgdf,bfh->bkgeh", rotation, spread, rotation, **product)
    rotated = jnp.einsum("bkce,bkgeh->bkgch", keys, spread, **product)
    return logit + jnp.sum(rotated * keys[:, :, None], axis=-1) / (2 * depth)
