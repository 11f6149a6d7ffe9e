"""Which key-value pairs stay: eviction rules as pure functions over arrays.

A rule needs no model and no cache of ours::

    from kvjax import policies
    from kvjax.types import Observation, View

    policy = policies.average_attention()
    stats = policy.init(spec, B, C)             # spec: num_kv_heads, group, head_dim
    view = View(pos, now, keep, keys=lambda: k, values=lambda: v)
    stats = policy.observe(stats, view, Observation(mass=weights_summed, n=n))
    gone = policies.evictions(policy.score(stats, view), pos, drop)   # bool [B, K, C]
"""

from kvjax.policies.base import Policy, checked, evictions, protect, stateless
from kvjax.policies.keys import key_diff
from kvjax.policies.mass import average_attention, h2o
from kvjax.policies.recency import random, recency, streaming
from kvjax.types import UserError

_REGISTRY = {
    factory.__name__: factory
    for factory in (average_attention, h2o, key_diff, random, recency, streaming)
}


def names() -> tuple[str, ...]:
    """The registered policies, in alphabetical order."""
    return tuple(sorted(_REGISTRY))


def make(name: str, **options) -> Policy:
    """The policy of that name, e.g. `make('streaming', sinks=8)`.

    Raises:
      UserError: an unknown name, or an option that the policy does not have.
    """
    if name not in _REGISTRY:
        raise UserError(f"policy {name!r} is unknown: use one of {', '.join(names())}")
    try:
        return _REGISTRY[name](**options)
    except TypeError as error:
        raise UserError(f"policy {name!r}: {error}") from None


__all__ = [
    "Policy",
    "average_attention",
    "checked",
    "evictions",
    "h2o",
    "key_diff",
    "make",
    "names",
    "protect",
    "random",
    "recency",
    "stateless",
    "streaming",
]
