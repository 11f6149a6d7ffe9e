"""Checkpoint tensors into the params of `kvjax.models.llama`.

Both readers speak Hugging Face's tensor names and its `[out, in]` orientation, with the
rows of query and key heads in half-rotated order; what is peculiar to a file format
stays in its reader.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from kvjax.types import ModelSpec, PyTree, UserError

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of this shape, by Hugging Face name."""
    m, f, v = spec.model_dim, spec.ff_dim, spec.vocab_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = {
        "input_layernorm": (m,),
        "self_attn.q_proj": (q, m),
        "self_attn.k_proj": (kv, m),
        "self_attn.v_proj": (kv, m),
        "self_attn.o_proj": (m, q),
        "post_attention_layernorm": (m,),
        "mlp.gate_proj": (f, m),
        "mlp.up_proj": (f, m),
        "mlp.down_proj": (m, f),
    }
    shapes = {EMBED: (v, m), "model.norm.weight": (m,)}
    for index in range(spec.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    if not spec.tied_head:
        shapes[HEAD] = (v, m)
    return shapes


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
            f"{source} has {len(extra)} tensors that the llama architecture does not "
            f"use, {extra[0]} first: take a checkpoint of the plain model"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{name} in {source} has shape {tuple(found[name])}, its configuration "
                f"asks for {tuple(shape)}: the two are not of the same model"
            )


def pack(
    spec: ModelSpec, read: Callable[[str], np.ndarray], dtype: jnp.dtype
) -> PyTree:
    """Reads every tensor once and packs it; layouts as in `kvjax.models.llama`.

    Args:
      spec: the model's shape.
      read: tensor by Hugging Face name, `[out, in]`, any float dtype.
      dtype: of the params.
    """
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim

    def tensor(name):
        return np.asarray(read(name)).astype(dtype, copy=False)

    def layer(index):
        def part(name):
            return tensor(f"model.layers.{index}.{name}.weight")

        q = part("self_attn.q_proj").reshape(k, g, d, -1)
        key = part("self_attn.k_proj").reshape(k, 1, d, -1)
        value = part("self_attn.v_proj").reshape(k, 1, d, -1)
        qkv = np.concatenate([q, key, value], axis=1)  # [K, G + 2, D, M]
        qkv = qkv.reshape(-1, qkv.shape[-1])
        gate_up = np.concatenate([part("mlp.gate_proj"), part("mlp.up_proj")])
        return {
            "attn_norm": jnp.array(part("input_layernorm")),
            "qkv": jnp.array(qkv.T),
            "out": jnp.array(part("self_attn.o_proj").T.reshape(k, g, d, -1)),
            "mlp_norm": jnp.array(part("post_attention_layernorm")),
            "gate_up": jnp.array(gate_up.T),
            "down": jnp.array(part("mlp.down_proj").T),
        }

    params = {
        "embed": jnp.array(tensor(EMBED)),
        "layers": tuple(layer(index) for index in range(spec.num_layers)),
        "final_norm": jnp.array(tensor("model.norm.weight")),
    }
    if not spec.tied_head:
        params["head"] = jnp.array(tensor(HEAD).T)
    return params
