"""JAX's `dot_product_attention` as a backend: fast, but without statistics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax.attention.inputs import AttentionSpec, Pairs, Queries, Unsupported
from kvjax.attention.reference import PLAIN, visible
from kvjax.attention.stored import decoded
from kvjax.types import Observation, Partial


def functions(name: str) -> dict[str, Any]:
    """Returns the fields of a `Backend` for one of JAX's implementations."""
    return {"attend": functools.partial(attend, name=name), "check": check}


def check(queries: Queries, pairs: Pairs, spec: AttentionSpec) -> None:
    """Raises Unsupported for what `jax.nn.dot_product_attention` cannot do."""
    if spec.scoring != PLAIN:
        raise Unsupported(
            f"it neither caps logits nor limits a query's window ({spec.scoring})"
        )
    if spec.stats:
        raise Unsupported(
            f"it returns no statistics, and {sorted(spec.stats)} are needed"
        )


def attend(
    queries: Queries, pairs: Pairs, spec: AttentionSpec, *, name: str
) -> tuple[Partial, Observation]:
    """Attends by JAX's implementation `name`; see `kvjax.attention.attend`.

    JAX returns a normalised output, which is a `Partial` with a denominator of 1.
    """
    q, k, v = queries.q, decoded(pairs.k), decoded(pairs.v)
    flat = lambda x: rearrange(x, "b k g t d -> b t (k g) d")
    seen = jnp.broadcast_to(
        visible(pairs.positions, queries.positions), (*q.shape[:4], k.shape[2])
    )
    with jax.numpy_dtype_promotion("standard"):  # it mixes dtypes inside
        out, lse = jax.nn.dot_product_attention(
            flat(q),
            rearrange(k, "b k c d -> b c k d"),
            rearrange(v, "b k c d -> b c k d"),
            mask=rearrange(seen, "b k g t c -> b (k g) t c"),
            implementation=name,
            return_residual=True,
        )
    any_seen = jnp.any(seen, axis=-1)
    out = rearrange(out, "b t (k g) d -> b k g t d", k=q.shape[1]).astype(jnp.float32)
    lse = rearrange(lse, "b t (k g) -> b k g t", k=q.shape[1]).astype(jnp.float32)
    partial = Partial(
        out=jnp.where(any_seen[..., None], out, 0.0),
        max_logit=jnp.where(any_seen, lse, -jnp.inf),
        denominator=any_seen.astype(jnp.float32),
    )
    return partial, Observation(num_tokens=queries.n, positions=queries.positions)
