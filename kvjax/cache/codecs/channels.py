"""The codec KIVI, which encodes keys per channel over groups of tokens."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Integer

from kvjax.cache.codecs import uniform
from kvjax.cache.codecs.base import Codec, TensorCodec
from kvjax.cache.codecs.rounding import fitted
from kvjax.types import Codes, UserError, whole_number


class Channels(NamedTuple):
    """Stored keys, in groups of G tokens.

    Attributes:
      codes: of G tokens of one channel, packed as `Codes` packs G channels of a token.
      scale: the step of every channel; NaN if the group holds NaN or an infinity.
      centre: the middle of every channel's range.
    """

    codes: Integer[Array, "B K N D P"]
    scale: BFloat16[Array, "B K N D 1"]
    centre: BFloat16[Array, "B K N D 1"]


def kivi(bits: int = 2, group: int = 32, residual_length: int = 128) -> Codec:
    """Encodes keys per channel over groups of tokens, and values per token.

    Some channels of keys are large in all tokens. With a grid for each channel, the
    large ones do not coarsen the others::

        keys     c, s of G tokens of one channel        values   of G channels of one
                 once all G are appended                         token, at once

    with the codes of `int2`. A group's scales depend on all of its tokens, so its pairs
    are never evicted. With a policy, encode the kept pairs after the prompt,
    `after_prompt("kivi")`, under a schedule that then evicts no more (`after_prefill`,
    `prefill_only`).

    Bytes per value: bits / 8 + 4 / group; 48 a pair at D = 64. The residual is extra.

    Args:
      bits: 2, 4 or 8.
      group: G, tokens of keys and channels of values with a scale and a centre.
      residual_length: the number of newest tokens kept unencoded; `group` at least.

    Source: KIVI, Liu et al. 2024, arXiv 2402.02750, section 3 and Algorithm 1 (G = 32,
    R = 128). There the residual of keys is emptied every R tokens; here it always holds
    the newest R.

    Raises:
      UserError: other bits; a group of values that does not divide the channels; a
        residual shorter than a group.
    """
    if whole_number("kivi bits", bits) not in (2, 4, 8):
        raise UserError(f"kivi bits {bits!r}: use 2, 4 or 8")
    group = whole_number("group", group, 2)
    if group * bits % 8:
        raise UserError(
            f"kivi packs {8 // bits} tokens a byte, which a group of {group} does not "
            f"fill: use a multiple of {8 // bits}"
        )
    newest = whole_number("residual_length", residual_length, group)
    value = uniform.of_bits(bits, group, symmetric=False)
    return Codec("kivi", _by_channel(bits, group), value, newest)


@functools.cache
def _by_channel(bits: int, group: int) -> TensorCodec:
    def init(shape, dtype) -> Channels:
        batch, heads, tokens, depth = shape
        flat = batch, heads, tokens // group * depth, group
        return _apart(uniform.zeros(flat, bits, None, symmetric=False), depth)

    def encode(x: Float[Array, "B K T D"]) -> Channels:
        batch, heads, tokens, depth = x.shape
        x = x.reshape(batch, heads, tokens // group, group, depth)
        flat = jnp.moveaxis(x, -1, -2).reshape(batch, heads, -1, group)
        return _apart(uniform.encode(flat, bits, None, symmetric=False), depth)

    def decode(stored: Channels, dtype: jnp.dtype) -> Float[Array, "B K C D"]:
        batch, heads, groups, depth = stored.codes.shape[:4]
        join = lambda leaf: leaf.reshape(batch, heads, groups * depth, -1)
        x = uniform.decode(Codes(*map(join, stored)), bits)
        x = x.reshape(batch, heads, groups, depth, group)
        x = jnp.moveaxis(x, -1, -2).reshape(batch, heads, groups * group, depth)
        return fitted(x, dtype)

    name = f"int{bits} by channel, groups of {group} tokens with centres"
    return TensorCodec(name, init, encode, decode, group)


def _apart(stored: Codes, depth: int) -> Channels:
    """Reshapes [B, K, N D, ...] to [B, K, N, D, ...]: layouts write whole groups."""
    split = lambda leaf: leaf.reshape(*leaf.shape[:2], -1, depth, leaf.shape[-1])
    return Channels(*map(split, stored))
