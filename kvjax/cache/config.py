"""What is kept of a KV cache, and how: parts that are checked and joined."""

import dataclasses

from kvjax.attention import backends
from kvjax.cache import codecs
from kvjax.policies import base
from kvjax.types import ModelSpec, Schedule, UserError

ROOMS = ("reuse", "gather")
ROPES = ("true", "slot")


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What is kept of a KV cache, and how; hashable, a static argument.

    Build it with `make_config`, which checks that the parts fit each other.

    Attributes:
      policy: which pairs stay; None only for the full cache.
      schedule: when pairs go.
      budget: |kv|, pairs per head, one per layer; None only for the full cache.
      codec: how pairs are stored.
      room: how a layer makes room. `reuse` marks victims empty and lets new pairs move
        into their slots; `gather` moves the kept pairs to the front. The same pairs
        stay either way.
      rope: where a key stands for its rotary angle. `true`: where it stood in the text;
        keys are stored rotated. `slot`: where it stands among the pairs kept, counted
        from 0, as StreamingLLM has it (section 3.2); keys are stored as they come and
        rotated at every use, and `room` has to be `gather`, which keeps slots in order.
      rows: rows whose evictions are worked out together while decoding. Rows of a
        ragged batch fill up at different steps; handling only those that are full, a
        few at a time, makes the cost of a row's evictions independent of the others.
      implementation: which attention runs, see `kvjax.attention.backends`; None is the
        best there is.
    """

    policy: base.Policy | None
    schedule: Schedule
    budget: tuple[int, ...] | None
    codec: codecs.Codec = codecs.identity
    room: str = "reuse"
    rope: str = "true"
    rows: int = 4
    implementation: str | None = None

    def needs(self, prompt: bool) -> frozenset[str]:
        """What attention must hand over; nothing once no more evictions come."""
        if not self.policy or not (prompt or self.schedule.evicts_in_decode):
            return frozenset()
        return self.policy.needs

    def prefill_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Slots per layer while prompts of up to `prompt` tokens are read."""
        if self.schedule.evicts_in_prefill:
            return self.budget
        return (prompt if self.schedule.compacts else prompt + new,) * spec.num_layers

    def decode_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Slots per layer while `new` tokens are generated."""
        if self.schedule.evicts_in_decode:
            return self.budget
        if self.schedule.compacts:
            return tuple(budget + new for budget in self.budget)
        return self.prefill_capacity(spec, prompt, new)


def make_config(
    spec: ModelSpec,
    policy: base.Policy | None,
    budget: int | tuple[int, ...] | None,
    schedule: Schedule | None = None,
    **options,
) -> CacheConfig:
    """Checks the parts against each other and joins them.

    Args:
      spec: the model's shape.
      policy: None is the full cache.
      budget: |kv| per head: one int for all layers or one int per layer.
      schedule: None is Batch-Max's Algorithm 1, or the full cache without a policy.
      **options: `codec`, `room`, `rope`, `rows`, `implementation` of `CacheConfig`.
        With `rope="slot"` the default of `room` is `gather`.

    Raises:
      UserError: a budget of 0, not larger than one block, or filled by pinned pairs; a
        number of budgets other than the layers; a policy without a budget; a rule that
        looks at past queries with `rope="slot"`, which turns the keys under them.
    """
    if options.get("rope") == "slot":
        options = {"room": "gather"} | options
    if policy is None:
        schedule = schedule or Schedule("full")
        if schedule.phases != "full" or budget is not None:
            raise UserError(
                "policy=None is the full cache, without a budget and with the schedule "
                f"'full': got budget {budget} and {schedule.phases!r}; name a policy"
            )
        made = CacheConfig(None, schedule, None, **options)
        _check_options(made)
        return made
    schedule = schedule or Schedule()
    if schedule.phases == "full" or budget is None:
        raise UserError(
            f"policy {policy.name!r} needs a budget (got {budget}) and a schedule that "
            f"evicts (got {schedule.phases!r})"
        )
    base.checked(policy)
    budgets = (budget,) * spec.num_layers if isinstance(budget, int) else tuple(budget)
    if len(budgets) != spec.num_layers:
        raise UserError(
            f"{len(budgets)} budgets for the {spec.num_layers} layers of {spec.name}: "
            "give one int, or one per layer"
        )
    for budget in set(budgets):
        check_budget(budget, policy, schedule)
    made = CacheConfig(policy, schedule, budgets, **options)
    _check_options(made)
    return made


def _check_options(made: CacheConfig) -> None:
    """Raises UserError for options that do not exist or exclude each other."""
    backends.check_name(made.implementation)
    if made.room not in ROOMS or made.rope not in ROPES or made.rows < 1:
        raise UserError(
            f"room={made.room!r}, rope={made.rope!r}, rows={made.rows}: room is one of "
            f"{ROOMS}, rope one of {ROPES}, rows at least 1"
        )
    if made.rope == "true":
        return
    if made.room != "gather":
        raise UserError(f"rope='slot' needs room='gather', got {made.room!r}")
    past = made.needs(prompt=True) & {"queries", "raw_queries"}
    if past:
        raise UserError(
            f"rope='slot' moves the keys under past queries, which policy "
            f"{made.policy.name!r} compares with them: use rope='true'"
        )


def check_budget(budget: int, policy: base.Policy, schedule: Schedule) -> None:
    """Raises UserError if the policy cannot work under so small a budget."""
    if budget < 1:
        raise UserError(f"budget {budget}: a head must keep at least 1 pair")
    step = schedule.evict if schedule.evicts_in_decode else 0
    if schedule.evicts_in_prefill:
        if schedule.evict < schedule.block:
            raise UserError(
                f"schedule evict={schedule.evict} makes no room for a block of "
                f"{schedule.block} tokens: raise evict or lower block"
            )
        step = max(step, schedule.block)
    least = least_kept(budget, schedule)
    if budget <= step or least < 0:
        raise UserError(
            f"budget {budget} must be larger than the {step} pairs that one eviction "
            "drops: raise the budget, or lower the schedule's block and evict"
        )
    if policy.pinned and policy.pinned >= max(least, 1):
        raise UserError(
            f"policy {policy.name!r} pins {policy.pinned} pairs, but an eviction at "
            f"budget {budget} leaves {least}: raise the budget or pin fewer"
        )


def least_kept(budget: int, schedule: Schedule) -> int:
    """The fewest pairs per head that an eviction at this budget leaves."""
    if not schedule.evicts_in_decode:
        return budget
    if not schedule.evicts_in_prefill:
        return budget - schedule.evict
    if schedule.evict % schedule.block:
        return budget - schedule.block + 1 - schedule.evict
    return budget // schedule.block * schedule.block - schedule.evict
