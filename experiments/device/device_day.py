r"""Measures everything that needs a GPU or TPU, in parts of at most 8 minutes.

    python experiments/device/device_day.py --workdir=runs/h100 [--part=3] [--gguf=FILE]
    python experiments/device/device_day.py --list

The parts: kernels against NumPy and other implementations, steps of a whole model as a
share of their roofline, peak memory against plans, bfloat16 against float32,
transformers and kvpress, and Batch-Max's comparison at the shapes of 8B and 13B models
with random weights.

Without --part, every part runs that is not done. A later call resumes after an
interruption or a timeout, and retries failed steps. A part that cannot run here (no
PyTorch, too little memory) is recorded as absent with the reason; --part=N retries it.
Each step runs in its own process. Nothing is downloaded.

WORKDIR/device.md holds the tables, device.jsonl their data, and the folders beside them
the throughput runs. The last line on stdout is JSON. The exit code is 1 if a step
failed.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

from absl import flags, logging
from device_page import Line, status, write_page
from device_parts import MINUTES, Part, machine, parts
from device_sizes import Absent, Asked, Row

from kvjax.cli import command
from kvjax.evaluation import files
from kvjax.evaluation.report.records import append_record, read_records
from kvjax.types import UserError

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES, MACHINE = "device.jsonl", "machine.json"
ENVIRONMENT = {  # of every step; variables that the caller has set win
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",  # share of a GPU; JAX's default is 0.75
    "HF_HUB_OFFLINE": "1",
}

_ALONE = threading.Lock()

# Runs a step, given the options, the part's number (0 describes the machine), its
# environment, the step's name and a limit in seconds. Returns None, or why no line was
# written.
Execute = Callable[[Asked, int, Mapping[str, str], str, float], str | None]


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "folder of the results, to resume from")
    flags.DEFINE_integer("part", None, "the only part to run, see --list", 1)
    flags.DEFINE_bool("list", False, "print the parts with their minutes")
    flags.DEFINE_bool("toy", False, "tiny sizes, on a CPU too")
    flags.DEFINE_string("gguf", "", "SmolLM2-135M-Instruct, if not in kvjax's cache")
    flags.DEFINE_string("baseline_python", "", "an interpreter with torch and kvpress")
    flags.DEFINE_string("step", None, "internal: the step to run here")


def main(_):
    logging.set_verbosity(logging.WARNING)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that SIGTERM ends as Ctrl-C
    asked = Asked(
        pathlib.Path(FLAGS.workdir or ""),
        *(FLAGS.toy, FLAGS.gguf, FLAGS.baseline_python),
    )
    if FLAGS.list:
        return print(listed(parts(asked.sizes)))
    if not FLAGS.workdir:
        raise UserError("--workdir is missing: name the folder for the results")
    if FLAGS.step is not None:
        return measure(asked, FLAGS.part or 0, FLAGS.step)
    result = day(asked, FLAGS.part, apart)
    print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


def listed(every: list[Part]) -> str:
    """Returns a line per part."""
    lines = [f"{i:3}  {p.minutes:g} min  {p.title}" for i, p in enumerate(every, 1)]
    return "\n".join(lines)


def day(asked: Asked, only: int | None, execute: Execute) -> Row:
    """Runs the parts that are not done, or the `only` one; returns the summary.

    Raises:
      UserError: an unknown part, a missing file, no GPU or TPU, or a folder with the
        results of another device.
    """
    every = parts(asked.sizes)
    if only is not None and only > len(every):
        raise UserError(f"--part={only}: there are {len(every)}, see --list")
    if asked.gguf and not pathlib.Path(asked.gguf).exists():
        raise UserError(f"--gguf={asked.gguf}: no such file")
    with opened(asked.workdir):
        here = checked_machine(asked, execute)
        for number in [only] if only else range(1, len(every) + 1):
            run_part(asked, every, number, execute, again=only is not None)
            write_page(asked.workdir, here, every, lines_of(asked))
        return summary(asked, here, every)


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[None]:
    """Creates and locks the folder; removes it afterwards if it is empty."""
    with files.on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with files.locked(folder):
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def summary(asked: Asked, here: Row, every: list[Part]) -> Row:
    """Returns the machine, and the numbers of the parts by status."""
    lines = lines_of(asked)
    found = {i: status(part, lines.get(i, {})) for i, part in enumerate(every, 1)}
    numbers = {
        each: [number for number, state in found.items() if state == each]
        for each in ("done", "absent", "failed", "left")
    }
    return {"file": str(asked.workdir / "device.md"), **here, **numbers}


def checked_machine(asked: Asked, execute: Execute) -> Row:
    """Describes the device, in a process that frees it again."""
    path = asked.workdir / MACHINE
    before = json.loads(path.read_bytes()) if path.exists() else None
    why = execute(asked, 0, {}, "machine", 60 * MINUTES)
    if why:
        raise UserError(f"JAX does not start on this machine: {why}")
    here = json.loads(path.read_bytes())
    same = before is None or before["device"] == here["device"]
    usable = here["platform"] != "cpu" or asked.toy
    if not (same and usable):
        path.unlink() if before is None else _write(path, before)
    if not usable:
        raise UserError("device_day needs a GPU or TPU, and JAX found a CPU")
    if not same:
        raise UserError(
            f"workdir {asked.workdir} holds results of {before['device']}, and this is "
            f"{here['device']}: name another folder"
        )
    return here


def run_part(
    asked: Asked, every: list[Part], number: int, execute: Execute, again: bool
) -> None:
    """Runs the steps of a part that are not done, until its minutes are over.

    Steps that were absent run `again` if that is set.
    """
    part, end = every[number - 1], time.monotonic() + 60 * MINUTES
    lines = lines_of(asked).get(number, {})

    def run_step(name: str) -> None:
        line = lines.get(name, {})
        done = line and not _failed(line) and not (again and "absent" in line)
        left = end - time.monotonic()
        if done or left <= 0:
            return
        print(f"part {number}, {part.title}: {name}", file=sys.stderr, flush=True)
        why = execute(asked, number, part.environment, name, left)
        if why:
            _add(asked, number, name, {"rows": [{"error": why}]})

    if not part.together:
        for name in part.steps:
            run_step(name)
        return
    with futures.ThreadPoolExecutor(len(part.steps)) as pool:
        list(pool.map(run_step, part.steps))


def lines_of(asked: Asked) -> dict[int, dict[str, Line]]:
    """Returns the newest line of each step, by part number and step name."""
    found: dict[int, dict[str, Line]] = {}
    for line in read_records(asked.workdir / LINES, lambda line: ("part", "step")):
        found.setdefault(line["part"], {})[line["step"]] = line
    return found


def _failed(line: Line) -> bool:
    return any("error" in row for row in line.get("rows", ()))


# --- a step ---------------------------------------------------------------------------


def apart(
    asked: Asked, number: int, environment: Mapping[str, str], name: str, limit: float
) -> str | None:
    """Runs a step in its own process; see `Execute`."""
    options = {"workdir": asked.workdir, "part": number or None, "step": name}
    options |= {"gguf": asked.gguf, "baseline_python": asked.baseline_python}
    arguments = [f"--{key}={value}" for key, value in options.items() if value]
    command = [sys.executable, __file__, *arguments, *(["--toy"] if asked.toy else [])]
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = ENVIRONMENT | dict(environment) | os.environ
    env["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        done = subprocess.run(command, env=env, stdout=sys.stderr, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped when the part's {MINUTES:g} minutes were over"
    if done.returncode:
        return f"its process ended with code {done.returncode}"
    return None


def inside(
    asked: Asked, number: int, environment: Mapping[str, str], name: str, limit: float
) -> str | None:
    """Runs a step in this process, one at a time; see `Execute`."""
    del environment, limit
    with _ALONE:
        measure(asked, number, name)


def measure(asked: Asked, number: int, name: str) -> None:
    """Runs a step and writes its line, also if the step fails."""
    if number == 0:
        return _write(asked.workdir / MACHINE, machine())
    step, start = parts(asked.sizes)[number - 1].steps[name], time.monotonic()
    line: dict[str, Any]
    try:
        line = {"rows": step(asked)}
    except Absent as why:
        line = {"absent": str(why)}
    except Exception as error:  # compilers and devices raise anything
        traceback.print_exc()
        said = " ".join(str(error).split())
        line = {"rows": [{"error": f"{type(error).__name__}: {said}"[:300]}]}
    _add(asked, number, name, line | {"seconds": round(time.monotonic() - start, 1)})


def _add(asked: Asked, number: int, name: str, line: dict[str, Any]) -> None:
    append_record(asked.workdir / LINES, {"part": number, "step": name, **line})


def _write(path: pathlib.Path, content: Row) -> None:
    with files.written(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    command.run(main, interrupted="interrupted: run it again to go on from here")
