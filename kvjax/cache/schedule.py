"""Schedules: at which steps of prefill and decode KV pairs are evicted."""

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
    """Decides at which steps pairs are evicted, and how many at a time.

    phases:
      `none`  never evicts: the full cache (FKV).
      `prefill_and_decode`  Batch-Max, Algorithm 1: the first |kv| tokens fill the
        budget. From then on, whenever a row's pairs and the incoming tokens would
        exceed it, all but |kv| - `evict_size` pairs per head are evicted first.
      `prefill_only`  the same during prefill, and no eviction in decode: generated
        tokens are all kept. This is how EasyKV encodes a prompt.
      `after_prefill`  one compaction to the budget once the whole prompt is read;
        generated tokens are all kept. SnapKV's schedule.
      `decode_only`  full prefill, one compaction to `budget - evict_size`, and the same
        again whenever the budget is full. With a budget of 2, `evict_size=1` and the
        recency policy this is Batch-Max's ED (Algorithm 2: only the newest pair is
        kept).

    prefill_chunk: prompt tokens per prefill step (p). None is `CHUNK`; where prefill
      evicts, it is the largest power of two within half of the budget, but no more than
      `CHUNK` or `evict_size`.
    evict_size: pairs per head that one eviction drops (p in Algorithm 1). None is
      `prefill_chunk` where prefill evicts, else the default of `prefill_chunk` under
      eviction.
    first_chunk: tokens of the first step where prefill evicts. `remainder` is
      |kv| mod p, so that blocks of p then fill |kv| exactly. `budget` is |kv|, as
      Algorithm 1 is printed (min(s, |kv|) of s tokens). Both evict at the same tokens;
      `budget` needs temporaries for a longer block, and takes twice as long to compile.
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
        """Returns the schedule with its default sizes filled in for a budget of |kv|.

        None is the full cache.
        """
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
        """True if pairs are evicted while the prompt is read."""
        return self.phases in ("prefill_and_decode", "prefill_only")

    @property
    def evicts_in_decode(self) -> bool:
        """True if pairs are evicted while tokens are generated."""
        return self.phases in ("prefill_and_decode", "decode_only")

    def evicts(self, is_prefill: bool) -> bool:
        """Returns whether pairs are evicted in prefill, or else in decode."""
        return self.evicts_in_prefill if is_prefill else self.evicts_in_decode

    @property
    def evicts_again(self) -> bool:
        """True if pairs are evicted each time a budget is full, not only once."""
        return self.evicts_in_prefill or self.evicts_in_decode

    @property
    def compacts(self) -> bool:
        """True if the cache changes its capacity between prefill and decode."""
        return self.phases in ("prefill_only", "after_prefill", "decode_only")


def _power_of_two(most: int) -> int:
    """Returns the largest power of two up to `most`, at least 1."""
    return 1 << max(most.bit_length() - 1, 0)
