"""Continuous batching: rows take new requests as soon as they end.

A request goes through these states; a prompt with several samples is one request until
it is inserted, and one per sample from there on::

            read           last chunk         insert            ended, stop text
    waiting ----> reading -----------> ready -------> decoding -----------------> end
       |             |                   |               |                         ^
       +-------------+-------------------+---------------+------- cancel ----------+

The executor (`kvjax.engine.executor`) holds one group of prompts that are being read or
are ready, and R rows. A turn of the scheduler does the first of these that it can:

    cancel  ends the requests that were cancelled since the last turn
    drop    forgets the group, once all of it is in rows
    insert  moves ready prompts to idle rows
    read    begins to read the next group, those that have waited longest
    step    decodes the rows, and reads a chunk of the group's prompts beside each step

So the next group is read while rows decode, and waits, ready, for rows to end. While
prompts are ready, a step returns as soon as one row has ended. Reading keeps up with R
rows, whose completions take N steps, if g prompts of C chunks that are read together
last no longer than g rows take to end: `C <= g * N / R`.

Source: Yu et al. 2022, "Orca" (iteration-level scheduling); Agrawal et al. 2024,
arXiv 2403.02310, "Sarathi-Serve" (chunks of prompts beside decoding rows).
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from kvjax.engine.executor import Drawn, Executor
from kvjax.engine.requests import Request
from kvjax.types import whole_number

Stops = Callable[[Request, list[int]], bool]


class Event(NamedTuple):
    """New tokens of a request, or its end, or both.

    Attributes:
      request: with `sample` set, for each of a prompt's samples.
      tokens: those drawn since the request's last event. After a stop text, tokens that
        were drawn before the stop was noticed are among them.
      logprobs: of the tokens, a NamedTuple of arrays [N, ...] as in `Drawn.logprobs`;
        None where the executor returns none.
      finish_reason: None until the request's last event; then "stop" (an end token or
        a stop text), "length" or "cancelled".
      kept: in the last event, the positions that heads keep, see `Executor.finished`;
        None if the request was cancelled before it was in a row.
    """

    request: Request
    tokens: list[int]
    logprobs: Any = None
    finish_reason: str | None = None
    kept: Any = None


class _Decoding(NamedTuple):
    """A row's request, and its tokens so far."""

    request: Request
    tokens: list[int]


class Scheduler:
    """Runs requests on an executor, first come, first served.

    Requests may be added and cancelled at any time between two turns. Not thread-safe.
    An error of the executor is raised from `turn` or `run`; the events of earlier turns
    have been returned by then, and neither executor nor scheduler can go on.
    """

    def __init__(
        self,
        executor: Executor,
        stops: Stops | None = None,
        *,
        ends: Collection[int] = (),
        limit: int = 32,
    ):
        """Makes a scheduler without requests.

        Args:
          executor: one that no other scheduler uses.
          stops: returns whether a request's tokens so far contain one of its stop
            texts; called once per turn in which the request gets tokens, and only for
            requests that have stop texts.
          ends: end tokens, to tell "stop" from "length" at the last token allowed.
          limit: most decode steps between two events of a row, and between two looks
            for stop texts.
        """
        self._executor, self._stops, self._ends = executor, stops, frozenset(ends)
        self._limit = whole_number("limit", limit, 1)
        # Prompts, as the requests that are made of each once it is read.
        self._waiting: collections.deque[list[Request]] = collections.deque()
        # The group: (place, request) of each sample that is in no row yet.
        self._places: collections.deque[tuple[int, Request]] = collections.deque()
        self._has_group = False  # the executor holds one, even if no place is left
        self._rows: dict[int, _Decoding] = {}  # that decode
        self._cancelled: set[int] = set()

    @property
    def busy(self) -> bool:
        """True while a request is waiting, being read, ready or decoding."""
        return bool(self._waiting or self._has_group or self._rows)

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn, with all its samples.

        Its prompt is read once for all of them, or where the executor refills no rows,
        once for each.
        """
        first, count = request.sample, request.sampling.num_samples
        numbers = range(first, first + count)
        samples = [dataclasses.replace(request, sample=number) for number in numbers]
        refills = self._executor.refills
        self._waiting.extend([samples] if refills else [[each] for each in samples])

    def cancel(self, number: int) -> None:
        """Ends the requests of this number, with all their samples, in the next turn.

        Nothing happens to requests that have ended.
        """
        self._cancelled.add(number)

    def run(self) -> Iterator[Event]:
        """Yields the events of all requests, until none is left.

        Requests that are added in the meantime run too. The iterator may be closed
        early, and `run` called again; events of the turn that was closed are lost.
        """
        while self.busy:
            yield from self.turn()

    def turn(self) -> list[Event]:
        """Does the next thing, see the module; returns its events, often none."""
        if self._cancelled:
            return self._cancel()
        if self._has_group and not self._executor.reading:
            if not self._places:
                return self._drop()
            if len(self._rows) < self._executor.rows:
                return self._insert()
        can_read = self._executor.refills or not self._rows
        if self._waiting and not self._has_group and can_read:
            return self._read()
        return self._step() if self.busy else []

    def _cancel(self) -> list[Event]:
        numbers, self._cancelled = self._cancelled, set()
        wanted = lambda request: request.number in numbers
        ended = [each for prompt in self._waiting for each in prompt if wanted(each)]
        ended += [request for _, request in self._places if wanted(request)]
        self._waiting = collections.deque(p for p in self._waiting if not wanted(p[0]))
        self._places = collections.deque(p for p in self._places if not wanted(p[1]))
        events = [Event(request, [], finish_reason="cancelled") for request in ended]
        rows = {row: r for row, (r, _) in self._rows.items() if wanted(r)}
        kept = self._free(list(rows), list(rows))
        return events + [
            Event(request, [], finish_reason="cancelled", kept=kept[row])
            for row, request in rows.items()
        ]

    def _drop(self) -> list[Event]:
        self._executor.drop()
        self._has_group = False
        return []

    def _insert(self) -> list[Event]:
        if self._executor.refills:
            idle = [row for row in range(self._executor.rows) if row not in self._rows]
            rows = idle[: len(self._places)]
        else:
            rows = [place for place, _ in self._places]
        chosen = [self._places.popleft() for _ in rows]
        places, requests = zip(*chosen, strict=True)
        drawn = self._executor.insert(places, rows, requests)
        self._rows |= {
            row: _Decoding(request, [])
            for row, request in zip(rows, requests, strict=True)
        }
        return self._take(drawn)

    def _read(self) -> list[Event]:
        count = min(self._executor.read_rows, len(self._waiting))
        group = [self._waiting.popleft() for _ in range(count)]
        self._executor.read([samples[0] for samples in group])
        self._has_group = True
        self._places.extend(
            (place, sample) for place, samples in enumerate(group) for sample in samples
        )
        return []

    def _step(self) -> list[Event]:
        is_ready = self._places and not self._executor.reading
        until = 1 if is_ready else max(len(self._rows), 1)
        return self._take(self._executor.step(self._limit, until))

    def _take(self, drawn: Drawn) -> list[Event]:
        """Gives requests their new tokens, and frees the rows of those that ended."""
        events = {}
        counts = (drawn.tokens >= 0).sum(axis=1).tolist()
        for row, decoding in self._rows.items():
            tokens = drawn.tokens[row, : counts[row]].tolist()
            decoding.tokens.extend(tokens)
            reason = self._reason(decoding, bool(drawn.done[row]), bool(tokens))
            if tokens or reason:
                logprobs = _of_row(drawn.logprobs, row, counts[row])
                events[row] = Event(decoding.request, tokens, logprobs, reason)
        ended = [row for row, event in events.items() if event.finish_reason]
        kept = self._free(ended, [row for row in ended if not drawn.done[row]])
        ends = {row: events[row]._replace(kept=kept[row]) for row in ended}
        return list((events | ends).values())

    def _reason(self, row: _Decoding, done: bool, is_new: bool) -> str | None:
        """Returns why a request has ended; None if it goes on."""
        (request, tokens), sampling = row, row.request.sampling
        if is_new and self._stops and sampling.stop and self._stops(request, tokens):
            return "stop"
        if not done:
            return None
        at_end = not sampling.ignore_eos and tokens[-1:] and tokens[-1] in self._ends
        is_short = len(tokens) < sampling.max_new_tokens
        return "stop" if at_end or is_short else "length"

    def _free(self, rows: list[int], release: list[int]) -> dict[int, Any]:
        """Makes rows idle; returns what their heads keep, by row.

        Args:
          rows: of requests that end.
          release: of these, the rows that have not ended by themselves.
        """
        kept = self._executor.finished(rows) if rows else []
        if release:
            self._executor.release(release)
        for row in rows:
            del self._rows[row]
        return dict(zip(rows, kept, strict=True))


def _of_row(logprobs: Any, row: int, count: int) -> Any:
    """Returns the row's first `count` log-probabilities."""
    if logprobs is None:
        return None
    return logprobs._make(array[row, :count] for array in logprobs)
