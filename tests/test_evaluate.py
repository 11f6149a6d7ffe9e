"""Runs of the whole experiment on a tiny model, interrupted and taken up again."""

import json

import pytest
from conftest import tiny_model
from test_tasks import HAYSTACK, make_tokenizer

from kvjax import evaluate, report

CONFIG = {
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.002,
    "seed": 0,
    "haystack": "",
    "budget": 48,
    "block": 16,
    "methods": [
        {"name": "Full cache"},
        {"name": "KeyDiff", "policy": "key_diff"},
        {
            "name": "ED",
            "policy": "recency",
            "phases": "decode",
            "budget": 2,
            "evict": 1,
        },
    ],
    "examples": 5,
    "prompt_tokens": 100,
    "depths": [0.2, 0.8],
    "max_new_tokens": 6,
    "windows": 2,
    "window_prompt_tokens": 64,
    "window_continuation_tokens": 5,
}
TIMES = ("tokens_per_s", "seconds", "measured_bytes")


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    model = tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())
    monkeypatch.setattr(evaluate, "load", lambda name, dtype: model)
    return evaluate.from_config(CONFIG, {"haystack": str(tmp_path / "texts")})


def without_times(records):
    return [
        {key: r[key] for key in r if not any(word in key for word in TIMES)}
        for r in records
    ]


def test_records_and_resumption(experiment, tmp_path):
    """Stopped after any step, it goes on there and ends with the same records."""
    steps = []
    whole = evaluate.run(
        experiment, tmp_path / "whole", lambda *step: steps.append(step)
    )
    assert [r["method"] for r in whole] == ["Full cache", "KeyDiff", "ED"]
    assert sum(units for _, units in steps) == experiment.units
    full, key_diff = whole[:2]
    assert full["kl"] == 0 and full["top1_agreement"] == 1
    assert key_diff["kl"] > 0 and key_diff["loss"] != full["loss"]
    assert 1 <= full["batch"] <= 4 and full["batch_limit"] == "prefill"
    assert key_diff["kv_bytes_per_row"] < 0.6 * full["kv_bytes_per_row"]
    assert all(r["planned_bytes"] <= 2_000_000 for r in whole)

    class Stop(KeyboardInterrupt):
        pass

    interrupted = tmp_path / "interrupted"
    stops = 0
    for limit in range(2, 40, 3):
        seen = []

        def stop(what, units, seen=seen, limit=limit):
            seen.append(what)
            if len(seen) > limit:
                raise Stop

        try:
            again = evaluate.run(experiment, interrupted, stop)
            break
        except Stop:
            stops += 1
    assert stops >= 3
    assert without_times(again) == without_times(whole)
    batches = report.read_records(interrupted / "batches.jsonl")
    for method in ("Full cache", "KeyDiff", "ED"):
        ran = [
            i
            for b in batches
            if b["method"] == method and b["task"] == "needle"
            for i in b["examples"]
        ]
        assert sorted(ran) == list(range(5)), "each prompt was run once"
    json.dumps(report.summary(again))
    assert report.write_report(again, interrupted).exists()
