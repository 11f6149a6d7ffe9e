"""What the kernels share: what they return, and what differs between JAX versions."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

NEVER = 2**31 - 1  # the position of an empty slot, as a query compares it
LOWEST = -1e30  # stands in for the largest score of a query that sees no key
STATS = ("mass", "mass_sq", "last", "window")  # what a kernel can add up on the way


class Scored(NamedTuple):
    """Attention before the division, and the statistics asked for (the rest None).

    Attributes:
      o: sum of exp(score - m) * value.
      m: largest score, -inf where no key is visible.
      l: sum of exp(score - m).
      mass: attention weights summed over the real queries, averaged over G.
      mass_sq: squares of the weights averaged over G, summed over the real queries.
      last: the last real query's weights, averaged over G.
      window: as `mass`, over the last `window` real queries only.
    """

    o: Float[Array, "B K G T D"]
    m: Float[Array, "B K G T"]
    l: Float[Array, "B K G T"]  # noqa: E741
    mass: Float[Array, "B K C"] | None = None
    mass_sq: Float[Array, "B K C"] | None = None
    last: Float[Array, "B K C"] | None = None
    window: Float[Array, "B K C"] | None = None


class Device(NamedTuple):
    """What a program runs on: `platform` is tpu, gpu or cpu, `kind` as JAX names it."""

    platform: str
    kind: str


def device() -> Device:
    """The device of the program that is being traced.

    A program compiled for a device that is not there names it by the abstract mesh
    (`jax.sharding.use_abstract_mesh`); others run on the default backend.
    """
    told = jax.sharding.get_abstract_mesh().abstract_device
    if told:
        return Device(told.platform, told.device_kind)
    return Device(jax.default_backend(), jax.devices()[0].device_kind)
