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
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_version",
        "use_cache",
        "_attn_implementation",
        "_name_or_path",
    }
)
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
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"has {key} = {value!r}", "it must be a number")
        return value

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
        heads, width = self.number("num_attention_heads"), self.number("hidden_size")
        return {
            "num_layers": self.number("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.number("num_key_value_heads", heads),
            "head_dim": self.number("head_dim", width // max(heads, 1)),
            "model_dim": width,
            "ff_dim": self.number("intermediate_size"),
            "vocab_size": self.number("vocab_size"),
            "context_length": self.number("max_position_embeddings", 2048),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "tie_embeddings": self.flag("tie_word_embeddings"),
        }

    def rope(self, head_dim: int, theta: float = 10_000.0) -> dict[str, Any]:
        """`rope_theta`, `rope` and `rotary_dim` of `ModelSpec`.

        transformers 5 nests them in `rope_parameters`; earlier ones have `rope_theta`
        and, for scaled positions, `rope_scaling`.
        """
        nested = self.get("rope_parameters", None)
        old = self.get("rope_scaling", None)
        for key, value in (("rope_parameters", nested), ("rope_scaling", old)):
            if value is not None and not isinstance(value, dict):
                raise self.unsupported(key, value)
        theta = self.number("rope_theta", theta)
        part = self.number("partial_rotary_factor", 1.0)
        said = {**(old or {}), **(nested or {})}
        theta = said.pop("rope_theta", None) or theta
        part = said.pop("partial_rotary_factor", None) or part
        turning = int(head_dim * part)
        return {
            "rope_theta": float(theta),
            "rope": self._scaling(said),
            "rotary_dim": None if turning == head_dim else turning,
        }

    def _scaling(self, said: dict[str, Any]) -> RopeScaling:
        said = {key: value for key, value in said.items() if value is not None}
        kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
        said.pop("type", None)
        kind = {"su": "longrope"}.get(kind, kind)
        context = self.number("max_position_embeddings", 2048)
        original = self.get("original_max_position_embeddings", None)
        nested = said.pop("original_max_position_embeddings", None)
        original = original or nested or context
        unknown = set(said) - set(_ROPE_KEYS.get(kind, ()))
        if kind not in _ROPE_KEYS or unknown:
            what = {"rope_type": kind, **{key: said[key] for key in sorted(unknown)}}
            raise self.unsupported("rope_parameters", what)
        factor = float(said.get("factor") or 1.0)
        if kind in ("default", "dynamic"):
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "llama3":
            low, high = (self._part(said, f"{x}_freq_factor") for x in ("low", "high"))
            return RopeScaling("llama3", factor, original, float(low), float(high))
        given = said.get("attention_factor")
        if kind == "yarn":
            return self._yarn(said, factor, original)
        factor = float(said.get("factor") or context / original)
        if given is None:
            stretched = math.log(factor) / math.log(original) if factor > 1 else 0.0
            given = math.sqrt(1 + stretched)
        used = min(self.context or context, context)
        which = "long_factor" if used > original else "short_factor"
        factors = tuple(float(x) for x in self._part(said, which))
        return RopeScaling(
            "longrope", factor, original, factors=factors, scale=float(given)
        )

    def _part(self, said: dict[str, Any], key: str) -> Any:
        if key not in said:
            raise self.error(f"has rope_parameters without {key}", "fetch it again")
        return said[key]

    def _yarn(self, said, factor: float, original: int) -> RopeScaling:
        """YaRN; its scale of cosine and sine is given, or grows with the factor."""

        def grown(weight):
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        scale = said.get("attention_factor")
        if scale is None and said.get("mscale") and said.get("mscale_all_dim"):
            scale = grown(said["mscale"]) / grown(said["mscale_all_dim"])
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original=original,
            low=float(said.get("beta_slow") or 1),
            high=float(said.get("beta_fast") or 32),
            scale=float(grown(1.0) if scale is None else scale),
            rounded=bool(said.get("truncate", True)),
        )
