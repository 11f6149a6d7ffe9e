"""GSM8K under rules that find every key: one thing changed at a time.

    python experiments/calibrate.py --model=MODEL --dtype=bfloat16 --num_texts=8 \\
        --texts='ESSAYS/*.txt' --output=mine.json
    python experiments/run.py --config=configs/reasoning.py:mine.json \\
        --config.model=MODEL --data_dir=DATA --workdir=runs/reasoning

MODEL is a GGUF file or a Hugging Face folder of a model that solves such problems with
its full cache. What follows the colon is its calibration, and after commas the rows
that are wanted: `mine.json,full,key_diff_50`, each with all whose names begin so. Four
solved problems are earlier turns of the conversation.

Rows evict as pairs come in, 16 at a time, keep half or a quarter of the longest
prompt's pairs by need, and pin 4 first and 16 newest pairs. *Alike*: every head keeps
as many. *Prefill only*: what is written stays. *Pinned 128*: the question too, which
is among the newest pairs when the prompt is in. docs/tasks_that_fail.md says what came
of it.
"""

from ml_collections import ConfigDict

_FULL = {"name": "Full cache", "prefill_chunk": 64}
_KEY_DIFF = {"policy": "key_diff"}
_AVERAGE = {"policy": "average_attention"}
_HEADS = {"policy": "kvjax.policies:retrieval_heads"}
_SNAPKV = {"policy": "snapkv", "schedule": "after_prefill", "prefill_chunk": 64}
_STREAMING = {"policy": "streaming"}
_ALIKE = {"budget_rule": "uniform"}
_READING = {"schedule": "prefill_only"}
_PINNED = {"pinned": (4, 128)}
_ROWS = {  # by name, which ends in the percentage of pairs that stay
    "full": _FULL,
    "key_diff_50": _KEY_DIFF,
    "key_diff_25": _KEY_DIFF,
    "average_50": _AVERAGE,
    "average_25": _AVERAGE,
    "heads_50": _HEADS,
    "heads_25": _HEADS,
    "snapkv_50": _SNAPKV,
    "snapkv_25": _SNAPKV,
    "streaming_alike_50": _STREAMING | _ALIKE,
    "streaming_alike_25": _STREAMING | _ALIKE,
    "key_diff_alike_50": _KEY_DIFF | _ALIKE,
    "key_diff_prefill_only_50": _KEY_DIFF | _READING,
    "key_diff_pinned_128_50": _KEY_DIFF | _PINNED,
    "key_diff_pinned_128_prefill_only_50": _KEY_DIFF | _PINNED | _READING,
}


def _method(name: str, calibration: str) -> dict:
    """A row's fields; heads keep at least what is pinned, or seen, and some more."""
    fields = _ROWS[name]
    if "policy" not in fields:
        return fields
    series, _, percent = name.rpartition("_")
    floor = 64 if fields["policy"] == "snapkv" else 40
    by_need = {
        "name": "calibrated",
        "path": calibration,
        "floor": 168 if "pinned" in fields else floor,
        "even": 0.25 if fields is _HEADS else 0.0,
    }
    return {
        "name": name.replace("_", " "),
        "series": series,
        "budget": f"{percent}%",
        "budget_rule": by_need,
    } | fields


def get_config(which: str = "") -> ConfigDict:
    """The fields of `quality.Quality` for a calibration's file, and some rows."""
    calibration, *wanted = which.split(",")
    if not calibration:
        raise OSError(
            "no calibration: write reasoning.py:FILE, as calibrate.py made it"
        )
    return ConfigDict(
        {
            "model": "qwen2.5-coder-0.5b-instruct",
            "dtype": "float32",
            "memory_gb": 5.0,
            "seed": 0,
            "haystack": "",
            "data_dir": "",
            "layerwise": True,
            "pinned": (4, 16),
            "prefill_chunk": 16,
            "evict_size": 16,
            "methods": tuple(
                _method(name, calibration)
                for name in _ROWS
                if not wanted or name.startswith(tuple(wanted))
            ),
            "tasks": ({"name": "gsm8k/chat", "num_examples": 20},),
        }
    )
