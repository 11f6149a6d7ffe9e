"""Methods measured on tasks: quality, throughput and memory of each, resumable.

Everything finished is written down at once, one line per batch, so that a run that was
interrupted goes on where it stopped and loses at most the batch in flight::

    WORKDIR/experiment.json   what was asked; another question wants another folder
    WORKDIR/batches.jsonl     one line per finished batch
    WORKDIR/reference.npy     the full cache's logits, f32[windows, continuation, V]
    WORKDIR/records.jsonl     one line per finished method, made from its batches
"""

import dataclasses
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax import cache
from kvjax.cache.config import CacheConfig, make_config
from kvjax.engine import api, compiled, layerwise, stop_texts
from kvjax.engine.compiled import Job
from kvjax.engine.memory import peak_memory
from kvjax.engine.planner import (
    Plan,
    check_one_row,
    device_memory,
    plan_by_shapes,
    plan_job,
    state_bytes,
    weights_bytes,
)
from kvjax.engine.steps import NO_EOS, compact, prefill, score_tokens
from kvjax.engine.stop_texts import ended
from kvjax.evaluation import tasks
from kvjax.evaluation.config import Experiment, Method, TaskRun, opened
from kvjax.evaluation.report import survivors
from kvjax.evaluation.report.records import Record, append_record, made_by, read_records
from kvjax.evaluation.tasks import fidelity, text
from kvjax.evaluation.tasks.base import Encoded, Example, Task
from kvjax.evaluation.tasks.base import encode as encoded
from kvjax.models.weights import load
from kvjax.parallel import axes, meshes
from kvjax.types import Model, UserError

_LOOK = 32  # tokens generated between two looks for a stop text
Progress = Callable[[str, int], None]  # what runs now, and units of work just finished


class Prepared(NamedTuple):
    """A task's examples, encoded.

    Attributes:
      run: what was asked.
      task: the task.
      examples: its questions.
      prompts: their tokens, and how many were cut out.
      new: most tokens of an answer.
    """

    run: TaskRun
    task: Task
    examples: list[Example]
    prompts: list[Encoded]
    new: int

    @property
    def longest(self) -> int:
        return max(len(prompt.tokens) for prompt in self.prompts)


def run(
    experiment: Experiment, workdir: str | os.PathLike, progress: Progress
) -> list[Record]:
    """Runs what is not yet in `workdir` and returns one record per method.

    Raises:
      UserError: anything that does not fit, before long work starts.
    """
    experiment.check()
    workdir = opened(experiment, pathlib.Path(workdir))
    compiled.keep_compiled()
    progress(f"loading {experiment.model}", 0)
    model = load(experiment.model, experiment.dtype, mesh=experiment.mesh)
    memory = device_memory(experiment.memory_gb)
    made = {m.name: m.compression(model.spec) for m in experiment.methods}
    given = [prepared(experiment, run, model) for run in experiment.tasks]
    jobs = {
        (name, task.run.name): _job(experiment, model, each, task)
        for name, each in made.items()
        for task in given
    }
    engine = _layers(model, made.values()) if experiment.layerwise else _whole(model)
    for job in jobs.values():
        engine.check(job, memory)
    windows = _windows(experiment, model)
    records = read_records(workdir / "records.jsonl")
    finished = {record["method"]: record for record in records}
    for method in experiment.methods:
        if method.name in finished:
            progress(method.name, experiment.units // len(experiment.methods))
            continue
        say = functools.partial(_say, progress, method.name)
        plans = {}
        for task in given:
            say("planning and compiling", 0)
            job = jobs[method.name, task.run.name]
            plan = engine.plan(job, memory, len(task.examples))
            run_batch = functools.partial(engine.run_batch, plan.job, experiment.seed)
            _answers(model, plan, run_batch, task, method, workdir, say)
            plans[task.run.name] = plan
        if windows:
            forced = functools.partial(_forced, model, engine.forced, windows, memory)
            _fidelity(model, made[method.name], forced, windows, method, workdir, say)
        record = _record(experiment, method, plans, given, workdir)
        append_record(workdir / "records.jsonl", record)
        finished[method.name] = record
        engine.forget()
    return [finished[method.name] for method in experiment.methods]


def prepared(experiment: Experiment, run: TaskRun, model: Model) -> Prepared:
    """A task's examples as tokens that the model can read, the same for all methods.

    Raises:
      UserError: an unknown task or option, data that is not there, no room.
    """
    task = tasks.get(run.name)
    new = run.max_new_tokens or task.max_new_tokens
    room = model.spec.context_length - new
    room = min(room, run.prompt_tokens or room)
    every = inspect.signature(task.examples).parameters
    known = sorted(set(every) - {"tokenizer", "count", "seed"})
    common = {"haystack": experiment.haystack, "data_dir": experiment.data_dir}
    common["length"] = run.prompt_tokens
    options = {k: v for k, v in common.items() if k in known and v is not None}
    options |= dict(run.options)
    if unknown := sorted(set(options) - set(known)):
        raise UserError(
            f"task {run.name} has no option {unknown[0]!r}: it has {', '.join(known)}"
        )
    examples = task.examples(model.tokenizer, run.examples, experiment.seed, **options)
    encode = functools.partial(encoded, model.tokenizer, task, room=room)
    prompts = [encode(each) for each in examples]
    if "length" in known and any(prompt.cut for prompt in prompts):
        raise UserError(
            f"task {run.name} writes prompts that are longer than the {room} tokens "
            f"that {model.spec.name} can read before {new} new ones: give it "
            f"prompt_tokens of {room} or less"
        )
    return Prepared(run, task, examples, prompts, new)


def _windows(experiment: Experiment, model: Model) -> list[fidelity.Window]:
    if not experiment.windows:
        return []
    return fidelity.windows(
        model.tokenizer,
        experiment.windows,
        experiment.window_prompt_tokens,
        experiment.window_continuation_tokens,
        experiment.seed,
        text.haystack(experiment.haystack),
    )


class _Engine(NamedTuple):
    """How prompts are run: by whole compiled programs, or layer by layer."""

    check: Callable[[Job, int], Any]  # raises where not even one row fits; instant
    plan: Callable[[Job, int, int], Plan]
    run_batch: Callable[..., api.BatchResult]  # of job, seed, prompts, rows
    forced: Callable[..., np.ndarray]  # of windows, what is kept
    forget: Callable[[], None]  # what was compiled: many programs exhaust memory maps


def _whole(model: Model) -> _Engine:
    def run_batch(job, seed, prompts, rows, stop):
        return api.run_batch(model.params, job, prompts, rows, seed, stop)

    def forget():
        compiled.programs.cache_clear()
        jax.clear_caches()

    forced = functools.partial(_forced_batch, model)
    return _Engine(check_one_row, plan_job, run_batch, forced, forget)


def _layers(model: Model, methods: Iterable[CacheConfig]) -> _Engine:
    readings = layerwise.Readings(model, methods)

    def run_batch(job, seed, prompts, rows, stop):
        reading = readings.after(job.config, prompts, job.max_new_tokens)
        reading, tokens = layerwise.write(
            model, job.config, reading, job.max_new_tokens, job.eos, stop
        )
        return api.BatchResult(tokens, layerwise.joined(reading), None, None)

    def forced(windows, made):
        given = np.asarray([window.continuation for window in windows])
        prompts = [window.prompt for window in windows]
        reading = readings.after(made, prompts, given.shape[1])
        return layerwise.score_tokens(model, made, reading, given[:, :-1])

    check = functools.partial(plan_by_shapes, max_batch=1)
    return _Engine(check, plan_by_shapes, run_batch, forced, jax.clear_caches)


def _say(progress: Progress, name: str, what: str, units: int) -> None:
    progress(f"{name}: {what}", units)


def _job(experiment: Experiment, model: Model, made, task: Prepared) -> Job:
    read, written = (
        experiment.window_prompt_tokens,
        experiment.window_continuation_tokens,
    )
    compiled.bucket(model.spec, made, read, written)  # raises if they do not fit
    prompt = compiled.bucket(model.spec, made, task.longest, task.new)
    eos = NO_EOS if task.run.ignore_eos else api.end_tokens(model)
    job = compiled.job_of(model, made, prompt, task.new, eos=eos)
    return dataclasses.replace(job, decode_chunk=_LOOK if task.task.stop else None)


def _answers(model, plan, run_batch, task: Prepared, method, workdir, say) -> None:
    """Runs the examples that no finished batch holds, and grades them."""
    path, name = workdir / "batches.jsonl", task.run.name
    done = {i for batch in _finished(path, method, name) for i in batch["examples"]}
    if done:
        say(f"{name}, taken up again", len(done))
    left = [i for i in range(len(task.examples)) if i not in done]
    stop = functools.partial(stop_texts.stops, model.tokenizer, task.task.stop)
    for rows in api.batches(left, plan.batch):
        say(f"{name}, {len(rows)} prompts at once", 0)
        prompts = [task.prompts[i].tokens for i in rows]
        with peak_memory(plan.weights_bytes) as measured:
            result = run_batch(prompts, rows, stop)
        texts = [
            model.tokenizer.decode(new, skip_special_tokens=True)
            for new in result.tokens
        ]
        live, allocated = cache.pair_bytes(result.state)
        batch = {
            "method": method.name,
            "task": name,
            "examples": rows,
            "scores": [
                task.task.grade(ended(made, task.task.stop), task.examples[i])
                for i, made in zip(rows, texts, strict=True)
            ],
            "details": [dict(task.examples[i].details) for i in rows],
            "texts": texts,
            "prompt_tokens": sum(map(len, prompts)),
            "cut_tokens": [task.prompts[i].cut for i in rows],
            "new_tokens": sum(map(len, result.tokens)),
            "prefill_seconds": result.prefill_seconds,
            "decode_seconds": result.decode_seconds,
            "measured_bytes": measured[0] if measured else None,
            "kv_bytes_live": live,
            "kv_bytes_allocated": allocated * len(rows) // len(result.state.next_pos),
        }
        if 0 in rows and plan.job.config.policy:
            row = rows.index(0)
            kept = cache.kept_positions(result.state)[row]
            batch["survivors"] = survivors.drawn(kept, len(prompts[row]))
        append_record(path, batch)
        say(name, len(rows))


def _fidelity(model, made, run, windows, method, workdir, say) -> None:
    """Compares the method's next-token distributions to the full cache's."""
    path = workdir / "batches.jsonl"
    if _finished(path, method, "fidelity"):
        say("fidelity, taken up again", len(windows))
        return
    reference = _reference(model, run, workdir, say)
    say(f"fidelity, {len(windows)} texts", 0)
    same = made.policy is None and made.implementation is None
    logits = reference if same else run(made)
    targets = np.asarray([window.continuation for window in windows]).reshape(-1)
    width = logits.shape[-1]
    scores = fidelity.compare(
        reference.reshape(-1, width), logits.reshape(-1, width), targets
    )
    append_record(path, {"method": method.name, "task": "fidelity", **scores})
    say("fidelity", len(windows))


def _reference(model, run, workdir, say) -> np.ndarray:
    path = workdir / "reference.npy"
    if not path.exists():
        say("the full cache's predictions", 0)
        full = make_config(model.spec, None, None)
        logits = run(full)
        partial = path.with_suffix(".part.npy")
        np.save(partial, logits)
        partial.replace(path)
    return np.load(path)


def _forced(
    model: Model, forced, windows, memory: int, made: CacheConfig
) -> np.ndarray:
    """Teacher-forced logits f32[windows, continuation, V], as many as fit at a time."""
    job = _window_job(model, made, windows)
    row = 2 * max(state_bytes(job).values())  # and as much again for temporaries
    rows = max(1, (memory - weights_bytes(job)) // row * job.data_parallel)
    parts = [
        forced([windows[i] for i in part], made)
        for part in api.batches(range(len(windows)), rows)
    ]
    return np.concatenate(parts)


def _window_job(model: Model, made: CacheConfig, windows) -> Job:
    prompt, new = len(windows[0].prompt), len(windows[0].continuation)
    return compiled.job_of(
        model, made, compiled.bucket(model.spec, made, prompt, new), new
    )


def _forced_batch(model: Model, windows, made: CacheConfig) -> np.ndarray:
    job, params = _window_job(model, made, windows), model.params
    job = dataclasses.replace(
        job, batch=-(-len(windows) // job.data_parallel) * job.data_parallel
    )
    tokens, lengths = api.pad_prompts(job, [window.prompt for window in windows])
    given = np.zeros((job.batch, job.max_new_tokens - 1), np.int32)
    given[: len(windows)] = [window.continuation[:-1] for window in windows]
    state = compiled.compile_init(job, job.prefill_capacity)()
    how = {"spec": job.spec, "made": made}
    with meshes.use(job.mesh):
        state, first = prefill(params, state, tokens, lengths, **how)
        if made.schedule.compacts:
            state = compact(state, capacity=job.decode_capacity, **how)
        state, rest = score_tokens(
            params, state, *meshes.shard_rows(job.mesh, given), **how
        )
    cache.raise_errors(state)
    first, rest = axes.to_host((first, rest))
    logits = np.concatenate([first[None], rest])
    return np.swapaxes(logits, 0, 1)[: len(windows)]


def _record(experiment, method, plans, tasks, workdir) -> Record:
    """A method's line, from the lines of its batches."""
    path = workdir / "batches.jsonl"
    scores = {task.run.name: _scores(path, method, task) for task in tasks}
    batches = [b for task in tasks for b in _finished(path, method, task.run.name)]
    count = sum(len(task.examples) for task in tasks)
    quality = _finished(path, method, "fidelity")
    tightest = max(plans.values(), key=lambda plan: plan.row_bytes)
    made = tightest.job.config

    def total(key):
        values = [batch[key] for batch in batches]
        return None if None in values else sum(values)

    reading, writing = total("prefill_seconds"), total("decode_seconds")
    seconds = None if reading is None else reading + writing

    def rate(key, seconds):
        return None if seconds is None else total(key) / seconds

    measured = [b["measured_bytes"] for b in batches if b["measured_bytes"]]
    decoding = [
        state_bytes(p.job)["decode"] * p.job.data_parallel // p.batch
        for p in plans.values()
    ]
    return {
        "method": method.name,
        "label": method.label or method.name,
        "policy": made.policy.name if made.policy else None,
        "schedule": made.schedule.phases,
        "budget": method.budget,
        "rope_positions": method.rope_positions,
        "batch": tightest.batch,
        "batch_limit": tightest.limited_by,
        "tasks": scores,
        "accuracy": sum(s["score"] for s in scores.values()) / len(scores),
        "examples": count,
        **{
            key: quality[0][key] if quality else None
            for key in ("loss", "reference_loss", "kl", "top1_agreement")
        },
        "prefill_tokens_per_s": rate("prompt_tokens", reading),
        "decode_tokens_per_s": rate("new_tokens", writing),
        "tokens_per_s": rate("new_tokens", seconds),
        "kv_bytes_per_row": max(plan.row_bytes for plan in plans.values()),
        "kv_bytes_decode": max(decoding),
        "kv_bytes_live": total("kv_bytes_live") / count,
        "kv_bytes_allocated": total("kv_bytes_allocated") / count,
        "planned_bytes": max(plan.peak_bytes for plan in plans.values()),
        "measured_bytes": max(measured, default=None),
        "memory_bytes": tightest.memory_bytes,
        "seconds": seconds,
        "seed": experiment.seed,
        "prompt_tokens": max(each["most_prompt_tokens"] for each in scores.values()),
        "max_new_tokens": max(each["max_new_tokens"] for each in scores.values()),
        "model": experiment.model,
        "mesh": experiment.mesh,
        "device": jax.devices()[0].device_kind,
        **made_by(),
    }


def _scores(path: pathlib.Path, method: Method, task: Prepared) -> dict[str, Any]:
    """A task's means, and its headline metric for every depth, length and the like."""
    batches = _finished(path, method, task.run.name)
    scores = [score for batch in batches for score in batch["scores"]]
    details = [detail for batch in batches for detail in batch["details"]]
    cut = [tokens for batch in batches for tokens in batch["cut_tokens"]]
    cells: dict[tuple, list[float]] = {}
    for detail, score in zip(details, scores, strict=True):
        cells.setdefault(tuple(sorted(detail.items())), []).append(
            score[task.task.metric]
        )
    means = {name: float(np.mean([s[name] for s in scores])) for name in scores[0]}
    maps = [batch["survivors"] for batch in batches if "survivors" in batch]
    return {
        "metric": task.task.metric,
        "score": means[task.task.metric],
        "metrics": means,
        "examples": len(scores),
        "prompt_tokens": sum(b["prompt_tokens"] for b in batches) / len(scores),
        "most_prompt_tokens": task.run.prompt_tokens or task.longest,
        "max_new_tokens": task.new,
        "cut_prompts": sum(tokens > 0 for tokens in cut),
        "cells": [
            dict(cell) | {"score": float(np.mean(found)), "examples": len(found)}
            for cell, found in sorted(cells.items())
            if cell
        ],
        "survivors": maps[0] if maps else None,
    }


def _finished(path: pathlib.Path, method: Method, task: str) -> list[dict]:
    return [
        batch
        for batch in read_records(path)
        if batch["method"] == method.name and batch["task"] == task
    ]
