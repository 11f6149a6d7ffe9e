"""Six ways to keep a KV cache, at one memory limit, on a real model.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

SmolLM2-135M-Instruct reads prompts of 1,000 tokens in which a pass key is hidden, with
a budget of half of its KV pairs (|kv| = 512), or of a quarter with calibrated heads.
Weights, cache and temporaries have to fit into 0.9 GB. Any field can be overridden:
`--config.budget=256`.
"""

from ml_collections import ConfigDict, FieldReference


def get_config() -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",  # or a GGUF file, or a model folder
            "dtype": "float32",
            "memory_gb": 0.9,  # 0: the device's own limit
            "seed": 0,
            "haystack": "",  # a folder of texts; empty: Python's own reference
            # What the methods share; a method may set its own.
            # |kv|, pairs per head and layer, or a share of the prompt: "25%".
            "budget": FieldReference(512, field_type=object),
            "prefill_chunk": 64,  # p, tokens per prefill step and pairs per eviction
            "methods": (
                {"name": "Full cache"},
                {
                    "name": "ED",
                    "policy": "recency",
                    "schedule": "decode_only",
                    "budget": 2,
                    "evict_size": 1,
                },
                {"name": "Batch-Max", "policy": "average_attention"},
                {"name": "StreamingLLM", "policy": "streaming"},
                {"name": "KeyDiff", "policy": "key_diff"},
                {  # sinks and newest pairs pinned, heads by what a calibration says
                    "name": "KeyDiff, heads by need",
                    "policy": "key_diff",
                    "budget": "25%",
                    "prefill_chunk": 32,  # a small head has room for so many
                    "evict_size": 32,
                },
            ),
            # What the tasks share; a task may set its own. For their names see
            # `kvjax.evaluation.tasks.names()`.
            "num_examples": 12,
            "prompt_tokens": 1000,
            "max_new_tokens": 64,
            "tasks": (
                # The pass key, at these depths of the text in turn.
                {
                    "name": "needle",
                    "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)},
                    "ignore_eos": True,  # as many tokens for every method
                },
            ),
            # Fidelity: the full cache's predictions on long text, teacher-forced.
            "fidelity": {
                "num_windows": 4,
                "prompt_tokens": 768,
                "continuation_tokens": 32,
            },
        }
    )
