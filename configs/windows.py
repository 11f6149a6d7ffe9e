"""What eviction costs in a model most of whose layers have a sliding window.

    python experiments/run.py --config=configs/windows.py --config.model=gemma-3-270m \
        --workdir=runs/windows

Gemma 3 270M (a folder, here of that name) has 15 layers with a window of 512 tokens and
three without. It reads prompts of 1,400 tokens in which a pass key is hidden, evicting
32 pairs at a time, with half and a quarter of the pairs that the full cache keeps of
them: 512 in a layer with a window, 1,400 in the others. *Alike*: every head keeps the
same. *In proportion*: every head keeps that share of what its full cache would. Beside
it, how far predictions on other text are from the full cache's. An hour on two CPU
cores.
"""

from ml_collections import ConfigDict

_TOKENS, _WINDOW, _LAYERS, _GLOBAL = 1400, 512, 18, 6  # each sixth layer sees all
_SEEN = [_WINDOW if (i + 1) % _GLOBAL else _TOKENS for i in range(_LAYERS)]
_POLICIES = {"KeyDiff": "key_diff", "Average": "average_attention"}
_SIZES = {
    f"{share:.0%} {how}": sizes
    for share in (0.25, 0.5)
    for how, sizes in {
        "in proportion": tuple(round(share * seen) for seen in _SEEN),
        "alike": round(share * sum(_SEEN) / _LAYERS),
    }.items()
}


def get_config() -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    return ConfigDict(
        {
            "model": "gemma-3-270m",
            "dtype": "float32",
            "memory_gb": 4.0,
            "seed": 0,
            "haystack": "",
            "prefill_chunk": 32,
            "evict_size": 32,
            "pinned": (4, 16),
            "methods": (
                {"name": "Full cache"},
                *(
                    {
                        "name": f"{name}, {how}",
                        "series": name,
                        "policy": policy,
                        "budget": sizes,
                    }
                    for how, sizes in _SIZES.items()
                    for name, policy in _POLICIES.items()
                ),
            ),
            "num_examples": 20,
            "prompt_tokens": _TOKENS,
            "max_new_tokens": 12,
            "tasks": (
                {"name": "needle", "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)}},
            ),
            "fidelity": {
                "num_windows": 8,
                "prompt_tokens": 1336,
                "continuation_tokens": 64,
            },
        }
    )
