"""Times transformers and kvpress at the largest batch that a memory limit allows.

`measure` returns tokens per second in records like kvjax's own::

    methods = [Method(), Method("key_diff", 512)]
    measure("venv/bin/python", path_of_gguf, methods, prompts, 64, 4 * 10**9)
    measure("venv/bin/python", "random:llama-3.1-8b", methods, prompts, 64, 48 * 10**9)

For a fair comparison the other libraries get the same token ids, prompts of one length
without padding, and ignore EOS. They prefill in one call, as in kvpress' own pipeline,
with logits of the last token only. transformers also prefills in chunks if that lets
more rows fit; the faster way is the record, the other is under `alternatives`. A press
keeps exactly `budget` pairs per head. Attention is sdpa, except for the press that
reads attention weights. On a CPU large freed blocks return to the system, as in kvjax's
own runs, because a batch would otherwise exceed the memory that it needs;
`retain_freed_memory` measures the libraries without that.
"""

import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from baselines import Baseline, BaselineDied, BaselineError, memory, presses
from kvjax.evaluation.batch_rules import turns
from kvjax.evaluation.report.records import FORMAT
from kvjax.models import presets
from kvjax.models.weights import hub
from kvjax.types import UserError

CHUNK = 256  # prompt tokens at a time, where transformers reads in chunks
WARM_UP = 512  # prompt tokens, at most, of the run that is not measured
UNGRADED = "score", "num_examples", "loss", "reference_loss", "kl", "top1_agreement"
Progress = Callable[[str, int], None]  # the current step, newly finished methods


class Method(NamedTuple):
    """A method to measure.

    Attributes:
      policy: of `presses.LABELS`, run by kvpress; None is transformers' full cache.
      budget: KV pairs per head kept of the prompt.
      options: of the press, by its own names, such as SnapKV's `window_size`.
      retain_freed_memory: times with glibc's defaults, which retain freed memory, at
        the batch that fits without; `measured_bytes` holds the peak.
    """

    policy: str | None = None
    budget: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    retain_freed_memory: bool = False

    @property
    def name(self) -> str:
        kept = ", freed memory kept" if self.retain_freed_memory else ""
        if self.policy is None:
            return f"transformers full cache{kept}"
        return f"kvpress {presses.LABELS[self.policy]} ({self.budget}){kept}"

    def request(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns the worker's request for the press."""
        ratio = presses.ratio(self.budget, prompt_tokens) if self.policy else None
        return {"policy": self.policy, "ratio": ratio, "options": dict(self.options)}

    def kept(self, prompt_tokens: int) -> int:
        return min(self.budget, prompt_tokens) if self.policy else prompt_tokens


def measure(
    python: str,
    model: str | pathlib.Path,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    memory_bytes: int,
    min_timed_batches: int = 3,
    progress: Progress = lambda what, finished: None,
    keep_tokens: bool = False,
) -> list[dict[str, Any]]:
    """Measures the throughput of methods under one memory limit.

    Args:
      python: the interpreter with torch, transformers, gguf, and kvpress for presses.
      model: a GGUF file; or `random:` and a shape's name, of `kvjax.models.presets`.
      methods: run one after the other.
      prompts: token ids, all of one length; their number bounds the batch.
      new_tokens: to generate per prompt, EOS ignored.
      memory_bytes: limit of weights, KV pairs and activations together.
      min_timed_batches: see `kvjax.evaluation.batch_rules.turns`.
      progress: called with the current step.
      keep_tokens: adds `tokens`, each prompt's answer, for the caller to grade.

    Returns:
      A record per method. Among its fields: `batch_size`, and `limited_by`, the phase
      that needs the most memory or `prompts`; the medians of the batches' seconds, and
      all of them in `*_seconds_all`; rates as in kvjax's records, where all new tokens
      count over the seconds of the decode phase, though the prompt gives the first;
      `measured_bytes`, the peak of what was timed; `tried_batches`, the batches run on
      the way.

    Raises:
      UserError: invalid arguments; not even one prompt fits.
      BaselineError: the worker cannot run.
    """
    _check(methods, prompts, new_tokens, min_timed_batches)
    task = _Task(prompts, new_tokens, memory_bytes, min_timed_batches)
    records = []
    for method in methods:
        with _Worker(python, model, methods, prompts[0]) as worker:
            ways = _plans(worker, method, task, progress)
            record = _faster([_time(worker, way, task, progress) for way in ways])
        if not keep_tokens:
            del record["tokens"]
        records.append(record)
        progress(method.name, 1)
    return records


def joined(
    python: str, model: str, dtype: str, asked: Sequence[Mapping[str, Any]]
) -> dict[str, Callable[..., dict[str, Any]]]:
    """Returns the methods by name, as `kvjax.evaluation.run.run` takes them.

    On a GPU, JAX preallocates most of the memory: set XLA_PYTHON_CLIENT_PREALLOCATE to
    false, and a `memory_gb` that leaves memory for both. `model` is also a name that
    `kvjax.load` knows, `dtype` is kvjax's, and `asked` are fields of `Method`.

    Raises:
      UserError: a model that is not a GGUF file, which the baselines could not read;
        two methods of one policy and budget; another side that cannot run, or would
        with another dtype or kind of device.
    """
    source = hub.fetch(model) if model in hub.NAMED else model
    if not model.startswith(presets.RANDOM) and pathlib.Path(source).suffix != ".gguf":
        raise UserError(
            f"baselines read GGUF files, and make random models, but not {model!r}: "
            "drop --baseline_python"
        )
    methods = [_method(fields) for fields in asked]
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise UserError(f"baselines {names}: give each policy and budget once")
    _check_side(python, source, methods, dtype)

    def run(method, prompts, new, memory, min_timed_batches, progress):
        say = lambda what, finished: progress(what, 0)
        task = prompts, new, memory, min_timed_batches, say
        try:
            (record,) = measure(python, source, [method], *task, keep_tokens=True)
        except BaselineError as error:
            raise UserError(str(error)) from None
        return record

    return {method.name: functools.partial(run, method) for method in methods}


def _method(fields: Mapping[str, Any]) -> Method:
    if unknown := sorted(set(fields) - set(Method._fields)):
        known = ", ".join(Method._fields)
        raise UserError(
            f"baseline has an unknown field {unknown[0]!r}: fields are {known}"
        )
    options = tuple(fields.get("options", {}).items())
    return Method(**dict(fields) | {"options": options})


def _check_side(python, model, methods, dtype) -> None:
    """Raises UserError if the worker cannot run, or has another dtype or device."""
    try:
        with _Worker(python, model, methods, [1, 2, 3]) as worker:
            about = worker.about
    except BaselineError as error:
        raise UserError(str(error)) from None
    ours = jax.devices()[0].platform
    theirs = "cpu" if about["device"] == "cpu" else "gpu"
    if (about["dtype"], theirs) != (dtype, ours):
        raise UserError(
            f"baselines run in {about['dtype']} on a {theirs.upper()}, kvjax in "
            f"{dtype} on a {ours.upper()}: set --config.dtype={about['dtype']}, or "
            "install what runs on the same device on both sides"
        )


def source_of(
    model: str | pathlib.Path,
) -> tuple[pathlib.Path | Mapping[str, Any], str]:
    """Returns what a worker loads, and the model's name in records."""
    path, name = pathlib.Path(model), str(model).removeprefix(presets.RANDOM)
    if name == str(model):
        return path, path.stem
    presets.spec(name)  # or it says which names there are
    return presets.CONFIGS[name], str(model)


class _Task(NamedTuple):
    prompts: Sequence[Sequence[int]]
    new: int
    limit: int
    min_timed_batches: int

    @property
    def length(self) -> int:
        return len(self.prompts[0])

    def batches(self, size: int) -> list[list[list[int]]]:
        """Returns the prompts of every batch, as in kvjax's own measurement."""
        rows = turns(len(self.prompts), size, self.min_timed_batches)
        return [[list(self.prompts[row]) for row in batch] for batch in rows]


class _Worker:
    """The worker process, restarted when it dies."""

    def __init__(self, python, model, methods, prompt):
        self.python, self.source, self.name = python, *source_of(model)
        self.first = {
            "methods": [each.request(len(prompt)) for each in methods],
            "prompt": list(prompt[:WARM_UP]),
        }
        self.start()

    def start(self) -> None:
        self.baseline = Baseline(self.python, "-m", "baselines.worker")
        try:
            self.baseline.load(self.source, device="best")
            self.about = self.baseline.ask(self.first)
        except BaselineError:
            self.baseline.close()
            raise

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_) -> None:
        self.baseline.close()

    def run(
        self,
        method: Method,
        task: _Task,
        batch: int,
        chunk: int | None,
        limit: int | None,
    ) -> dict[str, Any]:
        """Runs a rehearsal of one batch under a limit, or the timed batches."""
        timed = limit is None
        asked = {
            "chunk": chunk,
            "batches": task.batches(batch)[: None if timed else 1],
            "new": task.new,
            "limit": limit,
            "retain_freed_memory": timed and method.retain_freed_memory,
        }
        try:
            done = self.baseline.ask(method.request(task.length) | asked)
        except BaselineDied as death:
            self.baseline.close()
            self.start()
            return {"out_of_memory": str(death)}
        expected = [method.kept(task.length)]
        if done.get("kept", expected) != expected:
            raise BaselineError(
                f"{method.name} kept {done['kept']} pairs, not {expected}"
            )
        return done


class _Plan(NamedTuple):
    """A way to run a method, with the batches tried so far."""

    method: Method
    chunk: int | None
    trials: list[memory.Trial]


def _plans(worker: _Worker, method: Method, task: _Task, progress) -> list[_Plan]:
    """Returns the ways to prefill that are worth timing.

    Chunks only if more rows fit than in one call.
    """
    chunks = (None,) if method.policy or task.length <= CHUNK else (None, CHUNK)
    plans = [_Plan(method, chunk, []) for chunk in chunks]
    for plan in plans:
        _search(worker, plan, task, progress)
    whole = memory.largest(plans[0].trials)
    found = [p for p in plans if memory.largest(p.trials) > (whole if p.chunk else 0)]
    if not found:
        raise UserError(_too_small(method, task, plans[-1].trials[-1]))
    return found


def _search(worker: _Worker, plan: _Plan, task: _Task, progress: Progress) -> None:
    """Tries batches until the largest that fits is found."""
    limits = task.limit, len(task.prompts)
    while batch := memory.next_batch(worker.about["weights"], plan.trials, *limits):
        progress(f"does a batch of {batch} fit?", 0)
        done = worker.run(plan.method, task, batch, plan.chunk, task.limit)
        plan.trials.append(_trial(batch, done, task.limit))


def _time(
    worker: _Worker, plan: _Plan, task: _Task, progress: Progress
) -> dict[str, Any]:
    """Times one way, at a smaller batch if memory runs out; returns its record."""
    while batch := memory.largest(plan.trials):
        progress(f"timing a batch of {batch}", 0)
        done = worker.run(plan.method, task, batch, plan.chunk, None)
        if "out_of_memory" not in done:
            return _record(worker, plan, task, done)
        plan.trials.append(memory.Trial(batch, {}, done["out_of_memory"]))
        _search(worker, plan, task, progress)
    raise UserError(_too_small(plan.method, task, plan.trials[-1]))


def _faster(ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the record of the fastest way, with the others in brief."""
    record, *others = sorted(ways, key=lambda way: -way["output_tokens_per_s"])
    brief = ("prefill_chunk", "batch_size", "output_tokens_per_s", "measured_bytes")
    record["alternatives"] = [{key: each[key] for key in brief} for each in others]
    return record


def _trial(batch: int, done: dict[str, Any], limit: int) -> memory.Trial:
    if "out_of_memory" in done:
        return memory.Trial(batch, {}, done["out_of_memory"])
    over = [phase for phase, size in done["bytes"].items() if size > limit]
    return memory.Trial(
        batch, done["bytes"], f"{over[0]} over the limit" if over else ""
    )


def _too_small(method: Method, task: _Task, trial: memory.Trial) -> str:
    needed = f", needs {trial.peak / 1e9:.3g} GB" if trial.peak else ""
    return (
        f"memory of {task.limit / 1e9:.3g} GB is too small for one prompt of "
        f"{task.length} tokens with {method.name}: {trial.why}{needed}; give more "
        "memory or a shorter prompt"
    )


def _record(
    worker: _Worker, plan: _Plan, task: _Task, done: dict[str, Any]
) -> dict[str, Any]:
    """Returns the record of one way, with `tokens` for grading."""
    method, chunk, trials = plan
    batch = memory.largest(trials)
    (fits,) = [each for each in trials if each.batch == batch and not each.why]
    limit = max(fits.bytes, key=fits.bytes.get, default="memory")
    limit = "prompts" if batch == len(task.prompts) else limit
    read, written = done["seconds"]["prefill"], done["seconds"]["decode"]
    reading, writing = statistics.median(read), statistics.median(written)
    both = statistics.median(map(sum, zip(read, written, strict=True)))
    return {
        "format": FORMAT,
        "experiment": "throughput",
        "method": method.name,
        "series": method.name,
        "engine": "kvpress" if method.policy else "transformers",
        "policy": method.policy,
        "options": dict(method.options),
        "budget": method.budget,
        "schedule": "after_prefill" if method.policy else "none",
        "batch_size": batch,
        "limited_by": limit,
        "tried_batches": [each._asdict() for each in trials],
        "prompts": len(task.prompts),
        "prompt_tokens": task.length,
        "new_tokens": task.new,
        "prefill_chunk": chunk,
        "alternatives": [],
        "prefill_seconds": reading,
        "decode_seconds": writing,
        "seconds": both,
        "prefill_seconds_all": read,
        "decode_seconds_all": written,
        "prefill_tokens_per_s": batch * task.length / reading,
        "decode_tokens_per_s": batch * task.new / writing if task.new > 1 else None,
        "output_tokens_per_s": batch * task.new / both,
        "measured_bytes": max(done["bytes"].values(), default=None),
        "memory_bytes": task.limit,
        "model": worker.name,
        "attention": "eager" if method.policy in presses.EAGER else "sdpa",
        "dtype": worker.about["dtype"],
        "device": worker.about["device"],
        "threads": worker.about["threads"],
        "provenance": {"versions": worker.baseline.versions | worker.about["versions"]},
        "tokens": done["tokens"][: len(task.prompts)],
        **dict.fromkeys(UNGRADED),
    }


def _check(methods, prompts, new_tokens, min_timed_batches) -> None:
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"methods {list(methods)}: give one or more, each once")
    for policy, budget, *_ in methods:
        if policy and policy not in presses.LABELS:
            known = ", ".join(presses.LABELS)
            raise UserError(f"policy {policy!r} has no press: use one of {known}")
        if policy and (budget or 0) < 1:
            raise UserError(f"budget {budget} of {policy}: at least 1")
    lengths = sorted(set(map(len, prompts)))
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(f"prompts of {lengths} tokens: give prompts of one length")
    for name, count in (
        ("new_tokens", new_tokens),
        ("min_timed_batches", min_timed_batches),
    ):
        if count < 1:
            raise UserError(f"{name} {count}: at least 1")
