"""The executor of compiled programs, on one device or on a mesh of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvjax import cache
from kvjax.engine.executor import Drawn
from kvjax.engine.requests import Request
from kvjax.engine.runner import Prefilled, Started, Whole
from kvjax.engine.sampling import Tokens
from kvjax.parallel import axes, meshes


class _Group(NamedTuple):
    """Prompts that are being read, or have been.

    Attributes:
      requests: one per prompt.
      chunks: in how many chunks the longest is read.
      started: set while chunks are read beside decoding rows.
      read: set once all of them are in.
    """

    requests: Sequence[Request]
    chunks: int
    started: Started | None = None
    read: Prefilled | None = None


class DeviceExecutor:
    """Reads and decodes requests with a job's programs, see `executor.Executor`.

    A job without a pool is a fixed batch: its rows are filled together, once all of
    them are idle, since a copy of the prompts' state would double it.

    Args:
      runner: of a job; `job.batch` rows decode, `job.group.batch` prompts are read
        together.
    """

    def __init__(self, runner: Whole):
        self.rows, self.read_rows = runner.job.batch, runner.job.group.batch
        self.refills = runner.job.continuous
        self._runner = runner
        self._done = np.ones(self.rows, bool)
        self._pool = None
        self._group = None

    @property
    def reading(self) -> bool:
        return self._group is not None and self._group.read is None

    def read(self, requests: Sequence[Request]) -> None:
        if not self.refills:
            self._pool = None  # frees it: the rows are idle, and the prompts need room
        config = self._runner.job.config
        longest = max(len(each.tokens) for each in requests)
        rest = max(longest - config.first_chunk, 0)
        chunks = 1 + math.ceil(rest / config.schedule.prefill_chunk)
        self._group = _Group(requests, chunks)

    def step(self, limit: int, until: int) -> Drawn:
        if self.reading and self._group.started is None and not self._mixes():
            prompts = [each.tokens for each in self._group.requests]
            read = self._runner.prefill(prompts)
            self._group = self._group._replace(read=read)
            return self._drawn(None)
        if self.reading:
            return self._mixed(limit, until)
        if self._done.all():
            return self._drawn(None)
        limit = min(limit, self._runner.job.steps)
        self._pool, tokens = self._runner.decode(self._pool, limit, until)
        return self._drawn(tokens)

    def insert(
        self, places: Sequence[int], rows: Sequence[int], requests: Sequence[Request]
    ) -> Drawn:
        if not self.refills:
            return self._begin(dict(zip(places, requests, strict=True)))
        found, waiting = {}, list(zip(places, rows, requests, strict=True))
        while waiting:  # a place once at a time, as the program has one row for it
            now = {place: (row, each) for place, row, each in reversed(waiting)}
            taken = {row for row, _ in now.values()}
            waiting = [each for each in waiting if each[1] not in taken]
            found |= self._insert_once(now)
        return self._inserted(found)

    def drop(self) -> None:
        self._group = None

    def finished(self, rows: Sequence[int]) -> list:
        cache.raise_errors(self._pool.cache)
        return [cache.kept_positions(self._pool.cache, row)[0] for row in rows]

    def release(self, rows: Sequence[int]) -> None:
        self._done = axes.to_host(self._pool.done).copy()
        self._done[list(rows)] = True
        (done,) = meshes.shard_rows(self._runner.job.mesh, self._done)
        self._pool = self._pool.replace(done=done)

    def _begin(self, chosen: dict[int, Request]) -> Drawn:
        """Lets prompts, by place, decode in the rows where they were read."""
        group, self._group = self._group, None
        every = [chosen.get(i, each) for i, each in enumerate(group.requests)]
        self._pool, tokens = self._runner.begin(group.read, every)
        tokens = axes.to_host(tokens)
        if cancelled := set(range(len(every))) - set(chosen):
            self.release(sorted(cancelled))
        return self._inserted({row: _row(tokens, row) for row in chosen})

    def _insert_once(self, chosen: dict[int, tuple[int, Request]]) -> dict[int, Tokens]:
        """Copies prompts, by place (row, request), to rows; returns first tokens."""
        rows = np.full(self.read_rows, self.rows, np.int32)  # beyond the pool: dropped
        requests = list(self._group.requests)
        for place, (row, each) in chosen.items():
            rows[place], requests[place] = row, each
        self._pool, tokens = self._runner.insert(
            self._pool, self._group.read, requests, rows
        )
        tokens = axes.to_host(tokens)
        return {row: _row(tokens, place) for place, (row, _) in chosen.items()}

    def _inserted(self, found: dict[int, Tokens]) -> Drawn:
        """Returns the first tokens of the rows that were found."""
        some = next(iter(found.values()))
        empty = jax.tree.map(
            lambda x: np.zeros((self.rows, 1, *x.shape), x.dtype), some
        )
        empty.token[:] = -1
        for row, tokens in found.items():
            for whole, own in zip(*map(jax.tree.leaves, (empty, tokens)), strict=True):
                whole[row, 0] = own
        return self._drawn(empty)._replace(steps=0)

    def _drawn(self, tokens: Tokens | None) -> Drawn:
        """Returns tokens that are on the host, without the columns that nobody drew."""
        if self._pool is not None:
            self._done = axes.to_host(self._pool.done).copy()
        if tokens is None:
            return Drawn(np.zeros((self.rows, 0), np.int32), self._done, 0)
        steps = int(np.any(tokens.token >= 0, axis=0).sum())
        tokens = jax.tree.map(lambda x: x[:, :steps], tokens)
        logprobs = None if tokens.logprob is None else tokens
        return Drawn(tokens.token, self._done, steps, logprobs)

    def _mixes(self) -> bool:
        return self._runner.job.mixes and not self._done.all()

    def _mixed(self, limit: int, until: int) -> Drawn:
        """Decodes rows and reads the group's next chunks."""
        group = self._group
        started = group.started or self._runner.start(
            [each.tokens for each in group.requests]
        )
        limit = min(limit, self._runner.job.steps)
        self._pool, started, tokens = self._runner.mixed(
            self._pool, started, limit, until
        )
        read = None
        if int(started.reading.chunk) >= group.chunks:
            read, started = self._runner.read(started), None
        self._group = group._replace(started=started, read=read)
        return self._drawn(tokens)


def _row(tokens: Tokens, row: int) -> Tokens:
    return jax.tree.map(lambda x: x[row], tokens)
