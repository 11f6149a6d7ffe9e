"""Records of runs: one JSON line per method in a file that may be interrupted.

A record is a dict, one per method and one JSON line in a file. What it may hold (a
missing value counts as unknown and shows as "-"):

    method, policy, schedule    names; `method` is what tables and pictures call it
    label                       what methods have in common that differ in budget and
                                schedule only: the name of their row in a sweep
    budget                      slots per KV head: an int, one per layer, or None (all)
    rope                        "true" or "slot": where keys stand
    batch, batch_limit          prompts at a time, and what limits them
    accuracy, examples          share of needles found, among how many
    kl, loss, reference_loss    nats per token
    top1_agreement              share of tokens
    prefill_tokens_per_s, decode_tokens_per_s
    tokens_per_s                end to end: generated tokens by total time
    kv_bytes_per_row            most bytes of KV cache that one prompt takes at any time
    kv_bytes_decode             the same while tokens are generated
    kv_bytes_live, kv_bytes_allocated    of it, bytes of one prompt's keys and values at
                                the end: of the pairs kept, and of all slots
    planned_bytes, measured_bytes, memory_bytes    of the whole run; the last, its limit
    tasks                       {name: {metric, score, metrics, examples, ...}}, of
                                which `accuracy` is the mean score; `survivors` is the
                                first prompt's map, see `kvjax.evaluation.report.survivors`
    seconds, seed, prompt_tokens, max_new_tokens, model, device, command, versions
    kind                        "throughput" for those of `kvjax.evaluation.throughput`, which also
                                say engine, role, group, new_tokens and what the
                                roofline allows; see `kvjax.evaluation.report.throughput_report`
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
from typing import Any

import numpy as np

from kvjax.types import UserError

Record = dict[str, Any]


def read_records(path: str | os.PathLike) -> list[Record]:
    """Returns the records of a JSON-lines file; none if there is no such file.

    A last line that an interruption cut short is left out.

    Raises:
      UserError: another line is not JSON, naming the file and the line.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    lines = lines if _is_torn(last) else [*lines, last]
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line]


def append_record(path: str | os.PathLike, record: Record) -> None:
    """Adds one line to a JSON-lines file and has it on disk on return.

    NumPy scalars and arrays become plain numbers. A torn last line is removed first.
    """
    line = json.dumps(record, default=_plain).encode() + b"\n"
    with open(path, "ab+") as file:
        file.seek(0)
        last = file.read().rpartition(b"\n")[2]
        if _is_torn(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
        elif last:
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def is_torn(path: str | os.PathLike) -> bool:
    """Whether a file's last line was cut short: `read_records` leaves it out."""
    return _is_torn(pathlib.Path(path).read_bytes().rpartition(b"\n")[2])


def made_by() -> Record:
    """What a record says of its making: `command`, and `versions` of what computed it.

    A script below the current folder is named from there.
    """
    import kvjax

    script, *arguments = sys.argv
    below = os.path.relpath(script) if script else ""
    script = script if below.startswith(os.pardir) else below
    command = shlex.join(["python", script, *arguments])
    return {
        "command": "a notebook" if "kernel_launcher" in script else command,
        "versions": {
            "jax": importlib.metadata.version("jax"),
            "kvjax": kvjax.__version__,
            "python": platform.python_version(),
        },
    }


def _is_torn(last: bytes) -> bool:
    """Whether what follows the last line break is the beginning of a record only."""
    try:
        return bool(last) and not isinstance(json.loads(last), dict)
    except ValueError:
        return True


def _parse(path: pathlib.Path, number: int, line: bytes) -> Record:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number}: not a JSON record: {error}; mend or remove it"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")
