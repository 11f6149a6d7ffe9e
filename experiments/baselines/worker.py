"""Runs batches for `baselines.throughput`, and measures their time and memory.

    python -m baselines.worker

Requests, after the model:

    {"methods": [{policy, ratio, options}, ...], "prompt"}
    {"policy", "ratio", "options", "chunk", "batches", "new", "limit",
     "retain_freed_memory"}

The first request makes all presses, warms up with its prompt, and returns the bytes of
the weights. The second returns the seconds of every batch, the peak bytes of each
phase, the numbers of KV pairs kept, and the tokens; or `out_of_memory` where memory ran
out. With a `limit` it is a rehearsal: it decodes only the last of the new tokens, where
the cache is largest. For `retain_freed_memory` see `Meter`.
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import platform
import time
from typing import NamedTuple

import baselines
from baselines import presses

OUT_OF_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"
LAST = 8  # tokens that a rehearsal decodes
FEW, MANY = 1 << 20, 32 << 20  # bytes, below which glibc keeps freed blocks
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # names of mallopt's parameters


class Meter:
    """Measures the peak bytes after `start`, weights included.

    On a GPU the allocator reports them. On a CPU they are the weights and the growth of
    the resident set. By default glibc retains freed blocks of up to 32 MiB, and
    fragmentation adds up: a batch of 22 that fits into 2 GB took 5.1. Without
    `retain_freed_memory`, blocks of 1 MiB and more return to the system at once, as in
    `kvjax.engine.memory`, at the price of page faults.

    `peak` is None where the system does not report it (not Linux).
    """

    def __init__(self, model, retain_freed_memory: bool):
        self.device = model.device
        self.weights = sum(each.nbytes for each in model.parameters())
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        else:
            _retain_freed(below=MANY if retain_freed_memory else FEW)
            self.before = _resident("VmRSS")

    def start(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                pathlib.Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int | None:
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        top = _resident("VmHWM")
        return None if top is None else self.weights + top - self.before


def _resident(field: str) -> int | None:
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith(field)), None)


def _retain_freed(below: int) -> None:
    """Sets the size from which glibc returns freed blocks to the system."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, below)
        libc.mallopt(TRIM_THRESHOLD, 2 * below)
        libc.malloc_trim(0)


def answer(model, request):
    if "methods" in request:
        for each in request["methods"]:
            _press(**each)
        warm_up(model, request["prompt"])
        return about(model)
    try:
        return run(model, **request)
    except RuntimeError as error:  # of CUDA, of the CPU's allocator, of cuBLAS
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        return {"out_of_memory": str(error).splitlines()[0]}


def warm_up(model, prompt):
    """Uses all cores, and makes libraries allocate what they keep (10 to 20 MB)."""
    import torch

    from baselines import decoding

    if model.device.type == "cpu" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.tensor([prompt], device=model.device)
    decoding.decode(model, decoding.prefill(model, ids), 4)


def about(model):
    """Describes the model's size, the device and the versions."""
    import torch

    gpu = model.device.type == "cuda"
    versions = {"python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["kvpress"] = importlib.metadata.version("kvpress")
    return {
        "weights": sum(each.nbytes for each in model.parameters()),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": None if gpu else torch.get_num_threads(),
        "versions": versions,
    }


def run(model, policy, ratio, options, chunk, batches, new, limit, retain_freed_memory):
    """Runs the batches one after the other."""
    eager = policy in presses.EAGER
    model.set_attn_implementation("eager" if eager else "sdpa")
    press = _press(policy, ratio, options)
    meter = Meter(model, retain_freed_memory)
    every = [_batch(model, press, chunk, rows, new, meter, limit) for rows in batches]
    phases = every[0].seconds
    return {
        "seconds": {phase: [each.seconds[phase] for each in every] for phase in phases},
        "bytes": {
            phase: max(each.bytes[phase] for each in every)
            for phase in phases
            if meter.peak() is not None
        },
        "kept": sorted({count for each in every for count in each.kept}),
        "tokens": [tokens for each in every for tokens in each.tokens],
    }


class Batch(NamedTuple):
    """The result of a batch: by phase, seconds and peak bytes; pairs kept; tokens."""

    seconds: dict[str, float]
    bytes: dict[str, int | None]
    kept: set[int]
    tokens: list[list[int]]


def _batch(model, press, chunk, rows, new, meter, limit) -> Batch:
    """Runs a batch; a rehearsal stops after a prefill that exceeds the limit."""
    import torch

    from baselines import decoding

    done = Batch({}, {}, set(), [])
    ids = torch.tensor(rows, device=model.device)

    def phase(name, call):
        meter.start()
        start = _now(model)
        made = call()
        done.seconds[name] = _now(model) - start
        done.bytes[name] = meter.peak()
        return made

    read = phase("prefill", lambda: decoding.prefill(model, ids, press, chunk))
    done.kept.update(layer.get_seq_length() for layer in read.cache.layers)
    if not limit:
        done.tokens.extend(phase("decode", lambda: decoding.decode(model, read, new)))
    elif (done.bytes["prefill"] or 0) <= limit:
        phase("decode", lambda: _decode_last(model, read, new))
    return done


def _decode_last(model, read, new):
    from baselines import decoding

    steps = min(new, LAST)
    return decoding.decode(model, decoding.skip(read, new - steps), steps)


def _press(policy, ratio, options):
    return presses.make(policy, ratio, **options) if policy else None


def _now(model) -> float:
    """Returns the time in seconds after the device has finished its work."""
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _retain_freed(FEW)  # so that loading leaves nothing behind to fill
    baselines.serve(("torch", "transformers"), answer)
