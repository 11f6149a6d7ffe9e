"""Methods measured on tasks: quality, throughput and memory of each, resumable.

Everything finished is written down at once, one line per batch, so that a run that was
interrupted goes on where it stopped and loses at most the batch in flight::

    WORKDIR/experiment.json   what was asked; another question wants another folder
    WORKDIR/batches.jsonl     one line per finished batch
    WORKDIR/reference.npy     the full cache's logits, f32[windows, continuation, V]
    WORKDIR/records.jsonl     one line per finished method, made from its batches
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache, completions, layerwise, policies, programs, report
from kvjax.generate import compact, prefill, score_tokens
from kvjax.plan import (
    Plan,
    check_one_row,
    device_memory,
    plan_by_shapes,
    plan_job,
    state_bytes,
)
from kvjax.programs import Job
from kvjax.tasks import fidelity, needle, text
from kvjax.types import Model, ModelSpec, Schedule, UserError
from kvjax.weights import load

Progress = Callable[[str, int], None]  # what runs now, and units of work just finished


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
      name: what tables and pictures call it.
      policy: a name of `kvjax.policies.names()`, None for the full cache.
      options: the policy's parameters.
      phases, block, evict: the `Schedule`; `evict` None is the block.
      budget: |kv|, one int or one per layer; None for the full cache.
      rope: where a key stands for its rotary angle, see `cache.Compression`.
      implementation: which attention runs, see `cache.Compression`.
      label: what the methods have in common that differ only in budget and schedule,
        the name of their row in a sweep's tables and pictures; None is the name.
    """

    name: str
    policy: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    phases: str = "prefill+decode"
    block: int = 64
    evict: int | None = None
    budget: int | tuple[int, ...] | None = None
    rope: str = "true"
    implementation: str | None = None
    label: str | None = None

    def compression(self, spec: ModelSpec) -> cache.Compression:
        """Raises UserError where the parts do not fit each other."""
        policy, schedule = self.check()
        return cache.compression(
            spec,
            policy,
            self.budget,
            schedule,
            rope=self.rope,
            implementation=self.implementation,
        )

    def check(self) -> tuple[policies.Policy | None, Schedule]:
        """Policy and schedule, or a UserError for what is wrong in any model."""
        evict = self.block if self.evict is None else self.evict
        if self.policy is None:
            return None, Schedule("full", self.block, evict)
        schedule = Schedule(self.phases, self.block, evict)
        policy = policies.make(self.policy, **dict(self.options))
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        for budget in set(budgets) - {None}:
            cache.check_budget(budget, policy, schedule)
        return policy, schedule


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a run depends on; see `configs/quickstart.py` for the fields.

    With `layerwise`, prompts run as in `kvjax.layerwise`: for sweeps over many methods.
    Nothing is timed then, and memory is planned from shapes, for one method at a time.
    """

    model: str
    dtype: str
    memory_gb: float | None
    seed: int
    haystack: str | None
    methods: tuple[Method, ...]
    examples: int
    prompt_tokens: int
    depths: tuple[float, ...]
    max_new_tokens: int
    windows: int
    window_prompt_tokens: int
    window_continuation_tokens: int
    layerwise: bool = False

    @property
    def units(self) -> int:
        """Of work that progress is counted in: prompts read."""
        return len(self.methods) * (self.examples + self.windows)


def from_config(config: dict[str, Any], overrides: dict[str, Any]) -> Experiment:
    """The experiment that a config's fields describe.

    Args:
      config: fields of `Experiment`, and `block`, `evict` and `budget` for the methods
        that do not set their own. A `memory_gb` of 0 is the device's limit; an empty
        `haystack` is the default text. If `quick` is there and true, the fields in
        `quick_fields` replace those of the same name, `methods` among them.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    given = dict(config)
    quick_fields = given.pop("quick_fields", {})
    if given.pop("quick", False):
        given |= quick_fields
    given |= {key: v for key, v in overrides.items() if v is not None}
    shared = {
        key: given.pop(key) for key in ("block", "evict", "budget") if key in given
    }
    methods = tuple(_method(dict(fields), shared) for fields in given.pop("methods"))
    given["haystack"] = given.get("haystack") or None
    if given.get("memory_gb") == 0 and overrides.get("memory_gb") is None:
        given["memory_gb"] = None
    return _build(Experiment, given | {"methods": methods}, "config")


def _method(fields: dict[str, Any], shared: dict[str, Any]) -> Method:
    fields["options"] = tuple(sorted(fields.get("options", {}).items()))
    if fields.get("policy"):
        fields = shared | fields
    return _build(Method, fields, f"method {fields.get('name')!r}")


def _build(cls, fields: dict[str, Any], what: str):
    """A dataclass from a dict, its lists made tuples and its fields checked."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(
            f"{what} has an unknown field {unknown[0]!r}: fields are "
            + ", ".join(sorted(known))
        )
    try:
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        )
    except TypeError as error:
        raise UserError(f"{what}: {error}") from None


def run(
    experiment: Experiment, workdir: str | os.PathLike, progress: Progress
) -> list[report.Record]:
    """Runs what is not yet in `workdir` and returns one record per method.

    Raises:
      UserError: anything that does not fit, before long work starts.
    """
    _check(experiment)
    workdir = _open(experiment, pathlib.Path(workdir))
    programs.keep_compiled()
    progress(f"loading {experiment.model}", 0)
    model = load(experiment.model, jnp.dtype(experiment.dtype))
    job = functools.partial(_job, experiment, model)
    jobs = {method.name: job(method) for method in experiment.methods}
    memory = device_memory(experiment.memory_gb)
    for each in jobs.values():
        check_one_row(each, memory)
    haystack = text.haystack(experiment.haystack)
    examples = needle.examples(
        model.tokenizer,
        experiment.examples,
        experiment.prompt_tokens,
        experiment.depths,
        experiment.seed,
        haystack,
    )
    windows = fidelity.windows(
        model.tokenizer,
        experiment.windows,
        experiment.window_prompt_tokens,
        experiment.window_continuation_tokens,
        experiment.seed,
        haystack,
    )
    engine = _layers(model, jobs.values()) if experiment.layerwise else _whole(model)
    records = report.read_records(workdir / "records.jsonl")
    finished = {record["method"]: record for record in records}
    for method in experiment.methods:
        if method.name in finished:
            progress(method.name, experiment.examples + experiment.windows)
            continue
        say = functools.partial(_say, progress, method.name)
        say("planning and compiling", 0)
        plan = engine.plan(jobs[method.name], memory, len(examples))
        run_batch = functools.partial(engine.run_batch, plan.job, experiment.seed)
        _needle(model, plan, run_batch, examples, method, workdir, say)
        _fidelity(model, plan, engine.forced, windows, method, workdir, say)
        record = _record(experiment, method, plan, workdir, len(examples))
        report.append_record(workdir / "records.jsonl", record)
        finished[method.name] = record
        engine.forget()
    return [finished[method.name] for method in experiment.methods]


class _Engine(NamedTuple):
    """How prompts are run: by whole compiled programs, or layer by layer."""

    plan: Callable[[Job, int, int], Plan]
    run_batch: Callable[..., completions.BatchResult]  # of job, seed, prompts, rows
    forced: Callable[..., np.ndarray]  # of windows, what is kept
    forget: Callable[[], None]  # what was compiled: many programs exhaust memory maps


def _whole(model: Model) -> _Engine:
    def run_batch(job, seed, prompts, rows):
        return completions.run_batch(model.params, job, prompts, rows, seed)

    def forget():
        programs.programs.cache_clear()
        jax.clear_caches()

    forced = functools.partial(_forced_batch, model)
    return _Engine(plan_job, run_batch, forced, forget)


def _layers(model: Model, jobs: Iterable[Job]) -> _Engine:
    jobs = list(jobs)
    readings = layerwise.Readings(model, (job.made for job in jobs))

    def run_batch(job, seed, prompts, rows):
        reading = readings.after(job.made, prompts, job.new)
        steps = (job.new, completions.end_tokens(model))
        reading, tokens = layerwise.write(model, job.made, reading, *steps)
        return completions.BatchResult(tokens, layerwise.joined(reading), None, None)

    def forced(windows, made):
        given = np.asarray([window.continuation for window in windows])
        prompts = [window.prompt for window in windows]
        reading = readings.after(made, prompts, given.shape[1])
        return layerwise.score_tokens(model, made, reading, given[:, :-1])

    return _Engine(plan_by_shapes, run_batch, forced, jax.clear_caches)


def _say(progress: Progress, name: str, what: str, units: int) -> None:
    progress(f"{name}: {what}", units)


def _check(experiment: Experiment) -> None:
    """All that can be told wrong before the model is loaded."""
    names = [method.name for method in experiment.methods]
    if not names or len(set(names)) < len(names):
        raise UserError(f"methods {names}: give one or more, with different names")
    for field in ("examples", "windows", "prompt_tokens", "max_new_tokens"):
        if getattr(experiment, field) < 1:
            raise UserError(f"{field} {getattr(experiment, field)}: at least 1")
    device_memory(experiment.memory_gb)
    for method in experiment.methods:
        method.check()


def _open(experiment: Experiment, workdir: pathlib.Path) -> pathlib.Path:
    """The folder, if what lies in it answers the same question."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}; name another") from None
    asked = json.loads(json.dumps(dataclasses.asdict(experiment)))
    path = workdir / "experiment.json"
    if not (workdir / "batches.jsonl").exists() or not path.exists():
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asked, indent=2) + "\n")
        partial.replace(path)
        return workdir
    before = json.loads(path.read_text())
    changed = sorted(key for key in asked if asked[key] != before.get(key))
    if changed:
        raise UserError(
            f"workdir {workdir} holds results of another configuration ({changed[0]} "
            f"was {before.get(changed[0])!r:.80}): name another folder or delete it"
        )
    return workdir


def _job(experiment: Experiment, model: Model, method: Method) -> Job:
    made = method.compression(model.spec)
    read, written = (
        experiment.window_prompt_tokens,
        experiment.window_continuation_tokens,
    )
    programs.bucket(model.spec, made, read, written)  # raises if they do not fit
    new = experiment.max_new_tokens
    prompt = programs.bucket(model.spec, made, experiment.prompt_tokens, new)
    return programs.job_of(model, made, prompt, new)


def _needle(model, plan, run_batch, examples, method, workdir, say) -> None:
    """Runs the examples that no finished batch holds."""
    path = workdir / "batches.jsonl"
    done = {i for batch in _finished(path, method, "needle") for i in batch["examples"]}
    if done:
        say("needle, taken up again", len(done))
    left = [i for i in range(len(examples)) if i not in done]
    for rows in completions.batches(left, plan.batch):
        say(f"needle, {len(rows)} prompts at once", 0)
        prompts = [examples[i].tokens for i in rows]
        with _peak_memory(plan.weights_bytes) as measured:
            result = run_batch(prompts, rows)
        texts = [model.tokenizer.decode(new) for new in result.tokens]
        live, allocated = cache.pair_bytes(result.state)
        batch = {
            "method": method.name,
            "task": "needle",
            "examples": rows,
            "scores": [
                needle.grade(examples[i], made)
                for i, made in zip(rows, texts, strict=True)
            ],
            "texts": texts,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": sum(map(len, result.tokens)),
            "prefill_seconds": result.prefill_seconds,
            "decode_seconds": result.decode_seconds,
            "measured_bytes": measured[0] if measured else None,
            "kv_bytes_live": live,
            "kv_bytes_allocated": allocated * len(rows) // plan.batch,
        }
        report.append_record(path, batch)
        say("needle", len(rows))


def _fidelity(model, plan, forced, windows, method, workdir, say) -> None:
    """Compares the method's next-token distributions to the full cache's."""
    path = workdir / "batches.jsonl"
    if _finished(path, method, "fidelity"):
        say("fidelity, taken up again", len(windows))
        return
    rows = min(plan.batch, len(windows))
    run = functools.partial(_forced, forced, windows, rows)
    reference = _reference(model, run, workdir, say)
    say(f"fidelity, {len(windows)} texts", 0)
    full = plan.job.made.policy is None
    logits = reference if full else run(plan.job.made)
    targets = np.asarray([window.continuation for window in windows]).reshape(-1)
    width = logits.shape[-1]
    scores = fidelity.compare(
        reference.reshape(-1, width), logits.reshape(-1, width), targets
    )
    report.append_record(path, {"method": method.name, "task": "fidelity", **scores})
    say("fidelity", len(windows))


def _reference(model, run, workdir, say) -> np.ndarray:
    path = workdir / "reference.npy"
    if not path.exists():
        say("the full cache's predictions", 0)
        full = cache.compression(model.spec, None, None)
        logits = run(full)
        partial = path.with_suffix(".part.npy")
        np.save(partial, logits)
        partial.replace(path)
    return np.load(path)


def _forced(forced, windows, rows: int, made: cache.Compression) -> np.ndarray:
    """Teacher-forced logits f32[windows, continuation, V], a few windows at a time."""
    parts = [
        forced([windows[i] for i in part], made)
        for part in completions.batches(range(len(windows)), rows)
    ]
    return np.concatenate(parts)


def _forced_batch(model: Model, windows, made: cache.Compression) -> np.ndarray:
    spec, params = model.spec, model.params
    prompts = np.asarray([window.prompt for window in windows], np.int32)
    given = jnp.asarray([window.continuation[:-1] for window in windows], jnp.int32)
    batch, length = prompts.shape
    new = given.shape[1] + 1
    bucket = programs.bucket(spec, made, length, new)
    tokens = jnp.asarray(np.pad(prompts, ((0, 0), (0, bucket - length))))
    lengths = jnp.full((batch,), length, jnp.int32)
    capacity = made.prefill_capacity(spec, bucket, new)
    state = cache.init(spec, made, batch, capacity, params["embed"].dtype)
    state, first = prefill(params, state, tokens, lengths, spec=spec, made=made)
    if made.schedule.compacts:
        capacity = made.decode_capacity(spec, bucket, new)
        state = compact(state, spec=spec, made=made, capacity=capacity)
    state, rest = score_tokens(params, state, given, spec=spec, made=made)
    cache.raise_errors(state)
    logits = np.concatenate([np.asarray(first)[None], np.asarray(rest)])
    return np.swapaxes(logits, 0, 1)


def _record(experiment, method, plan, workdir, count) -> report.Record:
    """A method's line, from the lines of its batches."""
    path = workdir / "batches.jsonl"
    batches = _finished(path, method, "needle")
    (quality,) = _finished(path, method, "fidelity")

    def total(key):
        values = [batch[key] for batch in batches]
        return None if None in values else sum(values)

    reading, writing = total("prefill_seconds"), total("decode_seconds")
    seconds = None if reading is None else reading + writing

    def rate(key, seconds):
        return None if seconds is None else total(key) / seconds

    measured = [b["measured_bytes"] for b in batches if b["measured_bytes"]]
    return {
        "method": method.name,
        "label": method.label or method.name,
        "policy": plan.job.made.policy.name if plan.job.made.policy else None,
        "schedule": plan.job.made.schedule.phases,
        "budget": method.budget,
        "rope": method.rope,
        "batch": plan.batch,
        "batch_limit": plan.limit,
        "accuracy": sum(sum(batch["scores"]) for batch in batches) / count,
        "examples": count,
        **{
            key: quality[key]
            for key in ("loss", "reference_loss", "kl", "top1_agreement")
        },
        "prefill_tokens_per_s": rate("prompt_tokens", reading),
        "decode_tokens_per_s": rate("new_tokens", writing),
        "tokens_per_s": rate("new_tokens", seconds),
        "kv_bytes_per_row": plan.row_bytes,
        "kv_bytes_decode": state_bytes(plan.job)["decode"] // plan.batch,
        "kv_bytes_live": total("kv_bytes_live") / count,
        "kv_bytes_allocated": total("kv_bytes_allocated") / count,
        "planned_bytes": plan.peak_bytes,
        "measured_bytes": max(measured, default=None),
        "memory_bytes": plan.memory_bytes,
        "seconds": seconds,
        "seed": experiment.seed,
        "prompt_tokens": experiment.prompt_tokens,
        "max_new_tokens": experiment.max_new_tokens,
        "model": experiment.model,
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }


def _finished(path: pathlib.Path, method: Method, task: str) -> list[dict]:
    return [
        batch
        for batch in report.read_records(path)
        if batch["method"] == method.name and batch["task"] == task
    ]


@contextlib.contextmanager
def _peak_memory(weights: int) -> Iterator[list[int]]:
    """Measures the most bytes held inside the block, the weights included.

    On GPU and TPU it is the allocator's peak, told only if the block raised it, since
    it cannot be reset. On a CPU it is the growth of the process's resident set over
    what it was before, plus the weights. The list stays empty where neither is known.
    """
    found: list[int] = []
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    resident = _resident_peak(reset=True) if device.platform == "cpu" else None
    yield found
    if before is not None:
        peak = device.memory_stats()["peak_bytes_in_use"]
        found.extend([peak] if peak > before else [])
    elif resident is not None:
        found.append(weights + _resident_peak() - resident)


def _resident_peak(reset: bool = False) -> int | None:
    """The process's largest resident set in bytes since the last reset (Linux)."""
    try:
        if reset:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
