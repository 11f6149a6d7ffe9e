"""One layer without a model: random queries, keys and values through the cache.

What the contract and the oracles drive; compiles in a second or two.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache
from kvjax.cache import sharded
from kvjax.models import decoder
from kvjax.parallel import meshes
from kvjax.types import LayerOps, ModelSpec


class Data(NamedTuple):
    """What a layer would be given: `t` counts tokens, prompt and new ones.

    Attributes:
      q: [B, K, G, t, D], before rotary positions, like k.
      k, v: [B, K, t, D].
      out: [K, G, D, M], the output projection.
      tokens: [B, t].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    tokens: np.ndarray


def spec_of(heads: int, group: int, depth: int) -> ModelSpec:
    """One layer of that shape."""
    return ModelSpec(
        name="layer",
        num_layers=1,
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=depth,
        model_dim=12,
        ff_dim=1,
        vocab_size=20,
        context_length=4096,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
    )


def random_data(spec: ModelSpec, batch: int, count: int, seed: int) -> Data:
    """Gaussian, with queries long enough that attention is not even."""
    rng = np.random.default_rng(seed)
    heads, group, depth = spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return Data(
        q=2.5 * normal(batch, heads, group, count, depth),
        k=normal(batch, heads, count, depth),
        v=normal(batch, heads, count, depth),
        out=normal(heads, group, depth, spec.model_dim),
        tokens=rng.integers(0, spec.vocab_size, (batch, count)).astype(np.int32),
    )


_jit = functools.partial(  # these programs are compiled once and run for milliseconds
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@functools.partial(jax.jit, static_argnames=("spec", "config", "is_prefill"))
def step(spec, config, state, data: Data, n, is_prefill):
    """T tokens, of which each row's first n are real; outputs [B, K, G, T, D]."""
    positions = cache.next_positions(state, data.q.shape[3])
    ops = LayerOps(
        apply_rope=decoder.rotations(spec, positions)[0],
        value_contribution=jax.tree_util.Partial(_project, data.out),
        scoring=spec.scoring(0),
    )
    out, state = sharded.step_layer(
        spec,
        0,
        data.q,
        data.k,
        data.v,
        ops,
        state,
        config=config,
        n=n,
        tokens=data.tokens,
        is_prefill=is_prefill,
    )
    return out, cache.advance(state, n)


@functools.partial(
    _jit, static_argnames=("spec", "config", "block"), donate_argnames=("state",)
)
def read(spec, config, state, data: Data, lengths, block):
    """The prompts, block by block; the count of tokens is a multiple of the block."""

    def one(i, state):
        part = _part(data, i * block, block)
        n = jnp.clip(lengths - i * block, 0, block)
        return step(spec, config, state, part, n, is_prefill=True)[1]

    return jax.lax.fori_loop(0, data.tokens.shape[1] // block, one, state)


@functools.partial(_jit, static_argnames=("spec", "config"), donate_argnames=("state",))
def write(spec, config, state, data: Data, active):
    """Every token of `data` in turn, as decoding would."""

    def one(i, state):
        n = active.astype(jnp.int32)
        return step(spec, config, state, _part(data, i, 1), n, is_prefill=False)[1]

    return jax.lax.fori_loop(0, data.tokens.shape[1], one, state)


@functools.partial(_jit, static_argnames=("spec", "config", "capacity"))
def shrink(spec, config, state, capacity):
    """The compaction between prompt and decoding."""
    return sharded.compact(spec, state, config, capacity, decoder.rotations(spec))


class Run(NamedTuple):
    """What a prompt and new tokens leave of themselves.

    Attributes:
      kept: `cache.kept_positions` after the prompt, after its compaction where the
        schedule has one, and at the end.
      end: the state at the end.
    """

    kept: list[list[list[list[np.ndarray]]]]
    end: cache.KVState


def run(spec, config, data: Data, lengths, prompt: int, over=None) -> Run:
    """Reads each row's first `lengths` of `prompt` tokens, and writes all others.

    Args:
      spec: of the layer.
      config: whose schedule says how many tokens are read at once.
      data: prompts and new tokens.
      lengths: tokens of each row's prompt; rows of none stay empty.
      prompt: a multiple of the tokens that are read at once.
      over: a mesh to split rows and heads over.

    Raises:
      RuntimeError: the state holds an error.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    prompts, new = split(data, prompt)
    sizes = prompt, new.tokens.shape[1]
    capacity = config.prefill_capacity(spec, *sizes)
    init = functools.partial(cache.init, spec, config, len(lengths), capacity)
    placed = over and sharded.state_partitions(spec, config, capacity, over)
    with meshes.use(over):
        state = jax.jit(init, out_shardings=placed)()
        block = config.schedule.prefill_chunk
        state = read(spec, config, state, prompts, lengths, block)
        kept = [cache.kept_positions(state)]
        if config.schedule.compacts:
            state = shrink(spec, config, state, config.decode_capacity(spec, *sizes))
            kept.append(cache.kept_positions(state))
        end = write(spec, config, state, new, lengths > 0)
    cache.raise_errors(end)
    return Run([*kept, cache.kept_positions(end)], end)


def split(data: Data, at: int) -> tuple[Data, Data]:
    """The prompt's tokens and the others."""
    return _part(data, 0, at), _part(data, at, data.tokens.shape[1] - at)


def _project(out, v):
    return jnp.einsum("bktd,kgdm->bkgtm", v, out.astype(v.dtype))


def _part(data: Data, start, size) -> Data:
    def cut(x, axis):
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)

    q, k, v = cut(data.q, 3), cut(data.k, 2), cut(data.v, 2)
    return Data(q, k, v, data.out, cut(data.tokens, 1))
