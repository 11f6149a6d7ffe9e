"""The table and the text of throughput records, those of `kvjax.throughput`."""

from collections.abc import Sequence

from kvjax import cells, tables
from kvjax.cells import number, rate
from kvjax.records import Record

READING = """\
- All methods generate the same number of tokens (**New**) for the same prompts,
  whatever ends a text. **Batch** is how many prompts decode at a time and what kept it
  from more; **Read at once**, how many prompts are read at a time.
- **End-to-end** is generated tokens by the time of prefill and decoding together, the
  median of all rounds; in brackets, how many times ED's at as many new tokens.
- **roofline** is the share of what the device could reach by its measured bandwidth and
  matrix rate, if it did only what the method needs; **Predicted**, end to end, is that
  limit, known before the run."""


def is_throughput(records: Sequence[Record]) -> bool:
    """Whether these are `kvjax.throughput`'s, which have a table of their own."""
    return {record.get("kind") for record in records} == {"throughput"}


def table(records: Sequence[Record]) -> str:
    """Returns batches, rates and shares of the roofline, by number of new tokens.

    In brackets, end-to-end rates relative to ED's at as many new tokens.
    """
    eds = {r["new_tokens"]: r for r in records if r.get("role") == "ed"}

    def end_to_end(record):
        return tables.end_to_end(record, eds.get(record["new_tokens"], {}))

    columns: tables.Columns = {
        "New": lambda r: cells.text(r["new_tokens"]),
        "KV slots": cells.slots,
        "Batch (limited by)": cells.batch,
        "Read at once": lambda r: cells.text(r.get("group")),
        "Prefill tok/s": lambda r: rate(r.get("prefill_tokens_per_s")),
        "of roofline": lambda r: number(r.get("prefill_roofline")),
        "Decode tok/s": lambda r: rate(r.get("decode_tokens_per_s")),
        "roofline": lambda r: number(r.get("decode_roofline")),
        "End-to-end tok/s": end_to_end,
        "Predicted": lambda r: rate(r.get("predicted_tokens_per_s")),
        "Needle": lambda r: number(r.get("accuracy")),
        "Planned MB": lambda r: cells.megabytes(r.get("planned_bytes")),
        "Measured MB": lambda r: cells.megabytes(r.get("measured_bytes")),
    }
    names = [cells.text(r.get("method")) for r in records]
    return tables.markdown(records, columns, names)
