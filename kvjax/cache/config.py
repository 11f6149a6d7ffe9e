"""`CacheConfig`: all that a user may say of a KV cache."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.attention import backends
from kvjax.cache import budgets, calibrations, codecs, layouts, sizing
from kvjax.cache import offload as offloading
from kvjax.cache.schedule import Schedule
from kvjax.registry import Named, make, named
from kvjax.types import UserError, build, whole_number

EVICTIONS = ("in_place", "compact")
ROPE_POSITIONS = ("original", "cache")
Spelled = str | Mapping[str, Any] | Named  # a registered name, with options or without


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """All that may be said of a KV cache; hashable, and valid for any model.

    A policy, a budget rule, a codec and a layout may be given as an object, as a
    registered name, as `module:function` of one's own, or as a dict of the name and its
    options: `{"name": "snapkv", "window": 32}`.

    Attributes:
      policy: ranks the cached tokens, see `kvjax.policies`; None is the full cache.
      budget: KV pairs per head: an int for all heads; or for every layer an int or one
        per head; or a share of the longest prompt, as "25%". The full cache ignores it.
      budget_rule: distributes `budget`, then the mean, over layers and heads, see
        `kvjax.cache.budgets`; or what `kvjax.calibrate` returned. None is "uniform"
        for an int. For a share, it is "calibrated" where a calibration of the model's
        weights is known.
      schedule: when pairs are evicted: a `kvjax.Schedule`, the name of its phases, or a
        dict of its fields. None is Batch-Max's Algorithm 1 (`prefill_and_decode`).
      pinned: how many of the first and of the newest pairs of every head are never
        evicted, see `kvjax.policies.protect`. None is what the budget rule asks for:
        (4, 16) under calibrated sizes, which rest on them, and none under others.
      codec: how pairs are stored, see `kvjax.cache.codecs`.
      layout: where pairs lie, see `kvjax.cache.layouts`.
      offload: which values lie in host memory: a `kvjax.Offload`, its `top_n`, or a
        dict of its fields. None is none.
      eviction: how a layer makes room. `in_place` lets new pairs move into the slots of
        evicted ones; `compact` gathers the kept pairs at the front. The same pairs are
        kept either way. None is `compact` where `rope_positions` is "cache", and
        `in_place` elsewhere.
      rope_positions: which position a key is rotated by. `original` is that in the
        text; `cache` is that among the kept pairs, counted from 0 (StreamingLLM,
        section 3.2), and needs `compact`.
      rows_per_eviction: rows whose evictions are computed together while decoding. None
        is an eighth of the batch, at least 4.
      implementation: the attention backend, see `kvjax.attention.backends`; None is the
        first that supports the call.
    """

    policy: policies.Policy | Spelled | None = None
    budget: int | str | Sequence[int | Sequence[int]] | None = 512
    budget_rule: budgets.BudgetRule | calibrations.Calibration | Spelled | None = None
    schedule: Schedule | str | Mapping[str, Any] | None = None
    pinned: tuple[int, int] | None = None
    codec: codecs.Codec | Spelled = "identity"
    layout: layouts.Layout | Spelled = "dense"
    offload: offloading.Offload | int | Mapping[str, Any] | None = None
    eviction: str | None = None
    rope_positions: str = "original"
    rows_per_eviction: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        plain = {
            field: named(field, getattr(self, field))
            for field in ("policy", "budget_rule", "codec", "layout")
        }
        plain["budget"] = _hashable(self.budget)
        plain["schedule"] = _schedule(self.schedule)
        plain["offload"] = offloading.make(self.offload)
        if isinstance(self.pinned, list):
            plain["pinned"] = tuple(self.pinned)
        for field, value in plain.items():
            object.__setattr__(self, field, value)

    def made_policy(self) -> policies.Policy | None:
        """Returns the policy, with the explicitly pinned pairs; None: the full cache.

        Raises:
          UserError: an unknown name, options that it does not take, or no policy.
        """
        policy = _policy(self.policy)
        if policy is None or self.pinned is None:
            return policy
        if np.shape(self.pinned) != (2,):
            raise UserError(
                f"pinned is {self.pinned!r:.80}: give two numbers, of first and newest "
                "pairs, such as (4, 16)"
            )
        return policies.protect(policy, *self.pinned) if any(self.pinned) else policy

    def made_rule(self) -> budgets.BudgetRule | calibrations.Calibration | None:
        """Returns the budget rule; None where none is named.

        Raises:
          UserError: an unknown name, options that it does not take, or no rule.
        """
        rule = self.budget_rule
        if rule is None or isinstance(rule, calibrations.Calibration):
            return rule
        return make(budgets.make, rule)

    def made_codec(self) -> codecs.Codec:
        """Returns the codec.

        Raises:
          UserError: an unknown name, options that it does not take, or no codec.
        """
        return make(codecs.make, self.codec)

    def made_layout(self) -> layouts.Layout:
        """Returns the layout.

        Raises:
          UserError: an unknown name, options that it does not take, or no layout.
        """
        return make(layouts.make, self.layout)

    def check(self) -> None:
        """Checks what can be checked without a model.

        Raises:
          UserError: an unknown name; options that the named factory does not take; a
            budget that is too small for the policy and the schedule.
        """
        self.made_codec()
        self.made_layout()
        self.options()
        policy, rule = self.made_policy(), self.made_rule()
        if policy is None:
            return
        if isinstance(self.budget, str):  # sizes follow from the prompts
            sizing.share(self.budget)
            return
        sizes = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        if sizes == (None,) or isinstance(rule, calibrations.Calibration):
            return
        for size in budgets.possible(rule or budgets.uniform(), sizes):
            sizing.check_budget(size, policy, self.schedule or Schedule())

    def options(self) -> dict[str, Any]:
        """Returns the fields that a `CacheSpec` takes as they are, checked.

        Raises:
          UserError: options that do not exist or exclude each other.
        """
        backends.check_name(self.implementation)
        rope, rows = self.rope_positions, self.rows_per_eviction
        eviction = self.eviction or ("compact" if rope == "cache" else "in_place")
        if rows is not None:
            whole_number("rows_per_eviction", rows, 1)
        if eviction not in EVICTIONS or rope not in ROPE_POSITIONS:
            raise UserError(
                f"eviction={eviction!r}, rope_positions={rope!r}: eviction is one of "
                f"{EVICTIONS}, rope_positions one of {ROPE_POSITIONS}"
            )
        if rope == "cache" and eviction != "compact":
            raise UserError(
                f"rope_positions='cache' needs eviction='compact', got {eviction!r}"
            )
        return {
            "eviction": eviction,
            "rope_positions": rope,
            "rows_per_eviction": rows,
            "implementation": self.implementation,
        }


def _hashable(budget: Any) -> Any:
    """Returns a budget with lists and arrays as tuples."""
    if isinstance(budget, str) or not np.iterable(budget):
        return budget
    return tuple(map(_hashable, budget))


def _policy(policy: Any) -> policies.Policy | None:
    if isinstance(policy, Named):
        return make(policies.make, policy)
    if policy is None or isinstance(policy, policies.Policy):
        return policy
    name = getattr(policy, "__name__", None)
    hint = f"call it, as in policies.{name}()" if callable(policy) else "or a name"
    raise UserError(
        f"policy is {name or policy!r:.80}: give one of kvjax.policies, {hint}"
    )


def _schedule(schedule: Any) -> Schedule | None:
    if isinstance(schedule, str):
        return Schedule(schedule)
    if isinstance(schedule, Mapping):
        return build(Schedule, schedule, "schedule")
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    raise UserError(
        f"schedule is {schedule!r:.80}: give a kvjax.Schedule, such as "
        "Schedule('after_prefill', prefill_chunk=64)"
    )
