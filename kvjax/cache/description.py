"""A stable text of a cache configuration, to tell in a file what it was made under.

Functions have no text of their own, so a policy is described by its name and by the
options that its functions were made with.
"""

import dataclasses
import functools
import hashlib
import inspect
from typing import Any

import jax
import numpy as np

from kvjax.cache.codecs import Codec
from kvjax.cache.spec import CacheSpec
from kvjax.policies import Policy
from kvjax.policies.base import LayerParams

_OPTION = (bool, int, float, str, type(None))


def describe(config: CacheSpec) -> dict[str, str]:
    """Returns texts by field, equal for configurations that keep the same pairs.

    Fields that only change the speed are left out. So are the sizes of heads that a
    budget rule sets by what it measures in each prompt.
    """
    rule = config.budget_rule
    budget = "measured" if config.measures else str(config.budget)
    codecs = config.layer_codecs or (config.codec,)
    return {
        "policy": _of_policy(config.policy),
        "budget": budget,
        "budget_rule": rule.name if rule else "None",
        "schedule": ", ".join(map(str, dataclasses.astuple(config.schedule))),
        "codec": "; ".join(dict.fromkeys(map(_of_codec, codecs))),
        "layout": config.layout.name,
        "eviction": config.eviction,
        "rope_positions": config.rope_positions,
        "windows": str(config.windows),
    }


def _of_policy(policy: Policy | None) -> str:
    if policy is None:
        return "None"
    return f"{policy.name}({', '.join(sorted(_options(policy)))})"


def _of_codec(codec: Codec) -> str:
    text = f"{codec.name} (keys: {codec.key.name}; values: {codec.value.name}"
    more = codec.residual_length, codec.sinks, codec.after_prompt
    return text + (f"; {', '.join(map(str, more))})" if any(more) else ")")


def _options(policy: Policy) -> set[str]:
    """Returns `name=value` of every option that a policy's functions hold."""
    found, left, seen = set(), _held(policy, ""), []
    while left:
        name, value = left.pop()
        if isinstance(value, _OPTION):
            found.add(f"{name}={value}")
        elif isinstance(value, np.ndarray | jax.Array):
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes())
            found.add(f"{name}={digest.hexdigest()[:16]}")
        elif not any(value is other for other in seen):
            seen.append(value)  # a function may hold itself
            left += _held(value, name)
    return found


def _held(value: Any, name: str) -> list[tuple[str, Any]]:
    """Returns what a policy, a container, an object or a function holds, with names."""
    if isinstance(value, Policy):
        functions = [("", each) for each in (value.init, value.observe, value.score)]
        inner = [(name, value.name)] if name else []
        return [*inner, *functions, *([("", value.params)] if value.params else [])]
    if isinstance(value, LayerParams):
        leaves = enumerate(jax.tree.leaves(value.layers))
        return [(f"weights{i}", leaf) for i, leaf in leaves]
    if isinstance(value, functools.partial):
        arguments = [(name, each) for each in value.args]
        return [("", value.func), *arguments, *value.keywords.items()]
    if isinstance(value, dict):
        return [(str(key), each) for key, each in value.items()]
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, tuple | list):
        return [(f"{name}{i}", each) for i, each in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(value):
        return list(inspect.getclosurevars(value).nonlocals.items())
    return []
