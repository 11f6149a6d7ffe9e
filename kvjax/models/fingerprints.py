"""Fingerprints that distinguish a model's weights from others of the same shape."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.parallel import axes
from kvjax.types import Model, ModelSpec


def fingerprint(model: Model, rounded_to: jnp.dtype | None = None) -> str:
    """Returns 16 hexadecimal digits that identify a model's weights.

    They hash the embedding's first row and the first columns of the first and the last
    layer's `qkv`, as bfloat16, so that weights loaded as float32 and as bfloat16 have
    the same fingerprint.

    Args:
      model: from `kvjax.load`.
      rounded_to: the dtype that the weights are rounded to first. Weights loaded as
        float16 are rounded twice, and so have a fingerprint of their own.
    """
    layers, digest = model.params["layers"], hashlib.sha256()
    ends = _ends(model.params["embed"], layers[0]["qkv"], layers[-1]["qkv"])
    for some in axes.to_host(ends):
        some = some.astype(rounded_to or some.dtype)
        digest.update(some.astype(jnp.bfloat16).tobytes())
    return digest.hexdigest()[:16]


@jax.jit
def _ends(embed: Array, first: Array, last: Array) -> tuple[Array, ...]:
    """Returns the hashed row and columns.

    One program slices all three: compiling takes longer than anything else here.
    """
    return embed[0], first[:, 0], last[:, 0]


def marked(model: Model) -> ModelSpec:
    """Returns the model's spec with the fingerprint of its current weights."""
    return dataclasses.replace(model.spec, fingerprint=fingerprint(model))
