"""Batch-Max's |kv| sought as in its paper: SmolLM2 on a CPU, prompts of 3,000 tokens.

    python experiments/run.py --config=configs/batch_max/search.py \\
        --workdir=runs/batch_max_search
    python experiments/run.py --config=configs/batch_max/search.py:multi_news \\
        --data_dir=DATA --workdir=runs/batch_max_search_summaries

SmolLM2-135M-Instruct reads twelve prompts of nearly 3,000 tokens in which a pass key or
a magic number is hidden, in three wordings, and generates exactly 512 tokens for each,
in 1.05 GB, where the full cache has room for two prompts, or three while they are read.
What follows the colon is another task instead, such as `multi_news` or `xsum`, as the
paper searches for each of its own, with the paper's own rule alone: rows come from
DATA, see `kvjax.evaluation.tasks.data`.

Metel et al. 2024, arXiv 2412.05693, section 4.1: the full cache and ED run at b0 - 1.
Batch-Max's |kv| is lowered as far as the mean score stays within two points of the full
cache's, on the very prompts that are timed, which with twelve keys means that none more
is missed. Its batch is the largest divisor of their number that fits. The policies are
the paper's, by average attention, and KeyDiff, with all heads alike; and KeyDiff in
heads that need much with average attention in the others: there |kv| is the heads'
mean.

Steps of |kv| that halve try fewer than the paper's, which
`--config.budget_steps='(128,64)'` has. Raise `--config.num_examples`, of each task, for
scores that tell more. 45 minutes on two CPU cores, 20 of summaries; the results are in
docs/results/throughput.md. Stop it at any moment and start it again.
"""

from ml_collections import ConfigDict

_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TASKS = {
    "needle": {"depths": _DEPTHS},
    "passkey": {"depths": _DEPTHS},
    "ruler/niah_single_2": {},
}

_METHODS = (
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
)


def get_config(task: str = "") -> ConfigDict:
    """The fields of `throughput.Throughput`, of the keys or of the task named."""
    options = {task: {}} if task else _TASKS
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
            "budget_steps": (1024, 512, 256),
            "prefill_chunk": 64,  # p
            "methods": _METHODS[:3] if task else _METHODS,
            "tasks": tuple(
                {"name": name, "options": each} for name, each in options.items()
            ),
            "num_examples": 12 // len(options),
            "prompt_tokens": 3000,
            "max_new_tokens": (512,),
            "min_timed_batches": 1,
        }
    )
