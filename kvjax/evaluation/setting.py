"""What a run hands to its measurements, and what they hand back."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache import head_groups
from kvjax.engine.jobs import Job
from kvjax.engine.planner import Plan
from kvjax.evaluation.config import Experiment, Method
from kvjax.evaluation.report.records import (
    PROBES,
    Needed,
    Record,
    append_record,
    read_records,
)
from kvjax.types import Model

Progress = Callable[[str, int], None]  # what runs now, and units of work just finished
Baseline = Callable[..., Record]  # see `kvjax.evaluation.run.run`


class Lines:
    """A JSON-lines file, parsed once; what is added is on disk when `add` returns.

    Args, raises: see `read_records`.
    """

    def __init__(self, path: str | os.PathLike, needed: Needed = lambda line: ()):
        self.path, self._lines = path, read_records(path, needed)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._lines)

    def add(self, line: Record) -> None:
        append_record(self.path, line)
        self._lines.append(line)

    def where(self, **fields: Any) -> list[Record]:
        """The lines that hold all of these values, None for what is not there."""
        wanted = fields.items()
        return [x for x in self if all(x.get(key) == value for key, value in wanted)]


class Setting(NamedTuple):
    """What all measurements of a run share.

    Attributes:
      experiment: what was asked.
      model: loaded.
      memory: bytes that a measurement may take.
      workdir: where a measurement may keep more than lines.
      batches: `batches.jsonl`: what was run so far.
      records: `records.jsonl`: what was finished so far.
      baselines: other libraries' methods, see `kvjax.evaluation.run.run`.
    """

    experiment: Experiment
    model: Model
    memory: int
    workdir: os.PathLike
    batches: Lines
    records: Lines
    baselines: Mapping[str, Baseline]


class Row(NamedTuple):
    """A record to be made.

    Attributes:
      method, new_tokens: which tell it from the others; `new_tokens` is None where the
        tasks say how many.
      units: of work, see `Experiment.units_per_method`.
      measure: makes the record, and says what runs.
      rank: rows of a lower rank are measured first.
    """

    method: str
    new_tokens: int | None
    units: int
    measure: Callable[[Progress], Record]
    rank: int = 0

    @property
    def key(self) -> Record:
        return {"method": self.method, "new_tokens": self.new_tokens}

    @property
    def title(self) -> str:
        return (
            f"{self.method}, {self.new_tokens} new" if self.new_tokens else self.method
        )


def described(method: Method, planned: Plan) -> Record:
    """What a record says of a method and its batch."""
    config = planned.job.config
    return {
        "method": method.name,
        "series": method.series or method.name,
        "engine": "kvjax",
        "policy": config.policy.name if config.policy else None,
        "codec": method.stored,
        "offload": config.offload and dataclasses.asdict(config.offload),
        "schedule": config.schedule.phases,
        **_sizes(method, planned.job),
        "rope_positions": method.cache.rope_positions,
        "batch_rule": method.batch_rule,
        "batch_size": planned.batch,
        "prefill_batch": planned.prefill_groups[0],
        "limited_by": planned.limited_by,
        "kv_bytes_peak_per_seq": planned.row_bytes,
        "host_bytes_per_seq": planned.host_bytes // planned.batch,
        "planned_bytes": planned.peak_bytes,
        "memory_bytes": planned.memory_bytes,
    }


def mean_probe(batches: Sequence[Record]) -> Record:
    """What was left of the machine beside batches, see `roofline.probed`.

    None where a batch has no probe, as those of earlier versions.
    """
    known = all(key in batch for batch in batches for key in PROBES)
    return {
        key: float(np.mean([batch[key] for batch in batches])) if known else None
        for key in PROBES
    }


def _sizes(method: Method, job: Job) -> Record:
    """How many pairs heads keep, as the rule has them before a prompt is read."""
    config, heads = job.config, job.spec.num_kv_heads
    told = {
        "budget": method.budget,
        "budget_share": method.share,
        "budget_rule": method.rule,
    }
    if config.budget is None:
        return told
    each = np.array(
        [head_groups.sizes_per_head(sizes, heads) for sizes in config.budget]
    )
    if isinstance(method.budget, str):
        told["budget"] = round(each.mean())
        told["budget_rule"] = method.rule or config.budget_rule.name
    return told | {
        "mean_slots": float(each.mean()),
        "smallest_slots": int(each.min()),
        "largest_slots": int(each.max()),
        "sizes": each.tolist() if np.ptp(each) else None,
    }
