"""Experiments, of quality or of throughput, that go on where they were interrupted.

Everything finished is written down at once, so that a run that was interrupted, or
killed, loses at most the batch in flight::

    WORKDIR/experiment.json   what was asked, and of which devices; others want a folder
                              of their own
    WORKDIR/batches.jsonl     one line per finished batch
    WORKDIR/records.jsonl     one line per finished method, made from its batches
    WORKDIR/lock              whose run it is, while it lasts

`quality` and `throughput` say what a record is and how it is measured; this is the loop
that has them made.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from kvjax.engine import compiled
from kvjax.engine.memory import device_memory
from kvjax.evaluation import files, quality, throughput
from kvjax.evaluation.config import Experiment, Fields
from kvjax.evaluation.report.records import FORMAT, Record, provenance
from kvjax.evaluation.setting import Baseline, Lines, Progress, Setting
from kvjax.models import presets
from kvjax.models.weights import load
from kvjax.models.weights.pack import check_room
from kvjax.types import UserError

MEASUREMENTS = {"quality": quality, "throughput": throughput}
_RESULTS = ("records.jsonl", "batches.jsonl", "reference.npy")  # that runs leave


def from_config(fields: Fields, overrides: Fields) -> Experiment:
    """The experiment that a config's fields describe.

    Args:
      fields: `experiment`, "quality" where it is left out, and those of
        `quality.Quality` or `throughput.Throughput`.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    name = fields.get("experiment", "quality")
    if name not in MEASUREMENTS:
        known = ", ".join(MEASUREMENTS)
        raise UserError(f"experiment {name!r} is unknown: use one of {known}")
    return MEASUREMENTS[name].from_config(fields, overrides)


def run(
    experiment: Experiment,
    workdir: str | os.PathLike,
    progress: Progress,
    baselines: Mapping[str, Baseline] | None = None,
) -> list[Record]:
    """Measures what is not yet in `workdir`; one record per method and new tokens.

    Args:
      experiment: what to measure.
      workdir: where results go, and are found again.
      progress: told what runs, and how many units of work are finished.
      baselines: for throughput, methods of other libraries by the name in their
        records, each called with `(prompts, new_tokens, memory_bytes,
        min_timed_batches, progress)` for a record in our format: the same prompts, as
        token ids, in the same memory; `progress` counts nothing. If the record has
        `tokens`, the answers, they are graded and taken out.

    Raises:
      UserError: anything that does not fit, before long work starts.
    """
    experiment.check()
    baselines = baselines or {}
    if taken := {method.name for method in experiment.methods} & set(baselines):
        raise UserError(f"methods and baselines are both named {', '.join(taken)}")
    compiled.keep_compiled()
    with opened(experiment, pathlib.Path(workdir)) as folder:
        needed = MEASUREMENTS[experiment.experiment].needed
        batches = Lines(folder / "batches.jsonl", needed)
        records = Lines(folder / "records.jsonl")
        memory = device_memory(experiment.memory_gb)
        _check_weights(experiment, memory)
        model = load(experiment.model, experiment.dtype, mesh=experiment.mesh)
        return _records(
            Setting(experiment, model, memory, folder, batches, records, baselines),
            progress,
        )


def _check_weights(experiment: Experiment, memory: int) -> None:
    """Raises UserError where random weights, which take minutes, would be too many."""
    name = experiment.model.removeprefix(presets.RANDOM)
    if name == experiment.model or experiment.mesh:
        return
    check_room(presets.spec(name), experiment.dtype, memory=memory)


def _records(setting: Setting, progress: Progress) -> list[Record]:
    """Of all rows, those that are not there yet measured now."""
    rows = MEASUREMENTS[setting.experiment.experiment].rows(setting)
    for row in sorted(rows, key=lambda row: row.rank):
        if setting.records.where(**row.key):
            progress(row.title, row.units)
            continue
        record = row.measure(functools.partial(_say, progress, row.title))
        setting.records.add(_made(setting.experiment, record))
        _forget()
    return [setting.records.where(**row.key)[0] for row in rows]


def _say(progress: Progress, title: str, what: str, units: int) -> None:
    progress(f"{title}: {what}", units)


def _made(experiment: Experiment, record: Record) -> Record:
    """A whole record; what a baseline says of its own making goes before ours."""
    about = {
        "format": FORMAT,
        "experiment": experiment.experiment,
        "seed": experiment.seed,
        "model": experiment.model,
        "mesh": experiment.mesh,
        "device": jax.devices()[0].device_kind,
    }
    made = provenance()["provenance"] | record.get("provenance", {})
    return about | record | {"provenance": made}


def _forget() -> None:
    """Compiled programs go: those of many methods exhaust a process's memory maps."""
    compiled.clear()


@contextlib.contextmanager
def opened(experiment: Experiment, workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Lends the folder, locked, if what lies in it answers the same question.

    What this made is gone afterwards, if nothing was measured.

    Args:
      experiment: the question, kept in `experiment.json`.
      workdir: made if it is not there.

    Raises:
      UserError: another process is at work in it, it holds results of another
        configuration or of other devices, or it cannot be made.
    """
    index = jax.process_index()
    own = workdir / f"process-{index}" if index else workdir
    made = [folder for folder in (own, *own.parents) if not folder.exists()]
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}; name another") from None
    try:
        with files.locked(own):
            _share(workdir, own)
            _ask(experiment, own)
            try:
                yield own
            finally:
                if not _found(own):
                    (own / "experiment.json").unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # those that something lies in stay
            for folder in made:
                folder.rmdir()


def _found(folder: pathlib.Path) -> list[str]:
    return [name for name in _RESULTS if (folder / name).exists()]


def _ask(experiment: Experiment, workdir: pathlib.Path) -> None:
    """Writes the question down, and which devices answer it.

    Raises:
      UserError: results answer another question, or are of other devices.
    """
    asked = json.loads(json.dumps(dataclasses.asdict(experiment)))
    path, found, devices = workdir / "experiment.json", _found(workdir), _devices()
    if not found:
        with files.written(path) as partial:
            told = json.dumps(asked | {"devices": devices}, indent=2)
            partial.write_text(told + "\n")
        return
    if not path.exists():
        raise UserError(
            f"workdir {workdir} holds {found[0]} of a run that nothing tells about: "
            "name another folder or delete it"
        )
    before = _asked_before(path)
    changed = sorted(key for key in asked if asked[key] != before.get(key))
    if changed:
        raise UserError(
            f"workdir {workdir} holds results of another configuration ({changed[0]} "
            f"was {before.get(changed[0])!r:.80}): name another folder or delete it"
        )
    ran_on = before.get("devices", devices)  # earlier versions did not say
    if ran_on != devices:
        raise UserError(
            f"workdir {workdir} holds results of {ran_on}, and here is {devices}: go "
            "on there, name another folder or delete it"
        )


def _devices() -> str:
    """How many of which kind, as in "8 x TPU v5 lite"."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def _asked_before(path: pathlib.Path) -> dict[str, Any]:
    try:
        before = json.loads(path.read_bytes())
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise UserError(
            f"{path} is damaged, and nothing else tells what the results beside it "
            "answer: name another folder or delete it"
        )
    return before


def _share(workdir: pathlib.Path, own: pathlib.Path) -> None:
    """Has all processes begin with what process 0 has, on a disk that they share.

    Of a run on several hosts every process writes the same results, process 0 into the
    workdir itself; so all take the same steps.
    """
    if jax.process_count() == 1:
        return
    if own != workdir:
        for path in _files(own):
            path.unlink()
        for path in _files(workdir):
            shutil.copy(path, own)
    multihost_utils.sync_global_devices("workdir")


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [p for p in folder.iterdir() if p.is_file() and p.name != files.LOCK]
