"""A strict reader of Hugging Face's config.json: unknown attributes are errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.models.families.harmless import HARMLESS
from kvjax.types import RopeScaling, UserError

_REQUIRED = object()
_ROPE_COMMON = {
    "rope_theta",
    "partial_rotary_factor",
    "rope_type",
    "type",
    "original_max_position_embeddings",
}
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_KEYS = {
    "default": (),
    "dynamic": ("factor",),  # unscaled up to max_position_embeddings, our limit
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor"),
}


class Config:
    """The attributes of a config.json; `finish` refuses those that were never read.

    Args:
      values: the JSON object.
      source: the folder, for messages.
      context: longest context that the model will be used with; None for its full one.
    """

    def __init__(self, values: Mapping[str, Any], source, context: int | None = None):
        self.values, self.source, self.context = dict(values), source, context
        self._known = set(HARMLESS)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Returns a value of any type; the default if it is null or absent."""
        self._known.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"has no {key}", "fetch the checkpoint again")
            return default
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> int | float:
        """Returns a finite number."""
        value = self.get(key, default)
        if not _is_number(value):
            raise self.error(f"has {key} = {value!r}", "it must be a number")
        return value

    def size(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """Returns a whole number, such as one of layers, heads, channels or tokens."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            remedy = f"it must be a whole number, {least} or more"
            raise self.error(f"has {key} = {value!r}", remedy)
        return value

    def part(self, key: str) -> dict[str, Any]:
        """Returns a nested JSON object; an empty one if it is null or absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.unsupported(key, value)
        return value

    def windows(
        self, layers: int, size: int, usual: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """Returns the window of each layer; an empty tuple if none has one.

        Args:
          layers: number of layers.
          size: tokens that a layer with a window sees; 0 is no window.
          usual: the default types of the layers (of `LAYER_TYPES`), which `layer_types`
            may override. Empty for families whose layers are all of one type, which
            `layer_types` may only repeat.
        """
        uniform = [SLIDING if size else FULL] * layers
        kinds = self.get("layer_types", usual or uniform)
        known = isinstance(kinds, list) and all(kind in LAYER_TYPES for kind in kinds)
        if not known or len(kinds) != layers:
            remedy = f"it must be a list of {layers} of {', '.join(LAYER_TYPES)}"
            raise self.error(f"has layer_types = {kinds!r:.80}", remedy)
        if kinds != uniform and not (usual and size):
            what = f"has layer_types = {kinds!r:.80}, but by its other attributes all"
            raise self.error(f"{what} are {uniform[0]}", "correct those that are wrong")
        sizes = tuple(size if kind == SLIDING else 0 for kind in kinds)
        return sizes if any(sizes) else ()

    def absent(self, **usual: Any) -> None:
        """Sets values of attributes that the file lacks; null stays null."""
        self.values = usual | self.values

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns the truth of a value."""
        return bool(self.get(key, default))

    def only(self, **allowed: Any) -> None:
        """Raises UserError for a value that is neither allowed, null nor false."""
        for key, values in allowed.items():
            values = values if isinstance(values, tuple) else (values,)
            value = self.get(key, None)
            if value and value not in values:
                raise self.unsupported(key, value)

    def ignore(self, *keys: str) -> None:
        """Accepts any value of attributes that others make redundant."""
        self._known.update(keys)

    def finish(self) -> None:
        """Raises UserError for attributes that the family has not read.

        Families without windows do not read `layer_types`; it may repeat that.
        """
        if "layer_types" not in self._known:
            self.windows(self.size("num_hidden_layers"), 0)
        for key, value in self.values.items():
            if key not in self._known and value:
                raise self.unsupported(key, value)

    def unsupported(self, key: str, value: Any) -> UserError:
        """Returns the error for an attribute that kvjax does not compute."""
        return self.error(
            f"has {key} = {value!r}, which is not supported",
            "use another checkpoint, or remove it if it does not change the maths",
        )

    def error(self, what: str, remedy: str) -> UserError:
        """Returns an error that names the file, the fault and the remedy."""
        return UserError(f"config.json in {self.source} {what}: {remedy}")

    def shape(self) -> dict[str, Any]:
        """Returns the `ModelSpec` fields that have the same names in most families."""
        heads, width = self.size("num_attention_heads"), self.size("hidden_size")
        return {
            "num_layers": self.size("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.size("num_key_value_heads", heads),
            "head_dim": self.size("head_dim", width // heads),
            "model_dim": width,
            "ff_dim": self.size("intermediate_size"),
            "vocab_size": self.size("vocab_size"),
            "context_length": self.context_length(),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "tie_embeddings": self.flag("tie_word_embeddings"),
        }

    def context_length(self) -> int:
        """Returns the model's context length in tokens.

        Under `linear` and `yarn` scaling, `max_position_embeddings` is the length
        before scaling, as in published checkpoints (Vicuna 16k; Qwen2.5 by its card),
        unless it already is YaRN's length. vLLM reads it the same way.
        """
        trained = self.size("max_position_embeddings", 2048)
        kind, said = self._rope_said()
        if kind == "linear":
            return int(trained * self._positive(said, "factor"))
        if kind != "yarn":
            return trained
        original = self._original(said)
        factor = self._positive(said, "factor", trained / original)
        return max(trained, int(original * factor))

    def rope(
        self, head_dim: int, theta: float = 10_000.0, partial: bool = False
    ) -> dict[str, Any]:
        """Returns `rope_theta`, `rope` and `rotary_dim` of `ModelSpec`.

        transformers 5 nests them in `rope_parameters`; earlier versions have
        `rope_theta` and, for scaled positions, `rope_scaling`.

        Args:
          head_dim: channels of a head.
          theta: the default base.
          partial: whether this family supports `partial_rotary_factor`. In the others,
            transformers ignores it and vLLM applies it, so a factor other than 1 is
            ambiguous and refused.
        """
        theta = self.number("rope_theta", theta)
        part = self.number("partial_rotary_factor", 1.0)
        kind, said = self._rope_said()
        theta = self._positive(said, "rope_theta", theta)
        part = self._positive(said, "partial_rotary_factor", part)
        turning = int(head_dim * part)
        if turning != head_dim and not partial:
            raise self.error(
                f"has partial_rotary_factor = {part}, which transformers ignores in "
                "this family and vLLM does not",
                "remove it if all channels of a head rotate, else use another "
                "checkpoint",
            )
        odd = turning % 2 and kind in ("yarn", "longrope")  # transformers fails too
        if turning != head_dim and (odd or not 0 < turning < head_dim):
            what = f"has a partial_rotary_factor that rotates {turning} channels"
            remedy = f"it must rotate fewer than {head_dim}, an even number in {kind}"
            raise self.error(what, remedy)
        return {
            "rope_theta": theta,
            "rope": self._scaling(kind, said, turning),
            "rotary_dim": None if turning == head_dim else turning,
        }

    def _rope_said(self) -> tuple[str, dict[str, Any]]:
        """Returns the kind of scaling, and both attributes merged, without nulls."""
        said = {**self.part("rope_scaling"), **self.part("rope_parameters")}
        said = {key: value for key, value in said.items() if value is not None}
        kind = said.get("rope_type") or said.get("type") or "default"
        kind = "longrope" if kind == "su" else kind
        known = isinstance(kind, str) and kind in _ROPE_KEYS
        unknown = set(said) - _ROPE_COMMON - set(_ROPE_KEYS[kind] if known else ())
        if not known or unknown:
            what = {"rope_type": kind, **{key: said[key] for key in sorted(unknown)}}
            raise self.unsupported("rope_parameters", what)
        return kind, said

    def _original(self, said: dict[str, Any]) -> int:
        """Returns the tokens of the trained context."""
        key = "original_max_position_embeddings"
        nested = Config(said, self.source)
        trained = self.size("max_position_embeddings", 2048)
        return self.size(key, nested.size(key, trained))

    def _scaling(self, kind: str, said: dict[str, Any], turning: int) -> RopeScaling:
        """Returns the scaling of the frequencies of `turning` channels."""
        original = self._original(said)
        if kind in ("default", "dynamic"):
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", self._positive(said, "factor"))
        if kind == "llama3":
            keys = "low_freq_factor", "high_freq_factor", "factor"
            low, high, factor = (self._positive(said, key) for key in keys)
            return RopeScaling("llama3", factor, original, low, high)
        context = self.size("max_position_embeddings", 2048)
        factor = self._positive(said, "factor", context / original)
        if kind == "yarn":
            return self._yarn(said, factor, original)
        stretched = math.log(factor) / math.log(original) if factor > 1 else 0.0
        scale = self._positive(said, "attention_factor", math.sqrt(1 + stretched))
        used = min(self.context or context, context)
        which = "long_factor" if used > original else "short_factor"
        factors = self._factors(said, which, turning // 2)
        return RopeScaling("longrope", factor, original, factors=factors, scale=scale)

    def _positive(
        self, said: dict[str, Any], key: str, default: float | None = None
    ) -> float:
        """Returns a positive number of the scaling, required if there is no default."""
        value = said.get(key) or default
        if value is None:
            raise self.error(f"has rope_parameters without {key}", "fetch it again")
        if not _is_number(value) or value <= 0:
            what = f"has rope_parameters with {key} = {value!r:.80}"
            raise self.error(what, "it must be a number above 0")
        return float(value)

    def _factors(self, said: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
        """Returns LongRoPE's factors, one per frequency."""
        values = said.get(key)
        if values is None:
            raise self.error(f"has rope_parameters without {key}", "fetch it again")
        numbers = isinstance(values, list | tuple) and all(map(_is_number, values))
        if not numbers or len(values) != count:
            what = f"has rope_parameters with {key} = {values!r:.80}"
            raise self.error(what, f"it must be a list of {count} numbers")
        return tuple(map(float, values))

    def _yarn(self, said, factor: float, original: int) -> RopeScaling:
        """Returns YaRN's scaling.

        Cosine and sine are scaled by `attention_factor`, by default computed from the
        factor (Peng et al. 2023, section 3.4).
        """

        def attention_scale(weight):
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        scale, keys = attention_scale(1.0), ("mscale", "mscale_all_dim")
        if all(map(said.get, keys)):
            one, all_dims = (attention_scale(self._positive(said, key)) for key in keys)
            scale = one / all_dims
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original=original,
            low=self._positive(said, "beta_slow", 1),
            high=self._positive(said, "beta_fast", 32),
            scale=self._positive(said, "attention_factor", scale),
            rounded=bool(said.get("truncate", True)),
        )


def _is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and not a bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
