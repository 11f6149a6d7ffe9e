"""Which batch a method runs at: Batch-Max's protocol, and a pool.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1::

    ed          b0 - 1, where b0 is the smallest batch at which ED (full prefill, then
                the newest pair only) no longer fits
    full        the same, or the largest that fits if that is less
    batch_max   the largest of D that fits, see `divisors`
    search      the same, at the smallest |kv| that does, see `kvjax.evaluation.search`
    fixed       the method's `batch_size`, such as a paper's, which has to fit
    staggered   the largest pool, then the largest groups, see `kvjax.engine.planner`

Whether a batch fits is read off its compiled programs; `step_back` is for devices that
run out of memory all the same. Over a mesh, batches are what its rows divide.
"""

import dataclasses
from collections.abc import Sequence

from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.planner import (
    Plan,
    check_one_row,
    check_staggered,
    halve_groups,
    plan_if_fits,
    plan_job,
    plan_staggered,
)
from kvjax.messages import Say, silent
from kvjax.types import UserError

BATCH_RULES = ("full", "ed", "batch_max", "search", "fixed", "staggered")


def divisors(count: int) -> list[int]:
    """D of section 4.1: batch sizes that divide the prompts evenly, rising.

    With them no batch is part-filled, and none does work that is not asked for.
    """
    return [size for size in range(1, count + 1) if count % size == 0]


def check(rule: str, job: Job, memory_bytes: int) -> None:
    """Raises UserError for a job that the rule can find no batch for; instant."""
    if rule == "staggered":
        check_staggered(job)
    check_one_row(job, memory_bytes)
    if rule == "fixed":
        least = weights_bytes(job) + max(state_bytes(job).values())
        if least > memory_bytes:
            raise _too_large(job, f"weights and KV state take {least / 1e9:.3g} GB")


def find_batch(
    rule: str, job: Job, memory_bytes: int, count: int, most: int, say: Say = silent
) -> Plan:
    """The batch that a rule gives a job.

    Args:
      rule: of `BATCH_RULES`; `full`, for which `most` is ED's batch, is as `ed`.
      job: whatever batch it names, but for `fixed`, of which it is the batch.
      memory_bytes: the limit.
      count: prompts there are.
      most: no larger batch than that.
      say: told what is compiled.

    Raises:
      UserError: not even one row fits, or not the fixed batch.
    """
    if rule == "fixed":
        say(f"compiling for a batch of {job.batch}", 0)
        if planned := plan_if_fits(job, "batch_size", memory_bytes):
            return planned
        raise _too_large(job, f"compiled, it exceeds {memory_bytes / 1e9:.3g} GB")
    if rule == "staggered":
        return plan_staggered(job, memory_bytes, most, say)
    planned = plan_job(job, memory_bytes, most, say)
    even = rule in ("batch_max", "search")
    sizes = divisors(count) if even else range(1, count + 1)
    sizes = [s for s in sizes if s <= most and s % job.data_parallel == 0]
    planned = _largest(planned, sizes, say)
    if planned.batch < most:
        return planned
    limit = "prompts" if most == count else "ED"
    return dataclasses.replace(planned, limited_by=limit)


def _too_large(job: Job, what: str) -> UserError:
    return UserError(
        f"batch_size {job.batch} of {job.spec.name} does not fit, {what}: give a "
        "smaller batch_size or budget, or more memory"
    )


def _largest(planned: Plan, sizes: Sequence[int], say: Say) -> Plan:
    """The largest size that fits, sought from the plan on; the next one does not."""
    below = [size for size in sizes if size <= planned.batch]
    tried = (_with_batch(planned, size, say) for size in reversed(below))
    found = next(filter(None, tried), planned)
    for size in sizes[len(below) :]:
        larger = _with_batch(planned, size, say)
        if larger is None:
            break
        found = larger
    return found


def _with_batch(planned: Plan, batch: int, say: Say) -> Plan | None:
    say(f"compiling for a batch of {batch}", 0)
    job = dataclasses.replace(planned.job, batch=batch)
    return plan_if_fits(job, planned.limited_by, planned.memory_bytes)


def step_back(rule: str, planned: Plan, count: int, say: Say = silent) -> Plan:
    """The next smaller plan after one that ran out of memory all the same.

    Raises:
      UserError: there is none.
    """
    if rule == "fixed":
        raise _too_large(
            planned.job, f"though {planned.peak_bytes / 1e9:.3g} GB were planned"
        )
    if rule == "staggered" and planned.prefill_groups[0] > 1:
        return dataclasses.replace(halve_groups(planned), limited_by="out of memory")
    fewer = planned.batch - planned.job.data_parallel
    if fewer < 1:
        raise UserError(
            f"one row of {planned.job.spec.name} runs out of memory, though "
            f"{planned.peak_bytes / 1e9:.3g} GB were planned: lower memory_gb, and see "
            "what else uses the device"
        )
    found = find_batch(rule, planned.job, planned.memory_bytes, count, fewer, say)
    return dataclasses.replace(found, limited_by="out of memory")


def turns(count: int, batch: int, least: int) -> list[list[int]]:
    """The prompts of every timed batch: each once, and `least` batches or more.

    All batches are full, as rows cost the same whatever they hold: where the prompts
    are out, the first ones come again.
    """
    rows = batch * max(-(-count // batch), least)
    return [
        [row % count for row in range(start, start + batch)]
        for start in range(0, rows, batch)
    ]
