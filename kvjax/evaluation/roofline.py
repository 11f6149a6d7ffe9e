"""Rooflines: the rates that a plan could reach, from counted work and a device's rates.

One step takes at least the longest of three times: its FLOPs over the matrix rate, its
bytes over the memory bandwidth, and the bytes of values in host memory over the link's
bandwidth (Williams et al. 2009, "Roofline"). A phase takes the sum of its steps. The
counts below are of what the method needs, with the axes of `kvjax.types`, C the pairs
that a head holds including the T new ones (at most the layer's window), b the bytes of
a number, and 2 D b those of a pair, or what its codec stores::

    FLOPs of a step      2 * B * T * (weights of the layers' matrices)
                       + 2 * B * V * M                      if it ends in logits
                       + 4 * K * G * D * T * C * B          for every layer
    bytes of a step      (all weights of the layers) * b    once
                       + V * M * b                          if it ends in logits
                       + 2 * K * D * (C + T) * B * b        for every layer
    bytes of a compaction, and of inserting a prefill's rows into the pool
                         2 * K * D * (pairs before + pairs after) * B * b

Where a layer's values lie in host memory (`kvjax.cache.offload`), a decode step reads
and multiplies N of the C values, or as many as its queries select together; these and
the T new ones cross the link. A prefill chunk moves all C over it.

Of experts only the active ones count. Embeddings, norms, softmax, positions, statistics
and empty slots are left out: a program that reads those, or that stores what it could
have kept in registers, loses share, which is what a roofline should show.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import codecs
from kvjax.cache.spec import CacheSpec
from kvjax.engine.jobs import Job
from kvjax.engine.planner import Plan
from kvjax.models import decoder, layers
from kvjax.parallel import host
from kvjax.types import ModelSpec, UserError

_COPIED = 2**28  # bytes of the copied array: larger than any cache
_SECONDS = 0.4  # of each measurement
Heads = Sequence[int] | Int[np.ndarray, " LK"]  # pairs of every head of every layer


class Work(NamedTuple):
    """The work of one step, or the sum of several."""

    flops: float
    bytes: float
    link_bytes: float = 0.0


class Rates(NamedTuple):
    """A device's rates, measured or from its data sheet.

    `link_bytes_per_s` is of the link from the host, one way; infinite where unknown.
    """

    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = math.inf


class Device(NamedTuple):
    """A device by its data sheet: dense bfloat16 FLOPs, memory in bytes."""

    rates: Rates
    memory_bytes: float


# From NVIDIA's data sheets (SXM boards, no sparsity; PCIe 4 and 5 with 16 lanes) and
# Google Cloud's pages of the TPUs, which do not name links. A chip of v5p or tpu7x has
# two cores.
DEVICES = {
    "a100-80gb": Device(Rates(2.039e12, 312e12, 32e9), 80e9),
    "h100-sxm": Device(Rates(3.35e12, 989e12, 64e9), 80e9),
    "h200": Device(Rates(4.8e12, 989e12, 64e9), 141e9),
    "tpu-v5e": Device(Rates(819e9, 197e12), 16 * 2**30),
    "tpu-v5p": Device(Rates(2.765e12, 459e12), 95 * 2**30),
    "tpu-v6e": Device(Rates(1.64e12, 918e12), 32 * 2**30),
    "tpu7x": Device(Rates(7.38e12, 2.307e15), 192 * 2**30),
}


def device(name: str) -> Device:
    """Returns a device of `DEVICES`.

    Raises:
      UserError: an unknown name.
    """
    if name not in DEVICES:
        raise UserError(f"no rates of {name!r}: one of {', '.join(DEVICES)}")
    return DEVICES[name]


class Prediction(NamedTuple):
    """Tokens per second of prefill, of decoding, and of new tokens end to end."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens_per_s: float


def predict(plan: Plan, rates: Rates, prompt_tokens: int | None = None) -> Prediction:
    """Returns the highest rates that a full batch can reach by the formulae.

    `prompt_tokens` are per prompt; None is the longest that the plan allows.
    """
    reading = seconds(prefill(plan, prompt_tokens), rates)
    writing = seconds(decode(plan, prompt_tokens), rates)
    new = plan.batch * plan.job.max_new_tokens
    read = plan.batch * _length(plan, prompt_tokens)
    return Prediction(read / reading, new / writing, new / (reading + writing))


def seconds(steps: list[Work], rates: Rates) -> float:
    """Returns the least time that the steps take one after the other."""
    return sum(
        max(
            step.flops / rates.flops_per_s,
            step.bytes / rates.bytes_per_s,
            step.link_bytes / rates.link_bytes_per_s,
        )
        for step in steps
    )


def total(steps: list[Work]) -> Work:
    return Work(*map(sum, zip(*steps, strict=True)))


def prefill(plan: Plan, prompt_tokens: int | None = None) -> list[Work]:
    """Returns the steps of a batch's prefill, with compaction and insertion."""
    job, (rows, times) = plan.job, plan.prefill_groups
    length = _length(plan, prompt_tokens)
    blocks = list(_read(job, length))
    steps = [step(job, rows, new, held, logits=False) for new, held in blocks]
    held = blocks[-1][1]
    head = _head(job.spec) * rows
    steps.append(Work(2 * head, _head(job.spec) * _itemsize(job)))
    if job.config.compacts:
        kept = _compacted(job, held)
        read = _pairs(job, job.config.reading, rows, held)
        written = _pairs(job, job.config, rows, kept)
        steps.append(total([read, written]))
        if times > 1:  # values in host memory stay there
            steps.append(Work(0.0, 2 * written.bytes))
    return steps * times


def decode(plan: Plan, prompt_tokens: int | None = None) -> list[Work]:
    """Returns the decode steps; the first token comes from the prefill's logits."""
    job = plan.job
    *_, (_, held) = _read(job, _length(plan, prompt_tokens))
    if job.config.compacts:
        held = _compacted(job, held)
    steps = []
    for _ in range(job.max_new_tokens - 1):
        held = _appended(job, held, 1, job.config.schedule.evicts_in_decode)
        steps.append(step(job, plan.batch, 1, held, logits=True))
    return steps or [Work(0.0, float(_itemsize(job)))]


def step(job: Job, rows: int, tokens: int, held: Heads, logits: bool) -> Work:
    """Returns the work of `tokens` (T) of each of `rows` (B), by the formulae above.

    `held` is C of every head of every layer. `logits`: next-token logits are computed,
    one per row.
    """
    spec, size = job.spec, _itemsize(job)
    weights = matrices(spec, size, rows, tokens, logits)
    return total([weights, _attention(job, rows, tokens, held, prefill=not logits)])


class _Stored(NamedTuple):
    """The storage of every head's pairs [L * K], and its attention window."""

    key: Float[np.ndarray, " H"]  # bytes of one
    value: Float[np.ndarray, " H"]
    away: Bool[np.ndarray, " H"]  # its values lie in host memory
    window: Float[np.ndarray, " H"]


@functools.lru_cache(maxsize=64)
def _stored(spec: ModelSpec, config: CacheSpec, dtype: str) -> _Stored:
    size = lambda tensor: codecs.tensor_bytes(tensor, spec.head_dim, dtype)
    layers = [
        (size(codec.key), size(codec.value), config.recalls(i), window or math.inf)
        for i in range(spec.num_layers)
        for codec, window in [(config.codec_of(i), spec.sliding_window(i))]
    ]
    columns = zip(*layers, strict=True)
    return _Stored(*(np.repeat(column, spec.num_kv_heads) for column in columns))


def _attention(job: Job, rows: int, tokens: int, held: Heads, prefill: bool) -> Work:
    """Returns `attention` with pairs stored as the job's codecs and offloading do."""
    spec, config = job.spec, job.config.reading if prefill else job.config
    stored, group = _stored(spec, config, job.dtype), spec.queries_per_kv_head
    seen = np.minimum(held, stored.window)
    fetched = 0 if config.offload is None else config.offload.fetched(group)
    selects = stored.away & (not prefill)
    read = np.where(selects, np.minimum(seen, tokens * fetched), seen)
    flops = 2 * spec.head_dim * group * tokens * (seen + read)
    written = np.where(stored.away, 0, tokens)
    moved = stored.key * (seen + tokens) + stored.value * (read + written)
    link = np.where(stored.away, stored.value * (read + tokens), 0.0)
    return Work(*(float(rows * np.sum(each)) for each in (flops, moved, link)))


def matrices(
    spec: ModelSpec, size: float, rows: int, tokens: int, logits: bool
) -> Work:
    """Returns the work on weights in a step; each weight takes `size` bytes."""
    flops = 2 * rows * tokens * active_weights(spec)
    moved = size * layer_weights(spec, rows * tokens)
    if logits:
        flops += 2 * rows * _head(spec)
        moved += size * _head(spec)
    return Work(float(flops), float(moved))


def attention(
    spec: ModelSpec, size: float, rows: int, tokens: int, held: Heads
) -> Work:
    """Returns the work on pairs in a step; each number takes `size` bytes."""
    windows = [spec.sliding_window(i) or math.inf for i in range(spec.num_layers)]
    seen = np.minimum(held, np.repeat(windows, spec.num_kv_heads))
    pair = 2 * spec.head_dim * rows
    flops = 2 * pair * spec.queries_per_kv_head * tokens * np.sum(seen)
    return Work(float(flops), float(pair * size * np.sum(seen + tokens)))


@functools.lru_cache(maxsize=64)
def active_weights(spec: ModelSpec) -> int:
    """Returns the matrix weights of all layers that multiply one token."""
    return sum(
        size
        for layer in decoder.param_shapes(spec)["layers"]
        for size in _sizes(spec, layer, 1, matrices=True)
    )


@functools.lru_cache(maxsize=64)
def layer_weights(spec: ModelSpec, tokens: int) -> int:
    """Returns the weights of all layers that are read for this many tokens at once."""
    return sum(
        size
        for layer in decoder.param_shapes(spec)["layers"]
        for size in _sizes(spec, layer, tokens, matrices=False)
    )


def _sizes(spec, layer, tokens, matrices) -> Iterator[int]:
    """Yields the sizes of a layer's arrays; of experts, the routed share."""
    for name, leaf in layer.items():
        for part in jax.tree.leaves(leaf):
            if spec.experts and name in ("gate_up", "up", "down"):
                idle = (1 - spec.experts_per_token / spec.experts) ** tokens
                yield round(part.size * (1 - idle))
            elif part.ndim > 1 or not matrices:
                yield part.size


def _head(spec: ModelSpec) -> int:
    return spec.vocab_size * (spec.embed_dim or spec.model_dim)


def _itemsize(job: Job) -> int:
    return jnp.dtype(job.dtype).itemsize


def _length(plan: Plan, prompt_tokens: int | None) -> int:
    return plan.job.max_prompt_len if prompt_tokens is None else prompt_tokens


def _read(job: Job, length: int) -> Iterator[tuple[int, Int[np.ndarray, " LK"]]]:
    """Yields the tokens of every prefill chunk, and the pairs of every head with it."""
    schedule, spec = job.config.schedule, job.spec
    held = np.zeros(spec.num_layers * spec.num_kv_heads, int)
    first, chunk = job.config.first_chunk, schedule.prefill_chunk
    for start in (0, *range(first, length, chunk)):
        new = min(chunk if start else first, length - start)
        held = _appended(job, held, new, schedule.evicts_in_prefill)
        yield new, held


def _appended(job: Job, held, new: int, evicts: bool) -> Int[np.ndarray, " LK"]:
    """Returns the pairs of every head after `new` are inserted, as Algorithm 1 does."""
    held = _in_windows(job, held)
    if not evicts:
        return held + new
    budgets = np.array(job.config.head_budgets(job.spec))
    kept = budgets - job.config.schedule.evict_size
    return new + np.where(held + new > budgets, kept, held)


def _in_windows(job: Job, held) -> Int[np.ndarray, " LK"]:
    """Returns the pairs that sliding windows keep once a chunk has been inserted."""
    windows = _stored(job.spec, job.config, job.dtype).window
    return np.minimum(held, windows).astype(int)


def _compacted(job: Job, held) -> Int[np.ndarray, " LK"]:
    """Returns what `cache.compact` keeps, if the policy fills the budget."""
    schedule, held = job.config.schedule, _in_windows(job, held)
    if not schedule.compacts:  # only the codec changes
        return held
    budgets = np.array(job.config.head_budgets(job.spec))
    if schedule.evicts_in_decode:
        return np.where(held >= budgets, budgets - schedule.evict_size, held)
    return np.minimum(held, budgets)


def _pairs(job: Job, config: CacheSpec, rows: int, held) -> Work:
    """Returns the bytes of the rows' pairs, on the device and in host memory."""
    stored = _stored(job.spec, config, job.dtype)
    away = np.where(stored.away, stored.value, 0.0) * held
    here = (stored.key + stored.value) * held - away
    return Work(0.0, float(rows * np.sum(here)), float(rows * np.sum(away)))


@functools.cache
def measured_rates(dtype: str = "float32") -> Rates:
    """Returns the default device's rates, measured in a second or two.

    Each is the best of many runs: of a copy (see `measured_bandwidth`), of a product of
    square matrices of the dtype, multiplied as layers do and large enough for the
    backend's best rate, and of a transfer over the link. The link's rate is infinite on
    a CPU and on devices without pinned host memory.
    """
    size = 2048 if jax.default_backend() == "cpu" else 8192
    has_link = jax.default_backend() != "cpu" and host.is_there()
    link = measured_link() if has_link else math.inf
    product = 2 * size**3 / min(_multiplying(dtype, size, _SECONDS))
    return Rates(measured_bandwidth(), product, link)


def measured_bandwidth() -> float:
    """Returns bytes per second, read and written, of copies on the default device."""
    seconds, moved = _copying(_COPIED, _SECONDS)
    return moved / min(seconds)


def measured_link() -> float:
    """Returns bytes per second from pinned host memory to the default device."""
    away = host.to_host(jnp.ones((_COPIED // 4,), jnp.float32))
    return _COPIED / min(_seconds(lambda _: host.to_device(away), away, _SECONDS))


@contextlib.contextmanager
def probed(dtype: str) -> Iterator[dict[str, float]]:
    """Measures how much of a shared device is free around the block.

    A fixed product and a fixed copy run before and after the block, about a second in
    all. Once the block has ended, the yielded dict has `probe_flops_per_s` and
    `probe_bytes_per_s`, the means of both.
    """
    found: dict[str, float] = {}
    before = _probe(dtype)
    yield found
    flops, copied = np.mean([before, _probe(dtype)], axis=0).tolist()
    found |= {"probe_flops_per_s": flops, "probe_bytes_per_s": copied}


def _probe(dtype: str) -> tuple[float, float]:
    """Returns FLOPs/s and bytes/s as means: the best run would hide the load."""
    size = 1024 if jax.default_backend() == "cpu" else 4096
    product = 2 * size**3 / np.mean(_multiplying(dtype, size, _SECONDS / 2))
    seconds, moved = _copying(_COPIED // 4, _SECONDS / 2)
    return product, moved / np.mean(seconds)


def _multiplying(dtype: str, size: int, least: float) -> list[float]:
    """Returns seconds of products of square matrices, multiplied as layers do."""
    return _seconds(_product, jnp.full((size, size), 1 / size, dtype), least)


@jax.jit
def _product(x: Float[Array, "N N"]) -> Float[Array, "N N"]:
    return layers.product(x, x)  # the matrix 1/N is its own square


def _copying(size: int, least: float) -> tuple[list[float], int]:
    """Returns seconds of copies of `size` bytes, and the bytes that each run moves.

    Accelerators copy four times as much, 16 times per program: launching a program
    takes as long as a small copy.
    """
    times = 1 if jax.default_backend() == "cpu" else 16
    size = size if times == 1 else 4 * size
    copies = functools.partial(_copies, times=times)
    seconds = _seconds(copies, jnp.ones((size // 4,), jnp.float32), least)
    return seconds, 2 * size * times


@functools.partial(jax.jit, static_argnames="times", donate_argnums=0)
def _copies(x: Float[Array, " N"], times: int) -> Float[Array, " N"]:
    """Copies in place: new arrays would measure page faults on a CPU."""
    another = lambda i, x: 0.5 * x + i.astype(x.dtype)  # XLA cannot merge two of these
    return jax.lax.fori_loop(0, times, another, x)


def _seconds(
    run: Callable[[jax.Array], jax.Array], x: jax.Array, least: float
) -> list[float]:
    """Returns the seconds of at least two runs, which take `least` seconds together.

    Each run takes the output of the one before. One more run before them compiles.
    """
    x = jax.block_until_ready(run(x))
    times: list[float] = []
    while len(times) < 2 or sum(times) < least:
        start = time.perf_counter()
        x = jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return times
