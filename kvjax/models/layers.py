"""Building blocks of all model families: pure functions of arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.parallel import axes
from kvjax.types import RopeScaling

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


_FEW = 64  # up to so many rows, a CPU is faster with the weights on the left


def product(
    x: Float[Array, "*N I"], weight: Float[Array, "O I"]
) -> Float[Array, "*N O"]:
    """Returns x @ weight.T in x's dtype, summed in float32.

    The inputs are the minor axis of the weights: otherwise XLA's CPU backend rearranges
    all 16-bit weights at every use.
    """
    return jax.lax.platform_dependent(x, weight, cpu=_rounded, default=_times)


def wide_product(
    x: Float[Array, "*N I"], weight: Float[Array, "O I"]
) -> Float[Array, "*N O"]:
    """Returns x @ weight.T in float32."""
    wide = functools.partial(_times, preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(x, weight, cpu=_on_cpu, default=wide)


def _times(x, weight, **options):
    return jnp.einsum("...i,oi->...o", x, weight, **options)


def _rounded(x, weight):
    # XLA's CPU backend uses bfloat16 matrix units only for a float32 result.
    return _on_cpu(x, weight).astype(x.dtype)


def _on_cpu(x: Float[Array, "*N I"], weight: Float[Array, "O I"]) -> Array:
    """Returns `wide_product` in the form that XLA's CPU backend runs fastest.

    Weights on the left are read in place; weights on the right are copied first.
    """
    # One axis of rows: with two, XLA keeps another copy of all 16-bit weights.
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    whole = (*x.shape[:-1], len(weight))
    if rows > _FEW:
        wide = _times(flat, weight, preferred_element_type=jnp.float32)
        return wide.reshape(whole)
    if rows == 1 and x.dtype.itemsize <= 2:  # a single 16-bit row is a slow loop
        flat = jnp.pad(flat, ((0, 1), (0, 0)))
    swapped = jnp.einsum("oi,ni->on", weight, flat, preferred_element_type=jnp.float32)
    # Without the barrier, XLA swaps the operands back.
    swapped = jax.lax.optimization_barrier(swapped)[:, :rows]
    return swapped.T.reshape(whole)


def rms_norm(
    x: Float[Array, "*N M"], weight: Float[Array, "M"], eps: float
) -> Float[Array, "*N M"]:
    """Returns x / rms(x) * weight, normalised in float32 (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def offset_rms_norm(
    x: Float[Array, "*N M"], weight: Float[Array, "M"], eps: float
) -> Float[Array, "*N M"]:
    """Returns x / rms(x) * (1 + weight), all in float32, as Gemma computes it."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain = jnp.broadcast_to(1.0 + weight.astype(jnp.float32), x.shape)
    return (wide * scale * gain).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*N M"],
    weight: Float[Array, "M"],
    bias: Float[Array, "M"],
    eps: float,
) -> Float[Array, "*N M"]:
    """Returns (x - mean) / std * weight + bias, in float32 (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain, shift = (
        jnp.broadcast_to(w.astype(jnp.float32), x.shape) for w in (weight, bias)
    )
    return (wide * scale * gain + shift).astype(x.dtype)


def rope_frequencies(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns radians per token for each pair of channels, float32[width / 2].

    Args:
      width: channels that rotate.
      theta: the base.
      scaling: see `RopeScaling`. Llama 3: Grattafiori et al. 2024 (Hugging Face's
        `rope_type: llama3`); YaRN: Peng et al. 2023, section 3.4; LongRoPE: Ding et
        al. 2024.
    """
    plain = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling.kind == "linear":
        return np.float32(plain / scaling.factor)
    if scaling.kind == "longrope":
        return np.float32(plain / np.asarray(scaling.factors))
    if scaling.kind == "llama3":
        turns = scaling.original * plain / (2 * math.pi)
        kept = (turns - scaling.low) / (scaling.high - scaling.low)
    elif scaling.kind == "yarn":
        # The channels that rotate `high` and `low` times within the original context.
        edges = [
            width
            * math.log(scaling.original / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (scaling.high, scaling.low)
        ]
        if scaling.rounded:
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        first, last = max(edges[0], 0), min(edges[1], width - 1)
        span = last - first if last > first else 0.001
        kept = 1 - (np.arange(width // 2) - first) / span
    else:
        return np.float32(plain)
    kept = np.clip(kept, 0, 1)
    return np.float32(kept * plain + (1 - kept) * plain / scaling.factor)


def rope_tables(
    positions: Int[Array, "B *H T"], frequencies: np.ndarray, scale: float = 1.0
) -> tuple[Float[Array, "B *H T D"], Float[Array, "B *H T D"]]:
    """Returns cosine and sine of the rotary angles, float32 (Su et al. 2021, 3.2).

    Both halves of a head have the same angles, as in Hugging Face checkpoints: the
    paper's interleaved pairs, with the head's channels reordered.
    """
    angle = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    twice = lambda x: jnp.concatenate([x, x], axis=-1) * scale
    return twice(jnp.cos(angle)), twice(jnp.sin(angle))


def rotate(
    x: Float[Array, "B *H T D"],
    cos: Float[Array, "B *I T E"],
    sin: Float[Array, "B *I T E"],
) -> Float[Array, "B *H T D"]:
    """Rotates the heads of `x` by the angles of their tokens, computed in float32.

    The tables have the leading ones of x's head axes, or none, and are broadcast over
    the others. Channels beyond the tables' E are not rotated.
    """
    extra = tuple(range(cos.ndim - 2, x.ndim - 2))
    cos, sin = jnp.expand_dims(cos, extra), jnp.expand_dims(sin, extra)
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    wide = turning.astype(jnp.float32)
    left, right = jnp.split(wide, 2, axis=-1)
    swapped = jnp.concatenate([-right, left], axis=-1)
    rotated = (wide * cos + swapped * sin).astype(x.dtype)
    return jnp.concatenate([rotated, still], axis=-1) if still.shape[-1] else rotated


def activated(x: Float[Array, "*N F"], name: str) -> Float[Array, "*N F"]:
    """Applies an activation in float32 and rounds once, as PyTorch does."""
    return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def softcap(x: Array, cap: float) -> Array:
    """Returns cap * tanh(x / cap), which lies within +-cap."""
    return cap * jnp.tanh(x / cap)


def gate_and_up(
    both: Float[Array, "*N gate_up"], groups: int
) -> tuple[Float[Array, "*N F"], Float[Array, "*N F"]]:
    """Splits the outputs of `gate_up` into gate and up, see `ModelSpec.ff_groups`."""
    if groups == 1:  # a reshape would make a TPU copy the weights at every use
        gate, up = jnp.split(both, 2, axis=-1)
        return gate, up
    parts = both.reshape(*both.shape[:-1], groups, 2, -1)
    flat = (*both.shape[:-1], both.shape[-1] // 2)
    return parts[..., 0, :].reshape(flat), parts[..., 1, :].reshape(flat)


def mixture(
    x: Float[Array, "N M"],
    router: Float[Array, "E M"],
    gate_up: Float[Array, "E M gate_up"],
    down: Float[Array, "E F M"],
    used: int,
    activation: str,
    groups: int = 1,
) -> Float[Array, "N M"]:
    """Returns a mixture of gated MLPs: each token uses its `used` most likely experts.

    Their outputs are weighted by the router's softmax over the chosen experts, float32.
    Tokens are sorted by expert, so that every expert multiplies only its own. On a
    mesh, every shard sorts its own tokens and holds a slice of every expert.
    """
    over = axes.mesh()
    if over is None:
        return _mixture(x, router, gate_up, down, used, activation, groups)
    rows = axes.partition(over, x.shape, ("batch", None))
    inner = axes.partition(over, down.shape, (None, "ff", None))
    outer = PartitionSpec(None, None, inner[1])
    whole = inner[1] is None

    def body(*part):
        out = _mixture(*part, used, activation, groups if whole else 1)
        return out if whole else axes.psum_model(out)

    specs = rows, PartitionSpec(), outer, inner
    return axes.per_shard(body, specs, rows)(x, router, gate_up, down)


def _mixture(x, router, gate_up, down, used, activation, groups):
    scores = _times(x, router, preferred_element_type=jnp.float32)
    share, expert = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), used)
    share = share / jnp.sum(share, axis=-1, keepdims=True)
    order = jnp.argsort(expert.reshape(-1), stable=True)
    token = order // used
    sizes = jnp.bincount(expert.reshape(-1), length=len(router))
    hidden = jax.lax.ragged_dot(x[token], gate_up, sizes.astype(jnp.int32))
    gate, up = gate_and_up(hidden, groups)
    hidden = activated(gate, activation) * up
    out = jax.lax.ragged_dot(hidden, down, sizes.astype(jnp.int32))
    out = out * share.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(out)
