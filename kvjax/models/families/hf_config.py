"""Hugging Face's config.json, read strictly: what we do not understand is an error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.types import RopeScaling, UserError

_REQUIRED = object()
# No bearing on the forward pass: training, sampling, and how transformers runs a model.
HARMLESS = frozenset(
    {
        "activation_dropout",
        "architectures",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "ignore_keys_at_rope_validation",
        "init_std",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "language",
        "layerdrop",
        "length_penalty",
        "license",
        "max_length",
        "max_sequence_length",
        "max_window_layers",
        "min_length",
        "model_max_length",
        "name_or_path",
        "neftune_noise_alpha",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_length",
        "suppress_tokens",
        "target_lookbehind",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attention_2",
        "use_flash_attn",
        "use_return_dict",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
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
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
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

    def windows(
        self, layers: int, size: int, usual: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """The window of each layer; empty where none has one.

        Args:
          layers: how many there are.
          size: tokens that a layer with a window sees; 0 is no window.
          usual: the kinds of layers (`LAYER_TYPES`) that `layer_types` may replace.
            Empty for families whose layers are alike: they may only repeat it.
        """
        alike = [SLIDING if size else FULL] * layers
        kinds = self.get("layer_types", usual or alike)
        known = isinstance(kinds, list) and all(kind in LAYER_TYPES for kind in kinds)
        if not known or len(kinds) != layers:
            remedy = f"it must be a list of {layers} of {', '.join(LAYER_TYPES)}"
            raise self.error(f"has layer_types = {kinds!r:.80}", remedy)
        if kinds != alike and not (usual and size):
            what = f"has layer_types = {kinds!r:.80}, but by its other attributes all"
            raise self.error(f"{what} are {alike[0]}", "correct those that are wrong")
        sizes = tuple(size if kind == SLIDING else 0 for kind in kinds)
        return sizes if any(sizes) else ()

    def absent(self, **usual: Any) -> None:
        """What attributes are that the file lacks; null stays null."""
        self.values = usual | self.values

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
        """Raises UserError for attributes that nobody has asked for.

        Families without windows do not ask for `layer_types`, which may say so.
        """
        if "layer_types" not in self._known:
            self.windows(self.size("num_hidden_layers"), 0)
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

    def rope(
        self, head_dim: int, theta: float = 10_000.0, partial: bool = False
    ) -> dict[str, Any]:
        """`rope_theta`, `rope` and `rotary_dim` of `ModelSpec`.

        transformers 5 nests them in `rope_parameters`; earlier ones have `rope_theta`
        and, for scaled positions, `rope_scaling`.

        Args:
          head_dim: channels of a head.
          theta: the base, where none is given.
          partial: whether heads of this family may rotate in part. Of others
            transformers rotates all channels, whatever `partial_rotary_factor` says,
            and vLLM that part: which one a model was trained with is not known.
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
            what = f"has a partial_rotary_factor that turns {turning} channels"
            raise self.error(
                what, f"it must be a part of the {head_dim}, even in {kind}"
            )
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
