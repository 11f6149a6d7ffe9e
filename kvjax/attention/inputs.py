"""The arguments of attention: queries, KV pairs and static options."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvjax.attention.stored import Tensor
from kvjax.types import Scoring, Struct, static_field


class Queries(NamedTuple):
    """The queries of one attention call.

    Attributes:
      q: queries, with rotary positions applied.
      positions: position of each query.
      n: number of real queries per row; the rest of the T are padding at the end.
    """

    q: Float[Array, "B K G T D"]
    positions: Int[Array, "B T"]
    n: Int[Array, "B"]


class Pairs(NamedTuple):
    """The KV pairs that queries attend to, one per slot.

    Attributes:
      k: keys; decoded, or as their codec stores them.
      v: values, likewise; None where only weights or statistics are computed.
      positions: position of each slot's pair, -1 for an empty slot.
    """

    k: Tensor
    v: Tensor | None
    positions: Int[Array, "B K C"]


class AttentionSpec(Struct):
    """The static options of attention: a pytree without leaves, and hashable.

    Attributes:
      stats: statistics of the weights to return, see `kvjax.types.Observation`; names
        outside `ATTENTION_STATS` are ignored, the caller computes them.
      implementation: name of a backend of `kvjax.attention.backends`; None chooses the
        fastest that can run.
      scoring: soft cap on the logits, and sliding window of a query.
    """

    stats: frozenset[str] = static_field(default=frozenset())
    implementation: str | None = static_field(default=None)
    scoring: Scoring = static_field(default=Scoring())


class Unsupported(Exception):
    """Raised by a backend that cannot run; the message is the reason.

    Attributes:
      warn: whether to report it once per process when another backend runs instead.
    """

    def __init__(self, reason: str, warn: bool = False) -> None:
        super().__init__(reason)
        self.warn = warn
