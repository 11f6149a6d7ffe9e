"""The bytes that a job takes on each device and on the host.

Bytes of weights and KV state come from `jax.eval_shape`, those of temporaries from the
compiled programs' `memory_analysis()`.
"""

import dataclasses
import functools

import jax

from kvjax.cache import head_groups
from kvjax.engine import compiled
from kvjax.engine.compiled import Programs
from kvjax.engine.jobs import Job
from kvjax.parallel import host

_PROBES = (2, 6)  # batches whose programs show how memory grows with the rows


def weights_bytes(job: Job) -> int:
    """Returns the bytes of the weights, from their shapes."""
    return compiled.tree_bytes(compiled.arguments(job).params)


def state_bytes(job: Job) -> dict[str, int]:
    """Returns the bytes of the KV state in each phase, from its shapes."""
    states = {
        "prefill": compiled.arguments(job.group).prefill_state,
        "decode": compiled.arguments(job).decode_state.cache,
    }
    return {phase: compiled.tree_bytes(state) for phase, state in states.items()}


def pool_bytes(job: Job) -> int:
    """Returns the bytes of the decode state of all rows, from its shapes."""
    return compiled.tree_bytes(compiled.arguments(job).decode_state)


def least_bytes(job: Job) -> int:
    """Returns the bytes of the weights and of one row's KV state."""
    one = dataclasses.replace(job, batch=job.data_parallel, prefill_batch=None)
    return weights_bytes(job) + max(state_bytes(one).values())


def host_bytes(job: Job) -> int:
    """Returns the most that a batch's offloaded values take in host memory."""
    if job.config.offload is None:
        return 0
    read, group, pool = _host_bytes_of(job)
    if job.has_pool:
        return pool + read + group
    return read + group if job.config.compacts else max(read, pool)


def _host_bytes_of(job: Job) -> tuple[int, int, int]:
    """Returns host bytes of the group being read, the same compacted, and the pool."""
    group, pool = compiled.arguments(job.group), compiled.arguments(job).decode_state
    read, compacted, pool = map(
        host.nbytes, (group.prefill_state, group.decode_state, pool)
    )
    return read, compacted, pool


def phase_bytes(job: Job) -> dict[str, int]:
    """Returns the bytes at the peak of each phase, from the compiled programs.

    Arrays that a program does not take may be on the device too, and are counted: the
    weights during compaction, and the pool while a group's prompts are read.
    """
    return _peaks(job, compiled.programs(job))


def phase_model(job: Job) -> dict[str, tuple[float, float]]:
    """Returns for each phase the bytes without any row, and those that a row adds.

    Temporaries do not grow with the number of layers, so a model of two layers is
    compiled, at two small batches; the other layers are added from their shapes.
    """
    few, many = (probe * job.data_parallel for probe in _PROBES)
    small, large = _estimate(job, few), _estimate(job, many)
    step = many - few
    rows = {phase: (large[phase] - small[phase]) / step for phase in small}
    return {
        phase: (max(small[phase] - few * row, 0.0), row) for phase, row in rows.items()
    }


def program_bytes(compiled: jax.stages.Compiled, on_host: int = 0) -> int:
    """Returns the bytes that a program holds on the device.

    Outputs that alias an input are counted once.

    Args:
      compiled: the program.
      on_host: bytes of its arguments and results on the host, which a CPU's compiler
        counts as the device's.
    """
    m = compiled.memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    apart = m.host_argument_size_in_bytes + m.host_output_size_in_bytes
    return held + m.temp_size_in_bytes - (0 if apart else on_host)


def _peaks(job: Job, programs: Programs) -> dict[str, int]:
    weights = weights_bytes(job)
    logits = compiled.tree_bytes(compiled.arguments(job.group).logits)
    beside = pool_bytes(job) if job.has_pool else 0
    read, group, pool = _host_bytes_of(job)
    peaks = {"prefill": program_bytes(programs.prefill, read) + beside}
    if programs.compact:
        held = program_bytes(programs.compact, read + group)
        peaks["compact"] = held + weights + logits + beside
    if programs.insert:
        peaks["insert"] = program_bytes(programs.insert, pool + group) + weights
    peaks["decode"] = program_bytes(programs.decode, pool)
    if programs.mixed:
        peaks["mixed"] = program_bytes(programs.mixed, pool + read)
    if programs.begin:
        first = program_bytes(programs.begin, group) + weights + beside
        peaks["decode"] = max(peaks["decode"], first)
    return peaks


@functools.lru_cache(maxsize=256)
def _probed(job: Job) -> dict[str, int]:
    """Returns `phase_bytes` of a job that is not going to run."""
    return _peaks(job, compiled.compile_job(job))


def _estimate(job: Job, batch: int) -> dict[str, int]:
    """Returns `phase_bytes` from those of two layers and the other layers' shapes."""
    short = dataclasses.replace(_largest_layers(job, 2), batch=batch)
    whole = dataclasses.replace(job, batch=batch)
    weights = weights_bytes(job) - weights_bytes(short)
    every, two = state_bytes(whole), state_bytes(short)
    more = {phase: weights + every[phase] - two[phase] for phase in every}
    more["compact"] = more["prefill"] + every["decode"] - two["decode"]
    return {phase: peak + more[phase] for phase, peak in _probed(short).items()}


def _largest_layers(job: Job, count: int) -> Job:
    """Returns the job of a model of its `count` largest layers."""
    spec, config = job.spec, job.config
    count = min(count, spec.num_layers)
    stored = config.layer_codecs
    stored = (*stored[: count - 1], stored[-1]) if stored else ()
    slots = lambda sizes: sum(head_groups.sizes_per_head(sizes, spec.num_kv_heads))

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
