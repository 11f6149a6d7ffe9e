"""Throughput over several tasks, and the search for the smallest |kv|."""

from typing import NamedTuple

import pytest
from conftest import tiny_model
from testing.prose import HAYSTACK, make_tokenizer

from kvjax.engine import runner
from kvjax.evaluation import report, run, search, tasks
from kvjax.evaluation.config import TaskRun
from kvjax.evaluation.report import tables
from kvjax.evaluation.report.records import read_records
from kvjax.evaluation.samples import Samples, mixed
from kvjax.evaluation.tasks import base
from kvjax.evaluation.tasks.base import Encoded
from kvjax.registry import Registry
from kvjax.types import UserError

CONFIG = {
    "experiment": "throughput",
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.0012,
    "seed": 0,
    "haystack": "",
    "prefill_chunk": 16,
    "methods": ["FKV"],
    "tasks": [{"name": "count", "num_examples": 3}, {"name": "long"}],
    "num_examples": 5,
    "max_new_tokens": 4,
    "min_timed_batches": 1,
}

SOUGHT = {"name": "Batch-Max", "batch_rule": "search", "policy": "average_attention"}
SEARCH = CONFIG | {
    "methods": [SOUGHT, "FKV"],
    "tasks": [{"name": "count", "num_examples": 6}, {"name": "long"}],
    "num_examples": 6,
    "budget": 40,  # of others
    "budget_steps": [32, 16],
    "memory_gb": 0.0004,
    "min_timed_batches": 5,
}
SPEED = ("second", "_per_s", "roofline", "predicted", "measured")


class Words(NamedTuple):
    """A task with prompts of different lengths, graded by the number of words."""

    name: str
    longest: int

    def examples(self, tokenizer, count, seed):
        words = HAYSTACK.split()
        return [
            base.Example(f"{i}", " ".join(words[: self.longest - i]), ("",))
            for i in range(count)
        ]

    def grade(self, text, example):
        return {"words": len(set(text.split())) / 20}

    def task(self):
        return base.Task(self.name, self.examples, self.grade, "words", 5, "a test")


@pytest.fixture
def model(monkeypatch):
    """A model whose tokens are all words; registers two tasks."""
    tokenizer = make_tokenizer()
    found = tiny_model(vocab_size=len(tokenizer))._replace(tokenizer=tokenizer)
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: found)
    monkeypatch.setattr(tasks, "_registry", Registry("task", base.Task))
    tasks.register("count", Words("count", 20).task)
    tasks.register("long", Words("long", 60).task)
    return found


def measured(config, folder):
    return run.run(run.from_config(config, {}), folder, lambda *step: None)


def of_lengths(*lengths):
    return Samples(None, None, [], [Encoded((0,) * n, 0) for n in lengths], 1)


def test_tasks_take_turns():
    found = mixed([of_lengths(3, 4), of_lengths(9), of_lengths(5, 6, 7)])
    assert found.lengths == [3, 9, 5, 4, 6, 7]
    assert [len(tokens) for tokens in found.tokens([1, 5])] == [9, 7]
    assert (found.longest, found.mean_length) == (9, 34 / 6)


@pytest.mark.e2e
def test_several_tasks_in_one_batch(model, tmp_path):
    """Each answer is graded by its own task, with the same scores as alone."""
    (both,) = measured(CONFIG, tmp_path / "both")
    assert both["prompts"] == both["num_examples"] == 8
    told = both["tasks"]
    assert [(k, each["num_examples"]) for k, each in told.items()] == [
        ("count", 3),
        ("long", 5),
    ]
    assert both["score"] == sum(each["score"] for each in told.values()) / 2 > 0
    assert both["prompt_tokens"] > told["count"]["prompt_tokens"]
    for task in CONFIG["tasks"]:
        (alone,) = measured(CONFIG | {"tasks": [task]}, tmp_path / task["name"])
        metrics = alone["tasks"][task["name"]]["metrics"]
        assert metrics == pytest.approx(told[task["name"]]["metrics"])


@pytest.mark.parametrize(
    ("enough", "steps", "tried", "found"),
    [
        (300, (128, 64), [896, 768, 640, 512, 384, 256, 320], 320),
        (384, (128, 64), [896, 768, 640, 512, 384, 256, 320], 384),
        (0, (256, 64), [768, 512, 256, 192, 128], 128),
        (900, (128, 64), [896, 960], 960),
        (990, (128, 64), [896, 960], None),
        (500, (512, 256, 128, 64), [512, 256, 384, 448], 512),
    ],
)
def test_the_fewest_pairs_that_keep_the_score(enough, steps, tried, found):
    seen = []
    keeps = lambda size: seen.append(size) or size >= enough
    assert search.fewest(128, 999, steps, keeps) == found
    assert seen == tried


def test_what_is_missed_by_luck_ends_the_descent():
    """A smaller size that would keep the score again is not tried."""
    seen = []
    keeps = lambda size: seen.append(size) or size != 256
    assert search.fewest(64, 400, (128, 64), keeps) == 320
    assert seen == [384, 256, 320]


def test_the_best_that_may_still_come(model):
    """Examples that did not run count as right; tasks have equal weights."""
    samples = mixed([task_samples("count", 2), task_samples("long", 4)])
    assert search.best_score(samples, []) == 1
    lines = [{"examples": [0, 1], "scores": [{"words": 0.5}, {"words": 0.0}]}]
    assert search.best_score(samples, lines) == pytest.approx((0.75 + 0.75) / 2)
    rest = {"examples": [2, 3, 4, 5], "scores": [{"words": 0.25}] * 4}
    told = search.best_score(samples, [*lines, rest, *lines])
    assert told == pytest.approx(((0.5 + 0.25) / 2 + (0 + 0.75) / 4) / 2)


def task_samples(name, count):
    task = tasks.get(name)
    prompts = [Encoded((0,), 0)] * count
    run = TaskRun(name, count)
    return Samples(run, task, task.examples(None, count, 0), prompts, 1)


@pytest.fixture
def graded(model, monkeypatch):
    """Scores by |kv|: all right from 48 on, and with all pairs; else every second.

    Prompts, programs and tokens are real.
    """
    running, of_plan = [], runner.of_plan

    def watched(params, planned):
        running[:] = [planned.job.config.budget]
        return of_plan(params, planned)

    def grade(self, text, example):
        right = running[0] is None or min(running[0]) >= 48 or int(example.name) % 2
        return {"words": float(right)}

    monkeypatch.setattr(runner, "of_plan", watched)
    monkeypatch.setattr(Words, "grade", grade)


@pytest.mark.e2e
def test_search(graded, tmp_path):
    """The paper's table; runs interrupted at any step resume to the same table."""
    found, full = measured(SEARCH, tmp_path / "whole")
    assert (full["score"], full["budget"]) == (1, None)
    told = [(t["budget"], t["score"], t["chosen"]) for t in found["tried"]]
    assert [each[:2] for each in told if each[2]] == [(48, 1)]
    assert [each[0] for each in told] == [64, 48, 32]
    assert found["budget"] == 48 and found["batch_rule"] == "search"
    assert len(found["decode_seconds_all"]) >= SEARCH["min_timed_batches"]
    missed = found["tried"][-1]
    assert missed["num_examples"] < 12 and missed["score"] < 0.98
    lines = [
        (x.get("budget"), x["examples"])
        for x in read_records(tmp_path / "whole" / "batches.jsonl")
    ]
    assert len([x for x in lines if x[0] == 64]) == 12 / found["tried"][0]["batch_size"]
    stops = 0
    while True:
        try:
            again = run.run(run.from_config(SEARCH, {}), tmp_path / "b", stopping(12))
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    assert list(map(timeless, again)) == list(map(timeless, [found, full]))
    other = [
        (x.get("budget"), x["examples"])
        for x in read_records(tmp_path / "b" / "batches.jsonl")
    ]
    assert other == lines, "each once"


def stopping(steps):
    """A progress callback that interrupts the run repeatedly."""
    left = iter(range(steps))

    def step(*_):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return step


def timeless(record):
    if isinstance(record, list):
        return list(map(timeless, record))
    if not isinstance(record, dict):
        return record
    kept = {k: v for k, v in record.items() if not any(word in k for word in SPEED)}
    return {key: timeless(value) for key, value in kept.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": 2}, "tolerance 2.0: must be at most 1"),
        ({"budget_steps": []}, r"budget_steps \(\): give whole numbers in"),
        ({"budget_steps": [64, 128]}, r"budget_steps \(64, 128\): give whole"),
        ({"budget_steps": [64, 0]}, r"budget_steps \(64, 0\): give whole"),
        ({"methods": [SOUGHT]}, "'Batch-Max': batch_rule 'search' needs the full"),
        (
            {"methods": ["FKV", SOUGHT | {"budget": 64}]},
            "takes a policy, and no budget",
        ),
        ({"methods": ["FKV", SOUGHT | {"policy": None}]}, "policy None, .* takes a"),
        ({"prefill_chunk": 64}, "no .kv. to search: budget 64 must be larger than"),
        ({"budget_steps": [128]}, "no multiple of 128 is below the 73 tokens"),
    ],
)
def test_mistakes(model, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        measured(SEARCH | change, tmp_path)


def test_a_model_that_cannot_read(model, monkeypatch, tmp_path):
    bare = model._replace(tokenizer=None)
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: bare)
    with pytest.raises(UserError, match="'search' needs scores, and tiny has no tok"):
        measured(SEARCH | {"prompt_tokens": 60}, tmp_path)


TRIED = [(768, 3, 0.9, 12), (640, 4, 0.89, 12), (512, 6, 0.5, 6)]


def test_table_of_what_was_tried(tmp_path):
    """The paper's columns; the chosen row is bold, and a note explains the choice."""
    common = {
        "experiment": "throughput",
        "format": 2,
        "new_tokens": 8,
        "engine": "kvjax",
    }
    full = {"method": "FKV", "batch_rule": "full", "budget": None, "batch_size": 2}
    full |= {"score": 0.9, "num_examples": 12, "output_tokens_per_s": 5.0}
    tried = [
        {"budget": size, "batch_size": batch, "score": score, "num_examples": ran}
        | {"output_tokens_per_s": 10.0 * batch, "chosen": size == 640}
        for size, batch, score, ran in TRIED
    ]
    found = {"method": "Batch-Max", "batch_rule": "search", "tolerance": 0.02}
    found |= tried[1] | {"tried": tried}
    records = [common | full, common | found]
    rows = {tuple(row[:6]) for row in tables.search_table(records).rows}
    assert rows == {
        ("FKV", "8", "2", "all", "0.900", "12"),
        ("Batch-Max", "8", "3", "768", "0.900", "12"),
        ("Batch-Max", "8", "4", "640", "0.890", "12"),
        ("Batch-Max", "8", "6", "512", "0.500", "6"),
    }
    lines = report.overview(records).splitlines()
    (bold,) = [" ".join(line.split()) for line in lines if "**" in line]
    assert "| **Batch-Max** | **8** | **4** | **640** | **0.890** |" in bold
    page = report.write_report(records, tmp_path).read_text()
    assert "at most\n  0.02 below the full cache's" in page
    assert "was tried" not in report.write_report([common | full], tmp_path).read_text()
