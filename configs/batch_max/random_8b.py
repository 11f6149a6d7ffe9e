"""Batch-Max's comparison at the shape of Llama 3.1 8B, on one accelerator.

    python experiments/run.py --config=configs/batch_max/random_8b.py \\
        --workdir=runs/batch_max_8b

Random weights in bfloat16: speed and memory are those of the real model, quality is not
measured. Prompts of 4,000 random tokens, 512 new ones, |kv| = 1024. All memory that the
device offers; `--memory_gb=24` compares on less, as a smaller device would have it.

transformers and kvpress at the same shape, prompts and limit, where half of the
device's memory is theirs:

    XLA_PYTHON_CLIENT_PREALLOCATE=false python experiments/run.py \\
        --config=configs/batch_max/random_8b.py --memory_gb=48 \\
        --baseline_python=python --workdir=runs/race_8b

16 GB of weights, and 131 kB per token and row of the full cache. On an H200 48 rows of
that give 2,000 new tokens a second (docs/performance.md); the comparison has not been
run yet.
"""

from ml_collections import ConfigDict, FieldReference


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`, and what its methods share."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "random:llama-3.1-8b",
            "dtype": "bfloat16",
            "memory_gb": 0,  # the device's own limit
            "seed": 0,
            "haystack": "",
            "budget": FieldReference(1024, field_type=object),  # |kv|
            "prefill_chunk": 128,  # p
            "methods": (
                "FKV",
                "ED",
                "Batch-Max",
                "Batch-Max, KeyDiff",
                "Staggered SnapKV",
            ),
            "tasks": (
                {"name": "needle", "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)}},
            ),
            "num_examples": 240,
            "prompt_tokens": 4000,
            "max_new_tokens": (128, 512),
            "min_timed_batches": 3,
            "baselines": (  # only with --baseline_python
                {"policy": None},
                {"policy": "snapkv", "budget": 1024},
                {"policy": "key_diff", "budget": 1024},
            ),
        }
    )
