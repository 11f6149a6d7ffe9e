"""An executor that runs no model: a clock that counts what steps would take.

A scheduler (`kvjax.engine.scheduler`) drives it as it drives a real one. How long a
request's completion becomes is known to the executor only, as with a model. Calls are
computed whole, not token by token: a step of one token and a step of 32 cost the same
time on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.engine.executor import Drawn
from kvjax.engine.requests import Request


class Decoding(NamedTuple):
    """The rows that decode when a call begins.

    Attributes:
      prompts: tokens of each row's prompt.
      drawn: tokens drawn so far.
      left: tokens still to draw; a row takes part in that many steps.
    """

    prompts: Int[np.ndarray, " R"]
    drawn: Int[np.ndarray, " R"]
    left: Int[np.ndarray, " R"]


class Reading(NamedTuple):
    """The chunks that steps read.

    Attributes:
      prompts: tokens of the prompts that are read together.
      chunks: the index of each step's chunk, from 0.
    """

    prompts: Int[np.ndarray, " P"]
    chunks: Int[np.ndarray, " N"]


class Costs(NamedTuple):
    """What calls take, in seconds or any other unit of time.

    Attributes:
      decode: of each of N decode steps.
      chunk: of each step that reads chunks beside no row that decodes.
      mixed: of each step that does both; rows may end before the last one.
      insert: of inserting prompts of these lengths, and drawing their first tokens.
      call: of the host, per call of `step` and `insert`.
    """

    decode: Callable[[Decoding, int], Float[np.ndarray, " N"]]
    chunk: Callable[[Reading], Float[np.ndarray, " N"]]
    mixed: Callable[[Decoding, Reading], Float[np.ndarray, " N"]]
    insert: Callable[[Int[np.ndarray, " P"]], float]
    call: float = 0.0


def constant_costs(
    decode: float = 1.0, chunk: float = 1.0, mixed: float = 1.0, insert: float = 0.0
) -> Costs:
    """Returns costs that depend on nothing; by default, the clock counts steps."""
    return Costs(
        decode=lambda rows, steps: np.full(steps, decode),
        chunk=lambda reading: np.full(len(reading.chunks), chunk),
        mixed=lambda rows, reading: np.full(len(reading.chunks), mixed),
        insert=lambda prompts: insert,
    )


class Call(NamedTuple):
    """A call of `step` or `insert`, in the units of the clock.

    Attributes:
      start, seconds: when it began, and how long it took.
      steps: decode steps; 0 if it inserted rows, or read chunks only.
      tokens: drawn by all rows together.
    """

    start: float
    seconds: float
    steps: int
    tokens: int


class SimulatedExecutor:
    """An `Executor` (`kvjax.engine.executor`) with a clock in the place of a model.

    The tokens that a request draws are 0, 1, 2, ... Heads keep nothing.

    Attributes:
      rows, read_rows: see `Executor`.
      clock: the time; whoever has nothing to run may set it forward.
      calls: what was called so far.
    """

    def __init__(
        self,
        rows: int,
        read_rows: int,
        lengths: Callable[[Request], int],
        costs: Costs | None = None,
        *,
        chunk: int = 128,
        first_chunk: int | None = None,
    ):
        """Makes an executor whose rows are idle, at time 0.

        Args:
          rows: requests that decode together.
          read_rows: prompts that are read together.
          lengths: returns the tokens that a request draws until it ends by itself, at
            least 1; `max_new_tokens` may end it before.
          costs: None is `constant_costs()`.
          chunk: prompt tokens that a step reads.
          first_chunk: those that a prompt's first step reads; None is `chunk`.
        """
        self.rows, self.read_rows, self.refills = rows, read_rows, True
        self.clock, self.calls = 0.0, list[Call]()
        self._lengths, self._costs = lengths, costs or constant_costs()
        self._chunk, self._first_chunk = chunk, first_chunk or chunk
        self._group = np.zeros(0, np.int64)  # tokens of the group's prompts
        self._chunks, self._chunks_read = 0, 0
        self._state = Decoding(*np.zeros((3, rows), np.int64))

    @property
    def reading(self) -> bool:
        return self._chunks_read < self._chunks

    def read(self, requests: Sequence[Request]) -> None:
        self._group = np.array([len(request.tokens) for request in requests])
        rest = int(self._group.max()) - self._first_chunk
        self._chunks, self._chunks_read = 1 + max(-(-rest // self._chunk), 0), 0

    def step(self, limit: int, until: int) -> Drawn:
        state = self._state
        live = state.left.nonzero()[0]
        rows = Decoding(*(column[live] for column in state))
        steps = self._steps(rows.left, limit, until)
        took = self._seconds(rows, steps)
        self._chunks_read += steps * self.reading
        columns = np.arange(steps if live.size else 0, dtype=np.int32)
        tokens = np.full((self.rows, columns.size), -1, np.int32)
        drawn = rows.drawn[:, None] + columns
        tokens[live] = np.where(columns < rows.left[:, None], drawn, -1)
        taken = np.minimum(rows.left, steps)
        state.drawn[live] += taken
        state.left[live] -= taken
        self._advance(took, columns.size, int(taken.sum()))
        return Drawn(tokens, state.left == 0, columns.size)

    def insert(
        self, places: Sequence[int], rows: Sequence[int], requests: Sequence[Request]
    ) -> Drawn:
        state, prompts, at = self._state, self._group[list(places)], list(rows)
        state.prompts[at], state.drawn[at] = prompts, 1  # the first token, drawn now
        state.left[at] = [self._length(request) - 1 for request in requests]
        tokens = np.full((self.rows, 1), -1, np.int32)
        tokens[at] = 0
        self._advance(self._costs.insert(prompts), 0, len(at))
        return Drawn(tokens, state.left == 0, 0)

    def drop(self) -> None:
        self._chunks = self._chunks_read = 0

    def finished(self, rows: Sequence[int]) -> list[Any]:
        return [[] for _ in rows]

    def release(self, rows: Sequence[int]) -> None:
        self._state.left[list(rows)] = 0

    def _length(self, request: Request) -> int:
        most = request.sampling.max_new_tokens
        if request.sampling.ignore_eos:
            return most
        return max(min(self._lengths(request), most), 1)

    def _steps(self, left: Int[np.ndarray, " R"], limit: int, until: int) -> int:
        """Returns the steps that a call runs; `left` is of the rows that decode."""
        if self.reading:
            limit = min(limit, self._chunks - self._chunks_read)
        elif not left.size:
            return 0
        if not left.size:
            return limit
        if until >= left.size:
            return min(limit, int(left.max()))
        return min(limit, int(np.partition(left, until - 1)[until - 1]))

    def _seconds(self, rows: Decoding, steps: int) -> float:
        if not self.reading:
            return float(self._costs.decode(rows, steps).sum())
        chunks = np.arange(self._chunks_read, self._chunks_read + steps)
        reading = Reading(self._group, chunks)
        if not rows.left.size:
            return float(self._costs.chunk(reading).sum())
        return float(self._costs.mixed(rows, reading).sum())

    def _advance(self, seconds: float, steps: int, tokens: int) -> None:
        seconds += self._costs.call
        self.calls.append(Call(self.clock, seconds, steps, tokens))
        self.clock += seconds
