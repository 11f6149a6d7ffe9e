"""Shared by the scripts of this folder: prompts, small models, counted decode steps."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers
import transformers
from absl import flags

import kvjax
from kvjax.engine.device import DeviceExecutor
from kvjax.evaluation.report import records
from kvjax.evaluation.tasks import text
from kvjax.models import decoder
from kvjax.types import Model, ModelSpec, UserError

TINY = "tiny"
_SPEC = ModelSpec(
    name=TINY,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    model_dim=64,
    ff_dim=128,
    vocab_size=256,
    context_length=4096,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
)


class Timed(NamedTuple):
    """What a call returned, and its seconds."""

    result: Any
    seconds: float


def define_model_flags(memory_gb: float | None = None) -> None:
    flags.DEFINE_string(
        "model", "smollm2-135m-instruct", f"a name kvjax.load knows, or {TINY!r}"
    )
    flags.DEFINE_string("dtype", "float32", "of weights and KV pairs")
    flags.DEFINE_float("memory_gb", memory_gb, "for weights and KV pairs; None is all")
    flags.DEFINE_integer("seed", 0, "of lengths, texts and keys", 0)


def model_of(options: Any) -> Model:
    """Loads the model that the flags name; `tiny` has random weights."""
    if options.model == TINY:
        return tiny_model()
    return kvjax.load(options.model, dtype=options.dtype)


def tiny_model(**changes: Any) -> Model:
    """Returns two small layers, whose tokens are bytes."""
    spec = dataclasses.replace(_SPEC, **changes)
    params = jax.jit(decoder.random_params, static_argnums=0)(spec, jax.random.key(0))
    return Model(spec, params, _bytes_tokenizer())


def _bytes_tokenizer() -> Any:
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab = {name: token for token, name in enumerate(sorted(split.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer, core.decoder = split, tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def passages(model: Model, count: int, tokens: int) -> list[list[int]]:
    """Returns consecutive passages of prose, `tokens` token ids each."""
    encode = model.tokenizer
    ids = encode(text.haystack(), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < count * tokens:
        raise UserError(
            f"{count} prompts of {tokens} tokens: the text has {len(ids):,} tokens, so "
            "give fewer or shorter prompts"
        )
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]


def timed(call: Callable[[], Any]) -> Timed:
    start = time.perf_counter()
    result = call()
    return Timed(result, time.perf_counter() - start)


@contextlib.contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Yields a list that gets the decode steps of every call of `DeviceExecutor.step`.

    Steps that read prompts beside rows that decode are among them; those that only read
    are not.
    """
    counts: list[int] = []
    whole = DeviceExecutor.step

    def step(self, limit, until):
        drawn = whole(self, limit, until)
        counts.append(drawn.steps)
        return drawn

    DeviceExecutor.step = step
    try:
        yield counts
    finally:
        DeviceExecutor.step = whole


def spread(values: Any, scale: float = 1.0) -> dict[str, float]:
    """Returns percentiles of values, scaled and rounded to four digits."""
    cuts = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = {name: np.percentile(values, cut) for name, cut in cuts.items()}
    return {name: float(f"{scale * value:.4g}") for name, value in found.items()}


def record(name: str, model: Model, **found: Any) -> dict[str, Any]:
    """Returns the JSON line of a script."""
    return {
        "experiment": name,
        "model": model.spec.name,
        "dtype": str(model.params["embed"].dtype),
        "device": jax.devices()[0].device_kind,
        **found,
        **records.provenance(),
    }
