"""The class `Calibration`: each head's share of pairs, and the sizes made from it."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.cache.calibrations.apportion import apportion, proportional
from kvjax.types import ModelSpec, UserError, real_number, whole_number

Rows = tuple[tuple[float, ...], ...]  # [L][K]
FLOOR = 32  # pairs that every head keeps by default
AMONG = ("heads", "layers", "heads of each layer")  # what pairs are divided between
_FORMAT = 1
_OPTIONAL = {"made_by", "similarity", "float16"}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The share of its pairs that each head needs, for several ratios of all pairs.

    Attributes:
      model: the name in its spec.
      fingerprint: of its weights, see `kvjax.models.fingerprints`.
      target: the score of a pair, one of `kvjax.engine.calibration.TARGETS`; `loss` if
        the sizes were fitted by `kvjax.training.fit_heads`.
      num_texts, tokens: number of texts it was measured on, and tokens of each.
      accuracy: the share of tokens that the model predicted correctly while its
        attention scored the pairs; a low one means that the repetitions failed.
      ratios: pairs kept of all pairs, descending, each between 0 and 1.
      shares: for every ratio, the kept share of each head's pairs [L][K]; their mean is
        the ratio.
      similarity: for every layer [L], the cosine between the residual stream before and
        after its attention, mean over the texts' tokens; empty if not measured.
      made_by: the method, in words.
      float16: the fingerprint of the same weights loaded as float16; empty if unknown.

    Raises:
      UserError: a field of another type, shape or range.
    """

    model: str
    fingerprint: str
    target: str
    num_texts: int
    tokens: int
    accuracy: float
    ratios: tuple[float, ...]
    shares: tuple[Rows, ...]
    similarity: tuple[float, ...] = ()
    made_by: str = ""
    float16: str = ""

    def __post_init__(self):
        for name in ("model", "fingerprint", "target", "made_by", "float16"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} is {getattr(self, name)!r}: give a text")
        whole_number("num_texts", self.num_texts, 1)
        whole_number("tokens", self.tokens, 1)
        real_number("accuracy", self.accuracy, 0, 1)
        checked_ratios(self.ratios)
        if len(self.shares) != len(self.ratios):
            raise UserError(
                f"{len(self.shares)} sets of shares for {len(self.ratios)} ratios: "
                "give one each"
            )
        shapes = {_shape(rows) for rows in self.shares}
        if len(shapes) != 1 or None in shapes:
            raise UserError(
                "shares are not [L][K] numbers with the same L and K for every ratio"
            )
        for ratio, rows in zip(self.ratios, self.shares, strict=True):
            _check_shares(ratio, np.asarray(rows, np.float64))
        if self.similarity and len(self.similarity) != self.num_layers:
            raise UserError(
                f"similarity of {len(self.similarity)} layers for shares of "
                f"{self.num_layers}: give one each, or none"
            )
        for cosine in self.similarity:
            real_number("similarity", cosine, -1, 1)

    @property
    def num_layers(self) -> int:
        """The number L of layers."""
        return len(self.shares[0])

    @property
    def num_kv_heads(self) -> int:
        """The number K of KV heads of a layer."""
        return len(self.shares[0][0])

    def fits(self, spec: ModelSpec) -> bool:
        """Returns whether it was measured on the spec's weights, whatever their name.

        A spec without a fingerprint must have the same name instead.
        """
        if spec.fingerprint:
            same = spec.fingerprint in (self.fingerprint, self.float16)
        else:
            same = spec.name == self.model
        return same and self._has_heads_of(spec)

    def check(self, spec: ModelSpec) -> None:
        """Raises UserError unless it `fits`."""
        if self.fits(spec):
            return
        if spec.fingerprint and self._has_heads_of(spec):
            raise UserError(
                f"a calibration of {self.model!r} was made with other weights "
                f"({self.fingerprint}) than {spec.name!r} has ({spec.fingerprint}): "
                "calibrate these with kvjax.calibrate"
            )
        raise UserError(
            f"a calibration of {self.model!r} ({self.num_layers} layers of "
            f"{self.num_kv_heads} KV heads) does not fit {spec.name!r} "
            f"({spec.num_layers} of {spec.num_kv_heads}): calibrate that model with "
            "kvjax.calibrate"
        )

    def _has_heads_of(self, spec: ModelSpec) -> bool:
        mine = self.num_layers, self.num_kv_heads
        return mine == (spec.num_layers, spec.num_kv_heads)

    def shares_at(self, ratio: float) -> Float[np.ndarray, "L K"]:
        """Returns the shares at a ratio in (0, 1], float64; their mean is the ratio.

        Linear interpolation between the calibrated ratios, with shares of 0 at ratio 0
        and of 1 at ratio 1.

        Raises:
          UserError: a ratio that is not in (0, 1].
        """
        ratio = real_number("ratio", ratio)
        if not 0 < ratio <= 1:
            raise UserError(f"ratio {ratio}: give one above 0, and 1 at most")
        known = np.asarray(self.shares, np.float64)[::-1]
        known = np.stack([np.zeros(known.shape[1:]), *known, np.ones(known.shape[1:])])
        ends = [0.0, *self.ratios[::-1], 1.0]
        above = int(np.searchsorted(ends, ratio))
        weight = (ratio - ends[above - 1]) / (ends[above] - ends[above - 1])
        return known[above - 1] + weight * (known[above] - known[above - 1])

    def sizes(
        self,
        spec: ModelSpec,
        mean: int,
        *,
        length: int,
        floor: int = FLOOR,
        multiple: int = 8,
        among: str = "heads",
        even: float = 0.0,
    ) -> Int[np.ndarray, "L K"]:
        """Returns the number of pairs that each head keeps of a text.

        Args:
          spec: the model's shape, see `check`.
          mean: pairs per head; the sizes add up to mean * L * K exactly.
          length: tokens of the text; no head keeps more.
          floor: pairs that every head keeps; usually a multiple of `multiple`.
          multiple: sizes are multiples of it, except those at `floor` or `length`, and
            at most one (per layer, for "heads of each layer") that takes the remainder.
          among: one of `AMONG`. "heads" divides the total between all heads of all
            layers. "layers" divides it between layers by the mean share of their heads,
            which get one size. "heads of each layer" gives every layer the mean, and
            divides it between its heads.
          even: interpolates from the calibrated sizes, 0, to uniform ones, 1.

        Returns:
          int64.

        Raises:
          UserError: another model; a mean below `floor` or above `length`; an unknown
            `among`; `even` outside [0, 1].
        """
        self.check(spec)
        length = whole_number("length", length, 1)
        floor = whole_number("floor", floor, 1)
        mean = whole_number("mean size", mean, floor)
        if mean > length:
            raise UserError(
                f"a mean of {mean} pairs is more than the text's {length} tokens: give "
                f"{length} at most"
            )
        shape, ratio = (self.num_layers, self.num_kv_heads), mean / length
        even = real_number("even", even, 0, 1)
        rows = _rows(self.shares_at(ratio), ratio, among)
        if even == 1:  # apportioning in multiples would make uniform sizes differ
            return np.full(shape, mean)
        sizes = [
            apportion(row, mean * row.size, floor, length, multiple)
            for row in (1 - even) * rows + even * ratio
        ]
        return np.broadcast_to(np.reshape(sizes, (shape[0], -1)), shape)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file with a line per layer.

        Raises:
          UserError: the path cannot be written.
        """
        fields = dataclasses.asdict(self)
        ratios, shares = fields.pop("ratios"), fields.pop("shares")
        similarity = json.dumps(fields.pop("similarity"))
        head = json.dumps({"format": _FORMAT} | fields, indent=1, ensure_ascii=False)
        blocks = [
            f'  "{ratio}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in rows)
            for ratio, rows in zip(ratios, shares, strict=True)
        ]
        text = head.removesuffix("\n}") + f',\n "similarity": {similarity}'
        text += ',\n "shares": {\n'
        text += "\n  ],\n".join(blocks) + "\n  ]\n }\n}\n"
        path = pathlib.Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise UserError(
                f"{os.fspath(path)} cannot be written: {error.strerror}; name another "
                "file"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """Reads a file written by `save`.

        Raises:
          UserError: the file is missing or damaged; the message names the line.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            return cls(**_fields(found))
        except OSError as error:
            why = error.strerror
        except json.JSONDecodeError as error:
            why = f"not JSON, line {error.lineno}: {error.msg}"
        except (UnicodeDecodeError, UserError) as error:
            why = str(error)
        raise UserError(
            f"calibration {os.fspath(path)}: {why}; make it with kvjax.calibrate"
        )


def checked_among(among: Any) -> str:
    """Returns `among`; UserError unless it is one of `AMONG`."""
    if among not in AMONG:
        raise UserError(f"among is {among!r:.80}: use one of {AMONG}")
    return among


def checked_ratios(ratios: Any) -> tuple[float, ...]:
    """Returns the ratios as floats; UserError unless descending between 1 and 0."""
    several = isinstance(ratios, Sequence) and not isinstance(ratios, str)
    if not several or not len(ratios):
        raise UserError(f"ratios is {ratios!r:.80}: give one or more, as (0.5, 0.25)")
    found = tuple(real_number("ratio", ratio) for ratio in ratios)
    pairs = zip((1.0, *found), (*found, 0.0), strict=True)
    if not all(a > b for a, b in pairs):
        raise UserError(f"ratios {found}: give descending ones between 1 and 0")
    return found


def _rows(
    shares: Float[np.ndarray, "L K"], ratio: float, among: str
) -> Float[np.ndarray, "N M"]:
    """Returns rows of shares to apportion separately; their means are the ratio."""
    if checked_among(among) == "heads":
        return shares.reshape(1, -1)
    if among == "layers":
        return shares.mean(axis=1)[None]
    return np.stack([proportional(row, ratio * row.size, 0, 1) for row in shares])


def _shape(rows: Any) -> tuple[int, ...] | None:
    """Returns (L, K) of nested numbers, None for anything else."""
    try:
        found = np.asarray(rows)
    except ValueError:  # rows of several lengths
        return None
    real = np.issubdtype(found.dtype, np.number) and found.ndim == 2 and found.size
    return found.shape if real else None


def _check_shares(ratio: float, shares: Float[np.ndarray, "L K"]) -> None:
    """Raises UserError unless the shares are in (0, 1] and their mean is the ratio."""
    wrong = shares[~((shares > 0) & (shares <= 1))]
    if wrong.size:
        raise UserError(
            f"a share of {wrong[0]} at ratio {ratio}: give them above 0, up to 1"
        )
    if abs(shares.mean() - ratio) > 1e-3:
        raise UserError(
            f"shares at ratio {ratio} have a mean of {shares.mean():.4g}: their mean "
            "must be the ratio"
        )


def _fields(found: Any) -> dict[str, Any]:
    """Returns the arguments of `Calibration` from a file's JSON object."""
    if not isinstance(found, dict):
        raise UserError("not a JSON object")
    if found.pop("format", None) != _FORMAT:
        raise UserError(f"its format is not {_FORMAT}")
    names = {field.name for field in dataclasses.fields(Calibration)} - {"ratios"}
    if lacking := sorted(names - _OPTIONAL - set(found)):
        raise UserError(f"it has no {', '.join(lacking)}")
    if unknown := sorted(set(found) - names):
        raise UserError(f"it has an unknown field {unknown[0]!r}")
    shares = found.pop("shares")
    if not isinstance(shares, dict):
        raise UserError("its shares are not an object with rows for every ratio")
    try:
        ratios = tuple(float(ratio) for ratio in shares)
    except ValueError:
        raise UserError(f"its ratios {list(shares)} are not numbers") from None
    similarity = found.get("similarity", [])
    if not isinstance(similarity, list):
        raise UserError("its similarity is not a list with a number per layer")
    return found | {
        "ratios": ratios,
        "shares": tuple(map(tuples, shares.values())),
        "similarity": tuple(similarity),
    }


def tuples(rows: Any) -> Any:
    """Converts nested lists or arrays to tuples, which can be hashed."""
    rows = rows.tolist() if isinstance(rows, np.ndarray) else rows
    return tuple(map(tuples, rows)) if isinstance(rows, list) else rows
