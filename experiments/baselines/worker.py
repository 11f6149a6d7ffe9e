"""The other interpreter's side of `baselines.throughput`: runs, weighs, times batches.

    python -m baselines.worker

Requests, after the model:

    {"methods": [{policy, ratio, options}, ...], "prompt"}
    {"policy", "ratio", "options", "chunk", "batches", "new", "limit",
     "retain_freed_memory"}

The first asks whether all presses can be made, and for the model's shape; its prompt is
one to warm up with. The second answers with the seconds of every batch, the bytes at
the peak of each phase, how many pairs were kept, and the tokens; or, where memory ran
out, with `out_of_memory`. With a `limit` it is a rehearsal: of the new tokens only the
last ones are decoded, where the cache is largest. For `retain_freed_memory` see
`Meter`.
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
    """Peak bytes, the weights included, of what runs after `start`.

    On a GPU they are the allocator's. On a CPU they are the growth of the resident set
    and the weights. By itself glibc keeps freed blocks of up to 32 MiB for later, and
    those between others in use add up: a batch of 22 that fits into 2 GB took 5.1.
    Without `retain_freed_memory` blocks of 1 MiB and more go back to the system at
    once, as they do in `kvjax.engine.memory`, which costs page faults.

    Where the system does not tell (no Linux), `peak` is None.
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
    """Which freed blocks glibc keeps; other C libraries have no such choice."""
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
    """All cores; and memory that libraries take once and keep, 10 to 20 MB, taken."""
    import torch

    from baselines import decoding

    if model.device.type == "cpu" and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.tensor([prompt], device=model.device)
    decoding.decode(model, decoding.prefill(model, ids), 4)


def about(model):
    """The model's shape, and what it runs on."""
    import torch

    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None)
    shape = {
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "head_dim": head_dim or config.hidden_size // heads,
        "model_dim": config.hidden_size,
        "ff_dim": config.intermediate_size,
        "vocab": config.vocab_size,
        "element": model.dtype.itemsize,
        "weights": sum(each.nbytes for each in model.parameters()),
    }
    gpu = model.device.type == "cuda"
    versions = {"python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["kvpress"] = importlib.metadata.version("kvpress")
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": None if gpu else torch.get_num_threads(),
        "versions": versions,
    }


def run(model, policy, ratio, options, chunk, batches, new, limit, retain_freed_memory):
    """Batches one after the other."""
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
    """What one batch came to: by phase, seconds and peak bytes; pairs kept; tokens."""

    seconds: dict[str, float]
    bytes: dict[str, int | None]
    kept: set[int]
    tokens: list[list[int]]


def _batch(model, press, chunk, rows, new, meter, limit) -> Batch:
    """A rehearsal ends after the prompts if they are over the limit."""
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
    """Seconds, when all that was asked of the device is done."""
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _retain_freed(FEW)  # so that loading leaves nothing behind to fill
    baselines.serve(("torch", "transformers"), answer)
