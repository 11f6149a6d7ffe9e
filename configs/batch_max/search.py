"""Batch-Max's |kv| sought as in its paper: SmolLM2 on a CPU, prompts of 3,000 tokens.

    python experiments/run.py --config=configs/batch_max/search.py \\
        --workdir=runs/batch_max_search
    python experiments/run.py --config=configs/batch_max/search.py:multi_news \\
        --data_dir=DATA --workdir=runs/batch_max_search_summaries

SmolLM2-135M-Instruct reads twelve prompts of nearly 3,000 tokens in which a pass key or
a magic number is hidden, in three wordings, and generates exactly 128 tokens for each,
in 1.05 GB, where the full cache has room for three prompts. What follows the colon is
one more task, such as `multi_news` or `xsum`: its rows come from DATA, see
`kvjax.evaluation.tasks.data`.

Metel et al. 2024, arXiv 2412.05693, section 4.1: the full cache and ED run at b0 - 1.
Batch-Max's |kv| is lowered as far as the mean score stays within two points of the full
cache's, on the very prompts that are timed, which with twelve means that none more is
missed; its batch is the largest divisor of their number that fits. The policies are the
paper's, by average attention, and KeyDiff, with all heads alike and with heads that
keep what they need: there |kv| is their mean.

Steps of |kv| that halve try fewer than the paper's, which
`--config.budget_steps='(128,64)'` has. Raise `--config.num_examples`, of each task, for
scores that tell more. We have not run it at this size: by the pace of single prompts
and of compiling, one to two hours on two CPU cores; two steps less, (1024, 512, 256),
save a third. Stop it at any moment and start it again.
"""

from ml_collections import ConfigDict

_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TASKS = {
    "needle": {"depths": _DEPTHS},
    "passkey": {"depths": _DEPTHS},
    "ruler/niah_single_2": {},
}


def get_config(more: str = "") -> ConfigDict:
    """The fields of `throughput.Throughput`, with one more task if it is named."""
    options = _TASKS | ({more: {}} if more else {})
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 1.05,
            "seed": 0,
            "haystack": "",
            "data_dir": "",
            "tolerance": 0.02,  # of the mean score, below the full cache's
            "budget_steps": (1024, 512, 256, 128, 64),
            "prefill_chunk": 64,  # p
            "methods": (
                "FKV",
                "ED",
                {
                    "name": "Batch-Max",
                    "batch_rule": "search",
                    "policy": "average_attention",
                },
                {
                    "name": "Batch-Max, KeyDiff",
                    "batch_rule": "search",
                    "policy": "key_diff",
                },
                {
                    "name": "Batch-Max, retrieval heads",
                    "batch_rule": "search",
                    "policy": "kvjax.policies:retrieval_heads",
                    "pinned": (4, 16),
                    "budget_rule": {"name": "calibrated", "even": 0.25, "floor": 128},
                },
            ),
            "tasks": tuple(
                {"name": name, "options": each} for name, each in options.items()
            ),
            "num_examples": 4,
            "prompt_tokens": 3000,
            "max_new_tokens": (128,),
            "min_timed_batches": 1,
        }
    )
