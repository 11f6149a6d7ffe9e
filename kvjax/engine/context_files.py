"""Files of contexts: safetensors, with metadata and a checksum of everything.

A file is complete or not there at all: it is written beside its place and then renamed.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvjax.models.weights import tensors
from kvjax.types import UserError

FORMAT, VERSION = "kvjax context", 1


def write(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> None:
    """Writes arrays and values that JSON can hold, by name.

    Raises:
      UserError: the file cannot be written.
    """
    stored = {name: _known(array) for name, array in arrays.items()}
    values = {"format": FORMAT, "version": VERSION, **values}
    texts = {name: json.dumps(value) for name, value in values.items()}
    texts["checksum"] = _checksum(stored, texts)
    try:
        with _replacing(path) as part:
            tensors.write(part, stored, texts)
    except Exception as error:  # the writer has an exception of its own
        raise UserError(f"cannot write the context {path}: {_line(error)}") from error


def read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the arrays and the values of a file.

    Arrays of dtypes that safetensors does not know are returned as bytes.

    Raises:
      UserError: the file is not there, is truncated or damaged, is no context, or has
        another version.
    """
    import safetensors

    if not path.is_file():
        raise UserError(f"there is no context {path}: give the path of a file")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            texts = file.metadata() or {}
            _check_format(path, texts)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if texts.pop("checksum", None) != _checksum(arrays, texts):
            raise damaged(path, "its checksum is another")
        return arrays, {name: json.loads(text) for name, text in texts.items()}
    except (safetensors.SafetensorError, OSError) as error:
        raise damaged(path, _line(error)) from error


def damaged(path: pathlib.Path, reason: str) -> UserError:
    """Returns the error of a file that does not hold what it should."""
    return UserError(
        f"cannot read the context {path}: truncated or damaged ({reason}); read the "
        "document again"
    )


def _check_format(path: pathlib.Path, texts: Mapping[str, str]) -> None:
    if texts.get("format") != json.dumps(FORMAT):
        raise UserError(
            f"{path} is no context: give a file that Context.save has written"
        )
    if texts.get("version") != json.dumps(VERSION):
        raise UserError(
            f"context {path} has version {texts.get('version')} of the format, and "
            f"this kvjax reads version {VERSION}: read the document again"
        )


def _known(array: np.ndarray) -> np.ndarray:
    """Returns the array, as bytes if safetensors does not know its dtype."""
    known = array.dtype.kind in "iufb" or array.dtype.name == "bfloat16"
    return array if known else array.view(np.uint8)


def _checksum(arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> str:
    """Returns the CRC-32 of all arrays and texts, each in the order of their names."""
    crc = zlib.crc32(json.dumps(sorted(texts.items())).encode())
    for name in sorted(arrays):
        flat = np.ascontiguousarray(arrays[name]).reshape(-1)
        crc = zlib.crc32(flat.view(np.uint8), crc)
    return str(crc)


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file that replaces `path` once it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    part = pathlib.Path(name)
    try:
        yield part
        part.chmod(0o644)  # mkstemp lets nobody else read it
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
