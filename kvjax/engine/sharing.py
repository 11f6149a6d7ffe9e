"""Which methods may share one reading of a prompt, or one program that writes."""

import dataclasses

from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec

_NO_BUDGET = dict.fromkeys(("policy", "budget", "budget_rule", "mean_budget"))


def reading(config: CacheSpec) -> CacheSpec:
    """How prompts are read, for all that keep them whole until they are in."""
    return dataclasses.replace(config.reading, **_NO_BUDGET)


def watches_late(config: CacheSpec) -> bool:
    """Whether others can watch the same reading.

    The prompt is read as if the cache were full and all heads alike, keys stay in
    place, and what the rule does is known by its name: two with other weights look the
    same.
    """
    late = config.schedule.phases == "after_prefill"
    alone = config.policy is None or config.policy.params is not None
    alone = alone or not all(isinstance(sizes, int) for sizes in config.budget)
    return late and not alone and config.rope_positions == "original"


def stored_later(config: CacheSpec) -> bool:
    """Whether it is the full cache while the prompt is read, whatever it is then."""
    return config.policy is None and config.codec.after_prompt


def without_watching(config: CacheSpec) -> CacheSpec:
    """Without the policy, where nothing will be evicted any more.

    All such methods then run the same program.
    """
    if config.schedule.evicts_in_decode or config.policy is None:
        return config
    schedule = Schedule("none", config.schedule.prefill_chunk)
    return dataclasses.replace(config, schedule=schedule, **_NO_BUDGET)
