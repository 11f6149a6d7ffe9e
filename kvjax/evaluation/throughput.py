"""Measures tokens per second of methods at one memory limit, as Batch-Max does.

Source: Metel et al. 2024, arXiv 2412.05693, section 4.1. Every method generates a fixed
number of tokens for the same prompts; end tokens do not stop it. Methods differ in
their batch, see `batch_rules`: the compiled programs show whether a batch fits, and
running it confirms it. If the device still runs out of memory, the method continues
with the next smaller batch. Prompts come from tasks, so the tokens that are timed are
also graded, up to the first end token.

`METHODS` has the paper's methods, and staggered prefill with SnapKV.
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

METHODS: dict[str, dict[str, Any]] = {  # fields of methods that a config names
    "FKV": {"batch_rule": "full"},
    "ED": {"batch_rule": "ed"},
    "Batch-Max": {"batch_rule": "batch_max", "policy": "average_attention"},
    "Batch-Max, KeyDiff": {"batch_rule": "batch_max", "policy": "key_diff"},
    "Staggered SnapKV": {"batch_rule": "staggered", "policy": "snapkv"},
}
_COMMON: dict[str, dict[str, Any]] = {  # fields that a batch rule sets
    "full": {},
    "ed": {"policy": "recency", "schedule": "decode_only", "budget": 2}
    | {"evict_size": 1},
    "batch_max": {"schedule": "prefill_and_decode"},
    "fixed": {},
    "search": {"schedule": "prefill_and_decode", "budget": None},
    "staggered": {"schedule": "after_prefill"},
}
# ED is measured first, as its batch bounds the full cache's, and `search` last, as it
# compares with the full cache's score.
_RANKS = {"ed": 0, "full": 1, "search": 2}
# Fields of a line of batches.jsonl that a method's record is computed from.
_PLACE = ("method", "max_new_tokens", "batch_size", "prefill_batch")
_OF_BATCH = "examples", "scores", "prefill_seconds", "decode_seconds", "measured_bytes"
_OF_TRIED = (  # fields that a record keeps of each |kv| that the search tried
    *("budget", "batch_size", "limited_by", "score", "num_examples"),
    *("output_tokens_per_s", "predicted_tokens_per_s"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(Experiment):
    """A throughput experiment; `configs/batch_max/smollm2_cpu.py` shows the fields.

    Attributes:
      tasks: provide the prompts; those of several tasks are interleaved.
      max_new_tokens: tokens generated per prompt; each number is measured separately.
      min_timed_batches: minimal number of timed batches, see `batch_rules.turns`.
      tolerance: for batch rule "search", how far below the full cache's score a
        method's score may be: 0.02 is two points of 100.
      budget_steps: for batch rule "search", |kv| is searched among multiples of the
        first step, then between two of them among multiples of the next; see
        `search.fewest`.
      baselines: fields of other libraries' methods, read by `experiments/baselines`. If
        there are any, prompts that hide a key are all shortened to the shortest.
    """

    experiment: str = "throughput"
    max_new_tokens: tuple[int, ...]
    min_timed_batches: int
    tolerance: float = 0.02
    budget_steps: tuple[int, ...] = (128, 64)
    baselines: tuple[dict[str, Any], ...] = ()

    @property
    def units_per_method(self) -> int:
        """Returns the number of measurements per method."""
        return len(self.max_new_tokens)

    def check(self) -> None:
        super().check()
        for task in self.tasks:
            if task.max_new_tokens:
                raise UserError(
                    f"task {task.name}: max_new_tokens {task.max_new_tokens}: in "
                    "throughput give the experiment's max_new_tokens, one number or "
                    "more"
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
    """Builds a throughput experiment from the fields of a config and overrides.

    Fields are those of `Throughput`; also `prefill_chunk`, `budget` and `codec`, the
    defaults of methods, and `num_examples` and `prompt_tokens`, the defaults of tasks.
    A method is a name in `METHODS`, or its fields; its `batch_rule` sets the fields
    that all methods of this rule share, such as ED's policy and budget. `tasks` is the
    needle by default. `config.flattened` describes the rest.

    Raises:
      UserError: a field is missing or unknown.
    """
    merged = {"tasks": ({"name": "needle"},)} | config.flattened(fields, overrides)
    if isinstance(merged.get("max_new_tokens"), int):
        merged["max_new_tokens"] = (merged["max_new_tokens"],)
    of_methods = ("prefill_chunk", "budget", "codec")
    of_tasks = ("num_examples", "prompt_tokens")
    return config.experiment(Throughput, merged, of_methods, of_tasks, _method)


def _method(fields: str | Mapping[str, Any], shared: dict[str, Any]) -> Method:
    if isinstance(fields, str):
        if fields not in METHODS:
            raise UserError(
                f"method {fields!r} is unknown: give its fields, or one of "
                + ", ".join(map(repr, METHODS))
            )
        fields = {"name": fields} | METHODS[fields]
    rule = config.as_dict(fields, "method").get("batch_rule")
    if rule not in batch_rules.BATCH_RULES:
        raise UserError(
            f"method {fields.get('name')!r}: batch_rule {rule!r} is unknown, use one "
            "of " + ", ".join(batch_rules.BATCH_RULES)
        )
    return config.method(_COMMON[rule] | dict(fields), shared)


def _check_batch_size(method: Method, prompts: int) -> None:
    """Raises UserError if a batch size is missing, not used, or too large."""
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
    """Returns one row per method and number of new tokens, ranked by `_RANKS`.

    Raises:
      UserError: a method does not fit in memory. Raised before long work starts.
    """
    experiment, model = setting.experiment, setting.model
    most = max(experiment.max_new_tokens)
    longest = mixed_of(experiment, model, most, bool(experiment.baselines))
    found = []
    if setting.baselines and len(set(longest.lengths)) > 1:
        raise UserError(
            f"baselines read prompts of one length, and those of {longest.name} "
            "differ: use another task, or leave out the baselines"
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
    """Returns the names of the fields that a line of `batches.jsonl` must have."""
    ran = not line.get("out_of_memory")
    return (*_PLACE, *(_OF_BATCH if ran else ()))


def _job(model: Model, method: Method, longest: int, new: int) -> Job:
    """Returns a method's job. It has no end token: all rows generate `new` tokens."""
    spec = checked(model.spec, method.cache, longest)
    prompt = jobs.bucket(model.spec, spec, longest, new)
    job = jobs.job_of(model, spec, prompt, new)
    return dataclasses.replace(job, batch=method.batch_size or job.batch)


class _Trial(NamedTuple):
    """The inputs of one method's measurement.

    Attributes:
      setting, samples, method: shared inputs, prompts and the method.
      least: minimal number of timed batches.
      gives_up: decides from the finished batches whether to stop before all prompts
        have run.
    """

    setting: Setting
    samples: Mixed
    method: Method
    least: int
    gives_up: Callable[[list[Record]], bool] = lambda lines: False

    def job(self, new: int) -> Job:
        return _job(self.setting.model, self.method, self.samples.longest, new)

    def check(self, new: int) -> None:
        """Raises UserError if no batch can fit; instant."""
        rule = self.method.batch_rule
        batch_rules.check(rule, self.job(new), self.setting.memory)


def _measure(
    setting: Setting, samples: Mixed, method: Method, new: int
) -> Callable[[Progress], Record]:
    """Returns the function that measures a method and returns its record.

    Raises:
      UserError: the method does not fit in memory.
    """
    experiment = setting.experiment
    trial = _Trial(setting, samples, method, experiment.min_timed_batches)
    if method.batch_rule != "search":
        trial.check(new)
        return functools.partial(_measured, trial, new)
    if not samples.graded:
        raise UserError(
            f"method {method.name!r}: batch_rule 'search' needs scores, and "
            f"{experiment.model} has no tokenizer: name a folder of real weights"
        )
    steps, spec = experiment.budget_steps, setting.model.spec
    least, most = search.bounds(method, spec, samples.longest, steps)
    trial._replace(method=search.at(method, most)).check(new)
    return functools.partial(_searched, trial, new, least, most)


def _measured(trial: _Trial, new: int, say: Progress) -> Record:
    record = _ran(trial, new, say)
    say("finished", 1)
    return record


def _ran(trial: _Trial, new: int, say: Progress) -> Record:
    """Finds a method's batch, runs it, and returns the record.

    After running out of memory, continues with the next smaller batch.
    """
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
    """Returns the record of the smallest |kv| that keeps the score, and of those tried.

    A trial runs each prompt once, and stops as soon as it can no longer reach the
    score. If no |kv| keeps the score, the record is the largest one's, and none of
    `tried` has `chosen` true.
    """
    setting, samples, method = trial[:3]
    experiment, tried = setting.experiment, {}
    full, *_ = setting.records.where(batch_rule="full", new_tokens=new)
    target = search.lowest_score(full, experiment.tolerance)

    def ran(size: int, trial: _Trial) -> Record:
        compiled.clear()  # programs of the previous size
        at = trial._replace(method=search.at(method, size))
        return _ran(at, new, lambda what, units: say(f"|kv| {size}, {what}", units))

    def hopeless(lines: list[Record]) -> bool:
        return search.best_score(samples, lines) < target

    def keeps(size: int) -> bool:
        tried[size] = ran(size, trial._replace(least=1, gives_up=hopeless))
        whole = tried[size]["num_examples"] == len(samples.rows)
        return whole and tried[size]["score"] >= target

    found = search.fewest(least, most, experiment.budget_steps, keeps)
    record = ran(found or max(tried), trial)
    by_size = [
        {key: each[key] for key in _OF_TRIED} | {"chosen": size == found}
        for size, each in sorted((tried | {record["budget"]: record}).items())
    ]
    say("finished", 1)
    return record | {"tolerance": experiment.tolerance, "tried": by_size[::-1]}


def _most(setting: Setting, method: Method, new: int, count: int) -> int:
    """Returns the limit of a batch: all prompts; for the full cache, ED's batch."""
    if method.batch_rule != "full":
        return count
    eds = setting.records.where(batch_rule="ed", new_tokens=new)
    return min((record["batch_size"] for record in eds), default=count)


def _timed(trial: _Trial, planned: Plan, say: Progress) -> list[Record] | None:
    """Runs the batches of `batch_rules.turns` and returns their lines.

    Lines of an earlier run count. No warm-up batch is dropped: the programs are already
    compiled, and a median of three or more batches is robust to a slow first one.

    Returns:
      None if the device ran out of memory.
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
    """Yields the turns that have not run; a turn may occur several times."""
    for rows in turns:
        if rows in done:
            done.remove(rows)
        else:
            yield rows


def _batch(setting: Setting, samples: Mixed, planned: Plan, rows: list[int]) -> Record:
    """Runs one batch and returns its line of `batches.jsonl`.

    Its KV state must not outlive this call: the next batch needs the memory.
    """
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
    """Returns the measured fields of a record; seconds are medians over batches."""
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
    """Returns scores of the examples that ran; `score` is the mean over tasks."""
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
    """Returns a batch's work, the devices' rates, and the share of them it reached.

    `length` is tokens per prompt; `reading` and `writing` are measured tokens per
    second of prefill and of decode, None if nothing was decoded.
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
    """Runs a baseline and returns its record, with its answers replaced by scores."""
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
