"""The sizes of everything that `device_day.py` measures, and its options."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import kernel_proofs
from bench_kernels import BLOCK, DECODE, Shape

from kvjax.models import presets

Row = dict[str, Any]


class Absent(Exception):
    """Raised by a step that cannot run on this machine, with the reason in one line."""


class Comparison(NamedTuple):
    """A throughput config with changes.

    Attributes:
      config: its path in the repository, and the argument of its `get_config`.
      changes: fields that replace the config's.
      more: additional methods.
      prompts: number of prompts for the full cache, and for compressed ones.
      or_less: whether a device with less memory runs with all the memory it has.
    """

    config: tuple[str, ...]
    changes: Row
    more: tuple[Row, ...] = ()
    prompts: tuple[int, int] = (96, 240)
    or_less: bool = False


class Sizes(NamedTuple):
    """Sizes of all measurements: `FULL`, or `TOY` for a test on a CPU.

    Attributes:
      proofs: groups of cases for the kernels.
      shapes: of decode steps and of prefill chunks, each timed `repeats` times.
      model, dtype: the large model, of `presets`.
      step: rows, slots per head, and steps per timed call.
      planned: rows, prompt tokens, new tokens and budget of the batch whose peak memory
        is compared with its plan.
      comparisons: by the title of their parts.
      precision, rivals: fields that replace those of SmolLM2's configs; `methods` of
        the first are names.
    """

    proofs: dict[str, list[kernel_proofs.Case]]
    shapes: tuple[Sequence[Shape], Sequence[Shape]]
    repeats: int
    model: str
    dtype: str
    step: tuple[int, int, int]
    planned: tuple[int, int, int, int]
    comparisons: dict[str, Comparison]
    precision: Row
    rivals: Row


class Asked(NamedTuple):
    """The options of the command."""

    workdir: pathlib.Path
    toy: bool = False
    gguf: str = ""
    baseline_python: str = ""

    @property
    def sizes(self) -> Sizes:
        if not self.toy:
            return FULL
        presets.CONFIGS.setdefault(TOY.model, TOY_CONFIG)
        return TOY


def _staggered(budget: int) -> Row:
    """Returns a method that the paper's config does not have."""
    method = {"name": "Staggered SnapKV", "batch_rule": "staggered"}
    return method | {"policy": "snapkv", "budget": budget}


_8B = "configs/batch_max/random_8b.py"
_PAPER = "configs/batch_max/paper.py"
_ONE_BATCH = {"min_timed_batches": 1}
FULL = Sizes(
    proofs=kernel_proofs.GROUPS,
    shapes=(DECODE, BLOCK),
    repeats=30,
    model="llama-3.1-8b",
    dtype="bfloat16",
    step=(64, 2048, 32),
    planned=(64, 2048, 64, 1024),
    comparisons={
        "8B, 4,000 tokens": Comparison(
            (_8B,),
            {"memory_gb": 48.0, "max_new_tokens": (512,), **_ONE_BATCH},
            or_less=True,
        ),
        "8B, 20,000 tokens": Comparison(
            (_8B,),
            {
                "memory_gb": 48.0,
                "prompt_tokens": 20_000,
                "max_new_tokens": (2000,),
                "budget": 4096,
                **_ONE_BATCH,
            },
            prompts=(16, 48),
            or_less=True,
        ),
        "13B, 64 GB": Comparison(
            (_PAPER, "gsm8k_llama2_13b"),
            _ONE_BATCH,
            more=(_staggered(1536),),
            prompts=(20, 40),
        ),
        "13B, 128 GB": Comparison(
            (_PAPER, "cnn_dm_llama2_13b"),
            _ONE_BATCH,
            more=(_staggered(1024),),
            prompts=(60, 80),
        ),
    },
    precision={
        "methods": ("Full cache", "Batch-Max", "KeyDiff"),
        "memory_gb": 0,
        "num_examples": 48,
        "fidelity": {
            "num_windows": 16,
            "prompt_tokens": 768,
            "continuation_tokens": 32,
        },
    },
    rivals={
        "memory_gb": 4.0,
        "num_examples": 240,
        "max_new_tokens": (128,),
        "min_timed_batches": 2,
        "baselines": (
            {"policy": None},
            {
                "policy": "snapkv",
                "budget": 512,
                "options": {"window_size": 32, "kernel_size": 7},
            },
        ),
    },
)

_SMALL = {
    "model": "random:toy",
    "dtype": "float32",
    "memory_gb": 0.004,
    "prompt_tokens": 128,
    "max_new_tokens": (3,),
    "budget": 64,
    "prefill_chunk": 16,
    **_ONE_BATCH,
}
TOY = Sizes(
    proofs=kernel_proofs.TOY_GROUPS,
    shapes=([Shape(2, 2, 2, 1, 64, 16)], [Shape(2, 2, 2, 8, 64, 16)]),
    repeats=3,
    model="toy",
    dtype="float32",
    step=(2, 128, 4),
    planned=(4, 128, 4, 64),
    comparisons={"toy": Comparison((_8B,), _SMALL, prompts=(2, 4))},
    precision={
        "methods": ("Full cache",),
        "memory_gb": 0,
        "num_examples": 2,
        "prompt_tokens": 120,
        "max_new_tokens": 4,
        "budget": 32,
        "prefill_chunk": 16,
        "fidelity": {"num_windows": 2, "prompt_tokens": 48, "continuation_tokens": 4},
    },
    rivals={
        "methods": ("FKV",),
        "memory_gb": 0,
        "num_examples": 2,
        "prompt_tokens": 120,
        "max_new_tokens": (4,),
        "prefill_chunk": 16,
        **_ONE_BATCH,
    },
)
TOY_CONFIG = {  # of the model that its name stands for
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
