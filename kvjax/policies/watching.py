"""Rules that watch one reading together, each for itself."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from kvjax.policies.base import Policy
from kvjax.types import Stats


def together(members: Sequence[Policy]) -> Policy:
    """Watches as all of them do, keeps nothing; `only` gives each its statistics."""

    return Policy(
        init=lambda *shape: _joined(member.init(*shape) for member in members),
        observe=lambda stats, view, seen: _joined(
            member.observe(Stats(*part), view, seen)
            for member, part in zip(members, zip(*stats, strict=True), strict=True)
        ),
        score=lambda stats, view: jnp.zeros(view.positions.shape),
        required_stats=frozenset().union(*(m.required_stats for m in members)),
        name="together",
    )


def only(stats: Stats, index: int) -> Stats:
    """Those of one member of `together`."""
    return Stats(stats.per_slot[index], stats.per_row[index])


def _joined(parts: Iterable[Stats]) -> Stats:
    return Stats(*zip(*parts, strict=True))
