"""Throughput over several tasks, and the search for the fewest pairs that do."""

from typing import NamedTuple

import pytest
from conftest import tiny_model
from testing.prose import HAYSTACK, make_tokenizer

from kvjax.evaluation import run, tasks
from kvjax.evaluation.samples import Samples, mixed
from kvjax.evaluation.tasks import base
from kvjax.evaluation.tasks.base import Encoded
from kvjax.registry import Registry

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


class Words(NamedTuple):
    """A task whose prompts differ in length, and whose grade counts words."""

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
    """All of whose tokens are words; two tasks are there to be asked."""
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
    """Graded each by its own task, to the scores that each has alone."""
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
        assert alone["tasks"][task["name"]]["metrics"] == told[task["name"]]["metrics"]
