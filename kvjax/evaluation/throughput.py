"""Tokens per second at one memory limit: the protocol of Batch-Max, and a new rival.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1. Every method generates a fixed
number of tokens for the same prompts, whatever ends a text. What differs is the batch,
see `batch_rules`: whether one fits is read off its compiled programs, and confirmed by
running it. A device that runs out of memory all the same sends the method one batch
back. The prompts are of tasks, so the very tokens that are timed are graded too, up to
the one that ends the text.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from kvjax.cache.spec import checked
from kvjax.engine import compiled, jobs, runner
from kvjax.engine.jobs import Job
from kvjax.engine.memory import peak_memory
from kvjax.engine.planner import Plan, out_of_memory
from kvjax.evaluation import batch_rules, config, roofline, search
from kvjax.evaluation.config import Experiment, Method
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.samples import Mixed, mixed_graded, mixed_of, summaries
from kvjax.evaluation.setting import (
    Baseline,
    Progress,
    Row,
    Setting,
    described,
    mean_probe,
)
from kvjax.types import Model, UserError

METHODS: dict[str, dict[str, Any]] = {  # that a config asks for by name
    "FKV": {"batch_rule": "full"},
    "ED": {"batch_rule": "ed"},
    "Batch-Max": {"batch_rule": "batch_max", "policy": "average_attention"},
    "Batch-Max, KeyDiff": {"batch_rule": "batch_max", "policy": "key_diff"},
    "Staggered SnapKV": {"batch_rule": "staggered", "policy": "snapkv"},
}
_COMMON: dict[str, dict[str, Any]] = {
    "full": {},
    "ed": {
        "policy": "recency",
        "schedule": "decode_only",
        "budget": 2,
        "evict_size": 1,
    },
    "batch_max": {"schedule": "prefill_and_decode"},
    "fixed": {},
    "search": {"schedule": "prefill_and_decode", "budget": None},
    "staggered": {"schedule": "after_prefill"},
}
# Which is measured first: ED's batch bounds the full cache's, whose score is sought.
_RANKS = {"ed": 0, "full": 1, "search": 2}
# What a line of batches.jsonl holds that a method's record is made of.
_PLACE = ("method", "max_new_tokens", "batch_size", "prefill_batch")
_OF_BATCH = (
    "examples",
    "scores",
    "prefill_seconds",
    "decode_seconds",
    "measured_bytes",
)
_OF_TRIED = (  # of the record of a |kv| that was tried, for that of the method
    "budget",
    "batch_size",
    "limited_by",
    "score",
    "num_examples",
    "output_tokens_per_s",
    "predicted_tokens_per_s",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(Experiment):
    """See `configs/batch_max/smollm2_cpu.py` for the fields.

    Attributes:
      tasks: whose prompts every method works through, those of several by turns.
      max_new_tokens: generated per prompt; each number is a measurement of its own.
      min_timed_batches: batches that are timed, at least; see `batch_rules.turns`.
      tolerance: how far below the full cache's the score may be of methods whose |kv|
        is sought (`batch_rule` "search"): 0.02 is two points of 100.
      budget_steps: |kv| is sought among the multiples of the first, then between two
        of these among the multiples of the next; see `search.fewest`.
      baselines: fields of other libraries' methods, for whoever can run them. Where
        there are any, prompts that hide something are all made as long as the shortest.
    """

    experiment: str = "throughput"
    max_new_tokens: tuple[int, ...]
    min_timed_batches: int
    tolerance: float = 0.02
    budget_steps: tuple[int, ...] = (128, 64)
    baselines: tuple[dict[str, Any], ...] = ()

    @property
    def units_per_method(self) -> int:
        """Measurements."""
        return len(self.max_new_tokens)

    def check(self) -> None:
        super().check()
        for task in self.tasks:
            if task.max_new_tokens:
                raise UserError(
                    f"task {task.name}: max_new_tokens {task.max_new_tokens} of its "
                    "own: in throughput give the experiment's, one number or more"
                )
        if not self.max_new_tokens:
            raise UserError("max_new_tokens is empty: give one number or more")
        config.at_least(1, min_timed_batches=self.min_timed_batches)
        for new in self.max_new_tokens:
            config.at_least(1, max_new_tokens=new)
        for method in self.methods:
            _check_batch_size(method, sum(t.num_examples for t in self.tasks))
        search.check(self.methods, self.tolerance, self.budget_steps)

    def _place(self, method: config.Method) -> tuple:
        place = super()._place(method)
        return *place, method.batch_rule, method.batch_size


def from_config(fields: config.Fields, overrides: config.Fields) -> Throughput:
    """The experiment that a config's fields describe.

    Args:
      fields: of `Throughput`; `prefill_chunk`, `budget` and `codec` for the methods,
        `num_examples` and `prompt_tokens` for the task, that do not set their own. A
        method is a name of `METHODS`, or fields; its `batch_rule` also sets what all
        its methods have in common, such as ED's policy and budget. Without `tasks` it
        is the needle. See `config.flattened` for what else.
      overrides: fields to replace where the value is not None.

    Raises:
      UserError: a field that is missing or unknown.
    """
    given = config.flattened(fields, overrides)
    of_methods = config.taken(given, ("prefill_chunk", "budget", "codec"))
    of_tasks = config.taken(given, ("num_examples", "prompt_tokens"))
    asked = config.each_of(given, "tasks", ({"name": "needle"},))
    given["tasks"] = tuple(config.task(each, of_tasks) for each in asked)
    given["methods"] = tuple(
        _method(each, of_methods) for each in config.each_of(given, "methods")
    )
    if isinstance(given.get("max_new_tokens"), int):
        given["max_new_tokens"] = (given["max_new_tokens"],)
    return config.build(Throughput, given, "config")


def _method(asked: str | Mapping[str, Any], shared: dict[str, Any]) -> Method:
    if isinstance(asked, str):
        if asked not in METHODS:
            raise UserError(
                f"method {asked!r} is unknown: give its fields, or one of "
                + ", ".join(map(repr, METHODS))
            )
        asked = {"name": asked} | METHODS[asked]
    rule = config.as_dict(asked, "method").get("batch_rule")
    if rule not in batch_rules.BATCH_RULES:
        raise UserError(
            f"method {asked.get('name')!r}: batch_rule {rule!r} is unknown, use one of "
            + ", ".join(batch_rules.BATCH_RULES)
        )
    return config.method(_COMMON[rule] | dict(asked), shared)


def _check_batch_size(method: Method, prompts: int) -> None:
    """Raises UserError for a batch size that is missing, unasked for or too large."""
    size = method.batch_size
    if size is not None:
        config.at_least(1, batch_size=size)
    if (size is None) == (method.batch_rule == "fixed"):
        raise UserError(
            f"method {method.name!r}: batch_rule {method.batch_rule!r} with batch_size "
            f"{size}: 'fixed' takes one, and no other rule does"
        )
    if size is not None and size > prompts:
        raise UserError(
            f"method {method.name!r}: batch_size {size} exceeds the {prompts} prompts: "
            "lower it, or raise num_examples"
        )


def rows(setting: Setting) -> list[Row]:
    """One per method and number of new tokens, in the order of `_RANKS`.

    Raises:
      UserError: what does not fit, before long work.
    """
    experiment, model = setting.experiment, setting.model
    most = max(experiment.max_new_tokens)
    longest = mixed_of(experiment, model, most, bool(experiment.baselines))
    found = []
    if setting.baselines and len(set(longest.lengths)) > 1:
        raise UserError(
            f"baselines read prompts of one length, and those of {longest.name} "
            "differ: take another task, or do without baselines"
        )
    for place, new in enumerate(experiment.max_new_tokens):
        samples = longest.answered_in(new)
        for method in experiment.methods:
            measure = _measure(setting, samples, method, new)
            rank = len(_RANKS) * place + _RANKS.get(method.batch_rule, 1)
            found.append(Row(method.name, new, 1, measure, rank))
        for name, baseline in setting.baselines.items():
            measure = functools.partial(_baseline, setting, samples, baseline, new)
            found.append(Row(name, new, 1, measure, len(_RANKS) * place + 1))
    return found


def needed(line: Record) -> tuple[str, ...]:
    """The fields of a line of `batches.jsonl`."""
    ran = not line.get("out_of_memory")
    return (*_PLACE, *(_OF_BATCH if ran else ()))


def _job(model: Model, method: Method, longest: int, new: int) -> Job:
    """Without an end token: all rows generate `new` tokens."""
    kept = checked(model.spec, method.cache, longest)
    prompt = jobs.bucket(model.spec, kept, longest, new)
    job = jobs.job_of(model, kept, prompt, new)
    return dataclasses.replace(job, batch=method.batch_size or job.batch)


class _Trial(NamedTuple):
    """A method at work.

    Attributes:
      setting, samples, method: who works, and on what.
      least: batches that are timed, at least.
      gives_up: whether batches tell enough before all prompts were run.
    """

    setting: Setting
    samples: Mixed
    method: Method
    least: int
    gives_up: Callable[[list[Record]], bool] = lambda lines: False

    def job(self, new: int) -> Job:
        return _job(self.setting.model, self.method, self.samples.longest, new)

    def check(self, new: int) -> None:
        """Raises UserError where no batch can be found; instant."""
        rule = self.method.batch_rule
        batch_rules.check(rule, self.job(new), self.setting.memory)


def _measure(
    setting: Setting, samples: Mixed, method: Method, new: int
) -> Callable[[Progress], Record]:
    """What makes a method's record.

    Raises:
      UserError: what does not fit, before long work.
    """
    asked = setting.experiment
    trial = _Trial(setting, samples, method, asked.min_timed_batches)
    if method.batch_rule != "search":
        trial.check(new)
        return functools.partial(_measured, trial, new)
    if not samples.graded:
        raise UserError(
            f"method {method.name!r}: batch_rule 'search' needs scores, and "
            f"{asked.model} cannot read: name a folder of real weights"
        )
    steps, spec = asked.budget_steps, setting.model.spec
    least, most = search.bounds(method, spec, samples.longest, steps)
    trial._replace(method=search.at(method, most)).check(new)
    return functools.partial(_searched, trial, new, least, most)


def _measured(trial: _Trial, new: int, say: Progress) -> Record:
    record = _ran(trial, new, say)
    say("finished", 1)
    return record


def _ran(trial: _Trial, new: int, say: Progress) -> Record:
    """One method's record: its batch found, run, and stepped back from if need be."""
    setting, samples, method = trial[:3]
    rule, count, stepped_back = method.batch_rule, len(samples.rows), []
    most = _most(setting, method, new, count)
    job, memory = trial.job(new), setting.memory
    planned = batch_rules.find_batch(rule, job, memory, count, most, say)
    while (batches := _timed(trial, planned, say)) is None:
        stepped_back.append(planned.batch)
        planned = batch_rules.step_back(rule, planned, count, say)
    return {
        **described(method, planned),
        "stepped_back": stepped_back,
        **_figures(setting, samples, planned, batches),
    }


def _searched(trial: _Trial, new: int, least: int, most: int, say: Progress) -> Record:
    """The record of the smallest |kv| that does, and what all that were tried came to.

    Of those, prompts run once, and no further than they may still do. Where none does,
    the largest stands, and `chosen` of none is true.
    """
    setting, samples, method = trial[:3]
    asked, tried = setting.experiment, {}
    full, *_ = setting.records.where(batch_rule="full", new_tokens=new)
    wanted = search.lowest_score(full, asked.tolerance)

    def ran(size: int, trial: _Trial) -> Record:
        compiled.clear()  # of the last one
        at = trial._replace(method=search.at(method, size))
        return _ran(at, new, lambda what, units: say(f"|kv| {size}, {what}", units))

    def hopeless(lines: list[Record]) -> bool:
        return search.best_score(samples, lines) < wanted

    def keeps(size: int) -> bool:
        tried[size] = ran(size, trial._replace(least=1, gives_up=hopeless))
        whole = tried[size]["num_examples"] == len(samples.rows)
        return whole and tried[size]["score"] >= wanted

    found = search.fewest(least, most, asked.budget_steps, keeps)
    record = ran(found or max(tried), trial)
    told = [
        {key: each[key] for key in _OF_TRIED} | {"chosen": size == found}
        for size, each in sorted((tried | {record["budget"]: record}).items())
    ]
    say("finished", 1)
    return record | {"tolerance": asked.tolerance, "tried": told[::-1]}


def _most(setting: Setting, method: Method, new: int, count: int) -> int:
    """Prompts there are; for the full cache, ED's batch where ED is measured too."""
    if method.batch_rule != "full":
        return count
    eds = setting.records.where(batch_rule="ed", new_tokens=new)
    return min((record["batch_size"] for record in eds), default=count)


def _timed(trial: _Trial, planned: Plan, say: Progress) -> list[Record] | None:
    """The lines of its batches, see `batch_rules.turns`; None where memory ran out.

    None is thrown away: programs are compiled by then, and medians of three or more
    forgive the first. Those of an earlier run count.
    """
    setting, samples, method = trial[:3]
    place = {
        "method": method.name,
        "max_new_tokens": planned.job.max_new_tokens,
        "batch_size": planned.batch,
        "prefill_batch": planned.prefill_groups[0],
    }
    if method.batch_rule == "search":  # one name for many
        place["budget"] = method.budget
    if setting.batches.where(**place, out_of_memory=True):
        return None
    turns = batch_rules.turns(len(samples.rows), planned.batch, trial.least)
    done = setting.batches.where(**place)
    for rows in _left(turns, [line["examples"] for line in done]):
        if trial.gives_up(done):
            break
        say(f"{planned.batch} prompts at once", 0)
        try:
            setting.batches.add(place | _batch(setting, samples, planned, rows))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            setting.batches.add(place | {"out_of_memory": True})
            return None
        done = setting.batches.where(**place)
    return done


def _left(turns: list[list[int]], done: list[list[int]]) -> Iterator[list[int]]:
    """The turns that are not done, whichever these are; some come more than once."""
    for rows in turns:
        if rows in done:
            done.remove(rows)
        else:
            yield rows


def _batch(setting: Setting, samples: Mixed, planned: Plan, rows: list[int]) -> Record:
    """The line of one batch; its state is gone by then: the next one needs the room."""
    model, prompts = setting.model, samples.tokens(rows)
    probed = roofline.probed(planned.job.dtype)
    peak = peak_memory(planned.weights_bytes, planned.host_bytes)
    with probed as probe, peak as measured:
        chosen = runner.of_plan(model.params, planned)
        result = runner.run_batch(chosen, prompts, rows, setting.experiment.seed)
    return {
        "task": samples.name,
        "examples": rows,
        **mixed_graded(samples, model, rows, result.tokens),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(map(len, result.tokens)),
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "measured_bytes": measured[0] if measured else None,
        **probe,
    }


def _figures(
    setting: Setting, samples: Mixed, planned: Plan, batches: list[Record]
) -> Record:
    """What the batches come to; seconds are their medians."""
    new, length = planned.job.max_new_tokens, samples.mean_length
    read, written = planned.batch * length, planned.batch * new
    reading = [batch["prefill_seconds"] for batch in batches]
    writing = [batch["decode_seconds"] for batch in batches]
    prefill, decode = statistics.median(reading), statistics.median(writing)
    both = statistics.median(map(sum, zip(reading, writing, strict=True)))
    speed = read / prefill, written / decode if new > 1 else None
    measured = [b["measured_bytes"] for b in batches if b["measured_bytes"]]
    return {
        **_scores(samples, batches),
        "prompts": len(samples.rows),
        "prompt_tokens": samples.longest,
        "new_tokens": new,
        "max_new_tokens": new,
        "prefill_seconds": prefill,
        "decode_seconds": decode,
        "seconds": both,
        "prefill_seconds_all": reading,
        "decode_seconds_all": writing,
        "prefill_tokens_per_s": speed[0],
        "decode_tokens_per_s": speed[1],
        "output_tokens_per_s": written / both,
        **mean_probe(batches),
        "measured_bytes": max(measured, default=None),
        **_roofline(setting.experiment.dtype, planned, round(length), *speed),
    }


def _scores(samples: Mixed, batches: list[Record]) -> Record:
    """Of the examples that ran: the mean over tasks, as quality has it."""
    found = summaries(samples, batches)
    scores = [each["score"] for each in found.values()]
    return {
        "tasks": found or None,
        "score": sum(scores) / len(scores) if scores else None,
        "num_examples": sum(each["num_examples"] for each in found.values()),
    }


def _roofline(
    dtype: str, planned: Plan, length: int, reading: float, writing: float | None
) -> Record:
    """What a full batch has to do, what the devices could, and the share reached.

    Args:
      dtype: of the run.
      planned: the batch.
      length: of its prompts, in tokens.
      reading, writing: tokens per second that were measured; None, nothing was decoded.
    """
    devices = planned.job.mesh.size if planned.job.mesh else 1
    rates = roofline.measured_rates(dtype)
    rates = roofline.Rates(*(devices * rate for rate in rates))
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
        "decode_roofline": writing and writing / best.decode_tokens_per_s,
        **{f"predicted_{key}": value for key, value in best._asdict().items()},
    }


def _baseline(
    setting: Setting, samples: Mixed, measure: Baseline, new: int, say: Progress
) -> Record:
    """A baseline's record, with what its answers are worth in their place."""
    prompts = samples.tokens(range(len(samples.rows)))
    least = setting.experiment.min_timed_batches
    with roofline.probed(setting.experiment.dtype) as probe:
        record = measure(prompts, new, setting.memory, least, say)
    record |= probe
    answers = record.pop("tokens", None)
    if answers is not None and samples.graded:
        rows = range(len(answers))
        line = {"examples": rows, **mixed_graded(samples, setting.model, rows, answers)}
        record |= _scores(samples, [line])
    say("finished", 1)
    return record
