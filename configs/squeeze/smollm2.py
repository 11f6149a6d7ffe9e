"""SqueezeAttention: the same pairs in all layers, or shared out by what a prompt needs.

    python experiments/run.py --config=configs/squeeze/smollm2.py --workdir=runs/squeeze
    python experiments/run.py --config=configs/squeeze/smollm2.py:0.8 --workdir=runs/p80

Wang and Gan 2024, arXiv 2404.04793: layers whose attention changes the residual stream
little while the prompt is read keep the share p of the budget, 0.35 or what follows the
colon, and what they save goes to the others. Three rules, each with budgets shared out
uniformly and by `squeeze`, at equal memory: H2O, a sliding window, and StreamingLLM
with 4 sinks.

SmolLM2-135M-Instruct reads prompts of 500 tokens in which a pass key is hidden, all of
each before anything goes; decoding holds |kv| pairs and drops one for every new one, as
the paper has it. The window is the layer's budget, which is what `recency` keeps:
`sliding_window` has one width for all layers. The first batch of squeezed budgets
compiles once more when sizes are known, in its prefill's time: compare no rates.
`budgets.py` has the same rules at shares of 10 to 80%.

Expected, of 10 keys: H2O finds 5, the others 2; squeezed at 0.35 none, at 0.8 4 and 2.
docs/results/squeeze.md says why. Seven minutes of CPU time, four with programs of an
earlier run on disk.
"""

from ml_collections import ConfigDict, FieldReference

_POLICIES = {
    "H2O": {"policy": "h2o"},
    "Sliding window": {"policy": "recency"},
    "StreamingLLM": {"policy": "streaming", "options": {"sinks": 4}},
}


def get_config(p: str = "0.35") -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",  # or a GGUF file, or a model folder
            "dtype": "float32",
            "memory_gb": 2.0,  # 0: the device's own limit
            "seed": 0,
            "haystack": "",  # a folder of texts; empty: Python's own reference
            # |kv|, pairs per head: the mean over layers.
            "budget": FieldReference(128, field_type=object),
            "prefill_chunk": 64,
            "methods": ({"name": "Full cache"}, *_methods(float(p))),
            "num_examples": 10,
            "prompt_tokens": 500,
            "max_new_tokens": 12,
            "tasks": (
                {
                    "name": "needle",
                    "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)},
                },
            ),
        }
    )


def _methods(p: float):
    rules = "uniform", {"name": "squeeze", "p": p}
    return (
        {
            "name": name if rule == "uniform" else f"{name}, {rule['name']}",
            "schedule": "decode_only",
            "evict_size": 1,
            "budget_rule": rule,
            **fields,
        }
        for name, fields in _POLICIES.items()
        for rule in rules
    )
