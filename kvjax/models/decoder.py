"""A decoder-only transformer as a pure function of its weights, for all families.

A family's differences are fields of its `ModelSpec`. The weights are a plain pytree::

    embed       [V, E]
    positions   [N, M]             learned positions only
    embed_in    [M, E]             and
    embed_out   [E, M]             embeddings of another width only
    layers      tuple of L dicts
      attn_norm   Norm
      mlp_norm    Norm             absent where one norm serves both
      attn_after, mlp_after  Norm  `sandwich` only
      qkv         [K (G+2) D, M]   per KV head: its G query heads, its key, its value
      q_norm, k_norm  [D]          `qk_norm` only
      out         [M, K G D]
      up          [F, M]           gated: `gate_up` [2 F, M] instead, see `ff_groups`
      down        [M, F]
      experts: `router` [X, M], `gate_up` [X, M, 2 F], `down` [X, F, M]
      NAME_bias   of qkv, out, up or gate_up, down
    final_norm  Norm
    head        [V, E]             absent when the head is tied to `embed`

A Norm is [M], or a dict of `weight` and `bias`. Matrices are [outputs, inputs], see
`layers.product`; those of experts are laid out for `lax.ragged_dot`. One matmul
computes queries, keys and values, another gate and up: a wider matmul reads the weights
faster at small batches. Weights are stored as matrices: with short axes in between, a
TPU copies them into another layout at every use.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax.models import layers
from kvjax.parallel import axes, host
from kvjax.types import LayerOps, ModelSpec, PyTree, RopeScaling

Attend = Callable[..., tuple[Array, PyTree]]
Measure = Callable[..., PyTree]


def forward(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: PyTree,
    attend: Attend,
    measure: Measure | None = None,
) -> tuple[Float[Array, "B T M"], PyTree]:
    """Runs the decoder over T new tokens of every row.

    The model does not know how keys and values are stored. For every layer it calls
    `attend(layer, q, k, v, ops, cache) -> (out, cache)` with `layer` a Python int, `q`
    [B, K, G, T, D], `k` and `v` [B, K, T, D], `out` [B, K, G, T, D] in the dtype of
    `q`, and `ops` a `LayerOps`. Queries and keys are passed before rotary positions are
    applied, because the cache decides the position of a key.

    Args:
      params: weights as in the module's docstring.
      spec: the model's shape (static).
      tokens: ids below V.
      positions: each token's position in its own row.
      cache: passed from layer to layer, opaque to the model.
      attend: computes attention and updates the cache.
      measure: `measure(layer, before, after, cache) -> cache`, called with the residual
        stream [B, T, M] before and after every layer's attention; None to skip.

    Returns:
      The final normalised hidden states, and the cache after the last layer.
    """
    x = embedded(params, spec, tokens, positions)
    rotates = rotations(spec, positions)
    for index, weights in enumerate(params["layers"]):
        x, cache = layer(
            weights,
            spec,
            index,
            x,
            rotate=rotates[index],
            cache=cache,
            attend=attend,
            measure=measure,
        )
    return ended(params, spec, x), cache


def embedded(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T M"]:
    """Returns the input of the first layer: the embedded tokens."""
    x = host.rows(params["embed"], tokens)
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if "embed_in" in params:
        x = layers.product(x, params["embed_in"])
    if spec.positions == "learned":
        x = x + params["positions"][positions]
    return axes.constrain(x, "batch")


def ended(
    params: PyTree, spec: ModelSpec, x: Float[Array, "B *T M"]
) -> Float[Array, "B *T M"]:
    """Returns the input of the head: the last layer's output, normalised."""
    return _norm(x, params["final_norm"], spec) if spec.final_norm else x


def layer(
    weights: PyTree,
    spec: ModelSpec,
    index: int,
    x: Float[Array, "B T M"],
    rotate: Callable[..., Array],
    cache: PyTree,
    attend: Attend,
    measure: Measure | None = None,
) -> tuple[Float[Array, "B T M"], PyTree]:
    """Runs one layer of `forward`, and returns the residual stream and the cache."""
    x = axes.constrain(x, "batch")
    norm = lambda x, name: _norm(x, weights[name], spec)
    normed = x if spec.norm_placement == "post" else norm(x, "attn_norm")
    mixed, cache = _attention(
        weights, spec, index, normed, rotate=rotate, cache=cache, attend=attend
    )
    added = norm(mixed, "attn_after") if spec.norm_placement == "sandwich" else mixed
    if measure is not None:
        cache = measure(index, x, x + added, cache)
    if spec.norm_placement == "post":
        x = norm(x + added, "attn_norm")
        return norm(x + _mlp(weights, spec, x), "mlp_norm"), cache
    if spec.norm_placement.startswith("parallel"):
        both = spec.norm_placement == "parallel_two"
        h = norm(x, "mlp_norm") if both else normed
        return x + added + _mlp(weights, spec, h), cache
    x = x + added
    out = _mlp(weights, spec, norm(x, "mlp_norm"))
    if spec.norm_placement == "sandwich":
        out = norm(out, "mlp_after")
    return x + out, cache


def rotations(
    spec: ModelSpec, here: Int[Array, "B T"] | None = None
) -> tuple[Callable[..., Array], ...]:
    """Returns `LayerOps.apply_rope` of every layer.

    Layers with the same frequencies share one function.

    Args:
      spec: the model's shape.
      here: positions of the new tokens, whose tables are then computed once; None if
        positions are passed at every call.
    """
    plain = _rotation(spec, spec.rope_theta, spec.rope, here)
    if spec.local_rope_theta is None:
        return (plain,) * spec.num_layers
    local = _rotation(spec, spec.local_rope_theta, RopeScaling(), here)
    return tuple(
        local if spec.sliding_window(i) else plain for i in range(spec.num_layers)
    )


def _rotation(spec, theta, scaling, here) -> Callable[..., Array]:
    """Returns a function that rotates heads; it has the tables of positions `here`."""
    if spec.positions == "learned":
        return _still
    frequencies = layers.rope_frequencies(
        spec.rotary_dim or spec.head_dim, theta, scaling
    )
    tables = functools.partial(
        layers.rope_tables, frequencies=frequencies, scale=scaling.scale
    )
    # Without the barrier, XLA's CPU backend computes the tables again for every head.
    known = None if here is None else jax.lax.optimization_barrier(tables(here))

    def rotate(known, x, positions=None):
        return layers.rotate(x, *(known if positions is None else tables(positions)))

    return jax.tree_util.Partial(rotate, known)


@jax.tree_util.Partial
def _still(x, positions=None):
    return x


def logits(
    params: PyTree, hidden: Float[Array, "B M"], spec: ModelSpec
) -> Float[Array, "B V"]:
    """Returns next-token logits in float32; a tied head multiplies by the embedding."""
    if "embed_out" in params:
        hidden = layers.product(hidden, params["embed_out"])
    found = layers.wide_product(hidden, params.get("head", params["embed"]))
    return layers.softcap(found, spec.logit_softcap) if spec.logit_softcap else found


def param_shapes(spec: ModelSpec, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """Returns the shapes of the weights, a pytree of `jax.ShapeDtypeStruct`."""
    return _mapped(
        lambda weight: jax.ShapeDtypeStruct(tuple(dim.size for dim in weight), dtype),
        spec,
    )


def param_partitions(spec: ModelSpec, mesh: jax.sharding.Mesh) -> PyTree:
    """Returns how weights are split over a mesh, a pytree of `NamedSharding`.

    See `kvjax.parallel.axes.RULES`. An axis that does not divide evenly is replicated.
    """

    def split(weight):
        units = [dim.units or dim.size for dim in weight]
        names = [dim.name for dim in weight]
        return jax.NamedSharding(mesh, axes.partition(mesh, units, names))

    return _mapped(split, spec)


class _Dim(NamedTuple):
    """An axis of a weight.

    Attributes:
      size: its length.
      name: its logical axis; None if it is never split.
      units: number of indivisible units on it, such as heads; None for its size.
    """

    size: int
    name: str | None = None
    units: int | None = None


def _mapped(make: Callable, spec: ModelSpec) -> PyTree:
    """Returns the pytree of `make(dims)` for every weight."""
    is_weight = lambda node: type(node) is tuple and isinstance(node[0], _Dim)
    return jax.tree.map(make, _param_dims(spec), is_leaf=is_weight)


def _param_dims(spec: ModelSpec) -> PyTree:
    m, v = _Dim(spec.model_dim), _Dim(spec.vocab_size, "vocab")
    norm = (m,)
    if spec.norm == "layer":
        norm = {"weight": norm, "bias": norm}
    width = _Dim(spec.embed_dim or spec.model_dim)
    params = {
        "embed": (v, width),
        "layers": tuple(_layer_dims(spec, norm) for _ in range(spec.num_layers)),
    }
    if spec.final_norm:
        params["final_norm"] = norm
    if spec.positions == "learned":
        params["positions"] = (_Dim(spec.context_length), m)
    if width != m:
        params |= {"embed_in": (m, width), "embed_out": (width, m)}
    if not spec.tie_embeddings:
        params["head"] = (v, width)
    return params


def _layer_dims(spec: ModelSpec, norm: PyTree) -> dict:
    m, f = _Dim(spec.model_dim), _Dim(spec.ff_dim, "ff")
    k, d = spec.num_kv_heads, spec.head_dim
    heads = _Dim(k * (spec.queries_per_kv_head + 2) * d, "heads", k)
    mixed = _Dim(spec.num_heads * d, "heads", k)
    inner = _Dim(2 * spec.ff_dim, "ff", spec.ff_dim) if spec.gated else f
    first = "gate_up" if spec.gated else "up"
    layer = {"attn_norm": norm, "qkv": (heads, m), "out": (m, mixed)}
    if spec.norm_placement != "parallel":
        layer["mlp_norm"] = norm
    if spec.norm_placement == "sandwich":
        layer |= {"attn_after": norm, "mlp_after": norm}
    if spec.qk_norm:
        layer |= dict.fromkeys(("q_norm", "k_norm"), (_Dim(d),))
    if spec.experts:
        x = _Dim(spec.experts, "experts")
        layer |= {"router": (x, m), first: (x, m, inner), "down": (x, f, m)}
    else:
        layer |= {first: (inner, m), "down": (m, f)}
    if "qkv" in spec.biases:
        layer["qkv_bias"] = (heads,)
    if "out" in spec.biases:
        layer["out_bias"] = (m,)
    if "mlp" in spec.biases:
        layer |= {first + "_bias": (inner,), "down_bias": (m,)}
    return layer


def random_params(
    spec: ModelSpec, key: Array, dtype: jnp.dtype = jnp.float32
) -> PyTree:
    """Returns random weights, for tests and for benchmarks without a checkpoint.

    Outside `jit`, each array is drawn by its own program: one program for all of them
    may need several times their memory.
    """
    leaves, tree = jax.tree.flatten(param_shapes(spec, dtype))
    keys = jax.random.split(key, len(leaves))

    def draw(leaf, key):
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, dtype)
        fan_in = spec.model_dim if leaf.shape[-1] != spec.ff_dim else spec.ff_dim
        return _normal(key, leaf.shape, dtype, fan_in**-0.5)

    return jax.tree.unflatten(tree, list(map(draw, leaves, keys)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape, dtype, scale):
    return jax.random.normal(key, shape, dtype) * scale


def _norm(x, weight, spec: ModelSpec):
    if spec.norm == "layer":
        return layers.layer_norm(x, weight["weight"], weight["bias"], spec.norm_eps)
    norm = layers.offset_rms_norm if spec.norm == "rms_offset" else layers.rms_norm
    return norm(x, weight, spec.norm_eps)


def _attention(weights, spec, index, h, *, rotate, cache, attend):
    """Returns attention's addition to the residual stream, and the cache."""
    q, k, v = _project(h, weights, spec)
    ops = layer_ops(weights["out"], spec, index, rotate, h)
    mixed, cache = attend(index, q, k, v, ops, cache)
    out = _merge_heads(mixed, weights["out"])
    return _plus(out, weights, "out_bias"), cache


def layer_ops(
    out: Float[Array, "M KGD"],
    spec: ModelSpec,
    index: int,
    rotate: Callable[..., Array],
    hidden: Float[Array, "B T M"],
) -> LayerOps:
    """Returns the layer's `LayerOps`.

    The reshaped `out` is dead code, which XLA drops, unless a policy uses it.
    """
    heads = {"k": spec.num_kv_heads, "g": spec.queries_per_kv_head}
    by_head = rearrange(out, "m (k g d) -> k g d m", **heads)
    contributions = jax.tree_util.Partial(_contributions, by_head)
    return LayerOps(rotate, contributions, spec.scoring(index), hidden)


def _project(
    h: Float[Array, "B T M"], weights: PyTree, spec: ModelSpec
) -> tuple[Array, Array, Array]:
    """Returns q [B, K, G, T, D], k and v [B, K, T, D] from one matmul.

    `ModelSpec.query_scale` is applied to the queries here, so that attention always
    scales by D ** -0.5.
    """
    heads = {"k": spec.num_kv_heads, "p": spec.queries_per_kv_head + 2}
    flat = _plus(layers.product(h, weights["qkv"]), weights, "qkv_bias")
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
    """Returns `LayerOps.value_contribution` of the values for every query head."""
    return jnp.einsum("bktd,kgdm->bkgtm", values, out)


def _merge_heads(
    mixed: Float[Array, "B K G T D"], out: Float[Array, "M KGD"]
) -> Float[Array, "B T M"]:
    flat = rearrange(mixed, "b k g t d -> b t (k g d)")
    return layers.product(flat, out)


def _mlp(weights: PyTree, spec: ModelSpec, h: Float[Array, "B T M"]) -> Array:
    if spec.experts:
        names = ("router", "gate_up", "down")
        out = layers.mixture(
            h.reshape(-1, h.shape[-1]),
            *(weights[name] for name in names),
            spec.experts_per_token,
            spec.activation,
            spec.ff_groups,
        )
        return out.reshape(h.shape)
    act = functools.partial(layers.activated, name=spec.activation)
    if spec.gated:
        both = _plus(layers.product(h, weights["gate_up"]), weights, "gate_up_bias")
        gate, up = layers.gate_and_up(both, spec.ff_groups)
        hidden = act(gate) * up
    else:
        hidden = act(_plus(layers.product(h, weights["up"]), weights, "up_bias"))
    return _plus(layers.product(hidden, weights["down"]), weights, "down_bias")


def _plus(x, weights, bias: str):
    if bias not in weights:
        return x
    return x + jnp.broadcast_to(weights[bias], x.shape)
