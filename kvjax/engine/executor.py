"""The interface of executors, which read and decode requests in rows::

    read -> step ... step -> insert ... insert -> drop -> read
            (chunks)         (into rows)

    insert -> step ... step -> ended -> finished -> (idle)
                         |                  ^
                         +--> finished -> release

An executor holds R rows that decode, and beside them one group of up to g prompts that
is being read or has been read. It knows nothing of queues: a scheduler
(`kvjax.engine.scheduler`) decides which request goes where.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int

from kvjax.engine.requests import Request


class Drawn(NamedTuple):
    """The result of decode steps, or of an insertion; on the host.

    Attributes:
      tokens: the tokens drawn for each row, in order; -1 after a row's end, for idle
        rows and, in the result of an insertion, for all rows but the inserted ones.
      done: rows that have ended or are idle.
      steps: decode steps that ran; 0 if only prompts were read, or rows inserted.
      logprobs: where a request asks for them, a NamedTuple of arrays [R, N, ...];
        otherwise None.
    """

    tokens: Int[np.ndarray, "R N"]
    done: Bool[np.ndarray, " R"]
    steps: int
    logprobs: Any = None


class Executor(Protocol):
    """Reads prompts in chunks and decodes rows, both in fixed shapes.

    A row is *idle* until a request is inserted. It *decodes* until `done` is reported
    of it: it drew an end token that counts, or `max_new_tokens` tokens. Then it is idle
    again, and what its heads keep can be asked for until a request is inserted or the
    row is released.

    Attributes:
      rows: R, requests that decode together.
      read_rows: g, prompts that are read together.
      refills: whether rows that have ended take other requests while the rest decode.
        If not, a group is read once all rows are idle, and inserted whole, each place
        into the row of the same number.
    """

    rows: int
    read_rows: int
    refills: bool

    @property
    def reading(self) -> bool:
        """True from `read` until all chunks of the group's prompts have been read."""
        ...

    def read(self, requests: Sequence[Request]) -> None:
        """Begins to read a group of prompts; `step` reads their chunks.

        The executor must hold no other group: the last one has been dropped.

        Args:
          requests: 1 to `read_rows` of them. A request's place is its index here.
        """
        ...

    def step(self, limit: int, until: int) -> Drawn:
        """Decodes all rows that have not ended, and reads chunks beside them.

        While prompts are being read, each step reads one chunk of every prompt of the
        group in the same forward pass (a mixed step). If no row decodes, steps read
        chunks only. Returns at the first of these:

        - `limit` steps have run;
        - `until` of the rows that decoded at the call have ended;
        - the group's last chunk has been read, so `reading` turned False;
        - no row decodes, and no prompt is being read.

        Args:
          limit: at least 1.
          until: at least 1; at most the number of rows that decode, if any does.
        """
        ...

    def insert(
        self, places: Sequence[int], rows: Sequence[int], requests: Sequence[Request]
    ) -> Drawn:
        """Copies prompts that have been read to idle rows; draws their first tokens.

        A row whose first token ends it is reported as done at once.

        Args:
          places: of prompts in their group, see `read`. A place may be named several
            times, in this call and in later ones: the samples of a prompt.
          rows: as many different idle rows.
          requests: the request of each row. Only `sample` may differ from the one that
            was read.

        Returns:
          Tokens [R, 1]: -1 for rows that are not among `rows`.
        """
        ...

    def drop(self) -> None:
        """Forgets the group of prompts that has been read; none may be half read."""
        ...

    def finished(self, rows: Sequence[int]) -> list[Any]:
        """Returns the positions that heads keep, per row `[layer][head] -> ndarray`.

        Args:
          rows: those that have ended since they were inserted, or that will be released
            next.

        Raises:
          UserError: an error that the state recorded, such as a cache that overflowed.
        """
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Ends rows that decode (a stop text, a cancelled request): they are idle.

        Rows that ended by themselves need no release.
        """
        ...
