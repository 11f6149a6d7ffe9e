"""Attention to a frozen prefix: held once, and shared by all rows that go on after it.

::

    prefix     row 0                row 1              ...    S rows of KV pairs
    rows       0, ..., R - 1        R, ..., 2 R - 1    ...    S groups of R rows
    queries    [S R, K, G, T, D] -> [S, K, G, R T, D]

The queries of a group's rows are folded into the axis of new tokens, so that any
attention backend reads the prefix's pairs once for all of them. `attention.merge` joins
the result with each row's attention to its own pairs. The prefix may be compressed,
with another codec, layout and number of pairs per head than the rows have.
"""

import dataclasses

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.attention import AttentionSpec, Queries
from kvjax.cache import head_groups
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.parallel import axes
from kvjax.types import Partial, PyTree, Scoring, Stats, Struct, UserError, static_field


class Prefix(Struct):
    """S prefixes, each shared by a group of rows; nothing is appended or evicted.

    Attributes:
      state: their KV pairs, S rows, as `prefill` and `compact` return them.
      config: the configuration that they were read and compressed under.
    """

    state: KVState
    config: CacheSpec = static_field()

    @property
    def groups(self) -> int:
        """Returns S, the number of prefixes."""
        return self.state.next_pos.shape[0]

    def frozen(self) -> "Prefix":
        """Returns the prefixes without the policy's statistics and measurements."""
        none = (Stats(),) * len(self.state.layers)
        return self.replace(state=self.state.replace(stats=none, measured=None))

    def of_layer(self, index: int) -> "Prefix":
        """Returns the prefixes of one layer, without the policy's statistics."""
        return self.replace(state=self.state.of_layer(index)).frozen()


def rows_config(config: CacheSpec) -> CacheSpec:
    """Returns the configuration of the rows' own pairs: the full cache.

    The codec, the layout and the attention backend are those of the prefix.

    Args:
      config: the configuration of the prefix.
    """
    return dataclasses.replace(
        config,
        policy=None,
        schedule=Schedule("none").of_budget(None),
        budget=None,
        budget_rule=None,
        mean_budget=None,
        eviction="in_place",
        rows_per_eviction=None,
    )


def after(prefix: Prefix, state: KVState) -> KVState:
    """Returns empty rows, group by group, whose next token follows their prefix."""
    rows = len(state.next_pos) // prefix.groups
    start = jnp.repeat(prefix.state.next_pos, rows)
    return state.replace(next_pos=axes.constrain(start, "batch"))


def check(config: CacheSpec, own: CacheSpec) -> None:
    """Checks that rows of one configuration can go on after a prefix of another.

    Args:
      config: the configuration of the prefix.
      own: the configuration of the rows' own pairs.

    Raises:
      UserError: the rows evict; either part rotates keys by their place in the cache,
        or keeps values in host memory.
    """
    if own.policy:
        raise UserError(
            f"rows that share a prefix keep all of their own pairs, and policy "
            f"{own.policy.name!r} evicts some: give policy=None for the rows; the "
            "prefix may have a policy"
        )
    for name, each in (("prefix", config), ("rows", own)):
        if each.rope_positions != "original":
            raise UserError(
                f"the {name} of a shared prefix cannot have rope_positions="
                f"{each.rope_positions!r}: the prefix's keys would move as rows grow; "
                "use 'original'"
            )
        if each.offload is not None:
            raise UserError(
                f"the {name} of a shared prefix cannot keep values in host memory "
                f"({each.offload}): leave offload out"
            )


def check_groups(prefix: Prefix, rows: int) -> None:
    """Raises UserError unless the rows divide into the groups, on every device."""
    groups = prefix.groups
    if rows % groups:
        raise UserError(
            f"{rows} rows do not divide over {groups} prefixes: give a multiple of "
            f"{groups} rows"
        )
    over = axes.mesh()
    if over is None:
        return
    head_groups.check_split(prefix.config.budget, over.shape[axes.HEADS])
    if groups > 1 and groups % over.shape[axes.DATA]:
        raise UserError(
            f"{groups} prefixes do not divide over the {over.shape[axes.DATA]} groups "
            "of devices that the mesh's data axis makes: give one prefix, or a multiple"
        )


def partitions(prefix: Prefix) -> PyTree:
    """Returns the mesh axes of every array of one layer, as `PartitionSpec`s.

    Groups lie on the devices of their rows. A single prefix is on all of them.
    """
    state, by_row = prefix.state, axes.DATA if prefix.groups > 1 else None

    def split(layer):
        found = state.layout.partition(layer)
        if by_row:
            return found
        whole = lambda names: (None if name == axes.DATA else name for name in names)
        return jax.tree.map(lambda names: PartitionSpec(*whole(names)), found)

    made = state.replace(
        layers=tuple(map(split, state.layers)),
        stats=jax.tree.map(lambda _: PartitionSpec(by_row), state.stats),
        next_pos=PartitionSpec(by_row),
        error=PartitionSpec(by_row, axes.HEADS),
    )
    return prefix.replace(state=made)


def attend(
    prefix: Prefix,
    index: int,
    q: Float[Array, "B K G T D"],
    positions: Int[Array, "B T"],
    scoring: Scoring,
) -> Partial:
    """Attends to one layer of the prefixes with the queries of all their rows.

    Args:
      prefix: S prefixes.
      index: the layer's index in the prefix's state.
      q: queries of B = S R rows, group by group, with rotary positions.
      positions: of the queries.
      scoring: soft cap and window of the attention logits.
    """
    groups, length, config = prefix.groups, q.shape[3], prefix.config
    folded = rearrange(q, "(s r) k g t d -> s k g (r t) d", s=groups)
    here = positions.reshape(groups, -1)
    n = jnp.full((groups,), here.shape[1], jnp.int32)
    options = AttentionSpec(implementation=config.implementation, scoring=scoring)
    found, heads_of = [], []
    for place, heads in prefix.state.head_groups(index):
        heads = head_groups.local_heads(heads, q.shape[1])
        queries = Queries(head_groups.take(folded, heads), here, n)
        layer = prefix.state.layers[place]
        found.append(config.layout.attend(layer, queries, options, None)[0])
        heads_of.append(heads)

    def whole(*parts):
        x = head_groups.concatenate(parts, heads_of)
        return rearrange(x, "s k g (r t) ... -> (s r) k g t ...", t=length)

    return jax.tree.map(whole, *found)
