"""When pairs go."""

import dataclasses

from kvjax.types import UserError, whole_number

CHUNK = 64
PHASES = (
    "none",
    "prefill_and_decode",
    "prefill_only",
    "after_prefill",
    "decode_only",
)
FIRST_CHUNKS = "remainder", "budget"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When pairs are evicted.

    phases:
      `none`  never: the full cache (FKV).
      `prefill_and_decode`  Batch-Max, Algorithm 1: the first |kv| tokens fill the
        budget; from then on, whenever a row's pairs and the incoming tokens would
        exceed it, all but |kv| - `evict_size` pairs per head go first.
      `prefill_only`  the same while the prompt is read, and never again: what is
        decoded stays. EasyKV's way of encoding.
      `after_prefill`  one compaction to the budget once the whole prompt is in; what is
        decoded stays. SnapKV's schedule.
      `decode_only`  full prefill, one compaction to `budget - evict_size`, then
        likewise whenever the budget is full. With a budget of 2,
        `evict_size=1` and the recency policy this is Batch-Max's ED (Algorithm 2: only
        the newest pair is kept).

    prefill_chunk: prompt tokens per prefill step (p). None is `CHUNK`, or less where
      prefill evicts under a small budget: the largest power of two in half of it.
    evict_size: pairs per head that one eviction drops (p in Algorithm 1). None is
      `prefill_chunk` where prefill evicts, and else what that would be.
    first_chunk: how many tokens come first where prefill evicts. `remainder`: so many
      that blocks of p fill |kv| exactly, |kv| mod p. `budget`: |kv| at once, as
      Algorithm 1 is printed (min(s, |kv|) of s tokens). Both evict at the same tokens;
      a long block takes temporaries of its own, and its program twice as long to
      compile.
    """

    phases: str = "prefill_and_decode"
    prefill_chunk: int | None = None
    evict_size: int | None = None
    first_chunk: str = "remainder"

    def __post_init__(self):
        if self.phases not in PHASES:
            raise UserError(
                f"schedule phases {self.phases!r} is unknown: use one of "
                + ", ".join(PHASES)
            )
        if self.first_chunk not in FIRST_CHUNKS:
            raise UserError(
                f"schedule first_chunk {self.first_chunk!r} is unknown: use one of "
                + ", ".join(FIRST_CHUNKS)
            )
        for name in ("prefill_chunk", "evict_size"):
            if (size := getattr(self, name)) is not None:
                whole_number(f"schedule {name}", size, 1)

    def of_budget(self, budget: int | None) -> "Schedule":
        """The schedule with sizes chosen where it has none; |kv| None is all pairs."""
        if budget is not None:
            budget = whole_number("budget", budget)
        chosen = CHUNK if budget is None else min(CHUNK, _power_of_two(budget // 2))
        chunk, evict = self.prefill_chunk, self.evict_size
        if self.evicts_in_prefill:
            chunk = chunk or min(chosen, evict or chosen)
            evict = evict or chunk
        return dataclasses.replace(
            self, prefill_chunk=chunk or CHUNK, evict_size=evict or chosen
        )

    @property
    def evicts_in_prefill(self) -> bool:
        return self.phases in ("prefill_and_decode", "prefill_only")

    @property
    def evicts_in_decode(self) -> bool:
        return self.phases in ("prefill_and_decode", "decode_only")

    def evicts(self, is_prefill: bool) -> bool:
        """Whether it does so then: while a prompt is read, or while decoding."""
        return self.evicts_in_prefill if is_prefill else self.evicts_in_decode

    @property
    def evicts_again(self) -> bool:
        """Whether evictions come as budgets fill, each leaving room for more."""
        return self.evicts_in_prefill or self.evicts_in_decode

    @property
    def compacts(self) -> bool:
        """Whether the state changes its capacity between prefill and decode."""
        return self.phases in ("prefill_only", "after_prefill", "decode_only")


def _power_of_two(most: int) -> int:
    """The largest that is at most `most`; 1 below that."""
    return 1 << max(most.bit_length() - 1, 0)
