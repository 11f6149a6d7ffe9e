"""Records of runs: one JSON line per method, in a file that may be interrupted.

A record is a dict. It may hold these fields; tables show a missing one as "-":

    format                      `FORMAT`, the version of these fields
    experiment                  "quality" or "throughput": the protocol that was run
    method, policy, schedule    names; tables and figures show `method`
    series                      the name shared by methods that differ in budget and
                                schedule only: their row in a sweep
    budget                      slots per KV head: an int, one per layer, or None (all)
    budget_rule                 how layers share it: squeeze(p=0.3); None is uniform
    budget_share                the budget as a share of the longest prompt, such as
                                0.5, where the config says "50%"
    mean_slots, smallest_slots, largest_slots    over KV heads, before a prompt is read
    sizes                       slots of every head, [L][K]; None where all are equal
    codec                       how KV pairs are stored; "identity": unchanged
    rope_positions              "original" or "cache": the positions keys are rotated to
    engine                      "kvjax", or another library
    batch_size, limited_by      prompts per batch, and what limits it
    prefill_batch, batch_rule   prompts per prefill, and how the batch was chosen
    tolerance, tried            where |kv| was searched: how far the score may be below
                                the full cache's, and every |kv| that was tried,
                                {budget, batch_size, score, num_examples, ..., chosen}
    score, num_examples         the mean of the tasks' scores, over how many prompts
    tasks                       {name: {metric, score, metrics, num_examples, interval,
                                interval_method, breakdown, ...}}; `interval` is a 95%
                                confidence interval, `breakdown` scores by depth and
                                the like
    kl, loss, reference_loss    nats per token
    top1_agreement              share of tokens
    prefill_tokens_per_s, decode_tokens_per_s    prompt tokens; generated tokens without
                                each answer's first, which prefill produces (None where
                                there is no other)
    output_tokens_per_s         end to end: generated tokens by total time
    predicted_tokens_per_s      the same, at the roofline
    probe_flops_per_s, probe_bytes_per_s    of a fixed matrix product and a fixed copy
                                beside its batches: how much of the machine was free
    prefill_roofline, decode_roofline    shares of the roofline's rates
    offload                     fields of `kvjax.Offload`; None for none
    kv_bytes_peak_per_seq       bytes of KV cache of one prompt, at most
    host_bytes_per_seq          bytes of values that it has in host memory, at most
    kv_bytes_decode             bytes of KV cache of one prompt while decoding
    kv_bytes_live, kv_bytes_allocated    keys and values of one prompt at the end: of
                                the pairs kept, and of all slots
    planned_bytes, measured_bytes, memory_bytes    of the whole run; the last, its limit
    prompt_tokens, max_new_tokens, new_tokens    per prompt; the last, where all
                                prompts have the same number
    seconds, seed, model, device
    provenance                  {"command", "versions"}: see `provenance`
"""

import importlib.metadata
import json
import mmap
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from kvjax.evaluation import files
from kvjax.types import UserError

Record = dict[str, Any]
Needed = Callable[[Record], Iterable[str]]  # the fields that a record must have

FORMAT = 2
PROBES = "probe_flops_per_s", "probe_bytes_per_s"


class Source(NamedTuple):
    """A file of records.

    Attributes:
      path: as reports name it.
      records: all of them.
      torn: whether its last line was cut short; that line is left out.
    """

    path: str
    records: list[Record]
    torn: bool = False


def read(paths: Sequence[str | os.PathLike]) -> list[Source]:
    """Reads the files of records that a report of several runs is made from.

    Args:
      paths: files or folders, each file read once. Of a folder, records.jsonl is read
        or, where there is none, every *.jsonl but batches.jsonl.

    Raises:
      UserError: no path, no records, or a file that does not hold records.
    """
    if not paths:
        raise UserError("no runs named: give their folders or records.jsonl files")
    unique = {f.resolve(): f for path in paths for f in _files(pathlib.Path(path))}
    needed = lambda record: ("method", "experiment")
    sources = [_read(path, needed) for path in unique.values()]
    for source in sources:
        if not source.records:
            raise UserError(
                f"{source.path} holds no records: no method has finished there"
            )
    return sources


def read_records(
    path: str | os.PathLike, needed: Needed = lambda record: ()
) -> list[Record]:
    """Returns the records of a JSON-lines file; none where there is no such file.

    A last line that an interruption cut short is left out.

    Raises:
      UserError: another line is not a record, is of another format, or lacks a field
        that is `needed`; it names file and line.
    """
    path = pathlib.Path(path)
    return _read(path, needed).records if path.exists() else []


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Adds one line to a JSON-lines file; it is on disk on return.

    The line names its format. NumPy scalars and arrays become plain numbers. A torn
    last line is removed first.

    Raises:
      UserError: the disk is full, or writing fails for another reason.
    """
    line = json.dumps({"format": FORMAT} | record, default=_as_json).encode() + b"\n"
    with files.on_disk(path), open(path, "ab+") as file:
        last = _last_line(file)
        if _is_torn(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
        elif last:
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def provenance() -> Record:
    """Returns a record's `provenance`: the command and the versions of its software.

    A script below the current folder is named relative to it, a command of
    `kvjax.cli` as it is typed.
    """
    import kvjax

    script, *arguments = sys.argv
    below = os.path.relpath(script) if script else ""
    script = script if below.startswith(os.pardir) else below
    program = script.split() if script.startswith("kvjax ") else ["python", script]
    command = shlex.join([*program, *arguments])
    return {
        "provenance": {
            "command": "a notebook" if "kernel_launcher" in script else command,
            "versions": {
                "jax": importlib.metadata.version("jax"),
                "kvjax": kvjax.__version__,
                "python": platform.python_version(),
            },
        }
    }


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is not there: name a run's folder or its records")
    if (path / "records.jsonl").is_file():
        return [path / "records.jsonl"]
    found = sorted(f for f in path.glob("*.jsonl") if f.name != "batches.jsonl")
    if not found:
        raise UserError(
            f"{path} holds no records.jsonl: no method has finished there, or it is "
            "not the folder of a run"
        )
    return found


def _read(path: pathlib.Path, needed: Needed) -> Source:
    *lines, last = path.read_bytes().split(b"\n")
    torn = _is_torn(last)
    numbered = enumerate(lines if torn else [*lines, last], 1)
    records = [_parse(path, number, line, needed) for number, line in numbered if line]
    return Source(os.path.normpath(path), records, torn)


def _parse(path: pathlib.Path, number: int, line: bytes, needed: Needed) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UserError(
            f"{path}, line {number} is not a record in JSON: repair or remove it"
        )
    if (found := record.get("format", 1)) > FORMAT:
        raise UserError(
            f"{path}, line {number}: format {found} is newer than {FORMAT}: "
            "update kvjax"
        )
    if found < FORMAT:
        raise UserError(
            f"{path}, line {number}: format {found} is older than {FORMAT}: run it "
            "again with this kvjax"
        )
    if lacking := [field for field in needed(record) if field not in record]:
        raise UserError(
            f"{path}, line {number} lacks {lacking[0]!r}: repair or remove it"
        )
    return record


def _last_line(file: IO[bytes]) -> bytes:
    """Returns what follows the last line break, without reading the whole file."""
    if not file.seek(0, os.SEEK_END):
        return b""  # an empty file cannot be mapped
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content[content.rfind(b"\n") + 1 :]


def _is_torn(last: bytes) -> bool:
    """Returns whether what follows the last line break is an incomplete record."""
    try:
        json.loads(last)
    except ValueError:
        return last.startswith(b"{")
    return False


def _as_json(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")
