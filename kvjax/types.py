"""The shared vocabulary: axis letters, specs, and what the parts hand each other.

Axis letters, used in every signature and comment of the package:

    B rows          K KV heads                    C slots (capacity of a layer)
    T new tokens    G query heads per KV head     M model dim
    L layers        D head dim                    F feed-forward dim, V vocabulary

A *slot* is a place for one key-value pair. It is empty when its position is -1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

PyTree = Any
EMPTY = -1  # the position of an empty slot


class UserError(ValueError):
    """A mistake in what was asked for: the message names the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer; hashable, so jit can take it static.

    The policies need only `num_kv_heads`, `group` and `head_dim` of it.
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
    tied_head: bool

    @property
    def group(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Model(NamedTuple):
    """A loaded model: what `kvjax.load` returns.

    Attributes:
      spec: the shape.
      params: weights, see `kvjax.models.llama`.
      tokenizer: a `transformers.PreTrainedTokenizerFast` with its chat template,
        or None for a model that has none (random weights).
    """

    spec: ModelSpec
    params: PyTree
    tokenizer: Any


PHASES = ("full", "prefill+decode", "after_prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When pairs are evicted.

    phases:
      `full`            never: the full cache (FKV).
      `prefill+decode`  whenever a row's pairs and the incoming tokens would exceed the
                        budget, `evict` pairs per head go first. Batch-Max, Algorithm 1.
      `after_prefill`   one compaction to the budget once the whole prompt is in; what
                        is decoded stays. SnapKV's schedule.
      `decode`          full prefill, one compaction to `budget - evict`, then `evict`
                        pairs per head go whenever the budget is full. With a budget of
                        2, `evict=1` and the recency policy this is Batch-Max's ED
                        (Algorithm 2: only the newest pair is kept).

    block: prompt tokens per prefill step (p).
    evict: pairs per head that one eviction drops (p in Algorithm 1).
    """

    phases: str = "prefill+decode"
    block: int = 64
    evict: int = 64

    def __post_init__(self):
        if self.phases not in PHASES:
            raise UserError(
                f"schedule phases {self.phases!r} is unknown: use one of "
                + ", ".join(PHASES)
            )
        for name in ("block", "evict"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"schedule {name}={getattr(self, name)} must be at least 1"
                )

    @property
    def evicts_in_prefill(self) -> bool:
        return self.phases == "prefill+decode"

    @property
    def evicts_in_decode(self) -> bool:
        return self.phases in ("prefill+decode", "decode")

    @property
    def compacts(self) -> bool:
        """Whether the state shrinks between prefill and decode."""
        return self.phases in ("after_prefill", "decode")


class Partial(NamedTuple):
    """Attention over one segment of the keys, before the division.

    `o / l` is the segment's attention output; segments merge associatively, see
    `kvjax.attention.merge`.

    Attributes:
      o: sum of exp(score - m) * value, float32.
      m: largest score, -inf where no key is visible.
      l: sum of exp(score - m).
    """

    o: Float[Array, "B K G T D"]
    m: Float[Array, "B K G T"]
    l: Float[Array, "B K G T"]  # noqa: E741


class View(NamedTuple):
    """What a policy may see of one layer.

    Attributes:
      pos: position of the pair in each slot, -1 where the slot is empty.
      now: position of the newest token that the row has seen.
      keep: pairs per head that stay after the choice being made; in `observe`, the
        pairs per head that are live.
      keys: returns the keys as attention sees them; call it only if needed, stored
        keys may have to be decoded first.
      values: the same for the values.
    """

    pos: Int[Array, "B K C"]
    now: Int[Array, "B"]
    keep: Int[Array, "B"]
    keys: Callable[[], Float[Array, "B K C D"]]
    values: Callable[[], Float[Array, "B K C D"]]


class Observation(NamedTuple):
    """What one attention call saw; only the parts a policy `needs`, the others None.

    Padding queries count nowhere.

    Attributes:
      mass: attention weights summed over the call's queries, averaged over G.
      n: queries of each row that were real.
    """

    mass: Float[Array, "B K C"] | None = None
    n: Int[Array, "B"] | None = None


OBSERVABLE = frozenset({"mass"})  # what a policy may list in `needs`
