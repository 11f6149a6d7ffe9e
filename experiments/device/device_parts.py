"""The parts of `device_day.py`, a few minutes each, and their steps.

Each step runs in its own process, so that it finds the device empty and cannot hang or
kill another. It returns rows of its part's table; a row with `error` is a failure.
"""

import dataclasses
import functools
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

import bench_kernels
import jax
import kernel_proofs
import model_step
import numpy as np
from device_runs import (
    METHODS,
    PRECISIONS,
    ROOT,
    check_room,
    precision,
    rivals,
    throughput,
)
from device_sizes import Absent, Asked, Row, Sizes

import kvjax
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.engine import footprint, memory, planner, runner
from kvjax.engine.jobs import Job
from kvjax.evaluation import roofline
from kvjax.models import presets

Step = Callable[[Asked], list[Row]]
MINUTES = 8.0  # per part and call; a later call runs the remaining steps


class Part(NamedTuple):
    """A table of the page.

    Attributes:
      title: its heading.
      minutes: estimated time on a GPU of 80 GB.
      steps: by name.
      environment: of the steps' processes.
      together: whether the steps run concurrently, because they mostly compile and
        time nothing.
    """

    title: str
    minutes: float
    steps: Mapping[str, Step]
    environment: Mapping[str, str] = {}
    together: bool = False


def parts(sizes: Sizes) -> list[Part]:
    """Returns all parts in the order in which they run, from number 1."""
    of = functools.partial
    timed = [{str(shape): of(kernels, shape) for shape in s} for s in sizes.shapes]
    steps = {
        f"{what}, {name or 'chosen'}": of(model, what, name)
        for what in ADVANCES
        for name in (None, "reference")
    }
    shared = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }  # other processes need memory too
    groups = {group: of(proofs, group) for group in sizes.proofs}
    return [
        Part("Kernels against NumPy", 2, groups, shared, together=True),
        Part("Attention of decode steps", 6, timed[0]),
        Part("Attention of prefill blocks", 4, timed[1]),
        Part("Steps of a whole model", 4, steps),
        Part("Memory against its plan", 5, {m: of(peak, m) for m in KEPT}),
        Part("Precision", 5, {name: of(precision, name) for name in PRECISIONS}),
        Part("Beside transformers and kvpress", 7, {"rivals": rivals}, shared),
        *(
            Part(
                f"Throughput, {name}: {group}", 7, {group: of(throughput, name, group)}
            )
            for name in sizes.comparisons
            for group in METHODS
        ),
    ]


def machine() -> Row:
    """Describes the device, its host and the versions."""
    first = jax.devices()[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": first.platform,
        "device": first.device_kind,
        "devices": jax.device_count(),
        "memory GB": limit and limit / 1e9,
        "driver": " ".join(first.client.platform_version.split()),
        "jax": jax.__version__,
        "kvjax": f"{kvjax.__version__} {_revision()}".strip(),
        "python": platform.python_version(),
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _revision() -> str:
    """Returns the commit of the checkout, or "" without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# --- kernels --------------------------------------------------------------------------


def proofs(group: str, asked: Asked) -> list[Row]:
    """Compares the kernels with NumPy in a group of cases."""
    name = kernel_proofs.NAMES[jax.default_backend()]
    rows = [kernel_proofs.prove(case, name) for case in asked.sizes.proofs[group]]
    if all("not taken" in row for row in rows):
        raise Absent(rows[0]["not taken"])
    return rows


def kernels(shape: bench_kernels.Shape, asked: Asked) -> list[Row]:
    """Times every implementation of attention at one shape."""
    rows = bench_kernels.timed([shape], asked.sizes.repeats)
    return [{"shape": name, **row} for name, row in rows.items()]


# --- steps of a whole model -----------------------------------------------------------

ADVANCES = {"decode step": model_step.step, "prefill block": model_step.block}
KINDS = {  # JAX's device kind: the name in `roofline.DEVICES`, and the share of it
    "NVIDIA A100-SXM4-80GB": ("a100-80gb", 1),
    "NVIDIA H100 80GB HBM3": ("h100-sxm", 1),
    "NVIDIA H200": ("h200", 1),
    "TPU v5 lite": ("tpu-v5e", 1),
    "TPU v5": ("tpu-v5p", 1),
    "TPU v5p": ("tpu-v5p", 1),
    "TPU v6 lite": ("tpu-v6e", 1),
    "TPU7x": ("tpu7x", 0.5),  # each of its two cores is a device
}


def model(what: str, implementation: str | None, asked: Asked) -> list[Row]:
    """Times a step of a model with random weights, as a share of its roofline."""
    sizes, spec = asked.sizes, presets.spec(asked.sizes.model)
    rows, slots, steps = sizes.step
    config = model_step.batch_max(spec, slots)
    job = Job(spec, config, rows, slots, steps, "bfloat16")
    pairs = footprint.state_bytes(job)["decode"]
    check_room(spec, job.dtype, memory.device_memory() / 1e9, pairs)
    seconds, read = model_step.timed(
        spec, rows, slots, steps, implementation, advance=ADVANCES[what]
    )
    decoding = what == "decode step"
    tokens = 1 if decoding else config.schedule.prefill_chunk
    held = (slots,) * (spec.num_layers * spec.num_kv_heads)
    work = roofline.step(job, rows, tokens, held, logits=decoding)
    known = roofline.measured_rates("bfloat16")
    share = lambda rates: rates and roofline.seconds([work], rates) / seconds
    return [
        {
            "step": what,
            "attention": implementation or "the best that runs",
            "rows": rows,
            "tokens per row": tokens,
            "pairs per head": slots,
            "ms": 1e3 * seconds,
            "tokens/s": rows * tokens / seconds,
            "GB read": read / 1e9,
            "of measured roofline": share(known),
            "of published roofline": share(
                published_rates(jax.devices()[0].device_kind)
            ),
            "copy GB/s": known.bytes_per_s / 1e9,
            "product TFLOP/s": known.flops_per_s / 1e12,
        }
    ]


def published_rates(kind: str) -> roofline.Rates | None:
    """Returns the published rates of a kind of device; None if unknown."""
    if kind not in KINDS:
        return None
    name, share = KINDS[kind]
    return roofline.Rates(*(share * rate for rate in roofline.device(name).rates))


# --- memory ---------------------------------------------------------------------------

KEPT = {  # policy, schedule, and the number of prefill groups
    "FKV": (None, "none", 1),
    "Batch-Max": ("average_attention", "prefill_and_decode", 1),
    "SnapKV": ("snapkv", "after_prefill", 1),
    "Staggered SnapKV": ("snapkv", "after_prefill", 4),
}


def peak(method: str, asked: Asked) -> list[Row]:
    """Compares the device's peak memory, in a fresh process, with the plan."""
    sizes, spec = asked.sizes, presets.spec(asked.sizes.model)
    limit = memory.device_memory()
    check_room(spec, sizes.dtype, limit / 1e9)
    job = _job(method, sizes)
    plan = planner.plan_if_fits(job, "batch_size", limit)
    if plan is None:
        raise Absent(f"{job.batch} rows do not fit into {limit / 1e9:.3g} GB")
    params = kvjax.load(f"random:{sizes.model}", sizes.dtype).params
    size = plan.batch, job.max_prompt_len
    prompts = np.random.default_rng(0).integers(spec.vocab_size, size=size).tolist()
    with memory.peak_memory(plan.weights_bytes) as measured:
        runner.run_batch(runner.of_plan(params, plan), prompts, range(plan.batch))
    peak_bytes = measured[0] if measured else None
    return [
        {
            "method": method,
            "rows": plan.batch,
            "read at a time": plan.prefill_groups[0],
            "prompt tokens": job.max_prompt_len,
            "new tokens": job.max_new_tokens,
            "planned GB": plan.peak_bytes / 1e9,
            "measured GB": peak_bytes and peak_bytes / 1e9,
            "measured / planned": peak_bytes and peak_bytes / plan.peak_bytes,
            "weights GB": plan.weights_bytes / 1e9,
        }
    ]


def _job(method: str, sizes: Sizes) -> Job:
    """Returns the job whose peak memory is measured."""
    spec = presets.spec(sizes.model)
    rows, prompt, new, budget = sizes.planned
    policy, phases, times = KEPT[method]
    config = make_spec(spec, policy, policy and budget, Schedule(phases))
    job = Job(spec, config, rows, prompt, new, sizes.dtype)
    return dataclasses.replace(job, prefill_batch=rows // times if times > 1 else None)
