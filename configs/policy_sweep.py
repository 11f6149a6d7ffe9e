"""Every policy at three budgets under two schedules, and the full cache.

    python experiments/run.py --config=configs/policy_sweep.py --workdir=runs/sweep
    python experiments/run.py --config=configs/policy_sweep.py --workdir=runs/quick \
        --config.quick

SmolLM2-135M-Instruct reads prompts of 1,500 tokens with a hidden pass key, and goes on
with two texts of that length token by token, once for each of 133 methods: the 21
registered policies and StreamingLLM with renumbered positions, at 25%, 50% and 75% of
the prompt, evicting while they read and write (`prefill_and_decode`) or once after the
prompt (`after_prefill`). Stop it at any moment and start it again: it goes on where it
was. `heat_map.png` shows all of them, `pareto.png` the best for their memory.

Layer by layer (`kvjax.engine.layerwise`): nothing is timed. About an hour on two shared
CPU cores: 40 seconds for a method that evicts while it reads, 8 for one that waits,
since those share one reading. `--config.quick`, five policies at 50%, takes 4 minutes.

Expected: the full cache finds all keys. At 50%, evicting while reading, key_diff finds
6 of 6, average_attention, h2o, lag_kv and r_kv 5, snapkv 2; after the prompt, chunk_kv,
criticalkv, h2o, key_diff, lag_kv and r_kv 6. The figures are in docs/policies.md.

A quick run takes the fields in `quick_fields` in the place of those of the same name.
Any other field can be overridden, as in `--config.num_examples=24`, and in a quick run
`--config.quick_fields.num_examples=4`.
"""

from ml_collections import ConfigDict

_QUICK = ("average_attention", "key_diff", "random", "snapkv", "streaming")
_BLOCK = 128  # tokens per prefill step, and pairs per eviction
_BUDGETS = (768, 384, 1152)  # |kv|, pairs per head: 6, 3 and 9 blocks; a prompt has 12
_PHASES = ("prefill_and_decode", "after_prefill")
_SLOTS = "streaming, slot positions"  # as its paper has them; `streaming`: as they were

# Options are the papers' where those make sense at 1,500 tokens, and the comment says
# why where they do not.
_POLICIES = {
    "average_attention": {},
    "chunk_kv": {},
    "criticalkv": {},
    "expected_attention": {},
    "fastgen": {
        "special": (0, 1, 2),  # <|endoftext|>, <|im_start|>, <|im_end|>
        "punctuation": (30, 28, 43, 42, 17, 47, 198),  # . , ; : ! ? and line break
        # The paper's 30% of the prompt each, 450 pairs, are more than a budget of 384,
        # of which an eviction leaves 256.
        "heavy": 128,
        "local": 128,
    },
    "h2o": {},
    "h2o_sinks": {},
    "key_diff": {},
    "key_norm": {},
    "lag_kv": {},
    "r_kv": {},
    "random": {},
    "recency": {},
    "roco": {},
    "scissorhands": {},
    "scissorhands_released": {"heavy": 150},  # a tenth of the prompt, as the authors do
    "simlayerkv": {
        # The paper's 1,024 tokens are two thirds of the prompt. With these, about half
        # of SmolLM2's 30 layers are lazy (at 0.9 a quarter is, at 0.65 three quarters).
        "recent": 256,
        "threshold": 0.8,
    },
    "sliding_window": {},  # the window is the budget: the same as `recency`, a check
    "snapkv": {},
    "streaming": {},
    "tova": {},
}


def get_config() -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    return ConfigDict(
        {
            "quick": False,
            "quick_fields": {
                "methods": _methods(_QUICK, (768,)),
                "num_examples": 2,
                "tasks": _needle(0.3, 0.7),
                "fidelity": {"num_windows": 1},
            },
            "model": "smollm2-135m-instruct",  # or a GGUF file, or a model folder
            "dtype": "float32",
            "memory_gb": 4.0,  # enough for all prompts at once; 0: the device's limit
            "seed": 0,
            "layerwise": True,  # compiles a layer for each method, not a model
            "haystack": "",  # a folder of texts; empty: Python's own reference
            "prefill_chunk": _BLOCK,
            "methods": _methods((*_POLICIES, _SLOTS), _BUDGETS),
            # Needle: the pass key, at these depths of the text in turn.
            "num_examples": 6,
            "prompt_tokens": 1500,
            "tasks": _needle(0.1, 0.25, 0.4, 0.6, 0.75, 0.9),
            "max_new_tokens": 12,
            # Fidelity: the full cache's predictions on long text, teacher-forced.
            "fidelity": {
                "num_windows": 2,
                "prompt_tokens": 1500,
                "continuation_tokens": 64,
            },
        }
    )


def _methods(series: tuple[str, ...], budgets: tuple[int, ...]) -> tuple[dict, ...]:
    """The full cache, and every one at every budget under every schedule."""
    swept = (
        {
            "name": f"{each}, {budget}, {phases}",
            "series": each,
            "policy": "streaming" if each == _SLOTS else each,
            "options": _options(each, budget),
            "schedule": phases,
            "budget": budget,
            "rope_positions": "cache" if each == _SLOTS else "original",
        }
        for budget in budgets
        for phases in _PHASES
        for each in sorted(series)
    )
    return ({"name": "Full cache", "prefill_chunk": _BLOCK}, *swept)


def _needle(*depths: float) -> tuple[dict, ...]:
    return ({"name": "needle", "options": {"depths": depths}},)


def _options(series: str, budget: int) -> dict:
    if series == "sliding_window":
        return {"window": budget}
    return _POLICIES.get(series, {})
