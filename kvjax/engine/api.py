"""Prompts in, completions out: `kvjax.generate`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache
from kvjax.cache.codecs.base import Codec, identity
from kvjax.cache.config import make_config
from kvjax.cache.schedule import Schedule
from kvjax.engine import compiled
from kvjax.engine.compiled import Job
from kvjax.engine.planner import device_memory, plan_job
from kvjax.engine.sampling import Sampling
from kvjax.engine.steps import NO_EOS
from kvjax.parallel import axes, meshes
from kvjax.policies import Policy
from kvjax.types import Model, PyTree, UserError

Prompt = str | Sequence[int]
Stop = Callable[[list[int]], bool]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model made of one prompt.

    Attributes:
      text: the new tokens as text, without special tokens; None without a tokenizer.
      tokens: the new token ids, the end token included if there was one.
      kept_positions: positions of the pairs in the cache at the end, in rising order, as
        `kept_positions[layer][head]`; prompt and new tokens count from 0. The last new token has
        not been read, so it is not among them.
    """

    text: str | None
    tokens: list[int]
    kept_positions: list[list[np.ndarray]]


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
      max_new_tokens: max_batch tokens per completion.
      temperature, top_k, top_p: see `kvjax.engine.sampling.Sampling`; 0 is greedy.
      seed: of the sampling; prompt i draws the same tokens in any batch.
      ignore_eos: generate all `max_new_tokens`, for throughput runs.
      memory_gb: see `kvjax.plan.device_memory`.
      codec: how pairs are stored.
      implementation: which attention runs, see `kvjax.attention.backends`; None is the
        best there is.

    Returns:
      One completion per prompt, in order.

    Raises:
      UserError: no prompt, an empty prompt, one longer than the context, a token id
        outside the vocabulary, a budget that does not fit policy and schedule, too
        little memory for one row. All before anything is compiled.
    """
    config = make_config(
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
    bucket = compiled.bucket(model.spec, config, longest, max_new_tokens)
    eos = NO_EOS if ignore_eos else end_tokens(model)
    job = compiled.job_of(model, config, bucket, max_new_tokens, how, eos)
    done = {}
    for rows, result in generate_batches(
        model.params, job, tokens, device_memory(memory_gb), seed
    ):
        kept = cache.kept_positions(result.state)
        for row, index in enumerate(rows):
            new = result.tokens[row]
            done[index] = Completion(_text(model, new), new, kept[row])
    return [done[i] for i in range(len(tokens))]


def generate_batches(
    params: PyTree,
    job: Job,
    prompts: Sequence[Sequence[int]],
    memory_bytes: int,
    seed: int = 0,
    *,
    prompt_ids: Sequence[int] | None = None,
    max_batch: int | None = None,
    stop: Stop | None = None,
) -> Iterator[tuple[list[int], BatchResult]]:
    """Runs prompts, the short ones first, in batches that fill the memory.

    Args:
      params: the model's weights.
      job: what is done to each; its batch is planned here.
      prompts: token ids.
      memory_bytes: see `kvjax.plan.device_memory`.
      seed: of the whole run.
      prompt_ids: each prompt's number in the whole run; None where these are all.
      max_batch: no larger batch is planned.
      stop: see `run_batch`.

    Yields:
      Per batch, the indices of its prompts, and its result.

    Raises:
      UserError: too little memory for one row.
    """
    max_batch = min(max_batch or len(prompts), len(prompts))
    job = plan_job(job, memory_bytes, max_batch).job
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for rows in batches(order, job.batch):
        given = [prompts[i] for i in rows]
        named = [prompt_ids[i] for i in rows] if prompt_ids else rows
        yield rows, run_batch(params, job, given, named, seed, stop)


def run_batch(
    params: PyTree,
    job: Job,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    seed: int = 0,
    stop: Stop | None = None,
) -> BatchResult:
    """Runs up to `job.batch` prompts through the job's programs.

    Args:
      params: the model's weights.
      job: the shape; its programs are compiled if they are not yet.
      prompts: token ids per row; rows that are left over stay unused.
      indices: each prompt's number in the whole run, which seeds its sampling.
      seed: of the whole run.
      stop: asked after every `job.decode_chunk` tokens whether a row's tokens so far are all
        that is wanted of it.

    Raises:
      RuntimeError: the state ran out of slots.
    """
    programs = compiled.programs(job)
    keys = row_keys(job, indices, seed)
    state, logits, seconds = prefill_batch(params, job, prompts)
    start = time.perf_counter()
    decode = functools.partial(programs.decode, params)
    state, new = decode_batch(decode, job, state, logits, keys, len(prompts), stop)
    end = time.perf_counter()
    cache.raise_errors(state)
    return BatchResult(new, state, seconds, end - start)


def prefill_batch(
    params: PyTree, job: Job, prompts: Sequence[Sequence[int]]
) -> tuple[cache.KVState, Float[Array, "B V"], float]:
    """The state once the prompts are in, the logits that follow them, and seconds."""
    programs = compiled.programs(job)
    tokens, lengths = pad_prompts(job, prompts)
    state = jax.block_until_ready(programs.init())
    start = time.perf_counter()
    state, logits = programs.prefill(params, state, tokens, lengths)
    if programs.compact:
        state = programs.compact(state)
    jax.block_until_ready((state, logits))
    return state, logits, time.perf_counter() - start


def decode_batch(
    decode: Callable[..., tuple],
    job: Job,
    state: cache.KVState,
    logits: Float[Array, "B V"],
    keys: Array,
    rows: int,
    stop: Stop | None = None,
) -> tuple[cache.KVState, list[list[int]]]:
    """The state at the end and the new tokens of the first `rows` rows.

    A call of `decode` after the first begins by drawing each row's last token again,
    from logits that leave no other choice: the state has not seen it yet.
    """
    new: list[list[int]] = [[] for _ in range(rows)]
    active = np.arange(job.batch) < rows
    drawn = 0  # tokens of every active row
    while True:
        again = min(drawn, 1)
        limit = min(
            job.decode_chunk or job.max_new_tokens, job.max_new_tokens - drawn + again
        )
        (going,) = meshes.shard_rows(job.mesh, active)
        state, out, count = decode(state, logits, going, keys, np.int32(limit))
        out, count = axes.to_host((out, count))
        for row in np.flatnonzero(active):
            new[row] += out[row, again : count[row]].tolist()
            ended = new[row][-1] in job.eos or (stop is not None and stop(new[row]))
            active[row] = not ended
        drawn += limit - again
        if drawn == job.max_new_tokens or not active.any():
            return jax.block_until_ready(state), new
        last = np.zeros((job.batch,), np.int32)
        last[:rows] = [tokens[-1] for tokens in new]
        logits = _certain(*meshes.shard_rows(job.mesh, last), logits)


@jax.jit
def _certain(tokens: Int[Array, "B"], like: Float[Array, "B V"]) -> Array:
    """Logits that give each row's token all of the probability."""
    ids = jnp.arange(like.shape[1], dtype=jnp.int32)
    return jnp.where(ids[None, :] == tokens[:, None], 0.0, -jnp.inf)


def pad_prompts(
    job: Job, prompts: Sequence[Sequence[int]]
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Left-aligned prompts and their lengths; 0 for rows that are not in use."""
    tokens = np.zeros((job.batch, job.max_prompt_len), np.int32)
    lengths = np.zeros((job.batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return meshes.shard_rows(job.mesh, tokens, lengths)


def row_keys(job: Job, indices: Sequence[int], seed: int) -> Array:
    """The PRNG keys of rows that hold the prompts of these prompt_ids."""
    prompt_ids = np.zeros((job.batch,), np.int32)
    prompt_ids[: len(indices)] = indices
    with meshes.use(job.mesh):
        return compiled.row_keys(
            np.int32(seed), *meshes.shard_rows(job.mesh, prompt_ids)
        )


def batches(indices: Sequence[int], max_batch: int) -> list[list[int]]:
    """Cuts indices into as few batches as `max_batch` allows, of nearly equal size."""
    if not indices:
        return []
    count = -(-len(indices) // max_batch)
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
