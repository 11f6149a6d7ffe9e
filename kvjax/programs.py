"""The compiled programs of a job: all that runs on the device for one shape of batch.

A `Job` is everything that decides a program's shape. Its programs are compiled once a
process, ahead of their first use, so that the plan can read what memory they take; the
persistent compilation cache keeps them for the next process.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax import cache, sampling
from kvjax.generate import GREEDY, NO_EOS, compact, decode, prefill
from kvjax.models import decoder
from kvjax.types import ModelSpec, PyTree, UserError
from kvjax.weights import store

_GRAIN = 128  # prompts are padded to multiples of this many tokens


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch's shape and what happens to it; hashable.

    Attributes:
      spec: the model's shape.
      made: what is kept of the KV cache.
      batch: B, rows.
      prompt: most prompt tokens per row, see `bucket`.
      new: most tokens to generate per row.
      dtype: of weights and stored pairs, a name ("float32").
      how: the sampling rule.
      eos: tokens that end a row.
    """

    spec: ModelSpec
    made: cache.Compression
    batch: int
    prompt: int
    new: int
    dtype: str = "float32"
    how: sampling.Sampling = GREEDY
    eos: tuple[int, ...] = NO_EOS

    @property
    def prefill_capacity(self) -> tuple[int, ...]:
        return self.made.prefill_capacity(self.spec, self.prompt, self.new)

    @property
    def decode_capacity(self) -> tuple[int, ...]:
        return self.made.decode_capacity(self.spec, self.prompt, self.new)


class Programs(NamedTuple):
    """Compiled executables; `compact` is None where the state keeps its capacity."""

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    compact: jax.stages.Compiled | None
    decode: jax.stages.Compiled


def bucket(spec: ModelSpec, made: cache.Compression, longest: int, new: int) -> int:
    """Prompt tokens that a program is compiled for.

    A state whose capacity does not depend on the prompt gets one program for every
    prompt that the model can read. Otherwise prompts share programs in steps of 128
    tokens (more, if that is not a multiple of the block).

    Raises:
      UserError: prompt and new tokens together exceed the model's context.
    """
    if longest + new > spec.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new} new ones exceed the context of "
            f"{spec.name}, {spec.context_length} tokens: shorten the prompt"
        )
    block = made.schedule.block
    if made.schedule.evicts_in_prefill:
        return math.ceil(spec.context_length / block) * block
    grain = math.lcm(block, _GRAIN)
    return math.ceil(longest / grain) * grain


@functools.cache
def programs(job: Job) -> Programs:
    """Compiles everything that the job runs."""
    keep_compiled()
    spec, made = job.spec, job.made
    dtype = jnp.dtype(job.dtype)
    array = jax.ShapeDtypeStruct

    def state(capacity):
        return cache.init(spec, made, job.batch, capacity, dtype)

    first = functools.partial(state, job.prefill_capacity)
    before = jax.eval_shape(first)
    after = jax.eval_shape(functools.partial(state, job.decode_capacity))
    params = decoder.param_shapes(spec, dtype)
    rows = array((job.batch,), jnp.int32)
    tokens = array((job.batch, job.prompt), jnp.int32)
    logits = array((job.batch, spec.vocab_size), jnp.float32)
    active = array((job.batch,), jnp.bool)
    keys = jax.eval_shape(row_keys, array((), jnp.int32), rows)
    read = prefill.lower(params, before, tokens, rows, spec=spec, made=made)
    write = decode.lower(
        params,
        after,
        logits,
        active,
        keys,
        spec=spec,
        made=made,
        steps=job.new,
        how=job.how,
        eos=job.eos,
    )
    shrink = None
    if made.schedule.compacts:
        shrink = compact.lower(
            before, spec=spec, made=made, capacity=job.decode_capacity
        )
    return Programs(
        init=jax.jit(first).lower().compile(),
        prefill=read.compile(),
        compact=shrink.compile() if shrink else None,
        decode=write.compile(),
    )


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, unless the user has set one up.

    An unrolled model takes seconds to minutes to compile; the next process should not.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(store.cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@jax.jit
def row_keys(seed: Array, index: Int[Array, "B"]) -> Array:
    """One PRNG key per prompt: the same alone, in a batch, or in another order."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index)


def tree_bytes(tree: PyTree) -> int:
    """Bytes of a pytree of arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
