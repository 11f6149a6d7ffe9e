"""Reads and dequantises llama.cpp's GGUF files of the llama architecture."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.models.families import llama
from kvjax.models.weights import pack
from kvjax.models.weights import tokenizer as tokenizers
from kvjax.types import Model, ModelSpec, UserError

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The `llama.` keys of shapes and of constants that kvjax computes with ...
_SHAPE_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
    }
)
# ... and those that are accepted only with a value that changes nothing.
_NEUTRAL_KEYS = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
}


def check_magic(path: pathlib.Path) -> None:
    """Raises UserError for a file that does not start as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(
                f"{path} is not a GGUF file: give a .gguf file, or the folder of a "
                "Hugging Face checkpoint"
            )


def load(
    path: pathlib.Path,
    dtype: jnp.dtype,
    name: str | None = None,
    placement: pack.Placement | None = None,
) -> Model:
    """Reads, dequantises and packs a GGUF file.

    Args:
      path: the file.
      dtype: dtype of the params.
      name: name of the spec; None for the file's name without its suffix.
      placement: destination of the params; None for the default device.

    Raises:
      UserError: a truncated file, another architecture, scaled rotary positions,
        tensors that are missing, unknown or of another shape, an unknown quantisation
        or tokenizer.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"cannot read {path}: truncated or damaged ({error}); fetch it again"
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = _spec(fields, tensors, path, name or path.stem)
    pack.check_room(spec, dtype, placement)
    names = _names(spec.num_layers)
    found = {
        names.get(tensor.name, tensor.name): tuple(map(int, reversed(tensor.shape)))
        for tensor in reader.tensors
    }
    theirs = llama.tensor_names(spec)
    pack.check(found, pack.tensor_shapes(spec, theirs), path)
    ours = {theirs: name for name, theirs in names.items()}

    def read(name):
        tensor = tensors[ours[name]]
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{tensor.name} in {path} is quantised as {tensor.tensor_type.name}, "
                "which the gguf package cannot read: use another file of the model"
            ) from error
        # A copy, because unquantised tensors are views of the memory-mapped file.
        array = array.astype(dtype)
        if name.endswith("q_proj.weight"):
            return _half_rotated(array, spec.num_heads)
        if name.endswith("k_proj.weight"):
            return _half_rotated(array, spec.num_kv_heads)
        return array

    tokenizer = tokenizers.from_gguf(fields, path, spec)
    params = pack.pack(spec, theirs, read, dtype, placement)
    return Model(spec, params, tokenizer, _end_tokens(fields))


def _spec(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], path: pathlib.Path, name: str
) -> ModelSpec:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(
            f"{path} has general.architecture {architecture!r}: only 'llama' is known"
        )
    if "rope_freqs.weight" in tensors:
        raise UserError(
            f"{path} has rope_freqs.weight: scaled rotary positions are not supported, "
            "use a checkpoint without them"
        )
    keys = {
        key.removeprefix("llama."): value
        for key, value in fields.items()
        if key.startswith("llama.")
    }
    for key, value in keys.items():
        if key not in _SHAPE_KEYS and value != _NEUTRAL_KEYS.get(key):
            raise UserError(
                f"{path} has llama.{key} = {value!r}, which changes the maths in a way "
                "that is not supported: use a checkpoint without it"
            )

    def ask(key, default=None):
        value = keys.get(key, default)
        if not isinstance(value, (int, float)):
            what = "no" if value is None else "a per-layer"
            raise UserError(
                f"{path} has {what} llama.{key}: use a file with one number there"
            )
        return value

    heads, width = ask("attention.head_count"), ask("embedding_length")
    depth = ask("attention.key_length", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if ask(key, depth) != depth:
            raise UserError(
                f"{path} has llama.{key} = {keys[key]}, only the head's own size "
                f"({depth}) is supported: use another checkpoint"
            )
    embed = tensors.get("token_embd.weight")
    spec = ModelSpec(
        name=name,
        num_layers=ask("block_count"),
        num_heads=heads,
        num_kv_heads=ask("attention.head_count_kv", heads),
        head_dim=depth,
        model_dim=width,
        ff_dim=ask("feed_forward_length"),
        vocab_size=ask("vocab_size", None if embed is None else int(embed.shape[-1])),
        context_length=ask("context_length"),
        rope_theta=ask("rope.freq_base", 10000.0),
        norm_eps=ask("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
    )
    pack.check_heads(spec, path)
    return spec


def _end_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids that end a completion: end of text, of turn and of message."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return tuple(int(fields[key]) for key in keys if key in fields)


def _names(num_layers: int) -> dict[str, str]:
    """Returns Hugging Face's tensor names by llama.cpp's."""
    names = dict(_GLOBAL)
    for index in range(num_layers):
        for theirs, ours in _LAYER.items():
            names[f"blk.{index}.{theirs}.weight"] = (
                f"model.layers.{index}.{ours}.weight"
            )
    return names


def _half_rotated(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head from (0, D/2, 1, D/2 + 1, ...) to (0, ..., D - 1).

    llama.cpp rotates adjacent channels, and its converter reorders the rows of the
    query and key projections accordingly; `models.layers.rotate` pairs the two halves.
    """
    rows, columns = array.shape
    split = array.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)
