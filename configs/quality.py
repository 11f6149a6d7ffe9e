"""Real tasks at half and a quarter of the prompt: the full cache and five policies.

    python experiments/run.py --config=configs/quality.py:xsum --data_dir=DATA \\
        --workdir=runs/quality/xsum

What follows the colon is one of `TASKS` below, and DATA a folder with the rows (JSON
lines, see `kvjax.evaluation.tasks.data`); without one they come from Hugging Face
datasets or tensorflow-datasets. SmolLM2-135M-Instruct in float32, layer by layer
(`kvjax.engine.layerwise`): nothing is timed. 3 to 15 minutes a task on two CPU cores.
Stop it at any moment and start it again. `python experiments/report.py runs/quality/*`
joins the tasks.

A budget is |kv|, pairs per head, the multiple of 64 next to 50% and 25% of a prompt's
mean length. Three policies evict while they read and write in blocks of 64 (Batch-Max's
schedule), two once after the prompt.
"""

from ml_collections import ConfigDict

# task, examples, longest prompt, budgets, options, most new tokens (None: the paper's)
TASKS = {
    "xsum": ("xsum", 8, 1024, (320, 192), {}, None),
    "gsm8k": ("gsm8k", 8, None, (832, 384), {"shots": 8}, None),
    "bbh_boolean": ("bbh/boolean_expressions", 10, None, (256, 128), {}, None),
    "bbh_date": ("bbh/date_understanding", 10, None, (384, 192), {}, None),
    "multi_news": ("multi_news", 6, 2048, (832, 384), {}, 128),
    "ruler": ("ruler_file/niah_multikey_3", 5, None, (2112, 1088), {}, None),
    "needle_1000": ("needle", 10, 1000, (512, 256), {}, 16),
    "needle_2000": ("needle", 5, 2000, (1024, 512), {}, 16),
    "needle_3500": ("needle", 5, 3500, (1728, 896), {}, 16),
}
POLICIES = {  # and their schedules
    "average_attention": "prefill_and_decode",
    "key_diff": "prefill_and_decode",
    "streaming": "prefill_and_decode",
    "snapkv": "after_prefill",
    "chunk_kv": "after_prefill",
}


def get_config(task: str = "xsum") -> ConfigDict:
    """The fields of `quality.Quality` for one of `TASKS`."""
    if task not in TASKS:
        raise OSError(
            f"no task {task!r}: write quality.py:NAME, one of {', '.join(TASKS)}"
        )
    name, examples, length, budgets, options, new = TASKS[task]
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 8.0,
            "seed": 0,
            "haystack": "",
            "data_dir": "",
            "layerwise": True,
            "prefill_chunk": 64,
            "methods": (
                {"name": "Full cache"},
                *(
                    {
                        "name": f"{policy}, {share:.0%}",
                        "series": policy,
                        "policy": policy,
                        "schedule": phases,
                        "budget": budget,
                        "budget_share": share,
                    }
                    for budget, share in zip(budgets, (0.5, 0.25), strict=True)
                    for policy, phases in POLICIES.items()
                ),
            ),
            "tasks": (
                {
                    "name": name,
                    "num_examples": examples,
                    "prompt_tokens": length,
                    "max_new_tokens": new,
                    "options": options,
                },
            ),
        }
    )
