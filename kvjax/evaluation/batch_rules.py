"""Which batch a method runs at, and how long it takes: Batch-Max's protocol.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1. Whether a batch fits is read
off its compiled programs; `step_back` is for devices that run out of memory all the
same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvjax.engine import api, staggered
from kvjax.engine.compiled import Job
from kvjax.engine.memory import peak_memory
from kvjax.engine.planner import Plan, plan_if_fits, plan_job
from kvjax.types import PyTree, UserError

PROTOCOLS = ("full", "ed", "batch_max", "staggered")


class Timing(NamedTuple):
    """What came of running all prompts.

    Attributes:
      tokens: new tokens of each prompt.
      prefill, decode: seconds of every timed batch.
      measured_bytes: None where it is not known.
    """

    tokens: list[list[int]]
    prefill: list[float]
    decode: list[float]
    measured_bytes: int | None


def divisors(count: int) -> list[int]:
    """D of section 4.1: batch sizes that divide the prompts evenly, rising.

    With them no batch is part-filled, and none does work that is not asked for.
    """
    return [size for size in range(1, count + 1) if count % size == 0]


def find_batch(
    protocol: str, job: Job, memory_bytes: int, count: int, most: int
) -> Plan:
    """The batch that a protocol gives a job.

    `ed` gets b0 - 1, where b0 is the smallest batch that does not fit, and so does
    `full`, whose `most` is ED's; `batch_max` the largest of D that fits, see
    `divisors`; `staggered` the largest pool, then the largest groups.

    Args:
      protocol: of `PROTOCOLS`.
      job: whatever batch it names.
      memory_bytes: the limit.
      count: prompts there are.
      most: no larger batch than that.

    Raises:
      UserError: not even one row fits.
    """
    if protocol == "staggered":
        return staggered.plan_job(job, memory_bytes, most)
    planned = plan_job(job, memory_bytes, most)
    sizes = divisors(count) if protocol == "batch_max" else range(1, count + 1)
    planned = _largest(planned, [size for size in sizes if size <= most])
    if planned.batch < most:
        return planned
    limit = "prompts" if most == count else "ED"
    return dataclasses.replace(planned, limited_by=limit)


def _largest(planned: Plan, sizes: Sequence[int]) -> Plan:
    """The largest size that fits, sought from the plan on; the next one does not."""
    below = [size for size in sizes if size <= planned.batch]
    tried = (_with_batch(planned, size) for size in reversed(below))
    found = next(filter(None, tried), planned)
    for size in sizes[len(below) :]:
        larger = _with_batch(planned, size)
        if larger is None:
            break
        found = larger
    return found


def _with_batch(planned: Plan, batch: int) -> Plan | None:
    job = dataclasses.replace(planned.job, batch=batch)
    return plan_if_fits(job, planned.limited_by, planned.memory_bytes)


def step_back(protocol: str, planned: Plan, count: int) -> Plan:
    """The next smaller plan after one that ran out of memory all the same.

    Raises:
      UserError: there is none.
    """
    if isinstance(planned, staggered.StaggeredPlan) and planned.group > 1:
        return dataclasses.replace(
            staggered.halved(planned), limited_by="out of memory"
        )
    if planned.batch == 1:
        raise UserError(
            f"one row of {planned.job.spec.name} runs out of memory, though "
            f"{planned.peak_bytes / 1e9:.3g} GB were planned: lower memory_gb, and see "
            "what else uses the device"
        )
    found = find_batch(
        protocol, planned.job, planned.memory_bytes, count, planned.batch - 1
    )
    return dataclasses.replace(found, limited_by="out of memory")


def run_planned(
    params: PyTree,
    planned: Plan,
    seed: int,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
) -> api.BatchResult:
    """One batch, as its plan says."""
    if isinstance(planned, staggered.StaggeredPlan):
        return staggered.run_batch(params, planned, prompts, indices, seed)
    return api.run_batch(params, planned.job, prompts, indices, seed)


def turns(count: int, batch: int, repeats: int) -> list[list[int]]:
    """The prompts of every timed batch: each once, and `repeats` batches or more.

    All batches are full, as rows cost the same whatever they hold: where the prompts
    are out, the first ones come again.
    """
    rows = batch * max(-(-count // batch), repeats)
    return [
        [row % count for row in range(start, start + batch)]
        for start in range(0, rows, batch)
    ]


def time_prompts(
    run_batch: Callable[..., api.BatchResult],
    planned: Plan,
    prompts: Sequence[Sequence[int]],
    repeats: int,
) -> Timing:
    """Runs and times batch after batch, see `turns`.

    None is thrown away: programs are compiled by then, and medians of three or more
    forgive the first.

    Args:
      run_batch: of prompts and their numbers.
      planned: for the batch.
      prompts: token ids.
      repeats: batches to time, at least.
    """
    batches = turns(len(prompts), planned.batch, repeats)

    def timed(rows):
        """What the batch leaves, without its state: the next one needs the room."""
        result = run_batch([prompts[i] for i in rows], rows)
        return result.tokens, result.prefill_seconds, result.decode_seconds

    with peak_memory(planned.weights_bytes) as measured:
        done = [timed(rows) for rows in batches]
    tokens: dict[int, list[int]] = {}
    for rows, (new, *_) in zip(batches, done, strict=True):
        tokens |= dict(zip(rows, new, strict=True))
    return Timing(
        tokens=[tokens[i] for i in range(len(prompts))],
        prefill=[seconds for _, seconds, _ in done],
        decode=[seconds for _, _, seconds in done],
        measured_bytes=measured[0] if measured else None,
    )
