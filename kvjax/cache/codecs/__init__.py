"""How keys and values are stored, by name: `make("identity")`, or one of your own.

from kvjax.cache import codecs

codecs.register("half", lambda: codecs.Codec("half", halved, halved))
kvjax.generate(model, prompts, policy=policy, codec="half")
"""

from kvjax.cache.codecs.base import (
    Codec,
    TensorCodec,
    check,
    identity,
    pair_bytes,
    plain,
)
from kvjax.cache.codecs.registry import make, names, register

register("identity", lambda: identity)

__all__ = [
    "Codec",
    "TensorCodec",
    "check",
    "identity",
    "make",
    "names",
    "pair_bytes",
    "plain",
    "register",
]
