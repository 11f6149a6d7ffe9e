"""When pairs go."""

import dataclasses

from kvjax.types import UserError

PHASES = ("none", "prefill_and_decode", "after_prefill", "decode_only")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When pairs are evicted.

    phases:
      `none`  never: the full cache (FKV).
      `prefill_and_decode`  whenever a row's pairs and the incoming tokens would exceed
        the budget, `evict_size` pairs per head go first. Batch-Max, Algorithm 1.
      `after_prefill`  one compaction to the budget once the whole prompt is in; what is
        decoded stays. SnapKV's schedule.
      `decode_only`  full prefill, one compaction to `budget - evict_size`, then
        `evict_size` pairs per head go whenever the budget is full. With a budget of 2,
        `evict_size=1` and the recency policy this is Batch-Max's ED (Algorithm 2: only
        the newest pair is kept).

    prefill_chunk: prompt tokens per prefill step (p).
    evict_size: pairs per head that one eviction drops (p in Algorithm 1).
    """

    phases: str = "prefill_and_decode"
    prefill_chunk: int = 64
    evict_size: int = 64

    def __post_init__(self):
        if self.phases not in PHASES:
            raise UserError(
                f"schedule phases {self.phases!r} is unknown: use one of "
                + ", ".join(PHASES)
            )
        for name in ("prefill_chunk", "evict_size"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"schedule {name}={getattr(self, name)} must be at least 1"
                )

    @property
    def evicts_in_prefill(self) -> bool:
        return self.phases == "prefill_and_decode"

    @property
    def evicts_in_decode(self) -> bool:
        return self.phases in ("prefill_and_decode", "decode_only")

    @property
    def compacts(self) -> bool:
        """Whether the state shrinks between prefill and decode."""
        return self.phases in ("after_prefill", "decode_only")
