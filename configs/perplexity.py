"""What eviction costs in perplexity on real text, from 20 to 60% of the pairs.

    python experiments/run.py --config=configs/perplexity.py --workdir=runs/perplexity

SmolLM2-135M-Instruct reads four texts of 1,000 tokens, evicting while it reads, 32
pairs at a time, and goes on with the next 64 tokens of each, which are given: what
counts is how likely it finds them. Nine rules at five budgets, all heads alike, and the
full cache. The text is Python's reference; `--haystack=FOLDER` takes other text. The
report has a table of perplexities, and losses in nats per token, KL to the full cache's
predictions and shares of the same likeliest token; also how many of two pass keys were
found, as an experiment has a task.

Layer by layer, so that nothing is timed. Half an hour on two CPU cores; our table is in
docs/results/perplexity.md, its records in docs/data/perplexity.jsonl. Stop it at any
moment and start it again. `--config.fidelity.num_windows=16` narrows the uncertainty.
"""

from ml_collections import ConfigDict

_PERCENT = (20, 30, 40, 50, 60)
_POLICIES = {
    "StreamingLLM": "streaming",
    "Recency": "recency",
    "H2O": "h2o",
    "H2O with sinks": "h2o_sinks",
    "TOVA": "tova",
    "SnapKV": "snapkv",
    "Scissorhands": "scissorhands",
    "KeyDiff": "key_diff",
    "Average attention": "average_attention",
}


def get_config() -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 4.0,
            "seed": 0,
            "haystack": "",
            "layerwise": True,
            "prefill_chunk": 32,
            "evict_size": 32,
            "methods": (
                {"name": "Full cache"},
                *(
                    {
                        "name": f"{name}, {percent}%",
                        "series": name,
                        "policy": policy,
                        "budget": f"{percent}%",
                        "budget_rule": "uniform",
                    }
                    for percent in _PERCENT
                    for name, policy in _POLICIES.items()
                ),
            ),
            "tasks": ({"name": "needle", "options": {"depths": (0.3, 0.7)}},),
            "num_examples": 2,
            "prompt_tokens": 1000,
            "max_new_tokens": 12,
            "fidelity": {
                "num_windows": 4,
                "prompt_tokens": 1000,
                "continuation_tokens": 64,
            },
        }
    )
