"""SqueezeAttention's Figure 3: the score against the budget, with and without it.

    python experiments/run.py --config=configs/squeeze/budgets.py --workdir=runs/squeeze
    python experiments/run.py --config=configs/squeeze/budgets.py:0.8,40 \\
        --workdir=runs/p80

Wang and Gan 2024, arXiv 2404.04793, Figure 3 and Table 2: the three rules of
`smollm2.py`, at 10 to 80% of the pairs, shared out uniformly and by `squeeze` with p =
0.35. What follows the colon is another p, and the percentages if not all. The report's
pictures have a panel for each way; where two reach the same score, their budgets are a
row of the paper's Table 2.

SmolLM2-135M-Instruct reads 50 prompts of 500 tokens in which a pass key is hidden, all
of each before anything goes; decoding holds a layer's budget and drops one pair for
every new one, as Algorithm 1 has it. Whole models, as `squeeze` measures all layers of
a prompt before it says their sizes: an hour on two CPU cores. Stop it at any moment and
start it again. The records in docs/data/squeeze_budgets.jsonl are of the schedule
`after_prefill`, where the pairs of the 12 new tokens came on top of the budget; those
of three rows in docs/data/squeeze_decoding.jsonl are of this schedule.
"""

from ml_collections import ConfigDict

_PERCENTS = "10,20,40,60,80"
_POLICIES = {
    "H2O": {"policy": "h2o"},
    "Sliding window": {"policy": "recency"},
    "StreamingLLM": {"policy": "streaming", "options": {"sinks": 4}},
}


def get_config(which: str = "0.35") -> ConfigDict:
    """The fields of `quality.Quality`, and what methods and tasks share."""
    p, _, percents = which.partition(",")
    rules = {"": "uniform", ", squeezed": {"name": "squeeze", "p": float(p)}}
    return ConfigDict(
        {
            "model": "smollm2-135m-instruct",
            "dtype": "float32",
            "memory_gb": 3.0,
            "seed": 0,
            "haystack": "",
            "prefill_chunk": 64,
            "methods": (
                {"name": "Full cache"},
                *(
                    {
                        "name": f"{name}{way}, {percent}%",
                        "series": name,
                        "schedule": "decode_only",
                        "evict_size": 1,
                        "budget": f"{percent}%",
                        "budget_rule": rule,
                        **fields,
                    }
                    for percent in (percents or _PERCENTS).split(",")
                    for name, fields in _POLICIES.items()
                    for way, rule in rules.items()
                ),
            ),
            "tasks": (
                {
                    "name": "needle",
                    "options": {"depths": (0.1, 0.3, 0.5, 0.7, 0.9)},
                },
            ),
            "num_examples": 50,
            "prompt_tokens": 500,
            "max_new_tokens": 12,
        }
    )
