"""Tells the weights of a model from others of the same shape."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.parallel import axes
from kvjax.types import Model, ModelSpec


def fingerprint(model: Model, rounded_to: jnp.dtype | None = None) -> str:
    """16 hexadecimal digits that tell a model's weights from another's.

    Of the embedding's first row, and of the first columns of the first and last layer's
    `qkv`, as bfloat16: weights loaded as float32 and as bfloat16 have the same.

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
    """One program for all three: compiling takes longer than anything else here."""
    return embed[0], first[:, 0], last[:, 0]


def marked(model: Model) -> ModelSpec:
    """The model's spec with the fingerprint of the weights that it has now."""
    return dataclasses.replace(model.spec, fingerprint=fingerprint(model))
