"""Planning staggered prefill: prompts read group by group into a pool that decodes.

A rule that compresses once the prompt is in needs the whole prompt's pairs of every
row that is being read, but not of every row at the same time::

    group of g rows      prefill, full cache  ->  compact to |kv|
                                                      |  written into its rows
    pool of B rows       [ |kv| + new slots ] <-------+
                         decode, all B rows at once

so the batch that decodes is limited by the compressed pairs, as Batch-Max's is, and
not by the prompts'. Batch-Max (arXiv 2412.05693) does not compare with it. Tokens are
those of a fixed batch; `kvjax.engine.runner` runs both.
"""

import dataclasses

import jax

from kvjax.engine import compiled
from kvjax.engine.compiled import Job
from kvjax.engine.planner import (
    Plan,
    as_plan,
    check_one_row,
    memory_model,
    out_of_memory,
    phase_bytes,
    too_small,
    within_host,
)
from kvjax.messages import Say, silent
from kvjax.types import UserError


def plan_job(
    job: Job, memory_bytes: int, max_batch: int | None = None, say: Say = silent
) -> Plan:
    """The largest pool of a job, whatever batch it names, then the largest groups.

    The pool is the largest by what memory small ones need, which may be a row too few.
    The groups are as equal as their number allows: 10 rows of which 8 could be read at
    a time are read 5 by 5. Where the groups do not divide the pool, the last one begins
    early enough to be full: some of its rows are read twice.

    Args:
      job: with a schedule that compacts after the prompt.
      memory_bytes: for weights, pool, a group's state and temporaries together.
      max_batch: prompts there are.
      say: told what is compiled.

    Raises:
      UserError: a schedule without a compaction; not even a pool of one row fits.
    """
    check(job)
    job = dataclasses.replace(job, prefill_batch=None)
    check_one_row(job, memory_bytes)
    most = within_host(job, max_batch)
    say("compiling two layers, to see what a prompt takes", 0)
    batch, group, limit = _estimated(job, memory_bytes, *most)
    if limit == "host memory":  # which a group's values share with the pool's
        group = max(1, min(group, batch // 8))
        batch = max(1, batch - group)
    needed = {}
    while batch > 0:
        group = -(-batch // -(-batch // group))
        sized = dataclasses.replace(job, batch=batch, prefill_batch=group)
        say(f"compiling for a batch of {batch}, read {group} at a time", 0)
        try:
            needed = phase_bytes(sized)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            limit = "compiler"
            batch, group = (batch, group // 2) if group > 1 else (batch - 1, 1)
            continue
        worst = max(needed, key=needed.get)
        if needed[worst] <= memory_bytes:
            programs = compiled.programs(sized)
            return as_plan(sized, limit, memory_bytes, needed[worst], programs)
        share = memory_bytes / needed[worst]
        if worst == "decode" or group == 1:
            batch, limit = min(batch - 1, int(batch * share)), worst
            group = min(group, max(batch, 1))
        else:
            group = max(1, min(group - 1, int(group * share)))
    if not needed:
        needed = phase_bytes(dataclasses.replace(job, batch=1, prefill_batch=1))
    worst = max(needed, key=needed.get)
    raise UserError(too_small(job, memory_bytes, worst, needed[worst]))


def halved(planned: Plan) -> Plan:
    """The same pool, read in groups of half as many rows."""
    group = planned.prefill_groups[0] // 2
    job = dataclasses.replace(planned.job, prefill_batch=group)
    peak = max(phase_bytes(job).values())
    programs = compiled.programs(job)
    return as_plan(job, planned.limited_by, planned.memory_bytes, peak, programs)


def check(job: Job) -> None:
    """Raises UserError for a job that has nothing to pool, or runs on a mesh."""
    if job.mesh:
        raise UserError("staggered prefill runs on one device: leave the mesh out")
    if not job.config.compacts:
        raise UserError(
            f"staggered prefill pools what a compaction after the prompt leaves; the "
            f"schedule {job.config.schedule.phases!r} has none: use 'after_prefill', "
            "or a codec that waits for the end of the prompt"
        )


def _estimated(
    job: Job, memory_bytes: int, max_batch: int | None, why: str
) -> tuple[int, int, str]:
    """B, g, and what limits B: what decodes, or the pool beside a group of one row."""
    grown = memory_model(job)
    one = dataclasses.replace(job, batch=1)
    row = compiled.tree_bytes(compiled.arguments(one).decode_state)
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
        limit, batch = why, max_batch
    left = memory_bytes - batch * row
    group = min(_rows(left - least, each) for least, each in reading.values())
    return batch, max(1, min(group, batch)), limit


def _rows(room: float, row: float) -> int:
    return int(max(room, 0) // row)
