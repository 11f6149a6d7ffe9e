"""Uniform quantization to 8, 4 or 2 bits, with a scale per group of channels.

Every token of every head has its own scales, so that slots can be overwritten one by
one. A scale for a whole tensor would have to be fixed before later tokens are known.
"""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int8, Integer

from kvjax.cache.codecs.base import Codec, TensorCodec
from kvjax.cache.codecs.rounding import (
    fitted,
    grouped,
    in_steps,
    scale_of,
    sixteen_bits,
)
from kvjax.types import Codes, UserError, whole_number


def int8(group: int | None = None, symmetric: bool = True) -> Codec:
    """Encodes 8 bits a value, by default with one scale per token and head.

        s = max |x| / 127,  code = round(x / s) in -127..127,  x' = s code

    Bytes per value: 1 + 2 / group; 132 a pair at D = 64, 136 with groups of 32.

    Args:
      group: channels that share a scale; None is all of a head.
      symmetric: whether the grid is centred on 0; see `int2` for grids with a centre,
        which take 2 / group bytes more per value.

    Source: absmax quantization, Dettmers et al. 2022, arXiv 2208.07339, section 2.

    Raises:
      UserError: a group that is no number of channels.
    """
    tensor = of_bits(8, group, symmetric)
    return Codec("int8", tensor, tensor)


def int4(group: int | None = 32, symmetric: bool = True) -> Codec:
    """Encodes 4 bits a value, with a scale per group of channels.

        s = max |x| / 7,  code = round(x / s) in -7..7,  x' = s code

    Bytes per value: 1 / 2 + 2 / group; 72 a pair at D = 64.

    Args, Raises: as `int8`.

    Source: groups of 32 values as in llama.cpp's Q4_0.
    """
    tensor = of_bits(4, group, symmetric)
    return Codec("int4", tensor, tensor)


def int2(group: int | None = 32, symmetric: bool = False) -> Codec:
    """Encodes 2 bits a value, with a scale and a centre per group of channels.

        c = (min x + max x) / 2,  s = max |x - c| / 1.5
        code = floor((x - c) / s) in -2..1,  x' = s (code + 1/2) + c

    For b bits, 2^(b - 1) - 1/2 replaces 1.5. The grid spans the least to the largest
    value of a group, as with a zero point; but the centre is nearer to 0 than the
    minimum, and loses less in 16 bits. A symmetric grid has only -1, 0 and 1.

    Bytes per value: 1 / 4 + 4 / group; 48 a pair at D = 64, 40 if symmetric.

    Args, Raises: as `int8`.

    Source: the grid of KIVI, Liu et al. 2024, arXiv 2402.02750, section 3.1, here
    per token for keys too, as groups of tokens cannot be overwritten slot by slot.
    """
    tensor = of_bits(2, group, symmetric)
    return Codec("int2", tensor, tensor)


def of_bits(bits: int, group: int | None, symmetric: bool) -> TensorCodec:
    """Returns the codec of 8, 4 or 2 bits; the same object for the same arguments.

    Raises:
      UserError: a group that is no number of channels.
    """
    group = None if group is None else whole_number("group", group, 1)
    if not isinstance(symmetric, bool):
        raise UserError(f"symmetric is {symmetric!r}: give True or False")
    return _of_bits(bits, group, symmetric)


@functools.cache
def _of_bits(bits: int, group: int | None, symmetric: bool) -> TensorCodec:
    each = "one scale" if group is None else f"groups of {group}"
    return TensorCodec(
        f"int{bits}, {each}" + ("" if symmetric else " with centres"),
        init=lambda shape, dtype: zeros(shape, bits, group, symmetric),
        encode=lambda x: encode(x, bits, group, symmetric),
        decode=lambda stored, dtype: fitted(decode(stored, bits), dtype),
        even_grid=symmetric,
    )


def zeros(
    shape: tuple[int, ...], bits: int, group: int | None, symmetric: bool
) -> Codes:
    """Returns the codes of zeros (B, K, C, D).

    Raises:
      UserError: groups do not divide the channels, or these fill no whole bytes.
    """
    *rows, depth = shape
    size = group or depth
    if depth % size:
        raise UserError(
            f"int{bits} in groups of {group} channels does not divide a head_dim of "
            f"{depth}: use group={math.gcd(size, depth)}"
        )
    if depth * bits % 8:
        raise UserError(
            f"int{bits} packs {8 // bits} values a byte, which a head_dim of {depth} "
            "does not fill: use int8"
        )
    kind = jnp.int8 if bits == 8 else jnp.uint8
    scale = jnp.zeros((*rows, depth // size), jnp.bfloat16)
    codes = jnp.zeros((*rows, depth * bits // 8), kind)
    return Codes(codes, scale, None if symmetric else jnp.zeros_like(scale))


def encode(
    x: Float[Array, "B K T D"], bits: int, group: int | None, symmetric: bool
) -> Codes:
    """Encodes on the finest grid that reaches all values of a group."""
    most, flat = 2 ** (bits - 1), x.shape
    x = grouped(x.astype(jnp.float32), flat[-1] // (group or flat[-1]))
    if symmetric:
        centre, reach = None, most - 1
    else:
        low, high = (f(x, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
        centre, reach = sixteen_bits(low / 2 + high / 2), most - 0.5
        x = x - centre.astype(jnp.float32)
    scale = scale_of(x, reach)
    steps = in_steps(x, scale)
    codes = jnp.round(steps) if symmetric else jnp.floor(steps)
    # The scale's own rounding takes the outermost values up to half a step too far.
    codes = jnp.clip(codes, -most + symmetric, most - 1).astype(jnp.int8)
    centre = None if symmetric else centre[..., 0]
    return Codes(pack(codes.reshape(flat), bits), scale[..., 0], centre)


def decode(stored: Codes, bits: int) -> Float[Array, "B K C D"]:
    """Decodes to f32; the rounding of the scale can make the result infinite.

    Codes that share bytes are decoded before they are concatenated: on a CPU, XLA does
    not vectorize loops that go on after a concatenation.
    """
    parts = unpack(stored.codes, bits)
    count, width = len(parts), parts[0].shape[-1]
    size = count * width // stored.scale.shape[-1]
    runs = size // math.gcd(size, width)  # of a group's channels, each within one part
    split = lambda leaf: jnp.split(jnp.repeat(leaf, runs, axis=-1), count, axis=-1)
    scales = split(stored.scale)
    centres = [None] * count if stored.centre is None else split(stored.centre)
    return jnp.concatenate(list(map(_numbers, parts, scales, centres)), axis=-1)


def _numbers(
    codes: Int8[Array, "B K C P"],
    scale: BFloat16[Array, "B K C R"],
    centre: BFloat16[Array, "B K C R"] | None,
) -> Float[Array, "B K C P"]:
    """Decodes codes in R runs of channels, each on a grid of its own."""
    of_runs = lambda leaf: leaf.astype(jnp.float32)[..., None]
    steps = grouped(codes.astype(jnp.float32), scale.shape[-1])
    if centre is None:
        x = steps * of_runs(scale)
    else:
        x = (steps + 0.5) * of_runs(scale) + of_runs(centre)
    return x.reshape(codes.shape)


def pack(codes: Int8[Array, "B K T D"], bits: int) -> Integer[Array, "B K T P"]:
    """Packs several codes into a byte, the first P channels in its lowest bits.

    Codes of one byte are P channels apart, so that unpacking concatenates whole vectors
    and shuffles no lanes.
    """
    if bits == 8:
        return codes
    unsigned = (codes + 2 ** (bits - 1)).astype(jnp.uint8)
    parts = jnp.split(unsigned, 8 // bits, axis=-1)
    return functools.reduce(
        jnp.bitwise_or, (part << (bits * i) for i, part in enumerate(parts))
    )


def unpack(
    packed: Integer[Array, "B K C P"], bits: int
) -> list[Int8[Array, "B K C P"]]:
    """Returns the codes that `pack` took, one array for each place in a byte."""
    if bits == 8:
        return [packed]
    mask, middle = 2**bits - 1, 2 ** (bits - 1)
    shifted = (packed >> place for place in range(0, 8, bits))
    return [(codes & mask).astype(jnp.int8) - middle for codes in shifted]
