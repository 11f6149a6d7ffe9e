"""KCache's Table 2: how many values have to be fetched, and from which layer on.

    python experiments/run.py --config=configs/kcache/quality.py --workdir=runs/kcache
    python experiments/run.py --config=configs/kcache/quality.py:3500 \\
        --workdir=runs/kcache_3500

SmolLM2-135M-Instruct reads prompts of 1,000 (or as many as asked for) tokens with a
pass key in them and goes on by N of the values in all layers but the first L, whose
values stay on the device: N in 16, 32, 64, 128 and L in 0 to 3 as in He and Wu 2024
(arXiv 2404.18057, Table 2, Llama-2-7B on GSM8K: about 15 with all values, 14.25 with N
= 128 and L = 1, 8.49 with L = 0). What is fetched is by group, each query naming its
own N; `renormalize` is off, as the paper states none, and on in rows that say so.
Beside it the same N pairs per head kept of all, by KeyDiff and by SnapKV once the
prompt is in: those are gone for good, while KCache looks again for every token. Of
longer prompts 128 alone, as fewer find nothing in 1,000 tokens.

The report has the share of keys found, the KL to the full cache's predictions over
texts of the same length, and the share of the same likeliest token. Prompts are read
once for all rows, layer by layer, so nothing is timed; see throughput.py for that. On
two CPU cores two hours; `--config.num_examples=12` for a look. Stop it at any moment
and start it again.
"""

from ml_collections import ConfigDict

_FETCHED = (16, 32, 64, 128)
_LAYERS = (0, 1, 2, 3)
_LATER = {"name": "after_prompt", "codec": "identity"}  # read as the full cache is


def _kcache(top_n: int, device_layers: int, renormalize: bool = False) -> dict:
    name = f"KCache, N = {top_n}, L = {device_layers}"
    return {
        "name": name + (", renormalized" if renormalize else ""),
        "codec": _LATER,
        "offload": {
            "top_n": top_n,
            "device_layers": device_layers,
            "renormalize": renormalize,
        },
    }


def _evicted(name: str, policy: str, budget: int) -> dict:
    return {
        "name": f"{name}, {budget}",
        "policy": policy,
        "schedule": "after_prefill",
        "budget": budget,
    }


def get_config(prompt_tokens: str = "1000") -> ConfigDict:
    """The fields of `quality.Quality`, for prompts of so many tokens."""
    length = int(prompt_tokens)
    kept = _FETCHED if length <= 1000 else _FETCHED[-1:]
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 8.0,
            "seed": 0,
            "haystack": "",
            "layerwise": True,
            "prefill_chunk": 128,
            "methods": (
                {"name": "Full cache"},
                *(_kcache(n, layers) for n in _FETCHED for layers in _LAYERS),
                *(_kcache(n, 1, renormalize=True) for n in _FETCHED),
                *(_evicted("KeyDiff", "key_diff", n) for n in kept),
                *(_evicted("SnapKV", "snapkv", n) for n in kept[-2:]),
            ),
            "tasks": (
                {
                    "name": "needle",
                    "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)},
                },
            ),
            "num_examples": 50,
            "prompt_tokens": length,
            "max_new_tokens": 12,
            "fidelity": {
                "num_windows": 4,
                "prompt_tokens": length,
                "continuation_tokens": 64,
            },
        }
    )
