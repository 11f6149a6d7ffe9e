"""KCache: keys on the device, values in host memory; speed and batch at two limits.

    python experiments/run.py --config=configs/kcache/throughput.py \\
        --workdir=runs/kcache_speed

He and Wu 2024, arXiv 2404.18057. SmolLM2-135M-Instruct reads prompts of nearly 1,500
tokens with a pass key in them and generates exactly 128 for each. What is on the device
may take 2 GB, the values besides 6 GB of host memory. The full cache runs at the
largest batch that fits; KCache reads a few prompts at a time with all their values at
hand, moves these to the host, and decodes all rows together; staggered SnapKV evicts
where KCache moves.

A CPU has one memory for both, and no link between them: what the batches gain is real
here, what the link costs is not. The roofline in the records knows a link where the
device has a rate for it. The paper's device is in
`experiments/memory/memory_arithmetic.py --only=kcache`. Takes a quarter of an hour on
two CPU cores. We saw 24 rows where the full cache has 17 (docs/results/offload.md).
"""

from ml_collections import ConfigDict


def _kcache(top_n: int) -> dict:
    return {
        "name": f"KCache, N = {top_n}",
        "batch_rule": "staggered",
        "prefill_chunk": 256,
        "codec": {"name": "after_prompt", "codec": "identity"},
        "offload": {"top_n": top_n, "device_layers": 1, "memory_gb": 6.0},
    }


def get_config() -> ConfigDict:
    """The fields of `throughput.Throughput`."""
    return ConfigDict(
        {
            "experiment": "throughput",
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 2.0,
            "seed": 0,
            "haystack": "",
            "budget": 512,
            "prefill_chunk": 64,
            "methods": (
                "FKV",
                *map(_kcache, (32, 64, 128)),
                {
                    "name": "Staggered SnapKV",
                    "batch_rule": "staggered",
                    "policy": "snapkv",
                    "prefill_chunk": 256,
                },
            ),
            "tasks": (
                {"name": "needle", "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)}},
            ),
            "num_examples": 24,
            "prompt_tokens": 1500,
            "max_new_tokens": (128,),
            "min_timed_batches": 1,
        }
    )
