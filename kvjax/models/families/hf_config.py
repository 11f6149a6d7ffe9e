"""Hugging Face's config.json, read strictly: what we do not understand is an error."""

import math
from collections.abc import Mapping
from typing import Any

from kvjax.types import RopeScaling, UserError

_REQUIRED = object()
# No bearing on the forward pass.
HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "hidden_dropout_prob",
        "ignore_keys_at_rope_validation",
        "init_std",
        "initializer_range",
        "is_llama_config",
        "layerdrop",
        "max_length",
        "max_sequence_length",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
    }
)
_ROPE_COMMON = {
    "rope_theta",
    "partial_rotary_factor",
    "rope_type",
    "type",
    "original_max_position_embeddings",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_KEYS = {
    "default": (),
    "dynamic": ("factor",),  # plain as far as max_position_embeddings, our limit
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
    """The attributes of a config.json; `finish` complains of those nobody asked for.

    Args:
      values: the JSON object.
      source: the folder, for messages.
      context: tokens that the model will be used for; None for all it can read.
    """

    def __init__(self, values: Mapping[str, Any], source, context: int | None = None):
        self.values, self.source, self.context = dict(values), source, context
        self._known = set(HARMLESS)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value of any type; null and absent are the default."""
        self._known.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"has no {key}", "fetch the checkpoint again")
            return default
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> int | float:
        value = self.get(key, default)
        if not _is_number(value):
            raise self.error(f"has {key} = {value!r}", "it must be a number")
        return value

    def size(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """A whole number, of layers, heads, channels or tokens."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            remedy = f"it must be a whole number, {least} or more"
            raise self.error(f"has {key} = {value!r}", remedy)
        return value

    def part(self, key: str) -> dict[str, Any]:
        """A JSON object of its own; null and absent are an empty one."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.unsupported(key, value)
        return value

    def layer_types(self, layers: int) -> list[str] | None:
        """What each layer's queries see, `_LAYER_TYPES`; None where it is not said."""
        kinds = self.get("layer_types", None)
        if kinds is None:
            return None
        known = isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds)
        if not known or len(kinds) != layers:
            remedy = f"it must be a list of {layers} of {', '.join(_LAYER_TYPES)}"
            raise self.error(f"has layer_types = {kinds!r:.80}", remedy)
        return kinds

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def only(self, **allowed: Any) -> None:
        """Attributes that may be there if they say this; null and false ask nothing."""
        for key, wanted in allowed.items():
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            value = self.get(key, None)
            if value and value not in wanted:
                raise self.unsupported(key, value)

    def ignore(self, *keys: str) -> None:
        """Attributes whose meaning is covered by others."""
        self._known.update(keys)

    def finish(self) -> None:
        """Raises UserError for attributes that nobody has asked for."""
        for key, value in self.values.items():
            if key not in self._known and value:
                raise self.unsupported(key, value)

    def unsupported(self, key: str, value: Any) -> UserError:
        return self.error(
            f"has {key} = {value!r}, which is not supported",
            "use another checkpoint, or remove it if it does not change the maths",
        )

    def error(self, what: str, remedy: str) -> UserError:
        return UserError(f"config.json in {self.source} {what}: {remedy}")

    def shape(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that most families name alike."""
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
        """Tokens that the model can read.

        With `linear` and `yarn` rotary scaling `max_position_embeddings` is that of
        before, as checkpoints have it (Vicuna 16k; Qwen2.5 as its card says), unless it
        is already as long as YaRN makes it; vLLM reads them alike.
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

    def rope(self, head_dim: int, theta: float = 10_000.0) -> dict[str, Any]:
        """`rope_theta`, `rope` and `rotary_dim` of `ModelSpec`.

        transformers 5 nests them in `rope_parameters`; earlier ones have `rope_theta`
        and, for scaled positions, `rope_scaling`.
        """
        theta = self.number("rope_theta", theta)
        part = self.number("partial_rotary_factor", 1.0)
        kind, said = self._rope_said()
        theta = self._positive(said, "rope_theta", theta)
        turning = int(head_dim * self._positive(said, "partial_rotary_factor", part))
        if turning != head_dim and (turning % 2 or not 0 < turning < head_dim):
            what = f"has a partial_rotary_factor that turns {turning} channels"
            raise self.error(what, f"it must be an even part of the {head_dim}")
        return {
            "rope_theta": theta,
            "rope": self._scaling(kind, said, turning),
            "rotary_dim": None if turning == head_dim else turning,
        }

    def _rope_said(self) -> tuple[str, dict[str, Any]]:
        """The kind of scaling, and what both attributes say; null says nothing."""
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
        """Tokens of the context trained on."""
        key = "original_max_position_embeddings"
        nested = Config(said, self.source)
        trained = self.size("max_position_embeddings", 2048)
        return self.size(key, nested.size(key, trained))

    def _scaling(self, kind: str, said: dict[str, Any], turning: int) -> RopeScaling:
        """The scaling of the frequencies of so many channels that rotate."""
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
        """A number of the rotary scaling; None is no default."""
        value = said.get(key) or default
        if value is None:
            raise self.error(f"has rope_parameters without {key}", "fetch it again")
        if not _is_number(value) or value <= 0:
            what = f"has rope_parameters with {key} = {value!r:.80}"
            raise self.error(what, "it must be a number above 0")
        return float(value)

    def _factors(self, said: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
        """One factor per frequency."""
        values = said.get(key)
        if values is None:
            raise self.error(f"has rope_parameters without {key}", "fetch it again")
        numbers = isinstance(values, list | tuple) and all(map(_is_number, values))
        if not numbers or len(values) != count:
            what = f"has rope_parameters with {key} = {values!r:.80}"
            raise self.error(what, f"it must be a list of {count} numbers")
        return tuple(map(float, values))

    def _yarn(self, said, factor: float, original: int) -> RopeScaling:
        """YaRN; its scale of cosine and sine is given, or grows with the factor."""

        def grown(weight):
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        scale, keys = grown(1.0), ("mscale", "mscale_all_dim")
        if all(map(said.get, keys)):
            one, all_dims = (grown(self._positive(said, key)) for key in keys)
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
    """Finite, and not a truth value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
