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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax import cache
from kvjax.cache import sharded
from kvjax.cache.config import CacheConfig
from kvjax.engine.sampling import Sampling
from kvjax.engine.steps import GREEDY, NO_EOS, compact, decode, prefill, score
from kvjax.models import decoder, placement
from kvjax.models.weights import param_cache
from kvjax.parallel import axes, meshes
from kvjax.types import Model, ModelSpec, PyTree, UserError

_GRAIN = 128  # prompts are padded to multiples of this many tokens


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch's shape and what happens to it; hashable.

    Attributes:
      spec: the model's shape.
      config: what is kept of the KV cache.
      batch: B, rows.
      max_prompt_len: most prompt tokens per row, see `bucket`.
      max_new_tokens: most tokens to generate per row, or to be given it.
      dtype: of weights and stored pairs, a name ("float32").
      sampling: the sampling rule.
      eos: tokens that end a row.
      mesh: the devices it runs on, see `kvjax.cache.sharded`; None is the default device.
      decode_chunk: most tokens that one call generates, so that somebody can look at them in
        between; None for all.
      scored: whether the new tokens are given, and asked how likely they are.
    """

    spec: ModelSpec
    config: CacheConfig
    batch: int
    max_prompt_len: int
    max_new_tokens: int
    dtype: str = "float32"
    sampling: Sampling = GREEDY
    eos: tuple[int, ...] = NO_EOS
    mesh: Mesh | None = None
    decode_chunk: int | None = None
    scored: bool = False

    def __post_init__(self):
        if self.batch % self.data_parallel:
            raise UserError(
                f"a batch of {self.batch} does not divide over the {self.data_parallel} groups "
                "of devices that the mesh's data axis makes: take a multiple"
            )

    @property
    def data_parallel(self) -> int:
        """Groups of devices that share out the rows."""
        return self.mesh.shape[axes.DATA] if self.mesh else 1

    @property
    def prefill_capacity(self) -> tuple[int, ...]:
        return self.config.prefill_capacity(
            self.spec, self.max_prompt_len, self.max_new_tokens
        )

    @property
    def decode_capacity(self) -> tuple[int, ...]:
        return self.config.decode_capacity(
            self.spec, self.max_prompt_len, self.max_new_tokens
        )


def job_of(
    model: Model,
    config: CacheConfig,
    prompt: int,
    new: int,
    sampling: Sampling = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> Job:
    """The smallest batch of a model, where and in what dtype its params are."""
    over, dtype = placement.of(model.params), str(model.params["embed"].dtype)
    rows = over.shape[axes.DATA] if over else 1
    return Job(model.spec, config, rows, prompt, new, dtype, sampling, eos, over)


class Programs(NamedTuple):
    """Compiled executables.

    `compact` is None where the state keeps its capacity. `decode` is `generate.score`
    in a job whose tokens are given.
    """

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    compact: jax.stages.Compiled | None
    decode: jax.stages.Compiled


def bucket(spec: ModelSpec, config: CacheConfig, longest: int, new: int) -> int:
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
    block = config.schedule.prefill_chunk
    if config.schedule.evicts_in_prefill:
        return math.ceil(spec.context_length / block) * block
    grain = math.lcm(block, _GRAIN)
    return math.ceil(longest / grain) * grain


def size_class(config: CacheConfig, longest: int) -> int:
    """Prompts of one class share programs without much waste: each is twice as long.

    One class where the state's capacity does not depend on the prompt.
    """
    if config.schedule.evicts_in_prefill:
        return 0
    return max(longest - 1, _GRAIN - 1).bit_length()


@functools.cache
def programs(job: Job) -> Programs:
    """Compiles everything that the job runs."""
    return Programs(
        init=compile_init(job, job.prefill_capacity),
        prefill=compile_prefill(job),
        compact=compile_compact(job) if job.config.schedule.compacts else None,
        decode=compile_decode(job),
    )


def compile_init(job: Job, capacity: tuple[int, ...]) -> jax.stages.Compiled:
    """() -> an empty state."""
    keep_compiled()
    placed = None
    if job.mesh:
        over = job.mesh
        placed = sharded.state_partitions(job.spec, job.config, capacity, over)
    with meshes.use(job.mesh):
        init = functools.partial(init_state, job, capacity)
        return jax.jit(init, out_shardings=placed).lower().compile()


def compile_prefill(job: Job) -> jax.stages.Compiled:
    """(params, state, tokens, lengths) -> (state, logits), see `generate.prefill`."""
    keep_compiled()
    given = arguments(job)
    with meshes.use(job.mesh):
        return prefill.lower(
            given.params,
            given.prefill_state,
            given.tokens,
            given.rows,
            spec=job.spec,
            config=job.config,
        ).compile()


def compile_compact(job: Job) -> jax.stages.Compiled:
    """state -> state, see `generate.compact`."""
    keep_compiled()
    before, after = arguments(job).prefill_state, job.decode_capacity
    with meshes.use(job.mesh):
        return compact.lower(
            before, spec=job.spec, config=job.config, capacity=after
        ).compile()


def compile_decode(job: Job) -> jax.stages.Compiled:
    """`generate.decode` from its state on, or `generate.score`."""
    keep_compiled()
    given, alike = arguments(job), {"spec": job.spec, "config": job.config}
    start = given.params, given.decode_state, given.logits
    with meshes.use(job.mesh):
        if job.scored:
            return score.lower(*start, given.new, given.rows, **alike).compile()
        return decode.lower(
            *start,
            given.active,
            given.keys,
            jax.ShapeDtypeStruct((), jnp.int32),
            steps=job.decode_chunk or job.max_new_tokens,
            how=job.sampling,
            eos=job.eos,
            **alike,
        ).compile()


class Arguments(NamedTuple):
    """What a job's programs are given: shapes, and over a mesh how they are split."""

    params: PyTree
    prefill_state: cache.KVState
    decode_state: cache.KVState
    tokens: jax.ShapeDtypeStruct
    rows: jax.ShapeDtypeStruct
    logits: jax.ShapeDtypeStruct
    active: jax.ShapeDtypeStruct
    keys: jax.ShapeDtypeStruct
    new: jax.ShapeDtypeStruct


def arguments(job: Job) -> Arguments:
    """The shapes of everything that the job's programs are given."""
    spec, array = job.spec, jax.ShapeDtypeStruct
    rows = array((job.batch,), jnp.int32)
    given = Arguments(
        params=decoder.param_shapes(spec, jnp.dtype(job.dtype)),
        prefill_state=jax.eval_shape(
            functools.partial(init_state, job, job.prefill_capacity)
        ),
        decode_state=jax.eval_shape(
            functools.partial(init_state, job, job.decode_capacity)
        ),
        tokens=array((job.batch, job.max_prompt_len), jnp.int32),
        rows=rows,
        logits=array((job.batch, spec.vocab_size), jnp.float32),
        active=array((job.batch,), jnp.bool),
        keys=jax.eval_shape(row_keys, array((), jnp.int32), rows),
        new=array((job.batch, job.max_new_tokens), jnp.int32),
    )
    if job.mesh is None:
        return given
    by_row = NamedSharding(job.mesh, PartitionSpec(axes.DATA))
    state = functools.partial(sharded.state_partitions, spec, job.config, over=job.mesh)
    splits = Arguments(
        decoder.param_partitions(spec, job.mesh),
        state(job.prefill_capacity),
        state(job.decode_capacity),
        *(by_row,) * 6,
    )
    return jax.tree.map(
        lambda leaf, split: array(leaf.shape, leaf.dtype, sharding=split), given, splits
    )


def init_state(job: Job, capacity: tuple[int, ...]) -> cache.KVState:
    """An empty state for the job's batch."""
    dtype = jnp.dtype(job.dtype)
    return cache.init(job.spec, job.config, job.batch, capacity, dtype)


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, unless the user has set one up.

    An unrolled model takes seconds to minutes to compile; the next process should not.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update(
            "jax_compilation_cache_dir", str(param_cache.cache_dir() / "xla")
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@jax.jit
def row_keys(seed: Array, index: Int[Array, "B"]) -> Array:
    """One PRNG key per prompt: the same alone, in a batch, or in another order."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index)
    return axes.constrain(keys, "batch")


def tree_bytes(tree: PyTree) -> int:
    """Bytes, on each device, of a pytree of arrays or shapes."""

    def size(leaf):
        split = getattr(leaf, "sharding", None)
        shape = split.shard_shape(leaf.shape) if split else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
