"""The table and the text of throughput records, those of `kvjax.evaluation.throughput`."""

from collections.abc import Sequence

from kvjax.evaluation.report import cells, grids, tables
from kvjax.evaluation.report.cells import number, rate
from kvjax.evaluation.report.records import Record

READING = """\
- All methods generate the same number of tokens (**New**) for the same prompts,
  whatever ends a text. **Batch** is how many prompts decode at a time and what kept it
  from more (`ED`: that method's batch, which the full cache is not to exceed); **Read
  at once**, how many prompts are read at a time.
- **End-to-end** is generated tokens by the time of prefill and decoding together, the
  median of all batches; **x ED** and **x FKV**, how many times that of ED and of the
  full cache at as many new tokens.
- **roofline** is the share of what the device could reach by its measured bandwidth and
  matrix rate, if it did only what the method needs; **Predicted**, end to end, is that
  limit, known before the run. In the picture it is hollow, over the measurement;
  methods of one batch stand side by side.
- ED and the full cache run at b0 - 1, where b0 is the smallest batch at which ED does
  not fit; all others at the largest that fits, which for Batch-Max divides the number
  of prompts. Other engines, where there are any, run at their largest batch in the same
  memory; they have no prediction."""


def is_throughput(records: Sequence[Record]) -> bool:
    """Whether these are `kvjax.evaluation.throughput`'s, which have a table of their own."""
    return {record.get("kind") for record in records} == {"throughput"}


def times(record: Record, records: Sequence[Record], role: str) -> float | None:
    """Its end-to-end rate over that of the method whose `role` is "ed" or "full"."""
    bases = [r for r in records if r.get("role") == role]
    same = [r for r in bases if r.get("new_tokens") == record.get("new_tokens")]
    return cells.ratio(record, same[0], "tokens_per_s") if same else None


def _engine(record: Record) -> str:
    return record.get("engine", "kvjax")


def table(records: Sequence[Record]) -> str:
    """Returns `grid` in Markdown."""
    return grids.markdown(grid(records))


def grid(records: Sequence[Record]) -> grids.Grid:
    """Returns batches, rates and shares of the roofline, by number of new tokens.

    `x ED` and `x FKV` are end-to-end rates relative to theirs at as many new tokens.
    """
    other = any(_engine(record) != "kvjax" for record in records)
    columns: tables.Columns = {
        **({"Engine": _engine} if other else {}),
        "New": lambda r: cells.text(r.get("new_tokens")),
        "KV slots": cells.slots,
        "Batch (limited by)": cells.batch,
        "Read at once": lambda r: cells.text(r.get("group")),
        "Prefill tok/s": lambda r: rate(r.get("prefill_tokens_per_s")),
        "of roofline": lambda r: number(r.get("prefill_roofline")),
        "Decode tok/s": lambda r: rate(r.get("decode_tokens_per_s")),
        "roofline": lambda r: number(r.get("decode_roofline")),
        "End-to-end tok/s": lambda r: rate(r.get("tokens_per_s")),
        "x ED": lambda r: number(times(r, records, "ed")),
        "x FKV": lambda r: number(times(r, records, "full")),
        "Predicted": lambda r: rate(r.get("predicted_tokens_per_s")),
        "Needle": lambda r: number(r.get("accuracy")),
        "Planned MB": lambda r: cells.megabytes(r.get("planned_bytes")),
        "Measured MB": lambda r: cells.megabytes(r.get("measured_bytes")),
    }
    names = [cells.text(r.get("method")) for r in records]
    return tables.grid(records, columns, names)
