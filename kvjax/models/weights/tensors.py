"""Reads and writes the tensors of safetensors files, in blocks."""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.types import UserError

DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_BLOCK = 1 << 18  # numbers per read: casting that many stays in the CPU's cache


class Tensor(NamedTuple):
    """A tensor in a file, read on demand.

    It uses plain reads, not a memory map: the pages of a mapped file stay in the
    process's resident set as long as the map does, so a shard of 5 GB would take 5 GB.

    Attributes:
      file: the safetensors file.
      start: offset of the tensor's first byte in the file.
      dtype: safetensors' name of the dtype ("BF16").
      shape: the tensor's shape.
    """

    file: pathlib.Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the numbers in order, block by block, in the file's dtype."""
        left = math.prod(self.shape)
        with self.file.open("rb") as file:
            file.seek(self.start)
            while left:
                block = np.fromfile(file, DTYPES[self.dtype], min(left, _BLOCK))
                if not block.size:
                    raise UserError(f"{self.file} was cut short: fetch it again")
                left -= block.size
                yield block

    def read(self, dtype: jnp.dtype) -> np.ndarray:
        """Returns the whole tensor; casts block by block, without a second copy."""
        whole = np.empty(self.shape, dtype)
        flat, done = whole.reshape(-1), 0
        for block in self.blocks():
            flat[done : done + block.size] = block
            done += block.size
        return whole


def read_header(file: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name.

    Raises:
      UserError: the file is truncated or damaged.
    """
    import safetensors

    try:
        # Checks the header, and that the file is as long as the header says.
        with safetensors.safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(size))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"cannot read {file}: truncated or damaged ({error}); fetch it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: Tensor(
            file,
            8 + size + entry["data_offsets"][0],
            entry["dtype"],
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }


def write(
    file: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes arrays by name to a safetensors file, with texts by name."""
    from safetensors import numpy as writer

    # The writer copies raw memory: it would write a transposed view in wrong order.
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    writer.save_file(contiguous, file, metadata)
