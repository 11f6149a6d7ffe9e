"""Batch-Max's protocol on a tiny model: batches, clocks, steps back, resumption."""

import dataclasses
import json
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import tiny_model
from test_tasks import HAYSTACK, make_tokenizer

from kvjax import load
from kvjax.engine import api, staggered
from kvjax.engine.planner import phase_bytes
from kvjax.evaluation import batch_rules, roofline, throughput
from kvjax.evaluation.batch_rules import (
    divisors,
    find_batch,
    step_back,
    time_prompts,
    turns,
)
from kvjax.evaluation.report import run_report
from kvjax.evaluation.report.records import read_records
from kvjax.models import decoder, presets
from kvjax.types import Model, UserError

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
MEMORY = 1_200_000
CONFIG = {
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.0012,
    "seed": 0,
    "haystack": "",
    "budget": 48,
    "prefill_chunk": 16,
    "methods": [
        {"name": "FKV", "protocol": "full"},
        {"name": "ED", "protocol": "ed"},
        {
            "name": "SnapKV",
            "protocol": "staggered",
            "policy": "snapkv",
            "options": {"window": 8},
        },
        {"name": "Batch-Max", "protocol": "batch_max", "policy": "key_diff"},
    ],
    "prompts": 12,
    "prompt_tokens": 100,
    "depths": [0.2, 0.8],
    "max_new_tokens": [3, 6],
    "repeats": 2,
}
SPEED = ("second", "_per_s", "measured", "roofline", "predicted")


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_this_module():
    yield
    staggered.compile_programs.cache_clear()


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())


@pytest.fixture
def experiment(tmp_path, monkeypatch, model):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    monkeypatch.setattr(throughput, "load", lambda name, dtype: model)
    return throughput.from_config(CONFIG, {"haystack": str(tmp_path / "texts")})


def job_of(experiment, model, place, new=6):
    return throughput._job(experiment, model, experiment.methods[place], new)


def exhausted():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes too many")


def without_speed(records):
    return [
        {k: r[k] for k in r if not any(word in k for word in SPEED)} for r in records
    ]


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(13) == [1, 13] and divisors(1) == [1]


def test_batches_of_the_protocol(experiment, model):
    """By the compiler's own count: b0 is the first that does not fit."""
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
    assert pool.batch > ed.batch and pool.group < pool.batch


def test_a_divisor_only(experiment, model):
    """13 prompts have no even batch but 1 and 13: the protocol takes 1 of those."""
    job = job_of(experiment, model, 3)
    assert find_batch("batch_max", job, MEMORY, 13, 12).batch == 1


def fake_clock(seconds):
    """A run whose batches take `seconds` each, and whose tokens name their prompt."""
    calls = []

    def run_batch(prompts, rows):
        calls.append(list(rows))
        reading, writing = seconds[len(calls) - 1]
        new = [[i, len(prompt)] for i, prompt in zip(rows, prompts, strict=True)]
        return api.BatchResult(new, None, reading, writing)

    return run_batch, calls


def test_time_prompts(experiment, model):
    """All batches count; the last one is filled up."""
    planned = find_batch("batch_max", job_of(experiment, model, 3), MEMORY, 12, 2)
    assert planned.batch == 2
    prompts = [[1] * length for length in (3, 5, 7)]
    clock = [(1.0, 2.0), (3.0, 4.0)]
    run_batch, calls = fake_clock(clock)
    timing = time_prompts(run_batch, planned, prompts, repeats=1)
    assert calls == [[0, 1], [2, 0]]
    assert timing.tokens == [[0, 3], [1, 5], [2, 7]]
    assert timing.prefill == [1.0, 3.0] and timing.decode == [2.0, 4.0]


@pytest.mark.parametrize(
    ("count", "batch", "repeats", "expected"),
    [
        (4, 2, 1, [[0, 1], [2, 3]]),
        (4, 2, 3, [[0, 1], [2, 3], [0, 1]]),
        (3, 3, 2, [[0, 1, 2], [0, 1, 2]]),
        (5, 3, 1, [[0, 1, 2], [3, 4, 0]]),
    ],
)
def test_turns(count, batch, repeats, expected):
    """Every prompt once, full batches only, as many as are to be timed."""
    assert turns(count, batch, repeats) == expected


def test_records_and_resumption(experiment, tmp_path):
    """Stopped at any step, it goes on there and ends with the same records."""
    steps = []
    whole = throughput.run(experiment, tmp_path / "a", lambda *step: steps.append(step))
    assert sum(units for _, units in steps) == experiment.units == 8
    names = ["FKV", "ED", "SnapKV", "Batch-Max"]
    assert [(r["method"], r["new_tokens"]) for r in whole] == [
        (name, new) for new in (3, 6) for name in names
    ]
    full, ed, snap, batch_max = whole[:4]
    assert full["batch"] <= ed["batch"] < batch_max["batch"]
    assert snap["batch"] > ed["batch"] and snap["group"] < snap["batch"]
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
            again = throughput.run(experiment, tmp_path / "b", stop)
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
    other = dataclasses.replace(experiment, repeats=3)
    with pytest.raises(UserError, match=r"another configuration [(]repeats was 2"):
        throughput.run(other, tmp_path / "b", lambda *step: None)


def check_record(record):
    """Its own arithmetic, and that JSON holds it."""
    assert record["kind"] == "throughput" and record["engine"] == "kvjax"
    batches = max(-(-12 // record["batch"]), 2)
    new = record["batch"] * record["new_tokens"]
    for phase in ("prefill", "decode"):
        assert len(record[f"{phase}_seconds_all"]) == batches
        median = np.median(record[f"{phase}_seconds_all"])
        assert record[f"{phase}_seconds"] == pytest.approx(median)
    assert record["decode_tokens_per_s"] == pytest.approx(
        new / record["decode_seconds"]
    )
    both = np.add(record["prefill_seconds_all"], record["decode_seconds_all"])
    assert record["tokens_per_s"] == pytest.approx(new / np.median(both))
    assert record["planned_bytes"] <= record["memory_bytes"] == MEMORY
    assert 0 <= record["accuracy"] <= 1 and record["examples"] == 12
    for phase in ("prefill", "decode"):
        assert record[f"{phase}_bytes"] > 0 and record[f"{phase}_flops"] > 0
        share = record[f"{phase}_roofline"]
        predicted = record[f"predicted_{phase}_tokens_per_s"]
        measured = record[f"{phase}_tokens_per_s"]
        assert 0 < share == pytest.approx(measured / predicted)
    json.dumps(record)


def test_out_of_memory_steps_back(experiment, model, tmp_path, monkeypatch):
    """ED's batch fails twice, FKV follows it; a pool first reads fewer at a time."""
    real, tried = batch_rules.run_planned, []

    def run_planned(params, planned, seed, prompts, indices):
        tried.append((planned.job.config.schedule.phases, planned.batch))
        pooled = isinstance(planned, staggered.StaggeredPlan)
        if planned.prefill_groups[0] > (1 if pooled else 3):
            raise exhausted()
        return real(params, planned, seed, prompts, indices)

    monkeypatch.setattr(batch_rules, "run_planned", run_planned)
    short = dataclasses.replace(experiment, max_new_tokens=(3,), repeats=1)
    full, ed, snap, batch_max = throughput.run(short, tmp_path, lambda *step: None)
    assert ed["batch"] == 3 and ed["batch_limit"] == "out of memory"
    assert ed["stepped_back"] == list(range(ed["stepped_back"][0], 3, -1))
    assert len(ed["stepped_back"]) >= 2
    assert (full["batch"], full["stepped_back"]) == (3, [])
    assert full["batch_limit"] == "ED"
    assert batch_max["batch"] == 3 and batch_max["stepped_back"] == [
        size for size in reversed(divisors(12)) if 3 < size <= tried_first(tried)
    ]
    assert (snap["group"], set(snap["stepped_back"])) == (1, {snap["batch"]})
    assert all(r["tokens_per_s"] > 0 for r in (full, ed, snap, batch_max))


def tried_first(tried):
    return next(batch for phases, batch in tried if phases == "prefill_and_decode")


def test_other_errors_are_not_swallowed(experiment, tmp_path, monkeypatch):
    def run_planned(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(batch_rules, "run_planned", run_planned)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        throughput.run(experiment, tmp_path, lambda *step: None)


def test_one_row_that_does_not_run(experiment, model):
    planned = find_batch("ed", job_of(experiment, model, 1), MEMORY, 12, 1)
    with pytest.raises(UserError, match="one row of tiny runs out of memory"):
        step_back("ed", planned, 12)


def test_peers_stand_beside_ours(experiment, tmp_path):
    """Other engines get the same prompts, once, and their records come last."""
    asked, told = [], []

    def peer(prompts, new_tokens, memory_bytes, repeats, progress):
        asked.append((prompts, new_tokens, memory_bytes, repeats))
        progress("theirs runs", 0)
        return {"method": "theirs", "engine": "x", "new_tokens": new_tokens}

    one = dataclasses.replace(
        experiment, methods=experiment.methods[:1], max_new_tokens=(3,), repeats=1
    )
    for _ in range(2):
        say = lambda *step: told.append(step)
        records = throughput.run(one, tmp_path, say, {"theirs": peer})
        assert [r["method"] for r in records] == ["FKV", "theirs"]
    assert [what for what, units in told if units] == ["FKV", "theirs"] * 2
    assert told.count(("theirs runs", 0)) == 1
    (prompts, *rest), *more = asked
    assert not more and rest == [3, MEMORY, 1]
    assert len(prompts) == 12 and max(map(len, prompts)) <= 100


def test_a_model_without_a_tokenizer(experiment, model, tmp_path, monkeypatch):
    """Random prompts of exactly the length, and nothing to grade."""
    bare = model._replace(tokenizer=None)
    monkeypatch.setattr(throughput, "load", lambda name, dtype: bare)
    one = dataclasses.replace(
        experiment, methods=experiment.methods[:1], max_new_tokens=(3,), repeats=1
    )
    (record,) = throughput.run(one, tmp_path, lambda *step: None)
    assert (record["accuracy"], record["examples"]) == (None, 0)
    assert record["prompt_tokens"] == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "repeats 0: at least 1"),
        ({"max_new_tokens": []}, "max_new_tokens is empty"),
        ({"max_new_tokens": [0]}, "max_new_tokens 0: at least 1"),
        ({"methods": []}, "methods .*: give one or more"),
        ({"promts": 3}, "unknown field 'promts'"),
        ({"methods": [{"name": "x"}]}, "protocol None is unknown"),
        ({"methods": ["EDD"]}, "method 'EDD' is unknown: .* 'FKV', 'ED', 'Batch-Max'"),
        ({"memory_gb": -1}, "memory_gb -1"),
        (
            {
                "methods": [
                    {
                        "name": "x",
                        "protocol": "staggered",
                        "phases": "prefill_and_decode",
                    }
                    | {"policy": "recency"}
                ]
            },
            "staggered prefill pools",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, model, change, message):
    monkeypatch.setattr(throughput, "load", lambda name, dtype: model)
    with pytest.raises(UserError, match=message):
        experiment = throughput.from_config(CONFIG | change, {})
        throughput.run(experiment, tmp_path, lambda *step: None)


def test_the_roofline_is_of_this_batch(experiment, model):
    planned = find_batch("batch_max", job_of(experiment, model, 3), MEMORY, 12, 4)
    found = throughput._roofline("float32", planned, 100, 50.0, 20.0)
    best = roofline.predict(planned, roofline.measured_rates("float32"), 100)
    assert found["prefill_roofline"] == 50.0 / best.prefill_tokens_per_s
    assert found["decode_flops"] == roofline.total(roofline.decode(planned, 100)).flops


def config_of(path):
    return runpy.run_path(str(path))["get_config"]()


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "batch_max").glob("*.py")), ids=lambda path: path.stem
)
def test_configs(path):
    """They are understood, and fit the models that they name."""
    fields = config_of(path).to_dict()
    assert fields.pop("kind") == "throughput"
    asked = throughput.from_config(fields, {})
    throughput._check(asked, {})
    assert {entry.protocol for entry in asked.methods} == set(batch_rules.PROTOCOLS)
    assert path.stem in runpy.run_path(str(path))["__doc__"]
    assert len(divisors(asked.prompts)) >= 6
    if asked.model.startswith("random:"):
        spec = presets.spec(asked.model.removeprefix("random:"))
        for entry in asked.methods:
            for new in asked.max_new_tokens:
                bare = Model(spec, decoder.param_shapes(spec), None)
                assert throughput._job(asked, bare, entry, new).new == new


@pytest.mark.parametrize("name", ["squeeze", "kcache"])
def test_configs_of_what_is_missing(name):
    (path,) = (CONFIGS / name).glob("*.py")
    with pytest.raises(ValueError, match="is missing: kvjax does not yet"):
        config_of(path)


def test_random_models(monkeypatch):
    """The published shape, the same weights every time, and no tokenizer."""
    small = presets._config("LlamaForCausalLM", 1, 16, 32, 4, 2, 50, 64)
    monkeypatch.setitem(presets.CONFIGS, "small", small)
    one, two = load("random:small"), load("random:small", "bfloat16")
    assert one.spec == presets.spec("small") and one.tokenizer is None
    assert one.params["embed"].shape == (50, 16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(two.params)} == {"bfloat16"}
    again = load("random:small")
    jax.tree.map(np.testing.assert_array_equal, one.params, again.params)
    with pytest.raises(UserError, match="no shape of 'medium'"):
        load("random:medium")


def test_table_and_report(tmp_path):
    records = [
        {"kind": "throughput", "method": name, "role": role, "new_tokens": new}
        | {"tokens_per_s": speed * new, "budget": 64, "engine": "kvjax"}
        for new in (3, 6)
        for name, role, speed in (("ED", "ed", 2.0), ("Batch|Max", "batch_max", 5.0))
    ]
    table = run_report.overview(records)
    assert table.count(" 2.50 ") == 2 and table.count(" 1.00 ") == 2
    assert "| 30.0 | 2.50 |" in " ".join(table.split()) and "Batch\\|Max" in table
    path = run_report.write_report(records, tmp_path)
    assert table in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "report.md",
        "throughput_vs_batch.png",
    ]
    labels = list(run_report.summary(records)["methods"])
    names = ("ED", "Batch|Max")
    assert labels == [f"{name} ({new} new)" for new in (3, 6) for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs/squeeze/throughput.py"], "SqueezeAttention is missing"),
        (["configs/batch_max/random_8b.py", "--config.kind=x"], "kind 'x' is unknown"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, arguments, message):
    config, *more = arguments
    command = ["experiments/run.py", f"--config={config}", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *command, *more],
        cwd=CONFIGS.parent,
        env=os.environ | {"PYTHONPATH": str(CONFIGS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
