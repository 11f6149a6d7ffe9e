"""The compiled programs of a job.

They are compiled ahead of their first use, so that the planner can read the memory that
they take. The most recently used are kept in this process up to a limit in bytes, see
`kept_limit`; JAX's persistent compilation cache keeps all of them on disk.
"""

import collections
import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax import cache
from kvjax.cache import prefix as prefixes
from kvjax.cache import sharded
from kvjax.cache.prefix import Prefix
from kvjax.engine import memory, scoring, steps
from kvjax.engine.forward import with_policy
from kvjax.engine.jobs import Job
from kvjax.engine.sampling import Requests
from kvjax.models import decoder
from kvjax.models.weights import param_cache
from kvjax.parallel import axes, host, meshes
from kvjax.types import PyTree, UserError, real_number


class Programs(NamedTuple):
    """Compiled executables, see `kvjax.engine.steps`.

    Attributes:
      init: () -> an empty state of the rows that are read together.
      prefill: (params, state, tokens, lengths, prefix) -> (state, logits).
      keys: (seeds, prompt numbers, samples) -> keys, see `row_keys`; None in a job that
        draws no tokens.
      compact: (state, policy's params) -> state; None if nothing happens between
        prefill and decode.
      begin: (state, logits, requests, keys, seen) -> (DecodeState, Tokens); None in a
        job that draws none, or that has a pool.
      pool: () -> a DecodeState with no row in use; None in a job without a pool.
      insert: (pool, state, logits, requests, keys, rows, seen) -> (pool, Tokens); None
        in a job without a pool.
      decode: (params, DecodeState, limit, until, prefix) -> (DecodeState, Tokens); in a
        scored job `scoring.score`, (params, state, logits, tokens, lengths) -> (state,
        Scores); None in a job that only reads.
      mixed: (params, DecodeState, Reading, tokens, lengths, limit, until, prefix) ->
        (DecodeState, Reading, Tokens); None unless the job mixes.
      logits: (params, hidden) -> logits, see `steps.last_logits`; None likewise.
    """

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    keys: jax.stages.Compiled | None
    compact: jax.stages.Compiled | None = None
    begin: jax.stages.Compiled | None = None
    pool: jax.stages.Compiled | None = None
    insert: jax.stages.Compiled | None = None
    decode: jax.stages.Compiled | None = None
    mixed: jax.stages.Compiled | None = None
    logits: jax.stages.Compiled | None = None


class _Kept(NamedTuple):
    programs: Programs
    nbytes: int


_kept: collections.OrderedDict[Job, _Kept] = collections.OrderedDict()
_lock = threading.Lock()


def programs(job: Job) -> Programs:
    """Returns the job's programs, and compiles them unless they are kept."""
    return _find(job, functools.partial(compile_job, job))


def decoding(job: Job, reading: Programs) -> Programs:
    """Returns programs of a job that reads as `reading` does, with other budgets."""
    return _find(job, functools.partial(_compile_decoding, job, reading))


def _find(job: Job, make: Callable[[], Programs]) -> Programs:
    with _lock:
        found = _kept.pop(job, None)
        if not found:
            _make_room()
    if not found:
        memory.trim()  # returns what dropped programs and the loading of weights left
        before = memory.resident()
        made = make()
        memory.trim()  # returns what the compiler left
        found = _Kept(made, max(memory.resident() - before, 0))
    with _lock:
        _kept[job] = found
    return found.programs


def _make_room() -> None:
    """Drops the least recently used programs, until one more like the largest fits."""
    sizes = [kept.nbytes for kept in _kept.values()]
    largest, limit = max(sizes, default=0), kept_limit()
    while _kept and sum(kept.nbytes for kept in _kept.values()) + largest > limit:
        _kept.popitem(last=False)


def kept_limit() -> int:
    """Returns the bytes that kept programs may take: $KVJAX_PROGRAMS_GB, or 0.6 GB.

    Programs of a 135M model take about 0.2 GB a job on a CPU. The default keeps those
    of two policies, and a process that tries every policy below 2 GB.
    """
    text = os.environ.get("KVJAX_PROGRAMS_GB", "0.6")
    try:
        return int(real_number("KVJAX_PROGRAMS_GB", float(text), 0) * 1e9)
    except ValueError:
        raise UserError(f"KVJAX_PROGRAMS_GB is {text!r}: give gigabytes") from None


def clear() -> None:
    """Drops all kept programs; those that a caller holds go on working."""
    with _lock:
        _kept.clear()
    jax.clear_caches()


def compile_job(job: Job) -> Programs:
    """Compiles everything that the job runs, and keeps nothing."""
    keep_compiled()
    with meshes.use(job.mesh):
        reading = Programs(
            init=_compile_init(job.group),
            prefill=_compile_prefill(job.group),
            keys=_compile_keys(job.group) if _draws(job) else None,
        )
    return _compile_decoding(job, reading)


def _draws(job: Job) -> bool:
    """Returns whether a job generates tokens."""
    return job.max_new_tokens > 0 and not job.scored


def _compile_decoding(job: Job, reading: Programs) -> Programs:
    """Returns `reading` with the programs that run once the prompts are in."""
    keep_compiled()
    with meshes.use(job.mesh):
        compact = _compile_compact(job.group) if job.config.compacts else None
        if not job.max_new_tokens:
            return reading._replace(compact=compact)
        return reading._replace(
            compact=compact,
            begin=None if job.has_pool or not _draws(job) else _compile_begin(job),
            pool=_compile_pool(job) if job.has_pool else None,
            insert=_compile_insert(job) if job.has_pool else None,
            decode=_compile_score(job) if job.scored else _compile_decode(job),
            mixed=_compile_mixed(job) if job.mixes else None,
            logits=_compile_logits(job.group) if job.mixes else None,
        )


def _compiled(function, *args, **static) -> jax.stages.Compiled:
    compiled = function.lower(*args, **static).compile()
    function.clear_cache()  # its traces would keep every program in memory for ever
    return compiled


def _compile_prefill(job: Job) -> jax.stages.Compiled:
    shapes = arguments(job)
    return _compiled(
        steps.prefill,
        shapes.params,
        shapes.prefill_state,
        shapes.tokens,
        shapes.rows,
        shapes.prefix,
        spec=job.spec,
        config=job.config,
    )


def _compile_init(job: Job) -> jax.stages.Compiled:
    placed = None
    if job.mesh:
        kept = job.config.reading, job.prefill_capacity
        placed = sharded.state_partitions(job.spec, *kept, job.mesh)
    init = functools.partial(init_state, job, is_prefill=True)
    return jax.jit(init, out_shardings=placed).lower().compile()


def _compile_compact(job: Job) -> jax.stages.Compiled:
    shapes = arguments(job)
    return _compiled(
        steps.compact,
        shapes.prefill_state,
        shapes.params.get("policy"),
        spec=job.spec,
        config=job.config,
        capacity=job.decode_capacity,
    )


def _compile_keys(job: Job) -> jax.stages.Compiled:
    rows = arguments(job).rows
    return _compiled(row_keys, rows, rows, rows)


def _compile_begin(job: Job) -> jax.stages.Compiled:
    shapes = arguments(job)
    state = shapes.decode_state
    return _compiled(
        steps.begin,
        state.cache,
        shapes.logits,
        state.requests,
        state.keys,
        state.seen,
        sampling=job.sampling,
        eos=job.eos,
    )


def _compile_pool(job: Job) -> jax.stages.Compiled:
    """Compiles a pool with no row in use."""

    def make():
        idle = jnp.zeros((job.batch,), jnp.int32)
        like = arguments(job).decode_state.replace(cache=None, keys=None)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return zeros.replace(
            cache=init_state(job), done=idle == 0, keys=row_keys(idle, idle, idle)
        )

    return _placed(job, make).lower().compile()


def _placed(job: Job, make: Callable[[], steps.DecodeState]):
    """Returns a program whose result lies on the mesh as a decode state does."""
    if not job.mesh:
        return jax.jit(make)
    split = jax.tree.map(lambda leaf: leaf.sharding, arguments(job).decode_state)
    return jax.jit(make, out_shardings=split)


def _compile_insert(job: Job) -> jax.stages.Compiled:
    part = arguments(job.group)
    return _compiled(
        steps.insert,
        arguments(job).decode_state,
        part.decode_state.cache,
        part.logits,
        part.decode_state.requests,
        part.decode_state.keys,
        part.rows,
        part.decode_state.seen,
        sampling=job.sampling,
        eos=job.eos,
    )


def _compile_decode(job: Job) -> jax.stages.Compiled:
    shapes, number = arguments(job), jax.ShapeDtypeStruct((), jnp.int32)
    return _compiled(
        steps.decode,
        shapes.params,
        shapes.decode_state,
        number,
        number,
        shapes.prefix,
        **_drawing(job),
    )


def _drawing(job: Job) -> dict[str, Any]:
    """Returns the static arguments of the programs that run a model and draw tokens."""
    return {
        "spec": job.spec,
        "config": job.config,
        "steps": job.steps,
        "sampling": job.sampling,
        "eos": job.eos,
    }


def _compile_mixed(job: Job) -> jax.stages.Compiled:
    shapes, part = arguments(job), arguments(job.group)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return _compiled(
        steps.mixed,
        shapes.params,
        shapes.decode_state,
        part.reading,
        part.tokens,
        part.rows,
        number,
        number,
        shapes.prefix,
        **_drawing(job),
        groups=job.data_parallel,
    )


def _compile_logits(job: Job) -> jax.stages.Compiled:
    shapes = arguments(job)
    last = jax.jit(steps.last_logits, static_argnames="spec")
    return last.lower(shapes.params, shapes.reading.hidden, spec=job.spec).compile()


def _compile_score(job: Job) -> jax.stages.Compiled:
    shapes = arguments(job)
    return _compiled(
        scoring.score,
        shapes.params,
        shapes.decode_state.cache,
        shapes.logits,
        shapes.new,
        shapes.rows,
        spec=job.spec,
        config=job.config,
        keep_logits=job.keep_logits,
    )


class Arguments(NamedTuple):
    """The shapes of all arguments of a job's programs; over a mesh, their shardings."""

    params: PyTree
    prefill_state: cache.KVState
    reading: steps.Reading
    decode_state: steps.DecodeState
    tokens: jax.ShapeDtypeStruct
    rows: jax.ShapeDtypeStruct
    logits: jax.ShapeDtypeStruct
    new: jax.ShapeDtypeStruct
    prefix: Prefix | None


def arguments(job: Job) -> Arguments:
    """Returns the shapes of all arguments of the job's programs."""
    spec, array = job.spec, jax.ShapeDtypeStruct
    rows, floats = array((job.batch,), jnp.int32), array((job.batch,), jnp.float32)
    flags = array((job.batch,), jnp.bool)
    params = decoder.param_shapes(spec, jnp.dtype(job.dtype))
    like = lambda leaf: array(leaf.shape, leaf.dtype)
    params = jax.tree.map(like, with_policy(params, job.config))
    keys = jax.eval_shape(row_keys, rows, rows, rows)
    requests = Requests(
        temperature=floats,
        top_k=rows,
        top_p=floats,
        min_p=floats,
        repetition_penalty=floats,
        left=rows,
        ends=flags,
    )
    seen = array((job.batch, spec.vocab_size), jnp.bool)
    hidden = array((job.batch, spec.model_dim), jnp.dtype(job.dtype))
    after = host.like(functools.partial(init_state, job))
    before = host.like(functools.partial(init_state, job, is_prefill=True))
    shapes = Arguments(
        params=params,
        prefill_state=before,
        reading=steps.Reading(before, hidden, array((), jnp.int32)),
        decode_state=steps.DecodeState(
            after, rows, flags, keys, requests, seen if job.sampling.penalizes else None
        ),
        tokens=array((job.batch, job.max_prompt_len), jnp.int32),
        rows=rows,
        logits=array((job.batch, spec.vocab_size), jnp.float32),
        new=array((job.batch, job.max_new_tokens), jnp.int32),
        prefix=_prefix(job),
    )
    return _split(job, shapes) if job.mesh else shapes


def _split(job: Job, shapes: Arguments) -> Arguments:
    """Returns the shapes with every array's sharding over the job's mesh."""
    by_row = NamedSharding(job.mesh, PartitionSpec(axes.DATA))
    whole = NamedSharding(job.mesh, PartitionSpec())
    state = functools.partial(sharded.state_partitions, job.spec, over=job.mesh)
    params = decoder.param_partitions(job.spec, job.mesh)
    if "policy" in shapes.params:
        params["policy"] = jax.tree.map(lambda _: whole, shapes.params["policy"])
    after = state(job.config, job.decode_capacity)
    before = state(job.config.reading, job.prefill_capacity)
    rows = shapes.decode_state.replace(cache=None)
    decoding = jax.tree.map(lambda _: by_row, rows).replace(cache=after)
    splits = Arguments(
        params,
        before,
        steps.Reading(before, by_row, whole),
        decoding,
        tokens=by_row,
        rows=by_row,
        logits=by_row,
        new=by_row,
        prefix=_prefix_partitions(job, shapes.prefix),
    )
    return jax.tree.map(
        lambda leaf, split: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split
        ),
        shapes,
        splits,
    )


def _prefix(job: Job) -> Prefix | None:
    """Returns the shapes of what the job's rows go on after."""
    if job.prefix is None:
        return None
    config, capacity = job.prefix
    dtype = jnp.dtype(job.dtype)
    make = functools.partial(cache.init, job.spec, config, 1, capacity, dtype)
    return Prefix(host.like(make), config).frozen()


def _prefix_partitions(job: Job, prefix: Prefix | None) -> PyTree:
    if prefix is None:
        return None
    split = functools.partial(NamedSharding, job.mesh)
    return jax.tree.map(split, prefixes.partitions(prefix))


def init_state(job: Job, is_prefill: bool = False) -> cache.KVState:
    """Returns an empty state for the job's batch, to prefill or to decode."""
    config = job.config.reading if is_prefill else job.config
    capacity = job.prefill_capacity if is_prefill else job.decode_capacity
    return cache.init(job.spec, config, job.batch, capacity, jnp.dtype(job.dtype))


def keep_compiled() -> None:
    """Turns on JAX's persistent compilation cache, unless the user has set one up."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update(
            "jax_compilation_cache_dir", str(param_cache.cache_dir() / "xla")
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@jax.jit
def row_keys(
    seeds: Int[Array, "B"], numbers: Int[Array, "B"], samples: Int[Array, "B"]
) -> Array:
    """Returns one PRNG key per row, the same alone, in a batch or in any order.

    Args:
      seeds: of each request's `Sampling`.
      numbers: of each request in its run.
      samples: which of a request's samples the row draws; the first is 0.
    """

    def key(seed, number, sample):
        first = jax.random.fold_in(jax.random.key(seed), number)
        other = jax.random.fold_in(first, sample)
        return jax.random.wrap_key_data(
            jnp.where(sample > 0, *map(jax.random.key_data, (other, first)))
        )

    return axes.constrain(jax.vmap(key)(seeds, numbers, samples), "batch")


def tree_bytes(tree: PyTree) -> int:
    """Returns the bytes on each device, not on its host, of arrays or shapes."""

    def size(leaf):
        split = getattr(leaf, "sharding", None)
        shape = split.shard_shape(leaf.shape) if split else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree))) - host.nbytes(tree)
