"""PyTorch libraries beside kvjax: the same prompts, in an environment of their own.

    protocol    a worker process under another interpreter, and JSON lines to and fro
    throughput  `measure`: transformers and kvpress timed under one memory limit
    memory      how many bytes they should need, and the search for the largest batch
    presses     kvpress' presses by the names that our policies have
    decoding    prefill and greedy decoding with transformers
    worker      what `throughput` runs under the other interpreter

`decoding` and `worker` need torch, `throughput` needs kvjax; the others need neither,
and both sides import them.
"""

from baselines.protocol import Baseline, BaselineDied, BaselineError, serve

__all__ = ["Baseline", "BaselineDied", "BaselineError", "serve"]
