"""Compares twelve ways to split one budget between heads.

    python experiments/run.py --config=configs/heads.py:25 --workdir=runs/heads/25

The number after the colon is the percentage of a prompt's KV pairs that all heads keep.
SmolLM2-135M-Instruct reads prompts of 1,000 tokens, evicting while it reads, 16 pairs
at a time, with sinks and newest pairs pinned, in which a pass key or a magic number is
hidden: three wordings, 20 prompts each, two of them in text, `passkey` in noise. Beside
it, how far predictions on other text are from the full cache's. Sizes come from the
calibration that ships with the package; of the text, Python's reference, a tenth was in
its texts. `--haystack=FOLDER` takes other text, `--config.prompt_tokens=2000` longer
prompts.

*Alike*: uniform. *Pyramid*: layers, by depth. *Squeeze*: layers, by how much attention
changes the residual stream (SqueezeAttention, p = 0.35, measured on the calibration's
texts). *Squeeze capped*: the same, at most the prompt's length. *By layer*: calibrated
layers. *Ada*: calibrated heads within each layer. *By head*: calibrated heads over all
layers. *Half way*, *over a third*, *a quarter*: interpolated that far from these to
uniform. *By loss alone*: heads interpolated a third towards uniform, then moved along
the gradient of the loss that evicting costs `retrieval_heads` (`kvjax.training`). *By
loss*: these, interpolated 15% towards uniform. `:25,alike,by_head` runs only these
rows. *Retrieval heads* rank by KeyDiff in large heads, by average attention in the
others. SnapKV evicts after the prompt.

Layer by layer, so that nothing is timed: about an hour on two CPU cores with matrix
units for bfloat16, twice that in others' float32 (`--config.dtype=float32`); some rows
on one core and the others on another (`taskset -c 0`, `-c 1`) are done a third sooner.
Stop it at any moment and start it again. `python experiments/report.py runs/heads/*`
joins runs, and `experiments/gallery/budget_pictures.py` draws how well each budget rule
does as fewer pairs are kept.
"""

from ml_collections import ConfigDict, FieldReference

_RULES = [
    *("alike", "pyramid", "squeeze", "squeeze_capped", "by_layer", "ada"),
    *("half_way", "over_a_third", "a_quarter", "by_head", "by_loss_alone", "by_loss"),
]
_SOME = *_RULES[:5], "over_a_third", "by_head"
_POLICIES = {  # the rule, when it evicts, the fewest pairs of a head, who shares out
    "KeyDiff": ("key_diff", "prefill_and_decode", 40, _RULES[:-2]),
    "Retrieval heads": (
        "kvjax.policies:retrieval_heads",
        "prefill_and_decode",
        40,
        _RULES[1:],  # with all heads alike it is KeyDiff; the loss is of this rule
    ),
    "Average": ("average_attention", "prefill_and_decode", 40, _SOME),
    "SnapKV": ("snapkv", "after_prefill", 64, _SOME),  # whose window stays
    "Streaming": ("streaming", "prefill_and_decode", 64, _SOME),
}
_WHOLE = {"prefill_chunk": 64}  # where none is evicted while reading: sooner done
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TASKS = {
    "needle": {"depths": _DEPTHS},
    "passkey": {"depths": _DEPTHS},
    "ruler/niah_single_2": {},
}


def _rule(how: str, floor: int) -> str | dict:
    """A rule that shares out pairs, by its name here."""
    by_need = {"name": "calibrated", "floor": floor}
    squeezed = {"name": "squeeze", "least": floor, "source": "calibration"}
    return {
        "alike": "uniform",
        "pyramid": {"name": "pyramid", "beta": 4.0, "least": floor},
        "squeeze": squeezed,
        "squeeze_capped": squeezed | {"capped": True},
        "by_layer": by_need | {"among": "layers"},
        "ada": {"name": "ada", "floor": floor},
        "half_way": by_need | {"even": 0.5},
        "over_a_third": by_need | {"even": 0.35},
        "a_quarter": by_need | {"even": 0.25},
        "by_head": by_need,
        "by_loss_alone": by_need | {"target": "loss", "multiple": 32},
        "by_loss": by_need | {"target": "loss", "even": 0.15, "multiple": 8},
    }[how]


def get_config(which: str = "25") -> ConfigDict:
    """The fields of `quality.Quality` for a percentage of the pairs, and some rules."""
    percent, *wanted = which.split(",")
    unknown = sorted({*wanted} - {*_RULES})
    if unknown:
        raise OSError(f"{unknown[0]!r} shares nothing out: use {', '.join(_RULES)}")
    length = FieldReference(1000)
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "bfloat16",
            "memory_gb": 8.0,
            "seed": 0,
            "haystack": "",
            "layerwise": True,
            "budget": f"{percent}%",
            "pinned": (4, 16),
            "prefill_chunk": 16,
            "evict_size": 16,
            "methods": (
                {"name": "Full cache"} | _WHOLE,
                *(
                    {
                        "name": f"{name}, {how.replace('_', ' ')}",
                        "series": name,
                        "policy": policy,
                        "schedule": phases,
                        "budget_rule": _rule(how, floor),
                    }
                    | (_WHOLE if phases == "after_prefill" else {})
                    for name, (policy, phases, floor, rules) in _POLICIES.items()
                    for how in rules
                    if not wanted or how in wanted
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
