"""Reads rows of published data sets from files, the Hugging Face hub or TFDS.

All three have random access, so a few rows of a large split are read quickly.
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
    """The places that provide a data set.

    Attributes:
      name: its name in messages.
      hub: its id on the Hugging Face hub, and its configuration if it has several.
      tfds: its name in TensorFlow Datasets; None if it is not there.
      files: possible paths of a split in a `data_dir`, without suffix; NAME/SPLIT by
        default.
    """

    name: str
    hub: tuple[str, ...]
    tfds: str | None = None
    files: tuple[str, ...] = ()

    def paths(self, split: str, root: pathlib.Path) -> list[pathlib.Path]:
        """Returns the files that may hold the split, in the order of search."""
        places = self.files or (f"{self.name}/{split}",)
        return [root / f"{place}{suffix}" for place in places for suffix in _SUFFIXES]


def rows(source: Source, split: str, data_dir: str | None = None) -> Sequence[Row]:
    """Returns a split's rows in their published order.

    They come from the first of these places that has them:

    - a file in `data_dir`: `.jsonl` (an object per line) or `.json` (a list of objects,
      or an object with such a list as "examples" or "data");
    - the package `datasets` (its cache, or the hub);
    - the package `tensorflow-datasets` (its folder, or a download; many data sets need
      `tensorflow` as well).

    Raises:
      UserError: `data_dir` is not a folder, a file in it is damaged, or no place has
        the split; the message lists the places and their errors.
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
        except Exception as error:  # these libraries pass on errors of any type
            first = (str(error).splitlines() or [""])[0]
            misses.append(f"{open_split.__doc__}: {type(error).__name__}: {first}")
    raise UserError(
        f"cannot find split {split!r} of {source.name!r}: {'; '.join(misses)}. Pass "
        f"data_dir=FOLDER with {source.paths(split, pathlib.Path('FOLDER'))[0]}, or "
        "`pip install 'kvjax[data]'` where the Hugging Face hub can be reached"
    )


def read(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a JSON or JSON lines file.

    Raises:
      UserError: the file holds no list of objects.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":  # not splitlines(): it also splits at U+2028
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
    """Draws `count` different rows, with their indices, in a seeded random order.

    A smaller count gives the beginning of a larger one's; None draws all rows.

    Raises:
      UserError: `count` is negative or larger than the number of rows.
    """
    count = len(found) if count is None else count
    if not 0 <= count <= len(found):
        raise UserError(f"{what} has {len(found)} rows, so {count} cannot be drawn")
    order = np.random.default_rng(seed).permutation(len(found))
    return [(int(i), found[int(i)]) for i in order[:count]]


def field(*names: str) -> Callable[..., Any]:
    """Returns a function `(row, default=None)` that reads the first of these fields.

    "a.b" is field b of field a. Several names are needed because publishers of the same
    data name fields differently.

    Raises (the function):
      UserError: the row has none of the fields, and there is no default.
    """

    def get(row: Row, default: Any = None) -> Any:
        values = (_inside(row, name.split(".")) for name in names)
        found = next((value for value in values if value is not None), default)
        if found is None:
            raise UserError(
                f"a row has no field {' or '.join(map(repr, names))}; its fields are "
                f"{', '.join(map(repr, row))}"
            )
        return found

    return get


def _inside(value: Any, path: Sequence[str]) -> Any:
    """Returns the value at a path of field names, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def folder(data_dir: str) -> pathlib.Path:
    """Returns the folder as a path; raises UserError if it does not exist."""
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
    """Rows of TFDS with `str` and `list` values, decoded when they are read."""

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
