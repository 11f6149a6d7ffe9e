"""Records as runs write them, for the tests of reports."""

import pathlib

from kvjax.evaluation.report.records import FORMAT, append_record


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


DEPTHS = (0.1, 0.9)  # of the keys of `task_record`
SIZES = [[32, 96], [256, 128]]  # slots, layers by heads


def task_record(
    series, task, score, budget=None, schedule="none", share=None, **changes
):
    """A quality record of one task."""
    told = {
        "metric": "accuracy",
        "score": score,
        "num_examples": 4,
        "prompt_tokens": 90.0,
    }
    told["breakdown"] = [
        {"depth": d, "score": score, "num_examples": 2} for d in DEPTHS
    ]
    fields = {
        "series": series,
        "budget_share": share,
        "schedule": schedule,
        "budget": budget,
        "tasks": {task: told | changes.pop("task", {})},
        "score": score,
        "seed": 3,
        "provenance": {
            "command": "python experiments/run.py --config=a_b.py",
            "versions": {"numpy": "2.0"},
        },
        "kv_bytes_decode": 8e6 if budget is None else budget * 1e4,
        "kv_bytes_peak_per_seq": 8e6,
    }
    fields["method"] = f"{series}, {share:.0%}" if share else series
    return make_record(**(fields | changes))


def task_run(task, full, first, second, third=None, **changes):
    """Two methods at 50%, one at 25%: budgets differ from task to task."""
    size = len(task) * 10
    cut, once = "prefill_and_decode", "after_prefill"
    made = [
        task_record("Full cache", task, full, **changes),
        task_record("good", task, first, size * 2, cut, 0.5, **changes),
        task_record("poor", task, second, size * 2, once, 0.5, **changes),
    ]
    if third is not None:
        made.append(task_record("good", task, third, size, cut, 0.25, **changes))
    return made


def write_runs() -> list[str]:
    """Three runs in the current folder: two tasks of one model, and throughput."""
    members = {
        "one": task_run("xsum", 0.5, 0.4, 0.3, 0.2),
        "two": task_run("needle", 1.0, 0.75, 0.5),
        "speed": SPEEDS,
    }
    for name, records in members.items():
        pathlib.Path(name).mkdir()
        for each in records:
            append_record(pathlib.Path(name) / "records.jsonl", each)
    return list(members)
