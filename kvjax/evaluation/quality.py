"""Measures the quality of methods: task scores, and fidelity to the full cache.

Tasks run in batches that fill the memory; each batch is a line of `batches.jsonl`.
Fidelity compares a method's next-token distributions on long texts with those of the
full cache, whose logits are saved in `WORKDIR/reference.npy`,
f32[windows, continuation, V].
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax import cache
from kvjax.cache.spec import CacheSpec, checked, make_spec
from kvjax.engine import jobs, runner, stop_texts, tokenization
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.memory import peak_memory
from kvjax.engine.planner import Plan, check_one_row, plan_by_shapes, plan_job
from kvjax.engine.prefill_cache import PrefillCache
from kvjax.engine.steps import NO_EOS
from kvjax.evaluation import config, files, roofline
from kvjax.evaluation.config import Experiment, Method
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.samples import Samples, graded, samples_of, summary
from kvjax.evaluation.setting import Progress, Row, Setting, described, mean_probe
from kvjax.evaluation.tasks import fidelity, text
from kvjax.types import Model, UserError

_STOP_INTERVAL = 32  # tokens generated between two searches for a stop text
# Fields of a line of batches.jsonl that a method's record is computed from.
_OF_TASK = (
    *("examples", "scores", "prompt_tokens", "new_tokens", "measured_bytes"),
    *("prefill_seconds", "decode_seconds", "kv_bytes_live", "kv_bytes_allocated"),
)
_OF_FIDELITY = ("loss", "reference_loss", "kl", "top1_agreement")


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Text windows for teacher-forced comparison of predictions; 0 windows: none."""

    num_windows: int = 0
    prompt_tokens: int = 0
    continuation_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality(Experiment):
    """A quality experiment; `configs/quickstart.py` shows the fields.

    Attributes:
      fidelity: the comparison with the full cache's predictions.
      layerwise: whether prompts run layer by layer, as in `kvjax.engine.layerwise`, for
        sweeps over many methods. Time and memory are not measured then, and batches are
        planned from shapes, for one method at a time. Prefill passes that methods share
        are cached in the same amount of memory again; those that do not fit are
        repeated for every method.
    """

    experiment: str = "quality"
    fidelity: Fidelity = Fidelity()
    layerwise: bool = False

    @property
    def units_per_method(self) -> int:
        """Returns the number of prompts per method."""
        prompts = sum(task.num_examples for task in self.tasks)
        return prompts + self.fidelity.num_windows

    def check(self) -> None:
        super().check()
        config.at_least(0, **dataclasses.asdict(self.fidelity))
        for method in self.methods:
            for field in ("batch_rule", "batch_size"):
                if getattr(method, field) is not None:
                    raise UserError(
                        f"method {method.name!r}: {field} is for throughput; quality "
                        "runs at the largest batch that fits"
                    )
        if self.mesh and self.layerwise:
            raise UserError("a mesh runs whole models: set layerwise to false")


def from_config(fields: config.Fields, overrides: config.Fields) -> Quality:
    """Builds a quality experiment from the fields of a config.

    Args:
      fields: of `Quality`; also `prefill_chunk`, `evict_size`, `budget` and `codec`,
        the defaults of methods, and `num_examples`, `prompt_tokens` and
        `max_new_tokens`, the defaults of tasks. `config.flattened` describes the rest.
      overrides: fields to replace; None leaves a field as it is.

    Raises:
      UserError: a field is missing or unknown.
    """
    merged = config.flattened(fields, overrides)
    windows = config.build(Fidelity, merged.get("fidelity", {}), "fidelity")
    merged["fidelity"] = windows
    return config.experiment(Quality, merged, config.OF_METHODS, config.OF_TASKS)


def rows(setting: Setting) -> list[Row]:
    """Returns one row per method.

    Raises:
      UserError: a method does not fit in memory. Raised before long work starts.
    """
    experiment, model = setting.experiment, setting.model
    if model.tokenizer is None:
        raise UserError(
            f"model {experiment.model} has no tokenizer, and tasks are texts: name a "
            "folder with a tokenizer, or measure throughput"
        )
    tasks = [samples_of(experiment, each, model) for each in experiment.tasks]
    windows = _windows(setting)
    longest = max(task.longest for task in tasks)
    longest = max([longest, *(len(window.prompt) for window in windows)])
    configs = {
        m.name: checked(model.spec, m.cache, longest) for m in experiment.methods
    }
    methods = configs.values()
    engine = _layers(setting, methods) if experiment.layerwise else _whole(model)
    _saved_reference(setting, windows)  # raises if it is damaged
    found = []
    for method in experiment.methods:
        spec = configs[method.name]
        jobs = [(each, _job(setting, spec, each)) for each in tasks]
        for _, job in jobs:
            engine.check(job, setting.memory)
        run = _Run(setting, engine, method, spec, jobs, windows)
        measure = functools.partial(_measured, run)
        found.append(Row(method.name, None, experiment.units_per_method, measure))
    return found


def needed(line: Record) -> tuple[str, ...]:
    """Returns the names of the fields that a line of `batches.jsonl` must have."""
    fields = _OF_FIDELITY if line.get("task") == "fidelity" else _OF_TASK
    return "method", "task", *fields


def _windows(setting: Setting) -> list[fidelity.Window]:
    sizes = setting.experiment.fidelity
    if not sizes.num_windows:
        return []
    return fidelity.windows(
        setting.model.tokenizer,
        sizes.num_windows,
        sizes.prompt_tokens,
        sizes.continuation_tokens,
        setting.experiment.seed,
        text.haystack(setting.experiment.haystack),
    )


def _job(setting: Setting, spec: CacheSpec, task: Samples) -> Job:
    model, windows = setting.model, setting.experiment.fidelity
    bucket = functools.partial(jobs.bucket, model.spec, spec)
    bucket(windows.prompt_tokens, windows.continuation_tokens)  # raises if too long
    eos = NO_EOS if task.run.ignore_eos else tokenization.end_tokens(model)
    prompt = bucket(task.longest, task.new)
    job = jobs.job_of(model, spec, prompt, task.new, eos=eos)
    interval = _STOP_INTERVAL if _stop_texts(task) else None
    return dataclasses.replace(job, decode_chunk=interval)


def _stop_texts(task: Samples) -> tuple[str, ...]:
    """Returns the texts that end an answer while it is generated."""
    return () if task.run.ignore_eos else task.task.stop


class _Run(NamedTuple):
    """The inputs of one method's measurement: tasks with their jobs, and windows."""

    setting: Setting
    engine: "_Engine"
    method: Method
    config: CacheSpec
    tasks: list[tuple[Samples, Job]]
    windows: list[fidelity.Window]

    def lines(self, task: str) -> list[Record]:
        """Returns the lines of a task's finished batches."""
        return self.setting.batches.where(method=self.method.name, task=task)


def _measured(run: _Run, say: Progress) -> Record:
    """Measures a method and returns its record."""
    plans = []
    for task, job in run.tasks:
        count = len(task.examples)
        plans.append(run.engine.plan(job, run.setting.memory, count, say))
        _answers(run, task, plans[-1], say)
    if run.windows:
        _fidelity(run, say)
    return _record(run, plans)


class _Engine(NamedTuple):
    """Runs prompts, either by whole compiled programs or layer by layer."""

    check: Callable[[Job, int], Any]  # raises if one row does not fit; instant
    plan: Callable[[Job, int, int, Progress], Plan]
    runner: Callable[[Job], runner.Runner]


def _whole(model: Model) -> _Engine:
    whole = functools.partial(runner.Whole, model.params)
    return _Engine(check_one_row, plan_job, whole)


def _layers(setting: Setting, methods: Iterable[CacheSpec]) -> _Engine:
    check = functools.partial(plan_by_shapes, max_batch=1)
    readings = PrefillCache(setting.model, methods, setting.memory)
    plan = lambda job, memory, most, say: plan_by_shapes(job, memory, most)
    return _Engine(check, plan, readings.runner)


def _answers(run: _Run, task: Samples, plan: Plan, say: Progress) -> None:
    """Runs and grades the examples that no finished batch holds."""
    done = {i for batch in run.lines(task.name) for i in batch["examples"]}
    if done:
        say(f"{task.name}, resumed", len(done))
    left = [i for i in range(len(task.examples)) if i not in done]
    for rows in runner.batches(left, plan.batch):
        say(f"{task.name}, {len(rows)} prompts at once", 0)
        line = _batch(run, task, plan, rows)
        run.setting.batches.add({"method": run.method.name, **line})
        say(task.name, len(rows))


def _batch(run: _Run, task: Samples, plan: Plan, rows: list[int]) -> Record:
    """Runs one batch and returns its line of `batches.jsonl`."""
    model, seed = run.setting.model, run.setting.experiment.seed
    prompts = task.tokens(rows)
    stop = functools.partial(stop_texts.stops, model.tokenizer, _stop_texts(task))
    timed = not run.setting.experiment.layerwise
    with contextlib.ExitStack() as around:
        probe, measured = {}, []
        if timed:
            probe = around.enter_context(roofline.probed(plan.job.dtype))
            peak = peak_memory(plan.weights_bytes, plan.host_bytes)
            measured = around.enter_context(peak)  # slows the batch down
        result = runner.run_batch(
            run.engine.runner(plan.job), prompts, rows, seed, stop
        )
    live, allocated = cache.stored_bytes(result.state)
    return {
        "task": task.name,
        "examples": rows,
        **graded(task, model, rows, result.tokens),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(map(len, result.tokens)),
        "prefill_seconds": result.prefill_seconds if timed else None,
        "decode_seconds": result.decode_seconds if timed else None,
        "measured_bytes": measured[0] if measured else None,
        **probe,
        "kv_bytes_live": live,
        "kv_bytes_allocated": allocated * len(rows) // len(result.state.next_pos),
    }


def _fidelity(run: _Run, say: Progress) -> None:
    """Compares the method's next-token distributions with the full cache's."""
    if run.lines("fidelity"):
        say("fidelity, resumed", len(run.windows))
        return
    reference = _reference(run, say)
    say(f"fidelity, {len(run.windows)} texts", 0)
    logits = reference if _is_full_cache(run) else _forced(run, run.config)
    targets = np.asarray([window.continuation for window in run.windows]).reshape(-1)
    width = logits.shape[-1]
    scores = fidelity.compare(
        reference.reshape(-1, width), logits.reshape(-1, width), targets
    )
    line = {"method": run.method.name, "task": "fidelity", **scores}
    run.setting.batches.add(line)
    say("fidelity", len(run.windows))


def _is_full_cache(run: _Run) -> bool:
    """Returns whether the method equals the reference, except for its chunk size."""
    spec, own = run.setting.model.spec, run.config
    return not own.policy and own == make_spec(spec, None, None, own.schedule)


def _reference(run: _Run, say: Progress) -> np.ndarray:
    """Returns the full cache's logits, f32[windows, continuation, V]."""
    saved = _saved_reference(run.setting, run.windows)
    if saved is not None:
        return saved
    say("the full cache's predictions", 0)
    logits = _forced(run, make_spec(run.setting.model.spec, None, None))
    with files.written(run.setting.workdir / "reference.npy") as partial:
        np.save(partial, logits)
    return logits


def _saved_reference(
    setting: Setting, windows: Sequence[fidelity.Window]
) -> np.ndarray | None:
    """Returns the full cache's logits that an earlier run saved, or None.

    Raises:
      UserError: the file is damaged, or of other windows.
    """
    path = setting.workdir / "reference.npy"
    if not (windows and path.exists()):
        return None
    new, vocab = len(windows[0].continuation), setting.model.spec.vocab_size
    shape, logits = (len(windows), new, vocab), None
    with contextlib.suppress(ValueError, EOFError, SyntaxError):  # of damaged files
        logits = np.load(path, mmap_mode="r")
    if logits is None or (logits.shape, logits.dtype) != (shape, np.float32):
        raise UserError(f"{path} is damaged: delete it, and it is computed again")
    return logits


def _forced(run: _Run, spec: CacheSpec) -> np.ndarray:
    """Returns teacher-forced logits f32[windows, continuation, V].

    Windows run in batches, each as large as the memory allows.
    """
    setting, windows = run.setting, run.windows
    job = _window_job(setting.model, spec, windows)
    row = 2 * max(state_bytes(job).values())  # factor 2: room for temporaries
    rows = max(1, (setting.memory - weights_bytes(job)) // row * job.data_parallel)
    parts = [
        _forced_batch(run.engine, job, [windows[i] for i in part])
        for part in runner.batches(range(len(windows)), rows)
    ]
    return np.concatenate(parts)


def _window_job(model: Model, spec: CacheSpec, windows) -> Job:
    prompt, new = len(windows[0].prompt), len(windows[0].continuation)
    bucket = jobs.bucket(model.spec, spec, prompt, new)
    job = jobs.job_of(model, spec, bucket, new)
    return dataclasses.replace(job, scored=True, keep_logits=True)


def _forced_batch(engine: _Engine, job: Job, windows) -> np.ndarray:
    """Returns the teacher-forced logits of one batch."""
    job = dataclasses.replace(
        job, batch=-(-len(windows) // job.data_parallel) * job.data_parallel
    )
    run = engine.runner(job)
    prefilled = run.prefill([window.prompt for window in windows])
    targets = np.zeros((job.batch, job.max_new_tokens), np.int32)
    targets[: len(windows)] = [window.continuation for window in windows]
    lengths = np.where(np.arange(job.batch) < len(windows), job.max_new_tokens, 0)
    scores = run.score(prefilled, targets, lengths.astype(np.int32))
    return np.swapaxes(scores.logits, 0, 1)[: len(windows)]


def _record(run: _Run, plans: list[Plan]) -> Record:
    """Computes a method's record from the lines of its batches."""
    samples = [task for task, _ in run.tasks]
    tasks = {task.name: summary(task, run.lines(task.name)) for task in samples}
    batches = [batch for task in samples for batch in run.lines(task.name)]
    count = sum(len(task.examples) for task in samples)
    compared = (run.lines("fidelity") or [{}])[0]
    tightest = max(plans, key=lambda plan: plan.row_bytes)

    def total(key):
        values = [batch[key] for batch in batches]
        return None if None in values else sum(values)

    reading, writing = total("prefill_seconds"), total("decode_seconds")
    seconds = None if reading is None else reading + writing

    def rate(key, seconds):
        return None if seconds is None else total(key) / seconds

    decoded = total("new_tokens") > count  # prefill yields an answer's first token
    measured = [b["measured_bytes"] for b in batches if b["measured_bytes"]]
    decoding = [
        state_bytes(plan.job)["decode"] * plan.job.data_parallel // plan.batch
        for plan in plans
    ]
    return {
        **described(run.method, tightest),
        "tasks": tasks,
        "score": sum(each["score"] for each in tasks.values()) / len(tasks),
        "num_examples": count,
        **{key: compared.get(key) for key in _OF_FIDELITY},
        "prefill_tokens_per_s": rate("prompt_tokens", reading),
        "decode_tokens_per_s": rate("new_tokens", writing) if decoded else None,
        "output_tokens_per_s": rate("new_tokens", seconds),
        **mean_probe(batches),
        "kv_bytes_decode": max(decoding),
        "kv_bytes_live": total("kv_bytes_live") / count,
        "kv_bytes_allocated": total("kv_bytes_allocated") / count,
        "planned_bytes": max(plan.peak_bytes for plan in plans),
        "measured_bytes": max(measured, default=None),
        "seconds": seconds,
        "prompt_tokens": max(each["most_prompt_tokens"] for each in tasks.values()),
        "max_new_tokens": max(each["max_new_tokens"] for each in tasks.values()),
    }
