"""Runs quality and throughput experiments, and resumes interrupted ones.

Every result is written to disk as soon as it is finished, so that a run that is
interrupted or killed loses at most the current batch::

    WORKDIR/experiment.json   the configuration and the devices; a run with another
                              configuration needs another workdir
    WORKDIR/batches.jsonl     one line per finished batch
    WORKDIR/records.jsonl     one line per finished method, computed from its batches
    WORKDIR/lock              the process that uses the workdir

`quality` and `throughput` define the records and measure them; this module runs the
loop over methods and owns the workdir.
"""

import contextlib
import dataclasses
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
_RESULTS = ("records.jsonl", "batches.jsonl", "reference.npy")  # files of a run


def from_config(fields: Fields, overrides: Fields) -> Experiment:
    """Builds an experiment from the fields of a config.

    Fields are `experiment` ("quality" by default) and those of `quality.Quality` or
    `throughput.Throughput`. Overrides replace them; None leaves a field as it is.

    Raises:
      UserError: a field is missing or unknown.
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
    """Runs an experiment, and measures only what `workdir` does not hold yet.

    Args:
      experiment: the experiment.
      workdir: folder of the results, new ones and those of earlier runs.
      progress: receives a message and the number of units of work just finished.
      baselines: for throughput, methods of other libraries, keyed by the name in their
        records. Each is called as `(prompts, new_tokens, memory_bytes,
        min_timed_batches, progress)` and returns a record in this format. If that has
        `tokens` (the answers), they are graded and removed.

    Returns:
      One record per method and number of new tokens.

    Raises:
      UserError: the configuration is not valid or does not fit in memory. Raised
        before long work starts.
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
    """Raises UserError if random weights, which take minutes to draw, do not fit."""
    name = experiment.model.removeprefix(presets.RANDOM)
    if name == experiment.model or experiment.mesh:
        return
    check_room(presets.spec(name), experiment.dtype, memory=memory)


def _records(setting: Setting, progress: Progress) -> list[Record]:
    """Returns the records of all rows, and measures those that are missing."""
    rows = MEASUREMENTS[setting.experiment.experiment].rows(setting)
    for row in sorted(rows, key=lambda row: row.rank):
        if setting.records.where(**row.key):
            progress(row.title, row.units)
            continue
        say = lambda what, units, title=row.title: progress(f"{title}: {what}", units)
        record = row.measure(say)
        setting.records.add(_complete(setting.experiment, record))
        compiled.clear()  # programs of many methods exhaust a process's memory maps
    return [setting.records.where(**row.key)[0] for row in rows]


def _complete(experiment: Experiment, record: Record) -> Record:
    """Adds the experiment and the provenance; fields that a baseline set win."""
    about = {
        "format": FORMAT,
        "experiment": experiment.experiment,
        "seed": experiment.seed,
        "model": experiment.model,
        "mesh": experiment.mesh,
        "device": jax.devices()[0].device_kind,
    }
    versions = provenance()["provenance"] | record.get("provenance", {})
    return about | record | {"provenance": versions}


@contextlib.contextmanager
def opened(experiment: Experiment, workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Locks a workdir for one experiment, and yields this process's folder in it.

    Folders that are missing are made. On exit, files and folders that this created are
    removed if nothing was measured.

    Raises:
      UserError: another process uses the workdir, it holds results of another
        configuration or of other devices, or it cannot be created.
    """
    index = jax.process_index()
    own = workdir / f"process-{index}" if index else workdir
    created = [folder for folder in (own, *own.parents) if not folder.exists()]
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}; name another") from None
    try:
        with files.locked(own):
            _copy_from_process_0(workdir, own)
            _write_or_compare(experiment, own)
            try:
                yield own
            finally:
                if not _results_in(own):
                    (own / "experiment.json").unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # rmdir refuses folders that are not empty
            for folder in created:
                folder.rmdir()


def _results_in(folder: pathlib.Path) -> list[str]:
    return [name for name in _RESULTS if (folder / name).exists()]


def _write_or_compare(experiment: Experiment, workdir: pathlib.Path) -> None:
    """Writes `experiment.json`, or compares it if the workdir holds results.

    Raises:
      UserError: the results are of another configuration or of other devices.
    """
    fields = json.loads(json.dumps(dataclasses.asdict(experiment)))
    path, devices = workdir / "experiment.json", _devices()
    results = _results_in(workdir)
    if not results:
        with files.written(path) as partial:
            content = json.dumps(fields | {"devices": devices}, indent=2)
            partial.write_text(content + "\n")
        return
    if not path.exists():
        raise UserError(
            f"workdir {workdir} holds {results[0]} without the experiment.json that "
            "describes its run: name another folder or delete it"
        )
    before = _read_experiment(path)
    changed = sorted(key for key in fields if fields[key] != before.get(key))
    if changed:
        raise UserError(
            f"workdir {workdir} holds results of another configuration ({changed[0]} "
            f"was {before.get(changed[0])!r:.80}): name another folder or delete it"
        )
    ran_on = before.get("devices", devices)  # earlier versions did not write them
    if ran_on != devices:
        raise UserError(
            f"workdir {workdir} holds results of {ran_on}, and this is {devices}: "
            "resume it there, name another folder or delete it"
        )


def _devices() -> str:
    """Returns the number and kind of the devices, as in "8 x TPU v5 lite"."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def _read_experiment(path: pathlib.Path) -> dict[str, Any]:
    try:
        before = json.loads(path.read_bytes())
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise UserError(
            f"{path} is damaged, so the configuration of the results beside it is "
            "unknown: name another folder or delete it"
        )
    return before


def _copy_from_process_0(workdir: pathlib.Path, own: pathlib.Path) -> None:
    """Replaces this process's files by those of process 0, on a shared disk.

    In a run on several hosts every process writes the same results, process 0 into the
    workdir itself. All processes must start from the same files: otherwise one would
    skip a batch that the others run, and their collectives would not match.
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
