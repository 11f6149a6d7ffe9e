"""Hugging Face folders: `config.json` with safetensors, read tensor by tensor."""

import contextlib
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.types import Model, ModelSpec, UserError
from kvjax.weights import pack
from kvjax.weights import tokenizer as tokenizers

# Attributes of config.json that change the maths: the one value that we compute.
_NEUTRAL = {
    "model_type": "llama",
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
}
_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
# Read into the spec.
_SHAPE = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "tie_word_embeddings",
    }
)
# No bearing on the forward pass.
_HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "max_length",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unk_token_id",
        "unsloth_version",
        "use_cache",
        "_name_or_path",
        "_attn_implementation",
    }
)
_DTYPES = ("F32", "F16", "BF16")


def load(path: pathlib.Path, dtype: jnp.dtype) -> Model:
    """Reads a folder with a LlamaForCausalLM.

    No copy of it is kept: safetensors load as fast as the copy would.

    Raises:
      UserError: a file is missing or truncated, pickled weights only, an attribute in
        config.json that changes the maths in a way we do not compute, tensors
        missing, unknown, of another shape or dtype.
    """
    spec = _spec(path)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(file)) for file in _files(path)]
        home = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        # Early Llama checkpoints carry the rotary frequencies, which we compute.
        home = {k: f for k, f in home.items() if not k.endswith("rotary_emb.inv_freq")}
        for name, file in home.items():
            if (kind := file.get_slice(name).get_dtype()) not in _DTYPES:
                raise UserError(
                    f"{name} in {path} has dtype {kind}: only {', '.join(_DTYPES)} are "
                    "supported, use a checkpoint that is not quantised"
                )
        if spec.tied_head and pack.HEAD in home and pack.EMBED in home:
            head, embed = (home[n].get_tensor(n) for n in (pack.HEAD, pack.EMBED))
            if not np.array_equal(head, embed):
                raise UserError(
                    f"{path} has its own {pack.HEAD}, but tie_word_embeddings is true "
                    "in config.json: set it to false if the head is not the embedding"
                )
            del home[pack.HEAD]
        found = {n: tuple(f.get_slice(n).get_shape()) for n, f in home.items()}
        pack.check(found, pack.tensor_shapes(spec), path)
        params = pack.pack(spec, lambda name: home[name].get_tensor(name), dtype)
    return Model(spec, params, tokenizers.from_folder(path))


def _spec(path: pathlib.Path) -> ModelSpec:
    config = _json(path / "config.json", "give the folder of a whole checkpoint")
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise UserError(
            f"{path} has architectures {architectures}: only LlamaForCausalLM is known"
        )
    for key, value in config.items():
        known = key in _SHAPE or key in _HARMLESS
        # An attribute that is absent, null or false asks for nothing.
        if not known and value and value != _NEUTRAL.get(key):
            raise UserError(
                f"config.json in {path} has {key} = {value!r}, which is not supported: "
                "use another checkpoint, or remove it if it does not change the maths"
            )

    def ask(key, default=None):
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(
                f"config.json in {path} has {key} = {value!r}: it must be a number"
            )
        return value

    heads, width = ask("num_attention_heads"), ask("hidden_size")
    depth = ask("head_dim", width // max(heads, 1))
    spec = ModelSpec(
        name=path.resolve().name,
        num_layers=ask("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=ask("num_key_value_heads", heads),
        head_dim=depth,
        model_dim=width,
        ff_dim=ask("intermediate_size"),
        vocab_size=ask("vocab_size"),
        context_length=ask("max_position_embeddings", 2048),
        rope_theta=float(_rope_theta(config, path)),
        norm_eps=ask("rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )
    pack.check_heads(spec, path)
    return spec


def _rope_theta(config: dict[str, Any], path: pathlib.Path) -> float:
    """The base of the rotary angles; newer configs nest it in `rope_parameters`."""
    theta = config.get("rope_theta") or 10000.0
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict) or any(
            value is not None and name != "rope_theta" and value != _ROPE.get(name)
            for name, value in rope.items()
        ):
            raise UserError(
                f"config.json in {path} has {key} = {rope!r}: only default rotary "
                "positions are supported, use another checkpoint"
            )
        theta = rope.get("rope_theta", theta)
    return theta


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        shards = set(_json(index, "fetch it again").get("weight_map", {}).values())
        files = [path / pathlib.PurePath(shard).name for shard in sorted(shards)]
        for file in files:
            if not file.exists():
                raise UserError(
                    f"{index} names {file.name}, which is missing: fetch it"
                )
        return files
    if pickles := sorted(path.glob("*.bin")):
        raise UserError(
            f"{path} has pickled weights only ({pickles[0].name}), which can run code: "
            "convert them with transformers' save_pretrained"
        )
    raise UserError(f"{path} has no model.safetensors: fetch the checkpoint again")


def _open(file: pathlib.Path):
    import safetensors

    try:
        return safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"cannot read {file}: truncated or damaged ({error}); fetch it again"
        ) from error


def _json(file: pathlib.Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: {remedy}") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} does not hold a JSON object: {remedy}")
    return value
