"""Prefill passes that several methods of a sweep share, layer by layer.

A method is a `CacheSpec`. Methods that evict only once the whole prompt is in read it
with the full cache, so one pass serves all of them: it collects the statistics of all
their policies, and each method then evicts from a copy of the full cache.
"""

import dataclasses
import math
from collections.abc import Iterable

from kvjax.cache.spec import CacheSpec
from kvjax.engine import layerwise
from kvjax.engine.compiled import tree_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.layerwise import LayerByLayer
from kvjax.engine.runner import Prefilled, Prompts
from kvjax.policies import joint
from kvjax.types import Model


class PrefillCache:
    """Reads prompts for any of its methods, and keeps the passes that can be shared.

    Args:
      model: its weights stay on their devices.
      methods: all that runners will be asked for.
      held_bytes: limit of the passes kept; prompts beyond it are read again for every
        method.

    Raises:
      UserError: see `layerwise.check`.
    """

    def __init__(
        self,
        model: Model,
        methods: Iterable[CacheSpec],
        held_bytes: float = math.inf,
    ):
        methods = list(methods)
        for config in methods:
            layerwise.check(config)
        self.model = model._replace(params=layerwise.committed(model.params))
        sharing = (config.policy for config in methods if can_share(config))
        self._policies = tuple(dict.fromkeys(sharing))
        self._kept: dict[tuple, Prefilled] = {}
        self._left = held_bytes

    def runner(self, job: Job) -> LayerByLayer:
        """Returns a runner that prefills through this cache."""
        return LayerByLayer(self.model, job, self.prefill)

    def prefill(self, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
        """Returns the prompts read and compressed, with slots for `new` more tokens."""
        if can_share(config) or _stores_after_prompt(config):
            found = self._shared(config, prompts, new)
        else:
            found = layerwise.prefill(self.model, config.reading, prompts, new)
        return layerwise.compact(self.model, config, found, prompts, new)

    def _shared(self, config: CacheSpec, prompts: Prompts, new: int) -> Prefilled:
        """Returns the full cache, with the statistics of this method's policy."""
        full = dataclasses.replace(config.reading, **layerwise.FULL_CACHE)
        key = full, new, *map(tuple, prompts)
        found = self._kept.get(key)
        if found is None:
            every = joint.combine(self._policies) if config.policy else None
            full = dataclasses.replace(full, policy=every)
            found = layerwise.prefill(self.model, full, prompts, new)
            size = tree_bytes(found)
            if size <= self._left:
                self._left -= size
                self._kept[key] = found
        if not config.policy:
            return found
        index = self._policies.index(config.policy)
        stats = tuple(joint.member_stats(stats, index) for stats in found.state.stats)
        return found._replace(state=found.state.replace(stats=stats))


def can_share(config: CacheSpec) -> bool:
    """Returns whether a method with a policy can share its prefill pass.

    It reads with the full cache and uniform heads, does not move keys, and its policy
    is identified by name alone. A learned policy is not: two of one name may have other
    weights.
    """
    if config.policy is None or config.policy.params is not None:
        return False
    uniform = all(isinstance(sizes, int) for sizes in config.budget)
    after = config.schedule.phases == "after_prefill"
    return after and uniform and config.rope_positions == "original"


def _stores_after_prompt(config: CacheSpec) -> bool:
    """Returns whether it reads with the full cache, which a codec encodes later."""
    return config.policy is None and config.codec.after_prompt
