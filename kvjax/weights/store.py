"""The cache folder, and the ready-made copies of dequantised models in it.

A copy is a folder `<name>-<dtype>-<key>` with

    params/      an orbax checkpoint in the layout of `kvjax.models.decoder`
    tokenizer/   the tokenizer's own files, absent where there is none
    spec.json    the `ModelSpec`
    files.json   size and CRC-32 of each file above

It is written under another name and renamed when complete, so a write that was cut
short is never taken for a copy; `files.json` catches damage after that.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder
from kvjax.types import Model, ModelSpec, PyTree, RopeScaling
from kvjax.weights import tokenizer as tokenizers

# Part of every copy's key: raise it whenever the layout of the params or of the copy
# changes, and old copies are no longer found.
FORMAT = 3


class _UnusableCopy(Exception):
    """A copy that cannot be used; the message says what is wrong with it."""


def cache_dir() -> pathlib.Path:
    """$KVJAX_CACHE, else `kvjax` in $XDG_CACHE_HOME, else `~/.cache/kvjax`."""
    if own := os.environ.get("KVJAX_CACHE"):
        return pathlib.Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "kvjax"


def notice(text: str) -> None:
    """One line to stderr, for what takes long or differs from what was expected."""
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


def file_identity(path: pathlib.Path) -> str:
    """Changes when the file is replaced or written to; does not read it."""
    stat = path.stat()
    return f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"


def copy_path(name: str, identity: str, dtype: jnp.dtype) -> pathlib.Path:
    """Where the copy of this source in this dtype lies, whether or not it exists."""
    key = hashlib.sha256(f"{FORMAT}:{dtype.name}:{identity}".encode()).hexdigest()
    return cache_dir() / "copies" / f"{name[:64]}-{dtype.name}-{key[:16]}"


def load(
    name: str, identity: str, dtype: jnp.dtype, make: Callable[[], Model]
) -> Model:
    """The model from its copy, or from `make`, which then leaves a copy.

    Args:
      name: readable start of the copy's folder name.
      identity: of the source; another identity means another copy.
      dtype: of the params that `make` returns.
      make: converts the source; called only when there is no good copy.

    Returns:
      The model, on the default device. A copy that cannot be used is made again with a
      notice; one that cannot be written costs a notice, not the load.
    """
    copy = copy_path(name, identity, dtype)
    unusable = False
    if copy.exists():
        try:
            return _read(copy, dtype)
        except _UnusableCopy as error:
            unusable = True
            notice(f"the copy {copy} cannot be used ({error}); making it again")
    model = make()
    try:
        # Only now: where `make` fails too (no memory left), the copy was not at fault.
        if unusable:
            shutil.rmtree(copy)
        _write(copy, model)
    except Exception as error:
        # orbax reports a full disk by more than one type of exception.
        notice(f"no copy is kept in {copy}: {_one_line(error)}")
    return model


def _read(copy: pathlib.Path, dtype: jnp.dtype) -> Model:
    try:
        listed = json.loads((copy / "files.json").read_text())
        for name, expected in listed.items():
            if _fingerprint(copy / name) != expected:
                raise _UnusableCopy(f"{name} has changed")
        spec = _spec(json.loads((copy / "spec.json").read_text()))
        params = _restore(copy / "params", decoder.param_shapes(spec, dtype))
        folder = copy / "tokenizer"
        tokenizer = tokenizers.restore(folder) if folder.exists() else None
    except _UnusableCopy:
        raise
    except Exception as error:
        # Damage, or a copy by a version of orbax or transformers that differs: whatever
        # the readers raise, the answer is the same.
        raise _UnusableCopy(_one_line(error)) from error
    return Model(spec, params, tokenizer)


def _spec(fields: dict[str, Any]) -> ModelSpec:
    """JSON knows neither tuples nor dataclasses."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    rope = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields["rope"].items()
    }
    return ModelSpec(**fields | {"rope": RopeScaling(**rope)})


def _write(copy: pathlib.Path, model: Model) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    _sweep(copy.parent)
    part = pathlib.Path(tempfile.mkdtemp(dir=copy.parent, prefix=".making-"))
    try:
        _save(part / "params", model.params)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(part / "tokenizer")
        (part / "spec.json").write_text(json.dumps(dataclasses.asdict(model.spec)))
        files = sorted(path for path in part.rglob("*") if path.is_file())
        listed = {str(path.relative_to(part)): _fingerprint(path) for path in files}
        (part / "files.json").write_text(json.dumps(listed, indent=1))
        part.chmod(0o755)
        # Another process may have been first; its copy is as good as this one.
        if not copy.exists():
            part.rename(copy)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: pathlib.Path) -> None:
    """Removes what killed processes left behind; an hour outlasts any live one."""
    for part in folder.glob(".making-*"):
        if time.time() - part.stat().st_mtime > 3600:
            shutil.rmtree(part, ignore_errors=True)


def _fingerprint(path: pathlib.Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
        return [file.tell(), crc]


def _save(path: pathlib.Path, params: PyTree) -> None:
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(params))


def _restore(path: pathlib.Path, shapes: PyTree) -> PyTree:
    import orbax.checkpoint as ocp

    # An array made now lies where the user's settings put arrays.
    place = jnp.zeros(()).sharding
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
    )
    how = ocp.checkpoint_utils.construct_restore_args(target)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, how))


def _checkpointer():
    import orbax.checkpoint as ocp

    # Dequantised weights compress by a third, and then take four times as long to read.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]
