"""Codecs of keys and values, by name: `make("int4")`, or one of your own.

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
    tensor_bytes,
)
from kvjax.cache.codecs.channels import kivi
from kvjax.cache.codecs.float8 import fp8
from kvjax.cache.codecs.outliers import int4_outliers
from kvjax.cache.codecs.pairs import after_prompt, by_layer, k8v4, pair
from kvjax.cache.codecs.registry import make, names, register
from kvjax.cache.codecs.rotation import int2_rotated, int4_rotated, rotated
from kvjax.cache.codecs.uniform import int2, int4, int8

register("identity", lambda: identity)
for _factory in (
    *(fp8, int2, int2_rotated, int4, int4_outliers, int4_rotated, int8, kivi),
    *(after_prompt, by_layer, k8v4, pair, rotated),
):
    register(_factory.__name__, _factory)


__all__ = [
    "Codec",
    "TensorCodec",
    "after_prompt",
    "by_layer",
    "check",
    "fp8",
    "identity",
    "int2",
    "int2_rotated",
    "int4",
    "int4_outliers",
    "int4_rotated",
    "int8",
    "k8v4",
    "kivi",
    "make",
    "names",
    "pair",
    "pair_bytes",
    "plain",
    "register",
    "rotated",
    "tensor_bytes",
]
