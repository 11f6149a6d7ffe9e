"""Keys as one codec has them, values as another."""

from kvjax.cache.codecs import uniform
from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.registry import make
from kvjax.types import whole_number


def pair(
    key: Codec | str = "int8", value: Codec | str = "int4", residual_length: int = 0
) -> Codec:
    """Keys as one codec has them, values as another; bytes are half of each one's.

    Args:
      key: a codec or its name.
      value: likewise.
      residual_length: the newest tokens, whose pairs stay as they are besides.

    Raises:
      UserError: something that is no codec, or a length below 0.
    """
    key, value = make(key), make(value)
    newest = whole_number("residual_length", residual_length, 0)
    return Codec(f"pair of {key.name}, {value.name}", key.key, value.value, newest)


def k8v4(group: int | None = 32) -> Codec:
    """`int8` keys, whose errors decide who is attended, and `int4` values.

    Bytes: 102 a pair at D = 64.

    Args:
      group: channels of values with a scale of their own; keys have one per head.

    Raises:
      UserError: a group that is no number of channels.
    """
    return pair(uniform.int8(), uniform.int4(group))._replace(name="k8v4")
