"""What codecs do to numbers that fewer bits do not hold: scales, and the way back."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Shaped


def grouped(x: Shaped[Array, "B K T D"], count: int) -> Shaped[Array, "B K T N S"]:
    """The channels in `count` groups of neighbours."""
    return x.reshape(*x.shape[:-1], count, -1)


def scale_of(x: Float32[Array, "*axes S"], reach: float) -> BFloat16[Array, "*axes 1"]:
    """The step with which `reach` steps are a group's largest magnitude.

    NaN where any of the group is no number: a compiler's maximum may pass over NaN.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    numbers = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    return sixteen_bits(jnp.where(numbers, largest, jnp.nan) / reach)


def sixteen_bits(x: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
    """The nearest bfloat16: NaN for what is no number, but never infinite.

    bfloat16 and not float16: a scale has to reach as far as the values do.
    """
    x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    return fitted(x, jnp.dtype(jnp.bfloat16))


def in_steps(x: Float32[Array, "*axes S"], scale: BFloat16[Array, "*axes 1"]) -> Array:
    """How many steps of its group's scale each value is; none where that is 0.

    Steps above 2^126, which `int2` alone can have, count none either: compilers
    multiply by the reciprocal, which is flushed to 0.
    """
    step = scale.astype(jnp.float32)
    return x / jnp.where(step == 0, 1.0, step)


def fitted(x: Float32[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """In that dtype; what its largest number does not reach is that number.

    NaN, which stands for a group with something infinite too, stays.
    """
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) > most, jnp.sign(x) * most, x).astype(dtype)
