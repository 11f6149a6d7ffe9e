"""Quality experiments on a tiny model, interrupted and resumed."""

import dataclasses
import json
import pathlib
import runpy

import pytest
from conftest import tiny_model, tiny_spec
from testing.prose import HAYSTACK, make_tokenizer

from kvjax import policies
from kvjax.cache.spec import checked
from kvjax.engine import tokenization
from kvjax.evaluation import quality, report, run, samples, tasks
from kvjax.evaluation.quality import Fidelity
from kvjax.evaluation.report.records import append_record, read_records
from kvjax.evaluation.run import from_config
from kvjax.models import placement
from kvjax.parallel import meshes
from kvjax.types import UserError

pytestmark = pytest.mark.e2e

SWEEP = pathlib.Path(__file__).parents[2] / "configs" / "policy_sweep.py"

CONFIG = {
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.0005,
    "seed": 0,
    "haystack": "",
    "budget": 48,
    "prefill_chunk": 16,
    "methods": [
        {"name": "Full cache"},
        {"name": "KeyDiff", "policy": "key_diff"},
        {
            "name": "ED",
            "policy": "recency",
            "schedule": "decode_only",
            "budget": 2,
            "evict_size": 1,
        },
        {
            "name": "slots 48",
            "series": "slots",
            "policy": "streaming",
            "rope_positions": "cache",
        },
    ],
    "num_examples": 5,
    "prompt_tokens": 100,
    "max_new_tokens": 6,
    "tasks": [
        {"name": "needle", "options": {"depths": [0.2, 0.8]}},
        {
            "name": "passkey",
            "num_examples": 2,
            "prompt_tokens": 80,
            "max_new_tokens": 3,
        },
    ],
    "fidelity": {"num_windows": 2, "prompt_tokens": 64, "continuation_tokens": 5},
}
TIMES = ("tokens_per_s", "seconds", "measured_bytes", "probe")


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    model = tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    return from_config(CONFIG, {"haystack": str(tmp_path / "texts")})


def without_times(records):
    return [
        {key: r[key] for key in r if not any(word in key for word in TIMES)}
        for r in records
    ]


def test_records_and_resumption(experiment, tmp_path):
    """A run stopped after any step resumes there and ends with the same records."""
    steps = []
    whole = run.run(experiment, tmp_path / "whole", lambda *step: steps.append(step))
    assert [r["method"] for r in whole] == ["Full cache", "KeyDiff", "ED", "slots 48"]
    assert sum(units for _, units in steps) == 4 * experiment.units_per_method == 4 * 9
    full, key_diff = whole[:2]
    assert full["kl"] == 0 and full["top1_agreement"] == 1
    assert key_diff["kl"] > 0 and key_diff["loss"] != full["loss"]
    assert 1 <= full["batch_size"] <= 4 and full["limited_by"] == "prefill"
    assert key_diff["kv_bytes_peak_per_seq"] < 0.6 * full["kv_bytes_peak_per_seq"]
    assert all(r["planned_bytes"] <= 2_000_000 for r in whole)
    for record in whole:
        live, allocated = record["kv_bytes_live"], record["kv_bytes_allocated"]
        assert 0 < live <= allocated <= record["kv_bytes_decode"]
        assert (record["probe_flops_per_s"], record["probe_bytes_per_s"]) == (2e9, 1e9)
    assert full["kv_bytes_decode"] == full["kv_bytes_peak_per_seq"]
    slot = whole[3]
    assert (slot["rope_positions"], key_diff["rope_positions"]) == ("cache", "original")
    assert slot["series"] == "slots" and key_diff["series"] == "KeyDiff"
    needle, passkey = full["tasks"]["needle"], full["tasks"]["passkey"]
    assert (needle["num_examples"], passkey["num_examples"]) == (5, 2)
    assert [cell["depth"] for cell in needle["breakdown"]] == [0.2, 0.8]
    assert [cell["num_examples"] for cell in needle["breakdown"]] == [3, 2]
    assert full["score"] == (needle["score"] + passkey["score"]) / 2
    assert full["num_examples"] == 7 and needle["prompt_tokens"] <= 100

    class Stop(KeyboardInterrupt):
        pass

    interrupted = tmp_path / "interrupted"
    stops = 0
    for limit in range(2, 50, 3):
        seen = []

        def stop(what, units, seen=seen, limit=limit):
            seen.append(what)
            if len(seen) > limit:
                raise Stop

        try:
            again = run.run(experiment, interrupted, stop)
            break
        except Stop:
            stops += 1
    assert stops >= 3
    assert without_times(again) == without_times(whole)
    batches = read_records(interrupted / "batches.jsonl")
    for method in ("Full cache", "KeyDiff", "ED", "slots 48"):
        ran = [
            i
            for b in batches
            if b["method"] == method and b["task"] == "needle"
            for i in b["examples"]
        ]
        assert sorted(ran) == list(range(5)), "each prompt was run once"
    json.dumps(report.summary(again))
    assert report.write_report(again, interrupted).exists()


def test_a_split_model_scores_the_same(experiment, tmp_path, monkeypatch):
    """Tasks and fidelity over a mesh; three windows leave a row of two empty."""
    asked = dataclasses.replace(
        experiment,
        methods=experiment.methods[:2],
        tasks=experiment.tasks[1:],
        fidelity=dataclasses.replace(experiment.fidelity, num_windows=3),
        memory_gb=0.05,
    )
    alone = run.run(asked, tmp_path / "alone", lambda *step: None)
    model = run.load("", "float32", None)

    def load(name, dtype, mesh):
        over = meshes.mesh(mesh, model.spec.num_kv_heads)
        params = placement.split(model.spec, model.params, over)
        return model._replace(params=params, spec=placement.fitted(model.spec, over))

    monkeypatch.setattr(run, "load", load)
    split = dataclasses.replace(asked, mesh="data:2,model:4")
    together = run.run(split, tmp_path / "split", lambda *step: None)
    for one, other in zip(alone, together, strict=True):
        assert one["tasks"] == other["tasks"]
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-4)
        for key in ("kv_bytes_decode", "kv_bytes_peak_per_seq"):
            assert one[key] == pytest.approx(2 * other[key], rel=0.1)  # half the heads


def test_another_run_s_results_are_not_taken(experiment, tmp_path):
    append_record(tmp_path / "records.jsonl", {"method": "KeyDiff"})
    with pytest.raises(UserError, match=r"holds records.jsonl without the exp"):
        run.run(experiment, tmp_path, lambda *step: None)


def test_a_needle_is_never_cut_out(experiment):
    """The model's context is 256 tokens: none is left for an answer."""
    model, (needle, _) = run.load("", "float32", None), experiment.tasks
    asked = dataclasses.replace(needle, prompt_tokens=256, max_new_tokens=64)
    with pytest.raises(UserError, match="prompt_tokens of 192 or less"):
        samples.samples_of(experiment, asked, model)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_answers_end_where_they_are_to(
    experiment, tmp_path, monkeypatch, ignore_eos, layerwise
):
    """Every token is an end token; with `ignore_eos` generation continues."""
    monkeypatch.setattr(tokenization, "end_tokens", lambda model: tuple(range(2000)))
    task = dataclasses.replace(experiment.tasks[1], ignore_eos=ignore_eos)
    one = {"methods": experiment.methods[:1], "tasks": (task,), "fidelity": Fidelity()}
    asked = dataclasses.replace(experiment, **one, layerwise=layerwise)
    (record,) = run.run(asked, tmp_path, lambda *step: None)
    batches = read_records(tmp_path / "batches.jsonl")
    assert sum(b["new_tokens"] for b in batches) == (2 * 3 if ignore_eos else 2)
    assert (record["seconds"] is None) == layerwise, "layer by layer nothing is timed"
    decoded = ignore_eos and not layerwise  # the first token comes out of the prompt
    assert (record["decode_tokens_per_s"] is None) == (not decoded)
    assert layerwise <= (record["measured_bytes"] is None), "nor measured"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_answers_go_on_past_stop_texts_if_asked_to(
    experiment, tmp_path, monkeypatch, ignore_eos
):
    """Any text is a stop text, so the first search for one ends an answer."""
    task, passkey = experiment.tasks[1], tasks.get("passkey")
    monkeypatch.setattr(tasks, "get", lambda name: passkey._replace(stop=("",)))
    monkeypatch.setattr(quality, "_STOP_INTERVAL", 1)
    run_of = dataclasses.replace(task, ignore_eos=ignore_eos)
    one = {"methods": experiment.methods[:1], "fidelity": Fidelity()}
    asked = dataclasses.replace(experiment, **one, tasks=(run_of,))
    run.run(asked, tmp_path, lambda *step: None)
    batches = read_records(tmp_path / "batches.jsonl")
    assert sum(b["new_tokens"] for b in batches) == (2 * 3 if ignore_eos else 2)


@pytest.mark.parametrize("change", [{"seed": -1}, {"fidelity": Fidelity(-1)}])
def test_negative_numbers(experiment, change):
    with pytest.raises(UserError, match=r"(seed|num_windows) -1: 0 or more"):
        dataclasses.replace(experiment, **change).check()


def test_the_full_cache_is_read_in_the_same_blocks():
    full, key_diff = from_config(CONFIG, {}).methods[:2]
    chunks = [method.schedule.prefill_chunk for method in (full, key_diff)]
    assert chunks == [16, 16] and full.budget is None


def test_h2o_s_window_as_a_count():
    fields = {"name": "a", "policy": "h2o", "options": {"recent": 12}, "budget": 64}
    (method,) = from_config(CONFIG | {"methods": [fields]}, {}).methods
    assert checked(tiny_spec(), method.cache).policy is policies.h2o(recent=12)


def sweep(quick):
    config = runpy.run_path(str(SWEEP))["get_config"]().to_dict()
    return from_config(config | {"quick": quick}, {})


@pytest.mark.parametrize("quick", [False, True])
def test_the_sweep_fits_smollm2(quick):
    """Every budget and schedule is valid for its layers and heads."""
    sweep(quick).check()
    spec = tiny_spec(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    for method in sweep(quick).methods:
        made = checked(spec, method.cache)
        assert made.rope_positions == method.cache.rope_positions
        assert made.schedule.prefill_chunk == 128


def test_the_sweep_holds_every_policy():
    """But `retrieval_heads`, which is `key_diff` under uniform budgets."""
    methods = sweep(False).methods
    names = set(policies.names()) - {"retrieval_heads"}
    series = {method.series for method in methods if method.policy}
    assert {method.policy for method in methods} == {*names, None}
    assert len(series) == len(names) + 1  # streaming has two rows
    assert len(methods) == len(series) * 2 * 3 + 1
    assert len(sweep(True).methods) == 5 * 2 + 1
    assert sweep(True).tasks[0].num_examples < sweep(False).tasks[0].num_examples


def test_quick_fields_replace_others():
    quick = {
        "methods": [{"name": "Full cache"}],
        "num_examples": 1,
        "fidelity": {"num_windows": 1},
    }
    config = CONFIG | {"quick": True, "quick_fields": quick}
    assert len(from_config(config, {}).methods) == 1
    assert from_config(config, {}).fidelity == Fidelity(1, 64, 5)
    examples = lambda made: [task.num_examples for task in made.tasks]
    assert examples(from_config(config, {"num_examples": 3})) == [3, 2]
    assert examples(from_config(config | {"quick": False}, {})) == [5, 2]
    with pytest.raises(UserError, match="unknown field 'exampels'"):
        from_config(config | {"quick_fields": {"exampels": 1}}, {})
