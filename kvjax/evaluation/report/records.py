"""Records of runs: one JSON line per method in a file that may be interrupted.

A record is a dict, one per method (and number of new tokens) and one JSON line in a
file. What it may hold; a missing value counts as unknown and shows as "-":

    format                      `FORMAT`; what lacks it is of the first format, and
                                `upgraded` when it is read
    experiment                  "quality" or "throughput": which protocol was run
    method, policy, schedule    names; `method` is what tables and pictures call it
    series                      what methods have in common that differ in budget and
                                schedule only: the name of their row in a sweep
    budget                      slots per KV head: an int, one per layer, or None (all)
    budget_rule                 how layers share it: squeeze(p=0.3); None is uniform
    budget_share                the share of a prompt that the budget is, such as 0.5:
                                of the run's longest, where the config said "50%"
    mean_slots, smallest_slots, largest_slots    of KV heads, before a prompt is read
    sizes                       the slots of each [L][K]; None where all have as many
    codec                       how pairs are stored; "identity": as they are
    rope_positions              "original" or "cache": where keys stand
    engine                      "kvjax", or whose else it is
    batch_size, limited_by      prompts that fit at a time, and what limits them
    prefill_batch, batch_rule   prompts read at a time, and how the batch was found
    tolerance, tried            of a method whose |kv| was sought: how far its score may
                                be below the full cache's; and of every |kv| tried,
                                {budget, batch_size, score, num_examples, ..., chosen}
    score, num_examples         the mean of the tasks' scores, among how many prompts
    tasks                       {name: {metric, score, metrics, num_examples, interval,
                                interval_method, breakdown, survivors, ...}};
                                `interval` is of 95%, `breakdown` has the score of every
                                depth and the like, `survivors` a `survivor_map`
    kl, loss, reference_loss    nats per token
    top1_agreement              share of tokens
    prefill_tokens_per_s, decode_tokens_per_s    the latter of generated tokens, with an
                                answer's first, which comes out of the prompt; None
                                where there is no other
    output_tokens_per_s         end to end: generated tokens by total time
    predicted_tokens_per_s      the same, if the roofline were reached
    probe_flops_per_s, probe_bytes_per_s    of a fixed product and a fixed copy beside
                                its batches: how much of the machine was left for them
    prefill_roofline, decode_roofline    shares of the roofline's rates
    offload                     fields of `kvjax.Offload`; None for none
    kv_bytes_peak_per_seq       most bytes of KV cache that one prompt takes at any time
    host_bytes_per_seq          besides: the most that its values take in host memory
    kv_bytes_decode             the same while tokens are generated
    kv_bytes_live, kv_bytes_allocated    of it, bytes of one prompt's keys and values at
                                the end: of the pairs kept, and of all slots
    planned_bytes, measured_bytes, memory_bytes    of the whole run; the last, its limit
    prompt_tokens, max_new_tokens, new_tokens    of a prompt; the last, where all
                                prompts have exactly as many
    seconds, seed, model, device
    provenance                  {"command", "versions"}: see `provenance`
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import numpy as np
from jaxtyping import Float

from kvjax.evaluation import files
from kvjax.types import UserError

Record = dict[str, Any]
Needed = Callable[[Record], Iterable[str]]  # the fields that a record has to have

FORMAT = 2
PROBES = "probe_flops_per_s", "probe_bytes_per_s"
_BLOCK = 1 << 16  # bytes that are read from a file's end at a time
SURVIVOR_PARTS = 64  # of a prompt, in a map of survivors

# What the first format called otherwise.
_FIELDS = {
    "accuracy": "score",
    "batch": "batch_size",
    "batch_limit": "limited_by",
    "examples": "num_examples",
    "group": "prefill_batch",
    "kind": "experiment",
    "kv_bytes_per_row": "kv_bytes_peak_per_seq",
    "label": "series",
    "role": "batch_rule",
    "rope": "rope_positions",
    "tokens_per_s": "output_tokens_per_s",
}
_FLAG = "--peer_python=", "--baseline_python="
_TASK_FIELDS = {"cells": "breakdown", "examples": "num_examples"}
_VALUES = {
    "rope_positions": {"true": "original", "slot": "cache"},
    "schedule": {
        "full": "none",
        "prefill+decode": "prefill_and_decode",
        "decode": "decode_only",
    },
}


def read_records(
    path: str | os.PathLike, needed: Needed = lambda record: ()
) -> list[Record]:
    """Returns the records of a JSON-lines file, upgraded; none without such a file.

    A last line that an interruption cut short is left out.

    Args:
      path: of the file.
      needed: says which fields a record has to have.

    Raises:
      UserError: another line is no record, of a later format or lacks a field, naming
        file and line.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    lines = lines if _is_torn(last) else [*lines, last]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
    return [_parse(path, number, line, needed) for number, line in numbered]


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Adds one line to a JSON-lines file and has it on disk on return.

    It says which format it is of. NumPy scalars and arrays become plain numbers. A torn
    last line is removed first.

    Raises:
      UserError: the disk is full, or does not take it for another reason.
    """
    line = json.dumps({"format": FORMAT} | record, default=_plain).encode() + b"\n"
    with files.on_disk(path), open(path, "ab+") as file:
        last = _last(file)
        if _is_torn(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
        elif last:
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def is_torn(path: str | os.PathLike) -> bool:
    """Whether a file's last line was cut short: `read_records` leaves it out."""
    with open(path, "rb") as file:
        return _is_torn(_last(file))


def upgraded(record: Record) -> Record:
    """A record in the words of `FORMAT`, whichever format it was written in.

    Raises:
      ValueError: its format is a later one.
    """
    if (found := record.get("format", 1)) > FORMAT:
        raise ValueError(f"format {found} is newer than {FORMAT}: update kvjax")
    if found == FORMAT:
        return record
    new = {"format": FORMAT, "codec": "identity"} | _renamed(record, _FIELDS)
    for field, values in _VALUES.items():
        if field in new:
            new[field] = values.get(new[field], new[field])
    if "score" in new:
        new.setdefault("experiment", "quality")
    if share := _share_in_name(new):
        new["budget_share"] = share
    if new.get("tasks"):
        new["tasks"] = {name: _upgraded_task(t) for name, t in new["tasks"].items()}
    made = {key: new.pop(key) for key in ("command", "versions") if key in new}
    if "command" in made:
        made["command"] = made["command"].replace(*_FLAG)
    return new | ({"provenance": made} if made else {})


def provenance() -> Record:
    """What a record says of its making: the command, and what computed it.

    A script below the current folder is named from there.
    """
    import kvjax

    script, *arguments = sys.argv
    below = os.path.relpath(script) if script else ""
    script = script if below.startswith(os.pardir) else below
    command = shlex.join(["python", script, *arguments])
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


def survivor_map(kept: Sequence[Sequence[np.ndarray]], length: int) -> list[str]:
    """What is left of a prompt, small enough for a line of records.

    Args:
      kept: positions of the kept pairs, `[layer][head]`; those from `length` on, which
        were generated, do not count.
      length: of the prompt, in tokens.

    Returns:
      A string per layer of `SURVIVOR_PARTS` characters, or one per token if there are
      fewer. They stand for equal parts of the prompt, from "0", nothing is kept there,
      to "9", everything is.
    """
    edges = np.linspace(0, length, min(SURVIVOR_PARTS, length) + 1).round()
    room = np.diff(edges)

    def counts(head):
        return np.diff(np.searchsorted(np.sort(head), edges))

    return [
        "".join(
            str(round(9 * share))
            for share in np.mean([counts(head) for head in layer], 0) / room
        )
        for layer in kept
    ]


def survivor_shares(drawn: Sequence[str]) -> Float[np.ndarray, "L parts"]:
    """The shares that a `survivor_map` says, 0 to 1, to the nearest ninth."""
    return np.array([[int(digit) / 9 for digit in layer] for layer in drawn])


def _renamed(old: Record, names: dict[str, str]) -> Record:
    return {names.get(key, key): value for key, value in old.items()}


def _upgraded_task(task: Record) -> Record:
    new = _renamed(task, _TASK_FIELDS)
    if "breakdown" in new:
        new["breakdown"] = [_renamed(each, _TASK_FIELDS) for each in new["breakdown"]]
    return new


def _share_in_name(record: Record) -> float | None:
    """The first format told a budget's share in the method's name only: "tova, 50%"."""
    found = re.fullmatch(
        re.escape(str(record.get("series"))) + r", (\d+)%", str(record.get("method"))
    )
    return int(found[1]) / 100 if found else None


def _last(file: IO[bytes]) -> bytes:
    """What follows the last line break; reads no more than that and a block."""
    last, start = b"", file.seek(0, os.SEEK_END)
    while start and b"\n" not in last:
        end, start = start, max(0, start - _BLOCK)
        file.seek(start)
        last = file.read(end - start) + last
    return last.rpartition(b"\n")[2]


def _is_torn(last: bytes) -> bool:
    """Whether what follows the last line break is the beginning of a record only."""
    try:
        json.loads(last)
    except ValueError:
        return last.startswith(b"{")
    return False


def _parse(path: pathlib.Path, number: int, line: bytes, needed: Needed) -> Record:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"{path}, line {number} is no record in JSON: mend or remove it"
        )
    try:
        record = upgraded(found)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: {error}") from None
    if lacking := [field for field in needed(record) if field not in record]:
        raise UserError(
            f"{path}, line {number} lacks {lacking[0]!r}: mend or remove it"
        )
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")
