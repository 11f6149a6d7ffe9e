"""The rows that kvjax and the lm-evaluation-harness both answer in docs/harness.md.

    python experiments/run.py --config=configs/harness.py --data_dir=DATA \\
        --workdir=runs/harness

Twenty questions of GSM8K (8 shots) and twenty boolean expressions of BIG-Bench Hard (3
shots), with the full cache and with KeyDiff at 512 pairs per head, by
SmolLM2-135M-Instruct in float32.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The fields of `quality.Quality`."""
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 3.0,
            "seed": 0,
            "haystack": "",
            "data_dir": "",
            "prefill_chunk": 64,
            "methods": (
                {"name": "Full cache"},
                {"name": "KeyDiff", "policy": "key_diff", "budget": 512},
            ),
            "tasks": (
                {"name": "gsm8k", "num_examples": 20},
                {"name": "bbh/boolean_expressions", "num_examples": 20},
            ),
        }
    )
