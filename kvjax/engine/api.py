"""Prompts in, completions out: `kvjax.generate`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax import cache
from kvjax.cache.budgets import BudgetRule
from kvjax.cache.codecs import Codec, identity
from kvjax.cache.config import make_config
from kvjax.cache.schedule import Schedule
from kvjax.engine import compiled
from kvjax.engine.planner import device_memory
from kvjax.engine.runner import generate_batches
from kvjax.engine.sampling import Sampling
from kvjax.engine.steps import NO_EOS
from kvjax.policies import Policy
from kvjax.types import Model, UserError

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the model made of one prompt.

    Attributes:
      text: the new tokens as text, without special tokens; None without a tokenizer.
      tokens: the new token ids, the end token included if there was one.
      kept_positions: positions of the pairs in the cache at the end, in rising order,
        as `kept_positions[layer][head]`; prompt and new tokens count from 0. The last
        new token has not been read, so it is not among them.
    """

    text: str | None
    tokens: list[int]
    kept_positions: list[list[np.ndarray]]


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
    codec: Codec | str = identity,
    budget_rule: BudgetRule | str | None = None,
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
      memory_gb: see `kvjax.engine.planner.device_memory`.
      codec: how pairs are stored, of `kvjax.cache.codecs`, or its name.
      budget_rule: shares out `budget`, then the mean, between layers, see
        `kvjax.cache.budgets`; None is the same for all.
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
        budget_rule=budget_rule if policy else None,
        implementation=implementation,
    )
    sampling = Sampling(temperature, top_k, top_p)
    tokens = tokenize(model, prompts)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens}: must be at least 1")
    longest = max(map(len, tokens))
    bucket = compiled.bucket(model.spec, config, longest, max_new_tokens)
    eos = NO_EOS if ignore_eos else end_tokens(model)
    job = compiled.job_of(model, config, bucket, max_new_tokens, sampling, eos)
    done = {}
    memory = device_memory(memory_gb)
    for rows, result in generate_batches(model.params, job, tokens, memory, seed):
        kept = cache.kept_positions(result.state)
        for row, index in enumerate(rows):
            new = result.tokens[row]
            done[index] = Completion(_text(model, new), new, kept[row])
    return [done[i] for i in range(len(tokens))]


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
