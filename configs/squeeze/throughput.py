"""SqueezeAttention's Table 3 on a CPU: tokens per second against the batch.

    python experiments/run.py --config=configs/squeeze/throughput.py \\
        --workdir=runs/squeeze_throughput

Wang and Gan 2024, arXiv 2404.04793, Table 3: how fast tokens come at growing batches,
until memory is full. Here SmolLM2-135M-Instruct in 1.2 GB, prompts of 512 tokens in
which a pass key is hidden, 128 new tokens for each: the full cache; H2O with a fifth of
the pairs, in sizes by what heads need, as a share has them here; H2O squeezed (p =
0.35, cosines of the calibration that ships with the package). Both read the whole
prompt before they choose; decoding holds the budget and drops one pair for every new
one, as Algorithm 1 has it. Retrieval heads with a fifth evict while they read. What
holds whole prompts has room for 15 of them; *pool* reads them a few at a time and
decodes all together.

The records in docs/data/squeeze_throughput.jsonl are of the schedule `after_prefill`,
which chooses once and lets the 128 new pairs come on top: at 5 and 15 at once 59 and 80
tokens per second end to end with the full cache, H2O 58 and 87 (pool: 99), squeezed 61
and 86 (97, and no key found), retrieval heads 67 and 101 (30: 103). A quarter of an
hour on two EPYC cores with nothing beside it.
"""

from ml_collections import ConfigDict

_BATCHES = {  # 15 is the most for whoever holds whole prompts; None: a pool of all
    "Full cache": (5, 10, 15),
    "H2O": (5, 15, None),
    "H2O, squeezed": (5, 15, None),
    "Retrieval heads": (5, 15, 30),
}
_STEP_BY_STEP = {"policy": "h2o", "schedule": "decode_only", "evict_size": 1}
_FIELDS = {
    "Full cache": {},
    "H2O": _STEP_BY_STEP,
    "H2O, squeezed": _STEP_BY_STEP
    | {"budget_rule": {"name": "squeeze", "p": 0.35, "source": "calibration"}},
    "Retrieval heads": {
        "policy": "kvjax.policies:retrieval_heads",
        "schedule": "prefill_and_decode",
        "budget_rule": {"name": "calibrated", "even": 0.25, "floor": 64},
        "pinned": (4, 16),
        "prefill_chunk": 32,
    },
}


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 1.2,
            "seed": 0,
            "haystack": "",
            "prefill_chunk": 64,
            "methods": tuple(
                _method(name, batch) for name in _FIELDS for batch in _BATCHES[name]
            ),
            "tasks": (
                {"name": "needle", "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)}},
            ),
            "num_examples": 30,
            "prompt_tokens": 512,
            "max_new_tokens": (128,),
            "min_timed_batches": 1,
        }
    )


def _method(name: str, batch: int | None) -> dict:
    told = f"{batch} at once" if batch else "pool"
    fields = {"name": f"{name}, {told}", "series": name} | _FIELDS[name]
    if batch:
        fields |= {"batch_rule": "fixed", "batch_size": batch}
    else:
        fields |= {"batch_rule": "staggered", "prefill_chunk": 256}
    return fields | ({"budget": "20%"} if _FIELDS[name] else {})
