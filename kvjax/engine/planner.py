"""Finds the largest batch whose weights, KV state and temporaries fit the memory.

A first guess comes from `footprint.phase_model`; then the programs that will run are
compiled, and the batch is lowered until they fit. In a fixed batch all prompts are read
together. Staggered prefill reads them group by group into a pool that decodes::

    group of g rows      prefill, full cache  ->  compact to |kv|
                                                      |  inserted into its rows
    pool of B rows       [ |kv| + new slots ] <-------+
                         decode, all B rows at once

A policy that evicts once the prompt is in needs the whole prompt's pairs of every row
that is being read, but not of every row at once. So the pool's batch is limited by the
compressed pairs, as Batch-Max's is, and not by the prompts. Batch-Max (arXiv
2412.05693) does not compare with it. Tokens are those of a fixed batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache import head_groups
from kvjax.cache.spec import CacheSpec
from kvjax.engine import compiled, footprint
from kvjax.engine.compiled import Programs
from kvjax.engine.footprint import (
    least_bytes,
    phase_bytes,
    phase_model,
    state_bytes,
    weights_bytes,
)
from kvjax.engine.jobs import Job
from kvjax.engine.memory import host_memory
from kvjax.messages import Say, silent
from kvjax.types import UserError

_ROWS_PER_READ = 8  # rows that decode for each prompt that is read beside them


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A batch that fits, and what limits it.

    Attributes:
      job: the batch to run.
      limited_by: the phase ('prefill', 'compact' or 'decode') whose programs would not
        fit with one row more, or 'prompts' when all fit.
      memory_bytes: the limit given.
      peak_bytes: weights, state and temporaries of the largest phase at this batch;
        bytes here are those of each device.
      weights_bytes: of that, the weights.
      row_bytes: the most KV state that one row takes in any phase, on the device.
      host_bytes: the most that the batch's values take in host memory.
      programs: those whose memory was read, ready to run; None if none were compiled.
    """

    job: Job
    limited_by: str
    memory_bytes: int
    peak_bytes: int
    weights_bytes: int
    row_bytes: int
    host_bytes: int = 0
    programs: Programs | None = dataclasses.field(default=None, compare=False)

    @property
    def batch(self) -> int:
        return self.job.batch

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that leaves the context room for new ones."""
        room = self.job.spec.context_length - self.job.max_new_tokens
        return min(self.job.max_prompt_len, room)

    @property
    def prefill_groups(self) -> tuple[int, int]:
        """Rows whose prompts are read at a time, and the number of such groups."""
        rows = self.job.prefill_batch or self.batch
        return rows, -(-self.batch // rows)

    def __repr__(self) -> str:
        job, gigabytes = self.job, lambda count: f"{count / 1e9:.3g} GB"
        beside = (
            f", {gigabytes(self.host_bytes)} on the host" if self.host_bytes else ""
        )
        return (
            f"Plan(batch of {self.batch} for {job.spec.name}, prompts of up to "
            f"{self.longest_prompt:,} tokens and {job.max_new_tokens:,} new: "
            f"{gigabytes(self.peak_bytes)} of {gigabytes(self.memory_bytes)}, of it "
            f"weights {gigabytes(self.weights_bytes)} and KV state "
            f"{self.row_bytes / 1e6:.3g} MB per prompt{beside}; limited by "
            f"{self.limited_by})"
        )


def plan_job(
    job: Job, memory_bytes: int, max_batch: int | None = None, say: Say = silent
) -> Plan:
    """Returns the largest fixed batch of a job, whatever batch it names.

    A batch whose programs a compiler refuses for lack of memory does not fit either.

    Args:
      job: the batch's shape.
      memory_bytes: what weights, state, activations and temporaries may take together
        on each device; see `kvjax.engine.memory.device_memory`.
      max_batch: number of prompts; no larger batch is planned, except for the rows that
        fill up the last group of devices.
      say: receives progress messages.

    Raises:
      UserError: not even one row fits.
    """
    check_one_row(job, memory_bytes)
    job = dataclasses.replace(job, prefill_batch=None)
    if max_batch is not None:
        max_batch = -(-max_batch // job.data_parallel) * job.data_parallel
    most, why = _within_host(job, max_batch)
    if most is not None and _clearly_fits(job, memory_bytes, most):
        return _search(job, memory_bytes, most, None, why, say)
    say("compiling two layers, to see what a prompt takes", 0)
    fits = {
        phase: _rows(memory_bytes - fixed, row, job.data_parallel)
        for phase, (fixed, row) in phase_model(job).items()
    }
    batch, limit = _most_rows(fits, most, why)
    return _search(job, memory_bytes, batch, None, limit, say)


def plan_staggered(
    job: Job, memory_bytes: int, max_batch: int | None = None, say: Say = silent
) -> Plan:
    """Returns the largest pool of a job, and for it the largest groups.

    The pool is estimated from small ones, and may be a row too small. Groups are as
    equal as their number allows: 10 rows of which 8 could be read at a time are read 5
    by 5. Where the groups do not divide the pool, the last one begins early enough to
    be full: some of its rows are read twice.

    Args:
      job: with a schedule that compacts after the prompt.
      memory_bytes: for weights, pool, a group's state and temporaries together.
      max_batch: number of prompts.
      say: receives progress messages.

    Raises:
      UserError: see `check_staggered`; not even a pool of one row fits.
    """
    check_staggered(job)
    check_one_row(job, memory_bytes)
    job = dataclasses.replace(job, prefill_batch=None)
    most, why = _within_host(job, max_batch)
    say("compiling two layers, to see what a prompt takes", 0)
    model = phase_model(job)
    row = footprint.pool_bytes(dataclasses.replace(job, batch=1))
    reading = [model["prefill"], model["compact"]]
    fits = {
        phase: _rows(memory_bytes - sum(model[phase]), row)  # beside a group of one
        for phase in ("prefill", "compact")
    }
    fixed, decoding = model["decode"]
    fits["decode"] = _rows(memory_bytes - fixed, decoding)
    batch, limit = _most_rows(fits, most, why)
    left = memory_bytes - batch * row
    group = min(_rows(left - fixed, each) for fixed, each in reading)
    group = max(1, min(group, batch))
    if limit == "host memory":  # a group's values share it with the pool's
        group = max(1, min(group, batch // 8))
        batch = max(1, batch - group)
    return _search(job, memory_bytes, batch, group, limit, say)


def plan_requests(
    job: Job, memory_bytes: int, most: int, fixed: bool, say: Say = silent
) -> Plan:
    """Returns the rows that requests decode in.

    If all requests fit, they decode together in a fixed batch. If not, as many rows as
    fit are refilled one by one, beside a group of prompts that is being read: an eighth
    of the rows, since every step that reads a chunk of theirs decodes all rows too.

    Args:
      job: the rows' shape.
      memory_bytes: see `plan_job`.
      most: no more rows are planned.
      fixed: whether a fixed batch of that many rows would do.
      say: receives progress messages.

    Raises:
      UserError: not even one row fits.
    """
    check_one_row(job, memory_bytes)
    ways = job.data_parallel
    most = -(-most // ways) * ways
    job = dataclasses.replace(job, prefill_batch=None)
    room, why = _within_host(job, most)
    if fixed and room == most and _clearly_fits(job, memory_bytes, most):
        return _search(job, memory_bytes, most, None, why, say)
    refilled = dataclasses.replace(job, continuous=True)
    group = _group(refilled, most)
    sized = dataclasses.replace(refilled, batch=most, prefill_batch=group)
    states = 2 * sum(state_bytes(sized).values())
    if not fixed and weights_bytes(job) + states <= memory_bytes:
        return _search(refilled, memory_bytes, room, group, why, say)
    say("compiling two layers, to see what a prompt takes", 0)
    model = phase_model(job)
    rows = (_rows(memory_bytes - fixed, row, ways) for fixed, row in model.values())
    if fixed and min(*rows, room) >= most:
        plan = _search(job, memory_bytes, most, None, why, say)
        if plan.batch == most:
            return plan
    one = dataclasses.replace(job, batch=ways)
    beside = model["prefill"][1] + footprint.pool_bytes(one) / ways
    each = model["decode"][1] + beside / _ROWS_PER_READ
    left = memory_bytes - max(base for base, _ in model.values())
    batch = max(min(_rows(left, each, ways), room), ways)
    group = _group(refilled, batch)
    return _search(refilled, memory_bytes, batch, group, "decode", say)


def _group(job: Job, rows: int) -> int:
    """Returns how many prompts are read beside rows that are refilled."""
    return -(-rows // (_ROWS_PER_READ * job.data_parallel)) * job.data_parallel


def _search(
    job: Job, memory_bytes: int, batch: int, group: int | None, limit: str, say: Say
) -> Plan:
    """Lowers the batch, or the rows that are read together, until the programs fit.

    Args:
      job: of any batch.
      memory_bytes: the limit.
      batch: first guess of the rows.
      group: first guess of the rows that are read together; None for all.
      limit: the reason for the first guess.
      say: receives progress messages.
    """
    ways = job.data_parallel
    while batch > 0:
        if group is not None and not job.continuous:
            group = -(-batch // -(-batch // group))
        sized = dataclasses.replace(job, batch=batch, prefill_batch=group)
        together = "" if group is None else f", read {group} at a time"
        say(f"compiling for a batch of {batch}{together}{_price(job.config)}", 0)
        peaks = _peaks_if_compiled(sized)
        if peaks and max(peaks.values()) <= memory_bytes:
            return _planned(sized, limit, memory_bytes, peaks)
        worst = max(peaks, key=peaks.get) if peaks else "compiler"
        share = memory_bytes / peaks[worst] if peaks else None
        if group is not None and group > ways and worst != "decode":
            group = max(ways, _fewer(group, share or 0.5, ways))
        else:
            batch, limit = _fewer(batch, share or 1.0, ways), worst
            group = group and min(group, max(batch, ways))
    raise UserError(_too_small(job, memory_bytes, *_needed(job)))


def _fewer(rows: int, share: float, multiple: int = 1) -> int:
    """Returns that share of the rows, at least one less, in a multiple of devices."""
    fewer = min(rows - 1, int(rows * share))
    return fewer - fewer % multiple


def _rows(room: float, row: float, multiple: int = 1) -> int:
    """Returns how many rows fit."""
    return int(max(room, 0) // row) // multiple * multiple


def _most_rows(fits: dict[str, int], most: int | None, why: str) -> tuple[int, str]:
    """Returns the rows that every phase has room for, and what limits them."""
    limit = min(fits, key=fits.get)
    return (fits[limit], limit) if most is None or fits[limit] < most else (most, why)


def _needed(job: Job) -> tuple[str, int]:
    """Returns the phase that takes the most bytes for one row, and these bytes."""
    needed = {
        phase: int(fixed + job.data_parallel * row)
        for phase, (fixed, row) in phase_model(job).items()
    }
    worst = max(needed, key=needed.get)
    return worst, needed[worst]


def _clearly_fits(job: Job, memory_bytes: int, batch: int) -> bool:
    """Returns whether temporaries may take as much as the state: no need to probe."""
    state = max(state_bytes(dataclasses.replace(job, batch=batch)).values())
    return weights_bytes(job) + 2 * state <= memory_bytes


def _within_host(job: Job, max_batch: int | None) -> tuple[int | None, str]:
    """Returns the most rows whose values fit host memory, and what limits them.

    Raises:
      UserError: not even one row fits.
    """
    if job.config.offload is None:
        return max_batch, "prompts"
    ways = job.data_parallel
    one = dataclasses.replace(job, batch=ways, prefill_batch=None)
    shards = job.mesh.size if job.mesh else 1  # of all devices of one host
    row = footprint.host_bytes(one) * shards // ways
    limit = host_memory(job.config.offload.memory_gb)
    fits = limit // max(row, 1) // ways * ways
    if not fits:
        raise UserError(
            f"host memory of {limit / 1e9:.3g} GB is too small for one row of "
            f"{job.spec.name}, whose values take {row / 1e9:.3g}: give more, keep more "
            "layers on the device, or take a shorter prompt"
        )
    if max_batch is not None and max_batch <= fits:
        return max_batch, "prompts"
    return fits, "host memory"


def plan_by_shapes(job: Job, memory_bytes: int, max_batch: int) -> Plan:
    """Returns a batch to run layer by layer, on one device; compiles nothing.

    Counts the hidden states of its prompts, which one layer hands to the next, and as
    many bytes for temporaries as for the state.

    Raises:
      UserError: not even one row fits.
    """
    state = max(state_bytes(dataclasses.replace(job, batch=1)).values())
    hidden = job.max_prompt_len * job.spec.model_dim * jnp.dtype(job.dtype).itemsize
    row = 2 * state + hidden
    batch = min(max_batch, (memory_bytes - weights_bytes(job)) // row)
    if batch < 1:
        raise UserError(_too_small(job, memory_bytes, "it", weights_bytes(job) + row))
    limit = "prompts" if batch == max_batch else "prefill"
    peak = weights_bytes(job) + batch * row
    sized = dataclasses.replace(job, batch=batch)
    return as_plan(sized, limit, memory_bytes, peak)


def plan_if_fits(job: Job, limit: str, memory_bytes: int) -> Plan | None:
    """Returns the plan of the job as it is; None if its programs do not fit."""
    if _within_host(job, job.batch)[0] < job.batch:
        return None
    peaks = _peaks_if_compiled(job)
    if peaks is None or max(peaks.values()) > memory_bytes:
        return None
    return _planned(job, limit, memory_bytes, peaks)


def halve_groups(plan: Plan) -> Plan:
    """Returns the same pool, read in groups of half as many rows."""
    group = plan.prefill_groups[0] // 2
    job = dataclasses.replace(plan.job, prefill_batch=group)
    return _planned(job, plan.limited_by, plan.memory_bytes, phase_bytes(job))


def check_one_row(job: Job, memory_bytes: int) -> None:
    """Raises UserError if weights and one row's state alone are too large; instant."""
    if (least := least_bytes(job)) > memory_bytes:
        raise UserError(_too_small(job, memory_bytes, "it", least))


def check_staggered(job: Job) -> None:
    """Raises UserError for a job that cannot be pooled, or runs on a mesh."""
    if job.mesh:
        raise UserError("staggered prefill runs on one device: leave the mesh out")
    if not job.config.compacts:
        raise UserError(
            f"staggered prefill pools what a compaction after the prompt leaves; the "
            f"schedule {job.config.schedule.phases!r} has none: use 'after_prefill', "
            "or a codec that waits for the end of the prompt"
        )


def out_of_memory(error: Exception) -> bool:
    """Returns whether a device, or a compiler on its behalf, ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _peaks_if_compiled(job: Job) -> dict[str, int] | None:
    """Returns `phase_bytes`; None if a compiler refuses for lack of memory."""
    try:
        return phase_bytes(job)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return None


def _planned(job: Job, limit: str, memory_bytes: int, peaks: dict[str, int]) -> Plan:
    programs = compiled.programs(job)
    return as_plan(job, limit, memory_bytes, max(peaks.values()), programs)


def as_plan(
    job: Job,
    limit: str,
    memory_bytes: int,
    peak: int,
    programs: Programs | None = None,
) -> Plan:
    """Returns the plan of a job whose largest phase takes `peak` bytes."""
    states = state_bytes(job).values()
    # A group's state and the pool are on the device at the same time.
    most = sum(states) if job.has_pool else max(states)
    return Plan(
        job=job,
        limited_by=limit,
        memory_bytes=memory_bytes,
        peak_bytes=peak,
        weights_bytes=weights_bytes(job),
        row_bytes=most * job.data_parallel // job.batch,
        host_bytes=footprint.host_bytes(job),
        programs=programs,
    )


def _price(config: CacheSpec) -> str:
    """Returns a warning that heads of many sizes take minutes to compile, or "".

    XLA compiles equal kernels once, so another head group of a known shape costs less
    than another shape. Seconds are those of SmolLM2's programs to read and decode, on a
    Xeon of 2023.
    """
    if not config.budget or len(head_groups.distinct_sizes(config.budget)) == 1:
        return ""
    shapes = [
        (head_groups.size_of(sizes, heads), heads and len(heads))
        for sizes in config.budget
        for heads in head_groups.of_sizes(sizes)
    ]
    seconds = len(shapes) + 2.5 * len(set(shapes))
    return (
        f": heads of {len(head_groups.distinct_sizes(config.budget))} sizes, about "
        f"{seconds:.0f} s of CPU time unless cached"
    )


def _too_small(job: Job, memory_bytes: int, what: str, needed: int) -> str:
    return (
        f"memory of {memory_bytes / 1e9:.3g} GB is too small for one row of "
        f"{job.spec.name}: {what} needs at least {needed / 1e9:.3g} GB, weights and KV "
        f"state alone {least_bytes(job) / 1e9:.3g}; give more memory, a smaller budget "
        "or a shorter prompt"
    )
