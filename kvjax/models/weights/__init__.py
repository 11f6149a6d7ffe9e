"""Loads checkpoints into params: `load` and the readers that it calls.

hub          fetches named models, verified at every load, and models of the Hugging
             Face hub
gguf         reads and dequantises llama.cpp's files
safetensors  reads Hugging Face folders
tensors      reads and writes the tensors of safetensors files
pack         packs tensors of either source into the layout of `kvjax.models.decoder`
param_cache  keeps converted copies in the cache folder
tokenizer    makes tokenizers from either source
"""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax import messages
from kvjax.models import decoder, fingerprints, placement, presets
from kvjax.models.weights import gguf, hub, pack, param_cache, safetensors
from kvjax.parallel import meshes
from kvjax.types import Model, UserError, whole_number

__all__ = ["load"]

_DTYPES = ("float32", "bfloat16", "float16")


def load(
    name_or_path: str | os.PathLike,
    dtype: jnp.dtype = jnp.float32,
    context: int | None = None,
    mesh: str | None = None,
    cache_converted: bool | None = None,
) -> Model:
    """Loads a model by name, from a GGUF file, a Hugging Face folder or the hub.

    A named model is fetched once into the cache folder ($KVJAX_CACHE, else `kvjax` in
    the user's cache folder), and its SHA-256 is checked at every load. Dequantised GGUF
    weights are kept there as a copy per dtype, so that the next load takes a second or
    two. A model of the hub ("Qwen/Qwen2.5-0.5B") is fetched by `huggingface_hub` into
    its own cache, which is used without a network.

    Args:
      name_or_path: a known name ("smollm2-135m-instruct"), a `.gguf` file of the llama
        architecture, or a folder or hub id with `config.json` and safetensors of a
        family in docs/models.md. "random:llama-3.1-8b" is a shape of
        `kvjax.models.presets` with random weights, to measure speed and memory.
      dtype: dtype of all params: float32, bfloat16 or float16.
      context: limit on the tokens of a prompt and its completion, at most the model's
        own; None for the model's own. It also selects LongRoPE's frequencies.
      mesh: `data:2,model:4` splits the model over so many devices, see
        `kvjax.parallel.meshes.mesh`; None is the default device.
      cache_converted: whether to read the params from a converted copy in the cache
        folder, and to write one if there is none. None is True for GGUF files, whose
        weights take long to dequantise, and False for folders, which load as fast
        without a second copy on disk.

    Returns:
      The spec, the params (shapes in `kvjax.models.decoder`), the tokenizer, None where
      the checkpoint has none, and the tokens that end a completion.

    Raises:
      UserError: a name or path that is not there; a checkpoint that is damaged,
        incomplete or needs a computation that `kvjax.models.decoder` does not have; a
        failed download; a context above the model's; a mesh of more devices than there
        are. The message is one line with the remedy.
    """
    dtype = checked_dtype(dtype)
    if context is not None:
        context = whole_number("context", context, 1)
    asked, placed = _asked(name_or_path), _placement(mesh) if mesh else None
    with messages.progress(0) as say:
        say(f"loading {asked}", 0)
        model = load_placed(asked, dtype, context, placed, cache_converted)
        _warn_of_nan(model)
        model = model._replace(spec=fingerprints.marked(model))
    if mesh:
        over = meshes.mesh(mesh, model.spec.num_kv_heads)
        model = model._replace(spec=placement.fitted(model.spec, over))
        if whole := placement.notice(over, model.spec):
            messages.notice(whole)
    return model if context is None else _shortened(model, context)


def _asked(name_or_path: str | os.PathLike) -> str:
    try:
        return os.fsdecode(name_or_path)
    except TypeError:
        raise UserError(
            f"name_or_path is {name_or_path!r:.80}: give a name, a file or a folder"
        ) from None


def _shortened(model: Model, context: int) -> Model:
    """Returns the model with its context limited to `context` tokens."""
    spec, params = model.spec, model.params
    if context > spec.context_length:
        raise UserError(
            f"context {context}: {spec.name} reads {spec.context_length} tokens at "
            "most, give no more"
        )
    if spec.positions == "learned":
        params = params | {"positions": params["positions"][:context]}
    spec = dataclasses.replace(spec, context_length=context)
    return model._replace(spec=spec, params=params)


def _warn_of_nan(model: Model) -> None:
    """Warns of weights that hold NaN, which make all logits NaN."""
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    found = [(path, _has_nan(leaf)) for path, leaf in leaves]
    if names := [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, broken in found
        if broken
    ]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        messages.warn(
            f"weights of {model.spec.name} hold NaN: {', '.join(names[:3])}{more}; "
            "get the checkpoint again",
        )


@jax.jit
def _has_nan(weight: Array) -> Array:
    return jnp.any(jnp.isnan(weight))


def load_placed(
    asked: str,
    dtype: jnp.dtype,
    context: int | None = None,
    placement: pack.Placement | None = None,
    cache_converted: bool | None = None,
) -> Model:
    """Loads a model as `load` does, with params placed by a `pack.Placement`."""
    if asked.startswith(presets.RANDOM):
        return _random(asked.removeprefix(presets.RANDOM), dtype, placement)
    if asked in hub.NAMED:
        path, identity = hub.fetch(asked), hub.NAMED[asked].sha256
        return _load_gguf(path, asked, identity, dtype, placement, cache_converted)
    path = pathlib.Path(asked).expanduser()
    if not path.exists() and hub.is_id(asked):
        path = hub.snapshot(asked)
    if path.is_dir():
        return safetensors.load(path, dtype, context, placement, bool(cache_converted))
    if path.is_file():
        gguf.check_magic(path)
        identity = param_cache.identity([path])
        return _load_gguf(path, path.stem, identity, dtype, placement, cache_converted)
    named = "" if hub.is_path(asked) else f"no model named {asked!r} and "
    raise UserError(
        f"{named}no such file or folder as {asked}: give one of "
        f"{', '.join(sorted(hub.NAMED))}, a .gguf file, a Hugging Face folder, or the "
        "id of a model on its hub (owner/name)"
    )


def _random(name: str, dtype: jnp.dtype, placement: pack.Placement | None) -> Model:
    """Returns a published shape with random weights of a fixed seed, no tokenizer."""
    spec = presets.spec(name)
    pack.check_room(spec, dtype, placement)
    draw = functools.partial(decoder.random_params, spec, dtype=dtype)
    if placement:  # every device draws its own shard
        draw = jax.jit(draw, out_shardings=placement.shardings(spec))
    return Model(spec, draw(jax.random.key(0)), None)


def _placement(asked: str) -> pack.Placement:
    """Returns the placement that splits the params of any model over a mesh."""
    _, model = meshes.sizes(asked)

    def place(spec, path, weight):
        over = meshes.mesh(asked, spec.num_kv_heads)
        return placement.place(placement.fitted(spec, over), over, path, weight)

    def shardings(spec):
        over = meshes.mesh(asked, spec.num_kv_heads)
        return decoder.param_partitions(spec, over)

    return pack.Placement(place, shardings, f"gate and up in {model} groups")


def _load_gguf(
    path: pathlib.Path,
    name: str,
    identity: str,
    dtype: jnp.dtype,
    placement: pack.Placement | None,
    cache_converted: bool | None,
) -> Model:
    make = lambda: gguf.load(path, dtype, name, placement)
    if cache_converted is False:
        return make()
    return param_cache.load(name, identity, dtype, make, placement)


def checked_dtype(dtype: Any) -> jnp.dtype:
    """Returns a dtype as `jnp.dtype`; UserError if weights cannot have it."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in _DTYPES:
        raise UserError(f"dtype is {dtype!r}: give one of {', '.join(_DTYPES)}")
    return found
