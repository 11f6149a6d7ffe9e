"""How many pairs each head of a model needs, as measured on texts: shares and files.

::

    scores [L, K, T]   of the pairs of a text, by `kvjax.engine.calibration`
      |   kept_shares      one threshold over all layers and heads, for every ratio
      v
    Measured           shares of every text     -> `stability`
      |   average          over the texts, with a floor
      v
    Calibration        saved, loaded, and asked for whole sizes
      |   keep             in the user's folder
      v
    find               what was measured on a model's weights, by their fingerprint

Nothing here runs a model.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.cache.apportion import apportion, proportional
from kvjax.folders import cache_dir
from kvjax.messages import warn
from kvjax.types import ModelSpec, UserError, real_number, whole_number

Rows = tuple[tuple[float, ...], ...]  # [L][K]
SINKS, NEWEST = 4, 16  # pairs at a text's ends that always count as kept
FLOOR = 32  # pairs that every head keeps, unless somebody says otherwise
AMONG = ("heads", "layers", "heads of each layer")  # what shares out pairs
LOSS = "loss"  # the target of sizes that `kvjax.training.fit_heads` has moved
TARGETS = "repetition", "attention", LOSS
_SHIPPED = {  # by target
    "repetition": pathlib.Path(__file__).with_name("calibrated"),
    LOSS: pathlib.Path(__file__).with_name("fitted"),
}
_FORMAT = 1
_OPTIONAL = {"made_by", "similarity", "float16"}
_GRAIN = 10_000  # shares are whole numbers of these parts


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What share of a text's pairs each head keeps, for some ratios of all pairs.

    Attributes:
      model: the name in its spec.
      fingerprint: of its weights, see `kvjax.models.fingerprints`.
      target: what pairs were scored by, of `kvjax.engine.calibration.TARGETS`; `loss`
        where sizes came of `kvjax.training.fit_heads`.
      num_texts, tokens: how many texts it was measured on, and of how many tokens.
      accuracy: the share of tokens that the model predicted right where pairs were
        scored; targets from repetitions that went wrong are worth little.
      ratios: pairs kept of all pairs, falling, each between 0 and 1.
      shares: for every ratio, the kept share of each head's pairs [L][K]; their mean is
        the ratio.
      similarity: of every layer [L], the cosine of the residual stream before and after
        its attention, mean over the texts' tokens; empty where nobody measured it.
      made_by: how, in words.
      float16: the fingerprint of the same weights loaded as float16; empty where nobody
        has worked it out.

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
            raise UserError("shares are no [L][K] numbers, the same L and K per ratio")
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
        """L."""
        return len(self.shares[0])

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return len(self.shares[0][0])

    def fits(self, spec: ModelSpec) -> bool:
        """Whether it was measured on the weights of a spec, whatever their name.

        Of a shape alone, which has no weights, the name has to be the same.
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
        """The shares at any ratio above 0, up to 1, float64; their mean is the ratio.

        On straight lines between the calibrated ratios. Of nothing heads keep nothing,
        and of all pairs everything: below the smallest ratio its shares shrink alike.

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
        part = (ratio - ends[above - 1]) / (ends[above] - ends[above - 1])
        return known[above - 1] + part * (known[above] - known[above - 1])

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
        """How many pairs each head keeps of a text, `mean` on average.

        Args:
          spec: the model's shape, which `check` is asked about.
          mean: pairs per head; the sizes add up to it times L times K exactly.
          length: tokens of the text; no head keeps more.
          floor: pairs that every head keeps; a multiple itself, as a rule.
          multiple: sizes are multiples of it, but for those at `floor` or `length`, and
            one at most (of each layer, where they are its heads') that takes what the
            total leaves over.
          among: one of `AMONG`. All heads of all layers share out the whole; or layers
            do, by the mean share of their heads, which keep alike; or every layer
            keeps the mean and its heads share that out.
          even: how far sizes lie between the calibration, 0, and `mean` in every head,
            1.

        Returns:
          int64.

        Raises:
          UserError: another model; a mean below `floor` or above the length; another
            `among`; `even` beyond 0 and 1.
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
        if even == 1:  # multiples would set equals apart
            return np.full(shape, mean)
        sizes = [
            apportion(row, mean * row.size, floor, length, multiple)
            for row in (1 - even) * rows + even * ratio
        ]
        return np.broadcast_to(np.reshape(sizes, (shape[0], -1)), shape)

    def save(self, path: str | os.PathLike) -> None:
        """Writes it as JSON, a line per layer.

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
        """Reads what `save` wrote.

        Raises:
          UserError: no such file, or one that is damaged; the message says where.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            return cls(**_fields(found))
        except OSError as error:
            why = error.strerror
        except json.JSONDecodeError as error:
            why = f"no JSON, line {error.lineno}: {error.msg}"
        except (UnicodeDecodeError, UserError) as error:
            why = str(error)
        raise UserError(
            f"calibration {os.fspath(path)}: {why}; make it with kvjax.calibrate"
        )


Given = Calibration | str | os.PathLike | None


def of_model(
    spec: ModelSpec, given: Given = None, target: str | None = None
) -> Calibration:
    """The calibration of a model's weights.

    Args:
      spec: of the model.
      given: a calibration or the path of one; None for what `find` finds.
      target: see `find`.

    Raises:
      UserError: a file that cannot be read, or that is of another model or of other
        weights; no calibration is known.
    """
    if given is None:
        found = find(spec, target)
        if found is None:
            raise UserError(
                f"no calibration {f'by {target} ' if target else ''}of the weights of "
                f"{spec.name} is known: make it once with kvjax.calibrate(model)"
            )
        return found
    found = given if isinstance(given, Calibration) else Calibration.load(given)
    found.check(spec)
    return found


def find(spec: ModelSpec, target: str | None = None) -> Calibration | None:
    """The calibration of these weights by a target; None where nobody has made it.

    Looks through the user's folder, the newest first, and then through what comes with
    the package. Warns of files that cannot be read.

    Args:
      spec: whose fingerprint it goes by, see `Calibration.fits`.
      target: one of `TARGETS`; None is any but `loss`, whose sizes are for one policy.
    """
    changed = lambda path: path.stat().st_mtime_ns
    own = sorted(own_folder().glob("*.json"), key=changed, reverse=True)
    came = (path for at in _SHIPPED.values() for path in sorted(at.glob("*.json")))
    for path in (*own, *came):
        try:
            found = _loaded(path, changed(path))
        except UserError as error:
            warn(f"{error}, or delete it")
            continue
        wanted = found.target == target if target else found.target != LOSS
        if wanted and found.fits(spec):
            return found
    return None


@functools.lru_cache(maxsize=256)
def _loaded(path: pathlib.Path, changed: int) -> Calibration:
    return Calibration.load(path)


def own_folder() -> pathlib.Path:
    """The user's calibrations: `calibrations` in the cache folder ($KVJAX_CACHE)."""
    return cache_dir() / "calibrations"


def kept_path(found: Calibration) -> pathlib.Path:
    """Where `keep` puts a calibration: another one of its weights and target goes."""
    name = f"{found.model[:64]}-{found.target}-{found.fingerprint}.json"
    return own_folder() / name


def keep(found: Calibration) -> None:
    """Puts it into the user's folder, where `find` looks.

    Raises:
      UserError: the folder cannot be written.
    """
    path = kept_path(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be made: {error.strerror}; name another folder by "
            "KVJAX_CACHE"
        ) from None
    found.save(path)


def shipped(name: str, target: str = "repetition") -> Calibration:
    """The calibration that comes with the package for a model of this name.

    Raises:
      UserError: there is none.
    """
    folder = _SHIPPED.get(checked_target(target))
    if folder is None or not (path := folder / f"{name}.json").is_file():
        raise UserError(
            f"no calibration of {name!r} by {target} comes with kvjax: make one with "
            "kvjax.calibrate(model)"
        )
    return Calibration.load(path)


def checked_target(target: Any) -> str:
    """`target`; UserError unless it is one of `TARGETS`."""
    if target not in TARGETS:
        raise UserError(f"target is {target!r:.80}: use one of {TARGETS}")
    return target


class Measured(NamedTuple):
    """Shares of every single text, before they are averaged.

    Attributes:
      model, fingerprint, target, tokens, ratios: see `Calibration`.
      floor: pairs of a text that every head is to keep.
      shares: [N, R, L, K] of N texts and R ratios.
      similarity: [N, L], see `Calibration`.
      accuracy: [N], see `Calibration`.
      float16: see `Calibration`.
    """

    model: str
    fingerprint: str
    target: str
    tokens: int
    ratios: tuple[float, ...]
    floor: int
    shares: Float[np.ndarray, "N R L K"]
    similarity: Float[np.ndarray, "N L"]
    accuracy: np.ndarray
    float16: str = ""


def kept_shares(
    scores: Float[np.ndarray, "L K T"], ratio: float
) -> Float[np.ndarray, "L K"]:
    """Each head's kept pairs over T, where one threshold keeps the ratio of all pairs.

    The first `SINKS` and the last `NEWEST` pairs count as kept, whatever their scores.
    Exactly round(ratio L K T) pairs are kept; among equal scores, the first ones.
    """
    scores = np.array(scores)
    scores[..., :SINKS] = scores[..., -NEWEST:] = np.inf
    keep = np.zeros(scores.size, bool)
    keep[np.argsort(-scores, axis=None, kind="stable")[: round(ratio * keep.size)]] = 1
    return keep.reshape(scores.shape).mean(axis=-1)


def average(measured: Measured) -> Calibration:
    """The mean over the texts, in parts of 1e-4 that add up to the ratios.

    No head's share is less than what `floor` pairs are of a text, or more than 1.
    """
    means = np.mean(measured.shares, axis=0)
    return Calibration(
        model=measured.model,
        fingerprint=measured.fingerprint,
        target=measured.target,
        num_texts=len(measured.shares),
        tokens=measured.tokens,
        accuracy=round(float(np.mean(measured.accuracy)), 4),
        ratios=measured.ratios,
        shares=tuple(
            whole_shares(mean, ratio, measured.floor, measured.tokens)
            for mean, ratio in zip(means, measured.ratios, strict=True)
        ),
        similarity=_tuples(np.mean(measured.similarity, 0, np.float64).round(4)),
        float16=measured.float16,
    )


def whole_shares(
    shares: Float[np.ndarray, "L K"], ratio: float, floor: int, tokens: int
) -> Rows:
    """Shares in parts of 1e-4 whose mean is the ratio exactly.

    None is less than `floor` pairs of a text of so many tokens.
    """
    least, total = (
        math.ceil(floor * _GRAIN / tokens),
        round(ratio * shares.size * _GRAIN),
    )
    parts = apportion(shares, total, least, _GRAIN)
    return _tuples(parts / _GRAIN)


def stability(
    shares: Float[np.ndarray, "N R L K"],
    counts: Sequence[int] = (2, 8, 32),
    splits: int = 20,
) -> dict[int, np.ndarray]:
    """How far shares depend on the texts: two disjoint halves of them, compared.

    Args:
      shares: of N texts and R ratios.
      counts: how many texts the two halves have together; what is more than N is left
        out.
      splits: how many times texts are drawn, always the same ones.

    Returns:
      For every count [R], a ratio each: the mean absolute difference of the halves'
      mean shares, over heads and draws.
    """
    rng, found = np.random.default_rng(0), {}
    for count in (count for count in counts if count <= len(shares)):
        drawn = [rng.permutation(len(shares))[:count] for _ in range(splits)]
        halves = [np.split(shares[texts], [count // 2]) for texts in drawn]
        apart = [abs(one.mean(axis=0) - other.mean(axis=0)) for one, other in halves]
        found[count] = np.mean(apart, axis=(0, 2, 3))
    return found


def checked_among(among: Any) -> str:
    """`among`; UserError unless it is one of `AMONG`."""
    if among not in AMONG:
        raise UserError(f"among is {among!r:.80}: use one of {AMONG}")
    return among


def checked_ratios(ratios: Any) -> tuple[float, ...]:
    """The ratios as floats; UserError unless they fall, between 1 and 0."""
    several = isinstance(ratios, Sequence) and not isinstance(ratios, str)
    if not several or not len(ratios):
        raise UserError(f"ratios is {ratios!r:.80}: give one or more, as (0.5, 0.25)")
    found = tuple(real_number("ratio", ratio) for ratio in ratios)
    falling = all(a > b for a, b in zip((1.0, *found), (*found, 0.0), strict=True))
    if not falling:
        raise UserError(f"ratios {found}: give falling ones between 1 and 0")
    return found


def _rows(
    shares: Float[np.ndarray, "L K"], ratio: float, among: str
) -> Float[np.ndarray, "N M"]:
    """Shares in rows that are shared out apart, the mean of each the ratio."""
    if checked_among(among) == "heads":
        return shares.reshape(1, -1)
    if among == "layers":
        return shares.mean(axis=1)[None]
    return np.stack([proportional(row, ratio * row.size, 0, 1) for row in shares])


def _shape(rows: Any) -> tuple[int, ...] | None:
    """(L, K) of numbers; None for anything else."""
    try:
        found = np.asarray(rows)
    except ValueError:  # rows of several lengths
        return None
    real = np.issubdtype(found.dtype, np.number) and found.ndim == 2 and found.size
    return found.shape if real else None


def _check_shares(ratio: float, shares: Float[np.ndarray, "L K"]) -> None:
    """Raises UserError unless they are shares, and of this ratio."""
    wrong = shares[~((shares > 0) & (shares <= 1))]
    if wrong.size:
        raise UserError(f"a share of {wrong[0]} at ratio {ratio}: above 0, 1 at most")
    if abs(shares.mean() - ratio) > 1e-3:
        raise UserError(
            f"shares at ratio {ratio} have a mean of {shares.mean():.4g}: it is the "
            "ratio's"
        )


def _fields(found: Any) -> dict[str, Any]:
    """The arguments of `Calibration` in a file's object."""
    if not isinstance(found, dict):
        raise UserError("no JSON object")
    if found.pop("format", None) != _FORMAT:
        raise UserError(f"its format is not {_FORMAT}")
    names = {field.name for field in dataclasses.fields(Calibration)} - {"ratios"}
    if lacking := sorted(names - _OPTIONAL - set(found)):
        raise UserError(f"it has no {', '.join(lacking)}")
    if unknown := sorted(set(found) - names):
        raise UserError(f"it has an unknown field {unknown[0]!r}")
    shares = found.pop("shares")
    if not isinstance(shares, dict):
        raise UserError("its shares are no object of a ratio's rows")
    try:
        ratios = tuple(float(ratio) for ratio in shares)
    except ValueError:
        raise UserError(f"its ratios {list(shares)} are no numbers") from None
    similarity = found.get("similarity", [])
    if not isinstance(similarity, list):
        raise UserError("its similarity is no list of a number per layer")
    return found | {
        "ratios": ratios,
        "shares": tuple(map(_tuples, shares.values())),
        "similarity": tuple(similarity),
    }


def _tuples(rows: Any) -> Any:
    """Nested lists or arrays as tuples, which can be hashed."""
    rows = rows.tolist() if isinstance(rows, np.ndarray) else rows
    return tuple(map(_tuples, rows)) if isinstance(rows, list) else rows
