"""Batch-Max's protocol on a tiny model: batches, timing, stepping back, resuming."""

import dataclasses
import json
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import tiny_model
from testing.prose import HAYSTACK, make_tokenizer

from kvjax.engine import runner, tokenization
from kvjax.engine.footprint import phase_bytes
from kvjax.evaluation import batch_rules, roofline, run, tasks, throughput
from kvjax.evaluation.batch_rules import (
    divisors,
    find_batch,
    step_back,
    turns,
)
from kvjax.evaluation.report.records import read_records
from kvjax.evaluation.tasks import base
from kvjax.models import placement
from kvjax.parallel import meshes
from kvjax.registry import Registry
from kvjax.types import UserError

pytestmark = pytest.mark.e2e

MEMORY = 1_200_000
CONFIG = {
    "experiment": "throughput",
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.0012,
    "seed": 0,
    "haystack": "",
    "budget": 48,
    "prefill_chunk": 16,
    "methods": [
        {"name": "FKV", "batch_rule": "full"},
        {"name": "ED", "batch_rule": "ed"},
        {
            "name": "SnapKV",
            "batch_rule": "staggered",
            "policy": "snapkv",
            "options": {"window": 8},
        },
        {"name": "Batch-Max", "batch_rule": "batch_max", "policy": "key_diff"},
    ],
    "num_examples": 12,
    "prompt_tokens": 100,
    "tasks": [{"name": "needle", "options": {"depths": [0.2, 0.8]}}],
    "max_new_tokens": [3, 6],
    "min_timed_batches": 2,
}
FIXED = {"name": "x", "batch_rule": "fixed"}
SPEED = ("second", "_per_s", "measured", "roofline", "predicted", "probe")


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())


@pytest.fixture
def experiment(tmp_path, monkeypatch, model):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    return run.from_config(CONFIG, {"haystack": str(tmp_path / "texts")})


def job_of(experiment, model, place, new=6):
    return throughput._job(model, experiment.methods[place], 100, new)


def exhausted():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes too many")


def without_speed(records):
    return [
        {k: r[k] for k in r if not any(word in k for word in SPEED)} for r in records
    ]


def test_divisors():
    assert [divisors(n) for n in (6, 13, 1)] == [[1, 2, 3, 6], [1, 13], [1]]


def test_batches_of_the_protocol(experiment, model):
    """By the compiled programs' bytes, b0 is the first batch that does not fit."""
    ed = find_batch("ed", job_of(experiment, model, 1), MEMORY, 12, 12)
    assert 1 < ed.batch < 12 and ed.limited_by != "prompts"
    b0 = dataclasses.replace(ed.job, batch=ed.batch + 1)
    assert max(phase_bytes(ed.job).values()) <= MEMORY < max(phase_bytes(b0).values())
    full = find_batch("full", job_of(experiment, model, 0), MEMORY, 12, ed.batch)
    assert full.batch <= ed.batch
    job = job_of(experiment, model, 3)
    found = find_batch("batch_max", job, MEMORY, 30, 30)
    assert found.batch in divisors(30) and found.batch > ed.batch
    assert found.peak_bytes == max(phase_bytes(found.job).values()) <= MEMORY
    size = divisors(30)[divisors(30).index(found.batch) + 1]
    assert max(phase_bytes(dataclasses.replace(job, batch=size)).values()) > MEMORY
    pool = find_batch("staggered", job_of(experiment, model, 2), MEMORY, 12, 12)
    assert pool.batch > ed.batch and pool.prefill_groups[0] < pool.batch


def test_a_divisor_only(experiment, model):
    """13 has only the divisors 1 and 13; with at most 12 rows the batch is 1."""
    job = job_of(experiment, model, 3)
    assert find_batch("batch_max", job, MEMORY, 13, 12).batch == 1


def test_a_fixed_batch(experiment, model):
    """The batch is the fixed one, or an error says what does not fit."""
    fields = FIXED | {"policy": "key_diff", "batch_size": 5}
    (method,) = run.from_config(CONFIG | {"methods": [fields]}, {}).methods
    job = throughput._job(model, method, 100, 6)
    assert job.batch == 5
    for memory in (MEMORY, 10 * MEMORY):
        batch_rules.check("fixed", job, memory)
        planned = find_batch("fixed", job, memory, 12, 12)
        assert (planned.batch, planned.limited_by) == (5, "batch_size")
    with pytest.raises(UserError, match="batch_size 5 of tiny does not fit, though"):
        step_back("fixed", planned, 12)
    with pytest.raises(UserError, match="batch_size 5 of tiny does not fit, compiled"):
        find_batch("fixed", job, planned.peak_bytes - 1, 12, 12)
    state = 5 * planned.row_bytes
    with pytest.raises(UserError, match="does not fit, weights and KV state take"):
        batch_rules.check("fixed", job, planned.weights_bytes + state - 1)
    batch_rules.check("fixed", job, planned.weights_bytes + state)


@pytest.mark.parametrize(
    ("count", "batch", "least", "expected"),
    [
        (4, 2, 1, [[0, 1], [2, 3]]),
        (4, 2, 3, [[0, 1], [2, 3], [0, 1]]),
        (3, 3, 2, [[0, 1, 2], [0, 1, 2]]),
        (5, 3, 1, [[0, 1, 2], [3, 4, 0]]),
    ],
)
def test_turns(count, batch, least, expected):
    """Every prompt runs, in full batches, and in at least `least` of them."""
    assert turns(count, batch, least) == expected


def test_turns_that_are_lost_are_run_again():
    """Any missing turn is run again, also in the middle of the file."""
    asked = [[0, 1], [2, 3], [0, 1]]
    assert list(throughput._left(asked, [[2, 3], [0, 1]])) == [[0, 1]]
    assert list(throughput._left(asked, [[0, 1], [0, 1]])) == [[2, 3]]
    assert list(throughput._left(asked, [])) == asked


def test_records_and_resumption(experiment, tmp_path):
    """A run stopped at any step resumes there and ends with the same records."""
    steps = []
    whole = run.run(experiment, tmp_path / "a", lambda *step: steps.append(step))
    assert sum(units for _, units in steps) == 4 * experiment.units_per_method == 8
    names = ["FKV", "ED", "SnapKV", "Batch-Max"]
    assert [(r["method"], r["new_tokens"]) for r in whole] == [
        (name, new) for new in (3, 6) for name in names
    ]
    full, ed, snap, batch_max = whole[:4]
    assert full["batch_size"] <= ed["batch_size"] < batch_max["batch_size"]
    assert snap["batch_size"] > ed["batch_size"]
    assert snap["prefill_batch"] < snap["batch_size"]
    assert (ed["policy"], ed["budget"], ed["schedule"]) == ("recency", 2, "decode_only")
    assert (full["budget"], snap["schedule"]) == (None, "after_prefill")
    for record in whole:
        check_record(record)

    class Stop(KeyboardInterrupt):
        pass

    stops = 0
    for limit in range(1, 40, 6):
        seen = []

        def stop(what, units, seen=seen, limit=limit):
            seen.append(what)
            if len(seen) > limit:
                raise Stop

        try:
            again = run.run(experiment, tmp_path / "b", stop)
            break
        except Stop:
            stops += 1
            path = tmp_path / "b" / "records.jsonl"
            if path.exists():  # a kill in the middle of a line
                path.write_bytes(path.read_bytes() + b'{"method": "FKV", "new_t')
    assert stops >= 3
    assert without_speed(again) == without_speed(whole)
    path = tmp_path / "b" / "records.jsonl"
    assert len(read_records(path)) == len(path.read_text().splitlines()) == 8
    batches = [read_records(tmp_path / name / "batches.jsonl") for name in "ab"]
    place = lambda x: [x[k] for k in ("method", "max_new_tokens", "examples", "texts")]
    assert list(map(place, batches[0])) == list(map(place, batches[1])), "each once"
    other = dataclasses.replace(experiment, min_timed_batches=3)
    with pytest.raises(
        UserError, match=r"another configuration [(]min_timed_batches was 2"
    ):
        run.run(other, tmp_path / "b", lambda *step: None)


def check_record(record):
    """Checks a record's arithmetic, and that it can be written as JSON."""
    assert record["experiment"] == "throughput" and record["format"] == 2
    assert record["codec"] == "identity" and record["engine"] == "kvjax"
    batches = max(-(-12 // record["batch_size"]), 2)
    new = record["batch_size"] * record["new_tokens"]
    for phase in ("prefill", "decode"):
        assert len(record[f"{phase}_seconds_all"]) == batches
        median = np.median(record[f"{phase}_seconds_all"])
        assert record[f"{phase}_seconds"] == pytest.approx(median)
    assert record["decode_tokens_per_s"] == pytest.approx(
        new / record["decode_seconds"]
    )
    both = np.add(record["prefill_seconds_all"], record["decode_seconds_all"])
    assert record["output_tokens_per_s"] == pytest.approx(new / np.median(both))
    assert record["planned_bytes"] <= record["memory_bytes"] == MEMORY
    assert 0 <= record["score"] <= 1 and record["num_examples"] == 12
    assert (record["probe_flops_per_s"], record["probe_bytes_per_s"]) == (2e9, 1e9)
    assert record["tasks"]["needle"]["max_new_tokens"] == record["new_tokens"]
    for phase in ("prefill", "decode"):
        assert record[f"{phase}_bytes"] > 0 and record[f"{phase}_flops"] > 0
        share = record[f"{phase}_roofline"]
        predicted = record[f"predicted_{phase}_tokens_per_s"]
        measured = record[f"{phase}_tokens_per_s"]
        assert 0 < share == pytest.approx(measured / predicted)
    json.dumps(record)


def test_out_of_memory_steps_back(experiment, model, tmp_path, monkeypatch):
    """ED steps back and bounds FKV; a pool first halves its prefill groups."""
    real, tried = runner.of_plan, []

    def of_plan(params, planned):
        tried.append((planned.job.config.schedule.phases, planned.batch))
        pooled = planned.job.config.schedule.phases == "after_prefill"
        if planned.prefill_groups[0] > (1 if pooled else 3):
            raise exhausted()
        return real(params, planned)

    monkeypatch.setattr(runner, "of_plan", of_plan)
    asked = short(experiment, methods=experiment.methods)
    full, ed, snap, batch_max = run.run(asked, tmp_path, lambda *step: None)
    assert ed["batch_size"] == 3 and ed["limited_by"] == "out of memory"
    assert ed["stepped_back"] == list(range(ed["stepped_back"][0], 3, -1))
    assert len(ed["stepped_back"]) >= 2
    assert (full["batch_size"], full["stepped_back"]) == (3, [])
    assert full["limited_by"] == "ED"
    assert batch_max["batch_size"] == 3 and batch_max["stepped_back"] == [
        size for size in reversed(divisors(12)) if 3 < size <= tried_first(tried)
    ]
    assert (snap["prefill_batch"], set(snap["stepped_back"])) == (
        1,
        {snap["batch_size"]},
    )
    assert all(r["output_tokens_per_s"] > 0 for r in (full, ed, snap, batch_max))
    (tmp_path / "records.jsonl").unlink()
    monkeypatch.setattr(runner, "run_batch", None)  # killed, and all batches are there
    again = run.run(asked, tmp_path, lambda *step: None)
    assert again == [full, ed, snap, batch_max]


def tried_first(tried):
    return next(batch for phases, batch in tried if phases == "prefill_and_decode")


def test_other_errors_are_not_swallowed(experiment, tmp_path, monkeypatch):
    def run_batch(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(runner, "run_batch", run_batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        run.run(experiment, tmp_path, lambda *step: None)


def test_one_row_that_does_not_run(experiment, model):
    planned = find_batch("ed", job_of(experiment, model, 1), MEMORY, 12, 1)
    with pytest.raises(UserError, match="one row of tiny runs out of memory"):
        step_back("ed", planned, 12)


def short(experiment, **changes):
    """Returns the experiment with one method and one measurement."""
    sizes = {"max_new_tokens": (3,), "min_timed_batches": 1}
    sizes["methods"] = experiment.methods[:1]
    return dataclasses.replace(experiment, **(sizes | changes))


def test_baselines_stand_beside_ours(experiment, model, tmp_path):
    """Baselines run once, on the same prompts, are graded alike and come last."""
    asked, told = [], []

    def baseline(prompts, new_tokens, memory_bytes, least, progress):
        asked.append((prompts, new_tokens, memory_bytes, least))
        progress("theirs runs", 0)
        first = model.tokenizer("Sentence s1 has")["input_ids"]
        return {
            "method": "theirs",
            "engine": "x",
            "new_tokens": new_tokens,
            "model": "theirs.gguf",
            "provenance": {"versions": {"x": "1"}},
            "tokens": [first] * len(prompts),
        }

    one = short(experiment, baselines=({"policy": "x"},))
    say = lambda *step: told.append(step)
    for _ in range(2):
        records = run.run(one, tmp_path, say, {"theirs": baseline})
        assert [r["method"] for r in records] == ["FKV", "theirs"]
    assert sum(units for _, units in told) == 4
    assert told.count(("theirs, 3 new: theirs runs", 0)) == 1
    (prompts, *rest), *more = asked
    assert not more and rest == [3, MEMORY, 1]
    assert len(prompts) == 12 and {len(prompt) for prompt in prompts} <= {*range(101)}
    assert len({len(prompt) for prompt in prompts}) == 1
    ours, theirs = records
    assert theirs["tasks"]["needle"]["num_examples"] == 12 and theirs["score"] == 0
    assert "tokens" not in theirs and theirs["format"] == 2
    assert theirs["probe_flops_per_s"] == ours["probe_flops_per_s"] == 2e9
    assert theirs["model"] == "theirs.gguf" and theirs["seed"] == 0
    assert theirs["provenance"]["versions"] == {"x": "1"}
    assert ours["provenance"]["command"] == theirs["provenance"]["command"]
    with pytest.raises(UserError, match="both named FKV"):
        run.run(one, tmp_path, say, {"FKV": baseline})


@pytest.fixture
def speaking(experiment, monkeypatch):
    """A model whose tokens are all words; `run.load` returns it."""
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))._replace(tokenizer=tokenizer)
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    return model


class Count(NamedTuple):
    """A task with prompts of different lengths, graded by the number of words."""

    lengths: tuple[int, ...] = (20, 35, 50)

    def examples(self, tokenizer, count, seed):
        words = HAYSTACK.split()
        return [
            base.Example(f"count-{i}", " ".join(words[: self.lengths[i % 3]]), ("",))
            for i in range(count)
        ]

    def grade(self, text, example):
        return {"words": len(set(text.split())) / 20, "none": 0.0}

    def task(self):
        return base.Task("count", self.examples, self.grade, "words", 5, "a test")


def test_any_task_and_its_grades(speaking, tmp_path, monkeypatch):
    """Timed answers are graded as in quality: up to the first end token."""
    monkeypatch.setattr(tasks, "_registry", Registry("task", base.Task))
    tasks.register("count", Count().task)
    asked = {"tasks": [{"name": "count"}], "num_examples": 5, "max_new_tokens": 6}
    config = CONFIG | asked | {"methods": ["FKV", "Batch-Max"]}
    config = {key: v for key, v in config.items() if key != "prompt_tokens"}
    many = run.from_config(config, {})
    full, batch_max = run.run(many, tmp_path / "speed", lambda *step: None)
    (lengths,) = {
        tuple(record["tasks"]["count"][key] for key in ("prompt_tokens", "metric"))
        for record in (full, batch_max)
    }
    prompts = [
        len(speaking.tokenizer(e.prompt)["input_ids"])
        for e in Count().examples(None, 5, 0)
    ]
    assert lengths == (np.mean(prompts), "words")
    assert full["prompt_tokens"] == max(prompts)
    read = full["batch_size"] * np.mean(prompts)
    assert full["prefill_tokens_per_s"] == pytest.approx(read / full["prefill_seconds"])
    same = {key: CONFIG[key] for key in ("model", "dtype", "memory_gb", "seed")}
    same |= {"haystack": "", "prefill_chunk": 16, "budget": 48}
    same |= {"tasks": [{"name": "count", "num_examples": 5, "max_new_tokens": 6}]}
    same["methods"] = [
        {"name": "FKV"},
        {"name": "Batch-Max", "policy": "average_attention"},
    ]
    graded = run.run(run.from_config(same, {}), tmp_path / "q", lambda *step: None)
    for fast, good in zip((full, batch_max), graded, strict=True):
        assert 0 < fast["score"] == pytest.approx(good["score"])
        metrics = fast["tasks"]["count"]["metrics"]
        assert metrics == pytest.approx(good["tasks"]["count"]["metrics"])
    with pytest.raises(UserError, match="baselines read prompts of one length"):
        run.run(many, tmp_path / "speed", lambda *step: None, {"x": lambda *_: {}})


@pytest.mark.parametrize("ends", [(), tuple(range(2000))])
def test_answers_are_graded_up_to_their_end(
    experiment, speaking, tmp_path, monkeypatch, ends
):
    """End tokens stop neither generation nor timing."""
    monkeypatch.setattr(tokenization, "end_tokens", lambda model: ends)
    run.run(short(experiment), tmp_path, lambda *step: None)
    for batch in read_records(tmp_path / "batches.jsonl"):
        assert batch["new_tokens"] == 3 * len(batch["examples"])
        assert all(text == "" for text in batch["texts"]) == bool(ends)


def test_a_mesh(experiment, model, tmp_path, monkeypatch):
    """Batches are multiples of the mesh's data axis; pools need one device."""
    alone = short(experiment, memory_gb=0.05)
    (one,) = run.run(alone, tmp_path / "one", lambda *step: None)

    def load(name, dtype, mesh):
        over = meshes.mesh(mesh, model.spec.num_kv_heads)
        params = placement.split(model.spec, model.params, over)
        return model._replace(params=params, spec=placement.fitted(model.spec, over))

    monkeypatch.setattr(run, "load", load)
    asked = dataclasses.replace(alone, mesh="data:2,model:4")
    (split,) = run.run(asked, tmp_path / "split", lambda *step: None)
    assert split["batch_size"] == one["batch_size"] == 12
    assert split["mesh"] == "data:2,model:4" and one["mesh"] is None
    texts = [
        [b["texts"] for b in read_records(tmp_path / name / "batches.jsonl")]
        for name in ("one", "split")
    ]
    assert texts[0] == texts[1]
    pool = dataclasses.replace(asked, methods=experiment.methods[2:3])
    with pytest.raises(UserError, match="one device: leave the mesh out"):
        run.run(pool, tmp_path / "pool", lambda *step: None)


def test_a_model_without_a_tokenizer(model, tmp_path, monkeypatch):
    """Prompts are random tokens of the exact length, and are not graded."""
    bare = model._replace(tokenizer=None)
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: bare)
    fixed = run.from_config(CONFIG | {"methods": [FIXED | {"batch_size": 2}]}, {})
    (record,) = run.run(short(fixed, max_new_tokens=(1,)), tmp_path, lambda *step: None)
    assert record["decode_tokens_per_s"] is record["decode_roofline"] is None
    assert (record["score"], record["num_examples"]) == (None, 0)
    assert (record["prompt_tokens"], record["batch_size"]) == (100, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_timed_batches": 0}, "min_timed_batches 0: at least 1"),
        ({"max_new_tokens": []}, "max_new_tokens is empty"),
        ({"max_new_tokens": [0]}, "max_new_tokens 0: at least 1"),
        ({"methods": []}, "methods .*: give one or more"),
        ({"promts": 3}, "unknown field 'promts'"),
        ({"methods": [{"name": "x"}]}, "batch_rule None is unknown"),
        ({"methods": ["EDD"]}, "method 'EDD' is unknown: .* 'FKV', 'ED', 'Batch-Max'"),
        ({"memory_gb": -1}, "memory_gb -1"),
        ({"methods": [FIXED]}, "'fixed' with batch_size None: 'fixed' takes one"),
        ({"methods": [FIXED | {"batch_size": 0}]}, "batch_size 0: at least 1"),
        (
            {"methods": [FIXED | {"batch_size": 13}]},
            "batch_size 13 exceeds the 12 prompts",
        ),
        (
            {"methods": [FIXED | {"batch_size": 12}]},
            "batch_size 12 of tiny does not fit",
        ),
        (
            {"methods": [{"name": "x", "batch_rule": "full", "batch_size": 2}]},
            "'full' with batch_size 2: 'fixed' takes one, and no other",
        ),
        (
            {
                "methods": [
                    {
                        "name": "x",
                        "batch_rule": "staggered",
                        "schedule": "prefill_and_decode",
                    }
                    | {"policy": "recency"}
                ]
            },
            "staggered prefill pools",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, model, change, message):
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    with pytest.raises(UserError, match=message):
        experiment = run.from_config(CONFIG | change, {})
        run.run(experiment, tmp_path, lambda *step: None)


def test_the_roofline_is_of_this_batch(experiment, model):
    planned = find_batch("batch_max", job_of(experiment, model, 3), MEMORY, 12, 4)
    found = throughput._roofline("float32", planned, 100, 50.0, 20.0)
    best = roofline.predict(planned, roofline.measured_rates("float32"), 100)
    assert found["prefill_roofline"] == 50.0 / best.prefill_tokens_per_s
    assert found["decode_flops"] == roofline.total(roofline.decode(planned, 100)).flops
