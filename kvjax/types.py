"""Shared types: specs, models, and arrays between models, caches and policies.

Axis letters, used in every signature and comment of the package:

    B rows          K KV heads                    C slots (capacity of a layer)
    T new tokens    G query heads per KV head     M model dim
    L layers        D head dim                    F feed-forward dim, V vocabulary

A *slot* is a place for one KV pair. It is empty when its position is -1.
"""

import dataclasses
import functools
import importlib.util
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, dataclass_transform

import jax
from jaxtyping import Array, BFloat16, Float, Int, Integer

PyTree = Any
EMPTY = -1  # the position of an empty slot


# A static field of a `Struct`: hashable, part of the tree's structure, not a leaf.
static_field = functools.partial(dataclasses.field, metadata={"static": True})


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, static_field)
)
class Struct:
    """Base class of frozen dataclasses that are JAX pytrees of their fields."""

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with these fields changed."""
        return dataclasses.replace(self, **changes)


class UserError(ValueError):
    """An error in the user's input; its message names the value and the remedy."""


def build(cls: type, fields: Mapping[str, Any], what: str) -> Any:
    """Returns an instance of a dataclass made from a mapping of its fields.

    Args:
      cls: the dataclass.
      fields: its fields by name.
      what: the name of the object in error messages.

    Raises:
      UserError: a field that the class does not have, or one that is missing.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(fields) - set(known)):
        raise UserError(
            f"{what} has an unknown field {unknown[0]!r}: fields are "
            + ", ".join(sorted(known))
        )
    try:
        return cls(**fields)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None


def whole_number(
    name: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """Returns an integer, NumPy's too, as int; UserError for others or out of range."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: give a whole number")
    _check_range(name, found, least, most)
    return found


def real_number(
    name: str, value: Any, least: float | None = None, most: float | None = None
) -> float:
    """Returns a number as float; UserError for text, NaN or one out of range."""
    try:
        found = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"{name} is {value!r}: give a number")
    _check_range(name, found, least, most)
    return found


def _check_range(name: str, value: float, least, most) -> None:
    if least is not None and value < least:
        raise UserError(f"{name} {value}: must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"{name} {value}: must be at most {most}")


def require_extra(extra: str, *packages: str) -> None:
    """Raises UserError where a package of one of kvjax's extras is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{', '.join(missing)} {verb} not installed: pip install 'kvjax[{extra}]'"
        )


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling of rotary frequencies for contexts longer than the trained one.

    Attributes:
      kind: `none`; `linear`, which divides all frequencies by `factor`; `llama3`, which
        divides those below `low` rotations per `original` tokens, and interpolates up
        to `high`; `yarn`, the same, interpolating linearly over channels; `longrope`,
        which divides each by its own of `factors`.
      factor: the divisor.
      original: tokens of the trained context.
      low, high: rotations in that context, see `kind`.
      factors: one per frequency.
      scale: multiplies cosine and sine.
      rounded: whether the ends of YaRN's interpolation are rounded to whole channels.
    """

    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    factors: tuple[float, ...] = ()
    scale: float = 1.0
    rounded: bool = True


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer; hashable, so jit can take it static.

    Policies use only `num_kv_heads`, `queries_per_kv_head` and `head_dim`. The defaults
    are Llama's.

    Attributes:
      positions: `rotary`, or `learned` embeddings added to the tokens'.
      rotary_dim: leading channels of a head that rotate; None for all. An odd number n
        rotates n + 1 channels with the frequencies of n, as in transformers.
      rope: scaling of the rotary frequencies.
      sliding_windows: for each layer, the number of tokens that a query sees, itself
        included; 0 is unlimited. Empty is unlimited in all layers.
      local_rope_theta: base of the unscaled frequencies of layers with a window; None
        for those of the other layers.
      norm: `rms`; `rms_offset`, whose weights are added to 1; `layer`, with biases.
      norm_placement: norms `pre` or `post` attention and MLP; `sandwich` for both;
        `parallel` for attention and MLP side by side behind one norm, `parallel_two`
        behind one norm each.
      final_norm: whether a norm follows the last layer.
      activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
      gated: whether the activation multiplies a second projection.
      biases: projections that have one: of `qkv`, `out`, `mlp`.
      qk_norm: whether queries and keys are normalised per head.
      query_scale: scale of the products of queries and keys; None for head_dim ** -0.5.
      attention_softcap, logit_softcap: c of c tanh(x / c); 0 for none.
      embed_scale: scale of the embeddings.
      embed_dim: width of the embeddings; None for the model's.
      experts, experts_per_token: experts of the MLP, and the number that each token
        uses; 0 for a dense MLP.
      ff_groups: number of equal groups of the 2 F of `gate_up`, each its gate channels
        followed by its up channels; as many as devices split them.
      fingerprint: identifies the loaded weights, see `kvjax.models.fingerprints`; empty
        for a shape alone. It is no part of the shape: specs that differ only in it are
        equal, and share compiled programs.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    ff_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    positions: str = "rotary"
    rotary_dim: int | None = None
    rope: RopeScaling = RopeScaling()
    sliding_windows: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    norm: str = "rms"
    norm_placement: str = "pre"
    final_norm: bool = True
    activation: str = "silu"
    gated: bool = True
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    query_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    embed_dim: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    ff_groups: int = 1
    fingerprint: str = dataclasses.field(default="", compare=False)

    def sliding_window(self, layer: int) -> int:
        """Returns the number of tokens that a layer's queries see; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def scoring(self, layer: int) -> "Scoring":
        """Returns the soft cap and the window of a layer's attention logits."""
        return Scoring(self.attention_softcap, self.sliding_window(layer))

    @property
    def queries_per_kv_head(self) -> int:
        """The number G of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Model(NamedTuple):
    """A loaded model, as `kvjax.load` returns it.

    Attributes:
      spec: the shape.
      params: weights, see `kvjax.models.decoder`.
      tokenizer: a `transformers.PreTrainedTokenizerFast` with its chat template,
        or None for a model that has none (random weights).
      end_tokens: ids that end a completion according to the checkpoint; the tokenizer's
        own end token ends one too.
    """

    spec: ModelSpec
    params: PyTree
    tokenizer: Any
    end_tokens: tuple[int, ...] = ()

    def __repr__(self) -> str:
        spec, leaves = self.spec, jax.tree.leaves(self.params)
        count = sum(leaf.size for leaf in leaves)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        kinds = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        words = "no tokenizer" if self.tokenizer is None else "with a tokenizer"
        return (
            f"Model({spec.name}: {spec.num_layers} layers, {spec.num_heads} query and "
            f"{spec.num_kv_heads} KV heads of {spec.head_dim}, {count / 1e6:,.3g}M "
            f"weights in {kinds}, {size / 1e9:.3g} GB, context "
            f"{spec.context_length:,}, {words})"
        )


class Partial(NamedTuple):
    """Attention over one segment of the keys, before the softmax's division.

    `out / denominator` is the segment's attention output. Segments merge associatively,
    see `kvjax.attention.merge`.

    Attributes:
      out: sum of exp(logit - max_logit) * value, float32.
      max_logit: the largest logit, -inf where no key is visible.
      denominator: sum of exp(logit - max_logit).
    """

    out: Float[Array, "B K G T D"]
    max_logit: Float[Array, "B K G T"]
    denominator: Float[Array, "B K G T"]


class Codes(NamedTuple):
    """Quantised keys or values: integers, and scales of N groups of adjacent channels.

    Attributes:
      codes: int8[B, K, C, D]; below 8 bits uint8[B, K, C, D bits / 8], the first
        channels in the lowest bits, offset by 2^(bits - 1) to be unsigned.
      scale: the step of every group; NaN if the group held a NaN or an infinity.
      centre: the centre of every group; None for a grid around 0.
    """

    codes: Integer[Array, "B K C P"]
    scale: BFloat16[Array, "B K C N"]
    centre: BFloat16[Array, "B K C N"] | None = None


def numbers_of(pairs: Array | Codes) -> Array:
    """Returns the stored array of keys or values; the codes of quantised ones."""
    return pairs.codes if isinstance(pairs, Codes) else pairs


class Scoring(NamedTuple):
    """The soft cap and window of a layer's attention logits; static.

    Attributes:
      logits_soft_cap: c of c tanh(x / c); 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
    """

    logits_soft_cap: float = 0.0
    local_window: int = 0


class LayerOps(NamedTuple):
    """A layer's functions and arrays that the model passes to the cache.

    Attributes:
      apply_rope: (x, positions=None) -> x with the layer's rotary angles applied. x is
        [B, ..., T, D]; positions are [B, ..., T] with any of x's leading axes, None for
        the positions of the new tokens.
      value_contribution: values [B, K, T, D] -> [B, K, G, T, M], the vectors that they
        add to the residual stream at an attention weight of 1, by each query head's
        columns of the output projection.
      scoring: soft cap and window of the attention logits.
      hidden: input of attention, after the norm.
    """

    apply_rope: Callable[..., Float[Array, "B *H T D"]]
    value_contribution: Callable[[Float[Array, "B K T D"]], Float[Array, "B K G T M"]]
    scoring: Scoring = Scoring()
    hidden: Float[Array, "B T M"] | None = None


class View(NamedTuple):
    """A policy's view of one layer of the cache.

    Its functions compute nothing until a policy calls them.

    Attributes:
      positions: position of the pair in each slot, -1 where the slot is empty.
      query_position: position of the newest token of each row.
      num_keep: pairs per head that are kept by the eviction that `score` is called for;
        in `observe`, all live pairs.
      keys: returns the keys as attention sees them, dequantised if necessary.
      values: the same for the values.
      apply_rope: see `LayerOps`; positions are required here.
      layer: the layer's index; traced where layers share a program.
      params: this layer's part of `Policy.params`, traced.
      gather_heads: x [B, K, ...] of this view's heads -> [B, H, ...] of all heads of
        the layer. Where heads are split over devices it is a collective, and a policy
        that calls it must set `Policy.needs_all_heads`.
      heads: indices of this view's heads in the whole layer; None for all heads.
      budget: pairs that each of these heads may hold, |kv|, a static number; None if
        unknown.
      mean_budget: mean budget over all heads of the model, where they differ.
      scoring: soft cap and window, for policies that compute attention weights
        themselves.
    """

    positions: Int[Array, "B K C"]
    query_position: Int[Array, "B"]
    num_keep: Int[Array, "B K"]
    keys: Callable[[], Float[Array, "B K C D"]] | None = None
    values: Callable[[], Float[Array, "B K C D"]] | None = None
    apply_rope: Callable[..., Array] | None = None
    layer: int | Int[Array, ""] | None = None
    params: PyTree = None
    gather_heads: Callable[[Array], Array] = lambda x: x
    heads: Int[Array, "K"] | None = None
    budget: int | None = None
    mean_budget: float | None = None
    scoring: Scoring = Scoring()


class Observation(NamedTuple):
    """Statistics of one attention call over T queries.

    `num_tokens`, `positions` and `is_prefill` are always set. The other fields are set
    only if a policy names them in `required_stats`, else None. Each row's first
    `num_tokens` queries are real. The sums leave out padding; arrays with a T axis hold
    arbitrary values there.

    Attributes:
      num_tokens: real queries per row.
      positions: position of each query.
      is_prefill: whether the tokens are a prompt's, not generated ones; a Python bool.
      attn_sum: attention weights summed over the queries, averaged over G.
      attn_sq_sum: weights averaged over G, squared, and summed over the queries.
      last_attn: the last real query's weights, averaged over G; zero in rows without
        one.
      attn_weights: all the weights. No fused kernel returns them, and they take T * G
        times the memory of `attn_sum`.
      queries: the queries as attention sees them.
      pre_rope_queries: the queries before rotary positions are applied.
      output_norm: for each new pair, the L1 norm of its value's contribution to the
        residual stream (`LayerOps.value_contribution`), mean over G.
      tokens: the ids of the new tokens.
      hidden: input of attention, after the norm (`LayerOps.hidden`).
    """

    num_tokens: Int[Array, "B"] | None = None
    positions: Int[Array, "B T"] | None = None
    is_prefill: bool = True
    attn_sum: Float[Array, "B K C"] | None = None
    attn_sq_sum: Float[Array, "B K C"] | None = None
    last_attn: Float[Array, "B K C"] | None = None
    attn_weights: Float[Array, "B K G T C"] | None = None
    queries: Float[Array, "B K G T D"] | None = None
    pre_rope_queries: Float[Array, "B K G T D"] | None = None
    output_norm: Float[Array, "B K T"] | None = None
    tokens: Int[Array, "B T"] | None = None
    hidden: Float[Array, "B T M"] | None = None


ATTENTION_STATS = frozenset({"attn_sum", "attn_sq_sum", "last_attn", "attn_weights"})
OBSERVABLE = ATTENTION_STATS | {
    *("queries", "pre_rope_queries", "output_norm", "tokens", "hidden")
}


class Stats(NamedTuple):
    """A policy's statistics of one layer.

    Attributes:
      per_slot: a pytree of arrays [B, K, C, ...] that belong to slots: zero for a new
        pair, and moved with their pairs.
      per_row: a pytree of arrays [B, ...] that belong to rows.
    """

    per_slot: PyTree = ()
    per_row: PyTree = ()
