"""Experiments with codecs: what records hold, and that codecs change the bytes."""

import pytest
from conftest import tiny_model
from testing.prose import HAYSTACK, make_tokenizer

from kvjax.evaluation import run
from kvjax.evaluation.report.records import read_records
from kvjax.evaluation.run import from_config

QUALITY = {
    "model": "tiny",
    "dtype": "float32",
    "memory_gb": 0.1,
    "seed": 0,
    "haystack": "texts",
    "layerwise": True,
    "codec": {"name": "int4", "group": 8},
    "prefill_chunk": 8,
    "methods": (
        {"name": "Full cache"},
        {"name": "8 bits", "codec": "int8"},
        {"name": "2 bits", "codec": {"name": "int2", "group": 8}},
        {"name": "KeyDiff", "policy": "key_diff", "budget": 40},
    ),
    "num_examples": 1,
    "max_new_tokens": 3,
    "tasks": ({"name": "needle", "prompt_tokens": 90},),
    "fidelity": {"num_windows": 1, "prompt_tokens": 60, "continuation_tokens": 8},
}


@pytest.mark.e2e
def test_records_name_the_codec(tmp_path, monkeypatch):
    """The full cache takes only its own codec; the default is for the others."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(HAYSTACK)
    model = tiny_model(vocab_size=2000)._replace(tokenizer=make_tokenizer())
    monkeypatch.setattr(run, "load", lambda name, dtype, mesh: model)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    run.run(from_config(QUALITY, {}), out, lambda *step: None)
    full, eight, two, rule = read_records(out / "records.jsonl")
    assert (full["codec"], eight["codec"]) == ("identity", "int8")
    assert (two["codec"], rule["codec"]) == ("int2(group=8)", "int4(group=8)")
    assert full["kl"] == 0 < eight["kl"] < two["kl"]
    sizes = [each["kv_bytes_peak_per_seq"] for each in (two, eight, full)]
    assert sizes == sorted(set(sizes))
