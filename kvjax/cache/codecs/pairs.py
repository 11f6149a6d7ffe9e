"""Codecs made of others: one for keys and one for values, by layer, after prefill."""

import dataclasses

from kvjax.cache.codecs import uniform
from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.registry import make
from kvjax.types import UserError, whole_number


def pair(
    key: Codec | str = "int8",
    value: Codec | str = "int4",
    residual_length: int = 0,
    sinks: int = 0,
) -> Codec:
    """Stores keys by one codec and values by another; bytes are half of each one's.

    Args:
      key: a codec or its name.
      value: likewise.
      residual_length: the number of newest tokens that are also kept unencoded.
      sinks: the number of first tokens that are also kept unencoded.

    Raises:
      UserError: something that is no codec; one that differs between layers or waits
        for the end of the prompt, which only the whole codec can do; one that keeps
        more tokens unencoded than the pair does; a length below 0.
    """
    key, value = make(key), make(value)
    newest = whole_number("residual_length", residual_length, 0)
    sinks = whole_number("sinks", sinks, 0)
    for codec in (key, value):
        _check_alone("pair", codec)
        if codec.residual_length > newest or codec.sinks > sinks:
            raise UserError(
                f"codec {codec.name!r} within pair leaves the newest "
                f"{codec.residual_length} and the first {codec.sinks} tokens as they "
                "are: give pair a residual_length and sinks of so many"
            )
    name = f"pair of {key.name}, {value.name}"
    return Codec(name, key.key, value.value, newest, sinks)


def by_layer(
    inner: Codec | str = "int4",
    outer: Codec | str = "int8",
    first: int = 1,
    last: int = 1,
) -> Codec:
    """Stores the first and the last layers by one codec, those between by another.

    Bytes: those of each layer's codec.

    Args:
      inner: a codec or its name, for the layers between.
      outer: a codec or its name, for the first and the last layers.
      first: the number of first layers.
      last: the number of last layers.

    Raises:
      UserError: something that is no codec, or one that waits for the end of the
        prompt, which only the whole can do: `after_prompt(by_layer(...))`.
    """
    inner, outer = make(inner), make(outer)
    for codec in (inner, outer):
        _check_alone("by_layer", codec)
    first, last = whole_number("first", first, 0), whole_number("last", last, 0)
    name = f"{inner.name} within {first} and {last} layers of {outer.name}"
    return inner._replace(name=name, of_layer=_Ends(inner, outer, first, last))


def _check_alone(where: str, codec: Codec) -> None:
    """Raises UserError for a codec that cannot be part of another one."""
    if codec.after_prompt or codec.of_layer:
        raise UserError(
            f"codec {codec.name!r} within {where}: give one that is the same in all "
            f"layers, and after_prompt({where}(...)) for what waits"
        )


@dataclasses.dataclass(frozen=True)
class _Ends:
    """`Codec.of_layer` of `by_layer`; equal ones hash alike, for jit's cache."""

    inner: Codec
    outer: Codec
    first: int
    last: int

    def __call__(self, layer: int, layers: int) -> Codec:
        at_an_end = layer < self.first or layer >= layers - self.last
        return self.outer if at_an_end else self.inner


def after_prompt(codec: Codec | str = "int8") -> Codec:
    """Stores pairs by another codec, from the end of the prompt on.

    During prefill, pairs are stored unencoded, at full size, and policies read them so.
    Bytes during decoding: the codec's own.

    Args:
      codec: a codec or its name.

    Raises:
      UserError: something that is no codec.
    """
    codec = make(codec)
    return codec._replace(name=f"{codec.name}_after_prompt", after_prompt=True)


def k8v4(group: int | None = 32) -> Codec:
    """Stores keys as `int8`, as their errors move attention, and values as `int4`.

    Bytes: 102 a pair at D = 64.

    Args:
      group: channels of values that share a scale; keys have one scale per head.

    Raises:
      UserError: a group that is no number of channels.
    """
    return pair(uniform.int8(), uniform.int4(group))._replace(name="k8v4")
