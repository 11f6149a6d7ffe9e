"""How keys and values are stored."""

from kvjax.cache.codecs.base import Codec, identity

__all__ = ["Codec", "identity"]
