"""Reads Hugging Face folders: `config.json` with safetensors, tensor by tensor."""

import json
import pathlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.models.families import FAMILIES
from kvjax.models.families.hf_config import Config
from kvjax.models.families.names import Names
from kvjax.models.weights import pack, param_cache
from kvjax.models.weights import tokenizer as tokenizers
from kvjax.models.weights.tensors import DTYPES, Tensor, read_header
from kvjax.types import Model, ModelSpec, PyTree, UserError

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth")


def load(
    path: pathlib.Path,
    dtype: jnp.dtype,
    context: int | None = None,
    placement: pack.Placement | None = None,
    cache_converted: bool = False,
) -> Model:
    """Loads a model of one of the families from a folder.

    The host holds one tensor at a time in the dtype of the params; for a fused one, one
    of its parts as well.

    Args:
      path: the folder.
      dtype: dtype of the params.
      context: limit on the context, see `kvjax.load`; None for the model's own.
      placement: destination of the params; None for the default device.
      cache_converted: whether to read the params from their copy in the cache folder,
        and to write one if there is none; see `kvjax.models.weights.param_cache`.

    Raises:
      UserError: a missing or truncated file; pickled weights only; an attribute in
        config.json that needs a computation kvjax does not have; tensors that are
        missing, unknown, or of another shape or dtype.
    """
    spec, names = _spec(path, context)
    pack.check_room(spec, dtype, placement)
    files = _files(path)

    def make() -> PyTree:
        tensors = _checked(path, spec, names, files)
        read = lambda name: tensors[name].read(dtype)
        return pack.pack(spec, names, read, dtype, placement)

    if cache_converted:
        # The params depend on config.json and the files, but not on the context.
        identity = param_cache.identity([path / "config.json", *files])
        params = param_cache.params(spec, identity, dtype, make, placement)
    else:
        params = make()
    ends = _end_tokens(path)
    return Model(spec, params, tokenizers.from_folder(path), ends)


def _checked(
    path: pathlib.Path, spec: ModelSpec, names: Names, files: list[pathlib.Path]
) -> dict[str, Tensor]:
    """Returns the tensors of the params; checks their names, shapes and dtypes."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise UserError(
                    f"{name} in {path} is in both {tensors[name].file.name} and "
                    f"{file.name}: fetch the checkpoint again into an empty folder"
                )
            tensors[name] = tensor
    # Early checkpoints hold the rotary frequencies, and some their causal masks.
    dropped = ("rotary_emb.inv_freq", *names.dropped)
    tensors = {k: t for k, t in tensors.items() if not k.endswith(dropped)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{name} in {path} has dtype {tensor.dtype}: only {', '.join(DTYPES)} "
                "are supported, use a checkpoint that is not quantised"
            )
    head, embed = (f"{names.ends[part]}.weight" for part in ("head", "embed"))
    if spec.tie_embeddings and head in tensors and embed in tensors:
        if not _equal(tensors[head], tensors[embed]):
            raise UserError(
                f"{path} has its own {head}, but tie_word_embeddings is true in "
                "config.json: set it to false if the head is not the embedding"
            )
        del tensors[head]
    found = {name: tensor.shape for name, tensor in tensors.items()}
    pack.check(found, pack.tensor_shapes(spec, names), path)
    return tensors


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return all(map(np.array_equal, left.blocks(), right.blocks()))


def _spec(path: pathlib.Path, context: int | None) -> tuple[ModelSpec, Names]:
    values = _json(path / "config.json", "give the folder of a whole checkpoint")
    family = _family(values, path)
    config = Config(values, path, context)
    config.ignore("model_type")
    spec = family.spec_from_hf(config, path.resolve().name)
    config.finish()
    pack.check_heads(spec, path)
    return spec, family.tensor_names(spec)


def _family(values: dict[str, Any], path: pathlib.Path) -> ModuleType:
    """Returns the family that `architectures` names, or else `model_type`.

    Raises:
      UserError: neither names a known family, or they name two.
    """
    named, kind = values.get("architectures"), values.get("model_type")
    types = {family.__name__.rsplit(".", 1)[-1]: family for family in FAMILIES.values()}
    if not named and kind in types:
        return types[kind]
    if not named or len(named) != 1 or named[0] not in FAMILIES:
        raise UserError(
            f"{path} has architectures {named} and model_type {kind!r} in config.json: "
            f"kvjax knows {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[named[0]]
    if kind and types.get(kind) is not family:
        raise UserError(
            f"{path} has architectures {named} and model_type = {kind!r} in "
            "config.json, which are two families: correct the one that is wrong"
        )
    return family


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    single = path / "model.safetensors"
    if single.exists():
        return [single]
    if (path / _INDEX).exists():
        return _shards(path / _INDEX)
    if pickles := sorted(file for kind in _PICKLES for file in path.glob(kind)):
        raise UserError(
            f"{path} has pickled weights only ({pickles[0].name}), which can run code: "
            "convert them with transformers' save_pretrained"
        )
    raise UserError(
        f"{path} has no model.safetensors: fetch the checkpoint again, or another that "
        "has one"
    )


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    home = _json(index, "fetch it again").get("weight_map")
    if not isinstance(home, dict) or not home:
        raise UserError(f"{index} has no weight_map: fetch it again")
    files = []
    for shard in sorted(set(map(str, home.values()))):
        file = index.parent / shard
        if file.name != shard or file.suffix != ".safetensors":
            raise UserError(
                f"{index} names {shard!r}, which is not a safetensors file beside it: "
                "fetch it again"
            )
        if not file.exists():
            raise UserError(f"{index} names {shard}, which is missing: fetch it")
        files.append(file)
    return files


def _end_tokens(path: pathlib.Path) -> tuple[int, ...]:
    """Returns the ids that end a completion according to the folder.

    generation_config.json takes precedence over config.json, as in transformers. Chat
    models list several there (Llama 3: end of text, of turn, of message); their
    tokenizer has only one.

    Raises:
      UserError: ids that are not whole numbers.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        said = _json(file, "fetch it again") if file.exists() else {}
        if (said := said.get("eos_token_id")) is not None:
            ids = said if isinstance(said, list) else [said]
            if not all(type(token) is int for token in ids):
                raise UserError(
                    f"{file} has eos_token_id = {said!r}: it must be a token's "
                    "number, or a list of them"
                )
            return tuple(token for token in ids if token >= 0)
    return ()


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
