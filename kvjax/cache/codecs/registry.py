"""The registry of codecs."""

from kvjax.cache.codecs.base import Codec
from kvjax.registry import Registry
from kvjax.types import UserError

_REGISTRY = Registry("codec")
register, names = _REGISTRY.register, _REGISTRY.names


def make(codec: Codec | str, /, **options) -> Codec:
    """Returns the codec of a name or of a user's `module:function`; or it unchanged.

    Raises:
      UserError: an unknown name, options that it does not take, or something that is
        no codec.
    """
    found = _REGISTRY.make(codec, **options) if isinstance(codec, str) else codec
    if not isinstance(found, Codec) or min(found.residual_length, found.sinks) < 0:
        raise UserError(
            f"codec {codec!r} is no kvjax.cache.codecs.Codec whose residual_length and "
            f"sinks are 0 or more: got {found!r}"
        )
    return found
