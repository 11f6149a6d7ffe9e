"""What the kernels share: what they return, and what differs between JAX versions."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

NEVER = 2**31 - 1  # the position of an empty slot, as a query compares it
LOWEST = -1e30  # stands in for the largest score of a query that sees no key
HOPPER = ("H100", "H200")  # parts of such devices' names
# What a kernel can add up on the way.
STATS = ("attn_sum", "attn_sq_sum", "last_attn")


class Scored(NamedTuple):
    """Attention before the division, and the statistics asked for (the rest None).

    Attributes:
      out: sum of exp(logit - max_logit) * value.
      max_logit: the largest, -inf where no key is visible.
      denominator: sum of exp(logit - max_logit).
      attn_sum: attention weights summed over the real queries, averaged over G.
      attn_sq_sum: squares of the weights averaged over G, summed over the real queries.
      last_attn: the last real query's weights, averaged over G.
    """

    out: Float[Array, "B K G T D"]
    max_logit: Float[Array, "B K G T"]
    denominator: Float[Array, "B K G T"]
    attn_sum: Float[Array, "B K C"] | None = None
    attn_sq_sum: Float[Array, "B K C"] | None = None
    last_attn: Float[Array, "B K C"] | None = None


class Device(NamedTuple):
    """What a program runs on: `platform` is tpu, gpu or cpu, `kind` as JAX names it."""

    platform: str
    kind: str


def not_hopper(kind: str) -> str | None:
    """Why the GPU kernels cannot run on a GPU that JAX names `kind`; None if they can.

    Their products are instructions that compute capability 9.0 alone has.
    """
    if any(name in kind for name in HOPPER):
        return None
    return (
        f"the GPU kernels need a Hopper GPU ({' or '.join(HOPPER)}; compute capability "
        f"9.0), and this is {kind}"
    )


def device() -> Device:
    """The device of the program that is being traced.

    A program compiled for a device that is not there names it by the abstract mesh
    (`jax.sharding.use_abstract_mesh`); others run on the default backend.
    """
    told = jax.sharding.get_abstract_mesh().abstract_device
    if told:
        return Device(told.platform, told.device_kind)
    return Device(jax.default_backend(), jax.devices()[0].device_kind)
