"""Arithmetic shared by codecs: scales of groups, rounding, and saturating casts."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Shaped


def grouped(x: Shaped[Array, "B K T D"], count: int) -> Shaped[Array, "B K T N S"]:
    """Reshapes channels into `count` groups of neighbours."""
    return x.reshape(*x.shape[:-1], count, -1)


def scale_of(x: Float32[Array, "*axes S"], reach: float) -> BFloat16[Array, "*axes 1"]:
    """Returns each group's step: its largest magnitude divided by `reach`.

    NaN where the group holds NaN or an infinity. That is tested apart, as a compiler's
    maximum may skip NaN.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    numbers = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    return sixteen_bits(jnp.where(numbers, largest, jnp.nan) / reach)


def sixteen_bits(x: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Returns the nearest finite bfloat16; NaN for NaN and infinities.

    bfloat16 has the range of float32, which a scale needs; float16 does not.
    """
    x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    return fitted(x, jnp.dtype(jnp.bfloat16))


def in_steps(x: Float32[Array, "*axes S"], scale: BFloat16[Array, "*axes 1"]) -> Array:
    """Divides each value by its group's scale; a scale of 0, of zeros, counts as 1.

    Values with a scale above 2^126, which only `int2` can have, give 0: compilers
    multiply by the reciprocal, which is flushed to 0.
    """
    step = scale.astype(jnp.float32)
    return x / jnp.where(step == 0, 1.0, step)


def fitted(x: Float32[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Casts to a dtype, with values beyond its largest number clipped to that number.

    NaN stays; it also stands for a group that held an infinity.
    """
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) > most, jnp.sign(x) * most, x).astype(dtype)
