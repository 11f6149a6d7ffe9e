"""Tokens per second at one memory limit: the protocol of Batch-Max, and a new rival.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1. Every method generates a fixed
number of tokens for the same prompts, whatever ends a text. What differs is the batch::

    ed          b0 - 1, where b0 is the smallest batch at which ED (full prefill, then
                the newest pair only) no longer fits
    full        the same, or the largest that fits if that is less
    batch_max   the largest of D that fits, see `batch_rules.divisors`
    staggered   the largest pool, then the largest groups, see `kvjax.engine.staggered`

Whether a batch fits is read off its compiled programs, and confirmed by running it: a
device that runs out of memory all the same sends the method one batch back. Prompts are
pass-key prompts, so the very tokens that are timed are graded too.

Everything finished is written down at once::

    WORKDIR/experiment.json   what was asked; another question wants another folder
    WORKDIR/records.jsonl     one line per method and number of new tokens
"""

import dataclasses
import functools
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.engine import compiled, staggered
from kvjax.engine.compiled import Job
from kvjax.engine.planner import Plan, check_one_row, device_memory, out_of_memory
from kvjax.evaluation import batch_rules, roofline
from kvjax.evaluation.config import Method, build, flattened, opened, with_options
from kvjax.evaluation.report.records import Record, append_record, made_by, read_records
from kvjax.evaluation.tasks import needle, text
from kvjax.models.weights import load
from kvjax.types import Model, UserError

Progress = Callable[[str, int], None]  # what runs now, and units of work just finished
Peer = Callable[..., Record]

METHODS: dict[str, dict[str, Any]] = {  # that a config asks for by name
    "FKV": {"protocol": "full"},
    "ED": {"protocol": "ed"},
    "Batch-Max": {"protocol": "batch_max", "policy": "average_attention"},
    "Batch-Max, KeyDiff": {"protocol": "batch_max", "policy": "key_diff"},
    "Staggered SnapKV": {"protocol": "staggered", "policy": "snapkv"},
}
_COMMON: dict[str, dict[str, Any]] = {
    "full": {},
    "ed": {"policy": "recency", "phases": "decode_only", "budget": 2, "evict_size": 1},
    "batch_max": {"phases": "prefill_and_decode"},
    "staggered": {"phases": "after_prefill"},
}


@dataclasses.dataclass(frozen=True)
class Entry(Method):
    """A row of the table; `protocol` says how its batch is found."""

    protocol: str = "full"


@dataclasses.dataclass(frozen=True)
class Throughput:
    """All that a run depends on; see `configs/batch_max/smollm2_cpu.py`.

    Attributes:
      prompts: how many; every method works through all of them.
      prompt_tokens: the most that a prompt has.
      depths: where the pass key stands, in turn.
      max_new_tokens: generated per prompt; each number is a measurement of its own.
      repeats: batches that are timed, at least; see `batch_rules.turns`.
    """

    model: str
    dtype: str
    memory_gb: float | None
    seed: int
    haystack: str | None
    methods: tuple[Entry, ...]
    prompts: int
    prompt_tokens: int
    depths: tuple[float, ...]
    max_new_tokens: tuple[int, ...]
    repeats: int

    @property
    def units(self) -> int:
        """Of work that progress is counted in: measurements."""
        return len(self.methods) * len(self.max_new_tokens)


class Prompts(NamedTuple):
    """Token ids, and what a completion is worth; None where nobody can tell."""

    tokens: list[Sequence[int]]
    grade: Callable[[int, list[int]], float] | None


def from_config(config: dict[str, Any], overrides: dict[str, Any]) -> Throughput:
    """The experiment that a config's fields describe.

    Args:
      config: fields of `Throughput`, and `prefill_chunk` and `budget` for the methods that do
        not set their own. A method is a name of `METHODS`, or fields; its `protocol`
        also sets what all its methods have in common, such as ED's policy and budget.
        A `memory_gb` of 0 is the device's limit; an empty `haystack` is the default
        text.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    given = flattened(config, overrides)
    given.pop("peers", None)  # other engines are the caller's, see `run`
    shared = {
        key: given.pop(key) for key in ("prefill_chunk", "budget") if key in given
    }
    methods = tuple(_entry(each, shared) for each in given.pop("methods", ()))
    return build(Throughput, given | {"methods": methods}, "config")


def _entry(asked: str | Mapping[str, Any], shared: dict[str, Any]) -> Entry:
    if isinstance(asked, str):
        if asked not in METHODS:
            raise UserError(
                f"method {asked!r} is unknown: give its fields, or one of "
                + ", ".join(map(repr, METHODS))
            )
        asked = {"name": asked} | METHODS[asked]
    fields = dict(asked)
    protocol = fields.get("protocol")
    if protocol not in batch_rules.PROTOCOLS:
        raise UserError(
            f"method {fields.get('name')!r}: protocol {protocol!r} is unknown, use one "
            f"of {', '.join(batch_rules.PROTOCOLS)}"
        )
    if protocol == "full":
        shared = {key: v for key, v in shared.items() if key != "budget"}
    fields = shared | _COMMON[protocol] | fields
    return with_options(Entry, fields, f"method {fields.get('name')!r}")


def run(
    experiment: Throughput,
    workdir: str | os.PathLike,
    progress: Progress,
    peers: Mapping[str, Peer] | None = None,
) -> list[Record]:
    """Measures what is not yet in `workdir`; one record per method and new tokens.

    Args:
      experiment: what to measure.
      workdir: where records go, and are found again.
      progress: told what runs.
      peers: methods of other engines by the name in their records, each called with
        `(prompts, new_tokens, memory_bytes, repeats, progress)` for a record in our
        format: the same prompts, as token ids, in the same memory; `progress` counts
        nothing. If the record has `tokens`, the answers, they are graded and taken out.

    Raises:
      UserError: anything that does not fit, before long work starts.
    """
    peers = peers or {}
    _check(experiment, peers)
    workdir = opened(experiment, pathlib.Path(workdir))
    compiled.keep_compiled()
    progress(f"loading {experiment.model}", 0)
    model = load(experiment.model, experiment.dtype)
    memory = device_memory(experiment.memory_gb)
    for new in experiment.max_new_tokens:
        for entry in experiment.methods:
            check_one_row(_job(experiment, model, entry, new), memory)
    setting = _Setting(experiment, model, _prompts(experiment, model), memory)
    path = workdir / "records.jsonl"
    for new in experiment.max_new_tokens:
        for entry in sorted(experiment.methods, key=lambda each: each.protocol != "ed"):
            done = _named(path, new)
            if entry.name not in done:
                say = functools.partial(_say, progress, f"{entry.name}, {new} new")
                most = _most(setting, entry, done)
                append_record(path, _measured(setting, entry, new, most, say))
                _forget()
            progress(entry.name, 1)
        for name, measure in peers.items():
            if name not in _named(path, new):
                asked = setting.prompts.tokens, new, memory, experiment.repeats
                record = _graded(setting.prompts, measure(*asked, progress))
                append_record(path, made_by() | {"seed": experiment.seed} | record)
            progress(name, 1)
    found = [_named(path, new) for new in experiment.max_new_tokens]
    names = [*(entry.name for entry in experiment.methods), *peers]
    return [records[name] for records in found for name in names]


class _Setting(NamedTuple):
    """What all measurements of a run share."""

    experiment: Throughput
    model: Model
    prompts: Prompts
    memory: int


def _measured(
    setting: _Setting, entry: Entry, new: int, most: int, say: Progress
) -> Record:
    """One method's record: its batch found, run, and stepped back from if need be."""
    experiment, model, prompts, memory = setting
    job = _job(experiment, model, entry, new)
    count, stepped_back = len(prompts.tokens), []
    say("planning and compiling", 0)
    planned = batch_rules.find_batch(entry.protocol, job, memory, count, most)
    while True:
        say(f"{planned.batch} prompts at once", 0)
        run_batch = functools.partial(
            batch_rules.run_planned, model.params, planned, experiment.seed
        )
        try:
            timing = batch_rules.time_prompts(
                run_batch, planned, prompts.tokens, experiment.repeats
            )
            return _record(setting, entry, planned, timing, stepped_back)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            stepped_back.append(planned.batch)
        planned = batch_rules.step_back(entry.protocol, planned, count)


def _graded(prompts: Prompts, record: Record) -> Record:
    """A peer's record, with what its answers are worth in the place of the answers."""
    answers = record.pop("tokens", None)
    if answers is None or prompts.grade is None:
        return record
    grades = [prompts.grade(*each) for each in enumerate(answers)]
    return record | {"accuracy": statistics.fmean(grades), "examples": len(grades)}


def _record(
    setting: _Setting,
    entry: Entry,
    planned: Plan,
    timing: batch_rules.Timing,
    stepped_back: list[int],
) -> Record:
    """The line of one measurement; seconds are the medians of its batches."""
    experiment, prompts = setting.experiment, setting.prompts
    config, new = planned.job.config, planned.job.max_new_tokens
    length = max(map(len, prompts.tokens))
    read, written = planned.batch * length, planned.batch * new
    prefill, decode = map(statistics.median, (timing.prefill, timing.decode))
    both = statistics.median(map(sum, zip(timing.prefill, timing.decode, strict=True)))
    speed = read / prefill, written / decode
    grade = prompts.grade
    grades = [grade(*each) for each in enumerate(timing.tokens)] if grade else []
    return {
        "kind": "throughput",
        "method": entry.name,
        "label": entry.label or entry.name,
        "engine": "kvjax",
        "policy": config.policy.name if config.policy else None,
        "schedule": config.schedule.phases,
        "budget": entry.budget,
        "role": entry.protocol,
        "batch": planned.batch,
        "group": planned.prefill_groups[0],
        "batch_limit": planned.limited_by,
        "stepped_back": stepped_back,
        "prompts": len(prompts.tokens),
        "prompt_tokens": length,
        "new_tokens": new,
        "max_new_tokens": new,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "seconds": both,
        "prefill_seconds_all": timing.prefill,
        "decode_seconds_all": timing.decode,
        "prefill_tokens_per_s": speed[0],
        "decode_tokens_per_s": speed[1],
        "tokens_per_s": written / both,
        "accuracy": statistics.fmean(grades) if grades else None,
        "examples": len(grades),
        "kv_bytes_per_row": planned.row_bytes,
        "planned_bytes": planned.peak_bytes,
        "measured_bytes": timing.measured_bytes,
        "memory_bytes": planned.memory_bytes,
        **_roofline(experiment.dtype, planned, length, *speed),
        "seed": experiment.seed,
        "model": experiment.model,
        "device": jax.devices()[0].device_kind,
        **made_by(),
    }


def _roofline(
    dtype: str, planned: Plan, length: int, reading: float, writing: float
) -> Record:
    """What a full batch has to do, what the device could, and the share reached.

    Args:
      dtype: of the run.
      planned: the batch.
      length: of its prompts, in tokens.
      reading, writing: tokens per second that were measured.
    """
    rates = roofline.measured_rates(dtype)
    best = roofline.predict(planned, rates, length)
    steps = {
        "prefill": roofline.prefill(planned, length),
        "decode": roofline.decode(planned, length),
    }
    work = {phase: roofline.total(each) for phase, each in steps.items()}
    return {
        **{f"{phase}_bytes": each.bytes for phase, each in work.items()},
        **{f"{phase}_flops": each.flops for phase, each in work.items()},
        "copy_bytes_per_s": rates.bytes_per_s,
        "matrix_flops_per_s": rates.flops_per_s,
        "prefill_roofline": reading / best.prefill_tokens_per_s,
        "decode_roofline": writing / best.decode_tokens_per_s,
        **{f"predicted_{key}": value for key, value in best._asdict().items()},
    }


def _most(setting: _Setting, entry: Entry, done: dict[str, Record]) -> int:
    """Prompts there are; for the full cache, ED's batch where ED is measured too.

    ED goes first, so that its record, steps back included, is there by then.
    """
    count = len(setting.prompts.tokens)
    if entry.protocol != "full":
        return count
    eds = [each for each in setting.experiment.methods if each.protocol == "ed"]
    return min((done[each.name]["batch"] for each in eds), default=count)


def _prompts(experiment: Throughput, model: Model) -> Prompts:
    """Pass-key prompts; random tokens for a model without a tokenizer."""
    count, length = experiment.prompts, experiment.prompt_tokens
    if model.tokenizer is None:
        rng = np.random.default_rng(experiment.seed)
        drawn = rng.integers(model.spec.vocab_size, size=(count, length))
        return Prompts(drawn.tolist(), None)
    examples = needle.examples(
        model.tokenizer,
        count,
        length,
        experiment.depths,
        experiment.seed,
        text.haystack(experiment.haystack),
    )

    def grade(index, tokens):
        return needle.grade(examples[index], model.tokenizer.decode(tokens))

    return Prompts(_equal(examples), grade)


def _equal(examples: Sequence[needle.Example]) -> list[Sequence[int]]:
    """All as long as the shortest: a few tokens go from the text, far from the key.

    Engines that pad are not to pay for padding.
    """
    least = min(len(example.tokens) for example in examples)

    def shortened(example):
        cut = least // 4 if example.depth >= 0.5 else 3 * least // 4
        rest = cut + len(example.tokens) - least
        return [*example.tokens[:cut], *example.tokens[rest:]]

    return list(map(shortened, examples))


def _job(experiment: Throughput, model: Model, entry: Entry, new: int) -> Job:
    """Without an end token: all rows generate `new` tokens."""
    config = entry.compression(model.spec)
    prompt = compiled.bucket(model.spec, config, experiment.prompt_tokens, new)
    return compiled.job_of(model, config, prompt, new)


def _check(experiment: Throughput, peers: Mapping[str, Peer]) -> None:
    """All that can be told wrong before the model is loaded."""
    names = [*(entry.name for entry in experiment.methods), *peers]
    if not experiment.methods or len(set(names)) < len(names):
        raise UserError(f"methods {names}: give one or more, with different names")
    if not experiment.max_new_tokens:
        raise UserError("max_new_tokens is empty: give one number or more")
    if experiment.seed < 0:
        raise UserError(f"seed {experiment.seed}: 0 or more")
    sizes = {"prompts": experiment.prompts, "repeats": experiment.repeats}
    sizes |= {"prompt_tokens": experiment.prompt_tokens}
    for field, value in [
        *sizes.items(),
        *(("max_new_tokens", new) for new in experiment.max_new_tokens),
    ]:
        if value < 1:
            raise UserError(f"{field} {value}: at least 1")
    device_memory(experiment.memory_gb)
    for entry in experiment.methods:
        entry.check()


def _named(path: pathlib.Path, new: int) -> dict[str, Record]:
    """The finished records of one number of new tokens, by their methods."""
    records = read_records(path)
    return {r["method"]: r for r in records if r["new_tokens"] == new}


def _say(progress: Progress, name: str, what: str, units: int) -> None:
    progress(f"{name}: {what}", units)


def _forget() -> None:
    """Compiled programs go: those of many methods exhaust a process's memory maps."""
    compiled.programs.cache_clear()
    staggered.compile_programs.cache_clear()
    jax.clear_caches()
