"""Compares more KV pairs in fewer bits with fewer pairs in more bits, at equal bytes.

    python experiments/run.py --config=configs/equal_bytes.py:25 --workdir=runs/bytes/25

The number after the colon is the size of the cache in percent of the full cache's bytes
in bfloat16, positions included. SmolLM2-135M-Instruct reads prompts of 1,000 tokens,
evicting 32 pairs at a time during prefill, with sinks and newest pairs pinned. Each
prompt hides a pass key or a magic number: three wordings, 20 prompts each. Three
policies with uniform heads, and *retrieval heads* with calibrated heads (see heads.py),
keep as many pairs of 16 bits, 8, 8 and 4, or 4 as these bytes hold. The records also
have the KL to the full cache's predictions on other text. `--config.prompt_tokens=2000`
is for longer prompts.

Layer by layer, so that nothing is timed: half an hour on two CPU cores with matrix
units for bfloat16, an hour in others' float32 (`--config.dtype=float32`), which holds
the pairs of 16 bits in twice the bytes that are meant. Stop it at any moment and start
it again. `python experiments/report.py runs/bytes/*` joins runs.
"""

from ml_collections import ConfigDict, FieldReference

_BYTES = {"16 bits": 260, "8 bits": 136, "8 and 4 bits": 106, "4 bits, rotated": 76}
_CODECS = {
    "16 bits": "identity",
    "8 bits": "int8",
    "8 and 4 bits": "k8v4",
    "4 bits, rotated": "int4_rotated",
}
_BY_NEED = {"name": "calibrated", "even": 0.25, "floor": 64}
_POLICIES = {  # and how pairs are shared out among heads
    "KeyDiff": ("key_diff", "uniform"),
    "Average": ("average_attention", "uniform"),
    "SnapKV": ("snapkv", "uniform"),
    "Retrieval heads": ("kvjax.policies:retrieval_heads", _BY_NEED),
}
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TASKS = {
    "needle": {"depths": _DEPTHS},
    "passkey": {"depths": _DEPTHS},
    "ruler/niah_single_2": {},
}


def get_config(percent: str = "25") -> ConfigDict:
    """The fields of `quality.Quality` for a percentage of the bytes."""
    length, part = FieldReference(1000), float(percent)
    if not 0 < part <= 100:
        raise OSError(f"{percent}% of the bytes: write more than 0, and at most 100")
    share = lambda codec: min(100.0, part * _BYTES["16 bits"] / _BYTES[codec])
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "bfloat16",
            "memory_gb": 8.0,
            "seed": 0,
            "haystack": "",
            "layerwise": True,
            "pinned": (4, 16),
            "prefill_chunk": 32,
            "evict_size": 32,
            "methods": (
                {"name": "Full cache"},
                *(
                    {
                        "name": f"{name}, {bits}",
                        "series": f"{name}, {bits}",
                        "policy": policy,
                        "budget": f"{share(bits):.1f}%",
                        "budget_rule": rule,
                        "codec": codec,
                    }
                    for bits, codec in _CODECS.items()
                    for name, (policy, rule) in _POLICIES.items()
                ),
            ),
            "num_examples": 20,
            "prompt_tokens": length,
            "max_new_tokens": 16,
            "tasks": tuple(
                {"name": name, "options": options} for name, options in _TASKS.items()
            ),
            "fidelity": {
                "num_windows": 8,
                "prompt_tokens": length,  # of one length, as shares are of the longest
                "continuation_tokens": 64,
            },
        }
    )
