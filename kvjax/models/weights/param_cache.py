"""Keeps converted copies of checkpoints in the cache folder.

A copy is a folder `<name>-<dtype>-<key>` with

    params/      safetensors files in the layout of `kvjax.models.decoder`
    files.json   size and CRC-32 of each other file

and, for a GGUF file, whose own fields take long to read,

    model.json   the `ModelSpec` and the end tokens
    tokenizer/   the tokenizer's own files, absent where there is none

A copy is written under a temporary name and renamed when it is complete, so an
interrupted write leaves no copy. `files.json` detects later damage.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import messages
from kvjax.folders import cache_dir
from kvjax.models import decoder
from kvjax.models.weights import tensors
from kvjax.models.weights import tokenizer as tokenizers
from kvjax.models.weights.pack import Placement, check_room
from kvjax.types import Model, ModelSpec, PyTree, RopeScaling, UserError

Kept = TypeVar("Kept", Model, PyTree)

# Part of every copy's key. Raise it whenever the layout of the params or of the copy
# changes, so that old copies are no longer found.
FORMAT = 6


class _UnusableCopy(Exception):
    """A copy that cannot be used; the message says what is wrong with it."""


def identity(files: Sequence[pathlib.Path]) -> str:
    """Returns a text that changes when a file is replaced or written to.

    It uses paths, sizes and times; no file is read.
    """
    stats = [(path.resolve(), path.stat()) for path in files]
    return "\n".join(f"{path}:{s.st_size}:{s.st_mtime_ns}" for path, s in stats)


def copy_path(
    name: str, identity: str, dtype: jnp.dtype, order: str = ""
) -> pathlib.Path:
    """Returns the folder of the copy of a source in a dtype, whether or not it exists.

    Args:
      name: readable start of the folder's name.
      identity: the source's, see `identity`.
      dtype: dtype of the params.
      order: order of their rows and columns, see `pack.Placement`.
    """
    key = f"{FORMAT}:{dtype.name}:{order}:{identity}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache_dir() / "copies" / f"{name[:64]}-{dtype.name}-{digest[:16]}"


def load(
    name: str,
    identity: str,
    dtype: jnp.dtype,
    make: Callable[[], Model],
    placement: Placement | None = None,
) -> Model:
    """Returns the model from its copy, or calls `make` and writes a copy.

    A copy that cannot be used is made again, with a notice. If a copy cannot be
    written, a notice says so and the load succeeds.

    Args:
      name: readable start of the copy's folder name.
      identity: the source's, see `identity`.
      dtype: dtype of the params that `make` returns.
      make: converts the source; called only when there is no usable copy.
      placement: destination of the params, of a copy's and of `make`'s; None for the
        default device.
    """

    def read(copy: pathlib.Path) -> Model:
        listed = json.loads((copy / "model.json").read_text())
        spec, folder = _spec(listed["spec"]), copy / "tokenizer"
        check_room(spec, dtype, placement)
        params = _restore(copy / "params", spec, dtype, placement)
        tokenizer = tokenizers.restore(folder) if folder.exists() else None
        return Model(spec, params, tokenizer, tuple(listed["end_tokens"]))

    def write(part: pathlib.Path, model: Model) -> None:
        _save(part / "params", model.params)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(part / "tokenizer")
        spec = dataclasses.asdict(model.spec)
        listed = {"spec": spec, "end_tokens": model.end_tokens}
        (part / "model.json").write_text(json.dumps(listed))

    order = placement.order if placement else ""
    return _kept(copy_path(name, identity, dtype, order), make, read, write)


def params(
    spec: ModelSpec,
    identity: str,
    dtype: jnp.dtype,
    make: Callable[[], PyTree],
    placement: Placement | None = None,
) -> PyTree:
    """Returns the params of a known spec, from their copy or `make` as in `load`."""
    order = placement.order if placement else ""
    return _kept(
        copy_path(spec.name, identity, dtype, order),
        make,
        lambda copy: _restore(copy / "params", spec, dtype, placement),
        lambda part, made: _save(part / "params", made),
    )


def _kept(
    copy: pathlib.Path,
    make: Callable[[], Kept],
    read: Callable[[pathlib.Path], Kept],
    write: Callable[[pathlib.Path, Kept], None],
) -> Kept:
    unusable = False
    if copy.exists():
        try:
            return _read(copy, read)
        except _UnusableCopy as error:
            unusable = True
            messages.notice(
                f"the copy {copy} cannot be used ({error}); making it again"
            )
    made = make()
    try:
        # Removed only now: if `make` fails too (no memory), the copy was not at fault.
        if unusable:
            shutil.rmtree(copy)
        _write(copy, lambda part: write(part, made))
    except Exception as error:
        # Libraries raise different exceptions for a full disk.
        messages.notice(f"no copy is kept in {copy}: {_one_line(error)}")
    return made


def _read(copy: pathlib.Path, read: Callable[[pathlib.Path], Kept]) -> Kept:
    try:
        listed = json.loads((copy / "files.json").read_text())
        for name, expected in listed.items():
            if _fingerprint(copy / name) != expected:
                raise _UnusableCopy(f"{name} has changed")
        return read(copy)
    except (_UnusableCopy, UserError):
        raise
    except Exception as error:
        # Damage, or a copy by another version of transformers: readers raise many
        # types, and in every case the copy is made again.
        raise _UnusableCopy(_one_line(error)) from error


def _spec(fields: dict[str, Any]) -> ModelSpec:
    """Returns the spec from JSON fields, whose lists become tuples."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    rope = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields["rope"].items()
    }
    return ModelSpec(**fields | {"rope": RopeScaling(**rope)})


def _write(copy: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    _sweep(copy.parent)
    part = pathlib.Path(tempfile.mkdtemp(dir=copy.parent, prefix=".making-"))
    try:
        fill(part)
        files = sorted(path for path in part.rglob("*") if path.is_file())
        listed = {str(path.relative_to(part)): _fingerprint(path) for path in files}
        (part / "files.json").write_text(json.dumps(listed, indent=1))
        part.chmod(0o755)
        # Another process may have finished first; its copy is as good as this one.
        if not copy.exists():
            part.rename(copy)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: pathlib.Path) -> None:
    """Removes the unfinished copies of killed processes, which are over an hour old."""
    for part in folder.glob(".making-*"):
        if time.time() - part.stat().st_mtime > 3600:
            shutil.rmtree(part, ignore_errors=True)


def _fingerprint(path: pathlib.Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
        return [file.tell(), crc]


def _save(folder: pathlib.Path, params: PyTree) -> None:
    """Writes one file per layer and per other entry, with one in host memory."""
    folder.mkdir()
    for name, leaves in _by_file(params).items():
        arrays = {key: np.asarray(leaf) for key, leaf in leaves.items()}
        tensors.write(folder / f"{name}.safetensors", arrays)


def _restore(
    folder: pathlib.Path,
    spec: ModelSpec,
    dtype: jnp.dtype,
    placement: Placement | None,
) -> PyTree:
    """Reads the files of `_save`, with one array at a time in host memory."""
    shapes = decoder.param_shapes(spec, dtype)
    found = {
        name: tensors.read_header(folder / f"{name}.safetensors")
        for name in _by_file(shapes)
    }

    def read(path, shape, sharding=None):
        name, key = _place(path)
        tensor = found[name][key]
        if tensor.shape != shape.shape:
            raise _UnusableCopy(f"{key} has the shape {tensor.shape}")
        array = tensor.read(dtype)
        if sharding is None:
            return jax.block_until_ready(jax.device_put(array))
        return jax.block_until_ready(
            jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        )

    shardings = [placement.shardings(spec)] if placement else []
    return jax.tree_util.tree_map_with_path(read, shapes, *shardings)


def _by_file(params: PyTree) -> dict[str, dict[str, Any]]:
    """Groups the leaves of params by file: file name -> name in the file -> leaf."""
    files: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, key = _place(path)
        files.setdefault(name, {})[key] = leaf
    return files


def _place(path: tuple) -> tuple[str, str]:
    """Returns a leaf's file and its name there: ("layers.0", "layers.0.qkv")."""
    keys = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return ".".join(keys[: 2 if keys[0] == "layers" else 1]), ".".join(keys)


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]
