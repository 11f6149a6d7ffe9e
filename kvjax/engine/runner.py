"""Runs batches of prompts on a `Runner`, which has the steps of generation::

    fixed batch         prefill, begin, decode
    staggered prefill   prefill and insert for each group; then decode
    teacher forcing     prefill, score

`Whole` calls compiled programs of whole models. `kvjax.engine.layerwise` has a second
runner, which compiles single layers.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache import budgets, sizing
from kvjax.cache.prefix import Prefix
from kvjax.engine import compiled, scoring
from kvjax.engine.compiled import Programs
from kvjax.engine.forward import with_policy
from kvjax.engine.jobs import Job
from kvjax.engine.planner import Plan
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Requests, Sampling, Tokens, requests_of
from kvjax.engine.steps import DecodeState, Reading
from kvjax.parallel import axes, meshes
from kvjax.types import PyTree

Prompts = Sequence[Sequence[int]]
Stop = Callable[[Sequence[int], list[int]], bool]


GREEDY = Sampling()


class Prefilled(NamedTuple):
    """Prompts that have been read and compressed.

    Attributes:
      state: their KV state.
      logits: those that follow each row's last token.
    """

    state: cache.KVState
    logits: Float[Array, "B V"]


class Started(NamedTuple):
    """Prompts that are being read.

    Attributes:
      reading: their state.
      tokens: the prompts, left-aligned.
      lengths: tokens per prompt.
    """

    reading: Reading
    tokens: Int[Array, "N P"]
    lengths: Int[Array, "N"]


class Runner(Protocol):
    """The steps of generation for one job.

    Attributes:
      job: the batch's shape.
      compile_seconds: spent so far on programs that depend on the prompts: those of the
        sizes that a budget rule measured.
    """

    job: Job
    compile_seconds: float

    def prefill(self, prompts: Prompts) -> Prefilled:
        """Reads up to `job.group.batch` prompts; the other rows stay unused."""
        ...

    def begin(
        self, read: Prefilled, requests: Sequence[Request]
    ) -> tuple[DecodeState, Tokens]:
        """Draws first tokens. Rows without a request are done from the start."""
        ...

    def insert(
        self,
        pool: DecodeState | None,
        read: Prefilled,
        requests: Sequence[Request],
        rows: Int[np.ndarray, "N"],
    ) -> tuple[DecodeState, Tokens]:
        """Copies prompts to these rows of the pool, and draws their first tokens.

        None is a new pool.
        """
        ...

    def decode(
        self, state: DecodeState, limit: int, until: int | None = None
    ) -> tuple[DecodeState, Tokens]:
        """Draws up to `limit` more tokens per row, [B, N]; -1 beyond a row's end.

        Stops when so many more rows have ended; None is all. Tokens are on the host.
        """
        ...

    def score(
        self, read: Prefilled, tokens: np.ndarray, lengths: np.ndarray
    ) -> scoring.Scores:
        """Scores given tokens [B, N] after the prompts; the result is on the host."""
        ...

    def finished(self, state: DecodeState) -> cache.KVState:
        """Returns the KV state at the end; raises its errors."""
        ...


class BatchResult(NamedTuple):
    """New tokens of each row, the final state, and seconds without compilation."""

    tokens: list[list[int]]
    state: cache.KVState
    prefill_seconds: float | None
    decode_seconds: float | None


class Whole:
    """The runner of compiled programs of a whole model.

    If a budget rule measures prompts, the first ones that are read decide the sizes.

    Args:
      params: the model's weights.
      job: the batch's shape.
      programs: those of the job; None compiles them.
      prefix: what all rows go on after, see `Prefix.frozen`; None for nothing.
    """

    def __init__(
        self,
        params: PyTree,
        job: Job,
        programs: Programs | None = None,
        prefix: Prefix | None = None,
    ):
        self.job = job
        self._prefix = prefix
        self.compile_seconds = 0.0
        self._params = with_policy(params, job.config)
        self._programs = programs or compiled.programs(job)
        self._settled = not job.config.measures

    def prefill(self, prompts: Prompts) -> Prefilled:
        programs, group = self._programs, self.job.group
        tokens, lengths = pad_prompts(group, prompts)
        state, logits = programs.prefill(
            self._params, self._empty(), tokens, lengths, self._prefix
        )
        if not self._settled:
            self._reallocate(state.measured, lengths)
        return Prefilled(self._compacted(state), logits)

    def _empty(self) -> cache.KVState:
        """Returns an empty state for prompts, which go on after the prefix."""
        state = self._programs.init()
        if self._prefix is None:
            return state
        start = int(axes.to_host(self._prefix.state.next_pos)[0])
        rows = np.full((self.job.group.batch,), start, np.int32)
        return state.replace(next_pos=meshes.shard_rows(self.job.mesh, rows)[0])

    def _compacted(self, state: cache.KVState) -> cache.KVState:
        if self._programs.compact is None:
            return state
        return self._programs.compact(state, self._params.get("policy"))

    def _reallocate(self, measured: Array, lengths: Array) -> None:
        """Lets the budget rule set new sizes, from what it measured in the prompts."""
        self._settled = True
        sums, counts = axes.to_host((measured, lengths))
        means = (sums[counts > 0] / counts[counts > 0, None]).mean(0, dtype=np.float64)
        config = self.job.config
        pairs = config.head_budgets(self.job.spec)
        mean = math.ceil(sum(pairs) / len(pairs))  # of whole pairs, within windows
        sizes = budgets.reallocated(config.budget_rule, means, mean)
        room = config.schedule.prefill_chunk, self.job.max_prompt_len
        sizes = sizing.within_windows(self.job.spec, sizes, *room)
        if sizes != config.budget:
            config = dataclasses.replace(config, budget=sizes)
            for size in config.fillable:
                sizing.check_budget(size, config.policy, config.schedule)
            self.job = dataclasses.replace(self.job, config=config)
            start = time.perf_counter()
            self._programs = compiled.decoding(self.job, self._programs)
            self.compile_seconds += time.perf_counter() - start

    def begin(
        self, read: Prefilled, requests: Sequence[Request]
    ) -> tuple[DecodeState, Tokens]:
        asked, keys = row_requests(self.job, requests, self._programs.keys)
        seen = seen_tokens(self.job, requests)
        return self._programs.begin(*read, asked, keys, seen)

    def insert(
        self,
        pool: DecodeState | None,
        read: Prefilled,
        requests: Sequence[Request],
        rows: Int[np.ndarray, "N"],
    ) -> tuple[DecodeState, Tokens]:
        pool, group = self._programs.pool() if pool is None else pool, self.job.group
        asked, keys = row_requests(group, requests, self._programs.keys)
        (rows,) = meshes.shard_rows(self.job.mesh, rows)
        seen = seen_tokens(group, requests)
        return self._programs.insert(pool, *read, asked, keys, rows, seen)

    def decode(
        self, state: DecodeState, limit: int, until: int | None = None
    ) -> tuple[DecodeState, Tokens]:
        until = np.int32(self.job.batch if until is None else until)
        decode = self._programs.decode
        state, drawn = decode(self._params, state, np.int32(limit), until, self._prefix)
        return state, axes.to_host(drawn)

    def start(self, prompts: Prompts) -> "Started":
        """Begins to read prompts beside the rows of a pool, see `mixed`."""
        group, hidden = self.job.group, self.job.spec.model_dim
        tokens, lengths = pad_prompts(group, prompts)
        nothing = np.zeros((group.batch, hidden), jnp.dtype(self.job.dtype))
        (nothing,) = meshes.shard_rows(self.job.mesh, nothing)
        reading = Reading(self._empty(), nothing, np.int32(0))
        return Started(reading, tokens, lengths)

    def mixed(
        self, pool: DecodeState, started: "Started", limit: int, until: int
    ) -> tuple[DecodeState, "Started", Tokens]:
        """Decodes rows and reads on, see `kvjax.engine.steps.mixed`.

        Tokens are on the host.
        """
        pool, reading, drawn = self._programs.mixed(
            self._params,
            pool,
            *started,
            np.int32(limit),
            np.int32(until),
            self._prefix,
        )
        return pool, started._replace(reading=reading), axes.to_host(drawn)

    def read(self, started: "Started") -> Prefilled:
        """Returns prompts whose last chunk is in, compressed."""
        logits = self._programs.logits(self._params, started.reading.hidden)
        return Prefilled(self._compacted(started.reading.cache), logits)

    def score(
        self, read: Prefilled, tokens: np.ndarray, lengths: np.ndarray
    ) -> scoring.Scores:
        tokens, lengths = meshes.shard_rows(self.job.mesh, tokens, lengths)
        state, scores = self._programs.decode(self._params, *read, tokens, lengths)
        cache.raise_errors(state)
        return axes.to_host(scores)

    def finished(self, state: DecodeState) -> cache.KVState:
        cache.raise_errors(state.cache)
        return state.cache


def run_batch(
    runner: Runner,
    prompts: Prompts,
    prompt_ids: Sequence[int],
    seed: int = 0,
    stop: Stop | None = None,
    sampling: Sampling = GREEDY,
) -> BatchResult:
    """Runs up to `job.batch` prompts.

    Args:
      runner: of the job.
      prompts: token ids per row; the other rows stay unused.
      prompt_ids: each prompt's number in the whole run, which seeds its sampling.
      seed: of the whole run.
      stop: `(prompt, new tokens) -> bool`, called for every row after each
        `job.decode_chunk` tokens; True ends the row.
      sampling: how every row's tokens are chosen; `job` says how many.

    Raises:
      RuntimeError: the state ran out of slots.
    """
    start, compiled_before = time.perf_counter(), runner.compile_seconds
    pool = prefill_batch(runner, prompts, prompt_ids, seed, sampling)
    middle = time.perf_counter()
    reading = middle - start - (runner.compile_seconds - compiled_before)
    pool, tokens = decode_batch(runner, pool, prompts, stop)
    jax.block_until_ready(pool)
    end = time.perf_counter()
    return BatchResult(tokens, runner.finished(pool), reading, end - middle)


def prefill_batch(
    runner: Runner,
    prompts: Prompts,
    prompt_ids: Sequence[int],
    seed: int = 0,
    sampling: Sampling = GREEDY,
) -> DecodeState:
    """Reads all prompts and draws their first tokens."""
    job, pool = runner.job, None
    each = dataclasses.replace(sampling, max_new_tokens=job.max_new_tokens, seed=seed)
    requests = [
        Request(number, tuple(prompt), each)
        for number, prompt in zip(prompt_ids, prompts, strict=True)
    ]
    for first in _starts(job):
        rows = slice(first, first + job.group.batch)
        read = runner.prefill(prompts[rows])
        if not job.is_staggered:  # a copy into a pool would double it
            return jax.block_until_ready(runner.begin(read, requests)[0])
        numbers = np.arange(rows.start, rows.stop, dtype=np.int32)
        pool, _ = runner.insert(pool, read, requests[rows], numbers)
        jax.block_until_ready(pool)
        del read  # frees its memory before the next group is read
    return pool


def _starts(job: Job) -> list[int]:
    """Returns the first row of each group; the last begins early enough to be full."""
    rows = job.group.batch
    return [min(start, job.batch - rows) for start in range(0, job.batch, rows)]


def decode_batch(
    runner: Runner, state: DecodeState, prompts: Prompts, stop: Stop | None = None
) -> tuple[DecodeState, list[list[int]]]:
    """Returns the state at the end, and the new tokens of every prompt."""
    job, rows = runner.job, len(prompts)
    new = [[int(token)] for token in axes.to_host(state.token)[:rows]]
    left = job.max_new_tokens - 1
    while True:
        state, finished = _stopped(job, state, prompts, new, stop)
        if not left or finished:
            return state, new
        limit = min(job.decode_chunk or left, left)
        state, tokens = runner.decode(state, limit)
        for row, drawn in enumerate(tokens.token[:rows]):
            new[row] += drawn[drawn >= 0].tolist()
        left -= limit


def _stopped(
    job: Job,
    state: DecodeState,
    prompts: Prompts,
    new: list[list[int]],
    stop: Stop | None,
) -> tuple[DecodeState, bool]:
    """Marks the rows that `stop` ends as done; returns whether all rows are."""
    done = axes.to_host(state.done).copy()
    if stop is not None:
        done[: len(new)] |= [stop(*row) for row in zip(prompts, new, strict=True)]
        (marked,) = meshes.shard_rows(job.mesh, done)
        state = state.replace(done=marked)
    return state, bool(done.all())


def of_plan(params: PyTree, plan: Plan) -> Whole:
    """Returns the runner of a plan, with the programs whose memory was read."""
    return Whole(params, plan.job, plan.programs)


def pad_prompts(
    job: Job, prompts: Prompts
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Returns left-aligned prompts and their lengths, 0 for rows not in use."""
    tokens = np.zeros((job.batch, job.max_prompt_len), np.int32)
    lengths = np.zeros((job.batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return meshes.shard_rows(job.mesh, tokens, lengths)


def row_requests(
    job: Job,
    requests: Sequence[Request],
    make_keys: Callable[..., Array] = compiled.row_keys,
) -> tuple[Requests, Array]:
    """Returns the data of a batch's requests, and the PRNG keys of their rows."""
    rows = requests_of([each.sampling for each in requests], job.batch)
    identity = np.zeros((3, job.batch), np.int32)
    for row, each in enumerate(requests):
        identity[:, row] = each.sampling.seed, each.number, each.sample
    rows = jax.tree.map(lambda leaf: meshes.shard_rows(job.mesh, leaf)[0], rows)
    with meshes.use(job.mesh):
        return rows, make_keys(*meshes.shard_rows(job.mesh, *identity))


def seen_tokens(job: Job, requests: Sequence[Request]) -> Array | None:
    """Returns the prompts' tokens as flags [B, V]; None if no row is penalized."""
    if not job.sampling.penalizes:
        return None
    seen = np.zeros((job.batch, job.spec.vocab_size), bool)
    for row, each in enumerate(requests):
        seen[row, list(each.tokens)] = True
    return meshes.shard_rows(job.mesh, seen)[0]


def batches(indices: Sequence[int], most: int) -> list[list[int]]:
    """Cuts indices into as few batches as `most` allows, of nearly equal size."""
    if not indices:
        return []
    count = -(-len(indices) // most)
    size = -(-len(indices) // count)
    return [list(indices[i : i + size]) for i in range(0, len(indices), size)]
