"""Hugging Face folders: `config.json` with safetensors, read tensor by tensor."""

import contextlib
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.models.config import Config
from kvjax.models.families import FAMILIES
from kvjax.models.names import Names
from kvjax.types import Model, ModelSpec, UserError
from kvjax.weights import pack
from kvjax.weights import tokenizer as tokenizers

_DTYPES = ("F32", "F16", "BF16")


def load(path: pathlib.Path, dtype: jnp.dtype, context: int | None = None) -> Model:
    """Reads a folder with a model of one of the families.

    No copy of it is kept: safetensors load as fast as the copy would.

    Raises:
      UserError: a file is missing or truncated, pickled weights only, an attribute in
        config.json that changes the maths in a way we do not compute, tensors
        missing, unknown, of another shape or dtype.
    """
    spec, names = _spec(path, context)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(file)) for file in _files(path)]
        home = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        # Early checkpoints carry the rotary frequencies, and some their masks.
        dropped = ("rotary_emb.inv_freq", *names.dropped)
        home = {k: f for k, f in home.items() if not k.endswith(dropped)}
        for name, file in home.items():
            if (kind := file.get_slice(name).get_dtype()) not in _DTYPES:
                raise UserError(
                    f"{name} in {path} has dtype {kind}: only {', '.join(_DTYPES)} are "
                    "supported, use a checkpoint that is not quantised"
                )
        head, embed = (f"{names.ends[part]}.weight" for part in ("head", "embed"))
        if spec.tied_head and head in home and embed in home:
            own, tied = (home[name].get_tensor(name) for name in (head, embed))
            if not np.array_equal(own, tied):
                raise UserError(
                    f"{path} has its own {head}, but tie_word_embeddings is true in "
                    "config.json: set it to false if the head is not the embedding"
                )
            del home[head]
        found = {n: tuple(f.get_slice(n).get_shape()) for n, f in home.items()}
        pack.check(found, pack.tensor_shapes(spec, names), path)
        read = lambda name: home[name].get_tensor(name)
        params = pack.pack(spec, names, read, dtype)
    return Model(spec, params, tokenizers.from_folder(path))


def _spec(path: pathlib.Path, context: int | None) -> tuple[ModelSpec, Names]:
    values = _json(path / "config.json", "give the folder of a whole checkpoint")
    architectures = values.get("architectures") or ["LlamaForCausalLM"]
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        raise UserError(
            f"{path} has architectures {architectures}: kvjax knows "
            + ", ".join(sorted(FAMILIES))
        )
    family = FAMILIES[architectures[0]]
    config = Config(values, path, context)
    config.only(model_type=family.__name__.rsplit(".", 1)[-1])
    spec = family.spec_from_hf(config, path.resolve().name)
    config.finish()
    pack.check_heads(spec, path)
    return spec, family.tensor_names(spec)


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
