"""The shared vocabulary: axis letters, specs, and what the parts hand each other.

Axis letters, used in every signature and comment of the package:

    B rows          K KV heads                    C slots (capacity of a layer)
    T new tokens    G query heads per KV head     M model dim
    L layers        D head dim                    F feed-forward dim, V vocabulary

A *slot* is a place for one key-value pair. It is empty when its position is -1.
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


# A field of a `Struct` that jit compiles for: a hashable value, and no leaf.
static_field = functools.partial(dataclasses.field, metadata={"static": True})


@dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, static_field)
)
class Struct:
    """Makes every subclass a frozen dataclass that JAX flattens into its fields."""

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with these fields changed."""
        return dataclasses.replace(self, **changes)


class UserError(ValueError):
    """A mistake in what was asked for: the message names the value and the remedy."""


def build(cls: type, fields: Mapping[str, Any], what: str) -> Any:
    """Returns a dataclass made from its fields by name.

    Raises:
      UserError: a field that the class lacks, or one that is missing; says which, and
        of `what`.
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
    """`value` as an int, be it NumPy's; UserError for another type or out of range."""
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
    """`value` as a float; UserError for text, NaN or what is out of range."""
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
    """How rotary frequencies are stretched for contexts longer than those trained on.

    Attributes:
      kind: none; `linear`, all by `factor`; `llama3`, the slow ones by `factor`, those
        between `low` and `high` turns per `original` tokens partly; `yarn`, likewise
        between `high` and `low` turns, on a line; `longrope`, each by its own of
        `factors`.
      factor: by how much.
      original: tokens of the context trained on.
      low, high: turns in that context, see `kind`.
      factors: one per frequency.
      scale: what cosine and sine are multiplied by.
      rounded: whether yarn's line begins and ends at whole channels.
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

    The policies need only `num_kv_heads`, `queries_per_kv_head` and `head_dim` of it.
    The defaults are Llama's.

    Attributes:
      positions: `rotary`, or `learned`, added to the embeddings.
      rotary_dim: leading channels of a head that rotate; None for all. Of an odd number
        one more does, by that number's frequencies, as in transformers.
      rope: scaling of the rotary frequencies.
      sliding_windows: tokens that each layer's queries see, themselves included; 0
        for all, empty for all in all layers.
      local_rope_theta: base of the frequencies, unscaled, of layers with a window;
        None for the same as the others'.
      norm: `rms`; `rms_offset`, whose weights are added to 1; `layer`, with biases.
      norm_placement: where the norms stand: `pre` and `post` attention and MLP,
        `sandwich` for both, `parallel` for one norm before both at once,
        `parallel_two` for one each.
      final_norm: whether a norm follows the last layer.
      activation: `silu`, `gelu`, `gelu_tanh` or `relu`.
      gated: whether the activation multiplies a second projection.
      biases: of `qkv`, `out`, `mlp`.
      qk_norm: whether queries and keys are normalised head by head.
      query_scale: what products of queries and keys are scaled by; None for
        head_dim ** -0.5.
      attention_softcap, logit_softcap: c of c tanh(x / c); 0 for none.
      embed_scale: of the embeddings.
      embed_dim: of the embeddings; None for the model's.
      experts, experts_per_token: of the MLP, and how many a token goes to; 0 for one
        dense.
      ff_groups: equal parts that the 2 F of `gate_up` come in, each its gate's and
        then its up's; as many as devices split them.
      fingerprint: of the weights that were loaded with it, see
        `kvjax.models.fingerprints`; empty for a shape alone. Not part of the shape:
        specs that differ in it are equal, and share programs.
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
        """Tokens that a layer's queries see; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def scoring(self, layer: int) -> "Scoring":
        """What happens to a layer's scaled products of queries and keys."""
        return Scoring(self.attention_softcap, self.sliding_window(layer))

    @property
    def queries_per_kv_head(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Model(NamedTuple):
    """A loaded model: what `kvjax.load` returns.

    Attributes:
      spec: the shape.
      params: weights, see `kvjax.models.decoder`.
      tokenizer: a `transformers.PreTrainedTokenizerFast` with its chat template,
        or None for a model that has none (random weights).
      end_tokens: ids that end a completion, as far as the checkpoint says; the
        tokenizer's own end token does besides.
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
    """Attention over one segment of the keys, before the division.

    `out / denominator` is the segment's attention output; segments merge associatively,
    see `kvjax.attention.merge`.

    Attributes:
      out: sum of exp(logit - max_logit) * value, float32.
      max_logit: the largest, -inf where no key is visible.
      denominator: sum of exp(logit - max_logit).
    """

    out: Float[Array, "B K G T D"]
    max_logit: Float[Array, "B K G T"]
    denominator: Float[Array, "B K G T"]


class Codes(NamedTuple):
    """Whole numbers, and the scales of N groups of neighbouring channels.

    Attributes:
      codes: int8[B, K, C, D]; of fewer bits uint8[B, K, C, D bits / 8], the first
        channels in the lowest bits, 2^(bits - 1) above the number that is meant.
      scale: the step of every group; NaN if it held anything that is no number.
      centre: the middle of every group; None on a grid around 0.
    """

    codes: Integer[Array, "B K C P"]
    scale: BFloat16[Array, "B K C N"]
    centre: BFloat16[Array, "B K C N"] | None = None


def numbers_of(pairs: Array | Codes) -> Array:
    """What a slot holds of keys or values: the numbers themselves, or their codes."""
    return pairs.codes if isinstance(pairs, Codes) else pairs


class Scoring(NamedTuple):
    """What a layer does to its scaled products before the softmax; static.

    Attributes:
      logits_soft_cap: c of c tanh(x / c); 0 for none.
      local_window: tokens that a query sees, itself included; 0 for all before it.
    """

    logits_soft_cap: float = 0.0
    local_window: int = 0


class LayerOps(NamedTuple):
    """What a model lends the cache for one layer.

    Attributes:
      apply_rope: (x, positions=None) -> x with the layer's rotary angles applied. x is
        [B, ..., T, D]; positions are [B, ..., T] with any of x's leading axes, None for
        those of the tokens being read.
      value_contribution: values [B, K, T, D] -> [B, K, G, T, M], what each would add to
        the residual stream under a weight of 1: the head's part of the output
        projection.
      scoring: what happens to the products of queries and keys.
      hidden: what attention reads, after the input norm.
    """

    apply_rope: Callable[..., Float[Array, "B *H T D"]]
    value_contribution: Callable[[Float[Array, "B K T D"]], Float[Array, "B K G T M"]]
    scoring: Scoring = Scoring()
    hidden: Float[Array, "B T M"] | None = None


class View(NamedTuple):
    """What a policy may see of one layer.

    The functions cost nothing until they are called, and a rule that never calls one
    does without it.

    Attributes:
      positions: position of the pair in each slot, -1 where the slot is empty.
      query_position: position of the newest token that the row has seen.
      num_keep: pairs per head that stay after the choice that `score` is asked for; in
        `observe`, where nothing is chosen, all that are live.
      keys: returns the keys as attention sees them (stored keys may have to be decoded
        first).
      values: the same for the values.
      apply_rope: see `LayerOps`; positions have to be given.
      layer: the layer's index; may be traced, where layers share a program.
      params: this layer's part of `Policy.params`, traced.
      gather_heads: x [B, K, ...] of the heads that this view has -> [B, H, ...] of all
        heads of the layer. Where heads are split over devices it is a collective: a
        rule that calls it says so in `Policy.needs_all_heads`.
      heads: the numbers, in the whole layer, of the heads that this view has; None is
        all of them.
      budget: pairs that each of these heads may hold, |kv|, one static number; None
        where nobody says.
      mean_budget: the same on average over all heads of the model, where they differ.
      scoring: what the layer does to products before the softmax, for rules that make
        attention weights themselves.
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
    """What one attention call over T queries saw.

    `num_tokens`, `positions` and `is_prefill` are always there; of the others only what
    is among a policy's `required_stats`, the rest None. Each row's first `num_tokens`
    queries are real; padding counts nowhere in the sums and holds anything in the
    arrays with a T axis.

    Attributes:
      num_tokens: real queries per row.
      positions: position of each query.
      is_prefill: whether these are a prompt's tokens, rather than generated ones; a
        Python bool.
      attn_sum: attention weights summed over the queries, averaged over G.
      attn_sq_sum: squares of the weights summed over the queries; the weights averaged
        over G first.
      last_attn: the last real query's weights, averaged over G; zero in rows without
        one.
      attn_weights: all the weights. No fused kernel can hand them over: the price is an
        array of T times the size of `attn_sum` times G.
      queries: the queries as attention sees them.
      pre_rope_queries: the queries before rotary positions are applied.
      output_norm: of each new pair, the mean over G of the L1 norm of what its value
        adds to the residual stream (`LayerOps.value_contribution`).
      tokens: the ids of the new tokens.
      hidden: what attention reads, after the input norm (`LayerOps.hidden`).
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
    """What a policy remembers of one layer.

    Attributes:
      per_slot: a pytree of arrays [B, K, C, ...] that belong to slots: they are zero
        for a fresh pair and move with their pairs.
      per_row: a pytree of arrays [B, ...] that belong to rows.
    """

    per_slot: PyTree = ()
    per_row: PyTree = ()
