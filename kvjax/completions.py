"""Prompts in, completions out: `kvjax.generate`."""

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax import axes, cache, programs, sharding
from kvjax.codecs import Codec, identity
from kvjax.generate import NO_EOS
from kvjax.plan import device_memory, plan_job
from kvjax.policies import Policy
from kvjax.programs import Job
from kvjax.sampling import Sampling
from kvjax.types import Model, PyTree, Schedule, UserError

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model made of one prompt.

    Attributes:
      text: the new tokens as text, without special tokens; None without a tokenizer.
      tokens: the new token ids, the end token included if there was one.
      kept: positions of the pairs in the cache at the end, in rising order, as
        `kept[layer][head]`; prompt and new tokens count from 0. The last new token has
        not been read, so it is not among them.
    """

    text: str | None
    tokens: list[int]
    kept: list[list[np.ndarray]]


class BatchResult(NamedTuple):
    """One batch: new tokens per row, the final state, and seconds on the device."""

    tokens: list[list[int]]
    state: cache.KVState
    prefill_seconds: float
    decode_seconds: float


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    policy: Policy | None = None,
    budget: int | tuple[int, ...] = 512,
    schedule: Schedule | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    memory_gb: float | None = None,
    codec: Codec = identity,
    implementation: str | None = None,
) -> list[Completion]:
    """Completes prompts under a compressed KV cache.

    Prompts of any number and length run in batches of the size that the memory allows;
    a prompt's completion does not depend on the others.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or sequences of token ids. Texts are taken as they are: apply
        `model.tokenizer.apply_chat_template` yourself where you want it. A text that
        begins with the BOS token gets no second one.
      policy: which pairs stay, of `kvjax.policies`; None is the full cache.
      budget: |kv|, pairs per head, for all layers or one per layer; the full cache
        pays no heed to it.
      schedule: when pairs go; None is Batch-Max's Algorithm 1 with blocks of 64.
      max_new_tokens: most tokens per completion.
      temperature, top_k, top_p: see `kvjax.sampling.Sampling`; 0 is greedy.
      seed: of the sampling; prompt i draws the same tokens in any batch.
      ignore_eos: generate all `max_new_tokens`, for throughput runs.
      memory_gb: see `kvjax.plan.device_memory`.
      codec: how pairs are stored.
      implementation: which attention runs, see `kvjax.implementations`; None is the
        best there is.

    Returns:
      One completion per prompt, in order.

    Raises:
      UserError: no prompt, an empty prompt, one longer than the context, a token id
        outside the vocabulary, a budget that does not fit policy and schedule, too
        little memory for one row. All before anything is compiled.
    """
    made = cache.compression(
        model.spec,
        policy,
        budget if policy else None,
        schedule,
        codec=codec,
        implementation=implementation,
    )
    how = Sampling(temperature, top_k, top_p)
    tokens = tokenize(model, prompts)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens}: must be at least 1")
    longest = max(map(len, tokens))
    bucket = programs.bucket(model.spec, made, longest, max_new_tokens)
    eos = NO_EOS if ignore_eos else end_tokens(model)
    job = programs.job_of(model, made, bucket, max_new_tokens, how, eos)
    job = plan_job(job, device_memory(memory_gb), len(prompts)).job
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    done = {}
    for rows in batches(order, job.batch):
        result = run_batch(model.params, job, [tokens[i] for i in rows], rows, seed)
        kept = cache.kept_positions(result.state)
        for row, index in enumerate(rows):
            new = result.tokens[row]
            done[index] = Completion(_text(model, new), new, kept[row])
    return [done[i] for i in range(len(tokens))]


def run_batch(
    params: PyTree,
    job: Job,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    seed: int = 0,
) -> BatchResult:
    """Runs up to `job.batch` prompts through the job's programs.

    Args:
      params: the model's weights.
      job: the shape; its programs are compiled if they are not yet.
      prompts: token ids per row; rows that are left over stay unused.
      indices: each prompt's number in the whole run, which seeds its sampling.
      seed: of the whole run.

    Raises:
      RuntimeError: the state ran out of slots.
    """
    compiled = programs.programs(job)
    tokens, lengths, active, keys = packed(job, prompts, indices, seed)
    state = jax.block_until_ready(compiled.init())
    start = time.perf_counter()
    state, logits = compiled.prefill(params, state, tokens, lengths)
    if compiled.compact:
        state = compiled.compact(state)
    jax.block_until_ready((state, logits))
    middle = time.perf_counter()
    state, out, count = compiled.decode(params, state, logits, active, keys)
    jax.block_until_ready(state)
    end = time.perf_counter()
    cache.raise_errors(state)
    new = unpacked(out, count, len(prompts))
    return BatchResult(new, state, middle - start, end - middle)


def packed(
    job: Job,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    seed: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B"], Bool[Array, "B"], Array]:
    """Left-aligned prompts, their lengths, rows in use, PRNG keys; see `run_batch`."""
    tokens = np.zeros((job.batch, job.prompt), np.int32)
    lengths = np.zeros((job.batch,), np.int32)
    numbers = np.zeros((job.batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row], numbers[row] = len(prompt), indices[row]
    keys = programs.row_keys(jnp.int32(seed), jnp.asarray(numbers))
    return sharding.by_row(job.mesh, tokens, lengths, lengths > 0, keys)


def unpacked(
    tokens: Int[Array, "B N"], count: Int[Array, "B"], rows: int
) -> list[list[int]]:
    """The tokens that each of the first `rows` rows has generated."""
    out, count = axes.fetched((tokens, count))
    return [out[row, : count[row]].tolist() for row in range(rows)]


def batches(indices: Sequence[int], most: int) -> list[list[int]]:
    """Cuts indices into as few batches as `most` allows, of nearly equal size."""
    if not indices:
        return []
    count = -(-len(indices) // most)
    size = -(-len(indices) // count)
    return [list(indices[i : i + size]) for i in range(0, len(indices), size)]


def tokenize(model: Model, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of texts or of ids, checked.

    Raises:
      UserError: no prompt, an empty one, or ids outside the vocabulary.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise UserError(f"prompts is {prompts!r}: give a list of one prompt or more")
    tokens = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise UserError(
                    f"prompt {index} is text, but the model has no tokenizer"
                )
            prompt = model.tokenizer(prompt, verbose=False)["input_ids"]
            bos = getattr(model.tokenizer, "bos_token_id", None)
            if bos is not None and list(prompt[:2]) == [bos, bos]:
                prompt = prompt[1:]  # chat templates write one themselves
        ids = [int(token) for token in prompt]
        if not ids:
            raise UserError(f"prompt {index} is empty: it needs at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= model.spec.vocab_size:
            raise UserError(
                f"prompt {index} holds token {low if low < 0 else high}: ids of "
                f"{model.spec.name} run from 0 to {model.spec.vocab_size - 1}"
            )
        tokens.append(ids)
    return tokens


def end_tokens(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: the checkpoint's and the tokenizer's."""
    eos = getattr(model.tokenizer, "eos_token_id", None)
    ends = {*model.end_tokens} if eos is None else {*model.end_tokens, eos}
    return tuple(sorted(ends)) or NO_EOS


def _text(model: Model, tokens: list[int]) -> str | None:
    if model.tokenizer is None:
        return None
    return model.tokenizer.decode(tokens, skip_special_tokens=True)
