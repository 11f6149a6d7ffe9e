"""Blocks that the model families share: pure functions of arrays."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(
    x: Float[Array, "*N M"], weight: Float[Array, "M"], eps: float
) -> Float[Array, "*N M"]:
    """x / rms(x) * weight, computed in float32 (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def rope_tables(
    positions: Int[Array, "B *H T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B *H T D"], Float[Array, "B *H T D"]]:
    """Cosine and sine of the rotary angles, float32 (Su et al. 2021, section 3.2).

    The two halves of a head carry the same angles, as in Hugging Face checkpoints
    (the interleaved pairing of the paper, with the head's channels reordered).
    """
    half = jnp.arange(head_dim // 2, dtype=jnp.float32)
    frequency = theta ** (-2.0 * half / head_dim)
    angle = jnp.multiply.outer(positions.astype(jnp.float32), frequency)
    angle = jnp.concatenate([angle, angle], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B *H T D"],
    cos: Float[Array, "B *I T D"],
    sin: Float[Array, "B *I T D"],
) -> Float[Array, "B *H T D"]:
    """Rotates the heads of `x` by the angles of their tokens; float32 inside.

    The tables have the first of x's head axes, or none: they serve all the others.
    """
    extra = tuple(range(cos.ndim - 2, x.ndim - 2))
    cos, sin = jnp.expand_dims(cos, extra), jnp.expand_dims(sin, extra)
    wide = x.astype(jnp.float32)
    left, right = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-right, left], axis=-1)
    return (wide * cos + turned * sin).astype(x.dtype)


def swiglu(
    x: Float[Array, "B T M"],
    gate_up: Float[Array, "M 2F"],
    down: Float[Array, "F M"],
) -> Float[Array, "B T M"]:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), with gate and up in one matmul."""
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down
