"""Batch rules, which choose the batch of a method in a throughput experiment.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1::

    ed          b0 - 1, where b0 is the smallest batch at which ED (full prefill, then
                only the newest KV pair) no longer fits
    full        ED's batch, or the largest that fits if that is smaller
    batch_max   the largest of D that fits, see `divisors`
    search      as batch_max, with the smallest |kv| that keeps the score, see
                `kvjax.evaluation.search`
    fixed       the method's `batch_size`, such as a paper's; it must fit
    staggered   the largest pool, then the largest prefill groups, see
                `kvjax.engine.planner`

The compiled programs show whether a batch fits. `step_back` handles devices that still
run out of memory. On a mesh, batches are multiples of its data axis.
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
    """Returns D of section 4.1: the divisors of the number of prompts, ascending.

    With these batch sizes all batches are full, so no padding rows are computed.
    """
    return [size for size in range(1, count + 1) if count % size == 0]


def check(rule: str, job: Job, memory_bytes: int) -> None:
    """Raises UserError if no batch of the job can fit under the rule; instant."""
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
    """Returns the plan of a job under a batch rule, for `count` prompts.

    The job's own batch is used only under `fixed`. `most` is the largest batch; for
    `full`, ED's.

    Raises:
      UserError: one row does not fit, or the fixed batch does not.
    """
    if rule == "fixed":
        say(f"compiling for a batch of {job.batch}", 0)
        if planned := plan_if_fits(job, "batch_size", memory_bytes):
            return planned
        raise _too_large(job, f"compiled, it exceeds {memory_bytes / 1e9:.3g} GB")
    if rule == "staggered":
        return plan_staggered(job, memory_bytes, most, say)
    planned = plan_job(job, memory_bytes, most, say)
    divides = rule in ("batch_max", "search")
    sizes = divisors(count) if divides else range(1, count + 1)
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
    """Returns the plan of the largest size that fits, searching from `planned`."""
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
    """Returns the next smaller plan after one that ran out of memory.

    Raises:
      UserError: there is no smaller batch.
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
    """Returns the prompts of each timed batch: all prompts, in `least` batches or more.

    All batches are full, since an empty row costs as much as one with a prompt: after
    the last prompt, the first ones are repeated.
    """
    rows = batch * max(-(-count // batch), least)
    return [
        [row % count for row in range(start, start + batch)]
        for start in range(0, rows, batch)
    ]
