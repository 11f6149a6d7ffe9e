"""How fast a plan could run: bytes and FLOPs counted, and the device's rates.

One step takes at least the longest of its FLOPs over the matrix rate, its bytes over
the bandwidth, and what values in host memory put on the link over the link's rate
(Williams et al. 2009, "Roofline"). A phase takes the sum of its steps.
What is counted is what the method needs, by these formulae, with the axes of
`kvjax.types`, C the pairs that a head holds once the T new ones are in (no more than
the layer's window), b the bytes of a number, and 2 D b those of a pair, or what its
codec makes of them::

    FLOPs of a step      2 * B * T * (weights of the layers' matrices)
                       + 2 * B * V * M                      if it ends in logits
                       + 4 * K * G * D * T * C * B          for every layer
    bytes of a step      (all weights of the layers) * b    once
                       + V * M * b                          if it ends in logits
                       + 2 * K * D * (C + T) * B * b        for every layer
    bytes of a compaction, and of a pool's group
                         2 * K * D * (pairs before + pairs after) * B * b

Of a layer whose values lie in host memory (`kvjax.cache.offload`), a step of decoding
multiplies and reads N of the C values, or as many as its queries name together; these
and the T new ones cross the link. A block of a prompt takes all C over it.

Of experts only those count that are used. Embeddings, norms, softmax, positions and
statistics are left out, and so are empty slots: a program that reads those, or that
stores what it could have kept at hand, loses share, which is what a roofline is for.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.cache import codecs
from kvjax.cache.spec import CacheSpec
from kvjax.engine.jobs import Job
from kvjax.engine.planner import Plan
from kvjax.models import decoder, layers
from kvjax.parallel import host
from kvjax.types import ModelSpec, UserError

_COPIED = 2**28  # bytes of the array that is copied: more than caches hold
_SECONDS = 0.4  # of each measurement


class Work(NamedTuple):
    """What one step, or the sum of some, has to do."""

    flops: float
    bytes: float
    link_bytes: float = 0.0


class Rates(NamedTuple):
    """What a device can do, as measured or as its maker says.

    Of the link to its host, one way; infinite where nobody says.
    """

    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = math.inf


class Device(NamedTuple):
    """A device as its maker describes it: dense bfloat16 FLOPs, memory in bytes."""

    rates: Rates
    memory_bytes: float


# NVIDIA's data sheets (SXM boards, no sparsity; PCIe 4 and 5 of 16 lanes) and Google
# Cloud's pages of the TPUs, which say nothing of links; a chip of v5p and of tpu7x is
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
    """A device of `DEVICES`.

    Raises:
      UserError: a name that is not there.
    """
    if name not in DEVICES:
        raise UserError(f"no rates of {name!r}: one of {', '.join(DEVICES)}")
    return DEVICES[name]


class Prediction(NamedTuple):
    """Tokens per second: prompt tokens read, new tokens decoded, new tokens in all."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens_per_s: float


def predict(plan: Plan, rates: Rates, prompt_tokens: int | None = None) -> Prediction:
    """The most that a full batch can reach: nothing but the formulae is waited for.

    Args:
      plan: of `planner.plan_job` or `planner.plan_staggered`.
      rates: see `measured_rates`.
      prompt_tokens: per prompt; None is the longest that the plan has room for.
    """
    reading = seconds(prefill(plan, prompt_tokens), rates)
    writing = seconds(decode(plan, prompt_tokens), rates)
    new = plan.batch * plan.job.max_new_tokens
    read = plan.batch * _length(plan, prompt_tokens)
    return Prediction(read / reading, new / writing, new / (reading + writing))


def seconds(steps: list[Work], rates: Rates) -> float:
    """The least time that the steps take one after the other."""
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
    """The steps of reading a batch's prompts, a compaction and pooling included."""
    job, (rows, times) = plan.job, plan.prefill_groups
    length = _length(plan, prompt_tokens)
    blocks = list(_read(job, length))
    steps = [step(job, rows, new, held, logits=False) for new, held in blocks]
    held = blocks[-1][1]
    head = _head(job.spec) * rows
    steps.append(Work(2 * head, _head(job.spec) * _itemsize(job)))
    if job.config.compacts:
        kept = _compacted(job, held)
        steps.append(_moved(job, rows, held, kept))
        if times > 1:
            steps.append(_pooled(job, rows, kept))
    return steps * times


def decode(plan: Plan, prompt_tokens: int | None = None) -> list[Work]:
    """The steps of generating; the first token comes out of the prompt's logits."""
    job = plan.job
    *_, (_, held) = _read(job, _length(plan, prompt_tokens))
    if job.config.compacts:
        held = _compacted(job, held)
    steps = []
    for _ in range(job.max_new_tokens - 1):
        held = _appended(job, held, 1, job.config.schedule.evicts_in_decode)
        steps.append(step(job, plan.batch, 1, held, logits=True))
    return steps or [Work(0.0, float(_itemsize(job)))]


def step(job: Job, rows: int, tokens: int, held: tuple[int, ...], logits: bool) -> Work:
    """T tokens of B rows through the model, by the formulae above.

    Args:
      job: model, dtype and what is kept.
      rows: B.
      tokens: T per row.
      held: [L * K], C of every head of every layer.
      logits: whether next-token logits are worked out, one per row.
    """
    spec, size = job.spec, _itemsize(job)
    weights = matrices(spec, size, rows, tokens, logits)
    return total([weights, _attention(job, rows, tokens, held, prefill=not logits)])


class _Stored(NamedTuple):
    """Of every head [L * K]: how its pairs are stored, and how far back it looks."""

    key: Float[np.ndarray, " H"]  # bytes of one
    value: Float[np.ndarray, " H"]
    away: Bool[np.ndarray, " H"]  # values lie in host memory
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


def _attention(
    job: Job, rows: int, tokens: int, held: tuple[int, ...], prefill: bool
) -> Work:
    """`attention` of pairs as the job's codecs store them, and where."""
    spec, config = job.spec, job.config.reading if prefill else job.config
    stored, group = _stored(spec, config, job.dtype), spec.queries_per_kv_head
    seen = np.minimum(held, stored.window)
    fetched = 0 if config.offload is None else config.offload.fetched(group)
    few = stored.away & (not prefill)
    read = np.where(few, np.minimum(seen, tokens * fetched), seen)
    flops = 2 * spec.head_dim * group * tokens * (seen + read)
    written = np.where(stored.away, 0, tokens)
    moved = stored.key * (seen + tokens) + stored.value * (read + written)
    link = np.where(stored.away, stored.value * (read + tokens), 0.0)
    return Work(*(float(rows * np.sum(each)) for each in (flops, moved, link)))


def matrices(
    spec: ModelSpec, size: float, rows: int, tokens: int, logits: bool
) -> Work:
    """The part of a step that weights have in it; they take `size` bytes each."""
    flops = 2 * rows * tokens * active_weights(spec)
    moved = size * layer_weights(spec, rows * tokens)
    if logits:
        flops += 2 * rows * _head(spec)
        moved += size * _head(spec)
    return Work(float(flops), float(moved))


def attention(
    spec: ModelSpec, size: float, rows: int, tokens: int, held: tuple[int, ...]
) -> Work:
    """The part of a step that pairs have in it; a number takes `size` bytes each."""
    windows = (spec.sliding_window(i // spec.num_kv_heads) for i in range(len(held)))
    seen = [min(c, window or c) for c, window in zip(held, windows, strict=True)]
    pair = 2 * spec.head_dim * rows
    flops = sum(2 * pair * spec.queries_per_kv_head * tokens * c for c in seen)
    return Work(float(flops), float(sum(pair * (c + tokens) * size for c in seen)))


@functools.lru_cache(maxsize=64)
def active_weights(spec: ModelSpec) -> int:
    """Weights of the layers' matrices that one token is multiplied with."""
    return sum(
        size
        for layer in decoder.param_shapes(spec)["layers"]
        for size in _sizes(spec, layer, 1, matrices=True)
    )


@functools.lru_cache(maxsize=64)
def layer_weights(spec: ModelSpec, tokens: int) -> int:
    """Weights of all layers that are read for so many tokens at a time."""
    return sum(
        size
        for layer in decoder.param_shapes(spec)["layers"]
        for size in _sizes(spec, layer, tokens, matrices=False)
    )


def _sizes(spec, layer, tokens, matrices) -> Iterator[int]:
    """Of a layer's arrays; of stacks of experts, what evenly routed tokens use."""
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


def _read(job: Job, length: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Tokens of every block of a prompt, and the pairs every head holds with them."""
    schedule, spec = job.config.schedule, job.spec
    held = (0,) * (spec.num_layers * spec.num_kv_heads)
    first, chunk = job.config.first_chunk, schedule.prefill_chunk
    for start in (0, *range(first, length, chunk)):
        new = min(chunk if start else first, length - start)
        held = _appended(job, held, new, schedule.evicts_in_prefill)
        yield new, held


def _appended(job: Job, held, new: int, evicts: bool) -> tuple[int, ...]:
    """Pairs per head after new ones are in: Algorithm 1's arithmetic."""
    config, held = job.config, _in_windows(job, held)
    if not evicts:
        return tuple(pairs + new for pairs in held)
    budgets, evict = config.head_budgets(job.spec), config.schedule.evict_size
    pairs = zip(held, budgets, strict=True)
    return tuple(new + (b - evict if each + new > b else each) for each, b in pairs)


def _in_windows(job: Job, held) -> tuple[int, ...]:
    """What layers with a sliding window keep of the pairs once a block is in."""
    windows = _stored(job.spec, job.config, job.dtype).window
    return tuple(np.minimum(held, windows).astype(int).tolist())


def _compacted(job: Job, held) -> tuple[int, ...]:
    """What `cache.compact` leaves, if the rule keeps as much as it may."""
    config, held = job.config, _in_windows(job, held)
    if not config.schedule.compacts:  # nothing but its codec changes
        return held
    budgets = config.head_budgets(job.spec)
    if config.schedule.evicts_in_decode:
        least = [budget - config.schedule.evict_size for budget in budgets]
        pairs = zip(held, least, budgets, strict=True)
        return tuple(low if each >= most else each for each, low, most in pairs)
    return tuple(map(min, held, budgets))


def _moved(job: Job, rows: int, before, after) -> Work:
    """Pairs read as the prompt left them, and written as they are kept."""
    taken = _bytes_of(job, job.config.reading, before)
    return _sum_of_rows(rows, taken, _bytes_of(job, job.config, after))


def _pooled(job: Job, rows: int, kept) -> Work:
    """Pairs copied from a group into its pool; what is on the host stays there."""
    held = _bytes_of(job, job.config, kept)
    return _sum_of_rows(rows, (held[0], 0.0), (held[0], 0.0))


def _sum_of_rows(rows: int, *parts: tuple[float, float]) -> Work:
    on_device, over_link = map(sum, zip(*parts, strict=True))
    return Work(0.0, rows * on_device, rows * over_link)


def _bytes_of(job: Job, config: CacheSpec, held) -> tuple[float, float]:
    """Of one row's pairs: bytes on the device, and on the host."""
    stored = _stored(job.spec, config, job.dtype)
    there = np.where(stored.away, stored.value, 0.0) * held
    here = (stored.key + stored.value) * held - there
    return float(np.sum(here)), float(np.sum(there))


@functools.cache
def measured_rates(dtype: str = "float32") -> Rates:
    """The default device's rates, from copies and a matrix product; a second or two.

    The best of many tries each. For the copy see `measured_bandwidth`; the product is
    of square matrices of the dtype, multiplied as layers do, as large as the backend
    needs to be at its best. As many bytes come over the link; a CPU has none, and a
    device without host memory is not asked.
    """
    size = 2048 if jax.default_backend() == "cpu" else 8192
    has_link = jax.default_backend() != "cpu" and host.is_there()
    link = measured_link() if has_link else math.inf
    product = 2 * size**3 / min(_multiplying(dtype, size, _SECONDS))
    return Rates(measured_bandwidth(), product, link)


def measured_bandwidth() -> float:
    """Bytes per second, read and written, of the default device's copies."""
    seconds, moved = _copying(_COPIED, _SECONDS)
    return moved / min(seconds)


def measured_link() -> float:
    """Bytes per second from pinned host memory to the default device."""
    away = host.to_host(jnp.ones((_COPIED // 4,), jnp.float32))
    return _COPIED / min(_seconds(lambda _: host.to_device(away), away, _SECONDS))


@contextlib.contextmanager
def probed(dtype: str) -> Iterator[dict[str, float]]:
    """Measures what the device has left for the block, which others may use as well.

    A fixed product and a fixed copy run before the block and after it, about a second
    in all. The dict that it yields has `probe_flops_per_s` and `probe_bytes_per_s` once
    the block has ended: the means of both times.
    """
    found: dict[str, float] = {}
    before = _probe(dtype)
    yield found
    flops, copied = np.mean([before, _probe(dtype)], axis=0).tolist()
    found |= {"probe_flops_per_s": flops, "probe_bytes_per_s": copied}


def _probe(dtype: str) -> tuple[float, float]:
    """FLOPs and bytes per second: means, as the best of many tries says nothing."""
    size = 1024 if jax.default_backend() == "cpu" else 4096
    product = 2 * size**3 / np.mean(_multiplying(dtype, size, _SECONDS / 2))
    seconds, moved = _copying(_COPIED // 4, _SECONDS / 2)
    return product, moved / np.mean(seconds)


def _multiplying(dtype: str, size: int, least: float) -> list[float]:
    """Seconds of products of square matrices, multiplied as layers do."""
    return _seconds(_product, jnp.full((size, size), 1 / size, dtype), least)


@jax.jit
def _product(x: Float[Array, "N N"]) -> Float[Array, "N N"]:
    return layers.product(x, x)  # of what `_multiplying` gives, the same again


def _copying(size: int, least: float) -> tuple[list[float], int]:
    """Seconds of copies of so many bytes, and the bytes that each moves.

    On devices other than CPUs four times as many, and several copies to a program, the
    start of which takes as long as a small one.
    """
    times = 1 if jax.default_backend() == "cpu" else 16
    size = size if times == 1 else 4 * size
    copies = functools.partial(_copies, times=times)
    seconds = _seconds(copies, jnp.ones((size // 4,), jnp.float32), least)
    return seconds, 2 * size * times


@functools.partial(jax.jit, static_argnames="times", donate_argnums=0)
def _copies(x: Float[Array, " N"], times: int) -> Float[Array, " N"]:
    """In place: a new array every time would measure page faults on a CPU."""
    another = lambda i, x: 0.5 * x + i.astype(x.dtype)  # no two make one
    return jax.lax.fori_loop(0, times, another, x)


def _seconds(
    run: Callable[[jax.Array], jax.Array], x: jax.Array, least: float
) -> list[float]:
    """Seconds of as many runs as take `least` together, two at least.

    Each takes what the one before it made. One more run before them compiles.
    """
    x = jax.block_until_ready(run(x))
    times: list[float] = []
    while len(times) < 2 or sum(times) < least:
        start = time.perf_counter()
        x = jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return times
