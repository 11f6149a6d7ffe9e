"""Several policies that observe one prefill, each for itself."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from kvjax.policies.base import Policy
from kvjax.types import Stats


def combine(members: Sequence[Policy]) -> Policy:
    """Combines policies so that one prefill collects the statistics of all of them.

    The result evicts nothing itself; `member_stats` extracts one policy's statistics.
    """
    return Policy(
        init=lambda *shape: _joined(member.init(*shape) for member in members),
        observe=lambda stats, view, observation: _joined(
            member.observe(Stats(*own), view, observation)
            for member, own in zip(members, zip(*stats, strict=True), strict=True)
        ),
        score=lambda stats, view: jnp.zeros(view.positions.shape),
        required_stats=frozenset().union(*(m.required_stats for m in members)),
        name="joint",
    )


def member_stats(stats: Stats, index: int) -> Stats:
    """Returns the statistics of one member of `combine`'s policies."""
    return Stats(stats.per_slot[index], stats.per_row[index])


def _joined(members: Iterable[Stats]) -> Stats:
    return Stats(*zip(*members, strict=True))
