"""The Llama architecture as a pure function of its weights.

Covers Llama 1/2/3, SmolLM and other checkpoints of the same shape: RMSNorm, rotary
positions, grouped-query attention without biases, SwiGLU, tied or untied head.

The weights are a plain pytree::

    embed       [V, M]
    layers      tuple of L dicts
      attn_norm [M]
      qkv       [M, K (G+2) D]   per KV head: its G query heads, its key, its value
      out       [K, G, D, M]
      mlp_norm  [M]
      gate_up   [M, 2 F]
      down      [F, M]
    final_norm  [M]
    head        [M, V]           absent when the head is tied to `embed`

Queries, keys and values come out of one matmul, gate and up out of another: a wider
matmul reads the weights faster at small batches. They are stored as matrices: with
short axes in between, TPU copies them into another layout at every use.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax import nn
from kvjax.types import LayerOps, ModelSpec, PyTree

Attend = Callable[..., tuple[Array, PyTree]]


def forward(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: PyTree,
    attend: Attend,
) -> tuple[Float[Array, "B T M"], PyTree]:
    """Runs the decoder over T new tokens of every row.

    The model knows nothing of how keys and values are kept. For every layer it calls
    `attend(layer, q, k, v, ops, cache) -> (out, cache)` with `layer` a Python int, `q`
    [B, K, G, T, D], `k` and `v` [B, K, T, D], `out` [B, K, G, T, D] in the dtype of
    `q`, and `ops` a `LayerOps`. Queries and keys are handed over before their rotary
    positions are applied: where a key stands is for the cache to say.

    Args:
      params: weights as in the module's docstring.
      spec: the model's shape (static).
      tokens: ids below V.
      positions: each token's position in its own row.
      cache: handed from layer to layer, never looked at.
      attend: the injected attention.

    Returns:
      The final normalised hidden states, and the cache after the last layer.
    """
    x = params["embed"][tokens]
    rotate = rotation(spec, positions)
    for index, weights in enumerate(params["layers"]):
        x, cache = layer(weights, spec, index, x, rotate, cache, attend)
    return nn.rms_norm(x, params["final_norm"], spec.norm_eps), cache


def layer(
    weights: PyTree,
    spec: ModelSpec,
    index: int,
    x: Float[Array, "B T M"],
    rotate: Callable[..., Array],
    cache: PyTree,
    attend: Attend,
) -> tuple[Float[Array, "B T M"], PyTree]:
    """One layer of `forward`: attention and MLP, each added to the residual stream."""
    h = nn.rms_norm(x, weights["attn_norm"], spec.norm_eps)
    q, k, v = _project(h, weights["qkv"], spec)
    ops = LayerOps(rotate, functools.partial(_contributions, weights["out"]))
    mixed, cache = attend(index, q, k, v, ops, cache)
    x = x + _merge_heads(mixed, weights["out"])
    h = nn.rms_norm(x, weights["mlp_norm"], spec.norm_eps)
    return x + nn.swiglu(h, weights["gate_up"], weights["down"]), cache


def rotation(
    spec: ModelSpec, here: Int[Array, "B T"] | None = None
) -> Callable[..., Array]:
    """`LayerOps.rotate`; the tables of the tokens being read are made once."""

    def tables(positions):
        return nn.rope_tables(positions, spec.head_dim, spec.rope_theta)

    known = None if here is None else tables(here)

    def rotate(x, positions=None):
        return nn.rotate(x, *(known if positions is None else tables(positions)))

    return rotate


def logits(params: PyTree, hidden: Float[Array, "B M"]) -> Float[Array, "B V"]:
    """Next-token logits in float32; the tied head reads the embedding's rows."""
    if "head" in params:
        return jnp.matmul(hidden, params["head"], preferred_element_type=jnp.float32)
    return jax.lax.platform_dependent(
        hidden, params["embed"], cpu=_tied_head_rows_first, default=_tied_head
    )


def _tied_head(hidden, embed):
    return jnp.einsum("bm,vm->bv", hidden, embed, preferred_element_type=jnp.float32)


def _tied_head_rows_first(hidden, embed):
    """The same product; XLA's CPU backend wants the larger operand first, fenced."""
    product = jnp.einsum("vm,bm->vb", embed, hidden, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product).T


def param_shapes(spec: ModelSpec, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """The weights' shapes without the weights: a pytree of `jax.ShapeDtypeStruct`."""
    m, f, v = spec.model_dim, spec.ff_dim, spec.vocab_size
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = {
        "attn_norm": array(m),
        "qkv": array(m, k * (g + 2) * d),
        "out": array(k, g, d, m),
        "mlp_norm": array(m),
        "gate_up": array(m, 2 * f),
        "down": array(f, m),
    }
    params = {
        "embed": array(v, m),
        "layers": tuple(dict(layer) for _ in range(spec.num_layers)),
        "final_norm": array(m),
    }
    if not spec.tied_head:
        params["head"] = array(m, v)
    return params


def random_params(
    spec: ModelSpec, key: Array, dtype: jnp.dtype = jnp.float32
) -> PyTree:
    """Weights drawn at random, for tests and for throughput at shapes without files."""
    leaves, tree = jax.tree.flatten(param_shapes(spec, dtype))
    keys = jax.random.split(key, len(leaves))

    def draw(leaf, key):
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, dtype)
        fan_in = spec.model_dim if leaf.shape[0] != spec.ff_dim else spec.ff_dim
        return jax.random.normal(key, leaf.shape, dtype) * fan_in**-0.5

    return jax.tree.unflatten(tree, list(map(draw, leaves, keys)))


def _project(
    h: Float[Array, "B T M"], qkv: Float[Array, "M H"], spec: ModelSpec
) -> tuple[Array, Array, Array]:
    """One matmul for q [B, K, G, T, D], k and v [B, K, T, D]."""
    heads = {"k": spec.num_kv_heads, "p": spec.group + 2}
    flat = jax.lax.optimization_barrier(h @ qkv)  # else TPU transposes the weights
    split = rearrange(flat, "b t (k p d) -> b k p t d", **heads)
    return split[:, :, :-2], split[:, :, -2], split[:, :, -1]


def _contributions(
    out: Float[Array, "K G D M"], values: Float[Array, "B K T D"]
) -> Float[Array, "B K G T M"]:
    """`LayerOps.project`: every query head's part of the output projection."""
    return jnp.einsum("bktd,kgdm->bkgtm", values, out)


def _merge_heads(
    mixed: Float[Array, "B K G T D"], out: Float[Array, "K G D M"]
) -> Float[Array, "B T M"]:
    flat = rearrange(mixed, "b k g t d -> b t (k g d)")
    return flat @ rearrange(out, "k g d m -> (k g d) m")
