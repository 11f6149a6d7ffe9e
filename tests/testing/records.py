"""Records as runs write them, for the tests of reports."""

from kvjax.evaluation.report.records import FORMAT


def make_record(method, **changes):
    record = {
        "format": FORMAT,
        "experiment": "quality",
        "method": method,
        "policy": method.lower(),
        "schedule": "prefill_and_decode",
        "budget": 512,
        "batch_size": 18,
        "limited_by": "decode state",
        "score": 0.5,
        "num_examples": 24,
        "kl": 0.3,
        "top1_agreement": 0.82,
        "prefill_tokens_per_s": 1234.5,
        "decode_tokens_per_s": 88.25,
        "output_tokens_per_s": 14.4,
        "kv_bytes_peak_per_seq": 26e6,
        "memory_bytes": 512e6,
        "model": "tiny",
        "device": "cpu",
        "prompt_tokens": 1000,
        "max_new_tokens": 12,
        "provenance": {"versions": {"numpy": "2.0"}},
    }
    return record | changes


FULL = make_record(
    "Full cache",
    schedule="none",
    budget=None,
    batch_size=8,
    score=1.0,
    kl=0.0,
    output_tokens_per_s=9.0,
    kv_bytes_peak_per_seq=48e6,
)


RECORDS = [FULL, make_record("StreamingLLM"), make_record("KeyDiff", score=0.96)]


def sweep_records(**changes):
    """Two policies at two budgets under two schedules; one of them was not measured."""
    records = [FULL]
    for label, skill in (("good", 1.0), ("poor", 0.25)):
        for phases in ("prefill_and_decode", "after_prefill"):
            for budget in (768, 1152):
                fields = {
                    "series": label,
                    "schedule": phases,
                    "budget": budget,
                    "score": skill * budget / 1152,
                    "kl": 10.0 / budget,
                    "kv_bytes_decode": budget * 46e3,
                    "kv_bytes_live": budget * 23e3,
                    "kv_bytes_allocated": budget * 46e3,
                }
                name = f"{label}, {budget}, {phases}"
                records.append(make_record(name, **(fields | changes)))
    records[-1]["score"] = records[-1]["kl"] = None
    return records


def throughput_record(method, role, new, batch, speed, **changes):
    record = {
        "experiment": "throughput",
        "batch_rule": role,
        "new_tokens": new,
        "batch_size": batch,
        "output_tokens_per_s": speed,
        "predicted_tokens_per_s": 2 * speed,
        "budget": None if role == "full" else 64,
    }
    return make_record(method, **(record | changes))


PEER = {
    key: value
    for key, value in throughput_record("kvpress", None, 8, 3, 5.0).items()
    if key not in ("batch_rule", "predicted_tokens_per_s")
} | {"engine": "kvpress"}


SPEEDS = [
    throughput_record("ED", "ed", 8, 4, 10.0),
    throughput_record("FKV", "full", 8, 4, 8.0),
    throughput_record("Batch-Max", "batch_max", 8, 16, 20.0),
    PEER,
    throughput_record("ED", "ed", 32, 4, 40.0),
    throughput_record("Batch-Max", "batch_max", 32, 16, 60.0),
]
