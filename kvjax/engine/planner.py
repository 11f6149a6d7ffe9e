"""Memory arithmetic: the largest batch whose weights, state and temporaries fit.

Bytes of weights and state come from `jax.eval_shape`, those of temporaries from the
compiled programs' `memory_analysis()`. Temporaries do not grow with the layers, so they
are first read off a two-layer model at two small batches, and then checked on the
program that will run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache import parts
from kvjax.cache.spec import CacheSpec
from kvjax.engine import compiled
from kvjax.engine.compiled import Job, Programs
from kvjax.messages import Say, silent
from kvjax.parallel import host, limits
from kvjax.types import UserError, real_number

_PROBES = (2, 6)  # batches that the temporaries' growth is read from


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What fits, and what stopped it from being more.

    Attributes:
      job: the batch to run.
      limited_by: the phase ('prefill', 'compact' or 'decode') whose programs would not
        fit with one row more, or 'prompts' when all fit.
      memory_bytes: the limit given.
      peak_bytes: weights, state and temporaries of the largest phase at this batch, as
        all bytes here on each device.
      weights_bytes: of that, the weights.
      row_bytes: the most KV state that one row takes in any phase, on the device.
      host_bytes: the most that the batch's values take in host memory.
      programs: those whose memory was read, ready to run; None where it was not.
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
        """Tokens of the longest prompt that the context holds beside the new ones."""
        room = self.job.spec.context_length - self.job.max_new_tokens
        return min(self.job.max_prompt_len, room)

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

    @property
    def prefill_groups(self) -> tuple[int, int]:
        """Rows whose prompts are read at a time, and how many times."""
        rows = self.job.prefill_batch or self.batch
        return rows, -(-self.batch // rows)


def plan_job(
    job: Job, memory_bytes: int, max_batch: int | None = None, say: Say = silent
) -> Plan:
    """The largest batch of a job, whatever batch it names.

    A batch whose programs a compiler refuses for lack of memory does not fit either.

    Args:
      job: the batch's shape.
      memory_bytes: what weights, state, activations and temporaries may take together
        on each device; see `device_memory`.
      max_batch: prompts there are; no larger batch is planned, but for the rows that
        fill up the last group of devices.
      say: told what is compiled.

    Raises:
      UserError: not even one row fits.
    """
    check_one_row(job, memory_bytes)
    if max_batch is not None:
        max_batch = -(-max_batch // job.data_parallel) * job.data_parallel
    most, why = within_host(job, max_batch)
    if most is not None and _clearly_fits(job, memory_bytes, most):
        limit, batch = why, most
    else:
        say("compiling two layers, to see what a prompt takes", 0)
        limit, batch = _estimated(job, memory_bytes)
        if most is not None and batch >= most:
            limit, batch = why, most
    while batch > 0:
        planned = dataclasses.replace(job, batch=batch)
        say(f"compiling for a batch of {batch}{_price(job.config)}", 0)
        try:
            peaks = phase_bytes(planned)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            limit, batch = "compiler", batch - job.data_parallel
            continue
        worst = max(peaks, key=peaks.get)
        if peaks[worst] <= memory_bytes:
            programs = compiled.programs(planned)
            return as_plan(planned, limit, memory_bytes, peaks[worst], programs)
        limit = worst
        batch = min(batch - 1, int(batch * memory_bytes / peaks[worst]))
        batch -= batch % job.data_parallel
    needed = {
        phase: int(fixed + job.data_parallel * row)
        for phase, (fixed, row) in memory_model(job).items()
    }
    worst = max(needed, key=needed.get)
    raise UserError(too_small(job, memory_bytes, worst, needed[worst]))


def within_host(job: Job, max_batch: int | None) -> tuple[int | None, str]:
    """The most rows whose values host memory has room for, and what stops at that.

    Args:
      job: of any batch.
      max_batch: prompts there are; None for any number.

    Raises:
      UserError: not even one row fits.
    """
    if job.config.offload is None:
        return max_batch, "prompts"
    ways = job.data_parallel
    few = _host_bytes(dataclasses.replace(job, batch=ways, prefill_batch=None))
    row = few * (job.mesh.size if job.mesh else 1) // ways  # of all devices, one host
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
    """A batch to run layer by layer, on one device: what fits, compiling nothing.

    Counts the hidden states of its prompts, which one layer hands to the next, and as
    much room for temporaries as the state takes. At most `max_batch` rows.

    Raises:
      UserError: not even one row fits.
    """
    state = max(state_bytes(dataclasses.replace(job, batch=1)).values())
    hidden = job.max_prompt_len * job.spec.model_dim * jnp.dtype(job.dtype).itemsize
    row = 2 * state + hidden
    batch = min(max_batch, (memory_bytes - weights_bytes(job)) // row)
    if batch < 1:
        raise UserError(too_small(job, memory_bytes, "it", weights_bytes(job) + row))
    limit = "prompts" if batch == max_batch else "prefill"
    peak = weights_bytes(job) + batch * row
    return as_plan(dataclasses.replace(job, batch=batch), limit, memory_bytes, peak)


def check_one_row(job: Job, memory_bytes: int) -> None:
    """Raises UserError if weights and one row's state alone are too much; instant."""
    if _least(job) > memory_bytes:
        raise UserError(too_small(job, memory_bytes, "it", _least(job)))


def phase_bytes(job: Job) -> dict[str, int]:
    """Bytes at the peak of each phase, read off the compiled programs.

    What a program does not take as an argument may be there all the same: the weights
    while pairs are compacted, and the pool while a group's prompts are read.
    """
    return _peaks(job, compiled.programs(job))


@functools.lru_cache(maxsize=256)
def _probed(job: Job) -> dict[str, int]:
    """`phase_bytes` of a job that is not going to run."""
    return _peaks(job, compiled.compile_job(job))


def _peaks(job: Job, programs: Programs) -> dict[str, int]:
    weights, group = weights_bytes(job), compiled.arguments(job.group)
    logits = compiled.tree_bytes(group.logits)
    whole = compiled.arguments(job).decode_state
    pool = compiled.tree_bytes(whole) if job.is_staggered else 0
    read, part, kept = map(
        host.nbytes, (group.prefill_state, group.decode_state, whole)
    )
    peaks = {"prefill": program_bytes(programs.prefill, read) + pool}
    if programs.compact:
        found = program_bytes(programs.compact, read + part)
        peaks["compact"] = found + weights + logits + pool
    if programs.insert:
        peaks["insert"] = program_bytes(programs.insert, kept + part) + weights
    peaks["decode"] = program_bytes(programs.decode, kept)
    if programs.begin:
        first = program_bytes(programs.begin, part) + weights + pool
        peaks["decode"] = max(peaks["decode"], first)
    return peaks


def _host_bytes(job: Job) -> int:
    """The most that a batch's values take in host memory, from their shapes."""
    if job.config.offload is None:
        return 0
    group, kept = compiled.arguments(job.group), compiled.arguments(job).decode_state
    read, part, kept = map(host.nbytes, (group.prefill_state, group.decode_state, kept))
    if job.is_staggered:
        return kept + read + part
    return read + part if job.config.compacts else max(read, kept)


def state_bytes(job: Job) -> dict[str, int]:
    """Bytes of the KV state in each phase, from its shapes."""
    read, written = compiled.arguments(job.group), compiled.arguments(job)
    parts = {"prefill": read.prefill_state, "decode": written.decode_state.cache}
    return {phase: compiled.tree_bytes(state) for phase, state in parts.items()}


def device_memory(memory_gb: float | None = None) -> int:
    """Bytes that weights, state and temporaries may take together.

    Args:
      memory_gb: the limit in units of 1e9 bytes. None is 92% of the own limit of the
        smallest device on GPU and TPU, and half of the free memory of the machine, or
        of the container, on a CPU, which its virtual devices share.

    Raises:
      UserError: a limit that is not positive, or above the device's own (on a CPU, all
        of the machine's or the container's memory).
    """
    own = limits.device_bytes()
    if memory_gb is None:
        return own or limits.free_host_bytes() // 2 // len(jax.local_devices())
    if real_number("memory_gb", memory_gb) <= 0:
        raise UserError(f"memory_gb {memory_gb}: must be larger than 0")
    own = own or limits.host_bytes()
    if memory_gb * 1e9 > own:
        offered = own // 10**8 / 10
        raise UserError(f"memory_gb {memory_gb}: the device offers {offered}")
    return int(memory_gb * 1e9)


def host_memory(memory_gb: float | None = None) -> int:
    """Bytes of host memory that values may take.

    Args:
      memory_gb: the limit in units of 1e9 bytes; None is half of what is free.

    Raises:
      UserError: a limit above the machine's memory.
    """
    if memory_gb is None:
        return limits.free_host_bytes() // 2
    if memory_gb * 1e9 > (own := limits.host_bytes()):
        offered = own // 10**8 / 10
        raise UserError(f"offload memory_gb {memory_gb}: the machine offers {offered}")
    return int(memory_gb * 1e9)


def _clearly_fits(job: Job, memory_bytes: int, batch: int) -> bool:
    """Whether so many rows leave as much again for temporaries: no need to probe."""
    state = max(state_bytes(dataclasses.replace(job, batch=batch)).values())
    return weights_bytes(job) + 2 * state <= memory_bytes


def _estimated(job: Job, memory_bytes: int) -> tuple[str, int]:
    """The phase that limits the batch, and the batch that it allows."""
    fits = {
        phase: int((memory_bytes - fixed) // row)
        // job.data_parallel
        * job.data_parallel
        if memory_bytes > fixed
        else 0
        for phase, (fixed, row) in memory_model(job).items()
    }
    limit = min(fits, key=fits.get)
    return limit, fits[limit]


def memory_model(job: Job) -> dict[str, tuple[float, float]]:
    """Per phase, the bytes that are always there and those that each row adds."""
    few, many = (probe * job.data_parallel for probe in _PROBES)
    small, large = _estimate(job, few), _estimate(job, many)
    step = many - few
    rows = {phase: (large[phase] - small[phase]) / step for phase in small}
    return {
        phase: (max(small[phase] - few * row, 0.0), row) for phase, row in rows.items()
    }


def _estimate(job: Job, batch: int) -> dict[str, int]:
    """`phase_bytes` from those of two layers and the other layers' shapes."""
    short = dataclasses.replace(_largest_layers(job, 2), batch=batch)
    whole = dataclasses.replace(job, batch=batch)
    weights = weights_bytes(job) - weights_bytes(short)
    before, after = state_bytes(whole), state_bytes(short)
    more = {phase: weights + before[phase] - after[phase] for phase in before}
    more["compact"] = more["prefill"] + before["decode"] - after["decode"]
    return {phase: peak + more[phase] for phase, peak in _probed(short).items()}


def _price(config: CacheSpec) -> str:
    """Says what compiling costs where heads differ, which takes minutes.

    XLA compiles equal kernels once, so a part costs less than another shape. Seconds
    are those of SmolLM2's programs to read and decode, on a Xeon of 2023.
    """
    if not config.budget or len(parts.different(config.budget)) == 1:
        return ""
    shapes = [
        (parts.size_of(sizes, heads), heads and len(heads))
        for sizes in config.budget
        for heads in parts.of_sizes(sizes)
    ]
    seconds = len(shapes) + 2.5 * len(set(shapes))
    return (
        f": heads of {len(parts.different(config.budget))} sizes, about {seconds:.0f} "
        "s of CPU time unless cached"
    )


def _largest_layers(job: Job, count: int) -> Job:
    """The job of a model of so few layers: the largest stand for all temporaries."""
    spec, config = job.spec, job.config
    count = min(count, spec.num_layers)
    stored = config.layer_codecs
    stored = (*stored[: count - 1], stored[-1]) if stored else ()
    slots = lambda sizes: sum(parts.each_head(sizes, spec.num_kv_heads))

    def size(index):
        held = slots(config.budget[index]) if config.budget else 0
        return held, spec.sliding_window(index) or spec.context_length

    largest = sorted(range(spec.num_layers), key=size)[-count:]
    of_these = lambda every: every and tuple(every[index] for index in largest)
    return dataclasses.replace(
        job,
        spec=dataclasses.replace(
            spec, num_layers=count, sliding_windows=of_these(spec.sliding_windows)
        ),
        config=dataclasses.replace(
            config,
            budget=of_these(config.budget),
            windows=of_these(config.windows),
            layer_codecs=stored,
        ),
    )


def plan_if_fits(job: Job, limit: str, memory_bytes: int) -> Plan | None:
    """The plan of the job as it is, or None if its compiled programs do not fit."""
    if within_host(job, job.batch)[0] < job.batch:
        return None
    try:
        peak = max(phase_bytes(job).values())
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return None
    if peak > memory_bytes:
        return None
    return as_plan(job, limit, memory_bytes, peak, compiled.programs(job))


def out_of_memory(error: Exception) -> bool:
    """Whether a device, or a compiler on its behalf, has run out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def as_plan(
    job: Job,
    limit: str,
    memory_bytes: int,
    peak: int,
    programs: Programs | None = None,
) -> Plan:
    held = state_bytes(job).values()  # of a group and its pool, at the same time
    most = sum(held) if job.is_staggered else max(held)
    row = most * job.data_parallel // job.batch
    sizes = memory_bytes, peak, weights_bytes(job), row, _host_bytes(job)
    return Plan(job, limit, *sizes, programs)


def too_small(job: Job, memory_bytes: int, what: str, needed: int) -> str:
    return (
        f"memory of {memory_bytes / 1e9:.3g} GB is too small for one row of "
        f"{job.spec.name}: {what} needs at least {needed / 1e9:.3g} GB, weights and KV "
        f"state alone {_least(job) / 1e9:.3g}; give more memory, a smaller budget or a "
        "shorter prompt"
    )


def _least(job: Job) -> int:
    """Bytes of the weights and of one row's state."""
    return weights_bytes(job) + max(
        state_bytes(dataclasses.replace(job, batch=job.data_parallel)).values()
    )


def weights_bytes(job: Job) -> int:
    """Bytes of the weights, from their shapes."""
    return compiled.tree_bytes(compiled.arguments(job).params)


def program_bytes(compiled: jax.stages.Compiled, on_host: int = 0) -> int:
    """Bytes a program holds on the device; aliased outputs live in their inputs.

    Args:
      compiled: the program.
      on_host: bytes of what it takes and gives on the host, which a CPU's compiler
        counts as the device's.
    """
    m = compiled.memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    apart = m.host_argument_size_in_bytes + m.host_output_size_in_bytes
    return held + m.temp_size_in_bytes - (0 if apart else on_host)
