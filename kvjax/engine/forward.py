"""Forward passes of a whole model over a KV state, or over two at once."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.prefix import Prefix
from kvjax.cache.spec import CacheSpec
from kvjax.models import decoder
from kvjax.types import ModelSpec, PyTree


class Pass(NamedTuple):
    """The tokens that a forward pass reads after those of a KV state.

    Attributes:
      tokens: i32[B, T], new tokens.
      n: i32[B], how many of each row are real.
      state: the pairs of earlier tokens.
      is_prefill: whether the tokens belong to the prompt.
      prefix: what every row goes on after, see `kvjax.cache.prefix`; None for nothing.
    """

    tokens: Array
    n: Array
    state: cache.KVState
    is_prefill: bool
    prefix: Prefix | None = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        """The positions of the new tokens."""
        return cache.next_positions(self.state, self.tokens.shape[1])


def forward(
    params: PyTree,
    spec: ModelSpec,
    tokens: Int[Array, "B T"],
    n: Int[Array, "B"],
    state: cache.KVState,
    config: CacheSpec,
    is_prefill: bool = False,
    prefix: Prefix | None = None,
) -> tuple[Float[Array, "B T M"], cache.KVState]:
    """Runs the model over T new tokens, of which each row's first n are real."""
    new = Pass(tokens, n, state, is_prefill, prefix)
    state, step = _evicted(params, spec, new, config), _step(params, spec, new, config)
    measure = None
    if config.measures and is_prefill:
        measure = functools.partial(cache.measure, config=config, n=n)
    hidden, state = decoder.forward(
        params, spec, tokens, new.positions, state, step, measure
    )
    return hidden, cache.advance(state, n)


def forward_both(
    params: PyTree,
    spec: ModelSpec,
    rows: Pass,
    prompts: Pass,
    config: CacheSpec,
    groups: int = 1,
) -> tuple[Array, Array, cache.KVState, cache.KVState]:
    """Runs the model over the next tokens of two states, reading the weights once.

    To the model the tokens of both are one row of R + N T tokens, or one row for each
    of the groups of devices that rows are divided over. Attention parts them again, so
    that each token sees its own row alone.

    Args:
      params: the model's weights, see `with_policy`.
      spec: the model's shape.
      rows: R rows of one token.
      prompts: N rows of T tokens.
      config: configuration of the cache of both.
      groups: E, the groups of devices; R and N are multiples of it.

    Returns:
      The final hidden states [R, 1, M] and [N, T, M], and the two states.
    """
    both = rows, prompts
    widths = [each.tokens.shape[1] for each in both]
    first = len(rows.n) // groups
    spans = slice(0, first), slice(first, None)
    states = tuple(_evicted(params, spec, each, config) for each in both)
    steps = [_step(params, spec, each, config) for each in both]
    rotates = [decoder.rotations(spec, each.positions) for each in both]

    def pack(of_both: list[Array]) -> Array:
        flat = [rearrange(x, "(e r) t -> e (r t)", e=groups) for x in of_both]
        return jnp.concatenate(flat, axis=1)

    def attend(index, q, k, v, ops, states):
        outs, after = [], []
        for which, state in enumerate(states):
            own = functools.partial(_own, span=spans[which], width=widths[which])
            own_ops = ops._replace(
                apply_rope=rotates[which][index], hidden=own(ops.hidden)
            )
            out, state = steps[which](index, own(q), own(k), own(v), own_ops, state)
            outs.append(rearrange(out, "(e r) k g t d -> e k g (r t) d", e=groups))
            after.append(state)
        return jnp.concatenate(outs, axis=3), tuple(after)

    hidden, states = decoder.forward(
        params,
        spec,
        pack([each.tokens for each in both]),
        pack([each.positions for each in both]),
        states,
        attend,
    )
    states = [cache.advance(s, each.n) for s, each in zip(states, both, strict=True)]
    found = [_own(hidden, *each) for each in zip(spans, widths, strict=True)]
    return *found, *states


def _own(x: Float[Array, "E *H X D"], span: slice, width: int) -> Array:
    """Returns the tokens of one state, [B, *H, T, D], of those of both."""
    x = x[..., span, :]
    rows = x.reshape(*x.shape[:-2], -1, width, x.shape[-1])  # [E, *H, R, T, D]
    rows = jnp.moveaxis(rows, -3, 1)
    return rows.reshape(-1, *rows.shape[2:])


def _evicted(
    params: PyTree, spec: ModelSpec, new: Pass, config: CacheSpec
) -> cache.KVState:
    """Returns the state with the slots that the new tokens need."""
    return sharded.evict_overflow(
        spec,
        new.state,
        new.tokens.shape[1],
        decoder.rotations(spec),
        config=config,
        n=new.n,
        is_prefill=new.is_prefill,
        policy_params=params.get("policy"),
    )


def _step(
    params: PyTree, spec: ModelSpec, new: Pass, config: CacheSpec
) -> Callable[..., tuple[Array, cache.KVState]]:
    """Returns the attention of `kvjax.models.decoder.forward` for the new tokens."""
    learned = params.get("policy")

    def attend(index, q, k, v, ops, state):
        return sharded.step_layer(
            spec,
            index,
            q,
            k,
            v,
            ops,
            state,
            config=config,
            n=new.n,
            tokens=new.tokens,
            is_prefill=new.is_prefill,
            policy_params=learned and learned[index],
            has_evicted=True,
            prefix=new.prefix,
        )

    return attend


def with_policy(params: PyTree, config: CacheSpec) -> PyTree:
    """Returns the weights, with those of a learned policy, if any, under `policy`.

    The policy's weights are one pytree per layer. They are arguments of the programs,
    not constants in them.
    """
    if not config.policy or config.policy.params is None:
        return params
    return params | {"policy": config.policy.params.layers}
