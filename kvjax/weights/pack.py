"""Checkpoint tensors into the params of `kvjax.models.decoder`.

Readers speak Hugging Face's tensor names and its `[out, in]` orientation, with the rows
of query and key heads in half-rotated order; what is peculiar to a file format stays in
its reader, where a family keeps its tensors in its `Names`.
"""

from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import decoder
from kvjax.models.names import Names
from kvjax.types import ModelSpec, PyTree, UserError

Read = Callable[[str], np.ndarray]


def tensor_shapes(spec: ModelSpec, names: Names) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of this shape, by Hugging Face name."""
    shapes = dict(_end_shapes(spec, names))
    for index in range(spec.num_layers):
        for part, template in names.layer.items():
            experts = range(spec.experts) if "{e}" in template else (0,)
            for expert in experts:
                name = template.format(i=index, e=expert)
                for kind, shape in _part_shapes(spec, part).items():
                    shapes[f"{name}.{kind}"] = shape
    return shapes


def _end_shapes(spec: ModelSpec, names: Names) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that belong to no layer."""
    m, v, e = spec.model_dim, spec.vocab_size, spec.embed_dim or spec.model_dim
    ends = {"embed": (v, e)}
    if spec.positions == "learned":
        ends["positions"] = (spec.context_length + names.skipped_positions, m)
    if e != m:
        ends |= {"embed_in": (m, e), "embed_out": (e, m)}
    if not spec.tied_head:
        ends["head"] = (v, m)
    for part, shape in ends.items():
        yield f"{names.ends[part]}.weight", shape
    if spec.final_norm:
        for kind, shape in _norm_shapes(spec).items():
            yield f"{names.ends['final_norm']}.{kind}", shape


def _norm_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return dict.fromkeys(kinds, (spec.model_dim,))


def _part_shapes(spec: ModelSpec, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a part's weight and, where it has one, its bias."""
    m, f, d = spec.model_dim, spec.ff_dim, spec.head_dim
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    if part in ("attn_norm", "mlp_norm", "attn_after", "mlp_after"):
        return _norm_shapes(spec)
    if part in ("q_norm", "k_norm"):
        return {"weight": (d,)}
    rows, columns, biased = {
        "q": (q, m, "qkv"),
        "k": (kv, m, "qkv"),
        "v": (kv, m, "qkv"),
        "qkv": (q + 2 * kv, m, "qkv"),
        "out": (m, q, "out"),
        "gate": (f, m, "mlp"),
        "up": (f, m, "mlp"),
        "gate_up": (2 * f, m, "mlp"),
        "down": (m, f, "mlp"),
        "router": (spec.experts, m, ""),
    }[part]
    found = {"weight": (rows, columns)}
    return found | ({"bias": (rows,)} if biased in spec.biases else {})


def check_heads(spec: ModelSpec, source) -> None:
    """Raises UserError for heads that rotary positions or grouping cannot use."""
    if spec.head_dim < 2 or spec.head_dim % 2:
        raise UserError(
            f"{source} has head_dim {spec.head_dim}: rotary positions need an even "
            "one, use another checkpoint"
        )
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"{source} has {spec.num_kv_heads} KV heads for {spec.num_heads} query "
            "heads: the second must be a multiple of the first, use another checkpoint"
        )


def check(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    source,
) -> None:
    """Compares a checkpoint's tensors (name to shape) with the expected ones.

    Raises:
      UserError: naming the first tensor that is missing, unknown or of another shape.
    """
    if missing := [name for name in expected if name not in found]:
        raise UserError(
            f"{source} lacks {len(missing)} tensors, {missing[0]} first: fetch the "
            "checkpoint again, all of its files"
        )
    if extra := [name for name in found if name not in expected]:
        raise UserError(
            f"{source} has {len(extra)} tensors that its architecture does not "
            f"use, {extra[0]} first: take a checkpoint of the plain model"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{name} in {source} has shape {tuple(found[name])}, its configuration "
                f"asks for {tuple(shape)}: the two are not of the same model"
            )


def pack(spec: ModelSpec, names: Names, read: Read, dtype: jnp.dtype) -> PyTree:
    """Reads every tensor once and packs it; layouts as in `kvjax.models.decoder`.

    Args:
      spec: the model's shape.
      names: where the checkpoint keeps what.
      read: tensor by Hugging Face name, `[out, in]`, any float dtype.
      dtype: of the params.
    """

    def tensor(name):
        return np.asarray(read(name)).astype(dtype, copy=False)

    end = lambda part: tensor(names.ends[part] + ".weight")
    params = {
        "embed": jnp.array(end("embed")),
        "layers": tuple(
            _layer(spec, names, index, tensor) for index in range(spec.num_layers)
        ),
    }
    if spec.final_norm:
        params["final_norm"] = _norm(spec, names.ends["final_norm"], tensor)
    if spec.positions == "learned":
        params["positions"] = jnp.array(end("positions")[names.skipped_positions :])
    if spec.embed_dim not in (None, spec.model_dim):
        params |= {part: jnp.array(end(part).T) for part in ("embed_in", "embed_out")}
    if not spec.tied_head:
        params["head"] = jnp.array(end("head").T)
    wanted = jax.tree.map(lambda leaf: leaf.shape, decoder.param_shapes(spec))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == wanted
    return params


def _layer(spec: ModelSpec, names: Names, index: int, tensor: Read) -> PyTree:
    """One layer's params."""

    def part(name, kind="weight"):
        """A tensor; experts are stacked on a leading axis."""
        template = f"{names.layer[name]}.{kind}"
        if "{e}" not in template:
            return tensor(template.format(i=index))
        each = [tensor(template.format(i=index, e=e)) for e in range(spec.experts)]
        return np.stack(each)

    layer = {
        "qkv": jnp.array(_heads(spec, names, part, "weight").T),
        "out": jnp.array(_out(spec, part("out"))),
        "down": _turned(part("down")),
    }
    if "gate" in names.layer:
        both = [part("gate"), part("up")]
        layer["gate_up"] = _turned(np.concatenate(both, axis=-2))
    else:
        name = "gate_up" if spec.gated else "up"
        layer[name] = _turned(part(name))
    if "router" in names.layer:
        layer["router"] = _turned(part("router"))
    for norm in ("attn_norm", "mlp_norm", "attn_after", "mlp_after"):
        if norm in names.layer:
            layer[norm] = _norm(spec, names.layer[norm].format(i=index), tensor)
    for norm in ("q_norm", "k_norm") if spec.qk_norm else ():
        layer[norm] = jnp.array(part(norm))
    if "qkv" in spec.biases:
        layer["qkv_bias"] = jnp.array(_heads(spec, names, part, "bias"))
    if "out" in spec.biases:
        layer["out_bias"] = jnp.array(part("out", "bias"))
    if "mlp" in spec.biases:
        first = "gate_up" if spec.gated else "up"
        parts = ("gate", "up") if "gate" in names.layer else (first,)
        each = [part(name, "bias") for name in parts]
        layer[first + "_bias"] = jnp.array(np.concatenate(each))
        layer["down_bias"] = jnp.array(part("down", "bias"))
    return layer


def _heads(spec: ModelSpec, names: Names, part, kind: str) -> np.ndarray:
    """Rows of queries, keys and values, KV head by KV head: [K (G+2) D, ...]."""
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim
    if "qkv" in names.layer:
        fused = part("qkv", kind)
        if names.grouped:
            return fused
        q, key, value = np.split(fused, [k * g * d, (k * g + k) * d])
    else:
        q, key, value = (part(name, kind) for name in "qkv")
    q, key, value = (x.reshape(k, -1, d, *x.shape[1:]) for x in (q, key, value))
    heads = np.concatenate([q, key, value], axis=1)
    return heads.reshape(-1, *heads.shape[3:])


def _out(spec: ModelSpec, weight: np.ndarray) -> np.ndarray:
    return weight.T.reshape(spec.num_kv_heads, spec.group, spec.head_dim, -1)


def _turned(weight: np.ndarray) -> jnp.ndarray:
    """[..., out, in] to [..., in, out]."""
    return jnp.array(np.swapaxes(weight, -1, -2))


def _norm(spec: ModelSpec, name: str, tensor: Read) -> PyTree:
    weight = jnp.array(tensor(name + ".weight"))
    if spec.norm != "layer":
        return weight
    return {"weight": weight, "bias": jnp.array(tensor(name + ".bias"))}
