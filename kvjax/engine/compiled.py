"""The compiled programs of a job: all that runs on the device for one shape of batch.

A `Job` is everything that decides a program's shape. Its programs are compiled ahead of
their first use, so that the plan can read what memory they take. A few jobs' programs
are kept in this process (`programs`, `clear`), all of them on disk by JAX's persistent
compilation cache, for the next one.
"""

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax import cache
from kvjax.cache import parts, sharded
from kvjax.cache.spec import CacheSpec
from kvjax.engine import memory, steps
from kvjax.engine.sampling import TokenSampler
from kvjax.engine.steps import GREEDY, NO_EOS
from kvjax.models import decoder, placement
from kvjax.models.weights import param_cache
from kvjax.parallel import axes, host, meshes
from kvjax.types import Model, ModelSpec, PyTree, UserError

_GRAIN = 128  # prompts are padded to multiples of this many tokens
_KEPT = 2  # jobs of a policy whose programs stay in memory: 250 to 450 MB a job


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch's shape and what happens to it; hashable.

    Attributes:
      spec: the model's shape.
      config: what is kept of the KV cache.
      batch: B, rows that decode together.
      max_prompt_len: most prompt tokens per row, see `bucket`.
      max_new_tokens: most tokens to generate per row, or to be given it.
      dtype: of weights and stored pairs, a name ("float32").
      sampling: the sampling rule.
      eos: tokens that end a row.
      mesh: the devices it runs on, see `kvjax.cache.sharded`; None is the default
        device.
      decode_chunk: most tokens that one call generates, so that somebody can look at
        them in between; None for all.
      scored: whether the new tokens are given, and asked how likely they are.
      keep_logits: of a scored job, whether all logits are wanted.
      prefill_batch: rows whose prompts are read together; None for all. Fewer, and the
        prompts are read group by group into a pool of `batch` rows (staggered prefill).
    """

    spec: ModelSpec
    config: CacheSpec
    batch: int
    max_prompt_len: int
    max_new_tokens: int
    dtype: str = "float32"
    sampling: TokenSampler = GREEDY
    eos: tuple[int, ...] = NO_EOS
    mesh: Mesh | None = None
    decode_chunk: int | None = None
    scored: bool = False
    keep_logits: bool = False
    prefill_batch: int | None = None

    def __post_init__(self):
        if self.batch % self.data_parallel:
            raise UserError(
                f"a batch of {self.batch} does not divide over the "
                f"{self.data_parallel} groups of devices that the mesh's data axis "
                "makes: take a multiple"
            )
        if self.mesh:
            parts.check_split(self.config.budget, self.mesh.shape[axes.HEADS])

    @property
    def data_parallel(self) -> int:
        """Groups of devices that share out the rows."""
        return self.mesh.shape[axes.DATA] if self.mesh else 1

    @property
    def prefill_capacity(self) -> tuple[int, ...]:
        sizes = self.max_prompt_len, self.max_new_tokens
        return self.config.prefill_capacity(self.spec, *sizes)

    @property
    def decode_capacity(self) -> tuple[int, ...]:
        sizes = self.max_prompt_len, self.max_new_tokens
        return self.config.decode_capacity(self.spec, *sizes)

    @property
    def group(self) -> "Job":
        """The job of the rows that are read together."""
        batch = self.prefill_batch or self.batch
        return dataclasses.replace(self, batch=batch, prefill_batch=None)

    @property
    def is_staggered(self) -> bool:
        """Whether prompts are read into a pool, group by group."""
        return self.prefill_batch is not None and self.prefill_batch < self.batch


def job_of(
    model: Model,
    config: CacheSpec,
    prompt: int,
    new: int,
    sampling: TokenSampler = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> Job:
    """The smallest batch of a model, where and in what dtype its params are."""
    over, dtype = placement.of(model.params), str(model.params["embed"].dtype)
    rows = over.shape[axes.DATA] if over else 1
    return Job(model.spec, config, rows, prompt, new, dtype, sampling, eos, over)


class Programs(NamedTuple):
    """Compiled executables, see `kvjax.engine.steps`.

    Attributes:
      init: () -> an empty state of the rows that are read together.
      prefill: (params, state, tokens, lengths) -> (state, logits).
      compact: (state, policy's params) -> state; None where it keeps its capacity.
      keys: (seed, prompts' numbers) -> keys, see `row_keys`; None in a scored job.
      begin: (state, logits, active, keys) -> DecodeState; likewise.
      pool: () -> a DecodeState with no row in use; None where all are read at once.
      insert: (pool, part, row) -> pool; as `pool`.
      decode: (params, DecodeState, limit) -> (DecodeState, tokens); in a scored job
        `steps.score`, (params, state, logits, tokens, lengths) -> (state, Scores).
    """

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    compact: jax.stages.Compiled | None
    keys: jax.stages.Compiled | None
    begin: jax.stages.Compiled | None
    pool: jax.stages.Compiled | None
    insert: jax.stages.Compiled | None
    decode: jax.stages.Compiled


def bucket(spec: ModelSpec, config: CacheSpec, longest: int, new: int) -> int:
    """Prompt tokens that a program is compiled for.

    A state whose capacity does not depend on the prompt gets one program for every
    prompt that the model can read. Otherwise prompts share programs in steps of 128
    tokens, or an eighth of their length.

    Raises:
      UserError: prompt and new tokens together exceed the model's context.
    """
    if longest + new > spec.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new} new ones exceed the context of "
            f"{spec.name}, {spec.context_length} tokens: shorten the prompt"
        )
    if config.schedule.evicts_in_prefill:
        return spec.context_length
    grain = max(_GRAIN, 1 << max((longest - 1).bit_length() - 3, 0))
    return math.ceil(longest / grain) * grain


def size_class(config: CacheSpec, longest: int) -> int:
    """Prompts of one class share programs without much waste: each is twice as long.

    One class where the state's capacity does not depend on the prompt.
    """
    if config.schedule.evicts_in_prefill:
        return 0
    return max(longest - 1, _GRAIN - 1).bit_length()


_known: collections.OrderedDict[Job, Programs] = collections.OrderedDict()
_lock = threading.Lock()


def programs(job: Job) -> Programs:
    """The job's programs, compiled if they are not among those that are kept."""
    return _kept(job, functools.partial(compile_job, job))


def decoding(job: Job, reading: Programs) -> Programs:
    """Programs of a job that reads as another one does, and keeps other sizes then."""
    return _kept(job, functools.partial(_compile_decoding, job, reading))


def _kept(job: Job, make: Callable[[], Programs]) -> Programs:
    with _lock:
        made = _known.pop(job, None)
        if not made:
            _make_room(job)
    if not made:
        memory.trim()  # of what dropped programs left, and the loading of weights
        made = make()
        memory.trim()  # of what the compiler left
    with _lock:
        _known[job] = made
    return made


def _make_room(job: Job) -> None:
    """A compiler takes as much memory as two programs: other policies' go first."""
    policy = job.config.policy
    for other in [known for known in _known if known.config.policy != policy]:
        del _known[other]
    while len(_known) >= _KEPT:
        _known.popitem(last=False)


def clear() -> None:
    """Forgets all compiled programs; those that somebody still holds go on working."""
    with _lock:
        _known.clear()
    jax.clear_caches()


def compile_job(job: Job) -> Programs:
    """Compiles everything that the job runs, and keeps nothing."""
    keep_compiled()
    group = job.group
    given = arguments(group)
    alike = {"spec": job.spec, "config": job.config}
    with meshes.use(job.mesh):
        return Programs(
            init=_compile_init(group),
            prefill=_compiled(
                steps.prefill,
                *(given.params, given.prefill_state, given.tokens, given.rows),
                **alike,
            ),
            compact=_compile_compact(group) if job.config.compacts else None,
            keys=None if job.scored else _compile_keys(group),
            begin=None if job.scored else _compile_begin(group),
            pool=_compile_pool(job) if job.is_staggered else None,
            insert=_compile_insert(job) if job.is_staggered else None,
            decode=_compile_score(job) if job.scored else _compile_decode(job),
        )


def _compile_decoding(job: Job, reading: Programs) -> Programs:
    keep_compiled()
    with meshes.use(job.mesh):
        return reading._replace(
            compact=_compile_compact(job.group),
            begin=None if job.scored else _compile_begin(job.group),
            pool=_compile_pool(job) if job.is_staggered else None,
            insert=_compile_insert(job) if job.is_staggered else None,
            decode=_compile_score(job) if job.scored else _compile_decode(job),
        )


def _compiled(function, *args, **static) -> jax.stages.Compiled:
    compiled = function.lower(*args, **static).compile()
    function.clear_cache()  # its traces would keep every program in memory for ever
    return compiled


def _compile_init(job: Job) -> jax.stages.Compiled:
    placed = None
    if job.mesh:
        kept = job.config.reading, job.prefill_capacity
        placed = sharded.state_partitions(job.spec, *kept, job.mesh)
    init = functools.partial(init_state, job, is_prefill=True)
    return jax.jit(init, out_shardings=placed).lower().compile()


def _compile_compact(job: Job) -> jax.stages.Compiled:
    given = arguments(job)
    return _compiled(
        *(steps.compact, given.prefill_state, given.params.get("policy")),
        spec=job.spec,
        config=job.config,
        capacity=job.decode_capacity,
    )


def _compile_keys(job: Job) -> jax.stages.Compiled:
    seed = jax.ShapeDtypeStruct((), jnp.int32)
    return _compiled(row_keys, seed, arguments(job).rows)


def _compile_begin(job: Job) -> jax.stages.Compiled:
    given = arguments(job)
    state = given.decode_state
    return _compiled(
        *(steps.begin, state.cache, given.logits, given.active, state.keys),
        sampling=job.sampling,
        eos=job.eos,
    )


def _compile_pool(job: Job) -> jax.stages.Compiled:
    """A pool that no row of is in use."""

    def make():
        shape = arguments(job).decode_state
        idle = jnp.zeros((job.batch,), jnp.int32)
        state = init_state(job)
        keys = row_keys(jnp.int32(0), idle)
        return shape.replace(
            cache=state, token=idle, done=idle == 0, step=idle, keys=keys
        )

    return jax.jit(make).lower().compile()


def _compile_insert(job: Job) -> jax.stages.Compiled:
    pool, part = arguments(job).decode_state, arguments(job.group).decode_state
    return _compiled(steps.insert, pool, part, jax.ShapeDtypeStruct((), jnp.int32))


def _compile_decode(job: Job) -> jax.stages.Compiled:
    given = arguments(job)
    return _compiled(
        *(steps.decode, given.params, given.decode_state),
        jax.ShapeDtypeStruct((), jnp.int32),
        spec=job.spec,
        config=job.config,
        steps=max(1, job.decode_chunk or job.max_new_tokens - 1),
        sampling=job.sampling,
        eos=job.eos,
    )


def _compile_score(job: Job) -> jax.stages.Compiled:
    given = arguments(job)
    return _compiled(
        *(steps.score, given.params, given.decode_state.cache, given.logits),
        *(given.new, given.rows),
        spec=job.spec,
        config=job.config,
        keep_logits=job.keep_logits,
    )


class Arguments(NamedTuple):
    """What a job's programs are given: shapes, and over a mesh how they are split."""

    params: PyTree
    prefill_state: cache.KVState
    decode_state: steps.DecodeState
    tokens: jax.ShapeDtypeStruct
    rows: jax.ShapeDtypeStruct
    logits: jax.ShapeDtypeStruct
    active: jax.ShapeDtypeStruct
    new: jax.ShapeDtypeStruct


def arguments(job: Job) -> Arguments:
    """The shapes of everything that the job's programs are given."""
    spec, array = job.spec, jax.ShapeDtypeStruct
    rows, active = array((job.batch,), jnp.int32), array((job.batch,), jnp.bool)
    params = decoder.param_shapes(spec, jnp.dtype(job.dtype))
    like = lambda leaf: array(leaf.shape, leaf.dtype)
    params = jax.tree.map(like, steps.with_policy(params, job.config))
    keys = jax.eval_shape(row_keys, array((), jnp.int32), rows)
    after = host.like(functools.partial(init_state, job))
    before = host.like(functools.partial(init_state, job, is_prefill=True))
    given = Arguments(
        params=params,
        prefill_state=before,
        decode_state=steps.DecodeState(after, rows, active, rows, keys),
        tokens=array((job.batch, job.max_prompt_len), jnp.int32),
        rows=rows,
        logits=array((job.batch, spec.vocab_size), jnp.float32),
        active=active,
        new=array((job.batch, job.max_new_tokens), jnp.int32),
    )
    return _split(job, given) if job.mesh else given


def _split(job: Job, given: Arguments) -> Arguments:
    """The same with how every array is split over the job's mesh."""
    by_row = NamedSharding(job.mesh, PartitionSpec(axes.DATA))
    whole = NamedSharding(job.mesh, PartitionSpec())
    state = functools.partial(sharded.state_partitions, job.spec, over=job.mesh)
    params = decoder.param_partitions(job.spec, job.mesh)
    if "policy" in given.params:
        params["policy"] = jax.tree.map(lambda _: whole, given.params["policy"])
    after = state(job.config, job.decode_capacity)
    splits = Arguments(
        params,
        state(job.config.reading, job.prefill_capacity),
        steps.DecodeState(after, *(by_row,) * 4),
        *(by_row,) * 5,
    )
    return jax.tree.map(
        lambda leaf, split: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split
        ),
        given,
        splits,
    )


def init_state(job: Job, is_prefill: bool = False) -> cache.KVState:
    """An empty state for the job's batch, of reading prompts or of generating."""
    config = job.config.reading if is_prefill else job.config
    capacity = job.prefill_capacity if is_prefill else job.decode_capacity
    return cache.init(job.spec, config, job.batch, capacity, jnp.dtype(job.dtype))


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
    """Bytes on each device, not on its host, of a pytree of arrays or shapes."""

    def size(leaf):
        split = getattr(leaf, "sharding", None)
        shape = split.shard_shape(leaf.shape) if split else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree))) - host.nbytes(tree)
