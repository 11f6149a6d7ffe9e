"""Rows of published data sets: files, the Hugging Face hub, TensorFlow Datasets.

All three are random access, so that a few rows of a large split cost a few rows.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.types import UserError

Row = Mapping[str, Any]
_SUFFIXES = (".jsonl", ".json")


class Source(NamedTuple):
    """Where a data set is to be had.

    Attributes:
      name: what messages call it.
      hub: its id on the Hugging Face hub, and its configuration if it has several.
      tfds: its name in TensorFlow Datasets; None if it is not there.
      files: where a split may be in a `data_dir`, less the suffix; without any,
        NAME/SPLIT.
    """

    name: str
    hub: tuple[str, ...]
    tfds: str | None = None
    files: tuple[str, ...] = ()

    def paths(self, split: str, root: pathlib.Path) -> list[pathlib.Path]:
        """The files that may hold the split, the likelier first."""
        places = self.files or (f"{self.name}/{split}",)
        return [root / f"{place}{suffix}" for place in places for suffix in _SUFFIXES]


def rows(source: Source, split: str, data_dir: str | None = None) -> Sequence[Row]:
    """The split's rows, in their published order.

    Taken from the first of these that has them: a file in `data_dir`, `.jsonl` (an
    object per line) or `.json` (a list of objects, or an object with such a list as
    "examples" or "data"); the package `datasets` (its cache, or the hub); the package
    `tensorflow-datasets` (its folder, or a download; it knows many sets only where
    `tensorflow` is installed as well).

    Raises:
      UserError: `data_dir` is no folder, a file in it is damaged, or no place has the
        split; says what was looked for and what became of it.
    """
    misses = []
    if data_dir is not None:
        paths = source.paths(split, folder(data_dir))
        found = next((path for path in paths if path.is_file()), None)
        if found:
            return read(found)
        misses.append(f"no file {' or '.join(map(str, paths))}")
    for open_split in (_from_hub, _from_tfds):
        try:
            return open_split(source, split)
        except ImportError as error:
            misses.append(f"no package {error.name}")
        except Exception as error:  # these libraries raise whatever theirs raise
            first = (str(error).splitlines() or [""])[0]
            misses.append(f"{open_split.__doc__}: {type(error).__name__}: {first}")
    raise UserError(
        f"cannot find split {split!r} of {source.name!r}: {'; '.join(misses)}. Pass "
        f"data_dir=FOLDER with {source.paths(split, pathlib.Path('FOLDER'))[0]}, or "
        "`pip install 'kvjax[data]'` where the Hugging Face hub can be reached"
    )


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a JSON or JSON lines file. Raises UserError if it holds none."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":  # not splitlines: text may hold other line ends
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not JSON in UTF-8: {error}") from error
    if isinstance(found, dict):
        found = found.get("examples", found.get("data"))
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UserError(f"{str(path)!r} holds no list of objects")
    return found


def draw(
    found: Sequence[Row], count: int | None, seed: int | Sequence[int], what: str
) -> list[tuple[int, Row]]:
    """`count` different rows with their indices, in an order drawn by the seed.

    A smaller count gives the beginning of a larger one's; None is all rows.

    Raises:
      UserError: count is below 0 or above the number of rows.
    """
    count = len(found) if count is None else count
    if not 0 <= count <= len(found):
        raise UserError(f"{what} has {len(found)} rows, so {count} cannot be drawn")
    order = np.random.default_rng(seed).permutation(len(found))
    return [(int(i), found[int(i)]) for i in order[:count]]


def field(*names: str) -> Callable[..., Any]:
    """A function `(row, otherwise=None)`: the first of these fields that the row has.

    "a.b" is field b of field a. Publishers of the same data name fields differently.

    Raises (the function):
      UserError: the row has none of them, and there is nothing given otherwise.
    """

    def get(row: Row, otherwise: Any = None) -> Any:
        values = (_inside(row, name.split(".")) for name in names)
        found = next((value for value in values if value is not None), otherwise)
        if found is None:
            raise UserError(
                f"a row has no field {' or '.join(map(repr, names))}; its fields are "
                f"{', '.join(map(repr, row))}"
            )
        return found

    return get


def _inside(value: Any, path: Sequence[str]) -> Any:
    """What a path of field names leads to, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def folder(data_dir: str) -> pathlib.Path:
    """The folder as a path. Raises UserError if there is none."""
    path = pathlib.Path(data_dir)
    if not path.is_dir():
        raise UserError(f"data_dir {data_dir!r} is not a folder")
    return path


def _from_hub(source: Source, split: str) -> Sequence[Row]:
    """the Hugging Face hub"""
    import datasets

    return datasets.load_dataset(*source.hub, split=split)


def _from_tfds(source: Source, split: str) -> Sequence[Row]:
    """TensorFlow Datasets"""
    import tensorflow_datasets

    if source.tfds is None:
        raise LookupError(f"has no {source.name}")
    return _Decoded(tensorflow_datasets.data_source(source.tfds, split=split))


class _Decoded(Sequence):
    """Rows with text as `str` and lists as `list`, decoded when they are asked for."""

    def __init__(self, source: Sequence[Row]):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        return _decoded(self._source[index])


def _decoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _decoded(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    return value.decode() if isinstance(value, bytes) else value
