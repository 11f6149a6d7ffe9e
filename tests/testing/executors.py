"""An executor that plays scripts token by token, and one that checks the contract."""

import dataclasses

import numpy as np

from kvjax.engine.executor import Drawn
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling


def request(number, prompt=1, num_samples=1, **fields) -> Request:
    """A request with a prompt of this many tokens."""
    wanted = Sampling(**fields)
    object.__setattr__(wanted, "num_samples", num_samples)  # whatever is supported yet
    return Request(number, tuple(range(prompt)), wanted)


class Scripted:
    """Plays `script(request)`, the tokens of each request, one at a time.

    A row ends with its script, or at `max_new_tokens`. What its heads keep is its
    request.
    """

    def __init__(self, rows, read_rows, script, chunk=4, refills=True):
        self.rows, self.read_rows, self.refills = rows, read_rows, refills
        self._script, self._chunk = script, chunk
        self._unread, self._left = 0, [[] for _ in range(rows)]
        self._requests = [None] * rows

    @property
    def reading(self):
        return self._unread > 0

    def read(self, requests):
        self._unread = max(-(-len(r.tokens) // self._chunk) for r in requests)

    def step(self, limit, until):
        columns, ended, steps = [], 0, 0
        for _ in range(limit):
            live = [row for row, left in enumerate(self._left) if left]
            if not live and not self.reading:
                break
            steps += bool(live)
            columns.append([left.pop(0) if left else -1 for left in self._left])
            ended += sum(not self._left[row] for row in live)
            was_reading, self._unread = self.reading, max(self._unread - 1, 0)
            if ended >= until or (was_reading and not self.reading):
                break
        tokens = np.array(columns, np.int32).reshape(-1, self.rows).T[:, :steps]
        return Drawn(tokens, self._done(), steps)

    def insert(self, places, rows, requests):
        first = np.full((self.rows, 1), -1, np.int32)
        for row, each in zip(rows, requests, strict=True):
            script = list(self._script(each))[: each.sampling.max_new_tokens]
            first[row], self._left[row] = script[0], script[1:]
            self._requests[row] = each
        return Drawn(first, self._done(), 0)

    def drop(self):
        pass

    def finished(self, rows):
        return [self._requests[row] for row in rows]

    def release(self, rows):
        for row in rows:
            self._left[row] = []

    def _done(self):
        return np.array([not left for left in self._left])


class Strict:
    """Raises AssertionError where a call to an executor, or its answer, is wrong.

    `calls` has the name of every call, and what it was called with.
    """

    def __init__(self, executor):
        self._executor = executor
        self.rows, self.read_rows = executor.rows, executor.read_rows
        self.refills = executor.refills
        self.calls = []
        self.group, self.inserted = None, set()
        self.decoding, self.ended = set(), set()  # rows; ended: may be asked about
        self.asked = set()  # rows that `finished` was asked about

    @property
    def reading(self):
        found = self._executor.reading
        assert not (found and self.group is None)
        return found

    @property
    def ready(self):
        return self.group is not None and not self.reading

    def read(self, requests):
        self.calls.append(("read", list(requests)))
        assert self.group is None, "a group is being read, or not dropped"
        assert 1 <= len(requests) <= self.read_rows, "too many prompts, or none"
        assert self.refills or not self.decoding, "rows still decode"
        self._executor.read(requests)
        self.group, self.inserted = list(requests), set()

    def step(self, limit, until):
        self.calls.append(("step", limit, until))
        assert limit >= 1 and until >= 1
        assert self.decoding or self.reading, "there is nothing to do"
        assert until <= max(len(self.decoding), 1)
        was_reading, before = self.reading, set(self.decoding)
        drawn = self._executor.step(limit, until)
        assert drawn.tokens.shape[1] >= drawn.steps <= limit
        self._check(drawn, before)
        over = drawn.steps == limit or len(before - self.decoding) >= until
        assert over or was_reading or not self.decoding, "it returned too early"
        if self.decoding:  # as many tokens as steps
            rest = drawn.tokens[sorted(self.decoding)] >= 0
            assert (rest.sum(1) == drawn.steps).all()
        return drawn

    def insert(self, places, rows, requests):
        self.calls.append(("insert", list(places), list(rows), list(requests)))
        assert self.ready, "nothing has been read"
        assert 1 <= len(places) == len(rows) == len(requests)
        assert len(set(rows)) == len(rows), "a row is named twice"
        assert self.refills or rows == list(places), "rows and places differ"
        assert set(rows) <= set(range(self.rows)) - self.decoding, "a row is not idle"
        for place, each in zip(places, requests, strict=True):
            read = self.group[place]
            assert self.refills or each == read
            assert dataclasses.replace(each, sample=read.sample) == read
            assert (place, each.sample) not in self.inserted
            self.inserted.add((place, each.sample))
        drawn = self._executor.insert(places, rows, requests)
        assert drawn.tokens.shape == (self.rows, 1)
        assert drawn.steps == 0
        self.ended -= set(rows)
        self.asked -= set(rows)
        before = set(self.decoding)
        self.decoding |= set(rows)
        self._check(drawn, set(rows), others=before)
        assert (drawn.tokens[list(rows)] >= 0).all()
        return drawn

    def _check(self, drawn, drawing, others=frozenset()):
        """`drawing` are the rows that may draw, `others` those that go on."""
        assert drawn.tokens.shape[0] == self.rows == len(drawn.done)
        assert drawn.tokens.dtype.kind == "i" and drawn.done.dtype == bool
        real = drawn.tokens >= 0
        assert not (real[:, 1:] & ~real[:, :-1]).any(), "a token after -1"
        assert set(np.flatnonzero(real.any(1)).tolist()) <= drawing
        done = set(np.flatnonzero(drawn.done).tolist())
        assert done >= set(range(self.rows)) - self.decoding, "idle, and not done"
        assert not done & set(others)
        self.ended |= done & self.decoding
        self.decoding -= done

    def drop(self):
        self.calls.append(("drop",))
        assert self.ready, "there is nothing to forget"
        self._executor.drop()
        self.group = None

    def finished(self, rows):
        self.calls.append(("finished", list(rows)))
        assert rows and len(set(rows)) == len(rows)
        assert set(rows) <= self.ended | self.decoding
        assert not set(rows) & self.asked, "asked twice"
        self.asked |= set(rows)
        found = self._executor.finished(rows)
        assert len(found) == len(rows)
        return found

    def release(self, rows):
        self.calls.append(("release", list(rows)))
        assert rows and set(rows) <= self.decoding & self.asked, "not asked about"
        self._executor.release(rows)
        self.decoding -= set(rows)
