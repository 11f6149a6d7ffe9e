"""A tiny model with a token per word, asked as the lm-evaluation-harness asks."""

import importlib.util
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
import transformers
from conftest import tiny_model

from kvjax.evaluation.lm_harness import Requests

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is not installed")
SPECIAL = ["<unk>", "<bos>", "<eos>", "<stop>"]
WORDS = [f"w{i}" for i in range(46)]
COMPRESSED = [
    ("streaming", "prefill_and_decode"),
    ("average_attention", "prefill_and_decode"),
    ("key_diff", "after_prefill"),
    ("average_attention", "decode_only"),
]
CASES = [(None, "none"), *COMPRESSED]


class Request(NamedTuple):
    """What the harness hands over, as far as a model looks at it."""

    args: tuple


def make_tokenizer(bos=False):
    """A token per word; words are `w0` to `w45`."""
    vocab = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<stop>"],
    )


def tiny():
    return tiny_model()._replace(tokenizer=make_tokenizer())


def answering(model, policy=None, phases="prefill_and_decode", **changes):
    given = {"policy": policy, "memory_gb": 0.05}
    if policy and policy != "full":
        given |= {"schedule": phases, "budget": 24, "prefill_chunk": 8}
    return Requests(model, **(given | changes))


def words(seed, count):
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def ids(model, text):
    return model.tokenizer(text)["input_ids"]


def requests(texts):
    return [Request(pair) for pair in texts]
