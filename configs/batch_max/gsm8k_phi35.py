"""Batch-Max on GSM8K, Phi-3.5-mini: the paper's settings.

    python experiments/run.py --config=configs/batch_max/gsm8k_phi35.py \\
        --workdir=runs/batch_max_gsm8k_phi35

From the paper (Metel et al. 2024, arXiv 2412.05693): 960 test samples of at most 3,584
tokens, sixteen shots, graded by accuracy, and 512 new tokens, whatever ends a text; p =
64, tokens that are read and pairs that are evicted at a time; |kv| 1,664 at batch 8, a
divisor of 960, for Batch-Max; ED at |kv| 2 and 65, and the full cache, at b0 - 1
(section 4.1).

One device of 48 GB stands for four TITAN V of 12 GB. The paper has three pairs of |kv|
and batch for this model, 2,176 at 5, 1,984 at 6 and 1,664 at 8; that they belong to
CNN/DailyMail, NarrativeQA and GSM8K in this order is our reading. Keys are rotated as
for the whole context of 131,072 tokens, with LongRoPE's long factors, at any length.
Weights are of 16 bits, here bfloat16. Which samples are drawn, and that longer ones
lose their middle, is our choice; so is that ED evicts |kv| - 1 pairs, which leaves the
newest, as a warning says.

Speed depends on shapes alone, so weights are random, and prompts 3,584 random tokens,
unless `--config.model` names a folder that holds real weights. Then the prompts are the
task's, and their answers are graded; its rows come from `--data_dir`, see
`kvjax.evaluation.tasks.data`.

We have not run this: it takes a device that offers 48 GB. `--config.memory_gb=0` takes
what there is, and a batch that does not fit is refused.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`, and what its methods share."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "random:phi-3.5-mini",
            "dtype": "bfloat16",
            "memory_gb": 48.0,
            "seed": 0,
            "haystack": "",
            "prefill_chunk": 64,  # p
            "methods": (
                "FKV",
                {"name": "ED, 2 pairs", "batch_rule": "ed"},
                {
                    "name": "ED, 65 pairs",
                    "batch_rule": "ed",
                    "budget": 65,
                    "evict_size": 64,
                },
                {
                    "name": "Batch-Max, 1664 pairs",
                    "batch_rule": "fixed",
                    "batch_size": 8,
                    "policy": "average_attention",
                    "budget": 1664,
                },
            ),
            "tasks": ({"name": "gsm8k", "options": {"shots": 16}},),
            "data_dir": "",
            "num_examples": 960,
            "prompt_tokens": 3584,
            "max_new_tokens": (512,),
            "min_timed_batches": 3,
        }
    )
