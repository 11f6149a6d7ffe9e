"""Compares codecs on the full cache: how far each one moves a model's predictions.

    python experiments/run.py --config=configs/codecs.py --workdir=runs/codecs
    python experiments/run.py --config=configs/codecs.py:after_prompt \\
        --config.fidelity.num_windows=120 --workdir=runs/codecs_after

SmolLM2-135M-Instruct reads prompts of 768 tokens and predicts the 64 that follow, with
all KV pairs stored by each codec. The records have the loss, the KL to the full cache's
predictions, the agreement of the likeliest token, and whether a pass key in a prompt of
1,000 tokens is found. Nothing is evicted, so every difference is the codec's. Pairs are
encoded during prefill, so the prompt attends to codes; `:after_prompt` encodes them
after it, and then all codecs share one prefill: 120 windows are 100,000 tokens of text.

Layer by layer, so that nothing is timed. `--config.fidelity.num_windows=1` and
`--config.num_examples=1` are for a first look. Stop it at any moment and start it
again.
"""

from ml_collections import ConfigDict

_CODECS = {
    "8 bits": "int8",
    "8 bits, groups of 32": {"name": "int8", "group": 32},
    "float of 8 bits": "fp8",
    "keys 8 bits, values 4": "k8v4",
    "4 bits": "int4",
    "4 bits, centred": {"name": "int4", "symmetric": False},
    "4 bits, outliers": "int4_outliers",
    "4 bits, rotated": "int4_rotated",
    "2 bits": "int2",
    "2 bits, rotated": "int2_rotated",
    "2 bits, keys by channel": "kivi",
    "4 bits, keys by channel": {"name": "kivi", "bits": 4},
}


def get_config(when: str = "as_it_comes") -> ConfigDict:
    """The fields of `quality.Quality`, for pairs encoded `as_it_comes` or after."""
    if when not in ("as_it_comes", "after_prompt"):
        raise OSError(f"{when!r} is not as_it_comes or after_prompt")
    later = lambda codec: {"name": "after_prompt", "codec": codec}
    how = later if when == "after_prompt" else lambda codec: codec
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 8.0,
            "seed": 0,
            "haystack": "",
            "layerwise": True,
            "prefill_chunk": 64,
            "methods": (
                {"name": "Full cache"},
                *(
                    {"name": name, "codec": how(codec)}
                    for name, codec in _CODECS.items()
                ),
            ),
            "num_examples": 20,
            "prompt_tokens": 1000,
            "max_new_tokens": 16,
            "tasks": ({"name": "passkey", "options": {"depths": (0.1, 0.5, 0.9)}},),
            "fidelity": {
                "num_windows": 8,
                "prompt_tokens": 768,
                "continuation_tokens": 64,
            },
        }
    )
