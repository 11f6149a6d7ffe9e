"""What the steps of an engine take on a device, by the roofline.

`kvjax.evaluation.roofline` counts the work of a fixed batch. Here every row is at a
place of its own, and a step may read chunks of prompts beside rows that decode (a mixed
step): its FLOPs and bytes are the sum of both, with the weights read once.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kvjax.engine.jobs import Job
from kvjax.engine.planner import Plan, as_plan
from kvjax.engine.simulated import Costs, Decoding, Reading
from kvjax.evaluation import roofline
from kvjax.evaluation.roofline import Rates

_LENGTHS = 17  # prompt lengths whose steps are counted


def roofline_costs(job: Job, rates: Rates, call: float = 0.0) -> Costs:
    """Returns the least seconds that a job's steps take on a device.

    All rows and all of the group's chunks are multiplied with the weights, in use or
    not, since programs have fixed shapes. Pairs are counted where rows hold them,
    interpolated between prompts of 17 lengths.

    Args:
      job: the model, the cache and the rows; `prefill_batch` prompts are read together.
      rates: of the device.
      call: seconds of the host per call of the executor.
    """
    counted = _Counted(job, rates)
    return Costs(counted.decode, counted.chunk, counted.mixed, counted.insert, call)


class _Counted:
    """Seconds of steps, from work that is counted once.

    The last axis of arrays, W, is a `roofline.Work`: FLOPs, bytes, bytes of the link.
    """

    def __init__(self, job: Job, rates: Rates):
        self._rates = np.array(
            [rates.flops_per_s, rates.bytes_per_s, rates.link_bytes_per_s]
        )
        self._job, schedule = job, job.config.schedule
        self._first, self._width = job.config.first_chunk, schedule.prefill_chunk
        rows, group = job.batch, job.group.batch
        self._decode = self._weights(rows, 1, logits=True)
        self._head = self._decode - self._weights(rows, 1)
        self._chunk = self._weights(group, self._width)
        self._mixed = self._weights(1, rows + group * self._width) + self._head
        self._lengths = _spread(job.max_prompt_len)
        self._at, self._share = _neighbours(self._lengths)
        new = max(job.max_new_tokens, 2)  # the first token takes no decode step
        one = dataclasses.replace(job, batch=1, prefill_batch=None, max_new_tokens=new)
        plan = as_plan(one, "prompts", 0, 0)
        self._row_decode = self._of_rows(plan)  # [P, N, W]
        self._row_chunk = self._of_chunks(plan)  # [C, W]
        self._row_insert = self._of_insertions(plan)  # [P, W]

    def decode(self, rows: Decoding, steps: int) -> Float[np.ndarray, " N"]:
        return self._seconds(self._decode + self._pairs(rows, steps))

    def chunk(self, reading: Reading) -> Float[np.ndarray, " N"]:
        return self._seconds(self._chunk + self._read(reading))

    def mixed(self, rows: Decoding, reading: Reading) -> Float[np.ndarray, " N"]:
        pairs = self._pairs(rows, len(reading.chunks)) + self._read(reading)
        return self._seconds(self._mixed + pairs)

    def insert(self, prompts: Int[np.ndarray, " P"]) -> float:
        work = self._row_insert[self._at[:, prompts]]
        moved = np.einsum("cpw,cp->w", work, self._share[:, prompts])
        logits = self._head * [len(prompts) / self._job.batch, 1, 1]
        return float(self._seconds((logits + moved)[None])[0])

    def _seconds(self, work: Float[np.ndarray, "N W"]) -> Float[np.ndarray, " N"]:
        return (work / self._rates).max(axis=-1)

    def _pairs(self, rows: Decoding, steps: int) -> Float[np.ndarray, "N W"]:
        """Returns the work on the pairs of rows that decode."""
        columns = np.arange(steps)
        step = np.minimum(rows.drawn[:, None] - 1 + columns, self._last)
        work = self._row_decode[self._at[:, rows.prompts, None], step]
        shares = self._share[:, rows.prompts, None] * (columns < rows.left[:, None])
        return np.einsum("crnw,crn->nw", work, shares)

    def _read(self, reading: Reading) -> Float[np.ndarray, "N W"]:
        """Returns the work on the pairs of prompts that have so many chunks."""
        last = self._chunks(reading.prompts) - 1
        count = np.sum(reading.chunks <= last[:, None], axis=0)
        return self._row_chunk[reading.chunks] * count[:, None]

    def _chunks(self, prompts):
        return 1 + np.maximum(-(-(prompts - self._first) // self._width), 0)

    @property
    def _last(self) -> int:
        return self._row_decode.shape[1] - 1

    def _weights(self, rows: int, tokens: int, logits=False) -> Float[np.ndarray, " W"]:
        size = jnp.dtype(self._job.dtype).itemsize
        return np.array(roofline.matrices(self._job.spec, size, rows, tokens, logits))

    def _of_rows(self, plan: Plan) -> Float[np.ndarray, "P N W"]:
        """Returns a row's work on pairs at each token but the first."""
        steps = [roofline.decode(plan, length) for length in self._lengths.tolist()]
        return np.array(steps) - self._weights(1, 1, logits=True)

    def _of_chunks(self, plan: Plan) -> Float[np.ndarray, "C W"]:
        """Returns a prompt's work on pairs in each of its chunks, all of them full."""
        more = int(self._chunks(plan.job.max_prompt_len)) - 1
        steps = roofline.prefill(plan, self._first + more * self._width)[: more + 1]
        widths = [self._first] + more * [self._width]
        return np.array(steps) - [self._weights(1, width) for width in widths]

    def _of_insertions(self, plan: Plan) -> Float[np.ndarray, "P W"]:
        """Returns the work of compacting a prompt's pairs and of copying them."""
        copied = 2 * self._row_decode[:, 0] * [0, 1, 0]
        for i, length in enumerate(self._lengths.tolist()):
            after = roofline.prefill(plan, length)[self._chunks(length) + 1 :]
            copied[i] += np.sum([np.zeros(3), *after], axis=0)
        return copied


def _link(rates: Rates) -> float:
    return rates.link_bytes_per_s


def _neighbours(lengths: Int[np.ndarray, " P"]):
    """Returns each prompt length's next shorter and next longer one of a few.

    Returns:
      Their indices [2, T], and the share of each [2, T], by the length up to T - 1.
    """
    every = np.arange(lengths[-1] + 1)
    above = np.maximum(np.searchsorted(lengths, every), 1)
    low, high = lengths[above - 1], lengths[above]
    share = (every - low) / (high - low)
    return np.stack([above - 1, above]), np.stack([1 - share, share])


def _spread(longest: int) -> Int[np.ndarray, " P"]:
    """Returns a few prompt lengths, from 1 to the longest."""
    most = max(longest, 2)
    return np.unique(np.linspace(1, most, _LENGTHS).round().astype(np.int64))
