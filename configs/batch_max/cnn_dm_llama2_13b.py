"""Batch-Max on CNN/DailyMail, Llama 2 13B: the paper's settings.

    python experiments/run.py --config=configs/batch_max/cnn_dm_llama2_13b.py \\
        --workdir=runs/batch_max_cnn_dm_llama2_13b

From the paper (Metel et al. 2024, arXiv 2412.05693): 960 test samples of at most 3,584
tokens, one shot, graded by ROUGE-2, and 512 new tokens, whatever ends a text; p = 64,
tokens that are read and pairs that are evicted at a time; |kv| 1,024 at batch 32 and
896 at batch 40, divisors of 960, for Batch-Max; ED at |kv| 2 and 65, and the full
cache, at b0 - 1 (section 4.1).

One device of 128 GB stands for four V100 of 32 GB. The paper has four or two of them;
that GSM8K, where |kv| times batch is about half as large, had two, and this task four,
is our reading. Weights are of 16 bits, here bfloat16. Which samples are drawn, and that
longer ones lose their middle, is our choice; so is that ED evicts |kv| - 1 pairs, which
leaves the newest, as a warning says.

Speed depends on shapes alone, so weights are random, and prompts 3,584 random tokens,
unless `--config.model` names a folder that holds real weights. Then the prompts are the
task's, and their answers are graded; its rows come from `--data_dir`, see
`kvjax.evaluation.tasks.data`.

We have not run this: it takes a device that offers 128 GB. `--config.memory_gb=0` takes
what there is, and a batch that does not fit is refused.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`, and what its methods share."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "random:llama-2-13b",
            "dtype": "bfloat16",
            "memory_gb": 128.0,
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
                    "name": "Batch-Max, 1024 pairs",
                    "batch_rule": "fixed",
                    "batch_size": 32,
                    "policy": "average_attention",
                    "budget": 1024,
                },
                {
                    "name": "Batch-Max, 896 pairs",
                    "batch_rule": "fixed",
                    "batch_size": 40,
                    "policy": "average_attention",
                    "budget": 896,
                },
            ),
            "tasks": ({"name": "cnn_dailymail", "options": {"shots": 1}},),
            "data_dir": "",
            "num_examples": 960,
            "prompt_tokens": 3584,
            "max_new_tokens": (512,),
            "min_timed_batches": 3,
        }
    )
