"""Batch-Max's comparison on a CPU: SmolLM2 in 2 GB, and a rival the paper never met.

    python experiments/run.py --config=configs/batch_max/smollm2_cpu.py \\
        --workdir=runs/batch_max_cpu [--baseline_python=PYTHON]
    python experiments/run.py --config=configs/batch_max/smollm2_cpu.py:quality \\
        --workdir=runs/equal_quality [--baseline_python=PYTHON]

SmolLM2-135M-Instruct reads prompts of nearly 1,500 tokens with a pass key in them and
generates exactly 128, then exactly 512 tokens for each, whatever ends the text.
Weights, caches and temporaries have to fit into 2 GB. ED runs at b0 - 1, where b0 is
the smallest batch at which it does not fit, the full cache there too or, as it holds
what is decoded besides, at the largest batch below that fits; Batch-Max at the largest
divisor of the number of prompts that fits (Metel et al. 2024, arXiv 2412.05693, section
4.1). *Staggered* reads a few prompts at a time with the full cache, compresses
them, and decodes all of them together.

With an interpreter that has torch, transformers, gguf and kvpress, those libraries
answer the same prompts in the same memory: the full cache, and SnapKV and KeyDiff at
the same |kv|, once the prompt is in. Freed memory goes back to the system at once, or
their batches would not stay in 2 GB; as that costs them time, they are also timed with
freed memory kept, at the same batches.

`:quality` races at equal scores rather than equal |kv|: KeyDiff in heads that retrieve
and average attention in the others, with two and one eighths of the pairs where they
are needed, evicting 32 while reading, beside SnapKV at 512 in the other libraries and
the full cache; 48 prompts, 512 new tokens, one batch at least. The results
are in docs/results/throughput.md: an eighth finds what kvpress' SnapKV at 512 does, at
3.9 times its tokens/s, a quarter what the full cache finds, at 4.9 times transformers'.

The paper uses larger models on a GPU; model, memory, lengths and |kv| are our choice.
Times are the medians of three batches or more. About an hour on two CPU cores, and two
hours more with the other libraries.
"""

from ml_collections import ConfigDict, FieldReference

SNAPKV = {
    "policy": "snapkv",
    "budget": 512,
    "options": {"window_size": 32, "kernel_size": 7},
}


def get_config(race: str = "budget") -> ConfigDict:
    """The fields of `throughput.Throughput`, for equal budgets or equal quality."""
    config = _at_equal_budgets()
    if race == "quality":
        config.methods = ("FKV", *map(_where_needed, ("25%", "12.5%")))
        full, snapkv, full_kept, snapkv_kept = config.baselines[:4]
        config.baselines = snapkv, snapkv_kept, full, full_kept
        config.max_new_tokens, config.min_timed_batches = (512,), 1
        config.num_examples = 48  # with 24 an eighth would leave memory free
    elif race != "budget":
        raise ValueError(f"race {race!r}: use budget or quality")
    return config


def _where_needed(share: str) -> dict:
    return {
        "name": f"Retrieval heads, {share}",
        "batch_rule": "batch_max",
        "policy": "kvjax.policies:retrieval_heads",
        "budget": share,
        "budget_rule": {"name": "calibrated", "even": 0.25, "floor": 64},
        "pinned": (4, 16),
        "prefill_chunk": 32,
    }


def _at_equal_budgets() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 2.0,
            "seed": 0,
            "haystack": "",
            "budget": FieldReference(512, field_type=object),  # |kv|
            "prefill_chunk": 64,  # p
            "methods": (
                "FKV",
                "ED",
                {
                    "name": "Staggered SnapKV",
                    "batch_rule": "staggered",
                    "policy": "snapkv",
                    "options": {"pool": "average"},  # as kvpress does
                    "prefill_chunk": 256,  # one prompt is read at a time
                },
                "Batch-Max",
                "Batch-Max, KeyDiff",
            ),
            "baselines": (  # only with --baseline_python
                {"policy": None},
                SNAPKV,
                {
                    "policy": None,
                    "retain_freed_memory": True,
                },  # faster, and no longer in 2 GB
                SNAPKV | {"retain_freed_memory": True},
                {"policy": "key_diff", "budget": 512},
            ),
            "tasks": (
                {"name": "needle", "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)}},
            ),
            "num_examples": 24,
            "prompt_tokens": 1500,
            "max_new_tokens": (128, 512),
            "min_timed_batches": 3,
        }
    )
