"""Staggered prefill: a few prompts at a time are read, compressed and pooled.

A rule that compresses once the prompt is in needs the whole prompt's pairs of every
row that is being read, but not of every row at the same time::

    group of g rows      prefill, full cache  ->  compact to |kv|
                                                      |  written into its rows
    pool of B rows       [ |kv| + new slots ] <-------+
                         decode, all B rows at once

so the batch that decodes is limited by the compressed pairs, as Batch-Max's is, and
not by the prompts'. Batch-Max (arXiv 2412.05693) does not compare with it. Tokens are
those of `api.run_batch`.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.engine import api, compiled
from kvjax.engine.api import BatchResult
from kvjax.engine.compiled import Job
from kvjax.engine.planner import (
    Plan,
    check_one_row,
    memory_model,
    out_of_memory,
    program_bytes,
    state_bytes,
    too_small,
    weights_bytes,
)
from kvjax.types import PyTree, UserError


@dataclasses.dataclass(frozen=True)
class StaggeredPlan(Plan):
    """What fits; `job` is the pool's, its batch B.

    Attributes:
      group: g, prompts that are read at a time. Where it does not divide B, the last
        group begins early enough to be full: some of its rows are read twice.
    """

    group: int

    @property
    def groups(self) -> int:
        """Times that the prefill program runs for a full pool."""
        return -(-self.batch // self.group)

    @property
    def prefill_groups(self) -> tuple[int, int]:
        return self.group, self.groups

    @property
    def starts(self) -> list[int]:
        """The first row of every group."""
        return [
            min(start, self.batch - self.group)
            for start in range(0, self.batch, self.group)
        ]


class Programs(NamedTuple):
    """Compiled executables: those of a group of g rows, and of the pool."""

    init: jax.stages.Compiled
    prefill: jax.stages.Compiled
    compact: jax.stages.Compiled
    init_pool: jax.stages.Compiled
    insert: jax.stages.Compiled
    decode: jax.stages.Compiled


def plan_job(
    job: Job, memory_bytes: int, max_batch: int | None = None
) -> StaggeredPlan:
    """The largest pool of a job, whatever batch it names, then the largest groups.

    The pool is the largest by what memory small ones need, which may be a row too few.
    The groups are as equal as their number allows: 10 rows of which 8 could be read at
    a time are read 5 by 5.

    Args:
      job: with a schedule that compacts after the prompt.
      memory_bytes: for weights, pool, a group's state and temporaries together.
      max_batch: prompts there are.

    Raises:
      UserError: a schedule without a compaction; not even a pool of one row fits.
    """
    check(job)
    check_one_row(job, memory_bytes)
    batch, group, limit = _estimated(job, memory_bytes, max_batch)
    needed = {}
    while batch > 0:
        group = -(-batch // -(-batch // group))
        try:
            needed = phase_bytes(dataclasses.replace(job, batch=batch), group)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            limit = "compiler"
            batch, group = (batch, group // 2) if group > 1 else (batch - 1, 1)
            continue
        worst = max(needed, key=needed.get)
        if needed[worst] <= memory_bytes:
            return _plan(job, batch, group, limit, memory_bytes, needed[worst])
        share = memory_bytes / needed[worst]
        if worst == "decode" or group == 1:
            batch, limit = min(batch - 1, int(batch * share)), worst
            group = min(group, max(batch, 1))
        else:
            group = max(1, min(group - 1, int(group * share)))
    if not needed:
        needed = phase_bytes(dataclasses.replace(job, batch=1), 1)
        worst = max(needed, key=needed.get)
    raise UserError(too_small(job, memory_bytes, worst, needed[worst]))


def halved(planned: StaggeredPlan) -> StaggeredPlan:
    """The same pool, read in groups of half as many rows."""
    job, group = planned.job, planned.group // 2
    peak = max(phase_bytes(job, group).values())
    return _plan(
        job, planned.batch, group, planned.limited_by, planned.memory_bytes, peak
    )


def check(job: Job) -> None:
    """Raises UserError for a job that has nothing to pool, or runs on a mesh."""
    if job.mesh:
        raise UserError("staggered prefill runs on one device: leave the mesh out")
    if not job.config.schedule.compacts:
        raise UserError(
            f"staggered prefill pools what a compaction after the prompt leaves; the "
            f"schedule {job.config.schedule.phases!r} has none: use 'after_prefill'"
        )


def phase_bytes(job: Job, group: int) -> dict[str, int]:
    """Bytes at the peak of each phase, read off the compiled programs.

    The pool and its logits are there while a group is read and compacted, and the
    weights while no program takes them.
    """
    programs = compile_programs(job, group)
    small = dataclasses.replace(job, batch=group)
    weights, pool = weights_bytes(job), _pool_bytes(job)
    logits = compiled.tree_bytes(compiled.arguments(small).logits)
    return {
        "prefill": program_bytes(programs.prefill) + pool,
        "compact": program_bytes(programs.compact) + pool + weights + logits,
        "insert": program_bytes(programs.insert) + weights,
        "decode": program_bytes(programs.decode),
    }


@functools.cache
def compile_programs(job: Job, group: int) -> Programs:
    """Compiles everything that a pool of `job.batch` rows and its groups run."""
    small = dataclasses.replace(job, batch=group)
    put = insert.lower(
        *_handed_over(job), *_handed_over(small), jax.ShapeDtypeStruct((), jnp.int32)
    )
    return Programs(
        init=compiled.compile_init(small, small.prefill_capacity),
        prefill=compiled.compile_prefill(small),
        compact=compiled.compile_compact(small),
        init_pool=compiled.compile_init(job, job.decode_capacity),
        insert=put.compile(),
        decode=compiled.compile_decode(job),
    )


@functools.partial(jax.jit, donate_argnames=("pool", "logits"))
def insert(
    pool: cache.KVState,
    logits: Float[Array, "B V"],
    group: cache.KVState,
    group_logits: Float[Array, "g V"],
    row: Int[Array, ""],
) -> tuple[cache.KVState, Float[Array, "B V"]]:
    """Writes a group into the pool, from `row` on; pool and logits are donated."""

    def put(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, axis=0)

    return jax.tree.map(put, pool, group), put(logits, group_logits)


def run_batch(
    params: PyTree,
    planned: StaggeredPlan,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    seed: int = 0,
) -> BatchResult:
    """Reads up to B prompts group by group and decodes them together.

    Args:
      params: the model's weights.
      planned: from `plan_job`; its programs are compiled if they are not yet.
      prompts: token ids per row; rows that are left over stay unused.
      indices: each prompt's number in the whole run, which seeds its sampling.
      seed: of the whole run.

    Returns:
      As `api.run_batch`; pooling counts as prefill.

    Raises:
      RuntimeError: the state ran out of slots.
    """
    job, programs = planned.job, compile_programs(planned.job, planned.group)
    tokens, lengths = api.pad_prompts(job, prompts)
    keys = api.row_keys(job, indices, seed)
    pool = programs.init_pool()
    logits = jnp.zeros(compiled.arguments(job).logits.shape, jnp.float32)
    jax.block_until_ready((pool, logits, tokens))
    start = time.perf_counter()
    for first in planned.starts:
        rows = slice(first, first + planned.group)
        state, last = programs.prefill(
            params, programs.init(), tokens[rows], lengths[rows]
        )
        state = programs.compact(state)
        pool, logits = programs.insert(pool, logits, state, last, jnp.int32(first))
        jax.block_until_ready(pool)
        del state, last  # the next group's are not to lie beside them
    middle = time.perf_counter()
    decode = functools.partial(programs.decode, params)
    pool, new = api.decode_batch(decode, job, pool, logits, keys, len(prompts))
    end = time.perf_counter()
    cache.raise_errors(pool)
    return BatchResult(new, pool, middle - start, end - middle)


def _estimated(
    job: Job, memory_bytes: int, max_batch: int | None
) -> tuple[int, int, str]:
    """B, g, and what limits B: what decodes, or the pool beside a group of one row."""
    grown = memory_model(job)
    row = _pool_bytes(dataclasses.replace(job, batch=1))
    reading = {phase: grown[phase] for phase in ("prefill", "compact")}
    fixed, decoding = grown["decode"]
    fits = {
        phase: _rows(memory_bytes - least - each, row)
        for phase, (least, each) in reading.items()
    }
    fits["decode"] = _rows(memory_bytes - fixed, decoding)
    limit = min(fits, key=fits.get)
    batch = fits[limit]
    if max_batch is not None and batch >= max_batch:
        limit, batch = "prompts", max_batch
    left = memory_bytes - batch * row
    group = min(_rows(left - least, each) for least, each in reading.values())
    return batch, max(1, min(group, batch)), limit


def _rows(room: float, row: float) -> int:
    return int(max(room, 0) // row)


def _plan(job, batch, group, limit, memory_bytes, peak) -> StaggeredPlan:
    job = dataclasses.replace(job, batch=batch)
    reading = state_bytes(dataclasses.replace(job, batch=group))["prefill"]
    held = state_bytes(job)["decode"] + reading
    weights = weights_bytes(job)
    return StaggeredPlan(job, limit, memory_bytes, peak, weights, held // batch, group)


def _pool_bytes(job: Job) -> int:
    return compiled.tree_bytes(_handed_over(job))


def _handed_over(job: Job) -> tuple[cache.KVState, jax.ShapeDtypeStruct]:
    """Shapes of what decoding begins with: the state, and the logits."""
    given = compiled.arguments(job)
    return given.decode_state, given.logits
