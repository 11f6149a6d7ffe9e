"""Reads and writes the tensors of safetensors files, a few numbers at a time."""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.types import UserError

DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_BLOCK = 1 << 18  # numbers read at a time: a cast of them stays in the CPU's cache


class Tensor(NamedTuple):
    """A tensor in a file, not read yet.

    Plain reads, no memory map: pages of a mapped file stay in the process's resident
    set for as long as the map does, so that a shard of 5 GB costs 5 GB.

    Attributes:
      file: the safetensors file.
      start: offset of its first byte in the file.
      dtype: as safetensors names it ("BF16").
      shape: of the tensor.
    """

    file: pathlib.Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields its numbers in order, a few at a time, in the file's dtype."""
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
        """Returns the whole tensor; casts by blocks, so no second one is in memory."""
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


def write(file: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file of these tensors."""
    from safetensors import numpy as writer

    # The writer takes the memory as it lies: a transposed view would be shuffled.
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    writer.save_file(contiguous, file)
