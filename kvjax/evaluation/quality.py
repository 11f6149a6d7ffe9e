"""What methods cost in quality: their answers to tasks, graded, and their predictions.

Tasks run in batches that fill the memory, a line of `batches.jsonl` each. Fidelity
compares a method's next-token distributions on long texts to the full cache's, which
are kept in `WORKDIR/reference.npy`, f32[windows, continuation, V].
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax import cache
from kvjax.cache.spec import CacheSpec, checked, make_spec
from kvjax.engine import api, jobs, runner, stop_texts
from kvjax.engine.footprint import state_bytes, weights_bytes
from kvjax.engine.jobs import Job
from kvjax.engine.memory import peak_memory
from kvjax.engine.planner import Plan, check_one_row, plan_by_shapes, plan_job
from kvjax.engine.prefill_cache import PrefillCache
from kvjax.engine.steps import NO_EOS
from kvjax.evaluation import config, files, roofline
from kvjax.evaluation.config import Experiment, Method
from kvjax.evaluation.report.records import Record, survivor_map
from kvjax.evaluation.samples import Samples, graded, samples_of, summary
from kvjax.evaluation.setting import Progress, Row, Setting, described, mean_probe
from kvjax.evaluation.tasks import fidelity, text
from kvjax.types import Model, UserError

_LOOK = 32  # tokens generated between two looks for a stop text
# What a line of batches.jsonl holds that a method's record is made of.
_OF_TASK = (
    *("examples", "scores", "prompt_tokens", "new_tokens", "measured_bytes"),
    *("prefill_seconds", "decode_seconds", "kv_bytes_live", "kv_bytes_allocated"),
)
_OF_FIDELITY = ("loss", "reference_loss", "kl", "top1_agreement")


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Texts on which predictions are compared, teacher-forced; no windows, no texts."""

    num_windows: int = 0
    prompt_tokens: int = 0
    continuation_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality(Experiment):
    """See `configs/quickstart.py` for the fields.

    With `layerwise`, prompts run as in `kvjax.engine.layerwise`: for sweeps over many
    methods. Neither time nor memory is measured then, and memory is planned from
    shapes, for one method at a time; readings that methods share are held in as much
    again, and where that is full made again for every method.
    """

    experiment: str = "quality"
    fidelity: Fidelity = Fidelity()
    layerwise: bool = False

    @property
    def units_per_method(self) -> int:
        """Prompts read."""
        asked = sum(task.num_examples for task in self.tasks)
        return asked + self.fidelity.num_windows

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
    """The experiment that a config's fields describe.

    Args:
      fields: of `Quality`; `prefill_chunk`, `evict_size`, `budget` and `codec` for the
        methods, `num_examples`, `prompt_tokens` and `max_new_tokens` for the tasks that
        do not set their own. See `config.flattened` for what else.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    given = config.flattened(fields, overrides)
    of_methods = config.taken(given, config.OF_METHODS)
    of_tasks = config.taken(given, config.OF_TASKS)
    windows = config.build(Fidelity, given.pop("fidelity", {}), "fidelity")
    given["methods"] = tuple(
        config.method(each, of_methods) for each in config.each_of(given, "methods")
    )
    given["tasks"] = tuple(
        config.task(each, of_tasks) for each in config.each_of(given, "tasks")
    )
    return config.build(Quality, given | {"fidelity": windows}, "config")


def rows(setting: Setting) -> list[Row]:
    """One per method; raises UserError for what does not fit, before long work."""
    experiment, model = setting.experiment, setting.model
    if model.tokenizer is None:
        raise UserError(
            f"model {experiment.model} has no tokenizer, and quality is that of texts: "
            "name a folder with one, or measure throughput"
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
    _kept_reference(setting, windows)  # raises if it is damaged
    made = []
    for method in experiment.methods:
        kept = configs[method.name]
        jobs = [(each, _job(setting, kept, each)) for each in tasks]
        for _, job in jobs:
            engine.check(job, setting.memory)
        run = _Run(setting, engine, method, kept, jobs, windows)
        measure = functools.partial(_measured, run)
        made.append(Row(method.name, None, experiment.units_per_method, measure))
    return made


def needed(line: Record) -> tuple[str, ...]:
    """The fields of a line of `batches.jsonl`."""
    told = _OF_FIDELITY if line.get("task") == "fidelity" else _OF_TASK
    return "method", "task", *told


def _windows(setting: Setting) -> list[fidelity.Window]:
    asked = setting.experiment.fidelity
    if not asked.num_windows:
        return []
    return fidelity.windows(
        setting.model.tokenizer,
        asked.num_windows,
        asked.prompt_tokens,
        asked.continuation_tokens,
        setting.experiment.seed,
        text.haystack(setting.experiment.haystack),
    )


def _job(setting: Setting, kept: CacheSpec, task: Samples) -> Job:
    model, asked = setting.model, setting.experiment.fidelity
    bucket = functools.partial(jobs.bucket, model.spec, kept)
    bucket(asked.prompt_tokens, asked.continuation_tokens)  # raises if they do not fit
    eos = NO_EOS if task.run.ignore_eos else api.end_tokens(model)
    prompt = bucket(task.longest, task.new)
    job = jobs.job_of(model, kept, prompt, task.new, eos=eos)
    return dataclasses.replace(job, decode_chunk=_LOOK if _stop_texts(task) else None)


def _stop_texts(task: Samples) -> tuple[str, ...]:
    """Texts that end an answer while it is generated."""
    return () if task.run.ignore_eos else task.task.stop


class _Run(NamedTuple):
    """All that a method is measured by: tasks with their jobs, and windows."""

    setting: Setting
    engine: "_Engine"
    method: Method
    config: CacheSpec
    tasks: list[tuple[Samples, Job]]
    windows: list[fidelity.Window]

    def lines(self, task: str) -> list[Record]:
        """Of the batches that are finished."""
        return self.setting.batches.where(method=self.method.name, task=task)


def _measured(run: _Run, say: Progress) -> Record:
    """A method's record."""
    plans = []
    for task, job in run.tasks:
        count = len(task.examples)
        plans.append(run.engine.plan(job, run.setting.memory, count, say))
        _answers(run, task, plans[-1], say)
    if run.windows:
        _fidelity(run, say)
    return _record(run, plans)


class _Engine(NamedTuple):
    """How prompts are run: by whole compiled programs, or layer by layer."""

    check: Callable[[Job, int], Any]  # raises where not even one row fits; instant
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
    """Runs the examples that no finished batch holds, and grades them."""
    done = {i for batch in run.lines(task.name) for i in batch["examples"]}
    if done:
        say(f"{task.name}, taken up again", len(done))
    left = [i for i in range(len(task.examples)) if i not in done]
    for rows in runner.batches(left, plan.batch):
        say(f"{task.name}, {len(rows)} prompts at once", 0)
        line = _batch(run, task, plan, rows)
        run.setting.batches.add({"method": run.method.name, **line})
        say(task.name, len(rows))


def _batch(run: _Run, task: Samples, plan: Plan, rows: list[int]) -> Record:
    """The line of one batch."""
    model, seed = run.setting.model, run.setting.experiment.seed
    prompts = task.tokens(rows)
    stop = functools.partial(stop_texts.stops, model.tokenizer, _stop_texts(task))
    timed = not run.setting.experiment.layerwise
    with contextlib.ExitStack() as around:
        probe, measured = {}, []
        if timed:
            probe = around.enter_context(roofline.probed(plan.job.dtype))
            peak = peak_memory(plan.weights_bytes, plan.host_bytes)
            measured = around.enter_context(peak)  # costs its time
        chosen = run.engine.runner(plan.job)
        result = runner.run_batch(chosen, prompts, rows, seed, stop)
    live, allocated = cache.stored_bytes(result.state)
    line = {
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
    if 0 in rows and plan.job.config.policy:
        row = rows.index(0)
        kept = cache.kept_positions(result.state)[row]
        line["survivors"] = survivor_map(kept, len(prompts[row]))
    return line


def _fidelity(run: _Run, say: Progress) -> None:
    """Compares the method's next-token distributions to the full cache's."""
    if run.lines("fidelity"):
        say("fidelity, taken up again", len(run.windows))
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
    """Whether the method is the reference itself, but for the size of its chunks."""
    spec, kept = run.setting.model.spec, run.config
    return not kept.policy and kept == make_spec(spec, None, None, kept.schedule)


def _reference(run: _Run, say: Progress) -> np.ndarray:
    kept = _kept_reference(run.setting, run.windows)
    if kept is not None:
        return kept
    say("the full cache's predictions", 0)
    logits = _forced(run, make_spec(run.setting.model.spec, None, None))
    with files.written(run.setting.workdir / "reference.npy") as partial:
        np.save(partial, logits)
    return logits


def _kept_reference(
    setting: Setting, windows: Sequence[fidelity.Window]
) -> np.ndarray | None:
    """The full cache's predictions, if an earlier run has written them down.

    Raises:
      UserError: the file holds something else.
    """
    path = setting.workdir / "reference.npy"
    if not (windows and path.exists()):
        return None
    new, vocab = len(windows[0].continuation), setting.model.spec.vocab_size
    wanted, found = (len(windows), new, vocab), None
    with contextlib.suppress(ValueError, EOFError, SyntaxError):  # as NumPy has it
        found = np.load(path, mmap_mode="r")
    if found is None or (found.shape, found.dtype) != (wanted, np.float32):
        raise UserError(f"{path} is damaged: delete it, and it is made again")
    return found


def _forced(run: _Run, kept: CacheSpec) -> np.ndarray:
    """Teacher-forced logits f32[windows, continuation, V], as many as fit at a time."""
    setting, windows = run.setting, run.windows
    job = _window_job(setting.model, kept, windows)
    row = 2 * max(state_bytes(job).values())  # and as much again for temporaries
    rows = max(1, (setting.memory - weights_bytes(job)) // row * job.data_parallel)
    parts = [
        _forced_batch(run.engine, job, [windows[i] for i in part])
        for part in runner.batches(range(len(windows)), rows)
    ]
    return np.concatenate(parts)


def _window_job(model: Model, kept: CacheSpec, windows) -> Job:
    prompt, new = len(windows[0].prompt), len(windows[0].continuation)
    bucket = jobs.bucket(model.spec, kept, prompt, new)
    job = jobs.job_of(model, kept, bucket, new)
    return dataclasses.replace(job, scored=True, keep_logits=True)


def _forced_batch(engine: _Engine, job: Job, windows) -> np.ndarray:
    """Teacher-forced logits of one batch."""
    job = dataclasses.replace(
        job, batch=-(-len(windows) // job.data_parallel) * job.data_parallel
    )
    run = engine.runner(job)
    read = run.prefill([window.prompt for window in windows])
    given = np.zeros((job.batch, job.max_new_tokens), np.int32)
    given[: len(windows)] = [window.continuation for window in windows]
    lengths = np.where(np.arange(job.batch) < len(windows), job.max_new_tokens, 0)
    scores = run.score(read, given, lengths.astype(np.int32))
    return np.swapaxes(scores.logits, 0, 1)[: len(windows)]


def _record(run: _Run, plans: list[Plan]) -> Record:
    """A method's line, from the lines of its batches."""
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

    decoded = total("new_tokens") > count  # the first of an answer comes from prefill
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
