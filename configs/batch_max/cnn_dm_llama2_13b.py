"""Batch-Max on CNN/DailyMail summaries, Llama 2 13B, as far as it can be repeated.

    python experiments/run.py --config=configs/batch_max/cnn_dm_llama2_13b.py \
        --workdir=runs/batch_max_cnn_dm_llama2_13b

From the paper (Metel et al. 2024, arXiv 2412.05693): the task and the model (tables 1
and 2), 512 generated tokens, and how each method's batch is found (section 4.1).

Our choice, for want of the paper's tables: |kv|, p, the memory (all of the device), the
number of prompts, and the prompts' length, that of a long article. *Staggered* is not
in the paper.

Speed depends on shapes alone, so the weights are random unless `--config.model` names a
folder that holds them. Without real weights prompts are random tokens; with them,
pass-key prompts of this length. CNN/DailyMail itself is not graded.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The fields of `kvjax.throughput.Throughput`, and what its methods share."""
    return ConfigDict(
        {
            "kind": "throughput",
            "model": "random:llama-2-13b",
            "dtype": "bfloat16",
            "memory_gb": 0,  # the device's own limit
            "seed": 0,
            "haystack": "",
            "budget": 512,  # |kv|
            "prefill_chunk": 64,  # p
            "methods": ("FKV", "ED", "Batch-Max", "Staggered SnapKV"),
            "prompts": 240,
            "prompt_tokens": 1024,
            "depths": (0.1, 0.3, 0.5, 0.7, 0.9),
            "max_new_tokens": (512,),
            "repeats": 3,
        }
    )
