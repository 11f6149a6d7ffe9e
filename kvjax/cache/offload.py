"""KCache: keys stay on the device, values lie in host memory, and few are fetched.

He and Wu 2024, arXiv 2404.18057. No pair is evicted: every query is compared with all
keys, and only the values with the largest weights cross the link to the device::

    device    q . keys  ->  softmax  ->  top N       weights of the N  ->  output
                                           |               ^
    host                                   +--> values ----+    N of C, for every head

Prefill is exact: a block attends to all values of a layer, which cross the link
together and are not kept on the device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import attention
from kvjax.attention import AttentionSpec, Pairs, Queries
from kvjax.cache.codecs import Codec
from kvjax.cache.layouts.base import first_of
from kvjax.parallel import host
from kvjax.policies import base
from kvjax.types import (
    ModelSpec,
    Observation,
    Partial,
    UserError,
    build,
    real_number,
    whole_number,
)

QUERIES = ("union", "mean")


@dataclasses.dataclass(frozen=True)
class Offload:
    """Settings of values in host memory.

    Attributes:
      top_n: N, pairs per query whose values are fetched: those of the largest weights,
        the newest first among equal ones. The others add nothing to the output.
      device_layers: L, the number of first layers that keep their values on the device.
        The paper says that L has little effect. From its Table 2, where N = 128 scores
        8.49 at L = 0 and 14.25 at L = 1, we infer that 1 is better than 0.
      renormalize: whether the N weights are scaled to sum to 1. The paper states no
        such step. Without it an output lacks the share of the values left out, and we
        found predictions ten times as far off (docs/results/offload.md).
      queries: which pairs G queries of one KV head fetch; the paper does not treat
        this case. `union`: each query selects N pairs, and all attend to the union, up
        to G N. `mean`: the mean of their weights selects N pairs.
      memory_gb: host memory for values, in units of 1e9 bytes; None is half of what is
        free there.
    """

    top_n: int = 64
    device_layers: int = 1
    renormalize: bool = True
    queries: str = "union"
    memory_gb: float | None = None

    def __post_init__(self):
        whole_number("offload top_n", self.top_n, 1)
        whole_number("offload device_layers", self.device_layers, 0)
        if not isinstance(self.renormalize, bool):
            raise UserError(
                f"offload renormalize is {self.renormalize!r}: give True or False"
            )
        if self.queries not in QUERIES:
            raise UserError(
                f"offload queries {self.queries!r} is unknown: use one of "
                + ", ".join(QUERIES)
            )
        if self.memory_gb is not None:
            size = real_number("offload memory_gb", self.memory_gb)
            if size <= 0:
                raise UserError(f"offload memory_gb {size}: must be larger than 0")

    def fetched(self, queries_per_kv_head: int) -> int:
        """Returns the most values that a KV head fetches for one token."""
        return self.top_n * (queries_per_kv_head if self.queries == "union" else 1)


def make(offload: Offload | int | Mapping[str, Any] | None) -> Offload | None:
    """Returns an `Offload`, made of its `top_n` or its fields if need be, or None.

    Raises:
      UserError: something else, or fields that are unknown or out of range.
    """
    if offload is None or isinstance(offload, Offload):
        return offload
    if isinstance(offload, Mapping):
        return build(Offload, offload, "offload")
    return Offload(top_n=whole_number("offload", offload, 1))


def check(offload: Offload, spec: ModelSpec) -> None:
    """Raises UserError if no layer is left to offload, or without host memory."""
    if offload.device_layers >= spec.num_layers:
        raise UserError(
            f"offload device_layers {offload.device_layers}: {spec.name} has "
            f"{spec.num_layers} layers; with all of them on the device nothing is left "
            "to offload"
        )
    host.check()


def codec_of(codec: Codec, layer: int, offload: Offload) -> Codec:
    """Returns the layer's codec, with values in host memory from layer L on."""
    if layer < offload.device_layers:
        return codec
    return codec._replace(value=codec.value._replace(on_host=True))


class Choice(NamedTuple):
    """The pairs whose values are fetched, for every token and KV head.

    Attributes:
      slots: of these pairs, below C.
      valid: False for the entries beyond the live pairs, where these are fewer than N.
      weights: of these pairs for every query; 0 where not valid.
      sums: the partial attention over all pairs, without its output.
      observation: statistics of the weights of all pairs.
    """

    slots: Int[Array, "B K T N"]
    valid: Bool[Array, "B K T N"]
    weights: Float[Array, "B K G T N"]
    sums: Partial
    observation: Observation


def choose(
    queries: Queries, pairs: Pairs, spec: AttentionSpec, offload: Offload
) -> Choice:
    """Selects the pairs of the largest weights, whose values `attended` takes.

    Args:
      queries: queries.
      pairs: keys, with rotary positions; their values are not read.
      spec: statistics of the weights to return, and scoring.
      offload: N, and how queries that share a head select.
    """
    weights, sums, observation = attention.weights(queries, pairs, spec)
    pos = pairs.positions
    selected = _select(weights, sums.denominator, pos, offload)
    most = min(offload.fetched(queries.q.shape[2]), pos.shape[2])
    slots = first_of(selected, most)
    valid = slots < pos.shape[2]
    slots = jnp.where(valid, slots, 0)
    of_all_queries = jnp.broadcast_to(slots[:, :, None], (*weights.shape[:4], most))
    weights = jnp.take_along_axis(weights, of_all_queries, axis=-1)
    weights = jnp.where(valid[:, :, None], weights, 0.0)
    return Choice(slots, valid, weights, sums, observation)


def attended(
    choice: Choice, values: Float[Array, "B K TN D"], offload: Offload
) -> Partial:
    """Returns the attention output of the chosen pairs' values, in `slots` order."""
    values = values.reshape(*choice.slots.shape, -1)
    values = jnp.where(choice.valid[..., None], values, 0)  # empty slots hold anything
    out = jnp.einsum(
        "bkgtn,bktnd->bkgtd",
        choice.weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    sums = choice.sums._replace(out=out)
    if not offload.renormalize:
        return sums
    return sums._replace(denominator=jnp.sum(choice.weights, -1))


def _select(
    weights: Float[Array, "B K G T C"],
    denominator: Float[Array, "B K G T"],
    pos: Int[Array, "B K C"],
    offload: Offload,
) -> Bool[Array, "B K T C"]:
    """Returns True for the pairs that are fetched for each token."""
    nonzero = jnp.where(denominator != 0, denominator, 1.0)
    share = weights / nonzero[..., None]
    if offload.queries == "mean":
        share = jnp.mean(share, axis=2, keepdims=True)
    count = share.shape[2] * share.shape[3]
    slots = pos.shape[2]
    flat = share.reshape(len(pos), -1, slots)
    positions = jnp.repeat(pos, count, axis=1)
    beyond = jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32) - offload.top_n
    left_out = base.select_evictions(flat, positions, jnp.maximum(beyond, 0))
    selected = ((positions >= 0) & ~left_out).reshape(share.shape)
    return jnp.any(selected, axis=2)
