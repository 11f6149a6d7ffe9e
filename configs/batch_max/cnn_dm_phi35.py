"""Batch-Max on CNN/DailyMail summaries, Phi-3.5-mini, as far as it can be repeated.

    python experiments/run.py --config=configs/batch_max/cnn_dm_phi35.py \
        --workdir=runs/batch_max_cnn_dm_phi35

From the paper (Metel et al. 2024, arXiv 2412.05693): the task and the model (tables 1
and 2), 512 generated tokens, and how each method's batch is found (section 4.1).

Our choice, for want of the paper's tables: |kv|, p, the memory (all of the device), the
number of prompts, and the prompts' length, that of a long article. *Staggered* is not
in the paper.

Speed depends on shapes alone, so weights and prompts are random unless `--config.model`
names a folder that holds real weights. Then the prompts are the task's, cut to this
length, and their answers are graded; its rows come from `--data_dir`, see
`kvjax.evaluation.tasks.data`.
"""

from ml_collections import ConfigDict, FieldReference


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`, and what its methods share."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "random:phi-3.5-mini",
            "dtype": "bfloat16",
            "memory_gb": 0,  # the device's own limit
            "seed": 0,
            "haystack": "",
            "budget": FieldReference(512, field_type=object),  # |kv|
            "prefill_chunk": 64,  # p
            "methods": ("FKV", "ED", "Batch-Max", "Staggered SnapKV"),
            "tasks": ({"name": "cnn_dailymail"},),
            "data_dir": "",
            "num_examples": 240,
            "prompt_tokens": 1024,
            "max_new_tokens": (512,),
            "min_timed_batches": 3,
        }
    )
