"""Batch-Max by the settings of its paper: three tasks, two models.

    python experiments/run.py --config=configs/batch_max/paper.py:cnn_dm_llama2_13b \\
        --workdir=runs/batch_max_cnn_dm_llama2_13b

What follows the colon is a task and a model, one of `SIZES` below. With `,search` after
it (`paper.py:cnn_dm_llama2_13b,search`) Batch-Max's |kv| and batch are not the paper's
but sought on the device that is there, which takes real weights.

From the paper (Metel et al. 2024, arXiv 2412.05693): 960 test samples of at most 3,584
tokens, and 512 new tokens, whatever ends a text; CNN/DailyMail with one shot and
NarrativeQA with two, graded by ROUGE-2, GSM8K with sixteen by accuracy; p = 64, tokens
that are read and pairs that are evicted at a time; Batch-Max's |kv| and batches,
divisors of 960; ED at |kv| 2 and 65, and the full cache, at b0 - 1 (section 4.1).

One device stands for several: of 128 or 64 GB for four or two V100 of 32 GB (Llama 2),
of 48 GB for four TITAN V of 12 GB (Phi-3.5). That GSM8K, where |kv| times batch is
about half as large, had two V100 and the others four is our reading. So is which of
three pairs of |kv| and batch belongs to which task of Phi-3.5-mini, whose keys are
rotated as for its whole context, with LongRoPE's long factors, at any length. Weights
are of 16 bits, here bfloat16. Which samples are drawn, and that longer ones lose their
middle, is our choice; so is that ED evicts |kv| - 1 pairs, which leaves the newest, as
a warning says.

Speed depends on shapes alone, so weights are random, and prompts 3,584 random tokens,
unless `--config.model` names a folder that holds real weights. Then the prompts are the
task's, and their answers are graded; its rows come from `--data_dir`, see
`kvjax.evaluation.tasks.data`.

We have not run this: it takes such a device. `--config.memory_gb=0` takes what there
is, and a batch that does not fit is refused.
"""

from ml_collections import ConfigDict

_MODELS = {"llama2_13b": "random:llama-2-13b", "phi35": "random:phi-3.5-mini"}
_TASKS = {  # and their shots
    "cnn_dm": ("cnn_dailymail", 1),
    "narrativeqa": ("narrativeqa", 2),
    "gsm8k": ("gsm8k", 16),
}
SIZES = {  # GB, and Batch-Max's |kv| and batch
    "cnn_dm_llama2_13b": (128.0, ((1024, 32), (896, 40))),
    "narrativeqa_llama2_13b": (128.0, ((1792, 15), (1728, 16))),
    "gsm8k_llama2_13b": (64.0, ((1536, 8), (1408, 10))),
    "cnn_dm_phi35": (48.0, ((2176, 5),)),
    "narrativeqa_phi35": (48.0, ((1984, 6),)),
    "gsm8k_phi35": (48.0, ((1664, 8),)),
}
_SOUGHT = (
    {"name": "Batch-Max", "batch_rule": "search", "policy": "average_attention"},
)


def get_config(which: str = "cnn_dm_llama2_13b") -> ConfigDict:
    """The fields of `throughput.Throughput` for one of `SIZES`, ",search" behind it."""
    which, _, how = which.partition(",")
    if which not in SIZES or how not in ("", "search"):
        raise OSError(
            f"no {which!r}{how and f' with {how!r}'}: write paper.py:NAME, or "
            f"paper.py:NAME,search; NAME is one of {', '.join(SIZES)}"
        )
    memory, sizes = SIZES[which]
    model = next(name for name in _MODELS if which.endswith(name))
    task, shots = _TASKS[which.removesuffix(f"_{model}")]
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": _MODELS[model],
            "dtype": "bfloat16",
            "memory_gb": memory,
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
                *(_SOUGHT if how else map(_fixed, sizes)),
            ),
            "tasks": ({"name": task, "options": {"shots": shots}},),
            "data_dir": "",
            "num_examples": 960,
            "prompt_tokens": 3584,
            "max_new_tokens": (512,),
            "min_timed_batches": 3,
        }
    )


def _fixed(sizes: tuple[int, int]) -> dict:
    """Batch-Max at a |kv| and a batch."""
    budget, batch = sizes
    return {
        "name": f"Batch-Max, {budget} pairs",
        "batch_rule": "fixed",
        "batch_size": batch,
        "policy": "average_attention",
        "budget": budget,
    }
