"""Ready-made copies of checkpoints in the cache folder.

A copy is a folder `<name>-<dtype>-<key>` with

    params/      an orbax checkpoint in the layout of `kvjax.models.decoder`
    files.json   size and CRC-32 of each other file

and, of a GGUF file, whose own fields take long to read,

    model.json   the `ModelSpec` and the end tokens
    tokenizer/   the tokenizer's own files, absent where there is none

It is written under another name and renamed when complete, so a write that was cut
short is never taken for a copy; `files.json` catches damage after that.
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

from kvjax import messages
from kvjax.folders import cache_dir
from kvjax.models import decoder
from kvjax.models.weights import tokenizer as tokenizers
from kvjax.models.weights.pack import Placement, check_room
from kvjax.types import Model, ModelSpec, PyTree, RopeScaling, UserError

Kept = TypeVar("Kept", Model, PyTree)

# Part of every copy's key: raise it whenever the layout of the params or of the copy
# changes, and old copies are no longer found.
FORMAT = 5
_IN_FLIGHT = 1 << 26  # bytes read or written at once, besides one array


class _UnusableCopy(Exception):
    """A copy that cannot be used; the message says what is wrong with it."""


def identity(files: Sequence[pathlib.Path]) -> str:
    """Changes when a file is replaced or written to; does not read them."""
    stats = [(path.resolve(), path.stat()) for path in files]
    return "\n".join(f"{path}:{s.st_size}:{s.st_mtime_ns}" for path, s in stats)


def copy_path(
    name: str, identity: str, dtype: jnp.dtype, order: str = ""
) -> pathlib.Path:
    """Where the copy of this source in this dtype lies, whether or not it exists.

    Args:
      name: readable start of the folder's name.
      identity: of the source; another identity means another copy.
      dtype: of the params.
      order: of their rows and columns, see `kvjax.models.weights.pack.Placement`.
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
    """The model from its copy, or from `make`, which then leaves a copy.

    A copy that cannot be used is made again with a notice; one that cannot be written
    costs a notice, not the load.

    Args:
      name: readable start of the copy's folder name.
      identity: of the source; another identity means another copy.
      dtype: of the params that `make` returns.
      make: converts the source; called only when there is no good copy.
      placement: where the params of a copy go, and those of `make` already are; None
        for the default device.
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
    """The params of a known spec from their copy, or from `make`; as in `load`."""
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
        # Only now: where `make` fails too (no memory left), the copy was not at fault.
        if unusable:
            shutil.rmtree(copy)
        _write(copy, lambda part: write(part, made))
    except Exception as error:
        # orbax reports a full disk by more than one type of exception.
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
        # Damage, or a copy by a version of orbax or transformers that differs: whatever
        # the readers raise, the answer is the same.
        raise _UnusableCopy(_one_line(error)) from error


def _spec(fields: dict[str, Any]) -> ModelSpec:
    """JSON knows neither tuples nor dataclasses."""
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

    with _checkpointer(params) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(params))


def _restore(
    path: pathlib.Path,
    spec: ModelSpec,
    dtype: jnp.dtype,
    placement: Placement | None,
) -> PyTree:
    import orbax.checkpoint as ocp

    shapes = decoder.param_shapes(spec, dtype)
    if placement:
        shardings = placement.shardings(spec)
    else:
        # An array made now lies where the user's settings put arrays.
        usual = jnp.zeros(()).sharding
        shardings = jax.tree.map(lambda _: usual, shapes)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )
    how = ocp.checkpoint_utils.construct_restore_args(target)
    with _checkpointer(shapes) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, how))


def _checkpointer(shapes: PyTree):
    """Of arrays like these; holds few of them at once, besides those on the device."""
    import orbax.checkpoint as ocp

    most = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    handler = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=most + _IN_FLIGHT,
        restore_concurrent_bytes=most + _IN_FLIGHT,
        # Weights compress by a third at best, and take four times as long to read.
        use_compression=False,
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=handler))


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]
