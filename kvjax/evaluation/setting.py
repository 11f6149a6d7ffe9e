"""Inputs and outputs that the measurements of an experiment run share."""

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

Progress = Callable[[str, int], None]  # (message, units of work just finished)
Baseline = Callable[..., Record]  # see `kvjax.evaluation.run.run`


class Lines:
    """A JSON-lines file in memory; `add` returns after its line is on disk.

    See `read_records` for the arguments and the errors.
    """

    def __init__(self, path: str | os.PathLike, needed: Needed = lambda line: ()):
        self.path, self._lines = path, read_records(path, needed)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._lines)

    def add(self, line: Record) -> None:
        append_record(self.path, line)
        self._lines.append(line)

    def where(self, **fields: Any) -> list[Record]:
        """Returns the lines with these values; None matches a field that is missing."""
        return [
            line
            for line in self
            if all(line.get(key) == value for key, value in fields.items())
        ]


class Setting(NamedTuple):
    """Inputs that all measurements of a run share.

    Attributes:
      experiment: the experiment.
      model: the loaded model.
      memory: bytes that a measurement may use.
      workdir: folder for files of a measurement.
      batches: `batches.jsonl`, the batches finished so far.
      records: `records.jsonl`, the methods finished so far.
      baselines: methods of other libraries, see `kvjax.evaluation.run.run`.
    """

    experiment: Experiment
    model: Model
    memory: int
    workdir: os.PathLike
    batches: Lines
    records: Lines
    baselines: Mapping[str, Baseline]


class Row(NamedTuple):
    """A row of the results, to be measured unless its record exists.

    Attributes:
      method, new_tokens: identify the row; `new_tokens` is None where the tasks set the
        number.
      units: units of work, see `Experiment.units_per_method`.
      measure: measures and returns the record, and reports progress.
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
    """Returns the fields of a record that describe a method and its batch."""
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
    """Returns the mean of the batches' probes of the machine, see `roofline.probed`.

    None if a batch has no probe (earlier versions wrote none).
    """
    known = all(key in batch for batch in batches for key in PROBES)
    return {
        key: float(np.mean([batch[key] for batch in batches])) if known else None
        for key in PROBES
    }


def _sizes(method: Method, job: Job) -> Record:
    """Returns the fields of a record about the budget and the sizes of heads.

    Rules that look at a prompt change the sizes later; these are the planned ones.
    """
    config, heads = job.config, job.spec.num_kv_heads
    fields = {
        "budget": method.budget,
        "budget_share": method.share,
        "budget_rule": method.rule,
    }
    if config.budget is None:
        return fields
    each = np.array(
        [head_groups.sizes_per_head(sizes, heads) for sizes in config.budget]
    )
    if isinstance(method.budget, str):
        fields["budget"] = round(each.mean())
        fields["budget_rule"] = method.rule or config.budget_rule.name
    return fields | {
        "mean_slots": float(each.mean()),
        "smallest_slots": int(each.min()),
        "largest_slots": int(each.max()),
        "sizes": each.tolist() if np.ptp(each) else None,
    }
