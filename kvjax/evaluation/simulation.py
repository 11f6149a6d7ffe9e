"""Simulates how an engine serves requests on a device, from shapes alone.

The scheduler is the real one (`kvjax.engine.scheduler`). The executor is a clock
(`kvjax.engine.simulated`), and steps take what the roofline of the device allows
(`kvjax.evaluation.step_costs`), which is a bound and no forecast::

    load = simulation.draw_load(1000, prompt=2048, new=512, requests_per_s=4)
    spec = presets.spec("llama-3.1-8b")
    config = make_spec(spec, "key_diff", 512)
    print(simulation.serve(spec, config, roofline.device("h200"), load, rows=64))
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.cache.spec import CacheSpec
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.simulated import Call, SimulatedExecutor
from kvjax.evaluation import arithmetic
from kvjax.evaluation.roofline import Device
from kvjax.evaluation.step_costs import roofline_costs
from kvjax.types import ModelSpec, UserError, real_number

# --- what arrives ---------------------------------------------------------------------


class Load(NamedTuple):
    """Requests, by the time of their arrival.

    Attributes:
      arrivals: seconds, in ascending order.
      prompts: tokens of each prompt.
      outputs: tokens of each completion, which the scheduler does not know.
    """

    arrivals: Float[np.ndarray, " N"]
    prompts: Int[np.ndarray, " N"]
    outputs: Int[np.ndarray, " N"]


def draw_load(
    count: int,
    *,
    prompt: int,
    new: int,
    requests_per_s: float | None = None,
    kind: str = "lognormal",
    seed: int = 0,
) -> Load:
    """Draws requests whose lengths are spread.

    Args:
      count: N.
      prompt: tokens of the longest prompt.
      new: tokens of the longest completion.
      requests_per_s: mean rate of a Poisson process; None lets all arrive at once.
      kind: of lengths, see `arithmetic.draw_lengths`.
      seed: of NumPy's generators.

    Raises:
      UserError: a number below 1, a rate that is not positive, an unknown kind.
    """
    prompts, outputs = (
        arithmetic.draw_lengths(kind, count, longest, seed + i)
        for i, longest in enumerate((prompt, new))
    )
    gaps = np.zeros(count)
    if requests_per_s is not None:
        if real_number("requests_per_s", requests_per_s, 0) == 0:
            raise UserError("requests_per_s 0: give a rate above 0, or None")
        gaps = np.random.default_rng(seed + 2).exponential(1 / requests_per_s, count)
    return Load(np.cumsum(gaps), prompts, outputs)


# --- what happens ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation:
    """How requests were served; all times in seconds.

    Attributes:
      load: the requests.
      rows: that decode together.
      first: of each request, from its arrival to its first token.
      latency: of each request, from its arrival to its end.
      calls: of the executor.
    """

    load: Load
    rows: int
    first: Float[np.ndarray, " N"]
    latency: Float[np.ndarray, " N"]
    calls: Sequence[Call]

    @property
    def seconds(self) -> float:
        """The time of the last request's end, from the first one's arrival."""
        ends = self.load.arrivals + self.latency
        return float(ends.max() - self.load.arrivals.min())

    @property
    def tokens_per_s(self) -> float:
        return sum(call.tokens for call in self.calls) / self.seconds

    def first_token(self, *shares: float) -> list[float]:
        """Returns quantiles of the time to the first token."""
        return np.quantile(self.first, shares).tolist()

    def end_to_end(self, *shares: float) -> list[float]:
        """Returns quantiles of the latency."""
        return np.quantile(self.latency, shares).tolist()

    def between_tokens(self, *shares: float) -> list[float]:
        """Returns quantiles of the time from one token of a row to its next.

        In a call with several steps they all count as equally long. Insertions before a
        call are a part of its time. NaN if no request has a second token.
        """
        _, seconds, steps, tokens = np.array(self.calls).T
        decodes = steps > 0
        if not decodes.any():
            return [np.nan] * len(shares)
        held_up = np.cumsum(np.where(decodes, 0, seconds * (tokens > 0)))
        inserted = np.diff(held_up[decodes], prepend=0.0)
        gaps = (seconds[decodes] + inserted) / steps[decodes]
        order = np.argsort(gaps)
        reached = np.cumsum(tokens[decodes][order])
        at = np.searchsorted(reached, np.array(shares) * reached[-1])
        return gaps[order][at].tolist()

    def rows_by_time(self, slices: int = 10) -> list[float]:
        """Returns the mean number of rows that decode, in equal slices of the time."""
        start, seconds, steps, tokens = np.array(self.calls).T
        rows = np.divide(tokens, steps, where=steps > 0, out=np.zeros_like(steps))
        middle = start + seconds / 2
        begin = float(self.load.arrivals.min())
        within = begin, begin + self.seconds
        sums, _ = np.histogram(middle, slices, within, weights=rows * seconds)
        return (sums / (self.seconds / slices)).tolist()

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Returns a table for people."""
        lines = [f"{'seconds':24}{'p50':>10}{'p99':>10}"]
        for name, quantiles in (
            ("to the first token", self.first_token),
            ("between tokens", self.between_tokens),
            ("end to end", self.end_to_end),
        ):
            half, most = quantiles(0.5, 0.99)
            lines.append(f"{name:24}{half:10.4g}{most:10.4g}")
        rows = " ".join(f"{rows:.3g}" for rows in self.rows_by_time())
        requests = len(self.first)
        return "\n".join(
            [
                *lines,
                f"{requests:,} requests in {self.seconds:,.4g} s, "
                f"{requests / self.seconds:.3g} a second",
                f"{self.tokens_per_s:,.4g} new tokens a second",
                f"rows in use, of {self.rows}, by tenths of the time: {rows}",
            ]
        )


def simulate(load: Load, executor: SimulatedExecutor, limit: int = 32) -> Simulation:
    """Serves a load; requests are seen once the call that they arrive in returns.

    Args:
      load: the requests.
      executor: a new one, whose `lengths` are those of `load.outputs`.
      limit: see `Scheduler`: most steps of a call.
    """
    scheduler = Scheduler(executor, limit=limit)
    sampling = Sampling(max_new_tokens=int(load.outputs.max()))
    arrivals, prompts = load.arrivals.tolist(), load.prompts.tolist()
    arrived, count = 0, len(arrivals)
    first: dict[int, float] = {}
    end = [0.0] * count
    while scheduler.busy or arrived < count:
        if not scheduler.busy:  # nothing to do until the next request arrives
            executor.clock = max(executor.clock, arrivals[arrived])
        while arrived < count and arrivals[arrived] <= executor.clock:
            scheduler.add(Request(arrived, (0,) * prompts[arrived], sampling))
            arrived += 1
        for event in scheduler.turn():
            number = event.request.number
            first.setdefault(number, executor.clock)
            if event.finish_reason:
                end[number] = executor.clock
    begun = np.array([first[number] for number in range(count)])
    return Simulation(
        load=load,
        rows=executor.rows,
        first=begun - load.arrivals,
        latency=np.array(end) - load.arrivals,
        calls=executor.calls,
    )


def serve(
    spec: ModelSpec,
    config: CacheSpec,
    device: Device,
    load: Load,
    *,
    rows: int | None = None,
    read_rows: int = 1,
    limit: int = 32,
    call: float = 0.0,
    dtype: str = "bfloat16",
) -> Simulation:
    """Serves a load with a model on a device; see `roofline_costs`.

    Args:
      spec: the model's shape.
      config: the cache; a step reads `schedule.prefill_chunk` tokens of a prompt.
      device: its rates and memory.
      load: the requests.
      rows: that decode together; None is as many as fit beside the weights and a group
        that is being read, temporaries aside.
      read_rows: prompts that are read together.
      limit: most steps of a call.
      call: seconds of the host per call of the executor.
      dtype: of weights and pairs.

    Raises:
      UserError: not even one row fits.
    """
    longest, new = int(load.prompts.max()), int(load.outputs.max())
    job = Job(spec, config, read_rows, longest, new, dtype=dtype)
    rows = rows or _rows_that_fit(job, device.memory_bytes)
    job = dataclasses.replace(job, batch=rows, prefill_batch=min(read_rows, rows))
    outputs = load.outputs.tolist()
    executor = SimulatedExecutor(
        rows,
        min(read_rows, rows),
        lambda request: outputs[request.number],
        roofline_costs(job, device.rates, call),
        chunk=config.schedule.prefill_chunk,
        first_chunk=config.first_chunk,
    )
    return simulate(load, executor, limit)


def _rows_that_fit(job: Job, memory_bytes: float) -> int:
    """Returns the rows that fit beside a group of the job's rows that is being read."""
    states, weights = state_bytes(job), weights_bytes(job)
    row = states["decode"] / job.batch
    rows = arithmetic.rows_that_fit(memory_bytes, weights + states["prefill"], row)
    if not rows:
        raise UserError(
            f"{job.spec.name} with prompts of {job.max_prompt_len:,} tokens does not "
            f"fit in {memory_bytes / 1e9:.3g} GB: take a smaller budget, fewer "
            "read_rows or a larger device"
        )
    return rows
