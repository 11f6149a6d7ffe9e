"""The cost of KV caches from shapes alone: bytes, decode steps, pages and swaps.

Nothing is run. Times are rooflines (`kvjax.evaluation.roofline`): the least time that a
device of given rates can take. L layers, K KV heads, D numbers per head.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax import policies
from kvjax.cache.offload import Offload
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import CacheSpec, make_spec
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.planner import as_plan
from kvjax.evaluation import roofline
from kvjax.evaluation.roofline import Device, Rates, Work
from kvjax.parallel.limits import USABLE
from kvjax.types import ModelSpec, UserError, real_number, whole_number

BITS = 16.0  # of a number in weights, and in pairs by default
BYTES_ALONE = Rates(1.0, math.inf)  # a device limited by memory bandwidth alone
_ENTRY = 4  # bytes of a page table's entry
_SCALES = 32  # bits of a group's scale and zero, 16 each


# --- bytes ----------------------------------------------------------------------------


def stored_bits(bits: float, group: int = 0) -> float:
    """Returns bits per number with a scale and a zero per `group` numbers; 0: none."""
    whole_number("group", group, 0)
    return real_number("bits", bits, 1, 32) + (_SCALES / group if group else 0)


def kv_bytes(
    spec: ModelSpec, batch: int, tokens: int, bits: float = BITS, rolling: bool = False
) -> float:
    """Returns the bytes of `batch` rows of `tokens` (B, T) pairs: 2 L K D B T bits / 8.

    `bits` are per number, see `stored_bits`. `rolling`: layers with a sliding window
    keep no more than the window.

    Raises:
      UserError: a batch or length below 1.
    """
    whole_number("batch", batch, 1)
    whole_number("tokens", tokens, 1)
    windows = [spec.sliding_window(layer) for layer in range(spec.num_layers)]
    held = sum(min(tokens, (rolling and w) or tokens) for w in windows)
    return 2 * spec.num_kv_heads * spec.head_dim * held * batch * bits / 8


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Returns the bytes of all weights."""
    return weights_bytes(_row(spec, 1, None, dtype))


def row_bytes(spec: ModelSpec, tokens: int, budget: int | None, dtype: str) -> int:
    """Returns the bytes of one row's KV state, with positions and counters.

    `budget` is in pairs per head; None is the full cache.
    """
    return max(state_bytes(_row(spec, tokens, budget, dtype)).values())


def rows_that_fit(memory_bytes: float, weights: float, row: float) -> int:
    """Returns the rows of `row` bytes that fit beside the weights, temporaries aside.

    `kvjax.plan` also counts temporaries, which it reads from compiled programs.
    """
    return max(int((memory_bytes * USABLE - weights) // row), 0)


def _row(spec: ModelSpec, tokens: int, budget: int | None, dtype: str) -> Job:
    """Returns a job that prefills one row of `tokens` and decodes nothing."""
    policy = policies.average_attention() if budget else None
    schedule = Schedule() if budget else Schedule("none")
    return Job(spec, make_spec(spec, policy, budget, schedule), 1, tokens, 0, dtype)


# --- a step of decoding ---------------------------------------------------------------


class Step(NamedTuple):
    """The work of one decode step of a batch, on weights and on pairs."""

    weights: Work
    pairs: Work

    @property
    def work(self) -> Work:
        return roofline.total(list(self))

    @property
    def share_of_pairs(self) -> float:
        """The pairs' share of the bytes moved."""
        return self.pairs.bytes / self.work.bytes

    def seconds(self, rates: Rates) -> float:
        return roofline.seconds([self.work], rates)

    def waits_for(self, rates: Rates) -> str:
        """Returns 'bytes' or 'FLOPs', whichever takes longer."""
        bytes_ = self.work.bytes / rates.bytes_per_s
        return "FLOPs" if self.work.flops / rates.flops_per_s > bytes_ else "bytes"


def decode_step(spec: ModelSpec, batch: int, tokens: int, bits: float = BITS) -> Step:
    """Returns a step of `batch` rows, with `tokens` pairs per head after it.

    Weights have 16 bits. Unpacking pairs of fewer bits counts as free, which it is not.

    Raises:
      UserError: a batch or length below 1.
    """
    whole_number("batch", batch, 1)
    whole_number("tokens", tokens, 1)
    held = (tokens,) * (spec.num_layers * spec.num_kv_heads)
    return Step(
        roofline.matrices(spec, BITS / 8, batch, 1, logits=True),
        roofline.attention(spec, bits / 8, batch, 1, held),
    )


def gain(
    spec: ModelSpec, batch: int, tokens: int, bits: float, rates: Rates = BYTES_ALONE
) -> float:
    """Returns the speed-up of decoding with pairs of `bits` bits over 16 bits."""
    plain, small = (decode_step(spec, batch, tokens, b) for b in (BITS, bits))
    return plain.seconds(rates) / small.seconds(rates)


# --- pages ----------------------------------------------------------------------------


def draw_lengths(
    kind: str, count: int, longest: int, seed: int = 0
) -> Int[np.ndarray, " N"]:
    """Draws the lengths of `count` sequences, 1 to `longest` tokens.

    Kinds are 'uniform', and 'lognormal' with its median at an eighth of the longest and
    a sigma of 1, cut off at both ends.

    Raises:
      UserError: another kind, or a number below 1.
    """
    whole_number("count", count, 1)
    whole_number("longest", longest, 1)
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return rng.integers(1, longest, count, endpoint=True)
    if kind != "lognormal":
        raise UserError(f"no lengths of kind {kind!r}: lognormal or uniform")
    drawn = rng.lognormal(math.log(longest / 8), 1.0, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def contiguous_waste(lengths: Int[np.ndarray, " N"], longest: int) -> float:
    """Returns the empty share where every sequence reserves `longest` tokens."""
    return 1 - float(lengths.mean()) / longest


class Paging(NamedTuple):
    """The cost of pages of one size, per sequence.

    Attributes:
      empty: mean unused tokens of the last page.
      entries: mean entries of the page table.
      overhead: bytes of both, as a share of the used bytes.
    """

    empty: float
    entries: float
    overhead: float


def paging(lengths: Int[np.ndarray, " N"], page: int, token_bytes: float) -> Paging:
    """Returns the cost of pages of `page` tokens for sequences of these lengths.

    Entries of the page table take 4 bytes. Where lengths are spread over many pages,
    (page - 1) / 2 tokens stay empty.

    Raises:
      UserError: a page below 1 token.
    """
    whole_number("page", page, 1)
    pages = -(-lengths // page)
    empty = float((pages * page - lengths).mean())
    entries = float(pages.mean())
    used = float(lengths.mean()) * token_bytes
    return Paging(empty, entries, (empty * token_bytes + entries * _ENTRY) / used)


class Beams(NamedTuple):
    """Tokens in pages for all beams of a prompt, without and with sharing."""

    apart: int
    shared: int


def beams(width: int, prompt: int, output: int, page: int = 16) -> Beams:
    """Returns the tokens that beam search holds with and without copy on write.

    Beams of a prompt share its full pages. Every beam copies a last page that is not
    full, and outputs share nothing. That is an upper bound: beams that branch late need
    less.

    Raises:
      UserError: a width, page or prompt below 1, an output below 0.
    """
    for name, value in (("width", width), ("prompt", prompt), ("page", page)):
        whole_number(name, value, 1)
    whole_number("output", output, 0)
    each = -(-(prompt + output) // page)
    full = prompt // page
    if output == 0:
        return Beams(width * each * page, each * page)
    return Beams(width * each * page, (full + width * (each - full)) * page)


# --- a sequence that was preempted ----------------------------------------------------


class Link(NamedTuple):
    """The link that pairs come back over from the host.

    Attributes:
      bytes_per_s: of the link.
      copy_s: seconds of overhead per copy.
      page: tokens of a page; keys and values of a layer's page are a copy each.
    """

    bytes_per_s: float
    copy_s: float
    page: int


def swap_seconds(spec: ModelSpec, tokens: int, link: Link) -> float:
    """Returns the seconds to swap a sequence's pages in, one copy after the other."""
    pages = -(-tokens // link.page)
    copies = 2 * spec.num_layers * pages
    moved = kv_bytes(spec, 1, pages * link.page)
    return moved / link.bytes_per_s + copies * link.copy_s


def recompute_seconds(
    spec: ModelSpec, tokens: int, rates: Rates, chunk: int = 512
) -> float:
    """Returns the seconds to prefill one sequence again in chunks of `chunk` tokens."""
    whole_number("tokens", tokens, 1)
    whole_number("chunk", chunk, 1)
    blocks = [(min(chunk, tokens - start), start) for start in range(0, tokens, chunk)]
    return roofline.seconds([_block(spec, *block) for block in blocks], rates)


@functools.lru_cache(maxsize=4096)  # lengths have most of their blocks in common
def _block(spec: ModelSpec, new: int, before: int) -> Work:
    """Returns the work of prefilling `new` tokens of a row after `before` others."""
    held = (before + new,) * (spec.num_layers * spec.num_kv_heads)
    weights = roofline.matrices(spec, BITS / 8, 1, new, logits=False)
    pairs = roofline.attention(spec, BITS / 8, 1, new, held)
    return roofline.total([weights, pairs])


def equal_rate(spec: ModelSpec, tokens: int, rates: Rates) -> float:
    """Returns the link's bytes per second at which swapping equals recomputing."""
    return kv_bytes(spec, 1, tokens) / recompute_seconds(spec, tokens, rates)


# --- whole methods --------------------------------------------------------------------


class Decoding(NamedTuple):
    """The rate and the size of a decoding batch.

    Attributes:
      decode_tokens_per_s: of the whole batch, by the roofline.
      rows: that fit on the device, temporaries aside.
      host_row_bytes: of one row's values in host memory.
    """

    decode_tokens_per_s: float
    rows: int
    host_row_bytes: int


def decoding(
    spec: ModelSpec,
    config: CacheSpec,
    batch: int,
    prompt: int,
    new: int,
    device: Device,
    dtype: str = "bfloat16",
) -> Decoding:
    """Returns how fast a method could decode `batch` rows, and how many rows fit.

    It follows from shapes alone. `dtype` is of weights and pairs.
    """
    plan = as_plan(Job(spec, config, batch, prompt, new, dtype), "batch_size", 0, 0)
    rate = roofline.predict(plan, device.rates).decode_tokens_per_s
    rows = rows_that_fit(device.memory_bytes, plan.weights_bytes, plan.row_bytes)
    return Decoding(rate, rows, plan.host_bytes // batch)


# --- values in host memory ------------------------------------------------------------


def tokens_to_fetch_from(offload: Offload, rates: Rates) -> float:
    """Returns the pairs s per head above which fetching N beats reading all of them.

    That is where s / N exceeds the device's bandwidth over the link's (He and Wu 2024).
    """
    return offload.top_n * rates.bytes_per_s / rates.link_bytes_per_s


def hidden(spec: ModelSpec, prompt: int, rates: Rates, bits: float = 16) -> float:
    """Returns a layer's compute time over the time to send its values to the host.

        (2 weights of a layer's matrices + 4 H D s) / FLOPs per second
        --------------------------------------------------------------
        K D bits / 8                     / bytes per second of the link

    It is per token of a prompt of s tokens that is prefilled at once. From 1 on, the
    transfer is hidden behind prefill. With as many KV heads as query heads, 11 d^2
    weights and 16 bits it is `11 d + 2 s > FLOPS / bandwidth` of He and Wu 2024 (arXiv
    2404.18057).
    """
    weights = roofline.active_weights(spec) / spec.num_layers
    flops = 2 * weights + 4 * spec.num_heads * spec.head_dim * prompt
    sent = spec.num_kv_heads * spec.head_dim * bits / 8
    return flops / rates.flops_per_s * rates.link_bytes_per_s / sent
