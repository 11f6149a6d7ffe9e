"""A decoder-only transformer as a pure function of its weights, for all families.

What a family does differently is in its `ModelSpec`. The weights are a plain pytree::

    embed       [V, E]
    positions   [N, M]             learned positions only
    embed_in    [E, M]             and
    embed_out   [M, E]             embeddings of another width only
    layers      tuple of L dicts
      attn_norm   Norm
      mlp_norm    Norm             absent where one norm serves both
      attn_after, mlp_after  Norm  `sandwich` only
      qkv         [M, K (G+2) D]   per KV head: its G query heads, its key, its value
      q_norm, k_norm  [D]          `qk_norm` only
      out         [K, G, D, M]
      up          [M, F]           gated: `gate_up` [M, 2 F] instead
      down        [F, M]
      experts: `router` [M, X], `gate_up` [X, M, 2 F], `down` [X, F, M]
      NAME_bias   of qkv, out, up or gate_up, down
    final_norm  Norm
    head        [M, V]             absent when the head is tied to `embed`

A Norm is [M], or a dict of `weight` and `bias`. Queries, keys and values come out of
one matmul, gate and up out of another: a wider matmul reads the weights faster at small
batches. They are stored as matrices: with short axes in between, TPU copies them into
another layout at every use.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax import nn
from kvjax.types import LayerOps, ModelSpec, PyTree, RopeScaling, Scoring

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
    x = embedded(params, spec, tokens, positions)
    rotates = rotations(spec, positions)
    for index, weights in enumerate(params["layers"]):
        x, cache = layer(weights, spec, index, x, rotates[index], cache, attend)
    return ended(params, spec, x), cache


def embedded(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T M"]:
    """What the first layer reads."""
    x = params["embed"][tokens]
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if "embed_in" in params:
        x = x @ params["embed_in"]
    if spec.positions == "learned":
        x = x + params["positions"][positions]
    return x


def ended(
    params: PyTree, spec: ModelSpec, x: Float[Array, "B T M"]
) -> Float[Array, "B T M"]:
    """What the head reads of the last layer's output."""
    return _norm(x, params["final_norm"], spec) if spec.final_norm else x


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
    norm = lambda x, name: _norm(x, weights[name], spec)
    attention = functools.partial(
        _attention, weights, spec, index, rotate=rotate, cache=cache, attend=attend
    )
    if spec.blocks == "post":
        mixed, cache = attention(x)
        x = norm(x + mixed, "attn_norm")
        return norm(x + _mlp(weights, spec, x), "mlp_norm"), cache
    h = norm(x, "attn_norm")
    mixed, cache = attention(h)
    if spec.blocks.startswith("parallel"):
        if spec.blocks == "parallel_two":
            h = norm(x, "mlp_norm")
        return x + mixed + _mlp(weights, spec, h), cache
    if spec.blocks == "sandwich":
        x = x + norm(mixed, "attn_after")
        out = _mlp(weights, spec, norm(x, "mlp_norm"))
        return x + norm(out, "mlp_after"), cache
    x = x + mixed
    return x + _mlp(weights, spec, norm(x, "mlp_norm")), cache


def rotations(
    spec: ModelSpec, here: Int[Array, "B T"] | None = None
) -> tuple[Callable[..., Array], ...]:
    """`LayerOps.rotate` of every layer; layers that rotate alike share theirs."""
    plain = _rotation(spec, spec.rope_theta, spec.rope, here)
    if spec.window_theta is None:
        return (plain,) * spec.num_layers
    local = _rotation(spec, spec.window_theta, RopeScaling(), here)
    return tuple(local if spec.window(i) else plain for i in range(spec.num_layers))


def _rotation(spec, theta, scaling, here) -> Callable[..., Array]:
    """The tables of the tokens being read are made once."""
    if spec.positions == "learned":
        return lambda x, positions=None: x
    frequencies = nn.rope_frequencies(spec.rotary_dim or spec.head_dim, theta, scaling)
    tables = functools.partial(
        nn.rope_tables, frequencies=frequencies, scale=scaling.scale
    )
    known = None if here is None else tables(here)

    def rotate(x, positions=None):
        return nn.rotate(x, *(known if positions is None else tables(positions)))

    return rotate


def logits(
    params: PyTree, hidden: Float[Array, "B M"], spec: ModelSpec
) -> Float[Array, "B V"]:
    """Next-token logits in float32; the tied head reads the embedding's rows."""
    if "embed_out" in params:
        hidden = hidden @ params["embed_out"]
    if "head" in params:
        found = jnp.matmul(hidden, params["head"], preferred_element_type=jnp.float32)
    else:
        found = jax.lax.platform_dependent(
            hidden, params["embed"], cpu=_tied_head_rows_first, default=_tied_head
        )
    return nn.softcap(found, spec.logit_softcap) if spec.logit_softcap else found


def _tied_head(hidden, embed):
    return jnp.einsum("bm,vm->bv", hidden, embed, preferred_element_type=jnp.float32)


def _tied_head_rows_first(hidden, embed):
    """The same product; XLA's CPU backend wants the larger operand first, fenced."""
    product = jnp.einsum("vm,bm->vb", embed, hidden, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product).T


def param_shapes(spec: ModelSpec, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """The weights' shapes without the weights: a pytree of `jax.ShapeDtypeStruct`."""
    m, v = spec.model_dim, spec.vocab_size
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    norm = array(m)
    if spec.norm == "layer":
        norm = {"weight": norm, "bias": norm}
    width = spec.embed_dim or m
    params = {
        "embed": array(v, width),
        "layers": tuple(
            _layer_shapes(spec, array, norm) for _ in range(spec.num_layers)
        ),
    }
    if spec.final_norm:
        params["final_norm"] = norm
    if spec.positions == "learned":
        params["positions"] = array(spec.context_length, m)
    if width != m:
        params |= {"embed_in": array(width, m), "embed_out": array(m, width)}
    if not spec.tied_head:
        params["head"] = array(m, v)
    return params


def _layer_shapes(spec: ModelSpec, array, norm) -> dict:
    m, f, x = spec.model_dim, spec.ff_dim, spec.experts
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim
    heads, inner = k * (g + 2) * d, 2 * f if spec.gated else f
    first = "gate_up" if spec.gated else "up"
    layer = {"attn_norm": norm, "qkv": array(m, heads), "out": array(k, g, d, m)}
    if spec.blocks != "parallel":
        layer["mlp_norm"] = norm
    if spec.blocks == "sandwich":
        layer |= {"attn_after": norm, "mlp_after": norm}
    if spec.qk_norm:
        layer |= {"q_norm": array(d), "k_norm": array(d)}
    stack = (x,) if x else ()
    layer |= {first: array(*stack, m, inner), "down": array(*stack, f, m)}
    if x:
        layer["router"] = array(m, x)
    if "qkv" in spec.biases:
        layer["qkv_bias"] = array(heads)
    if "out" in spec.biases:
        layer["out_bias"] = array(m)
    if "mlp" in spec.biases:
        layer |= {first + "_bias": array(inner), "down_bias": array(m)}
    return layer


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


def _norm(x, weight, spec: ModelSpec):
    if spec.norm == "layer":
        return nn.layer_norm(x, weight["weight"], weight["bias"], spec.norm_eps)
    norm = nn.offset_rms_norm if spec.norm == "rms_offset" else nn.rms_norm
    return norm(x, weight, spec.norm_eps)


def _attention(weights, spec, index, h, *, rotate, cache, attend):
    """Mixes the tokens; returns the addition to the residual stream, and the cache."""
    q, k, v = _project(h, weights, spec)
    ops = LayerOps(
        rotate,
        functools.partial(_contributions, weights["out"]),
        Scoring(spec.attention_softcap, spec.window(index)),
    )
    mixed, cache = attend(index, q, k, v, ops, cache)
    out = _merge_heads(mixed, weights["out"])
    return _plus(out, weights, "out_bias"), cache


def _project(
    h: Float[Array, "B T M"], weights: PyTree, spec: ModelSpec
) -> tuple[Array, Array, Array]:
    """One matmul for q [B, K, G, T, D], k and v [B, K, T, D].

    A scale of its own goes into the queries, so that whoever multiplies them with keys
    scales by D ** -0.5.
    """
    heads = {"k": spec.num_kv_heads, "p": spec.group + 2}
    flat = _plus(h @ weights["qkv"], weights, "qkv_bias")
    flat = jax.lax.optimization_barrier(flat)  # else TPU transposes the weights
    split = rearrange(flat, "b t (k p d) -> b k p t d", **heads)
    q, k, v = split[:, :, :-2], split[:, :, -2], split[:, :, -1]
    if spec.qk_norm:
        q, k = _norm(q, weights["q_norm"], spec), _norm(k, weights["k_norm"], spec)
    if spec.query_scale is not None:
        q = q * jnp.asarray(spec.query_scale * spec.head_dim**0.5, q.dtype)
    return q, k, v


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


def _mlp(weights: PyTree, spec: ModelSpec, h: Float[Array, "B T M"]) -> Array:
    if spec.experts:
        names = ("router", "gate_up", "down")
        out = nn.mixture(
            h.reshape(-1, h.shape[-1]),
            *(weights[name] for name in names),
            spec.experts_used,
            spec.activation,
        )
        return out.reshape(h.shape)
    act = nn.ACTIVATIONS[spec.activation]
    if spec.gated:
        both = _plus(h @ weights["gate_up"], weights, "gate_up_bias")
        gate, up = jnp.split(both, 2, axis=-1)
        hidden = act(gate) * up
    else:
        hidden = act(_plus(h @ weights["up"], weights, "up_bias"))
    return _plus(hidden @ weights["down"], weights, "down_bias")


def _plus(x, weights, bias: str):
    if bias not in weights:
        return x
    return x + jnp.broadcast_to(weights[bias], x.shape)
