"""Runs PyTorch libraries on the prompts of kvjax, in their own environment.

    protocol    starts a worker under another interpreter, exchanges JSON lines with it
    throughput  `measure` times transformers and kvpress under one memory limit
    memory      searches for the largest batch that fits
    presses     kvpress' presses by the names of our policies
    decoding    prefill and greedy decoding with transformers
    worker      the script that `throughput` runs under the other interpreter
    questions   one more, for `engine/shared_document.py`

`decoding`, `questions` and `worker` need torch, `throughput` needs kvjax; the others
need neither, and both sides import them.
"""

from baselines.protocol import Baseline, BaselineDied, BaselineError, serve

__all__ = ["Baseline", "BaselineDied", "BaselineError", "serve"]
