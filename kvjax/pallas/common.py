"""Results, constants and the device check that the TPU and GPU kernels share."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

NEVER = 2**31 - 1  # the position of an empty slot, in comparisons with a query's
LOWEST = -1e30  # stands in for the largest score of a query that sees no key
HOPPER = ("H100", "H200")  # parts of such devices' names
# The statistics that kernels compute.
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
    """The device of a program: `platform` is tpu, gpu or cpu, `kind` is JAX's name."""

    platform: str
    kind: str


def not_hopper(kind: str) -> str | None:
    """Returns why the GPU kernels cannot run on a GPU of this kind, or None.

    They use wgmma, which only compute capability 9.0 has.
    """
    if any(name in kind for name in HOPPER):
        return None
    return (
        f"the GPU kernels need a Hopper GPU ({' or '.join(HOPPER)}; compute capability "
        f"9.0), and this is {kind}"
    )


def device() -> Device:
    """Returns the device of the program that is being traced.

    Ahead-of-time compilation for an absent device names it in the abstract mesh
    (`jax.sharding.use_abstract_mesh`); other programs run on the default backend.
    """
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target:
        return Device(target.platform, target.device_kind)
    return Device(jax.default_backend(), jax.devices()[0].device_kind)
